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
from tests.reference import DoublePolicy, ReferenceTRPO, ReferenceUATRPO, n_trajectories


def reference_for(model) -> ReferenceUATRPO | ReferenceTRPO:
    if isinstance(model, MatchedTRPO):
        return ReferenceTRPO(model.target_kl, model.cg_damping)
    model.sketch.draw_once()
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
    if getattr(model, "sample_unit", "") == "step":
        return model.n_steps * model.n_envs
    return n_trajectories(model.rollout_buffer.episode_starts)


def check_update(model, reference, data, n: int, noise: float = 0.0, rtol: float = 1e-5) -> dict:
    """The update moves the actor by a fraction κ^i of the reference's step, and logs the reference's figures."""
    expected = reference.step(*data, next_subsample(model, len(data[2])), n, noise)
    before = actor_vector(model)
    model.train()
    log = logged(model)
    for key in expected.keys() - {"step"}:
        assert log[key] == pytest.approx(expected[key], rel=1e-4), key
    assert log["step_fraction"] > 0
    wanted = log["step_fraction"] * expected["step"]
    assert np.linalg.norm(actor_vector(model) - before - wanted) <= rtol * np.linalg.norm(wanted)
    return log


def of_the_rollout(model):
    return model.policy, *env_major(model)


def check_updates(model, n_updates: int = 2, noise: float = 0.0, data_of=of_the_rollout) -> None:
    reference = reference_for(model)
    # conjugate gradients are not exact
    rtol = 1e-4 if isinstance(model, MatchedTRPO) else 1e-5
    for _ in range(n_updates):
        collect(model)
        check_update(model, reference, data_of(model), n_samples(model), noise, rtol)


@pytest.fixture(params=[False, True], ids=["general", "layered"])
def layered(request, monkeypatch) -> None:
    """Updates with products by autograd, and layer by layer."""
    if request.param:
        take_apart(monkeypatch)


@pytest.mark.parametrize("action_space", ACTION_SPACES)
@pytest.mark.parametrize(("factor", "n_envs"), [(1, 1), (3, 1), (10, 3)])
def test_step_equals_the_dense_reference(action_space, factor, n_envs):
    check_updates(make_model(UATRPO, action_space, n_envs, sub_sampling_factor=factor), n_updates=3)


@pytest.mark.parametrize("action_space", ACTION_SPACES)
@pytest.mark.parametrize(("factor", "n_envs"), [(1, 1), (10, 3)])
def test_matched_trpo_equals_the_dense_reference(action_space, factor, n_envs):
    check_updates(make_model(MatchedTRPO, action_space, n_envs, sub_sampling_factor=factor, cg_max_steps=200))


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
    check_updates(make_model(UATRPO, action_space, n_envs=2, n_critic_updates=1, **options))


class SquashedPolicy(DoublePolicy):
    """Stable-Baselines3 has the distribution, but no policy of its own that uses it without gSDE."""

    def _build(self, lr_schedule):
        super()._build(lr_schedule)
        self.action_dist = SquashedDiagGaussianDistribution(self.action_space.shape[0])


def test_squashed_gaussians_equal_the_dense_reference():
    check_updates(make_model(policy=SquashedPolicy, n_envs=2))


@pytest.mark.parametrize(
    ("action_space", "layered"),
    [("multi_discrete", False), *((space, layered) for space in ("box", "discrete") for layered in (False, True))],
    indirect=["layered"],
)
@pytest.mark.parametrize(("cls", "options"), [(UATRPO, {}), (MatchedTRPO, {"cg_max_steps": 200})])
def test_adversarial_noise_equals_the_dense_reference(cls, options, action_space, layered):
    # The line search may refuse a direction that noise has spoilt; here it must not hide the proposal
    options = {"n_envs": 2, "adversarial_noise": 0.3, "line_search_kl_factor": 1e6, **options}
    check_updates(make_model(cls, action_space, **options), noise=0.3)
