import math
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

from sb3_uatrpo.study.plan import NOISE, parse_seeds, parse_value, plan, read_study_file
from sb3_uatrpo.study.record import RunSpec, StudyError

SPEC = RunSpec("ppo", "CartPole-v1", 0, 100, "", {"gamma": 0.9, "n_envs": 2}, 0, 5)


def test_a_key_follows_from_everything_but_the_order():
    assert replace(SPEC, hyperparameters={"n_envs": 2, "gamma": 0.9}).key() == SPEC.key()
    # what is on disk must be found again, so this never changes
    assert SPEC.key() == "72c4cd7020"
    others = ["a2c", "Pendulum-v1", 1, 101, "x=1", {"gamma": 0.91, "n_envs": 2}, 1, 6]
    changed = [replace(SPEC, **{field.name: value}) for field, value in zip(fields(SPEC), others, strict=True)]
    assert len({spec.key() for spec in [SPEC, *changed]}) == 1 + len(others)
    assert len({SPEC, *changed}) == 1 + len(others)


def test_equal_is_what_has_one_key():
    # a setting that comes back from a file
    assert replace(SPEC, hyperparameters={"train_freq": (4, "step")}) == replace(
        SPEC, hyperparameters={"train_freq": [4, "step"]}
    )
    assert replace(SPEC, hyperparameters={"gamma": 1}) != replace(SPEC, hyperparameters={"gamma": 1.0})
    assert SPEC != SPEC.key()


def test_names():
    spec = replace(SPEC, env_id="module:ALE/Pong-v5", variant="noise=1,gamma=0.9", seed=12)
    assert spec.file_name == f"ppo_module-ALE-Pong-v5_noise=1-gamma=0.9_s12_{spec.key()}.json.gz"
    assert str(spec) == "ppo (noise=1,gamma=0.9) on module:ALE/Pong-v5, seed 12"


def test_a_long_variant_has_a_file():
    long = [replace(SPEC, variant=f"{'é' * 200}={i}") for i in (0, 1)]
    # with ".lock", what file systems take
    assert all(len(f"{spec.file_name}.lock".encode()) <= 255 for spec in long)
    assert len({spec.file_name for spec in long}) == 2
    longest = replace(SPEC, variant="x" * (231 - len("ppo_CartPole-v1__s0")))
    assert longest.file_name == f"ppo_CartPole-v1_{longest.variant}_s0_{longest.key()}.json.gz"


def test_a_plan_is_the_product():
    noise = {"adversarial_noise": [0.0, 1.0]}
    specs = plan(["uatrpo", "trpo_matched"], ["Hopper-v4", "HalfCheetah-v4"], [0, 1, 2], 1000, vary=noise)
    assert len(specs) == len(set(specs)) == 2 * 2 * 3 * 2
    # seed after seed, so that what is there is balanced at any time
    assert [spec.seed for spec in specs] == sorted(spec.seed for spec in specs)
    for spec in specs:
        assert spec.hyperparameters.get("adversarial_noise") == (1.0 if spec.variant == "noise=1" else None)
    plain = plan(["uatrpo", "trpo_matched"], ["Hopper-v4", "HalfCheetah-v4"], [0, 1, 2], 1000)
    assert set(plain) < set(specs)


def test_the_papers_algorithms_are_matched():
    for env_id in ("Hopper-v4", "HalfCheetah-v4", "Walker2d-v4", "Swimmer-v4"):
        ours, theirs = (spec.hyperparameters for spec in plan(["uatrpo_paper", "trpo_matched"], [env_id], [0]))
        assert {"gamma", "gae_lambda", "n_steps", "normalize", "sub_sampling_factor"} <= set(ours) & set(theirs)
        assert all(ours[name] == theirs[name] for name in set(ours) & set(theirs))


def test_settings_come_from_the_files_and_can_be_overridden(tmp_path):
    (spec,) = plan(["trpo"], ["CartPole-v1"], [0])
    assert spec.hyperparameters["policy"] == "MlpPolicy"
    assert spec.n_timesteps == 100_000
    assert "n_timesteps" not in spec.hyperparameters

    file = tmp_path / "own.yml"
    file.write_text("default:\n  policy: MlpPolicy\n  n_timesteps: 5e3\n  gamma: 0.5\n")
    specs = plan(
        ["trpo", "ppo"],
        ["CartPole-v1"],
        [0],
        params=["gamma:0.6", "ppo.gamma:0.7", "ppo.n_timesteps:5e3", "policy_kwargs:dict(activation_fn=nn.ReLU)"],
        conf_files=[f"trpo:{file}"],
    )
    assert specs[0].n_timesteps == 5000
    assert specs[0].hyperparameters == {
        "policy": "MlpPolicy",
        "gamma": 0.6,
        "policy_kwargs": "dict(activation_fn=nn.ReLU)",
    }
    assert specs[1].hyperparameters["gamma"] == 0.7
    both = plan(["trpo", "ppo"], ["CartPole-v1"], [0], conf_files=[str(file)])
    assert [spec.hyperparameters["gamma"] for spec in both] == [0.5, 0.5]


def test_runs_that_no_report_compares_are_refused():
    message = r"on CartPole-v1 they have 100,000 \(ppo, trpo\) and 200,000 \(a2c\) steps.*--n-timesteps"
    algos = ["ppo", "trpo", "a2c"]
    with pytest.raises(StudyError, match=message):
        plan(algos, ["CartPole-v1", "Pendulum-v1"], [0], params=["n_timesteps:1e5", "a2c.n_timesteps:2e5"])
    assert {spec.n_timesteps for spec in plan(algos, ["CartPole-v1"], [0], 500)} == {500}
    # environments may differ
    assert {spec.n_timesteps for spec in plan(["trpo"], ["CartPole-v1", "HalfCheetah-v4"], [0])} == {100_000, 1_000_000}


def test_settings_are_as_a_record_has_them():
    (spec,) = plan(["sac"], ["Pendulum-v1"], [0], vary={"train_freq": [(4, "step")]})
    assert spec.hyperparameters["train_freq"] == [4, "step"]
    assert spec.variant == "train_freq=(4, 'step')"


def test_no_noise_is_the_plain_algorithm_whatever_a_file_says(tmp_path):
    file = tmp_path / "own.yml"
    file.write_text("default:\n  policy: MlpPolicy\n  adversarial_noise: 2.0\n")
    noise = {"adversarial_noise": [0.0, 1.0]}
    specs = plan(["uatrpo"], ["CartPole-v1"], [0], 100, vary=noise, conf_files=[str(file)])
    assert [(spec.variant, spec.hyperparameters.get("adversarial_noise")) for spec in specs] == [
        ("", None),
        ("noise=1", 1.0),
    ]


def test_noise_has_one_key_however_it_is_written():
    (typed,) = plan(["uatrpo"], ["CartPole-v1"], [0], 100, vary={NOISE: [1]})
    (of_option,) = plan(["uatrpo"], ["CartPole-v1"], [0], 100, vary={NOISE: [1.0]})
    assert typed == of_option
    # a flag is no number, and the constructor will say so
    (flag,) = plan(["uatrpo"], ["CartPole-v1"], [0], 100, vary={NOISE: [True]})
    assert flag.hyperparameters[NOISE] is True
    assert typed.variant == "noise=1"


def test_values_are_read_as_python_writes_them():
    values = ["0.1", "1e-3", "True", "[1, 2]", "lin_0.1", "dict(a=1)", "'text'"]
    assert [parse_value(text) for text in values] == [0.1, 0.001, True, [1, 2], "lin_0.1", "dict(a=1)", "text"]
    # as text, "false" would switch on what it should switch off
    assert [parse_value(text) for text in ("false", "TRUE", "null", "none")] == [False, True, None, None]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"algos": ["uatrpoo"]}, "unknown algorithm 'uatrpoo'; did you mean 'uatrpo'?"),
        ({"algos": ["x"]}, "known names: a2c, ars"),
        ({"env_ids": ["Pendulum-v7"]}, "unknown environment 'Pendulum-v7'; did you mean"),
        ({"env_ids": ["no_such_module:Odd-v0"]}, "No module named 'no_such_module'"),
        ({"params": ["gama:0.9"]}, "unknown hyperparameter 'gama' of ppo; did you mean 'gamma'?"),
        ({"params": ["seed:1"]}, "unknown hyperparameter 'seed' of ppo"),
        ({"params": ["gamma"]}, "a hyperparameter must be written name:value, but it is 'gamma'"),
        ({"params": ["trpo.gamma:0.9"]}, "'trpo', which is not in the study"),
        ({"params": ["ppoo.gamma:0.9"]}, "ppoo.gamma:0.9 gives a hyperparameter to 'ppoo', which is not in the study"),
        ({"env_ids": [":CartPole-v1"]}, "unknown environment ':CartPole-v1'; did you mean 'CartPole-v1'?"),
        ({"env_ids": ["..:Odd-v0"]}, "environment '..:Odd-v0': TypeError: "),
        ({"env_ids": ["broken_task:Odd-v0"]}, "environment 'broken_task:Odd-v0': SystemExit: not today"),
        ({"seeds": [-1]}, "a seed must be an integer from 0 to 2**32-1, but it is -1"),
        ({"params": ["gamma:{1, 2}"]}, "but it is {1, 2}; code is written as a string"),
        (
            {"vary": {"gamma": [{1, 2}]}},
            "gamma of ppo on CartPole-v1 must be a finite number or a value that JSON can hold",
        ),
        ({"params": ["max_grad_norm:1e999"]}, "max_grad_norm of ppo on CartPole-v1 must be a finite number or"),
        (
            {"vary": {"gamma": [math.nan]}},
            "gamma of ppo on CartPole-v1 must be a finite number or a value that JSON can hold, but it is nan",
        ),
        (
            {"conf_files": ["INFINITE"]},
            "gamma of ppo on CartPole-v1 must be a finite number or a value that JSON can hold, but it is inf",
        ),
        ({"vary": {"n_timesteps": [50, 60]}}, "unknown hyperparameter 'n_timesteps' of ppo"),
        ({"vary": {"gamma": [0.9]}, "params": ["gamma:0.8"]}, "gamma is both overridden and varied"),
        ({"vary": {"gamma": [0.9]}, "params": ["ppo.gamma:0.8"]}, "gamma is both overridden and varied"),
        *(
            ({"params": [f"n_timesteps:{n}"], "n_timesteps": None}, f"must be an integer of at least 1, but it is {n}")
            for n in ("'abc'", -5, 0.5, 100.5, "[1]")
        ),
        (
            {"vary": {"adversarial_noise": [0.0, 1.0]}},
            "ppo has no adversarial_noise (--noise), only trpo_matched, uatrpo, uatrpo_paper",
        ),
        ({"vary": {"gama": [1]}}, "unknown hyperparameter 'gama'"),
        ({"conf_files": ["no_such_file.yml"]}, "No such file"),
        ({"conf_files": ["ppoo:own.yml"]}, "No such file or directory: 'ppoo:own.yml'"),
        ({"conf_files": ["EMPTY"]}, "ppo on CartPole-v1"),
        ({"conf_files": ["OTHERS"]}, "not found for ppo-CartPole-v1"),
        ({"conf_files": ["BROKEN"]}, "ppo on CartPole-v1"),
        ({"conf_files": ["LIST"]}, "ppo on CartPole-v1"),
        ({"conf_files": ["RAISES"]}, "NameError: name 'gamma' is not defined"),
        ({"conf_files": ["EXITS"]}, "SystemExit: not today"),
        ({"params": ["policy_kwargs:{'a': {1: 2}}"]}, "policy_kwargs of ppo on CartPole-v1 must be"),
        ({"params": ["n_timesteps:50"]}, "n_timesteps is given twice: for all runs (10), and as a hyperparameter"),
        ({"variants": {"long": {"ppo": {"n_timesteps": 50}}}}, "n_timesteps is given twice"),
        ({"algos": ["ars"], "params": ["n_envs:2"]}, "ars takes n_envs 1 in a study, but on CartPole-v1 it is 2"),
        ({"conf_files": ["sac:own.yml"]}, "sac:own.yml gives a file to 'sac', which is not in the study"),
    ],
)
def test_what_does_not_exist_is_named(changes, message, tmp_path, monkeypatch):
    (tmp_path / "broken_task.py").write_text("raise SystemExit('not today')\n")
    monkeypatch.syspath_prepend(tmp_path)
    files = {
        "EMPTY": "",
        "OTHERS": "Acrobot-v1:\n  policy: MlpPolicy\n",
        "BROKEN": "a: [",
        "LIST": "- 1\n",
        "INFINITE": "default:\n  policy: MlpPolicy\n  gamma: .inf\n",
        "RAISES": "hyperparams = {'default': {'gamma': gamma}}\n",
        "EXITS": "raise SystemExit('not today')\n",
    }
    suffixes = {"RAISES": ".py", "EXITS": ".py"}
    for name, text in files.items():
        (tmp_path / name).with_suffix(suffixes.get(name, ".yml")).write_text(text)
    if (name := changes.get("conf_files", [""])[0]) in files:
        changes = {"conf_files": [str((tmp_path / name).with_suffix(suffixes.get(name, ".yml")))]}
    arguments = {"algos": ["ppo"], "env_ids": ["CartPole-v1"], "seeds": [0], "n_timesteps": 10, **changes}
    with pytest.raises(StudyError) as caught:
        plan(**arguments)
    assert message in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1


def test_names_of_varied_values_tell_them_apart():
    def names(algo, **vary):
        return [spec.variant for spec in plan([algo], ["CartPole-v1"], [0], 10, vary=vary)]

    assert names("ppo", gamma=[0.9999999, 0.99999999, 1.0]) == ["gamma=0.9999999", "gamma=0.99999999", "gamma=1"]
    assert names("ppo", gamma=[1, 1.0]) == ["gamma=1"]
    assert names("uatrpo", trust_region_delta=[1e-6, 0.03]) == ["trust_region_delta=1e-06", "trust_region_delta=0.03"]
    (spec,) = plan(["ppo"], ["CartPole-v1"], [0], 10, vary={"policy_kwargs": ["dict(a=[64],net_arch=[32,64])"]})
    assert spec.varied == ["policy_kwargs=dict(a=[64], net_arch=[32, 64])"]


def test_a_range_of_seeds_is_bounded_before_it_is_written_out():
    assert parse_seeds(["3", "1-2", 2]) == [3, 1, 2]
    with pytest.raises(StudyError, match="up to 100,000 seeds, but 0-4000000000 has 4,000,000,001"):
        parse_seeds(["0-4000000000"])


def test_the_documented_commands_plan_the_committed_runs():
    """A repeated command finds the runs that have a record."""
    results = Path(__file__).parents[2] / "benchmarks" / "results"
    study = read_study_file(results / "paper_batches_study.yml")
    batches: dict[str, Any] = {
        "variants": study["variants"],
        "conf_files": [f"uatrpo:{results / 'paper_batches.yml'}"],
    }
    tasks = ["Hopper-v4", "HalfCheetah-v4", "Walker2d-v4", "Swimmer-v4"]
    a_million: dict[str, Any] = {"n_timesteps": 1_000_000, "eval_freq": 50_000}
    without = {"uncertainty_coef": [0]}
    damped = {"sub_sampling_factor": [1], "cg_damping": [1.0]}
    small = read_study_file(results / "small_tasks" / "study.yml") | {"seeds": [1, 2, 3]}
    planned = {
        "paper": [
            *plan(["uatrpo_paper", "trpo_matched"], tasks, range(5), **a_million, **batches),
            *plan(["uatrpo_paper", "trpo_matched"], tasks, range(3), **a_million, **batches, vary={NOISE: [1.0]}),
            *plan([], tasks, range(3), **a_million, **batches, vary={NOISE: [0.0, 1.0], **without}),
            *plan([], tasks, range(3, 5), **a_million, **batches, vary=without),
            *plan(["trpo_matched"], tasks, range(3), **a_million, vary=damped),
        ],
        "first": plan(["uatrpo_paper"], tasks[:2], range(4), 300_000, **batches),
        "small_tasks": plan(
            **small,
            conf_files=[*batches["conf_files"], f"uatrpo_paper:{results / 'small_tasks' / 'uatrpo_paper.yml'}"],
        ),
    }
    for folder, specs in planned.items():
        names = {path.name for path in (results / folder / "records").iterdir()}
        assert names == {spec.file_name for spec in specs}
