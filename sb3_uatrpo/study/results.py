"""What the runs of a study show: their names and final returns, and from these the values of groups and of pairs."""

import json
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import combinations
from typing import Any

import numpy as np
import pandas as pd

from sb3_uatrpo.study import statistics
from sb3_uatrpo.study.plan import PLAIN, StudyError, refuse_unequal_lengths, split_variant
from sb3_uatrpo.study.statistics import FINAL_SHARE, Array
from sb3_uatrpo.study.tables import Study

# Runs that may be averaged have these in common
GROUP = ["env", "condition", "label"]
# These do not affect training: runs that differ in nothing else are averaged, unless a seed would count twice
EVALUATION = ["eval_freq", "n_eval_episodes"]
# Points of a learning curve
N_POINTS = 100


def tabulate(study: Study, conditions: Sequence[str] = ()) -> Study:
    """
    Name the runs as reports do, and add their final returns.

    Noise and values varied for several algorithms are *conditions*; algorithms are compared within one. Values varied
    for a single algorithm become part of its *label*, so that its versions are compared with each other and with the
    other algorithms.

    :param conditions: the conditions to keep, ``"plain"`` for runs without varied values; all by default
    :return: the study with its runs in the order of a report, with the columns ``condition``, ``label``, and
        ``final_return`` and ``final_success``, a share of episodes, both NaN where unknown
    :raises StudyError: if finished runs differ in hyperparameters within a label and condition, or in numbers of steps
        within an environment; or if one of ``conditions`` does not exist
    """
    runs = study.runs.assign(**_names(study.runs), final_return=math.nan, final_success=math.nan)
    known = [name or PLAIN for name in sorted(set(runs.condition))]
    if unknown := set(conditions).difference(known):
        raise StudyError(f"no runs of the variant {unknown.pop()!r}; there are {', '.join(known)}")
    if conditions:
        runs = runs[runs.condition.replace("", PLAIN).isin(conditions)]
    # failed runs count in no mean
    done = runs[runs.error == ""]
    _refuse_unlike(done)
    for i, ended in study.episodes[study.episodes.run.isin(done.index)].groupby("run"):
        runs.loc[i, "final_return"] = _final_mean(runs.loc[i], ended, ended["return"])
        if "is_success" in ended and (share := _final_mean(runs.loc[i], ended, ended.is_success.notna())) > 0:
            runs.loc[i, "final_success"] = _final_mean(runs.loc[i], ended, ended.is_success.fillna(0)) / share
    runs = runs.assign(place=runs.label.map(in_order(runs.label).index)).sort_values(["env", "condition", "place", "seed"])
    return replace(study, runs=runs.drop(columns="place"))


def _names(runs: pd.DataFrame) -> dict[str, list[str]]:
    names, varied = zip(*map(split_variant, runs.variant), strict=True) if len(runs) else ((), ())
    algorithms: dict[str, set[tuple[str, str]]] = defaultdict(set)
    for algo, name, changes in zip(runs.algo, names, varied, strict=True):
        for change in changes:
            algorithms[change.partition("=")[0]].add((algo, name))
    shared = {name for name, of in algorithms.items() if name == "noise" or len(of) > 1}
    common = [[change for change in changes if change.partition("=")[0] in shared] for changes in varied]
    own = [joined([name, *(x for x in of if x not in both)]) for name, of, both in zip(names, varied, common, strict=True)]
    labels = [f"{algo} ({of})" if of else algo for algo, of in zip(runs.algo, own, strict=True)]
    return {"condition": list(map(",".join, common)), "label": labels}


def _final_mean(run: pd.Series, episodes: pd.DataFrame, values: pd.Series) -> float:
    mean = statistics.final_return(episodes.step, values, run.n_timesteps)
    return mean if math.isfinite(mean) else math.nan


def _refuse_unlike(runs: pd.DataFrame) -> None:
    """:raises StudyError: if runs differ that would be averaged, or compared although one had more steps"""
    remedy = "report on folders that have one length for each environment"
    refuse_unequal_lengths(zip(runs.env, runs.label, runs.n_timesteps, strict=True), remedy)
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
    if not pair:
        pairs = list(combinations(known, 2))
        return [pair for pair in pairs if pair[0].startswith("uatrpo")] or pairs
    if len(set(pair)) != 2 or not set(pair).issubset(known):
        raise StudyError(f"--algo takes two different ones of {', '.join(known)} to compare, but not {' '.join(pair)}")
    return [pair]


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
    """What tables and pictures show: a study of ``tabulate``, pairs of labels, and κ-CVaR with κ = ``kappa``."""

    study: Study
    pairs: list[Sequence[str]]
    kappa: float

    @property
    def cvar_name(self) -> str:
        return f"{100 * self.kappa:g}%-CVaR"

    @cached_property
    def compared(self) -> pd.DataFrame:
        """:return: the runs with a final return"""
        return self.study.runs[self.study.runs.final_return.notna()]

    @cached_property
    def groups(self) -> dict[tuple[str, str, str], pd.DataFrame]:
        """:return: for each environment, condition and label, its runs"""
        return dict(list(self.compared.groupby(GROUP, sort=False)))

    @cached_property
    def curves(self) -> pd.DataFrame:
        return learning_curves(replace(self.study, runs=self.compared))

    def series(self, name: str, column: str) -> pd.DataFrame:
        """:return: the rows of a table with a finite number in a column, of the runs with a final return"""
        table: pd.DataFrame = getattr(self.study, name)
        if column not in table:
            return pd.DataFrame(columns=["run", "step", column, *GROUP])
        return table[np.isfinite(table[column].astype(float))].join(self.compared[GROUP], on="run", how="inner")

    @cached_property
    def comparisons(self) -> pd.DataFrame:
        """:return: a row for each environment, condition and pair of labels that both have runs there"""
        rows: list[dict[str, Any]] = []
        for env, condition in dict.fromkeys(key[:2] for key in self.groups):
            for names in self.pairs:
                if all((env, condition, name) in self.groups for name in names):
                    runs = [self.groups[env, condition, name] for name in names]
                    x, y = (of.final_return for of in runs)
                    row = {"env": env, "condition": condition, "pair": names, "n_runs": (len(x), len(y))}
                    # a difference may also come from hyperparameters that both have
                    ours, theirs = (json.loads(of.hyperparameters.iloc[0]) for of in runs)
                    both = [name for name in differing([ours, theirs]) if name in ours.keys() & theirs.keys()]
                    row["unlike"] = "; ".join(f"{name} {ours[name]} and {theirs[name]}" for name in both)
                    row["mean"] = statistics.difference_of_means(x, y)
                    row["cvar"] = statistics.difference_of_cvars(x, y, self.kappa)
                    row["improvement"] = statistics.probability_of_improvement(x, y)
                    rows.append(row | {"welch": statistics.welch_test(x, y)})
        return pd.DataFrame(rows)

    @cached_property
    def scores(self) -> dict[str, dict[str, Array]]:
        """
        :return: for each condition with several environments, and each label with the same number of runs in all of
            them: final returns scaled from 0, the lowest in the environment, to 1, the highest (``n_runs x n_envs``)
        """
        by_env = self.compared.groupby("env").final_return
        lowest, highest = by_env.transform("min"), by_env.transform("max")
        score = (self.compared.final_return - lowest) / (highest - lowest).replace(0.0, 1.0)
        scores: dict[str, dict[str, Array]] = {}
        for condition, runs in self.compared.assign(score=score).groupby("condition"):
            n_envs = runs.env.nunique()
            for label in in_order(runs.label):
                columns = [of.score for _, of in runs[runs.label == label].groupby("env")]
                if n_envs > 1 and len(columns) == n_envs and len(set(map(len, columns))) == 1:
                    scores.setdefault(condition, {})[label] = np.stack(columns, axis=1)
        return scores


def counted(n: int, noun: str) -> str:
    """:return: the number and the noun, in the plural unless the number is one"""
    return f"{n} {noun}" + ("" if n == 1 else "s")


def joined(names: Iterable[str]) -> str:
    """:return: the names that are not empty, with commas between them"""
    return ", ".join(filter(None, names))
