r"""
Products with J = ∂h/∂θ and J' for heads h that are a chain of linear layers with elementwise functions between them.

A layer z_i = Wx_i + b that is used once in computing the head h_i has ∂h_i/∂W = D_i ⊗ x_i' and ∂h_i/∂b = D_i, with
D_i = ∂h_i/∂z_i (k×o) and x_i the layer's input. Given D and x, a product with J or J' is one large matrix product for
each layer and a small one for each timestep. No column has to pass through the network again.
"""

from dataclasses import dataclass
from functools import cached_property

import torch as th

from sb3_uatrpo.core.estimates import COLUMN_BYTES, Linearization


@dataclass(frozen=True)
class Layer:
    """
    One layer at n timesteps, y = φ(Wx + b).

    :param weight: index of W among the parameters, if it is one of them
    :param bias: index of b, shape ``(o,)``, among the parameters, if it is one of them
    :param inputs: x, shape ``(n, i)``
    :param matrix: W, shape ``(o, i)``
    :param slope: φ'(z), shape ``(n, o)``; None if φ is the identity
    """

    weight: int | None
    bias: int | None
    inputs: th.Tensor
    matrix: th.Tensor
    slope: th.Tensor | None


@dataclass(frozen=True)
class LayeredLinearization(Linearization):
    """
    A linearisation whose parameters belong to a chain of layers. Results equal the base class's up to float rounding;
    the head needs no graph.

    :param layers: from the input to the first a numbers of the head
    :param log_std: index of log σ among the parameters, if it is one of them; these are the head's last a numbers
    """

    layers: tuple[Layer, ...] = ()
    log_std: int | None = None

    @property
    def _n_outputs(self) -> int:
        """a, number of outputs of the last layer."""
        return len(self.layers[-1].matrix)

    def _pulled_back(self, cotangents: th.Tensor) -> list[th.Tensor]:
        """Cotangents of the last layer's outputs, shape ``(n, c, a)``, at z of each layer, shapes ``(n, c, o)``."""
        pulled = []
        for layer in reversed(self.layers):
            if layer.slope is not None:
                cotangents = cotangents * layer.slope[:, None]
            pulled.append(cotangents)
            if layer is not self.layers[0]:
                cotangents = cotangents @ layer.matrix
        return pulled[::-1]

    @cached_property
    def _jacobians(self) -> list[th.Tensor]:
        """D of each layer, shape ``(n, a, o)``."""
        a = self._n_outputs
        return self._pulled_back(th.eye(a, dtype=self.head.dtype, device=self.head.device).repeat(len(self.head), 1, 1))

    def vjp(self, cotangents: th.Tensor) -> th.Tensor:
        width, a = len(cotangents), self._n_outputs
        rows: list[th.Tensor | None] = [None] * len(self.params)
        by_timestep = cotangents.transpose(0, 1)
        network = by_timestep[:, :, :a]
        at_outputs = self._pulled_back(network) if width == 1 else [network @ D for D in self._jacobians]
        for layer, at in zip(self.layers, at_outputs, strict=True):
            if layer.weight is not None:
                rows[layer.weight] = (at.flatten(1).T @ layer.inputs).view(width, layer.matrix.numel())
            if layer.bias is not None:
                rows[layer.bias] = at.sum(dim=0)
        if self.log_std is not None:
            rows[self.log_std] = by_timestep[:, :, a:].sum(dim=0)
        return th.cat([row for row in rows if row is not None], dim=1).T

    def jvp(self, tangents: th.Tensor) -> th.Tensor:
        n, k = self.head.shape
        width, a = tangents.shape[1], self._n_outputs
        pieces = tangents.T.split([param.numel() for param in self.params], dim=1)
        products = tangents.new_zeros(n, width, a)
        for layer, D in zip(self.layers, self._jacobians, strict=True):
            o, i = layer.matrix.shape
            if layer.weight is None:
                changes = tangents.new_zeros(n, width, o)
            else:
                changes = (layer.inputs @ pieces[layer.weight].reshape(width * o, i).T).view(n, width, o)
            if layer.bias is not None:
                changes += pieces[layer.bias]
            products.baddbmm_(changes, D.transpose(1, 2))
        if k > a:
            log_std = tangents.new_zeros(width, a) if self.log_std is None else pieces[self.log_std]
            products = th.cat([products, log_std.expand(n, width, a)], dim=2)
        return products.transpose(0, 1)

    def samples(self) -> th.Tensor:
        columns: list[th.Tensor | None] = [None] * len(self.params)
        a = self._n_outputs
        for layer, at in zip(self.layers, self._pulled_back(self.scores[:, None, :a]), strict=True):
            if layer.weight is not None:
                columns[layer.weight] = (at.transpose(1, 2) * layer.inputs[:, None]).flatten(1)
            if layer.bias is not None:
                columns[layer.bias] = at[:, 0]
        if self.log_std is not None:
            columns[self.log_std] = self.scores[:, a:]
        return th.cat([column for column in columns if column is not None], dim=1)

    @cached_property
    def _samples(self) -> th.Tensor:
        return self.samples()

    def weighted_samples(self, weights: th.Tensor) -> th.Tensor:
        n_bytes = len(self.scores) * sum(param.numel() for param in self.params) * self.scores.itemsize
        # per-sample gradients are stored only while they are small
        if n_bytes > COLUMN_BYTES:
            return super().weighted_samples(weights)
        return (weights @ self._samples).T
