"""The pictures of a report: what ``plots`` draws, one panel for each environment and variant."""

import math
import re
import textwrap
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from sb3_uatrpo.study import plots
from sb3_uatrpo.study.groups import Group
from sb3_uatrpo.study.results import Panel, Results
from sb3_uatrpo.study.statistics import N_RESAMPLES_OVER_TRAINING, Array, Estimate

FORMATS = ("png", "svg")


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
    # legible where it lies on a line of the grid
    "legend.edgecolor": "none",
    "legend.framealpha": 0.9,
    # equal pictures have equal identifiers in them
    "svg.hashsalt": "sb3_uatrpo",
    # a name with a dollar sign is a name
    "text.parse_math": False,
}


def draw_pictures(results: Results, output: Path) -> set[str]:
    """
    :param results: what to show
    :param output: folder to write to
    :return: names of the pictures that there was something to draw for; each is there in every one of ``FORMATS``
    """
    drawn = set()
    with matplotlib.rc_context(STYLE):
        for name, draw in PICTURES.items():
            figure = draw(results)
            for extension in FORMATS:
                path = output / f"{name}.{extension}"
                # an earlier report's picture does not outlive its reason
                path.unlink(missing_ok=True)
                if figure is not None:
                    # without its date, an unchanged picture is an unchanged file
                    figure.savefig(path, dpi=150, metadata={"Date": None} if extension == "svg" else None)
                    drawn.add(name)
    return drawn


def _draw(
    keys: Sequence[Panel],
    draw: Callable[[Axes, Panel], Any],
    legend: bool = True,
    size: tuple[float, float] = (3.6, 2.7),
    share: str | None = "y",
) -> Figure:
    """
    One panel for each environment and variant. If there are variants, each environment has a row, within which the axis
    ``share``, if any, is shared.
    """
    env_ids = list(dict.fromkeys(env_id for env_id, _ in keys))
    variants = list(dict.fromkeys(variant for _, variant in keys))
    in_rows = len(variants) > 1
    if in_rows:
        places = {(e, v): (env_ids.index(e), variants.index(v)) for e, v in keys}
        n_rows, n_columns = len(env_ids), len(variants)
    else:
        # four are two by two
        n_columns = len(keys) if len(keys) <= 3 else min(3, math.ceil(math.sqrt(len(keys))))
        n_rows = math.ceil(len(keys) / n_columns)
        places = {key: divmod(i, n_columns) for i, key in enumerate(keys)}
    # a single narrow panel would leave no room for the legend
    figure = Figure(figsize=(max(size[0] * n_columns, 4.6), size[1] * n_rows))
    shared: dict[str, Any] = {axis: "row" if in_rows and axis == share else False for axis in "xy"}
    axes = figure.subplots(n_rows, n_columns, squeeze=False, sharex=shared["x"], sharey=shared["y"])
    for key, place in places.items():
        ax = axes[place]
        draw(ax, key)
        # a variant of several settings may be broken between them
        title = re.sub(",(?! )", ", ", ", ".join(part for part in key if part))
        # a title is not laid out: what is wider than the narrowest panel would be cut off or written over
        ax.set_title(textwrap.fill(title, 28))
        ax.tick_params(labelleft=True)
    for place in np.ndindex(axes.shape):
        if place not in places.values():
            axes[place].set_axis_off()
    if legend:
        entries: dict[str, Any] = {}
        for ax in axes.flat:
            entries |= {label: handle for handle, label in zip(*ax.get_legend_handles_labels(), strict=True)}
        # one row for short labels, one column for those that name settings
        longest = max(map(len, entries))
        columns = max(1, min(len(entries), int(figure.get_figwidth() / (0.7 + 0.075 * longest))))
        figure.set_figheight(figure.get_figheight() + 0.15 + 0.2 * math.ceil(len(entries) / columns))
        figure.legend(entries.values(), entries.keys(), loc="outside upper center", ncols=columns, handlelength=2.6)
    return figure


def _draw_learning_curves(results: Results) -> Figure:
    style = plots.styles(results.labels)

    def draw(ax: Axes, key: Panel) -> None:
        curves = {label: (group.grid, group.curves) for label, group in results.panels[key].items()}
        plots.plot_learning_curves(ax, curves, style)

    return _draw(list(results.panels), draw)


def _draw_evaluations(results: Results) -> Figure | None:
    style = plots.styles(results.labels)
    curves = {
        key: {label: group.evaluations for label, group in panel.items() if len(group.evaluations[0])}
        for key, panel in results.panels.items()
    }
    keys = [key for key, own in curves.items() if own]

    def draw(ax: Axes, key: Panel) -> None:
        plots.plot_learning_curves(ax, curves[key], style, ylabel="deterministic return")

    return _draw(keys, draw) if keys else None


def _draw_cvar(results: Results) -> Figure:
    style = plots.styles(results.labels)

    def draw(ax: Axes, key: Panel) -> None:
        plots.plot_cvar(ax, _final_returns(results.panels[key]), style)

    return _draw(list(results.panels), draw)


def _draw_cvar_over_training(results: Results) -> Figure:
    style = plots.styles(results.labels)

    def draw(ax: Axes, key: Panel) -> None:
        curves = {label: (group.grid, group.curves) for label, group in results.panels[key].items()}
        plots.plot_cvar_over_training(ax, curves, results.kappa, style, n_resamples=N_RESAMPLES_OVER_TRAINING)

    return _draw(list(results.panels), draw)


def _draw_kl_ratio(results: Results) -> Figure | None:
    style = plots.styles(results.labels)
    ratios = {
        key: {label: values for label, group in panel.items() if len(values := group.update_values("kl_ratio"))}
        for key, panel in results.panels.items()
    }
    keys = [key for key, own in ratios.items() if own]

    def draw(ax: Axes, key: Panel) -> None:
        plots.plot_kl_ratio(ax, ratios[key], style)
        ax.legend(loc="upper right", fontsize=8)
        # room for the legend above the bars; margins hold for all panels of a row, limits would be the last one's
        ax.margins(y=0.08 + 0.1 * max(map(len, ratios.values())))

    return _draw(keys, draw, legend=False, size=(4.4, 2.9)) if keys else None


def _draw_performance_profiles(results: Results) -> Figure:
    style = plots.styles(results.labels)
    everywhere = "all environments"
    keys = [*results.panels, *((everywhere, variant) for variant in results.scores)]

    def draw(ax: Axes, key: Panel) -> None:
        env_id, variant = key
        if env_id == everywhere:
            plots.plot_performance_profile(ax, results.scores[variant], style, "score τ, 0 to 1")
        else:
            plots.plot_performance_profile(ax, _final_returns(results.panels[key]), style)

    return _draw(keys, draw, share=None)


def _draw_interquartile_means(results: Results) -> Figure:
    estimates: dict[Panel, dict[str, Estimate]] = {key: {} for key in results.panels}
    for summary in results.summaries:
        group = summary.group
        estimates[group.env_id, group.variant][group.label] = summary.interquartile_mean
    return _draw_estimates(estimates, "IQM of final return", style=plots.styles(results.labels))


def _draw_differences(results: Results) -> Figure | None:
    if not results.comparisons:
        return None
    one = len(results.pairs) == 1
    estimates: dict[Panel, dict[str, Estimate]] = {}
    for key, comparisons in results.comparisons.items():
        own = estimates[key] = {}
        for comparison in comparisons:
            pair = "" if one else f"{comparison.name}: "
            own[f"{pair}mean"] = comparison.mean
            own[f"{pair}{results.cvar_name}"] = comparison.cvar
    xlabel = f"{' − '.join(results.pairs[0])}, final return" if one else "difference of final returns"
    return _draw_estimates(estimates, xlabel, reference=0.0)


def _draw_estimates(estimates: Mapping[Panel, Mapping[str, Estimate]], xlabel: str, **options: Any) -> Figure:
    def draw(ax: Axes, key: Panel) -> None:
        plots.plot_estimates(ax, estimates[key], xlabel, **options)

    longest = max(len(label) for own in estimates.values() for label in own)
    size = (2.8 + 0.07 * longest, 0.9 + 0.3 * max(map(len, estimates.values())))
    return _draw(list(estimates), draw, legend=False, size=size, share="x")


def _draw_probability_of_improvement(results: Results) -> Figure | None:
    if not results.comparisons:
        return None
    estimates = {
        f"{', '.join(part for part in key if part)}: {comparison.name.replace(' − ', ' > ')}": comparison.improvement
        for key, own in results.comparisons.items()
        for comparison in own
    }
    figure = Figure(figsize=(3.4 + 0.07 * max(map(len, estimates)), 0.9 + 0.3 * len(estimates)))
    ax = plots.plot_estimates(figure.subplots(), estimates, "probability of improvement", reference=0.5)
    ax.set_xlim(-0.02, 1.02)
    ax.set_xticks(np.linspace(0, 1, 5))
    return figure


PICTURES: dict[str, Callable[[Results], Figure | None]] = {
    "learning_curves": _draw_learning_curves,
    "evaluations": _draw_evaluations,
    "cvar": _draw_cvar,
    "cvar_over_training": _draw_cvar_over_training,
    "differences": _draw_differences,
    "kl_ratio": _draw_kl_ratio,
    "performance_profiles": _draw_performance_profiles,
    "interquartile_means": _draw_interquartile_means,
    "probability_of_improvement": _draw_probability_of_improvement,
}


def _final_returns(panel: Mapping[str, Group]) -> dict[str, Array]:
    return {label: group.final_returns for label, group in panel.items()}
