"""The measurement of directions: its report of committed records."""

from pathlib import Path

import pytest
from measure_direction_quality import read, report

FOLDER = Path(__file__).parents[1] / "benchmarks" / "results" / "direction_quality"


@pytest.mark.parametrize("folder", ["", "n_steps_125", "n_steps_250", "n_steps_500", "n_steps_4000"])
def test_the_reports_are_those_of_the_committed_measurements(folder):
    printed = report(read(sorted((FOLDER / folder).glob("*.json"))))
    assert (FOLDER / folder / "report.md").read_text("utf-8") == printed
