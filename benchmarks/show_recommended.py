"""
UATRPO's recommended settings beside sb3-contrib's TRPO and PPO with RL Zoo's settings.

    python benchmarks/show_recommended.py

It prints five tables, the first four with a row for each task that has runs of UATRPO:

- final returns, the number of runs, verdicts by the rule of docs/results.md, and the minutes that
  ``benchmark_recommended.py`` measured. Where there are several PPOs, the one with the highest mean is the rival.
- the last deterministic evaluations, the kind of figure that is usually published
- UATRPO beside TRPO on the same code with the same settings, and beside itself without the noise estimate. The median
  KL ratio is the actual KL divergence of a proposed step over the estimated one, of UATRPO and of this TRPO.
- UATRPO on versions 4 and 5 of the task
- the p of Welch's test for each comparison of the first table: alone, corrected for the six tasks as in that table, and
  corrected for all twelve comparisons at once

The picture shows the training returns over steps and over minutes.

With ``--newer``, runs of UATRPO and of its controls in those folders replace all others on the same tasks, because
their settings have changed; the rivals' settings have not, so all of their runs count. Without options, the tables have
all runs with today's settings, as README and docs/results.md show them.
"""

import argparse
import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import seaborn as sns
from judge_study import FEW, holm, judge, markdown, read_runs, update_values
from matplotlib.figure import Figure

from sb3_uatrpo.study import StudyError, results
from sb3_uatrpo.study.statistics import difference_of_means

RESULTS = Path(__file__).parent / "results"
# In RESULTS. After the runs of the first three, Ant's λ was changed, and Swimmer's number of environments
FOLDERS, NEWER = ("recommended", "rivals", "more_seeds"), ("ant", "swimmer")
TASKS = ["HalfCheetah-v4", "Hopper-v4", "Walker2d-v4", "Swimmer-v4", "Ant-v4", "Humanoid-v4"]
OURS, RIVALS = "uatrpo", ("ppo", "trpo")
NAMES = {OURS: "UATRPO", "ppo": "PPO", "trpo": "TRPO"}
# What is due to the method, and not to the settings?
MATCHED = "trpo_matched (same settings)"
CONTROLS = {MATCHED: "TRPO, same settings", "uatrpo (uncertainty_coef=0)": "without Σ"}
# Algorithms whose settings follow ours
OF_OURS = (OURS, "trpo_matched")
# The level of Welch's test
SIGNIFICANT = 0.05

# The runs of each task and label
Groups = Mapping[tuple[str, str], pd.DataFrame]


def tasks_of(groups: Groups) -> list[str]:
    return [task for task in TASKS if (task, OURS) in groups]


def labels_of(groups: Groups, task: str, algorithm: str) -> list[str]:
    """
    :return: the labels of an algorithm and its variants, in descending order of their mean final return. Ours has no
        variants.
    """
    if algorithm == OURS:
        return [OURS]
    labels = [label for env_id, label in groups if env_id == task and label.partition(" (")[0] == algorithm]
    return sorted(labels, key=lambda label: -groups[task, label].final_return.mean())


def best_of(groups: Groups, task: str, algorithm: str) -> str | None:
    """:return: the rival: the label with the highest mean final return; ``None`` without runs"""
    return next(iter(labels_of(groups, task, algorithm)), None)


def judged_against(groups: Groups, others: Mapping[str, str | None], least: int = FEW) -> pd.DataFrame:
    """
    :param others: for each task, the label to compare UATRPO with
    :param least: number of runs that both must have on a task
    :return: ``judge``'s table of the tasks where both have them, corrected for all tasks
    """
    samples = {}
    for task, label in others.items():
        if label and {(task, OURS), (task, label)} <= groups.keys():
            pair = (groups[task, OURS].final_return.to_numpy(), groups[task, label].final_return.to_numpy())
            if min(map(len, pair)) >= least:
                samples[task] = pair
    return judge(samples, difference_of_means, len(TASKS)) if samples else pd.DataFrame()


def judged_against_rivals(groups: Groups) -> dict[str, pd.DataFrame]:
    return {rival: judged_against(groups, {task: best_of(groups, task, rival) for task in TASKS}) for rival in RIVALS}


def tabulate(groups: Groups, judged: Mapping[str, pd.DataFrame], minutes: Mapping[tuple[str, str], float]) -> str:
    """UATRPO beside its rivals: a table in Markdown, with a column of minutes if there are any."""
    rows = []
    for task in tasks_of(groups):
        row = {"task": task, **returns_on(groups, task, "final_return")}
        best = [best_of(groups, task, name) for name in (OURS, *RIVALS)]
        row["runs"] = ", ".join("–" if label is None else str(len(groups[task, label])) for label in best)
        for rival in RIVALS:
            is_judged = task in judged[rival].index
            row[f"against {NAMES[rival]}"] = verdict_of(judged[rival].loc[task]) if is_judged else "–"
        if minutes:
            timed = [minutes.get((task, best_of(groups, task, name) or name)) for name in (OURS, *RIVALS)]
            row["minutes"] = ", ".join("–" if value is None else f"{value:.1f}" for value in timed)
        rows.append(row)
    return markdown(rows)


def tabulate_evaluations(groups: Groups) -> str:
    """The last deterministic evaluations of UATRPO and its rivals: a table in Markdown."""
    return markdown([{"task": task, **returns_on(groups, task, "last_evaluation")} for task in tasks_of(groups)])


def tabulate_controls(groups: Groups) -> str:
    """
    UATRPO beside its controls: a table in Markdown. With a few runs, bootstrap intervals are too narrow to judge by, so
    it has the differences with the p of Welch's test, corrected for all tasks.
    """
    judged = {label: judged_against(groups, dict.fromkeys(TASKS, label), least=2) for label in CONTROLS}
    rows = []
    for task in tasks_of(groups):
        row = {"task": task, "UATRPO": returns_of(groups, task, OURS)}
        row |= {name: returns_of(groups, task, label).partition(" (")[0] for label, name in CONTROLS.items()}
        for label, name in CONTROLS.items():
            of_task = judged[label].loc[task] if task in judged[label].index else None
            row[f"difference from {name}"] = "–" if of_task is None else difference_of(of_task)
        row["median KL ratio"] = ", ".join(median_kl_ratio(groups, task, label) for label in (OURS, MATCHED))
        rows.append(row)
    return markdown(rows)


def tabulate_versions(groups: Groups) -> str:
    """UATRPO on version 4 and version 5 of each task: a table in Markdown."""
    rows = []
    for task in tasks_of(groups):
        name, _, _ = task.rpartition("-")
        rows.append({"task": name, **{f"version {n}": returns_of(groups, f"{name}-v{n}", OURS) for n in (4, 5)}})
    return markdown(rows)


def tabulate_p_values(judged: Mapping[str, pd.DataFrame]) -> str:
    """Each comparison with a rival, and what corrections make of its p: a table in Markdown, or nothing without any."""
    tables = {rival: table for rival, table in judged.items() if not table.empty}
    if not tables:
        return ""
    compared = pd.concat(tables, names=["rival"])
    for_all = holm(compared["Welch's p"], len(RIVALS) * len(TASKS))
    rows = [
        {
            "task": task,
            "against": NAMES[rival],
            "p": in_words(row["Welch's p"]),
            "corrected for six tasks": in_words(row["Holm's p"]),
            "for all twelve": in_words(for_all[rival, task]),
        }
        for (rival, task), row in compared.sort_values("Welch's p").iterrows()
    ]
    return markdown(rows)


def returns_on(groups: Groups, task: str, column: str) -> dict[str, str]:
    """:return: by algorithm, the returns of all its variants, in the order of their mean final returns"""
    cells = {
        name: [returns_of(groups, task, label, column) for label in labels_of(groups, task, algorithm)]
        for algorithm, name in NAMES.items()
    }
    return {name: "; ".join(returns) or "–" for name, returns in cells.items()}


def returns_of(groups: Groups, task: str, label: str, column: str = "final_return") -> str:
    if (task, label) not in groups or (returns := groups[task, label][column].dropna()).empty:
        return "–"
    variant = label.partition(" ")[2]
    error = f" ± {returns.sem():,.0f}" if len(returns) > 1 else ""
    few = f" [{len(returns)}]" if len(returns) < FEW else ""
    return " ".join(filter(None, [f"{returns.mean():,.0f}{error}{few}", variant]))


def median_kl_ratio(groups: Groups, task: str, label: str) -> str:
    ratios = np.concatenate(groups[task, label].kl_ratios.tolist()) if (task, label) in groups else np.empty(0)
    return f"{np.median(ratios):.2f}" if len(ratios) else "–"


def verdict_of(row: pd.Series) -> str:
    """In bold where Welch's test, which five runs suit better than the bootstrap, confirms the difference."""
    confirmed = row.verdict in ("better", "worse") and row["Holm's p"] < SIGNIFICANT
    verdict = f"**{row.verdict}**" if confirmed else row.verdict
    return f"{verdict}: {row.difference:+,.0f} ({row.low:,.0f} to {row.high:,.0f}), {p_of(row)}"


def difference_of(row: pd.Series) -> str:
    return f"{row.difference:+,.0f}, {p_of(row)}"


def p_of(row: pd.Series) -> str:
    p = in_words(row["Holm's p"])
    return f"p {p}" if p.startswith("<") else f"p = {p}"


def in_words(p: float) -> str:
    return "< 0.001" if p < 0.001 else f"{p:.3f}"


def draw(curves: pd.DataFrame, groups: Groups, minutes: Mapping[tuple[str, str], float]) -> Figure:
    """Training returns, mean and standard error over runs: above over steps, below over minutes."""
    tasks = tasks_of(groups)
    style = dict(zip((OURS, *RIVALS), sns.color_palette("colorblind"), strict=False))
    # as wide as the legend at least
    figure = Figure(figsize=(max(2.6 * len(tasks), 4.4), 5.2), layout="constrained")
    axes = figure.subplots(2, len(tasks), squeeze=False, sharey="col")
    for (above, below), task in zip(axes.T, tasks, strict=True):
        for name, color in style.items():
            label = best_of(groups, task, name)
            of = curves[(curves.env == task) & (curves.label == label)].dropna()
            if of.empty:
                continue
            sns.lineplot(of, x="step", y="return", errorbar="se", color=color, ax=above)
            sns.lineplot(
                of, x="step", y="return", units="run", estimator=None, color=color, alpha=0.3, lw=0.6, ax=above
            )
            per_million = minutes.get((task, label or name))
            if per_million is not None:
                mean = of.groupby("step")["return"].mean()
                below.plot(mean.index / 1e6 * per_million, mean, color=color)
        above.set(title=task, xlabel="environment steps")
        below.set(xlabel="minutes")
        below.set_xlim(left=0)
        for ax in (above, below):
            ax.set_ylabel("training return" if task == tasks[0] else "")
            ax.grid(alpha=0.3)
    handles = [axes[0, 0].plot([], [], color=color, label=NAMES[name])[0] for name, color in style.items()]
    figure.legend(handles=handles, loc="outside upper center", ncols=3)
    return figure


def main(args: list[str] | None = None) -> tuple[str, ...]:
    """:return: the five tables"""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, nargs="+", help=f"default: {', '.join(FOLDERS)}")
    parser.add_argument(
        "--newer",
        type=Path,
        nargs="+",
        help=f"our runs here replace those of --folder; default: none with --folder, and {', '.join(NEWER)} without",
    )
    parser.add_argument("--env", nargs="+", choices=TASKS, default=TASKS, help="the tasks to show; default: all six")
    parser.add_argument(
        "--minutes",
        type=Path,
        default=RESULTS / "recommended" / "minutes.json",
        help="what benchmark_recommended.py wrote for today's settings; none leaves them out",
    )
    parser.add_argument("--output", type=Path, default=RESULTS / "recommended" / "recommended.png")
    options = parser.parse_args(args)
    newer_folders = options.newer or ([] if options.folder else [RESULTS / name for name in NEWER])
    try:
        study = read_runs(*(options.folder or [RESULTS / name for name in FOLDERS]), *newer_folders)
        is_newer = study.runs.folder.map(lambda path: any(Path(path).is_relative_to(of) for of in newer_folders))
        replaced = study.runs.env.isin(study.runs.env[is_newer]) & study.runs.algo.isin(OF_OURS) & ~is_newer
        study = results.tabulate(replace(study, runs=study.runs[~replaced]))
    except StudyError as error:
        parser.error(f"--folder, --newer: {error}")
    runs = study.runs
    # of both versions
    names = {task.rpartition("-")[0] for task in options.env}
    runs = runs[runs.final_return.notna() & (runs.condition == "") & runs.env.str.rpartition("-")[0].isin(names)]
    evaluations = study.evaluations.groupby(["run", "step"])["return"].mean().groupby("run").last()
    runs = runs.assign(
        last_evaluation=evaluations, kl_ratios=[update_values(study, runs.loc[[i]], "kl_ratio") for i in runs.index]
    )
    groups: Groups = dict(list(runs.groupby(["env", "label"])))
    if not any(label == OURS for _, label in groups):
        parser.error(f"--folder: there are no finished runs of {OURS}")
    minutes: dict[tuple[str, str], float] = {}
    if options.minutes.exists():
        times = pd.DataFrame(json.loads(options.minutes.read_text())["minutes"])
        minutes = times.groupby(["task", "algorithm"]).minutes.median().to_dict()
    judged = judged_against_rivals(groups)
    tables = (
        tabulate(groups, judged, minutes),
        tabulate_evaluations(groups),
        tabulate_controls(groups),
        tabulate_versions(groups),
        tabulate_p_values(judged),
    )
    print(*filter(None, tables), sep="\n\n")
    options.output.parent.mkdir(parents=True, exist_ok=True)
    draw(results.learning_curves(replace(study, runs=runs)), groups, minutes).savefig(options.output, dpi=120)
    return tables


if __name__ == "__main__":
    main()
