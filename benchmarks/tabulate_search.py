"""
What did each change of a search do?

    python benchmarks/tabulate_search.py --folder benchmarks/results/search

A row for each environment and variant, over its runs: the final returns; the area under the learning curve, which is
the mean training return over the whole run and less noisy than the end; the critic's explained variance and the
policy's mean standard deviation in the last fifth of the updates; and the mean KL divergence of an update. Returns and
areas are means with their standard errors.

    python benchmarks/tabulate_search.py --report

writes this for the committed search to ``report.md`` in its folder, with two more kinds of table. One ranks the
settings that have runs with all seeds in all three environments, by final return and by area in units of the mean final
return of the better of PPO and TRPO; † marks what is behind the preset by two standard errors of the difference, in
either. The other gives, for each change of the preset, the difference that it made.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
from command_line import parser_of
from evidence import RESULTS, markdown, mean_of, of_updates, read_runs

from sb3_uatrpo.study import Study, StudyError
from sb3_uatrpo.study.results import learning_curves, tabulate

# The tasks on which the main candidates were compared, and their seeds
TASKS = ["HalfCheetah-v4", "Walker2d-v4", "Ant-v4"]
SEEDS = [100, 101, 102, 103]
# The preset, in the search and in the runs of a million timesteps
CHOSEN = "batches of 2000 and target_kl 0.02"
CHOSEN_FOR_A_MILLION = ("base", f"{CHOSEN} and log_std -1")
# Runs that start from other settings than the preset: stages 1 and 2, and what was tried from there alone
FROM_ELSEWHERE = ("base", "log_std -1", "γ 0.99 λ 0.95 log_std -1", "γ 0.99 λ 0.95 log_std -2", "γ 0.9999 λ 0.99")


def name_of(label: str) -> str:
    return label.removeprefix("uatrpo").strip(" ()") or "base"


def finished_runs(folder: Path) -> Study:
    """
    :return: the finished runs, with the area under each one's learning curve, which is its mean training return
    :raises StudyError: if the folder has no finished runs
    """
    study = tabulate(read_runs(folder))
    runs = study.runs[study.runs.final_return.notna()]
    if runs.empty:
        raise StudyError(f"there are no finished runs in {folder}")
    return replace(study, runs=runs.assign(area=learning_curves(study).groupby("run")["return"].mean()))


def tabulate_settings(study: Study) -> str:
    """Each setting on each task, the largest area first: a table in Markdown."""
    rows = []
    for (task, label), group in study.runs.groupby(["env", "label"]):
        row = {
            "task": task,
            "setting": name_of(label),
            "runs": len(group),
            "final return": mean_of(group.final_return),
            "of each run": ", ".join(f"{value:,.0f}" for value in group.final_return),
            "area": mean_of(group.area),
            "explained variance": of_updates(study, group, "explained_variance", np.mean, ".2g", last=0.2),
            "std": of_updates(study, group, "std", np.mean, ".2g", last=0.2),
            "KL": of_updates(study, group, "kl_divergence_loss", np.mean, ".2g"),
        }
        rows.append((task, -group.area.mean(), row))
    return markdown([row for *_, row in sorted(rows, key=lambda of: of[:2])])


def mean_over_tasks(values: list[pd.Series]) -> tuple[float, float]:
    """Mean over environments of the mean over each one's runs, and its standard error, NaN for a single run."""
    mean = np.mean([np.mean(of_task) for of_task in values])
    error = np.sqrt(np.sum(np.square([of_task.sem() for of_task in values]))) / len(values)
    return float(mean), float(error)


def with_error(mean: float, error: float) -> str:
    return f"{mean:.3f}" + (f" ± {error:.3f}" if np.isfinite(error) else "")


def tabulate_objective(
    runs: pd.DataFrame, baselines: pd.DataFrame, tasks: list[str], seeds: list[int], base: str = ""
) -> str:
    """
    The settings with runs of all seeds in all environments, the highest normalised score first: a table in Markdown. A
    cell has the mean final return with its standard error, and the area.

    With the mean final return b of the better of PPO and TRPO in an environment, the normalised score is the mean over
    environments of final return / b, and "by area" is the mean of area / b.

    :param base: setting that the others are compared with: † marks those that are behind it, in score or by area, by
        at least two standard errors of the difference
    """
    best = baselines.groupby(["env", "label"]).final_return.mean().groupby("env").max()
    runs = runs[runs.env.isin(tasks) & runs.seed.isin(seeds)]
    rows = {}
    for label, of_setting in runs.groupby("label"):
        of_tasks = {task: of_setting[of_setting.env == task] for task in tasks}
        if any(set(group.seed) != set(seeds) for group in of_tasks.values()):
            continue
        cells = {task: f"{mean_of(group.final_return)}; {group.area.mean():,.0f}" for task, group in of_tasks.items()}
        scores, by_area = (
            mean_over_tasks([group[column] / best[task] for task, group in of_tasks.items()])
            for column in ("final_return", "area")
        )
        rows[name_of(label)] = (cells, scores, by_area)

    def is_behind(name: str) -> bool:
        if base not in rows:
            return False
        pairs = zip(rows[name][1:], rows[base][1:], strict=True)
        return any(ours - theirs <= -2 * np.hypot(a, b) for (ours, a), (theirs, b) in pairs)

    ordered = sorted(rows.items(), key=lambda item: -item[1][1][0])
    table = [
        {"setting": name + (" †" if is_behind(name) else ""), **cells}
        | {"normalised score": with_error(*scores), "by area": with_error(*by_area)}
        for name, (cells, scores, by_area) in ordered
    ]
    return markdown(table)


def tabulate_changes(runs: pd.DataFrame, base: str, left_out: Sequence[str]) -> str:
    """
    What each change of the setting ``base`` did: a table in Markdown of the differences of mean final returns, ± the
    standard error of the difference where both have several runs, with the number of runs in brackets.
    """
    runs = runs.assign(setting=runs.label.map(name_of))
    tasks = sorted(runs[runs.setting == base].env.unique())
    groups = dict(list(runs.groupby(["setting", "env"]).final_return))
    rows = []
    for setting in sorted(set(runs.setting) - {base, *left_out}):
        row = {"change": setting}
        for task in tasks:
            ours, theirs = groups.get((setting, task)), groups[base, task]
            if ours is None:
                row[task] = "–"
                continue
            error = np.hypot(ours.sem(), theirs.sem())
            row[task] = f"{ours.mean() - theirs.mean():+,.0f}"
            row[task] += (f" ± {error:,.0f}" if np.isfinite(error) else "") + f" [{len(ours)}]"
        if set(row.values()) - {setting, "–"}:
            rows.append(row)
    return markdown(rows)


def report(search: Path, baselines: Path) -> str:
    """
    :param search: the folder of the committed search; ``million`` in it has the runs of a million timesteps
    :param baselines: the folder of the runs of PPO and TRPO
    :return: the page in Markdown
    """
    study, study_of_million = finished_runs(search), finished_runs(search / "million")
    runs, million, of_baselines = study.runs, study_of_million.runs, finished_runs(baselines).runs
    # the preset has two names among the runs of a million timesteps
    first, *others = (f"uatrpo ({name})" if name != "base" else "uatrpo" for name in CHOSEN_FOR_A_MILLION)
    renamed = million.assign(label=million.label.replace(dict.fromkeys(others, first)))
    parts = [
        "# The runs of the search",
        "`python benchmarks/tabulate_search.py --report` writes this page; its docstring explains the tables. "
        "[The search](README.md) has the study files.",
        f"## Ranking after 500,000 timesteps\n\nThe preset is *{CHOSEN}*. †: behind it by two standard errors.",
        tabulate_objective(runs, of_baselines, TASKS, SEEDS, CHOSEN),
        "On seeds 100 and 103 alone, since 101 and 102 decided the choice:",
        tabulate_objective(runs, of_baselines, TASKS, [100, 103], CHOSEN),
        "## Ranking after a million timesteps\n\nThe preset is *base*, with λ 0.95 on Ant.",
        tabulate_objective(million, of_baselines, TASKS, SEEDS, "base"),
        "## What each change of the preset did\n\nAfter 500,000 timesteps; the preset has four runs, but one on "
        "Humanoid.",
        tabulate_changes(runs, CHOSEN, FROM_ELSEWHERE),
        "After a million timesteps, with λ 0.95 on Ant:",
        tabulate_changes(renamed, "base", ()),
        "## All runs of 500,000 timesteps\n\nHere *base* is the start of the search.",
        tabulate_settings(study),
        "## All runs of a million timesteps",
        tabulate_settings(study_of_million),
    ]
    return "\n\n".join(parts) + "\n"


def main(args: list[str] | None = None) -> str:
    parser = parser_of(__doc__)
    parser.add_argument("--folder", type=Path, default=RESULTS / "search")
    parser.add_argument("--report", action="store_true", help="write report.md of the committed search")
    options = parser.parse_args(args)
    if options.report:
        page = report(RESULTS / "search", RESULTS / "rivals")
        (RESULTS / "search" / "report.md").write_text(page, encoding="utf-8")
        return page
    try:
        table = tabulate_settings(finished_runs(options.folder))
    except StudyError as error:
        parser.error(f"--folder: {error}")
    print(table)
    return table


if __name__ == "__main__":
    main()
