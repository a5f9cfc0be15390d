"""
Pictures of many runs. Every ``plot_`` function takes arrays by label, draws on the given ``ax`` and returns it;
``ax.legend()`` shows the labels. Its ``style`` is a result of ``styles``, so that a label looks the same in all
pictures and can be told apart in black and white; without it, the labels of this picture have styles of their own.
``options`` are those of ``statistics.bootstrap``. ``curves`` have for each label the steps (``n_points``) and the
returns (``n_runs x n_points``), NaN before a run's first episode; what is drawn begins where all runs have a value.

``draw_pictures`` draws the pictures of a report, one panel for each environment and variant.
"""

import itertools
import math
import re
import textwrap
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import pandas as pd
import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, LogLocator, MaxNLocator, NullLocator, PercentFormatter
from numpy.typing import ArrayLike
from rliable.plot_utils import plot_performance_profiles

from sb3_uatrpo.study import statistics
from sb3_uatrpo.study.results import Panel, Results, evaluations, joined, learning_curves, update_series, update_values
from sb3_uatrpo.study.statistics import N_RESAMPLES_OVER_TRAINING, Array, Estimate

KAPPAS = np.linspace(0.01, 1.0, 100)
LINE_STYLES = ("-", "--", "-.", ":")
# Larger KL ratios are drawn in the last bin, and any below 0 in the first
LARGEST_RATIO = 5.0
# KL ratios that count as large: the share of updates at or above each is shown
THRESHOLDS = (2.0, 3.0)
# Number of parts of the training, each with its own median KL ratio
N_PARTS = 50
# Distances between ticks, times a power of ten
TICKS = (1.0, 2.0, 2.5, 5.0, 10.0)

Styles = Mapping[str, Mapping[str, Any]]
Curves = Mapping[str, tuple[ArrayLike, ArrayLike]]


def styles(labels: Sequence[str]) -> dict[str, dict[str, Any]]:
    """:return: for each label, a line style and a colour that colour-blind readers can tell apart"""
    colors = sns.color_palette("colorblind", max(len(labels), 1))
    looks = zip(colors, itertools.cycle(LINE_STYLES), strict=False)
    return {label: {"color": color, "linestyle": line} for label, (color, line) in zip(labels, looks, strict=False)}


def _marks(n_points: int) -> dict[str, Any]:
    """Few points, such as those of evaluations, are marked: a single one would be invisible otherwise."""
    return {"marker": "o", "markersize": 4, "markeredgewidth": 0} if n_points <= 20 else {}


def plot_learning_curves(
    ax: Axes, curves: Curves, style: Styles | None = None, ylabel: str = "training return"
) -> Axes:
    """Mean over runs with its standard error, and every run as a thin line."""
    style = style or styles(list(curves))
    for label, (timesteps, returns) in curves.items():
        table = pd.DataFrame(np.transpose(returns), index=np.asarray(timesteps, dtype=np.float64)).dropna()
        points = table.rename_axis("step").reset_index().melt("step", value_name="return")
        common: dict[str, Any] = {"data": points, "x": "step", "y": "return", "ax": ax, "legend": False, **style[label]}
        sns.lineplot(**common, label=label, errorbar="se", linewidth=1.8, zorder=3, **_marks(len(table)))
        if table.columns.size > 1:
            # many runs would hide their mean
            alpha = min(0.45, max(0.12, 4 / table.columns.size))
            common["linestyle"] = "-"
            sns.lineplot(**common, units="variable", estimator=None, alpha=alpha, linewidth=0.6, zorder=1)
    return _over_training(ax, curves, ylabel)


def plot_cvar(
    ax: Axes, returns: Mapping[str, ArrayLike], style: Styles | None = None, kappas: ArrayLike = KAPPAS, **options: Any
) -> Axes:
    """
    κ-CVaR of the final returns of each label (``n_runs``) for all κ, with bootstrap bands. It is the mean at κ = 1, and
    the worst run for κ ≤ 1/n.
    """
    style = style or styles(list(returns))
    for label, final in returns.items():
        _band(ax, kappas, statistics.bootstrap_cvar(final, kappas, **options), label, style[label])
    ax.set(xlabel="κ, share of worst runs", ylabel="κ-CVaR of final return", xlim=(0, 1))
    return ax


def plot_cvar_over_training(
    ax: Axes, curves: Curves, kappa: float = 0.2, style: Styles | None = None, **options: Any
) -> Axes:
    """κ-CVaR over runs at each step, with bootstrap bands; ``kappa`` in (0, 1]."""
    style = style or styles(list(curves))
    for label, (timesteps, returns) in curves.items():
        t, r = np.asarray(timesteps, dtype=np.float64), np.asarray(returns, dtype=np.float64)
        known = ~np.isnan(r).any(axis=0)
        _band(ax, t[known], statistics.bootstrap_cvar(r[:, known].T, kappa, **options), label, style[label])
    return _over_training(ax, curves, f"{100 * kappa:g}%-CVaR of training return")


def plot_kl_ratio(ax: Axes, ratios: Mapping[str, ArrayLike], style: Styles | None = None) -> Axes:
    """
    Histogram of the KL ratio of proposed steps: actual KL divergence before the line search over the estimated one, in
    all updates of all runs (``n_updates``). In the upper right corner, the shares of ratios of at least 2 and 3.
    """
    style = style or styles(list(ratios))
    known = {label: np.asarray(values, dtype=np.float64) for label, values in ratios.items() if np.size(values)}
    for row, (label, x) in enumerate(known.items()):
        counts, edges = np.histogram(np.clip(x, 0, LARGEST_RATIO), 50, (0, LARGEST_RATIO))
        color = style[label]["color"]
        ax.stairs(counts / len(x), edges, fill=True, color=color, alpha=0.25)
        ax.stairs(counts / len(x), edges, linewidth=1.4, label=label, **style[label])
        shares = ", ".join(f"{statistics.share_at_least(x, t):.0%} ≥ {t:g}" for t in THRESHOLDS)
        place: dict[str, Any] = {"xy": (1, 1), "xytext": (-4, -4 - 10 * row), "textcoords": "offset points"}
        ax.annotate(shares, xycoords="axes fraction", ha="right", va="top", fontsize=8, color=color, **place)
    for threshold in (1.0, *THRESHOLDS):
        ax.axvline(threshold, color="0.3", linewidth=0.8, linestyle="-" if threshold == 1 else ":", zorder=0)
    # room for the shares above the bars
    ax.margins(y=0.08 + 0.08 * len(known))
    xlabel = f"actual / estimated KL (≥ {LARGEST_RATIO:g} at {LARGEST_RATIO:g})"
    ax.set(xlabel=xlabel, ylabel="share of updates", xlim=(0, LARGEST_RATIO))
    ax.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    return ax


def plot_kl_ratio_over_training(ax: Axes, ratios: Curves, style: Styles | None = None) -> Axes:
    """
    Median and quartiles of the KL ratio of proposed steps in each fiftieth of the training, on a logarithmic axis;
    ``ratios`` have for each label the steps before each update and the ratios, of all runs (``n_updates`` each).
    """
    style = style or styles(list(ratios))
    last = max(np.max(timesteps) for timesteps, _ in ratios.values())
    quartiles: dict[str, Any] = {"estimator": "median", "errorbar": ("pi", 50), "err_kws": {"linewidth": 0}}
    for label, (timesteps, values) in ratios.items():
        x = np.ceil(np.asarray(timesteps, dtype=np.float64) * N_PARTS / last) / N_PARTS * last
        look = {"label": label, "legend": False, "linewidth": 1.8, **style[label], **_marks(len(np.unique(x)))}
        sns.lineplot(x=x, y=values, ax=ax, **quartiles, **look)
    ax.axhline(1.0, color="0.2", linewidth=0.8, zorder=0)
    ax.set_yscale("log")
    low, high = ax.get_ylim()
    # the narrower the range, the more ticks in a decade
    few = (1, 2, 5) if high > 15 * low else (1, 1.5, 2, 3, 5, 7)
    ax.yaxis.set_major_locator(LogLocator(subs=few) if high > 2 * low else MaxNLocator(7, steps=TICKS))
    ax.yaxis.set_major_formatter("{x:g}")
    ax.yaxis.set_minor_locator(NullLocator())
    return _over_training(ax, ratios, "actual / estimated KL")


def plot_performance_profile(
    ax: Axes,
    returns: Mapping[str, ArrayLike],
    style: Styles | None = None,
    xlabel: str = "final return τ",
    **options: Any,
) -> Axes:
    """
    Share of runs that end above each threshold, with bootstrap bands, as rliable draws it: for each label, of the final
    returns (``n_runs``), or of comparable scores (``n_runs x n_tasks``).
    """
    style = style or styles(list(returns))
    every = np.concatenate([np.ravel(values) for values in returns.values()])
    margin = 0.04 * np.ptp(every) or 0.04 * max(1.0, abs(every[0]))
    taus = np.linspace(every.min() - margin, every.max() + margin, 101)
    profiles = {label: statistics.performance_profile(values, taus, **options) for label, values in returns.items()}
    shares = {label: profile.value for label, profile in profiles.items()}
    bands = {label: profile[1:] for label, profile in profiles.items()}
    looks = {f"{name}s": {label: of[name] for label, of in style.items()} for name in ("color", "linestyle")}
    sizes = dict.fromkeys(("labelsize", "ticklabelsize"), matplotlib.rcParams["font.size"])
    return plot_performance_profiles(
        shares, taus, bands, ax=ax, xlabel=xlabel, ylabel="share of runs above τ", **looks, **sizes
    )


def plot_estimates(
    ax: Axes,
    estimates: Mapping[str, Estimate],
    xlabel: str,
    style: Styles | None = None,
    reference: float | None = None,
    xlim: tuple[float, float] | None = None,
) -> Axes:
    """
    Points with their intervals, one row for each label, the first on top, and a vertical line at ``reference``. NaN
    bounds are not drawn. Without ``style``, all rows look alike.
    """
    for row, (label, estimate) in enumerate(estimates.items()):
        color = style[label]["color"] if style else "0.2"
        ax.plot(estimate[1:], [row, row], color=color, linewidth=5, alpha=0.4, solid_capstyle="butt")
        ax.plot(estimate.value, row, "o", color=color, markersize=5)
    if reference is not None:
        ax.axvline(reference, color="0.2", linewidth=0.8, zorder=0)
    ax.set(xlabel=xlabel, xlim=xlim, ylim=(len(estimates) - 0.5, -0.5))
    ax.set_yticks(range(len(estimates)), list(estimates))
    ax.xaxis.set_major_locator(MaxNLocator(5, steps=TICKS))
    ax.grid(axis="y", visible=False)
    return ax


def _band(ax: Axes, x: ArrayLike, band: Estimate, label: str, style: Mapping[str, Any]) -> None:
    ax.plot(x, band.value, label=label, linewidth=1.8, zorder=3, **style)
    ax.fill_between(x, band.low, band.high, color=style["color"], alpha=0.2, linewidth=0, zorder=2)


def _over_training(ax: Axes, curves: Curves, ylabel: str) -> Axes:
    last = max((np.max(timesteps) for timesteps, _ in curves.values() if np.size(timesteps)), default=1)
    ax.set(xlabel="environment steps", ylabel=ylabel, xlim=(0, last))
    ax.xaxis.set_major_formatter(EngFormatter(sep=""))
    ax.xaxis.set_major_locator(MaxNLocator(4, steps=TICKS))
    return ax


# matplotlib's settings for all pictures of a report
STYLE: dict[Any, Any] = {
    "axes.grid": True,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlesize": 10,
    "figure.constrained_layout.h_pad": 0.06,
    "figure.constrained_layout.use": True,
    "figure.constrained_layout.w_pad": 0.1,
    "font.size": 9,
    "grid.alpha": 0.3,
    "legend.edgecolor": "none",
    # gives identical pictures identical identifiers
    "svg.hashsalt": "sb3_uatrpo",
    # names may contain dollar signs
    "text.parse_math": False,
}


def draw_pictures(results: Results, output: Path) -> set[str]:
    """Draw the pictures of a report into a folder, as PNG and SVG; return the names of those with data to show."""
    drawn = set()
    with matplotlib.rc_context(STYLE):
        for name, draw in PICTURES.items():
            figure = draw(results)
            for path in (output / f"{name}.png", output / f"{name}.svg"):
                # an earlier report's picture must not remain
                path.unlink(missing_ok=True)
                if figure is not None:
                    # without its date, an unchanged picture is an unchanged file
                    figure.savefig(path, dpi=150, metadata={"Date": None})
                    drawn.add(name)
    return drawn


def _draw(
    panels: Mapping[Panel, Any], draw: Callable[[Axes, Any], Any], size: Sequence[float] = (3.6, 2.7), share: str = "y"
) -> Figure | None:
    """A panel for each environment and variant. With variants, each environment has a row, which shares an axis."""
    if not panels:
        return None
    env_ids, variants = (list(dict.fromkeys(names)) for names in zip(*panels, strict=True))
    in_rows = len(variants) > 1
    # four panels without variants form two rows
    n_columns = len(variants) if in_rows else 2 if len(panels) == 4 else min(3, len(panels))
    n_rows = len(env_ids) if in_rows else math.ceil(len(panels) / n_columns)
    # a single narrow panel would leave no room for the legend
    figure = Figure(figsize=(max(size[0] * n_columns, 4.6), size[1] * n_rows))
    shared: dict[str, Any] = {f"share{share}": "row"} if in_rows else {}
    axes = figure.subplots(n_rows, n_columns, squeeze=False, **shared)
    entries: dict[str, Any] = {}
    for i, (names, content) in enumerate(panels.items()):
        ax = axes[(env_ids.index(names[0]), variants.index(names[1])) if in_rows else divmod(i, n_columns)]
        draw(ax, content)
        # a variant with several varied values may be broken between them; a title would overlap the next one
        ax.set_title(textwrap.fill(re.sub(",(?! )", ", ", joined(names)), 28))
        ax.tick_params(labelleft=True)
        entries |= {label: handle for handle, label in zip(*ax.get_legend_handles_labels(), strict=True)}
    for ax in axes.flat:
        if not ax.has_data():
            ax.set_axis_off()
    if entries:
        # one row for short labels, one column for those that name hyperparameters
        columns = max(1, min(len(entries), int(figure.get_figwidth() / (0.7 + 0.075 * max(map(len, entries))))))
        figure.set_figheight(figure.get_figheight() + 0.15 + 0.2 * math.ceil(len(entries) / columns))
        figure.legend(entries.values(), entries.keys(), loc="outside upper center", ncols=columns, handlelength=2.6)
    return figure


def _draw_runs(
    plot: Callable[..., Axes], values_of: Callable[[pd.DataFrame], Any], results: Results, **options: Any
) -> Figure | None:
    """The values of the runs of each panel and label, without labels and panels that have no values."""
    panels = {
        panel: {label: values for label, runs in by_label.items() if any(map(np.size, values := values_of(runs)))}
        for panel, by_label in results.panels.items()
    }
    draw = partial(plot, style=styles(results.labels), **options)
    return _draw({panel: by_label for panel, by_label in panels.items() if by_label}, draw)


def _draw_performance_profiles(results: Results) -> Figure | None:
    profiles: dict[Panel, tuple[str, Mapping[str, Array]]] = {
        panel: ("final return τ", {label: runs.final_return for label, runs in by_label.items()})
        for panel, by_label in results.panels.items()
    }
    profiles |= {("all environments", name): ("score τ, 0 to 1", scores) for name, scores in results.scores.items()}
    style = styles(results.labels)
    return _draw(profiles, lambda ax, of: plot_performance_profile(ax, of[1], style, xlabel=of[0]))


def _draw_differences(results: Results) -> Figure | None:
    one = len(results.pairs) == 1
    estimates: dict[Panel, dict[str, Estimate]] = {}
    for comparison in results.comparisons.itertuples():
        pair = "" if one else f"{comparison.name}: "
        by_name = {f"{pair}mean": comparison.mean, f"{pair}{results.cvar_name}": comparison.cvar}
        estimates.setdefault(comparison.panel, {}).update(by_name)
    xlabel = f"{' − '.join(results.pairs[0])}, final return" if one else "difference of final returns"
    return _draw_estimates(estimates, xlabel, reference=0.0)


def _draw_probability_of_improvement(results: Results) -> Figure | None:
    panels: dict[Panel, dict[str, Estimate]] = {}
    for row in results.comparisons.itertuples():
        name = f"{joined(row.panel)}: {row.name.replace(' − ', ' > ')}"
        panels.setdefault(("", ""), {})[name] = row.improvement
    return _draw_estimates(panels, "probability of improvement", reference=0.5, xlim=(-0.02, 1.02))


def _draw_estimates(panels: Mapping[Panel, Mapping[str, Estimate]], xlabel: str, **options: Any) -> Figure | None:
    """Estimates with their names beside the axis."""
    longest = max((len(label) for estimates in panels.values() for label in estimates), default=0)
    size = (2.8 + 0.07 * longest, 0.9 + 0.3 * max(map(len, panels.values()), default=0))
    return _draw(panels, partial(plot_estimates, xlabel=xlabel, **options), size, share="x")


PICTURES: dict[str, Callable[[Results], Figure | None]] = {
    "learning_curves": partial(_draw_runs, plot_learning_curves, learning_curves),
    "evaluations": partial(_draw_runs, plot_learning_curves, evaluations, ylabel="deterministic return"),
    "cvar": partial(_draw_runs, plot_cvar, attrgetter("final_return")),
    "cvar_over_training": lambda results: _draw_runs(
        partial(plot_cvar_over_training, kappa=results.kappa, n_resamples=N_RESAMPLES_OVER_TRAINING),
        learning_curves,
        results,
    ),
    "differences": _draw_differences,
    "kl_ratio": partial(_draw_runs, plot_kl_ratio, partial(update_values, key="kl_ratio")),
    "kl_ratio_over_training": partial(_draw_runs, plot_kl_ratio_over_training, partial(update_series, key="kl_ratio")),
    "performance_profiles": _draw_performance_profiles,
    "interquartile_means": lambda results: _draw_estimates(
        results.interquartile_means, "IQM of final return", style=styles(results.labels)
    ),
    "probability_of_improvement": _draw_probability_of_improvement,
}
