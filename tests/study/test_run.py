"""Studies on this machine, as they are typed and as they are interrupted."""

import gzip
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch as th
from matplotlib.figure import Figure
from rl_zoo3.utils import ALGOS
from stable_baselines3 import PPO

from sb3_uatrpo import RECOMMENDED, UATRPO
from sb3_uatrpo.study import __main__ as command_line
from sb3_uatrpo.study.driver import Ended, Executor, Outcome, RunProcess, run_study
from sb3_uatrpo.study.folders import StudyFolder
from sb3_uatrpo.study.plan import plan, read_study_file
from sb3_uatrpo.study.record import StudyError, read_record, read_records, write_record
from sb3_uatrpo.study.worker import OUTPUT, failed_record, run_one
from tests.study.synthetic import make_folder, make_record
from tests.study.tasks import processes_seen

# some of these environments have discrete actions, and no entry of their own in uatrpo.yml
pytestmark = pytest.mark.filterwarnings("ignore:policy_kwargs. log_std_init has no effect")

ROOT = Path(__file__).parents[2]
#: Seconds until a test gives up: what it waits for happens within a few on a machine with nothing else to do
PATIENCE = 300.0
STARTED = datetime(2026, 1, 1, tzinfo=timezone.utc)
QUICK = ["n_steps:100", "batch_size:50", "sub_sampling_factor:2", "normalize:False"]


def command(folder: Path, *more: str, seeds: str = "0-1", hold_from: int | None = None) -> list[str]:
    """A study of an environment that leaves the numbers of its processes in ``folder / "seen"``, and waits there."""
    seen = folder / "seen"
    seen.mkdir(parents=True, exist_ok=True)
    settings = [*QUICK, f"env_kwargs:{{'folder': {str(seen)!r}, 'hold_from': {hold_from}}}"]
    task = ["--algo", "uatrpo", "--env", "tests.study.tasks:Waiting-v0", "--seeds", seeds]
    options = [
        "--n-timesteps",
        "200",
        "--params",
        *settings,
        "--eval-freq",
        "0",
        "--folder",
        str(folder / "study"),
    ]
    return ["run", *task, *options, *more]


def start(words: list[str], **environment: str) -> subprocess.Popen:
    """A driver of its own, in a process group of its own, as a terminal would start it."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    driver = [sys.executable, "-m", "sb3_uatrpo.study", *words]
    return subprocess.Popen(
        driver,
        cwd=ROOT,
        start_new_session=True,
        env={**os.environ, **environment},
        # where these tests run in the background or under nohup, both are ignored, and children would inherit that
        preexec_fn=lambda: [signal.signal(number, signal.SIG_DFL) for number in (signal.SIGINT, signal.SIGHUP)],
        **pipes,
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


def records_of(folder: Path) -> dict[int, object]:
    records, bad = read_records(folder / "study" / "records")
    assert not bad
    return {record.spec.seed: record for record in records}


# ------------------------------------------------------------------------------------------------------------- one run


def test_a_specification_gives_the_same_record_again():
    (spec,) = plan(["uatrpo"], ["Pendulum-v1"], [3], 4000, eval_freq=2000, n_eval_episodes=2)
    steps = []
    first, second = run_one(spec, steps.append), run_one(spec)
    assert first.status == "done", first.traceback
    assert replace(second, wall_time=first.wall_time, started=first.started) == first
    assert steps == sorted(steps)
    assert steps[-1] == 4000

    # four environments of 200 steps an episode
    assert first.episodes["timesteps"] == [800 * i for i in range(1, 6) for _ in range(4)]
    assert set(first.episodes["lengths"]) == {200}
    assert first.evaluations["timesteps"] == [2000, 4000]
    assert np.shape(first.evaluations["returns"]) == (2, 2)
    # the last update too
    assert first.updates["timesteps"] == [2000, 4000]
    assert first.updates["n_updates"] == [1, 2]
    assert all(value > 0 for value in first.updates["kl_ratio"])

    (without,) = plan(["uatrpo"], ["Pendulum-v1"], [3], 4000, eval_freq=0)
    assert run_one(without).episodes == first.episodes
    (other,) = plan(["uatrpo"], ["Pendulum-v1"], [4], 4000, eval_freq=0)
    assert run_one(other).episodes != first.episodes


@pytest.mark.parametrize("n_steps", [50, 75, 100])
def test_a_record_has_every_update_of_small_batches(n_steps):
    """Their number is what a report's KL ratios are about."""
    params = [*QUICK, "n_envs:2", f"n_steps:{n_steps}", "n_projections:4", "sub_sampling_factor:1"]
    (spec,) = plan(["uatrpo"], ["CartPole-v1"], [0], 1000, params, eval_freq=0)
    updates = run_one(spec).updates
    n_updates = -(-1000 // (2 * n_steps))
    assert updates["timesteps"] == [2 * n_steps * (i + 1) for i in range(n_updates)]
    assert updates["n_updates"] == list(range(1, n_updates + 1))


def test_a_run_is_the_one_of_rl_zoo(tmp_path):
    """The same numbers as the Zoo's own command, with normalisation, a schedule and several environments."""
    params = ["learning_rate:'lin_0.01'", "normalize:True"]
    words = ["--algo", "ppo", "--env", "CartPole-v1", "-n", "1000", "--seed", "5", "--eval-freq", "-1", "-f", tmp_path]
    zoo = [sys.executable, "-m", "sb3_uatrpo.zoo", "train", *map(str, words), "--device", "cpu", "-params", *params]
    subprocess.run(zoo, cwd=ROOT, check=True, capture_output=True)
    monitors = (tmp_path / "ppo" / "CartPole-v1_1").glob("*.monitor.csv")
    theirs = sorted(float(line.split(",")[0]) for file in monitors for line in file.read_text().splitlines()[2:])
    (spec,) = plan(["ppo"], ["CartPole-v1"], [5], 1000, params, eval_freq=0)
    assert spec.hyperparameters["n_envs"] > 1
    assert sorted(run_one(spec).episodes["returns"]) == theirs


@pytest.mark.parametrize(
    ("algo", "env_id", "params"),
    [
        ("trpo", "CartPole-v1", ["n_steps:256", "n_envs:1", "batch_size:128"]),
        ("a2c", "CartPole-v1", []),
        ("dqn", "CartPole-v1", ["learning_starts:100"]),
        ("sac", "Pendulum-v1", ["learning_starts:100", "train_freq:10", "gradient_steps:1"]),
        ("ars", "CartPole-v1", ["n_delta:2"]),
    ],
)
def test_other_algorithms_of_rl_zoo(algo, env_id, params):
    (spec,) = plan([algo], [env_id], [0], 1000, params, eval_freq=500, n_eval_episodes=1)
    record = run_one(spec)
    assert record.status == "done", record.traceback
    assert record.episodes["returns"]
    assert record.episodes["timesteps"][-1] >= 900
    assert len(record.evaluations["timesteps"]) >= 2
    assert record.updates["timesteps"] or algo == "ars"
    # of algorithms that learn after every few steps, a part, with the last
    assert len(record.updates["timesteps"]) <= 10
    if algo in ("a2c", "sac"):
        assert record.updates["timesteps"][-1] >= 990


class Chatty(PPO):
    """Logs what no record holds."""

    def train(self):
        super().train()
        for name, value in {"figure": Figure(), "array": np.ones(2), "tensor": th.ones(1), "text": "fine"}.items():
            self.logger.record(f"train/{name}", value)


class Leaving(PPO):
    """Ends its process."""

    def train(self):
        sys.exit("enough")


def test_a_run_that_would_end_its_process_has_failed(monkeypatch):
    monkeypatch.setitem(ALGOS, "ppo", Leaving)
    (spec,) = plan(["ppo"], ["CartPole-v1"], [0], 500, ["n_steps:50", "batch_size:50", "n_envs:1"], eval_freq=0)
    record = run_one(spec)
    assert (record.status, record.reason) == ("failed", "SystemExit: enough")


def test_only_numbers_and_strings_are_kept_of_what_is_logged(tmp_path, monkeypatch):
    monkeypatch.setitem(ALGOS, "ppo", Chatty)
    (spec,) = plan(["ppo"], ["CartPole-v1"], [0], 500, ["n_steps:50", "batch_size:50", "n_envs:1"], eval_freq=0)
    record = run_one(spec)
    assert record.status == "done", record.traceback
    assert set(record.updates["tensor"]) == {1.0}
    assert set(record.updates["text"]) == {"fine"}
    assert not {"figure", "array"} & set(record.updates)
    assert read_record(write_record(record, tmp_path)).updates["text"] == record.updates["text"]


def test_a_run_leaves_the_terminal_and_the_folder_alone(tmp_path, monkeypatch, capfd):
    """MuJoCo warns of a file of Gymnasium's, past Python."""
    monkeypatch.chdir(tmp_path)
    params = ["n_steps:100", "batch_size:50"]
    (spec,) = plan(["uatrpo"], ["HalfCheetah-v4"], [0], 100, params, eval_freq=0)
    process = RunProcess(spec)
    wait_for(process.has_ended)
    assert process.result().record.status == "done"
    assert not process.path.exists()
    assert capfd.readouterr() == ("", "")
    assert not list(tmp_path.iterdir())


def test_a_failing_run_is_recorded(tmp_path):
    (tmp_path / "broken").touch()
    kwargs = f"env_kwargs:{{'folder': {str(tmp_path)!r}}}"
    (spec,) = plan(["uatrpo"], ["tests.study.tasks:Waiting-v0"], [0], 200, [*QUICK, kwargs])
    record = run_one(spec)
    assert record.status == "failed"
    assert record.traceback.strip().endswith("RuntimeError: the environment is broken")
    assert record.episodes["returns"] == []


@pytest.mark.parametrize("in_arrays", [False, True])
def test_success_is_kept_where_the_task_reports_it(in_arrays, tmp_path):
    kwargs = f"env_kwargs:{{'folder': {str(tmp_path)!r}, 'reports_success': True, 'in_arrays': {in_arrays}}}"
    params = [*QUICK, kwargs, "n_envs:2"]
    (spec,) = plan(["uatrpo"], ["tests.study.tasks:Waiting-v0"], [0], 400, params, eval_freq=200, n_eval_episodes=3)
    record = run_one(spec)
    assert record.status == "done", record.traceback
    # two environments, stepped together
    assert record.episodes["is_success"] == [0.0, 0.0, 1.0, 1.0] * 10
    assert record.evaluations["is_success"] == [[0.0, 1.0, 0.0], [1.0, 0.0, 1.0]]
    kept = read_record(write_record(record, tmp_path))
    assert (kept.episodes, kept.evaluations) == (record.episodes, record.evaluations)
    (spec,) = plan(["uatrpo"], ["CartPole-v1"], [0], 200, QUICK, eval_freq=0)
    assert "is_success" not in run_one(spec).episodes


@pytest.mark.parametrize("first_report", [2, 4])
def test_evaluations_that_report_success_only_later(first_report, tmp_path):
    """Stable-Baselines3 then has lists of different lengths, or fewer lists of successes than evaluations."""
    kwargs = f"env_kwargs:{{'folder': {str(tmp_path)!r}, 'reports_success': True, 'first_report': {first_report}}}"
    (spec,) = plan(
        ["ppo"],
        ["tests.study.tasks:Waiting-v0"],
        [0],
        400,
        ["n_steps:100", "batch_size:50", kwargs],
        eval_freq=200,
        n_eval_episodes=3,
    )
    record = run_one(spec)
    assert record.status == "done", record.traceback
    assert "is_success" not in record.evaluations
    assert record.episodes["is_success"] == [None] * (first_report - 1) + [1.0, 0.0] * (20 - first_report // 2) + [1.0]
    kept = read_record(write_record(record, tmp_path))
    assert (kept.episodes, kept.evaluations) == (record.episodes, record.evaluations)


@pytest.mark.parametrize("n_envs", [1, 2])
def test_steps_that_a_wrapper_repeats_are_counted_once(n_envs):
    params = [
        "n_steps:100",
        "batch_size:50",
        "env_wrapper:[{'rl_zoo3.wrappers.FrameSkip': {'skip': 4}}]",
        f"n_envs:{n_envs}",
    ]
    (spec,) = plan(["ppo"], ["CartPole-v1"], [0], 600, params, eval_freq=0)
    episodes = run_one(spec).episodes
    assert sum(episodes["lengths"]) > 2 * 600
    assert 500 < episodes["timesteps"][-1] <= 600
    assert episodes["timesteps"] == sorted(episodes["timesteps"])


@pytest.mark.parametrize("n_envs", [1, 2])
def test_a_run_whose_monitor_misses_episodes_has_failed(n_envs):
    """Otherwise, the record would hold only the episodes that were over before the time limit."""
    limit = "env_wrapper:[{'gymnasium.wrappers.TimeLimit': {'max_episode_steps': 15}}]"
    params = ["n_steps:100", "batch_size:50", f"n_envs:{n_envs}", limit]
    (spec,) = plan(["ppo"], ["CartPole-v1"], [0], 400, params, eval_freq=0)
    record = run_one(spec)
    assert record.status == "failed"
    assert "a wrapper around Monitor ended episodes that Monitor does not report" in record.reason


def test_a_run_that_a_callback_stops_early_has_failed():
    stop = "callback:[{'stable_baselines3.common.callbacks.StopTrainingOnMaxEpisodes': {'max_episodes': 2}}]"
    (spec,) = plan(["ppo"], ["CartPole-v1"], [0], 4000, ["n_steps:100", "batch_size:50", "n_envs:1", stop], eval_freq=0)
    record = run_one(spec)
    assert record.status == "failed"
    assert re.match(r"RuntimeError: a callback stopped it after [\d,]+ of 4,000 steps", record.reason)


def test_a_thread_of_the_environment_does_not_hold_up_the_study(tmp_path):
    kwargs = f"env_kwargs:{{'folder': {str(tmp_path)!r}, 'leaves_thread': True}}"
    (spec,) = plan(
        ["ppo"], ["tests.study.tasks:Waiting-v0"], [0], 200, ["n_steps:100", "batch_size:50", kwargs], eval_freq=0
    )
    run = RunProcess(spec)
    assert run.has_ended(PATIENCE)
    assert run.result().record.status == "done"


def test_a_record_that_cannot_be_read_says_why(tmp_path):
    (spec,) = plan(["ppo"], ["CartPole-v1"], [0], 200, ["n_steps:100", "batch_size:50"], eval_freq=0)
    run = RunProcess(spec)
    assert run.has_ended(PATIENCE)
    path = run.path / spec.file_name
    content = json.loads(gzip.decompress(path.read_bytes()))
    content["episodes"]["returns"] = [1.0]
    path.write_bytes(gzip.compress(json.dumps(content).encode()))
    (run.path / OUTPUT).write_text("é" * 5000 + "the end")
    ended = run.result()
    assert ended.record is None
    assert ended.reason.startswith("its record cannot be read: ")
    assert "lists of equal length" in ended.reason
    assert ended.reason.endswith("é" * 1993 + "the end")


# ------------------------------------------------------------------------------------------------------- whole studies


class Instant(Executor):
    """Has every record at once."""

    def __init__(self):
        super().__init__(2)
        self.submitted = []
        self.cancelled = False

    def compute(self, spec):
        return replace(failed_record(spec, "", STARTED), status="done", traceback=None)

    def submit(self, spec):
        self.submitted.append(spec)
        assert len(self.submitted) <= self.capacity

    def next(self, timeout):
        spec = self.submitted.pop(0)
        return Ended(spec, self.compute(spec), {})

    def steps(self):
        return {}

    def cancel(self):
        self.cancelled = True


class InThisProcess(Instant):
    """Makes the runs, without the seconds that a process takes to start."""

    def __init__(self, capacity, save_models):
        super().__init__()

    def compute(self, spec):
        return run_one(spec)


STUDY = """\
algorithms: [ppo]
environments: [CartPole-v1]
seeds: 0-1
n_timesteps: 64
eval_freq: 0
noise: [1]
variants:
  myopic:
    ppo: {gamma: 0.5}
    uatrpo: {gamma: 0.5}
"""


def test_what_a_file_says_and_what_is_typed(tmp_path):
    file = tmp_path / "study.yml"
    file.write_text(STUDY)
    study = read_study_file(file)
    assert study.pop("vary") == {"adversarial_noise": [1.0]}
    specs = plan(**study)
    assert [(spec.algo, spec.variant_name, spec.seed) for spec in specs] == [
        (*named, seed) for seed in (0, 1) for named in (("ppo", ""), ("ppo", "myopic"), ("uatrpo", "myopic"))
    ]
    assert all((spec.n_timesteps, spec.eval_freq, spec.varied) == (64, 0, []) for spec in specs)
    assert [spec.hyperparameters["gamma"] for spec in specs[1:3]] == [0.5, 0.5]
    (spec,) = plan(["uatrpo"], ["CartPole-v1"], [0], 64, eval_freq=0)
    # a name of a variant is part of the run
    assert replace(spec, hyperparameters=spec.hyperparameters | {"gamma": 0.5}) not in specs


def test_a_study_from_a_file_to_models_that_rl_zoo_shows(tmp_path, finish, monkeypatch):
    file = tmp_path / "study.yml"
    file.write_text(STUDY.replace("noise: [1]\n", "").replace("    ppo: {gamma: 0.5}\n", ""))
    folder = tmp_path / "study"
    # what is typed replaces what the file says
    typed = ["--algo", "uatrpo", "--seeds", "5", "--n-timesteps", "200", "--params", "n_steps:100", "--save-models"]
    assert "2 done, 0 failed" in finish(["run", "--folder", str(folder), "--study", str(file), *typed])

    monkeypatch.setattr("sb3_uatrpo.study.plots.draw_pictures", lambda results, output: set())
    finish(["report", "--folder", str(folder)])
    text = (folder / "report" / "report.md").read_text(encoding="utf-8")
    for label in ("uatrpo", "uatrpo (myopic)"):
        assert f"| CartPole-v1 | – | {label} | 1 |" in text

    assert len(list((folder / "models").iterdir())) == 2
    (model,) = (folder / "models").glob("uatrpo_CartPole-v1_s5_*")
    (archive,) = model.rglob("CartPole-v1.zip")
    # the sketch would be 200 times as many numbers as the policy's
    assert archive.stat().st_size < 500_000
    # a run that goes on from it draws an Ω of its own
    kept = UATRPO.load(archive, device="cpu").sketch
    assert kept.omega.numel() == 0
    assert not th.equal(kept.generator.get_state(), th.Generator().manual_seed(0).get_state())
    assert (model / "uatrpo" / "CartPole-v1_1" / "CartPole-v1" / "config.yml").exists()
    enjoy = ["enjoy", "--algo", "uatrpo", "--env", "CartPole-v1", "-f", str(model), "-n", "20", "--no-render"]
    zoo = [sys.executable, "-m", "sb3_uatrpo.zoo", *enjoy, "--device", "cpu"]
    shown = subprocess.run(zoo, cwd=ROOT, check=False, capture_output=True, text=True)
    assert shown.returncode == 0, shown.stderr


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("algorithms: [ppo", "while parsing"),
        ("", "None is not of type 'object'"),
        ("algos: [ppo]", "'algos' was unexpected"),
        ("algorithms: ppo", "algorithms: 'ppo' is not of type 'array'"),
        ("seeds: 3-1", "a seed must be an integer"),
        ("variants: {a=b: {ppo: {gamma: 0.5}}}", "the name of a variant must not be empty or contain '=' or ','"),
        ("variants: {short: {ppo: {gama: 0.5}}}", "unknown hyperparameter 'gama' of ppo"),
        ("variants: {short: {pppo: {gamma: 0.5}}}", "unknown algorithm 'pppo'"),
        ("noise: [0, -1]", "noise[1]: -1 is less than the minimum of 0"),
        ("seeds: []", "seeds: [] should be non-empty"),
        ("variants: {short: {1: {gamma: 0.5}}}", "a key must be text, but it is 1"),
        ("variants: {short: {ppo: {1: 0.5}}}", "a key must be text, but it is 1"),
    ],
)
def test_a_file_that_makes_no_sense_is_one_line(text, message, tmp_path, finish):
    file = tmp_path / "study.yml"
    file.write_text(text)
    words = ["--study", str(file), "--folder", str(tmp_path / "study"), "--env", "CartPole-v1", "--n-timesteps", "100"]
    said = finish(["run", *words], code=2)
    assert said.startswith("Error: ")
    assert message in said
    assert len(said.splitlines()) == 1


def test_a_study_from_runs_to_pictures(tmp_path, finish):
    words = ["--algo", "uatrpo", "trpo_matched", "--env", "CartPole-v1", "--n-timesteps", "2000", "--jobs", "2"]
    folder = ["--folder", str(tmp_path / "study")]
    assert "2 done, 0 failed" in finish(["run", *words, *folder])
    files = list((tmp_path / "study" / "records").iterdir())
    assert len(files) == 2
    written = [file.stat().st_mtime_ns for file in files]

    assert "2 of 2 runs have a record already" in finish(["run", *words, *folder])
    assert [file.stat().st_mtime_ns for file in files] == written

    finish(["report", *folder])
    report = tmp_path / "study" / "report"
    assert (report / "report.md").stat().st_size > 1000
    assert list(report.glob("*.png"))
    assert list(report.glob("*.svg"))


def test_failures_corruption_and_changed_settings(tmp_path, finish, monkeypatch):
    words = command(tmp_path)
    (tmp_path / "seen" / "broken").touch()
    said = finish(words, code=1)
    assert "0 done, 2 failed" in said
    assert "RuntimeError: the environment is broken" in said
    traceback = records_of(tmp_path)[0].traceback
    assert "in step" in traceback
    assert "this is the last that it says" in traceback

    # what failed is run again on request only
    monkeypatch.setattr("sb3_uatrpo.study.driver.ProcessExecutor", InThisProcess)
    (tmp_path / "seen" / "broken").unlink()
    assert "2 of 2 runs have a record already" in finish(words, code=1)
    assert "2 done, 0 failed" in finish([*words, "--retry-failed"])

    # so is what has a corrupted record, which is named
    first, second = sorted((tmp_path / "study" / "records").iterdir())
    first.write_bytes(first.read_bytes()[:100])
    second.write_bytes(gzip.compress(b"{}"))
    said = finish(words, code=1)
    assert f"skipped uatrpo on tests.study.tasks:Waiting-v0, seed 0: {first} cannot be read (" in said
    assert f"{second} cannot be read ('format' is a required property); --retry-corrupted repeats it" in said
    assert "0 done, 0 failed, 2 skipped" in said
    said = finish([*words, "--retry-corrupted"])
    assert "repeating uatrpo on tests.study.tasks:Waiting-v0, seed 0: its record cannot be read (" in said
    assert "2 done, 0 failed, 0 skipped" in said
    assert list(records_of(tmp_path)) == [0, 1]

    # a changed setting is another run
    assert "have a record already" not in finish([*words, "--params", "target_kl:0.005"])
    records, _ = read_records(tmp_path / "study" / "records")
    assert {record.spec.hyperparameters["target_kl"] for record in records} == {RECOMMENDED["target_kl"], 0.005}


class Losing(Instant):
    """Loses the first attempts at each run."""

    def __init__(self, n_lost):
        super().__init__()
        self.n_lost = n_lost
        self.attempts = Counter()

    def next(self, timeout):
        ended = super().next(timeout)
        self.attempts[ended.spec] += 1
        if self.attempts[ended.spec] <= self.n_lost:
            return Ended(ended.spec, None, {}, "its machine is gone")
        return ended


@pytest.mark.parametrize(("n_lost", "retries"), [(1, 0), (2, 3), (3, 3), (4, 3)])
def test_a_run_that_is_lost_starts_again(tmp_path, capsys, n_lost, retries):
    specs = plan(["ppo"], ["CartPole-v1"], range(5), 100)
    executor = Losing(n_lost)
    outcome = run_study(specs, StudyFolder(tmp_path / "study", create=True), lambda: executor, retries)
    said = capsys.readouterr().err
    attempts = min(n_lost, retries) + 1
    assert set(executor.attempts.values()) == {attempts}
    assert said.count("): its machine is gone\n") == 5 * (attempts - 1)
    assert executor.cancelled
    if n_lost <= retries:
        assert outcome == Outcome(done=5, failed=[], n_skipped=0)
        assert said.count(f"retried {specs[0]} ({n_lost} of {retries}): its machine is gone\n") == 1
    else:
        reason = f"lost {attempts} times, at last because its machine is gone" if retries else "its machine is gone"
        assert [record.reason for record in outcome.failed] == [reason] * 5


def test_a_run_that_raises_an_exception_does_not_start_again(tmp_path, capsys):
    specs = plan(["ppo"], ["CartPole-v1"], range(2), 100)
    executor = Instant()
    executor.compute = lambda spec: failed_record(spec, "ValueError: no", STARTED)
    outcome = run_study(specs, StudyFolder(tmp_path / "study", create=True), lambda: executor, retries=3)
    assert [record.reason for record in outcome.failed] == ["ValueError: no"] * 2
    assert "retried" not in capsys.readouterr().err


def test_a_record_that_cannot_be_kept_is_rescued(tmp_path, monkeypatch):
    """As when the disk is full after a day of computing."""
    specs = plan(["ppo"], ["CartPole-v1"], [0], 100)
    folder = StudyFolder(tmp_path / "study", create=True)
    monkeypatch.setattr(StudyFolder, "write", mock.Mock(side_effect=OSError(28, "No space left on device")))
    with pytest.raises(StudyError, match=r"No space left on device; the record of .* is in (.*) instead") as caught:
        run_study(specs, folder, Instant)
    rescued = str(caught.value).split(" is in ")[1].removesuffix(" instead")
    assert read_record(rescued).spec == specs[0]
    shutil.rmtree(Path(rescued).parent)


def test_models_are_not_made_for_runs_that_have_a_record(tmp_path, finish):
    words = ["run", "--folder", str(tmp_path / "study"), *PLAN]
    (spec,) = plan(["ppo"], ["CartPole-v1"], [0], 100)
    done = replace(failed_record(spec, "", STARTED), status="done", traceback=None)
    StudyFolder(tmp_path / "study", create=True).write(done)
    said = "1 of 1 runs are done without their model; they are not repeated\n"
    assert said not in finish(words)
    assert said in finish([*words, "--save-models"])


def test_runs_of_another_length_do_not_start(tmp_path, finish):
    words = ["run", "--folder", str(tmp_path / "study"), *PLAN]
    assert "1 done, 0 failed" in finish(words)
    said = finish([*words, "--n-timesteps", "200"], code=2)
    assert "on CartPole-v1 they have 100 (ppo) and 200 (ppo) steps; use another folder than" in said


def test_files_of_no_planned_run_are_ignored(tmp_path, finish):
    words = ["run", "--folder", str(tmp_path / "study"), *PLAN]
    finish(words)
    (path,) = (tmp_path / "study" / "records").iterdir()
    copy = path.with_name("copy.json.gz")
    shutil.copy(path, copy)
    said = finish(words)
    assert f"ignored {copy}: a copy" in said
    assert "1 done, 0 failed, 0 skipped" in said


def test_runs_that_are_too_short_for_an_evaluation_are_announced(tmp_path, capsys):
    for name, eval_freq, announced in (("none", 25_000, True), ("some", 50, False), ("exactly", 100, False)):
        specs = plan(["ppo"], ["CartPole-v1"], [0], 100, eval_freq=eval_freq)
        run_study(specs, StudyFolder(tmp_path / name, create=True), Instant)
        assert ("no evaluations" in capsys.readouterr().err) == announced


def test_a_killed_worker_takes_no_other_with_it(tmp_path):
    driver = start(command(tmp_path, "--jobs", "2", hold_from=1), OMP_NUM_THREADS="2")
    workers = wait_for(lambda: len(runs_seen(tmp_path)) == 2 and runs_seen(tmp_path))
    for worker in workers:
        # fresh processes, not copies of the driver
        assert b"sb3_uatrpo.study.worker" in Path(f"/proc/{worker}/cmdline").read_bytes()
        assert b"OMP_NUM_THREADS=1\0" in Path(f"/proc/{worker}/environ").read_bytes()
    os.kill(workers[0], signal.SIGKILL)
    let_go(tmp_path)
    said, _ = driver.communicate(timeout=PATIENCE)
    assert driver.returncode == 1
    assert "1 done, 1 failed" in said
    (failed,) = (record for record in records_of(tmp_path).values() if record.status == "failed")
    assert "was killed by signal 9 (Killed)" in failed.traceback


def test_a_driver_that_ends_loses_only_what_is_under_way(tmp_path, finish):
    """However it ends, the next one goes on."""
    words = command(tmp_path, "--jobs", "1", hold_from=2)
    for i, number in enumerate((signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGKILL)):
        driver = start(words)
        # the first run was done by the first driver, the second one is held
        wait_for(lambda seen=2 + i: len(runs_seen(tmp_path)) == seen)
        # Ctrl-C goes to the workers too, the signal that ends a job to its process
        (os.killpg if number == signal.SIGINT else os.kill)(driver.pid, number)
        said, _ = driver.communicate(timeout=PATIENCE)
        assert ("1 of 2 runs have a record already" in said) == (i > 0)
        if number == signal.SIGKILL:
            # the worker notices by itself
            wait_for(lambda: not any(map(is_alive, runs_seen(tmp_path))))
        else:
            assert driver.returncode == 130
            assert (
                said.splitlines()[-1] == "interrupted: finished runs are kept, and the same command resumes the study"
            )
            assert "Traceback" not in said
            assert not any(map(is_alive, runs_seen(tmp_path)))
        assert list(records_of(tmp_path)) == [0]
    let_go(tmp_path)
    said = finish(words)
    assert "1 of 2 runs have a record already" in said
    assert "2 done, 0 failed" in said


def test_nohup_is_respected():
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    try:
        assert set(command_line.ending_signals()) == {signal.SIGTERM, signal.SIGHUP}
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        assert command_line.ending_signals() == [signal.SIGTERM]
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_folder_that_another_driver_is_about_to_make(tmp_path):
    (tmp_path / ".study.tmp").touch()
    assert StudyFolder(tmp_path, create=True).read_all() == ([], [])


def test_a_study_has_one_driver_and_its_death_makes_room(tmp_path, finish):
    words = command(tmp_path, "--jobs", "1", seeds="0", hold_from=1)
    driver = start(words)
    wait_for(lambda: len(runs_seen(tmp_path)) == 1)
    refused = f"Error: another driver is at work in {tmp_path / 'study'}: a study has one at a time\n"
    assert finish(words, code=2) == refused
    # a report is no driver
    assert "no records" in finish(["report", "--folder", str(tmp_path / "study")], code=2)
    driver.kill()
    driver.communicate(timeout=PATIENCE)
    let_go(tmp_path)
    assert "1 done, 0 failed" in finish(words)


# A study of twenty runs of a fiftieth of a second each; a line in a file for each attempt
QUICK_STUDY = """
import sys, time
from pathlib import Path
from sb3_uatrpo.study.driver import Ended, Executor, run_study
from sb3_uatrpo.study.folders import StudyFolder
from tests.study.synthetic import make_record

folder = Path(sys.argv[1])
records = {record.spec: record for record in (make_record(seed=seed) for seed in range(20))}

class Quick(Executor):
    submitted = []

    def submit(self, spec):
        self.submitted.append(spec)
        with open(folder / "attempts", "a") as file:
            print(spec.seed, file=file)

    def next(self, timeout):
        time.sleep(0.02)
        spec = self.submitted.pop(0)
        return Ended(spec, records[spec], {"a/model.zip": bytes(10**6)})

    def steps(self):
        return {}

    def cancel(self):
        pass

outcome = run_study(list(records), StudyFolder(folder / "study", create=True), lambda: Quick(2))
assert outcome.done == 20, outcome
"""


def test_a_study_that_is_killed_three_times_loses_no_run(tmp_path):
    program = [sys.executable, "-c", QUICK_STUDY, str(tmp_path)]
    records = tmp_path / "study" / "records"

    def n_records():
        return len(list(records.glob("[!.]*.json.gz"))) if records.exists() else 0

    for least in (3, 8, 13):
        with subprocess.Popen(program, cwd=ROOT) as driver:
            wait_for(lambda least=least: n_records() >= least)
            driver.kill()
        assert driver.returncode == -signal.SIGKILL
        assert n_records() < 20
    subprocess.run(program, cwd=ROOT, check=True)
    assert sorted(records_of(tmp_path)) == list(range(20))
    # only the two under way at each end were done again
    attempts = Counter((tmp_path / "attempts").read_text().split())
    assert len(attempts) == 20
    assert attempts.total() <= 20 + 3 * 2


def test_a_driver_keeps_no_series(tmp_path):
    """Those of a large study are more than the memory holds."""
    specs = plan(["ppo"], ["CartPole-v1"], [0, 1], 100)
    folder = StudyFolder(tmp_path / "study", create=True)
    folder.write(failed_record(specs[0], "lost", STARTED))
    (failed,) = run_study(specs, folder, Instant).failed
    assert failed.reason == "lost"
    assert failed.episodes == failed.evaluations == failed.updates == {}
    # what failed is still known as such when it is run again
    assert run_study(specs, folder, Instant, retry_failed=True) == Outcome(done=2, failed=[], n_skipped=0)


# ----------------------------------------------------------------------------------------------------------- bad input

PLAN = ["--algo", "ppo", "--env", "CartPole-v1", "--n-timesteps", "100"]
OURS = ["--algo", "uatrpo", *PLAN[2:]]


@pytest.mark.parametrize(
    ("name", "words", "message"),
    [
        ("run", [*PLAN, "--algo", "uatrpoo"], "unknown algorithm 'uatrpoo'; did you mean 'uatrpo'?"),
        ("run", [*PLAN, "--env", "CartPole-v9"], "unknown environment 'CartPole-v9'"),
        ("run", [*PLAN, "--params", "gama:1"], "unknown hyperparameter 'gama' of ppo"),
        ("run", [*PLAN, "--noise", "0", "1"], "ppo has no adversarial_noise"),
        ("run", [*PLAN, "--noise", "-1"], "-1.0 is not in the range x>=0"),
        ("run", [*PLAN, "--seeds", "one"], "a seed must be an integer"),
        ("run", [*PLAN, "--seeds", "3-1"], "a seed must be an integer"),
        ("run", [*PLAN, "--seeds", "0-4294967296"], "a seed must be an integer from 0 to 2**32-1"),
        ("run", [*OURS, "--noise", "nan"], "adversarial_noise of uatrpo on CartPole-v1 must be a finite number"),
        ("run", [*OURS, "--noise", "1", "--vary", "adversarial_noise:1"], "come from --noise or from --vary, not from"),
        ("run", [*PLAN, "--shard", "3/8"], "--shard was removed: a Ray cluster (--ray) shares a study among machines"),
        ("mergers", [], "No such command"),
        ("merge", ["a", "b"], "merge was removed: report takes several folders"),
        ("report", ["--separate-settings"], "--separate-settings was removed: "),
        ("run", [*PLAN, "--jobs", "0"], "0 is not in the range x>=1"),
        ("run", [*PLAN, "--ray", "nowhere"], "the address of a Ray cluster must be host:port or auto"),
        ("run", [*PLAN, "--nonsense"], "No such option"),
        ("run", ["--algo", "ppo"], "nothing to run: give --env"),
        ("run", ["--env", "CartPole-v1"], "nothing to run: give --algo"),
        ("run", [*PLAN, "--folder", "NOT_A_STUDY"], "is not the folder of a study"),
        ("run", [*PLAN, "--folder", "NEWER"], "is a study of another format"),
        ("report", ["--folder", "NOT_A_STUDY"], ""),
        ("report", ["--folder", "EMPTY"], "no records"),
    ],
)
def test_bad_input_is_one_line(name, words, message, tmp_path, finish):
    for folder, content in (("NOT_A_STUDY", None), ("EMPTY", '{"format": 1}'), ("NEWER", '{"format": 9}')):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "something").touch()
        if content:
            (tmp_path / folder / "study.json").write_text(content)
    words = [str(tmp_path / word) if (tmp_path / word).is_dir() else word for word in words]
    folder = [] if "--folder" in words else ["--folder", str(tmp_path / "new")]
    said = finish([name, *folder, *words], code=2)
    assert said.startswith("Error: ")
    assert message in said
    assert len(said.splitlines()) == 1


def test_places_that_cannot_be_written_are_one_line(tmp_path, finish):
    make_folder(tmp_path / "no records")
    (tmp_path / "no records" / "records").touch()
    said = finish(["run", *PLAN, "--folder", str(tmp_path / "no records")], code=2)
    assert said.count("\n") == 1
    assert f"File exists: '{tmp_path / 'no records' / 'records'}'" in said
    (make_folder(tmp_path / "no lock") / ".lock").mkdir()
    said = finish(["run", *PLAN, "--folder", str(tmp_path / "no lock")], code=2)
    assert said.count("\n") == 1
    assert f"Is a directory: '{tmp_path / 'no lock' / '.lock'}'" in said
    (tmp_path / "file").touch()
    said = finish(["run", *PLAN, "--folder", str(tmp_path / "file" / "study")], code=2)
    assert "cannot become the folder of a study: [Errno 20] Not a directory" in said
    write_record(make_record(), make_folder(tmp_path / "study") / "records")
    said = finish(
        ["report", "--folder", str(tmp_path / "study"), "--output", str(tmp_path / "file" / "report")], code=2
    )
    assert said == f"Error: [Errno 20] Not a directory: '{tmp_path / 'file' / 'report'}'\n"


def test_values_may_follow_an_equals_sign():
    context = command_line.run.make_context("run", ["--folder=f", "--algo=a", "b", "--seeds=0", "1", "2-4"])
    assert context.params["algos"] == ("a", "b")
    assert context.params["seeds"] == ("0", "1", "2-4")


def test_options_take_several_values():
    words = "--folder f --algo a b --env e --seeds 0 2-4 --noise 0 1 --params gamma:-1 x:2 --retry-failed --algo c"
    context = command_line.run.make_context("run", words.split())
    assert context.params["algos"] == ("a", "b", "c")
    assert context.params["seeds"] == ("0", "2-4")
    assert context.params["noise"] == (0.0, 1.0)
    assert context.params["params"] == ("gamma:-1", "x:2")
    assert context.params["retry_failed"]


def test_imports_are_light():
    code = "import sys, sb3_uatrpo.study; print(sorted(sys.modules))"
    loaded = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for heavy in ("rl_zoo3", "matplotlib", "pandas", "scipy", "ray", "rliable", "click"):
        assert f"'{heavy}'" not in loaded
