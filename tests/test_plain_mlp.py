"""Which policies are taken apart, that what is taken apart is the policy, and that it notices when it is not."""

import copy
import math
import warnings
from functools import partial

import numpy as np
import pytest
import torch as th
from gymnasium import spaces
from stable_baselines3.common.policies import ActorCriticPolicy
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from sb3_uatrpo import UATRPO, MatchedTRPO, acting
from sb3_uatrpo.acting import ActingMLP
from sb3_uatrpo.plain_mlp import FastPath, PlainMLP, as_arrays, same_but_for_rounding
from tests.helpers import (
    ACTION_SPACES,
    DICT,
    IMAGE,
    NoiseEnv,
    SmallCNN,
    SmallCombined,
    collect,
    logged,
    make_model,
    scale_latents,
)


def policy_of(action_space="box", **kwargs) -> ActorCriticPolicy:
    return make_model(UATRPO, action_space, **{"double": False, "n_projections": 4, **kwargs}).policy


class Subclass(ActorCriticPolicy):
    pass


class OwnLatent(ActorCriticPolicy):
    def _get_action_dist_from_latent(self, latent_pi):
        return super()._get_action_dist_from_latent(2.0 * latent_pi)


ACCEPTED = {
    **{name: {"action_space": name} for name in ACTION_SPACES},
    "no_hidden_layer": {"policy_kwargs": {"net_arch": []}},
    "in_place": {"policy_kwargs": {"net_arch": [4], "activation_fn": partial(nn.ReLU, inplace=True)}},
    "image_as_numbers": {"observation_space": IMAGE},
    "two_extractors": {"policy_kwargs": {"net_arch": [4], "share_features_extractor": False}},
    "subclass": {"policy": Subclass},
}
REFUSED = {
    "gsde": {"use_sde": True},
    "prelu": {"policy_kwargs": {"net_arch": [4], "activation_fn": nn.PReLU}},
    "cnn": {"observation_space": IMAGE, "policy_kwargs": {"features_extractor_class": SmallCNN, "net_arch": []}},
    "dict": {
        "observation_space": DICT,
        "policy": "MultiInputPolicy",
        "policy_kwargs": {"features_extractor_class": SmallCombined, "net_arch": [3]},
    },
    "own_latent": {"policy": OwnLatent},
    "batch_norm": {"policy_kwargs": {"net_arch": [4], "activation_fn": partial(nn.BatchNorm1d, 4, affine=False)}},
}


@pytest.mark.parametrize("n_envs", [1, 5, 16])
@pytest.mark.parametrize("name", ACCEPTED)
def test_standard_policies_are_recognised_and_are_what_they_are_taken_for(name, n_envs):
    kwargs = {"action_space": "box", **ACCEPTED[name]}
    policy = policy_of(**kwargs)
    policy.set_training_mode(False)
    mlp = PlainMLP.recognise(policy)
    assert mlp is not None
    names = {id(param): name for name, param in policy.named_parameters()}
    assert {names[id(param)] for param in mlp.actor_params} == {n for n in names.values() if "value_net" not in n}
    space = kwargs.get("observation_space") or spaces.Box(-1.0, 1.0, (3,))
    space.seed(0)
    observations = np.stack([space.sample() for _ in range(n_envs)])
    acting = ActingMLP(mlp)
    assert acting.differences(observations) == []
    th.manual_seed(0)
    drawn = acting.sample(observations)
    after = th.get_rng_state()
    th.manual_seed(0)
    with th.no_grad():
        actions, values, log_probs = policy(th.as_tensor(observations))
    assert th.equal(after, th.get_rng_state())
    np.testing.assert_allclose(drawn.reshape(actions.shape), actions.numpy(), rtol=1e-5, atol=1e-5)
    own_values, own_log_probs = acting.evaluate(observations, drawn)
    th.testing.assert_close(own_values, values)
    th.testing.assert_close(own_log_probs, log_probs)


@pytest.mark.parametrize("name", REFUSED)
def test_others_are_not(name):
    assert PlainMLP.recognise(policy_of(**{"action_space": "box", **REFUSED[name]})) is None


def test_a_shared_layer_is_in_two_places():
    policy = policy_of(policy_kwargs={"net_arch": [4, 4, 4]})
    net = policy.mlp_extractor.policy_net
    net[4] = net[2]
    assert PlainMLP.recognise(policy) is None


CHANGES = {
    "a number": lambda policy: policy.value_net.bias.data.add_(1e-3),
    "a number, by NumPy": lambda policy: policy.log_std.detach().numpy().__setitem__(0, 3.0),
    "other memory": lambda policy: setattr(policy.value_net.bias, "data", policy.value_net.bias.data.clone()),
    "another parameter": lambda policy: setattr(policy, "log_std", nn.Parameter(policy.log_std.detach().clone())),
    "another layer": lambda policy: setattr(policy, "action_net", copy.deepcopy(policy.action_net)),
    "another distribution": lambda policy: setattr(policy, "action_dist", copy.copy(policy.action_dist)),
    "a hook": lambda policy: policy.mlp_extractor.policy_net[1].register_forward_hook(lambda *args: None),
}


@pytest.mark.parametrize("change", CHANGES)
def test_it_notices_that_the_policy_has_changed(change):
    policy = policy_of()
    acting = ActingMLP(PlainMLP.recognise(policy))
    assert acting.is_current()
    CHANGES[change](policy)
    assert not acting.is_current()


@pytest.mark.parametrize("register", [register_module_forward_hook, register_module_forward_pre_hook])
def test_it_notices_a_hook_on_all_modules(register):
    acting = ActingMLP(PlainMLP.recognise(policy_of()))
    handle = register(lambda *args: None)
    try:
        assert not acting.is_current()
    finally:
        handle.remove()
    assert acting.is_current()


def test_what_acted_is_evaluated_with_its_own_numbers():
    policy = policy_of()
    observations = np.random.default_rng(0).normal(size=(5, 3)).astype(np.float32)
    acting = ActingMLP(PlainMLP.recognise(policy))
    with th.no_grad():
        actions, values, log_probs = policy(th.as_tensor(observations))
        for param in policy.parameters():
            param.mul_(3.0)
        found = acting.evaluate(observations, actions.numpy())
    th.testing.assert_close(found[0], values)
    th.testing.assert_close(found[1], log_probs)


def test_what_looks_standard_and_is_not_is_served_the_general_way_with_one_warning(monkeypatch):
    """Structure cannot know all: here the policy's outputs differ from those of its layers."""
    scale_latents(monkeypatch, "forward_actor")
    with pytest.warns(UserWarning, match="its layers alone do not reproduce the action distribution that") as caught:
        model = make_model(UATRPO, "box", double=False, n_projections=4).learn(48)
    assert len(caught) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model.learn(2 * 48)
        assert model._who_acts(model.rollout_buffer) is None
    assert logged(model)["step_fraction"] > 0


def test_products_are_general_where_the_update_finds_a_difference(monkeypatch):
    model = make_model(UATRPO, "box", double=False, n_projections=4)
    collect(model)
    scale_latents(monkeypatch, "forward_actor")
    with pytest.warns(UserWarning, match="its layers alone do not reproduce the action distribution that"):
        model.train()
    assert logged(model)["kl_ratio"] == pytest.approx(1.0, abs=0.3)


@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e6])
def test_rounding_is_told_from_difference(scale):
    theirs = scale * th.randn(50, 3, generator=th.Generator().manual_seed(0))
    assert same_but_for_rounding(theirs * (1.0 + 1e-6), theirs)
    assert not same_but_for_rounding(theirs * 1.01, theirs)
    assert not same_but_for_rounding(theirs[:1], theirs)
    assert same_but_for_rounding(theirs * th.nan, theirs * th.nan)
    assert not same_but_for_rounding(theirs * th.nan, theirs)


def outputs_near_zero(scale: float = 1.0) -> tuple[ActingMLP, np.ndarray]:
    """One environment where mean, value and log-probability are sums of terms that cancel."""
    policy = policy_of(spaces.Box(-1.0, 1.0, (1,)), policy_kwargs={"net_arch": [64, 64]})
    policy.set_training_mode(False)
    observation = np.array([[0.3, -0.7, 0.5]], np.float32)
    latents = policy.mlp_extractor(th.as_tensor(observation))
    with th.no_grad():
        for head, latent in zip((policy.action_net, policy.value_net), latents, strict=True):
            head.weight.mul_(scale)
            head.bias.copy_(-(head.weight @ latent[0]))
        # log σ = -log √(2π)
        policy.log_std.fill_(-0.5 * math.log(2.0 * math.pi))
    mlp = PlainMLP.recognise(policy)
    assert mlp is not None
    return ActingMLP(mlp), observation


@pytest.mark.parametrize("scale", [1.0, 50.0])
def test_rounding_of_an_output_near_zero_is_no_difference(scale):
    acting, observation = outputs_near_zero(scale)
    with th.no_grad():
        _, value, log_prob = acting.policy(th.as_tensor(observation), deterministic=True)
    assert max(abs(value.item()), abs(log_prob.item())) < 1e-4 * scale
    assert acting.differences(observation) == []


def test_a_difference_of_an_output_near_zero_is_one(monkeypatch):
    acting, observation = outputs_near_zero()
    scale_latents(monkeypatch, "forward_actor")
    scale_latents(monkeypatch, "forward_critic")
    assert {"the distribution's mode", "the values"} <= set(acting.differences(observation))


def test_only_plain_features_and_single_precision_act_as_arrays(monkeypatch):
    observations = np.zeros((1, 3), np.float32)
    policy = policy_of()
    assert ActingMLP.of(policy, FastPath(), observations) is not None
    policy.features_extractor.register_forward_pre_hook(lambda *args: None)
    assert ActingMLP.of(policy, FastPath(), observations) is None
    assert PlainMLP.recognise(policy_of()).runs_on_arrays
    assert not PlainMLP.recognise(policy_of().double()).runs_on_arrays
    # torch.compile switches the validation of distributions off, for all that follow
    distribution = th.distributions.Distribution
    monkeypatch.setattr(distribution, "_validate_args", distribution._validate_args)
    compiled = policy_of()
    compiled.mlp_extractor.policy_net.compile(backend="eager")
    assert ActingMLP.of(compiled, FastPath(), observations) is None


def test_a_large_policy_acts_itself(monkeypatch):
    """Comparing all of its parameters at each step would take longer than is saved."""
    observations, policy = np.zeros((1, 3), np.float32), policy_of()
    n_bytes = sum(param.nbytes for param in policy.parameters())
    monkeypatch.setattr(acting, "MAX_PARAMETER_BYTES", n_bytes)
    assert ActingMLP.of(policy, FastPath(), observations) is not None
    monkeypatch.setattr(acting, "MAX_PARAMETER_BYTES", n_bytes - 1)
    assert ActingMLP.of(policy, FastPath(), observations) is None


@pytest.mark.parametrize("activation_fn", [nn.Tanh, nn.ReLU, nn.Identity, nn.GELU, partial(nn.ELU, inplace=True), None])
@pytest.mark.parametrize("n", [1, 7])
def test_arrays_are_what_the_layers_are(activation_fn, n):
    kwargs = {"net_arch": []} if activation_fn is None else {"net_arch": [5, 4], "activation_fn": activation_fn}
    mlp = PlainMLP.recognise(policy_of(policy_kwargs=kwargs))
    inputs = np.random.default_rng(0).normal(size=(n, 3)).astype(np.float32)
    kept = inputs.copy()
    for chain in (mlp.actor, mlp.critic):
        found = as_arrays(chain)(inputs)
        expected = th.from_numpy(inputs)
        for dense in chain:
            expected = dense(expected)
        np.testing.assert_allclose(found, expected.detach().numpy(), rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(inputs, kept)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("action_space", ACTION_SPACES)
def test_numbers_out_of_range_are_refused_as_the_policy_refuses_them_without_a_warning(action_space):
    policy = policy_of(action_space)
    acting = ActingMLP(PlainMLP.recognise(policy))
    with pytest.raises(ValueError, match="to satisfy the constraint"):
        acting.sample(np.array([[np.inf, -np.inf, 1.0]], np.float32))
    # tanh takes large numbers as it takes others
    assert np.isfinite(acting.sample(np.full((1, 3), 1e38, np.float32))).all()


@pytest.mark.parametrize(("n_choices", "layered"), [(10, True), (60, False), (1000, False)])
def test_wide_heads_are_left_to_general_products(n_choices, layered, monkeypatch):
    """∂h/∂z of the last layer has the square of their size."""
    seen = []
    linearize = PlainMLP.linearize
    monkeypatch.setattr(PlainMLP, "linearize", lambda self, *args: seen.append(1) or linearize(self, *args))
    env = NoiseEnv(spaces.Discrete(n_choices))
    model = MatchedTRPO("MlpPolicy", env, n_steps=16, batch_size=16, device="cpu", seed=0)
    model.learn(16)
    assert bool(seen) is layered
    assert logged(model)["step_fraction"] > 0
