"""Pictures of a report: tidy tables in seaborn's facets, a panel per environment and condition, a colour per label."""

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import matplotlib
import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import seaborn as sns
from matplotlib.ticker import EngFormatter

from sb3_uatrpo.study import statistics
from sb3_uatrpo.study.results import GROUP, Results, in_order, joined
from sb3_uatrpo.study.statistics import N_RESAMPLES_OVER_TRAINING, Estimate

KAPPAS = np.linspace(0.01, 1.0, 100)
# Larger KL ratios are drawn in the last bin; the share of updates at or above each threshold is shown
LARGEST_RATIO, THRESHOLDS = 5.0, (2.0, 3.0)
# Number of parts of the training, each with its own median KL ratio
N_PARTS = 50
STEPS = "environment steps"
STYLE: dict[Any, Any] = {
    "axes.grid": True, "axes.spines.right": False, "axes.spines.top": False, "font.size": 9, "grid.alpha": 0.3,
    # gives identical pictures identical identifiers; names may contain dollar signs
    "svg.hashsalt": "sb3_uatrpo", "text.parse_math": False,
}  # fmt: skip


def draw_pictures(results: Results, output: Path) -> set[str]:
    """Draw the pictures of a report into a folder, as PNG and SVG; return the names of those with data to show."""
    drawn = set()
    with matplotlib.rc_context(STYLE):
        for name, draw in PICTURES.items():
            grid = draw(results)
            for path in (output / f"{name}.png", output / f"{name}.svg"):
                # an earlier report's picture must not remain
                path.unlink(missing_ok=True)
                if grid is not None:
                    # without its date, an unchanged picture is an unchanged file
                    grid.savefig(path, dpi=120, metadata={"Date": None})
                    drawn.add(name)
            plt.close("all")
    return drawn


def _facets(results: Results, table: pd.DataFrame, draw: Callable[..., None], **options: Any) -> sns.FacetGrid:
    labels = in_order(results.compared.label)
    table = table.assign(panel=[joined(panel) for panel in zip(table.env, table.condition, strict=True)])
    # with conditions, each environment has a row
    columns = table.groupby("env").condition.nunique().max() if table.condition.any() else min(3, table.panel.nunique())
    look = {"hue": "label", "hue_order": labels, "palette": sns.color_palette("colorblind", len(labels))}
    look |= {"col": "panel", "col_wrap": columns, "sharex": False, "sharey": False, "despine": False}
    grid = sns.FacetGrid(table, **{**look, "height": 2.7, "aspect": 1.35, **options})
    grid.map_dataframe(draw).set_titles("{col_name}")
    if grid._hue_var is not None:
        sns.move_legend(grid.add_legend(title=""), "lower center", bbox_to_anchor=(0.5, 1.0), ncols=3, frameon=False)
    return grid


def _lines(
    results: Results, table: pd.DataFrame, function: Callable[[pd.DataFrame], pd.DataFrame], xlabel: str, ylabel: str
) -> sns.FacetGrid | None:
    """
    For each group of rows, the line and the band that ``function`` makes of them: a table with the fields of
    ``Estimate``, by x. Its further columns are single runs, drawn as thin lines.
    """
    parts = {group: function(rows) for group, rows in table.groupby(GROUP, sort=False)}
    if not parts:
        return None

    def draw(data: pd.DataFrame, color: Any, label: str = "") -> None:
        x, marker = data.index.get_level_values(-1), {"marker": "o", "markersize": 4} if len(data) <= 20 else {}
        plt.plot(x, data.filter(like="run ").dropna(axis=1, how="all"), color=color, linewidth=0.5, alpha=0.3)
        plt.plot(x, data.value, color=color, label=label, linewidth=1.8, **marker)
        plt.fill_between(x, data.low, data.high, color=color, alpha=0.2, linewidth=0)

    grid = _facets(results, pd.concat(parts, names=GROUP).reset_index(GROUP), draw).set_axis_labels(xlabel, ylabel)
    for ax in grid.axes.flat if xlabel == STEPS else ():
        ax.set_xlim(left=0)
        ax.xaxis.set_major_formatter(EngFormatter(sep=""))
    return grid


def _by_step(rows: pd.DataFrame) -> pd.DataFrame:
    """Returns, a column per run, from the step on at which all runs have one."""
    return rows.pivot_table(index="step", columns="run", values="return", dropna=False).dropna().add_prefix("run ")


def _mean_and_error(rows: pd.DataFrame) -> pd.DataFrame:
    runs = _by_step(rows)
    mean, error = runs.mean(axis=1), runs.sem(axis=1).fillna(0)
    return runs.assign(value=mean, low=mean - error, high=mean + error)


def _estimate(x: Iterable[float], estimate: Estimate) -> pd.DataFrame:
    return pd.DataFrame(estimate._asdict(), index=x)


def _cvar_over_training(results: Results) -> sns.FacetGrid | None:
    def band(rows: pd.DataFrame) -> pd.DataFrame:
        runs = _by_step(rows)
        options = {"n_resamples": N_RESAMPLES_OVER_TRAINING}
        return _estimate(runs.index, statistics.bootstrap_cvar(runs, results.kappa, **options))

    return _lines(results, results.curves, band, STEPS, f"{results.cvar_name} of training return")


def _performance_profiles(results: Results) -> sns.FacetGrid | None:
    """Of each environment, and of the scores over all of them."""
    ranges = results.compared.groupby("env").final_return.agg(["min", "max"]).to_dict("index")
    finals = [results.compared[[*GROUP, "final_return"]].assign(task=0)]
    for condition, by_label in results.scores.items():
        for label, scores in by_label.items():
            table = pd.DataFrame(scores).melt(var_name="task", value_name="final_return")
            finals.append(table.assign(env="all environments", condition=condition, label=label))

    def band(rows: pd.DataFrame) -> pd.DataFrame:
        limits = ranges.get(rows.env.iloc[0], {"min": 0.0, "max": 1.0})
        taus = np.linspace(limits["min"], limits["max"], 101)
        columns = [of.final_return for _, of in rows.groupby("task")]
        return _estimate(taus, statistics.performance_profile(np.stack(columns, axis=1), taus))

    return _lines(results, pd.concat(finals), band, "final return τ, or score from 0 to 1", "share of runs above τ")


def _kl_ratio(results: Results) -> sns.FacetGrid | None:
    """Histograms, with the shares of large ratios."""
    table = results.series("updates", "kl_ratio")
    labels = in_order(table.label)

    def draw(data: pd.DataFrame, color: Any, label: str = "") -> None:
        counts, edges = np.histogram(data.kl_ratio.clip(0, LARGEST_RATIO), 50, (0, LARGEST_RATIO))
        plt.stairs(counts / len(data), edges, fill=True, color=color, alpha=0.4, label=label)
        shares = ", ".join(f"{statistics.share_at_least(data.kl_ratio, t):.0%} ≥ {t:g}" for t in THRESHOLDS)
        place: dict[str, Any] = {"xycoords": "axes fraction", "textcoords": "offset points", "ha": "right", "va": "top"}
        plt.annotate(shares, (1, 1), (-4, -4 - 10 * labels.index(label)), fontsize=8, color=color, **place)

    if table.empty:
        return None
    grid = _facets(results, table, draw).refline(x=THRESHOLDS[0], linestyle=":").refline(x=THRESHOLDS[1], linestyle=":")
    xlabel = f"actual / estimated KL (≥ {LARGEST_RATIO:g} at {LARGEST_RATIO:g})"
    return grid.set_axis_labels(xlabel, "share of updates")


def _kl_ratio_over_training(results: Results) -> sns.FacetGrid | None:
    table = results.series("updates", "kl_ratio")
    table["step"] = np.ceil(table.step * N_PARTS / (last := table.step.max())) * last / N_PARTS

    def band(rows: pd.DataFrame) -> pd.DataFrame:
        quartiles = rows.groupby("step").kl_ratio.quantile([0.5, 0.25, 0.75]).unstack()
        return quartiles.set_axis(["value", "low", "high"], axis=1)

    grid = _lines(results, table, band, STEPS, "actual / estimated KL")
    return grid and grid.set(yscale="log").refline(y=1, linestyle="-", color="0.2", linewidth=0.8)


def _forest(
    results: Results, rows: Sequence[tuple[str, str, str, Estimate]], xlabel: str, reference: float | None = None
) -> sns.FacetGrid | None:
    """Points with their intervals; each row has an environment, a condition, a name and the estimate."""
    if not rows:
        return None
    estimates = [(*names, *map(float, estimate)) for *names, estimate in rows]
    table = pd.DataFrame(estimates, columns=[*GROUP, *Estimate._fields])

    def draw(data: pd.DataFrame, color: Any, label: str = "") -> None:
        plt.hlines(data.label, data.low, data.high, color="0.65", linewidth=5)
        plt.plot(data.value, data.label, "o", color="0.2", markersize=5)
        plt.ylim(len(data) - 0.5, -0.5)

    height = 0.9 + 0.25 * table.groupby(GROUP[:2]).size().max()
    aspect = (2.6 + 0.07 * max(map(len, table.label))) / height
    grid = _facets(results, table, draw, hue=None, height=height, aspect=aspect).set_axis_labels(xlabel, "")
    return grid if reference is None else grid.refline(x=reference, linestyle="-", color="0.2", linewidth=0.8)


def _differences(results: Results) -> list[tuple[str, str, str, Estimate]]:
    names = {"mean": "mean", "cvar": results.cvar_name}
    return [
        (of.env, of.condition, f"{' − '.join(of.pair)}: {name}", getattr(of, field))
        for of in results.comparisons.itertuples()
        for field, name in names.items()
    ]


PICTURES: dict[str, Callable[[Results], sns.FacetGrid | None]] = {
    "learning_curves": lambda of: _lines(of, of.curves, _mean_and_error, STEPS, "training return"),
    "evaluations": lambda of: _lines(
        of, of.series("evaluations", "return"), _mean_and_error, STEPS, "deterministic return"
    ),
    "cvar": lambda of: _lines(
        of,
        of.compared,
        lambda runs: _estimate(KAPPAS, statistics.bootstrap_cvar(runs.final_return, KAPPAS)),
        "κ, share of worst runs",
        "κ-CVaR of final return",
    ),
    "cvar_over_training": _cvar_over_training,
    "differences": lambda of: _forest(of, _differences(of), "difference of final returns", 0.0),
    "kl_ratio": _kl_ratio,
    "kl_ratio_over_training": _kl_ratio_over_training,
    "interquartile_means": lambda of: _forest(
        of,
        [(*group, statistics.interquartile_mean(runs.final_return)) for group, runs in of.groups.items()],
        "IQM of final return",
    ),
    "performance_profiles": _performance_profiles,
    "probability_of_improvement": lambda of: _forest(
        of,
        [(row.env, row.condition, " > ".join(row.pair), row.improvement) for row in of.comparisons.itertuples()],
        "probability of improvement",
        0.5,
    ),
}
