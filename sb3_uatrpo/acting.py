"""How the policy draws the actions of a rollout."""

import math
from collections.abc import Callable
from functools import partial

import torch as th
from gymnasium import spaces
from stable_baselines3.common.distributions import DiagGaussianDistribution
from stable_baselines3.common.policies import ActorCriticPolicy
from stable_baselines3.common.preprocessing import is_image_space
from stable_baselines3.common.torch_layers import FlattenExtractor
from stable_baselines3.common.type_aliases import PyTorchObs
from torch import nn
from torch.nn import functional as F

from sb3_uatrpo.plain_mlp import has_hooks, plain_actor

Sampler = Callable[[PyTorchObs], th.Tensor]


def sampler_of(policy: ActorCriticPolicy) -> Sampler:
    """
    What draws the actions of the current parameters, for one rollout.

    For the standard MLP policy with Gaussian actions this is the same arithmetic as the policy's own without what
    surrounds it: the same numbers, from the same random stream.

    :param policy: in evaluation mode
    :return: a function of observations; it raises what the policy itself raises if the actions are not finite
    """
    modules = plain_actor(policy)
    space = policy.observation_space
    as_floats = isinstance(space, spaces.Box) and not (policy.normalize_images and is_image_space(space))
    standard = (
        type(policy.pi_features_extractor) is FlattenExtractor
        and isinstance(policy.action_dist, DiagGaussianDistribution)
        and not any(map(has_hooks, policy.modules()))
    )
    if modules is not None and as_floats and standard:
        return _gaussian_mlp_sampler(policy, modules)
    return partial(_sample, policy)


def _sample(policy: ActorCriticPolicy, observations: PyTorchObs) -> th.Tensor:
    return policy.get_distribution(observations).get_actions()


def _gaussian_mlp_sampler(policy: ActorCriticPolicy, modules: list[nn.Module]) -> Sampler:
    layers = [
        partial(F.linear, weight=module.weight, bias=module.bias) if isinstance(module, nn.Linear) else module
        for module in modules
    ]
    with th.no_grad():
        std = policy.log_std.exp()

    def sample(observations: PyTorchObs) -> th.Tensor:
        assert isinstance(observations, th.Tensor)
        x = observations.float().flatten(1)
        for layer in layers:
            x = layer(x)
        actions = x + th.randn_like(x) * std
        # An action that is not a number must not reach a robot: the policy's own way says what is wrong.
        # The sum is one cheap number that is not finite unless all are.
        return actions if math.isfinite(actions.sum().item()) else _sample(policy, observations)

    return sample
