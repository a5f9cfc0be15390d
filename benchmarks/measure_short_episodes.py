"""
Do short episodes of equal length spoil the estimates of curvature and noise?

    python benchmarks/measure_short_episodes.py

At each step of an episode, one of two actions is right and has a reward of 1. The observation is the number of the
step, so each step is a problem of its own. F̂ and Σ̂ are estimated from every tenth step or so: if the same steps of the
episodes were taken each time, as a fixed stride does with episodes of 5, 10, 20 or 50 steps, the trust region would not
see the others, and the policy would change there without bound.

A row of the table is one length of episode and one shape of rollout. It gives the median over seeds of the final
return, as a share of the largest possible one, and of the KL ratio over all updates, with the largest ratio of any
update. Training ends early when nothing is left to learn.
"""

import argparse
import itertools
from typing import Any

import gymnasium as gym
import numpy as np
import pandas as pd
from gymnasium import spaces
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.vec_env import DummyVecEnv, VecMonitor

from sb3_uatrpo import UATRPO

#: Environments × steps of each: as many steps per update
SHAPES = ((50, 20), (1, 1000))


class RightChoice(gym.Env):
    """
    :param length: steps of an episode
    """

    action_space = spaces.Discrete(2)

    def __init__(self, length: int) -> None:
        self.observation_space = spaces.Discrete(length)
        self.right = np.random.default_rng(length).integers(2, size=length)
        self.time = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[int, dict[str, Any]]:
        super().reset(seed=seed)
        self.time = 0
        return 0, {}

    def step(self, action: Any) -> tuple[int, float, bool, bool, dict[str, Any]]:
        reward = float(action == self.right[self.time])
        self.time += 1
        is_over = self.time == len(self.right)
        return min(self.time, len(self.right) - 1), reward, is_over, False, {}


class Ratios(BaseCallback):
    """
    Collects the KL ratio of each update, and ends training after a hundred episodes in a row without a wrong choice.

    :param length: steps of an episode
    """

    def __init__(self, length: int) -> None:
        super().__init__()
        self.length = length
        self.found: list[float] = []
        self.n_updates = 0.0

    def _on_step(self) -> bool:
        returns = [episode["r"] for episode in self.model.ep_info_buffer or ()]
        return len(returns) < 100 or min(returns) < self.length

    def _on_rollout_start(self) -> None:
        logged = self.logger.name_to_value
        # training that ends within a rollout leaves the numbers of an update that has been seen
        if logged.get("train/n_updates", self.n_updates) == self.n_updates:
            return
        self.n_updates = logged["train/n_updates"]
        # a refused update has none
        if "train/kl_ratio" in logged:
            self.found.append(logged["train/kl_ratio"])

    def _on_training_end(self) -> None:
        self._on_rollout_start()


def train(length: int, n_envs: int, n_steps: int, n_updates: int, seed: int) -> tuple[float, list[float]]:
    """:return: mean return of the last hundred episodes, and the KL ratio of each update"""
    env = VecMonitor(DummyVecEnv([lambda: RightChoice(length)] * n_envs))
    model = UATRPO("MlpPolicy", env, n_steps=n_steps, gamma=0.9, seed=seed, device="cpu")
    ratios = Ratios(length)
    model.learn(n_updates * n_envs * n_steps, callback=ratios)
    return float(np.mean([episode["r"] for episode in model.ep_info_buffer or ()])), ratios.found


def main(args: list[str] | None = None) -> pd.DataFrame:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", nargs="+", type=int, default=[5, 7, 10, 20, 50], help="steps of an episode")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--n-updates", type=int, default=15, help="updates of 1,000 steps")
    options = parser.parse_args(args)
    if options.n_updates < 1:
        parser.error(f"--n-updates must be at least 1, but it is {options.n_updates}")
    rows = []
    for length, (n_envs, n_steps) in itertools.product(options.lengths, SHAPES):
        runs = [train(length, n_envs, n_steps, options.n_updates, seed) for seed in options.seeds]
        rows.append(
            {
                "steps per episode": length,
                "rollout": f"{n_envs} × {n_steps:,}",
                "final return": f"{np.median([final for final, _ in runs]) / length:.0%}",
                "median KL ratio": f"{np.median([np.median(ratios) for _, ratios in runs]):.3g}",
                "largest KL ratio": f"{max(max(ratios) for _, ratios in runs):.3g}",
            }
        )
    table = pd.DataFrame(rows)
    print(table.to_string(index=False))
    return table


if __name__ == "__main__":
    main()
