"""The standard MLP policy during a rollout: it acts on NumPy arrays, and its actions are evaluated afterwards."""

import copy
import math
from typing import Any

import numpy as np
import torch as th
from stable_baselines3.common.policies import ActorCriticPolicy
from stable_baselines3.common.utils import obs_as_tensor

from sb3_uatrpo.core.array_mlp import Array
from sb3_uatrpo.guard import RunningCode, warn_if_different
from sb3_uatrpo.plain_mlp import StandardMLP

#: A policy with more bytes of parameters acts itself: comparing them all at each step would take longer than is saved.
MAX_PARAMETER_BYTES = 4 * 2**20


class Step:
    """
    One step of all environments; its values and log-probabilities are computed when one of them is first read.

    :param acting: what drew the actions
    :param observations: the observations of the step
    :param stream: where random numbers come from; torch's global generator by default
    """

    __slots__ = ("_acting", "_found", "_observations", "actions", "features", "outputs")

    def __init__(self, acting: "ActingMLP", observations: Array, stream: th.Generator | None = None) -> None:
        self._acting, self._observations = acting, observations
        self._found: tuple[th.Tensor, th.Tensor] | None = None
        # what the policy saw and drew, whatever an environment or a callback writes into the arrays later
        with np.errstate(all="ignore"):
            self.features = observations.reshape(len(observations), -1).astype(np.float32)
            self.outputs = acting.mlp.actor(self.features)
            self.actions: Any = acting.draw(self.outputs, stream)

    @property
    def was_read(self) -> bool:
        """Whether a value or a log-probability of this step has been read."""
        return self._found is not None

    def find(self) -> tuple[th.Tensor, th.Tensor]:
        """
        :return: values, shape ``(n_envs, 1)``, and log-probabilities, shape ``(n_envs,)``; the same ones at each call
        """
        if self._found is None:
            self._found = self._acting.evaluate(self.features, self.outputs, self.actions)
        return self._found

    def obs_tensor(self) -> Any:
        # shares memory with the observations that go into the buffer, as in Stable-Baselines3
        return obs_as_tensor(self._observations, th.device("cpu"))

    def values(self) -> th.Tensor:
        return self.find()[0]

    def log_probs(self) -> th.Tensor:
        return self.find()[1]


class ActingMLP:
    """
    A standard MLP policy's layers, which act in its place.

    They draw the actions that the policy would draw, from the same random stream, and evaluate them, even if the policy
    has changed since.

    :param mlp: a standard MLP in evaluation mode
    """

    def __init__(self, mlp: StandardMLP) -> None:
        self.mlp = mlp
        # copies, for evaluations after the policy has changed
        self._critic, self._log_std = copy.deepcopy(mlp.critic), copy.copy(mlp.log_std)
        with np.errstate(all="ignore"):
            self._std = None if self._log_std is None else np.exp(self._log_std)
        self._is_finite = self._std is None or bool(np.isfinite(self._std).all())
        self._noise = th.empty(0, device="cpu")
        self._numbers = self._noise.numpy()
        #: bytes that a row of the pending steps takes, with the critic's activations
        widths = sum(len(layer.bias) for layer in mlp.critic.layers)
        self.bytes_per_row = 4 * (mlp.actor.layers[0].weight.shape[1] + 2 * len(mlp.actor.layers[-1].bias) + widths)

    @staticmethod
    def of(
        policy: ActorCriticPolicy,
        code: RunningCode,
        observations: Array,
        stream: th.Generator,
        found: tuple[th.Tensor, th.Tensor, th.Tensor],
    ) -> "ActingMLP | None":
        """
        :param policy: a policy that has just acted, in evaluation mode
        :param code: what ran then
        :param observations: what the policy saw
        :param stream: torch's global generator as it was before
        :param found: the policy's actions, values and log-probabilities
        :return: what acts in place of the policy; None if the policy has to act itself
        """
        mlp = StandardMLP.recognise(policy) if code.is_library_code else None
        if mlp is None or sum(param.nbytes for param in policy.parameters()) > MAX_PARAMETER_BYTES:
            return None
        acting = ActingMLP(mlp)
        step = Step(acting, observations, stream)
        if step.actions is None or not th.equal(stream.get_state(), th.get_rng_state()):
            # nothing to compare: numbers out of range, or another thread has drawn at the same time
            return None
        return None if warn_if_different(policy, acting._compared(step, found)) else acting

    def draw(self, outputs: Array, stream: th.Generator | None = None) -> Array | None:
        """
        Actions by the same torch calls as the policy's distribution, which draw as many numbers.

        :param outputs: the actor's outputs, shape ``(n_envs, a)``
        :param stream: where random numbers come from; torch's global generator by default
        :return: the actions; None, before any number is drawn, if torch would refuse a distribution with such outputs
        """
        # a sum that overflows is no harm: the policy itself decides
        if not (self._is_finite and math.isfinite(np.add.reduce(outputs, axis=None))):
            return None
        if self._std is None:
            weights = np.exp(outputs - outputs.max(axis=1, keepdims=True))
            probabilities = weights / weights.sum(axis=1, keepdims=True)
            return th.multinomial(th.from_numpy(probabilities), 1, True, generator=stream).numpy()[:, 0]
        if self._numbers.shape != outputs.shape:
            self._noise = th.empty(outputs.shape, dtype=th.float32, device="cpu")
            self._numbers = self._noise.numpy()
        self._noise.normal_(generator=stream)
        actions: Array = self._numbers * self._std
        actions += outputs
        return actions

    def evaluate(self, features: Array, outputs: Array, actions: Array) -> tuple[th.Tensor, th.Tensor]:
        """
        :param features: features of n steps, shape ``(n, i)``
        :param outputs: the actor's outputs, shape ``(n, a)``
        :param actions: the actions that were drawn
        :return: values, shape ``(n, 1)``, and log-probabilities, shape ``(n,)``
        """
        with np.errstate(all="ignore"):
            if self._std is None or self._log_std is None:
                shifted = outputs - outputs.max(axis=1, keepdims=True)
                chosen = np.take_along_axis(shifted, actions[:, None], axis=1)[:, 0]
                log_probs = chosen - np.log(np.exp(shifted).sum(axis=1))
            else:
                # as in torch, where the variance may overflow
                squares = np.square(actions - outputs) / (2.0 * np.square(self._std))
                terms = squares + self._log_std + 0.5 * math.log(2.0 * math.pi)
                log_probs = -terms.sum(axis=1)
            return th.from_numpy(self._critic(features)), th.from_numpy(log_probs)

    def _compared(self, step: Step, found: tuple[th.Tensor, th.Tensor, th.Tensor]) -> dict[str, tuple[Any, ...]]:
        """The actions, values and log-probabilities of a step, each with the policy's own and the size of its terms."""
        with np.errstate(all="ignore"):
            # an output of one environment alone may be close to zero by chance, but its rounding errors need not be
            terms, of_critic = (chain.size_of_terms(step.features) for chain in (self.mlp.actor, self._critic))
        # a log-probability is a sum of logarithms, of order one, and of logits or of squares of (a - μ)/σ
        of_log_probs = max(1.0, terms if self._std is None else terms / float(self._std.min()))
        actions, values, log_probs = found
        return {
            "the actions": (step.actions.reshape(actions.shape), actions, terms),
            "the values": (step.values(), values, of_critic),
            "the log-probabilities": (step.log_probs(), log_probs, of_log_probs),
        }
