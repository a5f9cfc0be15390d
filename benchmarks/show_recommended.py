"""
UATRPO's preset beside Stable-Baselines3's PPO and sb3-contrib's TRPO with RL Zoo's hyperparameters.

    python benchmarks/show_recommended.py
    python benchmarks/show_recommended.py --report

It prints these tables, most with a row for each environment that has runs of UATRPO:

- mean final returns, of the best PPO where there are several, and the minutes that ``benchmark_recommended.py``
  measured. A star marks what UATRPO is significantly ahead of; brackets, numbers of runs other than the largest.
- the differences with 95% bootstrap intervals, and the p of Welch's test, corrected by Holm's method for six
  environments. Bold is significant: p < 0.05, and the bootstrap interval with the same correction excludes zero.
- both for the last deterministic evaluations, the kind of figure that is usually published
- UATRPO beside its controls: TRPO on the same code with the same hyperparameters, and UATRPO without the uncertainty
  term. The KL ratio is that of actual and estimated KL divergence of a proposed step, of UATRPO and of this TRPO.
- UATRPO on versions 4 and 5 of the environment
- the p of each comparison: alone, corrected for six environments and for all twelve comparisons, and how many lead
- over all environments, on the seeds that all methods have: the interquartile mean (IQM) of scores, which are final
  returns scaled from 0, the lowest of an environment, to 1, the highest; and how probably a run of UATRPO ends above
  another method's, with intervals (rliable's stratified bootstrap).

The figures show these aggregates beside learning curves, learning curves over minutes, and those of the controls.

Runs of UATRPO and of its controls in ``--newer`` folders replace all others on the same environments, because their
hyperparameters have changed; all runs of PPO and TRPO count. ``--report`` writes the tables of all committed runs to
``report.md`` beside the figures, with the comparisons that were made before all of these runs existed.
"""

import json
import math
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import seaborn as sns
from command_line import parser_of
from evidence import (
    EVALUATION,
    FEW,
    RESULTS,
    TRAINING,
    Groups,
    holm,
    judge,
    markdown,
    mean_of,
    of_updates,
    read_runs,
    samples_of,
    with_evaluations,
)
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, MaxNLocator
from rliable import library, metrics

from sb3_uatrpo.study import Study, StudyError
from sb3_uatrpo.study.results import learning_curves, tabulate
from sb3_uatrpo.study.statistics import Estimate

# In RESULTS. After the runs of the first three, Ant's λ was changed, and Swimmer's number of parallel environments
FOLDERS, NEWER = ("recommended", "rivals", "more_seeds"), ("ant", "swimmer")
# What was compared before, with the heading in the report
EARLIER = {
    "The first comparison: seeds 0 to 4, λ 0.95 on Ant, one environment on Swimmer": ("recommended", "rivals"),
    "Ant after its λ had changed: seeds 5 to 9": ("ant",),
    "Seeds 5 to 9, one environment on Swimmer": ("more_seeds",),
}
TASKS = ["HalfCheetah-v4", "Hopper-v4", "Walker2d-v4", "Swimmer-v4", "Ant-v4", "Humanoid-v4"]
OURS, BASELINES = "uatrpo", ("ppo", "trpo")
NAMES = {OURS: "UATRPO", "ppo": "PPO", "trpo": "TRPO"}
# What is due to the method, and not to the hyperparameters?
MATCHED = "trpo_matched (same settings)"
CONTROLS = {MATCHED: "TRPO, same hyperparameters", "uatrpo (uncertainty_coef=0)": "without the uncertainty term"}
# Algorithms whose hyperparameters follow ours
OF_OURS = (OURS, "trpo_matched")
# The level of Welch's test
SIGNIFICANT = 0.05
N_RESAMPLES = 2000

# For each baseline, ``judge``'s table
Judged = Mapping[str, pd.DataFrame]
Minutes = Mapping[tuple[str, str], float]
# For each name in a figure, the colour and the kind of line
Styles = Mapping[str, Mapping[str, Any]]


def tasks_of(groups: Groups) -> list[str]:
    return [task for task in TASKS if (task, OURS) in groups]


def best_of(groups: Groups, task: str, algorithm: str) -> str | None:
    """:return: the label of an algorithm or variant with the highest mean, None without runs; ours has no variants"""
    if algorithm == OURS:
        return OURS if (task, OURS) in groups else None
    labels = [label for env_id, label in groups if env_id == task and label.partition(" (")[0] == algorithm]
    return max(labels, key=lambda label: groups[task, label].final_return.mean(), default=None)


def judged_against(
    groups: Groups, others: Mapping[str, str | None], least: int = FEW, column: str = TRAINING
) -> pd.DataFrame:
    """
    :param others: for each environment, the label to compare UATRPO with
    :param least: number of runs that both must have in an environment
    :param column: the returns to compare
    :return: ``judge``'s table of the environments where both have them, corrected for all environments
    """
    pairs = {task: (OURS, label) for task, label in others.items() if label}
    return judge(samples_of(groups, pairs, column, least), n_tasks=len(TASKS))


def judged_against_baselines(groups: Groups, column: str) -> Judged:
    return {
        algorithm: judged_against(groups, {task: best_of(groups, task, algorithm) for task in TASKS}, column=column)
        for algorithm in BASELINES
    }


def is_significant(row: pd.Series) -> bool:
    """Where Welch's test, which five runs suit better than the bootstrap, confirms the difference."""
    return bool(row.verdict in ("better", "worse") and row["Holm's p"] < SIGNIFICANT)


def tabulate_returns(groups: Groups, judged: Judged, minutes: Minutes, column: str = TRAINING) -> str:
    """UATRPO beside PPO and TRPO: a table in Markdown, with a column of minutes if there are any."""
    rows = []
    for task in tasks_of(groups):
        labels = {algorithm: best_of(groups, task, algorithm) for algorithm in NAMES}
        row = {"environment": task}
        for algorithm, label in labels.items():
            cell = returns_of(groups, task, label, column)
            table = judged.get(algorithm, pd.DataFrame())
            if task in table.index and is_significant(table.loc[task]) and table.loc[task].difference > 0:
                cell += r" \*"
            row[NAMES[algorithm]] = cell + (" †" if label not in (None, algorithm) else "")
        if minutes:
            timed = [minutes.get((task, label or algorithm)) for algorithm, label in labels.items()]
            # halves are rounded up
            row["minutes"] = ", ".join("–" if value is None else f"{value + 1e-9:.0f}" for value in timed)
        rows.append(row)
    return markdown(rows)


def tabulate_differences(groups: Groups, judged: Judged) -> str:
    """UATRPO minus each baseline: a table in Markdown."""
    rows = []
    for task in tasks_of(groups):
        counts = [len(groups[task, label]) if (label := best_of(groups, task, name)) else 0 for name in NAMES]
        row = {"environment": task, "runs": ", ".join(map(str, counts))}
        rows.append(row | {f"minus {NAMES[name]}": difference_of(table, task, True) for name, table in judged.items()})
    return markdown(rows)


def tabulate_controls(study: Study, groups: Groups, column: str = TRAINING) -> str:
    """UATRPO beside its controls: a table in Markdown."""
    judged = {label: judged_against(groups, dict.fromkeys(TASKS, label), 2, column) for label in CONTROLS}
    rows = []
    for task in tasks_of(groups):
        row = {"environment": task, "UATRPO": returns_of(groups, task, OURS, column)}
        for label, name in CONTROLS.items():
            row[name] = returns_of(groups, task, label, column)
            row[f"minus {name}"] = difference_of(judged[label], task)
        row["median KL ratio"] = ", ".join(
            of_updates(study, groups[task, label], "kl_ratio", np.median, ".2f") if (task, label) in groups else "–"
            for label in (OURS, MATCHED)
        )
        rows.append(row)
    return markdown(rows)


def tabulate_versions(groups: Groups) -> str:
    """UATRPO on version 4 and version 5 of each environment: a table in Markdown."""
    rows = []
    for name in (task.rpartition("-")[0] for task in tasks_of(groups)):
        rows.append({"environment": name, **{f"version {n}": returns_of(groups, f"{name}-v{n}", OURS) for n in (4, 5)}})
    return markdown(rows)


def corrected(judged: Judged) -> pd.DataFrame:
    """All comparisons by baseline and environment, with ``p`` as it is, for six environments, and for all twelve."""
    tables = {algorithm: table for algorithm, table in judged.items() if not table.empty}
    if not tables:
        return pd.DataFrame()
    compared = pd.concat(tables, names=["algorithm"])
    p = compared["Welch's p"]
    return compared.assign(**{"p": p, "for six": compared["Holm's p"], "for twelve": holm(p, 2 * len(TASKS))})


def tabulate_p_values(judged: Mapping[str, Judged]) -> str:
    """Each comparison with a baseline, and what corrections make of its p: a table in Markdown, or nothing without."""
    rows: dict[tuple[str, str], dict[str, str]] = {}
    for kind, by_algorithm in judged.items():
        table = corrected(by_algorithm)
        for (algorithm, task), row in (table if table.empty else table.sort_values("p")).iterrows():
            cells = rows.setdefault((task, algorithm), {"environment": task, "against": NAMES[algorithm]})
            cells |= {f"{kind}: {name}": in_words(row[name]) for name in ("p", "for six", "for twelve")}
    return markdown(list(rows.values()))


def count_leads(judged: Mapping[str, Judged]) -> str:
    """How many comparisons UATRPO leads significantly by Welch's test: a table in Markdown, or nothing without any."""
    tables = {kind: corrected(by_algorithm) for kind, by_algorithm in judged.items()}
    if any(table.empty for table in tables.values()):
        return ""
    names = {"for six": "corrected for six environments", "for twelve": "corrected for twelve comparisons"}
    return markdown(
        [
            {"Welch's test": name}
            | {kind: sum((of[column] < SIGNIFICANT) & (of.difference > 0)) for kind, of in tables.items()}
            for column, name in names.items()
        ]
    )


def common_scores(groups: Groups) -> tuple[dict[str, np.ndarray], list[int]]:
    """
    Final returns on the seeds that all methods have in each environment, scaled from 0, the lowest of them in the
    environment, to 1, the highest.

    :return: for each method (``n_runs x n_environments``), and the seeds; nothing without such seeds
    """
    labels = {(task, name): best_of(groups, task, name) for task in tasks_of(groups) for name in NAMES}
    if None in labels.values():
        return {}, []
    runs = {key: groups[key[0], label or ""].set_index("seed").final_return for key, label in labels.items()}
    seeds = sorted(set.intersection(*(set(returns.index) for returns in runs.values())))
    if len(seeds) < 2:
        return {}, []
    returns = np.array([[runs[task, name][seeds] for task in tasks_of(groups)] for name in NAMES])
    low, high = (bound(returns, axis=(0, 2), keepdims=True) for bound in (np.min, np.max))
    return dict(zip(NAMES.values(), ((returns - low) / (high - low)).swapaxes(1, 2), strict=True)), seeds


def aggregates(scores: Mapping[str, np.ndarray]) -> tuple[dict[str, Estimate], dict[str, Estimate]]:
    """
    :return: the interquartile mean of each method, and the probability that UATRPO improves on each other one, averaged
        over environments; rliable's, with 95% intervals of its stratified bootstrap
    """
    if not scores:
        return {}, {}
    ours = scores[NAMES[OURS]]
    pairs = {f"over {name}": (ours, values) for name, values in scores.items() if name != NAMES[OURS]}
    found = []
    for values, statistic in (
        (scores, lambda x: np.array([metrics.aggregate_iqm(x)])),
        # rliable's own function tests each resample, too
        (pairs, lambda x, y: np.array([np.heaviside(x[:, None] - y, 0.5).mean()])),
    ):
        with warnings.catch_warnings():
            # rliable passes its generator on in a way that arch calls deprecated
            warnings.simplefilter("ignore", FutureWarning)
            # and draws runs of pairs from NumPy's global one
            np.random.seed(0)
            points, intervals = library.get_interval_estimates(
                values, statistic, reps=N_RESAMPLES, random_state=np.random.RandomState(0)
            )
        found.append({name: Estimate(points[name][0], *intervals[name][:, 0]) for name in values})
    return found[0], found[1]


def tabulate_aggregates(means: Mapping[str, Estimate], improvements: Mapping[str, Estimate]) -> str:
    """A table in Markdown, or nothing without estimates."""
    estimates = {f"IQM of {name}": estimate for name, estimate in means.items()}
    estimates |= {f"probability of improvement {name}": estimate for name, estimate in improvements.items()}
    return markdown(
        [{"": name, "value": f"{of.value:.2f} ({of.low:.2f} to {of.high:.2f})"} for name, of in estimates.items()]
    )


def returns_of(groups: Groups, task: str, label: str | None, column: str = TRAINING) -> str:
    """Mean ± standard error, with the number of runs in brackets if other methods or environments have more."""
    returns = groups[task, label][column].dropna() if label and (task, label) in groups else pd.Series(dtype=float)
    is_few = 0 < len(returns) < max(map(len, groups.values()))
    return mean_of(returns) + (f" [{len(returns)}]" if is_few else "")


def difference_of(table: pd.DataFrame, task: str, with_interval: bool = False) -> str:
    """A row of ``judge``'s table; a dash where there is none."""
    if task not in table.index:
        return "–"
    row = table.loc[task]
    mark, p = "**" if is_significant(row) else "", in_words(row["Holm's p"])
    interval = f" ({row.low:,.0f} to {row.high:,.0f})" if with_interval else ""
    return f"{mark}{row.difference:+,.0f}{mark}{interval}, p {p if p[0] == '<' else f'= {p}'}"


def in_words(p: float) -> str:
    return "< 0.001" if p < 0.001 else f"{p:.3f}"


def styles(names: Iterable[str]) -> Styles:
    looks = zip(sns.color_palette("colorblind"), ("-", "--", "-."), strict=False)
    return {name: {"color": color, "linestyle": line} for name, (color, line) in zip(names, looks, strict=False)}


def draw_recommended(
    groups: Groups, curves: Groups, means: Mapping[str, Estimate], improvements: Mapping[str, Estimate]
) -> Figure:
    """Aggregates over the environments, if there are any, beside the learning curves of each."""
    tasks = tasks_of(groups)
    n_columns = math.ceil(len(tasks) / 2)
    style = styles(NAMES.values())
    figure = Figure(figsize=(3.4 + 2.7 * n_columns, 5.4), layout="constrained")
    left, right = figure.subfigures(1, 2, squeeze=False, width_ratios=(3.2, 2.7 * n_columns))[0]
    axes = right.subplots(2, n_columns, squeeze=False)
    for ax, task in zip(axes.flat, tasks, strict=False):
        draw_curves(ax, curves, task, {NAMES[name]: best_of(groups, task, name) for name in NAMES}, style)
    for ax in axes.flat[len(tasks) :]:
        ax.set_axis_off()
    above, below = left.subplots(2, 1, height_ratios=(3, 2))
    if means:
        draw_estimates(above, means, style)
        above.set(title="IQM over all environments", xlabel="final returns, scaled to 0 to 1")
        draw_estimates(below, improvements, {})
        below.axvline(0.5, color="0.2", linewidth=0.8, zorder=0)
        below.set(title="Probability of improvement", xlabel="pairs in which UATRPO ends higher")
    add_legend(right, style)
    return figure


def draw_minutes(groups: Groups, curves: Groups, minutes: Minutes) -> Figure:
    """Mean training returns over minutes."""

    def draw(ax: Axes, task: str, style: Styles) -> None:
        for algorithm, name in NAMES.items():
            label = best_of(groups, task, algorithm)
            per_million = minutes.get((task, label or algorithm))
            if label and per_million is not None:
                mean = curves[task, label].groupby("step")["return"].mean()
                ax.plot(mean.index / 1e6 * per_million, mean, **style[name])
        name_axes(ax, task, "minutes")

    return in_a_row(tasks_of(groups), NAMES.values(), draw)


def draw_controls(groups: Groups, curves: Groups) -> Figure:
    """Learning curves of UATRPO and its controls."""
    labels = {NAMES[OURS]: OURS, **{name: label for label, name in CONTROLS.items()}}
    return in_a_row(tasks_of(groups), labels, lambda ax, task, style: draw_curves(ax, curves, task, labels, style))


def in_a_row(tasks: list[str], names: Iterable[str], draw: Callable[[Axes, str, Styles], None]) -> Figure:
    """A panel for each environment."""
    # as wide as the legend at least
    figure = Figure(figsize=(max(2.6 * len(tasks), 6.0), 2.9), layout="constrained")
    style = styles(names)
    for ax, task in zip(figure.subplots(1, len(tasks), squeeze=False).flat, tasks, strict=True):
        draw(ax, task, style)
    add_legend(figure, style)
    return figure


def draw_curves(ax: Axes, curves: Groups, task: str, labels: Mapping[str, str | None], style: Styles) -> None:
    """Mean training returns over runs with their standard error, and every run as a thin line."""
    for name, label in labels.items():
        if (task, label) in curves:
            of = curves[task, label or ""]
            # from where all runs have a value
            shown = of[~of.step.isin(of.step[of["return"].isna()])]
            common: dict[str, Any] = {"data": shown, "x": "step", "y": "return", "ax": ax}
            sns.lineplot(**common, **style[name], errorbar="se", linewidth=1.8, zorder=3)
            run = {"units": "run", "estimator": None, "color": style[name]["color"]}
            sns.lineplot(**common, **run, alpha=0.4, linewidth=0.6, zorder=1)
    ax.margins(x=0)
    ax.xaxis.set_major_formatter(EngFormatter(sep=""))
    ax.xaxis.set_major_locator(MaxNLocator(4))
    name_axes(ax, task, "timesteps")


def name_axes(ax: Axes, task: str, xlabel: str) -> None:
    place = ax.get_subplotspec()
    ax.set(title=task, xlabel=xlabel, ylabel="training return" if place and place.is_first_col() else "")
    ax.set_xlim(left=0)
    ax.grid(alpha=0.3)


def draw_estimates(ax: Axes, estimates: Mapping[str, Estimate], style: Styles) -> None:
    """Points with their intervals, one row for each, the first on top; names without a style are grey."""
    for name, estimate in estimates.items():
        color = style.get(name, {}).get("color", "0.2")
        ax.plot(estimate[1:], [name, name], color=color, linewidth=5, alpha=0.4, solid_capstyle="butt")
        ax.plot(estimate.value, name, "o", color=color, markersize=5)
    ax.set(xlim=(0, 1), ylim=(len(estimates) - 0.5, -0.5))


def add_legend(figure: Any, style: Styles) -> None:
    ax = Figure().subplots()
    lines = [ax.plot([], [], **of, label=name)[0] for name, of in style.items()]
    figure.legend(handles=lines, loc="outside upper center", ncols=len(style))


def runs_in(folders: list[Path], newer_folders: list[Path], tasks: list[str]) -> tuple[Study, Groups]:
    """
    :param folders: studies
    :param newer_folders: studies whose runs of ours replace those of the others on the same environments
    :param tasks: version 4 of the environments to keep
    :return: the finished runs, and these of each environment and label
    :raises StudyError: if a folder is missing, or the runs cannot be averaged, or none is ours
    """
    # of a run that is in several folders, the first counts
    study = read_runs(*newer_folders, *folders)
    is_newer = study.runs.folder.map(lambda path: any(Path(path).is_relative_to(of) for of in newer_folders))
    replaced = study.runs.env.isin(study.runs.env[is_newer]) & study.runs.algo.isin(OF_OURS) & ~is_newer
    study = tabulate(replace(study, runs=study.runs[~replaced]))
    # of both versions
    names = {task.rpartition("-")[0] for task in tasks}
    runs = with_evaluations(study)
    runs = runs[runs.final_return.notna() & (runs.condition == "") & runs.env.str.rpartition("-")[0].isin(names)]
    groups: Groups = dict(list(runs.groupby(["env", "label"])))
    if not any(label == OURS for _, label in groups):
        raise StudyError(f"there are no finished runs of {OURS}")
    return replace(study, runs=runs), groups


def tables_of(study: Study, groups: Groups, minutes: Minutes) -> dict[str, str]:
    """:return: the tables in Markdown by their headings in the report"""
    columns = {"training": TRAINING, "evaluation": EVALUATION}
    judged = {kind: judged_against_baselines(groups, column) for kind, column in columns.items()}
    return {
        "Final returns": tabulate_returns(groups, judged["training"], minutes),
        "Differences of final returns": tabulate_differences(groups, judged["training"]),
        "Last deterministic evaluations": tabulate_returns(groups, judged["evaluation"], {}, EVALUATION),
        "Differences of the last evaluations": tabulate_differences(groups, judged["evaluation"]),
        "Controls": tabulate_controls(study, groups),
        "Controls by the last evaluations": tabulate_controls(study, groups, EVALUATION),
        "Versions": tabulate_versions(groups),
        "p values": tabulate_p_values(judged),
        "Significant leads": count_leads(judged),
    }


def report(groups: Groups, tables: Mapping[str, str], earlier: Mapping[str, list[str]], seeds: list[int]) -> str:
    """:return: the page in Markdown"""
    notes = {
        "Final returns": r"Brackets: number of runs where it is not ten. \*: UATRPO is significantly ahead. †: "
        "Stable-Baselines3's default hyperparameters, which do better than RL Zoo's: "
        f"{returns_of(groups, 'Hopper-v4', 'ppo')}.",
        "Controls": "The median KL ratio is that of UATRPO, then of TRPO.\n\n![Learning curves](controls.png)",
        "Over all environments": f"On seeds {', '.join(map(str, seeds))}.",
    }
    parts = [
        "# UATRPO beside PPO, TRPO and its controls\n\n`python benchmarks/show_recommended.py --report` writes this "
        "page and draws its figures; its docstring explains the tables. [Results](../../../docs/results.md) discusses "
        "them.",
        "![Aggregates and learning curves](recommended.png)\n![Training returns over minutes](minutes.png)",
    ]
    for name, table in tables.items():
        parts += filter(None, [f"## {name}", table, notes.get(name)])
    parts.append("## Earlier comparisons")
    for name, each in earlier.items():
        parts += [f"### {name}", *each]
    return "\n\n".join(parts) + "\n"


def main(args: list[str] | None = None) -> dict[str, str]:
    """:return: the tables by their headings"""
    parser = parser_of(__doc__)
    parser.add_argument("--folder", type=Path, nargs="+", help=f"default: {', '.join(FOLDERS)}")
    parser.add_argument("--newer", type=Path, nargs="+", help=f"default without --folder: {', '.join(NEWER)}")
    parser.add_argument("--env", nargs="+", choices=TASKS, default=TASKS, help="the environments; default: all six")
    parser.add_argument("--minutes", type=Path, default=RESULTS / "recommended/minutes.json", help="none: no minutes")
    parser.add_argument("--output", type=Path, default=RESULTS / "recommended", help="for the figures and the report")
    parser.add_argument("--report", action="store_true", help="write report.md, with the earlier comparisons")
    options = parser.parse_args(args)
    if options.report and (options.folder or options.newer):
        parser.error("--report is about all runs, so it takes neither --folder nor --newer")
    newer_folders = options.newer or ([] if options.folder else [RESULTS / name for name in NEWER])
    try:
        study, groups = runs_in(options.folder or [RESULTS / name for name in FOLDERS], newer_folders, options.env)
    except StudyError as error:
        parser.error(f"--folder, --newer: {error}")
    minutes: Minutes = {}
    if options.minutes.exists():
        times = pd.DataFrame(json.loads(options.minutes.read_text())["minutes"])
        minutes = times.groupby(["task", "algorithm"]).minutes.median().to_dict()
    scores, seeds = common_scores(groups)
    means, improvements = aggregates(scores)
    tables = tables_of(study, groups, minutes) | {"Over all environments": tabulate_aggregates(means, improvements)}
    tables = {name: table for name, table in tables.items() if table}
    print("\n\n".join(f"{name}\n\n{table}" for name, table in tables.items()))
    options.output.mkdir(parents=True, exist_ok=True)
    curves: Groups = dict(list(learning_curves(study).groupby(["env", "label"])))
    figures = {"recommended": draw_recommended(groups, curves, means, improvements)}
    figures |= {"controls": draw_controls(groups, curves)}
    figures |= {"minutes": draw_minutes(groups, curves, minutes)} if minutes else {}
    for name, figure in figures.items():
        figure.savefig(options.output / f"{name}.png", dpi=120)
    if options.report:
        earlier = {}
        for name, folders in EARLIER.items():
            _, then = runs_in([RESULTS / each for each in folders], [], options.env)
            judged = judged_against_baselines(then, TRAINING)
            earlier[name] = [tabulate_returns(then, judged, {}), tabulate_differences(then, judged)]
        (options.output / "report.md").write_text(report(groups, tables, earlier, seeds), encoding="utf-8")
    return tables


if __name__ == "__main__":
    main()
