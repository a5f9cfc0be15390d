"""The standard MLP policy as two chains of layers on its own memory: what the fast path computes with."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch as th
from gymnasium import spaces
from stable_baselines3.common.distributions import CategoricalDistribution, DiagGaussianDistribution
from stable_baselines3.common.policies import ActorCriticPolicy
from stable_baselines3.common.preprocessing import is_image_space
from stable_baselines3.common.torch_layers import FlattenExtractor, MlpExtractor
from torch import nn

from sb3_uatrpo.core.array_mlp import IDENTITY, RELU, TANH, Activation, Array, ArrayLayer, ArrayMLP
from sb3_uatrpo.core.layers import Layer
from sb3_uatrpo.guard import is_as_built

#: What a standard MLP consists of. A subclass may do anything, so types have to be exactly these.
_PARTS = {ActorCriticPolicy, FlattenExtractor, MlpExtractor, nn.Flatten, nn.Sequential, nn.Linear, nn.Tanh, nn.ReLU}
_ACTIVATIONS: dict[type[nn.Module], Activation] = {nn.Tanh: TANH, nn.ReLU: RELU}
#: Numbers in a network's ∂h/∂z that cost next to nothing.
_SMALL = 4096


@dataclass(frozen=True)
class StandardMLP:
    """
    Actor and critic of a standard MLP policy. The arrays share the memory of the policy's parameters.

    :param policy: the policy
    :param actor: from the features to the Gaussian's means or to the logits
    :param critic: from the features to the value
    :param actor_params: the parameters of the actor's layers, and log σ of a Gaussian
    :param critic_params: the parameters of the critic's layers, in the order of its gradients
    :param log_std: log σ, shape ``(action_dim,)``; None for discrete actions
    """

    policy: ActorCriticPolicy
    actor: ArrayMLP
    critic: ArrayMLP
    actor_params: tuple[th.Tensor, ...]
    critic_params: tuple[th.Tensor, ...]
    log_std: Array | None

    @staticmethod
    def recognise(policy: Any) -> "StandardMLP | None":
        """
        :param policy: any policy
        :return: its layers, if it is Stable-Baselines3's own MLP policy on the CPU in float32, with Tanh or ReLU, for
            Box observations, not images, and Box or Discrete actions; None if it is not
        """
        if (
            type(policy) is not ActorCriticPolicy
            or type(policy.action_dist) not in (DiagGaussianDistribution, CategoricalDistribution)
            or not isinstance(policy.observation_space, spaces.Box)
            or (policy.normalize_images and is_image_space(policy.observation_space))
            or policy.squash_output
            or not {type(module) for module in policy.modules()} <= _PARTS
            or type(policy.mlp_extractor) is not MlpExtractor
            or any(type(part) is not FlattenExtractor for part in _features_extractors(policy))
            or not is_as_built(policy)
            or not all(
                param.device.type == "cpu" and param.dtype == th.float32 and param.is_contiguous() and param.numel() > 0
                for param in policy.parameters()
            )
        ):
            return None
        return StandardMLP.of_layers(policy)

    @staticmethod
    def of_layers(policy: Any) -> "StandardMLP | None":
        """
        :param policy: a policy with the parts of a standard one
        :return: its layers; None if they are not what they are in a standard MLP
        """
        extractor = policy.mlp_extractor
        actor = _linear_layers(extractor.policy_net, policy.action_net)
        critic = _linear_layers(extractor.value_net, policy.value_net)
        if actor is None or critic is None:
            return None
        of_actor, of_critic = (
            [param for linear, _ in layers for param in (linear.weight, linear.bias)] for layers in (actor, critic)
        )
        log_std = None
        if isinstance(policy.action_dist, DiagGaussianDistribution):
            # log σ must be a parameter, not a function of parameters, with a number for each action dimension
            log_std = policy._parameters.get("log_std")
            if log_std is None or log_std.shape != (actor[-1][0].out_features,):
                return None
            of_actor.append(log_std)
        # products need each parameter to occur only once
        if len({*of_actor, *of_critic}) < len(of_actor) + len(of_critic):
            return None
        numbers = None if log_std is None else log_std.detach().numpy()
        return StandardMLP(policy, _on_arrays(actor), _on_arrays(critic), tuple(of_actor), tuple(of_critic), numbers)

    def features(self, observations: Any) -> Array:
        """
        :param observations: observations of n steps, an array or a tensor on the CPU
        :return: what actor and critic start from, shape ``(n, i)``
        """
        array = np.asarray(observations)
        with np.errstate(all="ignore"):
            return array.reshape(len(array), -1).astype(self.actor.layers[0].weight.dtype, copy=False)

    def is_fast_with(self, size: int) -> bool:
        """
        Whether products layer by layer are faster than general ones, or small anyway. For each step and column they
        multiply with k numbers per output of each layer, in addition to the weights.

        :param size: k, size of the head
        """
        n_weights = sum(layer.weight.size for layer in self.actor.layers)
        return size * self.n_outputs <= max(_SMALL, n_weights)

    @property
    def n_outputs(self) -> int:
        """Number of outputs of all the actor's layers together."""
        return sum(len(layer.bias) for layer in self.actor.layers)

    def head(self, outputs: Array) -> th.Tensor:
        """
        :param outputs: the actor's outputs, shape ``(n, a)``
        :return: h, shape ``(n, k)``: the outputs, and log σ of a Gaussian; or normalised logits
        """
        network = th.from_numpy(outputs)
        if self.log_std is None:
            # H, and so the products, do not depend on a constant that is added to all logits
            return network.log_softmax(dim=1)
        return th.cat([network, th.from_numpy(self.log_std).expand_as(network)], dim=1)

    def linearize(
        self, observations: Any, params: tuple[th.Tensor, ...]
    ) -> tuple[th.Tensor, tuple[Layer, ...], int | None]:
        """
        :param observations: observations of n steps
        :param params: the parameters that make up θ, in the order of their coordinates; others are constants
        :return: h, shape ``(n, k)``; the layers from the features to the outputs; and the index of log σ in ``params``
        """
        places = {param: place for place, param in enumerate(params)}
        inputs = self.features(observations)
        layers = []
        with np.errstate(all="ignore"):
            outputs = self.actor.outputs(inputs)
            for i, (layer, y) in enumerate(zip(self.actor.layers, outputs, strict=True)):
                weight, bias = (places.get(param) for param in self.actor_params[2 * i : 2 * i + 2])
                slope = None if layer.activation is IDENTITY else th.from_numpy(layer.activation.slope(y))
                layers.append(Layer(weight, bias, th.from_numpy(inputs), th.from_numpy(layer.weight), slope))
                inputs = y
        log_std = None if self.log_std is None else places.get(self.actor_params[-1])
        return self.head(outputs[-1]), tuple(layers), log_std


def _features_extractors(policy: ActorCriticPolicy) -> list[nn.Module]:
    """All that the methods of a policy use."""
    shared = [policy.features_extractor] if policy.share_features_extractor else []
    return [policy.pi_features_extractor, policy.vf_features_extractor, *shared]


def _linear_layers(hidden: Any, last: Any) -> list[tuple[nn.Linear, Activation]] | None:
    """
    Linear layers, each with the activation after it; None if there is anything else, or a layer whose W or b is an
    attribute instead of a parameter, and so could be replaced unnoticed.
    """
    layers: list[tuple[nn.Linear, Activation]] = []
    for module in [*(hidden if type(hidden) is nn.Sequential else [hidden]), last]:
        if type(module) is nn.Linear and isinstance(module._parameters.get("bias"), nn.Parameter):
            if "weight" not in module._parameters:
                return None
            layers.append((module, IDENTITY))
        elif type(module) in _ACTIVATIONS and layers and layers[-1][1] is IDENTITY:
            layers[-1] = layers[-1][0], _ACTIVATIONS[type(module)]
        else:
            return None
    return layers if layers and layers[-1][0] is last else None


def _on_arrays(layers: Iterable[tuple[nn.Linear, Activation]]) -> ArrayMLP:
    return ArrayMLP(
        tuple(
            ArrayLayer(linear.weight.detach().numpy(), linear.bias.detach().numpy(), activation)
            for linear, activation in layers
        )
    )
