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

import gc
import os
import statistics
import subprocess
import sys
import time
import warnings
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from functools import partial
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pandas as pd
import torch as th
from command_line import parser_of
from measuring import about, in_a_line, one_update, write_json
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


def make(method: str, network: str, device: str, n_steps: int, image_size: int) -> OnPolicyAlgorithm:
    """:return: a fresh model, with environments of its own"""
    cls, own = METHODS[method]
    net_arch = NETWORKS[network]
    images = partial(FakeImageEnv, 1, image_size, image_size, n_channels=4, discrete=False, channel_first=True)
    env = make_vec_env("Pendulum-v1" if net_arch else images, N_ENVS, seed=0)
    policy_kwargs = {"log_std_init": -1, **({"net_arch": net_arch} if net_arch else {})}
    arguments = {**own, **SHARED, "n_steps": n_steps // N_ENVS, "policy_kwargs": policy_kwargs}
    return cls("MlpPolicy" if net_arch else "CnnPolicy", env, device=device, **arguments)


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
        times: list[float] = []
        # at least two on a GPU, whose first one is not counted
        while len(times) < 1 + (device == "cuda") or (sum(times) < MODEL_LIMIT and len(times) < MOST_UPDATES):
            times.append(one_update(model, model.n_steps * N_ENVS)[1])
        peak_mb = th.cuda.max_memory_allocated() / 1e6 if device == "cuda" else 0.0
        d, m = model.sketch.shape if isinstance(model, UATRPO) else (None, None)
        row = {"network": network, "method": method, "way": way, "seconds": statistics.median(times[1:] or times)}
        rows.append({**row, "d": d, "m": m, "GPU MB": peak_mb, "times": times})
        print(f"{way}, {network}, {method}: {row['seconds']:.3f} s", file=sys.stderr, flush=True)
        del model
    return rows


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
    parser = parser_of(__doc__)
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
    rows = []
    for way, device, n in (("GPU", "cuda", threads), ("1 thread", "cpu", 1), (f"{threads} threads", "cpu", threads)):
        if device == "cpu" or on_gpu:
            # NumPy and torch read it when they are imported
            os.environ["OMP_NUM_THREADS"] = str(n)
            with ProcessPoolExecutor(1, get_context("spawn")) as pool:
                rows += pool.submit(measure_all, way, device, *sizes).result()

    measured = pd.DataFrame(rows)
    seconds = measured.pivot_table("seconds", ["network", "method"], "way", sort=False)
    table = seconds.join(measured.groupby(["network", "method"])[["d", "m", "GPU MB"]].max())
    lines.append(f"seconds of train() with {sizes[0]} steps, and with images of {sizes[1]}×{sizes[1]}")
    lines += [table.to_string(na_rep="", float_format="{:.4g}".format), *(verdict(seconds) if on_gpu else [])]
    gpu = f"{th.cuda.get_device_name()}, CUDA {th.version.cuda}" if on_gpu else "no GPU"
    lines.append(f"{gpu}, {in_a_line(about())}")
    print("\n".join(lines))
    (args.folder / "report.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    write_json(args.folder / "gpu.json", {"report": lines, "rows": rows})


if __name__ == "__main__":
    main()
