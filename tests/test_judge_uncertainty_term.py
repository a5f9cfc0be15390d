"""The one test of the uncertainty term, on samples whose outcome is known, and its committed report."""

import itertools
from pathlib import Path

import judge_uncertainty_term as module
import numpy as np
import pandas as pd
import pytest


def exact(strata: list[tuple[np.ndarray, np.ndarray]]) -> tuple[float, float]:
    """All exchanges within strata, one by one."""
    per_stratum = []
    for x, y in strata:
        together = np.concatenate([x, y])
        choices = (
            np.isin(np.arange(len(together)), chosen) for chosen in itertools.combinations(range(len(together)), len(x))
        )
        per_stratum.append([together[of].mean() - together[~of].mean() for of in choices])
    # the first choice is the observed one
    observed = np.mean([found[0] for found in per_stratum])
    every = np.array([np.mean(each) for each in itertools.product(*per_stratum)])
    return observed, float((np.abs(every) >= abs(observed) - 1e-9).mean())


@pytest.mark.parametrize("shift", [0.0, 1.0, -1.0])
def test_p_is_that_of_all_exchanges_within_environments(shift):
    rng = np.random.default_rng(0)
    # environments are far apart: exchanges between them would hide any difference
    strata = [(level + shift + rng.normal(size=4), level + rng.normal(size=3)) for level in (0.0, 100.0)]
    difference, p = module.permutation_test(strata, np.random.default_rng(1))
    expected, p_exact = exact(strata)
    assert difference == pytest.approx(expected)
    assert p == pytest.approx(p_exact, abs=0.01)


def test_a_row_has_the_mean_over_environments():
    rows = [
        {"env": env, "KL": 0.0, "with": ours, "final": 1.0 + gain * ours + 0.01 * seed * ours, "evaluation": 1.0}
        for env, gain in (("Ant-v4", 0.3), ("Hopper-v4", -0.1))
        for ours, n in ((True, 5), (False, 4))
        for seed in range(n)
    ]
    row = module.table_of({"made up": pd.DataFrame(rows)}).splitlines()[-1]
    assert row.startswith("| made up | 10, 8 | +0.120, p = ")
    assert row.endswith("| +0.000, p = 1.00 | Ant +0.32, Hopper -0.08 |")


def test_the_report_is_that_of_the_committed_runs(tmp_path):
    module.main(["--report", str(tmp_path / "report.md")])
    committed = Path(__file__).parents[1] / "benchmarks" / "results" / "uncertainty_term.md"
    assert (tmp_path / "report.md").read_text("utf-8") == committed.read_text("utf-8")
