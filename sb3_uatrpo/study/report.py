"""The report of a study: a Markdown page with tables and pictures."""

import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from sb3_uatrpo.study import statistics
from sb3_uatrpo.study.plan import StudyError
from sb3_uatrpo.study.results import GROUP, Results, counted, joined, pairs_of, tabulate
from sb3_uatrpo.study.statistics import CONFIDENCE_LEVEL, FINAL_SHARE, N_RESAMPLES, N_RESAMPLES_OVER_TRAINING, Estimate
from sb3_uatrpo.study.tables import read_study

PERCENT = "{:.1%}".format
NAMES = ("environment", "variant", "algorithm")
# With fewer runs than this in a group, the report warns about its intervals
FEW = 5
DEFINITIONS = f"""\
- *Final return* of a run: mean undiscounted training return of the episodes that ended in the last {FINAL_SHARE:.0%} of
  its steps; if none did, of those that ended last.
- *κ-CVaR*: mean of the worst share κ of the runs. The run at the boundary of that share counts in part; κ = 1 gives the
  mean.
- *Intervals*, in parentheses: {CONFIDENCE_LEVEL:.0%} percentile bootstrap over runs, from {N_RESAMPLES:,} resamples,
  {N_RESAMPLES_OVER_TRAINING:,} over training. With few runs they are too narrow, above all those of a CVaR. ± is the
  standard error of the mean.
- *Welch*: two-sided t-test of equal means with unequal variances. p is not corrected for the number of comparisons.
- *IQM*: mean without the lowest and the highest quarter of the runs; with fewer than four runs, the mean.
- *Probability of improvement*: how often a run of the first algorithm ends above a run of the second; a tie
  counts as half. Its interval is left out if all resamples agree.
- *Score*: final return, scaled from 0, the lowest of all runs shown in an environment, of every variant, to 1, the
  highest. Averages over environments are of algorithms with the same number of runs in each.
- *KL ratio*: actual KL divergence of a proposed step (before the line search) divided by the estimated one, for all
  updates of all runs.
- *Success*: share of the episodes that report `is_success` and ended in the last {FINAL_SHARE:.0%} of the steps."""


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
    :param variants: the variants to show, ``"plain"`` for runs without varied values; all by default
    :return: the report's path
    :raises StudyError: if there is no finished run, runs must not be averaged, or an argument is invalid
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
    results = Results(study, pairs_of(study.runs.label[study.runs.final_return.notna()], algorithms), kappa)
    if results.compared.empty:
        raise StudyError(f"{names}: no run is done with a training return, out of {counted(len(study.runs), 'run')}")

    # matplotlib takes a second to import, so errors in the input are reported first
    from sb3_uatrpo.study.plots import draw_pictures

    path = Path(output, "report.md")
    path.parent.mkdir(parents=True, exist_ok=True)
    blocks = [f"# Report on {names}", *_page(results), "## Pictures"]
    for name, caption in draw_pictures(results, path.parent).items():
        blocks.append(f"![{name.replace('_', ' ')}]({name}.png)\n\n*{caption}* ([SVG]({name}.svg))")
    path.write_text("\n\n".join([*filter(None, blocks), *_settings(results)]) + "\n", encoding="utf-8")
    return path


def _page(results: Results) -> Iterator[str]:
    yield from _runs(results)
    yield f"## What the numbers are\n\n{DEFINITIONS}\n\n## Returns"
    evaluations, successes = (_last_evaluations(results, name) for name in ("return", "is_success"))
    n_worst = {n: statistics.runs_behind_cvar(n, results.kappa) for n in map(len, results.groups.values())}
    cvar = f"{100 * results.kappa:g}%-CVaR"
    yield _table(
        {
            **dict(zip(NAMES, names, strict=True)),
            "runs": len(runs),
            "final return": _mean(runs.final_return),
            cvar: _estimate(statistics.bootstrap_cvar(runs.final_return, results.kappa)),
            "rests on": counted(n_worst[len(runs)], "run"),
            "IQM": _estimate(statistics.interquartile_mean(runs.final_return)),
            "lowest": _number(runs.final_return.min()),
            "highest": _number(runs.final_return.max()),
            "last evaluation": _last(evaluations, runs),
        }
        for names, runs in results.groups.items()
    )
    if several := sorted(n for n, worst in n_worst.items() if worst == 1 < n):
        yield (
            f"**The {cvar} of {' or '.join(map(str, several))} runs is the worst run alone.** Only with more than "
            f"{1 / results.kappa:g} runs does it rest on at least two."
        )
    if 1 in n_worst:
        yield "A single run has neither a standard error nor an interval, and its CVaR is its return."
    if table := _table(
        {
            **dict(zip(NAMES, names, strict=True)),
            "runs": len(shares),
            "success": _mean(shares, PERCENT),
            "last evaluation": _last(successes, runs, PERCENT),
        }
        for names, runs in results.groups.items()
        if len(shares := runs.final_success.dropna())
    ):
        yield f"## Success rates\n\n{table}"
    yield from _differences(results, cvar)
    yield from _proposed_steps(results)
    yield from _over_environments(results)


def _runs(results: Results) -> Iterator[str]:
    runs, left_out = results.study.runs, results.study.left_out
    done, failed = runs[runs.error == ""], runs[runs.error != ""]
    yield f"{counted(len(done), 'run')} done, {len(failed)} failed, {len(left_out)} left out because of damaged files."
    rows = []
    for names, group in runs.groupby(GROUP, sort=False):
        ended = group[group.error == ""]
        # a run that failed may have had other settings
        steps = (group if ended.empty else ended).n_timesteps.iloc[0]
        row = {**dict(zip(NAMES, names, strict=True)), "done": len(ended), "failed": len(group) - len(ended)}
        seeds, hours = _seeds(list(ended.seed)), f"{ended.seconds.sum() / 3600:.2g}"
        rows.append({**row, "steps": f"{steps:,}", "seeds": seeds, "hours": hours})
    yield f"## Runs\n\n{_table(rows)}"
    without = done[done.final_return.isna()]
    for title, lines in (
        ("Failed", [f"{_name(run)}: `{last_line(run.error)}`" for run in failed.itertuples()]),
        ("Without a final return, because no episode ended or one is not finite", map(_name, without.itertuples())),
        ("Left out", [f"`{path}`: {reason}" for path, reason in left_out]),
    ):
        if listed := "\n".join(f"- {line}" for line in lines):
            yield f"{title}:\n\n{listed}"


def _differences(results: Results, cvar: str) -> Iterator[str]:
    if results.comparisons.empty:
        return
    rows = []
    unlike: dict[str, list[str]] = {}
    for of in results.comparisons.itertuples():
        pair, p = " − ".join(of.pair), "< 0.001" if of.welch.pvalue < 0.001 else _number(of.welch.pvalue, 3)
        row = {"environment": of.env, "variant": of.condition, "difference": pair, "runs": "{}, {}".format(*of.n_runs)}
        row |= {"of means": _estimate(of.mean), "Welch t": _number(of.welch.statistic, 2), "p": p}
        rows.append(
            row | {f"of {cvar}": _estimate(of.cvar), "probability of improvement": _probability(of.improvement)}
        )
        if of.unlike:
            unlike.setdefault(f"{pair}: {of.unlike}", []).append(joined([of.env, of.condition]))
    yield f"## Differences\n\n{_table(rows)}"
    if (fewest := min(map(min, results.comparisons.n_runs))) < FEW:
        yield (
            f"**Do not rely on these intervals: some groups have only {counted(fewest, 'run')}.** Resampling fewer "
            f"than {FEW} runs shows only part of their spread; Welch's test is more cautious."
        )
    # a difference may also come from unequal hyperparameters
    if unlike:
        lines = "\n".join(f"- {settings} ({'; '.join(panels)})" for settings, panels in unlike.items())
        yield f"**The algorithms are not the only difference**: some settings that both have differ too:\n\n{lines}"


def _proposed_steps(results: Results) -> Iterator[str]:
    ratios = dict(list(results.series("updates", "kl_ratio").groupby(GROUP).kl_ratio))
    proposed = results.series("updates", "kl_proposed").groupby(GROUP).kl_proposed.mean()
    rows = []
    for names in filter(ratios.__contains__, results.groups):
        of, mean_kl = ratios[names], _number(proposed.get(names, math.nan), 4)
        large = {f"at least {t:g}": PERCENT(statistics.share_at_least(of, t)) for t in (2.0, 3.0)}
        row = {
            **dict(zip(NAMES, names, strict=True)),
            "updates": f"{len(of):,}",
            "median KL ratio": _number(of.median(), 2),
        }
        rows.append({**row, **large, "mean proposed KL": mean_kl})
    yield f"## Proposed steps\n\n{_table(rows)}"
    if silent := {label for names in results.groups.keys() - ratios.keys() for label in names[2:]}:
        yield f"No KL ratio of {', '.join(sorted(silent))}."


def _over_environments(results: Results) -> Iterator[str]:
    scores = results.scores
    form = "{:.3f}".format
    averaged = [
        {
            "variant": condition,
            "algorithm": label,
            "runs × environments": " × ".join(map(str, of.shape)),
            "IQM of score": _estimate(statistics.interquartile_mean(of), form),
        }
        for (condition, label), of in scores.items()
    ]
    improvements = [
        {
            "variant": condition,
            "pair": " > ".join(pair),
            "probability of improvement": _probability(statistics.probability_of_improvement(*both)),
        }
        for condition in dict.fromkeys(condition for condition, _ in scores)
        for pair in results.pairs
        if len(both := [scores[condition, label] for label in pair if (condition, label) in scores]) == 2
    ]
    if averaged:
        yield f"## Over all environments\n\n{_table(averaged)}"
        yield _table(improvements)
    elif results.compared.env.nunique() > 1:
        yield "Nothing is averaged over environments: no algorithm has the same number of runs in each."


def _settings(results: Results) -> Iterator[str]:
    yield "## Settings"
    lines = []
    for (env, condition, label), runs in results.study.runs.groupby(GROUP, sort=False):
        # finished runs first
        values = json.loads(runs.sort_values("error", kind="stable").hyperparameters.iloc[0])
        settings = ", ".join(f"`{name}: {value}`" for name, value in sorted(values.items()))
        lines.append(f"- {joined([label, env, condition])}: {settings}")
    yield "\n".join(lines)
    versions = pd.DataFrame(list(map(json.loads, results.compared.versions.unique())))
    if found := [f"`{name} {' and '.join(sorted(set(versions[name].dropna())))}`" for name in sorted(versions)]:
        yield f"Versions: {', '.join(found)}."


def _table(rows: Iterable[dict[str, Any]]) -> str:
    # pandas would need one more package for this
    cells = [{name: str(cell).replace("|", "\\|") or "–" for name, cell in row.items()} for row in rows]
    lines = [list(cells[0]), ["---"] * len(cells[0]), *(row.values() for row in cells)] if cells else []
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _number(value: float, digits: int | None = None) -> str:
    """Rounded to four significant digits, and to an integer from 1,000 up, unless ``digits`` says otherwise."""
    if not math.isfinite(value):
        return "" if math.isnan(value) else str(value)
    if digits is None and 0 < abs(value) < 1e-3:
        return f"{value:.4g}"
    if digits is None:
        digits = 0 if value == 0 else max(0, 3 - math.floor(math.log10(abs(value))))
    return f"{value:,.{digits}f}"


def _estimate(estimate: Estimate, form: Callable[[float], str] = _number, error: str = "") -> str:
    value, low, high = map(float, estimate)
    return form(value) + error + ("" if math.isnan(low) else f" ({form(low)} to {form(high)})")


def _probability(estimate: Estimate) -> str:
    """The interval is left out if all resamples agree, as when no run of one algorithm reaches one of the other."""
    agree = estimate.low == estimate.high
    return _estimate(Estimate(estimate.value, math.nan, math.nan) if agree else estimate, "{:.2f}".format)


def _mean(values: Any, form: Callable[[float], str] = _number) -> str:
    error = f" ± {form(float(statistics.standard_error(values)))}" if len(values) > 1 else ""
    return _estimate(statistics.bootstrap_mean(values), form, error)


def _last_evaluations(results: Results, name: str) -> pd.Series:
    """The mean of each run's own last evaluation."""
    table = results.series("evaluations", name)
    return table[table.step == table.groupby("run").step.transform("max")].groupby("run")[name].mean()


def _last(means: pd.Series, runs: pd.DataFrame, form: Callable[[float], str] = _number) -> str:
    """Mean and error over the runs; how many runs that are, if not all."""
    values = means[means.index.isin(runs.index)].to_numpy(dtype=float)
    few = f" ({counted(len(values), 'run')})" if len(values) < len(runs) else ""
    return _mean(values, form).partition(" (")[0] + few if len(values) else ""


def _name(run: Any) -> str:
    return f"{run.label} on {joined([run.env, run.condition])}, seed {run.seed}"


def last_line(error: str) -> str:
    """:return: the last line of a traceback, which says most"""
    return (error.strip().splitlines() or [""])[-1].replace("`", "'")[:200]


def _seeds(seeds: list[int]) -> str:
    # not a list of all seeds from the first to the last, since RL Zoo draws seeds from billions
    is_range = len(seeds) > 2 and seeds == list(range(seeds[0], seeds[0] + len(seeds)))
    return f"{seeds[0]} to {seeds[-1]}" if is_range else ", ".join(map(str, seeds))
