"""Runs on a Ray cluster. Records are sent to the driver, so the nodes need no shared file system."""

import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from typing import Any

from sb3_uatrpo.study.driver import Executor, Result, RunProcess
from sb3_uatrpo.study.record import RunSpec, StudyError
from sb3_uatrpo.study.worker import failed_record

try:
    import grpc  # type: ignore[import-untyped]
    import ray
    from ray.exceptions import RayError, RayTaskError
except ImportError as error:
    raise StudyError('--ray needs Ray: run pip install "sb3_uatrpo[study,ray]"') from error

# Enough to keep a cluster busy, and few enough for each to hold a file lock
MAX_SUBMITTED = 500
# Seconds between two reports of a run, and before giving up on an address
REPORT_INTERVAL, CONNECT_TIMEOUT = 1.0, 5.0
LOOPBACK = ("127.0.0.1", "localhost", "[::1]")


def run_on_node(spec: RunSpec, save_model: bool) -> Iterator[int | Result]:
    """
    The Ray task of a run. It starts a process of its own for the run, as ``ProcessExecutor`` does; that process ends
    with the task's.

    :param spec: what to run
    :param save_model: whether to keep the trained model
    :return: yields the number of steps done from time to time, and finally the result
    """
    process = RunProcess(spec, save_model)
    try:
        yield 0
        while not process.has_ended(REPORT_INTERVAL):
            yield process.steps()
        yield process.result()
    finally:
        process.stop()


@dataclass(frozen=True)
class Attempt:
    """
    One attempt at a run.

    :param spec: what to run
    :param number: number of the attempt, from 0
    :param started: when the run was first submitted
    :param steps: number of steps done, ``None`` before the attempt has started
    """

    spec: RunSpec
    number: int
    started: datetime
    steps: int | None = None


class RayExecutor(Executor):
    """
    One Ray task for each run. A run that is lost with its process or its node is restarted from the beginning; one that
    raises an exception is not.

    :param address: address of the cluster, ``host:port`` or ``auto``; this machine has to be one of its nodes
    :param say: called with a line about each run that is restarted
    :param n_jobs: maximum number of runs at a time, ``None`` for as many as the cluster has room for
    :param n_retries: how often a run is restarted
    :param save_models: whether to keep the trained models
    :raises StudyError: if no cluster answers at the address
    """

    def __init__(
        self,
        address: str,
        say: Callable[[str], None],
        n_jobs: int | None = None,
        n_retries: int = 3,
        save_models: bool = False,
    ) -> None:
        super().__init__(n_jobs or MAX_SUBMITTED, save_models)
        self.say = say
        self.n_retries = n_retries
        # an existing connection belongs to the caller
        self.connected_here = not ray.is_initialized()
        if self.connected_here:
            _connect(address)
        # Ray's own retries report neither the lost run nor the reason, and drop earlier outputs of a generator
        self.task = ray.remote(num_cpus=1, max_calls=1, max_retries=0, num_returns="streaming")(run_on_node)
        self.attempts: dict[Any, Attempt] = {}

    def submit(self, spec: RunSpec) -> None:
        self._start(Attempt(spec, 0, datetime.now(timezone.utc)))

    def _start(self, attempt: Attempt) -> None:
        self.attempts[self.task.remote(attempt.spec, self.save_models)] = attempt

    def collect(self, timeout: float) -> list[Result]:
        end = time.monotonic() + timeout
        while self.attempts:
            left = max(0.0, end - time.monotonic())
            ray.wait(list(self.attempts), num_returns=1, timeout=left)
            ready, _ = ray.wait(list(self.attempts), num_returns=len(self.attempts), timeout=0)
            results = [result for outputs in ready if (result := self._next(outputs)) is not None]
            # most outputs are only numbers of steps: keep waiting for a result
            if results or not left:
                return results
        return []

    def _next(self, outputs: Any) -> Result | None:
        """The result of a task if that is its next output, ``None`` while it is under way."""
        attempt = self.attempts.pop(outputs)
        try:
            output = ray.get(next(outputs))
        except RayTaskError as error:
            return Result(failed_record(attempt.spec, str(error), attempt.started), {})
        except RayError as error:
            # the sentences after the first are hints about Ray's tools
            reason = f"{type(error).__name__}: {' '.join(str(error).split()).partition('. ')[0]}"
            if attempt.number >= self.n_retries:
                reason = f"lost {attempt.number + 1} times, the last: {reason}"
                return Result(failed_record(attempt.spec, reason, attempt.started), {})
            self.say(f"retried {attempt.spec} ({attempt.number + 1} of {self.n_retries}): {reason}")
            self._start(replace(attempt, number=attempt.number + 1, steps=None))
            return None
        if isinstance(output, int):
            self.attempts[outputs] = replace(attempt, steps=output)
            return None
        return Result(*output)

    def steps(self) -> dict[RunSpec, int]:
        return {attempt.spec: attempt.steps for attempt in self.attempts.values() if attempt.steps is not None}

    def stop(self) -> None:
        for outputs in self.attempts:
            ray.cancel(outputs, force=True)
        self.attempts.clear()
        # the cluster stays as it is
        if self.connected_here:
            ray.shutdown()


def _connect(address: str) -> None:
    """:raises StudyError: if no cluster answers"""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    if address != "auto":
        host, _, port = address.rpartition(":")
        if not host or not port.isdigit() or int(port) >= 2**16:
            raise StudyError(f"the address of a Ray cluster must be host:port or auto, but it is {address!r}")
        # Ray replaces this machine's loopback address with its external one
        host = ray.util.get_node_ip_address() if host in LOOPBACK else host
        # Ray takes many minutes to give up on an address without a cluster
        if os.environ.get("RAY_USE_TLS") != "1":
            with grpc.insecure_channel(f"{host}:{port}") as channel:
                try:
                    grpc.channel_ready_future(channel).result(timeout=CONNECT_TIMEOUT)
                except grpc.FutureTimeoutError as error:
                    reason = f"no Ray cluster answered at {host}:{port} within {CONNECT_TIMEOUT:g} seconds"
                    raise StudyError(reason) from error
    before = signal.getsignal(signal.SIGTERM)
    try:
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
        # Ray's own handler would end this process before the runs are stopped
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, before)
    except Exception as error:
        raise StudyError(f"no Ray cluster answers at {address}: {' '.join(str(error).split())}") from error
