"""
Does the uncertainty term change returns? One test for every study that has UATRPO with and without the term.

    python benchmarks/judge_uncertainty_term.py
    python benchmarks/judge_uncertainty_term.py --report benchmarks/results/uncertainty_term.md

Scores are returns over those of the preset, as in ``judge_small_batches.py``. The difference, with the term minus
without, is the mean over environments and, with small batches, over ``target_kl``. Its p is that of a two-sided
permutation test, which exchanges runs within each environment and ``target_kl``. Nothing is corrected for the number of
rows, and the test was chosen after the runs: it asks the same question everywhere, and judges a gain like a loss.
"""

import argparse
from pathlib import Path

import numpy as np
import pandas as pd
from evidence import markdown, read_runs, with_evaluations
from judge_small_batches import FOLDER, PARTS, REFERENCES, scores_of
from judge_study import EVALUATION, SHRINKAGE, TRAINING
from show_recommended import CONTROLS, FOLDERS, NEWER, OURS, RESULTS, TASKS, runs_in

from sb3_uatrpo.study import read_study
from sb3_uatrpo.study.results import tabulate

N_PERMUTATIONS = 100_000
SCORES = {"final": "final returns", "evaluation": "last evaluations"}
COLUMNS = {"final": TRAINING, "evaluation": EVALUATION}
WITHOUT = next(label for label, name in CONTROLS.items() if "uncertainty" in name)
SHRINKAGE_WITHOUT = f"{SHRINKAGE[:-1]}, uncertainty_coef=0)"


def permutation_test(strata: list[tuple[np.ndarray, np.ndarray]], rng: np.random.Generator) -> tuple[float, float]:
    """
    :param strata: scores with the term and without it, of each environment and step length
    :return: the mean over strata of the difference of means, and its two-sided p
    """
    observed = np.mean([x.mean() - y.mean() for x, y in strata])
    permuted = np.zeros(N_PERMUTATIONS)
    for x, y in strata:
        drawn = rng.permuted(np.tile(np.concatenate([x, y]), (N_PERMUTATIONS, 1)), axis=1)
        permuted += (drawn[:, : len(x)].mean(axis=1) - drawn[:, len(x) :].mean(axis=1)) / len(strata)
    # rounding must not separate the equal ones; the observed order is one of all
    as_far = np.abs(permuted) >= abs(observed) - 1e-9
    return float(observed), float((as_far.sum() + 1) / (N_PERMUTATIONS + 1))


def studies() -> dict[str, pd.DataFrame]:
    """:return: by what is compared, its runs with ``env``, ``KL`` (equal if there is one), ``with`` the term, scores"""
    found = {}
    ours, without = PARTS["uncertainty"]
    small = scores_of(read_study(RESULTS.parent.parent / FOLDER))
    small = small[small.method.isin([ours, without])]
    for size, runs in small.groupby("size"):
        found[f"preset, {size:,} timesteps, 300,000 in all"] = runs.assign(**{"with": runs.method == ours})

    def scored(runs: pd.DataFrame, ours: str, without: str) -> pd.DataFrame:
        runs = runs[runs.label.isin([ours, without]) & runs.env.isin(TASKS)]
        of_scores = {score: runs[column] / runs.env.map(REFERENCES) for score, column in COLUMNS.items()}
        return runs.assign(**of_scores, **{"KL": 0.0, "with": runs.label == ours})

    paper = with_evaluations(tabulate(read_runs(RESULTS / "paper")))
    plain, noisy = (
        scored(paper[paper.condition == condition], SHRINKAGE, SHRINKAGE_WITHOUT) for condition in ("", "noise=1")
    )
    found["`uatrpo (paper-batches)`, 1,000 timesteps"] = plain
    newest, _ = runs_in([RESULTS / name for name in FOLDERS], [RESULTS / name for name in NEWER], TASKS)
    found["preset, 2,000 timesteps"] = scored(newest.runs, OURS, WITHOUT)
    found["`uatrpo (paper-batches)`, 1,000 timesteps, adversarial noise"] = noisy
    return found


def table_of(found: dict[str, pd.DataFrame]) -> str:
    """A row for each study: the difference and its p, and the difference of final returns in each environment."""
    rows = []
    for name, runs in found.items():
        row = {"UATRPO": name, "runs (with, without)": f"{runs['with'].sum()}, {(~runs['with']).sum()}"}
        for score, title in SCORES.items():
            known = runs.dropna(subset=score)
            samples = {
                key: (of.loc[of["with"], score].to_numpy(), of.loc[~of["with"], score].to_numpy())
                for key, of in known.groupby(["env", "KL"])
            }
            difference, p = permutation_test(list(samples.values()), np.random.default_rng(0))
            row[title] = f"{difference:+.3f}, p = {p:.{4 if p < 0.01 else 2}f}"
            if score == "final":
                by_env = (
                    pd.Series({key: x.mean() - y.mean() for key, (x, y) in samples.items()}).groupby(level=0).mean()
                )
        row["final returns by environment"] = ", ".join(
            f"{env.removesuffix('-v4')} {value:+.2f}" for env, value in by_env.items()
        )
        rows.append(row)
    return markdown(pd.DataFrame(rows))


def main(args: list[str] | None = None) -> str:
    """:return: the table in Markdown"""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--report", type=Path, help="a file for the table, in Markdown")
    options = parser.parse_args(args)
    table = table_of(studies())
    print(table)
    if options.report:
        text = [
            "# The uncertainty term, by one test",
            "`python benchmarks/judge_uncertainty_term.py --report benchmarks/results/uncertainty_term.md` writes this "
            "page. With the term minus without: scores are returns over the preset's; p is that of a permutation test "
            "within environments and step lengths, chosen after the runs and not corrected.",
            table,
        ]
        options.report.write_text("\n\n".join(text) + "\n", encoding="utf-8")
    return table


if __name__ == "__main__":
    main()
