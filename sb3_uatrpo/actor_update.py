"""What the stages of an actor update pass to each other, and what is logged of its outcome."""

import math
from dataclasses import dataclass, field

import torch as th

from sb3_uatrpo.core.estimates import SampleEstimates
from sb3_uatrpo.core.line_search import Evaluation, LineSearchResult


@dataclass(frozen=True)
class Direction:
    """
    The direction of a step.

    :param vector: v, shape ``(d,)``
    :param diagnostics: values to log, by name
    :param isotropic_curvature: μ, if the direction comes from a matrix with μI added
    """

    vector: th.Tensor
    diagnostics: dict[str, float] = field(default_factory=dict)
    isotropic_curvature: float = 0.0


@dataclass(frozen=True)
class Length:
    """
    The length of a step.

    :param eta: η, not finite if the trust region does not bound the direction
    :param kl_estimated: the KL divergence that the method expects at θ_k + ηv, nats
    :param diagnostics: values to log, by name
    """

    eta: float
    kl_estimated: float
    diagnostics: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class PolicyEstimates:
    """
    Everything that a method may use to find a step.

    :param layout: how many coordinates belong to each parameter of the policy, see ``Actor.layout``
    :param gradient: ĝ of the whole batch, including adversarial noise, shape ``(d,)``
    :param batch: estimates over the whole batch
    :param subsample: estimates over the subsample
    :param n_trajectories: number of trajectories in the rollout, as ``count_trajectories`` counts them
    """

    layout: th.Tensor
    gradient: th.Tensor
    batch: SampleEstimates
    subsample: SampleEstimates
    n_trajectories: int


def diagnose_step(reached: Evaluation, step_fraction: float) -> dict[str, float]:
    """
    :param reached: effect of the step that was taken, or of a step of length zero if none was taken
    :param step_fraction: its fraction of the full step, 0 if none was taken
    :return: values to log, by name
    """
    return {
        "policy_objective": reached.objective,
        "kl_divergence_loss": reached.kl,
        "step_fraction": step_fraction,
        "is_line_search_success": float(step_fraction > 0.0),
    }


def diagnose_line_search(result: LineSearchResult, kl_estimated: float, unchanged: Evaluation) -> dict[str, float]:
    """
    :param result: the outcome of the line search
    :param kl_estimated: the KL divergence expected of the full step, nats
    :param unchanged: effect of a step of length zero
    :return: values to log, by name; those of the full step only if its KL divergence is finite
    """
    found = {"kl_estimated": kl_estimated, **diagnose_step(result.accepted or unchanged, result.step_fraction)}
    if math.isfinite(result.proposed.kl) and kl_estimated > 0.0:
        found |= {"kl_proposed": result.proposed.kl, "kl_ratio": result.proposed.kl / kl_estimated}
    return found
