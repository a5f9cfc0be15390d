"""
What does a study cost beyond its runs? A study of one run, and the same training by RL Zoo's command at the same time.

    OMP_NUM_THREADS=1 python benchmarks/benchmark_study.py

Both train UATRPO with the same settings, seed and evaluations. Each takes a core, so two cores must be free. Times
cover whole commands, from the start of Python to its end: wall time, and CPU time of all their processes.
"""

import argparse
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import gymnasium as gym

import sb3_uatrpo

EVALUATION = ["--eval-freq", "25000", "--eval-episodes", "5"]


def study(env_id: str, n_timesteps: int, seed: int, folder: str) -> list[str]:
    words = ["--folder", f"{folder}/study", "--algo", "uatrpo", "--env", env_id, "--seeds", str(seed)]
    return ["sb3_uatrpo.study", "run", *words, "--n-timesteps", str(n_timesteps), *EVALUATION, "--jobs", "1"]


def bare(env_id: str, n_timesteps: int, seed: int, folder: str) -> list[str]:
    words = ["--algo", "uatrpo", "--env", env_id, "--seed", str(seed), "-n", str(n_timesteps), *EVALUATION]
    return ["sb3_uatrpo.zoo", "train", *words, "-f", folder, "--device", "cpu", "--verbose", "0"]


def seconds(command: Sequence[str], folder: str) -> tuple[float, float]:
    """Wall time and CPU time of a command and of all processes that it starts."""
    start = time.perf_counter()
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", *command],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            # -m puts the working directory on the module path: the folder is empty, so installed modules are imported
            cwd=folder,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
        _, status, used = os.wait4(process.pid, 0)
        wall = time.perf_counter() - start
        process.returncode = os.waitstatus_to_exitcode(status)
        if code := process.returncode:
            output.seek(0)
            raise RuntimeError(f"{' '.join(command)} ended with code {code}:\n{output.read()}")
    return wall, used.ru_utime + used.ru_stime


def side_by_side(commands: Sequence[Callable[..., list[str]]], *task: object) -> list[tuple[float, float]]:
    # threads only wait for their command
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(len(commands)) as pool:
        places = [Path(folder) / command.__name__ for command in commands]
        for place in places:
            place.mkdir()
        futures = [
            pool.submit(seconds, command(*task, str(place)), str(place))
            for command, place in zip(commands, places, strict=True)
        ]
        return [future.result() for future in futures]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--env", default="Hopper-v4")
    parser.add_argument("--n-timesteps", type=int, default=300_000)
    parser.add_argument("--repetitions", type=int, default=2)
    args = parser.parse_args()
    if args.env not in gym.registry:
        parser.error(f"--env: Gymnasium knows no environment {args.env!r}")
    for name in ("n_timesteps", "repetitions"):
        if getattr(args, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1, but it is {getattr(args, name)}")
    walls, cpus = [], []
    for seed in range(args.repetitions):
        (wall, cpu), (bare_wall, bare_cpu) = side_by_side((study, bare), args.env, args.n_timesteps, seed)
        walls.append(wall / bare_wall)
        cpus.append(cpu / bare_cpu)
        print(
            f"seed {seed}: study {wall:.1f} s ({cpu:.1f} s of CPU time), bare {bare_wall:.1f} s ({bare_cpu:.1f} s): "
            f"ratio {walls[-1]:.3f} ({cpus[-1]:.3f})",
            flush=True,
        )
    print(
        f"median ratio of wall time {statistics.median(walls):.3f}, of CPU time {statistics.median(cpus):.3f}; "
        f"{args.env}, {args.n_timesteps:,} steps, python {platform.python_version()} on {platform.machine()}, "
        f"sb3_uatrpo {sb3_uatrpo.__version__}"
    )


if __name__ == "__main__":
    main()
