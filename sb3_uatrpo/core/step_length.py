"""Length of the step along a direction (paper, Algorithm 2)."""

import math


def step_length(delta: float, squared_norm: float) -> float:
    """
    η = √(2δ/v'Mv): the step ηv ends on the boundary ½(ηv)'M(ηv) = δ of the trust region.

    :param delta: δ, nats
    :param squared_norm: v'Mv; with v'F̂v instead, the step's estimated KL divergence is δ
    :return: η; NaN if the trust region does not bound the direction: v'Mv is not positive, or not finite
    """
    if not 0.0 < squared_norm < math.inf:
        return math.nan
    return math.sqrt(2.0 * delta / squared_norm)
