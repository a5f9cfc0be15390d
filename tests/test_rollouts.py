"""Rollouts in which NumPy acts, beside Stable-Baselines3's own: all spaces, both buffers, both policies."""

import numpy as np
import pytest
import torch as th
from gymnasium import spaces
from stable_baselines3.common.buffers import RolloutBuffer
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.policies import ActorCriticPolicy

from sb3_uatrpo import MlpPolicy
from sb3_uatrpo.buffers import LeanRolloutBuffer
from tests.helpers import (
    ACTION_SPACES,
    BOTH,
    BUFFER_ARRAYS,
    PLAIN,
    POLICIES,
    At,
    as_sb3,
    assert_close,
    collect,
    count_fast_steps,
    filled,
    small,
)


class Watch(BaseCallback):
    """Keeps what a callback sees at each step."""

    def _on_training_start(self) -> None:
        self.seen: list[dict] = []

    def _on_step(self) -> bool:
        self.seen.append({key: self.locals[key] for key in ("values", "log_probs", "actions", "clipped_actions")})
        return True


@pytest.mark.parametrize("n_envs", [1, 3])
@pytest.mark.parametrize("case", POLICIES)
def test_buffer_and_callbacks_get_what_stable_baselines3_gives_them(case, n_envs, monkeypatch):
    acted, watches = count_fast_steps(monkeypatch), []
    model, reference = as_sb3(lambda: watches.append(Watch()) or watches[-1], n_envs=n_envs, **POLICIES[case])
    assert len(acted) == (model.n_steps if case in PLAIN else 0)
    assert reference.rollout_buffer.episode_starts.sum() > n_envs
    values, log_probs = model.rollout_buffer.values.copy(), model.rollout_buffer.log_probs.copy()
    # what a callback has kept stays as it was
    model.train()
    assert len(watches[0].seen) == model.n_steps
    for step, (ours, theirs) in enumerate(zip(*(watch.seen for watch in watches), strict=True)):
        for name in ("values", "log_probs"):
            assert type(ours[name]) is th.Tensor
            assert_close(ours[name].numpy(), theirs[name].numpy())
        np.testing.assert_array_equal(ours["values"].flatten(), values[step])
        np.testing.assert_array_equal(ours["log_probs"], log_probs[step])
        for name in ("actions", "clipped_actions"):
            assert_close(ours[name], theirs[name])


class OwnAdd(RolloutBuffer):
    def __init__(self, *args, label, **kwargs):
        super().__init__(*args, **kwargs)
        self.label = label

    def add(self, *args):
        self.last = args
        super().add(*args)


@BOTH
def test_a_buffer_of_the_users_gets_the_numbers_of_numpy(cls, monkeypatch):
    acted = count_fast_steps(monkeypatch)
    model, _ = as_sb3(cls=cls, rollout_buffer_class=OwnAdd, rollout_buffer_kwargs={"label": "mine"})
    assert type(model.rollout_buffer) is OwnAdd
    assert model.rollout_buffer.label == "mine"
    assert len(acted) == model.n_steps
    np.testing.assert_array_equal(model.rollout_buffer.last[-1].numpy(), model.rollout_buffer.log_probs[-1])


@pytest.mark.parametrize(("policy", "kind"), [("MlpPolicy", MlpPolicy), (ActorCriticPolicy, ActorCriticPolicy)])
@pytest.mark.parametrize(("buffer", "buffer_kind"), [(None, LeanRolloutBuffer), (RolloutBuffer, RolloutBuffer)])
@BOTH
def test_a_class_that_was_named_is_used_and_fast_rollouts_may_be_off(cls, policy, kind, buffer, buffer_kind, tmp_path):
    model = small(cls, policy=policy, rollout_buffer_class=buffer, fast_rollouts=False)
    model.save(tmp_path / "model")
    for each in (model, cls.load(tmp_path / "model")):
        assert (type(each.policy), type(each.rollout_buffer)) == (kind, buffer_kind)
        assert each.fast_rollouts is False


@BOTH
def test_old_files_that_name_the_classes_of_stable_baselines3_get_ours(cls, tmp_path):
    model = small(cls, policy=ActorCriticPolicy, rollout_buffer_class=RolloutBuffer)
    model.save(tmp_path / "old", exclude=["_file_format"])
    old = cls.load(tmp_path / "old")
    assert (type(old.policy), type(old.rollout_buffer)) == (MlpPolicy, LeanRolloutBuffer)
    # from then on, it is a file of today
    old.save(tmp_path / "new")
    assert type(cls.load(tmp_path / "new", rollout_buffer_class=RolloutBuffer).rollout_buffer) is RolloutBuffer


@pytest.mark.parametrize("n_envs", [1, 3])
@pytest.mark.parametrize("action_space", ["box", "box_matrix", "discrete", "multi_binary"])
def test_the_lean_buffer_has_the_numbers_of_stable_baselines3_bit_for_bit(action_space, n_envs):
    rng, space = np.random.default_rng(0), ACTION_SPACES[action_space]
    observations = spaces.Discrete(4) if action_space == "discrete" else spaces.Box(-1.0, 1.0, (2, 3), np.float64)
    buffers = [
        kind(37, observations, space, "cpu", gae_lambda=0.95, gamma=0.99, n_envs=n_envs)
        for kind in (LeanRolloutBuffer, RolloutBuffer)
    ]
    space.seed(0)
    observations.seed(0)
    for _ in range(37):
        step = (
            np.stack([observations.sample() for _ in range(n_envs)]),
            np.stack([space.sample() for _ in range(n_envs)]),
            rng.normal(size=n_envs).astype(np.float32),
            rng.random(n_envs) < 0.2,
            th.as_tensor(rng.normal(size=(n_envs, 1)), dtype=th.float32),
            th.as_tensor(rng.normal(size=n_envs), dtype=th.float32),
        )
        for buffer in buffers:
            buffer.add(*step)
    last, dones = th.as_tensor(rng.normal(size=(n_envs, 1)), dtype=th.float32), rng.random(n_envs) < 0.5
    for buffer in buffers:
        assert buffer.full
        buffer.compute_returns_and_advantage(last, dones)
    for name in BUFFER_ARRAYS:
        assert_close(*(getattr(buffer, name) for buffer in buffers), is_exact=True, what=name)


@pytest.mark.parametrize("fast", [True, False])
@pytest.mark.parametrize("case", ["box", "discrete", "gsde"])
def test_an_action_that_is_not_a_number_never_reaches_the_environment(case, fast):
    model = small(fast_rollouts=fast, **POLICIES[case])
    with th.no_grad():
        model.policy.action_net.bias.fill_(th.nan)
    with pytest.raises(ValueError, match="to satisfy the constraint"):
        collect(model)
    assert model.env.envs[0].unwrapped.steps == model.num_timesteps == 0


@pytest.mark.parametrize("action_space", ["box", "discrete"])
def test_settings_of_numpy_and_torch_change_nothing(action_space):
    def in_float64(*_):
        th.set_default_dtype(th.float64)

    expected = filled(True, action_space=action_space)
    try:
        with np.errstate(all="raise"):
            found = filled(True, At(in_float64, at=0), action_space=action_space)
    finally:
        th.set_default_dtype(th.float32)
    np.testing.assert_array_equal(found.rollout_buffer.actions, expected.rollout_buffer.actions)


@pytest.mark.parametrize("fast", [True, False])
def test_numbers_too_small_for_float32_raise_nothing(fast):
    tiny = np.array([1e-40, 1e-25, 1e-300])
    model = small(observation_space=spaces.Box(-tiny, tiny, dtype=np.float64), fast_rollouts=fast)
    with np.errstate(all="raise"):
        model.learn(2 * model.n_steps)
    assert model._n_updates == 2
