"""
Missing runs, some at a time. Each is RL Zoo's ``train`` in a process of its own, and its folder appears in the study
when it has ended, done or failed, so that a run is there as a whole or not at all.
"""

import json
import logging
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Generator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import closing
from dataclasses import asdict
from importlib import import_module
from itertools import islice
from pathlib import Path
from threading import Event
from typing import Any

import yaml
from filelock import FileLock, Timeout
from tqdm import tqdm

from sb3_uatrpo.study.callback import OF_A_STUDY, StudyCallback
from sb3_uatrpo.study.plan import FAILED, Run, StudyError, errors_of, refuse_unequal_lengths

CALLBACK = f"{StudyCallback.__module__}.{StudyCallback.__qualname__}"
# A run's specification, what a failed one has printed, and in a study's folder, what is not done yet
RUN, ERROR, UNFINISHED = "run.json", "error.txt", ".unfinished"
CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
# Enough to keep a cluster busy; how often Ray starts a lost run again; seconds until a cluster must answer
MAX_SUBMITTED, RETRIES, CONNECT_TIMEOUT = 500, 3, 5.0

# Contents of files by relative path, and what a failed run has printed
Ended = tuple[dict[str, bytes], str]
Results = Generator[tuple[Run, Ended], None, None]


def train(run: Run, save_model: bool = False, folder: Path | None = None, stop: Event | None = None) -> Ended:
    """
    Train once, in a fresh process of one thread, with RL Zoo's command. The same run has the same numbers.

    :param folder: where the run has its temporary folder; by default, in the system's
    :param stop: ends the run when it is set
    :return: the contents of its files by relative path, and what it printed if it has failed
    :raises ChildProcessError: if its process was killed
    """
    with tempfile.TemporaryDirectory(prefix="run_", dir=folder, ignore_cleanup_errors=True) as temporary:
        root, stop = Path(temporary).resolve(), stop or Event()
        module, _, env = run.env.rpartition(":")
        logs = root / run.algo / f"{env.replace('/', '-')}_1"
        callbacks = run.hyperparameters.get("callback") or []
        callbacks = [CALLBACK, *(callbacks if isinstance(callbacks, list) else [callbacks])]
        settings = {**run.hyperparameters, "n_timesteps": run.n_timesteps, "callback": callbacks}
        (root / "settings.yml").write_text(yaml.safe_dump({env: settings}))
        words: list[Any] = [sys.executable, "-m", "sb3_uatrpo.zoo", "train", "--algo", run.algo, "--env", env]
        words += ["-f", root, "--seed", run.seed, "--conf-file", root / "settings.yml", "--verbose", 0]
        words += ["--eval-freq", run.eval_freq or -1, "--eval-episodes", run.n_eval_episodes]
        words += ["--device", "cpu", "--num-threads", 1, *(["--gym-packages", module] if module else [])]
        if kwargs := run.hyperparameters.get("env_kwargs"):
            # otherwise, only the training environments would get them
            words += ["--env-kwargs", *(f"{name}:{value!r}" for name, value in kwargs.items())]
        # modules are found where this process finds them
        variables = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "SB3_LOGDIR": str(logs)}
        environment = {**os.environ, **variables, "OMP_NUM_THREADS": "1", OF_A_STUDY: "1"}
        with open(root / "output.txt", "wb") as output:
            # Standard input is never written to: its end tells the run that the study is gone. At Ctrl-C, RL Zoo would
            # save its model and end as if all were done, so it has a session of its own.
            pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": output, "stderr": subprocess.STDOUT}
            process = subprocess.Popen(list(map(str, words)), env=environment, start_new_session=True, **pipes)
            try:
                while process.poll() is None and not stop.wait(0.05):
                    pass
            finally:
                process.kill()
                process.communicate()
        code, printed = process.returncode, (root / "output.txt").read_text(errors="replace")
        if code < 0:
            raise ChildProcessError(f"{printed}\nthe run's process was killed by {signal.Signals(-code).name}")
        unwanted = () if save_model else (".zip", ".pkl")
        paths = [path for path in logs.rglob("*") if path.is_file() and path.suffix not in unwanted]
        files = {path.relative_to(logs).as_posix(): path.read_bytes() for path in paths}
        return files, (printed.strip() or f"exit code {code}") if code or "ended.json" not in files else ""


def run_study(
    runs: Sequence[Run],
    folder: str | os.PathLike[str],
    jobs: int | None = None,
    ray_address: str | None = None,
    save_models: bool = False,
    retry_failed: bool = False,
) -> list[tuple[Run, Path]]:
    """
    Carry out all runs that are not in the folder yet.

    :param folder: the study's folder, created if missing; it is locked meanwhile
    :param jobs: maximum number of runs at a time; by default, one per core, or as many as the Ray cluster takes
    :param ray_address: ``host:port`` of a Ray cluster, or ``auto``; this machine has to be one of its nodes
    :return: the runs that have failed, each with the file of what it printed
    :raises StudyError: if another process is at work in the folder, it has runs of the same name with other settings or
        of another length, or no Ray cluster answers
    """
    root = Path(folder)
    if jobs is not None and jobs < 1:
        raise StudyError(f"jobs must be at least 1, but it is {jobs}")
    root.mkdir(parents=True, exist_ok=True)
    try:
        lock = FileLock(root / ".lock").acquire(blocking=False)
    except Timeout as error:
        raise StudyError(f"another process is at work in {root}: a study has one at a time") from error
    with lock:
        shutil.rmtree(root / UNFINISHED, ignore_errors=True)
        (root / UNFINISHED).mkdir()
        there = _places(runs, root, retry_failed)
        missing = [run for run in runs if run.path not in there]
        if foreign := [root / run.path for run in missing if (root / run.path).exists()]:
            raise StudyError(f"{foreign[0]} is no run of a study (it has no {RUN}): move it away")
        for run in missing:
            shutil.rmtree(root / FAILED / run.path, ignore_errors=True)
        if there:
            print(f"{len(there)} of {len(runs)} runs are there already", file=sys.stderr)
        on_ray = _on_ray(missing, jobs or MAX_SUBMITTED, ray_address, save_models) if ray_address else None
        results = on_ray or _here(missing, jobs or CORES, save_models, root / UNFINISHED)
        # no bar is drawn if the output is not a terminal
        with closing(results), tqdm(total=len(runs), initial=len(there), unit="run", disable=None) as bar:
            for run, (files, printed) in results:
                there[run.path] = _keep(run, files, printed, root)
                bar.write(f"{'failed' if printed else 'done'}: {run}", file=sys.stderr)
                failed = [place for place in there.values() if (place / ERROR).exists()]
                bar.set_postfix(running=min(jobs or CORES, len(runs) - len(there)), failed=len(failed))
                bar.update()
        shutil.rmtree(root / UNFINISHED)
    return [(run, there[run.path] / ERROR) for run in runs if (there[run.path] / ERROR).exists()]


def _places(runs: Sequence[Run], root: Path, without_failed: bool) -> dict[Path, Path]:
    """Where the runs are that are there, done or failed."""
    planned, failed = {run.path: asdict(run) | run.hyperparameters for run in runs}, root.glob(f"{FAILED}/*/*/*/{RUN}")
    places, lengths = {}, [(run.env, run.algo, run.n_timesteps) for run in runs]
    for path in sorted((*root.glob(f"*/*/*/{RUN}"), *(() if without_failed else failed))):
        place, name = path.parent, Path(*path.parts[-4:-1])
        with errors_of(f"{path} (delete {place} to repeat the run)"):
            record = dict(json.loads(path.read_text()))
            record |= record["hyperparameters"]
        lengths.append((record["env"], record["algo"], record["n_timesteps"]))
        if plan := planned.get(name):
            places[name] = place
            unset, keys = "unset", (record | plan).keys() - {"hyperparameters"}
            if differ := sorted(k for k in keys if record.get(k, unset) != plan.get(k, unset)):
                there, wanted = (", ".join(f"{k}={row.get(k, unset)!r}" for k in differ) for row in (record, plan))
                remedy = "use another folder, name hyperparameters (variants, --vary), or if it failed, --retry-failed"
                raise StudyError(f"{place} has {there}, but {wanted} is asked for: {remedy}")
    refuse_unequal_lengths(lengths, f"use another folder than {root}, or delete its runs of the other length")
    return places


def _keep(run: Run, files: dict[str, bytes], error: str, root: Path) -> Path:
    """Write a run's files, and then move all of them into the study at once."""
    temporary, place = root / UNFINISHED / "ended", root / (FAILED if error else "") / run.path
    files = files | {RUN: json.dumps(asdict(run), indent=1).encode()} | ({ERROR: error.encode()} if error else {})
    for name, content in files.items():
        (temporary / name).parent.mkdir(parents=True, exist_ok=True)
        (temporary / name).write_bytes(content)
    place.parent.mkdir(parents=True, exist_ok=True)
    return temporary.rename(place)


def _here(runs: Sequence[Run], jobs: int, save: bool, folder: Path) -> Results:
    stop = Event()
    # threads only wait for their process; what is killed takes no other with it
    with ThreadPoolExecutor(jobs) as pool:
        futures = {pool.submit(train, run, save, folder, stop): run for run in runs}
        try:
            for future in as_completed(list(futures)):
                # or all models would stay in memory
                run = futures.pop(future)
                try:
                    yield run, future.result()
                except ChildProcessError as error:
                    yield run, ({}, str(error))
        finally:
            stop.set()
            pool.shutdown(cancel_futures=True)


def _on_ray(runs: Sequence[Run], jobs: int, address: str, save: bool) -> Results:
    ray: Any = import_module("ray")
    with errors_of(f"no Ray cluster answers at {address} (host:port, or auto)"):
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        if address != "auto":
            host, _, port = address.rpartition(":")
            # Ray would try for minutes to reach an address at which nobody answers
            socket.create_connection((host, int(port)), CONNECT_TIMEOUT).close()
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    try:
        # it starts again with another process if its own, or its machine, is lost
        task = ray.remote(num_cpus=1, max_calls=1, max_retries=RETRIES, retry_exceptions=[ChildProcessError])(train)
        waiting, pending = iter(runs), dict[Any, Run]()
        while True:
            pending |= {task.remote(run, save): run for run in islice(waiting, jobs - len(pending))}
            if not pending:
                break
            (ready,), _ = ray.wait(list(pending))
            run = pending.pop(ready)
            try:
                yield run, ray.get(ready)
            except ray.exceptions.RayError as error:
                yield run, ({}, f"lost {RETRIES + 1} times, at last:\n{error}")
    finally:
        # the cluster stays as it is; the tasks of this process end, and their runs with them
        ray.shutdown()
