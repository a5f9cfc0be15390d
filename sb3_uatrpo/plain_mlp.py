"""
The one fast path: the standard MLP policy, taken apart into its tensors.

What serves it faster than the policy itself (acting and evaluation in rollouts, products with J in updates) is exact
for this network alone. So it is recognised by its structure, down to the exact type of each layer, and then proven by
value: at each rollout and at each update its outputs are compared with the policy's own on real observations. Whatever
is not recognised, or differs, takes the general way.
"""

import copy
import math
import operator
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch as th
from gymnasium import spaces
from stable_baselines3.common.distributions import (
    BernoulliDistribution,
    CategoricalDistribution,
    DiagGaussianDistribution,
    Distribution,
    MultiCategoricalDistribution,
)
from stable_baselines3.common.policies import ActorCriticPolicy, BaseModel
from stable_baselines3.common.preprocessing import is_image_space
from stable_baselines3.common.torch_layers import CombinedExtractor, FlattenExtractor, MlpExtractor
from stable_baselines3.common.type_aliases import PyTorchObs
from torch import nn
from torch.nn import functional as F
from torch.nn.modules import module as torch_module

from sb3_uatrpo.core.layers import Layer
from sb3_uatrpo.heads import Head

_DISTRIBUTIONS = (
    BernoulliDistribution,
    CategoricalDistribution,
    DiagGaussianDistribution,
    MultiCategoricalDistribution,
)
#: Without parameters, and each number that comes out depends on one that goes in.
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
#: A policy that changes one of these may do more than its layers do.
_POLICY_METHODS = (
    "__call__",
    "forward",
    "get_distribution",
    "evaluate_actions",
    "predict_values",
    "extract_features",
    "_get_action_dist_from_latent",
)
#: Rounding of sums in another order, for outputs of the size of the largest: far above it for float32, far below any
#: change that somebody makes on purpose.
_RELATIVE_TOLERANCE = 1e-4


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
        :param outputs: Wx + b, which is not changed, also by activations that work in place
        :return: the next layer's input
        """
        for activation in self.activations:
            outputs = activation(outputs.clone() if getattr(activation, "inplace", False) else outputs)
        return outputs

    def __call__(self, inputs: th.Tensor) -> th.Tensor:
        return self.activate(F.linear(inputs, self.weight, self.bias))

    def operations(self) -> Iterator[Callable[[th.Tensor], th.Tensor]]:
        """
        :return: functions that do the same one after the other; their inputs are not needed any more
        """
        yield partial(F.linear, weight=self.weight, bias=self.bias)
        yield from (activation.forward for activation in self.activations)

    @property
    def params(self) -> list[th.Tensor]:
        return [self.weight] if self.bias is None else [self.weight, self.bias]


@dataclass(frozen=True)
class PlainMLP:
    """
    Actor and critic of a standard MLP policy as two chains of dense layers, which share no more than their inputs.

    :param policy: where it comes from
    :param actor: from the features to the Gaussian's means or to the logits
    :param critic: from the features to the value
    :param log_std: of the Gaussian, shape ``(action_dim,)``; None for other distributions
    """

    policy: ActorCriticPolicy
    actor: tuple[Dense, ...]
    critic: tuple[Dense, ...]
    log_std: th.Tensor | None

    @staticmethod
    def recognise(policy: Any) -> "PlainMLP | None":
        """
        :param policy: any policy
        :return: the policy taken apart, or None if it is no standard MLP
        """
        if not all(
            getattr(type(policy), name, None) is getattr(ActorCriticPolicy, name) and name not in vars(policy)
            for name in _POLICY_METHODS
        ):
            return None
        extractor = policy.mlp_extractor
        features_extractors = (policy.pi_features_extractor, policy.vf_features_extractor)
        if (
            type(extractor) is not MlpExtractor
            or {"forward_actor", "forward_critic"} & vars(extractor).keys()
            or any(type(net) is not nn.Sequential for net in (extractor.policy_net, extractor.value_net))
            or type(policy.action_dist) not in _DISTRIBUTIONS
            or any(True for features in features_extractors for _ in features.parameters())
        ):
            return None
        actor = _chain([*extractor.policy_net, policy.action_net])
        critic = _chain([*extractor.value_net, policy.value_net])
        around = (policy, extractor, extractor.policy_net, extractor.value_net)
        if actor is None or critic is None or not all(map(_is_left_alone, around)):
            return None
        log_std = policy.log_std if isinstance(policy.action_dist, DiagGaussianDistribution) else None
        mlp = PlainMLP(policy, actor, critic, log_std)
        # products need each parameter in one place
        return mlp if len(set(mlp.actor_params)) == len(mlp.actor_params) else None

    @property
    def actor_params(self) -> list[th.Tensor]:
        """Everything that the action distribution depends on."""
        params = [param for dense in self.actor for param in dense.params]
        return params if self.log_std is None else [*params, self.log_std]

    @property
    def n_outputs(self) -> int:
        """Outputs of all of the actor's layers."""
        return sum(len(dense.weight) for dense in self.actor)

    def linearize(
        self, observations: PyTorchObs, params: tuple[th.Tensor, ...], head: Head
    ) -> tuple[th.Tensor, tuple[th.Tensor, ...], tuple[Layer, ...]]:
        """
        The head with a graph of its own, on which no hook of the policy listens.

        :param observations: of n steps
        :param params: those of the actor's parameters that count, in the order of their coordinates
        :param head: what makes the head vector of a distribution
        :return: h, shape ``(n, k)``; the leaves of its graph, one for each parameter; and its layers
        """
        leaves = {param: param.detach().requires_grad_() for param in params}
        places = {param: place for place, param in enumerate(params)}

        def leaf(param: th.Tensor | None) -> th.Tensor | None:
            return None if param is None else leaves.get(param, param.detach())

        inputs = BaseModel.extract_features(self.policy, observations, self.policy.pi_features_extractor)
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
            layers.append(Layer(None, places[self.log_std], last.detach(), inputs, identity))
        distribution = copy.copy(self.policy.action_dist)
        vector = head.vector(_given(distribution, inputs, leaf(self.log_std)))
        return vector, tuple(leaves[param] for param in params), tuple(layers)


def _chain(modules: Iterable[nn.Module]) -> tuple[Dense, ...] | None:
    """Linear layers, each with the activations after it; None if there is anything else."""
    found: list[tuple[nn.Linear, list[nn.Module]]] = []
    for module in modules:
        if not _is_left_alone(module):
            return None
        if type(module) is nn.Linear:
            found.append((module, []))
        elif type(module) in _ACTIVATIONS and found:
            found[-1][1].append(module)
        else:
            return None
    return tuple(Dense(linear.weight, linear.bias, tuple(activations)) for linear, activations in found)


def _is_left_alone(module: nn.Module) -> bool:
    """Whether a module does what its class says, without anybody who listens to it and might change it."""
    return not any(_hooks(module)) and "forward" not in vars(module)


def _hooks(module: nn.Module) -> tuple[dict, ...]:
    return (
        module._forward_hooks,
        module._forward_pre_hooks,
        torch_module._global_forward_hooks,
        torch_module._global_forward_pre_hooks,
    )


def _given(distribution: Distribution, outputs: th.Tensor, log_std: th.Tensor | None) -> Distribution:
    """The distribution with the actor's outputs as its parameters."""
    parameters = (outputs,) if log_std is None else (outputs, log_std)
    return distribution.proba_distribution(*parameters)


class ActingMLP:
    """
    A plain MLP during a rollout: a copy of its numbers, which acts and can evaluate later what it did.

    It draws what the policy would draw, from the same random stream. Since it has a copy, values and log-probabilities
    are those of the policy that acted, also when that has changed since; whether it has is known from the numbers
    themselves, so that no way of changing them goes unnoticed.

    :param mlp: on the CPU, in evaluation mode
    """

    def __init__(self, mlp: PlainMLP) -> None:
        self._policy = mlp.policy
        self._distribution = copy.copy(mlp.policy.action_dist)
        params = [*mlp.actor_params, *(param for dense in mlp.critic for param in dense.params)]
        self._params = params
        self._addresses = [param.data_ptr() for param in params]
        arrays: list[Any] = [param.detach().numpy() for param in params]
        self._memory = [memoryview(array).cast("B") for array in arrays]
        self._numbers = b"".join(self._memory)
        self._owners, self._names, self._parts = zip(*_places_of(mlp.policy), strict=True)
        self._listeners = [hooks for module in mlp.policy.modules() for hooks in _hooks(module)[:2]]

        copies = {param: param.detach().clone() for param in params}
        self._actor, self._critic = (
            [
                Dense(copies[dense.weight], None if dense.bias is None else copies[dense.bias], dense.activations)
                for dense in chain
            ]
            for chain in (mlp.actor, mlp.critic)
        )
        # the same without the call of a module, on which nobody listens
        self._operations = [operation for dense in self._actor for operation in dense.operations()]
        self._log_std = None if mlp.log_std is None else copies[mlp.log_std]
        self._std = None if self._log_std is None else self._log_std.exp()
        space = mlp.policy.observation_space
        self._is_flat = (
            type(mlp.policy.pi_features_extractor) is FlattenExtractor
            and isinstance(space, spaces.Box)
            and not (mlp.policy.normalize_images and is_image_space(space))
        )
        #: what the evaluation of one step takes at a time, bytes
        widths = sum(len(dense.weight) for dense in (*self._actor, *self._critic))
        self.bytes_per_step = self._actor[0].weight.element_size() * (2 * self._actor[0].weight.shape[1] + widths)

    @staticmethod
    def can_take_over(mlp: PlainMLP) -> bool:
        """
        :param mlp: a plain MLP
        :return: whether its features are those of single steps, and its numbers can be watched
        """
        policy = mlp.policy
        params = [*mlp.actor_params, *(param for dense in mlp.critic for param in dense.params)]
        return all(
            type(extractor) in (FlattenExtractor, CombinedExtractor)
            and all(
                type(module) in (type(extractor), nn.Flatten, nn.ModuleDict) and _is_left_alone(module)
                for module in extractor.modules()
            )
            for extractor in (policy.pi_features_extractor, policy.vf_features_extractor)
        ) and all(param.device.type == "cpu" and param.is_contiguous() for param in params)

    def is_current(self) -> bool:
        """
        :return: whether the policy still is what was copied, number by number, part by part and without new hooks
        """
        return (
            all(map(operator.is_, map(dict.get, self._owners, self._names), self._parts))
            and not any(self._listeners)
            and [param.data_ptr() for param in self._params] == self._addresses
            and b"".join(self._memory) == self._numbers
        )

    def _features(self, observations: PyTorchObs) -> th.Tensor:
        if self._is_flat:
            # what comes out below, without what surrounds it
            assert isinstance(observations, th.Tensor)
            return observations.float().flatten(1)
        return BaseModel.extract_features(self._policy, observations, self._policy.pi_features_extractor)

    def _act(self, features: th.Tensor) -> th.Tensor:
        for operation in self._operations:
            features = operation(features)
        return features

    def sample(self, observations: PyTorchObs) -> th.Tensor:
        """
        :param observations: of one step, of all environments
        :return: actions, as the policy's distribution draws them
        :raises ValueError: if the distribution's parameters are not finite, as the policy does
        """
        outputs = self._act(self._features(observations))
        if self._std is None:
            return _given(self._distribution, outputs, None).get_actions()
        actions = outputs + th.randn_like(outputs) * self._std
        # An action that is not a number must not reach a robot: the policy's own way says what is wrong. The sum is
        # one cheap number that is not finite unless all are.
        if math.isfinite(actions.sum().item()) or bool(actions.isfinite().all()):
            return actions
        return self._policy.get_distribution(observations).get_actions()

    def evaluate(self, observations: PyTorchObs, actions: th.Tensor) -> tuple[th.Tensor, th.Tensor]:
        """
        :param observations: of n steps
        :param actions: as ``sample`` returned them
        :return: the steps' values, shape ``(n, 1)``, and log-probabilities, shape ``(n,)``
        """
        features = self._features(observations)
        distribution = _given(self._distribution, self._act(features), self._log_std)
        values = features
        for dense in self._critic:
            values = dense(values)
        return values, distribution.log_prob(actions)

    def differences(self, observations: PyTorchObs) -> list[str]:
        """
        :param observations: real ones
        :return: names of what differs from the policy's own beyond rounding
        """
        actions, values, log_probs = self._policy(observations, deterministic=True)
        mode = _given(self._distribution, self._act(self._features(observations)), self._log_std).mode()
        own_values, own_log_probs = self.evaluate(observations, mode)
        pairs = {
            "the distribution's mode": (mode.reshape(actions.shape), actions),
            "the values": (own_values, values),
            "the log-probabilities": (own_log_probs, log_probs),
            "get_distribution": (own_log_probs, self._policy.get_distribution(observations).log_prob(mode)),
        }
        return [name for name, (ours, theirs) in pairs.items() if not same_but_for_rounding(ours, theirs)]


def _places_of(policy: ActorCriticPolicy) -> Iterator[tuple[dict, str, Any]]:
    """Where the parts of a policy are kept: each dict, the name in it, and the part."""
    for module in policy.modules():
        for values in (module._modules, module._parameters):
            for name, part in values.items():
                yield values, name, part


def same_but_for_rounding(ours: th.Tensor, theirs: th.Tensor) -> bool:
    """
    :param ours: outputs of the fast path
    :param theirs: the policy's own
    :return: whether they agree to rounding
    """
    if ours.shape != theirs.shape:
        return False
    ours, theirs = ours.double(), theirs.double()
    scale = theirs.abs().nan_to_num(0.0, 0.0).amax().item() if theirs.numel() else 0.0
    return th.allclose(ours, theirs, rtol=_RELATIVE_TOLERANCE, atol=_RELATIVE_TOLERANCE * scale, equal_nan=True)


class FastPath:
    """Decides whether a policy is served as a plain MLP, and says once why one that looks like it is not."""

    def __init__(self) -> None:
        self._has_warned = False

    def for_rollout(self, policy: ActorCriticPolicy, observations: PyTorchObs) -> ActingMLP | None:
        """
        :param policy: in evaluation mode
        :param observations: those from which the rollout starts
        :return: what acts in the place of the policy; None if the policy has to act itself
        """
        mlp = PlainMLP.recognise(policy)
        if mlp is None or not ActingMLP.can_take_over(mlp):
            return None
        acting = ActingMLP(mlp)
        with th.no_grad():
            differences = acting.differences(observations)
        return acting if self._is_proven(differences) else None

    def for_update(self, ours: th.Tensor, theirs: th.Tensor) -> bool:
        """
        :param ours: the distributions' parameters at all steps of the batch, by the layers
        :param theirs: the same by the policy itself
        :return: whether products may be made layer by layer
        """
        return self._is_proven([] if same_but_for_rounding(ours, theirs) else ["the action distribution"])

    def _is_proven(self, differences: list[str]) -> bool:
        if differences and not self._has_warned:
            self._has_warned = True
            warnings.warn(
                "The policy looks like a standard MLP, but its layers alone do not give "
                f"{' and '.join(differences)} of the policy itself. It is served the general way, which is slower.",
                stacklevel=4,
            )
        return not differences
