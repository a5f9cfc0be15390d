"""
A small network on NumPy arrays, forward and backward.

One row through two layers of 64 units takes a few microseconds of arithmetic. A framework that keeps a graph and checks
for hooks around each product takes several times as long. Acting and the critic's minibatches are both that small.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]


@dataclass(frozen=True)
class ArrayLayer:
    """
    y = φ(Wx + b).

    :param weight: W, shape ``(o, i)``
    :param bias: b, shape ``(o,)``, if there is one
    :param activate: φ; it may write its result over its argument
    :param slope: φ'(z) as a function of φ(z); None if it is not known
    """

    weight: Array
    bias: Array | None
    activate: Callable[[Array], Array]
    slope: Callable[[Array], Array] | None


@dataclass(frozen=True)
class ArrayMLP:
    """
    A chain of dense layers.

    The caller checks whether results are finite. NumPy warns of overflow unless its ``errstate`` says otherwise.

    :param layers: the layers, in the order in which inputs pass through them
    """

    layers: tuple[ArrayLayer, ...]

    def __call__(self, inputs: Array) -> Array:
        """
        :param inputs: shape ``(n, i)``
        :return: outputs of the last layer, shape ``(n, o)``
        """
        if len(inputs) > 1:
            return self.outputs(inputs)[-1]
        # a matrix times a vector takes half as long as one row times a transposed matrix
        row = inputs[0]
        for layer in self.layers:
            row = layer.weight.dot(row)
            if layer.bias is not None:
                row += layer.bias
            row = layer.activate(row)
        return row[None]

    def outputs(self, inputs: Array) -> list[Array]:
        """
        :param inputs: shape ``(n, i)``
        :return: outputs of each layer, shapes ``(n, o)``
        """
        found = []
        for layer in self.layers:
            inputs = inputs @ layer.weight.T
            if layer.bias is not None:
                inputs += layer.bias
            inputs = layer.activate(inputs)
            found.append(inputs)
        return found

    def squared_error(self, inputs: Array, targets: Array, gradients: list[Array]) -> float:
        """
        Mean of (f(x_i) - t_i)² for one output f, and its gradient. Every layer's slope must be known.

        :param inputs: x, shape ``(n, i)``
        :param targets: t, shape ``(n,)``
        :param gradients: arrays that the gradients of W and b are written into, layer by layer from the first
        :return: the mean
        """
        outputs = self.outputs(inputs)
        errors = outputs[-1][:, 0] - targets
        cotangents = (2.0 / len(targets) * errors)[:, None]
        places = iter(reversed(gradients))
        for i in range(len(self.layers) - 1, -1, -1):
            layer = self.layers[i]
            assert layer.slope is not None
            cotangents = cotangents * layer.slope(outputs[i])
            if layer.bias is not None:
                np.add.reduce(cotangents, axis=0, out=next(places))
            np.matmul(cotangents.T, outputs[i - 1] if i > 0 else inputs, out=next(places))
            if i > 0:
                cotangents = cotangents @ layer.weight
        return float(errors.dot(errors)) / len(targets)
