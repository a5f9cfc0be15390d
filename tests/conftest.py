"""
One thread, since the networks are small and the last digits of sums depend on the number of threads; the same random
numbers for a test whichever tests ran before it; no deadlines; and one build of wheel and sdist for all tests.
"""

import os
import random
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
import torch as th
from filelock import FileLock
from hypothesis import settings

from tests.installing import run

th.set_num_threads(1)

# the time that an example takes says nothing on a busy machine
settings.register_profile("tests", deadline=None)
settings.load_profile("tests")


@pytest.fixture(autouse=True)
def _seeds():
    """Seed the global generators, which everything without a seed of its own draws from."""
    random.seed(0)
    np.random.seed(0)
    th.manual_seed(0)


@pytest.fixture
def unchecked_distributions(monkeypatch):
    """torch.compile switches off the checks of distributions for the whole process; afterwards they are on again."""
    distribution = th.distributions.Distribution
    monkeypatch.setattr(distribution, "_validate_args", distribution._validate_args)


@pytest.fixture(scope="session")
def source(tmp_path_factory) -> Path:
    """A copy of what a clone contains, with wheel and sdist in ``dist/``, so that builds leave the checkout alone."""
    base = tmp_path_factory.getbasetemp()
    # each process of pytest-xdist has a folder within that of the run; the first process to get here builds for all
    base = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    folder = base / "source" / "sb3_uatrpo"
    with FileLock(base / "source.lock"):
        if not folder.exists():
            ignored = (".git", ".venv*", "build", "dist", "runs", "*.egg-info", "__pycache__", ".*_cache")
            root = Path(__file__).parents[1]
            shutil.copytree(root, folder, symlinks=True, ignore=shutil.ignore_patterns(*ignored))
            run(sys.executable, "-m", "build", "--no-isolation", "--outdir", "dist", cwd=folder)
    return folder


@pytest.fixture(scope="session")
def built(source) -> dict[str, Path]:
    """The wheel and the sdist."""
    (wheel,) = (source / "dist").glob("*.whl")
    (sdist,) = (source / "dist").glob("*.tar.gz")
    return {"wheel": wheel, "sdist": sdist}
