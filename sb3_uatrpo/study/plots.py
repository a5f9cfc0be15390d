"""
Pictures of many runs. Every function draws on the ``ax`` that it is given and returns it; what it draws comes as
arrays, one entry for each label, and the labels are there for ``ax.legend()``.

Colours and line styles come from ``styles``, so that a label looks the same in all pictures and in black and white.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib.ticker import EngFormatter, MaxNLocator, PercentFormatter
from numpy.typing import ArrayLike

from sb3_uatrpo.study import statistics
from sb3_uatrpo.study.statistics import Array, Estimate

if TYPE_CHECKING:
    from matplotlib.axes import Axes

KAPPAS = np.linspace(0.01, 1.0, 100)
LINE_STYLES = ("-", "--", "-.", ":")
# Ratios above are drawn in the last bin, and those below 0, where an estimate was negative, in the first
LARGEST_RATIO = 5.0

Styles = Mapping[str, Mapping[str, Any]]
Curves = Mapping[str, tuple[ArrayLike, ArrayLike]]


def styles(labels: Sequence[str]) -> dict[str, dict[str, Any]]:
    """
    :param labels: what is compared
    :return: for each label, a colour that colour-blind readers can tell apart, and a line style
    """
    import seaborn as sns

    colors = sns.color_palette("colorblind", max(len(labels), 1))
    return {
        label: {"color": color, "linestyle": LINE_STYLES[i % len(LINE_STYLES)]}
        for i, (label, color) in enumerate(zip(labels, colors, strict=False))
    }


def plot_learning_curves(
    ax: "Axes", curves: Curves, style: Styles | None = None, ylabel: str = "training return", traces: bool = True
) -> "Axes":
    """
    Mean over runs with its standard error, and every run as a thin line.

    :param ax: where to draw
    :param curves: for each label the steps (``n_points``) and the returns (``n_runs x n_points``); NaN before a run's
        first episode. The mean begins where all runs have a value.
    :param style: what ``styles`` returns
    :param ylabel: what the returns are
    :param traces: whether to draw single runs
    :return: ``ax``
    """
    style = style or styles(list(curves))
    for label, (timesteps, returns) in curves.items():
        t, r = np.asarray(timesteps, dtype=np.float64), np.asarray(returns, dtype=np.float64)
        mean, error = r.mean(0), statistics.standard_error(r)
        # few points, as of evaluations, are marked: a single one would not be seen otherwise
        marker = "o" if len(t) <= 20 else ""
        ax.plot(t, mean, label=label, linewidth=1.8, marker=marker, markersize=3, zorder=3, **style[label])
        ax.fill_between(t, mean - error, mean + error, color=style[label]["color"], alpha=0.25, linewidth=0, zorder=2)
        if traces and len(r) > 1:
            # many runs would hide their mean
            alpha = min(0.45, max(0.12, 4 / len(r)))
            ax.plot(t, r.T, color=style[label]["color"], alpha=alpha, linewidth=0.6, zorder=1)
    return _over_training(ax, curves, ylabel)


def plot_cvar(
    ax: "Axes",
    returns: Mapping[str, ArrayLike],
    style: Styles | None = None,
    kappas: ArrayLike = KAPPAS,
    **options: Any,
) -> "Axes":
    """
    κ-CVaR of the final return for all κ, with bootstrap bands. At the right it is the mean, up to 1/n the worst run.

    :param ax: where to draw
    :param returns: for each label the final returns (``n_runs``)
    :param style: what ``styles`` returns
    :param kappas: in (0, 1], ascending
    :param options: of ``statistics.bootstrap``
    :return: ``ax``
    """
    style = style or styles(list(returns))
    x = np.asarray(kappas, dtype=np.float64)
    for label, final in returns.items():
        _band(ax, x, statistics.bootstrap_cvar(final, x, **options), label, style[label])
    ax.set(xlabel="κ, share of worst runs", ylabel="κ-CVaR of final return", xlim=(0, 1))
    return ax


def plot_cvar_over_training(
    ax: "Axes", curves: Curves, kappa: float = 0.2, style: Styles | None = None, **options: Any
) -> "Axes":
    """
    CVaR over runs at each step, with bootstrap bands.

    :param ax: where to draw
    :param curves: as for ``plot_learning_curves``
    :param kappa: in (0, 1]
    :param style: what ``styles`` returns
    :param options: of ``statistics.bootstrap``
    :return: ``ax``
    """
    style = style or styles(list(curves))
    for label, (timesteps, returns) in curves.items():
        t, r = np.asarray(timesteps, dtype=np.float64), np.asarray(returns, dtype=np.float64)
        known = ~np.isnan(r).any(axis=0)
        _band(ax, t[known], statistics.bootstrap_cvar(r[:, known].T, kappa, **options), label, style[label])
    return _over_training(ax, curves, f"{100 * kappa:g}%-CVaR of training return")


def plot_kl_ratio(
    ax: "Axes",
    ratios: Mapping[str, ArrayLike],
    style: Styles | None = None,
    thresholds: Sequence[float] = (2.0, 3.0),
    bins: int = 50,
) -> "Axes":
    """
    Histogram of the KL ratio of proposed steps: actual KL divergence before the line search over the estimated one. The
    legend has the shares that are at least each threshold.

    :param ax: where to draw
    :param ratios: for each label the ratios of all updates of all runs (``n_updates``)
    :param style: what ``styles`` returns
    :param thresholds: where to draw lines
    :param bins: number of bins between 0 and ``LARGEST_RATIO``
    :return: ``ax``
    """
    style = style or styles(list(ratios))
    edges = np.linspace(0, LARGEST_RATIO, bins + 1)
    for label, values in ratios.items():
        x = np.asarray(values, dtype=np.float64)
        if not len(x):
            continue
        shares = ", ".join(f"{statistics.share_at_least(x, t):.0%} ≥ {t:g}" for t in thresholds)
        counts, _ = np.histogram(np.clip(x, 0, LARGEST_RATIO), edges)
        color, line = style[label]["color"], style[label]["linestyle"]
        ax.stairs(counts / len(x), edges, fill=True, color=color, alpha=0.25)
        ax.stairs(counts / len(x), edges, color=color, linestyle=line, linewidth=1.4, label=f"{label}: {shares}")
    ax.axvline(1.0, color="0.2", linewidth=0.8, zorder=0)
    for threshold in thresholds:
        ax.axvline(threshold, color="0.5", linewidth=0.8, linestyle=":", zorder=0)
    ax.set(
        xlabel=f"actual / estimated KL of proposed steps (≥ {LARGEST_RATIO:g} at {LARGEST_RATIO:g})",
        ylabel="share of updates",
        xlim=(0, LARGEST_RATIO),
    )
    ax.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    return ax


def plot_performance_profile(
    ax: "Axes",
    returns: Mapping[str, ArrayLike],
    style: Styles | None = None,
    xlabel: str = "final return τ",
    n_thresholds: int = 101,
    **options: Any,
) -> "Axes":
    """
    The share of runs that end above each threshold, with bootstrap bands (rliable).

    :param ax: where to draw
    :param returns: for each label the final returns (``n_runs``), or comparable scores (``n_runs x n_tasks``)
    :param style: what ``styles`` returns
    :param xlabel: what the returns are
    :param n_thresholds: how many thresholds, from a little below the lowest to a little above the highest return
    :param options: of ``statistics.performance_profile``
    :return: ``ax``
    """
    style = style or styles(list(returns))
    together = np.concatenate([np.ravel(values) for values in returns.values()])
    margin = 0.04 * np.ptp(together) or 0.04 * max(1.0, abs(together[0]))
    thresholds = np.linspace(together.min() - margin, together.max() + margin, n_thresholds)
    for label, values in returns.items():
        profile = statistics.performance_profile(values, thresholds, **options)
        _band(ax, thresholds, profile, label, style[label], steps=True)
    ax.set(xlabel=xlabel, ylabel="share of runs above τ", xlim=(thresholds[0], thresholds[-1]), ylim=(-0.02, 1.02))
    ax.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    return ax


def plot_estimates(
    ax: "Axes",
    estimates: Mapping[str, Estimate],
    xlabel: str,
    style: Styles | None = None,
    reference: float | None = None,
) -> "Axes":
    """
    Points with their intervals, one row for each label, the first on top.

    :param ax: where to draw
    :param estimates: for each label a number and its bounds; NaN bounds are not drawn
    :param xlabel: what the numbers are
    :param style: what ``styles`` returns; all are drawn alike without it
    :param reference: where to draw a line, for example 0 for differences
    :return: ``ax``
    """
    for row, (label, estimate) in enumerate(estimates.items()):
        value, low, high = (float(np.squeeze(x)) for x in estimate)
        color = style[label]["color"] if style else "0.2"
        ax.plot([low, high], [row, row], color=color, linewidth=5, alpha=0.4, solid_capstyle="butt")
        ax.plot(value, row, "o", color=color, markersize=5)
    if reference is not None:
        ax.axvline(reference, color="0.2", linewidth=0.8, zorder=0)
    ax.set(xlabel=xlabel, ylim=(len(estimates) - 0.5, -0.5))
    ax.set_yticks(range(len(estimates)), list(estimates))
    ax.xaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 2.5, 5, 10]))
    ax.grid(axis="y", visible=False)
    return ax


def _band(ax: "Axes", x: Array, estimate: Estimate, label: str, style: Mapping[str, Any], steps: bool = False) -> None:
    drawstyle, step = ("steps-post", "post") if steps else ("default", None)
    ax.plot(x, estimate.value, label=label, linewidth=1.8, zorder=3, drawstyle=drawstyle, **style)
    low, high = estimate.low, estimate.high
    ax.fill_between(x, low, high, color=style["color"], alpha=0.2, linewidth=0, zorder=2, step=step)  # type: ignore[arg-type]


def _over_training(ax: "Axes", curves: Curves, ylabel: str) -> "Axes":
    last = max((np.max(timesteps) for timesteps, _ in curves.values() if np.size(timesteps)), default=1)
    ax.set(xlabel="environment steps", ylabel=ylabel, xlim=(0, last))
    ax.xaxis.set_major_formatter(EngFormatter(sep=""))
    ax.xaxis.set_major_locator(MaxNLocator(4, steps=[1, 2, 2.5, 5, 10]))
    return ax
