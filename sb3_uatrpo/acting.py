"""The standard MLP policy during a rollout: it acts on NumPy arrays, and its actions are evaluated afterwards."""

import itertools
import operator
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch as th
from gymnasium import spaces
from stable_baselines3.common import distributions, policies
from stable_baselines3.common.distributions import (
    BernoulliDistribution,
    CategoricalDistribution,
    DiagGaussianDistribution,
    Distribution,
    MultiCategoricalDistribution,
)
from stable_baselines3.common.policies import ActorCriticPolicy, BaseModel
from stable_baselines3.common.preprocessing import is_image_space, preprocess_obs
from stable_baselines3.common.torch_layers import CombinedExtractor, FlattenExtractor
from stable_baselines3.common.utils import obs_as_tensor
from torch.distributions import Bernoulli, Categorical, Normal

from sb3_uatrpo.core.array_mlp import Array
from sb3_uatrpo.hooks import forward_hooks
from sb3_uatrpo.plain_mlp import (
    DISTRIBUTION_METHODS,
    EXTRACTOR_METHODS,
    POLICY_METHODS,
    FastPath,
    PlainMLP,
    as_arrays,
    same_but_for_rounding,
    size_of_terms,
)

Observations = np.ndarray | dict[str, np.ndarray]

#: A policy with more bytes of parameters acts itself: comparing them all at each step would take longer than is saved.
MAX_PARAMETER_BYTES = 4 * 2**20
#: What acting repeats instead of calling it, as owner and name, by distribution; recorded before anyone can replace it.
_REPEATED: dict[type[Distribution], list[tuple[Any, str]]] = {
    kind: [(policies, "preprocess_obs"), (distributions, sampled_by.__name__), (sampled_by, method)]
    for kind, sampled_by, method in (
        (DiagGaussianDistribution, Normal, "rsample"),
        (CategoricalDistribution, Categorical, "sample"),
        (MultiCategoricalDistribution, Categorical, "sample"),
        (BernoulliDistribution, Bernoulli, "sample"),
    )
}
_OWN = {place: getattr(*place) for places in _REPEATED.values() for place in places}


class ActingMLP:
    """
    A copy of a plain MLP's parameters that acts in its place.

    It draws the actions that the policy would draw, from the same random stream, and evaluates them, even if the policy
    has changed since. It notices changes by comparing the parameters themselves, and by looking at each place where the
    parts and methods that a policy acts with could be replaced.

    :param mlp: a plain MLP on the CPU, in evaluation mode
    """

    def __init__(self, mlp: PlainMLP) -> None:
        policy = self.policy = mlp.policy
        self._kind = type(policy.action_dist)
        params = [*mlp.actor_params, *mlp.critic_params]
        self._addresses = [param.data_ptr() for param in params]
        self._where = [param.data_ptr for param in params]
        arrays: list[Any] = [param.detach().numpy() for param in params]
        self._memory = [memoryview(array).cast("B") for array in arrays]
        self._numbers = [bytes(memory) for memory in self._memory]
        self._owners, self._names, self._parts = zip(*_parts_of(policy), strict=True)
        self._modules = tuple(policy.modules())
        self._types = list(map(type, self._modules))
        self._places = _class_methods(policy)
        self._methods = list(itertools.starmap(getattr, self._places))
        self._children = [module._modules for module in self._modules if module._modules]
        self._n_children = list(map(len, self._children))
        hooks = (hooks for module in self._modules for hooks in forward_hooks(module))
        # forward_hooks returns the global ones again for each module
        self._hooks = list({id(each): each for each in hooks}.values())

        self._mlp = mlp.copied()
        # actions come from the policy's own arrays, not the copy's: they are equal as long as this object acts, and
        # already in the CPU's cache
        self._actor = as_arrays(mlp.actor)
        self._draw = _SAMPLERS[type(policy.action_dist)](self._mlp)
        self._space, self._normalize_images = policy.observation_space, policy.normalize_images
        extractor = policy.pi_features_extractor
        self._keys = list(extractor.extractors) if isinstance(extractor, CombinedExtractor) else []
        self._is_flat = (
            type(extractor) is FlattenExtractor
            and isinstance(self._space, spaces.Box)
            and not (self._normalize_images and is_image_space(self._space))
        )
        widths = sum(len(dense.weight) for dense in (*mlp.actor, *mlp.critic))
        #: bytes that the evaluation of one step needs
        self.bytes_per_step = mlp.actor[0].weight.element_size() * (2 * mlp.actor[0].weight.shape[1] + widths)

    @staticmethod
    def of(policy: ActorCriticPolicy, fast_path: FastPath, observations: Observations) -> "ActingMLP | None":
        """
        :param policy: a policy in evaluation mode
        :param fast_path: decides, given the outputs in which copy and policy differ, whether the copy may act
        :param observations: the observations that the rollout starts from
        :return: the copy that acts in place of the policy; None if the policy has to act itself
        """
        mlp = PlainMLP.recognise(policy)
        if (
            mlp is None
            or not mlp.runs_on_arrays
            or policy.squash_output
            or any(getattr(*place) is not _OWN[place] for place in _REPEATED[type(policy.action_dist)])
            or sum(param.nbytes for param in (*mlp.actor_params, *mlp.critic_params)) > MAX_PARAMETER_BYTES
        ):
            return None
        acting = ActingMLP(mlp)
        return acting if fast_path.is_proven(acting.differences(observations)) else None

    def is_current(self) -> bool:
        """
        :return: whether the policy still equals the copy in every parameter and part, none of its methods was replaced,
            and there is no forward hook, global or on its modules
        """
        return (
            all(map(operator.is_, map(dict.get, self._owners, self._names), self._parts))
            and type(self.policy.action_dist) is self._kind
            and list(map(type, self._modules)) == self._types
            and list(itertools.starmap(getattr, self._places)) == self._methods
            and list(map(len, self._children)) == self._n_children
            and not any(self._hooks)
            and [where() for where in self._where] == self._addresses
            # lengths are equal, so startswith compares the whole buffers, without copying them
            and all(map(bytes.startswith, self._numbers, self._memory))
        )

    def _features(self, observations: Observations) -> Array:
        if self._is_flat:
            # the same result as below, with less overhead
            assert isinstance(observations, np.ndarray)
            return observations.reshape(len(observations), -1).astype(np.float32, copy=False)
        return self._tensor_features(observations).numpy()

    def _tensor_features(self, observations: Observations) -> th.Tensor:
        """Observations flattened as by the policy's extractor, which may have been replaced since the copy was made."""
        tensors = obs_as_tensor(observations, th.device("cpu"))
        prepared = preprocess_obs(tensors, self._space, normalize_images=self._normalize_images)
        if isinstance(prepared, dict):
            return th.cat([prepared[key].flatten(1) for key in self._keys], dim=1)
        return prepared.flatten(1)

    @np.errstate(all="ignore")
    def sample(self, observations: Observations) -> Array:
        """
        :param observations: the observations of one step in all environments
        :return: actions, as the policy's distribution draws them
        :raises ValueError: if the distribution's parameters are not finite, as in the policy itself
        """
        actions = self._draw(self._actor(self._features(observations)))
        if actions is not None:
            return actions
        # A NaN must never reach a robot as an action: the policy itself acts, and its distribution raises the error.
        with th.no_grad():
            distribution = self.policy.get_distribution(obs_as_tensor(observations, th.device("cpu")))
            return distribution.get_actions().numpy()

    def evaluate(self, observations: Observations, actions: Array) -> tuple[th.Tensor, th.Tensor]:
        """
        :param observations: the observations of n steps
        :param actions: the actions that ``sample`` returned for them
        :return: the steps' values, shape ``(n, 1)``, and log-probabilities, shape ``(n,)``
        """
        with th.no_grad():
            features = self._tensor_features(observations)
            log_probs = self._mlp.distribution(self._mlp.outputs(features)).log_prob(th.from_numpy(actions))
            return self._mlp.values(features), log_probs

    @np.errstate(all="ignore")
    def differences(self, observations: Observations) -> list[str]:
        """
        :param observations: observations of the environment
        :return: names of the outputs that differ from the policy's own beyond rounding
        """
        tensors = obs_as_tensor(observations, th.device("cpu"))
        with th.no_grad():
            actions, values, log_probs = self.policy(tensors, deterministic=True)
            features = self._features(observations)
            on_arrays = self._mlp.distribution(th.from_numpy(self._actor(features))).mode()
            mode = self._mlp.distribution(self._mlp.outputs(th.from_numpy(features))).mode()
            own_values, own_log_probs = self.evaluate(observations, mode.numpy())
            # an output of one environment alone may be close to zero by chance, but its rounding errors need not be
            of_actor, of_critic = (
                size_of_terms(chain, th.from_numpy(features)) for chain in (self._mlp.actor, self._mlp.critic)
            )
            # a log-probability is a sum of logarithms, of order one, and for discrete actions of logits
            of_log_probs = max(1.0, of_actor)
            outputs = {
                "the distribution's mode": (on_arrays.reshape(actions.shape), actions, of_actor),
                "the values": (own_values, values, of_critic),
                "the log-probabilities": (own_log_probs, log_probs, of_log_probs),
                "the distribution from get_distribution": (
                    own_log_probs,
                    self.policy.get_distribution(tensors).log_prob(mode),
                    of_log_probs,
                ),
            }
        return [name for name, compared in outputs.items() if not same_but_for_rounding(*compared)]


def _parts_of(policy: ActorCriticPolicy) -> Iterator[tuple[dict, str, Any]]:
    """
    Every part of a policy, as the dict that holds it, its key there, and the part itself; and every place, still empty,
    where a method of the policy, its modules or its distribution could be replaced.
    """
    for name in ("action_dist", "normalize_images", "_squash_output", "share_features_extractor"):
        yield vars(policy), name, getattr(policy, name)
    for name in POLICY_METHODS:
        yield vars(policy), name, None
    for name in DISTRIBUTION_METHODS:
        yield vars(policy.action_dist), name, None
    for name in EXTRACTOR_METHODS:
        yield vars(policy.mlp_extractor), name, None
    for module in policy.modules():
        for name in ("forward", "_compiled_call_impl"):
            yield vars(module), name, None
        for values in (module._modules, module._parameters):
            for name, part in values.items():
                yield values, name, part
        if not module._modules and not module._parameters:
            # settings of an activation
            for name, value in vars(module).items():
                if not name.startswith("_") and name not in ("training", "forward"):
                    yield vars(module), name, value


def _class_methods(policy: ActorCriticPolicy) -> list[tuple[Any, str]]:
    """
    The methods that a policy's, its modules' and its distribution's classes define, and what acting repeats; each as
    owner and name.
    """
    methods: list[tuple[Any, str]] = [(type(policy), name) for name in POLICY_METHODS]
    methods += [(BaseModel, "extract_features"), *_REPEATED[type(policy.action_dist)]]
    methods += [(type(policy.action_dist), name) for name in DISTRIBUTION_METHODS]
    methods += [(type(policy.mlp_extractor), name) for name in EXTRACTOR_METHODS]
    return methods + [(kind, "forward") for kind in {type(module) for module in policy.modules()}]


# Each sampler makes the same torch call as the distribution and draws as many numbers, so the random stream is the
# policy's. It takes the actor's outputs, shape (n_envs, k), and returns the actions, or None if torch would refuse a
# distribution with these parameters.
Sampler = Callable[[Array], Array | None]


def _gaussian(mlp: PlainMLP) -> Sampler:
    assert mlp.log_std is not None
    std = mlp.log_std.exp().numpy()
    is_finite = bool(np.isfinite(std).all())
    noise, numbers = th.empty(0), np.empty(0)

    def draw(means: Array) -> Array | None:
        nonlocal noise, numbers
        # refused before any number is drawn, so that the policy itself can draw them
        if not (is_finite and np.isfinite(means).all()):
            return None
        if numbers.shape != means.shape:
            noise = th.empty(means.shape, dtype=th.float32, device="cpu")
            # a view, which normal_ below fills too
            numbers = noise.numpy()
        noise.normal_()
        return means + numbers * std

    return draw


def _choice(logits: Array) -> Array:
    weights = np.exp(logits - logits.max(axis=1, keepdims=True))
    probabilities = weights / weights.sum(axis=1, keepdims=True)
    return th.multinomial(th.from_numpy(probabilities), 1, True).numpy()[:, 0]


def _categorical(mlp: PlainMLP) -> Sampler:
    return lambda logits: _choice(logits) if np.isfinite(logits).all() else None


def _multi_categorical(mlp: PlainMLP) -> Sampler:
    ends = np.cumsum(mlp.action_dist.action_dims)[:-1]  # type: ignore[attr-defined]

    def draw(logits: Array) -> Array | None:
        if not np.isfinite(logits).all():
            return None
        return np.stack([_choice(part) for part in np.split(logits, ends, axis=1)], axis=1)

    return draw


def _bernoulli(mlp: PlainMLP) -> Sampler:
    def draw(logits: Array) -> Array | None:
        if not np.isfinite(logits).all():
            return None
        return th.bernoulli(th.from_numpy(1.0 / (1.0 + np.exp(-logits)))).numpy()

    return draw


_SAMPLERS: dict[type[Distribution], Callable[[PlainMLP], Sampler]] = {
    DiagGaussianDistribution: _gaussian,
    CategoricalDistribution: _categorical,
    MultiCategoricalDistribution: _multi_categorical,
    BernoulliDistribution: _bernoulli,
}
