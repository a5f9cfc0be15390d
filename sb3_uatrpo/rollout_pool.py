"""
Batch → batch: the newest rollout together with the last N, which earlier policies π_i collected.

Each timestep of an old rollout gets the importance ratio w = π_θk(a|s)/π_i(a|s) and an advantage under today's critic,

.. math:: \\delta_t=r_t+\\gamma(1-d_t)V(s_{t+1})-V(s_t), \\qquad
    A_t=\\delta_t+\\gamma\\lambda(1-d_t)\\min(1,w_{t+1})A_{t+1},

which is GAE where the policies are equal; the truncation is V-trace's (Espeholt et al., 2018). The newest rollout keeps
its buffer's advantages, and has w = 1. The update takes wA in the place of A: ĝ is the mean of wA∇log π, the surrogate
that of wA·π_θ/π_θk, Σ̂ the covariance of wA∇log π, and F̂ is over the states of all rollouts.

Paper: Queeney, Paschalidis and Cassandras, *Generalized Policy Improvement Algorithms with Theoretically Supported
Sample Reuse*, https://arxiv.org/abs/2206.13714, from which weights and step differ.
"""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch as th
from stable_baselines3.common.buffers import RolloutBuffer
from stable_baselines3.common.policies import ActorCriticPolicy
from stable_baselines3.common.utils import obs_as_tensor

from sb3_uatrpo.batch import Batch
from sb3_uatrpo.buffers import count_trajectories
from sb3_uatrpo.observations import map_observations
from sb3_uatrpo.plain import is_plain_buffer
from sb3_uatrpo.policies import evaluate_actions

#: Timesteps of an old rollout that are evaluated at once
PART = 1024


@dataclass(frozen=True)
class Rollout:
    """
    T timesteps of E environments, as a flattened rollout buffer holds them, in its own types.

    :param observations: shape ``(E·T, ...)``, environment by environment, or a dict of such
    :param last_observations: those after the last timestep, shape ``(E, ...)``, or a dict of such
    :param actions: shape ``(E·T, action_dim)``
    :param log_probs: log π_i(a|s), shape ``(E·T,)``
    :param rewards: shape ``(T, E)``, as ``episode_starts``
    :param dones: whether the last timestep ended an episode, shape ``(E,)``
    :param n_trajectories: as ``count_trajectories`` counts them, shape ``(1,)``
    :param masks: of shape ``(E·T, number of choices)``, by the name ``action_masks``; nothing without masks
    """

    observations: Any
    last_observations: Any
    actions: np.ndarray
    log_probs: np.ndarray
    rewards: np.ndarray
    episode_starts: np.ndarray
    dones: np.ndarray
    n_trajectories: np.ndarray
    masks: dict[str, np.ndarray] = field(default_factory=dict)

    def weighted(self, policy: ActorCriticPolicy, gamma: float, gae_lambda: float) -> tuple[Batch, th.Tensor]:
        """:return: the timesteps with their advantages A and log π_θk under today's policy, and w, shape ``(E·T,)``"""
        T, E = self.rewards.shape
        observations: Any = obs_as_tensor(self.observations, policy.device)
        actions = th.as_tensor(self.actions, dtype=th.float32, device=policy.device)
        masks = {name: th.as_tensor(array, device=policy.device) for name, array in self.masks.items()}
        batch = Batch(observations, actions, actions, actions, **masks)
        evaluated = []
        with th.no_grad():
            for start in range(0, T * E, PART):
                outputs = evaluate_actions(policy, batch[start : start + PART])
                evaluated.append([x.flatten() for x in outputs[:2]])
            last = policy.predict_values(obs_as_tensor(self.last_observations, policy.device)).double().cpu().numpy()
        values, log_probs = (th.cat(parts) for parts in zip(*evaluated, strict=True))
        ratios = (log_probs.double() - th.as_tensor(self.log_probs, device=policy.device).double()).exp()

        def by_time(tensor: th.Tensor) -> np.ndarray:
            return tensor.double().cpu().numpy().reshape(E, T).T

        V, w = np.concatenate([by_time(values), last.reshape(1, E)]), by_time(ratios)
        continues = 1.0 - np.concatenate([self.episode_starts[1:], self.dones[None]])
        with np.errstate(all="ignore"):
            deltas = self.rewards + gamma * continues * V[1:] - V[:-1]
            # an episode that goes on after the last timestep has no further δ
            truncated = np.concatenate([np.minimum(w[1:], 1.0), np.zeros((1, E))])
            decays = gamma * gae_lambda * continues * truncated
            advantages = np.empty_like(deltas)
            advantage = np.zeros(E)
            for t in range(T - 1, -1, -1):
                advantages[t] = advantage = deltas[t] + decays[t] * advantage
        flat = th.from_numpy(np.ascontiguousarray(advantages.T).reshape(-1)).to(policy.device)
        return replace(batch, advantages=flat, log_probs=log_probs), ratios


class RolloutPool:
    """The last N rollouts."""

    def __init__(self, n_rollouts: int) -> None:
        self._rollouts: deque[Rollout] = deque(maxlen=n_rollouts)

    def __len__(self) -> int:
        return len(self._rollouts)

    def join(
        self, newest: Batch, buffer: RolloutBuffer, policy: ActorCriticPolicy, gae_lambda: float, normalize: bool
    ) -> tuple[Batch, int, dict[str, float]]:
        """
        The newest rollout, with the advantages of its full, flattened buffer, followed by the older ones, with wA in
        place of A; the number of their trajectories; and values to log. A rollout whose ratios or advantages are not
        finite is dropped.

        :param normalize: centre the advantages by their weighted mean, and scale by the standard deviation of wA
        """
        raw = th.as_tensor(buffer.advantages.reshape(-1), device=newest.advantages.device).double()
        parts, ratios, advantages = [newest], [th.ones_like(raw)], [raw]
        kept = []
        for rollout in self._rollouts:
            steps, w = rollout.weighted(policy, buffer.gamma, gae_lambda)
            if bool((w * steps.advantages).isfinite().all() and w.isfinite().all()):
                kept.append(rollout)
                parts.append(steps)
                ratios.append(w)
                advantages.append(steps.advantages)
        self._replace(kept)
        w, A = th.cat(ratios), th.cat(advantages)
        if normalize:
            A = A - (w * A).mean() / w.mean()
            A = A / ((w * A).std() + 1e-8)
        batch = Batch(
            map_observations(lambda *tensors: th.cat(tensors), *(part.observations for part in parts)),
            th.cat([part.actions for part in parts]),
            (w * A).to(newest.advantages.dtype),
            th.cat([part.log_probs for part in parts]),
            None if newest.action_masks is None else th.cat([part.action_masks for part in parts]),  # type: ignore[misc]
        )
        share = (w.sum() ** 2 / (len(w) * (w**2).sum())).item()
        n_trajectories = count_trajectories(buffer) + sum(int(rollout.n_trajectories.item()) for rollout in kept)
        return batch, n_trajectories, {"effective_sample_share": share, "n_rollouts": 1 + len(kept)}

    def add(self, buffer: Any, last_observations: Any, dones: Any, has_masks: bool = False) -> None:
        """Keep the arrays of a full, flattened buffer, which it does not use again after ``reset``."""
        self._rollouts.append(
            Rollout(
                buffer.observations,
                map_observations(np.copy, last_observations),
                buffer.actions,
                buffer.log_probs.reshape(-1),
                buffer.rewards,
                buffer.episode_starts,
                np.array(dones, np.float32),
                np.array([count_trajectories(buffer)]),
                {"action_masks": buffer.action_masks} if has_masks else {},
            )
        )

    def clear(self) -> None:
        """Forget all rollouts."""
        self._rollouts.clear()

    def _replace(self, rollouts: Iterable[Rollout]) -> None:
        self._rollouts = deque(rollouts, maxlen=self._rollouts.maxlen)

    def state_dict(self) -> dict[str, th.Tensor]:
        """:return: every array as a tensor, named by its rollout, oldest first, its field and its key"""
        return {
            f"{i}/{name}/{key}": th.from_numpy(array)
            for i, rollout in enumerate(self._rollouts)
            for name, value in vars(rollout).items()
            for key, array in (value.items() if isinstance(value, dict) else [("", value)])
        }

    def load_state_dict(self, state_dict: dict[str, th.Tensor], strict: bool = True) -> None:
        """
        :param state_dict: what ``state_dict`` returned; of more than N rollouts, the last N are kept
        :param strict: whether to take only these rollouts; otherwise, entries that are missing stay as they are
        :raises RuntimeError: if a rollout is incomplete, as ``torch.nn.Module`` does
        """
        rollouts: dict[str, dict[str, Any]] = {}
        for path, tensor in (state_dict if strict else self.state_dict() | state_dict).items():
            i, name, key = path.split("/", 2)
            fields = rollouts.setdefault(i, {})
            array = tensor.cpu().numpy().copy()
            if key:
                fields.setdefault(name, {})[key] = array
            else:
                fields[name] = array
        for i, fields in rollouts.items():
            if missing := Rollout.__dataclass_fields__.keys() - fields - {"masks"}:
                raise RuntimeError(f"Error in loading the rollouts: number {i} lacks {', '.join(sorted(missing))}.")
        self._replace(Rollout(**fields) for fields in rollouts.values())


def require_plain_buffer(buffer: RolloutBuffer) -> None:
    """:raises ValueError: if the buffer's ``get`` or memory may be the user's own"""
    if not is_plain_buffer(buffer):
        raise ValueError(
            "n_reused_rollouts must be 0 with a rollout buffer of your own, but "
            f"rollout_buffer_class is {type(buffer).__name__}"
        )
