"""
One run, from its specification to its record. RL Zoo makes its environments, model and schedules.

``python -m sb3_uatrpo.study.worker FOLDER`` is the process of a run: it reads its task from a file in the folder, and
writes there the number of steps done, its record, and the trained model if asked for.
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
from contextlib import ExitStack, redirect_stdout, suppress
from dataclasses import replace
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import numpy as np
from stable_baselines3.common.base_class import BaseAlgorithm
from stable_baselines3.common.callbacks import BaseCallback, EvalCallback
from stable_baselines3.common.vec_env import VecEnv

from sb3_uatrpo.study.folders import read_evaluations
from sb3_uatrpo.study.record import Record, RunSpec, write_record

if TYPE_CHECKING:
    from rl_zoo3.exp_manager import ExperimentManager

PACKAGES = ("gymnasium", "mujoco", "numpy", "rl_zoo3", "sb3_contrib", "sb3_uatrpo", "stable_baselines3", "torch")
# Environment variables that keep numerical libraries to one thread; a library reads them when it is loaded
ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS"), "1")
# Minimum number of steps between two updates that a record keeps, for algorithms other than ours: records stay small
# even if these learn after every few steps
STEPS_BETWEEN_UPDATES = 200
# Minimum number of seconds between two writes of the file with the number of steps
REPORT_INTERVAL = 0.5
# Seconds that threads of an environment may go on after the run
PATIENCE = 5.0
# Distance between the seeds of training and of evaluation environments
EVAL_SEED_OFFSET = 1_000_000
# Files in a run's folder, besides its record
TASK, STEPS, OUTPUT, MODEL = "task.json", "steps", "output.txt", "model"


def run_one(
    spec: RunSpec, report: Callable[[int], None] | None = None, model_folder: str | os.PathLike[str] | None = None
) -> Record:
    """
    Train once, on one CPU thread. The same specification gives the same record, except for the time that it took.

    Intended for a process of its own: it seeds global random number generators and keeps torch to one thread. Other
    numerical libraries have to be kept to one thread before they are loaded, with ``ONE_THREAD`` in the environment.

    :param report: called at every step with the number of steps done
    :param model_folder: where to save the trained model for RL Zoo's ``enjoy``, without the sketch of UATRPO
    :return: a record, with status ``"failed"`` and the traceback if the run raised an exception
    """
    started = datetime.now(timezone.utc)
    try:
        with TemporaryDirectory(prefix="sb3_uatrpo_study_") as folder:
            series = _train(spec, report or (lambda steps: None), Path(folder), model_folder)
    # an environment may also try to end the process
    except (Exception, SystemExit):
        return failed_record(spec, traceback.format_exc(), started)
    return replace(failed_record(spec, "", started), status="done", traceback=None, **series)


def failed_record(spec: RunSpec, reason: str, started: datetime) -> Record:
    """:return: the record of a run that has ended without one, for this reason"""
    versions = {"python": platform.python_version()}
    for name in PACKAGES:
        with suppress(PackageNotFoundError):
            versions[name] = version(name)
    return Record(
        spec=spec,
        status="failed",
        traceback=reason,
        versions=versions,
        machine={"system": f"{platform.system()} {platform.machine()}", "cpus": str(os.cpu_count())},
        wall_time=round((datetime.now(timezone.utc) - started).total_seconds(), 3),
        started=started.isoformat(timespec="seconds"),
    )


def _train(
    spec: RunSpec, report: Callable[[int], None], folder: Path, model_folder: str | os.PathLike[str] | None
) -> dict[str, Any]:
    import torch as th
    import yaml
    from rl_zoo3.exp_manager import ExperimentManager
    from stable_baselines3.common.logger import Logger
    from stable_baselines3.common.utils import set_random_seed

    from sb3_uatrpo.study.plan import register_environment
    from sb3_uatrpo.trust_region_algorithm import TrustRegionAlgorithm
    from sb3_uatrpo.zoo import register

    register()
    th.set_num_threads(1)
    name = register_environment(spec.env_id)
    set_random_seed(spec.seed)
    config = folder / "hyperparameters.yml"
    config.write_text(yaml.safe_dump({name: {**spec.hyperparameters, "n_timesteps": spec.n_timesteps}}))
    options: dict[str, Any] = {"seed": spec.seed, "n_timesteps": spec.n_timesteps}
    # RL Zoo saves these beside a model as its command line
    arguments = argparse.Namespace(algo=spec.algo, env=name, env_kwargs=None, **options)
    # otherwise, only the training environments would get env_kwargs
    options |= {"config": str(config), "env_kwargs": spec.hyperparameters.get("env_kwargs")}
    manager = ExperimentManager(
        arguments, spec.algo, name, str(folder), eval_freq=0, verbose=0, device="cpu", **options
    )
    with redirect_stdout(io.StringIO()):
        experiment = manager.setup_experiment()
    assert experiment is not None
    model = experiment[0]
    # no output: the recorder reads the logged values
    model.set_logger(Logger(folder=None, output_formats=[]))
    env = model.get_env()
    assert env is not None
    recorder = RunRecorder(report, 0 if isinstance(model, TrustRegionAlgorithm) else STEPS_BETWEEN_UPDATES)
    callbacks = [*manager.callbacks, recorder]
    with ExitStack() as stack:
        stack.callback(env.close)
        if spec.eval_freq > 0:
            eval_env = manager.create_envs(1, eval_env=True)
            stack.callback(eval_env.close)
            eval_env.seed(spec.seed + EVAL_SEED_OFFSET)
            frequency = max(spec.eval_freq // env.num_envs, 1)
            evaluation = _Evaluation(eval_env, None, None, spec.n_eval_episodes, frequency, str(folder), verbose=0)
            callbacks.append(evaluation)
        model.learn(spec.n_timesteps, callback=callbacks)
        if model.num_timesteps < spec.n_timesteps:
            # its last episodes are not those at the end of a run of this length
            raise RuntimeError(f"a callback stopped it after {model.num_timesteps:,} of {spec.n_timesteps:,} steps")
        report(model.num_timesteps)
        episodes = _episodes(env, recorder.ends)
    if model_folder is not None:
        _save_model(model, manager, Path(model_folder))
    return {"episodes": episodes, "evaluations": read_evaluations(folder), "updates": recorder.columns()}


def _episodes(env: VecEnv, ends: dict[int, list[tuple[int, float | None]]]) -> dict[str, list]:
    """The episodes that each environment's Monitor saw, and what the recorder saw of their ends."""
    ended: list[tuple[int, float, int, float | None]] = []
    # Monitor's methods, since wrappers may have attributes of the same names
    methods = ("get_episode_rewards", "get_episode_lengths", "get_total_steps")
    seen = zip(*map(env.env_method, methods), env.get_attr("rewards"), strict=True)
    for i, (returns, lengths, n_steps, under_way) in enumerate(seen):
        if n_steps > sum(lengths) + len(under_way):
            raise RuntimeError(
                "a wrapper around Monitor ended episodes that Monitor does not report, so the returns of the others "
                "are not those of all episodes: end them by a wrapper within Monitor, or by max_episode_steps"
            )
        known = ends[i]
        if len(known) != len(returns):
            # callbacks do not get the infos of all steps, as with sb3-contrib's ARS. Environments step together: n
            # steps of one are n of each.
            known = [(int(steps), None) for steps in np.cumsum(lengths, dtype=int) * env.num_envs]
        steps, successes = zip(*known, strict=True) if known else ((), ())
        ended += zip(steps, map(float, returns), map(int, lengths), successes, strict=True)
    ended.sort(key=lambda episode: episode[0])
    names = ("timesteps", "returns", "lengths", "is_success")
    episodes = {name: [episode[i] for episode in ended] for i, name in enumerate(names)}
    if all(value is None for value in episodes["is_success"]):
        del episodes["is_success"]
    return episodes


def _save_model(model: BaseAlgorithm, manager: "ExperimentManager", folder: Path) -> None:
    """Save what RL Zoo saves, except for monitor files and the sketch, which would be most of the file."""
    from sb3_uatrpo.core.sketch import Sketch

    sketch = getattr(model, "sketch", None)
    if isinstance(sketch, Sketch):
        sketch.clear()
    with redirect_stdout(io.StringIO()):
        manager.save_trained_model(model)
    run = Path(manager.save_path)
    ignored = shutil.ignore_patterns("*.csv", "command.txt")
    # RL Zoo looks for a model in, for example, uatrpo/Hopper-v4_1
    shutil.copytree(run, folder / manager.algo / run.name, ignore=ignored)


def _success(info: dict[str, Any], unreported: Any) -> Any:
    """``info["is_success"]`` as a number: tasks also report it as a flag, or as an array of one."""
    is_success = info.get("is_success")
    return unreported if is_success is None else float(np.mean(is_success))


class _Evaluation(EvalCallback):
    """Also for episodes that do not all report their success, of which SB3's own could not write the lists."""

    def _log_success_callback(self, locals_: dict[str, Any], globals_: dict[str, Any]) -> None:
        if locals_["done"]:
            self._is_success_buffer.append(_success(locals_["info"], np.nan))


class RunRecorder(BaseCallback):
    """
    Keeps the numbers and strings logged under ``train/`` by updates at least ``steps_between_updates`` apart, and by
    the last, which SB3 never dumps. Of episodes, it keeps ``is_success`` and the steps at which they end: these do not
    follow from their lengths if a wrapper around Monitor repeats steps. ``report`` is called with the steps done.
    """

    def __init__(self, report: Callable[[int], None], steps_between_updates: int) -> None:
        super().__init__()
        self.report = report
        self.steps_between_updates = steps_between_updates
        self.updates: list[dict[str, Any]] = []
        #: for each environment, the step at which each of its episodes ended, and ``info["is_success"]`` or ``None``
        self.ends: dict[int, list[tuple[int, float | None]]] = defaultdict(list)
        self.seen: Any = None

    def _on_step(self) -> bool:
        for i, info in enumerate(self.locals.get("infos", ())):
            if "episode" in info:
                self.ends[i].append((self.num_timesteps, _success(info, None)))
        self.report(self.num_timesteps)
        return True

    def _on_rollout_start(self) -> None:
        # an update lies between the end of one rollout and the start of the next
        if not self.updates or self.num_timesteps - self.updates[-1]["timesteps"] >= self.steps_between_updates:
            self._keep_update()

    def _keep_update(self) -> None:
        values = self.logger.name_to_value
        number = values.get("train/n_updates")
        if number is None or number == self.seen:
            return
        self.seen = number
        logged = {name.removeprefix("train/"): as_number(v) for name, v in values.items() if name.startswith("train/")}
        kept = {name: value for name, value in logged.items() if isinstance(value, (int, float, str))}
        self.updates.append({"timesteps": self.num_timesteps, **kept})

    def _on_training_end(self) -> None:
        self._keep_update()

    def columns(self) -> dict[str, list]:
        """:return: for each name, a list with one entry per update, ``None`` if the update did not log that name"""
        names = dict.fromkeys(["timesteps", *(name for update in self.updates for name in update)])
        return {name: [update.get(name) for update in self.updates] for name in names}


def as_number(value: Any) -> Any:
    """:return: a NumPy or torch scalar as a Python number; anything else, such as figures and arrays, unchanged"""
    with suppress(AttributeError, RuntimeError, ValueError):
        return value.item()
    return value


def main() -> None:
    """Run the task in the folder. The process ends when its driver is gone."""
    # the driver stops its runs itself
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    folder = Path(sys.argv[1])
    threading.Thread(target=_end_with_the_driver, args=(folder,), daemon=True).start()
    task = json.loads((folder / TASK).read_text())
    # MuJoCo's warnings go to standard error. By default, they also go into a file in the current folder.
    with suppress(ImportError):
        import mujoco

        mujoco.set_mju_user_warning(lambda message: print(f"MuJoCo: {message}", file=sys.stderr))
    reported = 0.0

    def report(n_steps: int) -> None:
        nonlocal reported
        if time.monotonic() - reported >= REPORT_INTERVAL:
            reported = time.monotonic()
            (folder / STEPS).write_text(str(n_steps))

    record = run_one(RunSpec.from_json(task["spec"]), report, folder / MODEL if task["save_model"] else None)
    write_record(record, folder)
    # Python waits for threads at exit, and an environment may have left one that never ends
    end = threading.Timer(PATIENCE, os._exit, [0])
    end.daemon = True
    end.start()


def _end_with_the_driver(folder: Path) -> None:
    # the driver holds the other end of this pipe, and never writes. Not sys.stdin: it would be locked at exit.
    os.read(0, 1)
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(1)


if __name__ == "__main__":
    main()
