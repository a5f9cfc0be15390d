"""Writing into rollout buffers beside Stable-Baselines3's own methods, and what happens when those change."""

import copy

import numpy as np
import pytest
import torch as th
from gymnasium import spaces
from stable_baselines3.common.buffers import RolloutBuffer

from sb3_uatrpo import UATRPO, storage
from sb3_uatrpo.storage import StepWriter, compute_returns_and_advantage
from tests.helpers import make_model
from tests.reference import generalized_advantages

BOX = spaces.Box(-1.0, 1.0, (2,), np.float32)


@pytest.fixture(autouse=True)
def proof_is_made_anew():
    storage._recursion_is_proven.cache_clear()
    yield
    storage._recursion_is_proven.cache_clear()


def buffer_of(cls=RolloutBuffer, n_steps=6, n_envs=3, **kwargs) -> RolloutBuffer:
    return cls(n_steps, BOX, BOX, "cpu", gae_lambda=0.9, gamma=0.8, n_envs=n_envs, **kwargs)


def steps(rng, buffer) -> list[tuple]:
    n = buffer.n_envs
    return [
        (rng.normal(size=(n, 2)), rng.normal(size=(n, 2)).astype(np.float32), rng.normal(size=n), rng.random(n) < 0.3)
        for _ in range(buffer.buffer_size)
    ]


def contents(buffer) -> dict:
    return {name: value for name, value in vars(buffer).items() if isinstance(value, (np.ndarray, int))}


def written(buffer, by_us: bool) -> StepWriter | None:
    writer = StepWriter(buffer) if by_us else None
    for step in steps(np.random.default_rng(0), buffer):
        if writer is None:
            buffer.add(*step, th.zeros(buffer.n_envs), th.zeros(buffer.n_envs))
        else:
            writer.add(*step, None, None)
    return writer


class Counting(RolloutBuffer):
    """Counts its steps."""

    def add(self, *args):
        self.counted = getattr(self, "counted", 0) + 1
        super().add(*args)


@pytest.mark.parametrize("cls", [RolloutBuffer, Counting])
def test_steps_are_written_as_add_writes_them(cls):
    ours, theirs = buffer_of(cls), buffer_of(cls)
    writer = written(ours, by_us=True)
    written(theirs, by_us=False)
    assert writer._is_direct == (cls is RolloutBuffer)
    for name, value in contents(theirs).items():
        np.testing.assert_array_equal(contents(ours)[name], value, err_msg=name)


def _doubled_rewards(add):
    return lambda self, obs, action, reward, *rest: add(self, obs, action, 2.0 * reward, *rest)


def _another_array(add):
    def changed(self, obs, *rest):
        if not hasattr(self, "ages"):
            self.ages = np.zeros((self.buffer_size, self.n_envs))
        self.ages[self.pos] = 1.0
        add(self, obs, *rest)

    return changed


@pytest.mark.parametrize("change", [_doubled_rewards, _another_array])
def test_another_version_of_add_is_noticed(change, monkeypatch):
    monkeypatch.setattr(RolloutBuffer, "add", change(RolloutBuffer.add))
    # as if it had been like this when this package was imported
    monkeypatch.setitem(storage._OWN_METHODS, "add", [RolloutBuffer.add])
    ours, theirs = buffer_of(), buffer_of()
    assert written(ours, by_us=True)._is_direct is False
    written(theirs, by_us=False)
    for name, value in contents(theirs).items():
        np.testing.assert_array_equal(contents(ours)[name], value, err_msg=name)


@pytest.mark.parametrize("n_envs", [1, 4])
@pytest.mark.parametrize("seed", range(3))
def test_advantages(n_envs, seed):
    rng = np.random.default_rng(seed)
    buffer = buffer_of(n_steps=15, n_envs=n_envs)
    buffer.rewards, buffer.values = rng.normal(size=(2, 15, n_envs)).astype(np.float32)
    buffer.episode_starts = (rng.random((15, n_envs)) < 0.2).astype(np.float32)
    last_values, dones = rng.normal(size=(n_envs, 1)).astype(np.float32), rng.random(n_envs) < 0.5
    given = buffer.rewards, buffer.values, buffer.episode_starts, last_values[:, 0], dones
    expected = generalized_advantages(*given, 0.8, 0.9)
    theirs = copy.deepcopy(buffer)
    compute_returns_and_advantage(buffer, th.from_numpy(last_values), dones)
    assert storage._recursion_is_proven.cache_info().currsize == 1
    np.testing.assert_allclose(buffer.advantages, expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(buffer.returns, expected + buffer.values, rtol=1e-5, atol=1e-6)
    theirs.compute_returns_and_advantage(th.from_numpy(last_values), dones)
    np.testing.assert_allclose(buffer.advantages, theirs.advantages, rtol=1e-5, atol=1e-6)
    assert buffer.returns.dtype == buffer.advantages.dtype == np.float32


class MonteCarlo(RolloutBuffer):
    def compute_returns_and_advantage(self, last_values, dones):
        self.advantages[:] = 7.0


def _zeros(self, last_values, dones):
    self.advantages[:] = 0.0
    self.returns = self.advantages + 1.0


def test_other_ways_to_advantages_are_taken(monkeypatch):
    buffer = buffer_of(MonteCarlo)
    compute_returns_and_advantage(buffer, th.zeros(3, 1), np.zeros(3, bool))
    assert (buffer.advantages == 7.0).all()
    for when in ("replaced now", "another version of Stable-Baselines3"):
        monkeypatch.setattr(RolloutBuffer, "compute_returns_and_advantage", _zeros)
        if when != "replaced now":
            storage._recursion_is_proven.cache_clear()
            monkeypatch.setitem(storage._OWN_METHODS, "compute_returns_and_advantage", [_zeros])
        buffer = buffer_of()
        buffer.rewards += 1.0
        compute_returns_and_advantage(buffer, th.zeros(3, 1), np.zeros(3, bool))
        assert (buffer.advantages == 0.0).all()
        assert (buffer.returns == 1.0).all()


def test_rollouts_write_directly():
    model = make_model(UATRPO, "box", double=False, n_projections=4)
    calls = []
    model.rollout_buffer.__class__ = type("Buffer", (RolloutBuffer,), {})
    add = RolloutBuffer.add
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RolloutBuffer, "add", lambda self, *args: (calls.append(1), add(self, *args)))
        # as if it had been like this when this package was imported
        patch.setitem(storage._OWN_METHODS, "add", [RolloutBuffer.add])
        model.learn(2 * model.n_steps)
    # once for each rollout: the first step
    assert len(calls) == 2
