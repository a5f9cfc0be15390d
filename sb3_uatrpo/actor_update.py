"""What an update of the actor passes from stage to stage, and what came of it: values without behaviour."""

import math
from dataclasses import dataclass, field
from enum import Enum

import torch as th

from sb3_uatrpo.core.estimates import SampleEstimates
from sb3_uatrpo.core.line_search import Evaluation, LineSearchResult


@dataclass(frozen=True)
class Direction:
    """
    Where a method wants to go.

    :param vector: v, shape ``(d,)``
    :param diagnostics: what to log about it, by name
    :param isotropic_curvature: μ, where the direction came from a matrix with μI added
    """

    vector: th.Tensor
    diagnostics: dict[str, float] = field(default_factory=dict)
    isotropic_curvature: float = 0.0


@dataclass(frozen=True)
class Length:
    """
    How far a method wants to go.

    :param eta: η, not finite where the trust region does not bound the direction
    :param kl_estimated: the KL divergence that the method expects of θ_k + ηv, nats
    :param diagnostics: what to log about it, by name
    """

    eta: float
    kl_estimated: float
    diagnostics: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class PolicyEstimates:
    """
    All that a method may use to find a step.

    :param layout: how many coordinates each of the policy's parameters has, see ``Actor.layout``
    :param gradient: ĝ of the whole batch, with the adversarial noise if there is any, shape ``(d,)``
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
    An update of the actor that is over.

    :param status: how it ended; the actor has moved only if it was accepted
    :param reason: why it was refused, if it was
    :param proposed: what the full step does, if there was one
    :param reached: what the step that was taken does, or that of length zero
    :param diagnostics: what to log about it, by name
    """

    status: Status
    reason: str
    proposed: Evaluation | None
    reached: Evaluation
    diagnostics: dict[str, float]

    @staticmethod
    def refused(reason: str, still: Evaluation, diagnostics: dict[str, float]) -> "ActorUpdate":
        """
        :param reason: why there is no step
        :param still: what no step does
        :param diagnostics: what was found so far
        :return: an update that has no step
        """
        taken = _of_the_step_taken(Status.REFUSED, still, 0.0)
        return ActorUpdate(Status.REFUSED, reason, None, still, {**diagnostics, **taken})

    @staticmethod
    def searched(
        result: LineSearchResult, kl_estimated: float, still: Evaluation, diagnostics: dict[str, float]
    ) -> "ActorUpdate":
        """
        :param result: what the line search found
        :param kl_estimated: the KL divergence expected of the full step, nats
        :param still: what no step does
        :param diagnostics: what was found before
        :return: an update that has a step, taken or not
        """
        status = Status.LINE_SEARCH_FAILED if result.accepted is None else Status.ACCEPTED
        reached = result.accepted or still
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
