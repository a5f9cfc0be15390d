"""The report of a study: a table of its runs, comparisons between them, and a Markdown page."""

import json
import math
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
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
from sb3_uatrpo.study.zoo_folder import read_zoo_folder

# These do not affect training: runs that differ in nothing else are averaged, unless a seed would count twice
EVALUATION = {"eval_freq", "n_eval_episodes"}
# Points of a learning curve
N_POINTS = 100
# Characters of a label that fit into a legend
LONGEST_LABEL = 60
GROUP = ["environment", "variant", "algorithm"]
PERCENT = "{:.1%}".format

Pair = tuple[str, str]
Panel = tuple[str, str]
Group = tuple[str, str, str]

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
    Write ``report.md`` and its pictures, as PNG and SVG.

    :param folder: a study's folder, or RL Zoo's log folder
    :param output: where to write; created if missing
    :param algorithms: two labels to compare, the first minus the second. By default, each ``uatrpo`` is compared with
        every other label; without a ``uatrpo``, all pairs are compared.
    :param kappa: share of worst runs in tables and over training, in (0, 1]
    :param separate_settings: whether runs of one algorithm with different hyperparameters get labels of their own
        instead of being refused
    :return: the report's path
    :raises StudyError: if ``folder`` is not such a folder, has no finished run, or has runs that must not be averaged;
        or if ``algorithms`` or ``kappa`` is invalid
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
    :param folder: a study's folder, or RL Zoo's log folder
    :return: records, and (path, reason) of each file that cannot be read
    :raises StudyError: if ``folder`` is neither
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise StudyError(f"{folder}: no such folder")
    if (folder / MARKER).exists():
        return StudyFolder(folder).read_all()
    records, unreadable = read_zoo_folder(folder)
    if not records and not unreadable:
        raise StudyError(
            f"{folder}: neither a study (no study.json) nor a folder that RL Zoo wrote (no ALGO/ENV_1/ENV/args.yml)"
        )
    return records, unreadable


# --------------------------------------------------------------------------------------------------- the table of runs


def tabulate_runs(records: Sequence[Record], separate_settings: bool = False) -> pd.DataFrame:
    """
    A table with one row per run, in the order of a report. Runs that differ only in the seed, and so may be averaged,
    have the same ``environment``, ``variant`` and ``algorithm``.

    :param records: of any algorithms, environments, variants and hyperparameters
    :param separate_settings: whether runs of one algorithm with different hyperparameters get labels of their own,
        which name the differences
    :return: columns ``environment``; ``variant``, the varied values; ``algorithm``, with the name of its variant and
        any other differences; ``seed``; ``status``; ``n_timesteps``; ``final_return`` and ``final_success``, a share of
        episodes, NaN where unknown; and ``record``
    :raises StudyError: if hyperparameters differ within an algorithm, or numbers of steps within an environment, and
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
    """The final return or success rate of a finished run; NaN if there is none or it is not finite."""
    episodes = record.episodes
    if record.status != "done" or name not in episodes:
        return math.nan
    # an episode that does not report its success is None, a return that is not finite NaN
    known = [(t, value) for t, value in zip(episodes["timesteps"], episodes[name], strict=True) if value is not None]
    timesteps, values = zip(*known, strict=True) if known else ((), ())
    final = statistics.final_return(timesteps, values, record.spec.n_timesteps)
    return final if math.isfinite(final) else math.nan


def _refuse_different_steps(runs: pd.DataFrame) -> None:
    for env_id, steps in runs.groupby("environment").n_timesteps:
        if steps.nunique() > 1:
            listed = ", ".join(f"{n:,}" for n in sorted(steps.unique()))
            raise StudyError(
                f"records of different settings: runs on {env_id} have {listed} steps; "
                "--separate-settings compares them nevertheless"
            )


def _labels(runs: pd.DataFrame, separate_settings: bool) -> pd.Series:
    labels = runs.algorithm.copy()
    deciding = runs.record.map(lambda record: json.dumps(_what_decides(record.spec), sort_keys=True))
    for (env_id, variant, algo), alike in runs.groupby(GROUP):
        kinds = [kind for _, kind in alike.groupby(deciding)]
        specs = [kind.record.iloc[0].spec for kind in kinds]
        differing = _differing(specs)
        if not differing or (not separate_settings and EVALUATION.issuperset(differing) and alike.seed.is_unique):
            continue
        names = [_named(spec, differing) for spec in specs]
        if not separate_settings:
            counts = (f"{name} ({_count(len(kind), 'run')})" for name, kind in zip(names, kinds, strict=True))
            raise StudyError(
                f"records of different settings: {algo} on {_joined([env_id, variant])} has {' and '.join(counts)}; "
                "--separate-settings tells them apart"
            )
        for name, kind in zip(names, kinds, strict=True):
            labels[kind.index] = f"{algo} ({name})"
    # labels too long for a legend are numbered alike in all environments; the report lists their hyperparameters
    numbers: Counter[str] = Counter()
    for label in sorted(labels[labels.str.len() > LONGEST_LABEL].unique()):
        algo = label.partition(" ")[0]
        numbers[algo] += 1
        labels[labels == label] = f"{algo} (settings {numbers[algo]})"
    return labels


def _what_decides(spec: RunSpec) -> dict[str, Any]:
    """All that must not differ between runs that are averaged."""
    others = {name: getattr(spec, name) for name in ("n_timesteps", *sorted(EVALUATION))}
    return {**spec.hyperparameters, **others}


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
    :return: each once, sorted, those of ``uatrpo`` first
    """
    return sorted(set(labels), key=lambda label: (not _is_uatrpo(label), label))


def _is_uatrpo(label: str) -> bool:
    """Whether the label is ``uatrpo`` or begins with it, such as ``uatrpo_shrinkage``."""
    return label.startswith("uatrpo")


def pairs_of(labels: Sequence[str], algorithms: Pair | None) -> tuple[Pair, ...]:
    """
    :param labels: of all groups, in their order
    :param algorithms: the two to compare, or ``None`` for the default pairs
    :return: the pairs to compare: ``algorithms``, or each ``uatrpo`` with every other label, or all pairs
    :raises StudyError: if a given label does not exist, or both are the same
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
    :return: steps (``N_POINTS``), and at each the mean training return over the preceding ``FINAL_SHARE`` of all steps,
        so that the last point is the final return; NaN before the first episode has ended (``n_runs x N_POINTS``)
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
    :return: steps at which all runs were evaluated (``n_evaluations``), and the mean over the episodes of each
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
    :return: the finite values that all updates of all runs logged (1-D)
    """
    values = np.array([v for record in runs.record for v in record.updates.get(key, [])], dtype=np.float64)
    return values[np.isfinite(values)]


@dataclass(frozen=True)
class Results:
    """
    What the tables and the pictures show.

    :param runs: what ``tabulate_runs`` returned
    :param pairs: labels to compare, the first minus the second
    :param kappa: share of worst runs
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
        panels: dict[Panel, dict[str, pd.DataFrame]] = {}
        for (env_id, variant, label), runs in self.groups.items():
            panels.setdefault((env_id, variant), {})[label] = runs
        return panels

    @cached_property
    def groups(self) -> dict[Group, pd.DataFrame]:
        """:return: for each environment, variant and algorithm, its runs"""
        return dict(list(self.compared.groupby(GROUP, sort=False)))

    @cached_property
    def interquartile_means(self) -> dict[Group, Estimate]:
        return {names: statistics.interquartile_mean(runs.final_return) for names, runs in self.groups.items()}

    @cached_property
    def comparisons(self) -> pd.DataFrame:
        """:return: a row for each environment, variant and pair of algorithms that both have runs there"""
        rows: list[dict[str, Any]] = []
        for panel, algorithms in self.panels.items():
            for first, second in self.pairs:
                if first in algorithms and second in algorithms:
                    x, y = algorithms[first].final_return, algorithms[second].final_return
                    row: dict[str, Any] = {"panel": panel, "name": f"{first} − {second}"}
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
        :return: for each variant with several environments, and each label with equally many runs in all of them: final
            returns scaled from 0, the lowest in the environment, to 1, the highest (``n_runs x n_envs``)
        """
        by_env = self.compared.groupby("environment").final_return
        lowest, highest = by_env.transform("min"), by_env.transform("max")
        score = (self.compared.final_return - lowest) / (highest - lowest).replace(0.0, 1.0)
        scores: dict[str, dict[str, Array]] = {}
        for variant, runs in self.compared.assign(score=score).groupby("variant"):
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
    for names, group in runs.groupby(GROUP, sort=False):
        ended = group[group.status == "done"]
        hours = sum(record.wall_time for record in ended.record) / 3600
        counts = [len(ended), len(group) - len(ended), f"{group.n_timesteps.iloc[0]:,}"]
        rows.append([*names, *counts, _seeds(ended.seed.tolist()), f"{hours:.2g}"])
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
    # numbers of runs of which the CVaR has just one
    alone = set()
    for names, runs in results.groups.items():
        returns = runs.final_return
        mean, cvar = statistics.bootstrap_mean(returns), statistics.bootstrap_cvar(returns, results.kappa)
        n_behind_cvar = statistics.runs_behind_cvar(len(runs), results.kappa)
        if n_behind_cvar == 1:
            alone.add(len(runs))
        row = [*names, len(runs), _mean_and_error(returns), _estimate(mean)[1], *_estimate(cvar)]
        row += [_count(n_behind_cvar, "run"), _number(returns.min()), _number(returns.max())]
        rows.append([*row, _mean_and_error(_last_evaluation(runs))])
    yield _table(
        f"environment | variant | algorithm | runs | final return | interval | {results.cvar_name} | interval | "
        "rests on | lowest | highest | last evaluation",
        rows,
    )
    if several := sorted(alone - {1}):
        yield (
            f"**The {results.cvar_name} of {' or '.join(map(str, several))} runs is the worst run alone.** It takes "
            f"more than {1 / results.kappa:g} runs for it to rest on two."
        )
    if 1 in alone:
        yield "One run alone has neither a standard error nor an interval, and its CVaR is its return."


def _successes(results: Results) -> Iterator[str]:
    rows = []
    for names, runs in results.groups.items():
        shares = runs.final_success.dropna()
        if len(shares):
            _, interval = _estimate(statistics.bootstrap_mean(shares), PERCENT)
            last = _mean_and_error(_last_evaluation(runs, "is_success"), PERCENT)
            rows.append([*names, len(shares), _mean_and_error(shares, PERCENT), interval, last])
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
        n_runs = f"{len(comparison.first)}, {len(comparison.second)}"
        t, p = comparison.welch
        welch = [_number(t, 2), "< 0.001" if p < 0.001 else _number(p, 3)]
        others = [*_estimate(comparison.cvar), *_estimate(comparison.improvement, "{:.2f}".format)]
        rows.append([*comparison.panel, comparison.name, n_runs, *_estimate(comparison.mean), *welch, *others])
        if different := _different_hyperparameters(comparison.first, comparison.second):
            unlike.add(f"- {comparison.name} on {_joined(comparison.panel)}: {'; '.join(different)}")
    yield _table(
        "environment | variant | difference | runs | of means | interval | Welch t | p | "
        f"of {results.cvar_name} | interval | probability of improvement | interval",
        rows,
    )
    # a difference may come from unequal hyperparameters, too
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
    rows = []
    silent = set(results.labels)
    for names, runs in results.groups.items():
        ratios, proposed = (update_values(runs, key) for key in ("kl_ratio", "kl_proposed"))
        if len(ratios):
            silent.discard(names[-1])
            shares = [PERCENT(statistics.share_at_least(ratios, threshold)) for threshold in (2.0, 3.0)]
            mean_kl = _number(proposed.mean(), 4) if len(proposed) else ""
            rows.append([*names, f"{len(ratios):,}", _number(float(np.median(ratios)), 2), *shares, mean_kl])
    if rows:
        yield (
            "KL ratio: actual KL divergence of a proposed step, before the line search, over the estimated one; over "
            "all updates of all runs."
        )
        yield _table(
            "environment | variant | algorithm | updates | median ratio | at least 2 | at least 3 | mean proposed KL",
            rows,
        )
    if silent:
        yield f"No KL ratio in the records of {', '.join(sorted(silent))}."


def _aggregates(results: Results) -> Iterator[str]:
    yield "## Aggregates (rliable)"
    means = results.interquartile_means.items()
    rows = [[*names, len(results.groups[names]), *_estimate(mean)] for names, mean in means]
    yield _table("environment | variant | algorithm | runs | IQM of final return | interval", rows)
    if not results.scores:
        if results.compared.environment.nunique() > 1:
            yield "Nothing is averaged over environments: no algorithm has equally many runs in each."
        return
    yield (
        "Over all environments, with final returns scaled from 0, the lowest of all runs in an environment, to 1, the "
        "highest; for algorithms with equally many runs in every environment:"
    )
    averaged, improvements = [], []
    for variant, by_label in results.scores.items():
        for label, scores in by_label.items():
            mean = _estimate(statistics.interquartile_mean(scores), "{:.3f}".format)
            averaged.append([variant, label, " × ".join(map(str, scores.shape)), *mean])
        for x, y in results.pairs:
            if x in by_label and y in by_label:
                improvement = statistics.probability_of_improvement(by_label[x], by_label[y])
                improvements.append([variant, f"{x} > {y}", *_estimate(improvement, "{:.2f}".format)])
    yield _table("variant | algorithm | runs × environments | IQM of score | interval", averaged)
    if improvements:
        yield _table("variant | pair | probability of improvement, all environments | interval", improvements)


def _hyperparameters(results: Results) -> Iterator[str]:
    yield "## Settings"
    lines = []
    for (env_id, variant, label), runs in results.runs.groupby(GROUP, sort=False):
        values = sorted(runs.record.iloc[0].spec.hyperparameters.items())
        lines.append(f"- {_joined([label, env_id, variant])}: " + ", ".join(f"`{k}: {value}`" for k, value in values))
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
    cells = [[str(cell).replace("|", "\\|") or "–" for cell in row] for row in rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in [names, ["---"] * len(names), *cells])


def _number(value: float, digits: int | None = None) -> str:
    """Rounded to four significant digits, and to an integer from 1,000 up, unless ``digits`` says otherwise."""
    if math.isnan(value):
        return ""
    if digits is None and 0 < abs(value) < 1e-3:
        return f"{value:.4g}"
    if digits is None:
        digits = 0 if value == 0 else max(0, 3 - math.floor(math.log10(abs(value))))
    return f"{value:,.{digits}f}"


def _estimate(estimate: Estimate, form: Callable[[float], str] = _number) -> tuple[str, str]:
    value, low, high = (float(np.squeeze(x)) for x in estimate)
    return form(value), "" if math.isnan(low) else f"{form(low)} to {form(high)}"


def _mean_and_error(values: Any, form: Callable[[float], str] = _number) -> str:
    if not len(values):
        return ""
    error = f" ± {form(float(statistics.standard_error(values)))}" if len(values) > 1 else ""
    return form(float(values.mean())) + error


def _last_evaluation(runs: pd.DataFrame, name: str = "returns") -> Array:
    _, means = evaluations(runs, name)
    return means[:, -1:].ravel()


def _count(n: int, noun: str) -> str:
    return f"{n} {noun}" + ("" if n == 1 else "s")


def _seeds(seeds: list[int]) -> str:
    if len(seeds) > 2 and seeds == list(range(seeds[0], seeds[-1] + 1)):
        return f"{seeds[0]} to {seeds[-1]}"
    return ", ".join(map(str, seeds))


def _joined(names: Iterable[str]) -> str:
    return ", ".join(filter(None, names))


def _code(text: str) -> str:
    return "`" + text.replace("`", "'")[:200] + "`"
