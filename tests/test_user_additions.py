"""
What a user adds to a policy, a buffer or a callback is neither bypassed nor does it corrupt an update.

The measure is Stable-Baselines3: the same model with ``fast_rollouts=False``, or the same network in plain layers.
"""

import copy
import gc
import threading
import warnings
import zipfile
from functools import partial
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
import torch as th
from gymnasium import spaces
from stable_baselines3 import PPO
from stable_baselines3.common import callbacks as cb
from stable_baselines3.common.buffers import RolloutBuffer
from stable_baselines3.common.distributions import DiagGaussianDistribution
from stable_baselines3.common.policies import ActorCriticPolicy
from stable_baselines3.common.torch_layers import (
    BaseFeaturesExtractor,
    FlattenExtractor,
)
from stable_baselines3.common.vec_env import DummyVecEnv
from torch import nn
from torch.utils.checkpoint import checkpoint

from sb3_uatrpo import UATRPO, MatchedTRPO
from sb3_uatrpo.actor import Actor
from sb3_uatrpo.batch import rollout_batch
from sb3_uatrpo.critic import fit_values
from tests.forked import run_code
from tests.helpers import (
    ACTION_SPACES,
    NoiseEnv,
    actor_vector,
    collect,
    learn_in_threads,
    logged,
    make_model,
)
from tests.reference import DoublePolicy
from tests.test_rollouts import assert_same_buffers
from tests.test_update import check_updates

ROOT = Path(__file__).parents[1]


def small(action_space="box", **kwargs):
    return make_model(UATRPO, action_space, **{"double": False, "n_projections": 8, **kwargs})


def filled(fast: bool, change=lambda policy: None, callback=None, n_rollouts=1, **kwargs):
    """A model whose buffer holds one rollout, collected by us or as Stable-Baselines3 does."""
    model = small(**{"n_envs": 2, "fast_rollouts": fast, **kwargs})
    change(model.policy)
    th.manual_seed(3)
    for env in model.env.envs:
        env.reset(seed=1)
    model.train = lambda: None
    model.learn(n_rollouts * model.n_steps * model.n_envs, callback=callback)
    del model.train
    return model


def as_sb3(change=lambda policy: None, make_callback=lambda: None, **kwargs):
    """Both rollouts, which must be the same."""
    ours, theirs = (filled(fast, change, make_callback(), **kwargs) for fast in (True, False))
    assert_same_buffers(ours.rollout_buffer, theirs.rollout_buffer)
    return ours, theirs


@pytest.mark.parametrize("activation_fn", [nn.ReLU, nn.LeakyReLU, nn.ELU])
def test_activations_may_work_in_place(activation_fn):
    models = []
    for fn in (activation_fn, partial(activation_fn, inplace=True)):
        model = small(policy_kwargs={"net_arch": [8, 8], "activation_fn": fn}, n_steps=64)
        models.append(model.learn(3 * 64))
    plain, in_place = (actor_vector(model) for model in models)
    np.testing.assert_allclose(in_place, plain, rtol=1e-5, atol=1e-6)


class OddLinear(nn.Module):
    """A linear layer whose weight's gradient lies in memory in another order than the weight."""

    def __init__(self, linear: nn.Linear, kind: str):
        super().__init__()
        self.kind = kind
        self.weight = nn.Parameter(linear.weight.detach().clone())
        if kind == "ensemble":
            self.weight = nn.Parameter(self.weight.data[None].clone())
        self.bias = nn.Parameter(linear.bias.detach().clone())

    def forward(self, x):
        if self.kind == "einsum":
            return th.einsum("ni,oi->no", x, self.weight) + self.bias
        if self.kind == "contiguous":
            return x @ self.weight.T.contiguous() + self.bias
        return (x[None] @ self.weight.transpose(1, 2))[0] + self.bias


def actor_of(policy, buffer) -> Actor:
    """The policy as an update has it after the actor's step."""
    actor = Actor(policy)
    with actor.differentiable_policy():
        actor.find_params(rollout_batch(buffer, True))
    return actor


def fitted(model, change) -> list[np.ndarray]:
    """The critic's parameters after some epochs, flat."""
    policy = copy.deepcopy(model.policy)
    change(policy)
    policy.optimizer = policy.optimizer_class(policy.parameters(), lr=1e-2, **policy.optimizer_kwargs)
    actor = actor_of(policy, model.rollout_buffer)
    np.random.seed(0)
    fit_values(actor, model.rollout_buffer, 16, 3)
    acting = set(actor.params)
    return [param.detach().numpy().flatten() for param in policy.parameters() if param not in acting]


@pytest.mark.parametrize("kind", ["einsum", "contiguous", "ensemble"])
def test_a_critic_may_lay_its_gradients_out_differently(kind):
    model = small(policy_kwargs={"net_arch": [6, 5]})
    collect(model)

    def odd(policy):
        layers = policy.mlp_extractor.value_net
        for i in (0, 2):
            layers[i] = OddLinear(layers[i], kind)

    # the parameters' order differs: those of the odd layers come first as often as not
    plain, changed = (sorted(map(np.sum, fitted(model, change))) for change in (lambda policy: None, odd))
    np.testing.assert_allclose(changed, plain, rtol=1e-4, atol=1e-5)


class Convolution(BaseFeaturesExtractor):
    def __init__(self, observation_space):
        super().__init__(observation_space, 8)
        self.conv = nn.Conv2d(3, 4, 3)
        self.linear = nn.Linear(4 * 16, 8)

    def forward(self, observations):
        return self.linear(self.conv(observations).relu().flatten(1)).tanh()


def test_a_critic_may_lay_its_images_out_differently():
    policy_kwargs = {"net_arch": [4], "features_extractor_class": Convolution, "share_features_extractor": False}
    space = spaces.Box(0, 255, (3, 6, 6), np.uint8)
    model = small(policy="CnnPolicy", observation_space=space, policy_kwargs=policy_kwargs)
    collect(model)

    class ChannelsLast(Convolution):
        def forward(self, observations):
            return super().forward(observations.contiguous(memory_format=th.channels_last))

    def channels_last(policy):
        policy.vf_features_extractor.__class__ = ChannelsLast

    plain, changed = (fitted(model, change) for change in (lambda policy: None, channels_last))
    for one, other in zip(plain, changed, strict=True):
        np.testing.assert_allclose(other, one, rtol=1e-4, atol=1e-5)


HOOKED = """
import sys
import torch as th
from tests.helpers import make_model, collect
from sb3_uatrpo import UATRPO

model = make_model(UATRPO, "box", double=False, n_projections=8)
seen = []
for param in model.policy.parameters():
    param.register_hook(lambda g: seen.append((type(g), g.data.reshape(-1).norm().item())))
for module in model.policy.modules():
    module.register_full_backward_hook(lambda module, _, above: seen.extend(
        (type(part), part.sum().item()) for part in above if part is not None  # the critic uses one of two outputs
    ))
collect(model)
model.train()
assert seen, "nobody was called"
assert {kind for kind, _ in seen} == {th.Tensor}, seen[:3]
print("fine")
"""


def test_hooks_on_gradients_see_ordinary_tensors():
    """In a process of its own: some of these ended it."""
    ended = run_code(HOOKED, cwd=ROOT)
    assert ended.stdout == "fine\n", ended.stderr


@pytest.mark.parametrize("extractor", ["plain", "convolution"])
def test_hooks_on_gradients_that_only_look_change_nothing_and_those_that_change_are_obeyed(extractor):
    """They are called with the policy gradient and with the critic's gradients, not with the curvature products'."""
    kwargs = {"n_critic_updates": 0}
    if extractor == "convolution":
        space = spaces.Box(0, 255, (3, 6, 6), np.uint8)
        policy_kwargs = {"net_arch": [], "features_extractor_class": Convolution}
        kwargs |= {"policy": "CnnPolicy", "observation_space": space, "policy_kwargs": policy_kwargs}
    models = {}
    calls = []
    for kind in ("none", "looks", "zero"):
        model = models[kind] = small(**kwargs)
        collect(model)
        weight = model.policy.action_net.weight
        if kind == "looks":
            weight.register_hook(lambda g: calls.append(g.norm().item()))
            model.policy.action_net.register_full_backward_hook(lambda *args: calls.append(0.0))
        elif kind == "zero":
            weight.register_hook(th.zeros_like)
        found = []
        find = model._find_direction
        model._find_direction = lambda estimates, found=found, find=find: (
            found.append(estimates.gradient) or find(estimates)
        )
        model.train()
        models[kind] = (actor_vector(model), found[0], model)
    np.testing.assert_allclose(models["looks"][0], models["none"][0], rtol=1e-5, atol=1e-6)
    assert len(calls) == 2
    names = [name for name, _ in models["zero"][2].policy.named_parameters() if "value_net" not in name]
    sizes = dict(models["zero"][2].policy.named_parameters())
    start = sum(sizes[name].numel() for name in names[: names.index("action_net.weight")])
    part = slice(start, start + sizes["action_net.weight"].numel())
    assert not models["zero"][1][part].any()
    assert models["none"][1][part].all()


class At(cb.BaseCallback):
    """Makes one change, at the tenth step or at each."""

    def __init__(self, change, at: int | None = 10):
        super().__init__()
        self.change, self.at = change, at

    def _on_step(self) -> bool:
        if self.at in (None, self.n_calls):
            with th.no_grad():
                self.change(self.model, self.locals)
        return True


def load_other_weights(policy):
    policy.load_state_dict({key: 0.5 * value for key, value in policy.state_dict().items()})


def other_parameter(policy):
    policy.action_net.weight = nn.Parameter(-policy.action_net.weight.detach())


def rebound(policy):
    policy.value_net.weight.data = 2.0 * policy.value_net.weight.data


@pytest.mark.parametrize(
    "change",
    [
        lambda policy: policy.log_std.fill_(-1.0),
        lambda policy: policy.log_std.data.fill_(-1.0),
        lambda policy: policy.value_net.bias.data.add_(1.0),
        lambda policy: policy.mlp_extractor.policy_net[0].weight.data.mul_(2.0),
        load_other_weights,
        other_parameter,
        rebound,
        lambda policy: setattr(policy.action_net, "bias", None),
    ],
    ids=[
        "log_std", "log_std.data", "value_net.bias.data", "policy_net.weight.data", "load_state_dict",
        "other_parameter", "rebound", "no_bias",
    ],
)  # fmt: skip
def test_a_policy_may_change_in_the_middle_of_a_rollout(change):
    as_sb3(make_callback=lambda: At(lambda model, _: change(model.policy)))


class Residual(nn.Sequential):
    def forward(self, x):
        return x[:, :1] + super().forward(x)


class NotIterable(nn.Module):
    def __init__(self, layers: nn.Sequential):
        super().__init__()
        self.layers = layers

    def forward(self, x):
        return self.layers(x)


def residual(policy):
    policy.mlp_extractor.policy_net = Residual(*policy.mlp_extractor.policy_net)


def not_iterable(policy):
    policy.mlp_extractor.policy_net = NotIterable(policy.mlp_extractor.policy_net)


def patched_forward(policy):
    net = policy.mlp_extractor.policy_net
    forward = net.forward
    net.forward = lambda x: 1.5 * forward(x)


class MixesSteps(nn.Module):
    """No parameters, but what comes out for one step depends on the others."""

    def forward(self, x):
        return th.tanh(x - 0.5 * x.mean(dim=0))


@pytest.mark.parametrize("change", [residual, not_iterable, patched_forward])
def test_networks_of_other_kinds_act_and_are_updated(change):
    as_sb3(change)
    model = small(policy=DoublePolicy, n_envs=2)
    change(model.policy)
    check_updates(model, n_updates=2)


def test_layers_that_mix_steps_act_as_in_stable_baselines3():
    ours, _ = as_sb3(policy_kwargs={"net_arch": [4], "activation_fn": MixesSteps})
    ours.train()
    assert np.isfinite(actor_vector(ours)).all()


SUBMODULES = (
    "features_extractor",
    "features_extractor.flatten",
    "mlp_extractor",
    "mlp_extractor.policy_net",
    "mlp_extractor.policy_net.0",
    "mlp_extractor.policy_net.1",
    "mlp_extractor.value_net",
    "mlp_extractor.value_net.1",
    "action_net",
    "value_net",
)


def scaled(output):
    return tuple(1.5 * part for part in output) if isinstance(output, tuple) else 1.5 * output


@pytest.mark.parametrize("pre", [False, True])
@pytest.mark.parametrize("name", SUBMODULES)
def test_forward_hooks_act_in_rollouts(name, pre):

    def change(policy):
        module = policy.get_submodule(name)
        if pre:
            module.register_forward_pre_hook(lambda module, inputs: tuple(1.5 * part for part in inputs))
        else:
            module.register_forward_hook(lambda module, inputs, output: scaled(output))

    as_sb3(change)


@pytest.mark.parametrize("name", [name for name in SUBMODULES if "value_net" not in name and name != "mlp_extractor"])
def test_forward_hooks_act_in_updates(name):
    model = small(policy=DoublePolicy, n_envs=2)
    module = model.policy.get_submodule(name)
    module.register_forward_hook(lambda module, inputs, output: output + output**2)
    check_updates(model, n_updates=2)


def settings_of_torch():
    return (
        th.distributions.Distribution._validate_args,
        th.backends.cuda.flash_sdp_enabled(),
        th.backends.cuda.mem_efficient_sdp_enabled(),
        th.backends.cuda.math_sdp_enabled(),
    )


def test_an_update_leaves_the_settings_of_other_threads_alone():
    """In the middle of one model's update another one acts: settings are as ever, and NaN actions are refused."""
    learner, actor = small(), small()
    collect(learner)
    with th.no_grad():
        actor.policy.action_net.bias.fill_(th.nan)
    before, seen, errors = settings_of_torch(), [], []

    def act():
        seen.append(settings_of_torch())
        try:
            collect(actor)
        except ValueError as error:
            errors.append(str(error))

    find = learner._find_direction

    def find_while_another_acts(estimates):
        thread = threading.Thread(target=act)
        thread.start()
        thread.join()
        return find(estimates)

    learner._find_direction = find_while_another_acts
    learner.train()
    assert seen == [before]
    assert len(errors) == 1
    assert "to satisfy the constraint" in errors[0]
    assert settings_of_torch() == before


def test_several_models_learn_in_several_threads():
    policy_kwargs = {"net_arch": [4], "activation_fn": nn.GELU}
    before = settings_of_torch()
    models = [small(policy_kwargs=policy_kwargs, n_steps=16, batch_size=16) for _ in range(3)]
    learn_in_threads(models, 5 * 16)
    assert settings_of_torch() == before
    assert all(model._n_updates == 5 for model in models)


def test_a_compiled_policy_trains(monkeypatch):
    # torch.compile switches off the checks of distributions for the whole process
    distribution = th.distributions.Distribution
    monkeypatch.setattr(distribution, "_validate_args", distribution._validate_args)
    models = [small(n_steps=16, batch_size=16) for _ in range(2)]
    models[0].policy = th.compile(models[0].policy, backend="eager")
    for model in models:
        model.set_random_seed(0)
        model.learn(3 * 16)
    assert logged(models[0])["step_fraction"] > 0
    np.testing.assert_allclose(actor_vector(models[0]), actor_vector(models[1]), rtol=1e-4, atol=1e-5)


class Forces(BaseFeaturesExtractor):
    """The gradient of an energy, as in physics-informed networks."""

    def __init__(self, space):
        super().__init__(space, space.shape[0])
        self.energy = nn.Sequential(nn.Linear(space.shape[0], 4), nn.Tanh(), nn.Linear(4, 1))

    def forward(self, observations):
        return th.func.vmap(th.func.grad(lambda row: self.energy(row).squeeze()))(observations)


@pytest.mark.parametrize("cls", [UATRPO, MatchedTRPO])
def test_a_network_that_contains_derivatives_trains(cls):
    model = make_model(cls, "box", double=False, policy_kwargs={"features_extractor_class": Forces, "net_arch": [4]})
    before = model.policy.features_extractor.energy[0].weight.clone()
    model.learn(2 * model.n_steps)
    assert logged(model)["step_fraction"] > 0
    assert not before.equal(model.policy.features_extractor.energy[0].weight)


def test_complex_parameters_are_refused():
    class Rotates(BaseFeaturesExtractor):
        def __init__(self, space):
            super().__init__(space, 2)
            self.layer = nn.Linear(space.shape[0], 2, dtype=th.complex64)

        def forward(self, observations):
            return self.layer(observations.to(th.complex64)).abs()

    with pytest.raises(ValueError, match="real numbers"):
        small(policy_kwargs={"features_extractor_class": Rotates, "ortho_init": False})


class Flattens(RolloutBuffer):
    """Flattens ``episode_starts``, too, as recurrent buffers do."""

    def get(self, batch_size=None):
        if not self.generator_ready:
            self.episode_starts = self.swap_and_flatten(self.episode_starts)
        yield from super().get(batch_size)


def test_a_buffer_that_flattens_everything_has_as_many_trajectories():
    counted = [small(n_envs=3, rollout_buffer_class=buffer) for buffer in (RolloutBuffer, Flattens)]
    for model in counted:
        model.learn(2 * 3 * model.n_steps)
    assert logged(counted[0])["n_trajectories"] == logged(counted[1])["n_trajectories"] >= 3


def tensors_of(shape):
    gc.collect()
    return sum(issubclass(type(found), th.Tensor) and found.shape == shape for found in gc.get_objects())


@pytest.mark.parametrize("fast", [True, False])
def test_an_update_leaves_no_tensors_behind(fast):
    """A tensor that autograd keeps in a cycle is never freed."""
    model = small(n_steps=47, batch_size=47)
    if not fast:
        model.policy.register_forward_hook(lambda *args: None)
    model.learn(47)
    shape = (47, *model.observation_space.shape)
    before = tensors_of(shape)
    model.learn(3 * 47, reset_num_timesteps=False)
    assert tensors_of(shape) == before


class Lookup(BaseFeaturesExtractor):
    """Takes categories from 1 to 5."""

    def __init__(self, observation_space):
        super().__init__(observation_space, features_dim=8)
        self.table = nn.Embedding(5, 8)

    def forward(self, observations):
        return self.table(observations[:, 0].long() - 1)


@pytest.mark.parametrize("cls", [UATRPO, MatchedTRPO])
@pytest.mark.parametrize("as_dict", [True, False])
def test_a_network_need_not_take_zeros(cls, as_dict):
    space = spaces.Box(1.0, 5.0, (1,), np.float32)
    kwargs = {"features_extractor_class": Lookup}
    if as_dict:

        class Entry(Lookup):
            def forward(self, observations):
                return super().forward(observations["category"])

        space, kwargs = spaces.Dict({"category": space}), {"features_extractor_class": Entry}
    policy = "MultiInputPolicy" if as_dict else "MlpPolicy"
    env = NoiseEnv(ACTION_SPACES["box"], space)
    assert cls(policy, env, n_steps=16, batch_size=16, policy_kwargs=kwargs, device="cpu").learn(32)._n_updates == 2


class OnceOnly(BaseFeaturesExtractor):
    """Its backward pass records no gradients, so it has no derivative of its own."""

    class Sine(th.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x.sin()

        @staticmethod
        def backward(ctx, gradient):
            (x,) = ctx.saved_tensors
            with th.no_grad():
                return x.cos() * gradient

    def __init__(self, observation_space):
        super().__init__(observation_space, features_dim=4)
        self.linear = nn.Linear(observation_space.shape[0], 4)

    def forward(self, observations):
        return self.Sine.apply(self.linear(observations))


@pytest.mark.parametrize("cls", [UATRPO, MatchedTRPO])
def test_a_warning_names_what_the_trust_region_misses(cls):
    with pytest.warns(UserWarning, match=r"The trust region misses features_extractor.linear.weight.*twice there"):
        make_model(cls, "box", policy_kwargs={"features_extractor_class": OnceOnly})


class Dueling(BaseFeaturesExtractor):
    """Its first bias, and with a shared one after it every logit's, change nothing but rounding errors."""

    def __init__(self, observation_space):
        super().__init__(observation_space, features_dim=8)
        self.linear, self.norm = nn.Linear(observation_space.shape[0], 8), nn.LayerNorm(8, elementwise_affine=False)
        self.shift = nn.Parameter(th.zeros(1))

    def forward(self, observations):
        return self.norm(self.linear(observations) + self.shift)


class OwnAttention(BaseFeaturesExtractor):
    """The bias of the keys cancels in the softmax."""

    def __init__(self, observation_space):
        super().__init__(observation_space, features_dim=4)
        self.q, self.k, self.v = (nn.Linear(1, 4) for _ in range(3))

    def forward(self, observations):
        tokens = observations[:, :, None]
        weights = (self.q(tokens) @ self.k(tokens).transpose(1, 2)).softmax(dim=-1)
        return (weights @ self.v(tokens)).mean(dim=1)


@pytest.mark.parametrize("cls", [UATRPO, MatchedTRPO])
@pytest.mark.parametrize("extractor", [Dueling, OwnAttention])
def test_parameters_that_change_nothing_are_not_missed(extractor, cls):
    # a warning is an error in the tests
    model = make_model(cls, "discrete", double=False, policy_kwargs={"features_extractor_class": extractor})
    assert logged(model.learn(model.n_steps))["step_fraction"] > 0


@pytest.mark.parametrize("context", [th.no_grad, th.inference_mode])
def test_learning_without_gradients_is_an_error(context):
    model = small()
    before = actor_vector(model)
    with context(), pytest.raises(RuntimeError, match="needs gradients"):
        model.learn(model.n_steps)
    np.testing.assert_array_equal(actor_vector(model), before)


class NoAdvantages(RolloutBuffer):
    def _get_samples(self, batch_inds, env=None):
        samples = super()._get_samples(batch_inds, env)
        return samples._replace(advantages=th.zeros_like(samples.advantages))


class NoAdvantagesEither(RolloutBuffer):
    def get(self, batch_size=None):
        for samples in super().get(batch_size):
            yield samples._replace(advantages=th.zeros_like(samples.advantages))


@pytest.mark.parametrize("buffer", [NoAdvantages, NoAdvantagesEither])
def test_a_buffer_with_samples_of_its_own_is_honoured_by_the_actor(buffer):
    model = small(rollout_buffer_class=buffer, n_envs=2)
    collect(model)
    with pytest.warns(UserWarning, match="the update direction is zero"):
        model.train()


class PlainOverride(RolloutBuffer):
    def _get_samples(self, batch_inds, env=None):
        return super()._get_samples(batch_inds, env)


def test_a_buffer_whose_samples_are_the_usual_ones_changes_nothing():
    models = [small(rollout_buffer_class=buffer, n_envs=2) for buffer in (RolloutBuffer, PlainOverride)]
    for model in models:
        model.set_random_seed(0)
        model.learn(3 * 96)
    # the gradients of the second critic come from autograd, which may round differently
    np.testing.assert_allclose(*map(actor_vector, models), rtol=0, atol=1e-5)


def test_a_half_full_buffer_is_refused_as_ppo_refuses_it():
    model = small()
    ppo = PPO("MlpPolicy", model.env, n_steps=48, batch_size=16, device="cpu")
    for each in (model, ppo):
        each.learn(48, callback=lambda locals_, globals_: locals_["n_steps"] < 20)
        each._n_updates = 0
        with pytest.raises(AssertionError):
            each.train()
    assert model._n_updates == 0


@pytest.fixture(scope="module")
def fake_zoo(tmp_path_factory) -> Path:
    """A package called rl_zoo3, in a folder and in an archive."""
    folder = tmp_path_factory.mktemp("zoo")
    package = folder / "plain" / "rl_zoo3"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "utils.py").write_text("ALGOS = {}\n")
    (package / "utils_hidden.py").write_text("ALGOS = {}\n")
    (package / "other.py").write_text("ALGOS = {}\n")
    with zipfile.ZipFile(folder / "zoo.zip", "w") as archive:
        for path in package.iterdir():
            archive.write(path, f"rl_zoo3/{path.name}")
    return folder


ANOTHER_FINDER = """
import importlib.util
class Finder:
    def find_spec(self, name, path=None, target=None):
        if name.split('.')[0] == 'rl_zoo3':
            tail = name.split('.')[1:] or ['__init__']
            return importlib.util.spec_from_file_location(
                name, PLACE + '/plain/rl_zoo3/' + tail[0] + ('.py' if tail == ['__init__'] else '_hidden.py'),
                submodule_search_locations=[] if tail == ['__init__'] else None)
sys.meta_path.insert(1, Finder())
"""


KNOWN = "assert 'uatrpo' in rl_zoo3.utils.ALGOS, rl_zoo3.utils.ALGOS\n"


HOOKS = {
    "from an archive": (
        "sys.path.insert(0, PLACE + '/zoo.zip')\nimport rl_zoo3.utils, rl_zoo3.other\n"
        + KNOWN
        + "assert 'exec_module' not in vars(rl_zoo3.other.__spec__.loader)\n"
        "assert rl_zoo3.utils.__loader__ is rl_zoo3.utils.__spec__.loader is not None\n"
        "assert type(rl_zoo3.utils.__loader__) is type(rl_zoo3.other.__loader__)\n"
    ),
    "behind another finder": ANOTHER_FINDER
    + "import rl_zoo3\nrl_zoo3.__path__ = []\nimport rl_zoo3.utils\n"
    + KNOWN
    + "assert rl_zoo3.utils.__file__.endswith('utils_hidden.py')\n",
    "pickled specs": (
        "sys.path.insert(0, PLACE + '/plain')\nimport rl_zoo3\nimport importlib.util, pickle\n"
        "pickle.loads(pickle.dumps(importlib.util.find_spec('rl_zoo3.utils')))\n"
        "import rl_zoo3.utils\n"
        "pickle.loads(pickle.dumps(rl_zoo3.utils.__spec__))\n" + KNOWN
    ),
    "warnings are errors": (
        "import warnings\nwarnings.simplefilter('error')\nsys.modules['sb3_uatrpo'] = None\n"
        "sys.path.insert(0, PLACE + '/plain')\nimport rl_zoo3.utils\nassert rl_zoo3.utils.ALGOS == {}\n"
    ),
    "reloaded": (
        "sys.path.insert(0, PLACE + '/plain')\nimport importlib, rl_zoo3.utils\n"
        "importlib.reload(rl_zoo3.utils)\n"
        "import inspect\nassert 'ALGOS' in inspect.getsource(rl_zoo3.utils)\n" + KNOWN
    ),
}


@pytest.mark.parametrize("case", HOOKS)
def test_the_start_up_hook_harms_nobody(case, fake_zoo):
    code = f"import sys\nPLACE = {str(fake_zoo)!r}\n"
    # as the path file would, but here without it
    code += "sys.meta_path = [f for f in sys.meta_path if type(f).__module__ != 'sb3_uatrpo_zoo_hook']\n"
    code += "sys.modules.pop('sb3_uatrpo_zoo_hook', None)\nimport sb3_uatrpo_zoo_hook\n"
    code += HOOKS[case] + "print('fine')\n"
    ended = run_code(code, cwd=ROOT)
    assert ended.stdout == "fine\n", ended.stderr


def test_another_beta_takes_effect():
    model = small()
    model.learn(48)
    model.ema_beta = 0.5
    model.learn(48)
    assert model.sketch.ema_weight.item() == pytest.approx(0.1 + 0.5 * 0.9)
    model.ema_beta = 0.0
    model.learn(48)
    assert model.sketch.y_fisher.numel() == 0
    model.ema_beta = 0.9
    model.learn(48)
    assert model.sketch.ema_weight.item() == pytest.approx(0.1)
    assert model.sketch.y_fisher.any()


def doubled(values: th.Tensor) -> th.Tensor:
    return 2.0 * values


class Reads(cb.BaseCallback):
    """Reads in one way at every third step."""

    def __init__(self, read):
        super().__init__()
        self.read, self.seen = read, []

    def _on_step(self) -> bool:
        if self.n_calls % 3 == 0:
            self.seen.append(np.asarray(self.read(self.locals)).copy())
        return True


READS = {
    "tensor": lambda found: th.tensor(found["values"]),
    "scripted": lambda found: th.jit.script(doubled)(found["values"]),
    "in place": lambda found: found["values"].add_(1.0),
    "log_probs in place": lambda found: found["log_probs"].mul_(2.0),
    "copied": lambda found: dict(found)["values"],
    "starred": lambda found: (lambda values, **rest: values)(**found),
    "get": lambda found: found.get("values"),
    "items": lambda found: dict(list(found.items()))["log_probs"],
    "merged": lambda found: (found | {})["values"],
    "merged, on the right": lambda found: ({} | found)["values"],
    "data pointer": lambda found: [found["values"].data_ptr() != 0],
    "popped": lambda found: found.pop("values"),
    "deep copy": lambda found: copy.deepcopy({"a": found["values"]})["a"],
    "formatted": lambda found: [float(str(found["values"].flatten()[0].item()))],
}


@pytest.mark.parametrize("way", READS)
def test_callbacks_may_read_and_write_in_any_way(way):
    callbacks = []

    def make_callback():
        callbacks.append(Reads(READS[way]))
        return callbacks[-1]

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="To copy construct from a tensor")
        warnings.filterwarnings("ignore", message=".*torch.jit.script")
        as_sb3(make_callback=make_callback)
    ours, theirs = (callback.seen for callback in callbacks)
    assert len(ours) == 16
    for one, other in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)


def test_parameters_of_a_model_with_other_frozen_layers_restart_the_sketch():
    models = [small(policy_kwargs={"net_arch": [4, 4, 4]}) for _ in range(2)]
    for model, i in zip(models, (2, 4), strict=True):
        model.policy.mlp_extractor.policy_net[i].weight.requires_grad_(False)
        model.learn(48)
    models[1].set_parameters(models[0].get_parameters())
    with pytest.warns(UserWarning, match="starts afresh"):
        models[1].learn(48)
    assert models[1].sketch.ema_weight.item() == pytest.approx(0.1)


def test_the_mode_of_a_new_policy_is_that_of_stable_baselines3():
    model = small()
    assert model.policy.training == PPO("MlpPolicy", model.env, device="cpu").policy.training


def test_verbose_may_be_true(capsys):
    UATRPO("MlpPolicy", "CartPole-v1", verbose=True, device="cpu")
    assert "The sketch of" in capsys.readouterr().out


class Shapes(cb.BaseCallback):
    def __init__(self):
        super().__init__()
        self.seen = []

    def note(self):
        self.seen.append({key: self.locals[key].shape for key in ("actions", "clipped_actions", "values", "log_probs")})

    def _on_step(self) -> bool:
        self.note()
        return True

    def _on_rollout_end(self) -> None:
        self.note()


@pytest.mark.parametrize("action_space", ACTION_SPACES)
def test_shapes_of_what_callbacks_see(action_space):
    seen = []
    for fast in (True, False):
        shapes = Shapes()
        filled(fast, callback=shapes, action_space=action_space)
        seen.append(shapes.seen)
    assert seen[0] == seen[1]


class OneHotEnv(NoiseEnv):
    """Observations are rows of the identity, in a space that does not say so."""

    def __init__(self):
        super().__init__(ACTION_SPACES["box"], spaces.Box(0.0, 1.0, (4,), np.float32))

    def one_hot(self):
        return np.eye(4, dtype=np.float32)[self.np_random.integers(4)]

    def reset(self, **kwargs):
        super().reset(**kwargs)
        return self.one_hot(), {}

    def step(self, action):
        _, *rest = super().step(action)
        return self.one_hot(), *rest


class TakesOneHot(BaseFeaturesExtractor):
    def __init__(self, observation_space):
        super().__init__(observation_space, features_dim=4)
        self.linear = nn.Linear(4, 4)

    def forward(self, observations):
        if not bool((observations.sum(dim=1) == 1.0).all()):
            raise ValueError("not one-hot")
        return self.linear(observations)


@pytest.mark.parametrize("cls", [UATRPO, MatchedTRPO])
def test_a_network_may_refuse_observations_that_the_task_never_shows(cls, capsys):
    kwargs = {"n_projections": 8} if cls is UATRPO else {}
    policy_kwargs = {"net_arch": [4], "features_extractor_class": TakesOneHot}
    model = cls("MlpPolicy", OneHotEnv(), n_steps=48, batch_size=16, policy_kwargs=policy_kwargs, verbose=1, **kwargs)
    assert "The sketch of" not in capsys.readouterr().out
    before = actor_vector(model)
    model.learn(2 * 48)
    assert not np.array_equal(actor_vector(model), before)


class HoldsALock(Exception):
    def __init__(self):
        super().__init__("not one-hot")
        self.lock = threading.Lock()


def test_what_a_network_raised_is_not_saved(tmp_path):
    class Raises(TakesOneHot):
        def forward(self, observations):
            try:
                return super().forward(observations)
            except ValueError as error:
                raise HoldsALock from error

    policy_kwargs = {"net_arch": [4], "features_extractor_class": Raises}
    model = MatchedTRPO("MlpPolicy", OneHotEnv(), n_steps=48, batch_size=16, policy_kwargs=policy_kwargs)
    assert isinstance(model._first_error, HoldsALock)
    model.save(tmp_path / "model", exclude=["policy_kwargs"])


class Precise(BaseFeaturesExtractor):
    """Computes in float64, in a policy of float32."""

    def __init__(self, observation_space):
        super().__init__(observation_space, features_dim=4)
        self.linear = nn.Linear(3, 4).double()

    def forward(self, observations):
        return self.linear(observations.double()).float()


@pytest.mark.parametrize("cls", [UATRPO, MatchedTRPO])
def test_parameters_may_have_several_types(cls):
    kwargs = {"n_projections": 8} if cls is UATRPO else {}
    policy_kwargs = {"net_arch": [4], "features_extractor_class": Precise, "share_features_extractor": False}
    model = make_model(cls, "box", double=False, policy_kwargs=policy_kwargs, **kwargs)
    before = model.policy.pi_features_extractor.linear.weight.detach().clone()
    model.learn(2 * model.n_steps)
    after = model.policy.pi_features_extractor.linear.weight
    assert after.dtype == th.float64
    assert not th.equal(after, before)


class ToDouble(FlattenExtractor):
    def forward(self, observations):
        return super().forward(observations).double()


@pytest.mark.parametrize("cls", [UATRPO, MatchedTRPO])
@pytest.mark.parametrize("hooked", [False, True])
@pytest.mark.parametrize("with_log_std", [False, True])
def test_a_network_may_become_more_precise_after_construction(cls, with_log_std, hooked, tmp_path):
    kwargs = {"n_projections": 8} if cls is UATRPO else {}
    policy_kwargs = {"net_arch": [4], "features_extractor_class": ToDouble}

    def to_double(model):
        if with_log_std:
            model.policy.double()
        else:
            for part in (model.policy.mlp_extractor, model.policy.action_net, model.policy.value_net):
                part.double()
        if hooked:
            model.policy.log_std.register_hook(lambda gradient: gradient)

    model = make_model(cls, "box", double=False, policy_kwargs=policy_kwargs, **kwargs)
    to_double(model)
    model.learn(2 * 48)
    assert logged(model)["kl_ratio"] == pytest.approx(1.0, abs=0.3)
    # after loading too, the next update is the same to the last bit
    model.save(tmp_path / "model")
    loaded = cls.load(tmp_path / "model", model.env, device="cpu")
    to_double(loaded)
    loaded.set_parameters(tmp_path / "model", device="cpu")
    collect(model)
    loaded.rollout_buffer = copy.deepcopy(model.rollout_buffer)
    loaded.set_logger(model.logger)
    for each in (model, loaded):
        th.manual_seed(0)
        np.random.seed(0)
        each.train()
    assert np.array_equal(actor_vector(model), actor_vector(loaded))


class Counts(FlattenExtractor):
    """Counts the observations that it sees, in evaluation mode too."""

    def __init__(self, observation_space):
        super().__init__(observation_space)
        self.register_buffer("seen", th.zeros(1))
        self.register_buffer("times", th.zeros(1))
        self.register_buffer("last", th.zeros(0))

    def forward(self, observations):
        self.seen += len(observations)
        self.times = self.times + 1
        self.last = observations.detach()
        return super().forward(observations)


@pytest.mark.parametrize("cls", [UATRPO, MatchedTRPO])
def test_construction_leaves_no_trace_in_the_networks_statistics(cls):
    kwargs = {"n_projections": 8} if cls is UATRPO else {}
    model = make_model(cls, "box", policy_kwargs={"net_arch": [4], "features_extractor_class": Counts}, **kwargs)
    extractor = model.policy.features_extractor
    assert extractor.seen == extractor.times == 0
    assert extractor.last.shape == (0,)


@pytest.mark.parametrize("cls", [UATRPO, MatchedTRPO])
def test_a_network_that_cannot_be_differentiated_twice_is_refused(cls):
    with pytest.raises(ValueError, match=r"^policy: its network must be differentiable twice, but torch says: \w"):
        make_model(cls, "box", policy_kwargs={"activation_fn": nn.Hardsigmoid})


class LastIsOnceOnly(ActorCriticPolicy):
    """No parameter of the actor can be differentiated twice, since none comes after the last operation."""

    def _build(self, lr_schedule):
        super()._build(lr_schedule)
        self.action_net = nn.Sequential(self.action_net, _Sine())


class _Sine(nn.Module):
    def forward(self, logits):
        return OnceOnly.Sine.apply(logits)


@pytest.mark.parametrize("cls", [UATRPO, MatchedTRPO])
def test_a_network_in_which_no_parameter_can_be_differentiated_twice_is_refused(cls):
    with pytest.raises(ValueError, match=r"^policy: its network must be differentiable twice, but no parameter"):
        make_model(cls, "discrete", policy=LastIsOnceOnly)


class ReentrantCheckpoint(FlattenExtractor):
    def __init__(self, observation_space):
        super().__init__(observation_space)
        self.layer = nn.Linear(self.features_dim, self.features_dim)

    def forward(self, observations):
        given = super().forward(observations).requires_grad_()
        return checkpoint(self.layer, given, use_reentrant=self.is_reentrant)

    is_reentrant = True


class Checkpoint(ReentrantCheckpoint):
    is_reentrant = False


@pytest.mark.parametrize("cls", [UATRPO, MatchedTRPO])
def test_a_reentrant_checkpoint_is_refused(cls):
    """Derivatives with respect to given parameters would not reach its own."""
    with pytest.raises(ValueError, match=r"^policy: .*torch.utils.checkpoint with use_reentrant=False"):
        make_model(cls, "box", policy_kwargs={"features_extractor_class": ReentrantCheckpoint})
    model = make_model(cls, "box", policy_kwargs={"features_extractor_class": Checkpoint})
    before = model.policy.features_extractor.layer.weight.clone()
    model.learn(model.n_steps)
    assert not th.equal(model.policy.features_extractor.layer.weight, before)


class SeesSomeTokens(FlattenExtractor):
    """Attention of the first observation to those that are positive: sometimes to none."""

    def __init__(self, observation_space):
        super().__init__(observation_space)
        self.embed = nn.Linear(1, self.features_dim)
        self.attention = nn.MultiheadAttention(self.features_dim, 1, batch_first=True)

    def forward(self, observations):
        tokens = self.embed(observations[:, :, None])
        hidden = observations < 0
        return self.attention(tokens[:, :1], tokens, tokens, key_padding_mask=hidden, need_weights=False)[0].squeeze(1)


@pytest.mark.parametrize("cls", [UATRPO, MatchedTRPO])
def test_attention_may_see_nothing(cls):
    kwargs = {"policy_kwargs": {"features_extractor_class": SeesSomeTokens}}
    model = make_model(cls, "box", **kwargs)
    before = model.policy.action_net.weight.clone()
    model.learn(model.n_steps)
    hidden = model.rollout_buffer.observations < 0
    assert hidden.all(-1).any()
    assert not hidden.all(-1).all()
    assert not th.equal(model.policy.action_net.weight, before)


class BuildsItsDistribution(ActorCriticPolicy):
    def _get_action_dist_from_latent(self, latent_pi):
        self.action_dist = DiagGaussianDistribution(2).proba_distribution(self.action_net(latent_pi), self.log_std)
        return self.action_dist


@pytest.mark.parametrize("policy", ["MlpPolicy", BuildsItsDistribution])
def test_a_trial_step_beyond_floats_is_rejected(policy):
    model = make_model(UATRPO, "box", policy=policy, double=False, n_projections=8, trust_region_delta=1e12)
    before = copy.deepcopy(model.policy.action_net.state_dict())
    with pytest.warns(UserWarning, match="the KL divergence of the full step is not finite"):
        model.learn(model.n_steps)
    assert all(th.equal(value, before[name]) for name, value in model.policy.action_net.state_dict().items())


class HasABudget(cb.BaseCallback):
    budget = 3

    def _on_training_start(self):
        assert self.locals["callback"] is self

    def _on_step(self):
        assert self.locals["callback"] is self
        assert dict(self.locals)["callback"] is self
        return True

    def _on_rollout_end(self):
        assert self.locals["callback"] is self


class ReadsTheBudget(UATRPO):
    def collect_rollouts(self, env, callback, *args, **kwargs):
        assert callback.budget == 3
        with pytest.raises(AttributeError, match="no attribute 'overdraft'"):
            _ = callback.overdraft
        callback.spent = self.num_timesteps
        assert callback.verbose == 2
        return super().collect_rollouts(env, callback, *args, **kwargs)


@pytest.mark.parametrize("fast", [True, False])
def test_callbacks_find_themselves_in_their_locals(fast):
    model = make_model(ReadsTheBudget, "box", double=False, n_projections=8, fast_rollouts=fast)
    callback = HasABudget(verbose=2)
    model.learn(2 * model.n_steps, callback=callback)
    assert callback.spent == model.n_steps
    assert model.num_timesteps == 2 * model.n_steps


def test_the_standard_error_of_the_gradient_does_not_depend_on_hooks():
    def gradient(noise: float, factor: float):
        model = small(adversarial_noise=noise)
        collect(model)
        model.policy.action_net.weight.register_hook(lambda grad: factor * grad)
        found = []
        find = model._find_direction
        model._find_direction = lambda estimates: (found.append(estimates.gradient.clone()), find(estimates))[1]
        model.train()
        return found[0]

    moved = [(gradient(0.0, factor) - gradient(1.0, factor)).abs() for factor in (1.0, 10.0)]
    assert moved[0].any()
    th.testing.assert_close(moved[1], moved[0], rtol=1e-4, atol=1e-5)


def zoo_callbacks(tmp_path) -> list[cb.BaseCallback]:
    """What RL Zoo attaches."""
    from stable_baselines3.common.vec_env import DummyVecEnv

    eval_env = DummyVecEnv([lambda: NoiseEnv(ACTION_SPACES["box"])])
    return [
        cb.EvalCallback(eval_env, eval_freq=40, n_eval_episodes=1, verbose=0, warn=False),
        cb.CheckpointCallback(40, str(tmp_path)),
    ]


def test_everything_that_was_collected_is_the_same_with_usual_callbacks(tmp_path):
    as_sb3(make_callback=lambda: zoo_callbacks(tmp_path))


@pytest.mark.parametrize("action_space", ACTION_SPACES)
def test_settings_of_numpy_and_torch_change_nothing(action_space):
    plain = filled(True, action_space=action_space)
    try:
        with np.errstate(all="raise"):
            changed = filled(True, lambda policy: th.set_default_dtype(th.float64), action_space=action_space)
    finally:
        th.set_default_dtype(th.float32)
    np.testing.assert_array_equal(changed.rollout_buffer.actions, plain.rollout_buffer.actions)


class Tiny(gym.ObservationWrapper):
    """Observations in float64 that float32 cannot tell from zero, or only just."""

    observation_space = spaces.Box(-np.inf, np.inf, (3,), np.float64)

    def observation(self, observation):
        return np.full(3, 1.0) * [1e-40, 1e-25, 1e-300]


@pytest.mark.parametrize("fast", [True, False])
def test_numbers_too_small_for_float32_raise_nothing(fast):
    policy_kwargs = {"activation_fn": nn.Tanh}
    env = DummyVecEnv([lambda: Tiny(gym.make("Pendulum-v1"))])
    with np.errstate(all="raise"):
        model = UATRPO(
            "MlpPolicy", env, n_steps=50, n_projections=8, fast_rollouts=fast, policy_kwargs=policy_kwargs, device="cpu"
        )
        model.learn(100)
    assert model.num_timesteps == 100
