"""A rollout as tensors: env after env in time order, whatever was done with the buffer before."""

import numpy as np
import pytest
import torch as th
from stable_baselines3.common.buffers import RolloutBuffer

from sb3_uatrpo.batch import Batch, rollout_batch
from sb3_uatrpo.observations import rows_of
from tests.helpers import ACTION_SPACES, DICT, collect, env_major, small


def collected(n_envs=3, **kwargs):
    return collect(small(n_envs=n_envs, **kwargs))


def same_batches(one: Batch, other: Batch) -> bool:
    return all(th.equal(getattr(one, name), getattr(other, name)) for name in ("observations", "actions", "advantages"))


@pytest.mark.parametrize("action_space", ACTION_SPACES)
def test_the_batch_is_the_rollout_in_time_order(action_space):
    model = collected(action_space=action_space)
    obs, actions, advantages = env_major(model)
    state = np.random.get_state()[1].copy()
    batch = rollout_batch(model.rollout_buffer, True)
    assert th.equal(batch.observations, obs)
    assert th.equal(batch.actions, actions)
    assert batch.advantages.numpy() == pytest.approx(advantages.numpy(), abs=1e-6)
    # the buffer is flattened, without a copy of the observations, and no random number was drawn
    assert model.rollout_buffer.generator_ready
    assert np.shares_memory(batch.observations.numpy(), model.rollout_buffer.observations)
    assert np.array_equal(np.random.get_state()[1], state)
    next(model.rollout_buffer.get(7))
    assert same_batches(rollout_batch(model.rollout_buffer, True), batch)


def test_observations_may_be_a_dict():
    model = collected(observation_space=DICT)
    obs, _, _ = env_major(model)
    batch = rollout_batch(model.rollout_buffer, False)
    assert all(th.equal(batch.observations[key].float(), obs[key].float()) for key in obs)
    assert len(batch[10:20]) == 10
    assert rows_of(batch.observations, slice(3, 5))["vector"].shape == (2, 2)


def drawn(n_steps: int, factor: int, generator: np.random.Generator) -> list[int]:
    rows = th.arange(n_steps)
    subsample = Batch({"key": rows}, rows[:, None], rows, rows).subsample(factor, generator)
    # observations, actions and advantages stay together
    assert th.equal(subsample.observations["key"], subsample.advantages)
    assert th.equal(subsample.actions[:, 0], subsample.advantages)
    return subsample.advantages.tolist()


@pytest.mark.parametrize("factor", [2, 7, 48, 10_000])
@pytest.mark.parametrize("n_steps", [4, 48, 101])
def test_the_subsample_has_one_step_of_each_block(n_steps, factor):
    k = min(factor, n_steps // 2)
    generator = np.random.default_rng(0)
    n_draws = 2000 if n_steps < 50 else 100
    seen = [drawn(n_steps, factor, generator) for _ in range(n_draws)]
    assert all([row // k for row in rows] == list(range(-(-n_steps // k))) for rows in seen)
    if n_steps < 50:
        counts = np.bincount(np.concatenate(seen), minlength=n_steps)
        # every step of a block is equally likely, also in the last block, which may be shorter
        sizes = np.array([min(k, n_steps - row // k * k) for row in range(n_steps)])
        p = 1.0 / sizes
        assert (np.abs(counts - n_draws * p) <= 5.0 * np.sqrt(n_draws * p * (1.0 - p))).all()


@pytest.mark.parametrize(("n_steps", "factor"), [(48, 1), (2, 10), (3, 10)])
def test_a_factor_of_one_draws_nothing(n_steps, factor):
    generator = np.random.default_rng(0)
    before = generator.bit_generator.state
    assert drawn(n_steps, factor, generator) == list(range(n_steps))
    assert generator.bit_generator.state == before


def test_the_subsample_does_not_resonate_with_episodes():
    """Every step of an episode of ten is drawn, over the updates, whatever the factor."""
    generator = np.random.default_rng(0)
    steps = np.concatenate([drawn(100, 10, generator) for _ in range(50)]) % 10
    assert set(steps) == set(range(10))


class Halved(RolloutBuffer):
    """Minibatches of its own, and half of the rollout only."""

    def get(self, batch_size=None):
        (samples,) = super().get(None)
        for part in (slice(0, 30), slice(30, 72)):
            yield type(samples)(*(tensor[part] for tensor in samples))


def test_a_buffer_of_ones_own_says_what_the_batch_is():
    model = collected(rollout_buffer_class=Halved)
    np.random.seed(0)
    batch = rollout_batch(model.rollout_buffer, False)
    np.random.seed(0)
    pieces = list(model.rollout_buffer.get())
    assert len(batch) == 72
    assert th.equal(batch.advantages, th.cat([samples.advantages for samples in pieces]))
    assert th.equal(batch.observations, th.cat([samples.observations for samples in pieces]))


class Negative(RolloutBuffer):
    def to_torch(self, array):
        """Stable-Baselines3 gives no other argument."""
        return -th.tensor(array, device=self.device)


def test_a_buffer_may_make_tensors_in_its_own_way():
    usual, own = (rollout_batch(collected(rollout_buffer_class=of).rollout_buffer, False) for of in (None, Negative))
    assert usual.advantages.any()
    for name in ("observations", "actions", "advantages", "log_probs"):
        assert th.equal(getattr(own, name), -getattr(usual, name))


@pytest.mark.parametrize("n_envs", [1, 2])
@pytest.mark.parametrize("where", ["get of the class", "_get_samples of the class", "_get_samples of the object"])
def test_methods_of_the_buffer_may_be_replaced(where, n_envs, monkeypatch):
    """Advantages are zero in what the replacement returns. It expects an array of indices, as it always gets."""
    model = collected(n_envs)
    get, get_samples = RolloutBuffer.get, RolloutBuffer._get_samples

    def from_get(self, batch_size=None):
        for samples in get(self, batch_size):
            yield samples._replace(advantages=th.zeros_like(samples.advantages))

    def from_samples(self, indices, env=None):
        return get_samples(self, indices, env)._replace(advantages=th.zeros(len(indices)))

    if where == "get of the class":
        monkeypatch.setattr(RolloutBuffer, "get", from_get)
    elif where == "_get_samples of the class":
        monkeypatch.setattr(RolloutBuffer, "_get_samples", from_samples)
    else:
        model.rollout_buffer._get_samples = from_samples.__get__(model.rollout_buffer)
    batch = rollout_batch(model.rollout_buffer, False)
    assert not batch.advantages.any()
    assert len(batch.observations) == len(batch) == model.n_steps * n_envs


def test_a_buffer_that_is_not_full_is_refused():
    model = collected()
    model.rollout_buffer.reset()
    with pytest.raises(AssertionError, match="holds 0 of 48 steps"):
        rollout_batch(model.rollout_buffer, True)
