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
from judge_study import markdown, read_runs, update_values

from sb3_uatrpo.study import Study, StudyError
from sb3_uatrpo.study.results import learning_curves, tabulate

# The tasks on which the main candidates were compared, and their seeds
TASKS = ["HalfCheetah-v4", "Walker2d-v4", "Ant-v4"]
SEEDS = [100, 101, 102, 103]


def of_last_updates(study: Study, runs: pd.DataFrame, key: str, share: float) -> str:
    """Mean of a logged value over the last updates of all runs; a dash if there is none."""
    logged = [update_values(study, runs.loc[[i]], key) for i in runs.index]
    last = np.concatenate([values[int(len(values) * (1 - share)) :] for values in logged])
    return f"{last.mean():.2g}" if len(last) else "–"


def name_of(label: str) -> str:
    return label.removeprefix("uatrpo").strip(" ()") or "base"


def mean_of(values: pd.Series) -> str:
    """Mean over runs, with its standard error if there are several."""
    return f"{np.mean(values):,.0f}" + (f" ± {values.sem():,.0f}" if len(values) > 1 else "")


def finished_runs(folder: Path) -> tuple[Study, pd.DataFrame]:
    """
    :return: the study, and its finished runs with the area under each one's learning curve: its mean training return
    :raises StudyError: if the folder has no finished runs
    """
    study = tabulate(read_runs(folder))
    runs = study.runs[study.runs.final_return.notna()]
    if runs.empty:
        raise StudyError(f"there are no finished runs in {folder}")
    return study, runs.assign(area=learning_curves(study).groupby("run")["return"].mean())


def tabulate_settings(study: Study, runs: pd.DataFrame) -> str:
    """Each setting on each task, the largest area first: a table in Markdown."""
    rows = []
    for (task, label), group in runs.groupby(["env", "label"]):
        row = {
            "task": task,
            "setting": name_of(label),
            "runs": len(group),
            "final return": mean_of(group.final_return),
            "of each run": ", ".join(f"{value:,.0f}" for value in group.final_return),
            "area": mean_of(group.area),
            "explained variance": of_last_updates(study, group, "explained_variance", 0.2),
            "std": of_last_updates(study, group, "std", 0.2),
            "KL": of_last_updates(study, group, "kl_divergence_loss", 1.0),
        }
        rows.append((task, -group.area.mean(), row))
    return markdown([row for *_, row in sorted(rows, key=lambda of: of[:2])])


def mean_over_tasks(values: list[pd.Series]) -> str:
    """Mean over tasks of the mean over each one's runs, with its standard error if there are several runs."""
    mean = np.mean([np.mean(of_task) for of_task in values])
    error = np.sqrt(np.sum(np.square([of_task.sem() for of_task in values]))) / len(values)
    return f"{mean:.3f}" + (f" ± {error:.3f}" if np.isfinite(error) else "")


def tabulate_objective(runs: pd.DataFrame, rivals: pd.DataFrame, tasks: list[str], seeds: list[int]) -> str:
    """
    The settings with runs of all seeds on all tasks, the highest objective first: a table in Markdown. A cell has the
    mean final return with its standard error, and the area.

    With the mean final return b of a task's best rival, the objective is the mean over tasks of final return / b, and
    "by area" is the mean of area / b.
    """
    best = rivals.groupby(["env", "label"]).final_return.mean().groupby("env").max()
    runs = runs[runs.env.isin(tasks) & runs.seed.isin(seeds)]
    rows = []
    for label, of_setting in runs.groupby("label"):
        of_tasks = {task: of_setting[of_setting.env == task] for task in tasks}
        if any(set(group.seed) != set(seeds) for group in of_tasks.values()):
            continue
        row = {"setting": name_of(label)}
        row |= {task: f"{mean_of(group.final_return)}; {group.area.mean():,.0f}" for task, group in of_tasks.items()}
        relative = [group.final_return / best[task] for task, group in of_tasks.items()]
        row["objective"] = mean_over_tasks(relative)
        row["by area"] = mean_over_tasks([of_tasks[task].area / best[task] for task in tasks])
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
        study, runs = finished_runs(options.folder)
    except StudyError as error:
        parser.error(f"--folder: {error}")
    if options.rivals is None:
        table = tabulate_settings(study, runs)
    else:
        try:
            _, rivals = finished_runs(options.rivals)
        except StudyError as error:
            parser.error(f"--rivals: {error}")
        if missing := sorted(set(options.env) - set(rivals.env)):
            parser.error(f"--env: no rival has runs on {', '.join(missing)}")
        table = tabulate_objective(runs, rivals, options.env, options.seeds)
        if not table:
            seeds, tasks = ", ".join(map(str, options.seeds)), ", ".join(options.env)
            parser.error(f"--env, --seeds: no setting has runs of {seeds} on each of {tasks}")
    print(table)
    return table


if __name__ == "__main__":
    main()
