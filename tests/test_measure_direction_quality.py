"""The measurement of directions: its report of committed records."""

from pathlib import Path

import pytest
from measure_direction_quality import read, report

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "benchmarks" / "results" / "direction_quality"


@pytest.mark.parametrize("folder", ["", "n_steps_125", "n_steps_250", "n_steps_500", "n_steps_4000"])
def test_the_pages_show_the_committed_measurements(folder):
    """The committed report is the one written now, and docs/results.md has what the uncertainty term does to scores."""
    printed = report(read(sorted((FOLDER / folder).glob("*.json"))))
    assert (FOLDER / folder / "report.md").read_text(encoding="utf-8") == printed
    table = printed.split("In units of the estimator's own score:")[1]
    cells = dict.fromkeys(("paper", "shrinkage 0.75"), "")
    for line in table.splitlines()[4:]:
        name, difference, interval = (cell.strip() for cell in line.split("|")[1:-1])
        cells[name] = f"{difference} ({interval})"
    n_steps = int(folder.removeprefix("n_steps_") or 1000)
    row = f"| {n_steps:,} | {cells['shrinkage 0.75']} | {cells['paper']} |"
    assert row in (ROOT / "docs" / "results.md").read_text(encoding="utf-8")
