"""Small networks on arrays beside the same in loops and by numerical differences, in float64."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sb3_uatrpo.core.array_mlp import ArrayLayer, ArrayMLP
from tests.reference import mean_squared_error, mlp_output

ACTIVATIONS = {
    "tanh": (np.tanh, lambda y: 1.0 - y * y),
    "relu": (lambda z: np.maximum(z, 0.0), lambda y: y > 0.0),
    "identity": (lambda z: z, lambda y: 1.0),
}


def random_mlp(rng, sizes, activation, biases) -> ArrayMLP:
    layers = []
    for i, (n_inputs, n_outputs) in enumerate(itertools.pairwise(sizes)):
        bias = rng.normal(size=n_outputs) if biases[i] else None
        functions = ACTIVATIONS[activation if i < len(sizes) - 2 else "identity"]
        layers.append(ArrayLayer(rng.normal(size=(n_outputs, n_inputs)), bias, *functions))
    return ArrayMLP(tuple(layers))


def described(mlp: ArrayMLP) -> list[tuple]:
    return [(layer.weight, layer.bias, layer.activate) for layer in mlp.layers]


networks = {
    "seed": st.integers(0, 2**32 - 1),
    "sizes": st.lists(st.integers(1, 6), min_size=1, max_size=3),
    "activation": st.sampled_from(sorted(ACTIVATIONS)),
    "with_bias": st.booleans(),
    "n": st.integers(1, 7),
}


@settings(max_examples=60, deadline=None)
@given(**networks)
def test_outputs(seed, sizes, activation, with_bias, n):
    rng = np.random.default_rng(seed)
    mlp = random_mlp(rng, [*sizes, 3], activation, [with_bias] * len(sizes))
    inputs = rng.normal(size=(n, sizes[0]))
    kept = inputs.copy()
    expected = np.array([mlp_output(described(mlp), row) for row in inputs])
    np.testing.assert_allclose(mlp(inputs), expected, rtol=1e-10, atol=1e-12)
    np.testing.assert_array_equal(inputs, kept)


@settings(max_examples=40, deadline=None)
@given(**networks)
def test_the_gradient_of_the_squared_error(seed, sizes, activation, with_bias, n):
    rng = np.random.default_rng(seed)
    mlp = random_mlp(rng, [*sizes, 1], activation, [with_bias] * len(sizes))
    inputs, targets = rng.normal(size=(n, sizes[0])), rng.normal(size=n)
    params = [param for layer in mlp.layers for param in (layer.weight, layer.bias) if param is not None]
    gradients = [np.full_like(param, np.nan) for param in params]
    loss = mlp.squared_error(inputs, targets, gradients)
    assert loss == pytest.approx(mean_squared_error(described(mlp), inputs, targets), rel=1e-10)
    h = 1e-6
    for param, gradient in zip(params, gradients, strict=True):
        for place in np.ndindex(param.shape):
            kept = param[place]
            param[place] = kept + h
            above = mean_squared_error(described(mlp), inputs, targets)
            param[place] = kept - h
            below = mean_squared_error(described(mlp), inputs, targets)
            param[place] = kept
            assert gradient[place] == pytest.approx((above - below) / (2 * h), rel=1e-4, abs=1e-5)
