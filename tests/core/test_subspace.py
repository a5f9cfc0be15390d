"""The direction within the observed subspace against an explicit Q, and the laws it must keep."""

import numpy as np
import pytest
import torch as th
from hypothesis import given, settings
from hypothesis import strategies as st

from sb3_uatrpo.core import subspace as module
from sb3_uatrpo.core.subspace import PROJECTION_SOLVERS, subspace_direction
from tests.reference import hutchinson_trace, projected_direction


def psd(d: int, rank: int, seed: int, decay: float = 0.7) -> np.ndarray:
    rng = np.random.default_rng(seed)
    U = np.linalg.qr(rng.normal(size=(d, rank)))[0]
    return (U * decay ** np.arange(rank)) @ U.T


def problem(d: int, m: int, rank: int, seed: int):
    rng = np.random.default_rng(seed + 1)
    M = psd(d, rank, seed)
    omega, g = rng.normal(size=(d, m)), rng.normal(size=d)
    return M, omega, g


def direction(M, omega, g, solver="least_squares", shrinkage=0.0):
    return subspace_direction(*(th.as_tensor(array) for array in (M @ omega, omega, g)), solver, shrinkage)


solvers = pytest.mark.parametrize("solver", PROJECTION_SOLVERS)
with_and_without_shrinkage = pytest.mark.parametrize("shrinkage", [0.0, 0.5])


@solvers
@pytest.mark.parametrize("shrinkage", [0.0, 1e-3, 0.3, 0.75, 0.97])
@pytest.mark.parametrize(
    ("d", "m", "rank"), [(30, 8, 30), (30, 8, 5), (30, 29, 12), (12, 20, 12), (12, 40, 7), (5, 1, 5), (900, 20, 15)]
)
def test_equals_the_dense_reference_with_an_explicit_basis(solver, shrinkage, d, m, rank):
    for seed in range(3 if shrinkage else 5):
        M, omega, g = problem(d, m, rank, seed)
        found = direction(M, omega, g, solver, shrinkage)
        expected, kept, _ = projected_direction(M @ omega, omega, g, solver, shrinkage)
        assert found.rank == kept
        mu = shrinkage * hutchinson_trace(M @ omega, omega) / d
        assert found.isotropic_curvature == pytest.approx(mu)
        assert np.linalg.norm(found.vector.numpy() - expected) <= 1e-6 * np.linalg.norm(expected)


@solvers
@with_and_without_shrinkage
def test_the_algebra_is_in_float64_whatever_comes_in(solver, shrinkage):
    M, omega, g = problem(60, 30, 60, 0)
    arrays = [array.astype(np.float32) for array in (M @ omega, omega, g)]
    found = subspace_direction(*map(th.as_tensor, arrays), solver, shrinkage)
    expected, rank, _ = projected_direction(*(array.astype(np.float64) for array in arrays), solver, shrinkage)
    assert found.vector.dtype == th.float32
    assert found.rank == rank
    assert np.linalg.norm(found.vector.numpy() - expected) <= 1e-6 * np.linalg.norm(expected)


@pytest.mark.parametrize("rank", [4, 12])
@solvers
def test_with_as_many_projections_as_parameters_it_is_the_pseudo_inverse(solver, rank):
    M, omega, g = problem(12, 12 if solver == "least_squares" else 20, rank, 0)
    found = direction(M, omega, g, solver)
    expected = np.linalg.pinv(M, rcond=1e-10) @ g
    assert found.rank == rank
    assert np.linalg.norm(found.vector.numpy() - expected) <= 1e-5 * np.linalg.norm(expected)


@solvers
@settings(max_examples=80)
@given(
    d=st.integers(2, 40),
    m=st.integers(1, 50),
    seed=st.integers(0, 10_000),
    rho=st.just(0.0) | st.floats(0.01, 0.99),
    data=st.data(),
)
def test_laws(solver, d, m, seed, rho, data):
    """
    The direction climbs the gradient, and scales as M⁻¹g does. Outside the range of Y, it is the gradient over μ with
    shrinkage, and zero without.
    """
    rank = data.draw(st.integers(1, d))
    M, omega, g = problem(d, m, rank, seed)
    found = direction(M, omega, g, solver, rho)
    v, mu = found.vector.numpy(), found.isotropic_curvature
    _, _, Q = projected_direction(M @ omega, omega, g)
    assert Q.T @ Q == pytest.approx(np.eye(Q.shape[1]), abs=1e-10)
    assert 1 <= found.rank <= min(m, d)
    outside = v - Q @ (Q.T @ v)
    if rho:
        assert np.linalg.norm(outside - (g - Q @ (Q.T @ g)) / mu) <= 1e-6 * np.linalg.norm(g) / mu
        assert 0 < v @ g <= (g @ g) / mu * (1 + 1e-9)
    else:
        assert np.linalg.norm(outside) <= 1e-6 * np.linalg.norm(v)
        assert v @ g >= 0
    for scaled in (direction(4.0 * M, omega, g, solver, rho), direction(M, omega, g / 4.0, solver, rho)):
        assert np.linalg.norm(4.0 * scaled.vector.numpy() - v) <= (1e-6 if rho else 1e-5) * np.linalg.norm(v)


@settings(max_examples=30)
@given(d=st.integers(1, 60), m=st.integers(1, 20), seed=st.integers(0, 10_000))
def test_the_implicit_basis_is_orthonormal(d, m, seed):
    """Q = YW has orthonormal columns and spans the range of Y, though it is never formed."""
    Y = np.random.default_rng(seed).normal(size=(d, m))
    S, Vh = module._exact_singular_values(th.as_tensor(Y))
    kept = S > S[0] * max(d, m) * module.RESOLUTION
    Q = Y @ (Vh[kept].T / S[kept]).numpy()
    assert Q.T @ Q == pytest.approx(np.eye(Q.shape[1]), abs=1e-9)
    assert Q @ (Q.T @ Y) == pytest.approx(Y, abs=1e-5 * max(d, m))


@settings(max_examples=10)
@given(d=st.integers(840, 3000), m=st.integers(1, 40), decades=st.floats(0.0, 6.0), seed=st.integers(0, 10_000))
def test_the_basis_from_the_gram_matrix_is_orthonormal_above_the_cut(d, m, decades, seed):
    """Many parameters: S and V come from Y'Y, which is exact enough for every singular value that is kept."""
    generator = np.random.default_rng(seed)
    left, right = (np.linalg.qr(generator.normal(size=(rows, m)))[0] for rows in (d, m))
    spectrum = np.logspace(0.0, -decades, m)
    Y = (left * spectrum) @ right.T
    cut = max(d, m) * module.RESOLUTION
    assert cut > module.CUT_FOR_GRAM
    S, Vh = module._singular_values(th.as_tensor(Y.T @ Y))
    kept = (S > S[0] * cut).numpy()
    assert S.numpy()[kept] == pytest.approx(spectrum[kept], rel=1e-7)
    Q = Y @ (Vh[kept].T / S[kept]).numpy()
    assert Q.T @ Q == pytest.approx(np.eye(Q.shape[1]), abs=1e-7)


@solvers
def test_from_the_gram_matrix_or_from_a_qr_decomposition_the_direction_is_the_same(solver, monkeypatch):
    M, omega, g = problem(900, 20, 15, 0)
    by_gram = direction(M, omega, g, solver)
    monkeypatch.setattr(module, "CUT_FOR_GRAM", np.inf)
    exact = direction(M, omega, g, solver)
    assert by_gram.rank == exact.rank
    assert by_gram.vector.numpy() == pytest.approx(exact.vector.numpy(), rel=1e-5)


@with_and_without_shrinkage
@pytest.mark.parametrize("rows", [1, 7, 30, 1000])
def test_blocks_of_rows_do_not_matter(rows, shrinkage, monkeypatch):
    M, omega, g = problem(30, 8, 30, 0)
    whole = direction(M, omega, g, shrinkage=shrinkage)
    monkeypatch.setattr(module, "ROWS_AT_ONCE", rows)
    cut = direction(M, omega, g, shrinkage=shrinkage)
    assert cut.rank == whole.rank
    assert cut.vector.numpy() == pytest.approx(whole.vector.numpy(), rel=1e-8)


def test_an_identity_metric_projects_the_gradient():
    omega, g = np.random.default_rng(0).normal(size=(20, 6)), np.random.default_rng(1).normal(size=20)
    Q = np.linalg.qr(omega)[0]
    assert direction(np.eye(20), omega, g).vector.numpy() == pytest.approx(Q @ Q.T @ g, abs=1e-9)


def test_small_eigenvalues_are_not_divided_by():
    """What the sketch cannot resolve in float32 must not set the step."""
    M = np.diag([1.0, 0.5, 1e-9, 0.0])
    found = direction(M, np.random.default_rng(0).normal(size=(4, 4)), np.ones(4))
    assert found.rank == 2
    assert found.vector.numpy() == pytest.approx([1.0, 2.0, 0.0, 0.0], abs=1e-5)


@solvers
@pytest.mark.parametrize(("smallest", "kept"), [(2.0, 4), (8.0, 5)])
def test_the_cut_on_eigenvalues_grows_with_their_number(solver, smallest, kept):
    """λ > λ_max·ℓ·ε with ℓ = 5; Ω brings the last singular value above its own cut."""
    M = np.diag([1.0] * 4 + [smallest * module.RESOLUTION])
    assert direction(M, np.diag([1.0] * 4 + [1e3]), np.ones(5), solver).rank == kept


def test_projections_that_do_not_span_the_subspace_give_the_solution_of_least_norm():
    rng = np.random.default_rng(0)
    projected_omega, projected_statistic = rng.normal(size=(3, 6)), rng.normal(size=(3, 6))
    projected_omega[2] = projected_omega[1]
    found = module._least_squares(th.as_tensor(projected_omega), th.as_tensor(projected_statistic))
    expected = np.linalg.lstsq(projected_omega.T, projected_statistic.T, rcond=1e-12)[0].T
    np.testing.assert_allclose(found.numpy(), expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(("shrinkage", "rank"), [(0.0, 1), (0.5, 3)])
def test_with_shrinkage_the_cut_on_singular_values_has_a_limit(shrinkage, rank):
    """That of d = 2 million parameters would be 0.24."""
    d = 2_000_000
    omega = th.zeros(d, 3)
    omega[th.arange(3), th.arange(3)] = 1.0
    statistic = omega * th.tensor([1.0, 0.2, 0.15])
    assert subspace_direction(statistic, omega, th.ones(d), shrinkage=shrinkage).rank == rank


@solvers
def test_nothing_observed_gives_zero(solver):
    found = direction(np.zeros((6, 6)), np.ones((6, 3)), np.ones(6), solver)
    assert found.rank == 0
    assert not found.vector.any()


@solvers
@with_and_without_shrinkage
@pytest.mark.parametrize("spoilt", ["statistic", "gradient"])
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_non_finite_input_gives_a_non_finite_direction(solver, shrinkage, spoilt, value):
    M, omega, g = problem(6, 3, 6, 0)
    Y = M @ omega
    (Y if spoilt == "statistic" else g)[2] = value
    found = subspace_direction(th.as_tensor(Y), th.as_tensor(omega), th.as_tensor(g), solver, shrinkage)
    assert not bool(found.vector.isfinite().any())


def test_nystrom_is_closer_to_the_true_curvature():
    """v'Mv of the projected matrix against that of the matrix itself, as the module's documentation claims."""
    ratios = {}
    for solver in PROJECTION_SOLVERS:
        values = []
        for seed in range(20):
            M = psd(200, 150, seed, decay=0.97)
            _, omega, g = problem(200, 40, 1, seed)
            v = direction(M, omega, g, solver).vector.numpy()
            values.append((v @ M @ v) / (v @ g))  # v'g = v'M̃v
        ratios[solver] = np.median(values)
    assert 1.0 <= ratios["nystrom"] < ratios["least_squares"]


# ---------------------------------------------------------------------------------------------------------- shrinkage


def test_the_trace_from_the_sketch_tends_to_the_true_one():
    """Hutchinson's estimate divided by ‖Ω‖²/dm: no bias, and the variance of d·q'Aq, A = I⊗M, on the unit sphere."""
    M = psd(60, 40, 0, decay=0.95)
    errors = {}
    for m in (10, 160):
        mus = []
        for seed in range(200):
            omega = np.random.default_rng(seed).normal(size=(60, m))
            mus.append(direction(M, omega, np.ones(60), "nystrom", 0.5).isotropic_curvature)
        traces = np.array(mus) * 60 / 0.5
        errors[m] = np.sqrt(np.mean((traces - np.trace(M)) ** 2))
        n = 60 * m
        variance = 60**2 * 2 / (n * (n + 2)) * m * (np.trace(M @ M) - np.trace(M) ** 2 / 60)
        assert errors[m] == pytest.approx(np.sqrt(variance), rel=0.2)
        assert abs(traces.mean() - np.trace(M)) <= 4 * errors[m] / np.sqrt(200)
    assert errors[160] < 0.375 * errors[10]


def test_full_projections_with_shrinkage_solve_the_shrunk_system():
    M, omega, g = problem(12, 12, 12, 0)
    found = direction(M, omega, g, shrinkage=0.4)
    mu = found.isotropic_curvature
    assert found.vector.numpy() == pytest.approx(np.linalg.solve(0.6 * M + mu * np.eye(12), g), rel=1e-5)


def test_a_small_shrinkage_is_not_close_to_none():
    """The complement grows as 1/μ: ρ → 0 leads away from the observed subspace, ρ = 0 stays in it."""
    M, omega, g = problem(30, 8, 5, 0)
    _, _, Q = projected_direction(M @ omega, omega, g)

    def share_outside(shrinkage: float) -> float:
        v = direction(M, omega, g, shrinkage=shrinkage).vector.numpy()
        return float(np.linalg.norm(v - Q @ (Q.T @ v)) / np.linalg.norm(v))

    assert share_outside(0.0) < 1e-6
    assert share_outside(1e-4) > share_outside(0.1) > share_outside(0.9) > 0.1
    assert share_outside(1e-4) > 0.99


@solvers
@pytest.mark.parametrize("scale", [0.0, -1.0])
def test_a_trace_that_is_not_positive_is_refused(solver, scale):
    """No division by μ ≤ 0: the direction says that there is none."""
    omega = np.random.default_rng(0).normal(size=(6, 3))
    found = direction(scale * np.eye(6), omega, np.ones(6), solver, 0.5)
    assert not bool(found.vector.isfinite().any())
