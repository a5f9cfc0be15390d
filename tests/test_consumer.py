"""A user's project with the installed wheel, outside of this checkout: its types are checked, and it runs."""

import os
import re
import sys
from pathlib import Path

import pytest

from tests.installing import environment, pip, run

CONSUMER = Path(__file__).parent / "consumer"
PROJECT, MISTAKES = CONSUMER / "project.py", CONSUMER / "mistakes.py"


@pytest.fixture(scope="module")
def python(built, tmp_path_factory) -> Path:
    """The Python of an environment with the wheel."""
    folder = tmp_path_factory.mktemp("consumer")
    python = environment(folder)
    pip(python, "install", "--no-deps", built["wheel"], cwd=folder)
    return python


def test_mypy_finds_the_mistakes_and_nothing_else(python, tmp_path):
    for script in (PROJECT, MISTAKES):
        (tmp_path / script.name).write_text(script.read_text())
    command = ["--config-file", CONSUMER / "mypy.ini", "--cache-dir", os.devnull, "--python-executable", python]
    said = run(sys.executable, "-m", "mypy", *command, PROJECT.name, MISTAKES.name, cwd=tmp_path, code=1)
    found = re.findall(r"^(\S+?):(\d+): error: .* \[(\S+)\]$", said, re.MULTILINE)
    wanted = [
        (MISTAKES.name, str(number), line.split("  # ")[1])
        for number, line in enumerate(MISTAKES.read_text().splitlines(), start=1)
        if "  # " in line
    ]
    assert len(wanted) > 10
    assert sorted(found) == sorted(wanted), said


def test_the_project_runs(python, tmp_path):
    said = run(python, PROJECT, cwd=tmp_path)
    # no run failed, one is there; what a study says of its runs goes to stderr
    assert any(line.startswith("0 1 ") for line in said.splitlines())
