"""Uncertainty-Aware Trust Region Policy Optimization for Stable-Baselines3."""

from sb3_uatrpo.batch import NonFiniteRolloutError
from sb3_uatrpo.matched_trpo import MatchedTRPO
from sb3_uatrpo.policies import CnnPolicy, MlpPolicy, MultiInputPolicy
from sb3_uatrpo.uatrpo import RECOMMENDED, UATRPO

__version__ = "0.1.0"

__all__ = [
    "RECOMMENDED",
    "UATRPO",
    "CnnPolicy",
    "MatchedTRPO",
    "MlpPolicy",
    "MultiInputPolicy",
    "NonFiniteRolloutError",
    "__version__",
]
