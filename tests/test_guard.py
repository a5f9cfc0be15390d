"""When the fast path is taken, by what a user sees: whose code is called, how often, and what comes out."""

import copy
import cProfile
import functools
import gc
import sys
import threading
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch as th
from stable_baselines3.common import callbacks as cb
from stable_baselines3.common.buffers import RolloutBuffer
from stable_baselines3.common.distributions import DiagGaussianDistribution, Distribution
from stable_baselines3.common.logger import Logger
from stable_baselines3.common.on_policy_algorithm import OnPolicyAlgorithm
from stable_baselines3.common.policies import ActorCriticPolicy, BaseModel
from stable_baselines3.common.torch_layers import MlpExtractor
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from sb3_uatrpo import UATRPO, critic
from sb3_uatrpo.critic import ArrayGradients
from sb3_uatrpo.guard import RunningCode, Watch, has_library_methods, is_as_built, same_but_for_rounding
from tests.forked import run_code
from tests.helpers import actor_vector, collect, count_fast_steps, learn_in_threads, logged, make_model, scale_latents
from tests.test_rollouts import assert_same_buffers
from tests.test_user_additions import as_sb3, filled, small

ROOT = Path(__file__).parents[1]

PATCHED_BEFORE_IMPORT = """
import sys
import numpy as np
import torch as th
from stable_baselines3.common.buffers import RolloutBuffer
from stable_baselines3.common.distributions import DiagGaussianDistribution
from stable_baselines3.common.logger import Logger
from stable_baselines3.common.on_policy_algorithm import OnPolicyAlgorithm
from stable_baselines3.common.torch_layers import MlpExtractor

owner, name = {
    "sample": (DiagGaussianDistribution, "sample"),
    "forward_actor": (MlpExtractor, "forward_actor"),
    "add": (RolloutBuffer, "add"),
    "get": (RolloutBuffer, "get"),
    "compute_returns_and_advantage": (RolloutBuffer, "compute_returns_and_advantage"),
}[sys.argv[1]]
own, calls = getattr(owner, name), []


def replacement(self, *args, **kwargs):
    calls.append(1)
    return own(self, *args, **kwargs)


setattr(owner, name, replacement)
from sb3_uatrpo import UATRPO

counts = []
for fast in (True, False):
    model = UATRPO("MlpPolicy", "Pendulum-v1", n_steps=200, device="cpu", seed=0, fast_rollouts=fast)
    calls.clear()
    model.learn(400)
    counts.append(len(calls))
assert counts[0] == counts[1] > 0, counts
print("fine")
"""


@pytest.mark.parametrize("name", ["sample", "forward_actor", "add", "get", "compute_returns_and_advantage"])
def test_a_class_patched_before_this_package_is_imported(name):
    """In a process of its own: as many calls as Stable-Baselines3's own rollouts make."""
    ended = run_code(PATCHED_BEFORE_IMPORT, name, cwd=ROOT)
    assert ended.stdout == "fine\n", ended.stderr


def test_a_log_probability_replaced_before_this_package_is_imported_is_refused():
    script = """
import functools
from stable_baselines3.common.distributions import DiagGaussianDistribution
own = DiagGaussianDistribution.log_prob
DiagGaussianDistribution.log_prob = functools.wraps(own)(lambda self, actions: own(self, actions) - 1.0)
from sb3_uatrpo import UATRPO
UATRPO("MlpPolicy", "Pendulum-v1", n_steps=100, device="cpu").learn(100)
"""
    ended = run_code(script, cwd=ROOT)
    assert "policy: log_prob of DiagGaussianDistribution was replaced" in ended.stderr


def test_autocast_takes_the_general_way(monkeypatch):
    acted = count_fast_steps(monkeypatch)
    model = small()
    with pytest.warns(UserWarning, match="its layers alone do not reproduce"), th.autocast("cpu", th.float16):
        collect(model)
    assert not acted


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


def test_the_library_s_collection_of_rollouts_may_be_patched(monkeypatch):
    calls = []
    own = OnPolicyAlgorithm.collect_rollouts

    def traced(self, *args, **kwargs):
        calls.append("rollout")
        return own(self, *args, **kwargs)

    monkeypatch.setattr(OnPolicyAlgorithm, "collect_rollouts", traced)
    model = small()
    model.learn(128)
    assert len(calls) == model._n_updates > 1


@pytest.mark.parametrize("name", ["values", "log_probs"])
def test_what_a_callback_writes_into_the_buffer_stays(name):
    found = []
    for fast in (True, False):
        model = UATRPO("MlpPolicy", "Pendulum-v1", n_steps=64, batch_size=32, device="cpu", seed=0, fast_rollouts=fast)

        def write(local, _):
            buffer = local["rollout_buffer"]
            getattr(buffer, name)[: buffer.pos] = 7.0
            return True

        model.learn(64, callback=write)
        found.append(getattr(model.rollout_buffer, name))
    np.testing.assert_allclose(*found, rtol=1e-5)
    assert (found[0] == 7.0).sum() == 63


def test_a_patched_step_of_the_optimizer_is_noticed(monkeypatch):
    """It puts new memory into the parameters, from which arrays would not read."""
    vectors = []
    step = th.optim.Adam.step

    def clamped(self, closure=None):
        step(self, closure)
        for group in self.param_groups:
            for param in group["params"]:
                param.data = param.data.clamp(-0.3, 0.3)

    monkeypatch.setattr(th.optim.Adam, "step", clamped)
    for array_gradients in (ArrayGradients.of, lambda *args: None):
        monkeypatch.setattr(ArrayGradients, "of", staticmethod(array_gradients))
        model = UATRPO("MlpPolicy", "Pendulum-v1", n_steps=64, batch_size=8, device="cpu", seed=0)
        model.learn(64)
        vectors.append(model.policy.value_net.weight.detach().numpy().copy())
    np.testing.assert_allclose(*vectors, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("n_epochs", [1, 3])
def test_the_critic_gathers_once_in_each_epoch(n_epochs, monkeypatch):
    model = UATRPO("MlpPolicy", "Pendulum-v1", n_steps=64, batch_size=8, device="cpu", n_critic_updates=n_epochs)
    model.set_logger(Logger(folder=None, output_formats=[]))
    collect(model)
    minibatches, asked = critic._minibatches, []
    monkeypatch.setattr(critic, "_minibatches", lambda *args: asked.append(args[2]) or minibatches(*args))
    model.train()
    assert asked == [True] * n_epochs


def test_a_users_subclass_that_changes_nothing_takes_the_general_way(monkeypatch):
    class Subclass(ActorCriticPolicy):
        pass

    acted = count_fast_steps(monkeypatch)
    as_sb3(policy=Subclass)
    assert not acted


# ------------------------------------------------------------------------- what leaves no trace in the code that runs


@pytest.mark.parametrize("of", ["the object", "the class"])
def test_a_method_may_be_replaced_by_another_of_its_library(of, monkeypatch):
    """Actions without noise: first by an own function, then by one of the library, which is as good as its own."""
    acted = count_fast_steps(monkeypatch)
    if of == "the class":
        monkeypatch.setattr(DiagGaussianDistribution, "sample", DiagGaussianDistribution.mode)
        as_sb3()
    else:
        as_sb3(lambda policy: setattr(policy.action_dist, "sample", policy.action_dist.mode))
    assert not acted


def test_a_method_may_be_replaced_by_a_descriptor(monkeypatch):
    policy = small().policy
    assert is_as_built(policy)
    monkeypatch.setattr(nn.Linear, "extra_repr", functools.partialmethod(nn.Linear.extra_repr))
    assert not is_as_built(policy)


@pytest.mark.parametrize("of", ["the object", "the class"])
def test_a_method_may_be_replaced_by_a_function_in_c(of, monkeypatch):
    acted = count_fast_steps(monkeypatch)
    if of == "the class":
        monkeypatch.setattr(nn.Tanh, "forward", staticmethod(th.sigmoid))
        as_sb3()
    else:
        as_sb3(lambda policy: setattr(policy.mlp_extractor.policy_net[1], "forward", th.sin))
    assert not acted


def test_a_hook_may_be_a_function_in_c(capsys):
    """It leaves no trace in the Python code that runs."""
    printed = []
    for fast in (True, False):
        filled(fast, lambda policy: policy.value_net.register_forward_hook(print))
        printed.append(capsys.readouterr().out.count("Linear(in_features=4, out_features=1"))
    assert printed[0] == printed[1] > 48


class Flips(cb.BaseCallback):
    """Replaces a method of the library by another of the library, in mid-rollout."""

    def _on_step(self):
        if self.n_calls == 10:
            self.model.policy.mlp_extractor.policy_net[1].forward = th.sin
        return True


def test_a_function_in_c_in_mid_rollout():
    as_sb3(make_callback=Flips)


# ------------------------------------------------------------------------------------------------------- profilers


def test_under_a_profiler_the_general_way_is_taken_and_the_profiler_stays(monkeypatch):
    acted = count_fast_steps(monkeypatch)
    plain = filled(True)
    assert acted
    acted.clear()

    def profiler(frame, event, arg):
        return None

    sys.setprofile(profiler)
    try:
        profiled = filled(True)
        collected = copy.deepcopy(profiled.rollout_buffer)
        assert sys.getprofile() is profiler
        profiled.train()
        assert sys.getprofile() is profiler
    finally:
        sys.setprofile(None)
    assert not acted
    for other in (plain, filled(False)):
        assert_same_buffers(collected, other.rollout_buffer)


def test_a_profiler_that_only_threading_knows_is_noticed(monkeypatch):
    """As those written in C are."""
    acted = count_fast_steps(monkeypatch)
    threading.setprofile(lambda frame, event, arg: None)
    try:
        filled(True)
    finally:
        threading.setprofile(None)
    assert not acted


def test_cprofile_sees_a_whole_run():
    model = small(n_envs=2)
    profile = cProfile.Profile()
    with profile:
        model.learn(2 * 96)
    assert model._n_updates == 2
    names = {entry.code.co_name for entry in profile.getstats() if not isinstance(entry.code, str)}
    assert {"collect_rollouts", "train", "fit_values", "forward"} <= names


class Garbage:
    """In a cycle, so that only the collector finds it."""

    def __init__(self):
        self.itself = self

    def __del__(self):
        collected.append(self)


collected: list[Garbage] = []


@pytest.mark.parametrize("enabled", [True, False])
def test_finalizers_of_garbage_are_not_noted(enabled):
    """Otherwise, the last digits would depend on when the collector runs."""
    thresholds, was_enabled = gc.get_threshold(), gc.isenabled()
    code = RunningCode()
    collected.clear()
    try:
        gc.disable()
        gc.collect()
        kept = [Garbage()]
        gc.set_threshold(500)
        if enabled:
            gc.enable()
        with code.noted():
            kept.clear()
            # more objects than make the collector run
            list(map(list, [()] * 1000))
        assert gc.isenabled() == enabled
    finally:
        gc.set_threshold(*thresholds)
        (gc.enable if was_enabled else gc.disable)()
    assert code.is_library_code
    gc.collect()
    assert len(collected) == 1


def test_no_profiler_is_left_behind_by_an_error():
    code = RunningCode()
    with pytest.raises(ZeroDivisionError), code.noted():
        1 / 0  # noqa: B018
    assert sys.getprofile() is None
    model = small()
    with th.no_grad():
        model.policy.action_net.bias.fill_(th.nan)
    with pytest.raises(ValueError, match="to satisfy the constraint"):
        collect(model)
    assert sys.getprofile() is None


def test_a_profiler_that_somebody_starts_within_stays():
    def profiler(frame, event, arg):
        return None

    try:
        with RunningCode().noted():
            sys.setprofile(profiler)
        assert sys.getprofile() is profiler
    finally:
        sys.setprofile(None)


def test_threads_learn_side_by_side_as_each_alone_would():
    """Profilers belong to threads; random numbers are shared, and no draw of another thread looks like a difference."""
    models = [small(n_envs=2) for _ in range(3)]
    learn_in_threads(models, 5 * 96)
    assert all(model._n_updates == 5 for model in models)


# ------------------------------------------------------------------------------------------- the parts of the guard


def noted(policy) -> RunningCode:
    code = RunningCode()
    with th.no_grad(), code.noted():
        policy(th.zeros(1, 3))
    return code


def test_the_libraries_own_code_and_that_of_others():
    policy = small().policy
    assert noted(policy).is_library_code
    policy.value_net.register_forward_hook(lambda *args: None)
    assert not noted(policy).is_library_code


CHANGES = {
    "a number": lambda policy: policy.value_net.bias.data.add_(1e-3),
    "a number, by NumPy": lambda policy: policy.log_std.detach().numpy().__setitem__(0, 3.0),
    "other memory": lambda policy: setattr(policy.value_net.bias, "data", policy.value_net.bias.data.clone()),
    "another parameter": lambda policy: setattr(policy, "log_std", nn.Parameter(policy.log_std.detach().clone())),
    "no parameter": lambda policy: setattr(policy.action_net, "bias", None),
    "another layer": lambda policy: setattr(policy, "action_net", copy.deepcopy(policy.action_net)),
    "other tables of parameters": lambda policy: policy.action_net.__dict__.update(
        copy.deepcopy(policy.action_net).__dict__
    ),
    "another table of layers": lambda policy: setattr(
        policy.mlp_extractor.policy_net, "_modules", copy.deepcopy(policy.mlp_extractor.policy_net)._modules
    ),
    "one more layer": lambda policy: policy.mlp_extractor.policy_net.append(nn.ReLU()),
    "another distribution": lambda policy: setattr(policy, "action_dist", copy.copy(policy.action_dist)),
    "a method": lambda policy: setattr(policy.action_net, "forward", policy.action_net.forward),
    "a sampler": lambda policy: setattr(policy.action_dist, "sample", policy.action_dist.sample),
    "a class": lambda policy: setattr(policy.action_net, "__class__", type("Linear", (nn.Linear,), {})),
    "a hook": lambda policy: policy.mlp_extractor.policy_net[1].register_forward_hook(lambda *args: None),
}


@pytest.mark.parametrize("change", CHANGES)
def test_the_watch_notices_a_change(change):
    policy = small().policy
    watch = Watch(policy, noted(policy))
    assert watch.sees_no_change()
    CHANGES[change](policy)
    assert not watch.sees_no_change()


@pytest.mark.parametrize(
    ("owner", "name"),
    [
        (nn.Linear, "forward"),
        (nn.Linear, "__call__"),
        (MlpExtractor, "forward_critic"),
        (ActorCriticPolicy, "forward"),
    ],
)
def test_the_watch_notices_a_patched_class(owner, name, monkeypatch):
    policy = small().policy
    watch = Watch(policy, noted(policy))
    own = getattr(owner, name)
    monkeypatch.setattr(owner, name, lambda *args, **kwargs: own(*args, **kwargs))
    assert not watch.sees_no_change()


@pytest.mark.parametrize(("owner", "name"), [(th.nn.functional, "linear"), (th, "tanh")])
def test_a_patched_function_of_torch_is_noticed_by_the_next_rollout(owner, name, monkeypatch):
    acted = count_fast_steps(monkeypatch)
    model = small()
    collect(model)
    assert acted
    acted.clear()
    own = getattr(owner, name)
    monkeypatch.setattr(owner, name, lambda *args, **kwargs: own(*args, **kwargs))
    collect(model)
    assert not acted


@pytest.mark.parametrize(("owner", "name"), [(BaseModel, "__call__"), (Distribution, "__getattribute__")])
def test_the_watch_notices_a_method_added_to_a_base_class(owner, name, monkeypatch):
    policy = small().policy
    watch = Watch(policy, noted(policy))
    monkeypatch.setattr(owner, name, getattr(owner, name), raising=False)
    assert name in vars(owner)
    assert not watch.sees_no_change()


def test_a_parameter_that_shares_memory_with_the_one_it_replaces_changes_nothing():
    policy = small().policy
    watch = Watch(policy, noted(policy))
    policy.log_std = nn.Parameter(policy.log_std.detach())
    assert watch.sees_no_change()
    with th.no_grad():
        policy.log_std += 1.0
    assert not watch.sees_no_change()


@pytest.mark.parametrize("register", [register_module_forward_hook, register_module_forward_pre_hook])
def test_hooks_on_all_modules_are_noticed(register):
    policy = small().policy
    watch = Watch(policy, noted(policy))
    handle = register(lambda *args: None)
    try:
        assert not watch.sees_no_change()
        assert not is_as_built(policy)
    finally:
        handle.remove()
    assert watch.sees_no_change()
    assert is_as_built(policy)


def test_data_of_a_class_need_not_be_comparable(monkeypatch):
    monkeypatch.setattr(ActorCriticPolicy, "stats", np.zeros(3), raising=False)
    model = small()
    monkeypatch.setattr(ActorCriticPolicy, "stats", np.ones(3))
    model.learn(64)


def test_whose_methods_a_buffer_has(monkeypatch):
    class Subclass(RolloutBuffer):
        def add(self, *args):
            super().add(*args)

    buffer = small().rollout_buffer
    assert has_library_methods(buffer, "add", "get")
    assert not has_library_methods(small(rollout_buffer_class=Subclass).rollout_buffer, "add")
    assert has_library_methods(small(rollout_buffer_class=Subclass).rollout_buffer, "get")
    monkeypatch.setattr(RolloutBuffer, "get", RolloutBuffer.add)
    assert not has_library_methods(buffer, "get")
    buffer.add = buffer.add
    assert not has_library_methods(buffer, "add")


@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e6])
def test_rounding_is_told_from_difference(scale):
    theirs = scale * th.randn(50, 3, generator=th.Generator().manual_seed(0))
    assert same_but_for_rounding(theirs * (1.0 + 1e-6), theirs)
    assert not same_but_for_rounding(theirs * 1.01, theirs)
    assert not same_but_for_rounding(theirs[:1], theirs)
    assert not same_but_for_rounding(theirs.double(), theirs)
    assert same_but_for_rounding(theirs * th.nan, theirs * th.nan)
    assert not same_but_for_rounding(theirs * th.nan, theirs)


# ---------------------------------------------------------------- another version of the library, with other results


@pytest.mark.parametrize("method", ["forward_actor", "forward_critic"])
def test_another_version_of_the_library_is_served_the_general_way_with_one_warning(method, monkeypatch):
    scale_latents(monkeypatch, method)
    acted = count_fast_steps(monkeypatch)
    with pytest.warns(UserWarning, match="its layers alone do not reproduce the ") as caught:
        model = make_model(UATRPO, "box", double=False, n_projections=4).learn(48)
    assert len(caught) == 1
    # a warning is an error in the tests
    model.learn(2 * 48)
    assert not acted
    assert logged(model)["step_fraction"] > 0


def test_products_are_general_where_the_update_finds_a_difference(monkeypatch):
    model = make_model(UATRPO, "box", double=False, n_projections=4)
    collect(model)
    scale_latents(monkeypatch, "forward_actor")
    with pytest.warns(UserWarning, match="its layers alone do not reproduce the action distribution that"):
        model.train()
    assert logged(model)["kl_ratio"] == pytest.approx(1.0, abs=0.3)
