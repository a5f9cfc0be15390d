"""The SB3 side: what an update touches, refuses, logs, saves and repeats."""

import copy
import functools
import math
import warnings

import numpy as np
import pytest
import torch as th
from gymnasium import spaces
from stable_baselines3.common.buffers import RolloutBuffer
from stable_baselines3.common.policies import ActorCriticPolicy
from stable_baselines3.common.torch_layers import BaseFeaturesExtractor

from sb3_uatrpo import UATRPO, MatchedTRPO
from sb3_uatrpo.actor import Actor
from sb3_uatrpo.buffers import NonFiniteRolloutError, count_trajectories
from sb3_uatrpo.core.estimates import SampleEstimates
from sb3_uatrpo.core.line_search import Evaluation, backtracking_line_search
from sb3_uatrpo.critic import fit_values
from sb3_uatrpo.families import GaussianFamily
from tests.helpers import (
    ACTION_SPACES,
    DICT,
    NoiseEnv,
    SmallCombined,
    actor_vector,
    collect,
    env_major,
    logged,
    make_model,
    next_subsample,
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

BOTH = pytest.mark.parametrize("cls", [UATRPO, MatchedTRPO])
SHARED_KEYS = {
    "kl_estimated",
    "kl_proposed",
    "kl_ratio",
    "kl_divergence_loss",
    "n_trajectories",
    "step_fraction",
    "is_line_search_success",
    "policy_objective",
    "value_loss",
    "explained_variance",
    "learning_rate",
    "n_updates",
}
UATRPO_KEYS = {
    "uncertainty_penalty",
    "uncertainty_share",
    "radius_squared",
    "subspace_rank",
    "gradient_snr",
}


def small(cls, action_space="box", **kwargs):
    if cls is UATRPO:
        kwargs = {"n_projections": 8, **kwargs}
    return make_model(cls, action_space, **kwargs)


def state_of(model) -> dict[str, np.ndarray]:
    """Everything an update may change, copied."""
    state = {f"policy.{k}": v.clone().numpy() for k, v in model.policy.state_dict().items()}
    for i, entry in model.policy.optimizer.state_dict()["state"].items():
        state.update({f"optimizer.{i}.{k}": th.as_tensor(v).clone().numpy() for k, v in entry.items()})
    if isinstance(model, UATRPO):
        state.update({f"sketch.{k}": v.clone().numpy() for k, v in model.sketch.state_dict().items()})
    return state


def same(one: dict[str, np.ndarray], other: dict[str, np.ndarray], prefix: str = "") -> bool:
    keys = {k for k in one if k.startswith(prefix)}
    return keys == {k for k in other if k.startswith(prefix)} and all(np.array_equal(one[k], other[k]) for k in keys)


@BOTH
@pytest.mark.parametrize("action_space", ACTION_SPACES)
def test_every_key_is_logged(cls, action_space):
    model = small(cls, action_space, n_envs=2)
    collect(model)
    model.train()
    log = logged(model)
    wanted = SHARED_KEYS | (UATRPO_KEYS if cls is UATRPO else set()) | ({"std"} if "box" in action_space else set())
    assert set(log) == wanted | ({"noise_scale"} if log.get("gradient_snr", 0.0) > 0.0 else set())
    assert all(np.isfinite(value) for value in log.values())
    assert log["kl_ratio"] == pytest.approx(log["kl_proposed"] / log["kl_estimated"])
    if cls is UATRPO:
        # η²v'M̂v = 2δ: the two penalties fill the trust region
        assert log["kl_estimated"] + log["uncertainty_penalty"] == pytest.approx(model.trust_region_delta)
        assert log["uncertainty_share"] == pytest.approx(log["uncertainty_penalty"] / model.trust_region_delta)


@BOTH
def test_the_logged_kl_is_that_of_the_step_taken(cls):
    model = small(cls, n_envs=2)
    collect(model)
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
    model = small(cls, n_envs=2, normalize_advantage=normalize_advantage)
    collect(model)
    if not normalize_advantage:
        model.rollout_buffer.advantages += 3.0
    obs, actions, advantages = env_major(model)
    before = log_prob(model.policy, obs, actions).detach()
    model.train()
    ratio = th.exp(log_prob(model.policy, obs, actions).detach() - before)
    assert logged(model)["policy_objective"] == pytest.approx((advantages * ratio).mean().item(), rel=1e-6)


@BOTH
def test_the_actor_moves_in_the_step_and_the_critic_afterwards(cls):
    model = small(cls, n_critic_updates=0)
    collect(model)
    before = state_of(model)
    model.train()
    moved = {k for k, v in state_of(model).items() if k.startswith("policy.") and not np.array_equal(v, before[k])}
    assert moved == {k for k in before if k.startswith("policy.") and "value" not in k}
    assert not any(k.startswith("optimizer.") for k in state_of(model))

    model.n_critic_updates = 2
    collect(model)
    actor = actor_vector(model)
    found = Actor(model.policy)
    found.params = tuple(p for n, p in model.policy.named_parameters() if "value" not in n)
    fit_values(found, model.rollout_buffer, 20, 2)
    assert np.array_equal(actor, actor_vector(model))
    assert any(k.startswith("optimizer.") for k in state_of(model))


@BOTH
def test_weight_decay_does_not_move_the_actor(cls):
    optimizer = {"optimizer_class": th.optim.AdamW, "optimizer_kwargs": {"weight_decay": 0.5}}
    models = [small(cls, policy_kwargs={"net_arch": [4], **extra}) for extra in ({}, optimizer)]
    for model in models:
        model.set_random_seed(0)
        collect(model)
        model.train()
        assert logged(model)["step_fraction"] > 0
    assert np.array_equal(*(actor_vector(model) for model in models))


@BOTH
def test_critic_learns(cls):
    model = small(cls, n_critic_updates=200)
    collect(model)

    def loss():
        buffer = model.rollout_buffer
        obs, returns = (th.as_tensor(x.reshape(48, -1)) for x in (buffer.observations, buffer.returns))
        with th.no_grad():
            return (model.policy.predict_values(obs) - returns).square().mean().item()

    before = loss()
    model.train()
    assert loss() < 0.7 * before


@BOTH
@pytest.mark.parametrize("n_envs", [1, 3])
def test_a_flattened_buffer_gives_the_same_update(cls, n_envs):
    models = [small(cls, n_envs=n_envs) for _ in range(2)]
    for model in models:
        model.set_random_seed(0)
        collect(model)
    next(models[0].rollout_buffer.get(7))
    for model in models:
        np.random.seed(0)
        model.train()
    assert same(*map(state_of, models))


@BOTH
@pytest.mark.parametrize("seed", [0, 7])
def test_the_same_seed_gives_the_same_numbers(cls, seed):
    models = [small(cls, double=False, n_envs=2, seed=seed).learn(200) for _ in range(2)]
    assert same(*map(state_of, models))
    other = small(cls, double=False, n_envs=2, seed=seed + 1).learn(200)
    assert not np.array_equal(actor_vector(models[0]), actor_vector(other))


@BOTH
def test_unseeded_models_follow_torchs_global_generator(cls):
    models = []
    for _ in range(2):
        th.manual_seed(5)
        models.append(small(cls, seed=None))
    assert np.array_equal(*(actor_vector(model) for model in models))
    assert not np.array_equal(actor_vector(models[0]), actor_vector(small(cls, seed=None, double=False)))
    if cls is UATRPO:
        assert th.equal(*(model.sketch.generator.get_state() for model in models))
        assert not th.equal(models[0].sketch.generator.get_state(), small(cls, seed=None).sketch.generator.get_state())


@BOTH
def test_set_random_seed_makes_a_run_reproducible(cls):
    """Stable-Baselines3's seeds everything random of its own algorithms."""
    models = [small(cls, double=False, n_envs=2, seed=seed) for seed in (None, 1)]
    models[1].policy.load_state_dict(models[0].policy.state_dict())
    for model in models:
        model.set_random_seed(5)
        model.learn(200)
    assert same(*map(state_of, models))
    # as if they had been created with it
    seeded = small(cls, double=False, n_envs=2, seed=5)
    models[0].set_random_seed(5)
    models[1].set_random_seed(None)
    assert models[0].subsample_generator.bit_generator.state == seeded.subsample_generator.bit_generator.state
    assert models[1].subsample_generator.bit_generator.state != seeded.subsample_generator.bit_generator.state
    if cls is UATRPO:
        generators = [model.sketch.generator.get_state() for model in (models[0], seeded)]
        assert th.equal(*generators)


@BOTH
def test_training_goes_on_identically_after_save_and_load(cls, tmp_path):
    model = small(cls, double=False, n_envs=2).learn(200)
    model.save(tmp_path / "model")
    loaded = cls.load(tmp_path / "model", env=model.get_env())
    assert same(state_of(model), state_of(loaded))
    loaded.set_logger(model.logger)
    collect(model)
    loaded.rollout_buffer = copy.deepcopy(model.rollout_buffer)
    for each in (model, loaded):
        np.random.seed(3)
        th.manual_seed(3)
        each.train()
    assert same(state_of(model), state_of(loaded))


@BOTH
def test_the_policy_can_be_copied_after_an_update(cls):
    model = small(cls, double=False)
    collect(model)
    before = model.policy.action_dist
    model.train()
    assert model.policy.action_dist is before
    assert not before.distribution.mean.requires_grad
    copy.deepcopy(model.policy)


@BOTH
def test_distribution_checks_are_as_they_were(cls):
    validate = th.distributions.Distribution._validate_args
    model = small(cls)
    collect(model)
    model.train()
    assert th.distributions.Distribution._validate_args is validate


@BOTH
@pytest.mark.parametrize("name", ["observations", "rewards", "advantages", "returns"])
@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("flattened", [False, True])
def test_non_finite_rollouts_raise_before_anything_changes(cls, name, value, flattened):
    model = small(cls, n_envs=2)
    collect(model)
    model.train()
    collect(model)
    getattr(model.rollout_buffer, name)[11, 1] = value
    if flattened:
        next(model.rollout_buffer.get(7))
    before = state_of(model)
    with pytest.raises(FloatingPointError, match=rf"{name} .*{value}.* timestep 11 of environment 1") as raised:
        model.train()
    # what RL Zoo prunes a trial for
    assert isinstance(raised.value, ValueError)
    assert same(before, state_of(model))


def refuse(model, reason: str) -> None:
    """The update leaves the actor bit for bit as it was, says so, and trains the critic."""
    before = state_of(model)
    with pytest.warns(UserWarning, match=f"left the policy unchanged: {reason}"):
        model.train()
    after = state_of(model)
    actor = {k for k in before if k.startswith("policy.") and "value" not in k}
    assert all(np.array_equal(before[k], after[k]) for k in actor)
    assert all(np.isfinite(v).all() for v in after.values())
    assert logged(model)["step_fraction"] == 0.0
    assert logged(model)["is_line_search_success"] == 0.0
    assert logged(model)["kl_divergence_loss"] == 0.0
    collect(model)
    model.train()
    assert logged(model)["step_fraction"] > 0.0


@BOTH
def test_zero_advantages_are_refused(cls):
    model = small(cls)
    collect(model)
    # not a number that float32 holds exactly: its mean is not it
    model.rollout_buffer.advantages[:] = 0.1
    refuse(model, "the update direction is zero")


@BOTH
def test_non_finite_estimates_are_refused_and_never_reach_the_sketch(cls):
    model = small(cls, normalize_advantage=False, double=False)
    collect(model)
    model.train()
    collect(model)
    model.rollout_buffer.advantages[:] = 3e38 * np.sign(model.rollout_buffer.advantages)
    sketch = {k: v for k, v in state_of(model).items() if k.startswith("sketch.")}
    refuse(model, "the update direction is")
    if cls is UATRPO:
        assert np.isfinite(model.sketch.y_covariance.numpy()).all()
        assert sketch["sketch.ema_weight"] < model.sketch.ema_weight.item()


def test_the_sketch_advances_when_only_the_gradient_fails(monkeypatch):
    model = small(UATRPO)
    collect(model)
    true = SampleEstimates.gradient

    def of_the_batch_fails(self):
        return true(self) * (np.nan if self.n_timesteps == model.n_steps else 1.0)

    monkeypatch.setattr(SampleEstimates, "gradient", of_the_batch_fails)
    with pytest.warns(UserWarning, match="the update direction is not finite"):
        model.train()
    assert model.sketch.ema_weight.item() == pytest.approx(1 - model.ema_beta)
    assert model.sketch.y_fisher.any()


def test_a_fisher_product_that_is_not_finite_never_reaches_the_sketch(monkeypatch):
    model = small(UATRPO)
    collect(model)
    products = SampleEstimates.products

    def spoilt(self, X):
        fisher, covariance = products(self, X)
        return fisher * math.nan, covariance

    monkeypatch.setattr(SampleEstimates, "products", spoilt)
    with pytest.warns(UserWarning, match="the update direction is not finite"):
        model.train()
    assert model.sketch.ema_weight.item() == 0.0
    assert not model.sketch.y_fisher.any()


def test_a_direction_outside_the_sampled_subspace_has_no_share_of_uncertainty(monkeypatch):
    """Its Fisher term and its penalty are zero; shrinkage alone bounds the step."""
    model = small(UATRPO, shrinkage=0.5)
    collect(model)
    monkeypatch.setattr(SampleEstimates, "quadratic_forms", lambda self, v: (0.0, 0.0))
    model.train()
    assert logged(model)["uncertainty_share"] == 0.0


@pytest.mark.parametrize("steps", [1, 3])
def test_conjugate_gradients_take_cg_max_steps(steps, monkeypatch):
    model = small(MatchedTRPO, cg_max_steps=steps)
    collect(model)
    calls = []
    product = SampleEstimates.fisher_product
    monkeypatch.setattr(SampleEstimates, "fisher_product", lambda self, v: calls.append(1) or product(self, v))
    model.train()
    assert len(calls) == steps


@BOTH
def test_a_step_into_nowhere_restores_the_policy_exactly(cls, monkeypatch):
    """Steps so long that the distribution overflows: each trial is rejected, none is left half-written."""
    model = small(cls, double=False, line_search_max_iter=3)
    collect(model)
    found = type(model)._find_length

    def far(self, direction, estimates):
        length = found(self, direction, estimates)
        return type(length)(1e38, length.kl_estimated, length.values)

    monkeypatch.setattr(type(model), "_find_length", far)
    before = actor_vector(model)
    with pytest.warns(UserWarning, match="the KL divergence of the full step is not finite"):
        model.train()
    assert np.array_equal(before, actor_vector(model))
    assert logged(model)["step_fraction"] == 0.0
    assert "kl_proposed" not in logged(model)


@BOTH
def test_an_error_in_the_line_search_restores_the_policy(cls, monkeypatch):
    model = small(cls)
    collect(model)
    before = actor_vector(model)
    monkeypatch.setattr(GaussianFamily, "kl", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        model.train()
    assert np.array_equal(before, actor_vector(model))


@BOTH
def test_a_line_search_that_fails_restores_the_policy(cls):
    model = small(cls, line_search_kl_factor=1e-9, line_search_max_iter=2)
    collect(model)
    before = actor_vector(model)
    model.train()
    assert np.array_equal(before, actor_vector(model))
    assert logged(model)["step_fraction"] == 0.0
    assert logged(model)["kl_proposed"] > 0.0


@BOTH
def test_a_cut_back_step_is_a_power_of_the_shrinking_factor(cls):
    model = small(cls, line_search_kl_factor=0.1, line_search_shrinking_factor=0.7)
    collect(model)
    model.train()
    log = logged(model)
    i = np.log(log["step_fraction"]) / np.log(0.7)
    assert i == pytest.approx(round(i), abs=1e-6)
    assert i >= 1
    assert log["kl_divergence_loss"] <= 0.1 * log["kl_estimated"] < log["kl_proposed"]


@pytest.mark.parametrize("factor", [0.8, 0.9, 0.65, 0.6])
def test_the_shortest_step_is_known_in_spite_of_rounding(factor, monkeypatch):
    """A product of equal factors is not exactly their power."""
    model = small(MatchedTRPO, line_search_shrinking_factor=factor, line_search_max_iter=10)
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
def test_a_non_finite_critic_loss_never_reaches_the_optimizer(cls):
    model = small(cls, double=False, batch_size=8)
    collect(model)
    model.rollout_buffer.returns[5] = 3e38
    with pytest.warns(UserWarning, match="skipped a minibatch whose loss or gradient is not finite"):
        model.train()
    assert all(np.isfinite(v).all() for v in state_of(model).values())
    assert np.isfinite(logged(model)["value_loss"])


@BOTH
@pytest.mark.parametrize("factor", [0.5, 2.0, 3.0])
def test_the_bound_of_the_line_search_is_the_factor_times_the_estimate(cls, factor):
    model = small(cls, line_search_kl_factor=factor)
    bounds = []
    search = model._search
    model._search = lambda *args: bounds.append(args[-1]) or search(*args)
    collect(model)
    model.train()
    assert bounds == [pytest.approx(factor * logged(model)["kl_estimated"])]


@BOTH
def test_a_step_that_lowers_the_objective_is_not_taken(cls, monkeypatch):
    """Downhill all the way: whatever its KL divergence, no fraction of the step is accepted."""
    found = cls._find_direction

    def downhill(self, estimates):
        direction = found(self, estimates)
        return type(direction)(-direction.vector, direction.values)

    monkeypatch.setattr(cls, "_find_direction", downhill)
    model = small(cls, line_search_kl_factor=100.0, normalize_advantage=False)
    collect(model)
    model.rollout_buffer.advantages += 5.0
    before, objective = actor_vector(model), model.rollout_buffer.advantages.mean()
    model.train()
    assert logged(model)["step_fraction"] == 0.0
    assert logged(model)["policy_objective"] == pytest.approx(objective, rel=1e-6)
    assert np.array_equal(before, actor_vector(model))


@BOTH
def test_the_logged_value_loss_is_the_mean_over_minibatches(cls, monkeypatch):
    monkeypatch.setattr("sb3_uatrpo.trust_region_algorithm.fit_values", lambda *args: [1.0, 3.0])
    model = small(cls)
    collect(model)
    model.train()
    assert logged(model)["value_loss"] == 2.0


@BOTH
def test_logged_values_of_the_critic_and_the_noise(cls):
    model = small(cls, n_critic_updates=2)
    collect(model)
    values, returns = (
        array.astype(np.float64) for array in (model.rollout_buffer.values, model.rollout_buffer.returns)
    )
    model.train()
    log = logged(model)
    assert log["explained_variance"] == pytest.approx(1.0 - (returns - values).var() / returns.var(), rel=1e-5)
    assert log["std"] == pytest.approx(np.exp(model.policy.log_std.detach().numpy()).mean())


@BOTH
def test_the_learning_rate_is_that_of_the_schedule_from_the_first_minibatch_on(cls):
    model = small(cls, learning_rate=lambda progress: 0.0 if progress < 1.0 else 1.0, n_critic_updates=1)
    collect(model)
    model._current_progress_remaining = 0.5
    before = model.policy.value_net.weight.clone()
    model.train()
    assert th.equal(before, model.policy.value_net.weight)


@BOTH
@pytest.mark.parametrize("rate", [math.nan, math.inf, -math.inf])
def test_a_schedule_with_a_bad_value_changes_nothing(cls, rate):
    model = small(cls, learning_rate=lambda progress: 1e-3 if progress == 1.0 else rate)
    collect(model)
    model._current_progress_remaining = 0.5
    before = {name: value.clone() for name, value in model.policy.state_dict().items()}
    with pytest.raises(ValueError, match=f"learning_rate must be .*, but it is {rate}"):
        model.train()
    assert all(th.equal(value, before[name]) for name, value in model.policy.state_dict().items())


@BOTH
def test_what_a_schedule_takes_below_zero_counts_as_zero(cls):
    """As at the end of a run whose length is no multiple of a rollout's."""
    model = small(cls, learning_rate=lambda progress: 1e-2 * progress)
    collect(model)
    model._current_progress_remaining = -0.5
    critic = {name: value for name, value in state_of(model).items() if "value" in name}
    model.train()
    assert logged(model)["learning_rate"] == model.policy.optimizer.param_groups[0]["lr"] == 0.0
    assert all(np.array_equal(value, state_of(model)[name]) for name, value in critic.items())


@BOTH
@pytest.mark.parametrize(("n_steps", "total_timesteps"), [(64, 130), (1000, 500)])
def test_linear_schedules_last_to_the_end_of_the_run(cls, n_steps, total_timesteps):
    """As RL Zoo's ``lin_0.001``."""
    schedule = functools.partial(float.__mul__, 1e-3)
    model = cls("MlpPolicy", "CartPole-v1", n_steps=n_steps, batch_size=n_steps, learning_rate=schedule, device="cpu")
    model.learn(total_timesteps)
    assert model.num_timesteps >= total_timesteps
    assert model._current_progress_remaining < 0.0
    assert model.policy.optimizer.param_groups[0]["lr"] == 0.0


class Clamped(BaseFeaturesExtractor):
    """A lidar reports infinity where it meets nothing."""

    def __init__(self, observation_space: spaces.Box):
        super().__init__(observation_space, features_dim=3)

    def forward(self, observations):
        return observations.clamp(-2.0, 2.0)


@BOTH
def test_infinite_observations_that_the_policy_handles_are_trained_on(cls):
    models = [small(cls, double=False, policy_kwargs={"net_arch": [4], "features_extractor_class": Clamped})]
    models.append(small(cls, double=False, policy_kwargs={"net_arch": [4], "features_extractor_class": Clamped}))
    for model, out_of_range in zip(models, (np.inf, 2.0), strict=True):
        model.set_random_seed(0)
        collect(model)
        model.rollout_buffer.observations[5, 0, 1] = out_of_range
        model.train()
        assert logged(model)["step_fraction"] > 0
    assert same(*map(state_of, models))


class Subclass(ActorCriticPolicy):
    """Might compute anything, so it is not taken apart."""


@BOTH
@pytest.mark.parametrize("policy", ["MlpPolicy", Subclass])
@pytest.mark.parametrize("value", [np.inf, np.nan])
def test_infinite_observations_that_reach_the_network_are_refused(cls, policy, value):
    model = small(cls, double=False, policy=policy)
    collect(model)
    model.rollout_buffer.observations[5, 0, 1] = value
    before = state_of(model)
    with pytest.raises(
        NonFiniteRolloutError, match=f"observations are not finite: {value} at timestep 5 of environment 0"
    ):
        model.train()
    assert same(before, state_of(model))


class HardCritic(ActorCriticPolicy):
    """Only its values are not finite where observations are not."""

    def extract_features(self, obs, features_extractor=None):
        return super().extract_features(obs.clamp(-1.0, 1.0), features_extractor)

    def evaluate_actions(self, obs, actions):
        values, *others = super().evaluate_actions(obs, actions)
        return values + 0.0 * obs.sum(dim=1, keepdim=True), *others


@BOTH
def test_infinite_observations_that_only_the_critic_cannot_handle_are_refused(cls):
    model = small(cls, double=False, policy=HardCritic)
    collect(model)
    model.rollout_buffer.observations[5, 0, 1] = np.inf
    with pytest.raises(NonFiniteRolloutError, match="observations are not finite: inf at timestep 5 of environment 0"):
        model.train()


@BOTH
def test_a_buffer_that_returns_bad_observations_is_refused(cls):
    class Spoilt(RolloutBuffer):
        def _get_samples(self, batch_inds, env=None):
            samples = super()._get_samples(batch_inds, env)
            return samples._replace(observations=samples.observations.clone().fill_(np.nan))

    model = small(cls, double=False, rollout_buffer_class=Spoilt)
    collect(model)
    before = state_of(model)
    with pytest.raises(NonFiniteRolloutError, match="that the rollout buffer returned are not finite"):
        model.train()
    assert same(before, state_of(model))


@BOTH
def test_the_subsample_goes_on_after_loading(cls, tmp_path):
    """The same rollout gives the same update, which needs the same draws."""
    model = small(cls, double=False)
    collect(model)
    model.train()
    model.save(tmp_path / "model")
    loaded = cls.load(tmp_path / "model", env=model.env, device="cpu")
    loaded.set_logger(model.logger)
    assert loaded.subsample_generator.bit_generator.state == model.subsample_generator.bit_generator.state
    collect(model)
    loaded.rollout_buffer = copy.deepcopy(model.rollout_buffer)
    for each in (model, loaded):
        np.random.seed(0)
        each.train()
    assert same(state_of(model), state_of(loaded))
    assert next_subsample(model) == next_subsample(loaded)
    # and the draws differ from update to update
    fresh = small(cls, double=False)
    assert fresh.subsample_generator.bit_generator.state != model.subsample_generator.bit_generator.state


@BOTH
def test_files_of_releases_without_the_generator_load(cls, tmp_path):
    model = small(cls, double=False)
    first = model.subsample_generator.bit_generator.state
    model.save(tmp_path / "model", exclude=["subsample_generator"])
    loaded = cls.load(tmp_path / "model", env=model.env, device="cpu")
    assert loaded.subsample_generator.bit_generator.state == first
    collect(loaded)


@BOTH
def test_a_nan_in_one_entry_of_a_dict_is_named(cls):
    policy_kwargs = {"features_extractor_class": SmallCombined, "net_arch": [4]}
    model = small(cls, observation_space=DICT, policy="MultiInputPolicy", policy_kwargs=policy_kwargs)
    collect(model)
    model.rollout_buffer.observations["vector"][5, 0, 1] = np.nan
    with pytest.raises(FloatingPointError, match=r"observations\['vector'\].*nan at timestep 5 of environment 0"):
        model.train()


class ValueNamedExtractor(BaseFeaturesExtractor):
    """Parameters whose names say nothing about what depends on them."""

    def __init__(self, observation_space: spaces.Box):
        super().__init__(observation_space, features_dim=4)
        self.value_map = th.nn.Linear(3, 4)
        self.unused = th.nn.Linear(3, 4)

    def forward(self, observations):
        return self.value_map(observations).tanh()


@BOTH
def test_actor_parameters_are_found_from_the_graph(cls):
    kwargs = {"features_extractor_class": ValueNamedExtractor, "net_arch": [4]}
    model = small(cls, double=False, policy_kwargs=kwargs)
    model.policy.mlp_extractor.policy_net[0].bias.requires_grad_(False)
    collect(model)
    before = state_of(model)
    model.train()
    after = state_of(model)
    moved = {
        k.removeprefix("policy.") for k in before if k.startswith("policy.") and not np.array_equal(before[k], after[k])
    }
    actor = {k for k in moved if "value_net" not in k}
    assert "features_extractor.value_map.weight" in actor
    assert "mlp_extractor.policy_net.0.weight" in actor
    assert "mlp_extractor.policy_net.0.bias" not in actor
    assert not any("unused" in k for k in moved)


@BOTH
def test_an_actor_without_trainable_parameters_still_trains_its_critic(cls):
    model = small(cls, double=False)
    for name, param in model.policy.named_parameters():
        param.requires_grad_("value" in name)
    collect(model)
    before = state_of(model)
    with pytest.warns(UserWarning, match="no trainable parameters"):
        model.train()
    after = state_of(model)
    assert not np.array_equal(before["policy.value_net.weight"], after["policy.value_net.weight"])


LINEAR_ACTOR = {"policy_kwargs": {"net_arch": []}, "sub_sampling_factor": 1, "n_projections": 60}


def found_and_exact_direction(model, max_condition: float = 1e4) -> tuple[np.ndarray, np.ndarray]:
    """The direction that the first update finds, and M̂⁺ĝ with dense matrices."""
    collect(model)
    obs, actions, advantages = env_major(model)
    samples = gradient_samples(model.policy, obs, actions, advantages)
    n = n_trajectories(model.rollout_buffer.episode_starts)
    c = model.uncertainty_coef * radius_squared(samples.shape[1], n, model.confidence_alpha)
    rows = next_subsample(model)
    M = fisher_matrix(model.policy, obs[rows]) + c * covariance_matrix(samples[rows])

    found = []
    find = model._find_direction
    model._find_direction = lambda estimates: found.append(find(estimates)) or found[0]
    model.train()
    # nothing near a cut-off, so that the pseudo-inverse is a matter of mathematics
    assert np.linalg.cond(M) < max_condition
    return found[0].vector.numpy(), np.linalg.pinv(M) @ samples.mean(axis=0)


def test_projections_beyond_the_number_of_parameters_project_nothing():
    """Ω is the identity, so hundreds of projections cost and change nothing."""
    found = []
    for n_projections in (0, 1, 800):
        model = small(UATRPO, "discrete", shrinkage=0.5, n_projections=1)
        d = len(actor_vector(model))
        model.n_projections = d + n_projections
        collect(model)
        model.train()
        assert np.array_equal(model.sketch.omega.numpy(), np.eye(d))
        assert model.sketch.y_fisher.shape == (d, d)
        found.append(state_of(model))
    assert same(found[0], found[1])
    assert same(found[0], found[2])


@pytest.mark.parametrize("n_projections", [28, 200, 800, 2000])
def test_directions_of_little_curvature_are_kept(n_projections):
    """With Gaussian Ω, the cut on singular values grew with m, and 800 projections lost a direction."""
    limits = np.append(np.ones(11, np.float32), np.float32(0.008))
    options = {**LINEAR_ACTOR, "n_projections": n_projections, "observation_space": spaces.Box(-limits, limits)}
    model = small(UATRPO, **options)
    assert len(actor_vector(model)) == 28
    found, expected = found_and_exact_direction(model, max_condition=1e6)
    assert np.linalg.norm(found - expected) <= 1e-5 * np.linalg.norm(expected)


@pytest.mark.parametrize("solver", ["least_squares", "nystrom"])
@pytest.mark.parametrize("seed", [0, 1])
def test_more_projections_than_parameters_give_the_pseudo_inverse(solver, seed):
    """m ≥ d: the direction is M̂⁺ĝ itself, whatever Ω is."""
    model = small(UATRPO, projection_solver=solver, **LINEAR_ACTOR)
    model.sketch.generator.manual_seed(seed)
    assert len(actor_vector(model)) < 60
    found, expected = found_and_exact_direction(model)
    assert np.linalg.norm(found - expected) <= 1e-6 * np.linalg.norm(expected)


def test_without_uncertainty_it_is_the_natural_gradient():
    """c = 0 and m ≥ d: the direction of TRPO without damping, F̂⁺ĝ."""
    model = small(UATRPO, uncertainty_coef=0.0, **LINEAR_ACTOR)
    found, expected = found_and_exact_direction(model)
    assert np.linalg.norm(found - expected) <= 1e-6 * np.linalg.norm(expected)
    assert logged(model)["uncertainty_penalty"] == 0.0


@pytest.mark.parametrize("unit", ["trajectory", "step"])
def test_n_counts_episodes_that_start_or_steps(unit):
    model = small(UATRPO, n_envs=3, sample_unit=unit)
    collect(model)
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
    model = small(UATRPO, n_envs=len(starts_at), n_steps=12)
    collect(model)
    starts = np.zeros((12, len(starts_at)), dtype=np.float32)
    for env, steps in enumerate(starts_at):
        starts[steps, env] = 1.0
    model.rollout_buffer.episode_starts = starts
    if flattened:
        next(model.rollout_buffer.get(4))
    assert count_trajectories(model.rollout_buffer) == n_trajectories(starts) == expected


def test_the_sketch_is_lowered_to_its_memory_limit():
    d = len(actor_vector(small(UATRPO)))
    limit = 3 * d * 8 * 5 + 7  # room for five projections in float64
    with pytest.warns(UserWarning, match=rf"n_projections is lowered from 8 to 5: .*sketch_memory_limit={limit}"):
        model = small(UATRPO, sketch_memory_limit=limit)
    collect(model)
    model.train()
    assert model.sketch.shape == (d, 5)
    tensors = (model.sketch.omega, model.sketch.y_fisher, model.sketch.y_covariance)
    assert sum(t.untyped_storage().nbytes() for t in tensors) <= limit


def test_a_memory_limit_without_room_for_a_projection_is_refused():
    with pytest.raises(
        ValueError, match=r"sketch_memory_limit must have room for at least one projection, .* but it is 10$"
    ):
        small(UATRPO, sketch_memory_limit=10)


def test_without_averages_no_statistic_is_stored():
    model = small(UATRPO, ema_beta=0.0)
    collect(model)
    model.train()
    assert model.sketch.y_fisher.numel() == 0
    assert model.sketch.omega.numel() > 0


def direction_and_gradient(model) -> tuple[np.ndarray, np.ndarray]:
    """v and ĝ of the next update."""
    found = []
    find = model._find_direction

    def remember(estimates):
        direction = find(estimates)
        found.append((direction.vector.numpy(), estimates.gradient.numpy()))
        return direction

    model._find_direction = remember
    model.train()
    return found[0]


def cosine(a: np.ndarray, b: np.ndarray) -> float:
    return float(a @ b / np.linalg.norm(a) / np.linalg.norm(b))


def test_the_step_of_a_nature_cnn_uses_observed_curvature_with_shrinkage():
    """1.7 million parameters, where the paper's cut on σ leaves next to nothing."""
    env = NoiseEnv(ACTION_SPACES["discrete"], spaces.Box(0, 255, (84, 84, 1), np.uint8))
    options = {"n_projections": 12, "shrinkage": 0.75, "ema_beta": 0.0, "sub_sampling_factor": 3}
    model = UATRPO("CnnPolicy", env, n_steps=48, batch_size=16, seed=0, device="cpu", **options)
    collect(model)
    v, g = direction_and_gradient(model)
    assert len(g) > 1_600_000
    assert logged(model)["subspace_rank"] >= 2
    # neither the gradient's own direction nor unrelated to it
    assert 0.1 < cosine(v, g) < 0.9


@pytest.mark.parametrize("shrinkage", [0.0, 0.75])
def test_target_kl_is_the_estimated_kl_of_the_step(shrinkage):
    model = small(UATRPO, "box", target_kl=0.005, shrinkage=shrinkage)
    model.trust_region_delta = 123.0
    collect(model)
    model.train()
    log = logged(model)
    assert log["kl_estimated"] == pytest.approx(0.005)
    assert 0.0 < log["uncertainty_share"] < 1.0
    assert log["uncertainty_share"] == pytest.approx(
        log["uncertainty_penalty"] / (log["uncertainty_penalty"] + log["kl_estimated"])
    )


def test_the_trust_region_delta_does_not_matter_beside_target_kl():
    models = [small(UATRPO, target_kl=0.01)]
    with pytest.warns(UserWarning, match=r"trust_region_delta=3.0 has no effect, since target_kl=0.01"):
        models.append(small(UATRPO, target_kl=0.01, trust_region_delta=3.0))
    for model in models:
        model.set_random_seed(0)
        collect(model)
        model.train()
    assert same(*map(state_of, models))


@pytest.mark.parametrize("fisher", [0.0, np.nan, np.inf])
def test_a_direction_without_fisher_curvature_is_refused_beside_target_kl(fisher, monkeypatch):
    model = small(UATRPO, target_kl=0.01, shrinkage=0.5)
    collect(model)
    with monkeypatch.context() as patch:
        patch.setattr(SampleEstimates, "quadratic_forms", lambda *_: (fisher, 1.0))
        before = actor_vector(model)
        with pytest.warns(UserWarning, match="left the policy unchanged: the trust region does not bound"):
            model.train()
    assert np.array_equal(before, actor_vector(model))


def test_a_trust_region_without_curvature_is_refused_with_shrinkage(monkeypatch):
    """tr M̂ = 0: μ is zero, and nothing is divided by it."""
    model = small(UATRPO, shrinkage=0.5)
    collect(model)
    with monkeypatch.context() as patch:
        patch.setattr(SampleEstimates, "products", lambda self, X: (th.zeros_like(X), th.zeros_like(X)))
        before = actor_vector(model)
        with pytest.warns(UserWarning, match="left the policy unchanged: the update direction is not finite"):
            model.train()
    assert np.array_equal(before, actor_vector(model))


def test_policy_gradients_do_not_accumulate():
    """Estimates are made beside the parameters' own gradients."""
    model = small(UATRPO, n_critic_updates=0)
    collect(model)
    model.train()
    assert all(param.grad is None for param in model.policy.parameters())
    assert np.isfinite(flat(model.policy.parameters())).all()


class Masked(ActorCriticPolicy):
    """One choice is impossible."""

    value = -math.inf

    def _get_action_dist_from_latent(self, latent_pi):
        logits = self.action_net(latent_pi)
        hidden = th.zeros_like(logits, dtype=th.bool)
        hidden[:, 1] = True
        return self.action_dist.proba_distribution(logits.masked_fill(hidden, self.value))


class AlmostMasked(Masked):
    value = -1e6


@BOTH
def test_a_policy_with_impossible_choices_learns(cls):
    vectors = []
    for policy in (Masked, AlmostMasked):
        model = small(cls, "discrete", double=False, policy=policy)
        before = actor_vector(model)
        model.learn(3 * model.n_steps)
        assert logged(model)["step_fraction"] > 0.0
        assert not np.array_equal(actor_vector(model), before)
        vectors.append(actor_vector(model))
    np.testing.assert_allclose(*vectors, rtol=1e-3, atol=1e-4)


@BOTH
def test_a_kl_divergence_that_is_not_finite_is_said(cls, monkeypatch):
    model = small(cls)
    collect(model)
    before = actor_vector(model)
    monkeypatch.setattr(GaussianFamily, "kl", lambda self, old, new: th.full_like(old[:, 0], th.nan))
    with pytest.warns(UserWarning, match="left the policy unchanged: the KL divergence of the full step is not finite"):
        model.train()
    assert np.array_equal(actor_vector(model), before)
    assert logged(model)["step_fraction"] == 0.0
