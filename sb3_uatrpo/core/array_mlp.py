"""
A small network on NumPy arrays, forward and backward.

One row through two layers of 64 units takes a few microseconds of arithmetic. A framework that keeps a graph and checks
for hooks around each product takes several times as long. Acting and the critic's minibatches are both that small.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]


class Activation(NamedTuple):
    """φ, which may write its result over its argument, and φ'(z) as a function of φ(z): an array, or a number."""

    apply: Callable[[Array], Array]
    slope: Callable[[Array], Any]


IDENTITY = Activation(lambda z: z, lambda y: 1.0)
TANH = Activation(lambda z: np.tanh(z, out=z), lambda y: 1.0 - y * y)
RELU = Activation(lambda z: np.maximum(z, 0.0, out=z), lambda y: y > 0.0)


@dataclass(frozen=True)
class ArrayLayer:
    """y = φ(Wx + b), with W of shape ``(o, i)``."""

    weight: Array
    bias: Array
    activation: Activation


@dataclass(frozen=True)
class ArrayMLP:
    """
    A chain of dense layers. The caller checks whether results are finite, and NumPy warns of overflow unless its
    ``errstate`` says otherwise.
    """

    layers: tuple[ArrayLayer, ...]

    def __call__(self, inputs: Array) -> Array:
        """:return: outputs of the last layer, shape ``(n, o)``, for inputs of shape ``(n, i)``"""
        if len(inputs) > 1:
            return self.outputs(inputs)[-1]
        # a matrix times a vector takes half as long as one row times a transposed matrix
        row = inputs[0]
        for layer in self.layers:
            row = layer.weight.dot(row)
            row += layer.bias
            row = layer.activation.apply(row)
        return row[None]

    def outputs(self, inputs: Array) -> list[Array]:
        """:return: outputs of each layer, shapes ``(n, o)``, for inputs of shape ``(n, i)``"""
        outputs = []
        for layer in self.layers:
            inputs = inputs @ layer.weight.T
            inputs += layer.bias
            inputs = layer.activation.apply(inputs)
            outputs.append(inputs)
        return outputs

    def squared_error(self, inputs: Array, targets: Array, gradients: list[Array]) -> float:
        """
        Mean of (f(x_i) - t_i)² for one output f, and its gradient.

        :param inputs: x, shape ``(n, i)``
        :param targets: t, shape ``(n,)``
        :param gradients: arrays that the gradients of W and b are written into, layer by layer from the first
        :return: the mean
        """
        outputs = self.outputs(inputs)
        errors = outputs[-1][:, 0] - targets
        cotangents = (2.0 / len(targets) * errors)[:, None]
        for i in range(len(self.layers) - 1, -1, -1):
            cotangents = cotangents * self.layers[i].activation.slope(outputs[i])
            np.matmul(cotangents.T, outputs[i - 1] if i > 0 else inputs, out=gradients[2 * i])
            np.add.reduce(cotangents, axis=0, out=gradients[2 * i + 1])
            if i > 0:
                cotangents = cotangents @ self.layers[i].weight
        return float(errors.dot(errors)) / len(targets)
