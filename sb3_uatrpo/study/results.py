"""What the runs of a study show: one table of them, and from it the values of groups and comparisons between groups."""

import json
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike

from sb3_uatrpo.study import statistics
from sb3_uatrpo.study.record import UNVARIED, Record, RunSpec, StudyError, each_run_once, refuse_unequal_lengths
from sb3_uatrpo.study.statistics import FINAL_SHARE, Array, Estimate

# These do not affect training: runs that differ in nothing else are averaged, unless a seed would count twice
EVALUATION = ("eval_freq", "n_eval_episodes")
# Points of a learning curve
N_POINTS = 100
GROUP = ["environment", "variant", "algorithm"]

Pair = tuple[str, str]
Panel = tuple[str, str]


def tabulate_runs(records: Sequence[Record], variants: Sequence[str] = ()) -> pd.DataFrame:
    """
    A table with one row per run, in the order of a report. Runs that differ only in the seed, and so may be averaged,
    have the same ``environment``, ``variant`` and ``algorithm``.

    Noise and values varied for several algorithms define variants; algorithms are compared within a variant. Values
    varied for a single algorithm become part of its name, so that its versions are compared with each other and with
    the other algorithms.

    :param records: of any algorithms, environments, variants and hyperparameters. A run that is there more than once
        counts once.
    :param variants: the variants to keep, ``"plain"`` for runs without varied values; all by default
    :return: columns ``environment``; ``variant``; ``algorithm``, with the name of its variant and values varied for it
        alone; ``seed``; ``status``; ``n_timesteps``; ``final_return`` and ``final_success``, a share of episodes, NaN
        where unknown; and ``record``
    :raises StudyError: if finished runs differ in hyperparameters within a name, or in numbers of steps within an
        environment; or if one of ``variants`` does not exist
    """
    records = each_run_once(records)
    names, algorithms = _variants_and_algorithms([record.spec for record in records])
    rows = [(record.spec.env_id, record.spec.seed, record.status, record.spec.n_timesteps) for record in records]
    runs = pd.DataFrame(rows, columns=["environment", "seed", "status", "n_timesteps"])
    runs = runs.assign(variant=names, algorithm=algorithms, record=records)
    runs["final_return"] = [_final_mean(record, record.episodes["returns"]) for record in records]
    runs["final_success"] = list(map(_final_success, records))
    known = [name or UNVARIED for name in sorted(set(names))]
    for name in variants:
        if name not in known:
            raise StudyError(f"no runs of the variant {name!r}; there are {', '.join(known)}")
    if variants:
        runs = runs[runs.variant.replace("", UNVARIED).isin(variants)]
    # failed runs count in no mean
    _refuse_unlike(runs[runs.status == "done"])
    runs = runs.assign(place=runs.algorithm.map(in_order(runs.algorithm).index))
    return runs.sort_values(["environment", "variant", "place", "seed"], ignore_index=True).drop(columns="place")


def _variants_and_algorithms(specs: Sequence[RunSpec]) -> tuple[list[str], list[str]]:
    algorithms_with: dict[str, set[tuple[str, str]]] = defaultdict(set)
    for spec in specs:
        for change in spec.varied:
            algorithms_with[change.partition("=")[0]].add((spec.algo, spec.variant_name))
    shared = {name for name, algorithms in algorithms_with.items() if name == "noise" or len(algorithms) > 1}
    variants, labels = [], []
    for spec in specs:
        variants.append(",".join(change for change in spec.varied if change.partition("=")[0] in shared))
        own = joined([spec.variant_name, *(change for change in spec.varied if change.partition("=")[0] not in shared)])
        labels.append(f"{spec.algo} ({own})" if own else spec.algo)
    return variants, labels


def _final_mean(record: Record, values: ArrayLike) -> float:
    """Mean over the episodes of the final return; NaN for a run that is not done, and if it is not finite."""
    if record.status != "done":
        return math.nan
    mean = statistics.final_return(record.episodes["timesteps"], values, record.spec.n_timesteps)
    return mean if math.isfinite(mean) else math.nan


def _final_success(record: Record) -> float:
    """Share of successes among the episodes of the final return that report whether they succeeded; NaN if none do."""
    if "is_success" not in record.episodes:
        return math.nan
    # None where an episode does not report it
    reported = np.array(record.episodes["is_success"], dtype=np.float64)
    share = _final_mean(record, ~np.isnan(reported))
    return _final_mean(record, np.nan_to_num(reported)) / share if share else math.nan


def _refuse_unlike(runs: pd.DataFrame) -> None:
    """:raises StudyError: if runs differ that would be averaged, or compared although one had more steps"""
    refuse_unequal_lengths(
        zip(runs.environment, runs.algorithm, runs.n_timesteps, strict=True),
        "report on folders that have one length for each environment",
    )
    for (env_id, variant, label), alike in runs.groupby(GROUP):
        specs = [record.spec for record in alike.record]
        settings = [spec.hyperparameters | {name: getattr(spec, name) for name in EVALUATION} for spec in specs]
        names = _differing(settings)
        if names and not (alike.seed.is_unique and set(EVALUATION).issuperset(names)):
            each = (
                ", ".join(f"{name}={of[name]}" if name in of else f"no {name}" for name in names) for of in settings
            )
            kinds = " and ".join(f"{kind} ({counted(n, 'run')})" for kind, n in sorted(Counter(each).items()))
            raise StudyError(
                f"records of different settings: {label} on {joined([env_id, variant])} has {kinds}; they need names, "
                "as variants of a study file or by --vary"
            )


def _differing(settings: Sequence[dict[str, Any]]) -> list[str]:
    names = sorted(set().union(*settings))
    return [name for name in names if len({json.dumps(values.get(name), sort_keys=True) for values in settings}) > 1]


def in_order(labels: Iterable[str]) -> list[str]:
    """:return: each label once, sorted, those of ``uatrpo``, such as ``uatrpo_paper``, first"""
    return sorted(set(labels), key=lambda label: (not label.startswith("uatrpo"), label))


def pairs_of(labels: Iterable[str], algorithms: Pair | None) -> tuple[Pair, ...]:
    """
    :return: the pairs of labels to compare: ``algorithms``, or each ``uatrpo`` with every other label, or all pairs
    :raises StudyError: if a given label does not exist, or both are the same
    """
    known = in_order(labels)
    if algorithms is None:
        pairs = tuple(combinations(known, 2))
        return tuple(pair for pair in pairs if pair[0].startswith("uatrpo")) or pairs
    for label in algorithms:
        if label not in known:
            raise StudyError(f"no records of {label!r}; there are {', '.join(known)}")
    if algorithms[0] == algorithms[1]:
        raise StudyError(f"two algorithms are compared, but {algorithms[0]!r} was given twice")
    return (algorithms,)


def learning_curves(runs: pd.DataFrame) -> tuple[Array, Array]:
    """
    :return: steps (``N_POINTS``), and at each the mean training return over the preceding ``FINAL_SHARE`` of all steps,
        so that the last point is the final return; NaN before the first episode has ended (``n_runs x N_POINTS``)
    """
    last = runs.n_timesteps.iloc[0]
    grid = np.linspace(0, last, N_POINTS + 1)[1:]
    episodes = [(np.minimum(record.episodes["timesteps"], last), record.episodes["returns"]) for record in runs.record]
    curves = [statistics.learning_curve(*ended, grid, FINAL_SHARE * last) for ended in episodes]
    return grid, np.array(curves).reshape(-1, N_POINTS)


def evaluations(runs: pd.DataFrame) -> tuple[Array, Array]:
    """
    :return: steps at which all runs of a group were evaluated (``n_evaluations``), and the mean return of the episodes
        of each deterministic evaluation (``n_runs x n_evaluations``)
    """
    done = [record.evaluations for record in runs.record if record.evaluations["returns"]]
    series = [pd.Series([np.mean(row) for row in of["returns"]], of["timesteps"]) for of in done]
    if not series:
        return np.empty(0), np.empty((0, 0))
    # a NaN is a value too: it leaves a gap, but no other step takes its place
    means = pd.concat(series, axis=1, join="inner")
    return means.index.to_numpy(dtype=np.float64), means.to_numpy(dtype=np.float64).T


def update_values(runs: pd.DataFrame, key: str) -> Array:
    """:return: the finite values of ``train/key`` in all updates of all runs (``n_updates``)"""
    return update_series(runs, key)[1]


def update_series(runs: pd.DataFrame, key: str) -> tuple[Array, Array]:
    """:return: the steps before each update with a finite value of ``train/key``, and the values (``n_updates``)"""
    logged = [[record.updates["timesteps"], record.updates[key]] for record in runs.record if key in record.updates]
    timesteps, values = np.concatenate([np.empty((2, 0)), *logged], axis=1).astype(np.float64)
    known = np.isfinite(values)
    return timesteps[known], values[known]


@dataclass(frozen=True)
class Results:
    """What tables and pictures show: runs of ``tabulate_runs``, pairs of labels, and κ-CVaR with κ = ``kappa``."""

    runs: pd.DataFrame
    pairs: tuple[Pair, ...]
    kappa: float

    @property
    def cvar_name(self) -> str:
        return f"{100 * self.kappa:g}%-CVaR"

    @cached_property
    def compared(self) -> pd.DataFrame:
        """:return: the runs with a final return"""
        return self.runs[self.runs.final_return.notna()]

    @cached_property
    def labels(self) -> list[str]:
        return in_order(self.compared.algorithm)

    @cached_property
    def groups(self) -> dict[tuple[str, str, str], pd.DataFrame]:
        """:return: for each environment, variant and algorithm, its runs"""
        return dict(list(self.compared.groupby(GROUP, sort=False)))

    @cached_property
    def panels(self) -> dict[Panel, dict[str, pd.DataFrame]]:
        """:return: for each environment and variant, the runs of each algorithm"""
        panels: dict[Panel, dict[str, pd.DataFrame]] = {}
        for (env_id, variant, label), runs in self.groups.items():
            panels.setdefault((env_id, variant), {})[label] = runs
        return panels

    @cached_property
    def interquartile_means(self) -> dict[Panel, dict[str, Estimate]]:
        return {
            panel: {label: statistics.interquartile_mean(runs.final_return) for label, runs in by_label.items()}
            for panel, by_label in self.panels.items()
        }

    @cached_property
    def comparisons(self) -> pd.DataFrame:
        """:return: a row for each environment, variant and pair of algorithms that both have runs there"""
        rows: list[dict[str, Any]] = []
        for panel, algorithms in self.panels.items():
            for names in self.pairs:
                if algorithms.keys() >= set(names):
                    x, y = (algorithms[name].final_return for name in names)
                    row: dict[str, Any] = {"panel": panel, "name": " − ".join(names), "n_runs": (len(x), len(y))}
                    # a difference may also come from hyperparameters that both have
                    ours, theirs = (algorithms[name].record.iloc[0].spec.hyperparameters for name in names)
                    both = [name for name in _differing([ours, theirs]) if name in ours.keys() & theirs.keys()]
                    row["unlike"] = "; ".join(f"{name} {ours[name]} and {theirs[name]}" for name in both)
                    row["mean"] = statistics.difference_of_means(x, y)
                    row["cvar"] = statistics.difference_of_cvars(x, y, self.kappa)
                    row["improvement"] = statistics.probability_of_improvement(x, y)
                    row["welch"] = statistics.welch_test(x, y)
                    rows.append(row)
        return pd.DataFrame(rows)

    @cached_property
    def scores(self) -> dict[str, dict[str, Array]]:
        """
        :return: for each variant with several environments, and each label with the same number of runs in all of them:
            final returns scaled from 0, the lowest of ``runs`` in the environment, to 1, the highest
            (``n_runs x n_envs``)
        """
        by_env = self.compared.groupby("environment").final_return
        lowest, highest = by_env.transform("min"), by_env.transform("max")
        score = (self.compared.final_return - lowest) / (highest - lowest).replace(0.0, 1.0)
        scores: dict[str, dict[str, Array]] = {}
        for variant, runs in self.compared.assign(score=score).groupby("variant"):
            n_envs = runs.environment.nunique()
            for label in self.labels:
                columns = [group.score for _, group in runs[runs.algorithm == label].groupby("environment")]
                if n_envs > 1 and len(columns) == n_envs and len(set(map(len, columns))) == 1:
                    scores.setdefault(variant, {})[label] = np.stack(columns, axis=1)
        return scores


def counted(n: int, noun: str) -> str:
    """:return: the number and the noun, in the plural unless the number is one"""
    return f"{n} {noun}" + ("" if n == 1 else "s")


def joined(names: Iterable[str]) -> str:
    """:return: the names that are not empty, with commas between them"""
    return ", ".join(filter(None, names))
