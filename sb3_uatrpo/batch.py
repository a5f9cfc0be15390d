"""Rollout buffer → batch: one rollout as tensors, in time order."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch as th
from stable_baselines3.common.buffers import RolloutBuffer
from stable_baselines3.common.type_aliases import TensorDict


@dataclass(frozen=True)
class Batch:
    """
    Steps of a rollout, env after env, in time order.

    :param observations: shape ``(n, ...)``, or a dict of such
    :param actions: as the buffer holds them, shape ``(n, action_dim)``
    :param advantages: A, shape ``(n,)``
    :param returns: R, what the values are regressed on, shape ``(n,)``
    """

    observations: th.Tensor | TensorDict
    actions: th.Tensor
    advantages: th.Tensor
    returns: th.Tensor

    def __len__(self) -> int:
        return len(self.advantages)

    def __getitem__(self, steps: slice | th.Tensor) -> "Batch":
        observations = (
            {key: value[steps] for key, value in self.observations.items()}
            if isinstance(self.observations, dict)
            else self.observations[steps]
        )
        return Batch(observations, self.actions[steps], self.advantages[steps], self.returns[steps])

    def subsample(self, factor: int) -> "Batch":
        """
        Every ``factor``-th step, so that samples depend only weakly on each other (paper, appendix), but at least two.

        :param factor: subsampling factor, at least 1
        :return: ⌈n/k⌉ steps, k = min(``factor``, n // 2)
        """
        return self[:: max(1, min(factor, len(self) // 2))]


def rollout_batch(rollout_buffer: RolloutBuffer, normalize_advantage: bool) -> Batch:
    """
    The whole rollout as one batch.

    :param rollout_buffer: a full buffer, flattened already or not; it is not changed
    :param normalize_advantage: standardise the advantages over the batch
    :return: the batch, of n = n_steps·n_envs steps
    :raises FloatingPointError: if an observation, reward, advantage or return is NaN or infinite
    """
    _check_finite(rollout_buffer)
    advantages = _flat(rollout_buffer, "advantages", rollout_buffer.to_torch).flatten()
    if normalize_advantage:
        # In float64, so that equal advantages give zeros and not magnified rounding errors; the constant is SB3's
        exact = advantages.double()
        advantages = ((exact - exact.mean()) / (exact.std() + 1e-8)).to(advantages.dtype)
    # a float copy of the actions, as the buffer's own samples have it
    actions = _flat(
        rollout_buffer, "actions", lambda array: rollout_buffer.to_torch(array.astype(np.float32, copy=False))
    )
    returns = _flat(rollout_buffer, "returns", rollout_buffer.to_torch).flatten()
    return Batch(_flat(rollout_buffer, "observations", rollout_buffer.to_torch), actions, advantages, returns)


def count_trajectories(rollout_buffer: RolloutBuffer) -> int:
    """
    Number of trajectories in a rollout: for each environment the episodes that start in it, at least one.

    A fragment of an episode that began in an earlier rollout counts only where no episode starts. The paper's batches
    begin with a reset and drop the unfinished episode at their end, so a task that lasts as long as the batch is one
    trajectory there; counting the fragment as well would make it two.

    :param rollout_buffer: a full buffer
    :return: n of R_n² when a sample is a trajectory
    """
    started = np.count_nonzero(rollout_buffer.episode_starts, axis=0)
    return int(np.maximum(started, 1).sum())


def _flat(rollout_buffer: RolloutBuffer, name: str, convert: Callable[[np.ndarray], th.Tensor]) -> Any:
    """A buffer's array, or each of a dict of arrays, env-major as ``RolloutBuffer.get`` flattens it, and converted."""

    def flatten(array: np.ndarray) -> th.Tensor:
        # get() flattens in place at its first call; episode_starts and rewards stay as they were
        return convert(array if rollout_buffer.generator_ready else rollout_buffer.swap_and_flatten(array))

    value = getattr(rollout_buffer, name)
    return {key: flatten(array) for key, array in value.items()} if isinstance(value, dict) else flatten(value)


def _check_finite(rollout_buffer: RolloutBuffer) -> None:
    for name in ("observations", "rewards", "advantages", "returns"):
        value = getattr(rollout_buffer, name)
        arrays = value.items() if isinstance(value, dict) else [("", value)]
        for key, array in arrays:
            if not np.issubdtype(array.dtype, np.floating) or np.isfinite(array).all():
                continue
            where = tuple(int(i) for i in np.argwhere(~np.isfinite(array))[0])
            flattened = rollout_buffer.generator_ready and name != "rewards"
            env, step = divmod(where[0], rollout_buffer.buffer_size) if flattened else (where[1], where[0])
            what = f"{name}[{key!r}]" if key else name
            raise FloatingPointError(
                f"The rollout's {what} are not finite: {array[where]} at timestep {step} of environment {env}. "
                "Nothing was updated: policy, critic and sketch are those of the last update."
            )
