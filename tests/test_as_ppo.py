"""Policies that PPO trains are trained here too, by the distribution that acts, or refused by name."""

import warnings

import gymnasium as gym
import numpy as np
import pytest
import torch as th
from gymnasium import spaces
from stable_baselines3.common.buffers import RolloutBuffer
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.distributions import DiagGaussianDistribution
from stable_baselines3.common.policies import ActorCriticPolicy, MultiInputActorCriticPolicy
from stable_baselines3.common.torch_layers import BaseFeaturesExtractor
from stable_baselines3.common.vec_env import DummyVecEnv
from torch import nn

from sb3_uatrpo import UATRPO, MatchedTRPO, MlpPolicy
from tests.helpers import NoiseEnv, actor_vector, collect, logged, make_model

BOTH = pytest.mark.parametrize("cls", [UATRPO, MatchedTRPO])


def small(cls, policy, **kwargs):
    kwargs |= {"n_projections": 8} if cls is UATRPO else {}
    return make_model(cls, kwargs.pop("action_space", "box"), policy=policy, double=False, **kwargs)


# ----------------------------------------------------------------------- policies that override what PPO asks for


class Cards(gym.Env):
    """Play the highest of six cards that is legal."""

    observation_space = spaces.Dict(x=spaces.Box(-1, 1, (2,), np.float32), mask=spaces.Box(0, 1, (6,), np.float32))
    action_space = spaces.Discrete(6)

    def deal(self):
        self.legal = self.np_random.random(6) < 0.4
        self.legal[self.np_random.integers(6)] = True
        return {"x": np.zeros(2, np.float32), "mask": self.legal.astype(np.float32)}

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.steps = 0
        return self.deal(), {}

    def step(self, action):
        assert self.legal[action]
        self.steps += 1
        return self.deal(), (action + 1) / 6, False, self.steps == 10, {}


class Masked(MultiInputActorCriticPolicy):
    """Its mask comes from the two methods that PPO calls."""

    def forward(self, obs, deterministic=False):
        self.mask = obs["mask"]
        return super().forward(obs, deterministic)

    def evaluate_actions(self, obs, actions):
        self.mask = obs["mask"]
        return super().evaluate_actions(obs, actions)

    def _get_action_dist_from_latent(self, latent):
        logits = self.action_net(latent).masked_fill(self.mask == 0.0, -th.inf)
        return self.action_dist.proba_distribution(logits)


@BOTH
def test_a_mask_of_minus_infinity(cls):
    kwargs = {"shrinkage": 0.75, "target_kl": 0.05} if cls is UATRPO else {"target_kl": 0.05}
    model = cls(Masked, Cards(), n_steps=500, batch_size=50, gamma=0.0, seed=0, device="cpu", **kwargs)
    before = actor_vector(model)
    returns = []
    for _ in range(6):
        model.learn(500, reset_num_timesteps=False)
        returns.append(np.mean([episode["r"] for episode in list(model.ep_info_buffer)[-50:]]))
        assert logged(model)["step_fraction"] > 0.0
    assert not np.array_equal(actor_vector(model), before)
    assert returns[-1] > returns[0] + 0.5


class MaskedByALargeNumber(Masked):
    """On the steps that construction makes up, its mask hides everything."""

    def _get_action_dist_from_latent(self, latent):
        logits = self.action_net(latent).masked_fill(self.mask < 0.5, -1e8)
        return self.action_dist.proba_distribution(logits)


@BOTH
def test_steps_that_are_made_up_may_be_impossible(cls):
    model = cls(MaskedByALargeNumber, Cards(), n_steps=100, batch_size=50, seed=0, device="cpu")
    before = actor_vector(model)
    model.learn(200)
    assert not np.array_equal(actor_vector(model), before)


class Scaled(ActorCriticPolicy):
    """SB3's own ``get_distribution`` and ``predict_values`` would not see this method."""

    def extract_features(self, obs, features_extractor=None):
        return super().extract_features(0.1 * obs, features_extractor)


class TwoExtractors(ActorCriticPolicy):
    """Separate extractors of its own for actor and critic."""

    def _build(self, lr_schedule):
        n = self.features_dim
        super()._build(lr_schedule)
        self.of_actor, self.of_critic = (nn.Sequential(nn.Linear(n, n), nn.Tanh()) for _ in range(2))
        self.optimizer = self.optimizer_class(self.parameters(), lr=lr_schedule(1), **self.optimizer_kwargs)

    def _both(self, obs):
        latent = self.mlp_extractor.forward_actor(self.of_actor(obs))
        value = self.value_net(self.mlp_extractor.forward_critic(self.of_critic(obs)))
        return self._get_action_dist_from_latent(latent), value

    def forward(self, obs, deterministic=False):
        distribution, values = self._both(obs)
        actions = distribution.get_actions(deterministic)
        return actions, values, distribution.log_prob(actions)

    def evaluate_actions(self, obs, actions):
        distribution, values = self._both(obs)
        return values, distribution.log_prob(actions), distribution.entropy()

    def predict_values(self, obs):
        return self._both(obs)[1]


@BOTH
@pytest.mark.parametrize("policy", [Scaled, TwoExtractors])
def test_what_forward_and_evaluate_actions_compute_is_updated(policy, cls):
    model = small(cls, policy)
    before = {name: param.detach().clone() for name, param in model.policy.named_parameters()}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model.learn(2 * model.n_steps)
    moved = {name for name, param in model.policy.named_parameters() if not th.equal(param, before[name])}
    assert moved == set(before)
    assert logged(model)["step_fraction"] > 0.0


# --------------------------------------------------------------------------- distributions that an update would miss


class OwnHead(ActorCriticPolicy):
    """``action_dist`` does not know its layers."""

    def _build(self, lr_schedule):
        super()._build(lr_schedule)
        self.head = nn.Linear(self.features_dim, self.action_space.shape[0])
        self.optimizer = self.optimizer_class(self.parameters(), lr=lr_schedule(1), **self.optimizer_kwargs)

    def _of(self, obs):
        own = DiagGaussianDistribution(self.action_space.shape[0])
        return own.proba_distribution(self.head(self.extract_features(obs)), self.log_std - 0.5)

    def forward(self, obs, deterministic=False):
        distribution = self._of(obs)
        actions = distribution.get_actions(deterministic)
        return actions, self.predict_values(obs), distribution.log_prob(actions)

    def evaluate_actions(self, obs, actions):
        distribution = self._of(obs)
        return self.predict_values(obs), distribution.log_prob(actions), distribution.entropy()


class BesideTheOldOne(OwnHead):
    def evaluate_actions(self, obs, actions):
        super().get_distribution(obs)
        return super().evaluate_actions(obs, actions)


@BOTH
@pytest.mark.parametrize("policy", [OwnHead, BesideTheOldOne])
def test_a_head_that_action_dist_does_not_know_is_refused(policy, cls):
    with pytest.raises(ValueError, match=r"(?=.*forward)(?=.*evaluate_actions)(?=.*action_dist)"):
        small(cls, policy).learn(48)


class ActsOtherwise(MlpPolicy):
    def forward(self, obs, deterministic=False):
        distribution = self.get_distribution(obs)
        distribution.distribution.loc.data += 1.0
        actions = distribution.get_actions(deterministic)
        return actions, self.predict_values(obs), distribution.log_prob(actions)


@BOTH
def test_a_policy_that_acts_by_another_distribution_is_refused_before_anything_changes(cls):
    model = small(cls, ActsOtherwise)
    collect(model)
    before = {name: value.clone() for name, value in model.policy.state_dict().items()}
    generators = th.get_rng_state(), np.random.get_state()[1].copy()
    with pytest.raises(ValueError, match=r"forward and evaluate_actions disagree.*action_dist"):
        model.train()
    assert all(map(th.equal, before.values(), model.policy.state_dict().values()))
    assert th.equal(generators[0], th.get_rng_state())
    assert np.array_equal(generators[1], np.random.get_state()[1])
    assert cls is MatchedTRPO or model.sketch.ema_weight.item() == 0.0


# ------------------------------------------------------------------------------------------------ one warning each


class Noisy(BaseFeaturesExtractor):
    """Augmentation that stays on in evaluation mode."""

    def __init__(self, observation_space, generator=None):
        super().__init__(observation_space, 3)
        self.generator = generator

    def forward(self, observations):
        return observations + 0.5 * th.randn(observations.shape, generator=self.generator, dtype=observations.dtype)


@pytest.mark.parametrize("own_generator", [False, True])
@BOTH
def test_noise_of_its_own_gives_one_warning_and_another_after_ten_updates_that_hardly_moved(cls, own_generator):
    policy_kwargs = {"net_arch": [4], "features_extractor_class": Noisy}
    if own_generator:
        policy_kwargs["features_extractor_kwargs"] = {"generator": th.Generator().manual_seed(0)}
    model = small(cls, "MlpPolicy", policy_kwargs=policy_kwargs)
    with th.no_grad():
        model.policy.log_std.fill_(-3.0)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model.learn(15 * model.n_steps)
    messages = [str(warning.message) for warning in caught]
    assert sum("log-probabilities of the rollout differ" in message for message in messages) == 1
    assert sum("10 updates in a row" in message for message in messages) == 1


class Rewrites(BaseCallback):
    def _on_step(self) -> bool:
        return True

    def _on_rollout_end(self) -> None:
        self.model.rollout_buffer.log_probs -= 1.0


@BOTH
def test_a_callback_may_rewrite_log_probabilities_with_one_warning(cls):
    model = small(cls, "MlpPolicy")
    with pytest.warns(UserWarning, match="log-probabilities of the rollout differ") as caught:
        model.learn(3 * model.n_steps, callback=Rewrites())
    assert len(caught) == 1
    assert model._n_updates == 3


# ------------------------------------------------------------------------------------------------------- errors


class RefusesWhatIsMadeUp(BaseFeaturesExtractor):
    def __init__(self, observation_space, works):
        super().__init__(observation_space, 3)
        self.works = works

    def forward(self, observations):
        # the first of those that are made up
        if observations[0, 0] == np.float32(0.45):
            raise KeyError("made up")
        return observations if self.works or len(observations) == 1 else observations[:, :2]


@BOTH
def test_an_error_at_construction_explains_one_in_the_first_update(cls):
    kwargs = {"features_extractor_class": RefusesWhatIsMadeUp, "net_arch": [4]}
    model = small(cls, "MlpPolicy", policy_kwargs=kwargs | {"features_extractor_kwargs": {"works": True}})
    model.learn(model.n_steps)
    model = small(cls, "MlpPolicy", policy_kwargs=kwargs | {"features_extractor_kwargs": {"works": False}})
    with pytest.raises(
        RuntimeError, match=r"evaluate_actions failed .*shape \(48, 3\) and actions of shape \(48, 2\)"
    ) as error:
        model.learn(model.n_steps)
    chain = []
    cause = error.value
    while cause is not None:
        chain.append(cause)
        cause = cause.__cause__
    assert isinstance(chain[-1], KeyError)


class NeedsAnInteger(RolloutBuffer):
    def get(self, batch_size):
        yield from super().get(int(batch_size))


@BOTH
def test_a_buffer_whose_get_needs_an_integer(cls):
    model = small(cls, "MlpPolicy", rollout_buffer_class=NeedsAnInteger)
    model.learn(model.n_steps)
    assert logged(model)["step_fraction"] > 0.0


# ------------------------------------------------------------------------------- parameters that some batches use


class Gated(BaseFeaturesExtractor):
    """The first number of an observation picks one of two experts; one is rare."""

    def __init__(self, observation_space):
        super().__init__(observation_space, 3)
        self.usual, self.rare = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, observations):
        is_rare = observations[:, 0] > 0.95
        features = th.empty_like(observations)
        features[~is_rare] = self.usual(observations[~is_rare])
        if is_rare.any():
            features[is_rare] = self.rare(observations[is_rare])
        return features.tanh()


@BOTH
def test_a_parameter_that_was_used_stays_among_those_of_the_actor(cls, tmp_path):
    model = small(cls, "MlpPolicy", policy_kwargs={"net_arch": [4], "features_extractor_class": Gated})
    sizes, uses = [], []
    for _ in range(12):
        collect(model)
        uses.append(bool((model.rollout_buffer.observations[..., 0] > 0.95).any()))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            model.train()
        restarts = sum("starts afresh" in str(warning.message) for warning in caught)
        # only the first use of the rare expert makes d grow
        assert restarts == (cls is UATRPO and uses[-1] and not any(uses[:-1]) and len(uses) > 1)
        sizes.append("features_extractor.rare.weight" in model._acting_params)
        assert logged(model)["step_fraction"] > 0.0
    assert sizes == [any(uses[: i + 1]) for i in range(12)]
    assert False in uses
    model.save(tmp_path / "model")
    loaded = cls.load(tmp_path / "model", env=DummyVecEnv([lambda: NoiseEnv(spaces.Box(-1.0, 1.0, (2,)))]))
    assert loaded._acting_params == model._acting_params


# ---------------------------------------------------------------------------------------------------- checkpoints


@pytest.mark.parametrize("damage", ["nan", "weight"])
def test_a_sketch_that_cannot_be_right_is_refused(damage):
    model = small(UATRPO, "MlpPolicy")
    model.learn(model.n_steps)
    state = {name: value.clone() for name, value in model.sketch.state_dict().items()}
    if damage == "nan":
        state["y_fisher"][1, 2] = th.nan
    else:
        state["ema_weight"].zero_()
    with pytest.raises(ValueError, match="moving averages must be finite, and zero while their weight is zero"):
        model.set_parameters({"sketch": state}, exact_match=False)
