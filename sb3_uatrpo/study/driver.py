"""From specifications to records in a folder: only what is missing is run, each run in a process of its own."""

import json
import os
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from sb3_uatrpo.study.record import OUTPUT_HEADING, Record, RunSpec, StudyError, read_record
from sb3_uatrpo.study.study_folder import Claims, Files, StudyFolder
from sb3_uatrpo.study.worker import MODEL, ONE_THREAD, OUTPUT, STEPS, TASK, failed_record

# Seconds between looks at what the runs have done, and at whether a process has ended
POLL, POLL_PROCESSES = 0.5, 0.05
# How much of a failed run's own output is kept
OUTPUT_CHARACTERS = 2000


class Result(NamedTuple):
    """
    What comes of a run.

    :param record: its record
    :param model: the files of the trained model by relative path, none unless they were asked for
    """

    record: Record
    model: Files


# ----------------------------------------------------------------------------------------------------------- executors


class RunProcess:
    """
    A run in a fresh process of one thread, ``python -m sb3_uatrpo.study.worker``, with a temporary folder for all that
    it writes. It ends when this process does.

    :param spec: what to run
    :param save_model: whether to keep what it learns
    """

    def __init__(self, spec: RunSpec, save_model: bool = False) -> None:
        self.spec = spec
        self.started = datetime.now(timezone.utc)
        self._folder = TemporaryDirectory(prefix="sb3_uatrpo_study_", ignore_cleanup_errors=True)
        self.path = Path(self._folder.name)
        (self.path / TASK).write_text(json.dumps({"spec": spec.to_json(), "save_model": save_model}))
        # Modules are found where this process finds them
        paths = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "TMPDIR": self._folder.name}
        with open(self.path / OUTPUT, "wb") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "sb3_uatrpo.study.worker", self._folder.name],
                env={**os.environ, **ONE_THREAD, **paths},
                # nothing is written to it: its end tells the run that nobody is left to take the record
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
            )

    def has_ended(self) -> bool:
        """:return: whether there is a result"""
        return self.process.poll() is not None

    def steps(self) -> int:
        """:return: how many steps it has done"""
        try:
            return int((self.path / STEPS).read_text())
        # not there yet, or just being written
        except (OSError, ValueError):
            return 0

    def result(self) -> Result:
        """:return: what came of the run, once it has ended; its folder is gone then"""
        try:
            record = read_record(self.path / self.spec.file_name)
        except StudyError:
            code = self.process.returncode
            reason = f"the process of the run ended with exit code {code}; a negative one is a signal's"
            record = failed_record(self.spec, reason, self.started)
        output = (self.path / OUTPUT).read_text(errors="replace")[-OUTPUT_CHARACTERS:]
        if record.traceback and output:
            record = replace(record, traceback=record.traceback + OUTPUT_HEADING + output)
        model = self.path / MODEL
        files = {str(path.relative_to(model)): path.read_bytes() for path in model.rglob("*") if path.is_file()}
        self.stop()
        return Result(record, files)

    def stop(self) -> None:
        """End the run if it is under way, and remove its folder."""
        self.process.kill()
        # closes standard input, and waits
        self.process.communicate()
        self._folder.cleanup()


class Executor(ABC):
    """
    Computes runs in processes of their own. Every run that was submitted comes back, if not stopped.

    :param capacity: how many runs it can have under way
    :param save_models: whether to keep what runs learn
    """

    def __init__(self, capacity: int, save_models: bool = False) -> None:
        self.capacity = capacity
        self.save_models = save_models

    @abstractmethod
    def submit(self, spec: RunSpec) -> None:
        """
        :param spec: a run to start, when there is room for it
        """

    @abstractmethod
    def collect(self, timeout: float) -> list[Result]:
        """
        While runs are under way.

        :param timeout: most seconds to wait for the first
        :return: results of the runs that have ended since the last call
        """

    @abstractmethod
    def steps(self) -> dict[RunSpec, int]:
        """:return: the runs under way, and how many steps each has done"""

    @abstractmethod
    def stop(self) -> None:
        """End the runs under way, and whatever the executor needed for them; nothing of others."""


class ProcessExecutor(Executor):
    """Runs on this machine. One that is killed takes no other with it."""

    def __init__(self, capacity: int, save_models: bool = False) -> None:
        super().__init__(capacity, save_models)
        self.processes: list[RunProcess] = []

    def submit(self, spec: RunSpec) -> None:
        self.processes.append(RunProcess(spec, self.save_models))

    def collect(self, timeout: float) -> list[Result]:
        end = time.monotonic() + timeout
        while not (ended := [process for process in self.processes if process.has_ended()]):
            if time.monotonic() > end:
                return []
            time.sleep(POLL_PROCESSES)
        self.processes = [process for process in self.processes if process not in ended]
        return [process.result() for process in ended]

    def steps(self) -> dict[RunSpec, int]:
        return {process.spec: process.steps() for process in self.processes}

    def stop(self) -> None:
        for process in self.processes:
            process.stop()
        self.processes.clear()


# ------------------------------------------------------------------------------------------------------------- display


class StudyProgress:
    """
    How many runs are done, under way and failed, steps per second over all of them, and the time left. Where
    the output is no terminal, only a line for each run that ends.

    :param n_runs: number of runs of the study
    :param n_steps: steps of those that are still to be run
    :param n_done: number of runs that are done already
    :param n_failed: number of runs that failed already and stay so
    """

    def __init__(self, n_runs: int, n_steps: int, n_done: int = 0, n_failed: int = 0) -> None:
        self.n_steps, self.n_done, self.n_failed = n_steps, n_done, n_failed
        self.finished_steps = 0
        self.console = Console(stderr=True, highlight=False)
        self.progress = Progress(
            BarColumn(bar_width=24),
            TextColumn(f"{{task.fields[n_done]}}/{n_runs} done, {{task.fields[n_running]}} running"),
            TextColumn("{task.fields[n_failed]} failed"),
            TextColumn("{task.fields[speed]} steps/s"),
            TimeRemainingColumn(),
            console=self.console,
            refresh_per_second=2,
            disable=not self.console.is_terminal,
        )
        self.task = self.progress.add_task("", n_done=0, n_failed=0, n_running=0, speed="–")
        self.update(0, 0)

    def ended(self, record: Record) -> None:
        """
        :param record: of a run that has just ended
        """
        if record.status == "done":
            self.n_done += 1
            self.finished_steps += record.spec.n_timesteps
        else:
            self.n_failed += 1
            # what is not done any more takes no time either
            self.n_steps -= record.spec.n_timesteps
        returns = record.episodes["returns"]
        result = f"last return {returns[-1]:.4g}" if returns else record.reason or "no episode ended"
        self.say(f"{record.status:6} {record.spec}: {result} ({record.wall_time:.0f} s)")

    def skipped(self, record: Record) -> None:
        """
        :param record: of a run that somebody else has done meanwhile
        """
        self.n_done += record.status == "done"
        self.n_failed += record.status == "failed"
        self.n_steps -= record.spec.n_timesteps

    def update(self, n_running: int, running_steps: int) -> None:
        """
        :param n_running: number of runs under way
        :param running_steps: steps that they have done
        """
        speed = self.progress.tasks[self.task].speed
        self.progress.update(
            self.task,
            completed=self.finished_steps + running_steps,
            total=self.n_steps,
            n_done=self.n_done,
            n_failed=self.n_failed,
            n_running=n_running,
            speed="–" if speed is None else f"{speed:,.0f}",
        )

    def say(self, line: str) -> None:
        """
        :param line: printed above the display
        """
        self.console.print(line, markup=False, soft_wrap=True)


# --------------------------------------------------------------------------------------------------------------- study


@dataclass(frozen=True)
class Outcome:
    """
    What a study's folder holds after ``run_study``.

    :param done: number of runs that are done
    :param failed: records of the runs that failed, without their series
    :param n_skipped: number of runs whose record is corrupted and was not asked for anew
    """

    done: int
    failed: list[Record]
    n_skipped: int


def run_study(
    specs: Sequence[RunSpec],
    folder: StudyFolder,
    make_executor: Callable[[Callable[[str], None]], Executor],
    retry_failed: bool = False,
    retry_corrupted: bool = False,
) -> Outcome:
    """
    Run what has no record yet, and write each record as soon as its run has ended. Several may do so on one folder at a
    time: none repeats what another has under way, and each waits for what the others do.

    :param specs: the runs of the study
    :param folder: where the records are
    :param make_executor: makes what computes the runs, from a function that says a line to the user
    :param retry_failed: whether to run again what has failed
    :param retry_corrupted: whether to run again what has a record that cannot be read
    :return: what the folder holds of the study afterwards
    """
    records, corrupted = folder.read_all(series=False)
    before = {record.spec: record for record in records}
    unreadable = {path.name for path, _ in corrupted}
    settled, skipped, missing = [], [], []
    for spec in specs:
        record = before.get(spec)
        if record is not None and not (retry_failed and record.status == "failed"):
            settled.append(record)
        elif record is None and spec.file_name in unreadable and not retry_corrupted:
            skipped.append(spec)
        else:
            missing.append(spec)
    progress = StudyProgress(
        len(specs),
        n_steps=sum(spec.n_timesteps for spec in missing),
        n_done=sum(record.status == "done" for record in settled),
        n_failed=sum(record.status == "failed" for record in settled),
    )
    with progress.progress:
        for path, reason in corrupted:
            progress.say(f"skipped corrupted record {path}: {reason}")
        if settled:
            progress.say(f"{len(settled)} of {len(specs)} runs have a record already")
        new: list[Record] = []
        if missing:
            with folder.claims() as claims:
                executor = make_executor(progress.say)
                if all(spec.eval_freq > spec.n_timesteps for spec in missing):
                    progress.say("no evaluations: runs have fewer steps than there are between two of them")
                try:
                    new = _run_all(missing, before, folder, claims, executor, progress)
                finally:
                    executor.stop()
    ended = [*settled, *new]
    return Outcome(
        done=sum(record.status == "done" for record in ended),
        failed=[record for record in ended if record.status == "failed"],
        n_skipped=len(skipped),
    )


def _run_all(
    missing: Iterable[RunSpec],
    before: dict[RunSpec, Record],
    folder: StudyFolder,
    claims: Claims,
    executor: Executor,
    progress: StudyProgress,
) -> list[Record]:
    ended: list[Record] = []
    waiting = deque(missing)
    announced = False
    while waiting or claims.held:
        # those that somebody else has under way go to the end of the queue
        for _ in range(len(waiting)):
            if len(claims.held) >= executor.capacity:
                break
            spec = waiting.popleft()
            if not claims.take(spec):
                waiting.append(spec)
                continue
            current = folder.read(spec)
            if current is None or current.without_series() == before.get(spec):
                executor.submit(spec)
                continue
            claims.release(spec)
            progress.skipped(current)
            ended.append(current.without_series())
        if claims.held:
            for record, model in executor.collect(POLL):
                folder.write_model(record.spec, model)
                folder.write(record)
                claims.release(record.spec)
                progress.ended(record)
                ended.append(record.without_series())
        elif waiting:
            if not announced:
                progress.say(f"waiting for {len(waiting)} runs that another driver has under way")
                announced = True
            time.sleep(POLL)
        steps = executor.steps()
        progress.update(len(steps), sum(steps.values()))
    return ended
