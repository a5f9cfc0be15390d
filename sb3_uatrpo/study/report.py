"""The report of a study: a Markdown page with tables and pictures."""

import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from sb3_uatrpo.study import statistics
from sb3_uatrpo.study.plan import StudyError
from sb3_uatrpo.study.results import GROUP, Results, counted, joined, pairs_of, tabulate
from sb3_uatrpo.study.statistics import CONFIDENCE_LEVEL, FINAL_SHARE, N_RESAMPLES, N_RESAMPLES_OVER_TRAINING, Estimate
from sb3_uatrpo.study.tables import read_study

PERCENT = "{:.1%}".format
GROUPS = "environment | variant | algorithm"
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

CAPTIONS = {
    "learning_curves": f"Training return, trailing mean over {FINAL_SHARE:.0%} of the steps; mean and standard error over "
    "runs; thin lines are single runs",
    "evaluations": "Deterministic evaluations: mean and standard error over runs; thin lines are single runs",
    "cvar": "κ-CVaR of the final return; it is the mean at κ = 1, and the worst run for κ ≤ 1/n",
    "cvar_over_training": "CVaR over runs of the training return",
    "differences": "Difference of final returns",
    "kl_ratio": "KL ratio of proposed steps, with the shares of ratios of at least 2 and of at least 3",
    "kl_ratio_over_training": "Median and quartiles of the KL ratio over the updates in each fiftieth of the training",
    "interquartile_means": "IQM of the final return",
    "performance_profiles": "Performance profiles: the share of runs that end above τ",
    "probability_of_improvement": "Probability of improvement",
}


def report(
    folders: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    output: str | os.PathLike[str],
    algorithms: Sequence[str] = (),
    kappa: float = 0.2,
    variants: Sequence[str] = (),
) -> Path:
    """
    Write ``report.md`` and its pictures, as PNG and SVG.

    :param folders: what ``read_study`` reads, one or several
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
    study = read_study(*paths)
    if study.runs.empty:
        reasons = f" ({len(study.left_out)} unreadable, the first: {study.left_out[0][1]})" if study.left_out else ""
        raise StudyError(f"{names}: no runs{reasons}")
    study = tabulate(study, variants)
    compared = study.runs[study.runs.final_return.notna()]
    if compared.empty:
        raise StudyError(f"{names}: no run is done with a training return, out of {counted(len(study.runs), 'run')}")
    results = Results(study, pairs_of(compared.label, algorithms), kappa)

    # matplotlib takes a second to import, so errors in the input are reported first
    from sb3_uatrpo.study.plots import draw_pictures

    output = Path(output)
    output.mkdir(parents=True, exist_ok=True)
    pictures = draw_pictures(results, output)
    path = output / "report.md"
    path.write_text("\n\n".join([f"# Report on {names}", *_page(results, pictures)]) + "\n", encoding="utf-8")
    return path


def _page(results: Results, pictures: set[str]) -> Iterator[str]:
    """The blocks of the report in Markdown; ``pictures`` are the names of those beside it."""

    def shown(*names: str) -> str:
        images = "![{0}]({1}.png)\n\n*{2}* ([SVG]({1}.svg))"
        parts = [images.format(name.replace("_", " "), name, CAPTIONS[name]) for name in names if name in pictures]
        return "\n\n".join(parts)

    yield from _runs(results)
    yield "## What the numbers are"
    yield DEFINITIONS
    yield from _returns(results)
    yield shown("learning_curves", "evaluations", "cvar", "cvar_over_training")
    yield from _successes(results)
    if len(results.comparisons):
        yield from _differences(results)
        yield shown("differences")
    yield from _proposed_steps(results)
    if "kl_ratio" in pictures:
        yield shown("kl_ratio", "kl_ratio_over_training")
    yield from _aggregates(results)
    yield shown("interquartile_means", "performance_profiles", "probability_of_improvement")
    yield "## Settings"
    lines = []
    for (env, condition, label), runs in results.study.runs.groupby(GROUP, sort=False):
        # finished runs first
        values = json.loads(runs.sort_values("error", kind="stable").hyperparameters.iloc[0])
        settings = ", ".join(f"`{name}: {value}`" for name, value in sorted(values.items()))
        lines.append(f"- {joined([label, env, condition])}: {settings}")
    yield "\n".join(lines)
    versions = pd.DataFrame(list(map(json.loads, results.compared.versions.unique())))
    if found := [f"{name} {' and '.join(sorted(set(versions[name].dropna())))}" for name in sorted(versions)]:
        yield f"Versions: {', '.join(f'`{each}`' for each in found)}."


def _runs(results: Results) -> Iterator[str]:
    runs, left_out = results.study.runs, results.study.left_out
    failed, without = runs[runs.error != ""], runs[(runs.error == "") & runs.final_return.isna()]
    yield (
        f"{counted(len(runs) - len(failed), 'run')} done, {len(failed)} failed, {len(left_out)} left out because their "
        "files are damaged."
    )
    yield "## Runs"
    rows = []
    for names, group in runs.groupby(GROUP, sort=False):
        done = group[group.error == ""]
        # a run that failed may have had other settings
        steps = (group if done.empty else done).n_timesteps.iloc[0]
        row = [*names, len(done), len(group) - len(done), f"{steps:,}", _seeds(list(done.seed))]
        rows.append([*row, f"{done.seconds.sum() / 3600:.2g}"])
    yield _table(f"{GROUPS} | done | failed | steps | seeds | hours", rows)
    lines = [f"- {_name(run)}: `{_last_line(run.error)}` ({run.folder})" for run in failed.itertuples()]
    yield from ["Failed:", "\n".join(lines)] if lines else []
    if len(without):
        yield "Done, but without a final return, because no episode ended or a return is not finite:"
        yield "\n".join(f"- {_name(run)}" for run in without.itertuples())
    if left_out:
        yield "Left out:"
        yield "\n".join(f"- `{path}`: {reason}" for path, reason in left_out)


def _returns(results: Results) -> Iterator[str]:
    yield "## Returns"
    rows = []
    evaluations = _last_evaluations(results, "return")
    for names, runs in results.groups.items():
        returns = runs.final_return
        cvar = _estimate(statistics.bootstrap_cvar(returns, results.kappa))
        behind_cvar = counted(statistics.runs_behind_cvar(len(runs), results.kappa), "run")
        row = [*names, len(runs), *_mean(returns), *cvar, behind_cvar, _number(returns.min()), _number(returns.max())]
        rows.append([*row, _last_evaluation(runs, evaluations)])
    yield _table(
        f"{GROUPS} | runs | final return | interval | {results.cvar_name} | interval | rests on | lowest | highest | "
        "last evaluation",
        rows,
    )
    alone = {n for n in map(len, results.groups.values()) if statistics.runs_behind_cvar(n, results.kappa) == 1}
    if several := sorted(alone - {1}):
        yield (
            f"**The {results.cvar_name} of {' or '.join(map(str, several))} runs is the worst run alone.** Only with "
            f"more than {1 / results.kappa:g} runs does it rest on at least two."
        )
    if 1 in alone:
        yield "A single run has neither a standard error nor an interval, and its CVaR is its return."


def _successes(results: Results) -> Iterator[str]:
    evaluations = _last_evaluations(results, "is_success")
    rows = [
        [*names, len(shares), *_mean(shares, PERCENT), _last_evaluation(runs, evaluations, PERCENT)]
        for names, runs in results.groups.items()
        if len(shares := runs.final_success.dropna())
    ]
    if rows:
        yield "## Success rates"
        yield (
            "Share of successes among the episodes that report `is_success`: those that ended in the last "
            f"{FINAL_SHARE:.0%} of the steps, and those of the last deterministic evaluation. Mean and standard error "
            "over runs."
        )
        yield _table(f"{GROUPS} | runs | success | interval | last evaluation", rows)


def _differences(results: Results) -> Iterator[str]:
    yield "## Differences"
    rows = []
    unlike: dict[str, list[str]] = {}
    for of in results.comparisons.itertuples():
        name = " − ".join(of.pair)
        row = [of.env, of.condition, name, ", ".join(map(str, of.n_runs)), *_estimate(of.mean)]
        row += [_number(of.welch.statistic, 2), "< 0.001" if of.welch.pvalue < 0.001 else _number(of.welch.pvalue, 3)]
        rows.append([*row, *_estimate(of.cvar), *_probability(of.improvement)])
        if of.unlike:
            unlike.setdefault(f"{name}: {of.unlike}", []).append(joined([of.env, of.condition]))
    yield _table(
        "environment | variant | difference | runs | of means | interval | Welch t | p | "
        f"of {results.cvar_name} | interval | probability of improvement | interval",
        rows,
    )
    if (fewest := min(map(min, results.comparisons.n_runs))) < FEW:
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
    proposed = dict(list(results.series("updates", "kl_proposed").groupby(GROUP).kl_proposed))
    ratios = dict(list(results.series("updates", "kl_ratio").groupby(GROUP).kl_ratio))
    rows = []
    for names in filter(ratios.__contains__, results.groups):
        large = [PERCENT(statistics.share_at_least(ratios[names], threshold)) for threshold in (2.0, 3.0)]
        mean_kl = _number(proposed[names].mean(), 4) if names in proposed else ""
        rows.append([*names, f"{len(ratios[names]):,}", _number(ratios[names].median(), 2), *large, mean_kl])
    if rows:
        yield (
            "KL ratio: actual KL divergence of a proposed step (before the line search) divided by the estimated one, "
            "for all updates of all runs."
        )
        yield _table(f"{GROUPS} | updates | median ratio | at least 2 | at least 3 | mean proposed KL", rows)
    if silent := set(results.compared.label).difference(label for _, _, label, *_ in rows):
        yield f"No KL ratio of {', '.join(sorted(silent))}."


def _aggregates(results: Results) -> Iterator[str]:
    yield "## Aggregates"
    rows = [
        [*names, len(runs), *_estimate(statistics.interquartile_mean(runs.final_return))]
        for names, runs in results.groups.items()
    ]
    yield _table(f"{GROUPS} | runs | IQM of final return | interval", rows)
    if not results.scores:
        if results.compared.env.nunique() > 1:
            yield "Nothing is averaged over environments: no algorithm has the same number of runs in each."
        return
    yield (
        "Over all environments, with final returns scaled from 0, the lowest of all runs shown in an environment, of "
        "every variant, to 1, the highest; for algorithms with the same number of runs in every environment:"
    )
    averaged, improvements = [], []
    for condition, by_label in results.scores.items():
        for label, scores in by_label.items():
            mean = _estimate(statistics.interquartile_mean(scores), "{:.3f}".format)
            averaged.append([condition, label, " × ".join(map(str, scores.shape)), *mean])
        for x, y in results.pairs:
            if by_label.keys() >= {x, y}:
                improvement = statistics.probability_of_improvement(by_label[x], by_label[y])
                improvements.append([condition, f"{x} > {y}", *_probability(improvement)])
    yield _table("variant | algorithm | runs × environments | IQM of score | interval", averaged)
    if improvements:
        yield _table("variant | pair | probability of improvement, all environments | interval", improvements)


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


def _last_evaluations(results: Results, name: str) -> pd.Series:
    """The mean of each run's own last evaluation."""
    table = results.series("evaluations", name)
    return table[table.step == table.groupby("run").step.transform("max")].groupby("run")[name].mean()


def _last_evaluation(runs: pd.DataFrame, means: pd.Series, form: Callable[[float], str] = _number) -> str:
    """Mean and error over the runs; how many runs that are, if not all."""
    values = means[means.index.isin(runs.index)].to_numpy(dtype=np.float64)
    few = f" ({counted(len(values), 'run')})" if len(values) < len(runs) else ""
    return _mean(values, form)[0] + few if len(values) else ""


def _name(run: Any) -> str:
    return f"{run.label} on {joined([run.env, run.condition])}, seed {run.seed}"


def _last_line(error: str) -> str:
    lines: Iterable[str] = error.partition("\nThe last that it printed:\n")[0].strip().splitlines() or [""]
    return list(lines)[-1].replace("`", "'")[:200]


def _seeds(seeds: list[int]) -> str:
    # not a list of all seeds from the first to the last, since RL Zoo draws seeds from billions
    if len(seeds) > 2 and seeds == list(range(seeds[0], seeds[0] + len(seeds))):
        return f"{seeds[0]} to {seeds[-1]}"
    return ", ".join(map(str, seeds))
