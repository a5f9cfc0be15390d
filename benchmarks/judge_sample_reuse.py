"""
Does reusing rollouts help, by the rule of results/sample_reuse/README.md?

    python benchmarks/judge_sample_reuse.py --stage 1 --report

ranks the arms of stage 1, and

    python benchmarks/judge_sample_reuse.py --report

judges stage 2.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import pandas as pd
from command_line import parser_of
from evidence import ALPHA, MARGIN, RESULTS, holm, markdown, of_updates, read_runs
from judge_small_batches import REFERENCES, area
from judge_uncertainty_term import permutation_test
from tabulate_search import TASKS, finished_runs, tabulate_objective

from sb3_uatrpo.study import Study
from sb3_uatrpo.study.results import tabulate
from sb3_uatrpo.study.statistics import bootstrap, welch_test

FOLDER = RESULTS / "sample_reuse"
# What went on from stage 1, and the same settings with no old rollouts
ARM, WITHOUT_REUSE = "uatrpo (reuse 3 no term)", "uatrpo (no term)"
PRESET, WITHOUT_TERM = "uatrpo", "uatrpo (no term)"
SCORES = ("final", "area")
N_RESAMPLES = 10_000


def by_task(runs: pd.DataFrame, label: str, score: str) -> list[np.ndarray]:
    """:return: the label's scores in each task"""
    return [group.to_numpy() for _, group in runs[runs.label == label].groupby("env")[score]]


def difference(first: list[np.ndarray], second: list[np.ndarray]) -> Any:
    """:return: the mean over tasks of the differences of means, and its interval, seeds resampled in task and arm"""
    n = len(first)

    def statistic(*samples: np.ndarray, axis: int) -> np.ndarray:
        means = [x.mean(axis) for x in samples]
        return sum(means[:n]) / n - sum(means[n:]) / n

    return bootstrap(statistic, *first, *second, n_resamples=N_RESAMPLES)


def judge(runs: pd.DataFrame, arm: str, same: str, preset: str) -> tuple[list[str], pd.DataFrame]:
    """:return: the lines of the verdict, and a table of the tasks"""
    lines = []
    means = runs.groupby("label")[list(SCORES)].mean()
    intervals = {score: difference(by_task(runs, arm, score), by_task(runs, same, score)) for score in SCORES}
    for score, (value, low, high) in intervals.items():
        lines.append(f"`{arm}` minus `{same}`, {score}: {value:+.3f} ({low:+.3f} to {high:+.3f})")
    primary = intervals["area"][1] > 0 and intervals["final"][0] >= 0
    is_ahead = bool((means.loc[arm] >= means.loc[preset]).all())
    means_of_arms = "; ".join(f"`{name}` {row.final:.3f} and {row.area:.3f}" for name, row in means.iterrows())
    lines.append(f"mean scores, final and area: {means_of_arms}")

    rows = []
    for env, task in runs.groupby("env"):
        with_reuse, without = (task[task.label == name].final_return for name in (arm, same))
        rows.append({
            "task": env,
            **{name: f"{of.mean():,.0f} ± {of.sem():,.0f}" for name, of in task.groupby("label").final_return},
            "relative": with_reuse.mean() / without.mean() - 1,
            "p": welch_test(with_reuse, without)[1],
        })  # fmt: skip
    table = pd.DataFrame(rows)
    table["Holm"] = holm(table.p, len(table))
    worse = table[(table.relative < -MARGIN) | ((table.relative < 0) & (table.Holm < ALPHA))].task
    holds = primary and is_ahead and worse.empty
    lines.append(
        f"Reuse {'holds' if holds else 'does not hold'}: primary {'yes' if primary else 'no'}, not below the preset in "
        f"either mean {'yes' if is_ahead else 'no'}, tasks with a veto: {', '.join(worse) or 'none'}."
    )
    return lines, table.assign(**{name: table[name].map("{:+.3f}".format) for name in ("relative", "p", "Holm")})


def term(runs: pd.DataFrame, preset: str, without: str) -> str:
    """The one test of the uncertainty term: the preset minus the preset without it, final scores."""
    strata = list(zip(by_task(runs, preset, "final"), by_task(runs, without, "final"), strict=True))
    value, p = permutation_test(strata, np.random.default_rng(0))
    verdict = "the preset sets uncertainty_coef 0" if value < 0 and p < ALPHA else "nothing changes"
    return f"`{preset}` minus `{without}`, final: {value:+.3f}, p = {p:.4f}: {verdict}"


def first_stage() -> list[str]:
    """:return: the ranking of stage 1, and the policies at its end"""
    study, rivals = finished_runs(FOLDER / "stage_1"), finished_runs(RESULTS / "rivals")
    ranking = tabulate_objective(study.runs, rivals.runs, TASKS, [400, 401, 402, 403], "base")
    return ["# Stage 1", ranking, markdown(policies(study, study.runs))]


def second_stage() -> list[str]:
    """:return: the verdicts on reuse and on the term, and the tables behind them"""
    study = tabulate(read_runs(FOLDER / "stage_2"))
    runs = study.runs
    episodes = dict(list(study.episodes.groupby("run")))
    reference = runs.env.map(REFERENCES)
    areas = pd.Series({i: area(episodes[i], run.n_timesteps) for i, run in runs.iterrows() if i in episodes})
    scored = runs.assign(final=runs.final_return / reference, area=areas.reindex(runs.index) / reference)
    # a run that failed twice counts as the lowest of its environment
    lowest = scored.groupby("env")[["final_return", *SCORES]].transform("min")
    scored = scored.fillna({name: lowest[name] for name in lowest})
    lines, table = judge(scored, ARM, WITHOUT_REUSE, PRESET)
    lines.append(term(scored, PRESET, WITHOUT_TERM))
    return ["# Stage 2", *lines, markdown(table), markdown(policies(study, scored))]


def policies(study: Study, runs: pd.DataFrame) -> list[dict[str, str]]:
    """:return: for each arm, medians over the updates"""
    median: Callable[[np.ndarray], Any] = np.median
    return [
        {
            "arm": label,
            "σ in the last tenth": of_updates(study, group, "std", median, ".2f", 0.1),
            "effective share of the batch": of_updates(study, group, "effective_sample_share", median, ".2f"),
        }
        for label, group in runs.groupby("label")
    ]


def main(args: list[str] | None = None) -> str:
    """:return: the page in Markdown"""
    parser = parser_of(__doc__)
    parser.add_argument("--stage", type=int, choices=(1, 2), default=2)
    parser.add_argument("--report", action="store_true", help="write judged.md into the folder of the stage")
    options = parser.parse_args(args)
    page = "\n\n".join(first_stage() if options.stage == 1 else second_stage())
    print(page)
    if options.report:
        (FOLDER / f"stage_{options.stage}" / "judged.md").write_text(page + "\n", "utf-8")
    return page


if __name__ == "__main__":
    main()
