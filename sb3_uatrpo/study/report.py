"""The report of a study: a Markdown page with tables and pictures."""

import math
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from sb3_uatrpo.study import statistics
from sb3_uatrpo.study.folders import read_folder
from sb3_uatrpo.study.record import LeftOut, StudyError
from sb3_uatrpo.study.results import GROUP, Pair, Results, counted, joined, pairs_of, tabulate_runs, update_values
from sb3_uatrpo.study.statistics import CONFIDENCE_LEVEL, FINAL_SHARE, N_RESAMPLES, N_RESAMPLES_OVER_TRAINING, Estimate

PERCENT = "{:.1%}".format
GROUPS = " | ".join(GROUP)
# With fewer runs than this in a group, the report warns about its intervals
FEW = 5

DEFINITIONS = f"""\
- *Final return* of a run: mean undiscounted training return of the episodes that ended in the last {FINAL_SHARE:.0%} of
  its steps; if none did, of those that ended last.
- *κ-CVaR*: mean of the worst share κ of the runs. The run at the boundary of that share counts in part; κ = 1 gives the
  mean.
- *Intervals*: {CONFIDENCE_LEVEL:.0%} percentile bootstrap over runs, from {N_RESAMPLES:,} resamples,
  {N_RESAMPLES_OVER_TRAINING:,} over training. With few runs the intervals are too narrow, above all those of a CVaR.
  ± is the standard error of the mean.
- *Welch*: two-sided t-test of equal means with unequal variances. p is not corrected for the number of comparisons.
- *IQM*: mean without the lowest and the highest quarter of the runs; with fewer than four runs, the mean.
- *Probability of improvement*: how often a run of the first algorithm ends above a run of the second; a tie
  counts as half. Its interval is left out if all resamples agree."""

SMOOTHED = f"trailing mean over {FINAL_SHARE:.0%} of the steps"
CAPTIONS = {
    "learning_curves": f"Training return, {SMOOTHED}: mean and standard error over runs; thin lines are single runs",
    "evaluations": "Deterministic evaluations: mean and standard error over runs; thin lines are single runs",
    "cvar": "κ-CVaR of the final return, with bootstrap bands; it is the mean at κ = 1, and the worst run for κ ≤ 1/n",
    "cvar_over_training": f"CVaR over runs of the training return ({SMOOTHED}), with bootstrap bands",
    "differences": "Difference of final returns, with bootstrap intervals",
    "kl_ratio": "KL ratio of proposed steps, with the shares of ratios of at least 2 and of at least 3",
    "kl_ratio_over_training": "Median and quartiles of the KL ratio over the updates in each fiftieth of the training",
    "interquartile_means": "IQM of the final return, with bootstrap intervals",
    "performance_profiles": "Performance profiles: the share of runs that end above τ, with bootstrap bands",
    "probability_of_improvement": "Probability of improvement, with bootstrap intervals",
}


def report(
    folders: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    output: str | os.PathLike[str],
    algorithms: Pair | None = None,
    kappa: float = 0.2,
    variants: Sequence[str] = (),
) -> Path:
    """
    Write ``report.md`` and its pictures, as PNG and SVG.

    :param folders: a study's folder, or RL Zoo's log folder, or several of them
    :param output: where to write; created if missing
    :param algorithms: two labels to compare, the first minus the second. By default, each ``uatrpo`` is compared with
        every other label; without a ``uatrpo``, all pairs are compared.
    :param kappa: share of worst runs in tables and over training, in (0, 1]
    :param variants: the variants to show, by their names in the report's tables, ``"plain"`` for runs without varied
        values; all by default
    :return: the report's path
    :raises StudyError: if one of ``folders`` is not such a folder, if they have no finished run, or runs that must not
        be averaged; or if ``algorithms``, ``kappa`` or ``variants`` is invalid
    """
    if not 0 < kappa <= 1:
        raise StudyError(f"kappa must be in (0, 1], but it is {kappa}")
    paths = [Path(folder) for folder in ([folders] if isinstance(folders, str | os.PathLike) else folders)]
    names = joined(path.resolve().name for path in paths)
    records, unreadable = read_folder(*paths)
    if not records:
        reasons = f" ({len(unreadable)} unreadable, the first: {unreadable[0][1]})" if unreadable else ""
        raise StudyError(f"{names}: no records{reasons}")
    runs = tabulate_runs(records, variants)
    compared = runs[runs.final_return.notna()]
    if compared.empty:
        raise StudyError(f"{names}: no run is done with a training return, out of {counted(len(runs), 'run')}")
    results = Results(runs, pairs_of(compared.algorithm, algorithms), kappa)

    # matplotlib takes a second to import, so errors in the input are reported first
    from sb3_uatrpo.study.plots import draw_pictures

    output = Path(output)
    output.mkdir(parents=True, exist_ok=True)
    pictures = draw_pictures(results, output)
    path = output / "report.md"
    path.write_text("\n\n".join(_page(results, pictures, names, unreadable)) + "\n", encoding="utf-8")
    return path


def _page(results: Results, pictures: set[str], name: str, unreadable: LeftOut) -> Iterator[str]:
    """The blocks of the report in Markdown; ``pictures`` are the names of those beside it."""
    yield f"# Report on {name}"
    yield from _runs(results.runs, unreadable)
    yield "## What the numbers are"
    yield DEFINITIONS
    yield from _returns(results)
    yield from _pictures(pictures, "learning_curves", "evaluations", "cvar", "cvar_over_training")
    yield from _successes(results)
    yield from _differences(results)
    yield from _pictures(pictures, "differences")
    yield from _proposed_steps(results)
    yield from _pictures(pictures, "kl_ratio", "kl_ratio_over_training")
    yield from _aggregates(results)
    yield from _pictures(pictures, "interquartile_means", "performance_profiles", "probability_of_improvement")
    yield from _hyperparameters(results)


def _runs(runs: pd.DataFrame, unreadable: LeftOut) -> Iterator[str]:
    done, failed = runs[runs.status == "done"], runs[runs.status != "done"]
    without = done[done.final_return.isna()]
    yield (
        f"{counted(len(done), 'run')} done, {len(failed)} failed, {len(unreadable)} left out because their files "
        "are corrupted or repeat another run."
    )
    yield "## Runs"
    rows = []
    for names, group in runs.groupby(GROUP, sort=False):
        ended = group[group.status == "done"]
        # a run that failed may have had other settings
        steps = (group if ended.empty else ended).n_timesteps.iloc[0]
        row = [*names, len(ended), len(group) - len(ended), f"{steps:,}", _seeds(list(ended.seed))]
        rows.append([*row, f"{sum(record.wall_time for record in ended.record) / 3600:.2g}"])
    yield _table(f"{GROUPS} | done | failed | steps | seeds | hours", rows)
    if len(failed):
        yield "Failed:"
        reasons = (record.reason.replace("`", "'")[:200] for record in failed.record)
        yield "\n".join(f"- {record.spec}: `{why}`" for record, why in zip(failed.record, reasons, strict=True))
    if len(without):
        yield "Done, but without a final return, because no episode ended or a return is not finite:"
        yield "\n".join(f"- {record.spec}" for record in without.record)
    if unreadable:
        yield "Left out:"
        yield "\n".join(f"- `{path.name}`: {reason}" for path, reason in unreadable)


def _returns(results: Results) -> Iterator[str]:
    yield "## Returns"
    rows = []
    for names, runs in results.groups.items():
        returns = runs.final_return
        cvar = _estimate(statistics.bootstrap_cvar(returns, results.kappa))
        behind_cvar = counted(statistics.runs_behind_cvar(len(runs), results.kappa), "run")
        row = [*names, len(runs), *_mean(returns), *cvar, behind_cvar, _number(returns.min()), _number(returns.max())]
        rows.append([*row, _last_evaluation(runs)])
    yield _table(
        f"{GROUPS} | runs | final return | interval | {results.cvar_name} | interval | rests on | lowest | highest | "
        "last evaluation",
        rows,
    )
    sizes = set(map(len, results.groups.values()))
    alone = {n_runs for n_runs in sizes if statistics.runs_behind_cvar(n_runs, results.kappa) == 1}
    if several := sorted(alone - {1}):
        yield (
            f"**The {results.cvar_name} of {' or '.join(map(str, several))} runs is the worst run alone.** Only with "
            f"more than {1 / results.kappa:g} runs does it rest on at least two."
        )
    if 1 in alone:
        yield "A single run has neither a standard error nor an interval, and its CVaR is its return."


def _successes(results: Results) -> Iterator[str]:
    rows = []
    for names, runs in results.groups.items():
        shares = runs.final_success.dropna()
        if len(shares):
            last = _last_evaluation(runs, "is_success", PERCENT)
            rows.append([*names, len(shares), *_mean(shares, PERCENT), last])
    if rows:
        yield "## Success rates"
        yield (
            "Share of successes among the episodes that report `is_success`: those that ended in the last "
            f"{FINAL_SHARE:.0%} of the steps, and those of the last deterministic evaluation. Mean and standard error "
            "over runs."
        )
        yield _table(f"{GROUPS} | runs | success | interval | last evaluation", rows)


def _differences(results: Results) -> Iterator[str]:
    if not len(results.comparisons):
        return
    yield "## Differences"
    rows = []
    unlike: dict[str, list[str]] = {}
    for of in results.comparisons.itertuples():
        row = [*of.panel, of.name, ", ".join(map(str, of.n_runs)), *_estimate(of.mean), _number(of.welch.statistic, 2)]
        row.append("< 0.001" if of.welch.pvalue < 0.001 else _number(of.welch.pvalue, 3))
        rows.append([*row, *_estimate(of.cvar), *_probability(of.improvement)])
        if of.unlike:
            unlike.setdefault(f"{of.name}: {of.unlike}", []).append(joined(of.panel))
    yield _table(
        "environment | variant | difference | runs | of means | interval | Welch t | p | "
        f"of {results.cvar_name} | interval | probability of improvement | interval",
        rows,
    )
    fewest = min(map(min, results.comparisons.n_runs))
    if fewest < FEW:
        yield (
            f"**Do not rely on these intervals: some groups have only {counted(fewest, 'run')}.** Resampling fewer "
            f"than {FEW} runs shows only part of their spread; Welch's test is more cautious."
        )
    # a difference may also come from unequal hyperparameters
    if unlike:
        yield "**The algorithms are not the only difference**: some settings that both have differ too:"
        yield "\n".join(f"- {settings} ({'; '.join(panels)})" for settings, panels in unlike.items())


def _proposed_steps(results: Results) -> Iterator[str]:
    yield "## Proposed steps"
    rows = []
    for names, runs in results.groups.items():
        ratios, proposed = (update_values(runs, key) for key in ("kl_ratio", "kl_proposed"))
        if len(ratios):
            large = [PERCENT(statistics.share_at_least(ratios, threshold)) for threshold in (2.0, 3.0)]
            mean_kl = _number(proposed.mean(), 4) if len(proposed) else ""
            rows.append([*names, f"{len(ratios):,}", _number(float(np.median(ratios)), 2), *large, mean_kl])
    silent = set(results.labels).difference(label for _, _, label, *_ in rows)
    if rows:
        yield (
            "KL ratio: actual KL divergence of a proposed step (before the line search) divided by the estimated one, "
            "for all updates of all runs."
        )
        yield _table(f"{GROUPS} | updates | median ratio | at least 2 | at least 3 | mean proposed KL", rows)
    if silent:
        yield f"No KL ratio in the records of {', '.join(sorted(silent))}."


def _aggregates(results: Results) -> Iterator[str]:
    yield "## Aggregates"
    rows = [
        [*names, len(runs), *_estimate(results.interquartile_means[names[:2]][names[2]])]
        for names, runs in results.groups.items()
    ]
    yield _table(f"{GROUPS} | runs | IQM of final return | interval", rows)
    if not results.scores:
        if results.compared.environment.nunique() > 1:
            yield "Nothing is averaged over environments: no algorithm has the same number of runs in each."
        return
    yield (
        "Over all environments, with final returns scaled from 0, the lowest of all runs shown in an environment, of "
        "every variant, to 1, the highest; for algorithms with the same number of runs in every environment:"
    )
    averaged, improvements = [], []
    for variant, by_label in results.scores.items():
        for label, scores in by_label.items():
            mean = _estimate(statistics.interquartile_mean(scores), "{:.3f}".format)
            averaged.append([variant, label, " × ".join(map(str, scores.shape)), *mean])
        for x, y in results.pairs:
            if by_label.keys() >= {x, y}:
                improvement = statistics.probability_of_improvement(by_label[x], by_label[y])
                improvements.append([variant, f"{x} > {y}", *_probability(improvement)])
    yield _table("variant | algorithm | runs × environments | IQM of score | interval", averaged)
    if improvements:
        yield _table("variant | pair | probability of improvement, all environments | interval", improvements)


def _hyperparameters(results: Results) -> Iterator[str]:
    yield "## Settings"
    lines = []
    for (env_id, variant, label), runs in results.runs.groupby(GROUP, sort=False):
        # finished runs first
        shown = runs.sort_values("status", key=lambda status: status != "done", kind="stable").record.iloc[0]
        values = sorted(shown.spec.hyperparameters.items())
        lines.append(f"- {joined([label, env_id, variant])}: " + ", ".join(f"`{k}: {value}`" for k, value in values))
    yield "\n".join(lines)
    versions = pd.DataFrame([record.versions for record in results.compared.record])
    if found := [f"{name} {' and '.join(sorted(versions[name].dropna().unique()))}" for name in sorted(versions)]:
        yield f"Versions: {', '.join(found)}."


def _pictures(pictures: set[str], *names: str) -> Iterator[str]:
    for name in names:
        if name in pictures:
            yield f"![{name.replace('_', ' ')}]({name}.png)"
            yield f"*{CAPTIONS[name]}* ([SVG]({name}.svg))"


def _table(header: str, rows: Sequence[Sequence[Any]]) -> str:
    # pandas would need one more package for this
    names = header.split(" | ")
    cells = [[str(cell).replace("|", "\\|") or "–" for cell in row] for row in rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in [names, ["---"] * len(names), *cells])


def _number(value: float, digits: int | None = None) -> str:
    """Rounded to four significant digits, and to an integer from 1,000 up, unless ``digits`` says otherwise."""
    if not math.isfinite(value):
        return "" if math.isnan(value) else str(value)
    if digits is None and 0 < abs(value) < 1e-3:
        return f"{value:.4g}"
    if digits is None:
        digits = 0 if value == 0 else max(0, 3 - math.floor(math.log10(abs(value))))
    return f"{value:,.{digits}f}"


def _estimate(estimate: Estimate, form: Callable[[float], str] = _number) -> tuple[str, str]:
    value, low, high = map(float, estimate)
    return form(value), "" if math.isnan(low) else f"{form(low)} to {form(high)}"


def _probability(estimate: Estimate) -> tuple[str, str]:
    """The interval is left out if all resamples agree, as when no run of one algorithm reaches one of the other."""
    value, interval = _estimate(estimate, "{:.2f}".format)
    return value, "" if estimate.low == estimate.high else interval


def _mean(values: Any, form: Callable[[float], str] = _number) -> tuple[str, str]:
    """The mean with its standard error, and its interval."""
    mean, interval = _estimate(statistics.bootstrap_mean(values), form)
    error = f" ± {form(float(statistics.standard_error(values)))}" if len(values) > 1 else ""
    return mean + error, interval


def _last_evaluation(runs: pd.DataFrame, name: str = "returns", form: Callable[[float], str] = _number) -> str:
    """Mean and error over the runs of each one's own last evaluation; how many runs that are, if not all."""
    rows = [record.evaluations[name][-1] for record in runs.record if record.evaluations.get(name)]
    values = np.array([np.mean(row) for row in rows])
    values = values[np.isfinite(values)]
    few = f" ({counted(len(values), 'run')})" if len(values) < len(runs) else ""
    return _mean(values, form)[0] + few if len(values) else ""


def _seeds(seeds: list[int]) -> str:
    # not a list of all seeds from the first to the last, since RL Zoo draws seeds from billions
    if len(seeds) > 2 and seeds == list(range(seeds[0], seeds[0] + len(seeds))):
        return f"{seeds[0]} to {seeds[-1]}"
    return ", ".join(map(str, seeds))
