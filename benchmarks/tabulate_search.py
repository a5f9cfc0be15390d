"""
What did each lever of a search do?

    python benchmarks/tabulate_search.py --folder benchmarks/results/search

A row for each task and variant, over its runs: the final returns; the area under the learning curve, which is the mean
training return over the whole run and less noisy than the end; the critic's explained variance and the policy's mean
standard deviation in the last fifth of the updates; and the mean KL divergence of an update. Returns and areas are
means with their standard errors.

    python benchmarks/tabulate_search.py --folder benchmarks/results/search --rivals benchmarks/results/rivals \\
        --env HalfCheetah-v4 Walker2d-v4 Ant-v4 --seeds 100 101 102 103

ranks the settings that have runs with all of these seeds on all of these tasks instead, by their final return in terms
of the best rival's (the objective), and says how large their area is in the same terms.
"""

import argparse
from pathlib import Path

import numpy as np
import pandas as pd
from judge_study import markdown, records_in

from sb3_uatrpo.study import StudyError, standard_error
from sb3_uatrpo.study.results import learning_curves, tabulate_runs

# The tasks on which the main candidates were compared, and their seeds
TASKS = ["HalfCheetah-v4", "Walker2d-v4", "Ant-v4"]
SEEDS = [100, 101, 102, 103]


def of_last_updates(runs: pd.DataFrame, key: str, share: float) -> str:
    """Mean of a logged value over the last updates of all runs; a dash if there is none."""
    logged = [np.array(record.updates.get(key, []), dtype=np.float64) for record in runs.record]
    last = np.concatenate([values[int(len(values) * (1 - share)) :] for values in logged])
    known = last[np.isfinite(last)]
    return f"{known.mean():.2g}" if len(known) else "–"


def areas_of(runs: pd.DataFrame) -> np.ndarray:
    """Area under each run's learning curve: its mean training return (``n_runs``)."""
    return np.nanmean(learning_curves(runs)[1], axis=1)


def name_of(label: str) -> str:
    return label.removeprefix("uatrpo").strip(" ()") or "base"


def mean_of(values: pd.Series | np.ndarray) -> str:
    """Mean over runs, with its standard error if there are several."""
    return f"{np.mean(values):,.0f}" + (f" ± {standard_error(values):,.0f}" if len(values) > 1 else "")


def finished_runs(folder: Path) -> pd.DataFrame:
    """
    :raises StudyError: if the folder has no finished runs
    """
    runs = tabulate_runs(records_in(folder))
    runs = runs[runs.final_return.notna()]
    if runs.empty:
        raise StudyError(f"there are no finished runs in {folder / 'records'}")
    return runs


def tabulate_settings(runs: pd.DataFrame) -> str:
    """Each setting on each task, the largest area first: a table in Markdown."""
    rows = []
    for (task, label), group in runs.groupby(["environment", "algorithm"]):
        areas = areas_of(group)
        row = {
            "task": task,
            "setting": name_of(label),
            "runs": len(group),
            "final return": mean_of(group.final_return),
            "of each run": ", ".join(f"{value:,.0f}" for value in group.final_return),
            "area": mean_of(areas),
            "explained variance": of_last_updates(group, "explained_variance", 0.2),
            "std": of_last_updates(group, "std", 0.2),
            "KL": of_last_updates(group, "kl_divergence_loss", 1.0),
        }
        rows.append((task, -areas.mean(), row))
    return markdown([row for *_, row in sorted(rows, key=lambda of: of[:2])])


def mean_over_tasks(values: list[np.ndarray]) -> str:
    """Mean over tasks of the mean over each one's runs, with its standard error if there are several runs."""
    mean = np.mean([np.mean(of_task) for of_task in values])
    error = np.sqrt(np.sum(np.square([standard_error(of_task) for of_task in values]))) / len(values)
    return f"{mean:.3f}" + (f" ± {error:.3f}" if np.isfinite(error) else "")


def tabulate_objective(runs: pd.DataFrame, rivals: pd.DataFrame, tasks: list[str], seeds: list[int]) -> str:
    """
    The settings with runs of all seeds on all tasks, the highest objective first: a table in Markdown. A cell has the
    mean final return with its standard error, and the area.

    With the mean final return b of a task's best rival, the objective is the mean over tasks of final return / b, and
    "by area" is the mean of area / b.
    """
    best = rivals.groupby(["environment", "algorithm"]).final_return.mean().groupby("environment").max()
    runs = runs[runs.environment.isin(tasks) & runs.seed.isin(seeds)]
    rows = []
    for label, of_setting in runs.groupby("algorithm"):
        of_tasks = {task: of_setting[of_setting.environment == task] for task in tasks}
        if any(set(group.seed) != set(seeds) for group in of_tasks.values()):
            continue
        areas = {task: areas_of(group) for task, group in of_tasks.items()}
        row = {"setting": name_of(label)}
        row |= {task: f"{mean_of(group.final_return)}; {areas[task].mean():,.0f}" for task, group in of_tasks.items()}
        relative = [group.final_return / best[task] for task, group in of_tasks.items()]
        row["objective"] = mean_over_tasks(relative)
        row["by area"] = mean_over_tasks([areas[task] / best[task] for task in tasks])
        rows.append((-np.mean([returns.mean() for returns in relative]), row))
    return markdown([row for _, row in sorted(rows, key=lambda of: of[0])]) if rows else ""


def main(args: list[str] | None = None) -> str:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("benchmarks/results/search"))
    parser.add_argument("--rivals", type=Path, help="the folder of the rivals' runs; ranks settings by the objective")
    parser.add_argument("--env", nargs="+", default=TASKS, help="the tasks to rank by")
    parser.add_argument("--seeds", nargs="+", type=int, default=SEEDS, help="the seeds to rank by")
    options = parser.parse_args(args)
    try:
        runs = finished_runs(options.folder)
    except StudyError as error:
        parser.error(f"--folder: {error}")
    if options.rivals is None:
        table = tabulate_settings(runs)
    else:
        try:
            rivals = finished_runs(options.rivals)
        except StudyError as error:
            parser.error(f"--rivals: {error}")
        if missing := sorted(set(options.env) - set(rivals.environment)):
            parser.error(f"--env: no rival has runs on {', '.join(missing)}")
        table = tabulate_objective(runs, rivals, options.env, options.seeds)
        if not table:
            seeds, tasks = ", ".join(map(str, options.seeds)), ", ".join(options.env)
            parser.error(f"--env, --seeds: no setting has runs of {seeds} on each of {tasks}")
    print(table)
    return table


if __name__ == "__main__":
    main()
