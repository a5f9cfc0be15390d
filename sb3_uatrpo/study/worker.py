"""One run, from its specification to its record. It is RL Zoo's own: its environments, model and schedules."""

import argparse
import io
import os
import platform
import time
import traceback
from collections.abc import Callable
from contextlib import closing, redirect_stdout
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from sb3_uatrpo.study.record import Record
from sb3_uatrpo.study.specification import RunSpec

if TYPE_CHECKING:
    from rl_zoo3.exp_manager import ExperimentManager
    from stable_baselines3.common.callbacks import EvalCallback
    from stable_baselines3.common.vec_env import VecEnv

PACKAGES = ("gymnasium", "mujoco", "numpy", "rl_zoo3", "sb3_contrib", "sb3_uatrpo", "stable_baselines3", "torch")
# Environment variables that keep numerical libraries to one thread, read when they are loaded
ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS"), "1")
# Keeps what is reported rare, and the records of algorithms that learn after every few steps small
STEPS_BETWEEN_REPORTS = 200
# Seeds of the evaluations' environment lie this far from those of training
EVAL_SEED_OFFSET = 1_000_000


def run_one(spec: RunSpec, report: Callable[[int], None] | None = None) -> Record:
    """
    Train once, on one CPU thread. The same specification gives the same record, but for the time that it took.

    A process of its own is meant: global random number generators are seeded and torch is kept to one thread. Other
    numerical libraries have to be kept to it before they are loaded, with ``ONE_THREAD`` in the environment.

    :param spec: what to run
    :param report: called now and then with the steps done so far
    :return: a record with status ``"failed"`` and the traceback if the run raised an exception
    """
    started, clock = datetime.now(timezone.utc), time.perf_counter()
    try:
        series, problem = _train(spec, report or (lambda steps: None)), None
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


Series = tuple[dict[str, list], dict[str, list], dict[str, list]]
EMPTY: Series = (
    {"timesteps": [], "returns": [], "lengths": []},
    {"timesteps": [], "returns": []},
    {"timesteps": []},
)


def _record(spec: RunSpec, series: Series, problem: str | None, started: datetime, wall_time: float) -> Record:
    versions = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            continue
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


def _train(spec: RunSpec, report: Callable[[int], None]) -> Series:
    import torch as th
    import yaml
    from rl_zoo3.exp_manager import ExperimentManager
    from stable_baselines3.common.logger import Logger
    from stable_baselines3.common.utils import set_random_seed

    from sb3_uatrpo.study.diagnostics import UpdateRecorder
    from sb3_uatrpo.study.settings import register_environment
    from sb3_uatrpo.zoo import register

    register()
    th.set_num_threads(1)
    name = register_environment(spec.env_id)
    set_random_seed(spec.seed)
    with TemporaryDirectory(prefix="sb3_uatrpo_study_") as folder:
        config = Path(folder) / "settings.yml"
        config.write_text(yaml.safe_dump({name: {**spec.settings, "n_timesteps": spec.n_timesteps}}))
        manager = ExperimentManager(
            argparse.Namespace(),
            spec.algo,
            name,
            folder,
            n_timesteps=spec.n_timesteps,
            # or else only the environments of training would get them
            env_kwargs=spec.settings.get("env_kwargs"),
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
        with closing(env):
            recorder = UpdateRecorder(report, STEPS_BETWEEN_REPORTS)
            callbacks = [*manager.callbacks, recorder]
            if spec.eval_freq > 0:
                evaluation = _evaluation(manager, spec, env.num_envs, folder)
                callbacks.append(evaluation)
            model.learn(spec.n_timesteps, callback=callbacks)
        report(model.num_timesteps)
        evaluations = EMPTY[1]
        if spec.eval_freq > 0:
            evaluation.eval_env.close()
            returns = [[float(value) for value in values] for values in evaluation.evaluations_results]
            evaluations = {"timesteps": evaluation.evaluations_timesteps, "returns": returns}
        return _episodes(env), evaluations, recorder.columns()


def _evaluation(manager: "ExperimentManager", spec: RunSpec, n_envs: int, folder: str) -> "EvalCallback":
    """The callback that evaluates, and keeps its results only where it also writes them: in ``folder``."""
    from stable_baselines3.common.callbacks import EvalCallback

    env = manager.create_envs(1, eval_env=True)
    env.seed(spec.seed + EVAL_SEED_OFFSET)
    return EvalCallback(
        env,
        n_eval_episodes=spec.n_eval_episodes,
        eval_freq=max(spec.eval_freq // n_envs, 1),
        log_path=folder,
        deterministic=True,
        verbose=0,
    )


def _episodes(env: "VecEnv") -> dict[str, list]:
    """What each environment's Monitor has seen. They step together, so n steps of one are n of each."""
    ended = []
    for returns, lengths in zip(env.get_attr("episode_returns"), env.get_attr("episode_lengths"), strict=True):
        own_steps = 0
        for episode_return, length in zip(returns, lengths, strict=True):
            own_steps += length
            ended.append((own_steps * env.num_envs, float(episode_return), int(length)))
    ended.sort(key=lambda episode: episode[0])
    columns = [list(column) for column in zip(*ended, strict=True)] or [[], [], []]
    return dict(zip(("timesteps", "returns", "lengths"), columns, strict=True))
