"""What is logged of an update: each function but the last returns values by name."""

import math

import numpy as np
import torch as th
from stable_baselines3.common.buffers import RolloutBuffer
from stable_baselines3.common.logger import Logger
from stable_baselines3.common.policies import ActorCriticPolicy
from stable_baselines3.common.utils import explained_variance

from sb3_uatrpo.core.line_search import Evaluation, LineSearchResult


def step(reached: Evaluation, step_fraction: float) -> dict[str, float]:
    """Of the step that was taken, or of one of length zero if none was."""
    return {
        "policy_objective": reached.objective,
        "kl_divergence_loss": reached.kl,
        "step_fraction": step_fraction,
        "is_line_search_success": float(step_fraction > 0.0),
    }


def line_search(result: LineSearchResult, kl_estimated: float, unchanged: Evaluation) -> dict[str, float]:
    """Of the line search; ``unchanged`` is a step of length zero. The KL of the full step is left out if not finite."""
    values = {"kl_estimated": kl_estimated, **step(result.accepted or unchanged, result.step_fraction)}
    if math.isfinite(result.proposed.kl) and kl_estimated > 0.0:
        values |= {"kl_proposed": result.proposed.kl, "kl_ratio": result.proposed.kl / kl_estimated}
    return values


def critic(rollout_buffer: RolloutBuffer, losses: list[float]) -> dict[str, float]:
    """Of the critic: its values before the update, and its losses in the minibatches."""
    # in float64, where the square of a large return does not overflow
    values, returns = (array.flatten().astype(np.float64) for array in (rollout_buffer.values, rollout_buffer.returns))
    diagnostics = {"explained_variance": float(explained_variance(values, returns))}
    if losses:
        diagnostics["value_loss"] = float(np.mean(losses))
    return diagnostics


def record(logger: Logger, policy: ActorCriticPolicy, values: dict[str, float], previous: set[str]) -> set[str]:
    """
    Log the values of one update, and drop those of the update before that this one did not compute.

    :param previous: names of the values that the update before logged
    :return: names of the values that were logged
    """
    if hasattr(policy, "log_std"):
        values = {**values, "std": th.exp(policy.log_std).mean().item()}
    for name in previous - values.keys():
        # from all of them: a dump refuses tables of different length
        for table in (logger.name_to_value, logger.name_to_count, logger.name_to_excluded):
            table.pop(f"train/{name}", None)
    for name, value in values.items():
        logger.record(f"train/{name}", value)
    return set(values)
