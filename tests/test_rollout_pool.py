"""Old rollouts in the update: every number against the float64 reference, whole updates, and what is kept and saved."""

import copy

import numpy as np
import pytest
import torch as th
from gymnasium.wrappers import TimeLimit
from stable_baselines3.common.buffers import RolloutBuffer
from stable_baselines3.common.env_util import make_vec_env

from sb3_uatrpo import UATRPO, MatchedTRPO
from sb3_uatrpo.observations import map_observations
from tests.helpers import (
    ACTION_SPACES,
    BOTH,
    DICT,
    LARGE_IMAGE,
    Endless,
    actor_vector,
    assert_same_update,
    collect,
    logged,
    make_model,
    model_on,
    small,
)
from tests.reference import actor_parameters, n_trajectories, truncated_advantages
from tests.test_update import check_update, reference_for


def rollout_of(model) -> dict:
    """A copy of what the model has just collected, before the update."""
    buffer = model.rollout_buffer
    names = ("actions", "rewards", "episode_starts", "log_probs", "advantages")
    return {
        **{name: getattr(buffer, name).copy() for name in names},
        "observations": map_observations(np.copy, buffer.observations),
        "last_observations": map_observations(np.copy, model._last_obs),
        "dones": model._last_episode_starts.copy(),
    }


def env_major(array):
    return np.concatenate([array[:, e] for e in range(array.shape[1])])


def expected_batch(model, policy, rollouts: list[dict]):
    """Observations, actions and standardised wA of the newest rollout, the last, and then of the others; and w."""
    newest, older = rollouts[-1], rollouts[:-1]
    advantages = [env_major(newest["advantages"]).astype(np.float64)]
    ratios = [np.ones(len(advantages[0]))]
    for rollout in older:
        A, w = truncated_advantages(policy, rollout, model.gamma, model.gae_lambda)
        advantages.append(env_major(A))
        ratios.append(env_major(w))
    A, w = np.concatenate(advantages), np.concatenate(ratios)
    if model.normalize_advantage:
        A = A - (w * A).sum() / w.sum()
        A = A / ((w * A).std(ddof=1) + 1e-8)
    ordered = [newest, *older]

    def joined(*parts):
        return th.as_tensor(np.concatenate([env_major(part) for part in parts]))

    obs = map_observations(joined, *(rollout["observations"] for rollout in ordered))
    actions = joined(*(rollout["actions"] for rollout in ordered)).float()
    return obs, actions, th.as_tensor(w * A), w


def check_updates(model, n_updates: int, policy=None, rollout_of=rollout_of) -> None:
    """Each update is the reference's on the pooled batch."""
    reference, policy = reference_for(model), policy or model.policy
    rollouts: list[dict] = []
    for _ in range(n_updates):
        collect(model)
        rollouts = [*rollouts, rollout_of(model)][-1 - model.n_reused_rollouts :]
        *data, w = expected_batch(model, policy, rollouts)
        n = sum(n_trajectories(rollout["episode_starts"]) for rollout in rollouts)
        log = check_update(model, reference, (policy, *data), n, rtol=1e-4)
        assert log["n_trajectories"] == n
        assert log["n_rollouts"] == len(rollouts)
        assert log["effective_sample_share"] == pytest.approx(w.sum() ** 2 / len(w) / (w**2).sum(), rel=1e-5)


@pytest.mark.parametrize("action_space", ACTION_SPACES)
@pytest.mark.parametrize("n_reused_rollouts", [1, 2])
def test_updates_equal_the_dense_reference(action_space, n_reused_rollouts):
    options = {"n_reused_rollouts": n_reused_rollouts, "n_envs": 2, "n_steps": 24, "target_kl": 0.01}
    check_updates(make_model(UATRPO, action_space, **options), 4)


@pytest.mark.parametrize(
    "options",
    [
        {"normalize_advantage": False},
        {"shrinkage": 0.75, "step_length_samples": "batch"},
        {"use_sde": True},
        {"sub_sampling_factor": 1, "n_envs": 1},
        {"gamma": 1.0, "gae_lambda": 1.0},
        {"observation_space": DICT, "n_envs": 1},
    ],
    ids=str,
)
def test_options_equal_the_dense_reference(options):
    kwargs = {"n_envs": 3, "n_steps": 24, "target_kl": 0.01, "n_reused_rollouts": 1, **options}
    check_updates(make_model(**kwargs), 3)


@pytest.mark.parametrize("action_space", ["box", "discrete"])
def test_matched_trpo_equals_the_dense_reference(action_space):
    options = {"n_envs": 2, "n_steps": 24, "cg_max_steps": 200, "n_reused_rollouts": 2}
    check_updates(make_model(MatchedTRPO, action_space, **options), 4)


@BOTH
def test_without_old_rollouts_nothing_changes(cls):
    """The first update with N > 0 is that with N = 0, up to rounding of the standardised advantages."""
    models = [make_model(cls, "box", n_envs=2, n_reused_rollouts=n).learn(96) for n in (0, 3)]
    assert np.allclose(*map(actor_vector, models), rtol=1e-6, atol=1e-9)
    assert "n_rollouts" not in logged(models[0])


def test_with_equal_policies_the_advantages_are_gae():
    model = collect(make_model(n_envs=2, n_reused_rollouts=1, n_critic_updates=0))
    rollout = rollout_of(model)
    start = actor_vector(model)
    model.train()
    # back to where it was
    params = actor_parameters(model.policy)
    with th.no_grad():
        for param, part in zip(params, th.as_tensor(start).split([p.numel() for p in params]), strict=True):
            param.copy_(part.view_as(param))
    model.policy.set_training_mode(False)
    steps, w = model.rollout_pool._rollouts[0].weighted(model.policy, model.gamma, model.gae_lambda)
    assert np.allclose(w, 1.0, atol=1e-5)
    assert np.allclose(steps.advantages, env_major(rollout["advantages"]), rtol=1e-4, atol=1e-4)


@BOTH
@pytest.mark.filterwarnings("ignore:.*holds a sketch of")
@pytest.mark.parametrize(
    "kwargs", [{}, {"policy": "CnnPolicy", "observation_space": LARGE_IMAGE}, {"observation_space": DICT}], ids=str
)
def test_a_resumed_run_goes_on_bit_for_bit(cls, kwargs, tmp_path):
    model = small(cls, spread=False, n_steps=16, n_envs=2, n_reused_rollouts=2, **kwargs)
    model.learn(4 * 32)
    model.save(tmp_path / "model")
    loaded = cls.load(tmp_path / "model", env=model.env, device="cpu")
    assert len(loaded.rollout_pool) == 2
    assert_same_update(model, loaded, copy.deepcopy(model))


@BOTH
def test_files_of_another_n_are_loaded(cls, tmp_path):
    model = small(cls, n_reused_rollouts=2).learn(3 * 48)
    model.save(tmp_path / "two")
    assert len(cls.load(tmp_path / "two", env=model.env, n_reused_rollouts=1).rollout_pool) == 1
    assert len(cls.load(tmp_path / "two", env=model.env, n_reused_rollouts=0).learn(48).rollout_pool) == 0
    small(cls).learn(48).save(tmp_path / "none")
    loaded = cls.load(tmp_path / "none", env=model.env, n_reused_rollouts=1).learn(2 * 48)
    assert len(loaded.rollout_pool) == 1
    loaded.set_parameters(str(tmp_path / "two"))
    assert len(loaded.rollout_pool) == 1


@BOTH
def test_another_environment_clears_the_pool(cls):
    model = model_on(cls, "Pendulum-v1", n_reused_rollouts=2).learn(96)
    assert len(model.rollout_pool) == 2
    model.set_env(make_vec_env("Pendulum-v1"))
    assert len(model.rollout_pool) == 0
    model.learn(32)


@BOTH
@pytest.mark.parametrize("value", [np.nan, -np.inf])
def test_a_rollout_whose_ratios_are_not_finite_is_dropped(cls, value):
    model = make_model(cls, "box", n_reused_rollouts=2).learn(3 * 48)
    model.rollout_pool._rollouts[0].log_probs[3] = value
    model.learn(48)
    assert model.logger.name_to_value["train/n_rollouts"] == 2
    # the newest took its place
    assert len(model.rollout_pool) == 2
    assert np.isfinite(actor_vector(model)).all()


class OwnBuffer(RolloutBuffer):
    """A user's."""


@BOTH
def test_a_buffer_of_the_users_own_is_refused(cls):
    with pytest.raises(ValueError, match=r"n_reused_rollouts must be 0.*OwnBuffer"):
        make_model(cls, "box", n_reused_rollouts=1, rollout_buffer_class=OwnBuffer)
    make_model(cls, "box", n_reused_rollouts=0, rollout_buffer_class=OwnBuffer).learn(48)


def test_images_are_kept_in_their_own_type():
    kwargs = {"policy": "CnnPolicy", "observation_space": LARGE_IMAGE, "spread": False}
    model = small(UATRPO, "discrete", n_reused_rollouts=1, **kwargs).learn(48)
    assert model.rollout_pool._rollouts[0].observations.dtype == np.uint8


def test_rewards_at_time_limits_stay_as_they_were_stored():
    """There, Stable-Baselines3 adds the value to the reward."""
    env = TimeLimit(Endless(ACTION_SPACES["box"], reward=lambda _: 1.0), 4)
    model = model_on(UATRPO, env, n_steps=16, n_reused_rollouts=1).learn(16)
    kept = model.rollout_pool._rollouts[0]
    assert (kept.rewards[3::4] != 1.0).all()
    assert (np.delete(kept.rewards, range(3, 16, 4)) == 1.0).all()
    assert kept.dones == [1.0]


def test_an_incomplete_state_is_refused_or_completed():
    model = make_model(n_reused_rollouts=1).learn(48)
    state = model.rollout_pool.state_dict()
    whole = copy.deepcopy(state)
    del state["0/rewards/"]
    with pytest.raises(RuntimeError, match="number 0 lacks rewards"):
        model.rollout_pool.load_state_dict(state)
    model.rollout_pool.load_state_dict(state, strict=False)
    assert all(th.equal(whole[name], tensor) for name, tensor in model.rollout_pool.state_dict().items())
