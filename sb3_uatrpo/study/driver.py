"""From specifications to records in a folder. Only missing runs are executed, each in a process of its own."""

import json
import os
import subprocess
import sys
import tempfile
import time
from abc import ABC, abstractmethod
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from sb3_uatrpo.study.folders import Claims, Files, StudyFolder
from sb3_uatrpo.study.record import OUTPUT_HEADING, Record, RunSpec, StudyError, read_record, write_record
from sb3_uatrpo.study.worker import MODEL, ONE_THREAD, OUTPUT, STEPS, TASK, failed_record

# Seconds between updates of the display, and between checks whether a process has ended
POLL, POLL_PROCESSES = 0.5, 0.05
# Characters of a failed run's own output that are kept
OUTPUT_CHARACTERS = 2000


class Result(NamedTuple):
    """
    The result of a run.

    :param record: its record
    :param model: the files of the trained model by relative path, none unless they were asked for
    """

    record: Record
    model: Files


# ----------------------------------------------------------------------------------------------------------- executors


class RunProcess:
    """
    A run in a fresh process of one thread, ``python -m sb3_uatrpo.study.worker``, with a temporary folder for all its
    files. It ends when this process does.

    :param spec: what to run
    :param save_model: whether to keep the trained model
    """

    def __init__(self, spec: RunSpec, save_model: bool = False) -> None:
        self.spec = spec
        self.started = datetime.now(timezone.utc)
        self._folder = TemporaryDirectory(prefix="sb3_uatrpo_study_", ignore_cleanup_errors=True)
        self.path = Path(self._folder.name)
        (self.path / TASK).write_text(json.dumps({"spec": spec.to_json(), "save_model": save_model}))
        # modules are found where this process finds them
        paths = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "TMPDIR": self._folder.name}
        with open(self.path / OUTPUT, "wb") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "sb3_uatrpo.study.worker", self._folder.name],
                env={**os.environ, **ONE_THREAD, **paths},
                # never written to: its end of file tells the run that the driver is gone
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
            )

    def has_ended(self, timeout: float = 0.0) -> bool:
        """
        :param timeout: maximum number of seconds to wait for the end
        :return: whether the process has ended
        """
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(timeout)
        return self.process.returncode is not None

    def steps(self) -> int:
        """:return: the number of steps done"""
        try:
            return int((self.path / STEPS).read_text())
        # not there yet, or just being written
        except (OSError, ValueError):
            return 0

    def result(self) -> Result:
        """
        Remove the run's folder. The run must have ended.

        :return: the result of the run
        """
        path = self.path / self.spec.file_name
        try:
            record = read_record(path)
        except StudyError as error:
            code = self.process.returncode
            reason = f"the run's process ended with exit code {code} (if negative, a signal of that number killed it)"
            if path.exists():
                reason = f"its record cannot be read: {error}"
            record = failed_record(self.spec, reason, self.started)
        if record.traceback and (output := self._last_output()):
            record = replace(record, traceback=record.traceback + OUTPUT_HEADING + output)
        model = self.path / MODEL
        files = {str(path.relative_to(model)): path.read_bytes() for path in model.rglob("*") if path.is_file()}
        self.stop()
        return Result(record, files)

    def _last_output(self) -> str:
        path = self.path / OUTPUT
        with path.open("rb") as output:
            # a character takes at most four bytes
            output.seek(max(0, path.stat().st_size - 4 * OUTPUT_CHARACTERS))
            return output.read().decode(errors="replace")[-OUTPUT_CHARACTERS:]

    def stop(self) -> None:
        """End the run if it has not ended, and remove its folder."""
        self.process.kill()
        # closes standard input, and waits
        self.process.communicate()
        self._folder.cleanup()


class Executor(ABC):
    """
    Executes runs in processes of their own. Every submitted run yields a result, unless it is stopped.

    :param capacity: maximum number of submitted runs at a time
    :param save_models: whether to keep the trained models
    """

    def __init__(self, capacity: int, save_models: bool = False) -> None:
        self.capacity = capacity
        self.save_models = save_models

    @abstractmethod
    def submit(self, spec: RunSpec) -> None:
        """
        :param spec: a run, to be started as soon as there is room for it
        """

    @abstractmethod
    def collect(self, timeout: float) -> list[Result]:
        """
        Called only while there are submitted runs.

        :param timeout: maximum number of seconds to wait for the first result
        :return: results of runs that have ended, each of which is returned once; at the next call, there may be more
        """

    @abstractmethod
    def steps(self) -> dict[RunSpec, int]:
        """:return: for each run that has started and not ended, the number of steps done"""

    @abstractmethod
    def stop(self) -> None:
        """End all submitted runs, and release what the executor itself has acquired."""


class ProcessExecutor(Executor):
    """Runs on this machine. If one is killed, the others go on."""

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
        # one at a time, so that each result is written before the next one is read
        process = ended[0]
        result = process.result()
        self.processes.remove(process)
        return [result]

    def steps(self) -> dict[RunSpec, int]:
        return {process.spec: process.steps() for process in self.processes}

    def stop(self) -> None:
        for process in self.processes:
            process.stop()
        self.processes.clear()


# ------------------------------------------------------------------------------------------------------------- display


class StudyProgress(Progress):
    """
    Shows how many runs are done, running and failed, steps per second over all of them, and the time left. If the
    output is not a terminal, there is only a line for each run that ends.

    :param n_runs: number of runs of the study
    """

    def __init__(self, n_runs: int) -> None:
        console = Console(stderr=True, highlight=False)
        super().__init__(
            BarColumn(bar_width=24),
            TextColumn("{task.description}"),
            TimeRemainingColumn(),
            console=console,
            refresh_per_second=2,
            disable=not console.is_terminal,
        )
        self.n_runs = n_runs
        self.task = self.add_task("")

    def show(
        self, ended: Iterable[Record], steps: int, running: Mapping[RunSpec, int], left: Iterable[RunSpec]
    ) -> None:
        """
        :param ended: records of all runs that have ended
        :param steps: number of steps of the runs that this driver has finished
        :param running: runs under way here, and the number of steps done by each
        :param left: runs that have not ended
        """
        counts = Counter(record.status for record in ended)
        speed = self.tasks[self.task].speed
        self.update(
            self.task,
            description=f"{counts['done']}/{self.n_runs} done, {len(running)} running, {counts['failed']} failed, "
            f"{'–' if speed is None else f'{speed:,.0f}'} steps/s",
            completed=steps + sum(running.values()),
            total=steps + sum(spec.n_timesteps for spec in left),
        )

    def say(self, line: str) -> None:
        """
        Print a line above the display.

        :param line: the line
        """
        self.console.print(line, markup=False, soft_wrap=True)


# --------------------------------------------------------------------------------------------------------------- study


@dataclass(frozen=True)
class Outcome:
    """
    The state of a study after ``run_study``.

    :param done: number of runs that are done
    :param failed: records of the runs that failed, without their series
    :param n_skipped: number of runs with a corrupted record that were not run again
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
    Execute all runs that have no record yet, and write each record as soon as its run has ended. Several drivers may
    share a folder: none repeats a run that another one has under way, and each waits for the others' runs.

    :param specs: the runs of the study
    :param folder: where the records are
    :param make_executor: makes the executor of the runs, given a function that prints a line
    :param retry_failed: whether to repeat runs that have failed
    :param retry_corrupted: whether to repeat runs whose record cannot be read
    :return: the state of the study afterwards
    """
    records, corrupted = folder.read_all(series=False)
    before = {record.spec: record for record in records}
    unreadable = {path.name for path, _ in corrupted}
    ended, missing, n_skipped = [], [], 0
    for spec in specs:
        record = before.get(spec)
        if record is not None and not (retry_failed and record.status == "failed"):
            ended.append(record)
        elif record is None and spec.file_name in unreadable and not retry_corrupted:
            n_skipped += 1
        else:
            missing.append(spec)
    with StudyProgress(len(specs)) as progress:
        for path, reason in corrupted:
            progress.say(f"skipped corrupted record {path}: {reason}")
        if ended:
            progress.say(f"{len(ended)} of {len(specs)} runs have a record already")
        if missing:
            with folder.claims() as claims:
                executor = make_executor(progress.say)
                if all(spec.eval_freq > spec.n_timesteps for spec in missing):
                    progress.say("no evaluations: the runs are shorter than the interval between evaluations")
                try:
                    _run_all(missing, before, ended, folder, claims, executor, progress)
                finally:
                    executor.stop()
    failed = [record for record in ended if record.status == "failed"]
    return Outcome(len(ended) - len(failed), failed, n_skipped)


def _run_all(
    missing: Iterable[RunSpec],
    before: Mapping[RunSpec, Record],
    ended: list[Record],
    folder: StudyFolder,
    claims: Claims,
    executor: Executor,
    progress: StudyProgress,
) -> None:
    """Execute the missing runs and add their records to ``ended``; ``before`` has the records found at the start."""
    waiting = deque(missing)
    steps = 0
    announced = False
    while waiting or claims.held:
        # runs that another driver has under way go to the end of the queue
        for _ in range(len(waiting)):
            if len(claims.held) >= executor.capacity:
                break
            spec = waiting.popleft()
            if not claims.take(spec):
                waiting.append(spec)
                continue
            # a record other than the one found at the start: another driver has done the run in the meantime
            current = folder.read(spec)
            if current is None or current.without_series() == before.get(spec):
                executor.submit(spec)
            else:
                claims.release(spec)
                ended.append(current.without_series())
        if claims.held:
            for record, model in executor.collect(POLL):
                _keep(folder, record, model)
                claims.release(record.spec)
                ended.append(record.without_series())
                steps += record.spec.n_timesteps if record.status == "done" else 0
                progress.say(_last_line(record))
        elif waiting:
            if not announced:
                progress.say(f"waiting for {len(waiting)} runs that another driver has under way")
                announced = True
            time.sleep(POLL)
        progress.show(ended, steps, executor.steps(), [*waiting, *claims.held])


def _keep(folder: StudyFolder, record: Record, model: Files) -> None:
    """Write a record and its model; the record somewhere else, if the folder takes no more."""
    try:
        folder.write_model(record.spec, model)
        folder.write(record)
    except OSError as error:
        rescued = write_record(record, tempfile.mkdtemp(prefix="sb3_uatrpo_records_"))
        raise StudyError(f"{error}; the record of {record.spec} is in {rescued} instead") from error


def _last_line(record: Record) -> str:
    returns = record.episodes["returns"]
    result = f"last return {returns[-1]:.4g}" if returns else record.reason or "no episode ended"
    return f"{record.status:6} {record.spec}: {result} ({record.wall_time:.0f} s)"
