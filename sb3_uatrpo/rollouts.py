"""Environment → rollout buffer: at each step the policy only acts; values and log-probabilities follow in batches."""

from typing import Any

import numpy as np
import torch as th
from gymnasium import spaces
from stable_baselines3.common.buffers import RolloutBuffer
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.on_policy_algorithm import OnPolicyAlgorithm
from stable_baselines3.common.type_aliases import MaybeCallback
from stable_baselines3.common.utils import obs_as_tensor
from stable_baselines3.common.vec_env import VecEnv

from sb3_uatrpo.acting import ActingMLP
from sb3_uatrpo.batch import each, rows_of
from sb3_uatrpo.plain_mlp import FastPath
from sb3_uatrpo.rollout_locals import CallbacksWithRolloutLocals, RolloutLocals
from sb3_uatrpo.storage import StepWriter, compute_returns_and_advantage, is_sb3s_own

#: ROWS_AT_ONCE steps are evaluated at once, or fewer if their features and activations would take more than
#: EVALUATION_BYTES.
ROWS_AT_ONCE = 512
EVALUATION_BYTES = 16 * 2**20

#: Local variables of the loop below that Stable-Baselines3's loop does not have. They are hidden from callbacks, which
#: may copy everything that they see.
_OWN_LOCALS = ("__class__", "acting", "drawn", "evaluation", "step", "writer")


class StepEvaluation:
    """
    Values and log-probabilities of one step of all environments, computed when one of them is first read.

    :param acting: the copy of the policy that drew the actions
    :param observations: the observations of the step
    :param actions: the actions as drawn
    """

    __slots__ = ("_acting", "_found", "_stored", "actions", "observations")

    def __init__(self, acting: ActingMLP, observations: Any, actions: np.ndarray) -> None:
        self._acting, self._stored = acting, observations
        # what the policy saw and drew, whatever an environment or a callback writes into the arrays later
        self.observations, self.actions = each(np.copy, observations), actions.copy()
        self._found: tuple[th.Tensor, th.Tensor] | None = None

    @property
    def was_read(self) -> bool:
        """Whether a value or a log-probability of this step has been read."""
        return self._found is not None

    def find(self) -> tuple[th.Tensor, th.Tensor]:
        """
        :return: values, shape ``(n_envs, 1)``, and log-probabilities, shape ``(n_envs,)``; the same ones at each call
        """
        if self._found is None:
            self._found = self._acting.evaluate(self.observations, self.actions)
        return self._found

    def obs_tensor(self) -> Any:
        # shares memory with the observations that go into the buffer, as in Stable-Baselines3
        return obs_as_tensor(self._stored, th.device("cpu"))

    def values(self) -> th.Tensor:
        return self.find()[0]

    def log_probs(self) -> th.Tensor:
        return self.find()[1]


class DeferredEvaluation:
    """
    Values and log-probabilities of a rollout's steps, computed in batches.

    Those that a callback has read go into the buffer with their step and are not computed again, since the callback may
    have written into them.

    :param acting: the copy of the policy that acts
    :param rollout_buffer: the buffer that receives the steps
    """

    def __init__(self, acting: ActingMLP, rollout_buffer: RolloutBuffer) -> None:
        self._acting = acting
        self._buffer = rollout_buffer
        #: steps that no callback has read, each with its position in the buffer. Pairs, since an interrupt could come
        #: between additions to two lists.
        self._unread: list[tuple[int, StepEvaluation]] = []
        self._n_bytes = 0

    def take(self, step: StepEvaluation) -> tuple[th.Tensor | None, th.Tensor | None]:
        """
        :param step: the step that goes into the buffer next
        :return: the values and log-probabilities, if a callback has read them or a user's own ``add`` will read them;
            otherwise None for both, and ``fill`` writes them later
        """
        if step.was_read or not is_sb3s_own(self._buffer, "add"):
            return step.find()
        # bounds the memory of the copies
        self._n_bytes += _n_bytes(step.observations)
        if self._n_bytes > EVALUATION_BYTES:
            self.fill()
            self._n_bytes = _n_bytes(step.observations)
        self._unread.append((self._buffer.pos, step))
        return None, None

    def fill(self) -> None:
        """Compute the values and log-probabilities that no callback has read, and write them into the buffer."""
        n_envs = self._buffer.n_envs
        n_rows = max(1, min(ROWS_AT_ONCE, EVALUATION_BYTES // self._acting.bytes_per_step))
        n_steps = max(1, n_rows // n_envs)
        for start in range(0, len(self._unread), n_steps):
            places, some = map(list, zip(*self._unread[start : start + n_steps], strict=True))
            observations = each(lambda *steps: np.concatenate(steps), *(step.observations for step in some))
            actions = np.concatenate([step.actions for step in some])
            # a single step may have more rows than that, one for each environment
            parts = [slice(row, row + n_rows) for row in range(0, len(actions), n_rows)]
            found = [self._acting.evaluate(rows_of(observations, part), actions[part]) for part in parts]
            values, log_probs = (th.cat(numbers).numpy().reshape(-1, n_envs) for numbers in zip(*found, strict=True))
            self._buffer.values[places], self._buffer.log_probs[places] = values, log_probs
        self._unread, self._n_bytes = [], 0


def _n_bytes(observations: Any) -> int:
    return (
        sum(array.nbytes for array in observations.values()) if isinstance(observations, dict) else observations.nbytes
    )


def _as_callbacks_see(local: dict[str, Any], step: StepEvaluation | None) -> RolloutLocals:
    """A rollout's local variables as callbacks see them: some are computed only when they are read."""
    seen = RolloutLocals(local)
    for name in _OWN_LOCALS:
        dict.pop(seen, name, None)
    if step is not None:
        seen.defer("obs_tensor", step.obs_tensor)
        seen.defer("values", step.values)
        seen.defer("log_probs", step.log_probs)
    return seen


class DeferredRollouts(OnPolicyAlgorithm):
    """
    On-policy base class whose rollouts evaluate the visited states in batches, not step by step.

    The buffer holds what Stable-Baselines3's own ``collect_rollouts`` leaves there, up to float rounding of values and
    log-probabilities. Callbacks that read these get the tensors themselves, computed on demand; in the buffer, they are
    zero until they are computed.

    This is done for standard MLP policies on the CPU and buffers with the usual ``add``. In all other cases, rollouts
    are collected by Stable-Baselines3 itself. If the policy changes during a rollout, it acts and evaluates itself,
    step by step, for the rest of the rollout.
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
        Fill the buffer with the experience of the current policy; the arguments are Stable-Baselines3's.

        :return: False if the callback ended the rollout early
        """
        acting = self._who_acts(rollout_buffer)
        if acting is None:
            return super().collect_rollouts(env, callback, rollout_buffer, n_rollout_steps)
        rollout_buffer.reset()
        callback.on_rollout_start()
        if not (acting.is_current() and acting.policy is self.policy):
            # a callback has changed the policy, for example its noise. A copy that is not current does not act below.
            acting = self._who_acts(rollout_buffer) or acting

        evaluation = DeferredEvaluation(acting, rollout_buffer)
        writer = StepWriter(rollout_buffer)
        # Callbacks read these variables by name: keep Stable-Baselines3's names
        n_steps = 0
        try:
            while n_steps < n_rollout_steps:
                if acting is not None and not (acting.is_current() and acting.policy is self.policy):
                    # the copy that acted so far evaluates its steps; from here on, the changed policy does both
                    evaluation.fill()
                    acting = None
                if acting is None:
                    step = None
                    obs_tensor = obs_as_tensor(self._last_obs, self.device)  # type: ignore[arg-type]
                    with th.no_grad():
                        drawn, values, log_probs = self.policy(obs_tensor)
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
                    return False

                self._update_info_buffer(infos, dones)
                n_steps += 1
                if isinstance(self.action_space, spaces.Discrete):
                    actions = actions.reshape(-1, 1)
                if dones.any():
                    self._bootstrap_time_limits(rewards, dones, infos)
                # the variables of Stable-Baselines3's loop over environments, where it leaves them
                idx, done = len(dones) - 1, dones[-1]
                if step is not None:
                    values, log_probs = evaluation.take(step)
                writer.add(self._last_obs, actions, rewards, self._last_episode_starts, values, log_probs)  # type: ignore[arg-type]
                self._last_obs = new_obs  # type: ignore[assignment]
                self._last_episode_starts = dones
        finally:
            # after an interrupt, too
            evaluation.fill()

        # what Stable-Baselines3's locals hold at the end of a rollout: the last step's log-probabilities
        if step is not None:
            log_probs = step.log_probs()
        with th.no_grad():
            values = self.policy.predict_values(obs_as_tensor(new_obs, self.device))  # type: ignore[arg-type]
        compute_returns_and_advantage(rollout_buffer, values, dones)
        callback.update_locals(_as_callbacks_see(locals(), None))
        callback.on_rollout_end()
        return True

    def _who_acts(self, rollout_buffer: RolloutBuffer) -> ActingMLP | None:
        """The copy that acts in place of the policy, or None if the policy has to act itself."""
        if not self.fast_rollouts or not is_sb3s_own(rollout_buffer, "add"):
            return None
        assert self._last_obs is not None, "No previous observation was provided"
        self.policy.set_training_mode(False)
        return ActingMLP.of(self.policy, self._fast_path, self._last_obs)

    def _actions_for_env(self, actions: np.ndarray) -> np.ndarray:
        """The actions, clipped to the bounds of a Box action space, or rescaled to them if they were squashed."""
        if not isinstance(self.action_space, spaces.Box):
            return actions
        if self.policy.squash_output:
            return self.policy.unscale_action(actions)
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
