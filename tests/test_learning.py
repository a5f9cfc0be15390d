"""Training that would fail if an update pointed the wrong way."""

import numpy as np
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.evaluation import evaluate_policy
from stable_baselines3.common.vec_env import VecNormalize

from tests.helpers import BOTH


@BOTH
def test_cartpole(cls):
    model = cls("MlpPolicy", "CartPole-v1", seed=0, device="cpu").learn(20_000)
    returns, _ = evaluate_policy(model, model.get_env(), n_eval_episodes=10, warn=False)
    assert returns > 400  # of 500; a random policy reaches about 20


@BOTH
def test_pendulum(cls):
    env = VecNormalize(make_vec_env("Pendulum-v1", 4, seed=0), norm_reward=False, gamma=0.95)
    model = cls("MlpPolicy", env, n_steps=250, gamma=0.95, n_critic_updates=10, seed=0, device="cpu").learn(50_000)
    env.training = False
    returns, _ = evaluate_policy(model, env, n_eval_episodes=20, warn=False)
    assert returns > -500  # a random policy reaches about -1200, and so does one that does not learn


@BOTH
def test_hopper_improves(cls):
    env = VecNormalize(make_vec_env("Hopper-v4", seed=0), norm_reward=False, gamma=0.995)
    model = cls("MlpPolicy", env, seed=0, device="cpu").learn(12_000)
    episodes = np.array([info["r"] for info in model.ep_info_buffer])
    assert episodes[-20:].mean() > 150  # untrained: about 20
