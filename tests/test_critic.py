"""The critic's epochs beside a plain loop over RolloutBuffer.get with the optimizer as it is."""

import copy
import warnings

import gymnasium as gym
import numpy as np
import pytest
import torch as th
from gymnasium import spaces
from stable_baselines3.common.buffers import RolloutBuffer
from stable_baselines3.common.torch_layers import FlattenExtractor
from torch.nn import functional as F
from torch.optim.optimizer import register_optimizer_step_pre_hook

from sb3_uatrpo import UATRPO, MatchedTRPO
from sb3_uatrpo.actor import Actor
from sb3_uatrpo.core.array_mlp import ArrayMLP
from sb3_uatrpo.critic import fit_values
from tests.helpers import DICT, SmallCombined, actor_vector, collect, logged, make_model


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


OPTIMIZERS = {
    "adam": {},
    "adamw": {"optimizer_class": th.optim.AdamW, "optimizer_kwargs": {"weight_decay": 0.1}},
    "sgd": {"optimizer_class": th.optim.SGD},
    "rmsprop": {"optimizer_class": th.optim.RMSprop},
    "foreach": {"optimizer_kwargs": {"foreach": True}},
}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("observations", ["box", "dict"])
def test_as_a_plain_loop(optimizer, observations):
    kwargs = {"policy_kwargs": {"net_arch": [4], **OPTIMIZERS[optimizer]}}
    if observations == "dict":
        kwargs |= {"observation_space": DICT, "policy": "MultiInputPolicy"}
        kwargs["policy_kwargs"] |= {"features_extractor_class": SmallCombined}
    else:
        kwargs |= {"policy": "MlpPolicy"}
    model = make_model(UATRPO, "box", n_envs=2, double=False, n_projections=4, n_steps=45, **kwargs)
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


class Reversed(RolloutBuffer):
    """Every epoch the same, backwards."""

    def get(self, batch_size=None):
        samples = next(super().get(None))
        yield type(samples)(*(tensor.flip(0) for tensor in samples))


def test_a_buffer_with_samples_of_its_own_is_asked():
    model = make_model(UATRPO, "box", double=False, policy="MlpPolicy", n_projections=4, rollout_buffer_class=Reversed)
    collect(model)
    losses = trained(model, plain=False, epochs=4)[1]
    assert len(losses) == 4


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
    model = make_model(UATRPO, "box", policy="MlpPolicy", double=False, n_projections=4)
    change(model)
    before = {name: param.detach().clone() for name, param in model.policy.named_parameters()}
    model.learn(2 * model.n_steps)
    moved = {name for name, param in model.policy.named_parameters() if not th.equal(param, before[name])}
    assert moved
    assert not any("value" in name or "unused" in name for name in moved)
    assert model._n_updates == 2


def test_a_critic_without_parameters_of_its_own():
    model = make_model(UATRPO, "box", double=False, policy="MlpPolicy", n_projections=4)
    collect(model)
    everything = tuple(model.policy.parameters())
    before = [param.detach().clone() for param in everything]
    assert fit_values(actor_of(model.policy, everything), model.rollout_buffer, 16, 2) == []
    assert all(th.equal(one, other) for one, other in zip(before, everything, strict=True))


class Standardised(FlattenExtractor):
    """Without parameters, but what comes out for a step depends on the others."""

    def forward(self, observations):
        flat = super().forward(observations)
        return flat - flat.mean(dim=0)


class Rebinding(th.optim.SGD):
    """Puts new memory into the parameters."""

    def step(self, closure=None):
        super().step(closure)
        for group in self.param_groups:
            for param in group["params"]:
                param.data = param.data.clone()


def in_numpy(model, monkeypatch) -> bool:
    """Whether NumPy computes the critic's gradients."""
    collect(model)
    made = []
    squared_error = ArrayMLP.squared_error
    monkeypatch.setattr(ArrayMLP, "squared_error", lambda *args: (made.append(1), squared_error(*args))[1])
    fit_values(actor_of(model.policy), model.rollout_buffer, 16, 1)
    return bool(made)


def add_hook(model):
    model.policy.value_net.weight.register_hook(lambda gradient: None)


def freeze_a_part(model):
    model.policy.value_net.bias.requires_grad_(False)


def patch_the_buffer(model):
    model.rollout_buffer.get = model.rollout_buffer.get


@pytest.mark.parametrize(
    ("kwargs", "change", "expected"),
    [
        ({}, None, True),
        ({"policy_kwargs": {"net_arch": []}}, None, True),
        ({"policy_kwargs": {"net_arch": [4], "activation_fn": th.nn.ReLU}}, None, True),
        ({"policy_kwargs": {"net_arch": [4], "optimizer_class": th.optim.AdamW}}, None, True),
        ({"policy_kwargs": {"net_arch": [4], "activation_fn": th.nn.GELU}}, None, False),
        ({"policy_kwargs": {"net_arch": [4], "optimizer_class": Rebinding}}, None, False),
        ({"policy_kwargs": {"net_arch": [4], "features_extractor_class": Standardised}}, None, False),
        ({"use_sde": True}, None, False),
        ({"rollout_buffer_class": Reversed}, None, False),
        ({}, add_hook, False),
        ({}, freeze_a_part, False),
        ({}, patch_the_buffer, False),
    ],
)
def test_when_numpy_trains_the_critic(kwargs, change, expected, monkeypatch):
    model = make_model(UATRPO, "box", double=False, n_projections=4, **kwargs)
    if change is not None:
        change(model)
    assert in_numpy(model, monkeypatch) is expected


def test_hooks_of_all_optimizers_see_the_users_settings():
    model = make_model(UATRPO, "box", double=False, n_projections=4)
    collect(model)
    seen = []
    handle = register_optimizer_step_pre_hook(
        lambda optimizer, args, kwargs: seen.append(optimizer.param_groups[0]["fused"])
    )
    try:
        trained(model, plain=False)
    finally:
        handle.remove()
    assert set(seen) == {None}


def test_optimizers_may_put_new_memory_into_parameters():
    kept = []
    for optimizer_class in (th.optim.SGD, Rebinding):
        policy_kwargs = {"net_arch": [4], "optimizer_class": optimizer_class}
        model = make_model(UATRPO, "box", double=False, n_projections=4, policy_kwargs=policy_kwargs)
        collect(model)
        kept.append(trained(model, plain=False)[0])
    for one, another in zip(*kept, strict=True):
        np.testing.assert_allclose(one, another, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("fast", [True, False])
def test_a_minibatch_that_is_not_finite_changes_nothing(fast, monkeypatch):
    model = make_model(UATRPO, "box", double=False, n_projections=4)
    collect(model)
    model.rollout_buffer.returns[5] = 1e30
    if not fast:
        monkeypatch.setattr("sb3_uatrpo.actor.as_plain_mlp", lambda policy: None)
    before = [param.detach().clone() for param in model.policy.parameters()]
    actor = {param for name, param in model.policy.named_parameters() if "value" not in name}
    with pytest.warns(UserWarning, match="skipped a minibatch whose loss or gradient is not finite") as caught:
        losses = fit_values(actor_of(model.policy), model.rollout_buffer, 16, 2)
    # one minibatch of three in each of two epochs
    assert len(caught) == 2
    assert len(losses) == 4
    after = list(model.policy.parameters())
    assert all(bool(param.isfinite().all()) for param in after)
    assert [th.equal(one, other) for one, other in zip(before, after, strict=True)] == [
        param in actor for param in after
    ]


@pytest.mark.parametrize("fast", [True, False])
def test_a_finite_loss_whose_gradient_is_not_finite_changes_nothing(fast, monkeypatch):
    """Observations of 1e37 times errors of 1e4 overflow, the squares of errors do not."""
    kwargs = {"n_projections": 4, "policy_kwargs": {"net_arch": []}}
    model = make_model(UATRPO, "box", double=False, **kwargs)
    collect(model)
    model.rollout_buffer.observations[:] = 1e37
    model.rollout_buffer.returns[:] = 1e4
    with th.no_grad():
        model.policy.value_net.weight.zero_()
    if not fast:
        monkeypatch.setattr("sb3_uatrpo.actor.as_plain_mlp", lambda policy: None)
    before = [param.detach().clone() for param in model.policy.parameters()]
    with pytest.warns(UserWarning, match="skipped a minibatch whose loss or gradient is not finite"):
        assert fit_values(actor_of(model.policy), model.rollout_buffer, 16, 2) == []
    assert all(th.equal(*pair) for pair in zip(before, model.policy.parameters(), strict=True))


def test_a_buffer_may_change_each_minibatch_in_to_torch():
    class Centred(RolloutBuffer):
        def to_torch(self, array, copy=True):
            tensor = super().to_torch(array, copy)
            return tensor - tensor.mean() if tensor.ndim == 1 else tensor

    model = make_model(UATRPO, "box", double=False, n_projections=4, rollout_buffer_class=Centred)
    collect(model)
    other = copy.deepcopy(model.policy)
    ours = trained(model, plain=False)[0]
    model.policy = other
    for one, another in zip(ours, trained(model, plain=True)[0], strict=True):
        np.testing.assert_allclose(one, another, rtol=1e-5, atol=1e-6)


class KeepsZeros(th.optim.AdamW):
    def zero_grad(self, set_to_none=True):
        super().zero_grad(set_to_none=False)


def test_no_optimizer_moves_the_actor():
    """Not even with weight decay, gradients that somebody has left behind, and zeros instead of None."""
    policy_kwargs = {"net_arch": [4], "optimizer_class": KeepsZeros, "optimizer_kwargs": {"weight_decay": 0.5}}
    model = make_model(UATRPO, "box", n_projections=4, policy_kwargs=policy_kwargs, learning_rate=0.1)
    collect(model)
    model.policy.evaluate_actions(th.zeros(2, 3), th.zeros(2, 2))[1].sum().backward()
    before = actor_vector(model)
    model.rollout_buffer.advantages[:] = 0.0
    with pytest.warns(UserWarning, match="the update direction is zero"):
        model.train()
    assert np.array_equal(actor_vector(model), before)


class HasAnEmptyPart(gym.Env):
    observation_space = spaces.Dict(a=spaces.Box(-1.0, 1.0, (2,)), b=spaces.Box(-1.0, 1.0, (0,)))
    action_space = spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        return self.observation_space.sample(), {}

    def step(self, action):
        return self.observation_space.sample(), float(action), False, False, {}


@pytest.mark.parametrize("cls", [UATRPO, MatchedTRPO])
def test_an_observation_may_have_an_empty_part(cls):
    kwargs = {"n_projections": 4} if cls is UATRPO else {}
    model = cls("MultiInputPolicy", HasAnEmptyPart(), n_steps=48, batch_size=16, device="cpu", seed=0, **kwargs)
    model.learn(48)
    assert logged(model)["value_loss"] > 0.0


@pytest.mark.parametrize("cls", [UATRPO, MatchedTRPO])
def test_a_layer_may_be_empty(cls):
    """The actor's distribution then depends on biases alone."""
    kwargs = {"n_projections": 4} if cls is UATRPO else {}
    with warnings.catch_warnings():
        # torch's initialisation says that it has nothing to do
        warnings.filterwarnings("ignore", message="Initializing zero-element tensors")
        model = make_model(cls, "box", double=False, policy_kwargs={"net_arch": [0]}, **kwargs)
    model.learn(48)
    assert np.isfinite(actor_vector(model)).all()
