"""What the runs of a study show: their names and final returns, and from these tables of groups and of pairs."""

import json
import math
from collections import defaultdict
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
# Takes the place of an environment for scores
ALL = "all environments, scores"


def tabulate(study: Study, conditions: Sequence[str] = ()) -> Study:
    """
    Name the runs as reports do, and add their final returns.

    Noise and values varied for several algorithms are *conditions*; algorithms are compared within one. Values varied
    for a single algorithm become part of its *label*, so that its versions are compared with each other too.

    :param conditions: the conditions to keep, ``"plain"`` for runs without varied values; all by default
    :return: the study, whose runs have ``condition``, ``label``, and ``final_return`` and ``final_success``, a share of
        episodes, both NaN where unknown
    :raises StudyError: if runs that would be averaged have other settings, or runs on one environment other lengths
    """
    runs = study.runs.assign(**_names(study.runs), final_return=math.nan, final_success=math.nan)
    shown = runs.condition.replace("", PLAIN)
    if unknown := set(conditions).difference(shown):
        raise StudyError(f"no runs of the variant {unknown.pop()!r}; there are {', '.join(sorted(set(shown)))}")
    runs = runs[shown.isin(conditions or shown)].copy()
    # failed runs count in no mean
    done = runs[runs.error == ""]
    _refuse_unlike(done)
    for i, of in study.episodes[study.episodes.run.isin(done.index)].groupby("run"):
        value = statistics.final_return(of.step, of["return"], done.n_timesteps[i])
        runs.loc[i, "final_return"] = value if math.isfinite(value) else math.nan
        if "is_success" in of:
            known = (of.is_success.notna(), of.is_success.fillna(0))
            reported, successes = (statistics.final_return(of.step, x, done.n_timesteps[i]) for x in known)
            runs.loc[i, "final_success"] = successes / reported if reported else math.nan
    runs["place"] = runs.label.map(in_order(runs.label).index)
    return replace(study, runs=runs.sort_values(["env", "condition", "place", "seed"]).drop(columns="place"))


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
    lengths = zip(runs.env, runs.label, runs.n_timesteps, strict=True)
    refuse_unequal_lengths(lengths, "report on folders that have one length for each environment")
    for names, alike in runs.groupby(GROUP):
        settings = [json.loads(run.hyperparameters) | {k: run[k] for k in EVALUATION} for _, run in alike.iterrows()]
        other = differing(settings)
        if other and not (alike.seed.is_unique and set(EVALUATION).issuperset(other)):
            kinds = " and ".join(sorted({joined(f"{name}={of.get(name)}" for name in other) for of in settings}))
            remedy = "they need names, as variants of a study file or by --vary"
            raise StudyError(f"runs of different settings: {joined(names)} has {kinds}; {remedy}")


def differing(settings: Sequence[dict[str, Any]]) -> list[str]:
    """:return: the names of the settings that are not the same in all"""
    names = sorted(set().union(*settings))
    return [name for name in names if len({json.dumps(of.get(name), sort_keys=True) for of in settings}) > 1]


def in_order(labels: Iterable[str]) -> list[str]:
    """:return: each label once, sorted, those of ``uatrpo``, such as ``uatrpo_paper``, first"""
    return sorted(set(labels), key=lambda label: (not label.startswith("uatrpo"), label))


def joined(names: Iterable[str]) -> str:
    """:return: the names that are not empty, with commas between them"""
    return ", ".join(filter(None, names))


def learning_curves(study: Study) -> pd.DataFrame:
    """
    :return: for each run of ``tabulate`` and each of ``N_POINTS`` steps, the mean training return over the preceding
        ``FINAL_SHARE`` of all steps, so that the last one is the final return; NaN before the first episode has ended
    """
    curves = []
    for i, of in study.episodes[study.episodes.run.isin(study.runs.index)].groupby("run"):
        last = study.runs.n_timesteps[i]
        grid = np.linspace(0, last, N_POINTS + 1)[1:]
        values = statistics.learning_curve(np.minimum(of.step, last), of["return"], grid, FINAL_SHARE * last)
        curves.append(pd.DataFrame({"run": i, "step": grid, "return": values}))
    return pd.concat(curves, ignore_index=True).join(study.runs[GROUP], on="run")


@dataclass(frozen=True)
class Results:
    """
    What a report shows, of a study of ``tabulate``. Tables have a row for each environment, condition and label(s).

    :param pair: two labels to compare; by default, each ``uatrpo`` with every other label, or all pairs
    """

    study: Study
    pair: Sequence[str]
    kappa: float

    @property
    def cvar(self) -> str:
        return f"{100 * self.kappa:g}%-CVaR"

    @cached_property
    def compared(self) -> pd.DataFrame:
        """:return: the runs with a final return"""
        return self.study.runs[self.study.runs.final_return.notna()]

    @cached_property
    def samples(self) -> dict[tuple[str, str, str], Array]:
        """
        :return: for each environment, condition and label, the final returns (``n_runs``); for ``ALL`` environments,
            where a label has the same number of runs in each of several, scores (``n_runs x n_envs``): final returns
            scaled from 0, the lowest in the environment, to 1, the highest
        """
        samples = {key: of.to_numpy() for key, of in self.compared.groupby(GROUP, sort=False).final_return}
        by_env = self.compared.groupby("env").final_return
        lowest, highest = by_env.transform("min"), by_env.transform("max")
        runs = self.compared.assign(score=(self.compared.final_return - lowest) / (highest - lowest).replace(0.0, 1.0))
        n_envs = runs.groupby("condition").env.nunique()
        for (condition, label), of in runs.groupby(GROUP[1:], sort=False):
            scores = [column for _, column in of.groupby("env").score]
            if len(scores) == n_envs[condition] > 1 and len(set(map(len, scores))) == 1:
                samples[ALL, condition, label] = np.stack(scores, axis=1)
        return samples

    @cached_property
    def pairs(self) -> list[tuple[str, str, Sequence[str]]]:
        """:return: environment, condition and the two labels that are compared there"""
        known, pair = in_order(self.compared.label), self.pair
        if pair and (len({*pair}) != 2 or len(pair) != 2 or not {*pair}.issubset(known)):
            raise StudyError(f"--algo takes two different ones of {', '.join(known)}, but it is {' '.join(pair)}")
        pairs = [pair] if pair else list(combinations(known, 2))
        pairs = [of for of in pairs if pair or of[0].startswith("uatrpo")] or pairs
        panels = product(dict.fromkeys((env, of) for env, of, _ in self.samples), pairs)
        return [
            (env, of, pair) for (env, of), pair in panels if all((env, of, label) in self.samples for label in pair)
        ]

    def series(self, name: str, column: str) -> pd.DataFrame:
        """:return: the rows of a table with a finite number in a column, of the runs with a final return"""
        table: pd.DataFrame = getattr(self.study, name)
        table = table.assign(**{column: table[column].astype(float) if column in table else math.nan})
        return table[np.isfinite(table[column])].join(self.compared[GROUP], on="run", how="inner")

    def last_evaluations(self, column: str) -> pd.DataFrame:
        """:return: mean and standard error over the runs of each one's own last evaluation"""
        table = self.series("evaluations", column)
        last = table[table.step == table.groupby("run").step.transform("max")]
        return last.groupby([*GROUP, "run"])[column].mean().groupby(GROUP).agg(["mean", "sem"])

    @cached_property
    def returns(self) -> pd.DataFrame:
        rows: list[dict[str, Any]] = []
        for names, x in self.samples.items():
            rows.append(dict(zip(GROUP, names, strict=True)) | {"runs": len(x)})
            if x.ndim == 1:
                rows[-1] |= {"final return": statistics.bootstrap_mean(x), "±": pd.Series(x).sem()}
                rows[-1] |= {self.cvar: statistics.bootstrap_cvar(x, self.kappa), "lowest": x.min(), "highest": x.max()}
                rows[-1] |= {"rests on": str(statistics.runs_behind_cvar(len(x), self.kappa))}
            rows[-1] |= {"IQM": statistics.interquartile_mean(x)}
        last = self.last_evaluations("return").rename(columns={"mean": "last evaluation", "sem": "its ±"})
        return pd.DataFrame(rows).join(last, on=GROUP)

    @cached_property
    def differences(self) -> pd.DataFrame:
        rows: list[dict[str, Any]] = []
        settings = self.compared.groupby(GROUP).hyperparameters.first()
        for env, condition, pair in self.pairs:
            x, y = (self.samples[env, condition, label] for label in pair)
            rows.append({"env": env, "condition": condition, "label": " − ".join(pair), "runs": f"{len(x)}, {len(y)}"})
            if x.ndim == 1:
                rows[-1] |= {"of means": statistics.difference_of_means(x, y)}
                rows[-1] |= dict(zip(("Welch t", "p"), statistics.welch_test(x, y), strict=True))
                rows[-1] |= {f"of {self.cvar}": statistics.difference_of_cvars(x, y, self.kappa)}
                # a difference may also come from hyperparameters that both have
                ours, theirs = (json.loads(settings[env, condition, label]) for label in pair)
                both = [name for name in differing([ours, theirs]) if name in ours.keys() & theirs.keys()]
                rows[-1] |= {"other settings": joined(both)}
            rows[-1] |= {"probability of improvement": statistics.probability_of_improvement(x, y)}
        return pd.DataFrame(rows)

    @cached_property
    def ratios(self) -> pd.DataFrame:
        groups = self.series("updates", "kl_ratio").groupby(GROUP, sort=False).kl_ratio
        table = groups.agg(["size", "median"]).set_axis(["updates", "median KL ratio"], axis=1)
        for threshold in THRESHOLDS:
            table[f"at least {threshold:g}"] = groups.agg(lambda of, least=threshold: (of >= least).mean())
        table["mean proposed KL"] = self.series("updates", "kl_proposed").groupby(GROUP).kl_proposed.mean()
        return table.reset_index()
