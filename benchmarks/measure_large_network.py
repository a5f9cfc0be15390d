"""
How many singular values of the sketch should a large network keep? Measured with a NatureCNN and shrinkage.

    python benchmarks/measure_large_network.py --size 84

The task shows a bright square in one of four quadrants and rewards naming the quadrant. After a few updates the policy
is frozen. For each of a few rollouts, each relative cut on the singular values of the sketch gives a direction, which
is scored as in ``measure_direction_quality.py``. With the paper's settings, the cut grows with the number of
parameters.
"""

import argparse
from typing import Any
from unittest import mock

import gymnasium as gym
import numpy as np
import pandas as pd
import torch as th
from gymnasium import spaces
from measure_direction_quality import policy_estimates, score
from stable_baselines3.common.callbacks import CallbackList
from stable_baselines3.common.env_util import make_vec_env

from sb3_uatrpo import UATRPO
from sb3_uatrpo.core import subspace

CUTS = (0.1, 0.01, 0.001, 0.0001)


class Quadrants(gym.Env[np.ndarray, np.int64]):
    """A bright square on noise; the action names its quadrant."""

    def __init__(self, size: int) -> None:
        self.observation_space = spaces.Box(0, 255, (1, size, size), np.uint8)
        self.action_space = spaces.Discrete(4)
        self.size = size

    def _observe(self) -> np.ndarray:
        half = self.size // 2
        image = self.np_random.integers(0, 40, (1, self.size, self.size)).astype(np.uint8)
        self.quadrant = int(self.np_random.integers(4))
        row, column = self.np_random.integers(0, half - 8, 2) + half * np.array(divmod(self.quadrant, 2))
        image[:, row : row + 8, column : column + 8] = 255
        return image

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[np.ndarray, dict]:
        super().reset(seed=seed)
        self.steps = 0
        return self._observe(), {}

    def step(self, action: np.int64) -> tuple[np.ndarray, float, bool, bool, dict]:
        reward = float(action == self.quadrant)
        self.steps += 1
        return self._observe(), reward, False, self.steps >= 50, {}


def main(args: list[str] | None = None) -> pd.DataFrame:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=int, default=36, help="height and width of the images, at least 36")
    parser.add_argument("--n-projections", type=int, default=50)
    parser.add_argument("--n-steps", type=int, default=400, help="steps of a rollout")
    parser.add_argument("--updates", type=int, default=3, help="updates before the policy is frozen")
    parser.add_argument("--reference-rollouts", type=int, default=16)
    parser.add_argument("--test-rollouts", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(args)
    if options.size < 36:
        parser.error(f"--size must be at least 36, but it is {options.size}")
    th.set_num_threads(1)

    env = make_vec_env(Quadrants, seed=options.seed, env_kwargs={"size": options.size})
    model = UATRPO(
        "CnnPolicy",
        env,
        n_steps=options.n_steps,
        sub_sampling_factor=5,
        n_projections=options.n_projections,
        ema_beta=0.0,
        shrinkage=0.75,
        target_kl=0.01,
        policy_kwargs={"share_features_extractor": False},
        seed=options.seed,
        device="cpu",
    )
    model.learn(options.updates * options.n_steps)
    callback = CallbackList([])
    callback.init_callback(model)

    def rollout():  # type: ignore[no-untyped-def]
        model.collect_rollouts(env, callback, model.rollout_buffer, model.n_steps)
        return policy_estimates(model)

    references = [rollout() for _ in range(options.reference_rollouts)]
    gradient = th.stack([each.gradient for each in references]).mean(dim=0)

    def fisher(v: th.Tensor) -> float:
        return float(np.mean([each.batch.quadratic_forms(v)[0] for each in references[:2]]))

    own_cut = max(len(gradient), options.n_projections) * subspace.RESOLUTION
    rows = []
    for _ in range(options.test_rollouts):
        estimates = rollout()
        rows.append(
            {"direction": "plain gradient", "rank": None, "score": score(gradient, fisher, estimates.gradient)[0]}
        )
        for cut in sorted({own_cut, *(cut for cut in CUTS if cut < own_cut)}, reverse=True):
            with mock.patch.object(subspace, "MAX_SHRUNK_CUT", cut):
                direction = model._find_direction(estimates)
            quality, _ = score(gradient, fisher, direction.vector)
            rows.append(
                {
                    "direction": f"cut {cut:.2g}" + (" (max(d, m)·ε)" if cut == own_cut else ""),
                    "rank": direction.diagnostics["subspace_rank"],
                    "score": quality,
                    "cosine with gradient": th.cosine_similarity(direction.vector, estimates.gradient, dim=0).item(),
                }
            )
    frame = pd.DataFrame(rows)
    table = frame.groupby("direction", sort=False).mean()
    table["standard error"] = frame.groupby("direction", sort=False)["score"].sem()
    print(f"{len(gradient)} parameters, {options.n_projections} projections, seed {options.seed}")
    print(table.to_string(float_format=lambda value: f"{value:.3f}"))
    return table


if __name__ == "__main__":
    main()
