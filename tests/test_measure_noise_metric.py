"""How close Σ is to F on the committed agents: what the script compares, and that the pages have its figures."""

import re
from pathlib import Path

import measure_noise_metric as module
import pytest
import torch as th

from sb3_uatrpo import RECOMMENDED
from sb3_uatrpo.core.subspace import subspace_direction

ROOT = Path(__file__).parents[1]


@pytest.fixture
def _few_rollouts(monkeypatch):
    monkeypatch.setattr(module, "ROLLOUTS_TO_FILL_THE_SKETCH", 1)
    monkeypatch.setattr(module, "REFERENCE_STEPS", 200)


@pytest.mark.usefixtures("_few_rollouts")
@pytest.mark.filterwarnings("ignore:.*out of date.*:DeprecationWarning")
def test_only_what_varies_turns_the_direction(monkeypatch):
    found = module.measure("uatrpo/Hopper-v4", 100, 2, 2)
    assert 0.2 < found["traces"] < 5
    assert found["own"] > 0 < found["fresh"]
    assert min(found["angle"], found["other"]) > 1
    # with one random matrix, one subsample and no term anywhere, all directions are one
    monkeypatch.setattr(module, "VARIANTS", [(0, {"uncertainty_coef": 0.0})] * 3)
    same = module.measure("uatrpo/Hopper-v4", 100, 2, 2)
    assert same["c·R_n²"] == 0
    assert max(same["angle"], same["other"]) < 0.1


def test_a_sigma_proportional_to_f_does_not_change_the_direction_of_the_preset():
    """And the length comes from F̂ alone."""
    assert RECOMMENDED["target_kl"]
    root, gradient = th.randn(30, 12, dtype=th.float64), th.randn(30, dtype=th.float64)
    fisher, omega = root @ root.T, th.randn(30, 8, dtype=th.float64)
    plain, with_term = (
        subspace_direction(weight * fisher @ omega, omega, gradient, "least_squares", RECOMMENDED["shrinkage"]).vector
        for weight in (1.0, 4.6)
    )
    th.testing.assert_close(4.6 * with_term, plain)


def test_the_page_has_the_figures_of_the_report():
    table = (ROOT / "benchmarks" / "results" / "noise_metric.md").read_text("utf-8").split("\n\n")[-1]
    names, _, *rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.strip().splitlines()]
    columns = dict(zip(names, zip(*rows, strict=True), strict=True))
    assert set(columns["agent"]) == {
        str(path.relative_to(module.AGENTS)).removesuffix("_1") for path in module.AGENTS.glob("*/*_1")
    }
    page = (ROOT / "docs" / "algorithm.md").read_text("utf-8").split("### Why does the uncertainty term")[1]
    shown = re.findall(
        r"^\| (.+?) \| (\S+) to (\S+) \| (\S+) \|$", page.split("\n## ")[0].split("\n### ")[0], re.MULTILINE
    )
    assert len(shown) == 5
    swimmer = [(row[-2], row[-1]) for row in rows if "Swimmer" in row[0] and row[1] == "2000"]
    (a, b), (c, d) = swimmer
    assert f"{a} and {c}, against {b} and {d}" in " ".join(page.split())
    for name, low, high, median in shown:
        values = sorted(float(value.strip("°")) for value in columns[name])
        assert [float(value.strip("°")) for value in (low, high)] == [values[0], values[-1]], name
        assert float(median.strip("°")) == pytest.approx(
            (values[(len(values) - 1) // 2] + values[len(values) // 2]) / 2, abs=0.5 if "°" in median else 0.006
        ), name
