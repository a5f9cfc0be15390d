"""From specifications to records in a folder: an executor has the missing runs done, each in a process of its own."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from abc import ABC, abstractmethod
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from sb3_uatrpo.study.folders import Files, StudyFolder
from sb3_uatrpo.study.record import (
    OUTPUT_HEADING,
    Record,
    RunSpec,
    StudyError,
    read_record,
    refuse_unequal_lengths,
    write_record,
)
from sb3_uatrpo.study.worker import MODEL, ONE_THREAD, OUTPUT, STEPS, TASK, failed_record

# Seconds between updates of the display, and between checks whether a process has ended
POLL, POLL_PROCESSES = 0.5, 0.05
# Characters of a failed run's own output that are kept
OUTPUT_CHARACTERS = 2000


class Ended(NamedTuple):
    """A run that has ended, with its model's files. If its process or its machine was lost: a reason, no record."""

    spec: RunSpec
    record: Record | None
    model: Files
    reason: str = ""


class Executor(ABC):
    """
    Executes runs in processes of their own. What follows from their end is the driver's business.

    :param capacity: maximum number of submitted runs at a time
    :param save_models: whether to keep the trained models
    """

    def __init__(self, capacity: int, save_models: bool = False) -> None:
        self.capacity = capacity
        self.save_models = save_models

    @abstractmethod
    def submit(self, spec: RunSpec) -> None:
        """Start a run as soon as there is room for it."""

    @abstractmethod
    def next(self, timeout: float) -> Ended | None:
        """:return: the next of the submitted runs that has ended; ``None`` if none did within ``timeout`` seconds"""

    @abstractmethod
    def steps(self) -> dict[RunSpec, int]:
        """:return: for each run that has started and not ended, the number of steps done"""

    @abstractmethod
    def cancel(self) -> None:
        """End all submitted runs, and release what the executor itself has acquired."""


class RunProcess:
    """A run in a fresh process of one thread, with a temporary folder for its files. It ends when this process does."""

    def __init__(self, spec: RunSpec, save_model: bool = False) -> None:
        self.spec = spec
        self._folder = TemporaryDirectory(prefix="sb3_uatrpo_study_", ignore_cleanup_errors=True)
        self.path = Path(self._folder.name)
        (self.path / TASK).write_text(json.dumps({"spec": spec.to_json(), "save_model": save_model}))
        # modules are found where this process finds them
        paths = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "TMPDIR": self._folder.name}
        words = [sys.executable, "-m", "sb3_uatrpo.study.worker", self._folder.name]
        with open(self.path / OUTPUT, "wb") as output:
            # standard input is never written to: its end of file tells the run that the driver is gone
            pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": output, "stderr": subprocess.STDOUT}
            self.process = subprocess.Popen(words, env={**os.environ, **ONE_THREAD, **paths}, **pipes)

    def has_ended(self, timeout: float = 0.0) -> bool:
        """:return: whether the process has ended, after at most ``timeout`` seconds"""
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(timeout)
        return self.process.returncode is not None

    def steps(self) -> int:
        """:return: the number of steps done"""
        # its file may not be there yet, or just be written
        with suppress(OSError, ValueError):
            return int((self.path / STEPS).read_text())
        return 0

    def result(self) -> Ended:
        """:return: what the run has left; its folder is removed. The run must have ended."""
        with (self.path / OUTPUT).open("rb") as file:
            # a character takes at most four bytes
            file.seek(max(0, file.seek(0, os.SEEK_END) - 4 * OUTPUT_CHARACTERS))
            printed = file.read().decode(errors="replace")[-OUTPUT_CHARACTERS:]
        output = OUTPUT_HEADING + printed if printed else ""
        record, reason = None, ""
        path = self.path / self.spec.file_name
        try:
            record = read_record(path)
            if record.traceback:
                record = replace(record, traceback=record.traceback + output)
        except StudyError as error:
            code = self.process.returncode
            if path.exists():
                reason = f"its record cannot be read: {error}"
            elif code < 0:
                reason = f"the run's process was killed by signal {-code} ({signal.strsignal(-code)})"
            else:
                reason = f"the run's process ended with exit code {code}"
            reason += output
        model = self.path / MODEL
        files = {str(path.relative_to(model)): path.read_bytes() for path in model.rglob("*") if path.is_file()}
        self.stop()
        return Ended(self.spec, record, files, reason)

    def stop(self) -> None:
        """End the run if it has not ended, and remove its folder."""
        self.process.kill()
        # closes standard input, and waits
        self.process.communicate()
        self._folder.cleanup()


class ProcessExecutor(Executor):
    """Runs on this machine. If one is killed, the others go on."""

    def __init__(self, capacity: int, save_models: bool = False) -> None:
        super().__init__(capacity, save_models)
        self.processes: list[RunProcess] = []

    def submit(self, spec: RunSpec) -> None:
        self.processes.append(RunProcess(spec, self.save_models))

    def next(self, timeout: float) -> Ended | None:
        end = time.monotonic() + timeout
        while not (process := next(filter(RunProcess.has_ended, self.processes), None)):
            if time.monotonic() > end:
                return None
            time.sleep(POLL_PROCESSES)
        ended = process.result()
        self.processes.remove(process)
        return ended

    def steps(self) -> dict[RunSpec, int]:
        return {process.spec: process.steps() for process in self.processes}

    def cancel(self) -> None:
        for process in self.processes:
            process.stop()
        self.processes.clear()


@dataclass(frozen=True)
class Outcome:
    """
    The state of a study: the number of runs that are done, records of those that failed, without their series, and the
    number of runs that were skipped because their record is corrupted.
    """

    done: int
    failed: list[Record]
    n_skipped: int


def run_study(
    specs: Sequence[RunSpec],
    folder: StudyFolder,
    make_executor: Callable[[], Executor],
    retries: int = 0,
    retry_failed: bool = False,
    retry_corrupted: bool = False,
) -> Outcome:
    """
    Execute all runs that have no record yet, and write each record as soon as its run has ended.

    :param specs: the runs of the study
    :param folder: where the records are; it is locked meanwhile
    :param make_executor: makes the executor of the runs
    :param retries: how often a run that is lost with its process or its machine starts again, from the beginning. One
        that raises an exception does not: it would fail again.
    :param retry_failed: whether to repeat runs that have failed
    :param retry_corrupted: whether to repeat runs whose record cannot be read
    :return: the state of the study afterwards
    :raises StudyError: if another driver is at work in the folder, finished runs there have another length, or a record
        cannot be written
    """
    console = Console(stderr=True, highlight=False)
    columns = BarColumn(bar_width=24), TextColumn("{task.description}"), TimeRemainingColumn()
    # nothing is shown if the output is not a terminal
    display = Progress(*columns, console=console, refresh_per_second=2, disable=not console.is_terminal)
    with folder.lock(), display:

        def say(line: str) -> None:
            console.print(line, markup=False, soft_wrap=True)

        records, corrupted = folder.read_all(series=False)
        again = ("failed",) if retry_failed else ()
        kept = {record.spec: record for record in records if record.status not in again}
        unreadable = set() if retry_corrupted else {path.name for path, _ in corrupted}
        ended = [kept[spec] for spec in specs if spec in kept]
        missing = [spec for spec in specs if spec not in kept and spec.file_name not in unreadable]
        repeated = {spec.file_name for spec in missing}
        refuse_unequal_lengths(
            (
                (spec.env_id, spec.algo, spec.n_timesteps)
                for spec in [*specs, *(record.spec for record in records if record.status == "done")]
            ),
            f"use another folder than {folder.path}, or delete its records of the other length",
        )
        planned = {spec.file_name: spec for spec in specs}
        for path, reason in corrupted:
            if path.name not in planned:
                say(f"ignored {path}: {reason}")
            elif path.name in repeated:
                say(f"repeating {planned[path.name]}: its record cannot be read ({reason})")
            else:
                say(f"skipped {planned[path.name]}: {path} cannot be read ({reason}); --retry-corrupted repeats it")
        if ended:
            say(f"{len(ended)} of {len(specs)} runs have a record already")
        if missing:
            executor = make_executor()
            if all(spec.eval_freq > spec.n_timesteps for spec in missing):
                say("no evaluations: the runs are shorter than the interval between evaluations")
            task, steps, total = display.add_task(""), 0, sum(spec.n_timesteps for spec in missing)
            try:
                for result in _results(missing, executor, retries, say):
                    if result is not None:
                        record, model = result
                        _keep(folder, record, model)
                        say(_last_line(record))
                        ended.append(record.without_series())
                        # a run that failed has not done its steps
                        steps += record.spec.n_timesteps if record.status == "done" else 0
                        total -= record.spec.n_timesteps if record.status == "failed" else 0
                    running, counts = executor.steps(), Counter(record.status for record in ended)
                    text = f"{counts['done']}/{len(specs)} done, {len(running)} running, {counts['failed']} failed"
                    text += f", {display.tasks[0].speed or 0:,.0f} steps/s"
                    display.update(task, description=text, completed=steps + sum(running.values()), total=total)
            finally:
                executor.cancel()
    failed = [record for record in ended if record.status == "failed"]
    return Outcome(len(ended) - len(failed), failed, len(specs) - len(ended))


def _results(
    specs: Sequence[RunSpec], executor: Executor, retries: int, say: Callable[[str], None]
) -> Iterator[tuple[Record, Files] | None]:
    """Execute runs; yield the record and the model of each as it ends, and ``None`` from time to time."""
    waiting = deque(specs)
    # the number of attempts, and when the first one began
    under_way: dict[RunSpec, tuple[int, datetime]] = {}
    while waiting or under_way:
        while waiting and len(under_way) < executor.capacity:
            spec = waiting.popleft()
            under_way[spec] = 1, datetime.now(timezone.utc)
            executor.submit(spec)
        ended = executor.next(POLL)
        if ended is None:
            yield None
            continue
        spec, record, model, reason = ended
        attempts, started = under_way.pop(spec)
        if record is None and attempts <= retries:
            say(f"retried {spec} ({attempts} of {retries}): {reason.partition(OUTPUT_HEADING)[0]}")
            under_way[spec] = attempts + 1, started
            executor.submit(spec)
        else:
            reason = f"lost {attempts} times, at last because {reason}" if attempts > 1 else reason
            yield record or failed_record(spec, reason, started), model


def _keep(folder: StudyFolder, record: Record, model: Files) -> None:
    """Write a record and its model; the record somewhere else, if the folder takes no more."""
    try:
        folder.write(record, model)
    except OSError as error:
        rescued = write_record(record, tempfile.mkdtemp(prefix="sb3_uatrpo_records_"))
        raise StudyError(f"{error}; the record of {record.spec} is in {rescued} instead") from error


def _last_line(record: Record) -> str:
    returns = record.episodes["returns"]
    result = f"last return {returns[-1]:.4g}" if returns else record.reason or "no episode ended"
    return f"{record.status:6} {record.spec}: {result} ({record.wall_time:.0f} s)"
