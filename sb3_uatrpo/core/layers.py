r"""
Products with J and J' for heads that are a chain of linear layers with fixed functions between them.

A layer z_i = Wx_i + b that is used once in computing the head h_i has ∂h_i/∂W = D_i ⊗ x_i' and ∂h_i/∂b = D_i, with
D_i = ∂h_i/∂z_i (k×o) and x_i the layer's input. Given D and x, a product with J or J' is one large matrix product for
each layer and a small one for each step. No column has to pass through the network again.
"""

from dataclasses import dataclass
from functools import cached_property

import torch as th

from sb3_uatrpo.core.estimates import COLUMN_BYTES, Linearization, batched_grad


@dataclass(frozen=True)
class Layer:
    """
    One layer at n steps, or the log standard deviations of a Gaussian, which act like the bias of a layer.

    :param weight: index of W, shape ``(o, i)``, among the parameters, if it is one of them
    :param bias: index of b, shape ``(o,)``, among the parameters, if it is one of them
    :param inputs: x, shape ``(n, i)``
    :param outputs: z, shape ``(n, o)``, with the graph from it to the head
    :param jacobian: D, shape ``(n, k, o)``, if it is known without the graph
    """

    weight: int | None
    bias: int | None
    inputs: th.Tensor
    outputs: th.Tensor
    jacobian: th.Tensor | None = None


@dataclass(frozen=True)
class LayeredLinearization(Linearization):
    """
    A linearisation whose parameters all belong to linear layers. Results equal the base class's up to float rounding.

    :param layers: the layers; every parameter belongs to exactly one
    """

    layers: tuple[Layer, ...] = ()

    @cached_property
    def _jacobians(self) -> list[th.Tensor]:
        """D of each layer, shape ``(n, k, o)``; steps are independent, so k cotangents in all are enough."""
        n, k = self.head.shape
        units = th.eye(k, dtype=self.head.dtype, device=self.head.device)[:, None].expand(k, n, k)
        outputs = [layer.outputs for layer in self.layers if layer.jacobian is None]
        jacobians = batched_grad([self.head], outputs, [units]) if outputs else []
        found = iter(part for part in jacobians if part is not None)
        return [
            next(found).transpose(0, 1).contiguous() if layer.jacobian is None else layer.jacobian
            for layer in self.layers
        ]

    def vjp(self, cotangents: th.Tensor) -> th.Tensor:
        if len(cotangents) == 1 and "_jacobians" not in vars(self):
            # for a single column, such as the policy gradient over many steps, autograd is cheaper than computing D
            return super().vjp(cotangents)
        width = len(cotangents)
        rows: list[th.Tensor | None] = [None] * len(self.params)
        by_step = cotangents.transpose(0, 1)
        for layer, D in zip(self.layers, self._jacobians, strict=True):
            at_outputs = by_step @ D
            n_inputs = layer.inputs.shape[1]
            if layer.weight is not None:
                rows[layer.weight] = (at_outputs.flatten(1).T @ layer.inputs).view(width, D.shape[2] * n_inputs)
            if layer.bias is not None:
                rows[layer.bias] = at_outputs.sum(dim=0)
        return th.cat([row for row in rows if row is not None], dim=1).T

    def jvp(self, tangents: th.Tensor) -> th.Tensor:
        n, k = self.head.shape
        width = tangents.shape[1]
        pieces = tangents.T.split([param.numel() for param in self.params], dim=1)
        products = tangents.new_zeros(n, width, k)
        for layer, D in zip(self.layers, self._jacobians, strict=True):
            n_outputs = D.shape[2]
            if layer.weight is None:
                changes = tangents.new_zeros(n, width, n_outputs)
            else:
                weights = pieces[layer.weight].reshape(width * n_outputs, layer.inputs.shape[1])
                changes = (layer.inputs @ weights.T).view(n, width, n_outputs)
            if layer.bias is not None:
                changes += pieces[layer.bias]
            products.baddbmm_(changes, D.transpose(1, 2))
        return products.transpose(0, 1)

    def samples(self) -> th.Tensor:
        columns: list[th.Tensor] = [th.empty(0)] * len(self.params)
        for layer, D in zip(self.layers, self._jacobians, strict=True):
            at_outputs = (self.scores[:, None] @ D).squeeze(1)
            if layer.weight is not None:
                columns[layer.weight] = (at_outputs[:, :, None] * layer.inputs[:, None]).flatten(1)
            if layer.bias is not None:
                columns[layer.bias] = at_outputs
        return th.cat(columns, dim=1)

    @cached_property
    def _samples(self) -> th.Tensor:
        return self.samples()

    def weighted_samples(self, weights: th.Tensor) -> th.Tensor:
        n_bytes = len(self.scores) * sum(param.numel() for param in self.params) * self.scores.itemsize
        # per-sample gradients are stored only while they are small
        if n_bytes > COLUMN_BYTES:
            return super().weighted_samples(weights)
        return (weights @ self._samples).T
