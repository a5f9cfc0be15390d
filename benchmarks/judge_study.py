"""
Which method is better in which environment? Applies the rule of benchmarks/results/paper to the records of a study.

    python benchmarks/judge_study.py --folder benchmarks/results/paper
    python benchmarks/judge_study.py --folder benchmarks/results/paper --report benchmarks/results/paper/plain/judged.md

It prints a table of all runs. Then it compares the means and the 20%-CVaRs of two methods' final returns on each task,
and the means of their last deterministic evaluations, by bootstrap intervals over runs. Holm's method corrects *better*
and *worse* for the number of tasks. The rule is about final returns. ``--noise 1`` judges the runs with adversarial
noise.

A variant of an algorithm, such as ``trpo_matched (cg_damping=1)``, is a method of its own. After the pairs of the rule,
each variant is compared with the methods of the rule, and these with all other algorithms, such as PPO, whose runs may
be in a folder of their own. ``--report`` writes the tables in Markdown. ``--pair`` names other pairs to compare:

    python benchmarks/judge_study.py --folder benchmarks/results/paper benchmarks/results/rivals
    python benchmarks/judge_study.py --folder benchmarks/results/paper benchmarks/results/rivals --pair uatrpo_paper ppo
"""

import argparse
import itertools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from sb3_uatrpo.study import Study, StudyError, read_study
from sb3_uatrpo.study.results import tabulate
from sb3_uatrpo.study.statistics import (
    Estimate,
    bootstrap_cvar,
    difference_of_cvars,
    difference_of_means,
    welch_test,
)

SHRINKAGE, PAPER, TRPO = METHODS = ("uatrpo (paper-batches)", "uatrpo_paper", "trpo_matched")
# The pairs of the rule
PAIRS = ((PAPER, TRPO), (SHRINKAGE, TRPO), (SHRINKAGE, PAPER))
KAPPA = 0.2
ALPHA = 0.05
# "no worse": the lower end of the interval is a loss of less than this fraction of the other method's mean
MARGIN = 0.1
# Bootstrap intervals of fewer runs are too narrow
FEW = 5

# Columns of runs
TRAINING, EVALUATION = "final_return", "last_evaluation"
Difference = Callable[..., Estimate]
# What is compared: which returns, and how. The first is the rule's.
STATISTICS: dict[str, tuple[str, Difference]] = {
    "mean of the final returns": (TRAINING, difference_of_means),
    f"{KAPPA:.0%}-CVaR of the final returns": (
        TRAINING,
        lambda x, y, **options: difference_of_cvars(x, y, KAPPA, **options),
    ),
    "mean of the last evaluations": (EVALUATION, difference_of_means),
}
OF_MEANS = [name for name, (_, difference) in STATISTICS.items() if difference is difference_of_means]
Judged = Mapping[tuple[str, str], pd.DataFrame]


def pairs_of(methods: set[str]) -> list[tuple[str, str]]:
    """The pairs of the rule; each variant against each method of the rule; each of these against each other method."""
    plain = [method for method in METHODS if method in methods]
    # the labels of variants go on where those of the methods end
    begins = tuple(f"{method[:-1]}, " if method.endswith(")") else f"{method} (" for method in METHODS)
    variants = sorted(method for method in methods if method.startswith(begins))
    others = sorted(methods.difference(METHODS, variants))
    return [*PAIRS, *itertools.product(variants, plain), *((ours, other) for other in others for ours in plain)]


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


def markdown(rows: list[dict[str, Any]]) -> str:
    lines = [list(rows[0]), ["---"] * len(rows[0]), *(row.values() for row in rows)]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)


def overview(study: Study, groups: Mapping[tuple[str, str], pd.DataFrame]) -> str:
    """
    A row for each method on each task: final returns over runs, and steps over all updates of these runs, as proposed
    and as taken after the line search.
    """
    rows = []
    for (task, method), runs in groups.items():
        returns = runs.final_return.to_numpy()
        worst_runs = bootstrap_cvar(returns, KAPPA)
        # one run has no interval
        interval = f" ({worst_runs.low:,.0f} to {worst_runs.high:,.0f})" if len(returns) > 1 else ""
        rows.append(
            {
                "task": task,
                "method": method,
                "runs": len(returns),
                "final return": mean_of(runs.final_return),
                f"{KAPPA:.0%}-CVaR": f"{worst_runs.value:,.0f}{interval}",
                "final returns, worst first": ", ".join(f"{value:,.0f}" for value in sorted(returns)),
                "last evaluation": mean_of(runs[EVALUATION].dropna()),
                "median KL ratio": of_updates(study, runs, "kl_ratio", np.median, ".2f"),
                "KL ratio ≥ 2": of_updates(
                    study, runs, "kl_ratio", lambda ratios: float(np.mean(ratios >= 2.0)), ".1%"
                ),
                "mean KL proposed": of_updates(study, runs, "kl_proposed", np.mean, ".4f"),
                "mean KL taken": of_updates(study, runs, "kl_divergence_loss", np.mean, ".4f"),
                "shortened or rejected": of_updates(
                    study, runs, "step_fraction", lambda fractions: float(np.mean(fractions < 1)), ".1%"
                ),
            }
        )
    return markdown(rows)


def mean_of(returns: pd.Series) -> str:
    """Mean and standard error, which one run does not have; a dash without runs."""
    error = f" ± {returns.sem():,.0f}" if len(returns) > 1 else ""
    return f"{returns.mean():,.0f}{error}" if len(returns) else "–"


def of_updates(study: Study, runs: pd.DataFrame, key: str, statistic: Callable[[np.ndarray], float], form: str) -> str:
    """A statistic of a logged value over all updates of all runs; a dash if no run logged it."""
    values = update_values(study, runs, key)
    return f"{statistic(values):{form}}" if len(values) else "–"


def update_values(study: Study, runs: pd.DataFrame, key: str) -> np.ndarray:
    """:return: the finite values of ``train/key`` in all updates of all runs (``n_updates``)"""
    updates = study.updates[study.updates.run.isin(runs.index)]
    values = updates[key].to_numpy(dtype=np.float64) if key in updates else np.empty(0)
    return values[np.isfinite(values)]


def samples_of(
    groups: Mapping[tuple[str, str], pd.DataFrame], ours: str, theirs: str, column: str
) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """:return: the returns of two methods on each task where both have several: one run has no interval"""
    samples = {
        task: tuple(groups[task, of][column].dropna().to_numpy() for of in (ours, theirs))
        for task in sorted({task for task, method in groups if method == ours and (task, theirs) in groups})
    }
    return {task: (x, y) for task, (x, y) in samples.items() if min(len(x), len(y)) > 1}


def judge(
    samples: Mapping[str, tuple[np.ndarray, np.ndarray]], difference: Difference, n_tasks: int | None = None
) -> pd.DataFrame:
    """
    Compare two methods on each task.

    Holm's method: the i-th clearest of n differences, i = 0, …, is judged by its interval at the confidence level
    1 - 0.05/(n - i). The first interval that contains zero ends the procedure.

    :param samples: final returns of the first and of the second method, by task
    :param difference: takes two samples and returns their difference with its bootstrap interval
    :param n_tasks: n; by default, the number of tasks in ``samples``
    :return: a row for each task: the difference, its 95% interval, the verdict on the first method, and the p-value of
        Welch's test on the means, alone and with Holm's correction
    """
    n = n_tasks or len(samples)
    intervals = {
        task: [difference(x, y, confidence_level=1 - ALPHA / k) for k in range(1, n + 1)]
        for task, (x, y) in samples.items()
    }
    # intervals are nested: at how many levels does each exclude zero?
    clear = {task: sum(bool(each.low > 0 or each.high < 0) for each in found) for task, found in intervals.items()}
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


def summary(verdicts: Judged) -> str:
    """A row for each pair of methods: on each task the verdict on the first, and the difference with its interval."""
    tasks = sorted({task for table in verdicts.values() for task in table.index})
    rows = []
    for (ours, theirs), table in verdicts.items():
        row = {"first against second": f"{ours} against {theirs}"}
        for task in tasks:
            judged = table.loc[task] if task in table.index else None
            row[task] = (
                f"{judged.verdict}: {judged.difference:+,.0f} ({judged.low:,.0f} to {judged.high:,.0f})"
                if judged is not None
                else "–"
            )
        rows.append(row)
    return markdown(rows)


def report(arguments: Sequence[str], runs: str, judged: Mapping[str, Judged]) -> str:
    """
    :param arguments: of the command line
    :param runs: the table of ``overview``
    :param judged: for each statistic and pair of methods, ``judge``'s table
    :return: the page in Markdown
    """
    parts = [
        "# All runs, and which method is better",
        f"`python benchmarks/judge_study.py {' '.join(arguments)} --report FILE` writes this page.",
        runs,
    ]
    for name, by_pair in judged.items():
        if by_pair:
            parts += [f"## {name[0].upper()}{name[1:]}: verdict, difference, 95% interval", summary(by_pair)]
    rows = [
        {
            "first against second": " against ".join(pair),
            "environment": task,
            "means of": name.removeprefix("mean of the "),
        }
        | {"p": format(row["Welch's p"], ".3f"), "corrected": format(row["Holm's p"], ".3f")}
        for name in OF_MEANS
        for pair, table in judged[name].items()
        for task, row in table.iterrows()
    ]
    if rows:
        parts += ["## Welch's test of the means, alone and with Holm's correction", markdown(rows)]
    return "\n\n".join(parts) + "\n"


def recommendation(verdicts: Judged) -> str:
    """The rule's recommendation, given the verdicts on means for each pair of methods."""
    over_paper = verdicts[SHRINKAGE, PAPER]["verdict"]
    is_chosen = (over_paper == "better").any() and over_paper.isin(["better", "no worse"]).all()
    choice = SHRINKAGE if is_chosen else PAPER
    beats = [method for method in (PAPER, SHRINKAGE) if "better" in set(verdicts[method, TRPO].verdict)]
    over = f"better than {TRPO} somewhere: {' and '.join(beats)}" if beats else f"neither beats {TRPO} anywhere"
    return f"the rule recommends {choice}; {over}"


def main(args: list[str] | None = None) -> Judged:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--folder", type=Path, nargs="+", default=[Path("benchmarks/results/paper")], help="folders of studies"
    )
    parser.add_argument(
        "--pair", nargs=2, action="append", metavar=("FIRST", "SECOND"), help="two methods to compare, instead of all"
    )
    parser.add_argument("--noise", type=float, default=0.0, help="adversarial noise of the runs")
    parser.add_argument("--report", type=Path, help="a file for the tables, in Markdown")
    options = parser.parse_args(args)
    try:
        study = tabulate(read_runs(*options.folder))
    except StudyError as error:
        parser.error(f"--folder: {error}")
    condition = f"noise={options.noise:g}" if options.noise else ""
    runs = with_evaluations(study)
    runs = runs[runs.final_return.notna() & (runs.condition == condition)]
    if runs.empty:
        parser.error(
            f"--noise: there are no finished runs with noise {options.noise:g} in {', '.join(map(str, options.folder))}"
        )
    groups = dict(list(runs.groupby(["env", "label"])))
    print(overview(study, groups))
    if min(map(len, groups.values())) < FEW:
        print(f"\nWith fewer than {FEW} runs, intervals are too narrow, and verdicts are hints at most.")
    judged: dict[str, dict[tuple[str, str], pd.DataFrame]] = {name: {} for name in STATISTICS}
    methods = {method for _, method in groups}
    for method in itertools.chain.from_iterable(options.pair or ()):
        if method not in methods:
            parser.error(f"--pair: there are no runs of {method!r}, only of {', '.join(sorted(methods))}")
    for ours, theirs in options.pair or pairs_of(methods):
        for name, (column, difference) in STATISTICS.items():
            samples = samples_of(groups, ours, theirs, column)
            if not samples:
                print(f"\n{ours} against {theirs}, {name}: no task has several runs of both")
                continue
            table = judge(samples, difference)
            judged[name][ours, theirs] = table
            if difference is not difference_of_means:
                # Welch's test is about means
                table = table.drop(columns=["Welch's p", "Holm's p"])
            print(f"\n{ours} against {theirs}, {name}")
            print(table.to_string(float_format=lambda value: f"{value:,.2f}" if abs(value) < 10 else f"{value:,.0f}"))
    for name, by_pair in judged.items():
        if by_pair:
            print(f"\nIn short, {name}: verdict on the first, difference, 95% interval\n{summary(by_pair)}")
    if options.report:
        arguments = [
            "--folder",
            *map(str, options.folder),
            *(["--noise", f"{options.noise:g}"] if options.noise else []),
        ]
        options.report.parent.mkdir(parents=True, exist_ok=True)
        options.report.write_text(report(arguments, overview(study, groups), judged), encoding="utf-8")
    by_mean = judged[OF_MEANS[0]]
    # the rule is about the plain algorithms
    if not options.noise and by_mean.keys() >= set(PAIRS):
        print(f"\n{recommendation(by_mean)}")
    return by_mean


if __name__ == "__main__":
    main()
