"""
What is each choice made for speed worth? UATRPO with and without it, in turns.

    OMP_NUM_THREADS=1 python examples/benchmark_choices.py

Each choice is undone for single updates of the same model, by going back to what it replaced or to the alternative that
was tried. Results agree except for the last digits; only the time differs.
"""

import argparse
import json
import math
import platform
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import gymnasium as gym
import numpy as np
import pandas as pd
import torch as th
from benchmark_speed import N_STEPS, one_update
from train_mujoco import make_env

import sb3_uatrpo
from sb3_uatrpo import UATRPO, critic
from sb3_uatrpo.core import estimates, subspace
from sb3_uatrpo.plain_mlp import FastPath

SETTINGS: dict[str, Any] = {"n_steps": N_STEPS, "seed": 0, "device": "cpu"}


@dataclass(frozen=True)
class Choice:
    """
    :param name: what was chosen
    :param instead: what replaces it
    :param without: makes a context in which the choice is undone
    :param settings: arguments of UATRPO that are not the defaults
    """

    name: str
    instead: str
    without: Callable[[UATRPO], AbstractContextManager]
    settings: dict[str, Any] = field(default_factory=dict)


CHOICES = (
    Choice(
        "act only, evaluate after the rollout",
        "SB3's collect_rollouts",
        lambda model: mock.patch.object(model, "fast_rollouts", False),
    ),
    Choice(
        "products layer by layer",
        "general products",
        lambda model: mock.patch.object(FastPath, "for_update", return_value=False),
    ),
    Choice(
        "256 steps at once, all in F and Σ",
        "as many as fit",
        lambda model: mock.patch.object(estimates, "PRODUCT_STEPS", N_STEPS),
        {"sub_sampling_factor": 1},
    ),
    Choice(
        "basis from Y'Y",
        "QR and SVD of Y",
        lambda model: mock.patch.object(subspace, "CUT_FOR_GRAM", math.inf),
    ),
    Choice(
        "float64 copies of 512 rows",
        "of 8,192 rows",
        lambda model: mock.patch.object(subspace, "ROWS_AT_ONCE", 8192),
    ),
    Choice(
        "fused Adam",
        "Adam",
        lambda model: mock.patch.object(critic, "_fused_adam", return_value=nullcontext()),
    ),
)


def measure(choice: Choice, env_id: str, repetitions: int, warm_up: int) -> dict[str, Any]:
    """Of a rollout with its update, and of ``train()`` alone: median milliseconds with and without, and their ratio."""
    model = UATRPO("MlpPolicy", make_env(env_id, 0.995, seed=0), **SETTINGS, **choice.settings)
    model.learn(warm_up * N_STEPS)
    with choice.without(model):
        one_update(model)
    times: dict[str, list[tuple[float, float]]] = {"with": [], "without": []}
    for _ in range(repetitions):
        times["with"].append(one_update(model))
        with choice.without(model):
            times["without"].append(one_update(model))
    chosen, other = (1e3 * np.array(times[key]) for key in ("with", "without"))
    row: dict[str, Any] = {"choice": choice.name, "instead of": choice.instead}
    for column, what in enumerate(("all", "train()")):
        ours, theirs = chosen[:, column], other[:, column]
        first, median, third = np.quantile(ours / theirs, (0.25, 0.5, 0.75))
        row |= {f"{what} ms": np.median(ours), f"{what} without": np.median(theirs)}
        row |= {f"{what} ratio": median, f"{what} quartiles": f"{first:.2f}–{third:.2f}"}
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--env", default="Hopper-v4")
    parser.add_argument("--repetitions", type=int, default=15, help="updates with, and updates without each choice")
    parser.add_argument("--warm-up", type=int, default=3, help="updates before")
    parser.add_argument("--folder", type=Path, default=Path("runs/speed"))
    args = parser.parse_args()
    if args.env not in gym.registry:
        parser.error(f"--env: Gymnasium knows no environment {args.env!r}")
    for name in ("repetitions", "warm_up"):
        if getattr(args, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1, but it is {getattr(args, name)}")
    th.set_num_threads(1)
    table = pd.DataFrame([measure(choice, args.env, args.repetitions, args.warm_up) for choice in CHOICES])
    two_digits = dict.fromkeys((column for column in table if column.endswith("ratio")), "{:.2f}".format)
    print(table.to_string(index=False, formatters=two_digits, float_format="{:.0f}".format))
    print(
        f"\n{args.env}, {N_STEPS} steps and one update; python {platform.python_version()} on {platform.machine()}, "
        f"sb3_uatrpo {sb3_uatrpo.__version__}, torch {th.__version__}, one thread"
    )
    args.folder.mkdir(parents=True, exist_ok=True)
    (args.folder / "choices.json").write_text(json.dumps(table.to_dict("records"), indent=1, default=float) + "\n")


if __name__ == "__main__":
    main()
