"""Which policies are plain MLPs, and that their layers are the policy."""

from functools import partial

import numpy as np
import pytest
import torch as th
from gymnasium import spaces
from stable_baselines3.common.policies import ActorCriticPolicy
from torch import nn

from sb3_uatrpo import MatchedTRPO, MlpPolicy
from sb3_uatrpo.plain import as_plain_mlp
from sb3_uatrpo.plain_mlp import PlainMLP
from tests.helpers import (
    BOTH,
    PLAIN,
    POLICIES,
    NoiseEnv,
    collect,
    count_calls,
    count_fast_steps,
    logged,
    model_on,
    small,
    with_kwargs,
)


def policy_of(**kwargs) -> ActorCriticPolicy:
    policy = small(**kwargs).policy
    policy.set_training_mode(False)
    return policy


class Subclass(MlpPolicy):
    pass


ACCEPTED = {
    **{name: POLICIES[name] for name in PLAIN},
    "in_place": with_kwargs(activation_fn=partial(nn.ReLU, inplace=True)),
}
REFUSED = {
    **{name: kwargs for name, kwargs in POLICIES.items() if name not in PLAIN},
    "subclass": {"policy": Subclass},
    "batch_norm": with_kwargs(activation_fn=partial(nn.BatchNorm1d, 4, affine=False)),
}


@pytest.mark.parametrize("n_envs", [1, 5, 16])
@pytest.mark.parametrize("name", ACCEPTED)
def test_plain_policies_are_recognised_and_act_as_they_would(name, n_envs):
    policy = policy_of(**ACCEPTED[name])
    mlp = as_plain_mlp(policy)
    names = {id(param): name for name, param in policy.named_parameters()}
    assert {names[id(param)] for param in mlp.actor_params} == {n for n in names.values() if "value_net" not in n}
    assert {names[id(param)] for param in mlp.critic_params} == {n for n in names.values() if "value_net" in n}
    policy.observation_space.seed(0)
    observations = np.stack([policy.observation_space.sample() for _ in range(n_envs)])
    th.manual_seed(0)
    with th.no_grad():
        actions, values, log_probs = policy(th.as_tensor(observations))
    after = th.get_rng_state()
    th.manual_seed(0)
    ours = mlp.act(observations)
    assert th.equal(after, th.get_rng_state())
    for mine, theirs in zip(ours, (actions, values, log_probs), strict=True):
        assert mine.dtype == theirs.dtype
        th.testing.assert_close(mine, theirs)
    drawn = ours[0] if ours[0].ndim == 1 else ours[0].flatten(1)
    with th.no_grad():
        th.testing.assert_close(ours[2], policy.evaluate_actions(th.as_tensor(observations), drawn)[1])


@pytest.mark.parametrize("name", REFUSED)
def test_others_are_not(name):
    assert as_plain_mlp(policy_of(**REFUSED[name])) is None


class Quantised(nn.Parameter):
    """Computes with something else than its numbers."""


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
        lambda policy: setattr(policy.features_extractor, "flatten", nn.Sequential(nn.Flatten(), nn.Linear(3, 3))),
        lambda policy: setattr(policy.action_net, "weight", Quantised(policy.action_net.weight.detach())),
        lambda policy: setattr(policy.action_net, "bias", None),
        lambda policy: setattr(policy, "log_std", nn.Parameter(th.zeros(1))),
    ],
)
@pytest.mark.usefixtures("unchecked_distributions")
def test_what_was_changed_is_not(change):
    policy = policy_of()
    assert as_plain_mlp(policy) is not None
    change(policy)
    assert as_plain_mlp(policy) is None


@pytest.mark.parametrize("change", ["number", "data", "parameter", "None"])
def test_parameters_may_change_at_any_time(change):
    policy = policy_of()
    mlp, bias = as_plain_mlp(policy), policy.value_net.bias
    assert mlp.is_current()
    if change == "number":
        with th.no_grad():
            bias.fill_(7.0)
        assert mlp.is_current()
        assert mlp.critic.layers[-1].bias[0] == 7.0
        return
    if change == "data":
        bias.data = bias.data.clone()
    else:
        policy.value_net.bias = nn.Parameter(bias.detach().clone()) if change == "parameter" else None
    assert not mlp.is_current()


@pytest.mark.parametrize("action_space", ["box", "discrete"])
def test_numbers_out_of_range_are_left_to_torch_without_a_warning(action_space):
    mlp = as_plain_mlp(policy_of(action_space=action_space))
    assert mlp.act(np.array([[np.inf, -np.inf, 1.0]], np.float32)) is None
    # tanh takes large numbers as it takes others
    assert all(found.isfinite().all() for found in mlp.act(np.full((1, 3), 1e38, np.float32)))


def test_autocast_takes_the_general_way(monkeypatch):
    acted, model = count_fast_steps(monkeypatch), small()
    with th.autocast("cpu", th.float16):
        collect(model)
    assert not acted


@BOTH
def test_the_policy_of_stable_baselines3_acts_as_it_does_there_but_is_updated_layer_by_layer(cls, monkeypatch):
    acted, linearized = count_fast_steps(monkeypatch), count_calls(monkeypatch, PlainMLP, "linearize")
    model = small(cls, policy=ActorCriticPolicy)
    model.learn(model.n_steps)
    assert linearized
    assert not acted


@pytest.mark.parametrize(("n_choices", "layered"), [(10, True), (60, False), (1000, False)])
def test_wide_heads_are_left_to_general_products(n_choices, layered, monkeypatch):
    """∂h/∂z of the last layer has the square of their size."""
    linearized = count_calls(monkeypatch, PlainMLP, "linearize")
    model = model_on(MatchedTRPO, NoiseEnv(spaces.Discrete(n_choices)), n_steps=16).learn(16)
    assert bool(linearized) is layered
    assert logged(model)["step_fraction"] > 0
