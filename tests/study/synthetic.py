"""Made-up runs whose final returns are known, in the folders of studies."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from sb3_uatrpo.study.plan import FAILED, Run

FAILURE = """\
Traceback (most recent call last):
  File "simulator.py", line 1, in step
    step()
RuntimeError: the simulator | broke
"""


def write_run(
    folder: Path,
    algo: str = "uatrpo",
    env: str = "Hopper-v4",
    seed: int = 0,
    final: float = 100.0,
    n_timesteps: int = 10_000,
    variant: str = "",
    hyperparameters: dict[str, Any] | None = None,
    failed: bool = False,
    noise: float = 0.0,
    episode_length: int = 100,
    eval_freq: int = 2_000,
    kl_ratio: tuple[float, float] | None = (1.0, 0.1),
) -> Path:
    """
    A run that learns linearly up to ``final`` at 80% of its steps and stays there. ``noise`` is the standard deviation
    of the noise in every return, ``kl_ratio`` the median of the ratio and the spread of its logarithm.
    """
    run = Run(algo, env, seed, variant, n_timesteps, eval_freq, 2, hyperparameters or {"gamma": 0.99})
    place = folder / (FAILED if failed else "") / run.path
    place.mkdir(parents=True, exist_ok=True)
    (place / "run.json").write_text(json.dumps(vars(run)))
    if failed:
        (place / "error.txt").write_text(FAILURE)
        return place
    rng = np.random.default_rng([seed, len(algo), len(env), len(variant)])
    ends = np.arange(episode_length, n_timesteps + 1, episode_length)
    level = final * np.minimum(ends / (0.8 * n_timesteps), 1.0) + noise * rng.normal(size=len(ends))
    write_table(place, "episodes", {"step": ends, "return": level, "length": episode_length})
    updates: dict[str, Any] = {"step": np.arange(500, n_timesteps, 500)}
    if kl_ratio is not None:
        ratios = kl_ratio[0] * np.exp(kl_ratio[1] * rng.normal(size=len(updates["step"])))
        updates |= {"kl_ratio": np.r_[np.nan, ratios[1:]], "kl_proposed": 0.01 * ratios}
    write_table(place, "updates", updates)
    if eval_freq:
        evaluated = np.arange(eval_freq, n_timesteps + 1, eval_freq)
        np.savez(place / "evaluations.npz", timesteps=evaluated, results=[[final, final + 2.0]] * len(evaluated))
    ended = {"steps": n_timesteps, "seconds": 36.0, "versions": {"numpy": "2.0"}}
    (place / "ended.json").write_text(json.dumps(ended))
    return place


def write_table(place: Path, name: str, columns: dict[str, Any]) -> None:
    pd.DataFrame(columns).to_csv(place / f"{name}.csv.gz", index=False, float_format="%.6g")


def write_study(folder: Path, n_seeds: int = 4, envs=("Hopper-v4", "HalfCheetah-v4"), variants=("", "noise=1")) -> Path:
    """Two algorithms. One ends higher and has steps of the estimated size."""
    for env in envs:
        for variant in variants:
            for algo, level, kl_ratio in (("uatrpo", 2000.0, (1.0, 0.15)), ("trpo_matched", 1700.0, (1.8, 0.5))):
                for seed in range(n_seeds):
                    final = level + 300.0 * math.sin(7.0 * seed + len(algo) + len(variant)) - 40.0 * len(variant)
                    write_run(folder, algo, env, seed, final, 300_000, variant, noise=300.0, kl_ratio=kl_ratio)
    return folder
