"""The actor by its public names: what it finds, how it moves, and that it leaves the policy as it was."""

from contextlib import suppress

import numpy as np
import pytest
import torch as th

from sb3_uatrpo.actor import Actor
from sb3_uatrpo.batch import rollout_batch
from tests.helpers import ACTION_SPACES, DICT, actor_vector, collect, env_major, make_model
from tests.reference import actor_parameters, log_prob, policy_gradient, torch_distribution


def prepared(**kwargs):
    """A model with a rollout, its batch, and its actor."""
    model = collect(make_model(n_envs=2, **kwargs))
    return model, rollout_batch(model.rollout_buffer, True), Actor(model.policy)


@pytest.mark.parametrize(
    "kwargs", [*({"action_space": x} for x in ACTION_SPACES), {"observation_space": DICT}], ids=str
)
def test_its_parameters_are_those_that_the_distribution_depends_on(kwargs):
    model, batch, actor = prepared(**kwargs)
    with actor.update_mode():
        actor.find_params(batch)
    assert list(map(id, actor.params)) == list(map(id, actor_parameters(model.policy)))
    assert actor.n_params == len(actor_vector(model))
    acting = {id(param) for param in actor.params}
    expected = [param.numel() if id(param) in acting else 0 for param in model.policy.parameters()]
    # the last of them are the critic's
    assert actor.layout.tolist() == expected[: len(actor.layout)]
    assert not any(expected[len(actor.layout) :])
    assert expected[len(actor.layout) - 1] > 0


def test_modules_that_the_actor_does_not_use_leave_its_layout_as_it_is():
    model = make_model()
    model.learn(model.n_steps)
    model.policy.add_module("unused", th.nn.Linear(3, 3))
    weight = model.sketch.ema_weight.item()
    # no warning that the sketch starts afresh
    model.learn(model.n_steps)
    assert model.sketch.ema_weight.item() > weight


@pytest.mark.parametrize("action_space", ACTION_SPACES)
def test_log_probabilities_and_their_gradient_are_the_policys(action_space):
    model, batch, actor = prepared(action_space=action_space)
    obs, actions, advantages = env_major(model)
    with actor.update_mode():
        actor.find_params(batch)
        estimates = actor.estimates(batch)
        heads = actor.heads(batch)
        ours = actor.family.log_prob(heads, batch.actions)
        gradient = actor.gradient(batch, estimates)
    theirs = log_prob(model.policy, obs, actions).detach()
    assert ours.numpy() == pytest.approx(theirs.numpy(), abs=1e-9)
    assert batch.log_probs.numpy() == pytest.approx(theirs.numpy(), abs=1e-4)
    assert gradient.numpy() == pytest.approx(
        policy_gradient(model.policy, obs, actions, advantages), rel=1e-6, abs=1e-9
    )


def test_the_policy_is_as_it_was_afterwards():
    model, batch, _ = prepared()
    policy = model.policy
    hook = policy.action_net.weight.register_hook(lambda gradient: None)
    module_hook = policy.action_net.register_full_backward_hook(lambda *args: None)
    actor = Actor(policy)
    for training in (True, False):
        policy.set_training_mode(training)
        distribution, hooks = policy.action_dist, policy.action_net.weight._backward_hooks
        with suppress(ZeroDivisionError), actor.update_mode():
            assert not policy.training
            assert policy.action_dist is not distribution
            assert not policy.action_net.weight._backward_hooks
            assert not policy.action_net._backward_hooks
            actor.find_params(batch)
            1 / 0  # noqa: B018
        assert policy.training is training
        assert policy.action_dist is distribution
        assert policy.action_net.weight._backward_hooks is hooks
        assert len(policy.action_net._backward_hooks) == 1
    hook.remove()
    module_hook.remove()
    assert not policy.action_net.weight._backward_hooks
    assert not policy.action_net._backward_hooks


def test_it_moves_along_a_step_and_comes_back_exactly():
    model, batch, actor = prepared(double=False)
    with actor.update_mode():
        actor.find_params(batch)
    before = actor_vector(model)
    step = th.randn(actor.n_params, generator=th.Generator().manual_seed(0))
    with actor.moving_along(step) as move:
        move(0.5)
        assert actor_vector(model) == pytest.approx(before + 0.5 * step.double().numpy(), abs=1e-6)
        move(1.0)
        assert actor_vector(model) == pytest.approx(before + step.double().numpy(), abs=1e-6)
        move(0.0)
        assert np.array_equal(actor_vector(model), before)
    with suppress(ZeroDivisionError), actor.moving_along(th.inf * step) as move:
        move(1.0)
        1 / 0  # noqa: B018
    assert np.array_equal(actor_vector(model), before)
    with actor.moving_along(step) as move:
        move(1.0)
    assert not np.array_equal(actor_vector(model), before)


def test_the_head_is_that_of_the_policys_own_distribution():
    model, batch, actor = prepared()
    with actor.update_mode():
        actor.find_params(batch)
        heads = actor.heads(batch)
    distribution = torch_distribution(model.policy, batch.observations)
    mean, log_std = heads.chunk(2, dim=1)
    assert mean.numpy() == pytest.approx(distribution.mean.detach().numpy())
    assert log_std.exp().numpy() == pytest.approx(distribution.stddev.detach().numpy())
