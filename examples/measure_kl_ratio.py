"""
Is the KL divergence of the proposed steps what the algorithm expects? UATRPO beside the matched TRPO.

    python examples/measure_kl_ratio.py --env Hopper-v4 HalfCheetah-v4 --seed 0 1 --n-timesteps 150000 --jobs 2

Runs ``train_mujoco.py`` for each algorithm, environment and seed, one process each, and prints a table. Runs whose
folder is complete are not repeated.
"""

import argparse
import itertools
import os
import platform
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import gymnasium as gym
import mujoco
import numpy as np
import pandas as pd
import stable_baselines3
import torch as th
from train_mujoco import ALGORITHMS, final_return

import sb3_uatrpo


def run(algo: str, env: str, seed: int, n_timesteps: int, root: Path) -> Path:
    """Train in a process of its own, unless that was done."""
    folder = root / f"{n_timesteps}" / f"{algo}_{env}_{seed}"
    if not (folder / "model.zip").exists():
        script = Path(__file__).with_name("train_mujoco.py")
        command = [sys.executable, str(script), "--algo", algo, "--env", env, "--seed", str(seed)]
        command += ["--n-timesteps", str(n_timesteps), "--folder", str(folder), "--eval-freq", "0", "--no-progress-bar"]
        subprocess.run(command, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"}, stdout=subprocess.DEVNULL)
    return folder


def summary(folder: Path, algo: str, env: str, seed: int, n_timesteps: int) -> dict[str, object]:
    """One row of the table, from the log of a run."""
    log = pd.read_csv(folder / "progress.csv")
    ratio = log["train/kl_ratio"].dropna()
    fraction = log["train/step_fraction"].dropna()
    return {
        "env": env,
        "algorithm": ALGORITHMS[algo].__name__,
        "seed": seed,
        "updates": len(fraction),
        "median ratio": round(float(ratio.median()), 2),
        "ratio in 0.5–2": f"{np.mean((ratio >= 0.5) & (ratio <= 2)):.0%}",
        "ratio ≥ 2": f"{np.mean(ratio >= 2):.0%}",
        "ratio ≥ 3": f"{np.mean(ratio >= 3):.0%}",
        "mean proposed KL": round(float(log["train/kl_proposed"].mean()), 4),
        "steps cut back": f"{np.mean(fraction < 1):.0%}",
        "refused": f"{np.mean(fraction == 0):.0%}",
        "final return": round(final_return(folder, n_timesteps)),
    }


def main(args: list[str] | None = None) -> pd.DataFrame:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--algo", nargs="+", choices=ALGORITHMS, default=list(ALGORITHMS))
    parser.add_argument("--env", nargs="+", default=["Hopper-v4", "HalfCheetah-v4"])
    parser.add_argument("--seed", nargs="+", type=int, default=[0, 1])
    parser.add_argument("--n-timesteps", type=int, default=150_000)
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time")
    parser.add_argument("--folder", type=Path, default=Path("runs/kl_ratio"))
    options = parser.parse_args(args)

    specs = list(itertools.product(options.env, options.algo, options.seed))
    with ThreadPoolExecutor(options.jobs) as pool:
        folders = list(
            pool.map(lambda spec: run(spec[1], spec[0], spec[2], options.n_timesteps, options.folder), specs)
        )
    table = pd.DataFrame(
        [
            summary(folder, algo, env, seed, options.n_timesteps)
            for folder, (env, algo, seed) in zip(folders, specs, strict=True)
        ]
    )
    print(table.to_string(index=False))
    versions = {m.__name__: m.__version__ for m in (sb3_uatrpo, stable_baselines3, th, gym, mujoco, np)}
    print(f"\n{options.n_timesteps} steps a run; Python {platform.python_version()} on {platform.machine()},", end=" ")
    print(", ".join(f"{name} {version}" for name, version in versions.items()))
    return table


if __name__ == "__main__":
    main()
