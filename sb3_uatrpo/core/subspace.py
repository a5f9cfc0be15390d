r"""
The update direction within the subspace where the trust region was observed (paper, Algorithm 1 and appendix).

The statistic Y = M̂Ω gives an orthonormal basis Q of its range, the trust region matrix in that basis, M̃ ≈ Q'M̂Q, and
the direction v = QM̃⁺Q'ĝ. Q is never formed: with the singular value decomposition Y = QSV' it is Q = YW, W = VS⁻¹, so
only Y'Y, Ω'Y and Y'ĝ are needed from the d-dimensional space. They are small and summed over blocks of rows, so the
float64 work takes bounded memory for any d. The rest is algebra of m×m matrices on the CPU.

There are two reconstructions of M̃. The paper's solves M̃(Q'Ω) = Q'Y in the least-squares sense. Nyström's is
M̃ = Q'Y(Ω'Y)⁺Y'Q, truncated to half the projections (Tropp, Yurtsever, Udell and Cevher, 2017, *Fixed-rank
approximation of a positive-semidefinite matrix from streaming data*). The small eigenvalues of either are noise, which
would set the step if it were divided by them: the thresholds below are part of the method.

With shrinkage ρ > 0 the matrix is (1-ρ)M̂ + μI instead, μ = ρ·tr M̂/d (Ledoit and Wolf, 2004, *A well-conditioned
estimator for large-dimensional covariance matrices*; their estimate of the best ρ is not used). d·tr(Ω'Y)/‖Ω‖², with
the Frobenius norm, estimates the trace (Hutchinson, 1990) and equals it if Ω is the identity. Outside the observed
subspace the curvature is μ:

.. math:: v = Q\left((1-\rho)\tilde M+\mu I\right)^{-1}Q'\hat g + (\hat g - QQ'\hat g)/\mu
"""

import math
from dataclasses import dataclass
from typing import Literal, get_args

import torch as th

from sb3_uatrpo.core.memory import at_once

#: The statistic is known to the precision of the policy's float32 products; thresholds are in these units.
RESOLUTION = th.finfo(th.float32).eps
#: Relative cuts above this are applied to singular values from Y'Y, which is much cheaper than a QR decomposition but
#: squares them: at a relative cut t they are accurate to ε/t², with float64's ε. Here that is 2e-8 or better, finer
#: than the resolution of the statistic itself.
CUT_FOR_GRAM = 1e-4
#: Upper limit of the relative cut on singular values with shrinkage, since the usual cut keeps nothing from 8.4 million
#: parameters on. Curvature is at least μ, so noise in what is kept cannot lengthen a step.
MAX_SHRUNK_CUT = 0.1
#: Q'Ω counts as having full rank if no diagonal entry of the R of its QR decomposition is below this fraction of the
#: largest.
FULL_RANK = 1e-8
#: Rows of Y converted to float64 at once: few, so that they stay in the processor's cache.
ROWS_AT_ONCE = 512

ProjectionSolver = Literal["least_squares", "nystrom"]
PROJECTION_SOLVERS: tuple[ProjectionSolver, ...] = get_args(ProjectionSolver)


@dataclass(frozen=True)
class SubspaceDirection:
    """
    :param vector: v, shape ``(d,)``; zero when nothing was observed, and not finite if Y or ĝ is not
    :param rank: number of eigenvalues of M̃ that were kept
    :param isotropic_curvature: μ = ρ·tr M̂/d; zero without shrinkage
    :param noise_form: e'v(e), where v(e) is the direction that the vector e would have instead of ĝ; zero without e
    """

    vector: th.Tensor
    rank: int
    isotropic_curvature: float = 0.0
    noise_form: float = 0.0


def subspace_direction(
    statistic: th.Tensor,
    omega: th.Tensor,
    gradient: th.Tensor,
    projection_solver: ProjectionSolver = "least_squares",
    shrinkage: float = 0.0,
    noise: th.Tensor | None = None,
) -> SubspaceDirection:
    """
    Uncertainty-aware update direction (paper, Algorithm 1, with the appendix's projection of an averaged matrix).

    It keeps the singular values σ_i > σ_1·max(d, m)·ε of Y and the eigenvalues λ > λ_max·ℓ·ε of M̃, where ℓ is the
    number of singular values kept and ε the resolution of float32. Without shrinkage, v = QVΛ⁻¹V'Q'ĝ. With it,
    v = QV((1-ρ)Λ + μI)⁻¹V'Q'ĝ + (ĝ - QVV'Q'ĝ)/μ: what was cut counts as zero, so its curvature is μ. A trace that is
    not positive, or not finite, gives a direction that is not finite. All in float64, O(d·m²) operations.

    :param statistic: Y, shape ``(d, m)``
    :param omega: Ω, shape ``(d, m)``
    :param gradient: ĝ, shape ``(d,)``
    :param projection_solver: ``"least_squares"`` (the paper's) or ``"nystrom"``
    :param shrinkage: ρ in [0, 1)
    :param noise: e, shape ``(d,)``, to measure in the metric of the direction
    :return: the direction, of the type and on the device of ``gradient``, the rank kept, μ and e'v(e)
    """
    n_params, n_projections = statistic.shape
    cut = max(n_params, n_projections) * RESOLUTION
    if shrinkage > 0.0:
        cut = min(cut, MAX_SHRUNK_CUT)
    gram, sketched, correlated = _products_with(statistic, [omega, gradient[:, None]])
    refused = SubspaceDirection(th.full_like(gradient, th.nan), 0)
    if not bool(gram.isfinite().all()) or not bool(gradient.isfinite().all()):
        return refused
    isotropic = 0.0
    if shrinkage > 0.0:
        isotropic = shrinkage * sketched.trace().item() / th.linalg.vector_norm(omega).double().square().item()
        if not 0.0 < isotropic < math.inf:
            return refused
    S, Vh = _singular_values(gram) if cut > CUT_FOR_GRAM else _exact_singular_values(statistic)
    kept = S > S[0] * cut
    if not bool(kept.any()):
        return SubspaceDirection(th.zeros_like(gradient), 0)
    S, Vh = S[kept], Vh[kept]
    W = Vh.T / S

    if projection_solver == "nystrom":
        M = _nystrom(S[:, None] * Vh, sketched)
    else:
        M = _least_squares((sketched @ W).T, S[:, None] * Vh)
    eigenvalues, V = th.linalg.eigh((M + M.T) / 2)
    if projection_solver == "nystrom" and n_projections < n_params:
        half = max(1, n_projections // 2)
        eigenvalues, V = eigenvalues[-half:], V[:, -half:]
    kept = eigenvalues > eigenvalues[-1].clamp(min=0) * len(M) * RESOLUTION
    eigenvalues, V = eigenvalues[kept], V[:, kept]

    reduced = W.T @ correlated.T
    curvature = (1.0 - shrinkage) * eigenvalues + isotropic
    noise_form = 0.0
    if noise is not None:
        exact = sum(statistic[rows].T.double() @ noise[rows].double() for rows in _row_blocks(statistic))
        squares = (V.T @ W.T @ exact.cpu()).square()  # type: ignore[union-attr]
        noise_form = (squares / curvature).sum().item()
        if shrinkage > 0.0:
            noise_form += (noise.double().square().sum().item() - squares.sum().item()) / isotropic
    y = V @ ((V.T @ reduced) / curvature[:, None])
    if shrinkage == 0.0:
        return SubspaceDirection(_combine_columns(statistic, W @ y).squeeze(1), len(eigenvalues), 0.0, noise_form)
    y -= V @ (V.T @ reduced) / isotropic
    vector = _combine_columns(statistic, W @ y, gradient[:, None], 1.0 / isotropic).squeeze(1)
    return SubspaceDirection(vector, len(eigenvalues), isotropic, noise_form)


def _least_squares(projected_omega: th.Tensor, projected_statistic: th.Tensor) -> th.Tensor:
    """
    The least-squares solution M̃ of M̃(Q'Ω) = Q'Y, shape ``(ℓ, ℓ)``, from Q'Ω and Q'Y, each of shape ``(ℓ, m)``.
    """
    # Not torch.linalg.lstsq: its driver for rank-deficient systems gives different last digits at each call
    orthonormal, triangular = th.linalg.qr(projected_omega.T)
    sizes = triangular.diagonal().abs()
    if bool(sizes.amin() > FULL_RANK * sizes.amax()):
        # nearly always the case, since random directions span the range: several times faster than a pseudo-inverse
        return th.linalg.solve_triangular(triangular, orthonormal.T @ projected_statistic.T, upper=True).T
    rtol = max(projected_omega.shape) * th.finfo(th.float64).eps
    return projected_statistic @ th.linalg.pinv(projected_omega, rtol=rtol)


def _nystrom(projected_statistic: th.Tensor, sketched: th.Tensor) -> th.Tensor:
    """Q'Y(Ω'Y)⁺Y'Q from Q'Y, shape ``(ℓ, m)``, and Ω'Y, shape ``(m, m)``; without negative eigenvalues."""
    eigenvalues, V = th.linalg.eigh((sketched + sketched.T) / 2)
    kept = eigenvalues > eigenvalues[-1].clamp(min=0) * len(sketched) * RESOLUTION
    half = projected_statistic @ (V[:, kept] / eigenvalues[kept].sqrt())
    return half @ half.T


def _row_blocks(matrix: th.Tensor) -> list[slice]:
    n_rows = at_once(ROWS_AT_ONCE, matrix.device)
    return [slice(start, start + n_rows) for start in range(0, len(matrix), n_rows)]


def _exact_singular_values(matrix: th.Tensor) -> tuple[th.Tensor, th.Tensor]:
    """S and V' of a matrix of few rows, from the R of its QR decomposition."""
    _, S, Vh = th.linalg.svd(th.linalg.qr(matrix.double(), mode="r").R.cpu(), full_matrices=False)
    return S, Vh


def _singular_values(gram: th.Tensor) -> tuple[th.Tensor, th.Tensor]:
    """S and V' of Y from Y'Y, largest first."""
    eigenvalues, V = th.linalg.eigh(gram)
    return eigenvalues.clamp(min=0.0).sqrt().flip(0), V.T.flip(0)


def _products_with(matrix: th.Tensor, others: list[th.Tensor]) -> list[th.Tensor]:
    """Y'Y of a matrix Y, and X'Y of each other matrix X, in float64, in one product for each block of rows."""
    parts = [matrix, *others]
    sizes = [part.shape[1] for part in parts]
    half = -(-sizes[0] // 2)
    n_rows = min(at_once(ROWS_AT_ONCE, matrix.device), len(matrix))
    total = th.zeros(sum(sizes), sizes[0], dtype=th.float64, device=matrix.device)
    exact = th.empty(sum(sizes), n_rows, dtype=th.float64, device=matrix.device)
    for rows in _row_blocks(matrix):
        block = exact[:, : len(matrix[rows])]
        # the matrices are column-major, so their transposes have the memory layout for which the product is fastest
        for part, place in zip(parts, block.split(sizes), strict=True):
            place.copy_(part[rows].T)
        # Y'Y is symmetric: a quarter of it follows from another
        total[:, :half].addmm_(block, block[:half].T)
        total[half:, half:].addmm_(block[half:], block[half : sizes[0]].T)
    total[:half, half:] = total[half : sizes[0], :half].T
    return list(total.cpu().split(sizes))


def _combine_columns(
    matrix: th.Tensor, weights: th.Tensor, added: th.Tensor | None = None, scale: float = 0.0
) -> th.Tensor:
    """MX, or MX + sA, in float64, a block of rows at a time, returned in M's type and on its device."""
    weights = weights.to(matrix.device)
    blocks = []
    for rows in _row_blocks(matrix):
        block = matrix[rows].double() @ weights
        if added is not None:
            block.add_(added[rows].double(), alpha=scale)
        blocks.append(block.to(matrix.dtype))
    return th.cat(blocks)
