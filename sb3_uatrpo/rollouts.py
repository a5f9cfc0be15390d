"""Environment → rollout buffer: the policy only acts at each step; values and log-probabilities come after, at once."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch as th
from gymnasium import spaces
from stable_baselines3.common.buffers import DictRolloutBuffer, RolloutBuffer
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.on_policy_algorithm import OnPolicyAlgorithm
from stable_baselines3.common.policies import ActorCriticPolicy
from stable_baselines3.common.utils import obs_as_tensor
from stable_baselines3.common.vec_env import VecEnv

from sb3_uatrpo.acting import sampler_of

#: Observations judged at once after a rollout.
ROWS_AT_ONCE = 512

#: A policy that changes one of these may do more in ``forward`` than what is repeated after the rollout.
_POLICY_METHODS = (
    "__call__",
    "forward",
    "get_distribution",
    "evaluate_actions",
    "predict_values",
    "extract_features",
    "_get_action_dist_from_latent",
)


class DeferredTensor(th.Tensor):
    """
    A tensor that is computed when somebody looks at it: any operation of torch or NumPy on it gets the true numbers.

    :param look_up: returns the numbers
    """

    _look_up: Callable[[], th.Tensor]

    @staticmethod
    def __new__(cls, look_up: Callable[[], th.Tensor]) -> "DeferredTensor":
        deferred = th.Tensor._make_subclass(cls, _EMPTY)
        deferred._look_up = look_up
        return deferred

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def true(value: Any) -> Any:
            return value._look_up() if isinstance(value, DeferredTensor) else value

        args, kwargs = th.utils._pytree.tree_map(true, (args, kwargs or {}))
        return func(*args, **kwargs)


_EMPTY = th.empty(0)


class _Judgement:
    """
    Values and log-probabilities of the steps of one rollout, found when the rollout ends, or earlier for a callback.

    :param policy: the policy that acts
    """

    def __init__(self, policy: ActorCriticPolicy) -> None:
        self._policy = policy
        self._values: th.Tensor | None = None
        self._log_probs: th.Tensor | None = None
        self._actions: list[th.Tensor] = []

    def defer(self, observations: Any, actions: th.Tensor) -> tuple[th.Tensor, th.Tensor]:
        """
        :param observations: of this step, of all environments
        :param actions: of this step, as the policy drew them
        :return: the step's values, shape ``(n_envs, 1)``, and log-probabilities, shape ``(n_envs,)``
        """
        step = len(self._actions)
        self._actions.append(actions)

        def values() -> th.Tensor:
            # The policy of a rollout that is over may have moved since
            return self._judge(observations, actions)[0] if self._values is None else self._values[step]

        def log_probs() -> th.Tensor:
            return self._judge(observations, actions)[1] if self._log_probs is None else self._log_probs[step]

        return DeferredTensor(values), DeferredTensor(log_probs)

    def _judge(self, observations: Any, actions: th.Tensor) -> tuple[th.Tensor, th.Tensor]:
        with th.no_grad():
            values, log_probs, _ = self._policy.evaluate_actions(observations, actions)
        return values, log_probs

    def fill(self, rollout_buffer: RolloutBuffer) -> None:
        """
        Give the buffer's steps their values and log-probabilities.

        :param rollout_buffer: holds the observations of as many steps as ``pos`` says
        """
        n_steps, n_envs = rollout_buffer.pos, rollout_buffer.n_envs
        if n_steps == 0:
            return
        actions = th.cat(self._actions[:n_steps])
        pieces = []
        for start in range(0, len(actions), ROWS_AT_ONCE):
            rows = slice(start, min(start + ROWS_AT_ONCE, len(actions)))
            pieces.append(self._judge(_rows(rollout_buffer.observations, rows, n_envs, self._policy), actions[rows]))
        values, log_probs = (th.cat(tensors) for tensors in zip(*pieces, strict=True))
        rollout_buffer.values[:n_steps] = values.cpu().numpy().reshape(n_steps, n_envs)
        rollout_buffer.log_probs[:n_steps] = log_probs.cpu().numpy().reshape(n_steps, n_envs)
        if len(self._actions) == n_steps:
            self._values = values.reshape(n_steps, n_envs, 1)
            self._log_probs = log_probs.reshape(n_steps, n_envs)


def _rows(observations: Any, rows: slice, n_envs: int, policy: ActorCriticPolicy) -> Any:
    """Some rows of a buffer's observations, step after step, as the policy takes them."""

    def some(array: np.ndarray) -> np.ndarray:
        return array.reshape(len(array) * n_envs, *array.shape[2:])[rows]

    chosen = (
        {key: some(array) for key, array in observations.items()}
        if isinstance(observations, dict)
        else some(observations)
    )
    return obs_as_tensor(chosen, policy.device)


def can_judge_later(policy: ActorCriticPolicy, rollout_buffer: RolloutBuffer) -> bool:
    """
    Whether acting first and judging later gives what Stable-Baselines3's rollouts give.

    :param policy: not if its class, or the object, brings its own version of a method that both ways call, or hooks
    :param rollout_buffer: not if it brings its own ``add``, which may look at the values
    """
    return (
        all(
            getattr(type(policy), name) is getattr(ActorCriticPolicy, name) and name not in vars(policy)
            for name in _POLICY_METHODS
        )
        and not (policy._forward_hooks or policy._forward_pre_hooks)
        and type(rollout_buffer).add in (RolloutBuffer.add, DictRolloutBuffer.add)
    )


class DeferredRollouts(OnPolicyAlgorithm):
    """
    On-policy base whose rollouts judge the visited states together, after the last of them.

    The buffer holds what Stable-Baselines3's own ``collect_rollouts`` leaves there: the same states, actions and
    rewards, since actions are drawn by the same operations from the same random stream, and values and
    log-probabilities equal to float rounding, since they come from larger batches. Callbacks that read ``values`` or
    ``log_probs`` from their locals get the true numbers, computed when read.

    Not deferred, but collected by Stable-Baselines3 itself: policies that override what acting or judging calls,
    and buffers that override ``add``. During a rollout the buffer's own ``values`` and ``log_probs`` are still zero.
    """

    fast_rollouts: bool

    def collect_rollouts(
        self,
        env: VecEnv,
        callback: BaseCallback,
        rollout_buffer: RolloutBuffer,
        n_rollout_steps: int,
    ) -> bool:
        """
        Fill the buffer with the experience of the current policy.

        :param env: The training environment
        :param callback: called at each step, and at the beginning and end of the rollout
        :param rollout_buffer: Buffer to fill with rollouts
        :param n_rollout_steps: Number of experiences to collect per environment
        :return: False if the callback ended the rollout early
        """
        if not (self.fast_rollouts and can_judge_later(self.policy, rollout_buffer)):
            return super().collect_rollouts(env, callback, rollout_buffer, n_rollout_steps)
        assert self._last_obs is not None, "No previous observation was provided"
        policy = self.policy
        policy.set_training_mode(False)
        rollout_buffer.reset()
        if self.use_sde:
            policy.reset_noise(env.num_envs)
        callback.on_rollout_start()

        sample = sampler_of(policy)
        judgement = _Judgement(policy)
        later = th.zeros(env.num_envs)
        # The names of these variables are what callbacks look for
        n_steps = 0
        while n_steps < n_rollout_steps:
            if self.use_sde and self.sde_sample_freq > 0 and n_steps % self.sde_sample_freq == 0:
                policy.reset_noise(env.num_envs)
            obs_tensor = obs_as_tensor(self._last_obs, self.device)  # type: ignore[arg-type]
            with th.no_grad():
                drawn = sample(obs_tensor)
            values, log_probs = judgement.defer(obs_tensor, drawn)
            actions = drawn.cpu().numpy().reshape(-1, *self.action_space.shape)  # type: ignore[misc]
            clipped_actions = self._actions_for_env(actions)
            new_obs, rewards, dones, infos = env.step(clipped_actions)
            self.num_timesteps += env.num_envs

            callback.update_locals(locals())
            if not callback.on_step():
                judgement.fill(rollout_buffer)
                return False

            self._update_info_buffer(infos, dones)
            n_steps += 1
            if dones.any():
                self._bootstrap_time_limits(rewards, dones, infos)
            rollout_buffer.add(self._last_obs, actions, rewards, self._last_episode_starts, later, later)  # type: ignore[arg-type]
            self._last_obs = new_obs  # type: ignore[assignment]
            self._last_episode_starts = dones

        judgement.fill(rollout_buffer)
        with th.no_grad():
            values = policy.predict_values(obs_as_tensor(new_obs, self.device))  # type: ignore[arg-type]
        rollout_buffer.compute_returns_and_advantage(last_values=values, dones=dones)
        callback.update_locals(locals())
        callback.on_rollout_end()
        return True

    def _actions_for_env(self, actions: np.ndarray) -> np.ndarray:
        """Within the bounds of the action space, as far as it has any."""
        if not isinstance(self.action_space, spaces.Box):
            return actions
        if self.policy.squash_output:
            return self.policy.unscale_action(actions)
        return np.clip(actions, self.action_space.low, self.action_space.high)

    def _bootstrap_time_limits(self, rewards: np.ndarray, dones: np.ndarray, infos: list[dict[str, Any]]) -> None:
        """An episode that a time limit cut off goes on: its last reward takes in γV of the state that it reached."""
        for idx in np.flatnonzero(dones):
            reached = infos[idx].get("terminal_observation")
            if reached is not None and infos[idx].get("TimeLimit.truncated", False):
                with th.no_grad():
                    value = self.policy.predict_values(self.policy.obs_to_tensor(reached)[0])[0]
                rewards[idx] += (self.gamma * value).item()
