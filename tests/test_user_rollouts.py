"""
What users add to rollouts and to the critic's optimizer, and what callbacks see, beside Stable-Baselines3's own.
"""

import copy
import functools
from contextlib import nullcontext
from unittest import mock

import numpy as np
import pytest
import torch as th
from gymnasium import spaces
from stable_baselines3.common import callbacks as cb
from stable_baselines3.common.buffers import RolloutBuffer
from stable_baselines3.common.distributions import DiagGaussianDistribution
from stable_baselines3.common.on_policy_algorithm import OnPolicyAlgorithm
from stable_baselines3.common.policies import ActorCriticPolicy, MultiInputActorCriticPolicy
from stable_baselines3.common.torch_layers import (
    CombinedExtractor,
    FlattenExtractor,
    MlpExtractor,
)
from stable_baselines3.common.vec_env import DummyVecEnv, VecEnvWrapper, VecNormalize
from torch import nn
from torch.nn.modules import module as torch_module
from torch.nn.utils import prune

from sb3_uatrpo import UATRPO, MatchedTRPO
from sb3_uatrpo.actor import UnsupportedNetworkError
from sb3_uatrpo.core.array_mlp import ArrayMLP
from sb3_uatrpo.critic import fit_values
from sb3_uatrpo.families import UnsupportedDistributionError
from sb3_uatrpo.plain import as_plain_mlp
from tests import helpers
from tests.helpers import (
    ACTION_SPACES,
    NoiseEnv,
    actor_vector,
    collect,
    count_fast_steps,
    learn_in_threads,
    logged,
    make_model,
    spread_out,
)
from tests.test_rollouts import assert_same_buffers
from tests.test_user_additions import At, BuildsItsDistribution, actor_of, as_sb3, filled, small, zoo_callbacks


class AtTheStart(At):
    """Makes one change, before the first step."""

    def _on_rollout_start(self) -> None:
        with th.no_grad():
            self.change(self.model, self.locals)

    def _on_step(self) -> bool:
        return True


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


# what SB3's rollouts see in any case, since they ask the policy itself
AT_ONCE = [another_policy, patched_policy, another_class]
EXCHANGED = [
    patched_layer,
    appended_layer,
    hook_on_the_extractor,
    another_extractor,
    patched_sample,
    replaced_latents,
    layer_of_another_class,
    distribution_of_another_class,
]


@pytest.mark.parametrize("change", AT_ONCE + EXCHANGED)
def test_whatever_changes_at_the_start_of_a_rollout_is_seen(change):
    as_sb3(make_callback=lambda: AtTheStart(change))


@pytest.mark.parametrize("change", AT_ONCE)
def test_another_policy_is_seen_at_the_next_step(change):
    as_sb3(make_callback=lambda: At(change))


@pytest.mark.parametrize("change", EXCHANGED)
def test_what_is_exchanged_at_a_step_is_seen_at_the_next_rollout(change, monkeypatch):
    acted = count_fast_steps(monkeypatch)
    as_sb3(make_callback=lambda: LastStep(change), n_rollouts=2)
    assert len(acted) == 48


class LastStep(At):
    """Makes the change at the last step of the first rollout, where the policy has already acted."""

    def _on_step(self) -> bool:
        self.at = self.model.n_steps
        return super()._on_step()


def test_a_weight_that_is_no_parameter_may_be_replaced_in_mid_rollout():
    def plain(policy):
        weight = policy.action_net.weight.detach().clone()
        del policy.action_net.weight
        policy.action_net.weight = weight

    def tripled(model, _):
        model.policy.action_net.weight = 3.0 * model.policy.action_net.weight

    as_sb3(plain, lambda: At(tripled))


def test_a_layer_may_be_pruned_in_mid_rollout():
    def pruned(model, _):
        prune.l1_unstructured(model.policy.action_net, "weight", amount=0.5)

    as_sb3(make_callback=lambda: At(pruned))


def test_actions_may_become_squashed_in_mid_rollout():
    def squashed(model, _):
        model.policy._squash_output = True

    as_sb3(make_callback=lambda: At(squashed), action_space="box_matrix")


def test_a_patch_from_the_start_of_a_rollout_to_its_end():
    class Patches(cb.BaseCallback):
        def _on_rollout_start(self):
            patched_policy(self.model, None)

        def _on_rollout_end(self):
            del self.model.policy.forward

        def _on_step(self):
            return True

    as_sb3(make_callback=Patches)


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


def test_a_standard_deviation_in_a_buffer_may_be_annealed_in_mid_rollout():
    def anneal(model, _):
        model.policy.log_std = th.full_like(model.policy.log_std, -2.0)

    as_sb3(make_callback=lambda: At(anneal), policy=BufferStd)


class Clamped(FlattenExtractor):
    def forward(self, observations):
        return super().forward(observations).clamp(-0.1, 0.1)


@pytest.mark.parametrize("share", [True, False])
@pytest.mark.parametrize("name", ["features_extractor", "pi_features_extractor", "vf_features_extractor"])
def test_another_features_extractor_is_used(name, share):
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


@pytest.mark.parametrize("cls", [UATRPO, MatchedTRPO])
@pytest.mark.parametrize("width", [3, 5])
def test_actor_and_critic_may_see_different_keys(cls, width):
    space = spaces.Dict(noisy=spaces.Box(-1.0, 1.0, (3,)), exact=spaces.Box(-1.0, 1.0, (width,)))
    as_sb3(observation_space=space, policy=SeesMore)
    kwargs = {"n_projections": 8} if cls is UATRPO else {}
    model = make_model(cls, "box", double=False, observation_space=space, policy=SeesMore, **kwargs)
    model.learn(2 * 48)
    assert logged(model)["step_fraction"] > 0.0
    assert as_plain_mlp(model.policy) is None


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
        actor = actor_of(policy, model.rollout_buffer)
        actor.mlp = actor.mlp if arrays else None
        np.random.seed(0)
        fit_values(actor, model.rollout_buffer, 16, 3)
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


def counting_hook(calls):
    def change(policy):
        policy.action_net.register_forward_hook(lambda *args: calls.append("actor"))
        policy.value_net.register_forward_hook(lambda *args: calls.append("critic"))

    return change


def mock_hook(calls):
    return lambda policy: policy.value_net.register_forward_pre_hook(
        mock.Mock(side_effect=lambda *args: calls.append("critic"), return_value=None)
    )


def counting_subclass(calls):
    class Counts(ActorCriticPolicy):
        def forward(self, obs, deterministic=False):
            calls.append("forward")
            return super().forward(obs, deterministic)

        def predict_values(self, obs):
            calls.append("values")
            return super().predict_values(obs)

    return lambda policy: setattr(policy, "__class__", Counts)


def counting_method(calls):
    def change(policy):
        forward = policy.mlp_extractor.policy_net.forward
        policy.mlp_extractor.policy_net.forward = lambda x: calls.append("net") or forward(x)

    return change


def wrapped_sampler(calls):
    def change(policy):
        sample = policy.action_dist.sample

        @functools.wraps(sample)
        def wrapped():
            calls.append("sample")
            return sample()

        policy.action_dist.sample = wrapped

    return change


@pytest.mark.parametrize("make", [counting_hook, mock_hook, counting_subclass, counting_method, wrapped_sampler])
def test_what_counts_its_calls_counts_as_many_as_in_stable_baselines3(make):
    """Two rollouts and two updates: nothing that a user wrote is called once more, or once less."""
    kept = []
    for fast in (True, False):
        calls: list[str] = []
        model = small(n_envs=2, fast_rollouts=fast)
        make(calls)(model.policy)
        model.set_random_seed(0)
        model.learn(2 * 96)
        kept.append((calls, actor_vector(model)))
    assert kept[0][0] == kept[1][0]
    assert len(kept[0][0]) > 90
    np.testing.assert_allclose(kept[0][1], kept[1][1], rtol=1e-6)


@pytest.mark.parametrize("fast", [True, False])
def test_a_mixin_between_the_algorithm_and_its_base_is_asked(fast):
    calls = []

    class Counting(OnPolicyAlgorithm):
        def collect_rollouts(self, *args, **kwargs):
            calls.append("rollout")
            return super().collect_rollouts(*args, **kwargs)

    class Both(UATRPO, Counting):
        pass

    model = Both("MlpPolicy", "Pendulum-v1", n_steps=64, batch_size=32, device="cpu", fast_rollouts=fast)
    model.learn(128)
    assert len(calls) == 2


@pytest.mark.parametrize("name", ["values", "log_probs"])
def test_what_a_callback_writes_into_the_buffer_stays(name):
    found = []
    for fast in (True, False):
        model = UATRPO("MlpPolicy", "Pendulum-v1", n_steps=64, batch_size=32, device="cpu", seed=0, fast_rollouts=fast)

        def write(local, _):
            buffer = local["rollout_buffer"]
            getattr(buffer, name)[: buffer.pos] = 7.0
            return True

        with pytest.warns(UserWarning, match="rollout differ") if name == "log_probs" else nullcontext():
            model.learn(64, callback=write)
        found.append(getattr(model.rollout_buffer, name))
    np.testing.assert_allclose(*found, rtol=1e-5)
    assert (found[0] == 7.0).sum() == 63


def test_a_users_subclass_that_changes_nothing_takes_the_general_way(monkeypatch):
    class Subclass(ActorCriticPolicy):
        pass

    acted = count_fast_steps(monkeypatch)
    as_sb3(policy=Subclass)
    assert not acted


def test_a_hook_may_be_a_function_in_c(capsys):
    """It leaves no trace in the Python code that runs."""
    printed = []
    for fast in (True, False):
        filled(fast, lambda policy: policy.value_net.register_forward_hook(print))
        printed.append(capsys.readouterr().out.count("Linear(in_features=4, out_features=1"))
    assert printed[0] == printed[1] > 48


def test_threads_learn_side_by_side_as_each_alone_would():
    """Profilers belong to threads; random numbers are shared, and no draw of another thread looks like a difference."""
    models = [small(n_envs=2) for _ in range(3)]
    learn_in_threads(models, 5 * 96)
    assert all(model._n_updates == 5 for model in models)


def patched_classes(monkeypatch) -> list[str]:
    """Counts in classes of Stable-Baselines3 and torch who is called."""
    calls: list[str] = []

    def count(own, name):
        def counted(*args, **kwargs):
            calls.append(name)
            return own(*args, **kwargs)

        return counted

    for owner, name in [
        (ActorCriticPolicy, "forward"),
        (MlpExtractor, "forward_actor"),
        (DiagGaussianDistribution, "sample"),
    ]:
        monkeypatch.setattr(owner, name, count(getattr(owner, name), f"{owner.__name__}.{name}"))
    return calls


def test_patches_of_the_libraries_classes_are_seen_only_by_the_libraries_own_code(monkeypatch):
    """As with any subclass that overrides a method, NumPy knows nothing of them."""
    calls = patched_classes(monkeypatch)
    filled(True)
    assert not calls
    filled(False)
    assert {name: calls.count(name) for name in set(calls)} == {
        "ActorCriticPolicy.forward": 48,
        "MlpExtractor.forward_actor": 48,
        "DiagGaussianDistribution.sample": 48,
    }


def test_a_patch_that_only_rollouts_see_is_refused(monkeypatch):
    """Without NumPy in rollouts, the policy acts by the patch, but updates compute from its layers."""
    own = MlpExtractor.forward_actor
    monkeypatch.setattr(MlpExtractor, "forward_actor", lambda self, features: 3.0 * own(self, features))
    model = small(fast_rollouts=False)
    with pytest.raises(ValueError, match="a method of its libraries' classes was replaced"):
        model.learn(model.n_steps)


@pytest.mark.parametrize("of", ["the object", "the class"])
@pytest.mark.parametrize("cls", [UATRPO, MatchedTRPO])
def test_another_log_probability_is_refused(cls, of, monkeypatch):
    kwargs = {"n_projections": 8} if cls is UATRPO else {}
    model = make_model(cls, "box", double=False, **kwargs)
    collect(model)
    owner = model.policy.action_dist if of == "the object" else DiagGaussianDistribution
    monkeypatch.setattr(owner, "log_prob", lambda *args: th.zeros(len(args[-1])))
    before = actor_vector(model)
    with pytest.raises(UnsupportedDistributionError, match=r"^policy: log_prob of DiagGaussianDistribution was replac"):
        model.train()
    assert np.array_equal(actor_vector(model), before)


@pytest.mark.parametrize("cls", [UATRPO, MatchedTRPO])
@pytest.mark.parametrize("policy", [OneStd, ScalarStd, BufferStd, ClampedStd])
def test_standard_deviations_of_other_kinds_are_trained(policy, cls):
    model = make_model(cls, "box", policy=policy, double=False, **({"n_projections": 8} if cls is UATRPO else {}))
    before = {name: param.clone() for name, param in model.policy.named_parameters()}
    model.learn(2 * model.n_steps)
    assert logged(model)["step_fraction"] > 0
    assert not any(param.equal(before[name]) for name, param in model.policy.named_parameters())


@pytest.mark.parametrize("change", [OneStd.make_std, ScalarStd.make_std])
def test_a_standard_deviation_for_all_actions_acts(change):
    """In the package's own policy."""
    as_sb3(change)


@pytest.mark.parametrize("cls", [UATRPO, MatchedTRPO])
def test_compiled_modules_are_refused(cls, monkeypatch):
    """The derivative of what torch.compile makes of a network has no derivative."""
    distribution = th.distributions.Distribution
    monkeypatch.setattr(distribution, "_validate_args", distribution._validate_args)
    model = make_model(cls, "box", double=False)
    net = model.policy.mlp_extractor.policy_net
    model.policy.mlp_extractor.policy_net = th.compile(net, backend="aot_eager")
    before = actor_vector(model)
    with pytest.raises(UnsupportedNetworkError, match=r"^policy: .*no torch.compile"):
        model.learn(model.n_steps)
    assert np.array_equal(actor_vector(model), before)


def test_autocast_takes_the_general_way(monkeypatch):
    acted = count_fast_steps(monkeypatch)
    model = small()
    with th.autocast("cpu", th.float16):
        collect(model)
    assert not acted
    assert model.rollout_buffer.full


@pytest.mark.parametrize("action_space", ["box", "discrete"])
@pytest.mark.parametrize("fast", [True, False])
def test_numbers_that_are_not_finite_never_reach_the_environment(fast, action_space):
    model = small(action_space, fast_rollouts=fast)
    with th.no_grad():
        model.policy.action_net.bias.fill_(th.nan)
    with pytest.raises(ValueError, match="to satisfy the constraint"):
        collect(model)
    assert model.env.envs[0].unwrapped.steps == 0


def test_locals_may_be_copied_deeply():
    class Copies(cb.BaseCallback):
        def _on_step(self):
            left_out = ("self", "env", "callback", "rollout_buffer")
            copied = copy.deepcopy({name: value for name, value in self.locals.items() if name not in left_out})
            return copied["values"].shape == (2, 1)

    as_sb3(make_callback=Copies)


@pytest.mark.filterwarnings("ignore:Anomaly Detection has been enabled")
@pytest.mark.parametrize("cls", [UATRPO, MatchedTRPO])
@pytest.mark.parametrize("policy", ["MlpPolicy", BuildsItsDistribution])
def test_torchs_search_for_nan_changes_nothing(cls, policy):
    found = []
    for detects in (False, True):
        kwargs = {"n_projections": 8} if cls is UATRPO else {}
        model = make_model(cls, "box", double=False, policy=policy, **kwargs)
        with th.autograd.set_detect_anomaly(detects):
            model.learn(2 * model.n_steps)
        found.append(nn.utils.parameters_to_vector(model.policy.parameters()))
    th.testing.assert_close(*found, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("watched", [False, True])
@pytest.mark.parametrize("action_space", ["box", "discrete"])
def test_numpy_acts_under_usual_callbacks(action_space, watched, monkeypatch, tmp_path):
    model = small(action_space, n_envs=2)
    callbacks = zoo_callbacks(tmp_path) if watched and action_space == "box" else []
    if watched:
        callbacks += [cb.EveryNTimesteps(8, cb.ConvertCallback(lambda *_: True))]
    acted, minibatches = count_fast_steps(monkeypatch), []
    squared_error = ArrayMLP.squared_error
    monkeypatch.setattr(ArrayMLP, "squared_error", lambda *args: (minibatches.append(1), squared_error(*args))[1])
    model.learn(3 * 96, callback=callbacks)
    assert len(acted) == 3 * model.n_steps
    assert len(minibatches) == 3 * model.n_critic_updates * 6
