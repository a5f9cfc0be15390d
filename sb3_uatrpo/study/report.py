"""The report of a study: a Markdown page with tables and pictures."""

import json
import math
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from sb3_uatrpo.study import statistics
from sb3_uatrpo.study.plan import StudyError
from sb3_uatrpo.study.results import GROUP, Results, counted, joined, pairs_of, tabulate
from sb3_uatrpo.study.statistics import CONFIDENCE_LEVEL, FINAL_SHARE, N_RESAMPLES, N_RESAMPLES_OVER_TRAINING, Estimate
from sb3_uatrpo.study.tables import read_study

# With fewer runs than this in a group, the report warns about its intervals
FEW = 5
DEFINITIONS = f"""\
- *Final return* of a run: mean undiscounted training return of the episodes that ended in the last {FINAL_SHARE:.0%} of
  its steps; if none did, of those that ended last.
- *κ-CVaR*: mean of the worst share κ of the runs. The run at the boundary of that share counts in part; κ = 1 gives the
  mean.
- *Intervals*, in parentheses: {CONFIDENCE_LEVEL:.0%} percentile bootstrap over runs, from {N_RESAMPLES:,} resamples,
  {N_RESAMPLES_OVER_TRAINING:,} over training; left out if all resamples agree. With few runs they are too narrow, above
  all those of a CVaR. ± is the standard error of the mean.
- *Welch*: two-sided t-test of equal means with unequal variances. p is not corrected for the number of comparisons.
- *IQM*: mean without the lowest and the highest quarter of the runs; with fewer than four runs, the mean.
- *Probability of improvement*: how often a run of the first algorithm ends above a run of the second; a tie counts as
  half.
- *KL ratio*: actual KL divergence of a proposed step (before the line search) divided by the estimated one, for all
  updates of all runs.
- *Score*: final return scaled from 0, the lowest of all runs shown in an environment, of every variant, to 1, the
  highest; for algorithms with the same number of runs in every environment.
- *Success*: share of the episodes that report `is_success`: in the last {FINAL_SHARE:.0%} of the steps, and in the last
  deterministic evaluation."""


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
        raise StudyError(f"{names}: no runs ({len(study.left_out)} left out because of damaged files)")
    study = tabulate(study, variants)
    results = Results(study, pairs_of(study.runs.label[study.runs.final_return.notna()], algorithms), kappa)
    if results.compared.empty:
        raise StudyError(f"{names}: no run is done with a training return, out of {counted(len(study.runs), 'run')}")

    # matplotlib takes a second to import, so errors in the input are reported first
    from sb3_uatrpo.study.plots import draw_pictures

    path = Path(output, "report.md")
    path.parent.mkdir(parents=True, exist_ok=True)
    pictures = [
        f"![{name.replace('_', ' ')}]({name}.png)\n\n*{caption}* ([SVG]({name}.svg))"
        for name, caption in draw_pictures(results, path.parent).items()
    ]
    blocks = [f"# Report on {names}", *_tables(results), "## Pictures", *pictures, *_settings(results)]
    path.write_text("\n\n".join(filter(None, blocks)) + "\n", encoding="utf-8")
    return path


def _tables(results: Results) -> Iterator[str]:
    runs, left_out = results.study.runs, results.study.left_out
    done, failed = runs[runs.error == ""], runs[runs.error != ""]
    yield f"{counted(len(done), 'run')} done, {len(failed)} failed, {len(left_out)} left out because of damaged files."
    rows = []
    for names, of in runs.groupby(GROUP, sort=False):
        ended = of[of.error == ""]
        row = {**dict(zip(GROUP, names, strict=True)), "done": len(ended), "failed": len(of) - len(ended)}
        # a run that failed may have had other settings
        row |= {"steps": (of if ended.empty else ended).n_timesteps.iloc[0], "seeds": _seeds(list(ended.seed))}
        rows.append(row | {"hours": ended.seconds.sum() / 3600})
    yield f"## Runs\n\n{_table(pd.DataFrame(rows))}"
    without = done[done.final_return.isna()]
    for title, lines in (
        ("Failed", [f"{_name(run)}: `{last_line(run.error)}`" for run in failed.itertuples()]),
        ("Without a final return, because no episode ended or one is not finite", map(_name, without.itertuples())),
        ("Left out", [f"`{path}`: {reason}" for path, reason in left_out]),
    ):
        listed = "\n".join(f"- {line}" for line in lines)
        yield f"{title}:\n\n{listed}" if listed else ""
    yield f"## What the numbers are\n\n{DEFINITIONS}"
    yield f"## Returns\n\n{_table(results.returns)}"
    alone = {n for n in results.returns.runs if statistics.runs_behind_cvar(n, results.kappa) == 1}
    if several := sorted(alone - {1}):
        yield f"**The {results.cvar} of {' or '.join(map(str, several))} runs is the worst run alone.**"
    if 1 in alone:
        yield "A single run has neither a standard error nor an interval, and its CVaR is its return."
    shares = results.compared.dropna(subset="final_success").groupby(GROUP, sort=False).final_success
    if shares.ngroups:
        last = results.last_evaluations("is_success").groupby(GROUP).is_success.mean()
        table = pd.DataFrame({"runs": shares.size(), "success": shares.apply(statistics.bootstrap_mean)})
        yield f"## Success\n\n{_table(table.assign(**{'last evaluation': last}).reset_index())}"
    if len(results.differences):
        yield f"## Differences\n\n{_table(results.differences)}"
        if (fewest := results.returns.runs.min()) < FEW:
            yield (
                f"**Do not rely on these intervals: some groups have only {counted(fewest, 'run')}.** Resampling fewer "
                f"than {FEW} runs shows only part of their spread; Welch's test is more cautious."
            )
    if unlike := "\n".join(f"- {settings} ({'; '.join(panels)})" for settings, panels in results.unlike.items()):
        yield f"**The algorithms are not the only difference**: some settings that both have differ too:\n\n{unlike}"
    yield f"## Proposed steps\n\n{_table(results.ratios)}"
    if silent := set(results.compared.label).difference(results.ratios.get("label", ())):
        yield f"No KL ratio of {', '.join(sorted(silent))}."
    scores = results.scores
    iqms = [
        {"condition": of, "label": x, "IQM of score": statistics.interquartile_mean(scores[of, x])} for of, x in scores
    ]
    better = [
        {
            "condition": of,
            "label": f"{x} > {y}",
            "probability of improvement": statistics.probability_of_improvement(scores[of, x], scores[of, y]),
        }
        for of in dict.fromkeys(of for of, _ in scores)
        for x, y in results.pairs
        if {(of, x), (of, y)} <= scores.keys()
    ]
    if scores:
        yield f"## Over all environments\n\n{_table(pd.DataFrame(iqms))}\n\n{_table(pd.DataFrame(better))}"


def _settings(results: Results) -> Iterator[str]:
    lines = []
    for (env, condition, label), runs in results.study.runs.groupby(GROUP, sort=False):
        # finished runs first
        values = json.loads(runs.sort_values("error", kind="stable").hyperparameters.iloc[0])
        settings = ", ".join(f"`{name}: {value}`" for name, value in sorted(values.items()))
        lines.append(f"- {joined([label, env, condition])}: {settings}")
    yield "\n".join(["## Settings", "", *lines])
    versions = pd.DataFrame(list(map(json.loads, results.compared.versions.unique())))
    if found := [f"`{name} {' and '.join(sorted(set(versions[name].dropna())))}`" for name in sorted(versions)]:
        yield f"Versions: {', '.join(found)}."


def _table(table: pd.DataFrame) -> str:
    # pandas would need one more package for this
    header = {"env": "environment", "condition": "variant", "label": "algorithm"}
    names = [header.get(name, name) for name in table.columns]
    lines = [names, ["---"] * len(names), *([_cell(value) for value in row] for row in table.itertuples(index=False))]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) if len(table) else ""


def _cell(value: Any) -> str:
    """Numbers with four significant digits, and as an integer from 1,000 up."""
    if isinstance(value, Estimate):
        middle, low, high = (float(part) for part in value)
        return _cell(middle) + (f" ({_cell(low)} to {_cell(high)})" if low < high else "")
    if not isinstance(value, float):
        return f"{value:,}" if isinstance(value, int) else str(value).replace("|", "\\|") or "–"
    if not math.isfinite(value):
        return "–" if math.isnan(value) else str(value)
    digits = max(0, 3 - math.floor(math.log10(abs(value)))) if abs(value) >= 1e-3 else 0
    return f"{value:,.{digits}f}" if digits or abs(value) >= 1 else f"{value:.4g}"


def _name(run: Any) -> str:
    return f"{run.label} on {joined([run.env, run.condition])}, seed {run.seed}"


def last_line(error: str) -> str:
    """:return: the last line of a traceback, which says most"""
    return (error.strip().splitlines() or [""])[-1].replace("`", "'")[:200]


def _seeds(seeds: list[int]) -> str:
    # not a list of all seeds from the first to the last, since RL Zoo draws seeds from billions
    is_range = len(seeds) > 2 and seeds == list(range(seeds[0], seeds[0] + len(seeds)))
    return f"{seeds[0]} to {seeds[-1]}" if is_range else ", ".join(map(str, seeds))
