"""Can an update use this policy? Asked when a model is made, on timesteps that are made up."""

import inspect
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch as th
from gymnasium import spaces
from stable_baselines3.common.policies import ActorCriticPolicy
from stable_baselines3.common.preprocessing import get_action_dim, get_obs_shape
from stable_baselines3.common.utils import obs_as_tensor
from torch.nn.parameter import is_lazy

from sb3_uatrpo.actor import Actor, UnsupportedNetworkError
from sb3_uatrpo.batch import Batch
from sb3_uatrpo.core.layers import LayeredLinearization
from sb3_uatrpo.families import UnsupportedDistributionError


def check_policy(policy: ActorCriticPolicy) -> tuple[int, Exception | None]:
    """
    :param policy: of a new model
    :return: d, the number of actor parameters, as far as it is known before the first rollout, or 0 and the error that
        the policy raised, since it may refuse timesteps that are made up
    :raises UnsupportedDistributionError: if the policy's action distribution is not supported; a ``ValueError``
    :raises ValueError: if the policy is recurrent, or torch cannot differentiate it twice
    """
    needed = [
        name
        for name, parameter in inspect.signature(policy.evaluate_actions).parameters.items()
        if parameter.default is parameter.empty and parameter.kind is parameter.POSITIONAL_OR_KEYWORD
    ]
    if len(needed) > 2:
        raise ValueError(
            "policy: evaluate_actions must need nothing but observations and actions, since recurrent policies are not "
            f"supported, but that of {type(policy).__name__} needs {', '.join(needed)}"
        )
    actor = Actor(policy)
    with _unchanged_buffers(policy), actor.update_mode():
        try:
            timesteps = _two_timesteps(policy)
            actor.find_params(timesteps)
        except (UnsupportedDistributionError, UnsupportedNetworkError, Warning):
            raise
        except Exception as error:
            # the first update settles d
            return 0, error
        if any(param.is_complex() for param in actor.params):
            raise ValueError("policy: the actor's parameters must be real numbers, but some are complex")
        _check_products(actor, timesteps)
    return actor.n_params, None


def _check_products(actor: Actor, timesteps: Batch) -> None:
    """
    Warn if JX misses parameters that J'U has, because the backward pass of some operation records no gradients. F̂ and
    Σ̂ miss them too.

    :raises UnsupportedNetworkError: if torch cannot differentiate the network twice, or JX misses all parameters
    """
    linearization = actor.linearize(timesteps)
    # layer by layer, there is nothing that could be missed
    if not actor.params or isinstance(linearization, LayeredLinearization):
        return
    try:
        missed = linearization.missed_params()
    except th.OutOfMemoryError:
        raise
    except RuntimeError as error:
        reason = str(error).partition("\n")[0].rstrip(".")
        raise UnsupportedNetworkError(
            f"policy: its network must be differentiable twice, but torch says: {reason}."
        ) from error
    advice = "Look for operations whose backward pass records no gradients, such as once_differentiable."
    if missed and len(missed) == len(actor.params):
        raise UnsupportedNetworkError(
            f"policy: its network must be differentiable twice, but no parameter can be. {advice}"
        )
    if missed:
        names: dict[th.Tensor, str] = {param: name for name, param in actor.policy.named_parameters()}
        warnings.warn(
            f"The trust region misses {', '.join(names[actor.params[i]] for i in missed)}: the policy cannot be "
            f"differentiated twice there. {advice}",
            stacklevel=5,
        )


def _two_timesteps(policy: ActorCriticPolicy) -> Batch:
    space = policy.observation_space
    observations = (
        {key: _two_observations(part) for key, part in space.items()}
        if isinstance(space, spaces.Dict)
        else _two_observations(space)
    )
    nothing = th.zeros(2, device=policy.device)
    actions = th.zeros(2, get_action_dim(policy.action_space), device=policy.device)
    return Batch(obs_as_tensor(observations, policy.device), actions, nothing, nothing)


def _two_observations(space: spaces.Space) -> np.ndarray:
    """Two observations as the policy gets them. Not all are zero: some functions have no derivative there."""
    shape = (2, *get_obs_shape(space))
    if not isinstance(space, spaces.Box):
        return np.zeros(shape, space.dtype)
    numbers = np.arange(np.prod(shape)).reshape(shape)
    values = 0.25 + 0.2 * np.cos(numbers) if np.issubdtype(space.dtype, np.floating) else numbers % 3
    return values.clip(space.low, space.high).astype(space.dtype)


@contextmanager
def _unchanged_buffers(policy: ActorCriticPolicy) -> Iterator[None]:
    """Restore the buffers afterwards: networks count or average in them what they see within this context."""
    kept = [
        (module, name, old, old.clone())
        for module in policy.modules()
        for name, old in module.named_buffers(recurse=False)
        # a lazy one has no numbers yet, and evaluation mode leaves it those that it starts with
        if not is_lazy(old)
    ]
    try:
        yield
    finally:
        with th.no_grad():
            for module, name, old, numbers in kept:
                setattr(module, name, old.copy_(numbers))
