"""What the judges and tables of runs share: reading them, pairs of methods, their tests, and tables in Markdown."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from sb3_uatrpo.study import Study, StudyError, read_study
from sb3_uatrpo.study.statistics import Estimate, difference_of_means, welch_test

RESULTS = Path(__file__).parent / "results"
ALPHA = 0.05
# "no worse": the lower end of the interval is a loss of less than this fraction of the other method's mean
MARGIN = 0.1
# Bootstrap intervals of fewer runs are too narrow
FEW = 5

# Columns of runs
TRAINING, EVALUATION = "final_return", "last_evaluation"
# The runs of each environment and label
Groups = Mapping[tuple[str, str], pd.DataFrame]
# The returns of two methods, by environment
Samples = Mapping[str, tuple[np.ndarray, np.ndarray]]


def read_runs(*folders: Path) -> Study:
    """
    :return: the runs of studies; what cannot be read is named
    :raises StudyError: if a folder has no runs
    """
    study = read_study(*folders)
    paths = list(map(Path, study.runs.folder))
    for folder in folders:
        # of a copy, the original's runs count
        if not any(path.is_relative_to(folder) for path in paths) and read_study(folder).runs.empty:
            raise StudyError(f"there are no runs in {folder}")
    for path, reason in study.left_out:
        print(f"left out {path.name}: {reason}")
    return study


def with_evaluations(study: Study) -> pd.DataFrame:
    """:return: the runs, with the mean return of each one's own last deterministic evaluation (NaN if it has none)"""
    means = study.evaluations.groupby(["run", "step"])["return"].mean()
    return study.runs.assign(**{EVALUATION: means.groupby("run").last()})


def of_updates(
    study: Study, runs: pd.DataFrame, key: str, statistic: Callable[[np.ndarray], Any], form: str, last: float = 1.0
) -> str:
    """A statistic of the finite values of ``train/key`` in the last share of all runs' updates; a dash without any."""
    updates = study.updates[study.updates.run.isin(runs.index)].reindex(columns=["run", key])
    by_run = updates.groupby("run").run
    values = updates[key][by_run.cumcount() >= (by_run.transform("size") * (1 - last)).astype(int)].to_numpy(float)
    values = values[np.isfinite(values)]
    return f"{statistic(values):{form}}" if len(values) else "–"


def mean_of(returns: pd.Series) -> str:
    """Mean and standard error, which one run does not have; a dash without runs."""
    error = f" ± {returns.sem():,.0f}" if len(returns) > 1 else ""
    return f"{returns.mean():,.0f}{error}" if len(returns) else "–"


def samples_of(groups: Groups, pairs: Mapping[str, tuple[str, str]], column: str, least: int = 2) -> Samples:
    """
    :param pairs: for each environment, the labels of the methods to compare
    :param least: the number of returns that both must have: one run has no interval
    :return: the returns of both, where both have enough
    """
    samples = {
        task: (groups[task, x][column].dropna().to_numpy(), groups[task, y][column].dropna().to_numpy())
        for task, (x, y) in pairs.items()
        if (task, x) in groups and (task, y) in groups
    }
    return {task: pair for task, pair in samples.items() if min(map(len, pair)) >= least}


def judge(
    samples: Samples, difference: Callable[..., Estimate] = difference_of_means, n_tasks: int | None = None
) -> pd.DataFrame:
    """
    Compare two methods on each task.

    Holm's method: the i-th clearest of n differences, i = 0, …, is judged by its interval at the confidence level
    1 - 0.05/(n - i). The first interval that contains zero ends the procedure.

    :param samples: final returns of the first and of the second method, by task
    :param difference: takes two samples and returns their difference with its bootstrap interval
    :param n_tasks: n; by default, the number of tasks in ``samples``
    :return: a row for each task: the difference, its 95% interval, the verdict on the first method, and the p-value of
        Welch's test on the means, alone and with Holm's correction; empty without samples
    """
    if not samples:
        return pd.DataFrame()
    n = n_tasks or len(samples)
    intervals = {
        task: [difference(x, y, confidence_level=1 - ALPHA / k) for k in range(1, n + 1)]
        for task, (x, y) in samples.items()
    }
    # intervals are nested: at how many levels does each exclude zero?
    clear = {task: sum(bool(each.low > 0 or each.high < 0) for each in nested) for task, nested in intervals.items()}
    significant: set[str] = set()
    for place, task in enumerate(sorted(samples, key=lambda task: -clear[task])):
        if clear[task] < n - place:
            break
        significant.add(task)
    rows = []
    for task, (x, y) in samples.items():
        estimate = intervals[task][0]
        if task in significant:
            verdict = "better" if estimate.value > 0 else "worse"
        else:
            verdict = "no worse" if estimate.low > -MARGIN * abs(y.mean()) else "undecided"
        rows.append(
            {
                "task": task,
                "runs": f"{len(x)}, {len(y)}",
                "difference": float(estimate.value),
                "low": float(estimate.low),
                "high": float(estimate.high),
                "of the other's mean": float(estimate.value / abs(y.mean())),
                "verdict": verdict,
                "Welch's p": welch_test(x, y)[1],
            }
        )
    table = pd.DataFrame(rows).set_index("task")
    return table.assign(**{"Holm's p": holm(table["Welch's p"], n)})


def holm(p_values: pd.Series, n: int) -> pd.Series:
    """
    :param p_values: of some of n tests; those of the others count as higher
    :param n: number of tests
    :return: Holm's adjusted p-values: the i-th smallest times n - i, i = 0, …, at least the one before, at most 1
    """
    ordered = p_values.sort_values()
    return (ordered * (n - np.arange(len(ordered)))).cummax().clip(upper=1.0)[p_values.index]


def markdown(rows: Sequence[Mapping[str, Any]] | pd.DataFrame) -> str:
    """:return: the table, whose columns are those of the first row; nothing without rows"""
    rows = rows.to_dict("records") if isinstance(rows, pd.DataFrame) else rows
    lines = [[*rows[0]], ["---"] * len(rows[0]), *(row.values() for row in rows)] if rows else []
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)
