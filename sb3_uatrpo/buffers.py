"""Stable-Baselines3's rollout buffer, lean."""

from typing import Any

import numpy as np
import torch as th
from stable_baselines3.common.buffers import RolloutBuffer


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
