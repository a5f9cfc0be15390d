"""Environment → rollout buffer: at each step the policy only acts; values and log-probabilities follow in batches."""

from typing import Any

import numpy as np
import torch as th
from gymnasium import spaces
from stable_baselines3.common.buffers import RolloutBuffer
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.on_policy_algorithm import OnPolicyAlgorithm
from stable_baselines3.common.policies import ActorCriticPolicy
from stable_baselines3.common.type_aliases import MaybeCallback
from stable_baselines3.common.utils import obs_as_tensor
from stable_baselines3.common.vec_env import VecEnv

from sb3_uatrpo.acting import ActingMLP, Step
from sb3_uatrpo.core.array_mlp import Array
from sb3_uatrpo.guard import RunningCode, Watch, has_library_methods, is_own
from sb3_uatrpo.plain_mlp import StandardMLP
from sb3_uatrpo.rollout_locals import CallbacksWithRolloutLocals, RolloutLocals

#: Steps that take this many bytes are evaluated together.
PENDING_BYTES = 8 * 2**20
#: What Stable-Baselines3's rollout buffer holds of each step: the arguments of its ``add``, and what follows from them.
_ARRAYS = ("observations", "actions", "rewards", "episode_starts", "values", "log_probs", "advantages", "returns")


class FastSteps:
    """
    The steps of one rollout on the fast path: who acts, and what is stored.

    :param rollout_buffer: an empty buffer
    """

    def __init__(self, rollout_buffer: RolloutBuffer) -> None:
        self._buffer = rollout_buffer
        #: the step that was taken last, if it was a fast one
        self.step: Step | None = None
        self._has_begun = self._writes_directly = False
        self._acting: ActingMLP | None = None
        # Of steps whose values nobody has read: position in the buffer, features, outputs and actions. A list of
        # tuples, since an interrupt could leave two lists with different lengths, and Python's garbage collector would
        # go through objects of the class Step again and again.
        self._pending: list[tuple[int, Array, Array, Array]] = []

    def act(self, policy: ActorCriticPolicy, observations: Any) -> Array | None:
        """
        :param policy: the policy that would act
        :param observations: the observations of one step in all environments
        :return: its actions, drawn on the fast path; None if it has to act itself
        """
        self.step = None
        acting = self._acting
        if acting is None:
            return None
        if not (acting.mlp.policy is policy and self._watch.sees_no_change()):
            # the layers that acted so far evaluate their steps; from here on, the changed policy does both
            self.fill()
            self._acting = None
            return None
        step = Step(acting, observations)
        if step.actions is None:
            # A NaN must never reach a robot as an action: the policy itself acts, and its distribution raises the error
            return None
        self.step = step
        # what the environment or a callback writes into them does not change what is evaluated
        return step.actions.copy()

    def let_act(self, policy: ActorCriticPolicy, observations: Any) -> tuple[th.Tensor, th.Tensor, th.Tensor]:
        """
        The general path. The first step of a rollout takes it, and decides about those that follow.

        :param policy: the policy
        :param observations: as the policy takes them
        :return: its actions, values and log-probabilities
        """
        if self._has_begun:
            with th.no_grad():
                return policy(observations)
        self._has_begun = True
        code, stream = RunningCode(), th.Generator(device="cpu")
        stream.set_state(th.get_rng_state())
        with th.no_grad(), code.noted():
            found = policy(observations)
        if has_library_methods(self._buffer, "add"):
            self._acting = ActingMLP.of(policy, code, observations.numpy(), stream, found)
        if self._acting is not None:
            self._watch, self._add = Watch(policy, code), type(self._buffer).add
            self._most_pending = max(1, PENDING_BYTES // (self._acting.bytes_per_row * self._buffer.n_envs))
        return found

    def store(
        self,
        observations: Any,
        actions: Array,
        rewards: Array,
        episode_starts: Array,
        values: th.Tensor,
        log_probs: th.Tensor,
    ) -> None:
        """The arguments are those of the buffer's ``add``; the last two are those of the general path."""
        buffer, step = self._buffer, self.step
        # a callback may have replaced ``add`` since the last step; a user's own one gets true values
        if step is None or not self._writes_directly or "add" in vars(buffer) or type(buffer).add is not self._add:
            found = (values, log_probs) if step is None else step.find()
            buffer.add(observations, actions, rewards, episode_starts, *found)
            if self._acting is not None and buffer.pos == 1:
                self._writes_directly = self._is_written_as_here(observations, actions, rewards, episode_starts, *found)
            return
        position = buffer.pos
        buffer.observations[position] = observations
        buffer.actions[position] = actions.reshape(buffer.n_envs, buffer.action_dim)
        buffer.rewards[position] = rewards
        buffer.episode_starts[position] = episode_starts
        if step.was_read:
            # a callback may have written into them
            buffer.values[position], buffer.log_probs[position] = step.values().flatten(), step.log_probs()
        else:
            # bounds the memory of the copies
            if len(self._pending) >= self._most_pending:
                self.fill()
            self._pending.append((position, step.features, step.outputs, step.actions))
        buffer.pos = position + 1
        buffer.full = buffer.full or buffer.pos == buffer.buffer_size

    def _is_written_as_here(self, *given: Any) -> bool:
        """Whether the buffer's ``add`` stored these numbers, and nothing else, as the lines above would."""
        arrays = {name: array for name, array in vars(self._buffer).items() if isinstance(array, np.ndarray)}
        return arrays.keys() == set(_ARRAYS) and all(
            np.array_equal(array[0], np.asarray(numbers).astype(array.dtype).reshape(array[0].shape), equal_nan=True)
            for array, numbers in zip([arrays[name] for name in _ARRAYS], given, strict=False)
        )

    def fill(self) -> None:
        """Compute the values and log-probabilities that nobody has read, and write them into the buffer."""
        if self._pending and self._acting is not None:
            places, *arrays = zip(*self._pending, strict=True)
            values, log_probs = self._acting.evaluate(*map(np.concatenate, arrays))
            rows, shape = list(places), (len(places), self._buffer.n_envs)
            for array, found in ((self._buffer.values, values), (self._buffer.log_probs, log_probs)):
                # what a callback has written there stays, unless it is zero
                array[rows] = np.where(array[rows] == 0.0, found.view(shape).numpy(), array[rows])
        self._pending = []

    def as_callbacks_see(self, local: dict[str, Any]) -> RolloutLocals:
        """
        :param local: the local variables of a rollout
        :return: those that Stable-Baselines3's loop has; some are computed only when they are read
        """
        seen = RolloutLocals(local)
        # super() in the caller adds __class__
        for name in ("fast", "drawn", "__class__"):
            dict.pop(seen, name, None)
        if self.step is not None:
            seen.defer("obs_tensor", self.step.obs_tensor)
            seen.defer("values", self.step.values)
            seen.defer("log_probs", self.step.log_probs)
        return seen


class DeferredRollouts(OnPolicyAlgorithm):
    """
    On-policy base class whose rollouts evaluate the visited states in batches, not step by step.

    The buffer holds what Stable-Baselines3's own ``collect_rollouts`` leaves there, up to float rounding of values and
    log-probabilities. Callbacks that read these get the tensors themselves, computed on demand; in the buffer, they are
    zero until they are computed.

    ``guard.py`` says when this is done. With other policies or buffers, Stable-Baselines3 itself collects rollouts. If
    the first step of a rollout rules out the fast path, or anything changes later, the policy acts and evaluates
    itself, step by step, until the rollout ends.
    """

    fast_rollouts: bool

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
        if not self._may_be_fast(rollout_buffer):
            return super().collect_rollouts(env, callback, rollout_buffer, n_rollout_steps)
        assert self._last_obs is not None, "No previous observation was provided"
        self.policy.set_training_mode(False)
        rollout_buffer.reset()
        callback.on_rollout_start()

        fast = FastSteps(rollout_buffer)
        # Callbacks read these variables by name: keep Stable-Baselines3's names
        n_steps = 0
        try:
            while n_steps < n_rollout_steps:
                actions = fast.act(self.policy, self._last_obs)
                if actions is None:
                    obs_tensor = obs_as_tensor(self._last_obs, self.device)  # type: ignore[arg-type]
                    drawn, values, log_probs = fast.let_act(self.policy, obs_tensor)
                    actions = drawn.cpu().numpy()
                actions = actions.reshape(-1, *self.action_space.shape)  # type: ignore[misc]
                clipped_actions = self._actions_for_env(actions)
                new_obs, rewards, dones, infos = env.step(clipped_actions)
                self.num_timesteps += env.num_envs

                callback.update_locals(fast.as_callbacks_see(locals()))
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
                fast.store(self._last_obs, actions, rewards, self._last_episode_starts, values, log_probs)  # type: ignore[arg-type]
                self._last_obs = new_obs  # type: ignore[assignment]
                self._last_episode_starts = dones
        finally:
            # after an interrupt, too
            fast.fill()

        # as in Stable-Baselines3, locals hold the last step's observations and log-probabilities when a rollout ends
        if fast.step is not None:
            obs_tensor, log_probs, fast.step = fast.step.obs_tensor(), fast.step.log_probs(), None
        with th.no_grad():
            values = self.policy.predict_values(obs_as_tensor(new_obs, self.device))  # type: ignore[arg-type]
        rollout_buffer.compute_returns_and_advantage(last_values=values, dones=dones)
        callback.update_locals(fast.as_callbacks_see(locals()))
        callback.on_rollout_end()
        return True

    def _may_be_fast(self, rollout_buffer: RolloutBuffer) -> bool:
        """Whether Stable-Baselines3's own code, not a mixin's, would fill a buffer of its own from a standard MLP."""
        general: Any = super().collect_rollouts
        return (
            self.fast_rollouts
            and type(rollout_buffer) is RolloutBuffer
            and general.__func__ is OnPolicyAlgorithm.collect_rollouts
            and is_own(OnPolicyAlgorithm, "collect_rollouts")
            and StandardMLP.recognise(self.policy) is not None
        )

    def _actions_for_env(self, actions: Array) -> Array:
        """The actions, clipped to the bounds of a Box action space, or rescaled to them if they were squashed."""
        if not isinstance(self.action_space, spaces.Box):
            return actions
        if self.policy.squash_output:
            return self.policy.unscale_action(actions)
        # np.clip, which does these two, takes twice as long for a few numbers
        return np.minimum(np.maximum(actions, self.action_space.low), self.action_space.high)

    def _bootstrap_time_limits(self, rewards: Array, dones: Array, infos: list[dict[str, Any]]) -> None:
        """Add γV of the state that was reached to the last reward of an episode that a time limit truncated."""
        for idx in np.flatnonzero(dones):
            reached = infos[idx].get("terminal_observation")
            if reached is not None and infos[idx].get("TimeLimit.truncated", False):
                with th.no_grad():
                    value = self.policy.predict_values(self.policy.obs_to_tensor(reached)[0])[0]
                rewards[idx] += (self.gamma * value).item()
