"""R_n², the step length, conjugate gradients and the line search."""

import math

import numpy as np
import pytest
import torch as th
from hypothesis import given
from hypothesis import strategies as st

from sb3_uatrpo.core.confidence import confidence_radius_squared
from sb3_uatrpo.core.conjugate_gradient import conjugate_gradient
from sb3_uatrpo.core.line_search import Evaluation, backtracking_line_search
from sb3_uatrpo.core.step_length import step_length
from tests.reference import radius_squared


@given(d=st.integers(1, 10**7), n=st.integers(1, 10**6), alpha=st.floats(1e-6, 1 - 1e-6))
def test_radius(d, n, alpha):
    found = confidence_radius_squared(d, n, alpha)
    assert found == pytest.approx(radius_squared(d, n, alpha))
    assert found > d / n
    assert confidence_radius_squared(d, 2 * n, alpha) == pytest.approx(found / 2)


def test_radius_by_hand():
    # d = 100, n = 1, α = 1/e: 100 + 2·10 + 2
    assert confidence_radius_squared(100, 1, math.exp(-1)) == pytest.approx(122.0)


@given(delta=st.floats(1e-6, 10.0), norm=st.floats(1e-12, 1e12))
def test_step_ends_on_the_boundary(delta, norm):
    assert step_length(delta, norm) ** 2 * norm == pytest.approx(2 * delta)


@pytest.mark.parametrize("norm", [0.0, -1.0, math.nan, math.inf])
def test_an_unbounded_direction_has_no_length(norm):
    assert math.isnan(step_length(0.01, norm))


@given(seed=st.integers(0, 1000), scale=st.floats(1e-15, 1e10))
def test_conjugate_gradient_solves_and_does_not_depend_on_scale(seed, scale):
    rng = np.random.default_rng(seed)
    A = rng.normal(size=(8, 8))
    A = A @ A.T + 0.1 * np.eye(8)
    b = rng.normal(size=8)
    x = conjugate_gradient(lambda p: th.as_tensor(A) @ p, th.as_tensor(scale * b), 100).numpy()
    expected = scale * np.linalg.solve(A, b)
    assert np.linalg.norm(x - expected) <= 1e-3 * np.linalg.norm(expected)


def test_conjugate_gradient_stops_after_max_steps():
    A = th.diag(th.arange(1.0, 11.0))
    products = []
    conjugate_gradient(lambda p: products.append(0) or A @ p, th.ones(10), 3)
    assert len(products) == 3


@pytest.mark.parametrize("b", [0.0, math.nan])
def test_conjugate_gradient_of_nothing_is_zero(b):
    assert not conjugate_gradient(lambda p: p, th.full((4,), b), 10).any()


def test_conjugate_gradient_ends_where_the_curvature_does():
    A = th.diag(th.tensor([1.0, -1.0]))
    x = conjugate_gradient(lambda p: A @ p, th.tensor([1.0, 1.0]), 10)
    assert bool(x.isfinite().all())
    assert bool(conjugate_gradient(lambda p: p * math.nan, th.ones(2), 10).isfinite().all())


def search(objectives, kls, max_kl=1.0, max_iter=10, before=0.0):
    tried = []

    def evaluate(fraction):
        i = len(tried)
        tried.append(fraction)
        return Evaluation(objectives[min(i, len(objectives) - 1)], kls[min(i, len(kls) - 1)])

    return backtracking_line_search(evaluate, before, max_kl, 0.5, max_iter), tried


def test_the_full_step_is_taken_if_it_may_be():
    result, tried = search([0.0], [1.0])
    assert (result.step_fraction, tried) == (1.0, [1.0])
    assert result.accepted == result.proposed == Evaluation(0.0, 1.0)


def test_the_largest_fraction_wins():
    result, tried = search([-1.0, 5.0, 1.0], [0.1, 1.1, 0.9])
    assert (result.step_fraction, tried) == (0.25, [1.0, 0.5, 0.25])
    assert result.proposed == Evaluation(-1.0, 0.1)
    assert result.accepted == Evaluation(1.0, 0.9)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_non_finite_values_are_rejected(bad):
    assert search([bad, 1.0], [0.1])[0].step_fraction == 0.5
    assert search([1.0], [bad, 0.1])[0].step_fraction == 0.5


def test_no_fraction_is_accepted_after_max_iter():
    result, tried = search([-1.0], [0.1], max_iter=4)
    assert (result.step_fraction, result.accepted) == (0.0, None)
    assert tried == [1.0, 0.5, 0.25, 0.125]
