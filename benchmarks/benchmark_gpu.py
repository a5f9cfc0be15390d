"""
From which size of network on does a GPU pay?

    python benchmarks/benchmark_gpu.py --tests --folder runs/gpu
    python benchmarks/benchmark_gpu.py --device cpu --folder runs/gpu

UATRPO, MatchedTRPO, sb3-contrib's TRPO and PPO train three MLPs and a NatureCNN on the GPU and on the CPU, with one
thread and with several. A rollout is 1,000 steps, of Pendulum or of 84×84 images of noise, and only ``train()`` is
timed. The table has medians over a few updates without the first, unless there is time for one only. *GPU MB* is the
most memory that torch took there, for model, sketch, rollout and update.

With ``--tests``, the tests marked ``gpu`` run first: all of it takes less than ten minutes. ``--device cpu`` tries the
script on the CPU alone, with small rollouts and images. The folder gets the report, each time, and the tests' output.
"""

import argparse
import gc
import json
import os
import platform
import statistics
import subprocess
import sys
import time
import warnings
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from functools import partial
from importlib.metadata import version
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from typing import Any
from unittest import mock

import pandas as pd
import torch as th
from sb3_contrib import TRPO
from stable_baselines3 import PPO
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.envs import FakeImageEnv
from stable_baselines3.common.on_policy_algorithm import OnPolicyAlgorithm

from sb3_uatrpo import RECOMMENDED, UATRPO, MatchedTRPO

#: seconds for the tests, for each way of training, and for the updates of one model; and the most updates of one model
TESTS_LIMIT, WAY_LIMIT, MODEL_LIMIT, MOST_UPDATES = 300, 60, 1.0, 4
N_ENVS = 8
#: hidden layers; None is a NatureCNN
NETWORKS = {"64×64": [64, 64], "256×256": [256, 256], "512×512": [512, 512], "NatureCNN": None}
SHARED = {"gamma": 0.99, "gae_lambda": 0.95, "batch_size": 50, "seed": 0}
TRUST_REGION = {"n_critic_updates": 5, "sub_sampling_factor": 10, "cg_max_steps": 20, "target_kl": 0.02}
METHODS: dict[str, tuple[type[OnPolicyAlgorithm], dict[str, Any]]] = {
    "UATRPO": (UATRPO, RECOMMENDED),
    "MatchedTRPO": (MatchedTRPO, TRUST_REGION),
    "TRPO": (TRPO, TRUST_REGION),
    "PPO": (PPO, {}),
}


def make(method: str, network: str, device: str, n_steps: int, image_size: int, **changes: Any) -> OnPolicyAlgorithm:
    """:return: a fresh model, with environments of its own"""
    cls, own = METHODS[method]
    net_arch = NETWORKS[network]
    images = partial(FakeImageEnv, 1, image_size, image_size, n_channels=4, discrete=False, channel_first=True)
    env = make_vec_env("Pendulum-v1" if net_arch else images, N_ENVS, seed=0)
    policy_kwargs = {"log_std_init": -1, **({"net_arch": net_arch} if net_arch else {})}
    arguments = {**own, **SHARED, "n_steps": n_steps // N_ENVS, "policy_kwargs": policy_kwargs, **changes}
    return cls("MlpPolicy" if net_arch else "CnnPolicy", env, device=device, **arguments)


def measure(model: OnPolicyAlgorithm, limit: float) -> tuple[list[float], float]:
    """:return: the seconds of each ``train()``, at least two on a GPU, and the most MB that torch took there"""
    times: list[float] = []
    train, on_gpu = model.train, model.device.type == "cuda"

    def timed() -> None:
        start = time.perf_counter()
        train()
        if on_gpu:
            th.cuda.synchronize()
        times.append(time.perf_counter() - start)

    with mock.patch.object(model, "train", timed):
        while len(times) < 1 + on_gpu or (sum(times) < limit and len(times) < MOST_UPDATES):
            model.learn(model.n_steps * N_ENVS, reset_num_timesteps=False, log_interval=10**9)
    return times, th.cuda.max_memory_allocated() / 1e6 if on_gpu else 0.0


def measure_all(way: str, device: str, *sizes: int) -> list[dict[str, Any]]:
    """:return: a row for each network and method, while there is time. Runs in a process of its own"""
    for known in ("You are trying to run", "n_projections is lowered"):
        warnings.filterwarnings("ignore", message=known)
    rows: list[dict[str, Any]] = []
    start = time.perf_counter()
    for network, method in product(NETWORKS, METHODS):
        if time.perf_counter() - start > WAY_LIMIT:
            break
        gc.collect()
        if device == "cuda":
            th.cuda.reset_peak_memory_stats()
        model = make(method, network, device, *sizes)
        times, peak_mb = measure(model, MODEL_LIMIT)
        d, m = model.sketch.shape if isinstance(model, UATRPO) else (None, None)
        row = {"network": network, "method": method, "way": way, "seconds": statistics.median(times[1:] or times)}
        rows.append({**row, "d": d, "m": m, "GPU MB": peak_mb, "times": times})
        print(f"{way}, {network}, {method}: {row['seconds']:.3f} s", file=sys.stderr, flush=True)
        del model
    return rows


def room_for_projections(*sizes: int) -> str:
    """:return: a sentence about a NatureCNN on the GPU"""
    peaks = []
    for m in (50, 100):
        th.cuda.reset_peak_memory_stats()
        model = make("UATRPO", "NatureCNN", "cuda", *sizes, n_projections=m, sketch_memory_limit=2**40)
        peaks.append(measure(model, 0.0)[1])
        del model
        gc.collect()
    each, total = (peaks[1] - peaks[0]) / 50, th.cuda.get_device_properties(0).total_memory / 1e6
    room = 50 + (total - peaks[0]) / each
    return f"A projection of a NatureCNN takes {each:.0f} MB; the GPU's {total:.0f} MB have room for about {room:.0f}."


def verdict(seconds: pd.DataFrame) -> list[str]:
    """:return: for each method, from which network on the GPU is faster than the CPU, however many threads it has"""
    found = []
    # what there was no time for cannot be compared
    for method, rows in seconds.dropna().groupby("method", sort=False):
        is_faster = (rows["GPU"] < rows.drop(columns="GPU").min(axis=1)).to_list()
        pays = [network for i, (network, _) in enumerate(rows.index) if all(is_faster[i:])]
        found.append(f"{method}: a GPU pays " + (f"from {pays[0]} on." if pays else "for none of these networks."))
    return found


def run_tests(output: Path) -> str:
    """:return: the last line of their output: the outcome, unless they were not done in time"""
    command = [sys.executable, "-m", "pytest", "-p", "xdist", "-n4", "-m", "gpu", "-rA", "--color=no"]
    # other plugins of the machine may warn, which the tests take for a failure
    env = os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    with open(output, "w", encoding="utf-8") as file, suppress(subprocess.TimeoutExpired):
        subprocess.run(
            [*command, "tests/test_gpu.py"], env=env, stdout=file, stderr=file, timeout=TESTS_LIMIT, check=False
        )
    return output.read_text(encoding="utf-8").strip().splitlines()[-1].strip("= ")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda", help="cpu: no GPU, and small sizes")
    parser.add_argument("--tests", action="store_true", help="run the tests marked gpu, too")
    parser.add_argument("--folder", type=Path, default=Path("runs/gpu"))
    args = parser.parse_args()
    on_gpu = args.device == "cuda"
    if on_gpu and not th.cuda.is_available():
        parser.error("--device must be cpu where torch sees no CUDA device, but it is cuda")
    args.folder.mkdir(parents=True, exist_ok=True)
    lines = [f"tests: {run_tests(args.folder / 'tests.txt')}"] if args.tests else []
    sizes = (1000, 84) if on_gpu else (200, 36)
    threads = min(8, os.cpu_count() or 1)
    rows, room = [], []
    for way, device, n in (("GPU", "cuda", threads), ("1 thread", "cpu", 1), (f"{threads} threads", "cpu", threads)):
        if device == "cpu" or on_gpu:
            # NumPy and torch read it when they are imported
            with (
                mock.patch.dict(os.environ, OMP_NUM_THREADS=str(n)),
                ProcessPoolExecutor(1, get_context("spawn")) as pool,
            ):
                rows += pool.submit(measure_all, way, device, *sizes).result()
                room += [pool.submit(room_for_projections, *sizes).result()] if device == "cuda" else []

    measured = pd.DataFrame(rows)
    seconds = measured.pivot_table("seconds", ["network", "method"], "way", sort=False)
    table = seconds.join(measured.groupby(["network", "method"])[["d", "m", "GPU MB"]].max())
    lines.append(f"seconds of train() with {sizes[0]} steps, and with images of {sizes[1]}×{sizes[1]}")
    lines += [table.to_string(na_rep="", float_format="{:.4g}".format), *(verdict(seconds) if on_gpu else []), *room]
    gpu = f"{th.cuda.get_device_name()}, CUDA {th.version.cuda}" if on_gpu else "no GPU"
    packages = ("sb3_uatrpo", "stable_baselines3", "sb3_contrib", "torch", "numpy")
    versions = ", ".join(f"{name} {version(name)}" for name in packages)
    lines.append(f"{gpu}, {os.cpu_count()} cores, python {platform.python_version()}, {versions}")
    print("\n".join(lines))
    (args.folder / "report.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    (args.folder / "gpu.json").write_text(json.dumps({"report": lines, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
