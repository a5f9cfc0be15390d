"""Records that may be averaged: those whose training differs in the seed alone."""

import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from sb3_uatrpo.study.errors import StudyError
from sb3_uatrpo.study.record import Record
from sb3_uatrpo.study.specification import RunSpec
from sb3_uatrpo.study.statistics import FINAL_SHARE, Array, final_return, learning_curve

# Changes nothing in training: runs of other evaluations are taken together, if that makes no two runs of one
EVALUATION = {"eval_freq", "n_eval_episodes"}
# Steps at which curves over training are drawn
N_POINTS = 100
# Characters that the legend of a picture has room for
LONGEST_LABEL = 60


@dataclass(frozen=True)
class Group:
    """
    The runs of one algorithm in one environment with one group of settings.

    :param env_id: environment
    :param variant: how the runs differ from the algorithm's plain settings, "" if they do not
    :param label: the algorithm's name, and what tells it apart from others with the same name
    :param spec: specification of the first run; the others differ from it in their seed, and perhaps in evaluations
    :param records: runs that are done and have a training return, by seed; only their order tells runs apart below
    :param without_return: runs that are done, but in which no episode ended or the return is not finite
    :param failed: runs that failed
    """

    env_id: str
    variant: str
    label: str
    spec: RunSpec
    records: tuple[Record, ...]
    without_return: tuple[Record, ...]
    failed: tuple[Record, ...]

    @property
    def done(self) -> list[Record]:
        """:return: runs that are done, with and without a return, by seed"""
        return sorted([*self.records, *self.without_return], key=lambda record: record.spec.seed)

    @cached_property
    def final_returns(self) -> Array:
        """:return: ``n_runs``"""
        return np.array([run_return(record) for record in self.records])

    @property
    def grid(self) -> Array:
        """:return: steps at which ``curves`` are given (``N_POINTS``)"""
        return np.linspace(0, self.spec.n_timesteps, N_POINTS + 1)[1:]

    @cached_property
    def curves(self) -> Array:
        """
        :return: trailing mean of training returns over the last ``FINAL_SHARE`` of all steps, so that the last point is
            the final return; NaN before the first episode has ended (``n_runs x N_POINTS``)
        """
        n_timesteps = self.spec.n_timesteps
        curves = [
            learning_curve(
                np.minimum(record.episodes["timesteps"], n_timesteps),
                record.episodes["returns"],
                self.grid,
                FINAL_SHARE * n_timesteps,
            )
            for record in self.records
        ]
        return np.array(curves).reshape(-1, N_POINTS)

    @cached_property
    def evaluations(self) -> tuple[Array, Array]:
        """
        :return: steps at which all runs were evaluated (``n_evaluations``), and the mean deterministic returns
            (``n_runs x n_evaluations``)
        """
        means = [
            dict(zip(record.evaluations["timesteps"], map(np.mean, record.evaluations["returns"]), strict=True))
            for record in self.records
            if record.evaluations.get("timesteps")
        ]
        common = sorted(set.intersection(*map(set, means))) if means else []
        return np.array(common, dtype=np.float64), np.array([[run[t] for t in common] for run in means])

    def update_values(self, key: str) -> Array:
        """
        :param key: of ``train/``, without the prefix
        :return: its values in all updates of all runs, without those where it was not logged or is not finite (1-D)
        """
        values = [value for record in self.records for value in record.updates.get(key, []) if value is not None]
        array = np.array(values, dtype=np.float64)
        return array[np.isfinite(array)]


def group_records(records: Sequence[Record], separate_settings: bool = False) -> list[Group]:
    """
    :param records: of any algorithms, environments, variants and settings
    :param separate_settings: whether runs of one algorithm with different settings become groups of their own, with
        what differs in their label
    :return: groups by environment, variant and algorithm
    :raises StudyError: if settings differ within an algorithm, or the number of steps within an environment, and
        ``separate_settings`` is not set
    """
    alike: dict[tuple[str, str, str], dict[str, list[Record]]] = defaultdict(lambda: defaultdict(list))
    for record in records:
        spec = record.spec
        alike[spec.env_id, spec.variant, spec.algo][_settings_key(spec)].append(record)
    if not separate_settings:
        _refuse_different_steps(records)
    groups = []
    for (env_id, variant, algo), by_settings in sorted(alike.items()):
        told_apart = [runs for _, runs in sorted(by_settings.items())]
        specs = [runs[0].spec for runs in told_apart]
        differing = _differing(specs)
        together = [record for runs in told_apart for record in runs]
        seeds = {record.spec.seed for record in together}
        if not separate_settings and EVALUATION.issuperset(differing) and len(seeds) == len(together):
            groups.append(_group(algo, together))
            continue
        if differing and not separate_settings:
            counts = " and ".join(
                f"{_named(spec, differing)} ({len(runs)} run{'s'[: len(runs) > 1]})"
                for spec, runs in zip(specs, told_apart, strict=True)
            )
            where = f"{env_id}, {variant}" if variant else env_id
            raise StudyError(
                f"records of different settings: {algo} on {where} has {counts}; --separate-settings tells them apart"
            )
        for spec, runs in zip(specs, told_apart, strict=True):
            label = f"{algo} ({_named(spec, differing)})" if differing else algo
            groups.append(_group(label, runs))
    groups = _numbered(groups)
    order = in_order(group.label for group in groups)
    return sorted(groups, key=lambda group: (group.env_id, group.variant, order.index(group.label)))


def _numbered(groups: list[Group]) -> list[Group]:
    """Numbers for settings that no legend has room for, the same in all environments; the report says what they are."""
    names: dict[str, str] = {}
    taken: Counter[str] = Counter()
    for label in sorted({group.label for group in groups if len(group.label) > LONGEST_LABEL}):
        algo = label.partition(" ")[0]
        taken[algo] += 1
        names[label] = f"{algo} (settings {taken[algo]})"
    return [replace(group, label=names.get(group.label, group.label)) for group in groups]


def in_order(labels: Iterable[str]) -> list[str]:
    """
    :param labels: may repeat
    :return: each once, in the order of the alphabet, but ``uatrpo`` first
    """
    return sorted(set(labels), key=lambda label: (not is_uatrpo(label), label))


def is_uatrpo(label: str) -> bool:
    """:return: whether a label is ``uatrpo``, with or without settings that tell it apart"""
    return label.partition(" ")[0] == "uatrpo"


def _group(label: str, runs: list[Record]) -> Group:
    runs = sorted(runs, key=lambda record: record.spec.seed)
    done = [record for record in runs if record.status == "done"]
    usable = [record for record in done if np.isfinite(run_return(record))]
    return Group(
        env_id=runs[0].spec.env_id,
        variant=runs[0].spec.variant,
        label=label,
        spec=runs[0].spec,
        records=tuple(usable),
        without_return=tuple(record for record in done if record not in usable),
        failed=tuple(record for record in runs if record.status != "done"),
    )


def run_return(record: Record) -> float:
    """
    :param record: of a run
    :return: its final return, NaN without any episode
    :raises ValueError: if its episodes are not in order
    """
    return final_return(record.episodes["timesteps"], record.episodes["returns"], record.spec.n_timesteps)


def _what_decides(spec: RunSpec) -> dict[str, Any]:
    """All that may not differ between runs that are averaged, flat."""
    return {
        **spec.settings,
        "n_timesteps": spec.n_timesteps,
        "eval_freq": spec.eval_freq,
        "n_eval_episodes": spec.n_eval_episodes,
    }


def different_settings(first: Group, second: Group) -> list[str]:
    """
    :param first: of an algorithm
    :param second: of another
    :return: settings that both name with different values, as ``name value and value``
    """
    ours, theirs = _what_decides(first.spec), _what_decides(second.spec)
    return [
        f"{name} {ours[name]} and {theirs[name]}"
        for name in _differing([first.spec, second.spec])
        if name in ours and name in theirs
    ]


def _settings_key(spec: RunSpec) -> str:
    return json.dumps(_what_decides(spec), sort_keys=True)


def _differing(specs: list[RunSpec]) -> list[str]:
    settings = [_what_decides(spec) for spec in specs]
    names = sorted(set().union(*settings))
    return [name for name in names if len({json.dumps(s.get(name), sort_keys=True) for s in settings}) > 1]


def _named(spec: RunSpec, names: list[str]) -> str:
    settings = _what_decides(spec)
    return ", ".join(f"{name}={settings[name]}" if name in settings else f"no {name}" for name in names)


def _refuse_different_steps(records: Sequence[Record]) -> None:
    steps: dict[str, set[int]] = defaultdict(set)
    for record in records:
        steps[record.spec.env_id].add(record.spec.n_timesteps)
    for env_id, lengths in sorted(steps.items()):
        if len(lengths) > 1:
            listed = ", ".join(f"{n:,}" for n in sorted(lengths))
            raise StudyError(
                f"records of different settings: runs on {env_id} have {listed} steps; "
                "--separate-settings compares them nevertheless"
            )
