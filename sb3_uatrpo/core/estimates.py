r"""
Sample estimates of the policy gradient ĝ, the Fisher matrix F̂ and the gradient's covariance Σ̂, without forming them.

The policy's *head* h_i ∈ R^k holds the parameters of the action distribution at timestep i. With J_i = ∂h_i/∂θ (k×d),
H_i the Fisher matrix of the distribution with respect to h_i, and s_i = A_i ∂log π(a_i|s_i)/∂h_i,

.. math::
    \hat g = \frac1n\sum_i J_i's_i, \qquad
    \hat F = \frac1n\sum_i J_i'H_iJ_i, \qquad
    \hat\Sigma = \frac{1}{n-1}\sum_i (\xi_i-\bar\xi)(\xi_i-\bar\xi)', \quad \xi_i = J_i's_i.

F̂ is the Hessian at θ_k of the mean KL divergence (the generalised Gauss-Newton matrix: the KL's gradient with
respect to h vanishes there, so the curvature of h(θ) drops out). All products take all columns of a matrix at once:
J'U by batched reverse mode, and JX as the derivative of the linear map u ↦ J'u, also in reverse mode, so any network
that can be differentiated twice works. The constant 1/(1-γ) is left out of Σ̂, as in the paper's experiments, and of ĝ,
where it does not change the step.
"""

import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, reduce

import torch as th

from sb3_uatrpo.core.memory import at_once

#: A graph of the policy may keep this many bytes of activations; longer batches are processed in parts.
GRAPH_BYTES = 16 * 2**20
#: Products with many columns process PRODUCT_TIMESTEPS timesteps at once, or as many as have a graph of
#: PRODUCT_GRAPH_BYTES, whichever is more. On a CPU, wide chunks of few timesteps are faster than narrow chunks of many,
#: whose temporaries do not fit into its cache.
PRODUCT_TIMESTEPS = 256
PRODUCT_GRAPH_BYTES = 2 * 2**20
#: Products process columns in chunks whose temporaries take about this many bytes.
COLUMN_BYTES = 12 * 2**20


def batched_grad(
    outputs: Sequence[th.Tensor], inputs: Sequence[th.Tensor], cotangents: Sequence[th.Tensor]
) -> list[th.Tensor | None]:
    """
    Gradients along c cotangents at once. The graph is kept.

    :param outputs: tensors to differentiate
    :param inputs: tensors to differentiate with respect to
    :param cotangents: for each output, c cotangents along a new first dimension
    :return: for each input, c gradients along a new first dimension; None if no output depends on it
    """
    # torch's anomaly detection has to read the numbers, which is not possible for several cotangents at once
    if len(cotangents[0]) > 1 and not th.is_anomaly_enabled():
        try:
            gradients = th.autograd.grad(
                outputs, inputs, cotangents, is_grads_batched=True, retain_graph=True, allow_unused=True
            )
            return list(gradients)
        except th.OutOfMemoryError:
            raise
        except RuntimeError as error:
            # as with sparse matrices; the loop raises any other error again
            warnings.warn(
                "A part of the policy can be differentiated along one cotangent at a time only, which is slower: "
                + str(error).partition("\n")[0],
                stacklevel=2,
            )
    single = [
        th.autograd.grad(outputs, inputs, [part[i] for part in cotangents], retain_graph=True, allow_unused=True)
        for i in range(len(cotangents[0]))
    ]
    return [None if parts[0] is None else th.stack(parts) for parts in zip(*single, strict=True)]


@dataclass(frozen=True)
class Linearization:
    """
    The policy's head at n timesteps, linearised at the current parameters.

    :param head: h, shape ``(n, k)``, with its graph
    :param params: the actor's parameters, d numbers in all
    :param fisher_product: P ↦ HP for P of shape ``(..., n, k)``
    :param scores: s_i = A_i ∂log π(a_i|s_i)/∂h_i, shape ``(n, k)``
    """

    head: th.Tensor
    params: tuple[th.Tensor, ...]
    fisher_product: Callable[[th.Tensor], th.Tensor]
    scores: th.Tensor

    def vjp(self, cotangents: th.Tensor) -> th.Tensor:
        """:return: J'U, summed over the timesteps, for U of shape ``(c, n, k)``; shape ``(d, c)``, column-major"""
        gradients = batched_grad([self.head], self.params, [cotangents])
        # autograd returns None for a parameter that none of these timesteps uses
        rows = [
            # of the head's type: some parameters may have another
            cotangents.new_zeros(len(cotangents), param.numel())
            if part is None
            else part.reshape(len(cotangents), param.numel()).to(cotangents.dtype)
            for param, part in zip(self.params, gradients, strict=True)
        ]
        return th.cat(rows, dim=1).T

    @cached_property
    def _linear_map(self) -> tuple[th.Tensor, list[th.Tensor], list[int]]:
        """The graph of u ↦ J'u: u, the parts of J'u that depend on it, and the indices of their parameters."""
        # not zero, where the backward pass of some operations takes a shortcut that is not linear
        u = th.ones_like(self.head, requires_grad=True)
        pulled = th.autograd.grad(self.head, self.params, u, create_graph=True, allow_unused=True)
        places = [i for i, part in enumerate(pulled) if part is not None and part.requires_grad]
        return u, [pulled[i] for i in places], places

    def jvp(self, tangents: th.Tensor) -> th.Tensor:
        """
        JX. O(n·d·c) operations.

        :param tangents: X, shape ``(d, c)``, fastest when column-major
        :return: P, shape ``(c, n, k)``
        """
        u, pulled, places = self._linear_map
        rows = tangents.T
        pieces = rows.split([param.numel() for param in self.params], dim=1)
        cotangents = [pieces[i].reshape(len(rows), *self.params[i].shape).to(self.params[i].dtype) for i in places]
        (products,) = batched_grad(pulled, [u], cotangents)
        return u.new_zeros(len(rows), *u.shape) if products is None else products

    def missed_params(self) -> list[int]:
        """
        The parameters that ``jvp`` misses. With U of order one, X_p = (J'U)_p and zero elsewhere, U'JX_p must equal
        (J'U)_p'(J'U)_p. A parameter is missed if most of it is lost, since rounding may take a part, and it is left out
        if it hardly matters, since (J'U)_p may be rounding errors alone: for a bias before a normalisation it is zero.

        :return: the parameters' indices
        """
        U = th.arange(1, self.head.numel() + 1, device=self.head.device).to(self.head.dtype).cos().view_as(self.head)
        pulled, sizes = self.vjp(U[None]), [param.numel() for param in self.params]
        smallest = 1e-4 * pulled.norm()
        missed = []
        for i, part in enumerate(pulled.split(sizes)):
            norm = part.norm()
            # numbers that are not finite tell nothing
            if smallest < norm < th.inf:
                X = th.zeros_like(pulled)
                X.split(sizes)[i].copy_(part / norm)
                if not self._linear_map[2] or (norm - (self.jvp(X)[0] * U).sum()).abs() > 0.5 * norm:
                    missed.append(i)
        return missed

    def samples(self) -> th.Tensor:
        """:return: ξ_i = J_i's_i, shape ``(n, d)``, by J'U with a column of U for each timestep: O(n²·d) operations"""
        return self.vjp(th.diag_embed(self.scores.T).movedim(0, -1)).T

    def weighted_samples(self, weights: th.Tensor) -> th.Tensor:
        """:return: Σ_i w_i ξ_i for c weightings, shape ``(d, c)``, column-major, in O(n·d·c) operations"""
        return self.vjp(self.scores * weights[..., None])


def parts_of(n_timesteps: int, bytes_per_timestep: int, device: th.device) -> list[slice]:
    """:return: slices that cover the timesteps in order, whose graphs fit into memory one at a time"""
    return _slices(n_timesteps, min(n_timesteps, max(1, at_once(GRAPH_BYTES, device) // max(1, bytes_per_timestep))))


def _slices(n_timesteps: int, size: int) -> list[slice]:
    return [slice(start, min(start + size, n_timesteps)) for start in range(0, n_timesteps, size)]


class SampleEstimates:
    """
    ĝ, F̂ and Σ̂ over one set of timesteps.

    :param linearize: takes a slice and returns the linearisation of its timesteps; if they do not fit into one part, it
        is called again in each pass, so that only one part's graph exists at a time
    :param n_timesteps: n, number of timesteps
    :param n_params: d, number of actor parameters
    :param bytes_per_timestep: bytes that the graph of one timestep's head keeps
    :param device: where timesteps and parameters are
    :param bytes_beside: bytes that a linearisation also keeps for each timestep, however many columns a product has
    """

    def __init__(
        self,
        linearize: Callable[[slice], Linearization],
        n_timesteps: int,
        n_params: int,
        bytes_per_timestep: int,
        device: th.device,
        bytes_beside: int = 0,
    ) -> None:
        self.n_timesteps = n_timesteps
        self.n_params = n_params
        self.parts = parts_of(n_timesteps, bytes_per_timestep + bytes_beside, device)
        self._device = device
        self._linearize = linearize
        self._bytes_per_timestep = max(1, bytes_per_timestep)

    @cached_property
    def _whole(self) -> Linearization:
        return self._linearize(self.parts[0])

    def _linearizations(self, parts: list[slice] | None = None) -> Iterator[Linearization]:
        parts = parts or self.parts
        for part in parts:
            # a single part holds all timesteps, and is the only one that is kept from pass to pass
            yield self._whole if len(parts) == 1 else self._linearize(part)

    def head(self) -> th.Tensor:
        """:return: h at the parameters where it was linearised, shape ``(n, k)``, detached"""
        return th.cat([part.head.detach() for part in self._linearizations()])

    def gradient(self) -> th.Tensor:
        """:return: ĝ = mean of J_i's_i (paper, Equation 3, without 1/(1-γ)), shape ``(d,)``"""
        parts = self._linearizations()
        return reduce(th.add, (part.vjp(part.scores[None] / self.n_timesteps).squeeze(1) for part in parts))

    def noise(self) -> th.Tensor:
        """
        A vector with the covariance of ĝ and mean zero, whatever its mean g: the difference of the mean gradients of
        the first and the second half of the timesteps, scaled by √(n_1·n_2)/n. Timesteps within a half may depend on
        each other.

        :return: shape ``(d,)``
        """
        n, n_first = self.n_timesteps, self.n_timesteps // 2
        ratio = ((n - n_first) / n_first) ** 0.5
        weights = th.full((1, n), -1.0 / (ratio * n), dtype=th.float64, device=self._device)
        weights[:, :n_first] = ratio / n
        parts = zip(self._linearizations(), self.parts, strict=True)
        pulled = (part.weighted_samples(weights[:, timesteps].to(part.scores)) for part, timesteps in parts)
        return reduce(th.add, pulled).squeeze(1)

    def standard_error(self) -> th.Tensor:
        """
        Standard error of each coordinate of ĝ over the timesteps, se_j = √(Σ_i (ξ_ij - ĝ_j)² / (n(n-1))), from the
        gradients of a block of timesteps at a time.

        :return: shape ``(d,)``
        """
        gradient = self.gradient()
        # The operations of a block grow with the square of its length, and each timestep takes d floats of memory.
        block_size = max(1, min(32, at_once(COLUMN_BYTES, self._device) // (4 * self.n_params)))
        squares = th.zeros_like(gradient)
        for start in range(0, self.n_timesteps, block_size):
            samples = self._linearize(slice(start, start + block_size)).samples()
            squares += (samples - gradient).square().sum(dim=0)
        return (squares / (self.n_timesteps * (self.n_timesteps - 1))).sqrt()

    def products(self, matrix: th.Tensor) -> tuple[th.Tensor, th.Tensor]:
        """
        F̂X and Σ̂X from one pass: both need P = JX, and pull back HP/n and s_i(w_i - w̄)'/(n-1), with w_i = s_i'P_i
        and w̄ = ξ̄'X. O(n·d·c) operations, on one part of the timesteps and one chunk of the columns at a time.

        :param matrix: X, shape ``(d, c)``
        :return: F̂X and Σ̂X, each of shape ``(d, c)``, column-major
        """
        n_columns = matrix.shape[1]
        fisher, covariance = (matrix.new_empty(n_columns, self.n_params).T for _ in range(2))
        mean = self.gradient() @ matrix
        graph_bytes, column_bytes = (at_once(limit, self._device) for limit in (PRODUCT_GRAPH_BYTES, COLUMN_BYTES))
        timesteps_at_once = min(self.parts[0].stop, max(PRODUCT_TIMESTEPS, graph_bytes // self._bytes_per_timestep))
        # 5·d numbers for each column: its copy in pieces, and the products with F̂ and Σ̂, each in pieces and joined
        width = max(
            1, column_bytes // (timesteps_at_once * self._bytes_per_timestep + 5 * self.n_params * matrix.itemsize)
        )
        is_first = True
        for part in self._linearizations(_slices(self.n_timesteps, timesteps_at_once)):
            for start in range(0, n_columns, width):
                columns = slice(start, min(start + width, n_columns))
                P = part.jvp(matrix[:, columns])
                deviations = (part.scores * P).sum(dim=-1) - mean[columns, None]
                products = (
                    part.vjp(part.fisher_product(P) / self.n_timesteps),
                    part.weighted_samples(deviations / (self.n_timesteps - 1)),
                )
                for total, product in zip((fisher, covariance), products, strict=True):
                    total[:, columns] = product if is_first else total[:, columns] + product
            is_first = False
        return fisher, covariance

    def fisher_product(self, vector: th.Tensor) -> th.Tensor:
        """:return: F̂x, shape ``(d,)``, in O(n·d) operations"""
        parts = self._linearizations()
        pulled = reduce(th.add, (part.vjp(part.fisher_product(part.jvp(vector[:, None]))) for part in parts))
        return pulled.squeeze(1) / self.n_timesteps

    def quadratic_forms(self, vector: th.Tensor) -> tuple[float, float]:
        """
        v'F̂v = mean of P_i'H_iP_i and v'Σ̂v = sample variance of w_i, with P = Jv and w_i = s_i'P_i.

        Both are computed from P as sums over the timesteps, without products with J', so rounding does not make them
        negative. O(n·d) operations.

        :param vector: v, shape ``(d,)``
        :return: v'F̂v and v'Σ̂v
        """
        fisher = 0.0
        projected = []
        for part in self._linearizations():
            P = part.jvp(vector[:, None]).squeeze(0)
            fisher += (P.double() * part.fisher_product(P)).sum().item()
            projected.append((part.scores * P).sum(dim=-1, dtype=th.float64))
        return fisher / self.n_timesteps, th.cat(projected).var().item()
