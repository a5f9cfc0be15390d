"""What the scripts that measure share: environments, models, turns, times of updates, and JSON with the machine."""

import json
import os
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeVar
from unittest import mock

import torch as th
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.on_policy_algorithm import OnPolicyAlgorithm
from stable_baselines3.common.vec_env import VecNormalize

PACKAGES = ("sb3_uatrpo", "stable_baselines3", "sb3_contrib", "torch", "gymnasium", "mujoco", "numpy")

Name = TypeVar("Name")
Result = TypeVar("Result")


def normalized(env_id: str, n_envs: int = 1, seed: int = 0, gamma: float = 0.995) -> VecNormalize:
    """:return: environments with normalized observations"""
    return VecNormalize(make_vec_env(env_id, n_envs, seed=seed), norm_reward=False, gamma=gamma)


def one_update(
    model: OnPolicyAlgorithm, n_timesteps: int, callbacks: Sequence[BaseCallback] = ()
) -> tuple[float, float]:
    """Learn for one rollout and one update, and return the seconds in total and those in ``train()`` alone."""
    train, seconds = model.train, 0.0

    def timed() -> None:
        nonlocal seconds
        start = time.perf_counter()
        train()
        if model.device.type == "cuda":
            th.cuda.synchronize()
        seconds = time.perf_counter() - start

    with mock.patch.object(model, "train", timed):
        start = time.perf_counter()
        model.learn(n_timesteps, list(callbacks), reset_num_timesteps=False, log_interval=10**9)
        return time.perf_counter() - start, seconds


def in_turns(turns: Mapping[Name, Callable[[], Result]], rounds: int, warm_up: int = 0) -> dict[Name, list[Result]]:
    """Let contenders take turns, so that slower and faster moments of the machine affect all; leave out the warm-up."""
    results: dict[Name, list[Result]] = {name: [] for name in turns}
    for i in range(warm_up + rounds):
        for name, turn in turns.items():
            result = turn()
            results[name] += [result] if i >= warm_up else []
    return results


def about() -> dict[str, Any]:
    """:return: the machine and the versions"""
    machine = {"machine": platform.machine(), "system": platform.system(), "cores": os.cpu_count()}
    machine |= {"threads": th.get_num_threads(), "python": platform.python_version()}
    return {**machine, **{name: version(name) for name in PACKAGES}}


def in_a_line(facts: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in facts.items())


def write_json(path: Path, content: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=1, default=float) + "\n", encoding="utf-8")
