"""The presets: with and without changes, and on which actions they belong. test_zoo.py has where they come from."""

import copy
import pickle
import warnings

import pytest
from stable_baselines3.common.envs import IdentityEnvMultiBinary

from sb3_uatrpo import RECOMMENDED, RECOMMENDED_DISCRETE, RECOMMENDED_SMALL_BATCHES, UATRPO

PRESETS = pytest.mark.parametrize("preset", [RECOMMENDED, RECOMMENDED_DISCRETE, RECOMMENDED_SMALL_BATCHES])


@PRESETS
def test_without_changes_a_preset_is_its_arguments(preset):
    assert {**preset} == preset() == preset


def test_changes_replace_arguments_and_add_others():
    changed = RECOMMENDED(gamma=0.9, seed=3)
    assert changed == {**RECOMMENDED, "gamma": 0.9, "seed": 3}
    model = UATRPO("MlpPolicy", "Pendulum-v1", device="cpu", **changed)
    assert (model.gamma, model.seed, model.shrinkage) == (0.9, 3, RECOMMENDED["shrinkage"])
    assert (model.policy.log_std == -1.0).all()
    # of policy_kwargs, the others are kept
    assert RECOMMENDED(policy_kwargs={"net_arch": [8]})["policy_kwargs"] == {"log_std_init": -1, "net_arch": [8]}
    assert RECOMMENDED(policy_kwargs={"log_std_init": 0})["policy_kwargs"] == {"log_std_init": 0}
    assert RECOMMENDED(policy_kwargs=None) == RECOMMENDED
    assert RECOMMENDED_DISCRETE(policy_kwargs={"net_arch": [8]})["policy_kwargs"] == {"net_arch": [8]}
    # and no model or call changes the preset
    RECOMMENDED()["policy_kwargs"]["net_arch"] = [8]
    UATRPO("MlpPolicy", "Pendulum-v1", device="cpu", **RECOMMENDED).policy_kwargs["net_arch"] = [8]
    assert RECOMMENDED["policy_kwargs"] == {"log_std_init": -1}


def test_the_preset_for_continuous_actions_warns_where_actions_are_discrete(tmp_path):
    for env in ("CartPole-v1", IdentityEnvMultiBinary(2)):
        with pytest.warns(UserWarning, match=r"no effect .* RECOMMENDED_DISCRETE is for discrete") as caught:
            model = UATRPO("MlpPolicy", env, device="cpu", **RECOMMENDED)
        assert [warning.filename for warning in caught] == [__file__]
    # once is enough: neither training nor loading repeats it
    model.save(tmp_path / "model")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model.learn(1)
        UATRPO.load(tmp_path / "model", env=env)
    # whatever its value
    with pytest.warns(UserWarning, match="log_std_init has no effect with the action space Discrete"):
        UATRPO("MlpPolicy", "CartPole-v1", device="cpu", **RECOMMENDED(policy_kwargs={"log_std_init": -2}))
    # and presets are silent where they belong
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        UATRPO("MlpPolicy", "Pendulum-v1", **RECOMMENDED)
        UATRPO("MlpPolicy", "CartPole-v1", **RECOMMENDED_DISCRETE)
        UATRPO("MlpPolicy", "Pendulum-v1", **RECOMMENDED_DISCRETE)


@PRESETS
@pytest.mark.parametrize(
    "change",
    [
        lambda preset: preset.__setitem__("gamma", 0.5),
        lambda preset: preset.__delitem__("gamma"),
        lambda preset: preset.update(gamma=0.5),
        lambda preset: preset.__ior__({"gamma": 0.5}),
        lambda preset: preset.pop("gamma"),
        lambda preset: preset.popitem(),
        lambda preset: preset.clear(),
        lambda preset: preset.setdefault("seed", 1),
        lambda preset: RECOMMENDED["policy_kwargs"].__setitem__("log_std_init", 0),
    ],
)
def test_presets_cannot_be_changed(preset, change):
    before = {**preset}
    with pytest.raises(TypeError, match=r"RECOMMENDED\(gamma=0.5\)"):
        change(preset)
    assert preset == before


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, lambda preset: pickle.loads(pickle.dumps(preset))])
def test_copies_of_presets_are_presets(duplicate):
    copied = duplicate(RECOMMENDED)
    assert type(copied) is type(RECOMMENDED)
    assert copied == RECOMMENDED
    assert copied(gamma=0.5) == RECOMMENDED(gamma=0.5)
