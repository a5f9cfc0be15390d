"""Environment → rollout buffer: at each step the policy only acts; values and log-probabilities follow in batches."""

from typing import Any

import numpy as np
import torch as th
from gymnasium import spaces
from stable_baselines3.common.buffers import DictRolloutBuffer, RolloutBuffer
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.on_policy_algorithm import OnPolicyAlgorithm
from stable_baselines3.common.type_aliases import MaybeCallback
from stable_baselines3.common.utils import obs_as_tensor
from stable_baselines3.common.vec_env import VecEnv

from sb3_uatrpo.acting import ActingMLP
from sb3_uatrpo.plain_mlp import FastPath
from sb3_uatrpo.rollout_locals import CallbacksWithRolloutLocals, RolloutLocals
from sb3_uatrpo.storage import StepWriter, compute_returns_and_advantage

#: This many steps are evaluated at once, or fewer if their features and activations would take more bytes than that.
ROWS_AT_ONCE = 512
EVALUATION_BYTES = 16 * 2**20


class StepEvaluation:
    """
    Values and log-probabilities of one step of all environments, computed when one of them is first read.

    :param acting: what drew the actions
    :param observations: of the step
    :param actions: as they were drawn
    """

    __slots__ = ("_acting", "_actions", "_found", "_observations")

    def __init__(self, acting: ActingMLP, observations: Any, actions: np.ndarray) -> None:
        self._acting, self._observations, self._actions = acting, observations, actions
        self._found: tuple[th.Tensor, th.Tensor] | None = None

    @property
    def was_read(self) -> bool:
        return self._found is not None

    def find(self) -> tuple[th.Tensor, th.Tensor]:
        """
        :return: values, shape ``(n_envs, 1)``, and log-probabilities, shape ``(n_envs,)``; the same ones at each call
        """
        if self._found is None:
            self._found = self._acting.evaluate(self._observations, self._actions)
        return self._found

    def obs_tensor(self) -> Any:
        return obs_as_tensor(self._observations, th.device("cpu"))

    def values(self) -> th.Tensor:
        return self.find()[0]

    def log_probs(self) -> th.Tensor:
        return self.find()[1]


class DeferredEvaluation:
    """
    Values and log-probabilities of a rollout's steps, computed in batches after the last of them.

    Those that a callback has read go into the buffer with their step and are not computed again, since the callback may
    have written into them.

    :param acting: what acts
    :param rollout_buffer: where the steps are kept
    """

    def __init__(self, acting: ActingMLP, rollout_buffer: RolloutBuffer) -> None:
        self._acting = acting
        self._buffer = rollout_buffer
        self._actions: list[np.ndarray] = []
        self._unread: list[int] = []

    def take(self, step: StepEvaluation, actions: np.ndarray) -> tuple[th.Tensor | None, th.Tensor | None]:
        """
        :param step: the step that goes into the buffer next
        :param actions: as they were drawn
        :return: values and log-probabilities, if they were read; None for those that come later
        """
        if step.was_read:
            return step.find()
        self._unread.append(self._buffer.pos)
        self._actions.append(actions)
        return None, None

    def fill(self) -> None:
        """Write into the buffer the values and log-probabilities of all steps where no callback has read them."""
        buffer, n_envs, unread = self._buffer, self._buffer.n_envs, self._unread
        at_once = max(1, min(ROWS_AT_ONCE, EVALUATION_BYTES // self._acting.bytes_per_step))
        if not unread:
            return
        actions = np.concatenate(self._actions)
        values, log_probs = np.empty((2, len(unread) * n_envs), np.float32)
        # usually all steps are unread, and a slice of them needs no copy
        whole = len(unread) == unread[-1] + 1
        for start in range(0, len(actions), at_once):
            rows = slice(start, min(start + at_once, len(actions)))
            steps = slice(rows.start // n_envs, -(-rows.stop // n_envs))
            chosen = steps if whole else unread[steps]
            within = slice(rows.start - steps.start * n_envs, rows.stop - steps.start * n_envs)
            found = self._acting.evaluate(_rows(buffer.observations, chosen, within), actions[rows])
            values[rows], log_probs[rows] = found[0].numpy().flatten(), found[1].numpy()
        buffer.values[unread] = values.reshape(-1, n_envs)
        buffer.log_probs[unread] = log_probs.reshape(-1, n_envs)
        self._actions, self._unread = [], []


def _rows(observations: Any, steps: Any, within: slice) -> Any:
    """Rows of some steps of a buffer's observations, step after step, as the policy takes them."""
    if isinstance(observations, dict):
        return {key: _rows(array, steps, within) for key, array in observations.items()}
    chosen = observations[steps]
    return chosen.reshape(-1, *chosen.shape[2:])[within]


def _as_callbacks_see(local: dict[str, Any], step: StepEvaluation | None) -> RolloutLocals:
    """The local variables of a rollout, with those that are computed only when they are read."""
    seen = RolloutLocals(local)
    if step is not None:
        seen.defer("obs_tensor", step.obs_tensor)
        seen.defer("values", step.values)
        seen.defer("log_probs", step.log_probs)
    return seen


class DeferredRollouts(OnPolicyAlgorithm):
    """
    On-policy base class whose rollouts evaluate the visited states in batches, after the last of them.

    The buffer holds what Stable-Baselines3's own ``collect_rollouts`` leaves there: the same states, actions and
    rewards, since actions are drawn by the same operations from the same random stream, and values and
    log-probabilities equal to float rounding, since they come from larger batches. Callbacks that read ``values`` or
    ``log_probs`` from their locals get the tensors themselves, computed on demand.

    This is done for standard MLP policies on the CPU and buffers with the usual ``add``. In all other cases, rollouts
    are collected by Stable-Baselines3 itself. If the policy changes during a rollout, it acts and evaluates by itself,
    step by step, for the rest of it. During a rollout the buffer's own ``values`` and ``log_probs`` are still zero.
    """

    fast_rollouts: bool
    _fast_path: FastPath

    def _init_callback(self, callback: MaybeCallback, progress_bar: bool = False) -> BaseCallback:
        return CallbacksWithRolloutLocals(super()._init_callback(callback, progress_bar))

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
        acting = self._who_acts(rollout_buffer)
        if acting is None:
            return super().collect_rollouts(env, callback, rollout_buffer, n_rollout_steps)
        policy = self.policy
        rollout_buffer.reset()
        callback.on_rollout_start()

        evaluation = DeferredEvaluation(acting, rollout_buffer)
        writer = StepWriter(rollout_buffer)
        # Callbacks read these variables by name: keep Stable-Baselines3's names
        n_steps = 0
        while n_steps < n_rollout_steps:
            if acting is not None and not acting.is_current():
                # the steps so far are evaluated by the policy that took them; from here on, the changed one does it all
                evaluation.fill()
                acting = None
            if acting is None:
                step = None
                obs_tensor = obs_as_tensor(self._last_obs, self.device)  # type: ignore[arg-type]
                with th.no_grad():
                    drawn, values, log_probs = policy(obs_tensor)
                actions = drawn.cpu().numpy().reshape(-1, *self.action_space.shape)  # type: ignore[misc]
            else:
                drawn = acting.sample(self._last_obs)  # type: ignore[arg-type]
                step = StepEvaluation(acting, self._last_obs, drawn)
                actions = drawn.reshape(-1, *self.action_space.shape)  # type: ignore[misc]
            clipped_actions = self._actions_for_env(actions)
            new_obs, rewards, dones, infos = env.step(clipped_actions)
            self.num_timesteps += env.num_envs

            callback.update_locals(_as_callbacks_see(locals(), step))
            if not callback.on_step():
                evaluation.fill()
                return False

            self._update_info_buffer(infos, dones)
            n_steps += 1
            if isinstance(self.action_space, spaces.Discrete):
                actions = actions.reshape(-1, 1)
            if dones.any():
                self._bootstrap_time_limits(rewards, dones, infos)
            if step is not None:
                values, log_probs = evaluation.take(step, drawn)
            writer.add(self._last_obs, actions, rewards, self._last_episode_starts, values, log_probs)  # type: ignore[arg-type]
            self._last_obs = new_obs  # type: ignore[assignment]
            self._last_episode_starts = dones

        evaluation.fill()
        # what Stable-Baselines3's locals hold at the end of a rollout: the last step's log-probabilities
        if step is not None:
            log_probs = step.log_probs()
        with th.no_grad():
            values = policy.predict_values(obs_as_tensor(new_obs, self.device))  # type: ignore[arg-type]
        compute_returns_and_advantage(rollout_buffer, values, dones)
        callback.update_locals(locals())
        callback.on_rollout_end()
        return True

    def _who_acts(self, rollout_buffer: RolloutBuffer) -> ActingMLP | None:
        """What acts in the place of the policy, or None if the policy has to."""
        usual = (RolloutBuffer.add, DictRolloutBuffer.add)
        if not self.fast_rollouts or type(rollout_buffer).add not in usual or "add" in vars(rollout_buffer):
            return None
        assert self._last_obs is not None, "No previous observation was provided"
        self.policy.set_training_mode(False)
        return ActingMLP.of(self.policy, self._fast_path, self._last_obs)

    def _actions_for_env(self, actions: np.ndarray) -> np.ndarray:
        """The actions, clipped to the bounds of a Box action space."""
        if not isinstance(self.action_space, spaces.Box):
            return actions
        # the same as np.clip, with less overhead
        return np.minimum(np.maximum(actions, self.action_space.low), self.action_space.high)

    def _bootstrap_time_limits(self, rewards: np.ndarray, dones: np.ndarray, infos: list[dict[str, Any]]) -> None:
        """Add γV of the state that was reached to the last reward of an episode that a time limit truncated."""
        for idx in np.flatnonzero(dones):
            reached = infos[idx].get("terminal_observation")
            if reached is not None and infos[idx].get("TimeLimit.truncated", False):
                with th.no_grad():
                    value = self.policy.predict_values(self.policy.obs_to_tensor(reached)[0])[0]
                rewards[idx] += (self.gamma * value).item()
