"""Conjugate gradients against an exact solution, and where they stop."""

import math

import numpy as np
import pytest
import torch as th
from hypothesis import given
from hypothesis import strategies as st

from sb3_uatrpo.core.conjugate_gradient import conjugate_gradient


@given(seed=st.integers(0, 1000), scale=st.floats(1e-15, 1e10))
def test_conjugate_gradient_solves_and_does_not_depend_on_scale(seed, scale):
    rng = np.random.default_rng(seed)
    A = rng.normal(size=(8, 8))
    A = A @ A.T + 0.1 * np.eye(8)
    b = rng.normal(size=8)
    x = conjugate_gradient(lambda p: th.as_tensor(A) @ p, th.as_tensor(scale * b), 100).numpy()
    expected = scale * np.linalg.solve(A, b)
    assert np.linalg.norm(x - expected) <= 1e-3 * np.linalg.norm(expected)


@pytest.mark.parametrize("exponent", [-100, -40, 0, 40, 100])
def test_the_squares_of_single_precision_do_not_bound_the_scale(exponent):
    """Powers of two change no digit."""
    A = th.diag(th.arange(1.0, 5.0))
    b = th.tensor([1.0, -2.0, 0.5, 3.0])
    scale = 2.0**exponent
    assert th.equal(
        conjugate_gradient(lambda p: A @ p, scale * b, 3), scale * conjugate_gradient(lambda p: A @ p, b, 3)
    )


def test_conjugate_gradient_stops_after_max_steps():
    A = th.diag(th.arange(1.0, 11.0))
    products = []
    conjugate_gradient(lambda p: products.append(0) or A @ p, th.ones(10), 3)
    assert len(products) == 3


def test_conjugate_gradient_of_zero_is_zero():
    assert not conjugate_gradient(lambda p: p, th.zeros(4), 10).any()


@pytest.mark.parametrize("b", [math.nan, math.inf, -math.inf])
def test_conjugate_gradient_of_a_number_that_is_not_finite_is_not_a_number(b):
    rhs = th.ones(4)
    rhs[2] = b
    assert conjugate_gradient(lambda p: p, rhs, 10).isnan().all()


@pytest.mark.parametrize(
    ("diagonal", "b", "steps"),
    [((1.0, -1.0), (1.0, 1.0), 0), ((1.0, -2.0), (1.0, 1.0), 0), ((3.0, -1.0), (1.0, 0.5), 1)],
)
def test_no_step_is_taken_where_the_curvature_is_not_positive(diagonal, b, steps):
    A, b = th.diag(th.tensor(diagonal)), th.tensor(b)
    expected = conjugate_gradient(lambda p: A @ p, b, steps) if steps else th.zeros(2)
    assert th.equal(conjugate_gradient(lambda p: A @ p, b, 10), expected)


def test_conjugate_gradient_without_a_single_finite_product_has_no_solution():
    assert bool(conjugate_gradient(lambda p: p * math.nan, th.ones(2), 10).isnan().all())
    products = iter([th.tensor([1.0, 2.0]), th.full((2,), math.nan)])
    assert bool(conjugate_gradient(lambda p: next(products), th.ones(2), 10).isfinite().all())
