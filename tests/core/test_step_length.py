"""The length of a step: it ends on the boundary of the trust region."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sb3_uatrpo.core.step_length import step_length


@given(delta=st.floats(1e-6, 10.0), norm=st.floats(1e-12, 1e12))
def test_step_ends_on_the_boundary(delta, norm):
    assert step_length(delta, norm) ** 2 * norm == pytest.approx(2 * delta)


@pytest.mark.parametrize("norm", [0.0, -1.0, math.nan, math.inf])
def test_an_unbounded_direction_has_no_length(norm):
    assert math.isnan(step_length(0.01, norm))
