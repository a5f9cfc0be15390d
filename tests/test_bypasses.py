"""
Ways around the fast paths: what they do not compute is noticed, however unusual the way in which it came about.

The measure is Stable-Baselines3's own rollout, or autograd.
"""

import copy
from unittest import mock

import numpy as np
import pytest
import torch as th
from gymnasium import spaces
from stable_baselines3.common import buffers, distributions, policies
from stable_baselines3.common import callbacks as cb
from stable_baselines3.common.buffers import RolloutBuffer
from stable_baselines3.common.distributions import CategoricalDistribution, DiagGaussianDistribution
from stable_baselines3.common.policies import ActorCriticPolicy, BaseModel, MultiInputActorCriticPolicy
from stable_baselines3.common.torch_layers import CombinedExtractor, FlattenExtractor, MlpExtractor
from stable_baselines3.common.vec_env import DummyVecEnv, VecEnvWrapper, VecNormalize
from torch import nn
from torch.nn.modules import module as torch_module

from sb3_uatrpo import UATRPO, MatchedTRPO, critic
from sb3_uatrpo.critic import fit_values
from sb3_uatrpo.plain_mlp import StandardMLP
from tests import helpers
from tests.helpers import (
    ACTION_SPACES,
    NoiseEnv,
    actor_vector,
    collect,
    count_fast_steps,
    logged,
    make_model,
    spread_out,
)
from tests.reference import DoublePolicy
from tests.test_rollouts import assert_same_buffers
from tests.test_update import check_updates
from tests.test_user_additions import as_sb3, filled, small


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


class AtTheStart(At):
    """Makes one change, before the first step."""

    def _on_rollout_start(self) -> None:
        with th.no_grad():
            self.change(self.model, self.locals)

    def _on_step(self) -> bool:
        return True


# ----------------------------------------------------------------------------------------- changes in mid-rollout


def another_policy(model, _):
    model.policy = copy.deepcopy(model.policy)
    model.policy.action_net.bias.fill_(2.0)
    model.policy.value_net.bias.fill_(3.0)


def patched_policy(model, _):
    forward = model.policy.forward

    def halved(obs, deterministic=False):
        actions, values, log_probs = forward(obs, deterministic)
        return 0.5 * actions, values + 1.0, log_probs

    model.policy.forward = halved


def patched_layer(model, _):
    layer = model.policy.action_net
    forward = layer.forward
    layer.forward = lambda x: forward(x) + 1.0


def appended_layer(model, _):
    model.policy.mlp_extractor.policy_net.append(nn.ReLU())


class Halved(ActorCriticPolicy):
    def forward(self, obs, deterministic=False):
        actions, values, log_probs = super().forward(obs, deterministic)
        return 0.5 * actions, values + 1.0, log_probs


def another_class(model, _):
    model.policy.__class__ = Halved


def hook_on_the_extractor(model, _):
    model.policy.features_extractor.register_forward_hook(lambda module, inputs, output: 3.0 * output)


class Tripled(FlattenExtractor):
    def forward(self, observations):
        return 3.0 * super().forward(observations)


def another_extractor(model, _):
    policy = model.policy
    extractor = Tripled(policy.observation_space)
    policy.features_extractor = policy.pi_features_extractor = policy.vf_features_extractor = extractor


def patched_sample(model, _):
    distribution = model.policy.action_dist
    sample = distribution.sample
    distribution.sample = lambda: 0.1 * sample()


def replaced_latents(model, _):
    extractor = model.policy.mlp_extractor
    actor, critic = extractor.forward_actor, extractor.forward_critic
    extractor.forward_actor = lambda features: 0.1 * actor(features) + 0.3
    extractor.forward_critic = lambda features: 0.1 * critic(features) + 0.3


class DoubledLinear(nn.Linear):
    def forward(self, inputs):
        return 2.0 * super().forward(inputs)


def layer_of_another_class(model, _):
    model.policy.action_net.__class__ = model.policy.value_net.__class__ = DoubledLinear


class HalvedGaussian(DiagGaussianDistribution):
    def sample(self):
        return 0.5 * super().sample()


def distribution_of_another_class(model, _):
    model.policy.action_dist.__class__ = HalvedGaussian


def steeper(model, _):
    for module in model.policy.modules():
        if isinstance(module, nn.LeakyReLU):
            module.negative_slope = 0.9


@pytest.mark.parametrize(
    "change",
    [
        another_policy,
        patched_policy,
        patched_layer,
        appended_layer,
        another_class,
        hook_on_the_extractor,
        another_extractor,
        patched_sample,
        replaced_latents,
        layer_of_another_class,
        distribution_of_another_class,
        steeper,
    ],
)
@pytest.mark.parametrize("at", ["a step", "the start"])
def test_whatever_changes_in_mid_rollout(change, at):
    activation = nn.LeakyReLU if change is steeper else nn.Tanh
    as_sb3(
        make_callback=lambda: At(change) if at == "a step" else AtTheStart(change),
        policy_kwargs={"net_arch": [4], "activation_fn": activation},
    )


@pytest.mark.parametrize("kind", [MlpExtractor, nn.Tanh, ActorCriticPolicy])
def test_a_class_may_be_patched_in_mid_rollout(kind, monkeypatch):
    name = {MlpExtractor: "forward_actor", nn.Tanh: "forward", ActorCriticPolicy: "extract_features"}[kind]
    own = getattr(kind, name)

    def patch(model, _):
        # shifts what is computed, and keeps one rollout's patch from the next
        monkeypatch.setattr(kind, name, lambda *args: own(*args) + 0.5)

    def rollout(fast):
        with monkeypatch.context() as context:
            context.setattr(kind, name, own)
            return filled(fast, callback=At(patch))

    assert_same_buffers(rollout(True).rollout_buffer, rollout(False).rollout_buffer)


def test_a_weight_that_is_no_parameter_may_be_replaced_in_mid_rollout():
    def plain(policy):
        weight = policy.action_net.weight.detach().clone()
        del policy.action_net.weight
        policy.action_net.weight = weight

    def tripled(model, _):
        model.policy.action_net.weight = 3.0 * model.policy.action_net.weight

    as_sb3(plain, lambda: At(tripled))


def test_add_may_be_replaced_in_its_class_in_mid_rollout(monkeypatch):
    add = RolloutBuffer.add

    def patch(model, _):
        monkeypatch.setattr(RolloutBuffer, "add", lambda self, *args: add(self, *args[:-1], args[-1] + 1.0))

    def rollout(fast):
        with monkeypatch.context() as context:
            context.setattr(RolloutBuffer, "add", add)
            return filled(fast, callback=At(patch))

    assert_same_buffers(rollout(True).rollout_buffer, rollout(False).rollout_buffer)


def test_noise_that_is_annealed_at_the_start_of_a_rollout_does_not_make_it_slow(monkeypatch):
    drawn = count_fast_steps(monkeypatch)
    ours, _ = as_sb3(make_callback=lambda: AtTheStart(lambda model, _: model.policy.log_std.sub_(1.0)))
    assert len(drawn) == ours.n_steps - 1


def test_actions_may_become_squashed_in_mid_rollout():
    def squashed(model, _):
        model.policy._squash_output = True

    as_sb3(make_callback=lambda: At(squashed), action_space="box_matrix")


def test_a_global_hook_in_mid_rollout():
    class Registers(At):
        def _on_training_end(self):
            self.handle.remove()

    def make():
        def register(*_):
            callback.handle = torch_module.register_module_forward_hook(
                lambda module, inputs, output: 3.0 * output if isinstance(module, FlattenExtractor) else None
            )

        callback = Registers(register)
        return callback

    as_sb3(make_callback=make)


def test_a_patch_from_the_start_of_a_rollout_to_its_end():
    class Patches(cb.BaseCallback):
        def _on_rollout_start(self):
            patched_policy(self.model, None)

        def _on_rollout_end(self):
            del self.model.policy.forward

        def _on_step(self):
            return True

    as_sb3(make_callback=Patches)


# ------------------------------------------------------------------------------------- policies that only look plain


def test_a_distribution_may_be_patched():
    def greedy(policy):
        policy.action_dist.sample = policy.action_dist.mode

    def wrapped(policy):
        distribution = policy.action_dist
        log_prob = distribution.log_prob
        distribution.log_prob = lambda actions: log_prob(actions) - 1.0

    for n_envs in (1, 2):
        as_sb3(wrapped, n_envs=n_envs)
    for action_space in ("box", "discrete", "multi_discrete", "multi_binary"):
        as_sb3(greedy, action_space=action_space)


class Squashed(ActorCriticPolicy):
    """Its actions in [-1, 1] are rescaled to the bounds."""

    squash_output = True


def test_squashed_actions_are_rescaled_for_the_environment():
    seen = {True: [], False: []}

    class Keeps(cb.BaseCallback):
        def _on_step(self):
            seen[self.model.fast_rollouts].append(self.locals["clipped_actions"].copy())
            return True

    as_sb3(make_callback=Keeps, policy=Squashed, action_space="box_matrix")
    np.testing.assert_allclose(seen[True], seen[False], rtol=1e-5)


class WithStd(ActorCriticPolicy):
    """Its standard deviation is not one parameter for each action."""

    def _build(self, lr_schedule):
        super()._build(lr_schedule)
        del self.log_std
        self.make_std()
        self.optimizer = self.optimizer_class(self.parameters(), lr=lr_schedule(1), **self.optimizer_kwargs)


class OneStd(WithStd):
    def make_std(self):
        self.log_std = nn.Parameter(th.zeros(1))


class ScalarStd(WithStd):
    def make_std(self):
        self.log_std = nn.Parameter(th.tensor(-0.5))


class BufferStd(WithStd):
    def make_std(self):
        self.register_buffer("log_std", th.zeros(2))


class ClampedStd(WithStd):
    def make_std(self):
        self.log_std = nn.Parameter(th.zeros(2))
        nn.utils.parametrize.register_parametrization(self, "log_std", nn.Hardtanh(-3.0, 0.5))


@pytest.mark.parametrize("cls", [UATRPO, MatchedTRPO])
@pytest.mark.parametrize("policy", [OneStd, ScalarStd, BufferStd, ClampedStd])
def test_standard_deviations_of_other_kinds_are_trained(policy, cls):
    kwargs = {"n_projections": 8} if cls is UATRPO else {}
    models = []
    for fast in (True, False):
        model = make_model(cls, "box", policy=policy, double=False, **kwargs)
        plain = StandardMLP.recognise if fast else lambda policy: None
        with mock.patch.object(StandardMLP, "recognise", staticmethod(plain)):
            models.append(model.learn(2 * model.n_steps))
    ours, general = (nn.utils.parameters_to_vector(model.policy.parameters()) for model in models)
    th.testing.assert_close(ours, general)


def test_a_standard_deviation_in_a_buffer_may_be_annealed_in_mid_rollout():
    def anneal(model, _):
        model.policy.log_std = th.full_like(model.policy.log_std, -2.0)

    as_sb3(make_callback=lambda: At(anneal), policy=BufferStd)


def test_methods_may_be_replaced_in_the_classes_of_stable_baselines3():
    """What the replacement does need not show in a comparison of deterministic actions."""
    forward, add = ActorCriticPolicy.forward, RolloutBuffer.add
    calls = []

    def explores(self, obs, deterministic=False):
        actions, values, log_probs = forward(self, obs, deterministic)
        return actions if deterministic else 0.0 * actions, values, log_probs

    def counts(self, *args):
        calls.append(1)
        add(self, *args)

    with mock.patch.object(ActorCriticPolicy, "forward", explores):
        as_sb3()
    with mock.patch.object(RolloutBuffer, "add", counts):
        ours, _ = as_sb3()
    assert len(calls) == 2 * ours.n_steps


class StartsAtZero(NoiseEnv):
    def reset(self, **kwargs):
        observation, info = super().reset(**kwargs)
        return np.zeros_like(observation), info


@pytest.mark.parametrize(
    ("kind", "name", "bound"),
    [
        (FlattenExtractor, "forward", 0.1),
        (BaseModel, "extract_features", 0.1),
        (nn.Linear, "forward", 1.0),
        (nn.Tanh, "forward", 0.5),
        (MlpExtractor, "forward_actor", 0.1),
        (MlpExtractor, "forward_critic", 0.1),
        (policies, "preprocess_obs", 0.1),
    ],
)
def test_a_class_patched_before_the_rollout_need_not_show_at_its_first_observation(kind, name, bound, monkeypatch):
    own = getattr(kind, name)
    monkeypatch.setattr(helpers, "NoiseEnv", StartsAtZero)
    monkeypatch.setattr(kind, name, lambda *args, **kwargs: own(*args, **kwargs).clamp(-bound, bound))
    as_sb3()


@pytest.mark.parametrize("place", [distributions, th.distributions], ids=["sb3", "torch"])
@pytest.mark.parametrize(
    ("action_space", "name", "method"),
    [
        ("box", "Normal", "rsample"),
        ("discrete", "Categorical", "sample"),
        ("multi_discrete", "Categorical", "sample"),
        ("multi_binary", "Bernoulli", "sample"),
    ],
)
def test_another_sampler_draws_the_actions(place, action_space, name, method, monkeypatch):
    """The mode, which the comparison at the start of a rollout looks at, is as before."""
    kind = getattr(th.distributions, name)
    own = getattr(kind, method)

    def first_drawn(self, *args):
        return th.zeros_like(own(self, *args))

    if place is distributions:
        monkeypatch.setattr(distributions, name, type(name, (kind,), {method: first_drawn}))
    else:
        monkeypatch.setattr(kind, method, first_drawn)
    ours, _ = as_sb3(action_space=action_space)
    assert not ours.rollout_buffer.actions.any()


class Clamped(FlattenExtractor):
    def forward(self, observations):
        return super().forward(observations).clamp(-0.1, 0.1)


@pytest.mark.parametrize("share", [True, False])
@pytest.mark.parametrize("name", ["features_extractor", "pi_features_extractor", "vf_features_extractor"])
def test_another_features_extractor_is_used(name, share, monkeypatch):
    monkeypatch.setattr(helpers, "NoiseEnv", StartsAtZero)
    as_sb3(
        lambda policy: setattr(policy, name, Clamped(policy.observation_space)),
        policy_kwargs={"net_arch": [4], "share_features_extractor": share},
    )


class SeesMore(MultiInputActorCriticPolicy):
    """The actor sees one key of the observation, the critic another."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, share_features_extractor=False, **kwargs)

    def _build_mlp_extractor(self):
        for name, key in (("pi_features_extractor", "noisy"), ("vf_features_extractor", "exact")):
            setattr(self, name, CombinedExtractor(spaces.Dict({key: self.observation_space[key]})))
        self.features_extractor = self.pi_features_extractor
        self.features_dim = self.features_extractor.features_dim
        super()._build_mlp_extractor()
        width = self.vf_features_extractor.features_dim
        self.mlp_extractor.value_net = MlpExtractor(width, self.net_arch, self.activation_fn, "cpu").value_net


class StartsExactly(NoiseEnv):
    """At the start of an episode, the noisy observation is the exact one, as far as that goes."""

    def reset(self, **kwargs):
        observation, info = super().reset(**kwargs)
        return {**observation, "noisy": observation["exact"][:3].copy()}, info


@pytest.mark.parametrize("cls", [UATRPO, MatchedTRPO])
@pytest.mark.parametrize("width", [3, 5])
def test_actor_and_critic_may_see_different_keys(cls, width, monkeypatch):
    monkeypatch.setattr(helpers, "NoiseEnv", StartsExactly)
    space = spaces.Dict(noisy=spaces.Box(-1.0, 1.0, (3,)), exact=spaces.Box(-1.0, 1.0, (width,)))
    as_sb3(observation_space=space, policy=SeesMore)
    kwargs = {"n_projections": 8} if cls is UATRPO else {}
    model = make_model(cls, "box", double=False, observation_space=space, policy=SeesMore, **kwargs)
    model.learn(2 * 48)
    assert logged(model)["step_fraction"] > 0.0
    assert StandardMLP.recognise(model.policy) is None


@pytest.mark.parametrize("of", ["the object", "the class"])
@pytest.mark.parametrize("cls", [UATRPO, MatchedTRPO])
def test_another_log_probability_is_refused(cls, of, monkeypatch):
    kwargs = {"n_projections": 8} if cls is UATRPO else {}
    model = make_model(cls, "box", double=False, **kwargs)
    collect(model)
    owner = model.policy.action_dist if of == "the object" else DiagGaussianDistribution
    monkeypatch.setattr(owner, "log_prob", lambda *args: th.zeros(len(args[-1])))
    before = actor_vector(model)
    with pytest.raises(ValueError, match=r"^policy: log_prob of DiagGaussianDistribution was replaced; "):
        model.train()
    assert np.array_equal(actor_vector(model), before)


# ------------------------------------------------------------------------------------ what is stored and what is seen


def no_observation(model, _):
    model._last_obs = np.zeros_like(model._last_obs)


def no_obs_tensor(model, local):
    local["obs_tensor"].zero_()


def relabelled(model, local):
    buffer = local["rollout_buffer"]
    if buffer.pos:
        buffer.observations[buffer.pos - 1] = 0.0


def no_actions(model, local):
    local["actions"][:] = 0


@pytest.mark.parametrize("change", [no_observation, no_obs_tensor, relabelled])
def test_values_are_those_of_the_observations_that_the_policy_saw(change):
    as_sb3(make_callback=lambda: At(change, at=None))


def test_another_version_of_add_is_asked_at_each_step(monkeypatch):
    """It comes from the module of Stable-Baselines3's own, as in another version of it."""
    code = """
def add(self, *args, own=RolloutBuffer.add):
    own(self, *args)
    self.rewards[self.pos - 1] *= 2.0
"""
    found = {}
    exec(code, vars(buffers), found)
    found["add"].__qualname__ = "RolloutBuffer.add"
    monkeypatch.setattr(RolloutBuffer, "add", found["add"])
    as_sb3()


def transposed(policy):
    """All weights in column-major order."""
    for module in policy.modules():
        if isinstance(module, nn.Linear):
            module.weight = nn.Parameter(module.weight.detach().T.contiguous().T)


def test_weights_may_lie_in_memory_in_another_order():
    as_sb3(transposed)
    found = []
    for change in (lambda policy: None, transposed):
        model = small()
        change(model.policy)
        # a new weight is not yet one of the optimizer's
        model.policy.optimizer = th.optim.Adam(model.policy.parameters(), lr=1e-3, eps=1e-5)
        model.learn(2 * model.n_steps)
        found.append([param.detach().numpy() for param in model.policy.parameters()])
    assert not model.policy.action_net.weight.is_contiguous()
    for one, other in zip(*found, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("action_space", ACTION_SPACES)
def test_log_probabilities_are_those_of_the_actions_that_were_drawn(action_space):
    as_sb3(make_callback=lambda: At(no_actions, at=None), action_space=action_space)


class WritesIntoItsAction(NoiseEnv):
    def step(self, action):
        result = super().step(action)
        if isinstance(action, np.ndarray):
            action[...] = 0
        return result


@pytest.mark.parametrize("action_space", ["box", "multi_discrete", "multi_binary"])
def test_an_environment_may_write_into_its_action(action_space, monkeypatch):
    monkeypatch.setattr(helpers, "NoiseEnv", WritesIntoItsAction)
    as_sb3(action_space=action_space)


class ReusesItsArray(VecEnvWrapper):
    """Observations come in the same array at each step, as from shared memory."""

    def reset(self):
        self.observations = self.venv.reset().copy()
        return self.observations

    def step_wait(self):
        observations, *rest = self.venv.step_wait()
        self.observations[:] = observations
        return self.observations, *rest


@pytest.mark.parametrize("kind", ["shared memory", "integers behind VecNormalize"])
def test_environments_whose_observations_are_not_what_is_stored(kind):
    def rollout(fast):
        space = spaces.Box(-5, 5, (3,), np.int32) if kind.startswith("integers") else None
        env = DummyVecEnv([lambda: NoiseEnv(ACTION_SPACES["box"], *([space] if space else [])) for _ in range(2)])
        env = VecNormalize(env) if space else ReusesItsArray(env)
        model = UATRPO("MlpPolicy", env, n_steps=48, batch_size=16, seed=0, device="cpu", fast_rollouts=fast)
        spread_out(model.policy)
        model.train = lambda: None
        th.manual_seed(3)
        return model.learn(48).rollout_buffer

    assert_same_buffers(rollout(True), rollout(False))


@pytest.mark.parametrize("when", ["on_rollout_start", "step 5"])
def test_a_callback_may_patch_the_buffer(when):
    calls = {True: [], False: []}

    class Patches(cb.BaseCallback):
        def patch(self):
            buffer, fast = self.model.rollout_buffer, self.model.fast_rollouts
            add = buffer.add

            def mine(*args):
                calls[fast].append(args[4].numpy().copy())
                add(*args)

            buffer.add = mine

        def _on_rollout_start(self):
            if when == "on_rollout_start":
                self.patch()

        def _on_step(self):
            if (when, self.n_calls) == ("step 5", 5):
                self.patch()
            return True

    as_sb3(make_callback=Patches)
    assert len(calls[True]) == len(calls[False])
    np.testing.assert_allclose(calls[True], calls[False], rtol=1e-4, atol=1e-5)


def test_a_callback_may_collect_into_another_buffer():
    class Collects(cb.BaseCallback):
        def _on_step(self):
            if self.n_calls == 5:
                model = self.model
                other = RolloutBuffer(4, model.observation_space, model.action_space, "cpu", n_envs=2)
                callback = cb.CallbackList([])
                callback.init_callback(model)
                model.collect_rollouts(model.env, callback, other, 4)
            return True

    as_sb3(make_callback=Collects)


def test_an_interrupt_leaves_the_values_of_all_steps_behind():
    class Interrupts(cb.BaseCallback):
        def _on_step(self):
            if self.n_calls == 30:
                raise KeyboardInterrupt
            return True

    buffers = []
    for fast in (True, False):
        model = small(n_envs=2, fast_rollouts=fast)
        with pytest.raises(KeyboardInterrupt):
            model.learn(96, callback=Interrupts())
        buffers.append(model.rollout_buffer)
    for name in ("values", "log_probs"):
        ours, theirs = (getattr(buffer, name)[:29] for buffer in buffers)
        assert theirs.all()
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-5)


def test_locals_may_be_copied_deeply():
    names = {True: set(), False: set()}

    class Copies(cb.BaseCallback):
        def _on_step(self):
            left_out = ("self", "env", "callback", "rollout_buffer")
            names[self.model.fast_rollouts] |= self.locals.keys()
            copied = copy.deepcopy({name: value for name, value in self.locals.items() if name not in left_out})
            return copied["values"].shape == (2, 1) and list(reversed(self.locals.items())) != []

    as_sb3(make_callback=Copies)
    # variables of the steps at which time limits end episodes
    assert names[False] - names[True] <= {"terminal_obs", "terminal_value"}
    assert names[True] <= names[False]


def test_infinite_noise_takes_no_more_random_numbers_than_in_stable_baselines3():
    states = []
    for fast in (True, False):
        model = small(n_envs=2, fast_rollouts=fast)
        model.policy.log_std.data.fill_(100.0)
        th.manual_seed(3)
        model.train = lambda: None
        with np.errstate(all="ignore"):
            model.learn(model.n_steps)
        states.append(th.get_rng_state())
    assert th.equal(*states)


# ---------------------------------------------------------------------------------------------- optimizers of critics


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
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    before = self.state[param].get("before", th.zeros_like(param))
                    param.sub_(group["lr"] * (2.0 * param.grad - before))
                    self.state[param]["before"] = param.grad


def with_gradients(optimizer):
    return [param for group in optimizer.param_groups for param in group["params"] if param.grad is not None]


def replaces_gradients(optimizer, *_):
    for param in with_gradients(optimizer):
        param.grad = param.grad.clamp(-0.01, 0.01)


def clips_gradients(optimizer, *_):
    nn.utils.clip_grad_norm_(with_gradients(optimizer), 0.01)


@pytest.mark.parametrize(
    "case",
    ["nothing", "ForgetsGradients", "KeepsGradients", "replaces_gradients", "clips_gradients", "zero_grad", "keeps"],
)
def test_optimizers_and_step_hooks_see_each_minibatchs_gradient(case):
    optimizer_class = {"ForgetsGradients": ForgetsGradients, "KeepsGradients": KeepsGradients}.get(case, th.optim.Adam)
    found, seen, fused = [], [], []

    def keeps(optimizer, *_):
        seen[-1] += [param.grad for param in with_gradients(optimizer)]
        fused.append(optimizer.param_groups[0]["fused"])

    for arrays in (True, False):
        model = small(policy_kwargs={"net_arch": [4], "optimizer_class": optimizer_class})
        collect(model)
        policy, optimizer = model.policy, model.policy.optimizer
        seen.append([])
        if case in ("replaces_gradients", "clips_gradients"):
            optimizer.register_step_pre_hook(globals()[case])
        elif case == "zero_grad":
            optimizer.register_step_post_hook(lambda optimizer, *_: optimizer.zero_grad())
        elif case == "keeps":
            optimizer.register_step_pre_hook(keeps)
        actor = tuple(param for name, param in policy.named_parameters() if "value" not in name)
        np.random.seed(0)
        general = mock.patch.object(critic.ArrayGradients, "of", return_value=None)
        with mock.MagicMock() if arrays else general:
            fit_values(policy, model.rollout_buffer, 16, 3, actor)
        found.append(nn.utils.parameters_to_vector(policy.parameters()).detach())
    th.testing.assert_close(*found)
    if case == "keeps":
        assert len({float(gradient.sum()) for gradient in seen[0]}) == len(seen[0]) > 1
        th.testing.assert_close(*seen)
        assert set(fused) == {None}


def test_hooks_of_accumulated_gradients_are_called():
    model = small()
    collect(model)
    seen = []
    weight = model.policy.value_net.weight
    weight.register_post_accumulate_grad_hook(lambda param: seen.append(param.grad.clone()))
    model.train()
    assert len(seen) == model.n_critic_updates * -(-model.n_steps // model.batch_size)
    assert all(gradient.any() for gradient in seen)


@pytest.mark.filterwarnings("ignore:Full backward hook is firing")
def test_global_hooks_on_gradients_see_every_minibatch():
    seen = []
    model = small()
    collect(model)
    handle = torch_module.register_module_full_backward_hook(
        lambda module, *_: seen.append(module) if module is model.policy.value_net else None
    )
    try:
        model.train()
    finally:
        handle.remove()
    assert len(seen) >= model.n_critic_updates * -(-model.n_steps // model.batch_size)


# ------------------------------------------------------------------------------------------------------- whole updates


@pytest.mark.parametrize("kind", [DiagGaussianDistribution, CategoricalDistribution])
def test_updates_honour_what_replaces_the_parameters_of_a_distribution(kind, monkeypatch):
    own = kind.proba_distribution

    def squeezed(self, *args, action_logits=None):
        outputs, *log_std = args or (action_logits,)
        return own(self, outputs.tanh(), *(part.clamp(-1.0, 0.1) for part in log_std))

    monkeypatch.setattr(kind, "proba_distribution", squeezed)
    action_space = "box" if kind is DiagGaussianDistribution else "discrete"
    check_updates(small(action_space, policy=DoublePolicy, n_envs=2), n_updates=2)


@pytest.mark.filterwarnings("ignore:Anomaly Detection has been enabled")
@pytest.mark.parametrize("cls", [UATRPO, MatchedTRPO])
@pytest.mark.parametrize("plain", [True, False])
def test_torchs_search_for_nan_changes_nothing(cls, plain):
    found = []
    for detects in (False, True):
        model = make_model(cls, "box", double=False, **({"n_projections": 8} if cls is UATRPO else {}))
        recognise = StandardMLP.recognise if plain else lambda policy: None
        with (
            mock.patch.object(StandardMLP, "recognise", staticmethod(recognise)),
            th.autograd.set_detect_anomaly(detects),
        ):
            model.learn(2 * model.n_steps)
        found.append(nn.utils.parameters_to_vector(model.policy.parameters()))
    th.testing.assert_close(*found, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("cls", [UATRPO, MatchedTRPO])
def test_the_default_device_is_not_that_of_a_model_with_its_own(cls):
    """There is no other device here than one without memory, which fails wherever it is used."""
    env = DummyVecEnv([lambda: NoiseEnv(ACTION_SPACES["box"])])
    model = cls("MlpPolicy", env, n_steps=32, batch_size=16, device="cpu")
    with th.device("meta"):
        model.learn(64)
    assert not any(param.is_meta for param in model.policy.parameters())


def test_an_overflowing_penalty_refuses_the_update():
    model = small(uncertainty_coef=1e300)
    collect(model)
    before = actor_vector(model)
    with pytest.warns(UserWarning, match="left the policy unchanged"):
        model.train()
    assert np.array_equal(actor_vector(model), before)
    assert not model.sketch.y_fisher.any()
    assert model.sketch.ema_weight.item() == 0.0
