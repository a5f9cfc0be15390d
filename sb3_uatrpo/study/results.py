"""What the runs of a study show: their names and final returns, and from these tables of groups and of pairs."""

import json
import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import combinations, product
from typing import Any

import numpy as np
import pandas as pd

from sb3_uatrpo.study import statistics
from sb3_uatrpo.study.plan import PLAIN, StudyError, refuse_unequal_lengths, split_variant
from sb3_uatrpo.study.statistics import FINAL_SHARE, Array
from sb3_uatrpo.study.tables import Study

# What runs that may be averaged have in common, and what takes the place of an environment for scores
GROUP, ALL = ["env", "condition", "label"], "all environments, scores"
# Points of a learning curve, and KL ratios that count as large
N_POINTS, THRESHOLDS = 100, (2.0, 3.0)
PICTURE_FORMATS = ("png", "svg")


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
    for i, episodes in study.episodes[study.episodes.run.isin(done.index)].groupby("run"):
        value = statistics.final_return(episodes.step, episodes["return"], done.n_timesteps[i])
        runs.loc[i, "final_return"] = value if math.isfinite(value) else math.nan
        if "is_success" in episodes:
            known = episodes.dropna(subset="is_success")
            runs.loc[i, "final_success"] = statistics.final_return(known.step, known.is_success, done.n_timesteps[i])
    runs["label"] = pd.Categorical(runs.label, in_order(runs.label))
    return replace(study, runs=runs.sort_values([*GROUP, "seed"]).astype({"label": object}))


def _names(runs: pd.DataFrame) -> dict[str, list[str]]:
    split = [(algo, *split_variant(variant)) for algo, variant in zip(runs.algo, runs.variant, strict=True)]
    varied: dict[str, set[tuple[str, str]]] = defaultdict(set)
    for algo, name, changes in split:
        for change in changes:
            varied[change.partition("=")[0]].add((algo, name))
    # what only one algorithm varies belongs to its label
    label_changes = tuple(f"{name}=" for name, users in varied.items() if name != "noise" and len(users) == 1)
    labels, conditions = [], []
    for algo, name, changes in split:
        of_label = joined([name, *(change for change in changes if change.startswith(label_changes))])
        labels.append(f"{algo} ({of_label})" if of_label else algo)
        conditions.append(",".join(change for change in changes if not change.startswith(label_changes)))
    return {"condition": conditions, "label": labels}


def _refuse_unlike(runs: pd.DataFrame) -> None:
    lengths = zip(runs.env, runs.label, runs.n_timesteps, strict=True)
    refuse_unequal_lengths(lengths, "report on folders that have one length for each environment")
    for names, alike in runs.groupby(GROUP):
        settings = pd.DataFrame(map(json.loads, alike.hyperparameters), dtype=object).map(repr)
        kinds = settings.loc[:, settings.nunique() > 1].drop_duplicates()
        if len(kinds.columns):
            shown = sorted(
                joined(f"{name}={value}" for name, value in kind.items()) for kind in kinds.to_dict("records")
            )
            remedy = "they need names, as variants of a study file or by --vary"
            raise StudyError(f"runs of different settings: {joined(names)} has {' and '.join(shown)}; {remedy}")


def in_order(labels: Iterable[str]) -> list[str]:
    """:return: each label once, sorted, those of ``uatrpo``, such as ``uatrpo_paper``, first"""
    return sorted(set(labels), key=lambda label: (not label.startswith("uatrpo"), label))


def joined(names: Iterable[str]) -> str:
    """:return: the names that are not empty, with commas between them"""
    return ", ".join(filter(None, names))


def learning_curves(study: Study) -> pd.DataFrame:
    """
    :return: for each run with a final return, at ``N_POINTS`` steps, the mean training return over the preceding
        ``FINAL_SHARE`` of all steps, so that the last one is the final return; NaN before the first episode has ended
    """
    curves, runs = [], study.runs.dropna(subset="final_return")
    for i, episodes in study.episodes[study.episodes.run.isin(runs.index)].groupby("run"):
        last = runs.n_timesteps[i]
        grid = np.linspace(0, last, N_POINTS + 1)[1:]
        steps = np.minimum(episodes.step, last)
        values = statistics.learning_curve(steps, episodes["return"], grid, FINAL_SHARE * last)
        curves.append(pd.DataFrame({"run": i, "step": grid, "return": np.where(np.isfinite(values), values, np.nan)}))
    return pd.concat(curves, ignore_index=True).join(runs[GROUP], on="run")


class Results:
    """
    What a report shows of a study of ``tabulate``: tables with a row for each environment, condition and label(s).

    :param pair: two labels to compare; by default, each ``uatrpo`` with every other label, or all pairs
    :param kappa: share of worst runs in a CVaR
    """

    def __init__(self, study: Study, pair: Sequence[str], kappa: float) -> None:
        self.study, self.kappa, self.cvar = study, kappa, f"{100 * kappa:g}%-CVaR"
        #: the runs with a final return
        self.compared = study.runs[study.runs.final_return.notna()]
        self.labels = in_order(self.compared.label)
        if pair and (len({*pair}) != 2 or len(pair) != 2 or not {*pair}.issubset(self.labels)):
            raise StudyError(f"--algo takes two different ones of {', '.join(self.labels)}, but it is {' '.join(pair)}")
        pairs = list(combinations(self.labels, 2))
        if pair:
            pairs = [(pair[0], pair[1])]
        elif any(first.startswith("uatrpo") for first, _ in pairs):
            # the others are rivals, and not compared with each other
            pairs = [(first, second) for first, second in pairs if first.startswith("uatrpo")]
        #: for each group the final returns (``n_runs``), and for ``ALL`` environments scores (``n_runs x n_envs``)
        self.samples = {names: runs.to_numpy() for names, runs in self.compared.groupby(GROUP, sort=False).final_return}
        self.samples |= self._scores()
        self.returns = pd.DataFrame([self._returns(names, x) for names, x in self.samples.items()])
        last = self.last_evaluations("return").rename(columns={"mean": "last evaluation", "sem": "its ±"})
        self.returns = self.returns.join(last, on=GROUP) if len(self.returns) else self.returns
        panels = product(dict.fromkeys(names[:2] for names in self.samples), pairs)
        complete = [(*panel, pair) for panel, pair in panels if all((*panel, label) in self.samples for label in pair)]
        self.differences = pd.DataFrame([self._differences(*panel) for panel in complete])

    def _scores(self) -> dict[tuple[Any, ...], Array]:
        """Final returns scaled from 0 to 1, of labels with the same number of runs in each of several environments."""
        by_env, scores = self.compared.groupby("env").final_return, {}
        width = (by_env.transform("max") - by_env.transform("min")).replace(0.0, 1.0)
        runs = self.compared.assign(score=(self.compared.final_return - by_env.transform("min")) / width)
        n_envs = runs.groupby("condition").env.nunique()
        for (condition, label), group in runs.groupby(GROUP[1:], sort=False):
            columns = [column for _, column in group.groupby("env").score]
            if len(columns) == n_envs[condition] > 1 and len(set(map(len, columns))) == 1:
                scores[ALL, condition, label] = np.stack(columns, axis=1)
        return scores

    def _returns(self, names: tuple[Any, ...], x: Array) -> dict[str, Any]:
        row = dict(zip(GROUP, names, strict=True)) | {"runs": len(x)}
        if x.ndim == 1:
            row |= {"final return": statistics.bootstrap_mean(x), "±": pd.Series(x).sem()}
            row |= {self.cvar: statistics.bootstrap_cvar(x, self.kappa), "lowest": x.min(), "highest": x.max()}
            row |= {"rests on": str(statistics.runs_behind_cvar(len(x), self.kappa))}
        return row | {"IQM": statistics.interquartile_mean(x)}

    def _differences(self, env: str, condition: str, pair: Sequence[str]) -> dict[str, Any]:
        x, y = (self.samples[env, condition, label] for label in pair)
        row: dict[str, Any] = {"env": env, "condition": condition, "label": " − ".join(pair)}
        if x.ndim == 1:
            row |= {"runs": f"{len(x)}, {len(y)}", "of means": statistics.difference_of_means(x, y)}
            row |= dict(zip(("Welch t", "p"), statistics.welch_test(x, y), strict=True))
            row |= {f"of {self.cvar}": statistics.difference_of_cvars(x, y, self.kappa)}
        return row | {"probability of improvement": statistics.probability_of_improvement(x, y)}

    def series(self, name: str, column: str) -> pd.DataFrame:
        """:return: the rows of a table with a finite number in a column, of the runs with a final return"""
        table: pd.DataFrame = getattr(self.study, name)
        table = table.assign(**{column: table[column].astype(float) if column in table else math.nan})
        runs = self.compared[GROUP].rename_axis("run").reset_index()
        return runs.merge(table[np.isfinite(table[column])], on="run")

    def last_evaluations(self, column: str) -> pd.DataFrame:
        """:return: mean and standard error over the runs of each one's own last evaluation"""
        table = self.series("evaluations", column)
        last = table[table.step == table.groupby("run").step.transform("max")]
        return last.groupby([*GROUP, "run"])[column].mean().groupby(GROUP).agg(["mean", "sem"])

    def ratios(self) -> pd.DataFrame:
        groups = self.series("updates", "kl_ratio").groupby(GROUP, sort=False).kl_ratio
        table = groups.agg(["size", "median"]).set_axis(["updates", "median KL ratio"], axis=1)
        for threshold in THRESHOLDS:
            table[f"at least {threshold:g}"] = groups.agg(lambda ratios, least=threshold: (ratios >= least).mean())
        table["mean proposed KL"] = self.series("updates", "kl_proposed").groupby(GROUP).kl_proposed.mean()
        return table.reset_index()
