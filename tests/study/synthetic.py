"""Made-up records whose final returns are known."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np

from sb3_uatrpo.study.folders import FORMAT, MARKER
from sb3_uatrpo.study.record import Record, RunSpec, write_atomically, write_record

FAILURE = """\
Traceback (most recent call last):
  File "simulator.py", line 1, in step
    step()
RuntimeError: the simulator | broke
and this line says more

The last that it printed:
a progress bar
"""


def make_record(
    algo: str = "uatrpo",
    env_id: str = "Hopper-v4",
    seed: int = 0,
    final: float = 100.0,
    n_timesteps: int = 10_000,
    variant: str = "",
    hyperparameters: dict[str, Any] | None = None,
    status: str = "done",
    noise: float = 0.0,
    episode_length: int = 100,
    eval_freq: int = 2_000,
    kl_ratio: tuple[float, float] | None = (1.0, 0.1),
) -> Record:
    """
    A run that learns linearly up to ``final`` at 80% of its steps and stays there. ``noise`` is the standard deviation
    of the noise in every return, ``kl_ratio`` the median of the ratio and the spread of its logarithm.
    """
    rng = np.random.default_rng([seed, len(algo), len(env_id), len(variant)])
    ends = np.arange(episode_length, n_timesteps + 1, episode_length)
    level = final * np.minimum(ends / (0.8 * n_timesteps), 1.0)
    evaluated = list(range(eval_freq, n_timesteps + 1, eval_freq)) if eval_freq else []
    updates = np.arange(500, n_timesteps, 500)
    logged: dict[str, list] = {"timesteps": updates.tolist()}
    if kl_ratio is not None:
        ratios = kl_ratio[0] * np.exp(kl_ratio[1] * rng.normal(size=len(updates)))
        logged |= {"kl_ratio": [None, *ratios[1:].tolist()], "kl_proposed": (0.01 * ratios).tolist()}
    return Record(
        spec=RunSpec(algo, env_id, seed, n_timesteps, variant, hyperparameters or {"gamma": 0.99}, eval_freq, 2),
        status=status,
        traceback=FAILURE if status == "failed" else None,
        episodes={
            "timesteps": ends.tolist(),
            "returns": (level + noise * rng.normal(size=len(ends))).tolist(),
            "lengths": [episode_length] * len(ends),
        },
        evaluations={"timesteps": evaluated, "returns": [[final, final + 2.0] for _ in evaluated]},
        updates=logged,
        versions={"numpy": "2.0"},
        machine={},
        wall_time=36.0,
        started="2026-01-01T00:00:00+00:00",
    )


def make_folder(folder: Path) -> Path:
    """A study's folder without records."""
    write_atomically(folder / MARKER, json.dumps({"format": FORMAT}).encode())
    return folder


def make_study(
    folder: Path, n_seeds: int = 4, env_ids=("Hopper-v4", "HalfCheetah-v4"), variants=("", "noise=1")
) -> Path:
    """Two algorithms. One ends higher and has steps of the estimated size."""
    for env_id in env_ids:
        for variant in variants:
            for algo, level, kl_ratio in (("uatrpo", 2000.0, (1.0, 0.15)), ("trpo_matched", 1700.0, (1.8, 0.5))):
                for seed in range(n_seeds):
                    spread = 300.0 * math.sin(7.0 * seed + len(algo) + len(variant))
                    final = level + spread - 40.0 * len(variant)
                    record = make_record(algo, env_id, seed, final, 300_000, variant, noise=300.0, kl_ratio=kl_ratio)
                    write_record(record, folder / "records")
    return make_folder(folder)
