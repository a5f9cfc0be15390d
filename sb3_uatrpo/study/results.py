"""What a report shows: groups of runs, and what comes of comparing them."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations
from pathlib import Path

import numpy as np

from sb3_uatrpo.study import statistics
from sb3_uatrpo.study.errors import StudyError
from sb3_uatrpo.study.groups import Group, in_order, is_uatrpo
from sb3_uatrpo.study.statistics import Array, Estimate

Pair = tuple[str, str]
Panel = tuple[str, str]


@dataclass(frozen=True)
class Summary:
    """A group on its own."""

    group: Group
    kappa: float

    @cached_property
    def mean(self) -> Estimate:
        return statistics.bootstrap_mean(self.group.final_returns)

    @cached_property
    def cvar(self) -> Estimate:
        return statistics.bootstrap_cvar(self.group.final_returns, self.kappa)

    @property
    def n_behind_cvar(self) -> int:
        return statistics.runs_behind_cvar(len(self.group.records), self.kappa)

    @cached_property
    def interquartile_mean(self) -> Estimate:
        return statistics.interquartile_mean(self.group.final_returns)

    @cached_property
    def last_evaluations(self) -> Array:
        """:return: mean deterministic returns of the runs at the last step at which all were evaluated, if any"""
        _, means = self.group.evaluations
        return means[:, -1] if means.size else np.array([])

    @cached_property
    def kl_ratios(self) -> Array:
        return self.group.update_values("kl_ratio")

    @cached_property
    def mean_kl_proposed(self) -> float:
        proposed = self.group.update_values("kl_proposed")
        return float(proposed.mean()) if len(proposed) else np.nan


@dataclass(frozen=True)
class Comparison:
    """Final returns of a first group beside those of a second, in one environment and variant."""

    first: Group
    second: Group
    kappa: float

    @property
    def name(self) -> str:
        return f"{self.first.label} − {self.second.label}"

    @cached_property
    def mean(self) -> Estimate:
        return statistics.difference_of_means(self.first.final_returns, self.second.final_returns)

    @cached_property
    def cvar(self) -> Estimate:
        return statistics.difference_of_cvars(self.first.final_returns, self.second.final_returns, self.kappa)

    @cached_property
    def improvement(self) -> Estimate:
        return statistics.probability_of_improvement(self.first.final_returns, self.second.final_returns)

    @cached_property
    def welch(self) -> statistics.Welch:
        return statistics.welch_test(self.first.final_returns, self.second.final_returns)


@dataclass(frozen=True)
class Results:
    """What the tables and the pictures show."""

    folder: Path
    all_groups: tuple[Group, ...]
    unreadable: tuple[tuple[Path, str], ...]
    pairs: tuple[Pair, ...]
    kappa: float

    @cached_property
    def groups(self) -> list[Group]:
        """:return: those with a run to show"""
        return [group for group in self.all_groups if group.records]

    @cached_property
    def summaries(self) -> list[Summary]:
        return [Summary(group, self.kappa) for group in self.groups]

    @property
    def cvar_name(self) -> str:
        return f"{100 * self.kappa:g}%-CVaR"

    @cached_property
    def labels(self) -> list[str]:
        return in_order(group.label for group in self.groups)

    @cached_property
    def panels(self) -> dict[Panel, dict[str, Group]]:
        """:return: for each environment and variant, the groups by label"""
        panels: dict[Panel, dict[str, Group]] = {}
        for group in self.groups:
            panels.setdefault((group.env_id, group.variant), {})[group.label] = group
        return {key: {label: own[label] for label in self.labels if label in own} for key, own in panels.items()}

    @cached_property
    def comparisons(self) -> dict[Panel, list[Comparison]]:
        """:return: for each environment and variant, the pairs of which both have runs"""
        comparisons = {
            key: [Comparison(own[x], own[y], self.kappa) for x, y in self.pairs if x in own and y in own]
            for key, own in self.panels.items()
        }
        return {key: own for key, own in comparisons.items() if own}

    @cached_property
    def scores(self) -> dict[str, dict[str, Array]]:
        """
        :return: for each variant and label, final returns of all its environments, from 0 at the environment's
            lowest to 1 at its highest (``n_runs x n_envs``), where a variant has several environments and a label
            equally many runs in each
        """
        everywhere: dict[str, list[Array]] = {}
        for group in self.groups:
            everywhere.setdefault(group.env_id, []).append(group.final_returns)
        lowest = {env_id: min(map(np.min, returns)) for env_id, returns in everywhere.items()}
        highest = {env_id: max(map(np.max, returns)) for env_id, returns in everywhere.items()}
        scores: dict[str, dict[str, Array]] = {}
        for variant in sorted({variant for _, variant in self.panels}):
            own = {env_id: panel for (env_id, v), panel in self.panels.items() if v == variant}
            for label in self.labels:
                columns = [
                    (panel[label].final_returns - lowest[env_id]) / ((highest[env_id] - lowest[env_id]) or 1.0)
                    for env_id, panel in own.items()
                    if label in panel
                ]
                if len(own) > 1 and len(columns) == len(own) and len({len(column) for column in columns}) == 1:
                    scores.setdefault(variant, {})[label] = np.stack(columns, axis=1)
        return scores

    @cached_property
    def interquartile_scores(self) -> dict[str, dict[str, Estimate]]:
        """:return: for each variant and label, the IQM of ``scores``"""
        return {
            variant: {label: statistics.interquartile_mean(scores) for label, scores in own.items()}
            for variant, own in self.scores.items()
        }

    def improvement_everywhere(self, variant: str, first: str, second: str) -> Estimate:
        """:return: probability of improvement, averaged over all environments of a variant"""
        own = self.scores[variant]
        return statistics.probability_of_improvement(own[first], own[second])


def pairs_of(labels: Sequence[str], algorithms: Pair | None) -> tuple[Pair, ...]:
    """
    :param labels: of all groups, in their order
    :param algorithms: the two that are compared, or ``None`` for a choice
    :return: which labels are compared: the given ones, or ``uatrpo`` with every other one, or without it each with each
    :raises StudyError: if a given one is not among the labels, or both are the same
    """
    if algorithms is None:
        pairs = tuple(combinations(labels, 2))
        ours = tuple(pair for pair in pairs if is_uatrpo(pair[0]))
        return ours or pairs
    for label in algorithms:
        if label not in labels:
            raise StudyError(f"no records of {label!r}; there are {', '.join(labels)}")
    if algorithms[0] == algorithms[1]:
        raise StudyError(f"two algorithms are compared, but {algorithms[0]!r} was given twice")
    return (algorithms,)
