"""The policies behind the names of Stable-Baselines3, NumPy acting in one of them, and how any policy is evaluated."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch as th
from gymnasium import spaces
from stable_baselines3.common.distributions import Distribution
from stable_baselines3.common.policies import (
    ActorCriticCnnPolicy,
    ActorCriticPolicy,
    BasePolicy,
    MultiInputActorCriticPolicy,
)

from sb3_uatrpo.observations import map_observations
from sb3_uatrpo.plain_mlp import PlainMLP

CnnPolicy = ActorCriticCnnPolicy
MultiInputPolicy = MultiInputActorCriticPolicy


class ActsInNumpy(BasePolicy):
    """
    In rollouts of ``UATRPO`` and ``MatchedTRPO``, NumPy computes ``forward`` where the policy is plain. It draws the
    actions that the next base class would draw, and differs from it by rounding.
    """

    #: within a rollout, finds the layers of a plain policy
    _find_mlp: Callable[[Any], PlainMLP | None] | None = None
    _is_first_timestep = False
    _mlp: PlainMLP | None = None
    #: arguments of ``get_distribution``, whose result ``action_dist`` computes when it is read
    _unread: tuple[Any, ...] | None = None

    @property
    def action_dist(self) -> Distribution:
        """
        The action distribution of the last evaluation: in a rollout of the last timestep, after an update of all
        timesteps of the rollout. There it is computed when it is read, and has no graph.
        """
        unread, self._unread = self._unread, None
        if unread is not None:
            policy: Any = self
            training = self.training
            self.set_training_mode(False)
            with th.no_grad():
                policy.get_distribution(*unread)
            self.set_training_mode(training)
        return vars(self)["action_dist"]

    @action_dist.setter
    def action_dist(self, distribution: Distribution) -> None:
        # where other classes look for it, should the object get one
        vars(self).update(action_dist=distribution, _unread=None)

    def show_distribution(self, *observations_and_masks: Any) -> None:
        """Let ``action_dist`` be that of these observations, and masks if there are any, from now on."""
        # not by nn.Module, which would take as long as a layer
        vars(self)["_unread"] = observations_and_masks

    @contextmanager
    def acting_in_numpy(self, find_mlp: Callable[[Any], PlainMLP | None]) -> Iterator[None]:
        """
        Within this context, NumPy computes ``forward`` where it can.

        :param find_mlp: returns the layers of a policy, or None if it has other parts; asked at the first timestep, and
            after a parameter was replaced or got other memory
        """
        try:
            self._find_mlp, self._is_first_timestep = find_mlp, True
            yield
        finally:
            self._find_mlp, self._is_first_timestep, self._mlp = None, False, None

    # with action masks, these are the third argument
    def forward(
        self, obs: th.Tensor, deterministic: bool = False, *masks: Any
    ) -> tuple[th.Tensor, th.Tensor, th.Tensor]:
        find_mlp = self._find_mlp
        if find_mlp is None or deterministic or th.is_grad_enabled():
            return super().forward(obs, deterministic, *masks)
        if th.jit.is_tracing() or th.compiler.is_compiling():
            # which would record NumPy's results as constants
            return super().forward(obs, False, *masks)
        mlp = self._mlp
        if self._is_first_timestep or (mlp is not None and not mlp.is_current()):
            self._is_first_timestep = False
            mlp = self._mlp = find_mlp(self)
        acted = None if mlp is None else mlp.act(obs.numpy(), *masks)
        if acted is None:
            # other parts, or numbers that are not finite, of which torch raises its error
            return super().forward(obs, False, *masks)
        self.show_distribution(obs, *masks)
        return acted

    def __getstate__(self) -> dict[str, Any]:
        # the parameters of a copy have other memory; nn.Module leaves out the compiled call
        return {**super().__getstate__(), "_find_mlp": None, "_is_first_timestep": False, "_mlp": None}


class MlpPolicy(ActsInNumpy, ActorCriticPolicy):
    """
    Stable-Baselines3's MLP policy; arguments and results are the same. In rollouts of ``UATRPO`` and ``MatchedTRPO``,
    NumPy computes ``forward`` where the policy is plain. It draws the actions that Stable-Baselines3's would draw, and
    differs from it by rounding.
    """


def masks_of(policy: BasePolicy, timesteps: Any) -> dict[str, Any]:
    """:return: the timesteps' action masks, by the name that sb3-contrib's policies give them; nothing without masks"""
    # Stable-Baselines3's policies take none, whatever the buffer has
    masks = None if isinstance(policy, ActorCriticPolicy) else getattr(timesteps, "action_masks", None)
    return {} if masks is None else {"action_masks": masks}


def evaluate_actions(policy: ActorCriticPolicy, timesteps: Any) -> tuple[th.Tensor, ...]:
    """
    The policy's ``evaluate_actions``, called as PPO or MaskablePPO calls it.

    :param timesteps: a ``Batch``, or samples of a rollout buffer, with actions as the buffer holds them
    :return: values, log-probabilities and, if the policy has it, entropy
    :raises RuntimeError: the policy's own error, with the shapes of what it was called with
    """
    observations, actions = timesteps.observations, timesteps.actions
    if isinstance(policy.action_space, spaces.Discrete):
        actions = actions.long().flatten()
    try:
        return policy.evaluate_actions(observations, actions, **masks_of(policy, timesteps))  # type: ignore[return-value]
    except th.OutOfMemoryError:
        raise
    except RuntimeError as error:
        shapes = map_observations(lambda part: tuple(part.shape), observations)
        raise RuntimeError(
            f"{type(policy).__name__}.evaluate_actions failed for observations of shape {shapes} and actions of shape "
            f"{tuple(actions.shape)}: {error}"
        ) from error
