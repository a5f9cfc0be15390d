"""
Is it plain? Where policy, rollout buffer and optimizer are no more than Stable-Baselines3 makes them, NumPy computes on
the memory of the parameters: in rollouts, in the products with F̂ and Σ̂, and in the critic's epochs. Where users added
something, Stable-Baselines3's and torch's own code runs.

All questions of this kind are asked here, and gradient hooks are detached. Both need private names of torch, which
occur nowhere else.
"""

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch as th
from gymnasium import spaces
from stable_baselines3.common.buffers import DictRolloutBuffer, RolloutBuffer
from stable_baselines3.common.distributions import CategoricalDistribution, DiagGaussianDistribution, Distribution
from stable_baselines3.common.policies import ActorCriticPolicy, BasePolicy
from stable_baselines3.common.preprocessing import is_image_space
from stable_baselines3.common.torch_layers import FlattenExtractor, MlpExtractor
from torch import nn
from torch.nn.modules import module as torch_module
from torch.optim import optimizer as torch_optimizer

from sb3_uatrpo.buffers import LeanRolloutBuffer
from sb3_uatrpo.core.array_mlp import IDENTITY, RELU, TANH, Activation, ArrayLayer, ArrayMLP
from sb3_uatrpo.plain_mlp import PlainMLP
from sb3_uatrpo.policies import MlpPolicy

# Exact types, since a subclass may do anything.
_POLICIES: dict[type[BasePolicy], tuple[type[Distribution], ...]] = dict.fromkeys(
    (MlpPolicy, ActorCriticPolicy), (DiagGaussianDistribution, CategoricalDistribution)
)
_PARTS = {FlattenExtractor, MlpExtractor, nn.Flatten, nn.Sequential, nn.Linear, nn.Tanh, nn.ReLU}
_ACTIVATIONS: dict[type[nn.Module], Activation] = {nn.Tanh: TANH, nn.ReLU: RELU}
_BUFFERS: set[type[RolloutBuffer]] = {RolloutBuffer, DictRolloutBuffer, LeanRolloutBuffer}
_READING = ("get", "_get_samples", "to_torch")
_KNOWN_READING = {getattr(kind, name) for kind in _BUFFERS for name in _READING}


def admit(policies: Iterable[type[BasePolicy]], distribution: type[Distribution], buffers: Iterable[Any]) -> None:
    """
    Let policies and buffers of a library other than Stable-Baselines3 be plain, too.

    :param policies: exact types, whose networks are those of ``ActorCriticPolicy``
    :param distribution: of their actions
    :param buffers: exact types, which differ from Stable-Baselines3's in what they hold beside the same arrays
    """
    _POLICIES.update(dict.fromkeys(policies, (distribution,)))
    _BUFFERS.update(buffers)
    _KNOWN_READING.update(getattr(kind, name) for kind in buffers for name in _READING)


def as_plain_mlp(policy: Any) -> PlainMLP | None:
    """
    A policy's layers, if it is nothing else. This is asked at the first timestep of each rollout, after a timestep in
    which a parameter was replaced or got other memory, and once in each update.

    :param policy: any policy
    :return: its layers, if it is exactly an ``MlpPolicy`` or ``ActorCriticPolicy`` or one with action masks, of plain
        parts, on the CPU in float32, with Tanh or ReLU, Box observations that are not images, Box or Discrete actions
        and no gSDE, without hooks, not compiled, with no method hidden by an attribute, and with no parameter missing,
        empty or used twice; otherwise None
    """
    if type(policy) not in _POLICIES:
        return None
    # read so, it is not computed
    distribution = vars(policy)["action_dist"]
    modules, params = list(policy.modules()), list(policy.parameters())
    extractors = {policy.features_extractor, policy.pi_features_extractor, policy.vf_features_extractor}
    if (
        type(distribution) in _POLICIES[type(policy)]
        and isinstance(policy.observation_space, spaces.Box)
        and not (policy.normalize_images and is_image_space(policy.observation_space))
        and {type(module) for module in modules} <= _PARTS | {type(policy)}
        and all(type(part) is FlattenExtractor and type(part.flatten) is nn.Flatten for part in extractors)
        and type(policy.mlp_extractor) is MlpExtractor
        and all(param.device.type == "cpu" and param.dtype == th.float32 and param.is_contiguous() for param in params)
        and not th.is_autocast_enabled("cpu")
        and not _has_hooks(modules, params)
        and not any(_hides_a_method(part) for part in (*modules, distribution))
    ):
        return _mlp_on_memory(policy, type(distribution) is DiagGaussianDistribution)
    return None


def _hides_a_method(part: Any) -> bool:
    """Whether an attribute of the object has the name of a method of its class."""
    return any(callable(getattr(type(part), name, None)) for name in vars(part))


def _has_hooks(modules: list[nn.Module], params: list[nn.Parameter]) -> bool:
    """Whether a module or parameter has hooks, all modules have, or a module is compiled."""
    return (
        torch_module._has_any_global_hook()
        or any(
            module._forward_hooks
            or module._forward_pre_hooks
            or module._backward_hooks
            or module._backward_pre_hooks
            or module._compiled_call_impl
            for module in modules
        )
        or any(param._backward_hooks or param._post_accumulate_grad_hooks for param in params)
    )


def _mlp_on_memory(policy: Any, is_gaussian: bool) -> PlainMLP | None:
    extractor = policy.mlp_extractor
    actor = _linear_layers(extractor.policy_net, policy.action_net)
    critic = _linear_layers(extractor.value_net, policy.value_net)
    if actor is None or critic is None:
        return None
    actor_places, critic_places = (
        [(linear._parameters, name) for linear, _ in layers for name in ("weight", "bias")]
        for layers in (actor, critic)
    )
    if is_gaussian:
        # log σ must be a parameter, not a function of parameters, with a number for each action dimension
        actor_places.append((policy._parameters, "log_std"))
    actor_params, critic_params = (
        tuple(table.get(name) for table, name in places) for places in (actor_places, critic_places)
    )
    params: tuple[Any, ...] = actor_params + critic_params
    if (
        not all(type(param) is nn.Parameter and param.numel() > 0 for param in params)
        or len(set(params)) < len(params)
        or (is_gaussian and params[len(actor_params) - 1].shape != params[len(actor_params) - 2].shape)
    ):
        return None
    return PlainMLP(
        _on_arrays(actor),
        _on_arrays(critic),
        params[: len(actor_params)],
        params[len(actor_params) :],
        policy.log_std.detach().numpy() if is_gaussian else None,
        policy.action_space.shape,
        (*actor_places, *critic_places),
        list(map(th.Tensor.data_ptr, params)),
        np.full(len(actor[-1][0].bias), -0.5, np.float32),
    )


def _linear_layers(hidden: Any, last: Any) -> list[tuple[nn.Linear, Activation]] | None:
    """Linear layers, each with the activation after it; None if there is anything else."""
    layers: list[tuple[nn.Linear, Activation]] = []
    for module in [*(hidden if type(hidden) is nn.Sequential else [hidden]), last]:
        if type(module) is nn.Linear:
            layers.append((module, IDENTITY))
        elif type(module) in _ACTIVATIONS and layers and layers[-1][1] is IDENTITY:
            layers[-1] = layers[-1][0], _ACTIVATIONS[type(module)]
        else:
            return None
    return layers if layers and layers[-1][0] is last else None


def _on_arrays(layers: list[tuple[nn.Linear, Activation]]) -> ArrayMLP:
    return ArrayMLP(
        tuple(
            ArrayLayer(linear.weight.detach().numpy(), linear.bias.detach().numpy(), activation)
            for linear, activation in layers
        )
    )


def replaced_methods(buffer: RolloutBuffer) -> set[str]:
    """:return: those of ``get``, ``_get_samples`` and ``to_torch`` that are the user's own"""
    return {name for name in _READING if name in vars(buffer) or getattr(type(buffer), name) not in _KNOWN_READING}


def is_plain_buffer(buffer: RolloutBuffer) -> bool:
    """:return: whether the buffer's memory and the order of its minibatches are those of Stable-Baselines3"""
    return type(buffer) in _BUFFERS and not replaced_methods(buffer)


def is_plain_optimizer(optimizer: th.optim.Optimizer) -> bool:
    """:return: whether the optimizer takes gradients from anywhere, and nobody watches its steps"""
    return (
        type(optimizer) in (th.optim.Adam, th.optim.AdamW)
        and not {"step", "zero_grad"} & vars(optimizer).keys()
        and not (optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks)
        and not (torch_optimizer._global_optimizer_pre_hooks or torch_optimizer._global_optimizer_post_hooks)
    )


class GradientHooks:
    """
    The hooks on gradients of a policy: those of its parameters, and full backward hooks of its modules. Truthy if there
    are any, global ones included.

    :param policy: the policy that they are attached to
    """

    def __init__(self, policy: ActorCriticPolicy) -> None:
        self.are_global = bool(torch_module._global_backward_hooks or torch_module._global_backward_pre_hooks)
        owners: list[Any] = [*policy.parameters(), *policy.modules()]
        self._hooks = [
            (owner, name, hooks)
            for owner in owners
            for name in ("_backward_hooks", "_backward_pre_hooks")
            if (hooks := getattr(owner, name, None))
        ]

    def __bool__(self) -> bool:
        return self.are_global or bool(self._hooks)

    @contextmanager
    def attached(self, are_attached: bool) -> Iterator[None]:
        """Attach or detach them, and undo it afterwards. Global ones stay, since other threads may rely on them."""
        try:
            self._attach(are_attached)
            yield
        finally:
            self._attach(not are_attached)

    def _attach(self, are_attached: bool) -> None:
        for owner, name, hooks in self._hooks:
            # without hooks, torch expects None in a parameter, and an empty dict in a module
            without: Any = None if isinstance(owner, th.Tensor) else OrderedDict()
            setattr(owner, name, hooks if are_attached else without)
