"""The radius of the uncertainty set by its formula."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sb3_uatrpo.core.confidence import confidence_radius_squared
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
