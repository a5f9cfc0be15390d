"""The text of a report: one function for each of its sections."""

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from sb3_uatrpo.study import statistics
from sb3_uatrpo.study.groups import Group, different_settings
from sb3_uatrpo.study.record import Record
from sb3_uatrpo.study.results import Comparison, Results, Summary
from sb3_uatrpo.study.statistics import (
    CONFIDENCE_LEVEL,
    FINAL_SHARE,
    N_RESAMPLES,
    N_RESAMPLES_OVER_TRAINING,
    N_RESAMPLES_RLIABLE,
    Estimate,
)

DASH = "–"

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


def markdown(results: Results, pictures: set[str]) -> str:
    """
    :param results: what to show
    :param pictures: names of the pictures that lie beside the report
    :return: the report
    """
    blocks = [
        f"# Report on {results.folder.resolve().name}",
        *_runs(results),
        "## What the numbers are",
        DEFINITIONS,
        *_returns(results),
        *_pictures(pictures, "learning_curves", "evaluations", "cvar", "cvar_over_training"),
        *_differences(results),
        *_pictures(pictures, "differences"),
        *_proposed_steps(results),
        *_pictures(pictures, "kl_ratio"),
        *_aggregates(results),
        *_pictures(pictures, "interquartile_means", "performance_profiles", "probability_of_improvement"),
        *_settings(results),
    ]
    return "\n\n".join(blocks) + "\n"


# ------------------------------------------------------------------------------------------------------------ sections


def _runs(results: Results) -> Iterator[str]:
    failed = [record for group in results.all_groups for record in group.failed]
    without = [record for group in results.all_groups for record in group.without_return]
    n_done = sum(len(group.done) for group in results.all_groups)
    yield (
        f"{_count(n_done, 'run')} done, {len(failed)} failed, {len(results.unreadable)} left out because their files "
        "are corrupted or repeat another run."
    )
    yield "## Runs"
    yield _table(
        "environment | variant | algorithm | done | failed | steps | seeds | hours",
        [
            [
                *_names(group),
                len(group.done),
                len(group.failed),
                f"{group.spec.n_timesteps:,}",
                _seeds(group.done),
                f"{sum(record.wall_time for record in group.done) / 3600:.2g}",
            ]
            for group in results.all_groups
        ],
    )
    if failed:
        yield "Failed:"
        yield "\n".join(f"- {record.spec}: {_code(record.reason)}" for record in failed)
    if without:
        yield "Done, but without a final return, because no episode ended or a return is not finite:"
        yield "\n".join(f"- {record.spec}" for record in without)
    if results.unreadable:
        yield "Left out:"
        yield "\n".join(f"- `{path.name}`: {reason}" for path, reason in results.unreadable)


def _returns(results: Results) -> Iterator[str]:
    yield "## Returns"
    yield _table(
        f"environment | variant | algorithm | runs | final return | interval | {results.cvar_name} | interval | "
        "rests on | lowest | highest | last evaluation",
        [_return_row(summary) for summary in results.summaries],
    )
    alone = sorted({len(s.group.records) for s in results.summaries if s.n_behind_cvar == 1} - {1})
    if alone:
        yield (
            f"**The {results.cvar_name} of {' or '.join(map(str, alone))} runs is the worst run alone.** It takes "
            f"more than {1 / results.kappa:g} runs for it to rest on two."
        )
    if any(len(group.records) == 1 for group in results.groups):
        yield "One run alone has neither a standard error nor an interval, and its CVaR is its return."


def _return_row(summary: Summary) -> list[Any]:
    returns = summary.group.final_returns
    _, interval = _estimate(summary.mean)
    return [
        *_names(summary.group),
        len(returns),
        _mean_and_error(returns),
        interval,
        *_estimate(summary.cvar),
        _count(summary.n_behind_cvar, "run"),
        _number(returns.min()),
        _number(returns.max()),
        _mean_and_error(summary.last_evaluations) if summary.last_evaluations.size else DASH,
    ]


def _differences(results: Results) -> Iterator[str]:
    if results.comparisons:
        yield "## Differences"
        yield _table(
            "environment | variant | difference | runs | of means | interval | Welch t | p | "
            f"of {results.cvar_name} | interval | probability of improvement | interval",
            [_difference_row(comparison) for own in results.comparisons.values() for comparison in own],
        )
        yield from _unlike_settings(results)


def _unlike_settings(results: Results) -> Iterator[str]:
    """A difference is one of settings, too, where those that algorithms share are not the same."""
    unlike = {
        f"- {comparison.name} on {', '.join(filter(None, key))}: {'; '.join(settings)}"
        for key, own in results.comparisons.items()
        for comparison in own
        if (settings := different_settings(comparison.first, comparison.second))
    }
    if unlike:
        yield "**Not only the algorithms differ**, but also settings that both have:"
        yield "\n".join(sorted(unlike))


def _difference_row(comparison: Comparison) -> list[Any]:
    env_id, variant, _ = _names(comparison.first)
    p = comparison.welch.pvalue
    return [
        env_id,
        variant,
        comparison.name,
        f"{len(comparison.first.records)}, {len(comparison.second.records)}",
        *_estimate(comparison.mean),
        _number(comparison.welch.statistic, 2),
        "< 0.001" if p < 0.001 else _number(p, 3),
        *_estimate(comparison.cvar),
        *_estimate(comparison.improvement, 2),
    ]


def _proposed_steps(results: Results) -> Iterator[str]:
    yield "## Proposed steps"
    measured = [summary for summary in results.summaries if len(summary.kl_ratios)]
    if measured:
        yield (
            "KL ratio: actual KL divergence of a proposed step, before the line search, over the estimated one; over "
            "all updates of all runs."
        )
        yield _table(
            "environment | variant | algorithm | updates | median ratio | at least 2 | at least 3 | mean proposed KL",
            [_kl_row(summary) for summary in measured],
        )
    silent = sorted({group.label for group in results.groups} - {summary.group.label for summary in measured})
    if silent:
        yield f"No KL ratio in the records of {', '.join(silent)}."


def _kl_row(summary: Summary) -> list[Any]:
    ratios = summary.kl_ratios
    return [
        *_names(summary.group),
        f"{len(ratios):,}",
        _number(float(np.median(ratios)), 2),
        f"{statistics.share_at_least(ratios, 2.0):.1%}",
        f"{statistics.share_at_least(ratios, 3.0):.1%}",
        _number(summary.mean_kl_proposed, 4),
    ]


def _aggregates(results: Results) -> Iterator[str]:
    yield "## Aggregates (rliable)"
    yield _table(
        "environment | variant | algorithm | runs | IQM of final return | interval",
        [
            [*_names(summary.group), len(summary.group.records), *_estimate(summary.interquartile_mean)]
            for summary in results.summaries
        ],
    )
    if not results.scores:
        if len({group.env_id for group in results.groups}) > 1:
            yield "Nothing is averaged over environments: no algorithm has equally many runs in each."
        return
    yield (
        "Over all environments, with final returns scaled from 0, the lowest of all runs in an environment, to 1, the "
        "highest; for algorithms with equally many runs in every environment:"
    )
    yield _table(
        "variant | algorithm | runs × environments | IQM of score | interval",
        [
            [variant or DASH, label, " × ".join(map(str, own[label].shape)), *_estimate(estimate, 3)]
            for variant, own in results.scores.items()
            for label, estimate in results.interquartile_scores[variant].items()
        ],
    )
    pairs = [
        (variant, x, y) for variant, own in results.scores.items() for x, y in results.pairs if x in own and y in own
    ]
    if pairs:
        yield _table(
            "variant | pair | probability of improvement, all environments | interval",
            [
                [variant or DASH, f"{x} > {y}", *_estimate(results.improvement_everywhere(variant, x, y), 2)]
                for variant, x, y in pairs
            ],
        )


def _settings(results: Results) -> Iterator[str]:
    yield "## Settings"
    yield "\n".join(
        f"- {', '.join(part for part in (group.label, group.env_id, group.variant) if part)}: "
        + ", ".join(f"`{name}: {value}`" for name, value in sorted(group.spec.settings.items()))
        for group in results.all_groups
    )
    versions: dict[str, set[str]] = {}
    for record in (record for group in results.groups for record in group.records):
        for name, version in record.versions.items():
            versions.setdefault(name, set()).add(version)
    if versions:
        listed = ", ".join(f"{name} {' and '.join(sorted(found))}" for name, found in sorted(versions.items()))
        yield f"Versions: {listed}."


def _pictures(pictures: set[str], *names: str) -> Iterator[str]:
    for name in names:
        if name in pictures:
            yield f"![{name.replace('_', ' ')}]({name}.png)"
            yield f"*{CAPTIONS[name]}* ([SVG]({name}.svg))"


# --------------------------------------------------------------------------------------------------------------- cells


def _table(header: str, rows: Sequence[Sequence[Any]]) -> str:
    names = header.split(" | ")
    lines = [names, ["---"] * len(names), *rows]
    return "\n".join("| " + " | ".join(str(cell).replace("|", "\\|") for cell in line) + " |" for line in lines)


def _names(group: Group) -> list[str]:
    return [group.env_id, group.variant or DASH, group.label]


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


def _mean_and_error(values: statistics.Array) -> str:
    error = f" ± {_number(float(statistics.standard_error(values)))}" if len(values) > 1 else ""
    return _number(float(values.mean())) + error


def _count(n: int, noun: str) -> str:
    return f"{n} {noun}" + ("" if n == 1 else "s")


def _seeds(records: Sequence[Record]) -> str:
    seeds = [record.spec.seed for record in records]
    if len(seeds) > 2 and seeds == list(range(seeds[0], seeds[-1] + 1)):
        return f"{seeds[0]} to {seeds[-1]}"
    return ", ".join(map(str, seeds)) or DASH


def _code(text: str) -> str:
    return "`" + text.replace("`", "'")[:200] + "`"
