"""What is read from studies and from RL Zoo's folders, damaged ones included."""

import functools
import gzip
import json
import os
import zipfile
from collections import OrderedDict
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import yaml
from torch import nn

from sb3_uatrpo.study import StudyError, read_study
from sb3_uatrpo.study.results import learning_curves, tabulate
from tests.study.synthetic import write_run, write_study, write_table


def test_a_study_is_four_tables(tmp_path):
    place = write_run(tmp_path, "ppo", seed=3, final=50.0, n_timesteps=1000, eval_freq=500, variant="noise=1")
    write_run(tmp_path, seed=4, failed=True)
    study = read_study(tmp_path)
    assert not study.left_out
    failed, done = study.runs.to_dict("records")
    assert (done["algo"], done["env"], done["seed"], done["variant"]) == ("ppo", "Hopper-v4", 3, "noise=1")
    assert json.loads(done["hyperparameters"]) == {"gamma": 0.99}
    assert json.loads(done["versions"]) == {"numpy": "2.0"}
    assert (done["error"], done["seconds"], done["folder"]) == ("", 36.0, str(place))
    assert failed["error"].splitlines()[-1] == "RuntimeError: the simulator | broke"
    assert set(study.episodes.run) == set(study.updates.run) == set(study.evaluations.run) == {1}
    assert list(study.episodes.step) == list(range(100, 1001, 100))
    assert list(study.evaluations.step) == [500, 500, 1000, 1000]
    assert list(study.evaluations["return"]) == [50.0, 52.0] * 2


def test_saved_tables_are_read_as_they_were(tmp_path):
    study = read_study(write_study(tmp_path / "study", n_seeds=2))
    study.save(tmp_path / "saved")
    assert len(list((tmp_path / "saved").iterdir())) == 4
    # wherever they are now
    saved = read_study((tmp_path / "saved").rename(tmp_path / "moved"))
    assert set(saved.runs.folder) == {str(tmp_path / "moved")}
    pd.testing.assert_frame_equal(saved.runs.drop(columns="folder"), study.runs.drop(columns="folder"))
    for name in ("episodes", "updates", "evaluations"):
        pd.testing.assert_frame_equal(getattr(saved, name), getattr(study, name), check_dtype=False)
    # no path of this machine is in them
    assert str(tmp_path) not in gzip.decompress((tmp_path / "moved" / "runs.csv.gz").read_bytes()).decode()


def test_a_run_counts_once_and_contradictions_are_named(tmp_path):
    first, copy = (write_run(tmp_path / name) for name in "ab")
    write_run(tmp_path / "c", failed=True)
    assert list(read_study(tmp_path / "c", tmp_path / "a", tmp_path / "b").runs.folder) == [str(first)]
    other = write_run(tmp_path / "d", final=101.0)
    with pytest.raises(StudyError) as caught:
        read_study(tmp_path / "a", tmp_path / "d")
    assert str(caught.value).startswith(f"{first} and {other} are the same run with different episodes")
    # of a run without evaluations and one with them, the latter counts
    write_run(tmp_path / "without", eval_freq=0)
    assert len(read_study(tmp_path / "without", tmp_path / "a").evaluations)
    # other settings or another name make another run
    write_run(tmp_path / "e", final=101.0, hyperparameters={"gamma": 0.9})
    assert len(read_study(tmp_path / "b", tmp_path / "e").runs) == 2
    assert str(copy) in read_study(tmp_path / "b").runs.folder.tolist()


HUGE = "9" * 400
DAMAGES = {
    "huge step": ("episodes.csv.gz", lambda text: text.replace("\n900,", f"\n{HUGE},"), "values that are not numbers"),
    "negative step": ("episodes.csv.gz", lambda text: text.replace("\n100,", "\n-5,"), "not ascending integers"),
    "descending steps": ("episodes.csv.gz", lambda text: text.replace("\n900,", "\n100,"), "not ascending integers"),
    "text for a return": ("episodes.csv.gz", lambda text: text.replace(",100\n", ",long\n"), "not numbers"),
    "no steps": ("episodes.csv.gz", lambda text: text.replace("step", "time"), "KeyError: 'step'"),
    "success of 7": ("episodes.csv.gz", lambda text: "step,return,length,is_success\n5,1,5,7\n", "from 0 to 1"),
    "text for a KL ratio": ("updates.csv.gz", lambda text: "step,kl_ratio\n5,much\n", "not numbers"),
    "huge step of an update": ("updates.csv.gz", lambda text: text.replace("\n500,", f"\n{HUGE},"), "not numbers"),
    "text for seconds": ("ended.json", lambda text: text.replace("36.0", '"long"'), "could not convert string"),
    "cut specification": ("run.json", lambda text: text[:30], "JSONDecodeError"),
    "huge seed": ("run.json", lambda text: text.replace('"seed": 1', f'"seed": {HUGE}'), "seed in run.json cannot be"),
    "text for steps": ("run.json", lambda text: text.replace("1000,", '"x",'), "n_timesteps in run.json cannot be"),
}  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_files_are_left_out_by_name(damage, tmp_path):
    write_run(tmp_path, n_timesteps=1000, eval_freq=500)
    place = write_run(tmp_path, seed=1, n_timesteps=1000, eval_freq=500)
    name, change, reason = DAMAGES[damage]
    path = place / name
    if name.endswith(".gz"):
        path.write_bytes(gzip.compress(change(gzip.decompress(path.read_bytes()).decode()).encode()))
    else:
        path.write_text(change(path.read_text()))
    study = read_study(tmp_path)
    assert list(study.runs.seed) == [0]
    ((path, said),) = study.left_out
    assert path == place
    assert reason in said
    assert len(said) < 300


@pytest.mark.parametrize("name", ["run.json", "ended.json", "episodes.csv.gz", "updates.csv.gz", "evaluations.npz"])
def test_files_that_are_cut_missing_or_of_something_else(name, tmp_path):
    write_run(tmp_path)
    place = write_run(tmp_path, seed=1)
    for content in ((place / name).read_bytes()[:-9], b"\x00something else"):
        (place / name).write_bytes(content)
        study = read_study(tmp_path)
        assert [path for path, _ in study.left_out] == [place], content
        assert list(study.runs.seed) == [0]
    (place / name).unlink()
    # there may be no evaluations, and without its specification it is not a run
    assert len(read_study(tmp_path).left_out) == (name not in ("run.json", "evaluations.npz"))


@pytest.mark.parametrize(
    ("timesteps", "results"),
    [([500, 500], [[1.0], [2.0]]), ([1000, 500], [[1.0], [2.0]]), ([500, 1000], [[1.0]]), ([500], [1.0])],
)
def test_evaluations_at_repeated_steps_or_of_other_shapes(timesteps, results, tmp_path):
    place = write_run(tmp_path, n_timesteps=1000)
    np.savez(place / "evaluations.npz", timesteps=timesteps, results=results)
    ((path, reason),) = read_study(tmp_path).left_out
    assert path == place
    assert "the steps of its evaluations are repeated, or some have other numbers of episodes" in reason


def test_returns_that_are_not_finite_are_numbers(tmp_path):
    place = write_run(tmp_path)
    write_table(place, "episodes", {"step": [10, 20, 30], "return": [np.nan, np.inf, 1.0], "length": [10, 10, 10]})
    study = read_study(tmp_path)
    assert not study.left_out
    np.testing.assert_equal(list(study.episodes["return"]), [np.nan, np.inf, 1.0])


# ------------------------------------------------------------------------------------------------- folders of RL Zoo's


def zoo_run(logs, algo="uatrpo", number=1, seed=0, n_envs=1, final=100.0, n_timesteps=1000, taken=None, **settings):
    """A folder as rl_zoo3.train leaves it; ``taken`` steps of the run, 0 if it was killed."""
    run = logs / algo / f"CartPole-v1_{number}"
    (run / "CartPole-v1").mkdir(parents=True)
    dump = {
        "config.yml": {"n_envs": n_envs, "n_timesteps": 1e6, "policy": "MlpPolicy", **settings},
        "args.yml": {
            "algo": algo, "env": "CartPole-v1", "seed": seed, "n_timesteps": n_timesteps, "eval_freq": 500,
            "eval_episodes": 2, "env_kwargs": None, "trained_agent": "",
        },
    }  # fmt: skip
    for name, content in dump.items():
        (run / "CartPole-v1" / name).write_text(yaml.dump(OrderedDict(content)))
    for i in range(n_envs):
        lines = [f'#{{"t_start": {1.7e9 + i}, "env_id": "CartPole-v1"}}', "r,l,t"]
        lines += [f"{final + i},{100 // n_envs},{t}" for t in range(1, 11)]
        (run / f"{i}.monitor.csv").write_text("\n".join(lines) + "\n")
    np.savez(run / "evaluations.npz", timesteps=[500, 1000], results=[[1.0, 2.0], [3.0, 4.0]], ep_lengths=[[1, 1]] * 2)
    if taken != 0:
        with zipfile.ZipFile(run / "CartPole-v1.zip", "w") as archive:
            archive.writestr("data", json.dumps({"num_timesteps": n_timesteps if taken is None else taken}))
    return run


def test_a_folder_of_rl_zoos(tmp_path):
    zoo_run(tmp_path, n_envs=2, final=10.0)
    study = read_study(tmp_path)
    (row,) = study.runs.to_dict("records")
    assert (row["algo"], row["env"], row["seed"], row["n_timesteps"]) == ("uatrpo", "CartPole-v1", 0, 1000)
    assert json.loads(row["hyperparameters"]) == {"n_envs": 2, "policy": "MlpPolicy"}
    # two environments of 50 steps each, stepped together
    assert list(study.episodes.step) == [step for step in range(100, 1001, 100) for _ in range(2)]
    assert set(study.episodes["return"]) == {10.0, 11.0}
    assert list(study.evaluations["return"]) == [1.0, 2.0, 3.0, 4.0]
    assert study.updates.empty


def test_rl_zoos_runs_that_did_not_end_or_cannot_be_read(tmp_path):
    zoo_run(tmp_path)
    zoo_run(tmp_path, number=2, seed=1, taken=400)
    zoo_run(tmp_path, number=3, seed=2, taken=0)
    # repeated after a failure
    zoo_run(tmp_path, number=4, seed=2)
    (zoo_run(tmp_path, number=5, seed=3) / "0.monitor.csv").write_text("#{")
    zoo_run(tmp_path, number=6, seed=4, n_timesteps=900)
    # a line that was being written, an episode without a return, and an environment without an episode
    run = zoo_run(tmp_path, number=7, seed=5, n_envs=2)
    lines = (run / "0.monitor.csv").read_text().splitlines()
    (run / "0.monitor.csv").write_text("\n".join([*lines[:2], "nan,50,1", *lines[3:], "100.0,10"]) + "\n")
    (run / "1.monitor.csv").write_text("#{}\nr,l,t\n")
    study = read_study(tmp_path)
    errors = study.runs.set_index("seed").error.to_dict()
    assert errors == {0: "", 1: "stopped after 400 of 1,000 steps", 2: "", 5: ""}
    assert [path.name for path, _ in study.left_out] == ["CartPole-v1_5", "CartPole-v1_6"]
    # one episode of the last run has no return, but not among the last
    assert set(learning_curves(tabulate(study)).run) == set(study.runs.index[study.runs.error == ""])
    assert "a wrapper around Monitor repeats steps" in study.left_out[1][1]
    last = study.episodes[study.episodes.run == study.runs.index[-1]]
    assert list(last.step) == list(range(100, 1001, 100))
    assert np.isnan(last["return"].iloc[0])


def test_runs_of_rl_zoos_with_different_settings_have_the_name_of_a_folder(tmp_path):
    for number, gamma, seed in ((1, 0.9, 0), (2, 0.9, 1), (3, 0.99, 0), (10, 0.99, 1), (11, 0.5, 0)):
        zoo_run(tmp_path / "of", number=number, seed=seed, gamma=gamma, taken=0 if gamma == 0.5 else None)
    zoo_run(tmp_path / "of", "ppo", number=4)
    runs = read_study(tmp_path / "of").runs
    names = {Path(row.folder).name: row.variant for row in runs.itertuples()}
    of_first = dict.fromkeys(("CartPole-v1_1", "CartPole-v1_2"), "CartPole-v1_1")
    of_third = dict.fromkeys(("CartPole-v1_3", "CartPole-v1_10"), "CartPole-v1_3")
    assert names == {**of_first, **of_third, "CartPole-v1_11": "", "CartPole-v1_4": ""}
    # what folders have in common counts once, and episodes that ended together are in the order of the environments
    for folder in "ab":
        zoo_run(tmp_path / folder, gamma=0.9, n_envs=12)
    zoo_run(tmp_path / "b", number=2, gamma=0.5)
    study = read_study(tmp_path / "a", tmp_path / "b")
    assert list(study.runs.variant) == ["CartPole-v1_1", "CartPole-v1_2"]
    assert list(study.episodes["return"][:12]) == [100.0 + i for i in range(12)]


def test_settings_of_rl_zoos_are_text_and_nothing_is_imported(tmp_path):
    run = zoo_run(tmp_path)
    kwargs = {"activation_fn": nn.ReLU, "net_arch": (64, 64), "unknown": "NAME"}
    settings = {"n_timesteps": 1e6, "policy_kwargs": kwargs, "schedule": functools.partial(abs), "join": os.path.join}
    text = yaml.dump(OrderedDict(settings)).replace("NAME", "!!python/name:not_installed.Module ''")
    activation, unknown = "torch.nn.modules.activation.ReLU", "not_installed.Module"
    assert f"!!python/name:{activation}" in text
    (run / "CartPole-v1" / "config.yml").write_text(text)
    found = json.loads(read_study(tmp_path).runs.hyperparameters[0])
    assert found["policy_kwargs"] == {"activation_fn": activation, "net_arch": [64, 64], "unknown": unknown}
    assert found["join"] == "posixpath.join"
    assert "functools.partial" in found["schedule"]
    for value in ("!!python/object/apply:os.system ['touch made']", "n_timesteps: 1000\nx: 2020-01-01\n", "- 1"):
        (run / "CartPole-v1" / "config.yml").write_text(value)
        assert [path for path, _ in read_study(tmp_path).left_out] == [run]
    assert not Path("made").exists()
