r"""
Families of action distributions: those of Stable-Baselines3 as functions of a head vector.

A head vector h ∈ R^k holds the parameters of the action distribution at one timestep. All that a trust region method
needs from a distribution is a function of it: log π(a|h), the Fisher matrix H(h) = E[∂log π/∂h ∂log π/∂h'], and the
Kullback-Leibler divergence, *summed* over action dimensions.

To support another distribution, write its family and register it in ``_SUPPORTED``. ``tests/test_families.py`` then
compares the family with ``tests/reference.py``.
"""

import copy
import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import torch as th
from stable_baselines3.common.distributions import (
    BernoulliDistribution,
    CategoricalDistribution,
    DiagGaussianDistribution,
    Distribution,
    MultiCategoricalDistribution,
    SquashedDiagGaussianDistribution,
    StateDependentNoiseDistribution,
    TanhBijector,
)
from torch.distributions import Bernoulli, Categorical, Normal
from torch.nn import functional as F


class UnsupportedDistributionError(ValueError):
    """The policy's action distribution has no family here, or would be misread by it."""


class Family(ABC):
    """One kind of action distribution as a function of its head vector."""

    @abstractmethod
    def vector(self, distribution: Any) -> th.Tensor:
        """:return: h, shape ``(n, k)``, with its graph, of the Stable-Baselines3 distribution of n timesteps"""

    @abstractmethod
    def log_prob(self, head: th.Tensor, actions: th.Tensor) -> th.Tensor:
        """:return: log π(a|h) in nats of actions as buffers hold them, as by ``log_prob``, shape ``(n,)``"""

    @abstractmethod
    def fisher_product(self, head: th.Tensor, vectors: th.Tensor) -> th.Tensor:
        """:return: HP for P of shape ``(..., n, k)``, of the same shape"""

    @abstractmethod
    def kl(self, old: th.Tensor, new: th.Tensor) -> th.Tensor:
        """:return: KL(π_θk‖π_θ) in nats from their h, summed over action dimensions, shape ``(n,)``"""

    def score(self, head: th.Tensor, actions: th.Tensor) -> th.Tensor:
        """:return: ∂log π(a|h)/∂h, shape ``(n, k)``"""
        head = head.detach().requires_grad_()
        (score,) = th.autograd.grad(self.log_prob(head, actions).sum(), head)
        return score


class GaussianFamily(Family):
    """
    Independent Gaussians, h = (μ, log σ), H = diag(1/σ², 2). Given the state, gSDE's distribution has this form too.

    :param bijector: the squashing function of the actions, if any; the Gaussian is over its input
    :param at_actions: whether the squashing is corrected at the actions, or at the inverse that gSDE clamps
    """

    def __init__(self, bijector: Any = None, at_actions: bool = False) -> None:
        self.bijector, self.at_actions = bijector, at_actions

    def vector(self, distribution: Any) -> th.Tensor:
        gaussian = distribution.distribution
        return th.cat([gaussian.mean, gaussian.stddev.log()], dim=-1)

    def log_prob(self, head: th.Tensor, actions: th.Tensor) -> th.Tensor:
        mean, log_std = head.chunk(2, dim=-1)
        x = actions if self.bijector is None else self.bijector.inverse(actions)
        terms = -0.5 * ((x - mean) / log_std.exp()).square() - log_std - 0.5 * math.log(2.0 * math.pi)
        if self.bijector is not None:
            terms = terms - th.log(1.0 - (actions if self.at_actions else x.tanh()).square() + self.bijector.epsilon)
        return terms.sum(dim=-1)

    def fisher_product(self, head: th.Tensor, vectors: th.Tensor) -> th.Tensor:
        log_std = head.chunk(2, dim=-1)[1]
        return th.cat([(-2.0 * log_std).exp(), th.full_like(log_std, 2.0)], dim=-1) * vectors

    def kl(self, old: th.Tensor, new: th.Tensor) -> th.Tensor:
        old_mean, old_log_std = old.chunk(2, dim=-1)
        new_mean, new_log_std = new.chunk(2, dim=-1)
        # With u = log σ_old - log σ_new: ½(e^{2u} - 1 - 2u) + ½((μ_old - μ_new)/σ_new)², accurate for small steps too
        u2 = 2.0 * (old_log_std - new_log_std)
        shift = (old_mean - new_mean) / new_log_std.exp()
        return 0.5 * (u2.expm1() - u2 + shift.square()).sum(dim=-1)


class CategoricalFamily(Family):
    """
    Independent categorical distributions, h = their logits side by side, H = diag(p) - pp' for each. Choices that a
    mask forbids have p = 0, so they drop out of H, of scores and of the KL divergence.

    :param sizes: number of choices of each distribution
    """

    def __init__(self, sizes: list[int]) -> None:
        self.sizes = [int(size) for size in sizes]

    def vector(self, distribution: Any) -> th.Tensor:
        return th.cat([part.logits for part in wrapped_by(distribution)], dim=-1)

    def _log_softmax(self, head: th.Tensor) -> list[th.Tensor]:
        return [part.log_softmax(dim=-1) for part in head.split(self.sizes, dim=-1)]

    def log_prob(self, head: th.Tensor, actions: th.Tensor) -> th.Tensor:
        choices = actions.long().unbind(dim=-1)
        chosen = [
            part.gather(-1, a[:, None]).squeeze(-1) for part, a in zip(self._log_softmax(head), choices, strict=True)
        ]
        return th.stack(chosen).sum(dim=0)

    def fisher_product(self, head: th.Tensor, vectors: th.Tensor) -> th.Tensor:
        products = []
        for log_p, part in zip(self._log_softmax(head), vectors.split(self.sizes, dim=-1), strict=True):
            p = log_p.exp()
            products.append(p * (part - (p * part).sum(dim=-1, keepdim=True)))
        return th.cat(products, dim=-1)

    def kl(self, old: th.Tensor, new: th.Tensor) -> th.Tensor:
        divergences = []
        for old_log_p, new_log_p in zip(self._log_softmax(old), self._log_softmax(new), strict=True):
            divergences.append(_kl_terms(old_log_p, new_log_p).sum(dim=-1))
        return th.stack(divergences).sum(dim=0)


class BernoulliFamily(Family):
    """Independent Bernoulli distributions, h = their logits, H = diag(p(1-p))."""

    def vector(self, distribution: Any) -> th.Tensor:
        return distribution.distribution.logits

    def log_prob(self, head: th.Tensor, actions: th.Tensor) -> th.Tensor:
        return (actions * F.logsigmoid(head) + (1.0 - actions) * F.logsigmoid(-head)).sum(dim=-1)

    def fisher_product(self, head: th.Tensor, vectors: th.Tensor) -> th.Tensor:
        return head.sigmoid() * (-head).sigmoid() * vectors

    def kl(self, old: th.Tensor, new: th.Tensor) -> th.Tensor:
        succeed = _kl_terms(F.logsigmoid(old), F.logsigmoid(new))
        fail = _kl_terms(F.logsigmoid(-old), F.logsigmoid(-new))
        return (succeed + fail).sum(dim=-1)


def _kl_terms(log_p: th.Tensor, log_q: th.Tensor) -> th.Tensor:
    """
    p·log(p/q) - p + q for each choice. The sum over all choices is the KL divergence, since p and q sum to 1, but no
    term is negative, and rounding errors of the order of the step do not add up.
    """
    p, q = log_p.exp(), log_q.exp()
    difference = log_p - log_q
    # expm1 is accurate for small differences, and overflows for large ones
    terms = th.where(difference.abs() < 1.0, p * (difference + (-difference).expm1()), p * difference - p + q)
    # for a choice that was impossible, as with a mask, log p is -∞
    return th.where(p == 0.0, q, terms)


# The family of each distribution, and the torch distribution that it wraps. Exact types: a subclass may redefine its
# log-probability.
_SUPPORTED: dict[type[Distribution], tuple[Callable[[Any], Family], type[th.distributions.Distribution]]] = {
    DiagGaussianDistribution: (lambda _: GaussianFamily(), Normal),
    SquashedDiagGaussianDistribution: (
        lambda distribution: GaussianFamily(TanhBijector(distribution.epsilon), True),
        Normal,
    ),
    StateDependentNoiseDistribution: (lambda distribution: GaussianFamily(distribution.bijector), Normal),
    CategoricalDistribution: (lambda distribution: CategoricalFamily([distribution.action_dim]), Categorical),
    MultiCategoricalDistribution: (lambda distribution: CategoricalFamily(distribution.action_dims), Categorical),
    BernoulliDistribution: (lambda _: BernoulliFamily(), Bernoulli),
}
# Where one was replaced, the family would be wrong
_LOG_PROBS = {kind: kind.log_prob for kind in _SUPPORTED}


def support(
    kind: type[Distribution], make_family: Callable[[Any], Family], wrapped: type[th.distributions.Distribution]
) -> None:
    """
    Support the distributions of one more type.

    :param kind: their exact type
    :param make_family: takes a distribution and returns its family
    :param wrapped: the torch distribution that they wrap
    """
    _SUPPORTED[kind], _LOG_PROBS[kind] = (make_family, wrapped), kind.log_prob


def wrapped_by(distribution: Any) -> list[Any]:
    """:return: the torch distributions that one of Stable-Baselines3 or sb3-contrib wraps, none before its first use"""
    # sb3-contrib's name for several
    inner = getattr(distribution, "distributions", None) or distribution.distribution
    return inner if isinstance(inner, list) else [] if inner is None else [inner]


def empty_copy(distribution: Any) -> Any:
    """:return: a copy of a distribution of Stable-Baselines3 or sb3-contrib that wraps nothing"""
    copied = copy.copy(distribution)
    copied.distribution = None
    if hasattr(copied, "distributions"):
        copied.distributions = []
    return copied


def family_of(distribution: Any) -> Family:
    """
    :param distribution: a Stable-Baselines3 action distribution, such as a policy's ``action_dist``
    :return: its family
    :raises UnsupportedDistributionError: if the distribution is not supported
    """
    kind = type(distribution)
    if kind not in _SUPPORTED:
        raise UnsupportedDistributionError(
            f"policy: the action distribution {kind.__name__} is not supported, because its Fisher matrix is not known "
            f"here; use one of {', '.join(known.__name__ for known in _SUPPORTED)}, or add its family (CONTRIBUTING.md)"
        )
    if "log_prob" in vars(distribution) or kind.log_prob is not _LOG_PROBS[kind]:
        raise UnsupportedDistributionError(
            f"policy: log_prob of {kind.__name__} was replaced; other log-probabilities are not supported, because "
            "their Fisher matrix is not known here"
        )
    return _SUPPORTED[kind][0](distribution)


def check_distribution(distribution: Any, expected: type[Distribution]) -> None:
    """
    :param distribution: what a policy's ``evaluate_actions`` left in ``action_dist``
    :param expected: type of ``action_dist`` before, from which its family was made
    :raises UnsupportedDistributionError: if it is of another kind, or wraps another log-probability, so that the family
        would misread it
    """
    wrapped = _SUPPORTED[expected][1]
    parts = wrapped_by(distribution)
    if type(distribution) is not expected or not all(_is_a(part, wrapped) for part in parts):
        kinds = " and ".join(sorted({type(part).__name__ for part in parts}))
        raise UnsupportedDistributionError(
            f"policy: evaluate_actions left {type(distribution).__name__} of {kinds} in action_dist, which was "
            f"{expected.__name__} of {wrapped.__name__}; other distributions are not supported, because their Fisher "
            "matrix is not known here"
        )


def _is_a(part: Any, kind: type[th.distributions.Distribution]) -> bool:
    """Whether a torch distribution is of this kind, or of a subclass that keeps its log-probability."""
    return isinstance(part, kind) and type(part).log_prob is kind.log_prob
