"""A cluster of two nodes on the loopback address of this machine."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from tests.study.test_run import PATIENCE, ROOT, command, let_go, runs_seen, seeds_of, start, wait_for

# Without it, Ray takes the loopback address for the machine's outward one, and connects to that
LOOPBACK_ONLY = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0", "RAY_USAGE_STATS_ENABLED": "0"}

# A dead node is found after five of these checks; Ray's own interval is three seconds
HEALTH_CHECKS = {"RAY_health_check_initial_delay_ms": "0", "RAY_health_check_period_ms": "1000"}

# Its own process, because Ray leaves files open and threads running in the process that has started a cluster.
# A line of input is the number of a raylet to kill, the end of input ends the cluster.
CLUSTER = """
import os, signal, sys, time
from contextlib import suppress
import ray
from ray.cluster_utils import Cluster

node = {"num_cpus": 1, "object_store_memory": 80 * 2**20}
head = {**node, "include_dashboard": False, "node_ip_address": "127.0.0.1"}
for attempt in range(10):
    # Ray gives a node half a minute to start, which is not enough on a busy machine
    with suppress(Exception):
        cluster = Cluster(initialize_head=True, head_node_args=head)
        break
# the second node starts all the same when Ray no longer waits for it
with suppress(Exception):
    cluster.add_node(**node)
ray.init(cluster.address, logging_level="ERROR", log_to_driver=False)
while sum(node["Alive"] for node in ray.nodes()) < 2:
    time.sleep(0.1)
ray.shutdown()
print(cluster.address, flush=True)
if raylet := sys.stdin.readline():
    os.kill(int(raylet), signal.SIGKILL)
    # its children only notice when it is no longer a zombie
    os.waitpid(int(raylet), 0)
    sys.stdin.readline()
"""


@pytest.fixture
def cluster():
    # the names of its sockets would be too long below pytest's folders
    with tempfile.TemporaryDirectory(prefix="ray", ignore_cleanup_errors=True) as folder:
        # all that it writes, also the address of the cluster that is running, which might be another one's
        own_folder = {"RAY_TMPDIR": folder, "RAY_ENABLE_AUTO_CONNECT": "0"}
        environment = {**os.environ, **LOOPBACK_ONLY, **own_folder, **HEALTH_CHECKS}
        with subprocess.Popen(
            [sys.executable, "-c", CLUSTER],
            cwd=ROOT,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        ) as process:
            yield process
            process.stdin.close()
            assert process.wait(timeout=PATIENCE) == 0


def parent_of(process: int) -> int:
    return int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1])


def test_a_node_is_killed_and_the_study_finishes(cluster, tmp_path):
    address = cluster.stdout.readline().strip()
    assert address.startswith("127.0.0.1:")
    words = command(tmp_path, "--ray", address, "--save-models", seeds="0-1", hold_from=1)
    driver = start(words, **LOOPBACK_ONLY)
    # one run on each node is half-way
    running = wait_for(lambda: len(runs_seen(tmp_path)) == 2 and runs_seen(tmp_path))
    # of a run, the parent is Ray's worker, and that one's the raylet of its node
    raylets = {parent_of(parent_of(process)): process for process in running}
    assert len(raylets) == 2
    (killed,) = (raylet for raylet in raylets if b"\0--head\0" not in Path(f"/proc/{raylet}/cmdline").read_bytes())
    # until its node's death reaches it, the lost run is alive, but it never comes to its end
    (tmp_path / "seen" / f"stay_{raylets.pop(killed)}").touch()
    # the other one fails by itself, and is not retried
    (tmp_path / "seen" / f"broken_{raylets.popitem()[1]}").touch()
    cluster.stdin.write(f"{killed}\n")
    cluster.stdin.flush()
    let_go(tmp_path)
    said, _ = driver.communicate(timeout=PATIENCE)
    assert driver.returncode == 1, said
    assert "1 done, 1 failed" in said
    assert ": RuntimeError: the environment is broken (" in said
    assert len(seeds_of(tmp_path)) == len(list((tmp_path / "study").rglob("Waiting-v0.zip"))) == 1
    # one process for each attempt
    assert len(runs_seen(tmp_path)) == 3
