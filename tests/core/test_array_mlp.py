"""Small networks on arrays beside the same in torch, in float64."""

import itertools

import numpy as np
import pytest
import torch as th
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from sb3_uatrpo.core.array_mlp import IDENTITY, RELU, TANH, ArrayLayer, ArrayMLP

ACTIVATIONS = {TANH: nn.Tanh, RELU: nn.ReLU, IDENTITY: nn.Identity}


def random_mlp(rng, sizes, activation) -> ArrayMLP:
    layers = []
    for i, (n_inputs, n_outputs) in enumerate(itertools.pairwise(sizes)):
        function = activation if i < len(sizes) - 2 else IDENTITY
        layers.append(ArrayLayer(rng.normal(size=(n_outputs, n_inputs)), rng.normal(size=n_outputs), function))
    return ArrayMLP(tuple(layers))


def in_torch(mlp: ArrayMLP) -> nn.Sequential:
    """The same network, with parameters of its own."""
    parts: list[nn.Module] = []
    for layer in mlp.layers:
        linear = nn.Linear(*layer.weight.shape[::-1], dtype=th.float64)
        linear.weight.data, linear.bias.data = th.tensor(layer.weight), th.tensor(layer.bias)
        parts += [linear, ACTIVATIONS[layer.activation]()]
    return nn.Sequential(*parts)


networks = {
    "seed": st.integers(0, 2**32 - 1),
    "sizes": st.lists(st.integers(1, 6), min_size=1, max_size=3),
    "activation": st.sampled_from(list(ACTIVATIONS)),
    "n": st.integers(1, 7),
}


@settings(max_examples=60)
@given(**networks)
def test_outputs(seed, sizes, activation, n):
    rng = np.random.default_rng(seed)
    mlp = random_mlp(rng, [*sizes, 3], activation)
    inputs = rng.normal(size=(n, sizes[0]))
    kept = inputs.copy()
    expected = in_torch(mlp)(th.tensor(inputs)).detach().numpy()
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
    network = in_torch(mlp)
    expected = nn.functional.mse_loss(network(th.tensor(inputs)).flatten(), th.tensor(targets))
    expected.backward()
    assert mlp.squared_error(inputs, targets, gradients) == pytest.approx(expected.item(), rel=1e-10)
    for param, gradient in zip(network.parameters(), gradients, strict=True):
        np.testing.assert_allclose(gradient, param.grad.numpy(), rtol=1e-9, atol=1e-11)
