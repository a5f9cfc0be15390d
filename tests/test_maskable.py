"""UATRPO and MatchedTRPO with action masks: updates against dense references, and what MaskablePPO's users expect."""

import copy
import sys
from contextlib import nullcontext

import gymnasium as gym
import numpy as np
import pytest
import torch as th
from gymnasium import spaces
from sb3_contrib import MaskablePPO
from sb3_contrib.common.maskable.buffers import MaskableDictRolloutBuffer, MaskableRolloutBuffer
from sb3_contrib.common.maskable.callbacks import MaskableEvalCallback
from sb3_contrib.common.maskable.distributions import make_masked_proba_distribution
from sb3_contrib.common.maskable.evaluation import evaluate_policy
from sb3_contrib.common.maskable.policies import (
    MaskableActorCriticCnnPolicy,
    MaskableActorCriticPolicy,
    MaskableMultiInputActorCriticPolicy,
)
from sb3_contrib.common.maskable.utils import get_action_masks
from sb3_contrib.common.wrappers import ActionMasker
from stable_baselines3.common.callbacks import CheckpointCallback
from stable_baselines3.common.monitor import Monitor
from stable_baselines3.common.policies import ActorCriticPolicy
from stable_baselines3.common.vec_env import DummyVecEnv, SubprocVecEnv, VecNormalize
from torch.autograd.functional import jvp, vjp

from sb3_uatrpo import UATRPO, MatchedTRPO
from sb3_uatrpo.actor import Actor
from sb3_uatrpo.batch import rollout_batch
from sb3_uatrpo.families import family_of
from sb3_uatrpo.maskable import LeanMaskableRolloutBuffer, MaskableMatchedTRPO, MaskableUATRPO, MlpPolicy
from tests.forked import run_code
from tests.helpers import (
    DICT,
    LARGE_IMAGE,
    NewestFirst,
    NoiseEnv,
    SmallCombined,
    actor_vector,
    assert_same,
    back_in_time_order,
    collect,
    count_fast_steps,
    env_major,
    logged,
    make_model,
    model_on,
    take_apart,
    with_kwargs,
)
from tests.reference import AllowedChoices, WithMasks, _Double, choices
from tests.test_rollout_pool import check_updates as check_updates_with_old_rollouts
from tests.test_rollout_pool import rollout_of
from tests.test_update import check_updates

BOTH = pytest.mark.parametrize("cls", [MaskableUATRPO, MaskableMatchedTRPO])
SPACES = {
    "discrete": spaces.Discrete(5),
    "multi_discrete": spaces.MultiDiscrete([3, 2]),
    "multi_binary": spaces.MultiBinary(3),
}
OBSERVATIONS = pytest.mark.parametrize("observation_space", [None, DICT], ids=["vector", "dict"])


class PickyEnv(NoiseEnv):
    """Random masks, sometimes with one choice left. A forbidden action fails the test."""

    def draw(self):
        self.masks = []
        for size in choices(self.action_space):
            mask = self.np_random.random(size) < 0.5
            mask[self.np_random.integers(size)] = True
            self.masks.append(mask)

    def reset(self, **kwargs):
        observation, info = super().reset(**kwargs)
        self.draw()
        return observation, info

    def step(self, action):
        assert all(mask[choice] for mask, choice in zip(self.masks, np.atleast_1d(action), strict=True))
        self.draw()
        return super().step(action)

    def action_masks(self):
        return np.concatenate(self.masks)


@pytest.mark.parametrize("space", SPACES)
def test_families_are_those_of_the_allowed_choices(space):
    sizes = choices(SPACES[space])
    generator = th.Generator().manual_seed(0)
    old, new, direction = th.randn(3, 40, sum(sizes), generator=generator, dtype=th.float64)
    masks = th.rand(40, sum(sizes), generator=generator) < 0.5
    for first in (0, *np.cumsum(sizes)[:-1]):
        masks[:, first] |= ~masks[:, first : first + 2].any(dim=1)
    distribution = make_masked_proba_distribution(SPACES[space])

    def head(logits):
        distribution.proba_distribution(logits).apply_masking(masks)
        return family_of(distribution).vector(distribution)

    h = head(old)
    actions = distribution.sample().reshape(40, -1)
    family, reference = family_of(distribution), AllowedChoices(old.requires_grad_(), masks, sizes)
    th.testing.assert_close(family.log_prob(h, actions), reference.log_prob(actions))
    (score,) = th.autograd.grad(reference.log_prob(actions).sum(), old)
    th.testing.assert_close(vjp(head, old, family.score(h, actions))[1], score)
    th.testing.assert_close(family.kl(h, head(new)), reference.kl(AllowedChoices(new, masks, sizes)))
    divergence = AllowedChoices(old.detach(), masks, sizes).kl(reference).sum()
    (gradient,) = th.autograd.grad(divergence, old, create_graph=True)
    (expected,) = th.autograd.grad(gradient, old, direction)
    th.testing.assert_close(vjp(head, old, family.fisher_product(h, jvp(head, old, direction)[1]))[1], expected)
    # forbidden choices have no part in anything
    assert (expected[~masks] == 0.0).all()
    assert (expected[masks] != 0.0).any()


class DoublePolicy(_Double, MaskableActorCriticPolicy):
    pass


class DoubleMultiInputPolicy(_Double, MaskableMultiInputActorCriticPolicy):
    pass


def make_env(space: str, n_envs: int = 1, observation_space=None) -> DummyVecEnv:
    return DummyVecEnv([lambda: PickyEnv(SPACES[space], observation_space)] * n_envs)


def make_masked(cls, space="discrete", n_envs=1, observation_space=None, double=True, **kwargs):
    is_dict = isinstance(observation_space, spaces.Dict)
    policies = (DoublePolicy, DoubleMultiInputPolicy) if double else ("MlpPolicy", "MultiInputPolicy")
    kwargs = {"policy": policies[is_dict], **kwargs}
    if is_dict:
        kwargs["policy_kwargs"] = {"share_features_extractor": False, **kwargs.get("policy_kwargs", {})}
    return make_model(cls, SPACES[space], n_envs, observation_space=observation_space, env=PickyEnv, **kwargs)


def masks_of(model) -> th.Tensor:
    """The rollout's masks, env after env."""
    buffer = model.rollout_buffer
    masks = back_in_time_order(buffer, buffer.action_masks) if buffer.generator_ready else buffer.action_masks
    return th.as_tensor(np.concatenate([masks[:, e] for e in range(buffer.n_envs)]))


def for_reference(model):
    """The policy and the rollout as the functions of the reference take them."""
    obs, actions, advantages = env_major(model)
    parts = obs if isinstance(obs, dict) else {"only": obs}
    return WithMasks(model.policy), {**parts, "masks": masks_of(model)}, actions, advantages


def rollout_with_masks(model) -> dict:
    rollout = rollout_of(model)
    for name in ("observations", "last_observations"):
        rollout[name] = dict(rollout[name]) if isinstance(rollout[name], dict) else {"only": rollout[name]}
    rollout["observations"]["masks"] = model.rollout_buffer.action_masks.copy()
    return rollout


@pytest.mark.parametrize("space", SPACES)
@OBSERVATIONS
@pytest.mark.parametrize("n_envs", [1, 3])
def test_uatrpo_step_equals_the_dense_reference(space, observation_space, n_envs):
    check_updates(make_masked(MaskableUATRPO, space, n_envs, observation_space), data_of=for_reference)


@pytest.mark.parametrize("options", [{}, {"shrinkage": 0.75, "target_kl": 0.01, "step_length_samples": "batch"}])
def test_uatrpo_step_layer_by_layer_equals_the_dense_reference(options, monkeypatch):
    take_apart(monkeypatch)
    check_updates(make_masked(MaskableUATRPO, "discrete", 3, **options), data_of=for_reference)


# only the networks of Discrete actions are computed layer by layer
@pytest.mark.parametrize(("space", "layered"), [*((space, False) for space in SPACES), ("discrete", True)])
def test_trpo_step_equals_the_dense_reference(space, layered, monkeypatch):
    if layered:
        take_apart(monkeypatch)
    check_updates(make_masked(MaskableMatchedTRPO, space, cg_max_steps=200), n_updates=1, data_of=for_reference)


@pytest.mark.parametrize("space", SPACES)
@OBSERVATIONS
def test_updates_with_old_rollouts_equal_the_dense_reference(space, observation_space):
    options = {"n_reused_rollouts": 1, "cg_max_steps": 200, "n_steps": 24}
    model = make_masked(MaskableMatchedTRPO, space, 2, observation_space, **options)
    check_updates_with_old_rollouts(model, 3, WithMasks(model.policy), rollout_with_masks)


class OwnGet(NewestFirst, MaskableRolloutBuffer):
    pass


class OwnSamples(MaskableRolloutBuffer):
    """A user's: all advantages are doubled."""

    def _get_samples(self, batch_inds, env=None):
        samples = super()._get_samples(batch_inds, env)
        return samples._replace(advantages=2.0 * samples.advantages)


@pytest.mark.parametrize(
    ("buffer", "observation_space"),
    [(None, None), (None, DICT), (MaskableRolloutBuffer, None), (MaskableDictRolloutBuffer, DICT), (OwnSamples, None)],
)
def test_batch_has_the_masks_in_time_order(buffer, observation_space):
    model = collect(make_masked(MaskableUATRPO, "multi_discrete", 3, observation_space, rollout_buffer_class=buffer))
    state = np.random.get_state()[1].copy()
    expected = env_major(model)[1], masks_of(model)
    batch = rollout_batch(model.rollout_buffer, False, True)
    assert th.equal(batch.actions, expected[0])
    assert th.equal(batch.action_masks, expected[1])
    assert 0 < batch.action_masks.mean() < 1
    assert th.equal(batch[th.tensor([5, 2])].action_masks, expected[1][[5, 2]])
    # and no order was drawn
    assert (np.random.get_state()[1] == state).all()


def test_a_buffer_with_its_own_order_has_masks_in_that_order():
    model = collect(make_masked(MaskableMatchedTRPO, "discrete", rollout_buffer_class=OwnGet, batch_size=48))
    batch = rollout_batch(model.rollout_buffer, False, True)
    taken = batch.action_masks.gather(1, batch.actions.long())
    assert (taken == 1.0).all()
    model.train()
    assert logged(model)["step_fraction"] > 0


def test_the_lean_buffer_has_the_numbers_of_sb3_contrib():
    buffers = []
    for kind in (MaskableRolloutBuffer, LeanMaskableRolloutBuffer):
        model = collect(make_masked(MaskableUATRPO, "discrete", 2, double=False, rollout_buffer_class=kind))
        buffers.append(vars(model.rollout_buffer))
    theirs, ours = buffers
    arrays = [name for name, value in theirs.items() if isinstance(value, np.ndarray)]
    assert {"action_masks", "advantages", "returns", "observations"} <= set(arrays)
    assert all(np.array_equal(theirs[name], ours[name]) for name in arrays)


def test_changed_log_probabilities_give_a_warning_as_without_masks():
    model = collect(make_masked(MaskableUATRPO, "discrete"))
    model.rollout_buffer.log_probs += 1.0
    with pytest.warns(UserWarning, match="log-probabilities of the rollout differ"):
        model.train()


@pytest.mark.parametrize("space", SPACES)
def test_where_all_is_forbidden_an_update_has_nothing_to_learn(space, monkeypatch):
    """All choices are equally likely there, as in sb3-contrib, whatever the logits are."""
    gradients = []
    for layered in sorted({False, space == "discrete"}):
        with monkeypatch.context() as patch:
            if layered:
                take_apart(patch)
            model = collect(make_masked(MaskableMatchedTRPO, space))
            model.rollout_buffer.action_masks[7:] = 0.0
            actor, batch = Actor(model.policy), rollout_batch(model.rollout_buffer, False, True)
            with actor.update_mode():
                actor.find_params(batch)
                whole, known = actor.estimates(batch), actor.estimates(batch[:7])
                vector = th.ones(whole.n_params, dtype=th.float64)
                expected = known.gradient() * 7 / 48, known.fisher_product(vector) * 7 / 48
                found = whole.gradient(), whole.fisher_product(vector)
            th.testing.assert_close(found, expected)
            assert all(part.any() for part in found)
            gradients.append(found[0])
    th.testing.assert_close(gradients[0], gradients[-1])


# In place of MaskablePPO


@BOTH
@pytest.mark.parametrize("space", SPACES)
@OBSERVATIONS
def test_a_script_of_maskable_ppo(cls, space, observation_space, tmp_path):
    model = make_masked(cls, space, 2, observation_space, double=False)
    evaluation = Monitor(ActionMasker(PickyEnv(SPACES[space], observation_space), lambda env: env.action_masks()))
    callback = MaskableEvalCallback(
        evaluation, eval_freq=48, n_eval_episodes=2, best_model_save_path=tmp_path, verbose=0
    )
    model.learn(192, callback=callback)
    evaluate_policy(model, evaluation, n_eval_episodes=2)
    loaded = cls.load(tmp_path / "best_model", env=model.env, device="cpu")
    loaded.learn(96)
    model.save(tmp_path / "model")
    loaded = cls.load(tmp_path / "model", device="cpu")
    obs, masks = model.env.reset(), get_action_masks(model.env)
    actions = [policy.predict(obs, deterministic=True, action_masks=masks)[0] for policy in (model, loaded)]
    assert (actions[0] == actions[1]).all()


@BOTH
@pytest.mark.parametrize(
    ("policy", "own", "observation_space"),
    [
        ("MlpPolicy", MlpPolicy, None),
        (MaskableActorCriticPolicy, MaskableActorCriticPolicy, None),
        ("CnnPolicy", MaskableActorCriticCnnPolicy, LARGE_IMAGE),
        (MaskableActorCriticCnnPolicy, MaskableActorCriticCnnPolicy, LARGE_IMAGE),
        ("MultiInputPolicy", MaskableMultiInputActorCriticPolicy, DICT),
        (lambda *args, **kwargs: DoublePolicy(*args, **kwargs), DoublePolicy, None),
    ],
)
def test_policies_are_what_the_user_names(cls, policy, own, observation_space):
    small = {"features_extractor_kwargs": {"features_dim": 8}} if own is MaskableActorCriticCnnPolicy else {}
    model = make_masked(cls, observation_space=observation_space, policy=policy, policy_kwargs=small)
    assert type(model.policy) is own
    assert logged(model.learn(48))["kl_estimated"] > 0


@pytest.mark.parametrize("space", SPACES)
@pytest.mark.parametrize(
    ("policy", "observation_space"), [("MlpPolicy", None), ("CnnPolicy", LARGE_IMAGE), ("MultiInputPolicy", DICT)]
)
def test_the_first_rollout_is_that_of_maskable_ppo(space, policy, observation_space, monkeypatch):
    fast = count_fast_steps(monkeypatch)
    kwargs = {"features_extractor_class": SmallCombined} if observation_space is DICT else {}
    options = {"n_steps": 32, "batch_size": 32, "gamma": 0.9, "seed": 2, "device": "cpu", "policy_kwargs": kwargs}
    rollouts = []
    for cls in (MaskablePPO, MaskableUATRPO):
        model = cls(policy, make_env(space, 2, observation_space), **options)
        collect(model)
        rollouts.append(vars(model.rollout_buffer))
    for name in ("actions", "action_masks", "episode_starts"):
        assert np.array_equal(rollouts[0][name], rollouts[1][name]), name
    for name in ("rewards", "values", "log_probs"):
        np.testing.assert_allclose(rollouts[0][name], rollouts[1][name], rtol=1e-4, atol=1e-6)
    # where NumPy can act, it does
    assert len(fast) == (32 if space == "discrete" and policy == "MlpPolicy" else 0)
    model.policy.load_state_dict(MaskablePPO(policy, model.env, **options).policy.state_dict())


def test_numpy_updates_as_torch_does():
    actors = []
    for is_plain in (True, False):
        model = make_masked(MaskableUATRPO, n_envs=2, double=False)
        if not is_plain:
            model.policy.action_net.register_forward_hook(lambda module, inputs, output: None)
        assert (Actor(model.policy).mlp is not None) == is_plain
        before = actor_vector(model)
        model.learn(192)
        actors.append(actor_vector(model))
    assert np.abs(actors[0] - before).max() > 1e-3
    np.testing.assert_allclose(*actors, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("convert", [np.asarray, lambda mask: mask.astype(np.int8), lambda mask: mask.tolist()])
def test_masks_of_any_kind(convert):
    env = ActionMasker(PickyEnv(SPACES["discrete"]), lambda env: convert(env.action_masks()))
    model = model_on(MaskableUATRPO, env).learn(64)
    assert not model.rollout_buffer.action_masks.all()


def test_logits_that_are_not_finite_raise_the_error_of_sb3_contrib():
    """Those of forbidden choices, too."""
    env = ActionMasker(NoiseEnv(SPACES["discrete"]), lambda env: np.arange(5) > 0)
    model = model_on(MaskableUATRPO, env)
    with th.no_grad():
        model.policy.action_net.bias[0] = th.nan
    with pytest.raises(ValueError, match="parameter logits"):
        collect(model)


def test_action_dist_has_the_masks():
    model = collect(make_masked(MaskableUATRPO, "discrete", 2, double=False))
    distribution = model.policy.action_dist.distribution
    last = th.as_tensor(model.rollout_buffer.action_masks[-1]) > 0
    assert th.equal(distribution.probs > 0, last)
    model.train()
    assert th.equal(model.policy.action_dist.distribution.probs > 0, masks_of(model) > 0)


@BOTH
@pytest.mark.parametrize("space", SPACES)
@pytest.mark.parametrize("n_reused_rollouts", [0, 2])
def test_copies_and_checkpoints_continue_bit_for_bit(cls, space, n_reused_rollouts, tmp_path):
    model = make_masked(cls, space, 2, double=False, n_reused_rollouts=n_reused_rollouts)
    model.learn(96, callback=CheckpointCallback(48, str(tmp_path)))
    model.save(tmp_path / "model")
    copied, loaded = copy.deepcopy(model), cls.load(tmp_path / "model", env=make_env(space, 2), device="cpu")
    before = actor_vector(model)
    assert_same(model, copied, loaded)
    for continued in (model, copied, loaded):
        continued.set_random_seed(5)
        continued.env.seed(5)
        for env in continued.env.envs:
            env.observation_space.seed(5)
        continued._last_obs = continued.env.reset()
        continued._last_episode_starts = np.ones(2, bool)
        for _ in range(2):
            collect(continued)
            continued.set_logger(model.logger)
            continued.train()
    assert len(model.rollout_pool) == n_reused_rollouts
    assert_same(model, copied, loaded)
    assert not np.array_equal(actor_vector(model), before)
    cls.load(tmp_path / "rl_model_96_steps", device="cpu")


def test_processes_and_normalised_observations():
    env = SubprocVecEnv([lambda: PickyEnv(SPACES["discrete"]) for _ in range(2)], start_method="fork")
    try:
        model = model_on(MaskableUATRPO, VecNormalize(env)).learn(128)
        assert 0.0 < model.rollout_buffer.action_masks.mean() < 1.0
    finally:
        env.close()


def test_all_actions_are_allowed_without_masking():
    model = model_on(MaskableUATRPO, NoiseEnv(SPACES["discrete"]))
    with pytest.raises(ValueError, match="does not support action masking"):
        model.learn(32)
    model.learn(32, use_masking=False)
    assert model.rollout_buffer.action_masks.all()


def test_a_callback_can_stop_it():
    model = make_masked(MaskableMatchedTRPO, "discrete", double=False)
    model.learn(480, callback=lambda in_learn, in_module: in_learn["n_steps"] < 5)
    assert model.num_timesteps == 6


def test_boxes_and_policies_without_masks_are_refused():
    with pytest.raises(AssertionError, match="only supports"):
        MaskableUATRPO("MlpPolicy", NoiseEnv(spaces.Box(-1.0, 1.0, (2,))))
    for policy in ("uatrpo", ActorCriticPolicy):
        with pytest.raises(ValueError, match="policy must be a subclass of MaskableActorCriticPolicy, 'MlpPolicy'"):
            MaskableUATRPO(policy, NoiseEnv(SPACES["discrete"]))
    with pytest.raises(ValueError, match="policy must be a subclass of ActorCriticPolicy, 'MlpPolicy'"):
        UATRPO(MaskableActorCriticPolicy, NoiseEnv(SPACES["discrete"]))


@pytest.mark.parametrize(("saved", "other"), [(MaskableUATRPO, UATRPO), (MatchedTRPO, MaskableMatchedTRPO)])
def test_files_of_the_classes_without_masks_are_refused(saved, other, tmp_path):
    model_on(saved, make_env("discrete")).save(tmp_path / "model")
    with pytest.raises(ValueError, match="policy must be a subclass of"):
        other.load(tmp_path / "model", device="cpu")


# Without masks


class Silent(DummyVecEnv):
    """A user's, which does not say what it has."""

    def has_attr(self, attr_name):
        raise NotImplementedError


def allowed(env) -> np.ndarray:
    return np.ones(5, bool)


@pytest.mark.parametrize("cls", [UATRPO, MatchedTRPO])
def test_ignored_masks_give_one_warning(cls):
    model = model_on(cls, gym.Wrapper(NoiseEnv(SPACES["discrete"]))).learn(32)
    model.set_env(ActionMasker(NoiseEnv(SPACES["discrete"]), allowed))
    for _ in range(2):
        with pytest.warns(UserWarning, match=f"{cls.__name__} ignores the environment's action_masks") as caught:
            model.learn(64)
        assert [warning.filename for warning in caught] == [__file__]


def test_masks_in_the_observation_and_silent_environments_give_no_warning():
    for key in ("action_mask", "legal"):
        space = spaces.Dict({"x": spaces.Discrete(2), key: spaces.MultiBinary(5)})
        env = ActionMasker(NoiseEnv(SPACES["discrete"], space), allowed)
        warned = pytest.warns(UserWarning, match="ignores the environment's action_masks")
        with nullcontext() if "mask" in key else warned:
            model_on(UATRPO, env, "MultiInputPolicy").learn(32)
    model_on(UATRPO, Silent([lambda: ActionMasker(NoiseEnv(SPACES["discrete"]), allowed)])).learn(32)


def test_a_buffer_with_masks_is_nothing_special_to_policies_without():
    """Before there were classes with masks, these buffers worked as a user's own would."""
    # its critic is trained in torch, from the buffer's samples
    kwargs = {"rollout_buffer_class": MaskableRolloutBuffer, **with_kwargs(activation_fn=th.nn.ELU)}
    model = make_model(UATRPO, SPACES["discrete"], **kwargs)
    assert logged(model.learn(96))["kl_estimated"] > 0


def test_package_does_not_import_sb3_contrib(tmp_path):
    code = "import sys, sb3_uatrpo; print('sb3_contrib' in sys.modules)"
    assert run_code(code, cwd=tmp_path).stdout == "False\n"


def test_without_sb3_contrib_the_error_says_what_to_install(monkeypatch):
    for name in [name for name in sys.modules if name.partition(".")[0] == "sb3_contrib"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "sb3_contrib", None)
    monkeypatch.delitem(sys.modules, "sb3_uatrpo.maskable")
    with pytest.raises(ModuleNotFoundError, match=r'pip install "sb3-contrib>=2.9,<3"'):
        import sb3_uatrpo.maskable  # noqa: F401
