"""Runs on a Ray cluster. Records come back to the driver, so that no file system has to be shared."""

import logging
import os
import signal
import socket
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from typing import Any

from sb3_uatrpo.study.errors import StudyError
from sb3_uatrpo.study.executors import Say, run_quietly
from sb3_uatrpo.study.record import Record
from sb3_uatrpo.study.specification import RunSpec
from sb3_uatrpo.study.worker import ONE_THREAD, failed_record

try:
    import ray
    from ray.exceptions import RayError, RayTaskError
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
except ImportError as error:
    raise StudyError('--ray needs Ray: pip install "sb3_uatrpo[study,ray]" brings it') from error

# Enough for Ray to see how much work there is, few enough for a file lock each
MOST_SUBMITTED = 500
# Seconds between two reports of one run, and until an address that does not answer is given up
REPORT_INTERVAL = 1.0
CONNECT_TIMEOUT = 5.0
# How a gRPC client begins, and what kind of frame the server's answer is
HTTP2_SETTINGS = b"\x04"
HTTP2_GREETING = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\x00\x00\x00" + HTTP2_SETTINGS + bytes(5)
LOOPBACK = ("127.0.0.1", "localhost", "[::1]")


@dataclass(frozen=True)
class _Attempt:
    """One start of a run. ``number`` counts from 0."""

    spec: RunSpec
    number: int
    started: datetime

    @property
    def name(self) -> str:
        return f"{self.spec.key()}/{self.number}"


class StepCounter:
    """An actor beside the driver, to which the runs report."""

    def __init__(self) -> None:
        self.counts: dict[str, int] = {}

    def report(self, name: str, n_steps: int) -> None:
        """
        :param name: of an attempt
        :param n_steps: steps that it has done
        """
        self.counts[name] = n_steps

    def read(self) -> dict[str, int]:
        """:return: steps of every attempt that has started, by name"""
        return self.counts


def run_on_node(spec: RunSpec, name: str, counter: Any) -> Record:
    """
    What a task does.

    :param spec: what to run
    :param name: of the attempt
    :param counter: handle of the actor to report to
    :return: the run's record
    """
    last = time.monotonic()
    counter.report.remote(name, 0)

    def report(n_steps: int) -> None:
        nonlocal last
        if time.monotonic() - last >= REPORT_INTERVAL:
            last = time.monotonic()
            counter.report.remote(name, n_steps)

    return run_quietly(spec, report)


class RayExecutor:
    """
    Ray tasks of one CPU and one process each. Runs that are lost with their process or node are started again.

    :param address: the cluster's, ``host:port`` or ``auto``; this machine has to be one of its nodes
    :param say: told of each run that is started again
    :param n_jobs: most runs at a time, ``None`` for as many as the cluster has room for
    :param n_retries: how often a run is started again
    :raises StudyError: if no cluster answers at the address
    """

    def __init__(self, address: str, say: Say, n_jobs: int | None = None, n_retries: int = 3) -> None:
        self.capacity = n_jobs or MOST_SUBMITTED
        self._say = say
        self._n_retries = n_retries
        # a connection that is there already is somebody else's to end
        self._own_connection = not ray.is_initialized()
        if self._own_connection:
            _connect(address)
        options: dict[str, Any] = {"num_cpus": 1, "runtime_env": {"env_vars": ONE_THREAD}}
        # Lost runs are started again from here and not by Ray, which would not tell
        self._task = ray.remote(max_calls=1, max_retries=0, **options)(run_on_node)
        self._counter = _start_counter()
        self._answer = self._counter.read.remote()
        self._counts: dict[str, int] = {}
        self._attempts: dict[Any, _Attempt] = {}

    def submit(self, spec: RunSpec) -> None:
        """
        :param spec: a run to start, when there is room for it
        """
        self._start(_Attempt(spec, 0, datetime.now(timezone.utc)))

    def _start(self, attempt: _Attempt) -> None:
        self._attempts[self._task.remote(attempt.spec, attempt.name, self._counter)] = attempt

    def collect(self, timeout: float) -> list[Record]:
        """
        :param timeout: most seconds to wait for the first
        :return: records of the runs that have ended since the last call
        """
        ray.wait(list(self._attempts), num_returns=1, timeout=timeout)
        ended, _ = ray.wait(list(self._attempts), num_returns=len(self._attempts), timeout=0)
        records = [self._result(reference, self._attempts.pop(reference)) for reference in ended]
        return [record for record in records if record is not None]

    def _result(self, reference: Any, attempt: _Attempt) -> Record | None:
        """The record of an attempt that has ended, ``None`` if there is another attempt."""
        try:
            return ray.get(reference)
        except RayTaskError as error:
            return failed_record(attempt.spec, str(error), attempt.started)
        except RayError as error:
            # what follows the first sentence are hints at Ray's tools
            reason = f"{type(error).__name__}: {' '.join(str(error).split()).partition('. ')[0]}"
            if attempt.number >= self._n_retries:
                return failed_record(
                    attempt.spec, f"lost {attempt.number + 1} times, the last: {reason}", attempt.started
                )
            self._say(f"retried {attempt.spec} ({attempt.number + 1} of {self._n_retries}): {reason}")
            self._start(replace(attempt, number=attempt.number + 1))
            return None

    def steps(self) -> dict[RunSpec, int]:
        """:return: the runs that have been reported to be under way, and how many steps each has done"""
        if ray.wait([self._answer], timeout=0)[0]:
            # without the counter there is no display of steps, and all else goes on
            with suppress(RayError):
                self._counts = ray.get(self._answer)
            self._answer = self._counter.read.remote()
        started = [attempt for attempt in self._attempts.values() if attempt.name in self._counts]
        return {attempt.spec: self._counts[attempt.name] for attempt in started}

    def stop(self) -> None:
        """End the runs under way and the connection, if it was made here; the cluster stays as it is."""
        for reference in self._attempts:
            ray.cancel(reference, force=True)
        self._attempts.clear()
        ray.kill(self._counter)
        if self._own_connection:
            ray.shutdown()


def _start_counter() -> Any:
    """The actor's handle."""
    beside_driver = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=True)
    return ray.remote(StepCounter).options(num_cpus=0, scheduling_strategy=beside_driver).remote()


def _connect(address: str) -> None:
    """
    :raises StudyError: if no cluster answers
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    if address != "auto":
        host, _, port = address.rpartition(":")
        if not host or not port.isdigit() or int(port) >= 2**16:
            raise StudyError(f"the address of a Ray cluster is host:port or auto, but it is {address!r}")
        # Ray reads this machine's loopback address as its outward one
        host = ray.util.get_node_ip_address() if host in LOOPBACK else host
        # and takes many minutes to give up on one where nobody answers, or somebody else
        try:
            _probe(host, int(port))
        except OSError as error:
            raise StudyError(f"no Ray cluster answers at {host}:{port}: {error.strerror or error}") from error
    before = signal.getsignal(signal.SIGTERM)
    try:
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
        # Ray's own handler ends the process before the runs are
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, before)
    except Exception as error:
        raise StudyError(f"no Ray cluster answers at {address}: {' '.join(str(error).split())}") from error


def _probe(host: str, port: int) -> None:
    """
    :raises OSError: if nobody answers, or somebody who does not speak gRPC
    """
    with socket.create_connection((host, port), timeout=CONNECT_TIMEOUT) as connection:
        if os.environ.get("RAY_USE_TLS") == "1":
            return
        connection.sendall(HTTP2_GREETING)
        # 3 bytes of length, then the type of the frame
        if connection.recv(9)[3:4] != HTTP2_SETTINGS:
            raise OSError("what answers there is something else")
