"""The report of a study: one table of its runs, what comes of comparing them, and a page that says so."""

import json
import math
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from sb3_uatrpo.study import statistics
from sb3_uatrpo.study.record import Record, RunSpec, StudyError
from sb3_uatrpo.study.statistics import (
    CONFIDENCE_LEVEL,
    FINAL_SHARE,
    N_RESAMPLES,
    N_RESAMPLES_OVER_TRAINING,
    N_RESAMPLES_RLIABLE,
    Array,
    Estimate,
)
from sb3_uatrpo.study.study_folder import MARKER, StudyFolder
from sb3_uatrpo.study.zoo_folder import find_runs, read_zoo_folder

# Changes nothing in training: runs of other evaluations are taken together, if that makes no two runs of one
EVALUATION = {"eval_freq", "n_eval_episodes"}
# Steps at which curves over training are drawn
N_POINTS = 100
# Characters that the legend of a picture has room for
LONGEST_LABEL = 60
GROUP = ["environment", "variant", "algorithm"]
DASH = "–"

Pair = tuple[str, str]
Panel = tuple[str, str]

DEFINITIONS = f"""\
- *Final return* of a run: mean undiscounted training return of the episodes that ended in the last {FINAL_SHARE:.0%} of
  its steps, or of the last episode where none did.
- *κ-CVaR*: mean of the worst share κ of the runs. The run in which that share ends counts with the part that belongs to
  it; κ = 1 gives the mean.
- *Intervals*: {CONFIDENCE_LEVEL:.0%} percentile bootstrap over runs, from {N_RESAMPLES:,} resamples;
  {N_RESAMPLES_RLIABLE:,} for rliable's statistics, {N_RESAMPLES_OVER_TRAINING:,} over training. With few runs they are
  too narrow, that of a CVaR most of all. ± is the standard error of the mean.
- *Welch*: two-sided t-test of equal means with unequal variances. p is not corrected for the number of comparisons.
- *IQM*: mean without the lowest and the highest quarter of the runs; with fewer than four runs, the mean.
- *Probability of improvement*: how often a run of the first algorithm ends above a run of the second, ties halved."""

CAPTIONS = {
    "learning_curves": f"Training return, trailing mean over {FINAL_SHARE:.0%} of the steps: mean and standard error "
    "over runs, single runs thin",
    "evaluations": "Deterministic evaluations: mean and standard error over runs, single runs thin",
    "cvar": "κ-CVaR of the final return, with bootstrap bands; at κ = 1 it is the mean, up to 1/n the worst run alone",
    "cvar_over_training": f"CVaR over runs of the training return (trailing mean over {FINAL_SHARE:.0%} of the steps), "
    "with bootstrap bands",
    "differences": "Difference of final returns, with bootstrap intervals",
    "kl_ratio": "KL ratio of proposed steps; the legend has the shares that are at least 2 and 3",
    "interquartile_means": "IQM of the final return, with bootstrap intervals",
    "performance_profiles": "Performance profiles: the share of runs that end above τ, with bootstrap bands",
    "probability_of_improvement": "Probability of improvement, with bootstrap intervals",
}


def report(
    folder: str | os.PathLike[str],
    output: str | os.PathLike[str],
    algorithms: Pair | None = None,
    kappa: float = 0.2,
    separate_settings: bool = False,
) -> Path:
    """
    Write ``report.md`` and its pictures, PNG and SVG.

    :param folder: a study's folder, or one that RL Zoo wrote itself
    :param output: where to write, made if it is not there
    :param algorithms: the two labels that are compared, the first minus the second. By default each ``uatrpo`` is
        compared with every other one, and without it each with each.
    :param kappa: the share of worst runs in tables and over training, in (0, 1]
    :param separate_settings: whether runs of one algorithm with different hyperparameters are separated, not refused
    :return: the report's path
    :raises StudyError: if the folder is neither, holds no run that is done, or holds runs that may not be averaged; if
        ``algorithms`` or ``kappa`` cannot be
    """
    if not 0 < kappa <= 1:
        raise StudyError(f"kappa must be in (0, 1], but it is {kappa}")
    records, unreadable = read_folder(folder)
    if not records:
        reasons = f" ({len(unreadable)} unreadable, the first: {unreadable[0][1]})" if unreadable else ""
        raise StudyError(f"{folder}: no records{reasons}")
    runs = tabulate_runs(records, separate_settings)
    compared = runs[runs.final_return.notna()]
    if compared.empty:
        raise StudyError(
            f"{folder}: no run is done and has a training return; of {len(records)}, all failed or have none"
        )
    results = Results(runs, pairs_of(in_order(compared.algorithm), algorithms), kappa)

    # matplotlib takes a second to import, and bad input should not
    from sb3_uatrpo.study.plots import draw_pictures

    output = Path(output)
    output.mkdir(parents=True, exist_ok=True)
    pictures = draw_pictures(results, output)
    path = output / "report.md"
    path.write_text(markdown(results, pictures, Path(folder).resolve().name, unreadable), encoding="utf-8")
    return path


def read_folder(folder: str | os.PathLike[str]) -> tuple[list[Record], list[tuple[Path, str]]]:
    """
    :param folder: a study's folder, or one that RL Zoo wrote itself
    :return: records, and (path, reason) of what cannot be read
    :raises StudyError: if the folder is neither
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise StudyError(f"{folder}: no such folder")
    if (folder / MARKER).exists():
        return StudyFolder(folder).read_all()
    if find_runs(folder):
        return read_zoo_folder(folder)
    raise StudyError(
        f"{folder}: neither a study (no study.json) nor a folder that RL Zoo wrote (no ALGO/ENV_1/ENV/args.yml)"
    )


# --------------------------------------------------------------------------------------------------- the table of runs


def tabulate_runs(records: Sequence[Record], separate_settings: bool = False) -> pd.DataFrame:
    """
    One row for each run, in the order of a report. Runs that may be averaged, since their training differs in the seed
    alone, have the same ``environment``, ``variant`` and ``algorithm``.

    :param records: of any algorithms, environments, variants and hyperparameters
    :param separate_settings: whether runs of one algorithm with different hyperparameters get labels of their own,
        with what differs
    :return: columns ``environment``; ``variant``, what was varied for several algorithms; ``algorithm``, with the name
        of its variant and whatever else separates it from others; ``seed``; ``status``; ``n_timesteps``;
        ``final_return`` and ``final_success``, a share of episodes, both NaN where there is none; and ``record``
    :raises StudyError: if hyperparameters differ within an algorithm, or the number of steps within an environment, and
        ``separate_settings`` is not set
    """
    specs = [record.spec for record in records]
    runs = pd.DataFrame(
        {
            "environment": [spec.env_id for spec in specs],
            "variant": [spec.condition for spec in specs],
            "algorithm": [spec.label for spec in specs],
            "seed": [spec.seed for spec in specs],
            "status": [record.status for record in records],
            "n_timesteps": [spec.n_timesteps for spec in specs],
            "final_return": [_final(record, "returns") for record in records],
            "final_success": [_final(record, "is_success") for record in records],
            "record": records,
        }
    )
    if not separate_settings:
        _refuse_different_steps(runs)
    runs["algorithm"] = _labels(runs, separate_settings)
    order = in_order(runs.algorithm)
    return runs.sort_values(
        [*GROUP, "seed"], key=lambda column: column.map(order.index) if column.name == "algorithm" else column
    ).reset_index(drop=True)


def _final(record: Record, name: str) -> float:
    """The final return, or share of successes, of a run that is done; NaN if there is none or it is not finite."""
    episodes = record.episodes
    if record.status != "done" or name not in episodes:
        return math.nan
    known = [(t, value) for t, value in zip(episodes["timesteps"], episodes[name], strict=True) if value is not None]
    timesteps, values = zip(*known, strict=True) if known else ((), ())
    final = statistics.final_return(timesteps, values, record.spec.n_timesteps)
    return final if math.isfinite(final) else math.nan


def _labels(runs: pd.DataFrame, separate_settings: bool) -> pd.Series:
    """What each run's algorithm is called."""
    labels = runs.algorithm.copy()
    deciding = runs.record.map(lambda record: json.dumps(_what_decides(record.spec), sort_keys=True))
    for (env_id, variant, algo), alike in runs.groupby(GROUP):
        kinds = [kind for _, kind in alike.groupby(deciding)]
        specs = [kind.record.iloc[0].spec for kind in kinds]
        differing = _differing(specs)
        if not differing or (not separate_settings and EVALUATION.issuperset(differing) and alike.seed.is_unique):
            continue
        if not separate_settings:
            counts = " and ".join(
                f"{_named(spec, differing)} ({_count(len(kind), 'run')})"
                for spec, kind in zip(specs, kinds, strict=True)
            )
            where = f"{env_id}, {variant}" if variant else env_id
            raise StudyError(
                f"records of different settings: {algo} on {where} has {counts}; --separate-settings tells them apart"
            )
        for spec, kind in zip(specs, kinds, strict=True):
            labels[kind.index] = f"{algo} ({_named(spec, differing)})"
    # Numbers for those that no legend has room for, the same in all environments; the report says what they are
    numbers: Counter[str] = Counter()
    for label in sorted(labels[labels.str.len() > LONGEST_LABEL].unique()):
        algo = label.partition(" ")[0]
        numbers[algo] += 1
        labels[labels == label] = f"{algo} (settings {numbers[algo]})"
    return labels


def _refuse_different_steps(runs: pd.DataFrame) -> None:
    for env_id, steps in runs.groupby("environment").n_timesteps:
        if steps.nunique() > 1:
            listed = ", ".join(f"{n:,}" for n in sorted(steps.unique()))
            raise StudyError(
                f"records of different settings: runs on {env_id} have {listed} steps; "
                "--separate-settings compares them nevertheless"
            )


def _what_decides(spec: RunSpec) -> dict[str, Any]:
    """All that may not differ between runs that are averaged, flat."""
    return {
        **spec.hyperparameters,
        "n_timesteps": spec.n_timesteps,
        "eval_freq": spec.eval_freq,
        "n_eval_episodes": spec.n_eval_episodes,
    }


def _differing(specs: Sequence[RunSpec]) -> list[str]:
    deciding = [_what_decides(spec) for spec in specs]
    names = sorted(set().union(*deciding))
    return [name for name in names if len({json.dumps(d.get(name), sort_keys=True) for d in deciding}) > 1]


def _named(spec: RunSpec, names: list[str]) -> str:
    deciding = _what_decides(spec)
    return ", ".join(f"{name}={deciding[name]}" if name in deciding else f"no {name}" for name in names)


def in_order(labels: Iterable[str]) -> list[str]:
    """
    :param labels: may repeat
    :return: each once, in the order of the alphabet, but those of ``uatrpo`` first
    """
    return sorted(set(labels), key=lambda label: (not _is_uatrpo(label), label))


def _is_uatrpo(label: str) -> bool:
    """Whether it is ``uatrpo`` or a name that begins with it, such as ``uatrpo_shrinkage``, whatever follows."""
    return label.startswith("uatrpo")


def pairs_of(labels: Sequence[str], algorithms: Pair | None) -> tuple[Pair, ...]:
    """
    :param labels: of all groups, in their order
    :param algorithms: the two that are compared, or ``None`` for a choice
    :return: which labels are compared: the given ones, or each ``uatrpo`` with every other one, or without it each
        with each
    :raises StudyError: if a given one is not among the labels, or both are the same
    """
    if algorithms is None:
        pairs = tuple(combinations(labels, 2))
        return tuple(pair for pair in pairs if _is_uatrpo(pair[0])) or pairs
    for label in algorithms:
        if label not in labels:
            raise StudyError(f"no records of {label!r}; there are {', '.join(labels)}")
    if algorithms[0] == algorithms[1]:
        raise StudyError(f"two algorithms are compared, but {algorithms[0]!r} was given twice")
    return (algorithms,)


# ------------------------------------------------------------------------------------------ what a group of runs shows


def learning_curves(runs: pd.DataFrame) -> tuple[Array, Array]:
    """
    :param runs: of one group
    :return: steps (``N_POINTS``), and at each the trailing mean of training returns over the last ``FINAL_SHARE`` of
        all steps, so that the last point is the final return; NaN before the first episode has ended
        (``n_runs x N_POINTS``)
    """
    n_timesteps = runs.n_timesteps.iloc[0]
    grid = np.linspace(0, n_timesteps, N_POINTS + 1)[1:]
    curves = [
        statistics.learning_curve(
            np.minimum(episodes["timesteps"], n_timesteps), episodes["returns"], grid, FINAL_SHARE * n_timesteps
        )
        for episodes in (record.episodes for record in runs.record)
    ]
    return grid, np.array(curves).reshape(-1, N_POINTS)


def evaluations(runs: pd.DataFrame, name: str = "returns") -> tuple[Array, Array]:
    """
    :param runs: of one group
    :param name: ``"returns"`` or ``"is_success"``
    :return: steps at which all runs were evaluated (``n_evaluations``), and the means over the episodes of each
        deterministic evaluation (``n_runs x n_evaluations``)
    """
    means = pd.DataFrame(
        {
            i: pd.Series([np.mean(row) for row in record.evaluations[name]], record.evaluations["timesteps"])
            for i, record in enumerate(runs.record)
            if record.evaluations.get(name)
        }
    ).dropna()
    return means.index.to_numpy(dtype=np.float64), means.to_numpy(dtype=np.float64).T


def update_values(runs: pd.DataFrame, key: str) -> Array:
    """
    :param runs: any
    :param key: of ``train/``, without the prefix
    :return: its values in all updates of all runs, without those where it was not logged or is not finite (1-D)
    """
    values = [value for record in runs.record for value in record.updates.get(key, []) if value is not None]
    array = np.array(values, dtype=np.float64)
    return array[np.isfinite(array)]


@dataclass(frozen=True)
class Results:
    """
    What the tables and the pictures show.

    :param runs: what ``tabulate_runs`` returned
    :param pairs: labels that are compared, the first minus the second
    :param kappa: the share of worst runs
    """

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
    def panels(self) -> dict[Panel, dict[str, pd.DataFrame]]:
        """:return: for each environment and variant, the runs of each algorithm"""
        return {
            panel: dict(list(runs.groupby("algorithm", sort=False)))
            for panel, runs in self.compared.groupby(["environment", "variant"], sort=False)
        }

    @cached_property
    def summaries(self) -> pd.DataFrame:
        """:return: a row for each group: statistics of its final returns, and of its proposed steps"""
        return pd.DataFrame(
            {
                **dict(zip(GROUP, (*panel, label), strict=True)),
                "runs": runs,
                "mean": statistics.bootstrap_mean(runs.final_return),
                "cvar": statistics.bootstrap_cvar(runs.final_return, self.kappa),
                "n_behind_cvar": statistics.runs_behind_cvar(len(runs), self.kappa),
                "interquartile_mean": statistics.interquartile_mean(runs.final_return),
                "kl_ratios": update_values(runs, "kl_ratio"),
            }
            for panel, algorithms in self.panels.items()
            for label, runs in algorithms.items()
        )

    @cached_property
    def comparisons(self) -> pd.DataFrame:
        """:return: a row for each environment, variant and pair of algorithms that both have runs there"""
        rows: list[dict[str, Any]] = []
        for (env_id, variant), algorithms in self.panels.items():
            for first, second in self.pairs:
                if first not in algorithms or second not in algorithms:
                    continue
                x, y = algorithms[first].final_return, algorithms[second].final_return
                row: dict[str, Any] = {"environment": env_id, "variant": variant, "name": f"{first} − {second}"}
                row |= {"first": algorithms[first], "second": algorithms[second]}
                row["mean"] = statistics.difference_of_means(x, y)
                row["cvar"] = statistics.difference_of_cvars(x, y, self.kappa)
                row["improvement"] = statistics.probability_of_improvement(x, y)
                row["welch"] = statistics.welch_test(x, y)
                rows.append(row)
        return pd.DataFrame(rows)

    @cached_property
    def scores(self) -> dict[str, dict[str, Array]]:
        """
        :return: for each variant and label, final returns of all its environments, from 0 at the environment's
            lowest to 1 at its highest (``n_runs x n_envs``), where a variant has several environments and a label
            equally many runs in each
        """
        by_env = self.compared.groupby("environment").final_return
        lowest, highest = by_env.transform("min"), by_env.transform("max")
        scaled = self.compared.assign(
            score=(self.compared.final_return - lowest) / (highest - lowest).replace(0.0, 1.0)
        )
        scores: dict[str, dict[str, Array]] = {}
        for variant, runs in scaled.groupby("variant"):
            env_ids = runs.environment.unique()
            for label in self.labels:
                columns = [group.score for _, group in runs[runs.algorithm == label].groupby("environment")]
                if len(env_ids) > 1 and len(columns) == len(env_ids) and len({len(column) for column in columns}) == 1:
                    scores.setdefault(variant, {})[label] = np.stack(columns, axis=1)
        return scores


# ------------------------------------------------------------------------------------------------------------ the page


def markdown(results: Results, pictures: set[str], name: str, unreadable: Sequence[tuple[Path, str]]) -> str:
    """
    :param results: what to show
    :param pictures: names of the pictures that lie beside the report
    :param name: of the study
    :param unreadable: (path, reason) of what could not be read
    :return: the report
    """
    blocks = [
        f"# Report on {name}",
        *_runs(results.runs, unreadable),
        "## What the numbers are",
        DEFINITIONS,
        *_returns(results),
        *_pictures(pictures, "learning_curves", "evaluations", "cvar", "cvar_over_training"),
        *_successes(results),
        *_differences(results),
        *_pictures(pictures, "differences"),
        *_proposed_steps(results),
        *_pictures(pictures, "kl_ratio"),
        *_aggregates(results),
        *_pictures(pictures, "interquartile_means", "performance_profiles", "probability_of_improvement"),
        *_hyperparameters(results),
    ]
    return "\n\n".join(blocks) + "\n"


def _runs(runs: pd.DataFrame, unreadable: Sequence[tuple[Path, str]]) -> Iterator[str]:
    done, failed = runs[runs.status == "done"], runs[runs.status != "done"]
    without = done[done.final_return.isna()]
    yield (
        f"{_count(len(done), 'run')} done, {len(failed)} failed, {len(unreadable)} left out because their files "
        "are corrupted or repeat another run."
    )
    yield "## Runs"
    rows = []
    for _, group in runs.groupby(GROUP, sort=False):
        ended = group[group.status == "done"]
        counts = [len(ended), len(group) - len(ended), f"{group.n_timesteps.iloc[0]:,}"]
        hours = sum(record.wall_time for record in ended.record) / 3600
        rows.append([*_names(group), *counts, _seeds(ended.seed.tolist()), f"{hours:.2g}"])
    yield _table("environment | variant | algorithm | done | failed | steps | seeds | hours", rows)
    if len(failed):
        yield "Failed:"
        yield "\n".join(f"- {record.spec}: {_code(record.reason)}" for record in failed.record)
    if len(without):
        yield "Done, but without a final return, because no episode ended or a return is not finite:"
        yield "\n".join(f"- {record.spec}" for record in without.record)
    if unreadable:
        yield "Left out:"
        yield "\n".join(f"- `{path.name}`: {reason}" for path, reason in unreadable)


def _returns(results: Results) -> Iterator[str]:
    yield "## Returns"
    rows = []
    for summary in results.summaries.itertuples():
        returns = summary.runs.final_return
        _, evaluated = evaluations(summary.runs)
        mean = [len(returns), _mean_and_error(returns), _estimate(summary.mean)[1]]
        cvar = [*_estimate(summary.cvar), _count(summary.n_behind_cvar, "run")]
        last = _mean_and_error(evaluated[:, -1]) if evaluated.size else DASH
        rows.append([*_names(summary.runs), *mean, *cvar, _number(returns.min()), _number(returns.max()), last])
    yield _table(
        f"environment | variant | algorithm | runs | final return | interval | {results.cvar_name} | interval | "
        "rests on | lowest | highest | last evaluation",
        rows,
    )
    counts = results.summaries.runs.map(len)
    alone = sorted(set(counts[results.summaries.n_behind_cvar == 1]) - {1})
    if alone:
        yield (
            f"**The {results.cvar_name} of {' or '.join(map(str, alone))} runs is the worst run alone.** It takes "
            f"more than {1 / results.kappa:g} runs for it to rest on two."
        )
    if (counts == 1).any():
        yield "One run alone has neither a standard error nor an interval, and its CVaR is its return."


def _successes(results: Results) -> Iterator[str]:
    rows = []
    for summary in results.summaries.itertuples():
        shares = summary.runs.final_success.dropna()
        if len(shares):
            _, evaluated = evaluations(summary.runs, "is_success")
            last = _share(evaluated[:, -1]) if evaluated.size else DASH
            interval = " to ".join(f"{bound:.1%}" for bound in statistics.bootstrap_mean(shares)[1:])
            rows.append(
                [*_names(summary.runs), len(shares), _share(shares), interval if len(shares) > 1 else DASH, last]
            )
    if rows:
        yield "## Success rates"
        yield (
            f"Share of episodes that report success (`is_success`), of those that ended in the last {FINAL_SHARE:.0%} "
            "of the steps, and of the last deterministic evaluation; mean and standard error over runs."
        )
        yield _table("environment | variant | algorithm | runs | success | interval | last evaluation", rows)


def _differences(results: Results) -> Iterator[str]:
    if not len(results.comparisons):
        return
    yield "## Differences"
    rows = []
    unlike = set()
    for comparison in results.comparisons.itertuples():
        names = [*_names(comparison.first)[:2], comparison.name, f"{len(comparison.first)}, {len(comparison.second)}"]
        t, p = comparison.welch
        welch = [_number(t, 2), "< 0.001" if p < 0.001 else _number(p, 3)]
        others = [*_estimate(comparison.cvar), *_estimate(comparison.improvement, 2)]
        rows.append([*names, *_estimate(comparison.mean), *welch, *others])
        where = ", ".join(filter(None, [comparison.environment, comparison.variant]))
        if different := _different_hyperparameters(comparison.first, comparison.second):
            unlike.add(f"- {comparison.name} on {where}: {'; '.join(different)}")
    yield _table(
        "environment | variant | difference | runs | of means | interval | Welch t | p | "
        f"of {results.cvar_name} | interval | probability of improvement | interval",
        rows,
    )
    # a difference is one of hyperparameters, too, where those that algorithms share are not the same
    if unlike:
        yield "**Not only the algorithms differ**, but also settings that both have:"
        yield "\n".join(sorted(unlike))


def _different_hyperparameters(first: pd.DataFrame, second: pd.DataFrame) -> list[str]:
    """Those that both have with different values, as ``name value and value``."""
    specs = [runs.record.iloc[0].spec for runs in (first, second)]
    ours, theirs = map(_what_decides, specs)
    return [f"{name} {ours[name]} and {theirs[name]}" for name in _differing(specs) if name in ours and name in theirs]


def _proposed_steps(results: Results) -> Iterator[str]:
    yield "## Proposed steps"
    measured = results.summaries[results.summaries.kl_ratios.map(len) > 0]
    if len(measured):
        yield (
            "KL ratio: actual KL divergence of a proposed step, before the line search, over the estimated one; over "
            "all updates of all runs."
        )
        rows = []
        for summary in measured.itertuples():
            ratios, proposed = summary.kl_ratios, update_values(summary.runs, "kl_proposed")
            shares = [f"{statistics.share_at_least(ratios, threshold):.1%}" for threshold in (2.0, 3.0)]
            mean_kl = _number(proposed.mean() if len(proposed) else math.nan, 4)
            median = _number(float(np.median(ratios)), 2)
            rows.append([*_names(summary.runs), f"{len(ratios):,}", median, *shares, mean_kl])
        yield _table(
            "environment | variant | algorithm | updates | median ratio | at least 2 | at least 3 | mean proposed KL",
            rows,
        )
    silent = sorted(set(results.labels) - set(measured.algorithm))
    if silent:
        yield f"No KL ratio in the records of {', '.join(silent)}."


def _aggregates(results: Results) -> Iterator[str]:
    yield "## Aggregates (rliable)"
    yield _table(
        "environment | variant | algorithm | runs | IQM of final return | interval",
        [
            [*_names(summary.runs), len(summary.runs), *_estimate(summary.interquartile_mean)]
            for summary in results.summaries.itertuples()
        ],
    )
    if not results.scores:
        if results.compared.environment.nunique() > 1:
            yield "Nothing is averaged over environments: no algorithm has equally many runs in each."
        return
    yield (
        "Over all environments, with final returns scaled from 0, the lowest of all runs in an environment, to 1, the "
        "highest; for algorithms with equally many runs in every environment:"
    )
    means, improvements = [], []
    for variant, by_label in results.scores.items():
        for label, scores in by_label.items():
            mean = statistics.interquartile_mean(scores)
            means.append([variant or DASH, label, " × ".join(map(str, scores.shape)), *_estimate(mean, 3)])
        for x, y in results.pairs:
            if x in by_label and y in by_label:
                improvement = statistics.probability_of_improvement(by_label[x], by_label[y])
                improvements.append([variant or DASH, f"{x} > {y}", *_estimate(improvement, 2)])
    yield _table("variant | algorithm | runs × environments | IQM of score | interval", means)
    if improvements:
        yield _table("variant | pair | probability of improvement, all environments | interval", improvements)


def _hyperparameters(results: Results) -> Iterator[str]:
    yield "## Settings"
    lines = []
    for (env_id, variant, label), runs in results.runs.groupby(GROUP, sort=False):
        values = sorted(runs.record.iloc[0].spec.hyperparameters.items())
        named = ", ".join(filter(None, [label, env_id, variant]))
        lines.append(f"- {named}: " + ", ".join(f"`{name}: {value}`" for name, value in values))
    yield "\n".join(lines)
    versions = pd.DataFrame([record.versions for record in results.compared.record])
    if len(versions.columns):
        found = (f"{name} {' and '.join(sorted(versions[name].dropna().unique()))}" for name in sorted(versions))
        yield f"Versions: {', '.join(found)}."


def _pictures(pictures: set[str], *names: str) -> Iterator[str]:
    for name in names:
        if name in pictures:
            yield f"![{name.replace('_', ' ')}]({name}.png)"
            yield f"*{CAPTIONS[name]}* ([SVG]({name}.svg))"


# --------------------------------------------------------------------------------------------------------------- cells


def _table(header: str, rows: Sequence[Sequence[Any]]) -> str:
    # pandas would need one more package for this
    names = header.split(" | ")
    lines = [names, ["---"] * len(names), *rows]
    return "\n".join("| " + " | ".join(str(cell).replace("|", "\\|") for cell in line) + " |" for line in lines)


def _names(runs: pd.DataFrame) -> list[str]:
    return [name or DASH for name in runs[GROUP].iloc[0]]


def _number(value: float, digits: int | None = None) -> str:
    """Without digits of their own, numbers are rounded to four significant ones, and whole from 1,000 up."""
    if math.isnan(value):
        return DASH
    if digits is None and 0 < abs(value) < 1e-3:
        return f"{value:.4g}"
    if digits is None:
        digits = 0 if value == 0 else max(0, 3 - math.floor(math.log10(abs(value))))
    return f"{value:,.{digits}f}"


def _estimate(estimate: Estimate, digits: int | None = None) -> list[str]:
    value, low, high = (float(np.squeeze(x)) for x in estimate)
    interval = DASH if math.isnan(low) else f"{_number(low, digits)} to {_number(high, digits)}"
    return [_number(value, digits), interval]


def _mean_and_error(values: Any) -> str:
    error = f" ± {_number(float(statistics.standard_error(values)))}" if len(values) > 1 else ""
    return _number(float(values.mean())) + error


def _share(values: Any) -> str:
    error = f" ± {float(statistics.standard_error(values)):.1%}" if len(values) > 1 else ""
    return f"{float(values.mean()):.1%}{error}"


def _count(n: int, noun: str) -> str:
    return f"{n} {noun}" + ("" if n == 1 else "s")


def _seeds(seeds: list[int]) -> str:
    if len(seeds) > 2 and seeds == list(range(seeds[0], seeds[-1] + 1)):
        return f"{seeds[0]} to {seeds[-1]}"
    return ", ".join(map(str, seeds)) or DASH


def _code(text: str) -> str:
    return "`" + text.replace("`", "'")[:200] + "`"
