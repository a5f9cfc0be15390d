"""Runs on a Ray cluster. Records are sent to the driver, so the nodes need no shared file system."""

import logging
import os
import signal
import time
from collections.abc import Iterator
from typing import Any

from sb3_uatrpo.study.driver import Ended, Executor, RunProcess
from sb3_uatrpo.study.record import RunSpec, StudyError

try:
    import grpc  # type: ignore[import-untyped]
    import ray
    from ray.exceptions import RayError
except ImportError as error:
    raise StudyError('--ray needs Ray: run pip install ".[study,ray]" in a clone of sb3_uatrpo') from error

# Enough to keep a cluster busy
MAX_SUBMITTED = 500
# Seconds between two reports of a run, and before giving up on an address
REPORT_INTERVAL, CONNECT_TIMEOUT = 1.0, 5.0
LOOPBACK = ("127.0.0.1", "localhost", "[::1]")


def run_on_node(spec: RunSpec, save_model: bool) -> Iterator[int | Ended]:
    """The Ray task of a run, in a process that ends with the task's: yields steps from time to time, then the result"""
    process = RunProcess(spec, save_model)
    try:
        yield 0
        while not process.has_ended(REPORT_INTERVAL):
            yield process.steps()
        yield process.result()
    finally:
        process.stop()


class RayExecutor(Executor):
    """One Ray task for each run. This machine has to be a node of the cluster, at ``host:port`` or ``auto``."""

    def __init__(self, address: str, n_jobs: int | None = None, save_models: bool = False) -> None:
        super().__init__(n_jobs or MAX_SUBMITTED, save_models)
        _connect(address)
        # Ray's own retries report neither the lost run nor the reason, and drop earlier outputs of a generator
        self.task = ray.remote(num_cpus=1, max_calls=1, max_retries=0, num_returns="streaming")(run_on_node)
        # by the outputs of their tasks: the runs, and the steps of those that have started
        self.specs: dict[Any, RunSpec] = {}
        self.reported: dict[RunSpec, int] = {}

    def submit(self, spec: RunSpec) -> None:
        self.specs[self.task.remote(spec, self.save_models)] = spec

    def next(self, timeout: float) -> Ended | None:
        end = time.monotonic() + timeout
        # most outputs are only numbers of steps: keep waiting for a result
        while self.specs and (left := end - time.monotonic()) > 0:
            ready: list[Any] = ray.wait(list(self.specs), num_returns=1, timeout=left)[0]
            for outputs in ready:
                spec = self.specs.pop(outputs)
                output: Any
                try:
                    output = ray.get(next(outputs))
                except RayError as error:
                    # the sentences after the first are hints about Ray's tools
                    reason = " ".join(str(error).split()).partition(". ")[0]
                    output = Ended(spec, None, {}, f"{type(error).__name__}: {reason}")
                if not isinstance(output, int):
                    self.reported.pop(spec, None)
                    return Ended(*output)
                # the last to be read again
                self.specs[outputs] = spec
                self.reported[spec] = output
        return None

    def steps(self) -> dict[RunSpec, int]:
        return dict(self.reported)

    def cancel(self) -> None:
        for outputs in self.specs:
            ray.cancel(outputs, force=True)
        self.specs.clear()
        # the cluster stays as it is
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
                    tried = f" (Ray takes {host}:{port} for it)" if address != f"{host}:{port}" else ""
                    reason = f"no Ray cluster answered at {address}{tried} within {CONNECT_TIMEOUT:g} seconds"
                    raise StudyError(reason) from error
    before = signal.getsignal(signal.SIGTERM)
    try:
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
        # Ray's own handler would end this process before the runs are stopped
        signal.signal(signal.SIGTERM, before)
    except Exception as error:
        raise StudyError(f"no Ray cluster answers at {address}: {' '.join(str(error).split())}") from error
