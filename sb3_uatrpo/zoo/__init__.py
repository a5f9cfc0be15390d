"""RL Zoo's commands for UATRPO and MatchedTRPO."""

from sb3_uatrpo.zoo.registration import register

__all__ = ["register"]
