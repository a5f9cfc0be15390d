"""
UATRPO and MatchedTRPO with action masks. Rollouts, policies, distributions and buffers are those of sb3-contrib's
MaskablePPO, which this module calls. It is the only one that imports sb3-contrib.
"""

from typing import Any, ClassVar, TypeVar

import numpy as np
import torch as th
from gymnasium import spaces
from stable_baselines3.common.policies import BasePolicy
from stable_baselines3.common.type_aliases import MaybeCallback

from sb3_uatrpo import families, plain
from sb3_uatrpo.buffers import LeanRolloutBuffer
from sb3_uatrpo.families import CategoricalFamily
from sb3_uatrpo.matched_trpo import MatchedTRPO
from sb3_uatrpo.policies import ActsInNumpy
from sb3_uatrpo.sb3_algorithm import SB3Algorithm
from sb3_uatrpo.uatrpo import UATRPO

try:
    from sb3_contrib import MaskablePPO
    from sb3_contrib.common.maskable.buffers import MaskableDictRolloutBuffer, MaskableRolloutBuffer
    from sb3_contrib.common.maskable.distributions import (
        MaskableBernoulliDistribution,
        MaskableCategorical,
        MaskableCategoricalDistribution,
        MaskableMultiCategoricalDistribution,
    )
    from sb3_contrib.common.maskable.policies import (
        MaskableActorCriticCnnPolicy,
        MaskableActorCriticPolicy,
        MaskableMultiInputActorCriticPolicy,
    )
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        'sb3_uatrpo.maskable needs sb3-contrib: run pip install "sb3-contrib>=2.9,<3"', name=error.name
    ) from error

__all__ = ["MaskableMatchedTRPO", "MaskableUATRPO"]

SelfMaskable = TypeVar("SelfMaskable", bound="_Maskable")


class LeanMaskableRolloutBuffer(MaskableRolloutBuffer, LeanRolloutBuffer):
    """sb3-contrib's buffer on top of the lean one, with the same numbers."""


class MlpPolicy(ActsInNumpy, MaskableActorCriticPolicy):  # type: ignore[misc]
    """sb3-contrib's MLP policy; arguments and results are the same. In rollouts, NumPy computes where it is plain."""

    def forward(
        self, obs: th.Tensor, deterministic: bool = False, action_masks: np.ndarray | None = None
    ) -> tuple[th.Tensor, th.Tensor, th.Tensor]:
        return super().forward(obs, deterministic, action_masks)


families.support(
    MaskableCategoricalDistribution,
    lambda distribution: CategoricalFamily([distribution.action_dim]),
    MaskableCategorical,
)
# sb3-contrib's Bernoulli distributions are categorical ones of two choices
for _kind in (MaskableMultiCategoricalDistribution, MaskableBernoulliDistribution):
    families.support(_kind, lambda distribution: CategoricalFamily(distribution.action_dims), MaskableCategorical)
plain.admit(
    (MlpPolicy, MaskableActorCriticPolicy),
    MaskableCategoricalDistribution,
    (LeanMaskableRolloutBuffer, MaskableRolloutBuffer, MaskableDictRolloutBuffer),
)


class _Maskable(SB3Algorithm):
    """What MaskablePPO does beside its update."""

    policy_aliases: ClassVar[dict[str, type[BasePolicy]]] = {
        "MlpPolicy": MlpPolicy,
        "CnnPolicy": MaskableActorCriticCnnPolicy,
        "MultiInputPolicy": MaskableMultiInputActorCriticPolicy,
    }
    _takes_masks = True
    _POLICY = MaskableActorCriticPolicy
    _ACTION_SPACES = (spaces.Discrete, spaces.MultiDiscrete, spaces.MultiBinary)
    _use_masking = True

    def _setup_model(self) -> None:
        if self.rollout_buffer_class is None:
            is_dict = isinstance(self.observation_space, spaces.Dict)
            self.rollout_buffer_class = MaskableDictRolloutBuffer if is_dict else LeanMaskableRolloutBuffer
        kind: Any = self.policy_class

        # Stable-Baselines3 passes an argument that these policies do not have
        def without_sde(*args: Any, use_sde: bool, **kwargs: Any) -> Any:
            return kind(*args, **kwargs)

        without_sde.__name__ = getattr(kind, "__name__", "")
        self.policy_class = without_sde  # type: ignore[assignment]
        try:
            super()._setup_model()
        finally:
            self.policy_class = kind

    def learn(  # type: ignore[override]
        self: SelfMaskable,
        total_timesteps: int,
        callback: MaybeCallback = None,
        log_interval: int = 1,
        tb_log_name: str | None = None,
        reset_num_timesteps: bool = True,
        use_masking: bool = True,
        progress_bar: bool = False,
    ) -> SelfMaskable:
        """
        As MaskablePPO's.

        :param use_masking: whether to ask the environment for masks; if not, all actions are allowed
        """
        self._use_masking = use_masking
        return super().learn(total_timesteps, callback, log_interval, tb_log_name, reset_num_timesteps, progress_bar)

    def collect_rollouts(self, *args: Any, **kwargs: Any) -> bool:
        """As MaskablePPO's, which asks the environments for their masks before each timestep."""
        # its attributes are those that all algorithms of Stable-Baselines3 have
        borrowed: Any = MaskablePPO.collect_rollouts
        with self._acting_in_numpy():
            return borrowed(self, *args, **{"use_masking": self._use_masking, **kwargs})

    def predict(
        self,
        observation: np.ndarray | dict[str, np.ndarray],
        state: tuple[np.ndarray, ...] | None = None,
        episode_start: np.ndarray | None = None,
        deterministic: bool = False,
        action_masks: np.ndarray | None = None,
    ) -> tuple[np.ndarray, tuple[np.ndarray, ...] | None]:
        """As MaskablePPO's: without ``action_masks``, all actions are allowed."""
        policy: Any = self.policy
        return policy.predict(observation, state, episode_start, deterministic, action_masks=action_masks)


class MaskableUATRPO(_Maskable, UATRPO):
    """
    :class:`sb3_uatrpo.UATRPO` with action masks, in place of sb3-contrib's ``MaskablePPO``. The arguments are those of
    ``UATRPO``; actions are Discrete, MultiDiscrete or MultiBinary, without gSDE.
    """


class MaskableMatchedTRPO(_Maskable, MatchedTRPO):
    """:class:`sb3_uatrpo.MatchedTRPO` with action masks, as :class:`MaskableUATRPO` is ``UATRPO`` with them."""
