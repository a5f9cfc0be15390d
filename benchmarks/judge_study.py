"""
Which method is better in which environment? Applies the rule of benchmarks/results/paper to the runs of studies.

    python benchmarks/judge_study.py --folder benchmarks/results/paper --report benchmarks/results/paper/plain/judged.md
    python benchmarks/judge_study.py --folder benchmarks/results/paper benchmarks/results/rivals --pair uatrpo_paper ppo

It compares the means and the 20%-CVaRs of two methods' final returns on each task, and the means of their last
deterministic evaluations, by bootstrap intervals over runs. Holm's method corrects *better* and *worse* for the number
of tasks. The rule is about final returns. ``--noise 1`` judges the runs with adversarial noise. ``--report`` writes
the page that is printed, in Markdown.

A variant of an algorithm, such as ``trpo_matched (cg_damping=1)``, is a method of its own. After the pairs of the rule,
each variant is compared with the methods of the rule, and these with all other algorithms, such as PPO, whose runs may
be in a folder of their own. ``--pair`` names other pairs to compare.
"""

import itertools
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import numpy as np
import pandas as pd
from command_line import parser_of
from evidence import (
    EVALUATION,
    FEW,
    TRAINING,
    Groups,
    judge,
    markdown,
    mean_of,
    of_updates,
    read_runs,
    samples_of,
    with_evaluations,
)

from sb3_uatrpo.study import Study, StudyError
from sb3_uatrpo.study.results import tabulate
from sb3_uatrpo.study.statistics import Estimate, bootstrap_cvar, difference_of_cvars, difference_of_means

SHRINKAGE, PAPER, TRPO = METHODS = ("uatrpo (paper-batches)", "uatrpo_paper", "trpo_matched")
# The pairs of the rule
PAIRS = ((PAPER, TRPO), (SHRINKAGE, TRPO), (SHRINKAGE, PAPER))
KAPPA = 0.2
# What is compared: which returns, and how. The first is the rule's.
STATISTICS: dict[str, tuple[str, Callable[..., Estimate]]] = {
    "mean of the final returns": (TRAINING, difference_of_means),
    f"{KAPPA:.0%}-CVaR of the final returns": (TRAINING, partial(difference_of_cvars, kappa=KAPPA)),
    "mean of the last evaluations": (EVALUATION, difference_of_means),
}
OF_MEANS = [name for name, (_, difference) in STATISTICS.items() if difference is difference_of_means]
# For each pair of methods, ``judge``'s table
Judged = Mapping[tuple[str, str], pd.DataFrame]


def pairs_of(methods: set[str]) -> list[tuple[str, str]]:
    """The pairs of the rule; each variant against each method of the rule; each of these against each other method."""
    plain = [method for method in METHODS if method in methods]
    # the labels of variants go on where those of the methods end
    begins = tuple(f"{method[:-1]}, " if method.endswith(")") else f"{method} (" for method in METHODS)
    variants = sorted(method for method in methods if method.startswith(begins))
    others = sorted(methods.difference(METHODS, variants))
    return [*PAIRS, *itertools.product(variants, plain), *((ours, other) for other in others for ours in plain)]


def overview(study: Study, groups: Groups) -> str:
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
                "KL ratio ≥ 2": of_updates(study, runs, "kl_ratio", lambda ratios: np.mean(ratios >= 2.0), ".1%"),
                "mean KL proposed": of_updates(study, runs, "kl_proposed", np.mean, ".4f"),
                "mean KL taken": of_updates(study, runs, "kl_divergence_loss", np.mean, ".4f"),
                "shortened or rejected": of_updates(study, runs, "step_fraction", lambda of: np.mean(of < 1), ".1%"),
            }
        )
    return markdown(rows)


def summary(verdicts: Judged) -> str:
    """A row for each pair of methods: on each task the verdict on the first, and the difference with its interval."""
    tasks = sorted({task for table in verdicts.values() for task in table.index})
    rows = []
    for (ours, theirs), table in verdicts.items():
        row = {"first against second": f"{ours} against {theirs}"}
        for task in tasks:
            row[task] = "–"
            if task in table.index:
                judged = table.loc[task]
                row[task] = f"{judged.verdict}: {judged.difference:+,.0f} ({judged.low:,.0f} to {judged.high:,.0f})"
        rows.append(row)
    return markdown(rows)


def report(arguments: str, runs: str, judged: Mapping[str, Judged]) -> str:
    """
    :param arguments: of the command line
    :param runs: the table of ``overview``
    :param judged: for each statistic and pair of methods, ``judge``'s table
    :return: the page in Markdown
    """
    parts = [
        "# All runs, and which method is better",
        f"`python benchmarks/judge_study.py {arguments} --report FILE` writes this page.",
        runs,
    ]
    for name, by_pair in judged.items():
        if by_pair:
            parts += [f"## {name[0].upper()}{name[1:]}: verdict, difference, 95% interval", summary(by_pair)]
    rows = [
        {"first against second": " against ".join(pair), "environment": task}
        | {"means of": name.removeprefix("mean of the ")}
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
    parser = parser_of(__doc__)
    parser.add_argument("--folder", type=Path, nargs="+", default=[Path("benchmarks/results/paper")], help="of studies")
    parser.add_argument("--pair", nargs=2, action="append", help="two methods to compare, instead of all pairs")
    parser.add_argument("--noise", type=float, default=0.0, help="adversarial noise of the runs")
    parser.add_argument("--report", type=Path, help="a file for the tables, in Markdown")
    options = parser.parse_args(args)
    folders, noise = " ".join(map(str, options.folder)), f"{options.noise:g}" if options.noise else ""
    try:
        study = tabulate(read_runs(*options.folder))
    except StudyError as error:
        parser.error(f"--folder: {error}")
    runs = with_evaluations(study)
    runs = runs[runs.final_return.notna() & (runs.condition == (noise and f"noise={noise}"))]
    if runs.empty:
        parser.error(f"--noise: there are no finished runs with noise {options.noise:g} in {folders}")
    groups = dict(list(runs.groupby(["env", "label"])))
    judged: dict[str, dict[tuple[str, str], pd.DataFrame]] = {name: {} for name in STATISTICS}
    methods = {method for _, method in groups}
    for method in itertools.chain.from_iterable(options.pair or ()):
        if method not in methods:
            parser.error(f"--pair: there are no runs of {method!r}, only of {', '.join(sorted(methods))}")
    for pair in map(tuple, options.pair or pairs_of(methods)):
        for name, (column, difference) in STATISTICS.items():
            samples = samples_of(groups, dict.fromkeys(sorted({task for task, _ in groups}), pair), column)
            if samples:
                judged[name][pair] = judge(samples, difference)
            else:
                print(f"{' against '.join(pair)}, {name}: no task has several runs of both")
    page = report(f"--folder {folders}{noise and f' --noise {noise}'}", overview(study, groups), judged)
    print(page)
    if min(map(len, groups.values())) < FEW:
        print(f"With fewer than {FEW} runs, intervals are too narrow, and verdicts are hints at most.")
    if options.report:
        options.report.parent.mkdir(parents=True, exist_ok=True)
        options.report.write_text(page, encoding="utf-8")
    by_mean = judged[OF_MEANS[0]]
    # the rule is about the plain algorithms
    if not noise and by_mean.keys() >= set(PAIRS):
        print(recommendation(by_mean))
    return by_mean


if __name__ == "__main__":
    main()
