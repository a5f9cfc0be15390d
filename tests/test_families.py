"""Each head against torch's own distributions, in float64 and by double backward."""

import math

import numpy as np
import pytest
import torch as th
from hypothesis import given, settings
from hypothesis import strategies as st
from stable_baselines3.common.distributions import (
    BernoulliDistribution,
    CategoricalDistribution,
    DiagGaussianDistribution,
    Distribution,
    MultiCategoricalDistribution,
    SquashedDiagGaussianDistribution,
    StateDependentNoiseDistribution,
)
from stable_baselines3.common.policies import ActorCriticPolicy
from torch.distributions import Beta, Categorical

from sb3_uatrpo.families import family_of
from tests.helpers import BOTH, logged, make_model, small
from tests.reference import kl_of

N = 5


def gaussian(h):
    return DiagGaussianDistribution(2).proba_distribution(h[:, :2], h[:, 2:])


def squashed_gaussian(h):
    return SquashedDiagGaussianDistribution(2).proba_distribution(h[:, :2], h[:, 2:])


def state_dependent(h, squash_output=False):
    distribution = StateDependentNoiseDistribution(2, squash_output=squash_output)
    distribution.distribution = th.distributions.Normal(h[:, :2], h[:, 2:].exp())
    return distribution


def squashed_state_dependent(h):
    return state_dependent(h, squash_output=True)


def categorical(h):
    return CategoricalDistribution(4).proba_distribution(h)


def multi_categorical(h):
    return MultiCategoricalDistribution([3, 2]).proba_distribution(h)


def bernoulli(h):
    return BernoulliDistribution(3).proba_distribution(h)


KINDS = {
    gaussian: 4, squashed_gaussian: 4, state_dependent: 4, squashed_state_dependent: 4, categorical: 4,
    multi_categorical: 5, bernoulli: 3,
}  # fmt: skip
kinds = pytest.mark.parametrize("kind", KINDS)


def vectors(size: int, seed: int, scale: float = 1.0) -> th.Tensor:
    return scale * th.randn(N, size, generator=th.Generator().manual_seed(seed), dtype=th.float64)


def actions_for(kind) -> th.Tensor:
    generator = th.Generator().manual_seed(9)
    if kind in (categorical, multi_categorical):
        return th.randint(2, (N, 1 if kind is categorical else 2), generator=generator).double()
    if kind is bernoulli:
        return th.randint(2, (N, 3), generator=generator).double()
    actions = th.randn(N, 2, generator=generator, dtype=th.float64)
    return actions.tanh() if "squashed" in kind.__name__ else actions


@kinds
def test_vector_holds_the_distribution(kind):
    h = vectors(KINDS[kind], 0)
    found = family_of(kind(h)).vector(kind(h))
    assert found.shape == h.shape
    # logits are defined up to a constant of each categorical distribution
    assert family_of(kind(h)).kl(h, found) == pytest.approx(th.zeros(N).numpy(), abs=1e-12)


@kinds
def test_log_prob_is_the_distributions_own(kind):
    head, actions = family_of(kind(vectors(KINDS[kind], 0))), actions_for(kind)
    for seed in range(3):
        h = vectors(KINDS[kind], seed)
        expected = kind(h).log_prob(actions.flatten() if kind is categorical else actions)
        assert head.log_prob(h, actions).numpy() == pytest.approx(expected.numpy(), abs=1e-9)


@pytest.mark.parametrize("kind", [squashed_gaussian, squashed_state_dependent])
def test_log_prob_is_the_distributions_own_where_float32_rounds_actions_to_one(kind):
    h, actions = vectors(4, 0).float(), actions_for(kind).float()
    actions[0], actions[1, 0] = 1.0, -1.0
    assert family_of(kind(h)).log_prob(h, actions).numpy() == pytest.approx(kind(h).log_prob(actions).numpy(), rel=1e-5)


@kinds
def test_score_is_the_gradient_of_log_prob(kind):
    h = vectors(KINDS[kind], 3).requires_grad_()
    actions = actions_for(kind)
    total = kind(h).log_prob(actions.flatten() if kind is categorical else actions).sum()
    (expected,) = th.autograd.grad(total, h)
    assert family_of(kind(h)).score(h, actions).numpy() == pytest.approx(expected.numpy(), abs=1e-9)


@kinds
def test_fisher_product_is_the_hessian_of_the_kl(kind):
    size = KINDS[kind]
    h = vectors(size, 4)
    head = family_of(kind(h))
    eye = th.eye(size, dtype=th.float64)
    columns = head.fisher_product(h, eye[:, None, :].expand(size, N, size))
    for i in range(N):

        def divergence(new, i=i):
            old = family_of(kind(h[i : i + 1]))
            assert type(old) is type(head)
            return kl_of(kind(h[i : i + 1]).distribution, kind(new[None]).distribution).sum()

        hessian = th.autograd.functional.hessian(divergence, h[i])
        assert columns[:, i].numpy() == pytest.approx(hessian.numpy(), abs=1e-9)


@kinds
def test_kl_is_summed_over_action_dimensions(kind):
    old, new = vectors(KINDS[kind], 5), vectors(KINDS[kind], 6)
    expected = kl_of(kind(old).distribution, kind(new).distribution)
    assert family_of(kind(old)).kl(old, new).numpy() == pytest.approx(expected.numpy(), rel=1e-9)


@kinds
@settings(max_examples=30)
@given(seed=st.integers(0, 10_000), scale=st.floats(0.1, 5.0))
def test_laws(kind, seed, scale):
    """H is symmetric and positive semidefinite, KL(h‖h) = 0, KL ≥ 0, and a small step has KL near ½p'Hp."""
    size = KINDS[kind]
    h, p, q = vectors(size, seed, scale), vectors(size, seed + 1), vectors(size, seed + 2)
    head = family_of(kind(h))
    Hp, Hq = head.fisher_product(h, p), head.fisher_product(h, q)
    assert (q * Hp).sum(-1).numpy() == pytest.approx((p * Hq).sum(-1).numpy(), rel=1e-8, abs=1e-10)
    assert bool(((p * Hp).sum(-1) >= -1e-12).all())
    assert head.kl(h, h).numpy() == pytest.approx(th.zeros(N).numpy(), abs=1e-12)
    assert bool((head.kl(h, h + p) >= -1e-12).all())
    small = 1e-4 / scale * p / p.norm()
    expected = 0.5 * (small * head.fisher_product(h, small)).sum(-1)
    # relative to the distribution's own scale: σ may be e^-10 here
    if float(h.min()) > -5:
        assert head.kl(h, h + small).numpy() == pytest.approx(expected.numpy(), rel=0.05, abs=1e-13)


@kinds
def test_the_kl_of_float32_heads_is_exact_for_small_steps(kind):
    h, p = vectors(KINDS[kind], 7), 1e-2 * vectors(KINDS[kind], 8)
    head = family_of(kind(h))
    exact = head.kl(h.float().double(), (h + p).float().double())
    assert head.kl(h.float(), (h + p).float()).numpy() == pytest.approx(exact.numpy(), rel=0.02, abs=3e-7)


@pytest.mark.parametrize("size", [1e-2, 1e-3, 1e-4])
@kinds
def test_rounding_of_small_steps_does_not_add_up(kind, size):
    rng = np.random.default_rng(0)
    h, p = (th.from_numpy(rng.normal(size=(500, KINDS[kind])).astype(np.float32)) for _ in range(2))
    head = family_of(kind(h))
    divergences = head.kl(h, h + size * p)
    assert bool((divergences > -1e-12).all())
    exact = head.kl(h.double(), (h + size * p).double()).mean().item()
    assert divergences.mean().item() == pytest.approx(exact, rel=0.02)


def test_choices_of_probability_zero_have_a_divergence():
    old = th.tensor([-200.0, 0.0, 1.0])
    for head in (family_of(CategoricalDistribution(3)), family_of(BernoulliDistribution(3))):
        for new in (th.tensor([-1.0, 0.5, 1.0]), th.tensor([80.0, 0.0, 0.0])):
            assert head.kl(old, new).item() == pytest.approx(head.kl(old.double(), new.double()).item(), rel=1e-5)
        assert head.kl(old * math.nan, old).isnan()
    two, three = family_of(CategoricalDistribution(2)), family_of(CategoricalDistribution(3))
    masked = th.tensor([-math.inf, 0.0, 1.0]), th.tensor([-math.inf, 0.5, 1.0])
    assert three.kl(*masked).item() == pytest.approx(two.kl(*(head[1:] for head in masked)).item())
    # a choice that has become possible
    assert three.kl(masked[0], th.zeros(3)).item() == pytest.approx(three.kl(old, th.zeros(3)).item())


def test_an_unknown_distribution_is_refused_by_name():
    class Unheard(Distribution):
        proba_distribution_net = proba_distribution = log_prob = entropy = sample = mode = None
        actions_from_params = log_prob_from_params = None

    with pytest.raises(ValueError, match=r"Unheard.*use one of DiagGaussianDistribution"):
        family_of(Unheard())


class ReturnsBeta(ActorCriticPolicy):
    def _get_action_dist_from_latent(self, latent_pi):
        distribution = super()._get_action_dist_from_latent(latent_pi)
        mean = self.action_net(latent_pi)
        distribution.distribution = Beta(mean.exp(), mean.exp())
        return distribution


class ReturnsSquashed(ActorCriticPolicy):
    def _get_action_dist_from_latent(self, latent_pi):
        squashed = SquashedDiagGaussianDistribution(self.action_space.shape[0])
        return squashed.proba_distribution(self.action_net(latent_pi), self.log_std)


class Masked(Categorical):
    """Differs in how it is made."""

    def __init__(self, logits):
        super().__init__(logits=logits.index_fill(-1, th.tensor([0]), -1e8))


class ReturnsMasked(ActorCriticPolicy):
    def _get_action_dist_from_latent(self, latent_pi):
        distribution = super()._get_action_dist_from_latent(latent_pi)
        distribution.distribution = Masked(self.action_net(latent_pi))
        return distribution


@BOTH
def test_a_subclass_of_a_torch_distribution_with_its_log_probability_is_welcome(cls):
    assert logged(small(cls, "discrete", policy=ReturnsMasked).learn(48))["kl_ratio"] > 0


@BOTH
@pytest.mark.parametrize(
    ("policy", "message"),
    [
        (ReturnsBeta, "left DiagGaussianDistribution of Beta in action_dist"),
        (ReturnsSquashed, "evaluate_actions leaves no distribution in action_dist"),
    ],
)
def test_a_policy_that_returns_another_distribution_is_refused(policy, message, cls):
    """The head would read its mean and its standard deviation, and take it for a Gaussian."""
    with pytest.raises(ValueError, match=message):
        make_model(cls, policy=policy).learn(48)


@pytest.mark.parametrize("kind", [categorical, multi_categorical])
def test_an_impossible_choice_adds_nothing(kind):
    """As with a mask: the other choices are what they are without it, and the KL divergence is theirs."""
    old, new, masked = vectors(KINDS[kind], 0), vectors(KINDS[kind], 1), slice(1, 2)
    head = family_of(kind(old))
    found = []
    for value in (-1e6, -math.inf):
        for h in (old, new):
            h[:, masked] = value
        found.append(head.kl(old, new))
        assert head.kl(old, old).abs().max() == 0.0
        assert head.fisher_product(old, vectors(KINDS[kind], 2)).isfinite().all()
    th.testing.assert_close(*found)
    assert found[0].min() > 0.0
    # what becomes possible was not foreseen
    possible = new.clone()
    possible[:, masked] = 0.0
    assert (head.kl(possible, new) == math.inf).all()
