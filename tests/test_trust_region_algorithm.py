"""The SB3 side: what an update touches, refuses, logs, saves and repeats."""

import copy
import math
import pickle
import warnings

import numpy as np
import pytest
import torch as th
from gymnasium import spaces
from stable_baselines3.common.buffers import RolloutBuffer
from stable_baselines3.common.policies import ActorCriticPolicy

from sb3_uatrpo import UATRPO, MatchedTRPO
from sb3_uatrpo.actor import Actor
from sb3_uatrpo.buffers import NonFiniteRolloutError, count_trajectories
from sb3_uatrpo.core.estimates import SampleEstimates
from sb3_uatrpo.core.line_search import Evaluation, backtracking_line_search
from sb3_uatrpo.critic import fit_values
from sb3_uatrpo.families import GaussianFamily
from tests.helpers import (
    ACTION_SPACES,
    BOTH,
    DICT,
    NoiseEnv,
    actor_vector,
    assert_same,
    assert_same_update,
    collect,
    count_calls,
    direction_and_gradient,
    env_major,
    extractor,
    logged,
    make_model,
    model_on,
    next_subsample,
    part_of,
    small,
    state_of,
    unchanged,
    update,
    with_extractor,
    with_kwargs,
)
from tests.reference import (
    covariance_matrix,
    fisher_matrix,
    flat,
    gradient_samples,
    log_prob,
    n_trajectories,
    radius_squared,
)

SHARED_KEYS = {
    "kl_estimated", "kl_proposed", "kl_ratio", "kl_divergence_loss", "n_trajectories", "step_fraction",
    "is_line_search_success", "policy_objective", "value_loss", "explained_variance", "learning_rate", "n_updates",
}  # fmt: skip
UATRPO_KEYS = {"uncertainty_penalty", "uncertainty_share", "radius_squared", "subspace_rank", "gradient_snr"}


@BOTH
@pytest.mark.parametrize("action_space", ACTION_SPACES)
def test_every_key_is_logged(cls, action_space):
    model = make_model(cls, action_space, n_envs=2)
    log = update(model)
    wanted = SHARED_KEYS | (UATRPO_KEYS if cls is UATRPO else set()) | ({"std"} if "box" in action_space else set())
    assert set(log) == wanted | ({"noise_scale"} if log.get("gradient_snr", 0.0) > 0.0 else set())
    assert all(np.isfinite(value) for value in log.values())
    assert log["kl_ratio"] == pytest.approx(log["kl_proposed"] / log["kl_estimated"])
    if cls is UATRPO:
        # η²v'M̂v = 2δ: the two penalties fill the trust region
        assert log["kl_estimated"] + log["uncertainty_penalty"] == pytest.approx(model.trust_region_delta)
        assert log["uncertainty_share"] == pytest.approx(log["uncertainty_penalty"] / model.trust_region_delta)
    else:
        assert log["kl_estimated"] == model.target_kl


@BOTH
def test_the_logged_kl_is_that_of_the_step_taken(cls):
    model = collect(make_model(cls, n_envs=2))
    before = copy.deepcopy(model.policy)
    obs = th.as_tensor(model.rollout_buffer.observations).flatten(0, 1)
    model.train()
    with th.no_grad():
        old, new = (policy.get_distribution(obs).distribution for policy in (before, model.policy))
        kl = th.distributions.kl_divergence(old, new).sum(dim=1).mean().item()
    assert logged(model)["step_fraction"] == 1.0
    assert logged(model)["kl_proposed"] == logged(model)["kl_divergence_loss"] == pytest.approx(kl, rel=1e-6)
    assert logged(model)["policy_objective"] > 0


@BOTH
@pytest.mark.parametrize("normalize_advantage", [True, False])
def test_the_logged_objective_is_the_surrogate(cls, normalize_advantage):
    """The mean of A_i π(a_i|s_i)/π_old(a_i|s_i), which need not be zero before the step."""
    model = collect(make_model(cls, n_envs=2, normalize_advantage=normalize_advantage))
    if not normalize_advantage:
        model.rollout_buffer.advantages += 3.0
    obs, actions, advantages = env_major(model)
    before = log_prob(model.policy, obs, actions).detach()
    model.train()
    ratio = th.exp(log_prob(model.policy, obs, actions).detach() - before)
    assert logged(model)["policy_objective"] == pytest.approx((advantages * ratio).mean().item(), rel=1e-6)


@BOTH
def test_logged_values_of_the_critic_and_the_noise(cls):
    """The losses are those of the epochs that follow the step."""
    model, other = (make_model(cls, n_critic_updates=n) for n in (2, 0))
    collect(model)
    other.rollout_buffer = copy.deepcopy(model.rollout_buffer)
    values, returns = (getattr(model.rollout_buffer, name).astype(np.float64) for name in ("values", "returns"))
    for each in (model, other):
        np.random.seed(0)
        each.train()
    log = logged(model)
    assert log["explained_variance"] == pytest.approx(1.0 - (returns - values).var() / returns.var(), rel=1e-5)
    assert log["std"] == pytest.approx(np.exp(model.policy.log_std.detach().numpy()).mean())
    np.random.seed(0)
    losses = fit_values(Actor(other.policy), other.rollout_buffer, model.batch_size, 2)
    assert log["value_loss"] == pytest.approx(np.mean(losses), rel=1e-6)


@BOTH
def test_without_epochs_of_the_critic_the_actor_alone_moves(cls):
    model = collect(make_model(cls, n_critic_updates=0))
    before = state_of(model)
    model.train()
    after = state_of(model)
    moved = {name for name in part_of(before, "policy.") if not np.array_equal(after[name], before[name])}
    assert moved == {name for name in part_of(before, "policy.") if "value" not in name}
    assert not part_of(after, "optimizer.")
    # estimates are made beside the parameters' own gradients
    assert all(param.grad is None for param in model.policy.parameters())


@BOTH
@pytest.mark.parametrize("n_envs", [1, 3])
def test_a_flattened_buffer_gives_the_same_update(cls, n_envs):
    models = [make_model(cls, n_envs=n_envs) for _ in range(2)]
    for model in models:
        model.set_random_seed(0)
        collect(model)
    next(models[0].rollout_buffer.get(7))
    for model in models:
        np.random.seed(0)
        model.train()
    assert_same(*models)


@BOTH
@pytest.mark.parametrize("seed", [0, 7])
def test_the_same_seed_gives_the_same_numbers(cls, seed):
    models = [small(cls, n_envs=2, seed=seed).learn(200) for _ in range(2)]
    assert_same(*models)
    other = small(cls, n_envs=2, seed=seed + 1).learn(200)
    assert not np.array_equal(actor_vector(models[0]), actor_vector(other))


@BOTH
def test_unseeded_models_follow_torchs_global_generator(cls):
    models = []
    for _ in range(2):
        th.manual_seed(5)
        models.append(make_model(cls, seed=None))
    # the generator of Ω is part of the sketch
    assert_same(*models)
    other = make_model(cls, seed=None)
    assert not np.array_equal(actor_vector(models[0]), actor_vector(other))
    if cls is UATRPO:
        assert not th.equal(models[0].sketch.generator.get_state(), other.sketch.generator.get_state())


@BOTH
def test_set_random_seed_makes_a_run_reproducible(cls):
    """Stable-Baselines3's seeds everything random of its own algorithms."""
    models = [small(cls, n_envs=2, seed=seed) for seed in (None, 1)]
    models[1].policy.load_state_dict(models[0].policy.state_dict())
    for model in models:
        model.set_random_seed(5)
        model.learn(200)
    assert_same(*models)
    # as if they had been created with it
    seeded = small(cls, n_envs=2, seed=5)
    models[0].set_random_seed(5)
    models[1].set_random_seed(None)
    assert models[0].subsample_generator.bit_generator.state == seeded.subsample_generator.bit_generator.state
    assert models[1].subsample_generator.bit_generator.state != seeded.subsample_generator.bit_generator.state
    if cls is UATRPO:
        assert th.equal(models[0].sketch.generator.get_state(), seeded.sketch.generator.get_state())


@BOTH
@pytest.mark.parametrize(
    "kwargs",
    [
        {},
        with_kwargs(optimizer_class=th.optim.SGD),
        with_kwargs(activation_fn=th.nn.ELU),
        {"use_sde": True},
        {"use_sde": True, **with_kwargs(use_expln=True)},
    ],
    ids=str,
)
def test_copies_and_saved_models_go_on_bit_for_bit(cls, kwargs, tmp_path):
    model = small(cls, n_envs=2, **kwargs)
    fresh = model.subsample_generator.bit_generator.state
    model.learn(200).save(tmp_path / "model")
    for policy in (copy.deepcopy(model.policy), pickle.loads(pickle.dumps(model.policy))):
        np.testing.assert_equal(flat(policy.parameters()), flat(model.policy.parameters()))
    copied, loaded = copy.deepcopy(model), cls.load(tmp_path / "model", env=model.env, device="cpu")
    observation = model.observation_space.sample()
    for other in (copied, loaded):
        assert other.policy is not model.policy
        assert other.subsample_generator.bit_generator.state == model.subsample_generator.bit_generator.state != fresh
        predicted = (each.predict(observation, deterministic=True)[0] for each in (model, other))
        np.testing.assert_equal(*predicted)
    if cls is UATRPO:
        sketch = pickle.loads(pickle.dumps(model.sketch))
        assert th.equal(sketch.generator.get_state(), copied.sketch.generator.get_state())
        assert copied.sketch is not model.sketch
    assert_same_update(model, copied, loaded)
    assert next_subsample(model) == next_subsample(copied) == next_subsample(loaded)


@BOTH
def test_files_of_releases_without_the_generator_load(cls, tmp_path):
    model = small(cls)
    first = model.subsample_generator.bit_generator.state
    model.save(tmp_path / "model", exclude=["subsample_generator"])
    loaded = cls.load(tmp_path / "model", env=model.env, device="cpu")
    assert loaded.subsample_generator.bit_generator.state == first
    collect(loaded)


# ----------------------------------------------------------------------------------------------- what is not finite


@BOTH
@pytest.mark.parametrize("name", ["observations", "rewards", "advantages", "returns"])
@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("flattened", [False, True])
def test_non_finite_rollouts_raise_before_anything_changes(cls, name, value, flattened):
    model = make_model(cls, n_envs=2)
    update(model)
    collect(model)
    getattr(model.rollout_buffer, name)[11, 1] = value
    if flattened:
        next(model.rollout_buffer.get(7))
    # what RL Zoo prunes a trial for
    raised = pytest.raises(ValueError, match=rf"{name} .*{value}.* timestep 11 of environment 1")
    with unchanged(model), raised:
        model.train()


class HardCritic(ActorCriticPolicy):
    """Only its values are not finite where observations are not."""

    def extract_features(self, obs, features_extractor=None):
        return super().extract_features(obs.clamp(-1.0, 1.0), features_extractor)

    def evaluate_actions(self, obs, actions):
        values, *others = super().evaluate_actions(obs, actions)
        return values + 0.0 * obs.sum(dim=1, keepdim=True), *others


class Spoilt(RolloutBuffer):
    def _get_samples(self, batch_inds, env=None):
        samples = super()._get_samples(batch_inds, env)
        return samples._replace(observations=samples.observations.clone().fill_(np.nan))


@BOTH
@pytest.mark.parametrize(
    ("kwargs", "value", "message"),
    [
        ({}, np.inf, "observations are not finite: inf at timestep 5 of environment 0"),
        ({}, np.nan, "observations are not finite: nan at timestep 5 of environment 0"),
        ({"policy": HardCritic}, np.inf, "observations are not finite: inf at timestep 5 of environment 0"),
        ({"observation_space": DICT}, np.nan, r"observations\['vector'\].*nan at timestep 5 of environment 0"),
        ({"rollout_buffer_class": Spoilt}, 0.0, "that the rollout buffer returned are not finite"),
    ],
)
def test_observations_that_the_policy_cannot_handle_are_refused(cls, kwargs, value, message):
    model = collect(small(cls, **kwargs))
    observations = model.rollout_buffer.observations
    (observations["vector"] if isinstance(observations, dict) else observations)[5, 0, 1] = value
    with unchanged(model), pytest.raises(NonFiniteRolloutError, match=message):
        model.train()


@BOTH
def test_infinite_observations_that_the_policy_handles_are_trained_on(cls):
    """A lidar reports infinity where it meets nothing."""
    clamped = with_extractor(extractor(3, lambda n: {}, lambda self, x: x.clamp(-2.0, 2.0)))
    models = [small(cls, **clamped) for _ in range(2)]
    for model, out_of_range in zip(models, (np.inf, 2.0), strict=True):
        model.set_random_seed(0)
        collect(model)
        model.rollout_buffer.observations[5, 0, 1] = out_of_range
        model.train()
        assert logged(model)["step_fraction"] > 0
    assert_same(*models)


@BOTH
def test_a_non_finite_critic_loss_never_reaches_the_optimizer(cls):
    model = collect(small(cls, batch_size=8))
    model.rollout_buffer.returns[5] = 3e38
    with pytest.warns(UserWarning, match="skipped a minibatch whose loss or gradient is not finite"):
        model.train()
    assert all(np.isfinite(v).all() for v in state_of(model).values())
    assert np.isfinite(logged(model)["value_loss"])


# ------------------------------------------------------------------------------------- updates that move nothing


def equal_advantages(model, _):
    # not a number that float32 holds exactly: its mean is not it
    model.rollout_buffer.advantages[:] = 0.1


def huge_advantages(model, _):
    model.rollout_buffer.advantages[:] = 3e38 * np.sign(model.rollout_buffer.advantages)


def no_gradient_of_the_batch(model, patch):
    true = SampleEstimates.gradient
    patch.setattr(
        SampleEstimates, "gradient", lambda self: true(self) * (np.nan if self.n_timesteps == model.n_steps else 1.0)
    )


def no_fisher_product(_, patch):
    true = SampleEstimates.products
    patch.setattr(SampleEstimates, "products", lambda self, X: (math.nan * X, true(self, X)[1]))


def no_curvature(_, patch):
    patch.setattr(SampleEstimates, "products", lambda self, X: (th.zeros_like(X), th.zeros_like(X)))


def fisher_form(value):
    return lambda _, patch: patch.setattr(SampleEstimates, "quadratic_forms", lambda *_: (value, 1.0))


def huge_penalty(model, patch):
    patch.setattr(model, "uncertainty_coef", 1e300)


NOT_FINITE, UNBOUNDED = "the update direction is not finite", "the trust region does not bound"
WITH_TARGET = {"target_kl": 0.01, "shrinkage": 0.5}
#: arguments, what is spoilt, the reason, and whether the sketch advances all the same
REFUSALS = {
    "equal advantages": ({}, equal_advantages, "the update direction is zero", True),
    "huge advantages": ({"normalize_advantage": False, "double": False}, huge_advantages, NOT_FINITE, False),
    "gradient": ({}, no_gradient_of_the_batch, NOT_FINITE, True),
    "Fisher product": ({}, no_fisher_product, NOT_FINITE, False),
    "penalty": ({"double": False}, huge_penalty, NOT_FINITE, False),
    # tr M̂ = 0: μ is zero, and nothing is divided by it
    "no curvature": ({"shrinkage": 0.5}, no_curvature, NOT_FINITE, True),
    **{f"Fisher form {x}": (WITH_TARGET, fisher_form(x), UNBOUNDED, True) for x in (0.0, np.nan, np.inf)},
}
FOR_BOTH = ("equal advantages", "huge advantages", "gradient")


@pytest.mark.parametrize(("cls", "name"), [*((UATRPO, x) for x in REFUSALS), *((MatchedTRPO, x) for x in FOR_BOTH)])
def test_a_refused_update_leaves_the_actor_bit_for_bit_as_it_was(cls, name, monkeypatch):
    kwargs, spoil, reason, advances = REFUSALS[name]
    model = collect(make_model(cls, **kwargs))
    refused = pytest.warns(UserWarning, match=f"left the policy unchanged: {reason}")
    with monkeypatch.context() as patch, unchanged(model, actor_vector), refused:
        spoil(model, patch)
        model.train()
    log = logged(model)
    assert log["step_fraction"] == log["is_line_search_success"] == log["kl_divergence_loss"] == 0.0
    assert all(np.isfinite(value).all() for value in state_of(model).values())
    assert update(model)["step_fraction"] > 0.0
    if cls is UATRPO:
        assert model.sketch.ema_weight.item() == pytest.approx(1 - model.ema_beta ** (1 + advances))


@BOTH
def test_an_error_in_the_line_search_restores_the_policy(cls, monkeypatch):
    model = collect(make_model(cls))
    monkeypatch.setattr(GaussianFamily, "kl", lambda *_: 1 / 0)
    with unchanged(model, actor_vector), pytest.raises(ZeroDivisionError):
        model.train()


@BOTH
def test_a_line_search_that_fails_restores_the_policy(cls):
    model = collect(make_model(cls, line_search_kl_factor=1e-9, line_search_max_iter=2))
    with unchanged(model, actor_vector):
        model.train()
    assert logged(model)["step_fraction"] == 0.0
    assert logged(model)["kl_proposed"] > 0.0


@BOTH
def test_a_step_that_lowers_the_objective_is_not_taken(cls, monkeypatch):
    """Downhill all the way: whatever its KL divergence, no fraction of the step is accepted."""
    found = cls._find_direction

    def downhill(self, estimates):
        direction = found(self, estimates)
        return type(direction)(-direction.vector, direction.values)

    monkeypatch.setattr(cls, "_find_direction", downhill)
    model = collect(make_model(cls, line_search_kl_factor=100.0, normalize_advantage=False))
    model.rollout_buffer.advantages += 5.0
    objective = model.rollout_buffer.advantages.mean()
    with unchanged(model, actor_vector):
        model.train()
    assert logged(model)["step_fraction"] == 0.0
    assert logged(model)["policy_objective"] == pytest.approx(objective, rel=1e-6)


@BOTH
def test_an_actor_without_trainable_parameters_still_trains_its_critic(cls):
    model = small(cls)
    for name, param in model.policy.named_parameters():
        param.requires_grad_("value" in name)
    collect(model)
    before = model.policy.value_net.weight.clone()
    with pytest.warns(UserWarning, match="no trainable parameters"):
        model.train()
    assert not th.equal(before, model.policy.value_net.weight)


# ------------------------------------------------------------------------------------ the length, and the line search


def test_a_direction_outside_the_sampled_subspace_has_no_share_of_uncertainty(monkeypatch):
    """Its Fisher term and its penalty are zero; shrinkage alone bounds the step."""
    model = make_model(shrinkage=0.5)
    monkeypatch.setattr(SampleEstimates, "quadratic_forms", lambda self, v: (0.0, 0.0))
    assert update(model)["uncertainty_share"] == 0.0


def test_the_trust_region_delta_does_not_matter_beside_target_kl():
    models = [make_model(target_kl=0.01)]
    with pytest.warns(UserWarning, match=r"trust_region_delta=3.0 has no effect, since target_kl=0.01"):
        models.append(make_model(target_kl=0.01, trust_region_delta=3.0))
    for model in models:
        model.set_random_seed(0)
        update(model)
    assert_same(*models)


@pytest.mark.parametrize("steps", [1, 3])
def test_conjugate_gradients_take_cg_max_steps(steps, monkeypatch):
    calls = count_calls(monkeypatch, SampleEstimates, "fisher_product")
    update(make_model(MatchedTRPO, cg_max_steps=steps))
    assert len(calls) == steps


@BOTH
def test_a_cut_back_step_is_a_power_of_the_shrinking_factor(cls):
    log = update(make_model(cls, line_search_kl_factor=0.1, line_search_shrinking_factor=0.7))
    i = np.log(log["step_fraction"]) / np.log(0.7)
    assert i == pytest.approx(round(i), abs=1e-6)
    assert i >= 1
    assert log["kl_divergence_loss"] <= 0.1 * log["kl_estimated"] < log["kl_proposed"]


@pytest.mark.parametrize("factor", [0.8, 0.9, 0.65, 0.6])
def test_the_shortest_step_is_known_in_spite_of_rounding(factor, monkeypatch):
    """A product of equal factors is not exactly their power."""
    model = make_model(MatchedTRPO, line_search_shrinking_factor=factor, line_search_max_iter=10)
    monkeypatch.setattr("sb3_uatrpo.trust_region_algorithm.STUCK", 1)
    tried: list[float] = []
    backtracking_line_search(lambda fraction: tried.append(fraction) or Evaluation(0.0, 1.0), 0.0, 0.5, factor, 10)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for fraction in tried[:-1]:
            model._warn_if_stuck(fraction)
    with pytest.warns(UserWarning, match="by the line search's shortest step"):
        model._warn_if_stuck(tried[-1])


@BOTH
@pytest.mark.parametrize("factor", [0.5, 2.0, 3.0])
def test_the_bound_of_the_line_search_is_the_factor_times_the_estimate(cls, factor, monkeypatch):
    searches = count_calls(monkeypatch, cls, "_search")
    log = update(make_model(cls, line_search_kl_factor=factor))
    assert [bound for *_, bound in searches] == [pytest.approx(factor * log["kl_estimated"])]


# -------------------------------------------------------------------------------------------------- the learning rate


@BOTH
@pytest.mark.parametrize(("progress", "rate"), [(0.5, 0.005), (0.0, 0.0), (-0.5, 0.0)])
def test_the_learning_rate_is_that_of_the_schedule_and_never_negative(cls, progress, rate):
    """The progress is negative at the end of a run whose length is no multiple of a rollout's."""
    model = collect(make_model(cls, learning_rate=lambda progress: 0.01 * progress))
    model._current_progress_remaining = progress
    before = model.policy.value_net.weight.clone()
    model.train()
    assert logged(model)["learning_rate"] == model.policy.optimizer.param_groups[0]["lr"] == pytest.approx(rate)
    # from the first minibatch on
    assert th.equal(before, model.policy.value_net.weight) == (rate == 0.0)


@BOTH
@pytest.mark.parametrize("rate", [math.nan, math.inf, -math.inf])
def test_a_schedule_with_a_bad_value_changes_nothing(cls, rate):
    model = collect(make_model(cls, learning_rate=lambda progress: 1e-3 if progress == 1.0 else rate))
    model._current_progress_remaining = 0.5
    with unchanged(model), pytest.raises(ValueError, match=f"learning_rate must be .*, but it is {rate}"):
        model.train()


# --------------------------------------------------------------------------------------------------- the parameters θ


@BOTH
def test_actor_parameters_are_found_from_the_graph(cls):
    """Their names say nothing about what depends on them; those that are frozen stay."""

    def parts(n):
        return {"value_map": th.nn.Linear(n, 4), "unused": th.nn.Linear(n, 4)}

    model = small(cls, **with_extractor(extractor(4, parts, lambda self, x: self.value_map(x).tanh())))
    for net in (model.policy.mlp_extractor.policy_net, model.policy.mlp_extractor.value_net):
        net[0].bias.requires_grad_(False)
    before = state_of(model)
    update(model)
    after = state_of(model)
    moved = {name for name in part_of(before, "policy.") if not np.array_equal(before[name], after[name])}
    assert {"policy.features_extractor.value_map.weight", "policy.mlp_extractor.policy_net.0.weight"} <= moved
    assert not any("unused" in name or name.endswith("_net.0.bias") for name in moved)


LINEAR_ACTOR = {"policy_kwargs": {"net_arch": []}, "sub_sampling_factor": 1, "n_projections": 60}


def assert_exact_direction(model, tolerance: float, max_condition: float = 1e4) -> None:
    """The direction that the first update finds is M̂⁺ĝ with dense matrices."""
    collect(model)
    obs, actions, advantages = env_major(model)
    samples = gradient_samples(model.policy, obs, actions, advantages)
    n = n_trajectories(model.rollout_buffer.episode_starts)
    c = model.uncertainty_coef * radius_squared(samples.shape[1], n, model.confidence_alpha)
    rows = next_subsample(model)
    M = fisher_matrix(model.policy, obs[rows]) + c * covariance_matrix(samples[rows])
    # nothing near a cut-off, so that the pseudo-inverse is a matter of mathematics
    assert np.linalg.cond(M) < max_condition
    expected = np.linalg.pinv(M) @ samples.mean(axis=0)
    found, _ = direction_and_gradient(model)
    assert np.linalg.norm(found - expected) <= tolerance * np.linalg.norm(expected)


def test_projections_beyond_the_number_of_parameters_project_nothing():
    """Ω is the identity, so hundreds of projections cost and change nothing."""
    models = []
    for n_projections in (0, 1, 800):
        model = make_model(UATRPO, "discrete", shrinkage=0.5, n_projections=1)
        d = len(actor_vector(model))
        model.n_projections = d + n_projections
        update(model)
        assert np.array_equal(model.sketch.omega.numpy(), np.eye(d))
        assert model.sketch.y_fisher.shape == (d, d)
        models.append(model)
    assert_same(*models)


@pytest.mark.parametrize("n_projections", [28, 200, 800, 2000])
def test_directions_of_little_curvature_are_kept(n_projections):
    """With Gaussian Ω, the cut on singular values grew with m, and 800 projections lost a direction."""
    limits = np.append(np.ones(11, np.float32), np.float32(0.008))
    options = {**LINEAR_ACTOR, "n_projections": n_projections, "observation_space": spaces.Box(-limits, limits)}
    model = make_model(UATRPO, **options)
    assert len(actor_vector(model)) == 28
    assert_exact_direction(model, 1e-5, max_condition=1e6)


@pytest.mark.parametrize(
    # without uncertainty, it is the natural gradient F̂⁺ĝ, the direction of TRPO without damping
    "options",
    [{"projection_solver": "least_squares"}, {"projection_solver": "nystrom"}, {"uncertainty_coef": 0.0}],
)
@pytest.mark.parametrize("seed", [0, 1])
def test_more_projections_than_parameters_give_the_pseudo_inverse(options, seed):
    """m ≥ d: the direction is M̂⁺ĝ itself, whatever Ω is."""
    model = make_model(UATRPO, **LINEAR_ACTOR, **options)
    model.sketch.generator.manual_seed(seed)
    assert len(actor_vector(model)) < 60
    assert_exact_direction(model, 1e-6)
    assert (logged(model)["uncertainty_penalty"] == 0.0) == (model.uncertainty_coef == 0.0)


@pytest.mark.parametrize("unit", ["trajectory", "step"])
def test_n_counts_episodes_that_start_or_steps(unit):
    model = collect(make_model(UATRPO, n_envs=3, sample_unit=unit))
    collect(model)  # the second rollout begins in the middle of episodes
    starts = model.rollout_buffer.episode_starts
    assert not starts[0].all()
    trajectories = n_trajectories(starts)
    assert 3 < trajectories < 3 + starts[1:].sum()
    model.train()
    d = len(actor_vector(model))
    n = trajectories if unit == "trajectory" else 3 * 48
    assert logged(model)["radius_squared"] == pytest.approx(radius_squared(d, n, model.confidence_alpha))
    assert logged(model)["n_trajectories"] == trajectories


@pytest.mark.parametrize("flattened", [False, True])
@pytest.mark.parametrize(
    ("starts_at", "expected"),
    [
        # a rollout of the paper: a reset at its first step, an episode as long as the rollout
        ([[0]], 1),
        # the rest of an episode, then two new ones
        ([[3, 7]], 2),
        # nothing but a fragment
        ([[]], 1),
        # an episode that starts at the last step
        ([[11]], 1),
        ([[0, 11]], 2),
        # each environment counts for itself
        ([[], [0, 5, 8], [4]], 5),
        ([[], []], 2),
    ],
)
def test_a_fragment_counts_only_where_no_episode_starts(starts_at, expected, flattened):
    model = collect(make_model(UATRPO, n_envs=len(starts_at), n_steps=12))
    starts = np.zeros((12, len(starts_at)), dtype=np.float32)
    for env, steps in enumerate(starts_at):
        starts[steps, env] = 1.0
    model.rollout_buffer.episode_starts = starts
    if flattened:
        next(model.rollout_buffer.get(4))
    assert count_trajectories(model.rollout_buffer) == n_trajectories(starts) == expected


def test_the_sketch_is_lowered_to_its_memory_limit():
    d = len(actor_vector(make_model()))
    limit = 3 * d * 8 * 5 + 7  # room for five projections in float64
    with pytest.warns(UserWarning, match=rf"n_projections is lowered from 8 to 5: .*sketch_memory_limit={limit}"):
        model = make_model(sketch_memory_limit=limit)
    update(model)
    assert model.sketch.shape == (d, 5)
    tensors = (model.sketch.omega, model.sketch.y_fisher, model.sketch.y_covariance)
    assert sum(t.untyped_storage().nbytes() for t in tensors) <= limit
    with pytest.raises(ValueError, match=r"sketch_memory_limit must have room for .* projection, .* but it is 10$"):
        make_model(sketch_memory_limit=10)


def test_the_step_of_a_nature_cnn_uses_observed_curvature_with_shrinkage():
    """1.7 million parameters, where the paper's cut on σ leaves next to nothing."""
    env = NoiseEnv(ACTION_SPACES["discrete"], spaces.Box(0, 255, (84, 84, 1), np.uint8))
    options = {"n_projections": 12, "shrinkage": 0.75, "ema_beta": 0.0, "sub_sampling_factor": 3, "n_steps": 48}
    model = collect(model_on(UATRPO, env, "CnnPolicy", **options))
    v, g = direction_and_gradient(model)
    assert len(g) > 1_600_000
    assert logged(model)["subspace_rank"] >= 2
    # neither the gradient's own direction nor unrelated to it
    assert 0.1 < v @ g / np.linalg.norm(v) / np.linalg.norm(g) < 0.9


def masked_by(value):
    """A policy of which one choice is impossible."""

    class Masked(ActorCriticPolicy):
        def _get_action_dist_from_latent(self, latent_pi):
            logits = self.action_net(latent_pi)
            return self.action_dist.proba_distribution(logits.index_fill(1, th.tensor([1]), value))

    return Masked


@BOTH
def test_a_policy_with_impossible_choices_learns(cls):
    vectors = []
    for value in (-math.inf, -1e6):
        model = small(cls, "discrete", policy=masked_by(value))
        before = actor_vector(model)
        model.learn(3 * model.n_steps)
        assert logged(model)["step_fraction"] > 0.0
        assert not np.array_equal(actor_vector(model), before)
        vectors.append(actor_vector(model))
    np.testing.assert_allclose(*vectors, rtol=1e-3, atol=1e-4)
