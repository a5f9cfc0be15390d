"""Rollout buffer → batch: one rollout as tensors, in time order."""

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch as th
from gymnasium import spaces
from stable_baselines3.common.buffers import DictRolloutBuffer, RolloutBuffer
from stable_baselines3.common.policies import ActorCriticPolicy
from stable_baselines3.common.type_aliases import RolloutBufferSamples, TensorDict

_REPLACEABLE = ("get", "_get_samples", "to_torch")
_THEIRS = {getattr(kind, name) for kind in (RolloutBuffer, DictRolloutBuffer) for name in _REPLACEABLE}


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
    :param log_probs: log π(a|s) when the policy acted, shape ``(n,)``
    """

    observations: th.Tensor | TensorDict
    actions: th.Tensor
    advantages: th.Tensor
    log_probs: th.Tensor

    def __len__(self) -> int:
        return len(self.advantages)

    def __getitem__(self, steps: slice | th.Tensor) -> "Batch":
        return Batch(
            rows_of(self.observations, steps), self.actions[steps], self.advantages[steps], self.log_probs[steps]
        )

    def with_non_finite_observations(self) -> "Batch":
        """:return: the steps whose observations contain NaN or infinity"""
        parts = self.observations.values() if isinstance(self.observations, dict) else [self.observations]
        bad = th.zeros(len(self), dtype=th.bool, device=self.advantages.device)
        for part in filter(th.is_floating_point, parts):
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

    :param rollout_buffer: a full buffer, flattened or not; it is flattened, as its ``get`` would do. If its ``get`` is
        not Stable-Baselines3's, the batch is what one call returns, in that order. Otherwise the batch shares the
        buffer's memory where it can.
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
    samples = _samples(rollout_buffer)
    advantages = samples.advantages.flatten()
    if normalize_advantage:
        # In float64, so that equal advantages give zeros instead of magnified rounding errors; the constant is SB3's
        exact = advantages.double()
        advantages = ((exact - exact.mean()) / (exact.std() + 1e-8)).to(advantages.dtype)
    return Batch(samples.observations, samples.actions, advantages, samples.old_log_prob.flatten())


def _samples(buffer: RolloutBuffer) -> Any:
    """All steps of the buffer: in the order of its own ``get`` if it has one, otherwise environment by environment."""
    n_steps = buffer.buffer_size * buffer.n_envs
    own = {of for of in _REPLACEABLE if of in vars(buffer) or getattr(type(buffer), of) not in _THEIRS}
    if "get" in own:
        # an integer: the buffers of others may need one, where Stable-Baselines3's takes None
        pieces = list(buffer.get(n_steps))
        names = ("observations", "actions", "old_log_prob", "advantages")
        parts = {name: [getattr(piece, name) for piece in pieces] for name in names}
        return SimpleNamespace(**{name: map_observations(lambda *all: th.cat(all), *parts[name]) for name in names})
    # as get() does, but in time order and without a random number
    if not buffer.generator_ready:
        for name in ("observations", "actions", "values", "log_probs", "advantages", "returns"):
            setattr(buffer, name, map_observations(buffer.swap_and_flatten, getattr(buffer, name)))
        buffer.generator_ready = True
    if own:
        return buffer._get_samples(np.arange(n_steps))

    def shared(array: np.ndarray) -> th.Tensor:
        return buffer.to_torch(array, copy=False)

    actions = buffer.actions.astype(np.float32, copy=False)
    old = (shared(array) for array in (actions, buffer.values, buffer.log_probs, buffer.advantages, buffer.returns))
    return RolloutBufferSamples(map_observations(shared, buffer.observations), *old)


def evaluate_actions(policy: ActorCriticPolicy, observations: Any, actions: th.Tensor) -> tuple[th.Tensor, ...]:
    """
    The policy's ``evaluate_actions``, called as PPO calls it.

    :param policy: any actor-critic policy
    :param observations: of n steps
    :param actions: as the rollout buffer holds them, shape ``(n, action_dim)``
    :return: values, log-probabilities and, if the policy has it, entropy
    :raises RuntimeError: the policy's own error, with the shapes of what it was called with
    """
    if isinstance(policy.action_space, spaces.Discrete):
        actions = actions.long().flatten()
    try:
        return policy.evaluate_actions(observations, actions)  # type: ignore[return-value]
    except th.OutOfMemoryError:
        raise
    except RuntimeError as error:
        shapes = map_observations(lambda part: tuple(part.shape), observations)
        raise RuntimeError(
            f"{type(policy).__name__}.evaluate_actions failed for observations of shape {shapes} and actions of shape "
            f"{tuple(actions.shape)}: {error}"
        ) from error


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
            "Nothing was updated: the model is that of the last update."
        )
