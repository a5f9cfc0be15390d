"""Every argument out of range, of the wrong type, NaN or infinite is refused at construction, by name and value."""

import inspect
import re
import warnings
from fractions import Fraction

import numpy as np
import pytest
from gymnasium import spaces
from sb3_contrib import TRPO
from stable_baselines3 import A2C, PPO
from stable_baselines3.common.base_class import BaseAlgorithm
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.on_policy_algorithm import OnPolicyAlgorithm
from stable_baselines3.dqn.policies import DQNPolicy

from sb3_uatrpo import RECOMMENDED, UATRPO, MatchedTRPO
from tests.helpers import BOTH, NoiseEnv

VAR_KEYWORD, VAR_POSITIONAL = inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL
NAN, INF = float("nan"), float("inf")
NOT_NUMBERS = ["0.1", None, True, [0.1], NAN, INF, -INF, 10**400]
NOT_INTEGERS = [*NOT_NUMBERS[:-1], 1.5, 2.0]

SHARED = {
    "learning_rate": [*NOT_NUMBERS, -1e-3],
    "n_steps": [*NOT_INTEGERS, 0, -1],
    "batch_size": [*NOT_INTEGERS, 0, -1],
    "gamma": [*NOT_NUMBERS, -0.1, 1.1],
    "gae_lambda": [*NOT_NUMBERS, -0.1, 1.1],
    "sub_sampling_factor": [*NOT_INTEGERS, 0, -1],
    "n_reused_rollouts": [*NOT_INTEGERS, -1],
    "normalize_advantage": [None, 1, "yes", NAN],
    "adversarial_noise": [*NOT_NUMBERS, -0.1],
    "line_search_shrinking_factor": [*NOT_NUMBERS, 0.0, 1.0, 1.5, -0.5],
    "line_search_max_iter": [*NOT_INTEGERS, 0, -1],
    "line_search_kl_factor": [*NOT_NUMBERS, 0.0, -1.0],
    "n_critic_updates": [*NOT_INTEGERS, -1],
    "use_sde": [None, 1, "yes"],
    "fast_rollouts": [None, 1, "yes"],
    "sde_sample_freq": [*NOT_INTEGERS, -2],
    "stats_window_size": [*NOT_INTEGERS, 0, 10**30],
    "rollout_buffer_class": ["RolloutBuffer", 1, int],
    "rollout_buffer_kwargs": ["x", 1, [1]],
    "tensorboard_log": [1, ["runs"]],
    "policy_kwargs": ["x", 1, [64, 64]],
    "seed": [*(value for value in NOT_INTEGERS if value is not None), -1, 2**32],
    # True and False are 1 and 0 here, as in Stable-Baselines3
    "verbose": [*(value for value in NOT_INTEGERS if value is not True), -1],
}
OWN = {
    UATRPO: {
        "trust_region_delta": [*NOT_NUMBERS, 0.0, -0.03],
        "uncertainty_coef": [*NOT_NUMBERS, -1e-4],
        "confidence_alpha": [*NOT_NUMBERS, 0.0, 1.0, -0.1, 1.1],
        "n_projections": [*NOT_INTEGERS, 0, -200],
        "ema_beta": [*NOT_NUMBERS, 1.0, -0.1, 1.1],
        "sample_unit": ["episode", None, 1, ["step"]],
        "step_length_samples": ["all", None, 1],
        "projection_solver": ["cholesky", None, 1],
        "shrinkage": [*NOT_NUMBERS, 1.0, 1, -0.1, 1.5],
        "target_kl": [*(value for value in NOT_NUMBERS if value is not None), 0.0, 0, -0.01],
        "sketch_memory_limit": [*NOT_INTEGERS, 0, -1],
        "save_sketch": [None, 1, "yes", NAN],
    },
    MatchedTRPO: {
        "target_kl": [*NOT_NUMBERS, 0.0, -0.01],
        "cg_max_steps": [*NOT_INTEGERS, 0],
        "cg_damping": [*NOT_NUMBERS, -0.1],
    },
}
CASES = [
    pytest.param(cls, name, value, id=f"{cls.__name__}-{name}-{value!r}")
    for cls in OWN
    for name, values in {**SHARED, **OWN[cls]}.items()
    for value in values
]


@pytest.mark.parametrize(("cls", "name", "value"), CASES)
def test_bad_argument(cls, name, value):
    with pytest.raises(ValueError, match=rf"^{name} must be .*, but it is {re.escape(repr(value))}$"):
        # continuous actions, or SB3 itself refuses use_sde
        cls("MlpPolicy", "Pendulum-v1", **{name: value})


@BOTH
def test_the_signature_shows_every_argument_and_each_of_our_own_has_a_bad_value_above(cls):
    parameters = inspect.signature(cls).parameters
    checked = {*SHARED, *OWN[cls]}
    assert {*checked, "policy", "env", "device"} <= parameters.keys()
    assert not {parameter.kind for parameter in parameters.values()} & {VAR_KEYWORD, VAR_POSITIONAL}
    theirs = (inspect.signature(kind.__init__).parameters for kind in (BaseAlgorithm, OnPolicyAlgorithm))
    assert parameters.keys() - set().union(*theirs) <= checked


@BOTH
def test_numpy_numbers_are_numbers(cls):
    """They become Python's own: NumPy's would overflow in sums, have fewer digits, or be refused by torch."""
    env = make_vec_env("CartPole-v1", 2)
    integers = {
        "n_steps": np.uint8(200),
        "batch_size": np.int8(50),
        "seed": np.int64(3),
        "line_search_max_iter": np.int8(10),
        "n_critic_updates": np.uint8(1),
        "sub_sampling_factor": np.int16(10),
        "stats_window_size": np.int64(10),
        "verbose": np.int64(0),
    }
    numbers = {"gamma": np.float16(0.9), "learning_rate": np.float32(0.5), "line_search_kl_factor": Fraction(3, 2)}
    flags = {name: np.bool_(True) for name in ("normalize_advantage", "fast_rollouts")}
    if cls is UATRPO:
        integers |= {"n_projections": np.uint8(20), "sketch_memory_limit": np.uint32(2**31)}
        numbers |= {"target_kl": np.float16(0.01), "shrinkage": np.float32(0.5)}
    model = cls("MlpPolicy", env, **integers, **numbers, **flags)
    assert model.normalize_advantage is model.fast_rollouts is True
    for name, value in {**integers, **numbers}.items():
        kept = getattr(model, "_stats_window_size" if name == "stats_window_size" else name)
        assert type(kept) is (int if name in integers else float), name
        assert kept == value, name
    model.learn(400)
    assert model.num_timesteps == 400


POLICIES = "a subclass of ActorCriticPolicy, 'MlpPolicy', 'CnnPolicy', 'MultiInputPolicy'"
MATRIX = spaces.MultiDiscrete([[3, 2], [2, 2]])


@BOTH
@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        *(
            ({"policy": policy}, rf"^policy must be {POLICIES}, but it is {re.escape(repr(policy))}$")
            for policy in (3, None, "Mlp", int, DQNPolicy)
        ),
        ({"env": None}, r"env must be an environment.*but it is None"),
        ({"env": NoiseEnv(MATRIX)}, r"^env: MultiDiscrete actions must have one dimension, but .*MultiDiscrete"),
        ({"n_steps": 1}, r"n_steps \* n_envs must be at least 2.*n_steps is 1 and n_envs is 1"),
        # a preset without asterisks
        ({"learning_rate": RECOMMENDED}, r"learning_rate must be a finite number of at least 0, but it is \{'n_steps'"),
    ],
)
def test_what_is_no_policy_environment_rollout_or_rate_is_refused(cls, kwargs, message):
    with pytest.raises(ValueError, match=message):
        cls(**{"policy": "MlpPolicy", "env": "CartPole-v1", **kwargs})


@BOTH
def test_an_unsupported_action_space_is_refused_as_sb3_does(cls):
    with pytest.raises(AssertionError, match="only supports"):
        cls("MlpPolicy", NoiseEnv(spaces.Tuple([spaces.Discrete(2), spaces.Discrete(2)])))


@BOTH
def test_a_batch_size_that_does_not_divide_the_rollout_warns(cls):
    with pytest.warns(UserWarning, match=r"batch_size=30 .*n_steps=100 and n_envs=1.*truncated to 10 steps"):
        cls("MlpPolicy", "CartPole-v1", n_steps=100, batch_size=30)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        cls("MlpPolicy", "CartPole-v1", n_steps=100, batch_size=25)


@BOTH
def test_the_number_of_steps_is_that_of_the_buffer(cls, tmp_path):
    model = cls("MlpPolicy", "CartPole-v1", n_steps=100, device="cpu")
    model.n_steps = 200
    with pytest.raises(ValueError, match=r"^n_steps must be 100, .*, but it is 200; load\(\) can change it$"):
        model.learn(200)
    model.save(tmp_path / "model")
    loaded = cls.load(tmp_path / "model", env=model.get_env(), n_steps=50)
    assert loaded.learn(100).num_timesteps == 100


@BOTH
def test_what_load_or_the_user_changes_is_checked_too(cls, tmp_path):
    model = cls("MlpPolicy", "CartPole-v1", n_steps=50)
    model.save(tmp_path / "model")
    for name, value in (("gamma", 2.0), ("verbose", "loud")):
        with pytest.raises(ValueError, match=f"{name} must be"):
            cls.load(tmp_path / "model", **{name: value})
    model.line_search_shrinking_factor = 2.0
    with pytest.raises(ValueError, match="line_search_shrinking_factor must be"):
        model.learn(50)


@pytest.mark.parametrize(
    ("cls", "name", "hint"),
    [
        *((cls, "quite_unknown", "") for cls in OWN),
        *((cls, "learning_rates", r"did you mean 'learning_rate'\?") for cls in OWN),
        *((cls, "uncertainty", r"did you mean 'uncertainty_coef'\?") for cls in [UATRPO]),
        *((cls, name, "it belongs in policy_kwargs") for cls in OWN for name in ("log_std_init", "net_arch")),
        *((cls, name, "the trust region bounds the step") for cls in OWN for name in ("clip_range", "max_grad_norm")),
        *((cls, name, "a loss of its own") for cls in OWN for name in ("clip_range_vf", "vf_coef")),
        *((cls, name, "optimizer_class") for cls in OWN for name in ("use_rms_prop", "rms_prop_eps")),
        *((cls, "ent_coef", "there is no entropy bonus") for cls in OWN),
        *((cls, "n_epochs", "n_critic_updates") for cls in OWN),
        *((UATRPO, name, "shrinkage") for name in ("cg_max_steps", "cg_damping")),
        *((MatchedTRPO, name, "only UATRPO has it") for name in ("shrinkage", "step_length_samples")),
    ],
)
def test_an_unknown_argument_is_refused_with_a_hint_if_there_is_one(cls, name, hint):
    rest = f".*{hint}" if hint else "$"
    said = rf"{cls.__name__}\.__init__\(\) got an unexpected keyword argument '{name}'{rest}"
    with pytest.raises(TypeError, match=said):
        cls("MlpPolicy", "CartPole-v1", **{name: 0.1})


def test_every_argument_of_ppo_and_a2c_is_taken_or_explained():
    for cls in OWN:
        ours = inspect.signature(cls).parameters
        for other in (PPO, A2C, TRPO):
            for name in inspect.signature(other).parameters.keys() - ours.keys():
                with pytest.raises(TypeError, match=f"'{name}': "):
                    cls("MlpPolicy", "CartPole-v1", **{name: None})


def test_a_subclass_may_have_arguments_of_other_algorithms():
    class WithEntropy(UATRPO):
        def __init__(self, *args, ent_coef=0.0, **kwargs):
            super().__init__(*args, **kwargs)

    assert WithEntropy("MlpPolicy", "CartPole-v1", ent_coef=0.1, n_steps=50).n_steps == 50
