import json
import math
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from sb3_uatrpo.study import read_study
from sb3_uatrpo.study.plan import NOISE, Run, StudyError, parse_seeds, plan, read_study_file, split_assignment, versions
from tests.study.synthetic import write_run


def test_names_and_folders():
    run = Run("ppo", "module:ALE/Pong-v5", 12, "noise=1,gamma=0.9", 100, 0, 5, {})
    assert str(run) == "ppo (noise=1,gamma=0.9) on module:ALE/Pong-v5, seed 12"
    # RL Zoo's 0 means the latest run
    assert run.path == Path("noise=1,gamma=0.9", "ppo", "ALE-Pong-v5_13")
    assert Run("ppo", "A-v0", 0, "", 1, 0, 5, {}).path == Path("plain", "ppo", "A-v0_1")
    # in ASCII, and short enough for every file system; where two are the same, the plan is refused
    variants = ["λ 0.9 / 2", f"{'é' * 200}=1", "x" * 300]
    names = [Run("ppo", "A-v0", 0, variant, 1, 0, 5, {}).path.parts[0] for variant in variants]
    assert names[0] == "-0.9-2"
    assert all(name.isascii() and len(name) <= 200 for name in names)


def test_versions_tell_changes_of_the_source(monkeypatch, tmp_path):
    found = versions()
    assert found == versions()
    assert found["torch"]
    assert found["platform"]
    import sb3_uatrpo

    (tmp_path / "module.py").write_text("x = 1\n")
    monkeypatch.setattr(sb3_uatrpo, "__file__", str(tmp_path / "__init__.py"))
    other = versions()["sb3_uatrpo"]
    assert other != found["sb3_uatrpo"]
    (tmp_path / "module.py").write_text("x = 2\n")
    assert versions()["sb3_uatrpo"] != other


def test_a_plan_is_the_product():
    noise = {"adversarial_noise": [0.0, 1.0]}
    runs = plan(["uatrpo", "trpo_matched"], ["Hopper-v4", "HalfCheetah-v4"], [0, 1, 2], 1000, vary=noise)
    assert len(runs) == len({run.path for run in runs}) == 2 * 2 * 3 * 2
    # seed after seed, so that what is there is balanced at any time
    assert [run.seed for run in runs] == sorted(run.seed for run in runs)
    for run in runs:
        assert run.hyperparameters.get("adversarial_noise") == (1.0 if run.variant == "noise=1" else None)
    plain = plan(["uatrpo", "trpo_matched"], ["Hopper-v4", "HalfCheetah-v4"], [0, 1, 2], 1000)
    assert all(run in runs for run in plain)


def test_the_papers_algorithms_are_matched():
    for env_id in ("Hopper-v4", "HalfCheetah-v4", "Walker2d-v4", "Swimmer-v4"):
        ours, theirs = (run.hyperparameters for run in plan(["uatrpo_paper", "trpo_matched"], [env_id], [0]))
        assert {"gamma", "gae_lambda", "n_steps", "normalize", "sub_sampling_factor"} <= set(ours) & set(theirs)
        assert all(ours[name] == theirs[name] for name in set(ours) & set(theirs))


def test_settings_come_from_the_files_and_can_be_overridden(tmp_path):
    (run,) = plan(["trpo"], ["CartPole-v1"], [0])
    assert run.hyperparameters["policy"] == "MlpPolicy"
    assert run.n_timesteps == 100_000
    assert "n_timesteps" not in run.hyperparameters

    file = tmp_path / "own.yml"
    file.write_text("default:\n  policy: MlpPolicy\n  n_timesteps: 5e3\n  gamma: 0.5\n")
    kwargs = "dict(activation_fn=nn.ReLU)"
    params = ["gamma:0.6", "ppo.gamma:0.7", "ppo.n_timesteps:5e3", f"policy_kwargs:{kwargs}"]
    runs = plan(["trpo", "ppo"], ["CartPole-v1"], [0], params=params, conf_files=[f"trpo:{file}"])
    assert runs[0].n_timesteps == 5000
    assert runs[0].hyperparameters == {"policy": "MlpPolicy", "gamma": 0.6, "policy_kwargs": kwargs}
    assert runs[1].hyperparameters["gamma"] == 0.7
    both = plan(["trpo", "ppo"], ["CartPole-v1"], [0], conf_files=[str(file)])
    assert [run.hyperparameters["gamma"] for run in both] == [0.5, 0.5]


def test_runs_that_no_report_compares_are_refused():
    message = r"on CartPole-v1, ppo has 100,000 steps and a2c 200,000; .*--n-timesteps"
    algos = ["ppo", "trpo", "a2c"]
    with pytest.raises(StudyError, match=message):
        plan(algos, ["CartPole-v1", "Pendulum-v1"], [0], params=["n_timesteps:1e5", "a2c.n_timesteps:2e5"])
    assert {run.n_timesteps for run in plan(algos, ["CartPole-v1"], [0], 500)} == {500}
    # environments may differ
    assert {run.n_timesteps for run in plan(["trpo"], ["CartPole-v1", "HalfCheetah-v4"], [0])} == {100_000, 1_000_000}


def test_no_noise_is_the_plain_algorithm_whatever_a_file_says(tmp_path):
    file = tmp_path / "own.yml"
    file.write_text("default:\n  policy: MlpPolicy\n  adversarial_noise: 2.0\n")
    noise = {"adversarial_noise": [0.0, 1.0]}
    runs = plan(["uatrpo"], ["CartPole-v1"], [0], 100, vary=noise, conf_files=[str(file)])
    found = [(run.variant, run.hyperparameters.get("adversarial_noise")) for run in runs]
    assert found == [("", None), ("noise=1", 1.0)]


def test_values_are_read_as_python_writes_them():
    values = ["0.1", "1e-3", "True", "[1, 2]", "lin_0.1", "dict(a=1)", "'text'", "a:b"]
    found = [split_assignment(f"name:{text}") for text in values]
    assert found == [("name", x) for x in (0.1, 0.001, True, [1, 2], "lin_0.1", "dict(a=1)", "text", "a:b")]
    # as text, "false" would switch on what it should switch off
    words = [split_assignment(f"name:{text}")[1] for text in ("false", "TRUE", "null", "none")]
    assert words == [False, True, None, None]
    assert parse_seeds(["3", "1-2", 2]) == [3, 1, 2]


FILES = {
    "empty.yml": "",
    "others.yml": "Acrobot-v1:\n  policy: MlpPolicy\n",
    "broken.yml": "a: [",
    "list.yml": "- 1\n",
    "infinite.yml": "default:\n  policy: MlpPolicy\n  gamma: .inf\n",
    "raises.py": "hyperparams = {'default': {'gamma': gamma}}\n",
    "exits.py": "raise SystemExit('not today')\n",
}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"algos": ["uatrpoo"]}, "unknown algorithm 'uatrpoo'; RL Zoo knows a2c, ars"),
        ({"env_ids": ["Pendulum-v7"]}, "environment 'Pendulum-v7': Gymnasium does not know it"),
        ({"env_ids": ["no_such_module:Odd-v0"]}, "No module named 'no_such_module'"),
        ({"env_ids": [":CartPole-v1"]}, "environment ':CartPole-v1': Gymnasium does not know it"),
        ({"env_ids": ["..:Odd-v0"]}, "environment '..:Odd-v0': TypeError: "),
        ({"env_ids": ["broken_task:Odd-v0"]}, "environment 'broken_task:Odd-v0': SystemExit: not today"),
        ({"params": ["gama:0.9"]}, "hyperparameters of ppo on CartPole-v1: unknown 'gama'; known are "),
        ({"params": ["seed:1"]}, "unknown 'seed'; known are "),
        ({"params": ["gamma"]}, "a hyperparameter must be written name:value, but it is 'gamma'"),
        ({"params": ["trpo.gamma:0.9"]}, "unknown 'trpo.gamma'"),
        ({"params": ["ppoo.gamma:0.9"]}, "unknown 'ppoo.gamma'"),
        ({"seeds": [-1]}, "a seed must be an integer from 0 to 2**32-1, or a range such as 0-49"),
        ({"params": ["gamma:{1, 2}"]}, "hyperparameters of ppo on CartPole-v1: TypeError: Object of type set is not"),
        ({"params": ["max_grad_norm:1e999"]}, "Out of range float values are not JSON compliant"),
        ({"vary": {"gamma": [math.nan]}}, "Out of range float values are not JSON compliant"),
        ({"conf_files": ["infinite.yml"]}, "Out of range float values are not JSON compliant"),
        ({"vary": {"n_timesteps": [50, 60]}}, "unknown 'n_timesteps'"),
        ({"vary": {"gamma": [0.9]}, "params": ["gamma:0.8"]}, "gamma is both overridden and varied"),
        ({"vary": {"gamma": [0.9]}, "params": ["ppo.gamma:0.8"]}, "gamma is both overridden and varied"),
        *(
            ({"params": [f"n_timesteps:{n}"], "n_timesteps": None}, f"must be an integer of at least 1, but it is {n}")
            for n in ("'abc'", -5, 0.5, 100.5, "[1]")
        ),
        ({"vary": {"adversarial_noise": [0.0, 1.0]}}, "unknown 'adversarial_noise'"),
        ({"conf_files": ["no_such_file.yml"]}, "No such file"),
        ({"conf_files": ["ppoo:own.yml"]}, "No such file or directory: 'ppoo:own.yml'"),
        ({"conf_files": ["sac:own.yml"]}, "No such file or directory: 'sac:own.yml'"),
        ({"conf_files": ["empty.yml"]}, "ppo on CartPole-v1"),
        ({"conf_files": ["others.yml"]}, "not found for ppo-CartPole-v1"),
        ({"conf_files": ["broken.yml"]}, "ppo on CartPole-v1"),
        ({"conf_files": ["list.yml"]}, "ppo on CartPole-v1"),
        ({"conf_files": ["raises.py"]}, "NameError: name 'gamma' is not defined"),
        ({"conf_files": ["exits.py"]}, "SystemExit: not today"),
        ({"params": ["n_timesteps:50"]}, "n_timesteps is given twice: for all runs (10), and as a hyperparameter"),
        ({"variants": {"long": {"ppo": {"n_timesteps": 50}}}}, "n_timesteps is given twice"),
        ({"variants": {"a=b": {"ppo": {}}}}, "it must not be plain, failed or report, or have '=' or ','"),
        ({"variants": {"failed": {"ppo": {}}}}, "it must not be plain, failed or report"),
        ({"variants": {"report": {"ppo": {}}}}, "it must not be plain, failed or report"),
        ({"n_eval_episodes": 0}, "n_eval_episodes (--eval-episodes) must be an integer of at least 1, but it is 0"),
        ({"params": ["device:cuda"]}, "unknown 'device'; known are"),
        ({"algos": [["ppo"]]}, "unknown algorithm \"['ppo']\"; RL Zoo knows "),
        ({"env_ids": [2]}, "environment '2': Gymnasium does not know it"),
        ({"variants": {".hidden": {"ppo": {}}}}, "or '.' first"),
        ({"variants": {"empty": None}}, "variant 'empty' (name: {algorithm: {hyperparameter: value}})"),
        ({"variants": {"a b": {"ppo": {}}, "a-b": {"ppo": {}}}}, "would have one folder, a-b/ppo/CartPole-v1_1"),
        ({"seeds": ["0-4000000000"]}, "of up to 100,000 seeds, but it is 0-4000000000"),
        ({"study": "algorithms: [ppo"}, "while parsing"),
        ({"study": ""}, "it must hold algorithms, environments, "),
        ({"study": "{environment: [Hopper-v4], seeds: 1}"}, "all optional, not environment"),
        ({"study": "algos: [ppo]"}, "all optional, not algos"),
        ({"study": "[ppo]"}, "all optional, not ['ppo']"),
        ({"study": "algorithms: ppo"}, "algorithms must be a list, but it is 'ppo'"),
        ({"study": "eval_freq: often"}, "eval_freq must be a int, but it is 'often'"),
        ({"study": "seeds: 3-1"}, "a seed must be an integer"),
        ({"study": "noise: [high]"}, "could not convert string to float: 'high'"),
    ],
)
def test_what_does_not_exist_is_named(changes, message, tmp_path, monkeypatch):
    (tmp_path / "broken_task.py").write_text("raise SystemExit('not today')\n")
    monkeypatch.syspath_prepend(tmp_path)
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    if (name := changes.get("conf_files", [""])[0]) in FILES:
        changes = {"conf_files": [str(tmp_path / name)]}
    call = partial(plan, **{"algos": ["ppo"], "env_ids": ["CartPole-v1"], "seeds": [0], "n_timesteps": 10, **changes})
    if "study" in changes:
        (tmp_path / "study.yml").write_text(changes["study"])
        call = partial(read_study_file, tmp_path / "study.yml")
    with pytest.raises(StudyError) as caught:
        call()
    said = str(caught.value)
    assert message in said
    assert said.startswith(f"{tmp_path / 'study.yml'}: ") == ("study" in changes)
    assert len(said.splitlines()) == 1


def test_names_of_varied_values_tell_them_apart():
    def names(algo, **vary):
        return [run.variant for run in plan([algo], ["CartPole-v1"], [0], 10, vary=vary)]

    assert names("ppo", gamma=[0.9999999, 0.99999999, 1.0]) == ["gamma=0.9999999", "gamma=0.99999999", "gamma=1"]
    assert names("ppo", gamma=[1, 1.0]) == ["gamma=1"]
    assert names("uatrpo", trust_region_delta=[1e-6, 0.03]) == ["trust_region_delta=1e-06", "trust_region_delta=0.03"]
    (run,) = plan(["ppo"], ["CartPole-v1"], [0], 10, vary={"policy_kwargs": ["dict(a=[64],net_arch=[32,64])"]})
    assert run.variant == "policy_kwargs=dict(a=[64], net_arch=[32, 64])"


def test_the_documented_commands_plan_the_committed_runs():
    """The settings of the committed runs are those of the commands that the pages state."""
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
    names = ["algo", "env", "seed", "variant", "n_timesteps", "eval_freq", "n_eval_episodes", "hyperparameters"]
    for folder, runs in planned.items():
        committed = read_study(results / folder).runs[names].itertuples(index=False)
        settings = [{**vars(run), "hyperparameters": json.dumps(run.hyperparameters, sort_keys=True)} for run in runs]
        assert {tuple(of) for of in committed} == {tuple(of[name] for name in names) for of in settings}


def test_a_study_file(tmp_path):
    file = tmp_path / "study.yml"
    file.write_text(
        "{algorithms: [ppo], environments: [CartPole-v1], seeds: 0-1, n_timesteps: 64, eval_freq: 0, noise: [1], "
        "variants: {myopic: {ppo: {gamma: 0.5}, uatrpo: {gamma: 0.5}}}}"
    )
    study = read_study_file(file)
    assert study.pop("vary") == {NOISE: [1.0]}
    runs = plan(**study)
    of_each = [("ppo", ""), ("ppo", "myopic"), ("uatrpo", "myopic")]
    assert [(run.algo, run.variant, run.seed) for run in runs] == [(*of, seed) for seed in (0, 1) for of in of_each]
    assert all((run.n_timesteps, run.eval_freq) == (64, 0) for run in runs)
    assert [run.hyperparameters["gamma"] for run in runs[1:3]] == [0.5, 0.5]


@pytest.mark.parametrize("missing", ["pandas", "scipy"])
def test_without_its_extra_the_command_ends_with_a_line(tmp_path, missing):
    write_run(tmp_path / "study")
    code = (
        f"import runpy, sys; sys.modules[{missing!r}] = None; sys.argv = ['study', 'report', '--folder', 'study']\n"
        "runpy.run_module('sb3_uatrpo.study', run_name='__main__')"
    )
    ended = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert ended.returncode == 2
    assert ended.stderr.count("\n") == 1
    assert 'run pip install ".[study,ray]"' in ended.stderr
