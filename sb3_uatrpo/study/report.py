"""The report of a study: a Markdown page with tables and pictures."""

import math
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from sb3_uatrpo.study import statistics
from sb3_uatrpo.study.plan import StudyError
from sb3_uatrpo.study.results import GROUP, PICTURE_FORMATS, Results, joined, tabulate
from sb3_uatrpo.study.statistics import CONFIDENCE_LEVEL, FINAL_SHARE, N_RESAMPLES, N_RESAMPLES_OVER_TRAINING, Estimate
from sb3_uatrpo.study.tables import read_study

DEFINITIONS = f"""\
- *Final return* of a run: mean undiscounted training return of the episodes that ended in the last {FINAL_SHARE:.0%} of
  its steps; if none did, of those that ended last. Learning curves have such a mean at every step.
- *κ-CVaR*: mean of the worst share κ of the runs, which *rests on* that many runs; one of them may count in part.
- *Intervals*, in parentheses: {CONFIDENCE_LEVEL:.0%} percentile bootstrap over runs, from {N_RESAMPLES:,} resamples,
  {N_RESAMPLES_OVER_TRAINING:,} over training. With few runs they are too narrow. ± is the standard error of the mean.
- *Welch*: t-test of equal means, unequal variances; more cautious with few runs. p is of each comparison alone.
- *IQM*: mean without the lowest and the highest quarter of the runs; with fewer than four runs, the mean.
- *Probability of improvement*: how often a run of the first algorithm ends above one of the second; a tie counts half.
- *KL ratio*: actual KL divergence of a proposed step over the estimated one; in pictures, with median and quartiles.
- *Score*: final return scaled from 0, the lowest of all runs shown in an environment, to 1, the highest; for algorithms
  with the same number of runs in every environment.
- *Success*: as the final return, the share of episodes that succeeded, among those that report `is_success`."""
HEADER = {"env": "environment", "condition": "variant", "label": "algorithm"}


def report(
    folders: Sequence[str | os.PathLike[str]],
    output: str | os.PathLike[str],
    algorithms: Sequence[str] = (),
    kappa: float = 0.2,
    variants: Sequence[str] = (),
    picture_format: str = "png",
) -> Path:
    """
    Write ``report.md`` and its pictures.

    :param folders: what ``read_study`` reads
    :param algorithms: two labels to compare, as in ``Results``
    :param kappa: share of worst runs in a CVaR, in (0, 1]
    :param variants: the conditions to show, as in ``tabulate``
    :param picture_format: ``"png"`` or ``"svg"``
    :return: the report's path
    :raises StudyError: if there is no finished run, runs must not be averaged, or an argument is invalid
    """
    names, study = joined(Path(folder).resolve().name for folder in folders), read_study(*folders)
    if not 0 < kappa <= 1:
        raise StudyError(f"kappa must be in (0, 1], but it is {kappa}")
    if picture_format not in PICTURE_FORMATS:
        raise StudyError(f"picture_format must be one of {', '.join(PICTURE_FORMATS)}, but it is {picture_format!r}")
    results = Results(tabulate(study, variants), algorithms, kappa)
    if results.compared.empty:
        reasons = [f"out of {len(study.runs)}", *(f"{path} is left out ({reason})" for path, reason in study.left_out)]
        raise StudyError(f"{names}: no run is done with a training return, {'; '.join(reasons)}")

    # after errors in the input
    from sb3_uatrpo.study.plots import draw_pictures

    path = Path(output, "report.md")
    blocks = [f"# Report on {names}", *_tables(results), "## Pictures"]
    path.parent.mkdir(parents=True, exist_ok=True)
    pictures = draw_pictures(results, path.parent, picture_format)
    blocks += [f"![{picture.stem}]({picture.name})" for picture in pictures]
    path.write_text("\n\n".join(filter(None, [*blocks, *_settings(results)])) + "\n", encoding="utf-8")
    return path


def _tables(results: Results) -> Iterator[str]:
    runs, left_out = results.study.runs, results.study.left_out
    runs = runs.assign(done=runs.error == "", failed=runs.error != "", seeds=runs.seed.astype(str))
    yield f"{runs.done.sum()} runs done, {runs.failed.sum()} failed, {len(left_out)} left out because of damaged files."
    columns = {"done": "sum", "failed": "sum", "n_timesteps": "first", "seeds": ", ".join, "seconds": "sum"}
    table = runs.groupby(GROUP, sort=False).agg(columns)
    table["seconds"] /= 3600
    yield "## Runs"
    yield _table(table.rename(columns={"n_timesteps": "steps", "seconds": "hours"}).reset_index())
    runs["name"] = [f"{run.label} on {joined([run.env, run.condition])}, seed {run.seed}" for run in runs.itertuples()]
    failed, without_return = runs[runs.failed], runs[runs.done & runs.final_return.isna()]
    lines = [f"- failed: {run.name}: `{run.error.strip().splitlines()[-1]:.200}`" for run in failed.itertuples()]
    lines += [f"- no episode ended, or one is not finite: {run.name}" for run in without_return.itertuples()]
    yield "\n".join([*lines, *(f"- left out: `{path}`: {reason}" for path, reason in left_out)])
    yield f"## What the numbers are\n\n{DEFINITIONS}\n\n## Returns\n\n{_table(results.returns)}"
    shares = results.compared.dropna(subset="final_success").groupby(GROUP, sort=False).final_success
    if shares.ngroups:
        table = pd.DataFrame({"runs": shares.size(), "success": shares.apply(statistics.bootstrap_mean)})
        table["last evaluation"] = results.last_evaluations("is_success")["mean"]
        yield f"## Success\n\n{_table(table.reset_index())}"
    if len(results.differences):
        yield f"## Differences\n\n{_table(results.differences)}"
    yield f"## Proposed steps\n\n{_table(results.ratios()) or 'There are no KL ratios.'}"


def _settings(results: Results) -> Iterator[str]:
    # finished runs first
    first = results.study.runs.sort_values("error", kind="stable").groupby(GROUP, sort=False).hyperparameters.first()
    lines = [f"- {joined(reversed(names))}: `{settings}`" for names, settings in first.items()]
    lines += [f"- versions: `{versions}`" for versions in results.compared.versions.unique()]
    yield "\n".join(["## Settings", "", *lines])


def _table(table: pd.DataFrame) -> str:
    # pandas would need one more package for this
    names = list(table.rename(columns=HEADER))
    lines = [names, ["---"] * len(names), *(map(_cell, row) for row in table.itertuples(index=False))]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) if len(table) else ""


def _cell(value: Any) -> str:
    """Numbers with four significant digits, and as an integer from 1,000 up."""
    if isinstance(value, Estimate):
        middle, low, high = map(float, value)
        return _cell(middle) + (f" ({_cell(low)} to {_cell(high)})" if low < high else "")
    if not isinstance(value, float):
        return f"{value:,}" if isinstance(value, int) else str(value).replace("|", "\\|") or "–"
    if not math.isfinite(value) or abs(value) < 1e-3:
        return "–" if math.isnan(value) else f"{value:.4g}"
    return f"{value:,.{max(0, 3 - math.floor(math.log10(abs(value))))}f}"
