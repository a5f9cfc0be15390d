"""
Do proposed steps have the KL divergence that the algorithm expects? UATRPO and the matched TRPO compared.

    python examples/measure_kl_ratio.py --env Hopper-v4 HalfCheetah-v4 --seed 0 1 --n-timesteps 150000 --jobs 2

Runs ``train_mujoco.py`` for each algorithm, environment and seed, each in its own process. Prints a table, and draws
learning curves and histograms of the ratio. Complete runs are not repeated.
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
import matplotlib.pyplot as plt
import mujoco
import numpy as np
import pandas as pd
import stable_baselines3
import torch as th
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from stable_baselines3.common.monitor import load_results
from train_mujoco import ALGORITHMS, final_return

import sb3_uatrpo


def run(algo: str, env: str, seed: int, n_timesteps: int, root: Path) -> Path:
    """Train in a separate process, unless the run is complete."""
    folder = root / f"{n_timesteps}" / f"{algo}_{env}_{seed}"
    if not (folder / "model.zip").exists():
        script = Path(__file__).with_name("train_mujoco.py")
        command = [sys.executable, str(script), "--algo", algo, "--env", env, "--seed", str(seed)]
        command += ["--n-timesteps", str(n_timesteps), "--folder", str(folder), "--eval-freq", "0", "--no-progress-bar"]
        print(f"training {algo} on {env}, seed {seed}", file=sys.stderr, flush=True)
        subprocess.run(command, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"}, stdout=subprocess.DEVNULL)
    return folder


def summary(folder: Path, algo: str, env: str, seed: int, n_timesteps: int) -> dict[str, object]:
    """One row of the table, from the log of a run."""
    log = pd.read_csv(folder / "progress.csv")
    ratio = log["train/kl_ratio"].dropna()
    fraction = log["train/step_fraction"].dropna()
    return {
        "env": env,
        "algorithm": algo,
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


def draw(folders: dict[tuple[str, str, int], Path], n_timesteps: int) -> Figure:
    """For each environment: mean training return of each run, and the ratios of all runs of an algorithm."""
    environments = sorted({env for env, _, _ in folders})
    figure, axes = plt.subplots(
        len(environments), 2, figsize=(9, 3.2 * len(environments)), layout="constrained", squeeze=False
    )
    bins = np.linspace(0.0, 5.0, 51)
    for (left, right), env in zip(axes, environments, strict=True):
        for color, algo in zip(("C0", "C1", "C2"), ALGORITHMS, strict=True):
            own = [folder for (e, a, _), folder in folders.items() if (e, a) == (env, algo)]
            ratios = []
            for i, folder in enumerate(own):
                episodes = load_results(str(folder))
                window = max(1, min(20, len(episodes) // 5))
                smooth = episodes["r"].rolling(window, min_periods=1).mean()
                left.plot(episodes["l"].cumsum(), smooth, color=color, label=algo if i == 0 else None)
                ratios.append(pd.read_csv(folder / "progress.csv")["train/kl_ratio"].dropna())
            if ratios:
                together = pd.concat(ratios).clip(upper=bins[-1])
                weights = np.full(len(together), 1.0 / len(together))
                right.hist(together, bins, weights=weights, color=color, alpha=0.6, label=algo)
        left.set(title=env, xlabel="environment steps", ylabel="return, mean of 20 episodes", xlim=(0, n_timesteps))
        left.xaxis.set_major_locator(MaxNLocator(5))
        right.axvline(1.0, color="black", linewidth=0.8)
        right.set(
            title="proposed steps", xlabel="actual KL / estimated KL (5 and more at 5)", ylabel="share of updates"
        )
        for ax in (left, right):
            ax.grid(alpha=0.3)
            ax.legend()
    return figure


def main(args: list[str] | None = None) -> pd.DataFrame:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--algo", nargs="+", choices=ALGORITHMS, default=list(ALGORITHMS))
    parser.add_argument("--env", nargs="+", default=["Hopper-v4", "HalfCheetah-v4"])
    parser.add_argument("--seed", nargs="+", type=int, default=[0, 1])
    parser.add_argument("--n-timesteps", type=int, default=150_000)
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time")
    parser.add_argument("--folder", type=Path, default=Path("runs/kl_ratio"))
    parser.add_argument("--picture", type=Path, help="default: FOLDER/N_TIMESTEPS/kl_ratio.png")
    options = parser.parse_args(args)

    for env in options.env:
        if env not in gym.registry:
            parser.error(f"--env: Gymnasium knows no environment {env!r}")
    if options.n_timesteps < 3000:
        parser.error(
            f"--n-timesteps must be at least 3000, for two updates in the log, but it is {options.n_timesteps}"
        )
    if options.jobs < 1:
        parser.error(f"--jobs must be at least 1, but it is {options.jobs}")

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
    picture: Path = options.picture or options.folder / f"{options.n_timesteps}" / "kl_ratio.png"
    figure = draw(dict(zip(specs, folders, strict=True)), options.n_timesteps)
    figure.savefig(picture, dpi=110)
    plt.close(figure)
    print(table.to_string(index=False))
    versions = {m.__name__: m.__version__ for m in (sb3_uatrpo, stable_baselines3, th, gym, mujoco, np)}
    print(f"\n{options.n_timesteps} steps a run; Python {platform.python_version()} on {platform.machine()},", end=" ")
    print(", ".join(f"{name} {version}" for name, version in versions.items()))
    print(f"picture: {picture}")
    return table


if __name__ == "__main__":
    main()
