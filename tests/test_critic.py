"""The critic's epochs beside a plain loop over RolloutBuffer.get with the optimizer as it is."""

import copy

import numpy as np
import pytest
import torch as th
from stable_baselines3.common.buffers import RolloutBuffer
from torch.nn import functional as F
from torch.optim.optimizer import register_optimizer_step_pre_hook

from sb3_uatrpo.actor import Actor
from sb3_uatrpo.core.array_mlp import ArrayMLP
from sb3_uatrpo.critic import fit_values
from tests.helpers import (
    BOTH,
    DICT,
    IMAGE,
    NewestFirst,
    SmallCNN,
    actor_vector,
    collect,
    count_calls,
    extractor,
    logged,
    small,
    unchanged,
    with_extractor,
    with_kwargs,
)


def actor_of(policy, params=None) -> Actor:
    actor = Actor(policy)
    actor.params = params or tuple(param for name, param in policy.named_parameters() if "value" not in name)
    return actor


def trained(model, plain: bool, epochs: int = 3) -> tuple[list[np.ndarray], list[float], dict]:
    """The policy's parameters and the losses after some epochs, by us or by the plain loop."""
    policy, buffer = model.policy, model.rollout_buffer
    actor = {id(param) for name, param in policy.named_parameters() if "value" not in name}
    np.random.seed(5)
    losses = []
    if plain:
        policy.set_training_mode(True)
        for _ in range(epochs):
            for samples in buffer.get(model.batch_size):
                loss = F.mse_loss(policy.predict_values(samples.observations).flatten(), samples.returns)
                policy.optimizer.zero_grad()
                loss.backward()
                for param in policy.parameters():
                    if id(param) in actor:
                        param.grad = None
                policy.optimizer.step()
                losses.append(loss.item())
    else:
        losses = fit_values(actor_of(policy), buffer, model.batch_size, epochs)
    return [param.detach().numpy().copy() for param in policy.parameters()], losses, policy.optimizer.state_dict()


class Rebinding(th.optim.SGD):
    """Puts new memory into the parameters."""

    def step(self, closure=None):
        super().step(closure)
        for group in self.param_groups:
            for param in group["params"]:
                param.data = param.data.clone()


def with_gradients(optimizer):
    return [param for group in optimizer.param_groups for param in group["params"] if param.grad is not None]


class ForgetsGradients(th.optim.Adam):
    def step(self, closure=None):
        super().step(closure)
        self.zero_grad()


class KeepsGradients(th.optim.Optimizer):
    """Uses the gradient before, by keeping it."""

    def __init__(self, params, lr=1e-3):
        super().__init__(params, {"lr": lr})

    @th.no_grad()
    def step(self, closure=None):
        for param in with_gradients(self):
            before = self.state[param].get("before", th.zeros_like(param))
            param.sub_(self.param_groups[0]["lr"] * (2.0 * param.grad - before))
            self.state[param]["before"] = param.grad


class Reversed(NewestFirst, RolloutBuffer):
    pass


class Centred(RolloutBuffer):
    """Changes each minibatch."""

    def to_torch(self, array, copy=True):
        tensor = super().to_torch(array, copy)
        return tensor - tensor.mean() if tensor.ndim == 1 else tensor


OPTIMIZERS = {
    "adam": {},
    "adamw": with_kwargs(optimizer_class=th.optim.AdamW, optimizer_kwargs={"weight_decay": 0.1}),
    "sgd": with_kwargs(optimizer_class=th.optim.SGD),
    "rmsprop": with_kwargs(optimizer_class=th.optim.RMSprop),
    "foreach": with_kwargs(optimizer_kwargs={"foreach": True}),
    **{kind.__name__: with_kwargs(optimizer_class=kind) for kind in (Rebinding, ForgetsGradients, KeepsGradients)},
}
LOOPS = {
    **OPTIMIZERS,
    **{f"{name}, dict": {**kwargs, "observation_space": DICT} for name, kwargs in OPTIMIZERS.items()},
    **{kind.__name__: {"rollout_buffer_class": kind} for kind in (Reversed, Centred)},
}


@pytest.mark.parametrize("name", LOOPS)
def test_as_a_plain_loop(name):
    model = small(n_envs=2, n_steps=45, **LOOPS[name])
    model.batch_size = 16  # 90 steps: the last minibatch is a truncated one
    collect(model)
    other = copy.deepcopy(model.policy)
    ours, losses, state = trained(model, plain=False)
    model.policy = other
    theirs, their_losses, their_state = trained(model, plain=True)
    assert losses == pytest.approx(their_losses, rel=1e-5)
    for one, another in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(one, another, rtol=1e-5, atol=1e-6)
    # the optimizer is left as it was found, so checkpoints are those of Stable-Baselines3
    assert state["param_groups"] == their_state["param_groups"]
    assert state["state"].keys() == their_state["state"].keys()
    for place, of_param in their_state["state"].items():
        for name, value in of_param.items():
            if isinstance(value, th.Tensor):
                th.testing.assert_close(state["state"][place][name], value, rtol=1e-4, atol=1e-6)


def no_baseline(model):
    evaluate = model.policy.evaluate_actions

    def without_values(observations, actions):
        values, *others = evaluate(observations, actions)
        return th.zeros_like(values), *others

    model.policy.evaluate_actions = without_values


def a_frozen_critic_beside_a_trainable_module(model):
    for name, param in model.policy.named_parameters():
        param.requires_grad_("value" not in name)
    model.policy.add_module("unused", th.nn.Linear(3, 3))


@pytest.mark.parametrize("change", [no_baseline, a_frozen_critic_beside_a_trainable_module])
def test_a_critic_that_nothing_trained_has_a_part_in(change):
    model = small()
    change(model)
    before = {name: param.detach().clone() for name, param in model.policy.named_parameters()}
    model.learn(2 * model.n_steps)
    moved = {name for name, param in model.policy.named_parameters() if not th.equal(param, before[name])}
    assert moved
    assert not any("value" in name or "unused" in name for name in moved)
    assert model._n_updates == 2


def test_a_critic_without_parameters_of_its_own():
    model = collect(small())
    with unchanged(model):
        assert fit_values(actor_of(model.policy, tuple(model.policy.parameters())), model.rollout_buffer, 16, 2) == []


def add_hook(model):
    model.policy.value_net.weight.register_hook(lambda gradient: None)


def freeze_a_part(model):
    model.policy.value_net.bias.requires_grad_(False)


def patch(part, name):
    setattr(part, name, getattr(part, name))


#: without parameters, but what comes out for a step depends on the others
Standardised = extractor(3, lambda n: {}, lambda self, x: x - x.mean(dim=0))


@pytest.mark.parametrize(
    ("kwargs", "change", "expected"),
    [
        ({}, None, True),
        (with_kwargs(net_arch=[]), None, True),
        (with_kwargs(activation_fn=th.nn.ReLU), None, True),
        (with_kwargs(optimizer_class=th.optim.AdamW), None, True),
        (with_kwargs(activation_fn=th.nn.GELU), None, False),
        (with_kwargs(optimizer_class=Rebinding), None, False),
        (with_extractor(Standardised), None, False),
        ({"use_sde": True}, None, False),
        ({"rollout_buffer_class": Reversed}, None, False),
        ({}, add_hook, False),
        ({}, freeze_a_part, False),
        ({}, lambda model: patch(model.rollout_buffer, "get"), False),
        *(({}, lambda model, name=name: patch(model.policy.optimizer, name), False) for name in ("step", "zero_grad")),
    ],
)
def test_when_numpy_trains_the_critic(kwargs, change, expected, monkeypatch):
    model = small(**kwargs)
    if change is not None:
        change(model)
    collect(model)
    minibatches = count_calls(monkeypatch, ArrayMLP, "squared_error")
    fit_values(actor_of(model.policy), model.rollout_buffer, 16, 1)
    assert bool(minibatches) is expected


def replaces_gradients(optimizer, *_):
    for param in with_gradients(optimizer):
        param.grad = param.grad.clamp(-0.01, 0.01)


def clips_gradients(optimizer, *_):
    th.nn.utils.clip_grad_norm_(with_gradients(optimizer), 0.01)


@pytest.mark.parametrize(
    ("register", "hook"),
    [
        (th.optim.Adam.register_step_pre_hook, replaces_gradients),
        (th.optim.Adam.register_step_pre_hook, clips_gradients),
        (th.optim.Adam.register_step_post_hook, lambda optimizer, *_: optimizer.zero_grad()),
        # of all optimizers
        (lambda _, hook: register_optimizer_step_pre_hook(hook), replaces_gradients),
    ],
)
def test_step_hooks_see_each_minibatchs_gradient_and_the_users_settings(register, hook):
    model, found, seen = collect(small()), [], []
    policies = model.policy, copy.deepcopy(model.policy)

    def keeps(optimizer, *_):
        assert optimizer.param_groups[0]["fused"] is None
        seen[-1].append(th.cat([param.grad.flatten() for param in with_gradients(optimizer)]))

    for plain in (False, True):
        model.policy = policies[plain]
        seen.append([])
        handles = [register(model.policy.optimizer, each) for each in (keeps, hook)]
        try:
            found.append(trained(model, plain)[0])
        finally:
            for handle in handles:
                handle.remove()
    for one, another in zip(*found, strict=True):
        np.testing.assert_allclose(one, another, rtol=1e-5, atol=1e-6)
    assert len({float(gradient.sum()) for gradient in seen[0]}) == 9
    th.testing.assert_close(*seen)


def huge_return(model):
    """One minibatch of three in each epoch has an infinite loss."""
    model.rollout_buffer.returns[5] = 1e30


def huge_gradients(model):
    """Observations of 1e37 times errors of 1e4 overflow, the squares of errors do not."""
    model.rollout_buffer.observations[:] = 1e37
    model.rollout_buffer.returns[:] = 1e4
    with th.no_grad():
        model.policy.value_net.weight.zero_()


@pytest.mark.parametrize("fast", [True, False])
@pytest.mark.parametrize(("spoil", "n_skipped"), [(huge_return, 2), (huge_gradients, 6)])
def test_a_minibatch_that_is_not_finite_changes_nothing(spoil, n_skipped, fast, monkeypatch):
    model = collect(small(policy_kwargs={"net_arch": []}))
    spoil(model)
    if not fast:
        monkeypatch.setattr("sb3_uatrpo.actor.as_plain_mlp", lambda policy: None)
    before = {name: param.detach().clone() for name, param in model.policy.named_parameters()}
    with pytest.warns(UserWarning, match="skipped a minibatch whose loss or gradient is not finite") as caught:
        losses = fit_values(actor_of(model.policy), model.rollout_buffer, 16, 2)
    assert (len(caught), len(losses)) == (n_skipped, 6 - n_skipped)
    for name, param in model.policy.named_parameters():
        assert bool(param.isfinite().all())
        assert th.equal(param, before[name]) == ("value" not in name or n_skipped == 6)


class KeepsZeros(th.optim.AdamW):
    def zero_grad(self, set_to_none=True):
        super().zero_grad(set_to_none=False)


@BOTH
@pytest.mark.parametrize(
    "kwargs",
    [
        *(
            with_kwargs(optimizer_class=kind, optimizer_kwargs={"weight_decay": 0.5})
            for kind in (th.optim.AdamW, KeepsZeros)
        ),
        {"policy": "CnnPolicy", "observation_space": IMAGE, **with_extractor(SmallCNN)},
    ],
    ids=["weight decay", "zeros instead of None", "shared extractor"],
)
def test_the_critic_leaves_the_actor_where_the_trust_region_put_it(cls, kwargs):
    """Not even gradients that somebody has left behind move it."""
    actors, critics = [], []
    for n_critic_updates in (0, 5):
        model = collect(small(cls, n_critic_updates=n_critic_updates, **kwargs))
        observations = th.as_tensor(model.rollout_buffer.observations[:, 0])
        model.policy.evaluate_actions(observations, th.zeros(48, 2))[1].sum().backward()
        model.train()
        assert logged(model)["step_fraction"] > 0.0
        actors.append(actor_vector(model))
        critics.append(model.policy.value_net.weight.detach())
    assert np.array_equal(*actors)
    assert not th.equal(*critics)
