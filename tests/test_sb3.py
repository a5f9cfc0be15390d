"""What a Stable-Baselines3 user knows, on UATRPO and MatchedTRPO."""

import copy
import io
import re
import warnings
from contextlib import nullcontext
from functools import partial

import gymnasium as gym
import numpy as np
import pytest
import torch as th
from gymnasium import spaces
from sb3_contrib import TRPO
from stable_baselines3 import PPO
from stable_baselines3.common import callbacks as cb
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.logger import configure
from stable_baselines3.common.vec_env import DummyVecEnv, SubprocVecEnv, VecFrameStack, VecMonitor, VecNormalize

from sb3_uatrpo import UATRPO, MatchedTRPO, uatrpo
from sb3_uatrpo.critic import fit_values
from tests.forked import run_code
from tests.helpers import (
    ACTION_SPACES,
    BOTH,
    NoiseEnv,
    actor_vector,
    assert_same,
    collect,
    logged,
    model_on,
    small,
    state_of,
    unchanged,
    with_extractor,
)
from tests.test_user_additions import EXTRACTORS


def learns_something(model, n_timesteps: int = 64) -> None:
    """Both actor and critic change, and all numbers stay finite."""
    before = copy.deepcopy(model.policy.state_dict())
    model.learn(n_timesteps)
    after = model.policy.state_dict()
    changed = {key for key in after if not th.equal(before[key], after[key])}
    assert {key for key in changed if "value_net" in key}
    assert {key for key in changed if "action_net" in key}
    assert all(np.isfinite(value).all() for value in state_of(model).values())


# ---------------------------------------------------------------------------------------------------------- policies


@BOTH
def test_batch_norm_statistics_move_with_the_critic_only_and_are_reported(cls, monkeypatch):
    model = small(cls, "discrete", n_critic_updates=0, **with_extractor(EXTRACTORS["norms and dropout"]))
    statistics = model.policy.features_extractor.net[1]
    collect(model)
    before = statistics.running_mean.clone()
    model.train()
    assert th.equal(before, statistics.running_mean)
    assert logged(model)["critic_kl"] == pytest.approx(0.0, abs=1e-9)
    # the next minibatch replaces them, so that there is something to measure
    statistics.momentum = 1.0
    model.n_critic_updates = 1
    collect(model)
    stepped = []

    def fit(actor, *args):
        stepped.append(copy.deepcopy(actor.policy))
        return fit_values(actor, *args)

    monkeypatch.setattr("sb3_uatrpo.trust_region_algorithm.fit_values", fit)
    model.train()
    assert not th.equal(before, statistics.running_mean)
    obs = th.as_tensor(model.rollout_buffer.observations.reshape(48, 3))
    for policy in (stepped[0], model.policy):
        policy.set_training_mode(False)
    with th.no_grad():
        old, new = (policy.get_distribution(obs).distribution for policy in (stepped[0], model.policy))
    kl, reverse = (th.distributions.kl_divergence(*pair).mean().item() for pair in ((old, new), (new, old)))
    assert logged(model)["critic_kl"] == pytest.approx(kl, rel=1e-4)
    assert reverse != pytest.approx(kl, rel=1e-3)


# -------------------------------------------------------------------------------------------------------- the spaces


@BOTH
@pytest.mark.parametrize(
    "action_space",
    [
        *ACTION_SPACES.values(),
        spaces.Box(-1.0, 1.0, (2,), np.float64),
        spaces.Box(-1.0, 1.0, (1, 2, 2), np.float32),
        spaces.Discrete(4, start=-1),
        spaces.Discrete(1),
        spaces.MultiDiscrete([4]),
        spaces.MultiBinary(1),
    ],
    ids=str,
)
@pytest.mark.parametrize("n_envs", [1, 3])
def test_action_spaces(cls, action_space, n_envs):
    is_single = action_space == spaces.Discrete(1)
    with pytest.warns(UserWarning, match="one action") if is_single else nullcontext():
        model = model_on(cls, DummyVecEnv([lambda: NoiseEnv(action_space)] * n_envs))
    before = model.policy.value_net.weight.detach().clone()
    # without another warning, as of many updates that moved nothing
    model.learn(12 * 32 * n_envs if is_single else 64)
    assert not th.equal(before, model.policy.value_net.weight)
    assert all(np.isfinite(value).all() for value in state_of(model).values())
    action, _ = model.predict(model.get_env().reset())
    assert action.shape == (n_envs, *action_space.shape)


# ------------------------------------------------------------------------------------------------------------ running


def wrapped():
    env = VecMonitor(DummyVecEnv([lambda: gym.make("Pendulum-v1")] * 2))
    return VecFrameStack(VecNormalize(env, gamma=0.995), 3)


@BOTH
@pytest.mark.parametrize("make", [wrapped, partial(make_vec_env, "CartPole-v1", 2, vec_env_cls=SubprocVecEnv)])
def test_vectorised_environments(cls, make):
    env = make()
    learns_something(model_on(cls, env))
    env.close()


@BOTH
def test_callbacks_of_sb3(cls, tmp_path):
    env, eval_env = make_vec_env("CartPole-v1", 2, seed=0), make_vec_env("CartPole-v1", 1, seed=1)
    evaluation = cb.EvalCallback(
        eval_env,
        callback_on_new_best=cb.StopTrainingOnRewardThreshold(reward_threshold=1e9),
        callback_after_eval=cb.StopTrainingOnNoModelImprovement(max_no_improvement_evals=100),
        **{"eval_freq": 32, "n_eval_episodes": 2, "log_path": str(tmp_path), "verbose": 0},
    )
    counted = []
    others = [
        cb.CheckpointCallback(32, str(tmp_path / "checkpoints")),
        cb.EveryNTimesteps(64, cb.ConvertCallback(lambda *_: counted.append(1) or True)),
        cb.LogEveryNTimesteps(64),
        cb.StopTrainingOnMaxEpisodes(10_000),
    ]
    model = model_on(cls, env).learn(256, callback=[evaluation, *others], progress_bar=True)
    assert len(counted) == 4
    assert (tmp_path / "evaluations.npz").exists()
    checkpoint = tmp_path / "checkpoints" / "rl_model_128_steps.zip"
    assert actor_vector(cls.load(checkpoint)).shape == actor_vector(model).shape


@BOTH
def test_a_callback_may_stop_training_within_a_rollout(cls):
    model = model_on(cls, "CartPole-v1")
    with unchanged(model):
        model.learn(1000, callback=lambda *_: model.num_timesteps < 20)
    assert model.num_timesteps == 20
    learns_something(model)


@BOTH
def test_learning_goes_on(cls):
    model = model_on(cls, "CartPole-v1").learn(64)
    model.learn(64, reset_num_timesteps=False)
    assert model.num_timesteps == 128
    assert model._n_updates == 4
    model.learn(64)
    assert model.num_timesteps == 64


@BOTH
def test_logs(cls, tmp_path):
    model = model_on(cls, "CartPole-v1", tensorboard_log=str(tmp_path), stats_window_size=7)
    model.learn(96)
    assert model.ep_info_buffer.maxlen == 7
    assert list((tmp_path / f"{cls.__name__}_1").glob("events.out.tfevents.*"))
    model.set_logger(configure(str(tmp_path), ["csv", "json"]))
    model.learn(96)
    model.logger.close()
    header = (tmp_path / "progress.csv").read_text().splitlines()[0]
    assert "train/kl_ratio" in header
    assert "nan" not in (tmp_path / "progress.json").read_text().lower()


# -------------------------------------------------------------------------------------------------------------- state


def test_the_sketch_is_part_of_the_parameters(tmp_path):
    model, other = (model_on(UATRPO, "CartPole-v1", seed=seed).learn(64) for seed in (0, 1))
    params = model.get_parameters()
    assert set(params) == {"policy", "policy.optimizer", "sketch"}
    other.set_parameters(params, exact_match=True)
    assert_same(model, other, prefix="sketch.")
    policy_alone = {k: v for k, v in params.items() if k != "sketch"}
    other.set_parameters(policy_alone, exact_match=False)
    assert_same(model, other, prefix="sketch.")
    with pytest.raises(ValueError, match="sketch"):
        other.set_parameters(policy_alone, exact_match=True)
    # the file of another algorithm: averages of another policy do not apply
    PPO("MlpPolicy", "CartPole-v1").save(tmp_path / "ppo")
    other.set_parameters(tmp_path / "ppo.zip")
    assert other.sketch.omega.numel() == 0
    partial = {**params, "sketch": {k: v for k, v in params["sketch"].items() if k != "omega"}}
    with pytest.raises(RuntimeError, match="omega"):
        other.set_parameters(partial, exact_match=True)
    other.set_parameters(partial, exact_match=False)


@pytest.mark.parametrize("save_sketch", [True, False])
def test_a_file_without_its_sketch_is_small_and_training_starts_a_new_one(save_sketch, tmp_path):
    """The model itself keeps its own, whether the file leaves it out or all files do."""
    model = UATRPO("MlpPolicy", "CartPole-v1", n_steps=100, seed=0, device="cpu", save_sketch=save_sketch).learn(100)
    with unchanged(model):
        model.save(tmp_path / "whole")
        model.save(tmp_path / "small", exclude=["sketch"])
        model.save(tmp_path / "included", exclude=["sketch"], include=["sketch"])
    whole, small_, included = ((tmp_path / f"{name}.zip").stat().st_size for name in ("whole", "small", "included"))
    assert small_ < 250_000
    assert included == whole
    assert whole > small_ + model.sketch.n_bytes if save_sketch else whole < 250_000
    loaded = UATRPO.load(
        tmp_path / ("small" if save_sketch else "whole"), env=make_vec_env("CartPole-v1"), device="cpu"
    )
    assert loaded.save_sketch is save_sketch
    assert_same(model, loaded, prefix="policy.")
    assert loaded.sketch.omega.numel() == 0
    loaded.learn(100)
    assert loaded.sketch.shape == model.sketch.shape
    assert loaded.sketch.ema_weight.item() == pytest.approx(1 - model.ema_beta)
    assert not save_sketch or not th.equal(loaded.sketch.omega, model.sketch.omega)


def test_the_first_file_with_a_large_sketch_gives_a_warning(tmp_path, monkeypatch):
    models = [model_on(UATRPO, "CartPole-v1", n_projections=200, save_sketch=save).learn(32) for save in (True, False)]
    monkeypatch.setattr(uatrpo, "LARGE_SKETCH", 10**6)
    models[1].save(tmp_path / "silent")
    with pytest.warns(UserWarning, match=r"first holds a sketch of \d+ MB. save_sketch=False"):
        models[0].save(tmp_path / "first")
    models[0].save(tmp_path / "second")


@BOTH
def test_nothing_is_lost_if_a_model_cannot_be_saved(cls, tmp_path):
    model = model_on(cls, "CartPole-v1").learn(64)
    (tmp_path / "file").touch()
    with unchanged(model), pytest.raises(OSError, match="file"):
        model.save(tmp_path / "file" / "model", exclude=["sketch"])


ONE, OTHER = "mlp_extractor.policy_net.2.weight", "mlp_extractor.policy_net.4.weight"


def three_layers(frozen: str = ""):
    model = model_on(UATRPO, NoiseEnv(ACTION_SPACES["box"]), policy_kwargs={"net_arch": [4, 4, 4]})
    freeze(model, frozen)
    return model.learn(32)


def freeze(model, frozen: str) -> None:
    for name, param in model.policy.named_parameters():
        param.requires_grad_(name != frozen)


def fewer_projections(model, _):
    model.n_projections = 5


def fewer_projections_in_load(model, tmp_path):
    model.save(tmp_path / "model")
    return UATRPO.load(tmp_path / "model", env=model.env, n_projections=5)


def parameters_of_other_layers(model, _):
    model.set_parameters(three_layers(OTHER).get_parameters())


def sketch_of_another_network(model, _):
    other = model_on(UATRPO, "CartPole-v1").learn(32)
    model.set_parameters({"sketch": other.get_parameters()["sketch"]}, exact_match=False)


@pytest.mark.parametrize(
    ("frozen", "change", "message"),
    [
        ("", fewer_projections, r"starts afresh.* m=8 projections.* m=5"),
        ("", fewer_projections_in_load, r"starts afresh.* m=8 projections.* m=5"),
        ("", lambda model, _: freeze(model, ONE), "starts afresh"),
        (ONE, lambda model, _: freeze(model, ""), "starts afresh"),
        # of equal number
        (ONE, lambda model, _: freeze(model, OTHER), "starts afresh"),
        (ONE, parameters_of_other_layers, "starts afresh"),
        ("", sketch_of_another_network, "starts afresh"),
    ],
)
def test_what_makes_the_sketch_start_afresh(frozen, change, message, tmp_path):
    model = three_layers(frozen)
    assert model.sketch.ema_weight.item() == pytest.approx(0.1)
    assert model.sketch.shape == (len(actor_vector(model)), 8)
    model = change(model, tmp_path) or model
    with pytest.warns(UserWarning, match=message):
        learns_something(model, 32)
    assert model.sketch.ema_weight.item() == pytest.approx(0.1)
    assert model.sketch.shape == (len(actor_vector(model)), model.n_projections)


@pytest.mark.parametrize("room", [None, 3])
def test_frozen_layers_keep_their_sketch_through_a_checkpoint(room, tmp_path):
    """Even if a limit binds before they are frozen: room for three projections of all parameters, for eight of them."""

    def frozen(make, **kwargs):
        with pytest.warns(UserWarning, match="n_projections is lowered from 8 to 3") if room else nullcontext():
            model = make(env=NoiseEnv(ACTION_SPACES["box"]), **kwargs)
        model.policy.mlp_extractor.policy_net.requires_grad_(False)
        return model

    kwargs = {"policy_kwargs": {"net_arch": [64]}}
    if room:
        d = len(actor_vector(model_on(UATRPO, NoiseEnv(ACTION_SPACES["box"]), **kwargs)))
        kwargs["sketch_memory_limit"] = 12 * d * room
    model = frozen(partial(model_on, UATRPO), **kwargs)
    model.learn(64).save(tmp_path / "model")
    assert model.sketch.shape[1] == 8
    loaded = frozen(partial(UATRPO.load, tmp_path / "model"))
    loaded.learn(32)
    assert loaded.sketch.ema_weight.item() == pytest.approx(1 - model.ema_beta**3)


def test_unfreezing_layers_lowers_the_projections_with_a_warning_or_is_refused():
    for room, outcome in ((2, pytest.warns(UserWarning, match="lowered from 8 to 2")), (0, None)):
        model = model_on(UATRPO, NoiseEnv(ACTION_SPACES["box"]))
        freeze(model, "log_std")
        model.learn(32)
        freeze(model, "")
        model.sketch_memory_limit = 12 * len(actor_vector(model)) * room + 11
        if outcome is None:
            refused = pytest.raises(ValueError, match="sketch_memory_limit must have room for at least one projection")
            with unchanged(model), refused:
                model.learn(32)
        else:
            with outcome, pytest.warns(UserWarning, match="starts afresh"):
                model.learn(32)
            assert model.sketch.shape[1] == 2


def test_another_beta_takes_effect():
    model = model_on(UATRPO, NoiseEnv(ACTION_SPACES["box"])).learn(32)
    for beta, weight in ((0.5, 0.1 + 0.5 * 0.9), (0.0, 0.0), (0.9, 0.1)):
        model.ema_beta = beta
        model.learn(32)
        assert model.sketch.ema_weight.item() == pytest.approx(weight)
        assert (model.sketch.y_fisher.numel() > 0) == (beta > 0.0)


@pytest.mark.parametrize("damage", ["nan", "weight"])
def test_a_sketch_that_cannot_be_right_is_refused(damage):
    model = model_on(UATRPO, "CartPole-v1").learn(32)
    state = {name: value.clone() for name, value in model.sketch.state_dict().items()}
    if damage == "nan":
        state["y_fisher"][1, 2] = th.nan
    else:
        state["ema_weight"].zero_()
    with pytest.raises(ValueError, match="moving averages must be finite, and zero while their weight is zero"):
        model.set_parameters({"sketch": state}, exact_match=False)


def test_the_size_of_a_checkpoint_is_said(tmp_path, capsys):
    model = UATRPO("MlpPolicy", "CartPole-v1", verbose=True, n_steps=100).learn(100)
    said = re.search(r"sketch of (\d+) actor parameters and 200 projections takes ([\d.]+) MB", capsys.readouterr().out)
    assert said is not None
    d, megabytes = int(said[1]), float(said[2])
    assert megabytes * 1e6 == pytest.approx(12 * d * 200, rel=0.01)
    model.save(tmp_path / "model.zip")
    assert (tmp_path / "model.zip").stat().st_size == pytest.approx(megabytes * 1e6, rel=0.1)
    capsys.readouterr()
    UATRPO.load(tmp_path / "model.zip")
    assert capsys.readouterr().out == ""


# ------------------------------------------------------------------------------------------------------------- memory

LARGE_IMAGES = """
import resource
import warnings
import numpy as np
import gymnasium as gym
from stable_baselines3.common.envs import FakeImageEnv
from sb3_uatrpo import UATRPO

with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    env = FakeImageEnv(screen_height=84, screen_width=84, n_channels=4, discrete=True)
    model = UATRPO("CnnPolicy", env, n_steps=40, batch_size=20, n_critic_updates=1, seed=0, device="cpu")
assert any("n_projections is lowered from 200 to 5" in str(w.message) for w in caught), caught
model.learn(40)
assert model.sketch.n_bytes <= 2**30
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""


def test_atari_like_images_train_within_four_gigabytes(tmp_path):
    ended = run_code(LARGE_IMAGES, cwd=tmp_path)
    assert ended.code == 0, ended.stderr
    assert int(ended.stdout.split()[-1]) * 1024 < 4e9


# ------------------------------------------------------------------------------------------------------------- faults


UNBOUNDED = spaces.Box(-np.inf, np.inf, (3,), np.float32)


def check_fault(model, n_timesteps: int = 160) -> None:
    with warnings.catch_warnings():
        expected = "left the policy unchanged|critic skipped a minibatch|so small that rounding hides it"
        warnings.filterwarnings("ignore", message=f".*({expected})")
        model.learn(n_timesteps)
    assert model._n_updates > 0
    assert all(np.isfinite(value).all() for value in state_of(model).values())


EXTREMES = {
    **{f"rewards of {r}": {"reward": lambda _, r=r: r} for r in (0.0, 1.0)},
    **{f"rewards times {scale}": {"reward": lambda r, x=scale: x * r} for scale in (1e20, 1e37, 1e-30)},
    **{f"observations times {x}": {"observe": lambda o, x=x: np.float32(x * o)} for x in (1e6, 1e30, 0.0)},
}


@BOTH
@pytest.mark.parametrize("gsde", [False, True])
@pytest.mark.parametrize("name", EXTREMES)
def test_extreme_environments(cls, name, gsde):
    check_fault(model_on(cls, NoiseEnv(ACTION_SPACES["box"], UNBOUNDED, **EXTREMES[name]), use_sde=gsde))


@BOTH
@pytest.mark.parametrize(("n_steps", "n_envs"), [(2, 1), (3, 1), (1, 2)])
def test_few_samples(cls, n_steps, n_envs):
    env = DummyVecEnv([lambda: NoiseEnv(ACTION_SPACES["box"], UNBOUNDED)] * n_envs)
    check_fault(model_on(cls, env, n_steps=n_steps, batch_size=n_steps * n_envs), n_timesteps=30)


@BOTH
@pytest.mark.parametrize(("log_std", "bias"), [(0.0, -100.0), (-40.0, 0.0), (-80.0, 0.0), (80.0, 0.0)])
def test_a_policy_whose_gradient_vanishes_or_overflows(cls, log_std, bias):
    policy_kwargs = {"net_arch": [4], "activation_fn": th.nn.ReLU, "log_std_init": log_std}
    model = model_on(cls, NoiseEnv(ACTION_SPACES["box"], UNBOUNDED), policy_kwargs=policy_kwargs)
    with th.no_grad():
        model.policy.mlp_extractor.policy_net[0].bias.fill_(bias)
    check_fault(model)


@BOTH
def test_a_broken_reward_stops_training_with_the_last_good_policy(cls, tmp_path):
    rewards = iter([1.0] * 7 + [np.nan] * 1000)
    model = model_on(cls, NoiseEnv(ACTION_SPACES["box"], reward=lambda _: next(rewards)))
    with unchanged(model), pytest.raises(FloatingPointError, match="rewards are not finite: nan at timestep"):
        model.learn(1000)
    model.save(tmp_path / "last_good")
    # for acting alone, no environment is needed
    assert_same(model, cls.load(tmp_path / "last_good"))


@BOTH
@pytest.mark.parametrize("other", [UATRPO, MatchedTRPO, PPO, TRPO])
@pytest.mark.parametrize("in_memory", [True, False])
def test_a_file_of_another_algorithm_is_refused(cls, other, in_memory, tmp_path):
    """Parameters may fit, and settings of the same name have another scale."""
    file = io.BytesIO() if in_memory else tmp_path / "model"
    other("MlpPolicy", "CartPole-v1", n_steps=32, batch_size=16, device="cpu", target_kl=0.1).save(file)
    if in_memory:
        file.seek(0)
    if cls is other:
        assert cls.load(file, device="cpu").target_kl == 0.1
        return
    with pytest.raises(ValueError, match=f"^path must be a file that {cls.__name__} saved, but another algorithm "):
        cls.load(file, device="cpu")


@BOTH
def test_settings_may_be_left_out_of_a_file(cls, tmp_path):
    """Those are the constructor's defaults after loading, as in Stable-Baselines3."""
    model = model_on(cls, "CartPole-v1", line_search_kl_factor=3.0, normalize_advantage=False)
    model.save(tmp_path / "model", exclude=["line_search_kl_factor"])
    loaded = cls.load(tmp_path / "model", device="cpu")
    assert loaded.line_search_kl_factor == 1.5
    assert loaded.normalize_advantage is False


@BOTH
@pytest.mark.parametrize("name", ["gamma", "n_steps", "batch_size", "target_kl"])
def test_a_subclass_may_make_a_setting_a_property(cls, name):
    seen = []

    def set_it(self, value):
        seen.append(value)
        vars(self)[f"_{name}"] = value

    computed = type(cls.__name__, (cls,), {name: property(lambda self: vars(self)[f"_{name}"], set_it)})
    plain = model_on(cls, "CartPole-v1", target_kl=0.02)
    assert getattr(model_on(computed, "CartPole-v1", target_kl=0.02), name) == getattr(plain, name)
    assert seen
    with pytest.raises(ValueError, match=f"^{name} must be"):
        model_on(computed, "CartPole-v1", **{name: -1})


@BOTH
def test_what_is_no_model_is_refused_as_sb3_does(cls, tmp_path):
    (tmp_path / "model.zip").write_text("nothing of the kind")
    with pytest.raises(ValueError, match="wasn't a zip-file"):
        cls.load(tmp_path / "model", device="cpu")
    with pytest.raises(FileNotFoundError):
        cls.load(tmp_path / "nowhere", device="cpu")
