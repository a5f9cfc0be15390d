"""Stable-Baselines3's rollout buffer, lean, and what an update asks any rollout buffer."""

from typing import Any

import numpy as np
import torch as th
from stable_baselines3.common.buffers import RolloutBuffer


class NonFiniteRolloutError(FloatingPointError, ValueError):
    """
    The rollout contains NaN or infinity. This is also a ``ValueError``, like torch's error about distribution
    parameters that are not finite, so that a hyperparameter search of RL Zoo prunes the trial instead of ending.
    """


class LeanRolloutBuffer(RolloutBuffer):
    """
    Stable-Baselines3's buffer with the same numbers, bit for bit. ``add`` copies each array once, and advantages take
    fewer calls. ``UATRPO`` and ``MatchedTRPO`` use it unless ``rollout_buffer_class`` names another.
    """

    def add(
        self, obs: Any, action: Any, reward: Any, episode_start: Any, value: th.Tensor, log_prob: th.Tensor
    ) -> None:
        step = self.pos
        self.observations[step] = obs.reshape(self.n_envs, *self.obs_shape)
        self.actions[step] = action.reshape(self.n_envs, self.action_dim)
        self.rewards[step] = reward
        self.episode_starts[step] = episode_start
        self.values[step] = value.numpy(force=True).reshape(-1)
        self.log_probs[step] = log_prob.numpy(force=True).reshape(-1)
        self.pos = step + 1
        self.full = self.full or self.pos == self.buffer_size

    def compute_returns_and_advantage(self, last_values: th.Tensor, dones: np.ndarray) -> None:
        following = np.concatenate([self.values[1:], last_values.numpy(force=True).reshape(1, -1)])
        continues = 1.0 - np.concatenate([self.episode_starts[1:], dones[None].astype(np.float32)])
        # the same operations in the same order, or the last digits would differ
        deltas = self.rewards + self.gamma * following * continues - self.values
        decays = self.gamma * self.gae_lambda * continues
        # numbers are faster than rows of one number
        columns: Any = 0 if self.n_envs == 1 else slice(None)
        advantage: Any = np.float32(0.0)
        advantages = []
        for delta, decay in zip(deltas[::-1, columns], decays[::-1, columns], strict=True):
            advantage = delta + decay * advantage
            advantages.append(advantage)
        self.advantages[:] = np.array(advantages[::-1]).reshape(self.advantages.shape)
        self.returns = self.advantages + self.values


def count_trajectories(rollout_buffer: RolloutBuffer) -> int:
    """
    Number of trajectories in a rollout: the episodes that start in each environment, at least one per environment.

    A fragment of an episode that began in an earlier rollout counts only where no episode starts. The paper's batches
    begin with a reset and drop the unfinished episode at the end, so an episode as long as the batch is one trajectory.
    Counting the fragment as well would make it two.

    :param rollout_buffer: a full buffer
    :return: the n in R_n² when a sample is a trajectory
    """
    starts = rollout_buffer.episode_starts
    if starts.shape != (rollout_buffer.buffer_size, rollout_buffer.n_envs):
        # a user's own buffer may flatten them, too
        starts = starts.reshape(rollout_buffer.n_envs, rollout_buffer.buffer_size).T
    started = np.count_nonzero(starts, axis=0)
    return int(np.maximum(started, 1).sum())


def check_finite(rollout_buffer: RolloutBuffer, name: str) -> None:
    """:raises NonFiniteRolloutError: if a number in this array, or dict of arrays, is NaN or infinite"""
    value = getattr(rollout_buffer, name)
    arrays = value.items() if isinstance(value, dict) else [("", value)]
    for key, array in arrays:
        if not np.issubdtype(array.dtype, np.floating) or np.isfinite(array).all():
            continue
        where = tuple(int(i) for i in np.argwhere(~np.isfinite(array))[0])
        flattened = rollout_buffer.generator_ready and name != "rewards"
        env, step = divmod(where[0], rollout_buffer.buffer_size) if flattened else (where[1], where[0])
        what = f"{name}[{key!r}]" if key else name
        raise NonFiniteRolloutError(
            f"The rollout's {what} are not finite: {array[where]} at timestep {step} of environment {env}. "
            "Nothing was updated: the model is that of the last update."
        )
