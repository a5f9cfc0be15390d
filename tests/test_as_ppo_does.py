"""What PPO does in the hands of a user, and these classes must too."""

import copy
import pickle
from contextlib import nullcontext

import gymnasium as gym
import numpy as np
import pytest
import torch as th
from gymnasium import spaces
from stable_baselines3 import PPO
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.policies import ActorCriticPolicy
from stable_baselines3.common.vec_env import DummyVecEnv, VecNormalize
from torch import nn

from sb3_uatrpo import UATRPO, trust_region_algorithm
from tests.helpers import ACTION_SPACES, BOTH, At, NoiseEnv, model_on
from tests.test_user_additions import EXTRACTORS


class Deterministic(nn.Module):
    """As Stable-Baselines3's documentation exports policies."""

    def __init__(self, policy):
        super().__init__()
        self.policy = policy

    def forward(self, observations):
        return self.policy(observations, deterministic=True)


def traced(policy, observation):
    return th.jit.trace(policy, observation, check_trace=False)


def exported(policy, observation):
    """Replaces tensors by some without memory, which cannot be checked."""
    th.distributions.Distribution.set_default_validate_args(False)
    return th.export.export(Deterministic(policy), (observation,)).module()


@pytest.mark.usefixtures("unchecked_distributions")
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore:.*torch.jit.trace.*:DeprecationWarning")
@pytest.mark.parametrize("export", [traced, exported])
@BOTH
def test_a_policy_that_is_exported_within_a_rollout_is_the_policy(cls, export):
    found, expected = [], []

    def compare(model, _):
        observations = th.tensor([[0.0] * 4, [1.0] * 4, [-2.0] * 4])
        policy = export(model.policy, th.zeros(1, 4))
        found.extend(policy(row[None])[1].item() for row in observations)
        expected.extend(model.policy.predict_values(observations).flatten().tolist())

    model_on(cls, "CartPole-v1").learn(32, callback=At(compare, at=10))
    assert len(set(found)) == 3
    assert found == pytest.approx(expected, abs=1e-5)


@pytest.mark.usefixtures("unchecked_distributions")
def test_a_copy_of_a_compiled_policy_acts_with_its_own_parameters():
    policy = model_on(UATRPO, "CartPole-v1").policy
    policy.compile(backend="eager")
    copied = copy.deepcopy(policy)
    with th.no_grad():
        for param in copied.parameters():
            param.add_(1.0)
        assert th.equal(copied(th.ones(1, 4))[1], copied.forward(th.ones(1, 4))[1])
    pickle.loads(pickle.dumps(policy))


@pytest.mark.filterwarnings("ignore:The log-probabilities of the rollout differ", "ignore:.*left the policy unchanged")
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_large_means_are_no_replaced_method(seed):
    """The first number is a Unix timestamp, so that float32 rounds the means by large amounts."""
    space = spaces.Box(-np.inf, np.inf, (8,), np.float64)
    env = NoiseEnv(ACTION_SPACES["box"], space, observe=lambda x: np.append(1.7e9, x[1:]))
    model = model_on(UATRPO, env, n_steps=64, seed=seed, policy_kwargs={"activation_fn": nn.ReLU})
    assert model.learn(192)._n_updates == 3


@pytest.fixture
def two_threads():
    n_threads = th.get_num_threads()
    th.set_num_threads(2)
    yield
    th.set_num_threads(n_threads)


@pytest.mark.usefixtures("two_threads")
@BOTH
@pytest.mark.parametrize(("net_arch", "n_threads"), [([8], 1), ([512, 512], 2)])
@pytest.mark.parametrize("error", [None, RuntimeError, KeyboardInterrupt])
def test_small_networks_are_updated_by_one_thread(cls, net_arch, n_threads, error, monkeypatch):
    model = model_on(cls, "CartPole-v1", policy_kwargs={"net_arch": net_arch})
    fit_values, seen = trust_region_algorithm.fit_values, []

    def watched(*args):
        seen.append(th.get_num_threads())
        if error:
            raise error
        return fit_values(*args)

    monkeypatch.setattr(trust_region_algorithm, "fit_values", watched)
    with pytest.raises(error) if error else nullcontext():
        model.learn(32)
    assert seen == [n_threads]
    assert th.get_num_threads() == 2


class Looks(BaseCallback):
    """Whether action_dist is the distribution that acted, one row for each environment, wherever a callback looks."""

    def _on_training_start(self):
        self.looks = []

    def _look(self):
        log_probs = self.model.policy.action_dist.log_prob(self.acted)
        self.looks.append(log_probs.shape == self.taken.shape and th.allclose(log_probs, self.taken, atol=1e-4))

    def _on_step(self):
        self.acted, self.taken = th.as_tensor(self.locals["actions"]), self.locals["log_probs"]
        self._look()
        # an evaluation's; the next timestep's is shown again
        self.model.predict(self.model.observation_space.sample())
        if self.n_calls == 5:
            copy.deepcopy(self.model)
        return True

    def _on_rollout_end(self):
        # after the last predict, as with PPO
        self.ended = self.model.policy.action_dist.distribution is not None


@BOTH
@pytest.mark.parametrize("n_envs", [1, 3])
@pytest.mark.parametrize(
    ("env", "policy_kwargs"),
    [
        ("CartPole-v1", {}),
        ("Pendulum-v1", {}),
        ("Pendulum-v1", {"activation_fn": nn.ELU}),
        ("CartPole-v1", {"features_extractor_class": EXTRACTORS["transformer"]}),
    ],
)
def test_callbacks_see_the_distribution_that_acted(cls, env, policy_kwargs, n_envs):
    callback = Looks()
    model = model_on(cls, DummyVecEnv([lambda: gym.make(env)] * n_envs), policy_kwargs=policy_kwargs)
    model.learn(2 * 32 * n_envs, callback=callback)
    assert callback.looks == [True] * 64
    assert callback.ended


class OwnPolicy(ActorCriticPolicy):
    """Not the package's class."""


@BOTH
@pytest.mark.parametrize(("policy", "n_rows"), [("MlpPolicy", 64), (OwnPolicy, 32)])
def test_after_an_update_action_dist_is_the_new_policy(cls, policy, n_rows):
    model = model_on(cls, "Pendulum-v1", policy, n_steps=64, batch_size=32).learn(64)
    shown = model.policy.action_dist.distribution
    assert not shown.mean.requires_grad
    observations = th.as_tensor(model.rollout_buffer.observations).reshape(64, -1)[:n_rows]
    expected = model.policy.get_distribution(observations).distribution
    assert th.allclose(shown.mean, expected.mean, atol=1e-6)
    assert th.allclose(shown.stddev, expected.stddev)


def test_reading_the_distribution_changes_no_mode_and_no_number():
    policy_kwargs = {"features_extractor_class": EXTRACTORS["transformer"]}
    model = model_on(UATRPO, "CartPole-v1", policy_kwargs=policy_kwargs).learn(64)
    state, training = th.get_rng_state(), model.policy.training
    assert model.policy.action_dist.distribution is not None
    assert model.policy.training is training
    assert th.equal(th.get_rng_state(), state)


@BOTH
def test_a_model_of_normalized_observations_warns_without_them(cls, tmp_path):
    def plain():
        return DummyVecEnv([lambda: gym.make("CartPole-v1")])

    model = model_on(cls, VecNormalize(plain())).learn(64)
    model.save(tmp_path / "model")
    with pytest.warns(UserWarning, match="trained with VecNormalize") as caught:
        loaded = cls.load(tmp_path / "model", env=plain())
    assert len(caught) == 1
    with pytest.warns(UserWarning, match="trained with VecNormalize"):
        loaded.set_env(plain())
    # silent: warnings are errors
    loaded.set_env(VecNormalize(plain()))
    cls.load(tmp_path / "model")
    cls.load(tmp_path / "model", env=VecNormalize(plain()))
    untrained = model_on(cls, VecNormalize(plain()))
    untrained.set_env(plain())


@BOTH
def test_parameters_of_ppo_are_taken_and_given(cls, tmp_path):
    ppo, model = (model_on(kind, "CartPole-v1") for kind in (PPO, cls))
    ppo.save(tmp_path / "ppo")
    model.set_parameters(tmp_path / "ppo.zip")
    model.learn(32)
    if cls is UATRPO:
        model.save_sketch = False
    model.save(tmp_path / "model")
    ppo.set_parameters(tmp_path / "model.zip")
    observations = model.observation_space.sample()[None].repeat(3, axis=0)
    for loaded in (ppo, PPO.load(tmp_path / "model")):
        np.testing.assert_array_equal(
            loaded.predict(observations, deterministic=True)[0], model.predict(observations, deterministic=True)[0]
        )
