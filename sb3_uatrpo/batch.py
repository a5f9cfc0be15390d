"""Rollout buffer → batch: one rollout as tensors, in time order."""

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch as th
from stable_baselines3.common.buffers import RolloutBuffer
from stable_baselines3.common.type_aliases import TensorDict

from sb3_uatrpo.buffers import check_finite
from sb3_uatrpo.observations import map_observations, rows_of
from sb3_uatrpo.plain import replaced_methods


@dataclass(frozen=True)
class Batch:
    """
    Steps of a rollout, one environment after the other, each in time order.

    :param observations: shape ``(n, ...)``, or a dict of such
    :param actions: as the buffer holds them, shape ``(n, action_dim)``
    :param advantages: A, shape ``(n,)``
    :param log_probs: log π(a|s) when the policy acted, shape ``(n,)``
    :param action_masks: zero for each choice that was forbidden, shape ``(n, number of choices)``; None without masks
    """

    observations: th.Tensor | TensorDict
    actions: th.Tensor
    advantages: th.Tensor
    log_probs: th.Tensor
    action_masks: th.Tensor | None = None

    def __len__(self) -> int:
        return len(self.advantages)

    def __getitem__(self, timesteps: slice | th.Tensor) -> "Batch":
        return Batch(
            rows_of(self.observations, timesteps),
            self.actions[timesteps],
            self.advantages[timesteps],
            self.log_probs[timesteps],
            None if self.action_masks is None else self.action_masks[timesteps],
        )

    def with_non_finite_observations(self) -> "Batch":
        """:return: the timesteps whose observations contain NaN or infinity"""
        parts = self.observations.values() if isinstance(self.observations, dict) else [self.observations]
        bad = th.zeros(len(self), dtype=th.bool, device=self.advantages.device)
        for part in filter(th.is_floating_point, parts):
            bad |= ~part.flatten(1).isfinite().all(dim=1)
        return self[bad.nonzero().flatten()]

    def subsample(self, factor: int, generator: np.random.Generator) -> "Batch":
        """
        One timestep from each block of k consecutive ones, k = min(``factor``, n // 2), the last block included, which
        may be shorter. The blocks keep samples only weakly dependent (paper, appendix). The timestep is drawn at
        random: a fixed stride would meet the same places of every episode whose length shares a factor with k.

        :param factor: subsampling factor, at least 1
        :param generator: draws the timesteps, unless k is 1
        :return: ⌈n/k⌉ timesteps in time order, at least two
        """
        n, k = len(self), min(factor, len(self) // 2)
        if k <= 1:
            return self
        starts = np.arange(0, n, k)
        timesteps = starts + generator.integers(np.minimum(k, n - starts))
        return self[th.from_numpy(timesteps).to(self.advantages.device)]


def rollout_batch(rollout_buffer: RolloutBuffer, normalize_advantage: bool, has_masks: bool = False) -> Batch:
    """
    The whole rollout as one batch.

    :param rollout_buffer: a full buffer, flattened or not; it is flattened, as its ``get`` would do. If its ``get`` is
        the user's own, the batch is what one call returns. Otherwise it shares memory where it can.
    :param normalize_advantage: standardise the advantages over the batch
    :param has_masks: whether the buffer is one of sb3-contrib's, with action masks
    :raises AssertionError: if the buffer is not full, as in Stable-Baselines3's own buffers
    :raises NonFiniteRolloutError: if a reward, advantage or return is NaN or infinite
    """
    assert rollout_buffer.full, (
        f"the rollout buffer holds {rollout_buffer.pos} of {rollout_buffer.buffer_size} steps, but it has to be full"
    )
    for name in ("rewards", "advantages", "returns"):
        check_finite(rollout_buffer, name)
    masks = ["action_masks"] if has_masks else []
    samples = _samples(rollout_buffer, masks)
    advantages = samples.advantages.flatten()
    if normalize_advantage:
        # In float64, so that equal advantages give zeros instead of magnified rounding errors; the constant is SB3's
        exact = advantages.double()
        advantages = ((exact - exact.mean()) / (exact.std() + 1e-8)).to(advantages.dtype)
    old_log_probs = samples.old_log_prob.flatten()
    return Batch(
        samples.observations, samples.actions, advantages, old_log_probs, *(getattr(samples, name) for name in masks)
    )


def _samples(buffer: RolloutBuffer, masks: list[str]) -> Any:
    """All timesteps: in the order of the buffer's own ``get`` if it has one, otherwise environment by environment."""
    n_steps = buffer.buffer_size * buffer.n_envs
    replaced = replaced_methods(buffer)
    if "get" in replaced:
        # an integer: the buffers of others may need one, where Stable-Baselines3's takes None
        pieces = list(buffer.get(n_steps))
        names = ("observations", "actions", "old_log_prob", "advantages", *masks)
        parts = {name: [getattr(piece, name) for piece in pieces] for name in names}
        return SimpleNamespace(**{name: map_observations(lambda *all: th.cat(all), *parts[name]) for name in names})
    # as get() does, but in time order and without a random number
    if not buffer.generator_ready:
        for name in ("observations", "actions", "values", "log_probs", "advantages", "returns", *masks):
            setattr(buffer, name, map_observations(buffer.swap_and_flatten, getattr(buffer, name)))
        buffer.generator_ready = True
    if replaced:
        return buffer._get_samples(np.arange(n_steps))

    def shared(array: np.ndarray) -> th.Tensor:
        return buffer.to_torch(array, copy=False)

    return SimpleNamespace(
        observations=map_observations(shared, buffer.observations),
        actions=shared(buffer.actions.astype(np.float32, copy=False)),
        old_log_prob=shared(buffer.log_probs),
        advantages=shared(buffer.advantages),
        **{name: shared(getattr(buffer, name)) for name in masks},
    )
