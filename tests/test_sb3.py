"""What a Stable-Baselines3 user knows, on UATRPO and MatchedTRPO."""

import copy
import io
import pickle
import re
import warnings
from contextlib import nullcontext

import gymnasium as gym
import numpy as np
import pytest
import torch as th
from gymnasium import spaces
from sb3_contrib import TRPO
from sb3_contrib.common.recurrent.policies import RecurrentActorCriticPolicy
from stable_baselines3 import PPO
from stable_baselines3.common import callbacks as cb
from stable_baselines3.common.buffers import RolloutBuffer
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.evaluation import evaluate_policy
from stable_baselines3.common.logger import configure
from stable_baselines3.common.policies import ActorCriticPolicy
from stable_baselines3.common.torch_layers import BaseFeaturesExtractor
from stable_baselines3.common.vec_env import DummyVecEnv, SubprocVecEnv, VecFrameStack, VecMonitor, VecNormalize

from sb3_uatrpo import UATRPO, CnnPolicy, MatchedTRPO, MlpPolicy, MultiInputPolicy
from sb3_uatrpo.critic import fit_values
from tests.forked import run_code
from tests.helpers import (
    ACTION_SPACES,
    DICT,
    IMAGE,
    NoiseEnv,
    SmallCNN,
    SmallCombined,
    actor_vector,
    collect,
    logged,
    spread_out,
)
from tests.reference import actor_parameters
from tests.test_trust_region_algorithm import same, state_of

BOTH = pytest.mark.parametrize("cls", [UATRPO, MatchedTRPO])
SMALL = {"n_steps": 32, "batch_size": 16, "seed": 0, "device": "cpu"}


def small(cls, policy, env, **kwargs):
    return cls(policy, env, **{**SMALL, **({"n_projections": 8} if cls is UATRPO else {}), **kwargs})


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
def test_policy_aliases(cls):
    assert cls.policy_aliases == {"MlpPolicy": MlpPolicy, "CnnPolicy": CnnPolicy, "MultiInputPolicy": MultiInputPolicy}


@BOTH
@pytest.mark.parametrize(
    "policy_kwargs",
    [
        {"net_arch": []},
        {"net_arch": [4, 4]},
        {"net_arch": {"pi": [4], "vf": [8, 8]}},
        {"net_arch": {"pi": [], "vf": [4]}},
        {"activation_fn": th.nn.ReLU, "ortho_init": False},
        {"log_std_init": -1.0},
        {"share_features_extractor": False},
        {"optimizer_class": th.optim.RMSprop},
        {"optimizer_class": th.optim.SGD, "optimizer_kwargs": {"momentum": 0.9}},
    ],
    ids=str,
)
def test_networks_and_optimizers(cls, policy_kwargs):
    learns_something(small(cls, "MlpPolicy", NoiseEnv(ACTION_SPACES["box"]), policy_kwargs=policy_kwargs))


class TwoHeaded(ActorCriticPolicy):
    """A custom policy that has its own way to the distribution, and a value net of an unusual name."""

    def _build(self, lr_schedule):
        super()._build(lr_schedule)
        self.extra = th.nn.Linear(self.mlp_extractor.latent_dim_pi, self.mlp_extractor.latent_dim_pi)
        self.optimizer = self.optimizer_class(self.parameters(), lr=lr_schedule(1), **self.optimizer_kwargs)

    def _get_action_dist_from_latent(self, latent_pi):
        return super()._get_action_dist_from_latent(self.extra(latent_pi).tanh())


@BOTH
def test_custom_policy_class(cls):
    model = small(cls, TwoHeaded, NoiseEnv(ACTION_SPACES["box"]))
    before = model.policy.extra.weight.clone()
    learns_something(model)
    assert not th.equal(before, model.policy.extra.weight)


class Attention(BaseFeaturesExtractor):
    def __init__(self, observation_space):
        super().__init__(observation_space, 8)
        self.embed = th.nn.Linear(1, 8)
        self.attention = th.nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, observations):
        tokens = self.embed(observations[..., None])
        return self.attention(tokens, tokens, tokens, need_weights=False)[0].mean(dim=1)


class Recurrent(BaseFeaturesExtractor):
    def __init__(self, observation_space):
        super().__init__(observation_space, 8)
        self.gru = th.nn.GRU(1, 8, batch_first=True)

    def forward(self, observations):
        return self.gru(observations[..., None])[0][:, -1]


class Normalised(BaseFeaturesExtractor):
    """Batch norm, layer norm and dropout."""

    def __init__(self, observation_space):
        super().__init__(observation_space, 8)
        self.net = th.nn.Sequential(
            th.nn.Linear(3, 8), th.nn.BatchNorm1d(8), th.nn.SiLU(), th.nn.LayerNorm(8), th.nn.Dropout(0.5)
        )

    def forward(self, observations):
        return self.net(observations)


@BOTH
@pytest.mark.parametrize("extractor", [Attention, Recurrent, Normalised])
@pytest.mark.parametrize("shared", [True, False])
def test_feature_extractors(cls, extractor, shared):
    policy_kwargs = {"features_extractor_class": extractor, "share_features_extractor": shared, "net_arch": [4]}
    learns_something(small(cls, "MlpPolicy", NoiseEnv(ACTION_SPACES["box"]), policy_kwargs=policy_kwargs))


@BOTH
def test_the_critic_does_not_move_a_shared_extractor(cls):
    """What actor and critic share stays where the trust region put it."""
    models = []
    for n_critic_updates in (0, 5):
        policy_kwargs = {"features_extractor_class": SmallCNN, "net_arch": [4]}
        env = NoiseEnv(ACTION_SPACES["box"], IMAGE)
        model = small(cls, "CnnPolicy", env, policy_kwargs=policy_kwargs, n_critic_updates=n_critic_updates)
        models.append(model.learn(32))
    actors = [actor_vector(model) for model in models]
    assert any("features_extractor" in name for name, _ in models[0].policy.named_parameters())
    assert np.array_equal(*actors)
    assert not any("critic_kl" in key for key in logged(models[1]))


@BOTH
def test_batch_norm_statistics_move_with_the_critic_only_and_are_reported(cls, monkeypatch):
    policy_kwargs = {"features_extractor_class": Normalised, "net_arch": [4]}
    env = NoiseEnv(ACTION_SPACES["discrete"])
    model = small(cls, "MlpPolicy", env, policy_kwargs=policy_kwargs, n_critic_updates=0)
    spread_out(model.policy)
    statistics = model.policy.features_extractor.net[1]
    collect(model)
    before = statistics.running_mean.clone()
    model.set_logger(configure(None, []))
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
    obs = th.as_tensor(model.rollout_buffer.observations.reshape(32, 3))
    for policy in (stepped[0], model.policy):
        policy.set_training_mode(False)
    with th.no_grad():
        old, new = (policy.get_distribution(obs).distribution for policy in (stepped[0], model.policy))
    kl, reverse = (th.distributions.kl_divergence(*pair).mean().item() for pair in ((old, new), (new, old)))
    assert logged(model)["critic_kl"] == pytest.approx(kl, rel=1e-4)
    assert reverse != pytest.approx(kl, rel=1e-3)


@BOTH
def test_frozen_parameters_stay(cls):
    model = small(cls, "MlpPolicy", NoiseEnv(ACTION_SPACES["box"]))
    frozen = [model.policy.mlp_extractor.policy_net[0].weight, model.policy.mlp_extractor.value_net[0].weight]
    for param in frozen:
        param.requires_grad_(False)
    before = [param.clone() for param in frozen]
    model.learn(64)
    assert all(map(th.equal, before, frozen))


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
        model = small(cls, "MlpPolicy", DummyVecEnv([lambda: NoiseEnv(action_space)] * n_envs))
    # without another warning
    before = model.policy.value_net.weight.detach().clone()
    model.learn(64)
    assert not th.equal(before, model.policy.value_net.weight)
    assert all(np.isfinite(value).all() for value in state_of(model).values())
    action, _ = model.predict(model.get_env().reset())
    assert action.shape == (n_envs, *action_space.shape)


@pytest.mark.filterwarnings("error")
@BOTH
def test_one_action_is_said_once(cls):
    with pytest.warns(UserWarning, match="one action"):
        model = small(cls, "MlpPolicy", NoiseEnv(spaces.Discrete(1)))
    model.learn(12 * model.n_steps)


@BOTH
@pytest.mark.parametrize(
    ("policy", "observation_space", "policy_kwargs"),
    [
        ("MlpPolicy", spaces.Box(-1.0, 1.0, (2, 3), np.float64), {}),
        ("MlpPolicy", spaces.Discrete(5), {}),
        ("MlpPolicy", spaces.MultiDiscrete([3, 2]), {}),
        ("MlpPolicy", spaces.MultiBinary(4), {}),
        ("MlpPolicy", IMAGE, {}),
        ("CnnPolicy", IMAGE, {"features_extractor_class": SmallCNN}),
        ("MultiInputPolicy", DICT, {"features_extractor_class": SmallCombined}),
        ("MultiInputPolicy", DICT, {"features_extractor_class": SmallCombined, "share_features_extractor": False}),
    ],
    ids=str,
)
@pytest.mark.parametrize("n_envs", [1, 2])
def test_observation_spaces(cls, policy, observation_space, policy_kwargs, n_envs):
    env = DummyVecEnv([lambda: NoiseEnv(ACTION_SPACES["multi_discrete"], observation_space)] * n_envs)
    learns_something(small(cls, policy, env, policy_kwargs=policy_kwargs), n_timesteps=64)


@BOTH
def test_what_sb3_refuses_is_refused_by_sb3(cls):
    with pytest.raises(ValueError, match="MultiInputPolicy"):
        small(cls, "MlpPolicy", NoiseEnv(ACTION_SPACES["box"], DICT))
    with pytest.raises(NotImplementedError, match="Nested observation spaces"):
        small(cls, "MultiInputPolicy", NoiseEnv(ACTION_SPACES["box"], spaces.Dict({"a": DICT})))
    with pytest.raises(AssertionError, match="Multi-dimensional MultiBinary"):
        small(cls, "MlpPolicy", NoiseEnv(spaces.MultiBinary([2, 2])))
    with pytest.raises(ValueError, match="gSDE"):
        small(cls, "MlpPolicy", "CartPole-v1", use_sde=True)
    with pytest.raises(AssertionError, match="finite"):
        small(cls, "MlpPolicy", NoiseEnv(spaces.Box(-np.inf, np.inf, (2,))))


class CauchyDistribution:
    pass


class CauchyPolicy(ActorCriticPolicy):
    def _build(self, lr_schedule):
        super()._build(lr_schedule)
        self.action_dist = CauchyDistribution()


@BOTH
def test_an_unknown_distribution_is_refused_at_construction(cls):
    with pytest.raises(ValueError, match="CauchyDistribution"):
        small(cls, CauchyPolicy, NoiseEnv(ACTION_SPACES["box"]))


@BOTH
@pytest.mark.parametrize("squash_output", [False, True])
@pytest.mark.parametrize("use_expln", [False, True])
@pytest.mark.parametrize("sde_sample_freq", [-1, 4])
def test_gsde(cls, squash_output, use_expln, sde_sample_freq):
    env = DummyVecEnv([lambda: NoiseEnv(ACTION_SPACES["box"])] * 2)
    policy_kwargs = {"squash_output": squash_output, "use_expln": use_expln, "net_arch": [4], "log_std_init": -1.0}
    model = small(cls, "MlpPolicy", env, use_sde=True, sde_sample_freq=sde_sample_freq, policy_kwargs=policy_kwargs)
    learns_something(model, 128)


# ------------------------------------------------------------------------------------------------------------ running


@BOTH
def test_subprocess_environments(cls):
    env = make_vec_env("CartPole-v1", 2, vec_env_cls=SubprocVecEnv)
    learns_something(small(cls, "MlpPolicy", env))
    env.close()


@BOTH
def test_wrappers(cls):
    env = VecMonitor(DummyVecEnv([lambda: gym.make("Pendulum-v1")] * 2))
    env = VecFrameStack(VecNormalize(env, gamma=0.995), 3)
    learns_something(small(cls, "MlpPolicy", env))


class Recorder(cb.BaseCallback):
    """What callbacks see at each step and at the ends of rollouts."""

    def __init__(self):
        super().__init__()
        self.seen = []
        self.rollouts = 0

    def _on_step(self):
        wanted = {"actions", "values", "log_probs", "rewards", "dones", "infos", "clipped_actions", "obs_tensor"}
        assert wanted <= set(self.locals)
        with th.no_grad():
            values, log_probs, _ = self.model.policy.evaluate_actions(
                self.locals["obs_tensor"], th.as_tensor(self.locals["actions"])
            )
        assert th.allclose(values, self.locals["values"], atol=1e-5)
        assert th.allclose(log_probs, self.locals["log_probs"], atol=1e-5)
        self.seen.append(self.num_timesteps)
        return True

    def _on_rollout_end(self):
        self.rollouts += 1
        assert self.model.rollout_buffer.full
        assert np.array_equal(self.locals["obs_tensor"], self.model.rollout_buffer.observations[-1])


@BOTH
def test_callbacks_see_what_sb3_shows_them(cls):
    recorder = Recorder()
    small(cls, "MlpPolicy", make_vec_env("Pendulum-v1", 2)).learn(128, callback=recorder)
    assert recorder.seen == list(range(2, 129, 2))
    assert recorder.rollouts == 2


@BOTH
def test_callbacks_of_sb3(cls, tmp_path):
    env, eval_env = make_vec_env("CartPole-v1", 2, seed=0), make_vec_env("CartPole-v1", 1, seed=1)
    stop = cb.StopTrainingOnNoModelImprovement(max_no_improvement_evals=100)
    best = cb.StopTrainingOnRewardThreshold(reward_threshold=1e9)
    counted = []
    model = small(cls, "MlpPolicy", env)
    model.learn(
        256,
        callback=[
            cb.CheckpointCallback(32, str(tmp_path / "checkpoints")),
            cb.EvalCallback(
                eval_env,
                callback_on_new_best=best,
                callback_after_eval=stop,
                eval_freq=32,
                n_eval_episodes=2,
                log_path=str(tmp_path),
                verbose=0,
            ),
            cb.EveryNTimesteps(64, cb.ConvertCallback(lambda *_: counted.append(1) or True)),
            cb.LogEveryNTimesteps(64),
            cb.StopTrainingOnMaxEpisodes(10_000),
        ],
        progress_bar=True,
    )
    assert len(counted) == 4
    assert (tmp_path / "evaluations.npz").exists()
    checkpoint = tmp_path / "checkpoints" / "rl_model_128_steps.zip"
    assert actor_vector(cls.load(checkpoint)).shape == actor_vector(model).shape


@BOTH
def test_a_callback_may_stop_training_within_a_rollout(cls):
    model = small(cls, "MlpPolicy", "CartPole-v1")
    before = actor_vector(model)
    model.learn(1000, callback=lambda *_: model.num_timesteps < 20)
    assert model.num_timesteps == 20
    assert np.array_equal(before, actor_vector(model))
    learns_something(model)


@BOTH
def test_learning_goes_on(cls):
    model = small(cls, "MlpPolicy", "CartPole-v1").learn(64)
    model.learn(64, reset_num_timesteps=False)
    assert model.num_timesteps == 128
    assert model._n_updates == 4
    model.learn(64)
    assert model.num_timesteps == 64


class OwnBuffer(RolloutBuffer):
    def __init__(self, *args, label="", **kwargs):
        super().__init__(*args, **kwargs)
        self.label = label


@BOTH
def test_rollout_buffer_class(cls):
    kwargs = {"rollout_buffer_class": OwnBuffer, "rollout_buffer_kwargs": {"label": "mine"}}
    model = small(cls, "MlpPolicy", "CartPole-v1", **kwargs)
    learns_something(model)
    assert model.rollout_buffer.label == "mine"


@BOTH
def test_learning_rate_schedule(cls):
    model = small(cls, "MlpPolicy", "CartPole-v1", learning_rate=lambda progress: 1e-2 * progress)
    model.learn(128)
    assert model.policy.optimizer.param_groups[0]["lr"] == pytest.approx(0.0, abs=1e-9)
    model = small(cls, "MlpPolicy", "CartPole-v1", learning_rate=lambda progress: 1e-2 * progress)
    model.learn(128, callback=lambda *_: model.num_timesteps < 65)
    assert model.policy.optimizer.param_groups[0]["lr"] == pytest.approx(5e-3)


@BOTH
def test_logs(cls, tmp_path):
    model = small(cls, "MlpPolicy", "CartPole-v1", tensorboard_log=str(tmp_path), stats_window_size=7)
    model.learn(96)
    assert model.ep_info_buffer.maxlen == 7
    assert list((tmp_path / f"{cls.__name__}_1").glob("events.out.tfevents.*"))
    model.set_logger(configure(str(tmp_path), ["csv", "json"]))
    model.learn(96)
    model.logger.close()
    header = (tmp_path / "progress.csv").read_text().splitlines()[0]
    assert "train/kl_ratio" in header
    assert "nan" not in (tmp_path / "progress.json").read_text().lower()


@BOTH
def test_predict_and_evaluate(cls):
    model = small(cls, "MlpPolicy", "CartPole-v1").learn(64)
    env = gym.make("CartPole-v1")
    observation, _ = env.reset(seed=0)
    first, _ = model.predict(observation, deterministic=True)
    assert all(model.predict(observation, deterministic=True)[0] == first for _ in range(5))
    assert np.isfinite(evaluate_policy(model, model.get_env(), 2, warn=False)[0])


# -------------------------------------------------------------------------------------------------------------- state


@BOTH
def test_deepcopy_and_pickle(cls):
    model = small(cls, "MlpPolicy", NoiseEnv(ACTION_SPACES["box"])).learn(64)
    collect(model)
    for copied in (copy.deepcopy(model.policy), pickle.loads(pickle.dumps(model.policy))):
        assert all(map(th.equal, model.policy.state_dict().values(), copied.state_dict().values()))
    whole = copy.deepcopy(model)
    assert same(state_of(model), state_of(whole))
    assert whole.policy is not model.policy
    if cls is UATRPO:
        assert whole.sketch is not model.sketch
        reread = pickle.loads(pickle.dumps(model.sketch))
        assert th.equal(reread.generator.get_state(), model.sketch.generator.get_state())
    for each in (model, whole):
        each.set_logger(configure(None, []))
        np.random.seed(0)
        each.train()
    assert same(state_of(model), state_of(whole))


def test_the_sketch_is_part_of_the_parameters(tmp_path):
    model, other = (small(UATRPO, "MlpPolicy", "CartPole-v1", seed=seed).learn(64) for seed in (0, 1))
    params = model.get_parameters()
    assert set(params) == {"policy", "policy.optimizer", "sketch"}
    other.set_parameters(params, exact_match=True)
    assert same(state_of(model), state_of(other), "sketch.")
    policy_alone = {k: v for k, v in params.items() if k != "sketch"}
    other.set_parameters(policy_alone, exact_match=False)
    assert same(state_of(model), state_of(other), "sketch.")
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


def test_a_model_is_saved_without_its_sketch(tmp_path):
    """In a small file, which acts as the model does and starts a new sketch; the model itself keeps its own."""
    model = UATRPO("MlpPolicy", "CartPole-v1", n_steps=100, seed=0, device="cpu").learn(100)
    before = state_of(model)
    model.save(tmp_path / "whole")
    model.save(tmp_path / "small", exclude=["sketch"])
    model.save(tmp_path / "included", exclude=["sketch"], include=["sketch"])
    assert same(before, state_of(model))
    whole, small_, included = ((tmp_path / f"{name}.zip").stat().st_size for name in ("whole", "small", "included"))
    assert small_ < 250_000
    assert included == whole > small_ + model.sketch.n_bytes

    env = make_vec_env("CartPole-v1")
    loaded = UATRPO.load(tmp_path / "small", env=env, device="cpu")
    assert all(map(th.equal, model.policy.state_dict().values(), loaded.policy.state_dict().values()))
    assert loaded.sketch.omega.numel() == 0
    loaded.learn(100)
    assert loaded.sketch.shape == model.sketch.shape
    assert loaded.sketch.ema_weight.item() == pytest.approx(1 - model.ema_beta)
    assert not th.equal(loaded.sketch.omega, model.sketch.omega)


@BOTH
def test_nothing_is_lost_if_a_model_cannot_be_saved(cls, tmp_path):
    model = small(cls, "MlpPolicy", "CartPole-v1").learn(64)
    before = state_of(model)
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match="file"):
        model.save(tmp_path / "file" / "model", exclude=["sketch"])
    assert same(before, state_of(model))


def test_loading_with_other_projections_restarts_the_sketch(tmp_path):
    small(UATRPO, "MlpPolicy", "CartPole-v1").learn(64).save(tmp_path / "model")
    model = UATRPO.load(tmp_path / "model", env=make_vec_env("CartPole-v1"), n_projections=5)
    with pytest.warns(UserWarning, match=r"starts afresh.* m=8 projections.* m=5"):
        learns_something(model)
    assert model.sketch.omega.shape[1] == 5


def test_another_network_restarts_the_sketch():
    model = small(UATRPO, "MlpPolicy", "CartPole-v1").learn(64)
    other = small(UATRPO, "MlpPolicy", "CartPole-v1", policy_kwargs={"net_arch": [8]})
    other.set_parameters({"sketch": model.get_parameters()["sketch"]}, exact_match=False)
    with pytest.warns(UserWarning, match="starts afresh"):
        learns_something(other)
    assert other.sketch.shape[0] == len(actor_vector(other))


def test_frozen_parameters_keep_their_sketch_through_a_checkpoint(tmp_path):
    def freeze(model):
        model.policy.log_std.requires_grad_(False)
        return model

    env = NoiseEnv(ACTION_SPACES["box"])
    model = freeze(small(UATRPO, "MlpPolicy", env)).learn(64)
    model.save(tmp_path / "model")
    loaded = freeze(UATRPO.load(tmp_path / "model", env=env))
    loaded.learn(32)
    assert loaded.sketch.ema_weight.item() == pytest.approx(1 - model.ema_beta**3)


def test_a_sketch_of_frozen_layers_survives_a_limit_that_binds_before_they_are_frozen(tmp_path):
    def freeze(model):
        model.policy.mlp_extractor.policy_net.requires_grad_(False)
        return model

    env = NoiseEnv(ACTION_SPACES["box"])
    kwargs = {"policy_kwargs": {"net_arch": [64]}}
    d = len(actor_vector(small(UATRPO, "MlpPolicy", env, **kwargs)))
    # room for three projections of all parameters, and for eight of those that stay trainable
    with pytest.warns(UserWarning, match="n_projections is lowered from 8 to 3"):
        model = freeze(small(UATRPO, "MlpPolicy", env, sketch_memory_limit=12 * d * 3, **kwargs))
    model.learn(64).save(tmp_path / "model")
    assert model.sketch.shape[1] == 8
    with pytest.warns(UserWarning, match="n_projections is lowered from 8 to 3"):
        loaded = freeze(UATRPO.load(tmp_path / "model", env=env))
    loaded.learn(32)
    assert loaded.sketch.ema_weight.item() == pytest.approx(1 - model.ema_beta**3)


def test_unfreezing_layers_lowers_the_projections_with_a_warning_or_is_refused():
    for room, outcome in ((2, pytest.warns(UserWarning, match="lowered from 8 to 2")), (0, None)):
        model = small(UATRPO, "MlpPolicy", NoiseEnv(ACTION_SPACES["box"]))
        model.policy.log_std.requires_grad_(False)
        model.learn(32)
        model.policy.log_std.requires_grad_(True)
        model.sketch_memory_limit = 12 * sum(p.numel() for p in actor_parameters(model.policy)) * room + 11
        if outcome is None:
            before = actor_vector(model)
            with pytest.raises(ValueError, match="sketch_memory_limit must have room for at least one projection"):
                model.learn(32)
            assert np.array_equal(actor_vector(model), before)
        else:
            with outcome, pytest.warns(UserWarning, match="starts afresh"):
                model.learn(32)
            assert model.sketch.shape[1] == 2


def test_other_parameters_of_equal_number_restart_the_sketch():
    model = small(UATRPO, "MlpPolicy", NoiseEnv(ACTION_SPACES["box"]), policy_kwargs={"net_arch": [4, 4, 4]})
    one, other = (model.policy.mlp_extractor.policy_net[i].weight for i in (2, 4))
    one.requires_grad_(False)
    model.learn(32)
    one.requires_grad_(True)
    other.requires_grad_(False)
    with pytest.warns(UserWarning, match="starts afresh"):
        model.learn(32)


def test_another_number_of_projections_restarts_the_sketch():
    model = small(UATRPO, "MlpPolicy", "CartPole-v1").learn(32)
    model.n_projections = 5
    with pytest.warns(UserWarning, match=r"m=8 .* m=5"):
        model.learn(32)
    assert model.sketch.omega.shape[1] == 5


@BOTH
def test_attributes_are_checked_when_learning_starts(cls):
    model = small(cls, "MlpPolicy", "CartPole-v1")
    model.line_search_shrinking_factor = 2.0
    with pytest.raises(ValueError, match="line_search_shrinking_factor must be"):
        model.learn(32)


class Experts(BaseFeaturesExtractor):
    """The last number of the observation chooses one of two networks, and a quarter of the steps choose the second."""

    def __init__(self, observation_space):
        super().__init__(observation_space, 4)
        self.experts = th.nn.ModuleList(th.nn.Linear(3, 4) for _ in range(2))

    def forward(self, observations):
        rare = observations[:, 2] > 0.5
        features = observations.new_zeros(len(observations), 4)
        for expert, chosen in zip(self.experts, (~rare, rare), strict=True):
            if chosen.any():
                features = features.index_put((chosen,), expert(observations[chosen]).tanh())
        return features


@BOTH
@pytest.mark.parametrize("sub_sampling_factor", [1, 16])
def test_parameters_that_few_steps_use_are_trained(cls, sub_sampling_factor):
    env = NoiseEnv(ACTION_SPACES["box"])
    policy_kwargs = {"features_extractor_class": Experts, "net_arch": [4]}
    model = small(
        cls, "MlpPolicy", env, policy_kwargs=policy_kwargs, n_steps=64, sub_sampling_factor=sub_sampling_factor
    )
    before = model.policy.features_extractor.experts[1].weight.clone()
    # ten updates, since in a third of them none of the four steps behind F̂ and Σ̂ uses these parameters
    learns_something(model, 640)
    assert not th.equal(before, model.policy.features_extractor.experts[1].weight)


def test_unfreezing_a_layer_restarts_the_sketch():
    model = small(UATRPO, "MlpPolicy", NoiseEnv(ACTION_SPACES["box"]))
    model.policy.log_std.requires_grad_(False)
    model.learn(32)
    assert model.sketch.shape[0] == len(actor_vector(model))
    model.policy.log_std.requires_grad_(True)
    with pytest.warns(UserWarning, match="starts afresh"):
        model.learn(32)
    assert model.sketch.shape[0] == sum(param.numel() for param in actor_parameters(model.policy))


@BOTH
def test_a_model_can_be_loaded_for_prediction_only(cls, tmp_path):
    model = small(cls, "MlpPolicy", "CartPole-v1").learn(64)
    model.save(tmp_path / "model")
    loaded = cls.load(tmp_path / "model")
    observation = np.zeros(4, dtype=np.float32)
    assert loaded.predict(observation, deterministic=True)[0] == model.predict(observation, deterministic=True)[0]


def test_the_size_of_a_checkpoint_is_said(tmp_path, capsys):
    model = UATRPO("MlpPolicy", "CartPole-v1", verbose=1, n_steps=100).learn(100)
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


class ScaledEnv(NoiseEnv):
    """Noise whose rewards and observations may be extreme."""

    def __init__(self, reward: float | None = None, reward_scale: float = 1.0, scale: float = 1.0):
        space = spaces.Box(-np.inf, np.inf, (3,), np.float32)
        super().__init__(ACTION_SPACES["box"], space, reward_scale)
        self.reward, self.scale = reward, scale

    def reset(self, **kwargs):
        observation, info = super().reset(**kwargs)
        return np.float32(self.scale * observation), info

    def step(self, action):
        observation, reward, *rest = super().step(action)
        return np.float32(self.scale * observation), reward if self.reward is None else self.reward, *rest


def check_fault(model, n_timesteps: int = 160) -> None:
    with warnings.catch_warnings():
        expected = "left the policy unchanged|critic skipped a minibatch|so small that rounding hides it"
        warnings.filterwarnings("ignore", message=f".*({expected})")
        model.learn(n_timesteps)
    assert model._n_updates > 0
    assert all(np.isfinite(value).all() for value in state_of(model).values())


@BOTH
@pytest.mark.parametrize("gsde", [False, True])
@pytest.mark.parametrize(
    "env",
    [
        {"reward": 0.0},
        {"reward": 1.0},
        {"reward_scale": 1e20},
        {"reward_scale": 1e37},
        {"reward_scale": 1e-30},
        {"scale": 1e6},
        {"scale": 1e30},
        {"scale": 0.0},
    ],
    ids=str,
)
def test_extreme_environments(cls, env, gsde):
    check_fault(small(cls, "MlpPolicy", ScaledEnv(**env), use_sde=gsde))


@BOTH
@pytest.mark.parametrize("n_steps", [2, 3])
def test_two_samples(cls, n_steps):
    check_fault(small(cls, "MlpPolicy", ScaledEnv(), n_steps=n_steps, batch_size=n_steps), n_timesteps=30)


@BOTH
def test_two_environments_of_one_step(cls):
    env = DummyVecEnv([ScaledEnv] * 2)
    check_fault(small(cls, "MlpPolicy", env, n_steps=1, batch_size=2), n_timesteps=20)


@BOTH
@pytest.mark.parametrize("dead", ["latent", "saturated"])
def test_a_policy_whose_gradient_vanishes(cls, dead):
    model = small(cls, "MlpPolicy", ScaledEnv(), policy_kwargs={"net_arch": [4], "activation_fn": th.nn.ReLU})
    with th.no_grad():
        if dead == "latent":
            model.policy.mlp_extractor.policy_net[0].bias.fill_(-100.0)
        else:
            model.policy.log_std.fill_(-40.0)
    check_fault(model)


@BOTH
@pytest.mark.parametrize("log_std", [-80.0, 80.0])
def test_a_policy_at_the_edge_of_floating_point(cls, log_std):
    model = small(cls, "MlpPolicy", ScaledEnv(), policy_kwargs={"net_arch": [4], "log_std_init": log_std})
    check_fault(model)


class BrokenEnv(NoiseEnv):
    def step(self, action):
        observation, reward, *rest = super().step(action)
        return observation, np.nan if self.steps == 7 else reward, *rest


@BOTH
def test_a_broken_reward_stops_training_with_the_last_good_policy(cls, tmp_path):
    model = small(cls, "MlpPolicy", BrokenEnv(ACTION_SPACES["box"]))
    before = state_of(model)
    with pytest.raises(FloatingPointError, match="rewards are not finite: nan at timestep"):
        model.learn(1000)
    assert same(before, state_of(model))
    model.save(tmp_path / "last_good")
    assert same(before, state_of(cls.load(tmp_path / "last_good")))


@pytest.mark.parametrize("cls", [UATRPO, MatchedTRPO])
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


@pytest.mark.parametrize("cls", [UATRPO, MatchedTRPO])
def test_settings_may_be_left_out_of_a_file(cls, tmp_path):
    """Those are the constructor's defaults after loading, as in Stable-Baselines3."""
    model = small(cls, "MlpPolicy", "CartPole-v1", line_search_kl_factor=3.0, normalize_advantage=False)
    model.save(tmp_path / "model", exclude=["line_search_kl_factor"])
    loaded = cls.load(tmp_path / "model", device="cpu")
    assert loaded.line_search_kl_factor == 1.5
    assert loaded.normalize_advantage is False


@pytest.mark.parametrize("cls", [UATRPO, MatchedTRPO])
@pytest.mark.parametrize("name", ["gamma", "n_steps", "batch_size", "target_kl"])
def test_a_subclass_may_make_a_setting_a_property(cls, name):
    seen = []

    def set_it(self, value):
        seen.append(value)
        vars(self)[f"_{name}"] = value

    computed = type(cls.__name__, (cls,), {name: property(lambda self: vars(self)[f"_{name}"], set_it)})
    plain = small(cls, "MlpPolicy", "CartPole-v1", target_kl=0.02)
    assert getattr(small(computed, "MlpPolicy", "CartPole-v1", target_kl=0.02), name) == getattr(plain, name)
    assert seen
    with pytest.raises(ValueError, match=f"^{name} must be"):
        small(computed, "MlpPolicy", "CartPole-v1", **{name: -1})


@pytest.mark.parametrize("cls", [UATRPO, MatchedTRPO])
def test_what_is_no_model_is_refused_as_sb3_does(cls, tmp_path):
    (tmp_path / "model.zip").write_text("nothing of the kind")
    with pytest.raises(ValueError, match="wasn't a zip-file"):
        cls.load(tmp_path / "model", device="cpu")
    with pytest.raises(FileNotFoundError):
        cls.load(tmp_path / "nowhere", device="cpu")


@pytest.mark.parametrize("cls", [UATRPO, MatchedTRPO])
def test_a_recurrent_policy_is_refused_at_construction(cls):
    with pytest.raises(ValueError, match=r"^policy: evaluate_actions must need .* needs obs, actions, lstm_st"):
        cls(RecurrentActorCriticPolicy, "CartPole-v1", n_steps=32, batch_size=16, device="cpu")
