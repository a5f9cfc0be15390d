"""Pictures of a report: tidy tables in seaborn's facets, a panel per environment and condition, a colour per label."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib
import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import seaborn as sns
from matplotlib.ticker import EngFormatter

from sb3_uatrpo.study import statistics
from sb3_uatrpo.study.results import GROUP, THRESHOLDS, Results, in_order, joined, learning_curves
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


def draw_pictures(results: Results, output: Path) -> list[str]:
    """Draw the pictures of a report into a folder, as PNG and SVG; return the names of those with data to show."""
    drawn: list[str] = []

    def save(name: str, table: pd.DataFrame, draw: Callable[..., sns.FacetGrid], *options: Any) -> None:
        grid = draw(results, table, *options) if len(table) else None
        for path in (output / f"{name}.png", output / f"{name}.svg"):
            # an earlier report's picture must not remain
            path.unlink(missing_ok=True)
            if grid is not None:
                # without its date, an unchanged picture is an unchanged file
                grid.savefig(path, dpi=120, metadata={"Date": None})
        drawn.extend([name] if grid is not None else [])
        plt.close("all")

    def cvars(runs: pd.DataFrame) -> pd.DataFrame:
        return _band(KAPPAS, statistics.bootstrap_cvar(runs.final_return, KAPPAS))

    def cvar_by_step(rows: pd.DataFrame) -> pd.DataFrame:
        runs, n_resamples = _by_step(rows), N_RESAMPLES_OVER_TRAINING
        return _band(runs.index, statistics.bootstrap_cvar(runs, results.kappa, n_resamples=n_resamples))

    curves, ratios = learning_curves(results.study).dropna(), results.series("updates", "kl_ratio")
    ratios["part"] = np.ceil(ratios.step * N_PARTS / ratios.step.max()) * ratios.step.max() / N_PARTS
    evaluations, differences = results.series("evaluations", "return"), results.differences
    with matplotlib.rc_context(STYLE):
        save("learning_curves", curves, _lines, _mean_and_error, STEPS, "training return")
        save("evaluations", evaluations, _lines, _mean_and_error, STEPS, "deterministic return")
        save("cvar", results.compared, _lines, cvars, "κ, share of worst runs", "κ-CVaR of final return")
        save("cvar_over_training", curves, _lines, cvar_by_step, STEPS, f"{results.cvar} of training return")
        save("differences", differences, _forest, ["of means", f"of {results.cvar}"], 0.0)
        save("probability_of_improvement", differences, _forest, ["probability of improvement"], 0.5)
        save("kl_ratio", ratios, _histograms)
        save("kl_ratio_over_training", ratios, _lines, _quartiles, STEPS, "actual / estimated KL")
        save("interquartile_means", results.returns, _forest, ["IQM"])
        save("performance_profiles", _scores(results), _lines, _profile, "τ", "share of runs above τ")
    return drawn


def _facets(results: Results, table: pd.DataFrame, draw: Callable[..., None], **options: Any) -> sns.FacetGrid:
    labels = in_order(results.compared.label)
    table = table.assign(panel=[joined(panel) for panel in zip(table.env, table.condition, strict=True)])
    # with conditions, each environment has a row
    n = table.groupby("env").condition.nunique().max() if table.condition.any() else table.panel.nunique()
    look = {"hue": "label", "hue_order": labels, "palette": sns.color_palette("colorblind", len(labels))}
    look |= {"col": "panel", "col_wrap": n if table.condition.any() else {1: 1, 2: 2, 4: 2}.get(n, 3)}
    look |= {"sharex": False, "sharey": False, "despine": False, "height": 2.7, "aspect": 1.35}
    grid = sns.FacetGrid(table, **{**look, **options}).map_dataframe(draw).set_titles("{col_name}")
    if "hue" not in options:
        sns.move_legend(grid.add_legend(title=""), "lower center", bbox_to_anchor=(0.5, 1), ncols=3, frameon=False)
    return grid


def _lines(
    results: Results, table: pd.DataFrame, function: Callable[[pd.DataFrame], pd.DataFrame], xlabel: str, ylabel: str
) -> sns.FacetGrid:
    """
    The line and the band that ``function`` makes of each group's rows: a table with the fields of ``Estimate``, by x.
    Its further columns are single runs, drawn as thin lines.
    """

    def draw(data: pd.DataFrame, color: Any, label: str) -> None:
        # few points, such as those of evaluations, are marked: a single one would be invisible otherwise
        x, marker = data.index.get_level_values(-1), "o" if len(data) <= 20 else ""
        plt.plot(x, data.filter(like="run ").dropna(axis=1, how="all"), color=color, linewidth=0.5, alpha=0.3)
        plt.plot(x, data.value, color=color, label=label, linewidth=1.8, marker=marker, markersize=4)
        plt.fill_between(x, data.low, data.high, color=color, alpha=0.2, linewidth=0)

    parts = {group: function(rows) for group, rows in table.groupby(GROUP, sort=False)}
    grid = _facets(results, pd.concat(parts, names=GROUP).reset_index(GROUP), draw).set_axis_labels(xlabel, ylabel)
    for ax in grid.axes.flat if xlabel == STEPS else ():
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


def _scores(results: Results) -> pd.DataFrame:
    """The final returns in each environment, and the scores over all of them."""
    tables = [results.compared.rename(columns={"final_return": "score"}).assign(task=0)]
    for (condition, label), scores in results.scores.items():
        table = pd.DataFrame(scores).melt(var_name="task", value_name="score")
        tables.append(table.assign(env="all environments (scores)", condition=condition, label=label))
    table = pd.concat(tables)[[*GROUP, "task", "score"]]
    return table.join(table.groupby("env").score.agg(["min", "max"]), on="env")


def _profile(rows: pd.DataFrame) -> pd.DataFrame:
    taus = np.linspace(rows["min"].iloc[0], rows["max"].iloc[0], 101)
    scores = np.stack([of_task for _, of_task in rows.groupby("task").score], axis=1)
    return _band(taus, statistics.performance_profile(scores, taus))


def _histograms(results: Results, ratios: pd.DataFrame) -> sns.FacetGrid:
    labels = in_order(ratios.label)

    def draw(data: pd.DataFrame, color: Any, label: str) -> None:
        counts, edges = np.histogram(data.kl_ratio.clip(0, LARGEST_RATIO), 50, (0, LARGEST_RATIO))
        plt.stairs(counts / len(data), edges, fill=True, color=color, alpha=0.4, label=label)
        shares = ", ".join(f"{statistics.share_at_least(data.kl_ratio, t):.0%} ≥ {t:g}" for t in THRESHOLDS)
        place: dict[str, Any] = {"xycoords": "axes fraction", "textcoords": "offset points", "ha": "right", "va": "top"}
        plt.annotate(shares, (1, 1), (-4, -4 - 10 * labels.index(label)), fontsize=8, color=color, **place)

    grid = _facets(results, ratios, draw)
    return grid.set_axis_labels(f"actual / estimated KL (≥ {LARGEST_RATIO:g} at {LARGEST_RATIO:g})", "share of updates")


def _forest(results: Results, table: pd.DataFrame, columns: list[str], reference: float | None = None) -> sns.FacetGrid:
    """Estimates in some columns, as points with their intervals, one above the other."""
    table = table[[*GROUP, *columns]].melt(GROUP, ignore_index=False).sort_index(kind="stable")
    table["label"] += " " + table.variable if len(columns) > 1 else ""

    def draw(data: pd.DataFrame, color: Any, label: str = "") -> None:
        value, low, high = np.array(data.value.tolist()).T
        plt.hlines(data.label, low, high, color="0.65", linewidth=5)
        plt.plot(value, data.label, "o", color="0.2", markersize=5)
        plt.ylim(len(data) - 0.5, -0.5)
        if reference is not None:
            plt.axvline(reference, color="0.2", linewidth=0.8, zorder=0)

    panels = [list(of) for _, of in table.groupby(GROUP[:2]).label]
    share, height = all(names == panels[0] for names in panels), 0.9 + 0.25 * max(map(len, panels))
    aspect = (2.5 + 0.06 * max(map(len, table.label)) / (2 if share else 1)) / height
    grid = _facets(results, table, draw, hue=None, sharey=share, height=height, aspect=aspect)
    return grid.set_axis_labels(columns[0] if len(columns) == 1 else "difference", "")
