"""Where runs are computed."""

import multiprocessing
import os
import shutil
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from io import TextIOBase
from typing import Any, Protocol

import pebble

from sb3_uatrpo.study.record import OUTPUT_HEADING, Record
from sb3_uatrpo.study.specification import RunSpec
from sb3_uatrpo.study.worker import ONE_THREAD, failed_record, run_one

Say = Callable[[str], None]

# How much of a failed run's own output is kept
OUTPUT_CHARACTERS = 2000


class Executor(Protocol):
    """
    Computes runs in processes of their own. Every run that was submitted comes back as a record, if not stopped.

    ``capacity`` is how many runs it can have under way.
    """

    capacity: int

    def submit(self, spec: RunSpec) -> None:
        """
        :param spec: a run to start, when there is room for it
        """

    def collect(self, timeout: float) -> list[Record]:
        """
        While runs are under way.

        :param timeout: most seconds to wait for the first
        :return: records of the runs that have ended since the last call
        """

    def steps(self) -> dict[RunSpec, int]:
        """:return: the runs under way, and how many steps each has done"""

    def stop(self) -> None:
        """End the runs under way, and whatever the executor needed for them; nothing of others."""


@dataclass
class _Run:
    spec: RunSpec
    steps: Any
    started: datetime


class ProcessExecutor:
    """
    One fresh process for each run, on this machine. One that is killed takes no other with it.

    :param n_jobs: most runs at a time
    """

    def __init__(self, n_jobs: int) -> None:
        self.capacity = n_jobs
        self._context = multiprocessing.get_context("spawn")
        # pebble 5.2 announces mp_context but reads context, and forks without a word if it is not there
        options: dict[str, Any] = {"context": self._context, "mp_context": self._context}
        self._start = pebble.concurrent.process(name="study_run", **options)(run_in_child)
        self._runs: dict[Future[Record], _Run] = {}
        self._scratch = tempfile.TemporaryDirectory(prefix="sb3_uatrpo_study_", ignore_cleanup_errors=True)

    def submit(self, spec: RunSpec) -> None:
        """
        :param spec: a run to start
        """
        # Shared memory without a lock, which a worker that is killed could leave locked
        steps = self._context.RawValue("q", 0)
        # A fresh process takes over the environment, and loads its libraries before it runs a line of ours
        with environment(ONE_THREAD):
            future = self._start(spec, steps, self._scratch.name)
        self._runs[future] = _Run(spec, steps, datetime.now(timezone.utc))

    def collect(self, timeout: float) -> list[Record]:
        """
        :param timeout: most seconds to wait for the first
        :return: records of the runs that have ended since the last call
        """
        ended, _ = wait(self._runs, timeout, FIRST_COMPLETED)
        return [self._record(future, self._runs.pop(future)) for future in ended]

    def steps(self) -> dict[RunSpec, int]:
        """:return: the runs under way, and how many steps each has done"""
        return {run.spec: run.steps.value for run in self._runs.values()}

    def stop(self) -> None:
        """End the runs under way."""
        for future in self._runs:
            future.cancel()
        # pebble ends the processes of cancelled futures from threads of its own
        for process in multiprocessing.active_children():
            if process.name == "study_run":
                process.join(timeout=10)
        self._runs.clear()
        self._scratch.cleanup()

    @staticmethod
    def _record(future: Future[Record], run: _Run) -> Record:
        problem = future.exception()
        if problem is None:
            return future.result()
        if isinstance(problem, pebble.ProcessExpired):
            reason = f"the process of the run ended with exit code {problem.exitcode}; a negative one is a signal's"
        else:
            reason = "".join(map(str, (type(problem).__name__, ": ", problem, "\n", problem.__cause__ or "")))
        return failed_record(run.spec, reason, run.started)


def run_in_child(spec: RunSpec, steps: Any, scratch: str) -> Record:
    """
    What the process of a run does. It ends when its driver is gone.

    :param spec: what to run
    :param steps: shared number to which steps are reported
    :param scratch: folder for the run's temporary files
    :return: the run's record
    """
    tempfile.tempdir = scratch
    threading.Thread(target=_end_with_the_driver, args=(scratch,), daemon=True).start()

    def report(n: int) -> None:
        steps.value = n

    return run_quietly(spec, report)


def _end_with_the_driver(scratch: str) -> None:
    """Wait beside the run, whatever it is busy with, until nobody is left to take the result, or to clean up."""
    driver = multiprocessing.parent_process()
    assert driver is not None
    driver.join()
    shutil.rmtree(scratch, ignore_errors=True)
    os._exit(1)


def run_quietly(spec: RunSpec, report: Callable[[int], None]) -> Record:
    """
    Run without a word, since the terminal belongs to the driver's display.

    :param spec: what to run
    :param report: called now and then with the steps done so far
    :return: the run's record; if it failed, with the last that it printed
    """
    output = _Tail()
    with redirect_stdout(output), redirect_stderr(output):
        _let_mujoco_warn_here()
        record = run_one(spec, report)
    if record.traceback and output.text:
        record = replace(record, traceback=record.traceback + OUTPUT_HEADING + output.text)
    return record


def _let_mujoco_warn_here() -> None:
    """Where all else does, in Python's standard error: MuJoCo writes past it, and to a file in the current folder."""
    with suppress(ImportError):
        import mujoco

        mujoco.set_mju_user_warning(lambda message: print(f"MuJoCo: {message}", file=sys.stderr))


@contextmanager
def environment(variables: Mapping[str, str]) -> Iterator[None]:
    """
    :param variables: environment variables to set for the time of the context
    """
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


class _Tail(TextIOBase):
    """Keeps the end of what is written to it."""

    def __init__(self) -> None:
        self.text = ""

    def write(self, text: str) -> int:
        self.text = (self.text + text)[-OUTPUT_CHARACTERS:]
        return len(text)
