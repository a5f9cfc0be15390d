"""
What does the start-up hook cost, and what does importing sb3_uatrpo add to Stable-Baselines3's own import?

    python benchmarks/benchmark_startup.py

Python is started alternately in two empty virtual environments, one with the hook's two files and one without. Then
Stable-Baselines3 and sb3_uatrpo are imported alternately in this environment.
"""

import argparse
import importlib.util
import os
import platform
import py_compile
import statistics
import subprocess
import sys
import tempfile
import time
import venv
from pathlib import Path

HOOK = "sb3_uatrpo_zoo_hook"


def seconds(*command: str | Path) -> float:
    """The wall time of a command."""
    environment = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "SB3_UATRPO_NO_HOOK")}
    start = time.perf_counter()
    subprocess.run([str(part) for part in command], check=True, env=environment)
    return time.perf_counter() - start


def milliseconds(times: list[float]) -> str:
    quartiles = statistics.quantiles(times, n=4)
    return f"{1e3 * statistics.median(times):8.2f} ms ({1e3 * quartiles[0]:.2f} to {1e3 * quartiles[2]:.2f})"


def compare(one: tuple[str, list], other: tuple[str, list], repetitions: int) -> None:
    """Run two commands alternately, and print medians and quartiles of their times and of the differences."""
    times: dict[str, list[float]] = {one[0]: [], other[0]: []}
    for _ in range(repetitions):
        for label, command in (one, other):
            times[label].append(seconds(*command))
    for label, of_label in times.items():
        print(f"{label:36}{milliseconds(of_label)}")
    differences = [after - before for before, after in zip(*times.values(), strict=True)]
    print(f"{'difference':36}{milliseconds(differences)}\n")


def installed_hook() -> str:
    """Find the hook of this environment without importing it."""
    spec = importlib.util.find_spec(HOOK)
    if spec is None or spec.origin is None:
        raise SystemExit("sb3_uatrpo is not installed in this environment")
    return spec.origin


def bare_environment(folder: Path, hook: bool) -> Path:
    """Create a virtual environment that is empty or holds only the hook, and return the path of its Python."""
    venv.create(folder)
    (site,) = (folder / "lib").glob("python*/site-packages")
    if hook:
        module = site / f"{HOOK}.py"
        module.write_bytes(Path(installed_hook()).read_bytes())
        py_compile.compile(str(module), doraise=True)  # as pip does
        (site / f"{HOOK}.pth").write_text(f"import {HOOK}\n")
    return folder / "bin" / "python"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--starts", type=int, default=300, help="how often Python is started in each environment")
    parser.add_argument("--imports", type=int, default=10, help="how often each package is imported")
    args = parser.parse_args()
    if min(args.starts, args.imports) < 2:
        parser.error(f"--starts and --imports must be at least 2, not {args.starts} and {args.imports}")
    print(f"Python {platform.python_version()}, {platform.machine()}; medians (quartiles)\n")
    with tempfile.TemporaryDirectory() as root:
        without = bare_environment(Path(root, "without"), hook=False)
        with_hook = bare_environment(Path(root, "with"), hook=True)
        for python in (without, with_hook):  # the first start reads from the disk, and is not timed
            seconds(python, "-c", "pass")
        one = ("Python starts without the hook", [without, "-c", "pass"])
        compare(one, ("Python starts with the hook", [with_hook, "-c", "pass"]), args.starts)
    theirs = ("import stable_baselines3", [sys.executable, "-c", "import stable_baselines3"])
    ours = ("import sb3_uatrpo", [sys.executable, "-c", "import sb3_uatrpo"])
    compare(theirs, ours, args.imports)


if __name__ == "__main__":
    main()
