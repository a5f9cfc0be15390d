"""What the runs of a study show: their names and final returns, and from these the values of groups and of pairs."""

import json
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import combinations, product
from typing import Any

import numpy as np
import pandas as pd

from sb3_uatrpo.study import statistics
from sb3_uatrpo.study.plan import PLAIN, StudyError, refuse_unequal_lengths, split_variant
from sb3_uatrpo.study.statistics import FINAL_SHARE, Array
from sb3_uatrpo.study.tables import Study

# What runs that may be averaged have in common
GROUP = ["env", "condition", "label"]
# These do not affect training: runs that differ in nothing else are averaged, unless a seed would count twice
EVALUATION = ["eval_freq", "n_eval_episodes"]
# Points of a learning curve
N_POINTS = 100
# KL ratios that count as large
THRESHOLDS = (2.0, 3.0)


def tabulate(study: Study, conditions: Sequence[str] = ()) -> Study:
    """
    Name the runs as reports do, and add their final returns.

    Noise and values varied for several algorithms are *conditions*; algorithms are compared within one. Values varied
    for a single algorithm become part of its *label*, so that its versions are compared with each other too.

    :param conditions: the conditions to keep, ``"plain"`` for runs without varied values; all by default
    :return: the study with its runs in the order of a report, with the columns ``condition``, ``label``, and
        ``final_return`` and ``final_success``, a share of episodes, both NaN where unknown
    :raises StudyError: if finished runs differ in hyperparameters within a label and condition, or in numbers of steps
        within an environment; or if one of ``conditions`` does not exist
    """
    runs = study.runs.assign(**_names(study.runs), final_return=math.nan, final_success=math.nan)
    shown = runs.condition.replace("", PLAIN)
    if unknown := set(conditions).difference(shown):
        raise StudyError(f"no runs of the variant {unknown.pop()!r}; there are {', '.join(sorted(set(shown)))}")
    runs = runs[shown.isin(conditions or shown)].copy()
    # failed runs count in no mean
    done = runs[runs.error == ""]
    _refuse_unlike(done)
    for i, ended in study.episodes[study.episodes.run.isin(done.index)].groupby("run"):

        def mean(values: pd.Series, steps: pd.Series = ended.step, n: int = done.n_timesteps[i]) -> float:
            return statistics.final_return(steps, values, n)

        runs.loc[i, "final_return"] = mean(ended["return"])
        if "is_success" in ended and (share := mean(ended.is_success.notna())):
            runs.loc[i, "final_success"] = mean(ended.is_success.fillna(0)) / share
    runs["final_return"] = runs.final_return.where(np.isfinite(runs.final_return))
    place = runs.label.map(in_order(runs.label).index)
    order = runs.assign(place=place).sort_values(["env", "condition", "place", "seed"]).drop(columns="place")
    return replace(study, runs=order)


def _names(runs: pd.DataFrame) -> dict[str, list[str]]:
    split = [(algo, *split_variant(variant)) for algo, variant in zip(runs.algo, runs.variant, strict=True)]
    algorithms: dict[str, set[tuple[str, str]]] = defaultdict(set)
    for algo, name, changes in split:
        for change in changes:
            algorithms[change.partition("=")[0]].add((algo, name))
    own = {name for name, of in algorithms.items() if name != "noise" and len(of) == 1}
    labels, conditions = [], []
    for algo, name, changes in split:
        of_label = joined([name, *(change for change in changes if change.partition("=")[0] in own)])
        labels.append(f"{algo} ({of_label})" if of_label else algo)
        conditions.append(",".join(change for change in changes if change.partition("=")[0] not in own))
    return {"condition": conditions, "label": labels}


def _refuse_unlike(runs: pd.DataFrame) -> None:
    """:raises StudyError: if runs differ that would be averaged, or compared although one had more steps"""
    lengths = zip(runs.env, runs.label, runs.n_timesteps, strict=True)
    refuse_unequal_lengths(lengths, "report on folders that have one length for each environment")
    for (env, condition, label), alike in runs.groupby(GROUP):
        settings = [json.loads(run.hyperparameters) | {k: run[k] for k in EVALUATION} for _, run in alike.iterrows()]
        names = differing(settings)
        if names and not (alike.seed.is_unique and set(EVALUATION).issuperset(names)):
            each = (joined(f"{name}={of[name]}" if name in of else f"no {name}" for name in names) for of in settings)
            kinds = " and ".join(f"{kind} ({counted(n, 'run')})" for kind, n in sorted(Counter(each).items()))
            raise StudyError(
                f"runs of different settings: {label} on {joined([env, condition])} has {kinds}; they need names, as "
                "variants of a study file or by --vary"
            )


def differing(settings: Sequence[dict[str, Any]]) -> list[str]:
    """:return: the names of the settings that are not the same in all"""
    names = sorted(set().union(*settings))
    return [name for name in names if len({json.dumps(of.get(name), sort_keys=True) for of in settings}) > 1]


def in_order(labels: Iterable[str]) -> list[str]:
    """:return: each label once, sorted, those of ``uatrpo``, such as ``uatrpo_paper``, first"""
    return sorted(set(labels), key=lambda label: (not label.startswith("uatrpo"), label))


def pairs_of(labels: Iterable[str], pair: Sequence[str] = ()) -> list[Sequence[str]]:
    """
    :return: the pairs of labels to compare: the given one, or each ``uatrpo`` with every other label, or all pairs
    :raises StudyError: if a given label does not exist, or both are the same
    """
    known = in_order(labels)
    if pair and (len({*pair}) != 2 or len(pair) != 2 or not {*pair}.issubset(known)):
        raise StudyError(f"--algo takes two different ones of {', '.join(known)}, but it is {' '.join(pair)}")
    pairs = [pair] if pair else list(combinations(known, 2))
    return [each for each in pairs if pair or each[0].startswith("uatrpo")] or pairs


def learning_curves(study: Study) -> pd.DataFrame:
    """
    :return: for each run of ``tabulate`` and each of ``N_POINTS`` steps, the mean training return over the preceding
        ``FINAL_SHARE`` of all steps, so that the last one is the final return; NaN before the first episode has ended
    """
    curves = []
    for i, ended in study.episodes[study.episodes.run.isin(study.runs.index)].groupby("run"):
        last = study.runs.n_timesteps[i]
        grid = np.linspace(0, last, N_POINTS + 1)[1:]
        values = statistics.learning_curve(np.minimum(ended.step, last), ended["return"], grid, FINAL_SHARE * last)
        curves.append(pd.DataFrame({"run": i, "step": grid, "return": values}))
    return pd.concat(curves, ignore_index=True).join(study.runs[GROUP], on="run")


@dataclass(frozen=True)
class Results:
    """What a report shows: a study of ``tabulate``, pairs of labels, and κ-CVaR with κ = ``kappa``."""

    study: Study
    pairs: list[Sequence[str]]
    kappa: float

    @property
    def cvar(self) -> str:
        return f"{100 * self.kappa:g}%-CVaR"

    @cached_property
    def compared(self) -> pd.DataFrame:
        """:return: the runs with a final return"""
        return self.study.runs[self.study.runs.final_return.notna()]

    @cached_property
    def groups(self) -> dict[tuple[str, str, str], pd.DataFrame]:
        """:return: for each environment, condition and label, its runs"""
        return dict(list(self.compared.groupby(GROUP, sort=False)))

    def series(self, name: str, column: str) -> pd.DataFrame:
        """:return: the rows of a table with a finite number in a column, of the runs with a final return"""
        table: pd.DataFrame = getattr(self.study, name)
        table = table.assign(**{column: table[column].astype(float) if column in table else math.nan})
        return table[np.isfinite(table[column])].join(self.compared[GROUP], on="run", how="inner")

    def last_evaluations(self, column: str) -> pd.DataFrame:
        """:return: the mean of each run's own last evaluation, in the column"""
        table = self.series("evaluations", column)
        last = table[table.step == table.groupby("run").step.transform("max")]
        return last.groupby([*GROUP, "run"])[column].mean().reset_index()

    @cached_property
    def returns(self) -> pd.DataFrame:
        """:return: a row for each environment, condition and label"""
        rows = []
        evaluations = self.last_evaluations("return").groupby(GROUP)["return"].agg(["mean", "sem"])
        for names, runs in self.groups.items():
            x, last = runs.final_return, evaluations.reindex([names]).iloc[0]
            row = {**dict(zip(GROUP, names, strict=True)), "runs": len(x), "final return": statistics.bootstrap_mean(x)}
            row |= {"±": float(statistics.standard_error(x)), self.cvar: statistics.bootstrap_cvar(x, self.kappa)}
            row |= {"rests on": counted(statistics.runs_behind_cvar(len(x), self.kappa), "run")}
            row |= {"IQM": statistics.interquartile_mean(x), "lowest": x.min(), "highest": x.max()}
            rows.append(row | {"last evaluation": last["mean"], "its ±": last["sem"]})
        return pd.DataFrame(rows)

    @cached_property
    def differences(self) -> pd.DataFrame:
        """:return: a row for each environment, condition and pair of labels that both have runs there"""
        rows = []
        for (env, condition), names in product(dict.fromkeys(key[:2] for key in self.groups), self.pairs):
            if all((env, condition, name) in self.groups for name in names):
                x, y = (self.groups[env, condition, name].final_return for name in names)
                welch = statistics.welch_test(x, y)
                row = {"env": env, "condition": condition, "label": " − ".join(names), "runs": f"{len(x)}, {len(y)}"}
                row |= {"of means": statistics.difference_of_means(x, y), "Welch t": welch.statistic, "p": welch.pvalue}
                row |= {f"of {self.cvar}": statistics.difference_of_cvars(x, y, self.kappa)}
                rows.append(row | {"probability of improvement": statistics.probability_of_improvement(x, y)})
        return pd.DataFrame(rows)

    @cached_property
    def unlike(self) -> dict[str, list[str]]:
        """:return: hyperparameters that both of a pair have, with different values, and where: not only algorithms differ"""
        found: dict[str, list[str]] = defaultdict(list)
        settings = {names: json.loads(runs.hyperparameters.iloc[0]) for names, runs in self.groups.items()}
        for (env, condition), pair in product(dict.fromkeys(key[:2] for key in self.groups), self.pairs):
            ours, theirs = (settings.get((env, condition, label), {}) for label in pair)
            both = [name for name in differing([ours, theirs]) if name in ours.keys() & theirs.keys()]
            if both:
                values = "; ".join(f"{name} {ours[name]} and {theirs[name]}" for name in both)
                found[f"{' − '.join(pair)}: {values}"].append(joined([env, condition]))
        return found

    @cached_property
    def ratios(self) -> pd.DataFrame:
        """:return: a row for each environment, condition and label with KL ratios"""
        rows = []
        proposed = self.series("updates", "kl_proposed").groupby(GROUP).kl_proposed.mean()
        for names, x in self.series("updates", "kl_ratio").groupby(GROUP, sort=False).kl_ratio:
            row = {**dict(zip(GROUP, names, strict=True)), "updates": len(x), "median KL ratio": x.median()}
            row |= {f"at least {t:g}": statistics.share_at_least(x, t) for t in THRESHOLDS}
            rows.append(row | {"mean proposed KL": proposed.get(names, math.nan)})
        return pd.DataFrame(rows)

    @cached_property
    def scores(self) -> dict[tuple[str, str], Array]:
        """
        :return: for each condition with several environments, and each label with the same number of runs in all of
            them: final returns scaled from 0, the lowest in the environment, to 1, the highest (``n_runs x n_envs``)
        """
        by_env = self.compared.groupby("env").final_return
        lowest, highest = by_env.transform("min"), by_env.transform("max")
        runs = self.compared.assign(score=(self.compared.final_return - lowest) / (highest - lowest).replace(0.0, 1.0))
        n_envs = runs.groupby("condition").env.nunique()
        scores = {}
        for condition, label in product(n_envs.index, in_order(runs.label)):
            of = runs[(runs.condition == condition) & (runs.label == label)].groupby("env").score
            if of.ngroups == n_envs[condition] > 1 and of.size().nunique() == 1:
                scores[condition, label] = np.stack([column for _, column in of], axis=1)
        return scores


def counted(n: int, noun: str) -> str:
    """:return: the number and the noun, in the plural unless the number is one"""
    return f"{n} {noun}" + ("" if n == 1 else "s")


def joined(names: Iterable[str]) -> str:
    """:return: the names that are not empty, with commas between them"""
    return ", ".join(filter(None, names))
