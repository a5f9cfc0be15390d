"""Small environments, models and rollouts for the tests, and how they are compared."""

import copy
from contextlib import contextmanager
from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch as th
from gymnasium import spaces
from stable_baselines3.common.buffers import RolloutBuffer
from stable_baselines3.common.callbacks import BaseCallback, CallbackList
from stable_baselines3.common.distributions import DiagGaussianDistribution
from stable_baselines3.common.logger import Logger
from stable_baselines3.common.preprocessing import get_flattened_obs_dim
from stable_baselines3.common.torch_layers import BaseFeaturesExtractor
from stable_baselines3.common.vec_env import DummyVecEnv

from sb3_uatrpo import UATRPO, MatchedTRPO, plain
from sb3_uatrpo.actor import Actor
from sb3_uatrpo.batch import Batch
from sb3_uatrpo.observations import map_observations
from sb3_uatrpo.plain_mlp import PlainMLP
from tests.reference import DoubleMultiInputPolicy, DoublePolicy, actor_parameters, flat

BOTH = pytest.mark.parametrize("cls", [UATRPO, MatchedTRPO])
ACTION_SPACES: dict[str, spaces.Space] = {
    "box": spaces.Box(-1.0, 1.0, (2,), np.float32),
    "box_matrix": spaces.Box(-2.0, 3.0, (2, 2), np.float32),
    "discrete": spaces.Discrete(3),
    "multi_discrete": spaces.MultiDiscrete([3, 2]),
    "multi_binary": spaces.MultiBinary(3),
}
IMAGE = spaces.Box(0, 255, (1, 6, 6), np.uint8)
#: the smallest that Stable-Baselines3's own network for images takes
LARGE_IMAGE = spaces.Box(0, 255, (1, 36, 36), np.uint8)
DICT = spaces.Dict({"image": IMAGE, "vector": spaces.Box(-1.0, 1.0, (2,), np.float32), "value_map": spaces.Discrete(3)})


def extractor(width, parts, forward):
    """A features extractor: the modules that it has for n numbers per observation, and what it computes with them."""

    class Made(BaseFeaturesExtractor):
        def __init__(self, space):
            super().__init__(space, width)
            for name, part in parts(get_flattened_obs_dim(space)).items():
                setattr(self, name, part)

        def forward(self, observations):
            return forward(self, observations)

    return Made


def with_kwargs(**policy_kwargs):
    return {"policy_kwargs": policy_kwargs}


def with_extractor(made, **policy_kwargs):
    return with_kwargs(features_extractor_class=made, **policy_kwargs)


class SmallCNN(BaseFeaturesExtractor):
    """A convolution, a non-linearity and a projection, with few enough parameters for dense matrices."""

    def __init__(self, observation_space: spaces.Box, features_dim: int = 4):
        super().__init__(observation_space, features_dim)
        self.conv = th.nn.Conv2d(observation_space.shape[0], 2, 3, stride=2)
        self.linear = th.nn.Linear(8, features_dim)

    def forward(self, observations):
        return self.linear(self.conv(observations).relu().flatten(1)).tanh()


class SmallCombined(BaseFeaturesExtractor):
    """One small network for each entry of a dict; one is called "value_map"."""

    def __init__(self, observation_space: spaces.Dict):
        super().__init__(observation_space, features_dim=4 + 2 + 2)
        self.extractors = th.nn.ModuleDict(
            {"image": SmallCNN(observation_space["image"]), "value_map": th.nn.Linear(3, 2)}
        )

    def forward(self, observations):
        image = self.extractors["image"](observations["image"])
        value_map = self.extractors["value_map"](observations["value_map"].flatten(1)).tanh()
        return th.cat([image, observations["vector"], value_map], dim=1)


#: policies of each kind that is supported, as arguments of ``make_model``
POLICIES: dict[str, dict[str, Any]] = {
    **{name: {"action_space": name} for name in ACTION_SPACES},
    "deep": with_kwargs(net_arch=[4, 3, 2]),
    "relu": {"action_space": "discrete", **with_kwargs(net_arch=[5, 4], activation_fn=th.nn.ReLU)},
    "no_hidden_layer": {"action_space": "box_matrix", **with_kwargs(net_arch=[])},
    "two_networks": with_kwargs(net_arch={"pi": [5, 4], "vf": [3]}),
    "linear_actor": with_kwargs(net_arch={"pi": [], "vf": [4]}),
    "two_extractors": with_kwargs(share_features_extractor=False),
    "matrices": {"observation_space": spaces.Box(-1.0, 1.0, (2, 3), np.float64)},
    # parameters of an activation belong to no linear layer
    "prelu": with_kwargs(activation_fn=th.nn.PReLU),
    "gelu": with_kwargs(activation_fn=th.nn.GELU),
    "gsde": {"use_sde": True, "sde_sample_freq": 3},
    "gsde_squashed": {"use_sde": True, **with_kwargs(squash_output=True)},
    "gsde_expln": {"use_sde": True, **with_kwargs(use_expln=True)},
    "gsde_one_std": {"use_sde": True, **with_kwargs(full_std=False)},
    "discrete_observations": {"observation_space": spaces.Discrete(5)},
    "multi_discrete_observations": {"observation_space": spaces.MultiDiscrete([2, 3])},
    "binary_observations": {"observation_space": spaces.MultiBinary(4)},
    "flattened_image": {"observation_space": IMAGE},
    "image": {"action_space": "discrete", "observation_space": IMAGE, **with_extractor(SmallCNN, net_arch=[])},
    "two_cnns": {"observation_space": IMAGE, **with_extractor(SmallCNN, net_arch=[], share_features_extractor=False)},
    "dict_of_vectors": {"observation_space": spaces.Dict(one=spaces.Box(-1.0, 1.0, (2,)), other=spaces.Discrete(3))},
    "dict": {"action_space": "multi_discrete", "observation_space": DICT},
    "separate_networks_of_a_dict": {"observation_space": DICT, **with_kwargs(share_features_extractor=False)},
}
#: those that NumPy computes, in rollouts and layer by layer in updates
PLAIN = (
    "box", "box_matrix", "discrete", "deep", "relu", "no_hidden_layer", "two_networks", "linear_actor",
    "two_extractors", "matrices",
)  # fmt: skip


class NoiseEnv(gym.Env):
    """
    Observations and rewards are noise, which functions may change. After at least two steps, an episode terminates or
    is truncated at random.
    """

    def __init__(
        self, action_space: spaces.Space, observation_space: spaces.Space | None = None, observe=None, reward=None
    ):
        self.action_space = action_space
        self.observation_space = observation_space or spaces.Box(-1.0, 1.0, (3,), np.float32)
        self.observation_space.seed(0)
        self.observe, self.reward = observe or (lambda x: x), reward or (lambda x: x)
        self.steps = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None):
        super().reset(seed=seed)
        self.steps = 0
        return self.observe(self.observation_space.sample()), {}

    def step(self, action):
        self.steps += 1
        over, cut = self.np_random.random(2) < 0.05
        ready = self.steps > 1
        reward = self.reward(float(self.np_random.normal() + np.sum(np.asarray(action))))
        return self.observe(self.observation_space.sample()), reward, bool(over and ready), bool(cut and ready), {}


class Endless(NoiseEnv):
    """One episode, which a wrapper may end."""

    def step(self, action):
        return *super().step(action)[:2], False, False, {}


class NewestFirst:
    """Before a rollout buffer: each epoch is one minibatch, backwards, as a user's own might be."""

    def get(self, batch_size=None):
        samples = next(super().get(None))
        yield type(samples)(*(tensor.flip(0) for tensor in samples))


def make_model(
    cls=UATRPO,
    action_space: spaces.Space | str = "box",
    n_envs: int = 1,
    double: bool = True,
    observation_space=None,
    spread: bool = True,
    env=NoiseEnv,
    **kwargs,
):
    """A small model on noise, with few projections, in float64 and moved off its special point by default."""
    space = ACTION_SPACES[action_space] if isinstance(action_space, str) else action_space
    policies = (DoublePolicy, DoubleMultiInputPolicy) if double else ("MlpPolicy", "MultiInputPolicy")
    combined = {"features_extractor_class": SmallCombined} if observation_space is DICT else {}
    options: dict[str, Any] = {
        "policy": policies[isinstance(observation_space, spaces.Dict)],
        "n_steps": 48,
        "batch_size": 16,
        "sub_sampling_factor": 3,
        **kwargs,
        "policy_kwargs": {"net_arch": [4], **combined, **kwargs.get("policy_kwargs", {})},
    }
    if options["n_steps"] * n_envs % options["batch_size"]:
        options["batch_size"] = options["n_steps"] * n_envs
    model = model_on(cls, DummyVecEnv([lambda: env(space, observation_space)] * n_envs), **options)
    if spread:
        spread_out(model.policy)
    model.set_logger(Logger(folder=None, output_formats=[]))
    return model


small = partial(make_model, double=False)


def model_on(cls, env, policy: Any = "MlpPolicy", **kwargs):
    """A model on a task, with short rollouts."""
    projections = {"n_projections": 8} if issubclass(cls, UATRPO) else {}
    return cls(policy, env, **{"n_steps": 32, "batch_size": 16, "seed": 0, "device": "cpu", **projections, **kwargs})


def spread_out(policy: th.nn.Module) -> None:
    """Move a fresh policy off its special point, where the last layer is almost zero and σ is one."""
    generator = th.Generator().manual_seed(1)
    with th.no_grad():
        for param in policy.parameters():
            param.add_(0.3 * th.randn(param.shape, generator=generator, dtype=th.float64).to(param))


def take_apart(monkeypatch) -> None:
    """In updates of the actor, the tests' policies count as plain, though they are subclasses in float64."""
    init = Actor.__init__

    def layered(self, policy):
        init(self, policy)
        self._fast_layers = plain._mlp_on_memory(policy, type(policy.action_dist) is DiagGaussianDistribution)

    monkeypatch.setattr(Actor, "__init__", layered)


def count_calls(monkeypatch, owner, name: str) -> list[tuple]:
    """A list that grows by the arguments of each call of a method or function."""
    calls: list[tuple] = []
    method = getattr(owner, name)
    monkeypatch.setattr(owner, name, lambda *args, **kwargs: (calls.append(args), method(*args, **kwargs))[1])
    return calls


def count_fast_steps(monkeypatch) -> list[int]:
    """A list that grows by one with each step of a rollout in which NumPy acts."""
    calls: list[int] = []
    act = PlainMLP.act

    def counted(self, *observations_and_masks):
        found = act(self, *observations_and_masks)
        if found is not None:
            calls.append(1)
        return found

    monkeypatch.setattr(PlainMLP, "act", counted)
    return calls


def collect(model):
    """Fill the model's rollout buffer. The model itself."""
    if model._last_obs is None:
        model._setup_learn(10**9)
    callback = CallbackList([])
    callback.init_callback(model)
    assert model.collect_rollouts(model.env, callback, model.rollout_buffer, model.n_steps)
    return model


def update(model) -> dict[str, Any]:
    """Collect a rollout and train on it. What was logged."""
    collect(model).train()
    return logged(model)


def direction_and_gradient(model) -> tuple[np.ndarray, np.ndarray]:
    """v and ĝ of an update of the rollout that was collected."""
    found = []
    find = model._find_direction

    def remember(estimates):
        gradient = estimates.gradient.numpy().copy()
        direction = find(estimates)
        found.append((direction.vector.numpy(), gradient))
        return direction

    model._find_direction = remember
    model.train()
    del model._find_direction
    return found[0]


class At(BaseCallback):
    """
    Calls ``change(model, locals)`` at the start of the first rollout (0), at one of all timesteps, or at each (None).
    """

    def __init__(self, change, at: int | None):
        super().__init__()
        self.change, self.at = change, at

    def _on_rollout_start(self) -> None:
        if self.at == self.n_calls == 0:
            self._on_step()

    def _on_step(self) -> bool:
        if self.at in (None, self.n_calls):
            with th.no_grad():
                self.change(self.model, self.locals)
        return True


def filled(fast: bool, callback: BaseCallback | None = None, n_rollouts: int = 1, **kwargs):
    """A model whose buffer holds a rollout, in which NumPy acts where it can, or as Stable-Baselines3 collects it."""
    model = small(**{"n_envs": 2, "fast_rollouts": fast, **kwargs})
    th.manual_seed(3)
    for env in model.env.envs:
        env.reset(seed=1)
    model.train = lambda: None
    model.learn(n_rollouts * model.n_steps * model.n_envs, callback=callback)
    del model.train
    return model


def as_sb3(make_callback=lambda: None, **kwargs):
    """Both rollouts, which must be the same and draw the same random numbers."""
    ours = filled(True, make_callback(), **kwargs)
    after = th.get_rng_state()
    theirs = filled(False, make_callback(), **kwargs)
    assert th.equal(after, th.get_rng_state())
    assert_same_buffers(ours.rollout_buffer, theirs.rollout_buffer)
    return ours, theirs


BUFFER_ARRAYS = (
    "observations", "actions", "rewards", "episode_starts", "values", "log_probs", "advantages", "returns"
)  # fmt: skip


def assert_same_buffers(ours: RolloutBuffer, theirs: RolloutBuffer) -> None:
    assert ours.pos == theirs.pos
    for name in BUFFER_ARRAYS:
        # actions are sums in another order, or choices
        is_exact = name in ("observations", "episode_starts")
        map_observations(
            partial(assert_close, is_exact=is_exact, what=name), getattr(ours, name), getattr(theirs, name)
        )


def assert_close(ours: np.ndarray, theirs: np.ndarray, is_exact: bool = False, what: str = "") -> None:
    """Of the same type and shape, and equal up to float32's rounding; whole numbers are equal."""
    assert ours.dtype == theirs.dtype
    assert ours.shape == theirs.shape
    tolerance = 0.0 if is_exact or ours.dtype != np.float32 else 2e-5
    np.testing.assert_allclose(ours, theirs, tolerance, tolerance, err_msg=what)


def state_of(model) -> dict[str, np.ndarray]:
    """Everything an update may change, copied."""
    state = {f"policy.{k}": v.clone().numpy() for k, v in model.policy.state_dict().items()}
    for i, entry in model.policy.optimizer.state_dict()["state"].items():
        state.update({f"optimizer.{i}.{k}": th.as_tensor(v).clone().numpy() for k, v in entry.items()})
    if isinstance(model, UATRPO):
        state.update({f"sketch.{k}": v.clone().numpy() for k, v in model.sketch.state_dict().items()})
    return state


def part_of(state: dict[str, np.ndarray], prefix: str) -> dict[str, np.ndarray]:
    return {name: value for name, value in state.items() if name.startswith(prefix)}


def assert_same(model, *others, prefix: str = "") -> None:
    """Policies, optimizers and sketches are equal bit for bit, or those parts whose names begin with the prefix."""
    for other in others:
        np.testing.assert_equal(part_of(state_of(other), prefix), part_of(state_of(model), prefix))


@contextmanager
def unchanged(model, what=state_of):
    """What happens here, an error included, changes nothing of the model, or of what is given."""
    before = what(model)
    yield
    np.testing.assert_equal(what(model), before)


def assert_same_update(model, *others) -> None:
    """The same rollout and random numbers give all of them the same update, bit for bit."""
    assert_same(model, *others)
    collect(model)
    for other in others:
        other.set_logger(model.logger)
        other.rollout_buffer = copy.deepcopy(model.rollout_buffer)
        other._last_obs, other._last_episode_starts = model._last_obs, model._last_episode_starts
    for each in (model, *others):
        np.random.seed(0)
        th.manual_seed(0)
        each.train()
    assert_same(model, *others)


def back_in_time_order(buffer, array):
    """An array of a flattened buffer as it was before."""
    return array.reshape(buffer.n_envs, buffer.buffer_size, *array.shape[1:]).swapaxes(0, 1)


def env_major(model) -> tuple[Any, th.Tensor, th.Tensor]:
    """The rollout, env after env: observations, actions and standardised advantages, by plain loops."""
    buffer = copy.copy(model.rollout_buffer)
    if buffer.generator_ready:
        # an update has flattened it, env after env
        for name in ("observations", "actions", "advantages"):
            setattr(buffer, name, map_observations(partial(back_in_time_order, buffer), getattr(buffer, name)))
    order = [(t, e) for e in range(buffer.n_envs) for t in range(buffer.buffer_size)]

    def in_order(array):
        return th.as_tensor(np.stack([array[t, e] for t, e in order]))

    observations = buffer.observations
    obs = (
        {k: in_order(v) for k, v in observations.items()} if isinstance(observations, dict) else in_order(observations)
    )
    actions = np.stack([buffer.actions[t, e] for t, e in order])
    advantages = np.array([buffer.advantages[t, e] for t, e in order], dtype=np.float64).flatten()
    if model.normalize_advantage:
        advantages = (advantages - advantages.mean()) / (advantages.std(ddof=1) + 1e-8)
    return obs, th.as_tensor(actions.astype(np.float32)), th.as_tensor(advantages)


def next_subsample(model, n: int | None = None) -> list[int]:
    """The steps that the next update draws for F̂ and Σ̂, as rows in env-major order; n steps, or those of a rollout."""
    rows = th.arange(n or model.n_steps * model.n_envs)
    generator = copy.deepcopy(model.subsample_generator)
    return Batch(rows, rows, rows, rows).subsample(model.sub_sampling_factor, generator).actions.tolist()


def actor_vector(model) -> np.ndarray:
    return flat(actor_parameters(model.policy))


def logged(model) -> dict[str, Any]:
    """What the last update recorded under train/, without the prefix."""
    values = model.logger.name_to_value
    return {key.removeprefix("train/"): value for key, value in values.items() if key.startswith("train/")}
