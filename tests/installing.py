"""Commands, and fresh environments that borrow heavy packages from the one that runs the tests, by a path file."""

import os
import subprocess
import sys
from pathlib import Path


def run(*command: str | Path, cwd: Path, code: int = 0, **environment: str) -> str:
    """Run a command and return what it printed."""
    # a path to this checkout would hide what is not installed
    clean = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "SB3_UATRPO_NO_HOOK")}
    result = subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env={**clean, "OMP_NUM_THREADS": "1", "MPLBACKEND": "Agg", "MUJOCO_GL": "egl", **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    output = result.stdout + result.stderr
    assert result.returncode == code, output
    return output


def environment(folder: Path) -> Path:
    """Make a fresh environment that borrows heavy packages, and return its Python."""
    run(sys.executable, "-m", "venv", "--without-pip", folder / "venv", cwd=folder)
    python = folder / "venv" / "bin" / "python"
    # path files in a borrowed folder are not read, so packages installed here in editable mode are not borrowed
    borrowed = [path for path in sys.path if Path(path).name == "site-packages"]
    (site_packages(python) / "borrowed.pth").write_text("".join(f"{path}\n" for path in borrowed))
    return python


def pip(python: Path, *args: str | Path, cwd: Path) -> str:
    """Run this environment's pip for another environment."""
    return run(sys.executable, "-m", "pip", "--python", python, "--disable-pip-version-check", *args, cwd=cwd)


def site_packages(python: Path) -> Path:
    """Where an environment keeps its packages."""
    (site,) = (python.parents[1] / "lib").glob("python*/site-packages")
    return site
