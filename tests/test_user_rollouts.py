"""
What users add to a policy is seen in rollouts: at once, or from the next rollout on. The measure is Stable-Baselines3:
the same model with ``fast_rollouts=False``.
"""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch as th
from stable_baselines3.common import callbacks as cb
from stable_baselines3.common.on_policy_algorithm import OnPolicyAlgorithm
from stable_baselines3.common.vec_env import DummyVecEnv
from torch import nn
from torch.nn.utils import prune

from sb3_uatrpo import UATRPO
from sb3_uatrpo.core.array_mlp import ArrayMLP
from tests.helpers import (
    ACTION_SPACES,
    At,
    NoiseEnv,
    actor_vector,
    as_sb3,
    count_calls,
    count_fast_steps,
    extractor,
    model_on,
    small,
)

# ------------------------------------------------------------------------------------------------- ways to add it


def patched(part, name, change):
    """An object's method is replaced by one that changes its result."""
    method = getattr(part, name)
    setattr(part, name, lambda *args: change(method(*args)))


def subclassed(part, name, change):
    """An object's class is replaced by a subclass whose method changes the result."""
    own = type(part)
    part.__class__ = type("Changed", (own,), {name: lambda self, *args: change(getattr(own, name)(self, *args))})


def hooked(module, _, change):
    module.register_forward_hook(lambda module, inputs, output: change(output))


def hooked_before(module, _, change):
    module.register_forward_pre_hook(lambda module, inputs: change(inputs))


def scaled(output):
    return tuple(1.5 * part for part in output) if isinstance(output, tuple) else 1.5 * output


def halved(acted):
    actions, values, log_probs = acted
    return 0.5 * actions, values + 1.0, log_probs


# ---------------------------------------------------------------------- changes of a policy that are seen at once


def load_other_weights(policy):
    policy.load_state_dict({key: 0.5 * value for key, value in policy.state_dict().items()})


def new_parameter(policy):
    policy.action_net.weight = nn.Parameter(-policy.action_net.weight.detach())


def new_memory(policy):
    policy.value_net.weight.data = 2.0 * policy.value_net.weight.data


AT_ONCE = {
    "log_std": lambda policy: policy.log_std.fill_(-1.0),
    # NumPy must draw no random numbers before it leaves them to torch
    "infinite log_std": lambda policy: policy.log_std.fill_(100.0),
    "log_std.data": lambda policy: policy.log_std.data.fill_(-1.0),
    "value_net.bias.data": lambda policy: policy.value_net.bias.data.add_(1.0),
    "policy_net.weight.data": lambda policy: policy.mlp_extractor.policy_net[0].weight.data.mul_(2.0),
    "no bias": lambda policy: setattr(policy.action_net, "bias", None),
    "pruned layer": lambda policy: prune.l1_unstructured(policy.action_net, "weight", amount=0.5),
    "patched policy": lambda policy: patched(policy, "forward", halved),
    "policy of another class": lambda policy: subclassed(policy, "forward", halved),
    **{change.__name__: change for change in (load_other_weights, new_parameter, new_memory)},
}


@pytest.mark.parametrize("at", [0, 10], ids=["at the start", "at the tenth step"])
@pytest.mark.parametrize("change", AT_ONCE)
def test_what_is_seen_at_once(change, at):
    as_sb3(lambda: At(lambda model, _: AT_ONCE[change](model.policy), at))


# ------------------------------------------------- parts that are exchanged: seen at the start of the next rollout


def patched_latents(policy):
    for name in ("forward_actor", "forward_critic"):
        patched(policy.mlp_extractor, name, lambda latent: 0.1 * latent + 0.3)


class Within(nn.Module):
    """Cannot be iterated over."""

    def __init__(self, network: nn.Module):
        super().__init__()
        self.network = network

    def forward(self, x):
        return self.network(x)


def network_within_another(policy):
    policy.mlp_extractor.policy_net = Within(policy.mlp_extractor.policy_net)


Clamped = extractor(3, lambda n: {}, lambda self, x: x.clamp(-0.1, 0.1))


def another_extractor(policy):
    clamped = Clamped(policy.observation_space)
    policy.features_extractor = policy.pi_features_extractor = policy.vf_features_extractor = clamped


def column_major_weights(policy):
    for module in policy.modules():
        if isinstance(module, nn.Linear):
            module.weight = nn.Parameter(module.weight.detach().T.contiguous().T)


def one_std(policy):
    policy.log_std = nn.Parameter(th.zeros(1))


def scalar_std(policy):
    policy.log_std = nn.Parameter(th.tensor(-0.5))


SUBMODULES = (
    "features_extractor", "features_extractor.flatten", "mlp_extractor", "mlp_extractor.policy_net",
    "mlp_extractor.policy_net.0", "mlp_extractor.policy_net.1", "mlp_extractor.value_net", "mlp_extractor.value_net.1",
    "action_net", "value_net",
)  # fmt: skip
AT_NEXT = {
    **{
        f"{way.__name__} {name}": lambda policy, way=way, name=name: way(policy.get_submodule(name), "forward", scaled)
        for way in (patched, subclassed, hooked, hooked_before)
        for name in SUBMODULES
    },
    **{
        f"{way.__name__} {name}": lambda policy, way=way, name=name: way(policy.action_dist, name, scaled)
        for way in (patched, subclassed)
        for name in ("sample", "log_prob")
    },
    "appended layer": lambda policy: policy.mlp_extractor.policy_net.append(nn.ReLU()),
    **{
        change.__name__: change
        for change in (
            patched_latents, network_within_another, another_extractor, column_major_weights, one_std, scalar_std
        )
    },
}  # fmt: skip


@pytest.mark.parametrize(("n_rollouts", "at"), [(1, 0), (2, 48)], ids=["at the start", "at the last step"])
@pytest.mark.parametrize("change", AT_NEXT)
def test_what_is_seen_at_the_start_of_a_rollout(change, n_rollouts, at, monkeypatch):
    """Changes at the last step of the first rollout are seen in the second one. Until then, NumPy acts."""
    acted = count_fast_steps(monkeypatch)
    as_sb3(lambda: At(lambda model, _: AT_NEXT[change](model.policy), at), n_rollouts=n_rollouts)
    assert len(acted) == at


@pytest.mark.parametrize("share", [True, False])
@pytest.mark.parametrize("name", ["features_extractor", "pi_features_extractor", "vf_features_extractor"])
def test_each_features_extractor_may_be_another(name, share):
    def exchange(model, _):
        setattr(model.policy, name, Clamped(model.policy.observation_space))

    as_sb3(lambda: At(exchange, at=0), policy_kwargs={"share_features_extractor": share})


# -------------------------------------------------------------------------------------------- what callbacks write


def another_policy(model, _):
    model.policy = type(model.policy)(
        model.observation_space, model.action_space, model.lr_schedule, net_arch=[4]
    ).requires_grad_(False)


def relabelled(_, local):
    buffer = local["rollout_buffer"]
    if buffer.pos:
        buffer.observations[buffer.pos - 1] = 0.0


def rewritten(_, local):
    buffer = local["rollout_buffer"]
    buffer.values[: buffer.pos] = buffer.log_probs[: buffer.pos] = 7.0


WRITTEN = {
    "model.policy": another_policy,
    "model._last_obs": lambda model, _: model._last_obs.fill(0),
    "buffer.observations": relabelled,
    "buffer.values and log_probs": rewritten,
    "obs_tensor": lambda _, local: local["obs_tensor"].zero_(),
    "actions": lambda _, local: local["actions"].fill(0),
    "values": lambda _, local: local["values"].add_(1.0),
    "log_probs": lambda _, local: local["log_probs"].mul_(2.0),
}


@pytest.mark.parametrize("action_space", ["box", "discrete"])
@pytest.mark.parametrize("name", WRITTEN)
def test_what_callbacks_write_stays_and_reaches_nothing_else(name, action_space):
    as_sb3(lambda: At(WRITTEN[name], at=10 if name == "model.policy" else None), action_space=action_space)


def zoo_callbacks(tmp_path) -> list[cb.BaseCallback]:
    """What RL Zoo attaches, and one more."""
    eval_env = DummyVecEnv([lambda: NoiseEnv(ACTION_SPACES["box"])])
    return [
        cb.EvalCallback(eval_env, eval_freq=40, n_eval_episodes=1, verbose=0, warn=False),
        cb.CheckpointCallback(40, str(tmp_path)),
        cb.EveryNTimesteps(8, cb.ConvertCallback(lambda *_: True)),
    ]


def test_numpy_acts_and_trains_the_critic_under_usual_callbacks(monkeypatch, tmp_path):
    acted, minibatches = count_fast_steps(monkeypatch), count_calls(monkeypatch, ArrayMLP, "squared_error")
    as_sb3(lambda: cb.CallbackList(zoo_callbacks(tmp_path)))
    model = small(n_envs=2)
    model.learn(2 * 96, callback=zoo_callbacks(tmp_path))
    assert len(acted) == 3 * model.n_steps
    assert len(minibatches) == 2 * model.n_critic_updates * 6


# ----------------------------------------------------------------------------------- what is called how many times


def counting_hooks(calls, policy):
    policy.action_net.register_forward_hook(lambda *args: calls.append("actor"))
    policy.value_net.register_forward_hook(lambda *args: calls.append("critic"))


def counting_class(calls, policy):
    for name in ("forward", "predict_values"):
        subclassed(policy, name, lambda result, name=name: (calls.append(name), result)[1])


def counting_methods(calls, policy):
    for part, name in ((policy.mlp_extractor.policy_net, "forward"), (policy.action_dist, "sample")):
        patched(part, name, lambda result, name=name: (calls.append(name), result)[1])


@pytest.mark.parametrize("add", [counting_hooks, counting_class, counting_methods])
def test_what_counts_its_calls_counts_as_many_as_in_stable_baselines3(add):
    """Two rollouts and two updates: nothing that a user wrote is called once more, or once less."""
    kept = []
    for fast in (True, False):
        calls: list[str] = []
        model = small(n_envs=2, fast_rollouts=fast)
        add(calls, model.policy)
        model.set_random_seed(0)
        model.learn(2 * 96)
        kept.append((calls, actor_vector(model)))
    assert kept[0][0] == kept[1][0]
    assert len(kept[0][0]) > 90
    np.testing.assert_allclose(kept[0][1], kept[1][1], rtol=1e-6)


def test_a_mixin_between_the_algorithm_and_its_base_is_asked(monkeypatch):
    class Counting(OnPolicyAlgorithm):
        def collect_rollouts(self, *args, **kwargs):
            return super().collect_rollouts(*args, **kwargs)

    calls = count_calls(monkeypatch, Counting, "collect_rollouts")
    model_on(type("Both", (UATRPO, Counting), {}), "Pendulum-v1").learn(64)
    assert len(calls) == 2


@pytest.mark.parametrize("activation_fn", [nn.Tanh, nn.GELU])
def test_models_learn_side_by_side_in_threads(activation_fn):
    models = [small(n_envs=2, policy_kwargs={"activation_fn": activation_fn}) for _ in range(3)]
    with ThreadPoolExecutor(3) as pool:
        # an error in one of them is raised here
        list(pool.map(lambda model: model.learn(5 * 96), models))
    assert all(model._n_updates == 5 for model in models)
