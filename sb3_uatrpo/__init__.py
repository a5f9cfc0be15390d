"""Uncertainty-Aware Trust Region Policy Optimization for Stable-Baselines3."""

from sb3_uatrpo.buffers import NonFiniteRolloutError
from sb3_uatrpo.matched_trpo import MatchedTRPO
from sb3_uatrpo.policies import CnnPolicy, MlpPolicy, MultiInputPolicy
from sb3_uatrpo.presets import RECOMMENDED, RECOMMENDED_DISCRETE, RECOMMENDED_SMALL_BATCHES
from sb3_uatrpo.uatrpo import UATRPO

__version__ = "0.1.0"

__all__ = [
    "RECOMMENDED",
    "RECOMMENDED_DISCRETE",
    "RECOMMENDED_SMALL_BATCHES",
    "UATRPO",
    "CnnPolicy",
    "MatchedTRPO",
    "MlpPolicy",
    "MultiInputPolicy",
    "NonFiniteRolloutError",
    "__version__",
]
