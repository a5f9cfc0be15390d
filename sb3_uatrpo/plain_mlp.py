"""The standard MLP policy, taken apart: what can be done faster for it is exact for it alone."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch as th
from stable_baselines3.common.distributions import (
    BernoulliDistribution,
    CategoricalDistribution,
    DiagGaussianDistribution,
    MultiCategoricalDistribution,
)
from stable_baselines3.common.policies import ActorCriticPolicy
from stable_baselines3.common.torch_layers import MlpExtractor
from torch import nn

from sb3_uatrpo.core.layers import Layer

_DISTRIBUTIONS = (
    BernoulliDistribution,
    CategoricalDistribution,
    DiagGaussianDistribution,
    MultiCategoricalDistribution,
)


def plain_actor(policy: ActorCriticPolicy) -> list[nn.Module] | None:
    """
    The actor's modules if it is a plain chain: features and activations without parameters, and linear layers.

    :param policy: any policy
    :return: linear layers and activations in the order in which they are applied, or None for any other actor
    """
    if (
        type(policy).get_distribution is not ActorCriticPolicy.get_distribution
        or type(policy)._get_action_dist_from_latent is not ActorCriticPolicy._get_action_dist_from_latent
        or any(True for _ in policy.pi_features_extractor.parameters())
        or type(policy.mlp_extractor) is not MlpExtractor
        or type(policy.action_dist) not in _DISTRIBUTIONS
    ):
        return None
    modules = [*policy.mlp_extractor.policy_net, policy.action_net]
    linear = [module for module in modules if type(module) is nn.Linear]
    params = [param for module in modules for param in module.parameters()]
    of_linear = [param for module in linear for param in module.parameters()]
    # each layer in one place, each parameter in one layer, and nobody in between
    plain = len(set(params)) == len(of_linear) == len(params) and not any(map(has_hooks, linear))
    return modules if plain else None


def has_hooks(module: nn.Module) -> bool:
    """Whether somebody listens to what the module takes and gives, and might change it."""
    return bool(module._forward_hooks or module._forward_pre_hooks)


@contextmanager
def layers_recorded(policy: ActorCriticPolicy, params: tuple[th.Tensor, ...]) -> Iterator[list[Layer]]:
    """
    Records what goes into and comes out of the actor's linear layers while the policy is evaluated once.

    :param policy: any policy
    :param params: the actor's parameters
    :return: filled when the context ends; left empty for actors that are no plain chain
    """
    layers: list[Layer] = []
    modules = plain_actor(policy)
    if modules is None:
        yield layers
        return
    places = {param: place for place, param in enumerate(params)}

    def record(module: nn.Module, inputs: tuple[th.Tensor, ...], outputs: th.Tensor) -> None:
        assert isinstance(module, nn.Linear)
        weight, bias = places.get(module.weight), places.get(module.bias)
        if weight is not None or bias is not None:
            layers.append(Layer(weight, bias, inputs[0].detach(), outputs))

    def record_log_std(module: nn.Module, inputs: tuple[th.Tensor, ...], means: th.Tensor) -> None:
        # h = (μ, log σ), and log σ is the same parameter at every step
        n, size = means.shape
        identity = th.eye(2 * size, dtype=means.dtype, device=means.device)[:, size:].expand(n, 2 * size, size)
        layers.append(Layer(None, places[policy.log_std], inputs[0].detach(), means, identity))

    hooks = [module.register_forward_hook(record) for module in modules if isinstance(module, nn.Linear)]
    if isinstance(policy.action_dist, DiagGaussianDistribution) and policy.log_std in places:
        hooks.append(policy.action_net.register_forward_hook(record_log_std))
    try:
        yield layers
    finally:
        for hook in hooks:
            hook.remove()
