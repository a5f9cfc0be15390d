"""Backtracking: the largest trial step that neither lowers the objective nor leaves the trust region."""

import math
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Evaluation:
    """
    The effect of a trial step on the whole batch.

    :param objective: surrogate objective, mean of A·π_θ/π_θk
    :param kl: mean KL(π_θk‖π_θ) in nats
    """

    objective: float
    kl: float


@dataclass(frozen=True)
class LineSearchResult:
    """
    :param step_fraction: the fraction of the proposed step that was accepted, 0 when none was
    :param proposed: the proposed step's evaluation
    :param accepted: the accepted step's evaluation, ``None`` when none was
    """

    step_fraction: float
    proposed: Evaluation
    accepted: Evaluation | None


def backtracking_line_search(
    evaluate: Callable[[float], Evaluation], objective: float, max_kl: float, shrinking_factor: float, max_iter: int
) -> LineSearchResult:
    """
    The largest κ^i, i = 0 … ``max_iter`` - 1, with finite values, no lower objective than before, and KL within bounds.

    :param evaluate: takes the step's fraction in (0, 1]; if a fraction is accepted, the last call is for it
    :param objective: the objective before the step
    :param max_kl: the largest KL accepted, nats
    :param shrinking_factor: κ in (0, 1)
    :param max_iter: number of trials, at least 1
    :return: what was tried and what was accepted
    """
    fraction = 1.0
    proposed: Evaluation | None = None
    for _ in range(max_iter):
        trial = evaluate(fraction)
        proposed = proposed or trial
        # comparisons with NaN are false, so only infinity needs a check of its own
        if trial.kl <= max_kl and objective <= trial.objective and max(trial.kl, trial.objective) < math.inf:
            return LineSearchResult(fraction, proposed, trial)
        fraction *= shrinking_factor
    assert proposed is not None
    return LineSearchResult(0.0, proposed, None)
