"""Small networks on arrays beside the same in loops and by numerical differences, in float64."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sb3_uatrpo.core.array_mlp import IDENTITY, RELU, TANH, ArrayLayer, ArrayMLP
from tests.reference import mean_squared_error, mlp_output

ACTIVATIONS = {"tanh": TANH, "relu": RELU, "identity": IDENTITY}


def random_mlp(rng, sizes, activation) -> ArrayMLP:
    layers = []
    for i, (n_inputs, n_outputs) in enumerate(itertools.pairwise(sizes)):
        function = ACTIVATIONS[activation if i < len(sizes) - 2 else "identity"]
        layers.append(ArrayLayer(rng.normal(size=(n_outputs, n_inputs)), rng.normal(size=n_outputs), function))
    return ArrayMLP(tuple(layers))


def described(mlp: ArrayMLP) -> list[tuple]:
    plain = {TANH: np.tanh, RELU: lambda z: np.maximum(z, 0.0), IDENTITY: lambda z: z}
    return [(layer.weight, layer.bias, plain[layer.activation]) for layer in mlp.layers]


networks = {
    "seed": st.integers(0, 2**32 - 1),
    "sizes": st.lists(st.integers(1, 6), min_size=1, max_size=3),
    "activation": st.sampled_from(sorted(ACTIVATIONS)),
    "n": st.integers(1, 7),
}


@settings(max_examples=60)
@given(**networks)
def test_outputs(seed, sizes, activation, n):
    rng = np.random.default_rng(seed)
    mlp = random_mlp(rng, [*sizes, 3], activation)
    inputs = rng.normal(size=(n, sizes[0]))
    kept = inputs.copy()
    expected = np.array([mlp_output(described(mlp), row) for row in inputs])
    np.testing.assert_allclose(mlp(inputs), expected, rtol=1e-10, atol=1e-12)
    np.testing.assert_array_equal(inputs, kept)


@settings(max_examples=40)
@given(**networks)
def test_the_gradient_of_the_squared_error(seed, sizes, activation, n):
    rng = np.random.default_rng(seed)
    mlp = random_mlp(rng, [*sizes, 1], activation)
    inputs, targets = rng.normal(size=(n, sizes[0])), rng.normal(size=n)
    params = [param for layer in mlp.layers for param in (layer.weight, layer.bias)]
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
