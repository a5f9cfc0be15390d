"""Rollouts in which NumPy acts, beside Stable-Baselines3's own."""

import numpy as np
import pytest
import torch as th
from gymnasium import spaces
from stable_baselines3.common.buffers import RolloutBuffer
from stable_baselines3.common.callbacks import BaseCallback, CallbackList
from stable_baselines3.common.policies import ActorCriticPolicy, MultiInputActorCriticPolicy
from torch import nn

from sb3_uatrpo import UATRPO, MatchedTRPO, MlpPolicy
from sb3_uatrpo.buffers import LeanRolloutBuffer
from sb3_uatrpo.plain import as_plain_mlp
from tests.helpers import ACTION_SPACES, DICT, IMAGE, SmallCNN, SmallCombined, count_fast_steps, make_model

SQUASHED = {"net_arch": [4], "squash_output": True}
SEPARATE = {"net_arch": [], "features_extractor_class": SmallCNN, "share_features_extractor": False}
CASES = {
    **{name: {"action_space": name} for name in ACTION_SPACES},
    "relu": {"action_space": "box", "policy_kwargs": {"activation_fn": nn.ReLU, "net_arch": {"pi": [5, 4], "vf": [3]}}},
    "no_hidden_layer": {"action_space": "box", "policy_kwargs": {"net_arch": []}},
    "gsde": {"action_space": "box", "use_sde": True, "sde_sample_freq": 3},
    "gsde_squashed": {"action_space": "box", "use_sde": True, "policy_kwargs": SQUASHED},
    "discrete_observations": {"action_space": "box", "observation_space": spaces.Discrete(5)},
    "multi_discrete_observations": {"action_space": "box", "observation_space": spaces.MultiDiscrete([2, 3])},
    "float64_observations": {"action_space": "box", "observation_space": spaces.Box(-1.0, 1.0, (2, 3), np.float64)},
    "image": {"action_space": "discrete", "observation_space": IMAGE, "policy_kwargs": SEPARATE},
    "flattened_image": {"action_space": "box", "observation_space": IMAGE},
    "dict": {
        "action_space": "box",
        "observation_space": DICT,
        "policy": MultiInputActorCriticPolicy,
        "policy_kwargs": {"net_arch": [3], "features_extractor_class": SmallCombined},
    },
}
#: NumPy acts
FAST = ("box", "box_matrix", "discrete", "relu", "no_hidden_layer", "float64_observations")
ARRAYS = ("observations", "actions", "rewards", "episode_starts", "values", "log_probs", "advantages", "returns")


class Watch(BaseCallback):
    """Keeps what a callback can see, and may stop the rollout."""

    def __init__(self, stop_at: int | None = None):
        super().__init__()
        self.seen: list[dict] = []
        self.stop_at = stop_at

    def _on_step(self) -> bool:
        self.seen.append({key: self.locals[key] for key in ("values", "log_probs", "actions", "clipped_actions")})
        return len(self.seen) != self.stop_at


def rollout(fast: bool, n_envs: int = 3, stop_at: int | None = None, cls=UATRPO, watched: bool = True, **kwargs):
    """A model after one rollout, and what a callback saw of it."""
    kwargs = {"policy": "MlpPolicy", "fast_rollouts": fast, **kwargs}
    model = make_model(cls, n_envs=n_envs, double=False, n_projections=4, **kwargs)
    model._setup_learn(10**9)
    watch = Watch(stop_at)
    callback = model._init_callback([watch] if watched else [])
    callback.on_training_start({}, {})
    th.manual_seed(3)
    for env in model.env.envs:
        env.reset(seed=1)
    ended = model.collect_rollouts(model.env, callback, model.rollout_buffer, model.n_steps)
    assert ended == (stop_at is None)
    return model, watch.seen


def assert_same_buffers(mine: RolloutBuffer, theirs: RolloutBuffer) -> None:
    assert mine.pos == theirs.pos
    for name in ARRAYS:
        ours, others = getattr(mine, name), getattr(theirs, name)
        pairs = [(ours[key], others[key]) for key in others] if isinstance(others, dict) else [(ours, others)]
        # actions are sums in another order, or choices
        exact = name in ("observations", "episode_starts") or (name == "actions" and ours.dtype != np.float32)
        for one, other in pairs:
            assert one.dtype == other.dtype
            assert one.shape == other.shape
            np.testing.assert_allclose(one, other, rtol=0 if exact else 2e-5, atol=0 if exact else 2e-5, err_msg=name)


@pytest.mark.parametrize("n_envs", [1, 3])
@pytest.mark.parametrize("case", CASES)
def test_the_buffer_is_that_of_stable_baselines3(case, n_envs, monkeypatch):
    acted = count_fast_steps(monkeypatch)
    model, _ = rollout(True, n_envs, **CASES[case])
    assert len(acted) == (model.n_steps if case in FAST else 0)
    after_ours = th.get_rng_state()
    reference, _ = rollout(False, n_envs, **CASES[case])
    assert_same_buffers(model.rollout_buffer, reference.rollout_buffer)
    # the same draws in the same number, and the same episodes ended or cut off
    assert th.equal(after_ours, th.get_rng_state())
    assert model.num_timesteps == reference.num_timesteps
    assert [dict(info, t=0) for info in model.ep_info_buffer] == [dict(info, t=0) for info in reference.ep_info_buffer]
    assert reference.rollout_buffer.episode_starts.sum() > n_envs


@pytest.mark.parametrize("case", ["box", "discrete", "multi_binary", "discrete_observations", "gsde", "dict", "image"])
def test_callbacks_see_the_true_numbers(case):
    model, seen = rollout(True, **CASES[case])
    _, theirs = rollout(False, **CASES[case])
    values, log_probs = model.rollout_buffer.values.copy(), model.rollout_buffer.log_probs.copy()
    assert len(seen) == len(theirs) == model.n_steps
    model.train()
    for step, (ours, others) in enumerate(zip(seen, theirs, strict=True)):
        assert type(ours["values"]) is type(ours["log_probs"]) is th.Tensor
        assert ours["values"].shape == others["values"].shape
        assert ours["log_probs"].shape == others["log_probs"].shape
        np.testing.assert_array_equal(ours["values"].flatten().numpy(), values[step])
        np.testing.assert_array_equal(np.asarray(ours["log_probs"]), log_probs[step])
        np.testing.assert_allclose(ours["values"].numpy(), others["values"].numpy(), rtol=2e-5, atol=2e-5)
        for name in ("actions", "clipped_actions"):
            assert ours[name].dtype == others[name].dtype
            tolerance = 2e-5 if ours[name].dtype == np.float32 else 0.0
            np.testing.assert_allclose(ours[name], others[name].reshape(ours[name].shape), tolerance, tolerance)


class ReadAtOnce(BaseCallback):
    def __init__(self):
        super().__init__()
        self.values: list[np.ndarray] = []
        self.log_probs: list[np.ndarray] = []

    def _on_step(self) -> bool:
        self.values.append(self.locals["values"].clone().cpu().numpy())
        self.log_probs.append(self.locals["log_probs"].clone().cpu().numpy())
        return True


@pytest.mark.parametrize("case", ["box", "multi_discrete", "gsde_squashed"])
def test_a_callback_may_read_at_every_step(case):
    kept = []
    for fast in (True, False):
        model = make_model(UATRPO, n_envs=2, double=False, policy="MlpPolicy", fast_rollouts=fast, **CASES[case])
        reader = ReadAtOnce()
        th.manual_seed(0)
        model.learn(2 * model.n_steps, callback=reader)
        kept.append((np.array(reader.values), np.array(reader.log_probs), model.rollout_buffer.actions))
    for ours, others in zip(*kept, strict=True):
        np.testing.assert_allclose(ours, others, rtol=1e-4, atol=1e-4)


class Exports(BaseCallback):
    def _on_step(self) -> bool:
        deterministic = Deterministic(self.model.policy)
        exported = th.export.export(deterministic, (th.ones(1, 3),)).module()
        with th.no_grad():
            assert th.equal(exported(th.ones(1, 3))[0], deterministic(th.ones(1, 3))[0])
        return False


class Deterministic(nn.Module):
    """As Stable-Baselines3's documentation exports policies."""

    def __init__(self, policy):
        super().__init__()
        self.policy = policy

    def forward(self, observations):
        return self.policy(observations, deterministic=True)


def test_a_callback_may_export_the_policy(monkeypatch):
    """Exporting replaces tensors by some without memory."""
    monkeypatch.setattr(th.distributions.Distribution, "_validate_args", False)
    model = make_model(UATRPO, "box", double=False, n_projections=4, policy="MlpPolicy")
    model.learn(10, callback=Exports())
    assert model.num_timesteps == 1


@pytest.mark.parametrize("stop_at", [1, 7])
@pytest.mark.parametrize("case", ["box", "dict"])
def test_stopped_early(case, stop_at):
    model, seen = rollout(True, stop_at=stop_at, **CASES[case])
    reference, theirs = rollout(False, stop_at=stop_at, **CASES[case])
    assert model.rollout_buffer.pos == stop_at - 1
    assert_same_buffers(model.rollout_buffer, reference.rollout_buffer)
    # the step at which it stopped is in no buffer, yet it was seen
    np.testing.assert_allclose(seen[-1]["values"].numpy(), theirs[-1]["values"].numpy(), rtol=1e-5, atol=1e-5)


class OwnForward(MlpPolicy):
    calls = 0

    def forward(self, obs, deterministic=False):
        type(self).calls += 1
        return super().forward(obs, deterministic)


class OwnValues(MlpPolicy):
    def predict_values(self, obs):
        return super().predict_values(obs)


def test_what_is_not_plain_is_left_to_stable_baselines3(monkeypatch):
    acted = count_fast_steps(monkeypatch)
    model, _ = rollout(True, action_space="box", policy=OwnForward)
    assert OwnForward.calls == model.n_steps
    rollout(True, action_space="box", policy=OwnValues)
    rollout(False, action_space="box")
    assert not acted


class OwnAdd(RolloutBuffer):
    def add(self, *args):
        self.last = args
        super().add(*args)


def test_a_buffer_of_the_users_gets_the_numbers_of_numpy(monkeypatch):
    acted = count_fast_steps(monkeypatch)
    model, _ = rollout(True, action_space="box", rollout_buffer_class=OwnAdd)
    assert type(model.rollout_buffer) is OwnAdd
    assert len(acted) == model.n_steps
    np.testing.assert_array_equal(model.rollout_buffer.last[-1].numpy(), model.rollout_buffer.log_probs[-1])


@pytest.mark.parametrize(("policy", "kind"), [("MlpPolicy", MlpPolicy), (ActorCriticPolicy, ActorCriticPolicy)])
@pytest.mark.parametrize(("buffer", "buffer_kind"), [(None, LeanRolloutBuffer), (RolloutBuffer, RolloutBuffer)])
@pytest.mark.parametrize("cls", [UATRPO, MatchedTRPO])
def test_a_class_that_was_named_is_used(cls, policy, kind, buffer, buffer_kind, tmp_path):
    model = make_model(cls, "box", policy=policy, double=False, rollout_buffer_class=buffer)
    model.save(tmp_path / "model")
    for each in (model, cls.load(tmp_path / "model")):
        assert (type(each.policy), type(each.rollout_buffer)) == (kind, buffer_kind)


@pytest.mark.parametrize("cls", [UATRPO, MatchedTRPO])
def test_old_files_that_name_the_classes_of_stable_baselines3_get_ours(cls, tmp_path):
    model = make_model(cls, "box", policy=ActorCriticPolicy, double=False, rollout_buffer_class=RolloutBuffer)
    model.save(tmp_path / "old", exclude=["_file_format"])
    old = cls.load(tmp_path / "old")
    assert (type(old.policy), type(old.rollout_buffer)) == (MlpPolicy, LeanRolloutBuffer)
    # from then on, it is a file of today
    old.save(tmp_path / "new")
    assert type(cls.load(tmp_path / "new", rollout_buffer_class=RolloutBuffer).rollout_buffer) is RolloutBuffer


@pytest.mark.parametrize("cls", [UATRPO, MatchedTRPO])
def test_the_policy_of_stable_baselines3_is_updated_layer_by_layer(cls, monkeypatch):
    acted = count_fast_steps(monkeypatch)
    models = [
        make_model(cls, "box", policy=policy, double=False, policy_kwargs={"net_arch": [8]})
        for policy in (ActorCriticPolicy, "MlpPolicy")
    ]
    assert all(as_plain_mlp(model.policy) is not None for model in models)
    models[0].learn(models[0].n_steps)
    assert not acted


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
    for name in ARRAYS:
        ours, theirs = (getattr(buffer, name) for buffer in buffers)
        assert ours.dtype == theirs.dtype
        np.testing.assert_array_equal(ours, theirs, err_msg=name)


@pytest.mark.parametrize("fast", [True, False])
@pytest.mark.parametrize("case", ["box", "discrete", "gsde"])
def test_an_action_that_is_not_a_number_never_reaches_the_environment(case, fast):
    model, _ = rollout(fast, n_envs=1, **CASES[case])
    with th.no_grad():
        model.policy.action_net.bias.fill_(th.nan)
    before = model.num_timesteps
    callback = CallbackList([])
    callback.init_callback(model)
    with pytest.raises(ValueError, match="to satisfy the constraint"):
        model.collect_rollouts(model.env, callback, model.rollout_buffer, model.n_steps)
    assert model.num_timesteps == before


def test_one_more_after_load(tmp_path):
    """The switch is saved with the model."""
    model, _ = rollout(False, action_space="box")
    model.save(tmp_path / "model")
    assert UATRPO.load(tmp_path / "model").fast_rollouts is False
