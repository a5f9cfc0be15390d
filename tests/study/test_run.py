"""Studies on this machine, as they are typed and as they are interrupted."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch as th
import yaml
from matplotlib.figure import Figure
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.logger import configure

from sb3_uatrpo import UATRPO
from sb3_uatrpo.study import Study, read_study
from sb3_uatrpo.study import __main__ as command_line
from sb3_uatrpo.study.callback import StudyCallback
from sb3_uatrpo.study.plan import Run, plan
from sb3_uatrpo.study.run import run_study
from tests.forked import run_code, runs_of_studies
from tests.study.synthetic import write_run
from tests.study.tasks import processes_seen

ROOT = Path(__file__).parents[2]
#: Seconds until a test gives up: what it waits for happens within a few on a machine with nothing else to do
PATIENCE = 300.0
# RL Zoo's command
ZOO = "from sb3_uatrpo.zoo.__main__ import main; main()"
QUICK = ["n_steps:100", "batch_size:50", "sub_sampling_factor:2", "normalize:False"]


def command(folder: Path, *more: str, seeds: str = "0-1", hold_from: int | None = None) -> list[str]:
    """A study of an environment that leaves the numbers of its processes in ``folder / "seen"``, and waits there."""
    seen = folder / "seen"
    seen.mkdir(parents=True, exist_ok=True)
    settings = [*QUICK, f"env_kwargs:{{'folder': {str(seen)!r}, 'hold_from': {hold_from}}}"]
    words = f"run --algo uatrpo --env tests.study.tasks:Waiting-v0 --seeds {seeds} --n-timesteps 200 --eval-freq 0"
    return [*words.split(), "--folder", str(folder / "study"), "--params", *settings, *more]


def start(words: list[str], **environment: str) -> subprocess.Popen:
    """A driver of its own, in a process group of its own, as a terminal would start it."""
    return subprocess.Popen(
        [sys.executable, "-m", "sb3_uatrpo.study", *words],
        cwd=ROOT,
        start_new_session=True,
        env={**os.environ, **environment},
        # where these tests run in the background or under nohup, both are ignored, and children would inherit that
        preexec_fn=lambda: [signal.signal(number, signal.SIG_DFL) for number in (signal.SIGINT, signal.SIGHUP)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@pytest.fixture
def finish(capsys, monkeypatch):
    """What a command prints; its driver is this process."""

    def run(words: list[str], code: int = 0) -> str:
        monkeypatch.setattr(sys, "argv", ["study", *words])
        ended = 0
        try:
            command_line.main()
        except SystemExit as end:
            ended = end.code
        output = "".join(capsys.readouterr())
        assert ended == code, output
        return output

    return run


@pytest.fixture
def forked():
    with runs_of_studies():
        yield


def wait_for(condition, timeout: float = PATIENCE):
    """What the condition returns once it is true."""
    end = time.monotonic() + timeout
    while not (result := condition()):
        assert time.monotonic() < end, "nothing happened"
        time.sleep(0.05)
    return result


def runs_seen(folder: Path) -> list[int]:
    return processes_seen(folder / "seen")


def let_go(folder: Path) -> None:
    (folder / "seen" / "go").touch()


def is_alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    # one that nobody has waited for yet is as good as gone
    stat = Path(f"/proc/{process}/stat")
    return not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] != "Z"


def seeds_of(folder: Path) -> list[int]:
    """The seeds of the runs that are done."""
    return sorted(json.loads(path.read_text())["seed"] for path in (folder / "study").glob("*/*/*/run.json"))


def carry_out(folder: Path, *runs: Run) -> Study:
    """The tables of some runs, all of which are done."""
    with runs_of_studies():
        failed = run_study(runs, folder)
    assert not failed, failed[0][1].read_text()
    return read_study(folder)


def quick(algo: str, env: str, *params: str, n_timesteps: int = 400, seed: int = 0, **options) -> Run:
    options = {"eval_freq": 0, **options}
    (run,) = plan([algo], [env], [seed], n_timesteps, params, **options)
    return run


# ------------------------------------------------------------------------------------------------------------- one run


def test_the_same_run_has_the_same_numbers(tmp_path):
    of_run = {"seed": 3, "n_timesteps": 4000}
    first = carry_out(tmp_path / "a", quick("uatrpo", "Pendulum-v1", **of_run, eval_freq=2000, n_eval_episodes=2))
    # evaluations change no training
    second = carry_out(tmp_path / "b", quick("uatrpo", "Pendulum-v1", **of_run))
    for name in ("episodes", "updates"):
        pd.testing.assert_frame_equal(getattr(first, name), getattr(second, name))
    # four environments of 200 steps an episode
    assert list(first.episodes.step) == [800 * i for i in range(1, 6) for _ in range(4)]
    assert set(first.episodes.length) == {200}
    assert list(first.evaluations.step) == [2000, 2000, 4000, 4000]
    # the last update too
    assert list(first.updates.step) == [2000, 4000]
    assert list(first.updates.n_updates) == [1, 2]
    assert (first.updates.kl_ratio > 0).all()
    (row,) = first.runs.to_dict("records")
    assert "(source " in json.loads(row["versions"])["sb3_uatrpo"]
    assert row["seconds"] > 0


def test_a_run_is_the_one_of_rl_zoo(tmp_path):
    """The same numbers as the Zoo's own command, with normalisation, a schedule and several environments."""
    params = ["learning_rate:'lin_0.01'", "normalize:True"]
    words = "train --algo ppo --env CartPole-v1 -n 1000 --seed 5 --eval-freq -1 -f . --device cpu -params"
    assert run_code(ZOO, *words.split(), *params, cwd=tmp_path).code == 0
    run = quick("ppo", "CartPole-v1", *params, seed=5, n_timesteps=1000)
    assert run.hyperparameters["n_envs"] > 1
    ours = carry_out(tmp_path / "study", run)
    theirs = read_study(tmp_path / "ppo")
    columns = ["step", "return", "length"]
    pd.testing.assert_frame_equal(ours.episodes[columns], theirs.episodes[columns])
    # both are one run, and the study knows more of it
    assert len(read_study(tmp_path).runs) == 1
    assert len(read_study(tmp_path).updates)


def test_other_algorithms_of_rl_zoo(tmp_path):
    settings = {
        ("a2c", "CartPole-v1"): [],
        ("sac", "Pendulum-v1"): ["learning_starts:100", "train_freq:10", "gradient_steps:1"],
        # it shows callbacks no episodes
        ("ars", "CartPole-v1"): ["n_delta:2"],
    }
    evaluated = {"n_timesteps": 1000, "eval_freq": 500, "n_eval_episodes": 1}
    study = carry_out(tmp_path, *(quick(*of, *params, **evaluated) for of, params in settings.items()))
    for i, algo in study.runs.algo.items():
        episodes, updates, evaluations = (
            table[table.run == i] for table in (study.episodes, study.updates, study.evaluations)
        )
        assert len(evaluations) >= 2, algo
        assert len(episodes) == len(updates) == 0 if algo == "ars" else episodes.step.iloc[-1] >= 800, algo
        # of algorithms that learn after every few steps, a part, with the last
        assert algo == "ars" or (len(updates) <= 10 and updates.step.iloc[-1] >= 990), algo


class Chatty(UATRPO):
    """Logs what no table holds."""

    def train(self):
        super().train()
        for name, value in {"figure": Figure(), "array": np.ones(2), "tensor": th.ones(1), "text": "fine"}.items():
            self.logger.record(f"train/{name}", value)


def test_every_update_is_kept_with_the_numbers_and_text_that_it_logs(tmp_path):
    """In a script of one's own: the callback writes into the logger's folder."""
    env = make_vec_env("CartPole-v1", n_envs=2)
    model = Chatty("MlpPolicy", env, n_steps=75, batch_size=50, n_projections=4, device="cpu")
    model.set_logger(configure(str(tmp_path), []))
    model.learn(1000, callback=StudyCallback())
    updates = pd.read_csv(tmp_path / "updates.csv.gz")
    # small batches too: a report's KL ratios are about their number
    assert list(updates.step) == [150 * i for i in range(1, 8)]
    assert list(updates.n_updates) == list(range(1, 8))
    assert set(updates.tensor) == {1.0}
    assert set(updates.text) == {"fine"}
    assert not {"figure", "array"} & set(updates)
    assert json.loads((tmp_path / "ended.json").read_text())["steps"] == 1050


def test_the_callback_in_any_hyperparameter_file(tmp_path):
    """RL Zoo's own command, which keeps its best model and the sketch."""
    settings = {"policy": "MlpPolicy", "n_timesteps": 400, "n_steps": 100, "batch_size": 50}
    settings["callback"] = "sb3_uatrpo.study.callback.StudyCallback"
    (tmp_path / "own.yml").write_text(yaml.safe_dump({"default": settings}))
    words = "train --algo uatrpo --env CartPole-v1 -n 400 --eval-freq 200 -conf own.yml -f . --device cpu"
    assert run_code(ZOO, *words.split(), cwd=tmp_path).code == 0
    folder = tmp_path / "uatrpo" / "CartPole-v1_1"
    assert len(pd.read_csv(folder / "updates.csv.gz")) == 4
    assert len(pd.read_csv(folder / "episodes.csv.gz")) > 3
    assert (folder / "best_model.zip").exists()
    assert UATRPO.load(folder / "CartPole-v1.zip").sketch.omega.numel() > 0


def test_success_is_kept_where_the_task_reports_it(tmp_path):
    def waiting(seed: int, **kwargs) -> Run:
        folder = {"folder": str(tmp_path), "reports_success": True, **kwargs}
        params = [*QUICK, f"env_kwargs:{folder}", "n_envs:2"]
        return quick("uatrpo", "tests.study.tasks:Waiting-v0", *params, seed=seed, eval_freq=200, n_eval_episodes=3)

    # Stable-Baselines3 would have lists of different lengths, or fewer lists than evaluations
    runs = [waiting(0), waiting(2, first_report=2), waiting(3, in_arrays=True, first_report=4)]
    study = carry_out(tmp_path / "study", *runs, quick("uatrpo", "CartPole-v1", *QUICK, n_timesteps=200))
    number = {row.seed: i for i, row in study.runs.iterrows() if row.env != "CartPole-v1"}
    episodes, evaluations = (
        {seed: list(table.is_success[table.run == i]) for seed, i in number.items()}
        for table in (study.episodes, study.evaluations)
    )
    # two environments, stepped together
    assert episodes[0] == [0.0, 0.0, 1.0, 1.0] * 10
    assert evaluations[0] == [0.0, 1.0, 0.0, 1.0, 0.0, 1.0]
    for seed, first in ((2, 2), (3, 4)):
        np.testing.assert_equal(episodes[seed], [np.nan] * 2 * (first - 1) + episodes[0][2 * (first - 1) :])
        assert np.isnan(evaluations[seed]).all()
    (other,) = set(study.runs.index) - set(number.values())
    assert study.episodes.is_success[study.episodes.run == other].isna().all()


def test_wrappers_that_repeat_steps_or_end_episodes(tmp_path, forked):
    skip = "env_wrapper:[{'rl_zoo3.wrappers.FrameSkip': {'skip': 4}}]"
    study = carry_out(tmp_path / "skip", quick("ppo", "CartPole-v1", "n_steps:100", "batch_size:50", skip, "n_envs:2"))
    assert study.episodes.length.sum() > 2 * 400
    assert 300 < study.episodes.step.iloc[-1] <= 400

    short = ["n_steps:100", "batch_size:50", "n_envs:1"]
    # lives end before Monitor's episodes do
    lives = "env_wrapper:[{'tests.study.tasks.Lives': {}}]"
    study = carry_out(tmp_path / "lives", quick("ppo", "CartPole-v1", *short, lives))
    assert study.episodes.length.sum() > 300

    limit = "env_wrapper:[{'gymnasium.wrappers.TimeLimit': {'max_episode_steps': 15}}]"
    stop = "callback:[{'stable_baselines3.common.callbacks.StopTrainingOnMaxEpisodes': {'max_episodes': 2}}]"
    runs = [quick("ppo", "CartPole-v1", *short, limit), quick("ppo", "CartPole-v1", *short, stop, seed=1)]
    reasons = [path.read_text().splitlines()[-1] for _, path in run_study(runs, tmp_path / "failed")]
    # otherwise, there would be only the episodes that were over before the time limit
    assert reasons[0].startswith("RuntimeError: a wrapper around Monitor ended episodes that Monitor does not report")
    assert reasons[1].startswith("RuntimeError: a callback stopped it after ")
    assert reasons[1].endswith(" of 400 steps")


# ------------------------------------------------------------------------------------------------------- whole studies


def test_a_study_from_a_file_to_agents_that_rl_zoo_shows(tmp_path, finish):
    file = tmp_path / "study.yml"
    settings = {"algorithms": ["ppo"], "environments": ["CartPole-v1"], "seeds": "0-1", "n_timesteps": 64}
    file.write_text(yaml.safe_dump({**settings, "eval_freq": 100, "variants": {"myopic": {"uatrpo": {"gamma": 0.5}}}}))
    folder = tmp_path / "study"
    # what is typed replaces what the file says
    typed = ["--algo", "uatrpo", "--seeds", "5", "--n-timesteps", "200", "--params", "n_steps:100", "--save-models"]
    assert "2 done, 0 failed" in finish(["run", "--folder", str(folder), "--study", str(file), *typed])
    finish(["report", "--folder", str(folder)])
    text = (folder / "report" / "report.md").read_text(encoding="utf-8")
    for label in ("uatrpo", "uatrpo (myopic)"):
        assert f"| CartPole-v1 | – | {label} | 1 |" in text

    archive = folder / "plain" / "uatrpo" / "CartPole-v1_6" / "CartPole-v1.zip"
    # the sketch would be 200 times as many numbers as the policy's
    assert archive.stat().st_size < 500_000
    # a run that goes on from it draws an Ω of its own
    kept = UATRPO.load(archive, device="cpu").sketch
    assert kept.omega.numel() == 0
    assert not th.equal(kept.generator.get_state(), th.Generator().manual_seed(0).get_state())
    enjoy = "enjoy --algo uatrpo --env CartPole-v1 -n 20 --no-render --device cpu -f"
    plots = f"all_plots -a uatrpo -e CartPole -o {tmp_path / 'results'} --no-display -f"
    for variant in ("plain", "myopic"):
        shown, drawn = (run_code(ZOO, *words.split(), str(folder / variant), cwd=ROOT) for words in (enjoy, plots))
        assert shown.code == drawn.code == 0, shown.stderr + drawn.stderr
        assert "CartPole-v1_6" in shown.stdout
        assert "|CartPole" in drawn.stdout
    assert (tmp_path / "results.pkl").exists()


def test_failures_and_changed_settings(tmp_path, finish, forked):
    words = command(tmp_path, seeds="0")
    (tmp_path / "seen" / "broken").touch()
    said = finish(words, code=1)
    assert "0 done, 1 failed" in said
    path = tmp_path / "study" / "failed" / "plain" / "uatrpo" / "Waiting-v0_1" / "error.txt"
    reason = "uatrpo on tests.study.tasks:Waiting-v0, seed 0: RuntimeError: the environment is broken"
    assert f"failed: {reason} ({path})\n" in said
    traceback = path.read_text()
    assert "in step" in traceback
    assert "this is the last that it says" in traceback
    (tmp_path / "study" / "run.json").write_text("{")
    said = finish(["report", "--folder", str(tmp_path / "study")], code=2)
    assert "no run is done with a training return, out of 1; " in said
    assert f"{tmp_path / 'study'} is left out (JSONDecodeError: " in said
    (tmp_path / "study" / "run.json").unlink()

    # what failed is run again on request only
    (tmp_path / "seen" / "broken").rename(tmp_path / "seen" / "exits")
    assert "failed: uatrpo on tests.study.tasks:Waiting-v0, seed 0: " in finish([*words, "--retry-failed"], code=1)
    (tmp_path / "seen" / "exits").unlink()
    assert "1 of 1 runs are there already" in finish(words, code=1)
    assert "1 done, 0 failed" in finish([*words, "--retry-failed"])
    assert not list((tmp_path / "study" / "failed").rglob("run.json"))
    assert "1 of 1 runs are there already" in finish(words)

    # other settings need another name
    said = finish([*words, "--params", "target_kl:0.005"], code=2)
    assert "plain/uatrpo/Waiting-v0_1 has target_kl=0.02, but target_kl=0.005 is asked for: use another" in said
    assert "has n_timesteps=200, but n_timesteps=300 is asked" in finish([*words, "--n-timesteps", "300"], code=2)
    other = command(tmp_path, "--n-timesteps", "300", seeds="1")
    assert "reports do not compare runs of different length" in finish(other, code=2)
    file = tmp_path / "study" / "plain" / "uatrpo" / "Waiting-v0_1" / "run.json"
    file.write_text("{")
    assert "Waiting-v0_1 to repeat the run" in finish(words, code=2)
    file.unlink()
    assert "Waiting-v0_1 is no run of a study" in finish(words, code=2)


def test_a_killed_run_takes_no_other_with_it(tmp_path):
    driver = start(command(tmp_path, "--jobs", "2", hold_from=1), OMP_NUM_THREADS="2")
    workers = wait_for(lambda: len(runs_seen(tmp_path)) == 2 and runs_seen(tmp_path))
    for worker in workers:
        # fresh processes, not copies of the driver
        assert b"sb3_uatrpo.zoo" in Path(f"/proc/{worker}/cmdline").read_bytes()
        assert b"OMP_NUM_THREADS=1\0" in Path(f"/proc/{worker}/environ").read_bytes()
    os.kill(workers[0], signal.SIGKILL)
    let_go(tmp_path)
    said, _ = driver.communicate(timeout=PATIENCE)
    assert driver.returncode == 1
    assert "1 done, 1 failed" in said
    assert "the run's process was killed by SIGKILL" in said


def test_a_study_that_is_interrupted_and_killed_equals_one_that_is_not(tmp_path, finish):
    """However its driver ends, only what is under way is lost, and done again from the beginning by the next one."""
    options = ["--jobs", "1", "--eval-freq", "100", "--eval-episodes", "1"]
    words = command(tmp_path, *options, hold_from=2)
    for i, number in enumerate((signal.SIGKILL, signal.SIGINT, signal.SIGKILL)):
        driver = start(words)
        # the first run was done by the first driver, the second one is held
        wait_for(lambda seen=2 + i: len(runs_seen(tmp_path)) == seen)
        refused = f"Error: another process is at work in {tmp_path / 'study'}: a study has one at a time\n"
        assert finish(words, code=2) == refused
        # who reads it is no driver
        assert len(read_study(tmp_path / "study").runs) == 1
        # Ctrl-C goes to the workers too
        (os.killpg if number == signal.SIGINT else os.kill)(driver.pid, number)
        said, _ = driver.communicate(timeout=PATIENCE)
        assert ("1 of 2 runs are there already" in said) == (i > 0)
        if number == signal.SIGINT:
            last = "interrupted: finished runs are kept, and the same command resumes the study"
            assert (driver.returncode, said.splitlines()[-1]) == (130, last)
            assert "Traceback" not in said
            assert not any(map(is_alive, runs_seen(tmp_path)))
        # what it was writing stays until the next start, and the worker notices by itself
        wait_for(lambda: not any(map(is_alive, runs_seen(tmp_path))))
        assert seeds_of(tmp_path) == [0]
    let_go(tmp_path)
    said = finish(words)
    assert "1 of 2 runs are there already" in said
    assert "2 done, 0 failed" in said
    assert not (tmp_path / "study" / ".unfinished").exists()
    finish(command(tmp_path, *options, "--folder", str(tmp_path / "whole"), seeds="1", hold_from=2))
    both, whole = (read_study(tmp_path / name) for name in ("study", "whole"))
    changing = ["seconds", "folder"]
    assert both.runs.drop(columns=changing).loc[1].to_dict() == whole.runs.drop(columns=changing).loc[0].to_dict()
    for name in ("episodes", "updates", "evaluations"):
        table, expected = (getattr(study, name).drop(columns="run") for study in (both, whole))
        other, killed = (table[getattr(both, name).run == i].reset_index(drop=True) for i in (0, 1))
        pd.testing.assert_frame_equal(killed, expected)
        assert not other.equals(killed)


# ----------------------------------------------------------------------------------------------------------- bad input

PLAN = "run --algo ppo --env CartPole-v1 --n-timesteps 100"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (f"{PLAN} --algo uatrpoo", "unknown algorithm 'uatrpoo'"),
        (f"{PLAN} --params gama:1", "unknown 'gama'"),
        (f"{PLAN} --noise 0 1", "unknown 'adversarial_noise'"),
        (f"{PLAN} --noise loud", "argument --noise: invalid float value: 'loud'"),
        (f"{PLAN} --seeds one", "a seed must be an integer"),
        (f"{PLAN} --n-timesteps 0", "must be an integer of at least 1, but it is '0'"),
        (f"{PLAN} --eval-freq 0 --ray nowhere", "no Ray cluster answers at nowhere (host:port, or auto)"),
        (f"{PLAN} --retries 3", "unrecognized arguments: --retries 3"),
        (f"{PLAN} --jobs 0", "jobs must be at least 1, but it is 0"),
        (f"{PLAN} --folder FILE/study", "Not a directory"),
        ("run --algo ppo", "nothing to run: give --algo and --env"),
        ("run --env CartPole-v1", "nothing to run: give --algo and --env"),
        ("mergers", "invalid choice: 'mergers'"),
        ("report --folder EMPTY", "neither a study nor a folder that RL Zoo wrote"),
        ("report --folder MISSING", "MISSING: no such folder"),
        ("report --folder DONE --kappa 2", "kappa must be in (0, 1], but it is 2.0"),
        ("report --folder DONE --format gif", "picture_format must be one of png, svg, but it is 'gif'"),
        ("report --folder DONE --output FILE/report", "Not a directory"),
    ],
)
def test_bad_input_is_one_line(words, message, tmp_path, finish, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "EMPTY").mkdir()
    (tmp_path / "FILE").touch()
    write_run(tmp_path / "DONE")
    said = finish([*words.split(), *([] if "--folder" in words else ["--folder", "new"])], code=2)
    assert said.startswith("Error: ")
    assert message in said
    assert len(said.splitlines()) == 1
