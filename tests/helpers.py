"""Small environments and rollouts for the tests."""

from typing import Any

import gymnasium as gym
import numpy as np
import torch as th
from gymnasium import spaces
from stable_baselines3.common.callbacks import CallbackList
from stable_baselines3.common.logger import Logger
from stable_baselines3.common.vec_env import DummyVecEnv

from tests.reference import DoublePolicy, actor_parameters, flat

ACTION_SPACES: dict[str, spaces.Space] = {
    "box": spaces.Box(-1.0, 1.0, (2,), np.float32),
    "box_matrix": spaces.Box(-2.0, 3.0, (2, 2), np.float32),
    "discrete": spaces.Discrete(3),
    "multi_discrete": spaces.MultiDiscrete([3, 2]),
    "multi_binary": spaces.MultiBinary(3),
}


class NoiseEnv(gym.Env):
    """Observations and rewards are noise; an episode ends or is cut off at random after two steps at least."""

    def __init__(
        self, action_space: spaces.Space, observation_space: spaces.Space | None = None, reward_scale: float = 1.0
    ):
        self.action_space = action_space
        self.observation_space = observation_space or spaces.Box(-1.0, 1.0, (3,), np.float32)
        self.observation_space.seed(0)
        self.reward_scale = reward_scale
        self.steps = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None):
        super().reset(seed=seed)
        self.steps = 0
        return self.observation_space.sample(), {}

    def step(self, action):
        self.steps += 1
        over, cut = self.np_random.random(2) < 0.05
        ready = self.steps > 1
        reward = self.reward_scale * float(self.np_random.normal() + np.sum(np.asarray(action)))
        return self.observation_space.sample(), reward, bool(over and ready), bool(cut and ready), {}


def make_model(
    cls, action_space: spaces.Space | str, n_envs: int = 1, double: bool = True, observation_space=None, **kwargs
):
    """A small model on noise, in float64 unless told otherwise."""
    space = ACTION_SPACES[action_space] if isinstance(action_space, str) else action_space
    env = DummyVecEnv([lambda: NoiseEnv(space, observation_space) for _ in range(n_envs)])
    kwargs = {
        "n_steps": 48,
        "batch_size": 16,
        "sub_sampling_factor": 3,
        "seed": 0,
        "device": "cpu",
        "policy_kwargs": {"net_arch": [4]},
        **kwargs,
    }
    if kwargs["n_steps"] * n_envs % kwargs["batch_size"]:
        kwargs["batch_size"] = kwargs["n_steps"] * n_envs
    policy = kwargs.pop("policy", DoublePolicy if double else "MlpPolicy")
    model = cls(policy, env, **kwargs)
    spread_out(model.policy)
    model.set_logger(Logger(folder=None, output_formats=[]))
    return model


def spread_out(policy: th.nn.Module) -> None:
    """Move a fresh policy off its special point, where the last layer is almost zero and σ is one."""
    generator = th.Generator().manual_seed(1)
    with th.no_grad():
        for param in policy.parameters():
            param.add_(0.3 * th.randn(param.shape, generator=generator, dtype=th.float64).to(param.dtype))


def collect(model) -> None:
    """Fill the model's rollout buffer."""
    if model._last_obs is None:
        model._setup_learn(10**9)
    callback = CallbackList([])
    callback.init_callback(model)
    assert model.collect_rollouts(model.env, callback, model.rollout_buffer, model.n_steps)


def env_major(model) -> tuple[th.Tensor, th.Tensor, th.Tensor]:
    """The rollout as env after env: observations, actions and standardised advantages, by plain loops."""
    buffer = model.rollout_buffer
    order = [(t, e) for e in range(buffer.n_envs) for t in range(buffer.buffer_size)]
    obs = np.stack([buffer.observations[t, e] for t, e in order])
    actions = np.stack([buffer.actions[t, e] for t, e in order])
    advantages = np.array([buffer.advantages[t, e] for t, e in order], dtype=np.float64)
    if model.normalize_advantage:
        advantages = (advantages - advantages.mean()) / (advantages.std(ddof=1) + 1e-8)
    return th.as_tensor(obs), th.as_tensor(actions.astype(np.float32)), th.as_tensor(advantages)


def actor_vector(model) -> np.ndarray:
    return flat(actor_parameters(model.policy))


def logged(model) -> dict[str, Any]:
    """What the last update recorded under train/, without the prefix."""
    values = model.logger.name_to_value
    return {key.removeprefix("train/"): value for key, value in values.items() if key.startswith("train/")}
