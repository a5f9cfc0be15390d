"""Which policies are taken apart into layers, and that what is taken apart is the policy."""

import math
from functools import partial

import numpy as np
import pytest
import torch as th
from gymnasium import spaces
from stable_baselines3.common.policies import ActorCriticPolicy
from torch import nn

from sb3_uatrpo import UATRPO, MatchedTRPO, acting
from sb3_uatrpo.acting import ActingMLP, Step
from sb3_uatrpo.guard import RunningCode
from sb3_uatrpo.plain_mlp import StandardMLP
from tests.helpers import DICT, IMAGE, NoiseEnv, SmallCNN, SmallCombined, logged, make_model, scale_latents


def policy_of(action_space="box", **kwargs) -> ActorCriticPolicy:
    policy = make_model(UATRPO, action_space, **{"double": False, "n_projections": 4, **kwargs}).policy
    policy.set_training_mode(False)
    return policy


class Subclass(ActorCriticPolicy):
    pass


def with_activation(activation_fn):
    return {"policy_kwargs": {"net_arch": [4], "activation_fn": activation_fn}}


ACCEPTED = {
    "box": {},
    "box_matrix": {"action_space": "box_matrix"},
    "discrete": {"action_space": "discrete"},
    "no_hidden_layer": {"policy_kwargs": {"net_arch": []}},
    "relu": with_activation(nn.ReLU),
    "in_place": with_activation(partial(nn.ReLU, inplace=True)),
    "two_extractors": {"policy_kwargs": {"net_arch": [4], "share_features_extractor": False}},
    "matrices": {"observation_space": spaces.Box(-1.0, 1.0, (2, 3), np.float64)},
}
REFUSED = {
    "subclass": {"policy": Subclass},
    "multi_discrete": {"action_space": "multi_discrete"},
    "multi_binary": {"action_space": "multi_binary"},
    "image_as_numbers": {"observation_space": IMAGE},
    "discrete_observations": {"observation_space": spaces.Discrete(3)},
    "gsde": {"use_sde": True},
    "gelu": with_activation(nn.GELU),
    "prelu": with_activation(nn.PReLU),
    "batch_norm": with_activation(partial(nn.BatchNorm1d, 4, affine=False)),
    "cnn": {"observation_space": IMAGE, "policy_kwargs": {"features_extractor_class": SmallCNN, "net_arch": []}},
    "dict": {
        "observation_space": DICT,
        "policy": "MultiInputPolicy",
        "policy_kwargs": {"features_extractor_class": SmallCombined, "net_arch": [3]},
    },
}


def in_place_of(policy: ActorCriticPolicy, observations: np.ndarray) -> tuple[ActingMLP | None, tuple]:
    """What acts in place of a policy that has just acted, and what the policy found."""
    code, stream = RunningCode(), th.Generator()
    stream.set_state(th.get_rng_state())
    with th.no_grad(), code.noted():
        found = policy(th.as_tensor(observations))
    return ActingMLP.of(policy, code, observations, stream, found), found


@pytest.mark.parametrize("n_envs", [1, 5, 16])
@pytest.mark.parametrize("name", ACCEPTED)
def test_standard_policies_are_recognised_and_are_what_they_are_taken_for(name, n_envs):
    policy = policy_of(**ACCEPTED[name])
    mlp = StandardMLP.recognise(policy)
    names = {id(param): name for name, param in policy.named_parameters()}
    assert {names[id(param)] for param in mlp.actor_params} == {n for n in names.values() if "value_net" not in n}
    assert {names[id(param)] for param in mlp.critic_params} == {n for n in names.values() if "value_net" in n}
    policy.observation_space.seed(0)
    observations = np.stack([policy.observation_space.sample() for _ in range(n_envs)])
    th.manual_seed(0)
    ours, (actions, values, log_probs) = in_place_of(policy, observations)
    after = th.get_rng_state()
    th.manual_seed(0)
    step = Step(ours, observations)
    assert th.equal(after, th.get_rng_state())
    np.testing.assert_allclose(step.actions.reshape(actions.shape), actions.numpy(), rtol=1e-5, atol=1e-5)
    th.testing.assert_close(step.values(), values)
    th.testing.assert_close(step.log_probs(), log_probs)


@pytest.mark.parametrize("name", REFUSED)
def test_others_are_not(name):
    assert StandardMLP.recognise(policy_of(**REFUSED[name])) is None


def shared_layer(policy):
    net = policy.mlp_extractor.policy_net
    net.append(net[0] if net[0].in_features == net[0].out_features else policy.action_net)


def compiled(policy):
    policy.mlp_extractor.policy_net.compile(backend="eager")


def weight_that_is_no_parameter(policy):
    weight = policy.action_net.weight.detach().clone()
    del policy.action_net.weight
    policy.action_net.weight = weight


@pytest.mark.parametrize(
    "change",
    [
        shared_layer,
        compiled,
        weight_that_is_no_parameter,
        lambda policy: policy.double(),
        # NumPy has no such type
        lambda policy: policy.bfloat16(),
        lambda policy: policy.to("meta"),
        lambda policy: policy.register_parameter("scale", nn.Parameter(th.ones(1, dtype=th.bfloat16))),
        lambda policy: policy.mlp_extractor.policy_net.insert(1, nn.Tanh()),
        lambda policy: setattr(policy.action_net, "bias", None),
        lambda policy: setattr(policy, "log_std", nn.Parameter(th.zeros(1))),
        lambda policy: setattr(policy.value_net, "forward", policy.value_net.forward),
        lambda policy: policy.features_extractor.register_forward_pre_hook(lambda *args: None),
    ],
)
def test_what_was_changed_is_not(change, monkeypatch):
    # torch.compile switches the validation of distributions off, for all that follow
    distribution = th.distributions.Distribution
    monkeypatch.setattr(distribution, "_validate_args", distribution._validate_args)
    policy = policy_of()
    assert StandardMLP.recognise(policy) is not None
    change(policy)
    assert StandardMLP.recognise(policy) is None


def test_what_acted_is_evaluated_with_its_own_numbers():
    policy = policy_of()
    observations = np.random.default_rng(0).normal(size=(5, 3)).astype(np.float32)
    acting, _ = in_place_of(policy, observations)
    step = Step(acting, observations)
    with th.no_grad():
        values, log_probs, _ = policy.evaluate_actions(th.as_tensor(observations), th.as_tensor(step.actions))
        for param in policy.parameters():
            param.mul_(3.0)
    observations[:], step.actions.flags.writeable = 0.0, False
    th.testing.assert_close(step.values(), values)
    th.testing.assert_close(step.log_probs(), log_probs)


def near_zero(scale: float = 1.0) -> tuple[ActorCriticPolicy, np.ndarray]:
    """One environment where mean and value are sums of terms that cancel; the mean's log-probability is zero."""
    policy = policy_of(spaces.Box(-1.0, 1.0, (1,)), policy_kwargs={"net_arch": [64, 64]})
    observation = np.array([[0.3, -0.7, 0.5]], np.float32)
    latents = policy.mlp_extractor(th.as_tensor(observation))
    with th.no_grad():
        for head, latent in zip((policy.action_net, policy.value_net), latents, strict=True):
            head.weight.mul_(scale)
            head.bias.copy_(-(head.weight @ latent[0]))
        policy.log_std.fill_(-0.5 * math.log(2.0 * math.pi))
    return policy, observation


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("scale", [1.0, 50.0])
@pytest.mark.parametrize("log_std", [None, -14.0])
def test_rounding_of_an_output_near_zero_is_no_difference(scale, log_std):
    policy, observation = near_zero(scale)
    with th.no_grad():
        assert policy.predict_values(th.as_tensor(observation)).abs().max() < 1e-4 * scale
        if log_std is not None:
            policy.log_std.fill_(log_std)
    assert in_place_of(policy, observation)[0] is not None


def test_a_difference_of_an_output_near_zero_is_one(monkeypatch):
    policy, observation = near_zero()
    scale_latents(monkeypatch, "forward_actor")
    scale_latents(monkeypatch, "forward_critic")
    with pytest.warns(UserWarning, match="do not reproduce the actions and the values"):
        assert in_place_of(policy, observation)[0] is None


def test_a_large_policy_acts_itself(monkeypatch):
    """Comparing all of its parameters at each step would take longer than is saved."""
    observations, policy = np.zeros((1, 3), np.float32), policy_of()
    n_bytes = sum(param.nbytes for param in policy.parameters())
    monkeypatch.setattr(acting, "MAX_PARAMETER_BYTES", n_bytes)
    assert in_place_of(policy, observations)[0] is not None
    monkeypatch.setattr(acting, "MAX_PARAMETER_BYTES", n_bytes - 1)
    assert in_place_of(policy, observations)[0] is None


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("action_space", ["box", "discrete"])
def test_numbers_out_of_range_draw_nothing_and_give_no_warning(action_space):
    ours, _ = in_place_of(policy_of(action_space), np.zeros((1, 3), np.float32))
    before = th.get_rng_state()
    assert Step(ours, np.array([[np.inf, -np.inf, 1.0]], np.float32)).actions is None
    assert th.equal(before, th.get_rng_state())
    # tanh takes large numbers as it takes others
    assert np.isfinite(Step(ours, np.full((1, 3), 1e38, np.float32)).actions).all()


@pytest.mark.parametrize(("n_choices", "layered"), [(10, True), (60, False), (1000, False)])
def test_wide_heads_are_left_to_general_products(n_choices, layered, monkeypatch):
    """∂h/∂z of the last layer has the square of their size."""
    seen = []
    linearize = StandardMLP.linearize
    monkeypatch.setattr(StandardMLP, "linearize", lambda self, *args: seen.append(1) or linearize(self, *args))
    env = NoiseEnv(spaces.Discrete(n_choices))
    model = MatchedTRPO("MlpPolicy", env, n_steps=16, batch_size=16, device="cpu", seed=0)
    model.learn(16)
    assert bool(seen) is layered
    assert logged(model)["step_fraction"] > 0
