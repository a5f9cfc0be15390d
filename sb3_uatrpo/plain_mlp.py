"""
The one fast path: the standard MLP policy, taken apart into its tensors.

The faster code for acting and evaluation in rollouts, for products with J and for the critic's gradients is correct for
this network alone. So the network is recognised by its structure, down to the exact type and methods of each layer, and
then checked by value: its outputs are compared with the policy's own, at the observations that each rollout starts from
and at those of each update. A policy that is not recognised, or differs, takes the general code path.
"""

import copy
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch as th
from stable_baselines3.common.distributions import (
    BernoulliDistribution,
    CategoricalDistribution,
    DiagGaussianDistribution,
    Distribution,
    MultiCategoricalDistribution,
)
from stable_baselines3.common.policies import ActorCriticPolicy, BaseModel
from stable_baselines3.common.torch_layers import (
    BaseFeaturesExtractor,
    CombinedExtractor,
    FlattenExtractor,
    MlpExtractor,
)
from stable_baselines3.common.type_aliases import PyTorchObs
from torch import nn
from torch.nn import functional as F

from sb3_uatrpo.core.array_mlp import Array, ArrayLayer, ArrayMLP
from sb3_uatrpo.core.layers import Layer
from sb3_uatrpo.heads import Head
from sb3_uatrpo.hooks import forward_hooks

#: The methods of a distribution that acting and updates call.
DISTRIBUTION_METHODS = ("sample", "mode", "get_actions", "log_prob", "proba_distribution")
#: The methods of an MlpExtractor that a policy calls.
EXTRACTOR_METHODS = ("forward_actor", "forward_critic")
#: Elementwise activations that have no parameters.
_ACTIVATIONS = (
    nn.CELU,
    nn.ELU,
    nn.GELU,
    nn.Hardswish,
    nn.Hardtanh,
    nn.Identity,
    nn.LeakyReLU,
    nn.Mish,
    nn.ReLU,
    nn.ReLU6,
    nn.SELU,
    nn.SiLU,
    nn.Sigmoid,
    nn.Softplus,
    nn.Softsign,
    nn.Tanh,
)


def _methods(kind: type, names: Iterable[str]) -> list[Any]:
    return [getattr(kind, name, None) for name in names]


#: Stable-Baselines3's own methods, recorded before anyone can replace them in its classes.
_DISTRIBUTIONS = {
    kind: _methods(kind, DISTRIBUTION_METHODS)
    for kind in (
        BernoulliDistribution,
        CategoricalDistribution,
        DiagGaussianDistribution,
        MultiCategoricalDistribution,
    )
}
#: The same for the policy: a policy that redefines one of these methods may do more than its layers do.
POLICY_METHODS = (
    "__call__",
    "forward",
    "get_distribution",
    "evaluate_actions",
    "predict_values",
    "extract_features",
    "_get_action_dist_from_latent",
)
_POLICY = _methods(ActorCriticPolicy, POLICY_METHODS)
_EXTRACTOR = _methods(MlpExtractor, EXTRACTOR_METHODS)
#: And for the modules that a standard MLP consists of.
_FORWARD: dict[type[nn.Module], Any] = {
    kind: kind.forward
    for kind in (*_ACTIVATIONS, nn.Linear, nn.Sequential, nn.Flatten, FlattenExtractor, CombinedExtractor, MlpExtractor)
}
_EXTRACT_FEATURES = BaseModel.extract_features
#: Largest difference that counts as rounding, relative to the largest output: far above the effect of another order of
#: summation in float32, and far below that of any deliberate change.
_RELATIVE_TOLERANCE = 1e-4
#: Numbers in a network's ∂h/∂z that cost next to nothing.
_SMALL = 4096


@dataclass(frozen=True)
class Dense:
    """
    A linear layer and the activations that follow it.

    :param weight: W, shape ``(o, i)``
    :param bias: b, shape ``(o,)``, if there is one
    :param activations: applied one after the other to Wx + b
    """

    weight: th.Tensor
    bias: th.Tensor | None
    activations: tuple[nn.Module, ...]

    def activate(self, outputs: th.Tensor) -> th.Tensor:
        """
        :param outputs: Wx + b; not changed, even by in-place activations
        :return: the next layer's input
        """
        for activation in self.activations:
            outputs = activation.forward(outputs.clone() if getattr(activation, "inplace", False) else outputs)
        return outputs

    def __call__(self, inputs: th.Tensor) -> th.Tensor:
        return self.activate(F.linear(inputs, self.weight, self.bias))

    @property
    def params(self) -> list[th.Tensor]:
        """W, and b if there is one."""
        return [self.weight] if self.bias is None else [self.weight, self.bias]


@dataclass(frozen=True)
class PlainMLP:
    """
    Actor and critic of a standard MLP policy as two chains of dense layers.

    :param policy: the policy that the layers come from
    :param actor: from the features to the Gaussian's means or to the logits
    :param critic: from the features to the value
    :param log_std: log σ of the Gaussian, shape ``(action_dim,)``; None for other distributions
    :param action_dist: a copy of the policy's distribution
    """

    policy: ActorCriticPolicy
    actor: tuple[Dense, ...]
    critic: tuple[Dense, ...]
    log_std: th.Tensor | None
    action_dist: Distribution

    @staticmethod
    def recognise(policy: Any) -> "PlainMLP | None":
        """
        :param policy: any policy
        :return: the policy's layers, or None if it is not a standard MLP
        """
        if (
            _methods(type(policy), POLICY_METHODS) != _POLICY
            or vars(policy).keys() & set(POLICY_METHODS)
            or BaseModel.extract_features is not _EXTRACT_FEATURES
        ):
            return None
        extractor = policy.mlp_extractor
        if (
            type(extractor) is not MlpExtractor
            or _methods(MlpExtractor, EXTRACTOR_METHODS) != _EXTRACTOR
            or vars(extractor).keys() & set(EXTRACTOR_METHODS)
            or any(type(net) is not nn.Sequential for net in (extractor.policy_net, extractor.value_net))
            or _DISTRIBUTIONS.get(type(policy.action_dist)) != _methods(type(policy.action_dist), DISTRIBUTION_METHODS)
            or any(hasattr(type(policy.action_dist), name) for name in vars(policy.action_dist))
            or any(True for features in _features_extractors(policy) for _ in features.parameters())
        ):
            return None
        actor = _chain([*extractor.policy_net, policy.action_net])
        critic = _chain([*extractor.value_net, policy.value_net])
        around = (policy, extractor, extractor.policy_net, extractor.value_net)
        if actor is None or critic is None or not all(map(_is_unmodified, around)):
            return None
        log_std = None
        if isinstance(policy.action_dist, DiagGaussianDistribution):
            # log σ must be a parameter, not a buffer or a function of parameters, with a number per action dimension
            log_std = policy._parameters.get("log_std")
            if log_std is None or log_std.shape != (len(actor[-1].weight),):
                return None
        mlp = PlainMLP(policy, actor, critic, log_std, copy.copy(policy.action_dist))
        # products need each parameter to occur only once
        return mlp if len(set(mlp.actor_params)) == len(mlp.actor_params) else None

    @property
    def actor_params(self) -> list[th.Tensor]:
        """Everything that the action distribution depends on."""
        params = [param for dense in self.actor for param in dense.params]
        return params if self.log_std is None else [*params, self.log_std]

    @property
    def critic_params(self) -> list[th.Tensor]:
        """Everything that the value depends on."""
        return [param for dense in self.critic for param in dense.params]

    @property
    def runs_on_arrays(self) -> bool:
        """
        Whether NumPy can compute on the memory of the parameters, on features that actor and critic share: the
        observation of each step by itself, flattened. Nothing may be compiled or have a hook.
        """
        flattened = {_flattened(extractor) for extractor in _features_extractors(self.policy)}
        return (
            len(flattened) == 1
            and None not in flattened
            and all(
                param.device.type == "cpu" and param.dtype == th.float32 and param.is_contiguous() and param.numel() > 0
                for param in (*self.actor_params, *self.critic_params)
            )
            and not any(module._compiled_call_impl for module in self.policy.modules())
        )

    def copied(self) -> "PlainMLP":
        """
        :return: a copy with its own parameters and activations, without gradients
        """
        copies = {param: param.detach().clone() for param in (*self.actor_params, *self.critic_params)}

        def chain(denses: tuple[Dense, ...]) -> tuple[Dense, ...]:
            return tuple(
                Dense(
                    copies[dense.weight],
                    None if dense.bias is None else copies[dense.bias],
                    tuple(map(_frozen, dense.activations)),
                )
                for dense in denses
            )

        log_std = None if self.log_std is None else copies[self.log_std]
        return replace(self, actor=chain(self.actor), critic=chain(self.critic), log_std=log_std)

    def features(self, observations: PyTorchObs) -> th.Tensor:
        """
        :param observations: observations of n steps
        :return: the features that the actor starts from, and with ``runs_on_arrays`` the critic, too; shape ``(n, i)``
        """
        return BaseModel.extract_features(self.policy, observations, self.policy.pi_features_extractor)

    def outputs(self, features: th.Tensor) -> th.Tensor:
        """
        :param features: features of n steps, shape ``(n, i)``
        :return: the Gaussian's means or the logits, shape ``(n, o)``
        """
        return _through(self.actor, features)

    def distribution(self, outputs: th.Tensor) -> Distribution:
        """
        :param outputs: the actor's outputs, shape ``(n, o)``
        :return: the policy's action distribution
        """
        return _with_parameters(copy.copy(self.action_dist), outputs, self.log_std)

    def values(self, features: th.Tensor) -> th.Tensor:
        """
        :param features: features of n steps, shape ``(n, i)``
        :return: the critic's values, shape ``(n, 1)``
        """
        return _through(self.critic, features)

    @property
    def n_outputs(self) -> int:
        """Number of outputs of all the actor's layers together."""
        return sum(len(dense.weight) for dense in self.actor)

    def is_fast_with(self, size: int) -> bool:
        """
        Whether products layer by layer are faster than general ones, or small anyway. For each step and column they
        multiply with k numbers per output of each layer, in addition to the weights.

        :param size: k, size of the head
        """
        return size * self.n_outputs <= max(_SMALL, sum(dense.weight.numel() for dense in self.actor))

    def linearize(
        self, observations: PyTorchObs, params: tuple[th.Tensor, ...], head: Head
    ) -> tuple[th.Tensor, tuple[th.Tensor, ...], tuple[Layer, ...]]:
        """
        The head in a graph of its own, without the policy's hooks.

        :param observations: observations of n steps
        :param params: the parameters that make up θ, in the order of their coordinates; others are constants
        :param head: turns a distribution into its head vector
        :return: h, shape ``(n, k)``; the leaves of its graph, one for each parameter; and its layers
        """
        leaves = {param: param.detach().requires_grad_() for param in params}
        places = {param: place for place, param in enumerate(params)}

        def leaf(param: th.Tensor | None) -> th.Tensor | None:
            return None if param is None else leaves.get(param, param.detach())

        inputs = self.features(observations)
        layers = []
        for dense in self.actor:
            outputs = F.linear(inputs, leaf(dense.weight), leaf(dense.bias))  # type: ignore[arg-type]
            weight, bias = places.get(dense.weight), None if dense.bias is None else places.get(dense.bias)
            if weight is not None or bias is not None:
                layers.append(Layer(weight, bias, inputs.detach(), outputs))
            last, inputs = inputs, dense.activate(outputs)
        if self.log_std in leaves:
            # h = (μ, log σ), and log σ is the same parameter at every step
            n, size = inputs.shape
            identity = th.eye(2 * size, dtype=inputs.dtype, device=inputs.device)[:, size:].expand(n, 2 * size, size)
            # a layer without W and with a known D: its inputs and outputs are not used
            layers.append(Layer(None, places[self.log_std], last.detach(), inputs, identity))
        distribution = copy.copy(self.policy.action_dist)
        vector = head.vector(_with_parameters(distribution, inputs, leaf(self.log_std)))
        return vector, tuple(leaves[param] for param in params), tuple(layers)


def _features_extractors(policy: ActorCriticPolicy) -> list[BaseFeaturesExtractor]:
    """All that the methods of a policy use."""
    extractors = [policy.pi_features_extractor, policy.vf_features_extractor]
    return [*extractors, policy.features_extractor] if policy.share_features_extractor else extractors


def _flattened(extractor: BaseFeaturesExtractor) -> tuple[str, ...] | None:
    """What an extractor flattens: the keys of a dict, or nothing else than the observation; None if it does more."""
    kind = type(extractor)
    if kind not in (FlattenExtractor, CombinedExtractor) or not all(
        type(module) in (kind, nn.Flatten, nn.ModuleDict) and _is_unmodified(module) for module in extractor.modules()
    ):
        return None
    return tuple(extractor.extractors) if isinstance(extractor, CombinedExtractor) else ()


def _through(chain: Iterable[Dense], inputs: th.Tensor) -> th.Tensor:
    for dense in chain:
        inputs = dense(inputs)
    return inputs


def _chain(modules: Iterable[nn.Module]) -> tuple[Dense, ...] | None:
    """
    Linear layers, each with the activations after it; None if there is anything else, or a layer whose W or b is an
    attribute instead of a parameter, and so could be replaced unnoticed.
    """
    found: list[tuple[nn.Linear, list[nn.Module]]] = []
    for module in modules:
        if not _is_unmodified(module):
            return None
        if type(module) is nn.Linear and {"weight", "bias"} <= module._parameters.keys():
            found.append((module, []))
        elif type(module) in _ACTIVATIONS and found:
            found[-1][1].append(module)
        else:
            return None
    return tuple(Dense(linear.weight, linear.bias, tuple(activations)) for linear, activations in found)


def _frozen(activation: nn.Module) -> nn.Module:
    """A copy that stays as it is, even if the class is patched."""
    duplicate = copy.copy(activation)
    duplicate.forward = duplicate.forward
    return duplicate


def _is_unmodified(module: nn.Module) -> bool:
    """Whether a module does what its class once defined: no forward hooks, and no ``forward`` of its own or patched."""
    kind = type(module)
    return (
        not any(forward_hooks(module))
        and "forward" not in vars(module)
        and _FORWARD.get(kind, kind.forward) is kind.forward
    )


def as_arrays(chain: Iterable[Dense]) -> ArrayMLP:
    """
    :param chain: layers on the CPU
    :return: the same layers on arrays that share the memory of their parameters
    """
    layers = []
    for dense in chain:
        bias = None if dense.bias is None else dense.bias.detach().numpy()
        layers.append(ArrayLayer(dense.weight.detach().numpy(), bias, *_on_arrays(dense.activations)))
    return ArrayMLP(tuple(layers))


def _on_arrays(
    activations: tuple[nn.Module, ...],
) -> tuple[Callable[[Array], Array], Callable[[Array], Any] | None]:
    """One layer's activations as a function of an array, and their slope as a function of the output, if known."""
    if not activations:
        return (lambda array: array), (lambda output: 1.0)
    if len(activations) == 1 and type(activations[0]) is nn.Tanh:
        return (lambda array: np.tanh(array, out=array)), (lambda output: 1.0 - output * output)
    if len(activations) == 1 and type(activations[0]) is nn.ReLU:
        return (lambda array: np.maximum(array, 0.0, out=array)), (lambda output: output > 0.0)

    def by_torch(array: Array) -> Array:
        tensor = th.from_numpy(array)
        for activation in activations:
            tensor = activation.forward(tensor)
        return tensor.numpy()

    return by_torch, None


def _with_parameters(distribution: Distribution, outputs: th.Tensor, log_std: th.Tensor | None) -> Distribution:
    """The distribution with the actor's outputs as its parameters."""
    parameters = (outputs,) if log_std is None else (outputs, log_std)
    return distribution.proba_distribution(*parameters)


def size_of_terms(chain: Iterable[Dense], features: th.Tensor) -> float:
    """
    :param chain: layers
    :param features: features of n steps, shape ``(n, i)``
    :return: the largest ``|W|·|h| + |b|`` of the last layer, h being its input. Rounding errors are relative to this,
        even where terms cancel and the output is close to zero.
    """
    *hidden, last = chain
    bias = None if last.bias is None else last.bias.abs()
    terms = F.linear(_through(hidden, features).abs(), last.weight.abs(), bias)
    return terms.nan_to_num(0.0, 0.0).amax().item() if terms.numel() else 0.0


def same_but_for_rounding(ours: th.Tensor, theirs: th.Tensor, scale: float = 0.0) -> bool:
    """
    :param ours: outputs of the fast path
    :param theirs: the policy's own
    :param scale: size of the numbers that the outputs are sums of; at least the largest output is assumed
    :return: whether they agree up to rounding
    """
    if ours.shape != theirs.shape:
        return False
    ours, theirs = ours.double(), theirs.double()
    if theirs.numel():
        scale = max(scale, theirs.abs().nan_to_num(0.0, 0.0).amax().item())
    return th.allclose(ours, theirs, rtol=_RELATIVE_TOLERANCE, atol=_RELATIVE_TOLERANCE * scale, equal_nan=True)


class FastPath:
    """Decides whether a policy is treated as a plain MLP, and warns once if it looks like one but is not."""

    def __init__(self) -> None:
        self._has_warned = False

    def is_proven(self, differences: list[str]) -> bool:
        """
        :param differences: names of the outputs that differ beyond rounding; the first time, a warning lists them
        :return: whether there are none
        """
        if differences and not self._has_warned:
            self._has_warned = True
            warnings.warn(
                "The policy looks like a standard MLP, but its layers alone do not reproduce "
                f"{' and '.join(differences)} that the policy itself computes. The slower general code path is used.",
                stacklevel=4,
            )
        return not differences
