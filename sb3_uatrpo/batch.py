"""Rollout buffer → batch: one rollout as tensors, in time order."""

import copy
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch as th
from stable_baselines3.common.buffers import RolloutBuffer
from stable_baselines3.common.type_aliases import TensorDict

from sb3_uatrpo.guard import has_library_methods


class NonFiniteRolloutError(FloatingPointError, ValueError):
    """
    The rollout contains NaN or infinity. This is also a ``ValueError``, like torch's error about distribution
    parameters that are not finite, so that a hyperparameter search of RL Zoo prunes the trial instead of ending.
    """


@dataclass(frozen=True)
class Batch:
    """
    Steps of a rollout, one environment after the other, each in time order.

    :param observations: shape ``(n, ...)``, or a dict of such
    :param actions: as the buffer holds them, shape ``(n, action_dim)``
    :param advantages: A, shape ``(n,)``
    """

    observations: th.Tensor | TensorDict
    actions: th.Tensor
    advantages: th.Tensor

    def __len__(self) -> int:
        return len(self.advantages)

    def __getitem__(self, steps: slice | th.Tensor) -> "Batch":
        return Batch(rows_of(self.observations, steps), self.actions[steps], self.advantages[steps])

    def with_non_finite_observations(self) -> "Batch":
        """:return: the steps whose observations contain NaN or infinity"""
        parts = self.observations.values() if isinstance(self.observations, dict) else [self.observations]
        bad = th.zeros(len(self), dtype=th.bool, device=self.advantages.device)
        for part in parts:
            bad |= ~part.flatten(1).isfinite().all(dim=1)
        return self[bad.nonzero().flatten()]

    def subsample(self, factor: int, generator: np.random.Generator) -> "Batch":
        """
        One step from each block of k consecutive steps, k = min(``factor``, n // 2), the last block included, which may
        be shorter. The blocks keep samples only weakly dependent (paper, appendix). The step is drawn at random: a
        fixed stride would meet the same steps of every episode whose length shares a factor with k.

        :param factor: subsampling factor, at least 1
        :param generator: draws the steps, unless k is 1
        :return: ⌈n/k⌉ steps in time order, at least two
        """
        n, k = len(self), min(factor, len(self) // 2)
        if k <= 1:
            return self
        starts = np.arange(0, n, k)
        steps = starts + generator.integers(np.minimum(k, n - starts))
        return self[th.from_numpy(steps).to(self.advantages.device)]


def rows_of(observations: th.Tensor | TensorDict, rows: slice | th.Tensor) -> Any:
    """
    :param observations: shape ``(n, ...)``, or a dict of such
    :param rows: the rows to take
    :return: these rows, in the same form
    """
    return map_observations(lambda part: part[rows], observations)


def map_observations(function: Callable[..., Any], *observations: Any) -> Any:
    """
    :param function: takes as many arrays as there are observations
    :param observations: arrays, or dicts of arrays with the same keys
    :return: its result for the arrays, or for those of each key
    """
    if isinstance(observations[0], dict):
        return {key: function(*(part[key] for part in observations)) for key in observations[0]}
    return function(*observations)


def rollout_batch(rollout_buffer: RolloutBuffer, normalize_advantage: bool) -> Batch:
    """
    The whole rollout as one batch.

    :param rollout_buffer: a full buffer, flattened or not. If its ``get`` is not Stable-Baselines3's, or its
        ``_get_samples`` was replaced on the object, the batch is what one call of ``get`` returns, in that order.
    :param normalize_advantage: standardise the advantages over the batch
    :return: the batch, of n = n_steps·n_envs steps
    :raises AssertionError: if the buffer is not full, as in Stable-Baselines3's own buffers
    :raises NonFiniteRolloutError: if a reward, advantage or return is NaN or infinite
    """
    assert rollout_buffer.full, (
        f"the rollout buffer holds {rollout_buffer.pos} of {rollout_buffer.buffer_size} steps, but it has to be full"
    )
    for name in ("rewards", "advantages", "returns"):
        check_finite(rollout_buffer, name)
    pieces = list(_samples(rollout_buffer))
    advantages = th.cat([samples.advantages.flatten() for samples in pieces])
    if normalize_advantage:
        # In float64, so that equal advantages give zeros instead of magnified rounding errors; the constant is SB3's
        exact = advantages.double()
        advantages = ((exact - exact.mean()) / (exact.std() + 1e-8)).to(advantages.dtype)
    return Batch(
        map_observations(lambda *parts: th.cat(parts), *(samples.observations for samples in pieces)),
        th.cat([samples.actions for samples in pieces]),
        advantages,
    )


def _samples(rollout_buffer: RolloutBuffer) -> Iterable[Any]:
    """All steps of the buffer: in the order of its own ``get`` if it has one, otherwise environment by environment."""
    # a replacement on the object may be bound to it, and would not see the copy made below
    if not has_library_methods(rollout_buffer, "get") or "_get_samples" in vars(rollout_buffer):
        return rollout_buffer.get(None)
    # get() would flatten the buffer in place and draw a random order; flattening a copy avoids both
    twin = copy.copy(rollout_buffer)
    if not rollout_buffer.generator_ready:
        for name in ("observations", "actions", "values", "log_probs", "advantages", "returns"):
            setattr(twin, name, map_observations(twin.swap_and_flatten, getattr(rollout_buffer, name)))
        twin.generator_ready = True
    # a slice saves a copy, but a buffer with its own _get_samples may expect an array
    rows = slice(None) if has_library_methods(twin, "_get_samples") else np.arange(twin.buffer_size * twin.n_envs)
    return [twin._get_samples(rows)]  # type: ignore[arg-type]


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
    """
    :param rollout_buffer: a full buffer, flattened or not
    :param name: one of its arrays, or of its dicts of arrays
    :raises NonFiniteRolloutError: if a number in it is NaN or infinite, naming the place
    """
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
            "Nothing was updated: policy, critic and sketch are those of the last update."
        )
