"""Conjugate gradients for the control MatchedTRPO (Schulman et al., 2015, Appendix C)."""

import math
from collections.abc import Callable

import torch as th

#: Stop once the squared norm of the residual is this fraction of the right-hand side's: float32 products cannot resolve
#: more.
RESIDUAL_TOLERANCE = 1e-10


def conjugate_gradient(product: Callable[[th.Tensor], th.Tensor], rhs: th.Tensor, max_steps: int) -> th.Tensor:
    """
    Approximate solution x of Ax = b for a symmetric positive definite A, from x = 0.

    The start is fixed and the tolerance relative, so equal inputs give equal results, and a small right-hand side is
    solved as well as a large one. A search direction without positive, finite curvature ends the search at the current
    x.

    :param product: x ↦ Ax
    :param rhs: b, shape ``(d,)``
    :param max_steps: maximum number of products with A
    :return: x, shape ``(d,)``; zero if b is zero, NaN if b or Ab is not finite
    """
    x = th.zeros_like(rhs)
    largest = rhs.abs().max().item() if rhs.numel() else 0.0
    if not largest < math.inf:
        return th.full_like(rhs, math.nan)
    if largest == 0.0:
        return x
    # without scaling, squares of very small or large numbers would leave float32's range; a power of two scales exactly
    scale = math.ldexp(1.0, math.frexp(largest)[1] - 1)
    residual = rhs / scale
    direction = residual.clone()
    squared_norm = residual.dot(residual)
    target = RESIDUAL_TOLERANCE * squared_norm
    for _ in range(max_steps):
        if not squared_norm > target:
            break
        image = product(direction)
        curvature = direction.dot(image)
        if not bool(curvature.isfinite()) and not bool(x.any()):
            return th.full_like(rhs, math.nan)
        if not (curvature > 0 and bool(curvature.isfinite())):
            break
        step = squared_norm / curvature
        x = x + step * direction
        residual = residual - step * image
        previous, squared_norm = squared_norm, residual.dot(residual)
        direction = residual + (squared_norm / previous) * direction
    return x * scale
