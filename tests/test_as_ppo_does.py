"""What PPO does in the hands of a user, and these classes must too."""

import copy
import pickle
from contextlib import nullcontext

import gymnasium as gym
import numpy as np
import pytest
import torch as th
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.torch_layers import BaseFeaturesExtractor
from torch import nn

from sb3_uatrpo import UATRPO, MatchedTRPO, trust_region_algorithm

BOTH = pytest.mark.parametrize("cls", [UATRPO, MatchedTRPO])
SMALL = {"n_steps": 64, "batch_size": 32, "device": "cpu", "seed": 0}


class Exports(BaseCallback):
    def _on_step(self):
        if self.n_calls == 50:
            with th.no_grad():
                self.exported = th.jit.trace(self.model.policy, th.zeros(1, 4), check_trace=False)
                self.observations = th.tensor([[0.0] * 4, [1.0] * 4, [-2.0] * 4])
                self.values = [self.exported(row[None])[1].item() for row in self.observations]
                self.expected = self.model.policy.predict_values(self.observations).flatten().tolist()
        return True


@BOTH
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore:.*torch.jit.trace.*:DeprecationWarning")
def test_a_policy_that_is_traced_within_a_rollout_is_the_policy(cls):
    callback = Exports()
    cls("MlpPolicy", "CartPole-v1", **SMALL).learn(64, callback=callback)
    assert len(set(callback.values)) == 3
    assert callback.values == pytest.approx(callback.expected, abs=1e-5)


def test_a_copy_of_a_compiled_policy_acts_with_its_own_parameters():
    policy = UATRPO("MlpPolicy", "CartPole-v1", **SMALL).policy
    policy.compile(backend="eager")
    copied = copy.deepcopy(policy)
    with th.no_grad():
        for param in copied.parameters():
            param.add_(1.0)
        assert th.equal(copied(th.ones(1, 4))[1], copied.forward(th.ones(1, 4))[1])
    pickle.loads(pickle.dumps(policy))


@BOTH
@pytest.mark.parametrize(
    ("env", "kwargs"),
    [
        ("CartPole-v1", {}),
        ("CartPole-v1", {"policy_kwargs": {"optimizer_class": th.optim.SGD}}),
        ("CartPole-v1", {"policy_kwargs": {"activation_fn": nn.ELU}}),
        ("Pendulum-v1", {"use_sde": True}),
        ("Pendulum-v1", {"use_sde": True, "policy_kwargs": {"use_expln": True}}),
    ],
)
def test_a_model_can_be_copied_after_it_has_learned(cls, env, kwargs):
    model = cls("MlpPolicy", env, **SMALL, **kwargs).learn(64)
    copied = copy.deepcopy(model)
    observation = np.ones(model.observation_space.shape, np.float32)
    assert np.array_equal(
        copied.predict(observation, deterministic=True)[0], model.predict(observation, deterministic=True)[0]
    )


class Tokens(BaseFeaturesExtractor):
    """Each number of the observation is a token of an encoder with dropout."""

    def __init__(self, space):
        super().__init__(space, 8)
        self.embed = nn.Linear(1, 8)
        self.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 8, batch_first=True), 1)

    def forward(self, observations):
        return self.encoder(self.embed(observations.unsqueeze(-1))).mean(dim=1)


class Lazy(BaseFeaturesExtractor):
    def __init__(self, space):
        super().__init__(space, 8)
        self.net = nn.Sequential(nn.Linear(space.shape[0], 8), nn.LazyBatchNorm1d(), nn.ReLU())

    def forward(self, observations):
        return self.net(observations)


@BOTH
@pytest.mark.filterwarnings("ignore:Lazy modules are a new feature:UserWarning")
@pytest.mark.parametrize("extractor", [Tokens, Lazy])
def test_extractors_of_torch_parts_are_trained(cls, extractor):
    model = cls("MlpPolicy", "CartPole-v1", **SMALL, policy_kwargs={"features_extractor_class": extractor})
    model.learn(64)
    before = [param.clone() for param in model.policy.features_extractor.parameters()]
    model.learn(64)
    after = list(model.policy.features_extractor.parameters())
    assert any(not th.equal(old, new) for old, new in zip(before, after, strict=True))


class Clock(gym.Env):
    """The first number is a Unix timestamp, so that float32 rounds the means by large amounts."""

    observation_space = gym.spaces.Box(-np.inf, np.inf, (8,), np.float64)
    action_space = gym.spaces.Box(-1, 1, (2,), np.float32)

    def _observe(self):
        numbers = self.np_random.normal(size=8)
        numbers[0] = 1.7e9
        return numbers

    def reset(self, seed=None, options=None):
        super().reset(seed=seed)
        return self._observe(), {}

    def step(self, action):
        return self._observe(), float(self.np_random.normal()), bool(self.np_random.random() < 0.1), False, {}


@pytest.mark.filterwarnings("ignore:The log-probabilities of the rollout differ", "ignore:.*left the policy unchanged")
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_large_means_are_no_replaced_method(seed):
    kwargs = {**SMALL, "seed": seed, "policy_kwargs": {"activation_fn": nn.ReLU}}
    model = UATRPO("MlpPolicy", Clock(), **kwargs).learn(192)
    assert model._n_updates == 3


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
    model = cls("MlpPolicy", "CartPole-v1", **SMALL, policy_kwargs={"net_arch": net_arch})
    fit_values, seen = trust_region_algorithm.fit_values, []

    def watched(*args):
        seen.append(th.get_num_threads())
        if error:
            raise error
        return fit_values(*args)

    monkeypatch.setattr(trust_region_algorithm, "fit_values", watched)
    with pytest.raises(error) if error else nullcontext():
        model.learn(64)
    assert seen == [n_threads]
    assert th.get_num_threads() == 2
