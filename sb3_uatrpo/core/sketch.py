"""
Random projections of F̂ and Σ̂ and their exponential moving averages (paper, appendix, Algorithm 3).

The averages are valid only together with the Ω that they were computed with, so Ω is drawn once and kept. Matrices are
``(d, m)`` and column-major: a column of Ω is one direction in parameter space, contiguous in memory. With m = d, Ω is
the identity, and the products are the matrices themselves.
"""

import warnings
from typing import Any

import torch as th


class Sketch:
    """
    Ω, Y_F, Y_Σ, the weight of the averages, and the parameters that they belong to.

    Its state is a ``state_dict`` of plain tensors, so Stable-Baselines3 saves, loads and moves it with the policy.
    The matrices are empty until Ω is drawn, at the first update.

    :param n_params: d, number of actor parameters
    :param n_projections: m, number of random projections, at most d
    :param ema_beta: β in [0, 1); with 0 nothing is averaged and Y_F and Y_Σ are not stored
    :param seed: seeds the generator that draws Ω
    :param dtype: type of the policy's parameters
    :param device: where Ω, Y_F and Y_Σ are kept; Ω is drawn on the CPU, so its numbers do not depend on the device
    """

    def __init__(
        self, n_params: int, n_projections: int, ema_beta: float, seed: int, dtype: th.dtype, device: th.device
    ) -> None:
        self.shape = (n_params, n_projections)
        self.ema_beta = ema_beta
        self.dtype = dtype
        self.device = device
        self.generator = th.Generator().manual_seed(seed)
        self.clear()

    omega: th.Tensor
    y_fisher: th.Tensor
    y_covariance: th.Tensor
    #: 1 - β^k after k updates: the total weight in an average that started at zero
    ema_weight: th.Tensor
    #: how many of the d coordinates belong to each parameter of the policy; empty until that is known. Floating point,
    #: as is all of the state except the generator's
    layout: th.Tensor

    def clear(self) -> None:
        """Discard Ω and the averages. The next update draws a new Ω, and the averages start afresh."""
        self.omega = th.zeros(0, 0, dtype=self.dtype, device=self.device)
        self.layout = th.zeros(0, dtype=th.float64, device="cpu")
        self._clear_averages(self.omega, self.ema_beta)

    def _clear_averages(self, omega: th.Tensor, ema_beta: float) -> None:
        """Averages before the first update: zeros of Ω's shape and memory layout, or empty if β is 0."""
        average = omega if ema_beta > 0.0 else omega[:0, :0]
        self.y_fisher, self.y_covariance = th.zeros_like(average), th.zeros_like(average)
        self.ema_weight = th.zeros(1, dtype=th.float64, device="cpu")

    @property
    def n_bytes(self) -> int:
        """Bytes of Ω, and of Y_F and Y_Σ where they are kept, once Ω is drawn: in memory and in a checkpoint."""
        return self.shape[1] * self.bytes_per_projection(self.shape[0], self.ema_beta, self.dtype)

    @staticmethod
    def bytes_per_projection(n_params: int, ema_beta: float, dtype: th.dtype) -> int:
        """:return: bytes that one more projection takes, with d parameters of this type"""
        return (3 if ema_beta > 0.0 else 1) * n_params * dtype.itemsize

    def draw_once(self) -> None:
        """Draw Ω, standard Gaussian, or the identity if m = d, unless it has been drawn already."""
        if self.omega.numel() > 0:
            return
        n_params, n_projections = self.shape
        if n_projections == n_params:
            rows = th.eye(n_params, dtype=self.dtype, device="cpu")
        else:
            rows = th.randn(n_projections, n_params, generator=self.generator, dtype=self.dtype, device="cpu")
        omega = rows.to(self.device).T
        self._clear_averages(omega, self.ema_beta)
        # last, so that a draw that was interrupted is repeated
        self.omega = omega

    def adapt(self, layout: th.Tensor, n_projections: int, ema_beta: float, dtype: th.dtype) -> None:
        """
        Adapt the sketch to an update. It starts afresh, with a warning, if its averages no longer apply.

        :param layout: how many of the d coordinates belong to each parameter of the policy
        :param n_projections: m
        :param ema_beta: β of this update and those that follow; averages are kept only while β > 0
        :param dtype: type of the actor's outputs, and so of the products with F̂ and Σ̂
        """
        if dtype != self.dtype:
            self.omega, self.y_fisher, self.y_covariance = (
                matrix.to(dtype) for matrix in (self.omega, self.y_fisher, self.y_covariance)
            )
            self.dtype = dtype
        shape = (int(layout.sum()), n_projections)
        if shape != self.shape or (len(self.layout) > 0 and not th.equal(layout, self.layout)):
            if self.omega.numel() > 0:
                # d may stay the same when other layers are frozen
                now = "other parameters of the same number" if shape == self.shape else f"d={shape[0]} and m={shape[1]}"
                warnings.warn(
                    f"The sketch of the trust region starts afresh: it was kept for d={self.shape[0]} actor parameters "
                    f"and m={self.shape[1]} projections, but now there are {now}. Parameters were used for the first "
                    "time, frozen, unfrozen or replaced, or n_projections has changed.",
                    stacklevel=3,
                )
            self.shape = shape
            self.clear()
        if (self.ema_beta > 0.0) != (ema_beta > 0.0):
            self._clear_averages(self.omega, ema_beta)
        self.layout, self.ema_beta = layout, ema_beta

    def update(self, fisher: th.Tensor, covariance: th.Tensor, coefficient: float) -> th.Tensor:
        """
        Take in the current batch and return the statistic of the averaged trust region matrix.

        Y_F ← βY_F + (1-β)F̂Ω, Y_Σ ← βY_Σ + (1-β)Σ̂Ω, Y = (Y_F + c·R_n²·Y_Σ)/(1-β^{k+1}).

        :param fisher: F̂Ω, shape ``(d, m)``, finite; its memory is reused for Y, which may be as large as the averages
        :param covariance: Σ̂Ω, shape ``(d, m)``, finite
        :param coefficient: c·R_n² of the current batch
        :return: Y, shape ``(d, m)``
        """
        if self.ema_beta == 0.0:
            return fisher.add_(covariance, alpha=coefficient)
        self.ema_weight.lerp_(th.ones_like(self.ema_weight), 1.0 - self.ema_beta)
        self.y_fisher.lerp_(fisher, 1.0 - self.ema_beta)
        self.y_covariance.lerp_(covariance, 1.0 - self.ema_beta)
        return th.add(self.y_fisher, self.y_covariance, alpha=coefficient, out=fisher).div_(self.ema_weight.item())

    def state_dict(self) -> dict[str, th.Tensor]:
        """:return: the whole state; the generator's, the only entry that is not floating point, comes last"""
        return {
            "omega": self.omega,
            "y_fisher": self.y_fisher,
            "y_covariance": self.y_covariance,
            "ema_weight": self.ema_weight,
            "layout": self.layout,
            "generator": self.generator.get_state(),
        }

    def load_state_dict(self, state_dict: dict[str, Any], strict: bool = True) -> None:
        """
        Restore a state, whatever its shape. The next update decides whether it fits, since only then it is known which
        parameters are frozen, and so how many projections fit into memory.

        :param state_dict: what ``state_dict`` returned
        :param strict: whether to require every entry and no other
        :raises RuntimeError: if ``strict`` and the entries differ, as ``torch.nn.Module`` does
        :raises ValueError: if the averages are not finite, or not zero while their weight is zero
        """
        expected = set(self.state_dict())
        if strict and set(state_dict) != expected:
            missing, unexpected = sorted(expected - set(state_dict)), sorted(set(state_dict) - expected)
            raise RuntimeError(
                f"Error in loading the sketch: missing entries {missing}, unexpected entries {unexpected}."
            )
        state = {**self.state_dict(), **state_dict}
        averages, weight = [state["y_fisher"], state["y_covariance"]], state["ema_weight"]
        # a moving average never recovers from a NaN, and its weight divides it
        if not all(bool(part.isfinite().all()) for part in (*averages, weight)) or (
            weight.item() == 0.0 and any(bool(part.any()) for part in averages)
        ):
            raise ValueError(
                "the sketch's moving averages must be finite, and zero while their weight is zero, but those of the "
                "state are not; clear() before saving leaves them out"
            )
        self.generator.set_state(state["generator"].cpu())
        # clones keep the strides, and so the column-major layout
        self.omega, self.y_fisher, self.y_covariance = (
            state[name].to(self.device).clone() for name in ("omega", "y_fisher", "y_covariance")
        )
        if self.omega.numel() > 0:
            self.shape, self.dtype = (self.omega.shape[0], self.omega.shape[1]), self.omega.dtype
        self.layout, self.ema_weight = (state[name].to("cpu", th.float64).clone() for name in ("layout", "ema_weight"))
        expected_shape = self.omega.shape if self.ema_beta > 0.0 else (0, 0)
        if self.y_fisher.shape != expected_shape or self.y_covariance.shape != expected_shape:
            # saved with averages and loaded without, or vice versa
            self._clear_averages(self.omega, self.ema_beta)
