"""
Random projections of F̂ and Σ̂ and their exponential moving averages (paper, appendix, Algorithm 3).

The averages mean something only together with the Ω that made them, so Ω is drawn once and kept. Matrices are
``(d, m)`` and column-major: a column of Ω is one direction in parameter space, contiguous in memory.
"""

import warnings
from typing import Any

import torch as th


class Sketch:
    """
    Ω, Y_F, Y_Σ and the weight of their average.

    Its state is a ``state_dict`` of plain tensors, so Stable-Baselines3 saves, loads and moves it with the policy.
    An empty sketch (nothing drawn yet) holds matrices of no size.

    :param ema_beta: β in [0, 1); with 0 nothing is averaged and Y_F and Y_Σ are not stored
    :param seed: seeds the generator that draws Ω
    :param device: where Ω, Y_F and Y_Σ live; the numbers are drawn on the CPU, so they do not depend on it
    """

    def __init__(self, ema_beta: float, seed: int, device: th.device) -> None:
        self.ema_beta = ema_beta
        self.device = device
        self.generator = th.Generator().manual_seed(seed)
        self._clear()

    def _clear(self) -> None:
        self.omega = th.zeros(0, 0, device=self.device)
        self.y_fisher = th.zeros(0, 0, device=self.device)
        self.y_covariance = th.zeros(0, 0, device=self.device)
        # 1 - β^k after k updates: what an average that began at zero has taken in so far
        self.ema_weight = th.zeros(1, dtype=th.float64)

    @property
    def shape(self) -> tuple[int, int]:
        """(d, m) of the matrices, (0, 0) when nothing was drawn yet."""
        return self.omega.shape[0], self.omega.shape[1]

    def ensure_shape(self, n_params: int, n_projections: int, dtype: th.dtype) -> None:
        """
        Draw Ω, standard Gaussian, if there is none of this shape yet.

        A sketch of another shape is dropped, with a warning.

        :param n_params: d
        :param n_projections: m
        :param dtype: type of the policy's parameters
        """
        if self.shape == (n_params, n_projections):
            return
        if self.omega.numel() > 0:
            warnings.warn(
                "The sketch of the trust region starts afresh: it was kept for "
                f"d={self.shape[0]} actor parameters and m={self.shape[1]} projections, "
                f"and there are now d={n_params} and m={n_projections}.",
                stacklevel=2,
            )
        self._clear()
        omega = th.randn(n_projections, n_params, generator=self.generator, dtype=dtype)
        self.omega = omega.to(self.device).T
        if self.ema_beta > 0.0:
            self.y_fisher = th.zeros_like(self.omega)
            self.y_covariance = th.zeros_like(self.omega)

    def advance(self, fisher: th.Tensor, covariance: th.Tensor, coefficient: float) -> th.Tensor:
        """
        Take in the current batch and return the statistic of the averaged trust region matrix.

        Y_F ← βY_F + (1-β)F̂Ω, Y_Σ ← βY_Σ + (1-β)Σ̂Ω, Y = (Y_F + c·R_n²·Y_Σ)/(1-β^{k+1}).

        :param fisher: F̂Ω, shape ``(d, m)``, finite
        :param covariance: Σ̂Ω, shape ``(d, m)``, finite
        :param coefficient: c·R_n² of the current batch
        :return: Y, shape ``(d, m)``
        """
        if self.ema_beta == 0.0:
            return fisher + coefficient * covariance
        self.y_fisher.lerp_(fisher, 1.0 - self.ema_beta)
        self.y_covariance.lerp_(covariance, 1.0 - self.ema_beta)
        self.ema_weight.lerp_(th.ones_like(self.ema_weight), 1.0 - self.ema_beta)
        return (self.y_fisher + coefficient * self.y_covariance) / self.ema_weight.item()

    def state_dict(self) -> dict[str, th.Tensor]:
        """
        :return: the whole state; the generator's comes last, and is the only entry that is not floating point
        """
        return {
            "omega": self.omega,
            "y_fisher": self.y_fisher,
            "y_covariance": self.y_covariance,
            "ema_weight": self.ema_weight,
            "generator": self.generator.get_state(),
        }

    def load_state_dict(self, state_dict: dict[str, Any], strict: bool = True) -> None:
        """
        Take over a state. Its shapes need not be this sketch's: ``ensure_shape`` judges them at the next update.

        :param state_dict: what ``state_dict`` returned
        :param strict: whether every entry must be there, and no other
        :raises RuntimeError: if ``strict`` and the entries differ, as ``torch.nn.Module`` does
        """
        expected = set(self.state_dict())
        if strict and set(state_dict) != expected:
            missing, unexpected = sorted(expected - set(state_dict)), sorted(set(state_dict) - expected)
            raise RuntimeError(
                f"Error in loading the sketch: missing entries {missing}, unexpected entries {unexpected}."
            )
        for name in ("omega", "y_fisher", "y_covariance"):
            if name in state_dict:
                # clones keep the strides, and with them the column-major layout
                setattr(self, name, state_dict[name].to(self.device).clone())
        if "ema_weight" in state_dict:
            self.ema_weight = state_dict["ema_weight"].cpu().clone()
        if "generator" in state_dict:
            self.generator.set_state(state_dict["generator"].cpu())

    @staticmethod
    def n_bytes(n_params: int, n_projections: int, ema_beta: float, itemsize: int) -> int:
        """
        Bytes that Ω, and Y_F and Y_Σ where they are kept, take.

        :param n_params: d
        :param n_projections: m
        :param ema_beta: β
        :param itemsize: bytes of one number
        :return: bytes
        """
        return (3 if ema_beta > 0.0 else 1) * n_params * n_projections * itemsize
