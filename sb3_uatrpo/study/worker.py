"""
One run, from its specification to its record. It is RL Zoo's own: its environments, model and schedules.

``python -m sb3_uatrpo.study.worker FOLDER`` is the process of a run: it reads its task from a file in the folder, and
leaves there the steps that it has done, its record, and what it learned if that is wanted.
"""

import argparse
import io
import json
import os
import platform
import shutil
import signal
import sys
import threading
import time
import traceback
from collections import defaultdict
from collections.abc import Callable
from contextlib import closing, redirect_stdout, suppress
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from stable_baselines3.common.base_class import BaseAlgorithm
from stable_baselines3.common.callbacks import BaseCallback, EvalCallback
from stable_baselines3.common.vec_env import VecEnv

from sb3_uatrpo.study.record import Record, RunSpec, write_record

if TYPE_CHECKING:
    from rl_zoo3.exp_manager import ExperimentManager

PACKAGES = ("gymnasium", "mujoco", "numpy", "rl_zoo3", "sb3_contrib", "sb3_uatrpo", "stable_baselines3", "torch")
# Environment variables that keep numerical libraries to one thread, read when they are loaded
ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS"), "1")
# Keeps what is reported rare, and the records of algorithms that learn after every few steps small
STEPS_BETWEEN_REPORTS = 200
# Seconds between two writes of the file with the steps
REPORT_INTERVAL = 0.5
# Seeds of the evaluations' environment lie this far from those of training
EVAL_SEED_OFFSET = 1_000_000
# What a run's folder holds, besides its record
TASK, STEPS, OUTPUT, MODEL = "task.json", "steps", "output.txt", "model"

Series = tuple[dict[str, list], dict[str, list], dict[str, list]]
EMPTY: Series = (
    {"timesteps": [], "returns": [], "lengths": []},
    {"timesteps": [], "returns": []},
    {"timesteps": []},
)


def run_one(
    spec: RunSpec, report: Callable[[int], None] | None = None, model_folder: str | os.PathLike[str] | None = None
) -> Record:
    """
    Train once, on one CPU thread. The same specification gives the same record, but for the time that it took.

    A process of its own is meant: global random number generators are seeded and torch is kept to one thread. Other
    numerical libraries have to be kept to it before they are loaded, with ``ONE_THREAD`` in the environment.

    :param spec: what to run
    :param report: called now and then with the steps done so far
    :param model_folder: where to leave what was learned, as RL Zoo's ``enjoy`` reads it, without the sketch of UATRPO
    :return: a record with status ``"failed"`` and the traceback if the run raised an exception
    """
    started, clock = datetime.now(timezone.utc), time.perf_counter()
    try:
        with TemporaryDirectory(prefix="sb3_uatrpo_study_") as folder:
            series, problem = _train(spec, report or (lambda steps: None), Path(folder), model_folder), None
    # one that would end the process is a failure of the run like any other
    except (Exception, SystemExit):
        series, problem = EMPTY, traceback.format_exc()
    return _record(spec, series, problem, started, time.perf_counter() - clock)


def failed_record(spec: RunSpec, reason: str, started: datetime) -> Record:
    """
    :param spec: a run that came to an end without saying why
    :param reason: what is known
    :param started: when it started
    :return: its record
    """
    return _record(spec, EMPTY, reason, started, (datetime.now(timezone.utc) - started).total_seconds())


def _record(spec: RunSpec, series: Series, problem: str | None, started: datetime, wall_time: float) -> Record:
    versions = {"python": platform.python_version()}
    for name in PACKAGES:
        with suppress(PackageNotFoundError):
            versions[name] = version(name)
    episodes, evaluations, updates = series
    return Record(
        spec=spec,
        status="failed" if problem else "done",
        traceback=problem,
        episodes=episodes,
        evaluations=evaluations,
        updates=updates,
        versions=versions,
        machine={"system": f"{platform.system()} {platform.machine()}", "cpus": str(os.cpu_count())},
        wall_time=round(wall_time, 3),
        started=started.isoformat(timespec="seconds"),
    )


def _train(
    spec: RunSpec, report: Callable[[int], None], folder: Path, model_folder: str | os.PathLike[str] | None
) -> Series:
    import torch as th
    import yaml
    from rl_zoo3.exp_manager import ExperimentManager
    from stable_baselines3.common.logger import Logger
    from stable_baselines3.common.utils import set_random_seed

    from sb3_uatrpo.study.plan import register_environment
    from sb3_uatrpo.zoo import register

    register()
    th.set_num_threads(1)
    name = register_environment(spec.env_id)
    set_random_seed(spec.seed)
    config = folder / "hyperparameters.yml"
    config.write_text(yaml.safe_dump({name: {**spec.hyperparameters, "n_timesteps": spec.n_timesteps}}))
    manager = ExperimentManager(
        # what RL Zoo leaves beside a model as the command line
        argparse.Namespace(algo=spec.algo, env=name, seed=spec.seed, n_timesteps=spec.n_timesteps, env_kwargs=None),
        spec.algo,
        name,
        str(folder),
        n_timesteps=spec.n_timesteps,
        # or else only the environments of training would get them
        env_kwargs=spec.hyperparameters.get("env_kwargs"),
        eval_freq=0,
        seed=spec.seed,
        verbose=0,
        device="cpu",
        config=str(config),
    )
    with redirect_stdout(io.StringIO()):
        experiment = manager.setup_experiment()
    assert experiment is not None
    model = experiment[0]
    # no output: what is logged goes to the recorder
    model.set_logger(Logger(folder=None, output_formats=[]))
    env = model.get_env()
    assert env is not None
    recorder = RunRecorder(report, STEPS_BETWEEN_REPORTS)
    callbacks: list[BaseCallback] = [*manager.callbacks, recorder]
    evaluations = EMPTY[1]
    with closing(env):
        if spec.eval_freq > 0:
            evaluation = _evaluation(manager, spec, env.num_envs, folder)
            callbacks.append(evaluation)
        model.learn(spec.n_timesteps, callback=callbacks)
        report(model.num_timesteps)
        if spec.eval_freq > 0:
            evaluation.eval_env.close()
            evaluations = {
                "timesteps": evaluation.evaluations_timesteps,
                "returns": [[float(value) for value in values] for values in evaluation.evaluations_results],
            }
            # SB3 has as many of these as episodes reported one
            successes = evaluation.evaluations_successes
            if successes and all(len(values) == spec.n_eval_episodes for values in successes):
                evaluations["is_success"] = [[float(value) for value in values] for values in successes]
        episodes = _episodes(env, recorder.successes)
    if model_folder is not None:
        _save_model(model, manager, Path(model_folder))
    return episodes, evaluations, recorder.columns()


def _evaluation(manager: "ExperimentManager", spec: RunSpec, n_envs: int, folder: Path) -> EvalCallback:
    """The callback that evaluates, and keeps its results only where it also writes them: in ``folder``."""
    env = manager.create_envs(1, eval_env=True)
    env.seed(spec.seed + EVAL_SEED_OFFSET)
    return EvalCallback(
        env,
        n_eval_episodes=spec.n_eval_episodes,
        eval_freq=max(spec.eval_freq // n_envs, 1),
        log_path=str(folder),
        deterministic=True,
        verbose=0,
    )


def _episodes(env: VecEnv, successes: dict[int, list]) -> dict[str, list]:
    """What each environment's Monitor has seen. They step together, so n steps of one are n of each."""
    ended = []
    known = False
    for i, (returns, lengths) in enumerate(
        zip(env.get_attr("episode_returns"), env.get_attr("episode_lengths"), strict=True)
    ):
        # an algorithm that does not learn from these environments' steps has no such list
        is_success = successes[i] if len(successes[i]) == len(returns) else [None] * len(returns)
        known = known or any(value is not None for value in is_success)
        steps = 0
        for episode_return, length, success in zip(returns, lengths, is_success, strict=True):
            steps += length
            ended.append((steps * env.num_envs, float(episode_return), int(length), success))
    ended.sort(key=lambda episode: episode[0])
    columns = [list(column) for column in zip(*ended, strict=True)] or [[], [], [], []]
    episodes = dict(zip(("timesteps", "returns", "lengths", "is_success"), columns, strict=True))
    if not known:
        del episodes["is_success"]
    return episodes


def _save_model(model: BaseAlgorithm, manager: "ExperimentManager", folder: Path) -> None:
    """What RL Zoo leaves of a run, but for monitor files, and for the sketch, which is most of it."""
    from sb3_uatrpo.core.sketch import Sketch

    sketch = getattr(model, "sketch", None)
    if isinstance(sketch, Sketch):
        # a fresh one holds nothing yet
        model.sketch = Sketch(*sketch.shape, sketch.ema_beta, 0, sketch.dtype, sketch.device)  # type: ignore[attr-defined]
    with redirect_stdout(io.StringIO()):
        manager.save_trained_model(model)
    run = Path(manager.save_path)
    ignored = shutil.ignore_patterns("*.csv", "command.txt")
    # where RL Zoo looks below its log folder, such as uatrpo/Hopper-v4_1
    shutil.copytree(run, folder / manager.algo / run.name, ignore=ignored)


class RunRecorder(BaseCallback):
    """
    Keeps the numbers and strings that are logged under ``train/``, of the last update too, which SB3 logs but never
    writes; and what episodes say of their success, which Monitor does not keep.

    :param report: called with the number of steps so far
    :param n_steps: least steps between two reports, and between two updates that are kept: of an algorithm that
        learns after every few steps, such as SAC, only a part is
    """

    def __init__(self, report: Callable[[int], None], n_steps: int) -> None:
        super().__init__()
        self.report = report
        self.n_steps = n_steps
        self.updates: list[dict[str, Any]] = []
        #: for each environment, ``info["is_success"]`` of its episodes, ``None`` where it is not there
        self.successes: dict[int, list] = defaultdict(list)
        self.reported = 0
        self.seen: Any = None

    def _on_step(self) -> bool:
        for i, info in enumerate(self.locals.get("infos", ())):
            if "episode" in info:
                is_success = info.get("is_success")
                self.successes[i].append(None if is_success is None else float(is_success))
        if self.num_timesteps - self.reported >= self.n_steps:
            self.reported = self.num_timesteps
            self.report(self.num_timesteps)
        return True

    def _on_rollout_start(self) -> None:
        # An update lies between the end of one rollout and the start of the next
        values = self.logger.name_to_value
        number = values.get("train/n_updates")
        if number is None or number == self.seen:
            return
        if self.updates and self.num_timesteps - self.updates[-1]["timesteps"] < self.n_steps:
            return
        self.seen = number
        logged = {name.removeprefix("train/"): _plain(v) for name, v in values.items() if name.startswith("train/")}
        plain = {name: value for name, value in logged.items() if isinstance(value, (int, float, str))}
        self.updates.append({"timesteps": self.num_timesteps, **plain})

    def _on_training_end(self) -> None:
        self._on_rollout_start()

    def columns(self) -> dict[str, list]:
        """
        :return: a list for each name, as long as there are updates, with ``None`` where an update did not log it
        """
        names = dict.fromkeys(["timesteps", *(name for update in self.updates for name in update)])
        return {name: [update.get(name) for update in self.updates] for name in names}


def _plain(value: Any) -> Any:
    """Numbers of NumPy and torch as Python's own; anything else, such as pictures and arrays, as it is."""
    try:
        return value.item()
    except (AttributeError, RuntimeError, ValueError):
        return value


# --------------------------------------------------------------------------------------------------------- the process


def main() -> None:
    """Run what the folder's task says. The process ends when its driver is gone."""
    # the driver ends its runs itself
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    folder = Path(sys.argv[1])
    threading.Thread(target=_end_with_the_driver, args=(folder,), daemon=True).start()
    task = json.loads((folder / TASK).read_text())
    _let_mujoco_warn_here()
    reported = 0.0

    def report(n_steps: int) -> None:
        nonlocal reported
        if time.monotonic() - reported >= REPORT_INTERVAL:
            reported = time.monotonic()
            (folder / STEPS).write_text(str(n_steps))

    record = run_one(RunSpec.from_json(task["spec"]), report, folder / MODEL if task["save_model"] else None)
    write_record(record, folder)


def _end_with_the_driver(folder: Path) -> None:
    """Wait beside the run, whatever it is busy with, until nobody is left to take the result, or to clean up."""
    # the driver holds the other end of this pipe, and writes nothing. Python's own stdin would be locked at the exit.
    os.read(0, 1)
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(1)


def _let_mujoco_warn_here() -> None:
    """Where all else does, in Python's standard error: MuJoCo writes past it, and to a file in the current folder."""
    with suppress(ImportError):
        import mujoco

        mujoco.set_mju_user_warning(lambda message: print(f"MuJoCo: {message}", file=sys.stderr))


if __name__ == "__main__":
    main()
