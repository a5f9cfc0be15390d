"""Data classes of an actor update: what its stages pass to each other, and its outcome."""

import math
from dataclasses import dataclass, field
from enum import Enum

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


class Status(Enum):
    """How an update of the actor ended."""

    ACCEPTED = "accepted"
    REFUSED = "refused"
    LINE_SEARCH_FAILED = "line search failed"


@dataclass(frozen=True)
class ActorUpdate:
    """
    A completed update of the actor.

    :param status: how the update ended; the actor has moved only if a step was accepted
    :param reason: why the update was refused; empty if it was not
    :param proposed: effect of the full step; None if the update was refused
    :param reached: effect of the step that was taken, or of a step of length zero if none was taken
    :param diagnostics: values to log, by name
    """

    status: Status
    reason: str
    proposed: Evaluation | None
    reached: Evaluation
    diagnostics: dict[str, float]

    @staticmethod
    def refused(reason: str, unchanged: Evaluation, diagnostics: dict[str, float]) -> "ActorUpdate":
        """
        :param reason: why there is no step
        :param unchanged: effect of a step of length zero
        :param diagnostics: values found so far
        :return: an update without a step
        """
        taken = _of_the_step_taken(Status.REFUSED, unchanged, 0.0)
        return ActorUpdate(Status.REFUSED, reason, None, unchanged, {**diagnostics, **taken})

    @staticmethod
    def after_line_search(
        result: LineSearchResult, kl_estimated: float, unchanged: Evaluation, diagnostics: dict[str, float]
    ) -> "ActorUpdate":
        """
        :param result: the outcome of the line search
        :param kl_estimated: the KL divergence expected of the full step, nats
        :param unchanged: effect of a step of length zero
        :param diagnostics: values found before the line search
        :return: an update whose step the line search accepted or rejected
        """
        status = Status.LINE_SEARCH_FAILED if result.accepted is None else Status.ACCEPTED
        reached = result.accepted or unchanged
        found = {**diagnostics, "kl_estimated": kl_estimated}
        if math.isfinite(result.proposed.kl) and kl_estimated > 0.0:
            found |= {"kl_proposed": result.proposed.kl, "kl_ratio": result.proposed.kl / kl_estimated}
        found |= _of_the_step_taken(status, reached, result.step_fraction)
        return ActorUpdate(status, "", result.proposed, reached, found)


def _of_the_step_taken(status: Status, reached: Evaluation, step_fraction: float) -> dict[str, float]:
    return {
        "policy_objective": reached.objective,
        "kl_divergence_loss": reached.kl,
        "step_fraction": step_fraction,
        "is_line_search_success": float(status is Status.ACCEPTED),
    }
