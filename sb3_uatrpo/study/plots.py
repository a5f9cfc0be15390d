"""Pictures of a report: tidy tables in seaborn's facets, a panel per environment and condition, a colour per label."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib
import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import seaborn as sns
from matplotlib.ticker import EngFormatter, MaxNLocator

from sb3_uatrpo.study import statistics
from sb3_uatrpo.study.results import GROUP, PICTURE_FORMATS, Results, joined, learning_curves
from sb3_uatrpo.study.statistics import N_RESAMPLES_OVER_TRAINING, Estimate

KAPPAS = np.linspace(0.01, 1.0, 100)
# Larger KL ratios are drawn in the last bin; parts of the training, each with its own median KL ratio
LARGEST_RATIO, N_PARTS = 5.0, 50
STEPS = "environment steps"
STYLE: dict[Any, Any] = {
    "axes.grid": True, "axes.spines.right": False, "axes.spines.top": False, "font.size": 9, "grid.alpha": 0.3,
    # gives identical pictures identical identifiers; names may contain dollar signs
    "svg.hashsalt": "sb3_uatrpo", "text.parse_math": False,
}  # fmt: skip


# Panels with fewer runs of some algorithm say so
FEW_RUNS = 5


def draw_pictures(results: Results, output: Path, picture_format: str) -> list[Path]:
    """Draw the pictures of a report into a folder; return those with data to show."""
    drawn: list[Path] = []

    def save(name: str, grid: sns.FacetGrid | None) -> None:
        # an earlier report's picture must not remain
        for earlier in PICTURE_FORMATS:
            (output / f"{name}.{earlier}").unlink(missing_ok=True)
        if grid is not None:
            for ax in grid.axes.flat:
                if ax.get_title() in few:
                    ax.set_title(few[ax.get_title()])
            drawn.append(output / f"{name}.{picture_format}")
            # without its date, an unchanged picture is an unchanged file
            grid.savefig(drawn[-1], dpi=120, metadata={"Date": None})
        plt.close("all")

    def cvar(rows: pd.DataFrame) -> pd.DataFrame:
        runs, n_resamples = _by_step(rows), N_RESAMPLES_OVER_TRAINING
        return _band(runs.index, statistics.bootstrap_cvar(runs, results.kappa, n_resamples=n_resamples))

    def lines(table: pd.DataFrame, function: Callable[..., pd.DataFrame], *axes: str) -> sns.FacetGrid | None:
        parts = {names: function(rows) for names, rows in table.groupby(GROUP)}
        return _lines(labels, {names: part for names, part in parts.items() if len(part)}, *axes)

    labels, samples, differences = results.labels, results.samples, results.differences
    fewest: dict[str, int] = {}
    for (*panel, _), x in samples.items():
        fewest[joined(panel)] = min(len(x), fewest.get(joined(panel), len(x)))
    few = {panel: f"{panel} (fewest runs: {n})" for panel, n in fewest.items() if n < FEW_RUNS}
    curves, ratios = learning_curves(results.study).dropna(), results.series("updates", "kl_ratio")
    ratios["part"] = np.ceil(ratios.step * N_PARTS / ratios.step.max()) * ratios.step.max() / N_PARTS
    cvars = {names: _band(KAPPAS, statistics.bootstrap_cvar(x, KAPPAS)) for names, x in samples.items() if x.ndim == 1}
    profiles = {}
    for names, x in samples.items():
        every = np.concatenate([other.ravel() for (env, *_), other in samples.items() if env == names[0]])
        taus = np.linspace(every.min(), every.max(), 101)
        profiles[names] = _band(taus, statistics.performance_profile(x, taus))
    with matplotlib.rc_context(STYLE):
        save("learning_curves", lines(curves, _mean_and_error, STEPS, "training return"))
        save("evaluations", lines(results.series("evaluations", "return"), _mean_and_error, STEPS, "evaluation return"))
        save("cvar", _lines(labels, cvars, "κ, share of worst runs", "κ-CVaR of final return"))
        save("cvar_over_training", lines(curves, cvar, STEPS, f"{results.cvar} of training return"))
        save("differences", _forest(differences, "of means", 0.0))
        save("probability_of_improvement", _forest(differences, "probability of improvement", 0.5))
        save("kl_ratio", _histograms(labels, ratios))
        save("kl_ratio_over_training", lines(ratios, _quartiles, STEPS, "actual / estimated KL"))
        save("interquartile_means", _forest(results.returns, "IQM", math.nan))
        save("performance_profiles", _lines(labels, profiles, "τ", "share of runs above τ"))
    return drawn


def _facets(table: pd.DataFrame, draw: Callable[..., None], labels: list[str], **options: Any) -> sns.FacetGrid:
    table = table.assign(panel=[joined(panel) for panel in zip(table.env, table.condition, strict=True)])
    # with conditions, each environment has a row
    n = table.groupby("env").condition.nunique().max() if table.condition.any() else table.panel.nunique()
    look = {"hue": "label", "hue_order": labels, "palette": sns.color_palette("colorblind", len(labels))}
    look |= {"col": "panel", "col_wrap": n if table.condition.any() else {1: 1, 2: 2, 4: 2}.get(n, 3)}
    look |= {"sharex": False, "sharey": False, "despine": False, "height": 2.7, "aspect": 1.35}
    grid = sns.FacetGrid(table, **{**look, **options}).map_dataframe(draw).set_titles("{col_name}")
    shown = [label for label in labels if label in set(table.label)]
    if shown:
        sns.move_legend(
            grid.add_legend(title="", label_order=shown),
            "lower center",
            bbox_to_anchor=(0.5, 1),
            ncols=3,
            frameon=False,
        )
    return grid


def _lines(
    labels: list[str], parts: dict[tuple[str, str, str], pd.DataFrame], xlabel: str, ylabel: str
) -> sns.FacetGrid | None:
    """Lines and bands of tables with the fields of ``Estimate``, by x. Further columns are single runs, thin lines."""

    def draw(data: pd.DataFrame, color: Any, label: str) -> None:
        # few points, such as those of evaluations, are marked: a single one would be invisible otherwise
        x, marker = data.index.get_level_values(-1), "o" if len(data) <= 20 else ""
        plt.plot(x, data.filter(like="run ").dropna(axis=1, how="all"), color=color, linewidth=0.5, alpha=0.3)
        plt.plot(x, data.value, color=color, label=label, linewidth=1.8, marker=marker, markersize=4)
        plt.fill_between(x, data.low, data.high, color=color, alpha=0.2, linewidth=0)

    if not parts:
        return None
    grid = _facets(pd.concat(parts, names=GROUP).reset_index(GROUP), draw, labels).set_axis_labels(xlabel, ylabel)
    for ax in grid.axes.flat:
        # more labels would overlap in a small panel
        ax.xaxis.set_major_locator(MaxNLocator(5))
        if xlabel == STEPS:
            ax.set_xlim(left=0)
            ax.xaxis.set_major_formatter(EngFormatter(sep=""))
    return grid


def _band(x: Any, estimate: Estimate) -> pd.DataFrame:
    return pd.DataFrame(estimate._asdict(), index=x)


def _by_step(rows: pd.DataFrame) -> pd.DataFrame:
    """Returns, a column per run, at the steps at which all runs have one."""
    return rows.pivot_table(index="step", columns="run", values="return").dropna().add_prefix("run ")


def _mean_and_error(rows: pd.DataFrame) -> pd.DataFrame:
    runs = _by_step(rows)
    mean, error = runs.mean(axis=1), runs.sem(axis=1).fillna(0)
    return runs.assign(value=mean, low=mean - error, high=mean + error)


def _quartiles(rows: pd.DataFrame) -> pd.DataFrame:
    return rows.groupby("part").kl_ratio.quantile([0.5, 0.25, 0.75]).unstack().set_axis(Estimate._fields, axis=1)


def _histograms(labels: list[str], ratios: pd.DataFrame) -> sns.FacetGrid | None:
    def draw(data: pd.DataFrame, color: Any, label: str) -> None:
        counts, edges = np.histogram(data.kl_ratio.clip(0, LARGEST_RATIO), 50, (0, LARGEST_RATIO))
        plt.stairs(counts / len(data), edges, fill=True, color=color, alpha=0.4, label=label)

    grid = _facets(ratios, draw, labels) if len(ratios) else None
    return grid and grid.set_axis_labels(f"actual / estimated KL (≥ {LARGEST_RATIO:g} at the end)", "share of updates")


def _forest(table: pd.DataFrame, column: str, reference: float) -> sns.FacetGrid | None:
    """Estimates as points with their intervals, one above the other, and a line at ``reference``."""

    def draw(data: pd.DataFrame, color: Any, label: str = "") -> None:
        value, low, high = np.array(data[column].tolist()).T
        plt.hlines(data.label, low, high, color="0.6", linewidth=4)
        plt.plot(value, data.label, "o", color="0.2")
        plt.axvline(reference, color="0.2", linewidth=0.8, zorder=0)
        plt.ylim(len(data) - 0.5, -0.5)

    if table.empty:
        return None
    table = table.dropna(subset=column)
    height = 0.9 + 0.25 * table.groupby(GROUP[:2]).size().max()
    aspect = (2.5 + 0.06 * max(map(len, table.label))) / height
    return _facets(table, draw, [], hue=None, height=height, aspect=aspect).set_axis_labels(column, "")
