"""
The policies behind the names that users know from Stable-Baselines3, and the one question about ``MlpPolicy``.

``MlpPolicy`` is this package's own class. Where ``plain_mlp`` says that a policy is nothing but its layers, NumPy
computes on the memory of its parameters: in rollouts, in the products with F̂ and Σ̂, and in the critic's epochs.
Otherwise Stable-Baselines3's own code runs.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch as th
from gymnasium import spaces
from stable_baselines3.common.distributions import CategoricalDistribution, DiagGaussianDistribution, Distribution
from stable_baselines3.common.policies import (
    ActorCriticCnnPolicy,
    ActorCriticPolicy,
    MultiInputActorCriticPolicy,
)
from stable_baselines3.common.preprocessing import is_image_space
from stable_baselines3.common.torch_layers import FlattenExtractor, MlpExtractor
from torch import nn
from torch.nn.modules import module as torch_module

from sb3_uatrpo.plain_mlp import PlainMLP

CnnPolicy = ActorCriticCnnPolicy
MultiInputPolicy = MultiInputActorCriticPolicy


class MlpPolicy(ActorCriticPolicy):
    """
    Stable-Baselines3's MLP policy; arguments and results are the same. In rollouts of ``UATRPO`` and ``MatchedTRPO``,
    ``forward`` computes in NumPy where ``plain_mlp`` allows it. It draws the actions that Stable-Baselines3's would
    draw, and differs from it by rounding.
    """

    _mlp: PlainMLP | None = None
    _awaits_question = False
    #: observations whose distribution ``action_dist`` computes when it is read
    _unread_observations: Any = None

    @property
    def action_dist(self) -> Distribution:
        """
        The action distribution of the last evaluation: in a rollout of the last timestep, after an update of all
        timesteps of the rollout. There it is computed when it is read, and has no graph.
        """
        observations, self._unread_observations = self._unread_observations, None
        if observations is not None:
            training = self.training
            self.set_training_mode(False)
            with th.no_grad():
                self.get_distribution(observations)
            self.set_training_mode(training)
        return vars(self)["action_dist"]

    @action_dist.setter
    def action_dist(self, distribution: Distribution) -> None:
        # where other classes look for it, should the object get one
        vars(self).update(action_dist=distribution, _unread_observations=None)

    def show_distribution(self, observations: Any) -> None:
        """
        :param observations: those whose distribution ``action_dist`` has from now on
        """
        # not by nn.Module, which would take as long as a layer
        vars(self)["_unread_observations"] = observations

    @contextmanager
    def numpy_rollout(self) -> Iterator[None]:
        """Within this context, the first call of ``forward`` asks ``plain_mlp``, and NumPy may compute."""
        try:
            self._awaits_question = True
            yield
        finally:
            self._awaits_question, self._mlp = False, None

    def forward(self, obs: th.Tensor, deterministic: bool = False) -> tuple[th.Tensor, th.Tensor, th.Tensor]:
        # a tracer or compiler would record NumPy's results as constants
        if deterministic or th.is_grad_enabled() or th.jit.is_tracing() or th.compiler.is_compiling():
            return super().forward(obs, deterministic)
        mlp = self._mlp
        if self._awaits_question or (mlp is not None and not mlp.is_current()):
            self._awaits_question = False
            mlp = self._mlp = plain_mlp(self)
        acted = None if mlp is None else mlp.act(obs.numpy())
        if acted is None:
            return super().forward(obs)
        self.show_distribution(obs)
        return acted

    def __getstate__(self) -> dict[str, Any]:
        # the parameters of a copy have other memory; nn.Module leaves out the compiled call
        return {**super().__getstate__(), "_mlp": None, "_awaits_question": False}


# A subclass may do anything, so types have to be exactly these.
_PARTS = {MlpPolicy, FlattenExtractor, MlpExtractor, nn.Flatten, nn.Sequential, nn.Linear, nn.Tanh, nn.ReLU}


def plain_mlp(policy: Any) -> PlainMLP | None:
    """
    The one question: is a policy nothing but its layers? It is asked at the first step of each rollout, after a step in
    which a parameter was replaced or got other memory, and once in each update.

    :param policy: any policy
    :return: its layers, if it is exactly an ``MlpPolicy`` of plain parts, on the CPU in float32, with Tanh or ReLU, Box
        observations that are not images, Box or Discrete actions and no gSDE, without hooks, not compiled, and with no
        method hidden by an attribute; otherwise None
    """
    if type(policy) is not MlpPolicy:
        return None
    # not computed before it is read
    distribution = vars(policy)["action_dist"]
    modules, params = list(policy.modules()), list(policy.parameters())
    extractors = {policy.features_extractor, policy.pi_features_extractor, policy.vf_features_extractor}
    if (
        type(distribution) in (DiagGaussianDistribution, CategoricalDistribution)
        and isinstance(policy.observation_space, spaces.Box)
        and not (policy.normalize_images and is_image_space(policy.observation_space))
        and {type(module) for module in modules} <= _PARTS
        and {(type(of), type(getattr(of, "flatten", None))) for of in extractors} == {(FlattenExtractor, nn.Flatten)}
        and type(policy.mlp_extractor) is MlpExtractor
        and all(param.device.type == "cpu" and param.dtype == th.float32 and param.is_contiguous() for param in params)
        and not th.is_autocast_enabled("cpu")
        and not any_hooks(modules, params)
        and not any(_hides_a_method(part) for part in (*modules, distribution))
    ):
        return PlainMLP.of_layers(policy, distribution)
    return None


def _hides_a_method(part: Any) -> bool:
    """Whether an attribute of the object has the name of a method of its class."""
    return any(callable(getattr(type(part), name, None)) for name in vars(part))


def any_hooks(modules: list[nn.Module], params: list[nn.Parameter]) -> bool:
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
