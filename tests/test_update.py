"""Whole updates against the dense reference: every action space, subsampling factor and number of environments."""

import numpy as np
import pytest
from stable_baselines3.common.distributions import SquashedDiagGaussianDistribution

from sb3_uatrpo import UATRPO, MatchedTRPO
from tests.helpers import (
    ACTION_SPACES,
    actor_vector,
    collect,
    env_major,
    logged,
    make_model,
    next_subsample,
    take_apart,
)
from tests.reference import DoublePolicy, ReferenceUATRPO, n_trajectories, trpo_step


def reference_for(model) -> ReferenceUATRPO:
    return ReferenceUATRPO(
        omega=model.sketch.omega.numpy().copy(),
        delta=model.trust_region_delta,
        coef=model.uncertainty_coef,
        alpha=model.confidence_alpha,
        beta=model.ema_beta,
        solver=model.projection_solver,
        step_length_samples=model.step_length_samples,
        shrinkage=model.shrinkage,
        target_kl=model.target_kl,
    )


def n_samples(model) -> int:
    buffer = model.rollout_buffer
    if model.sample_unit == "step":
        return buffer.buffer_size * buffer.n_envs
    return n_trajectories(buffer.episode_starts)


def check_updates(model, n_updates: int, noise: float = 0.0, rtol: float = 1e-5) -> None:
    """Each update moves the actor by a fraction κ^i of the reference's step, and logs the reference's figures."""
    model.sketch.draw_once()
    reference = reference_for(model)
    for _ in range(n_updates):
        collect(model)
        obs, actions, advantages = env_major(model)
        expected = reference.step(
            model.policy, obs, actions, advantages, next_subsample(model), n_samples(model), noise
        )
        before = actor_vector(model)
        model.train()
        log = logged(model)
        for key in (
            "kl_estimated",
            "uncertainty_penalty",
            "uncertainty_share",
            "radius_squared",
            "subspace_rank",
            "gradient_snr",
        ):
            assert log[key] == pytest.approx(expected[key], rel=1e-4), key
        moved = actor_vector(model) - before
        assert log["step_fraction"] > 0
        wanted = log["step_fraction"] * expected["step"]
        assert np.linalg.norm(moved - wanted) <= rtol * np.linalg.norm(wanted)


@pytest.fixture(params=[False, True], ids=["general", "layered"])
def layered(request, monkeypatch) -> None:
    """Updates with products by autograd, and layer by layer."""
    if request.param:
        take_apart(monkeypatch)


@pytest.mark.parametrize("action_space", ACTION_SPACES)
@pytest.mark.parametrize(("factor", "n_envs"), [(1, 1), (3, 1), (10, 3)])
def test_step_equals_the_dense_reference(action_space, factor, n_envs):
    model = make_model(UATRPO, action_space, n_envs=n_envs, sub_sampling_factor=factor, n_projections=8)
    check_updates(model, n_updates=3)


@pytest.mark.parametrize(
    "options",
    [
        {"projection_solver": "nystrom"},
        {"step_length_samples": "batch"},
        {"sample_unit": "step"},
        {"ema_beta": 0.0},
        {"ema_beta": 0.5, "uncertainty_coef": 0.5},
        {"normalize_advantage": False},
        {"n_projections": 1},
        {"sub_sampling_factor": 10_000},
        {"target_kl": 0.01},
        {"shrinkage": 0.5},
        {"shrinkage": 0.01, "ema_beta": 0.0},
        {"shrinkage": 0.97, "projection_solver": "nystrom"},
        {"shrinkage": 0.75, "target_kl": 0.01, "step_length_samples": "batch"},
        {"shrinkage": 0.75, "uncertainty_coef": 0.0, "n_projections": 100},
    ],
    ids=lambda options: "-".join(map(str, options)),
)
@pytest.mark.usefixtures("layered")
@pytest.mark.parametrize("action_space", ["box", "discrete"])
def test_options_equal_the_dense_reference(action_space, options):
    model = make_model(UATRPO, action_space, n_envs=2, **{"n_projections": 8, "n_critic_updates": 1, **options})
    check_updates(model, n_updates=2)


class SquashedPolicy(DoublePolicy):
    """Stable-Baselines3 has the distribution, but no policy of its own that uses it without gSDE."""

    def _build(self, lr_schedule):
        super()._build(lr_schedule)
        self.action_dist = SquashedDiagGaussianDistribution(self.action_space.shape[0])


def test_squashed_gaussians_equal_the_dense_reference():
    check_updates(make_model(UATRPO, "box", policy=SquashedPolicy, n_envs=2, n_projections=8), n_updates=2)


@pytest.mark.usefixtures("layered")
@pytest.mark.parametrize("action_space", ["box", "discrete"])
def test_adversarial_noise_layer_by_layer_or_not(action_space):
    options = {"n_envs": 2, "adversarial_noise": 0.3, "line_search_kl_factor": 1e6}
    check_updates(make_model(UATRPO, action_space, n_projections=8, **options), n_updates=2, noise=0.3)
    check_trpo_updates(make_model(MatchedTRPO, action_space, cg_max_steps=200, **options), n_updates=2, noise=0.3)


@pytest.mark.parametrize("action_space", ["box", "multi_discrete"])
def test_adversarial_noise_equals_the_dense_reference(action_space):
    # The line search may refuse a direction that noise has spoilt; here it must not hide the proposal
    options = {"n_envs": 2, "adversarial_noise": 0.3, "line_search_kl_factor": 1e6}
    check_updates(make_model(UATRPO, action_space, n_projections=8, **options), n_updates=2, noise=0.3)
    check_trpo_updates(make_model(MatchedTRPO, action_space, cg_max_steps=200, **options), n_updates=2, noise=0.3)


def check_trpo_updates(model, n_updates: int, noise: float = 0.0) -> None:
    for _ in range(n_updates):
        collect(model)
        step = trpo_step(
            model.policy, *env_major(model), next_subsample(model), model.target_kl, model.cg_damping, noise
        )
        before = actor_vector(model)
        model.train()
        log = logged(model)
        assert log["kl_estimated"] == model.target_kl
        assert log["step_fraction"] > 0
        wanted = log["step_fraction"] * step
        assert np.linalg.norm(actor_vector(model) - before - wanted) <= 1e-4 * np.linalg.norm(wanted)


@pytest.mark.parametrize("action_space", ACTION_SPACES)
@pytest.mark.parametrize(("factor", "n_envs"), [(1, 1), (10, 3)])
def test_matched_trpo_equals_the_dense_reference(action_space, factor, n_envs):
    check_trpo_updates(
        make_model(MatchedTRPO, action_space, n_envs=n_envs, sub_sampling_factor=factor, cg_max_steps=200), n_updates=2
    )
