"""
How fast is UATRPO compared with other algorithms, and where does the time of an update go?

    OMP_NUM_THREADS=1 python benchmarks/benchmark_speed.py
    OMP_NUM_THREADS=1 python benchmarks/benchmark_speed.py --n-envs 8
    OMP_NUM_THREADS=1 python benchmarks/benchmark_speed.py --n-steps 2048 --batch-size 64

UATRPO, MatchedTRPO, sb3-contrib's TRPO, PPO and A2C, and SBX's PPO where that is installed, learn in turns, one update
at a time, with equal batches, critics and networks, so that slower and faster moments of the machine affect all of
them. With ``--callbacks``, each algorithm except SBX's gets RL Zoo's callbacks (evaluations and checkpoints) and the
recorder of studies. "UATRPO, general" is UATRPO with SB3's own rollouts (`fast_rollouts=False`).

The table has medians and ranges over the updates; ratios are medians of the ratios to sb3-contrib's TRPO and to PPO of
the same round. Then our two algorithms are timed again, with a clock in every stage. For comparison: the bare
environment loop, which no algorithm can beat, and the matrix products that no update of UATRPO can avoid.

Prints the tables, writes them as JSON, and draws a picture.
"""

import argparse
import json
import platform
import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from importlib import import_module
from importlib.metadata import version
from importlib.util import find_spec
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest import mock

import gymnasium as gym
import matplotlib.pyplot as plt
import mujoco
import numpy as np
import pandas as pd
import sb3_contrib
import stable_baselines3
import torch as th
from stable_baselines3 import A2C, PPO
from stable_baselines3.common.callbacks import BaseCallback, CheckpointCallback, EvalCallback
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.on_policy_algorithm import OnPolicyAlgorithm
from stable_baselines3.common.vec_env import VecNormalize

import sb3_uatrpo
from sb3_uatrpo import UATRPO, MatchedTRPO, trust_region_algorithm, uatrpo
from sb3_uatrpo.core.estimates import SampleEstimates
from sb3_uatrpo.study.callback import StudyCallback

# the paper's tasks have newer versions
warnings.filterwarnings("ignore", message=r".*The environment \S+ is out of date.*", category=DeprecationWarning)

SBX = "PPO (SBX)"


@dataclass(frozen=True)
class Setting:
    """What all algorithms have in common: steps per update over all environments, environments, and minibatch size."""

    n_steps: int = 1000
    n_envs: int = 1
    batch_size: int = 50

    @property
    def shared(self) -> dict[str, Any]:
        return {"n_steps": self.n_steps // self.n_envs, "gamma": 0.995, "gae_lambda": 0.97, "seed": 0}

    @property
    def trust_region(self) -> dict[str, Any]:
        return {**self.shared, "batch_size": self.batch_size, "n_critic_updates": 5, "device": "cpu"}

    def env(self, env_id: str) -> VecNormalize:
        envs = make_vec_env(env_id, self.n_envs, seed=0)
        return VecNormalize(envs, norm_reward=False, gamma=self.shared["gamma"])

    def contenders(self) -> dict[str, Callable[[Any], OnPolicyAlgorithm]]:
        return {
            "UATRPO": lambda env: UATRPO("MlpPolicy", env, **self.trust_region),
            "UATRPO, general": lambda env: UATRPO("MlpPolicy", env, **self.trust_region, fast_rollouts=False),
            "MatchedTRPO": lambda env: MatchedTRPO("MlpPolicy", env, **self.trust_region),
            "TRPO": lambda env: sb3_contrib.TRPO(
                "MlpPolicy", env, **self.trust_region, sub_sampling_factor=10, cg_max_steps=20, target_kl=0.01
            ),
            "PPO": lambda env: PPO("MlpPolicy", env, **self.ppo, device="cpu"),
            "A2C": lambda env: A2C("MlpPolicy", env, **self.shared, device="cpu"),
        }

    @property
    def ppo(self) -> dict[str, Any]:
        return {**self.shared, "batch_size": self.batch_size, "n_epochs": 10}


OURS = ("UATRPO", "MatchedTRPO")
STAGES = ("env", "policy", "buffer", "products", "basis", "line search", "critic")


class Clock:
    """Adds up the wall time of the functions it wraps, each without the time of wrapped functions that it calls."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self._within: list[float] = []

    def around(self, stage: str, function: Callable) -> Callable:
        def timed(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            self._within.append(0.0)
            try:
                return function(*args, **kwargs)
            finally:
                passed = time.perf_counter() - start
                self.seconds[stage] += passed - self._within.pop()
                if self._within:
                    self._within[-1] += passed

        return timed


class Recorder(StudyCallback):
    """Writes nothing after each of the updates that are timed."""

    def _on_training_end(self) -> None:
        pass


def usual_callbacks(env: VecNormalize, folder: str) -> list[BaseCallback]:
    """What RL Zoo and studies attach; evaluations and checkpoints are rarer than the updates that are timed."""
    return [
        EvalCallback(env, eval_freq=25_000, n_eval_episodes=5, log_path=folder, verbose=0, warn=False),
        CheckpointCallback(25_000, folder),
        Recorder(),
    ]


def one_update(model: OnPolicyAlgorithm, n_steps: int, callbacks: list[BaseCallback]) -> tuple[float, float]:
    """Learn for one rollout and one update, and return the seconds in total and those in ``train()`` alone."""
    own = Clock()
    with mock.patch.object(model, "train", own.around("train", model.train)):
        start = time.perf_counter()
        model.learn(n_steps, callbacks, reset_num_timesteps=False, log_interval=10**9)
        total = time.perf_counter() - start
    return total, own.seconds["train"]


class InAnotherProcess:
    """
    SBX's PPO, Stable-Baselines3's PPO in JAX. It waits for its turns in a process of its own, where the threads and the
    memory of one framework do not get in the way of the other.
    """

    _model: Any

    def __init__(self, env_id: str, setting: Setting, n_steps: int) -> None:
        self.pool = ProcessPoolExecutor(1, get_context("spawn"), self._learn, (env_id, setting, n_steps))

    @classmethod
    def _learn(cls, env_id: str, setting: Setting, n_steps: int) -> None:
        cls._model = import_module("sbx").PPO("MlpPolicy", setting.env(env_id), **setting.ppo)
        cls._model.learn(n_steps)

    @classmethod
    def _one_update(cls, n_steps: int) -> tuple[float, float]:
        return one_update(cls._model, n_steps, [])

    def one_update(self, n_steps: int) -> tuple[float, float]:
        return self.pool.submit(self._one_update, n_steps).result()


@contextmanager
def clocks_in_every_stage(model: OnPolicyAlgorithm, clock: Clock) -> Iterator[None]:
    """Within this context, the clock times the stages of one of our algorithms."""
    places: list[tuple[Any, str, str]] = [
        (model.env, "step", "env"),
        (model.rollout_buffer, "add", "buffer"),
        (model.rollout_buffer, "compute_returns_and_advantage", "buffer"),
        # of the class: an attribute of the policy would hide its method, and it would not count as plain
        (type(model.policy), "forward", "policy"),
        (SampleEstimates, "products", "products"),
        (SampleEstimates, "gradient", "products"),
        (SampleEstimates, "fisher_product", "products"),
        (SampleEstimates, "quadratic_forms", "products"),
        (uatrpo, "subspace_direction", "basis"),
        (trust_region_algorithm.TrustRegionAlgorithm, "_search", "line search"),
        (trust_region_algorithm, "fit_values", "critic"),
    ]
    patches = [
        mock.patch.object(owner, name, clock.around(stage, getattr(owner, name))) for owner, name, stage in places
    ]
    for patch in patches:
        patch.start()
    try:
        yield
    finally:
        for patch in patches:
            patch.stop()


def bare_env_seconds(env: gym.Env, n_steps: int) -> float:
    """The environment alone, with random actions drawn beforehand."""
    env.reset(seed=0)
    actions = [env.action_space.sample() for _ in range(n_steps)]
    start = time.perf_counter()
    for action in actions:
        _, _, terminated, truncated, _ = env.step(action)
        if terminated or truncated:
            env.reset()
    return time.perf_counter() - start


def matrix_product_seconds(model: UATRPO, n_steps: int) -> float:
    """JΩ and both products with J' as one matrix product each, and the two float64 products of the basis."""
    d, m = model.sketch.shape
    n = n_steps // model.sub_sampling_factor
    rows, omega, back = th.randn(n, d), th.randn(d, m), th.randn(n, m)
    exact = th.randn(d, m, dtype=th.float64)
    start = time.perf_counter()
    rows @ omega
    for _ in range(2):
        rows.T @ back
    for _ in range(2):
        exact.T @ exact
    return time.perf_counter() - start


def measure(
    env_id: str, setting: Setting, repetitions: int, warm_up: int, with_callbacks: bool, folder: str
) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Let the algorithms take turns: a row for each of them, and a row for each of our breakdowns."""
    n_steps = setting.n_steps
    models = {name: make(setting.env(env_id)) for name, make in setting.contenders().items()}
    callbacks: dict[str, list[BaseCallback]] = {
        name: usual_callbacks(setting.env(env_id), folder) if with_callbacks else [] for name in models
    }
    for name, model in models.items():
        model.learn(warm_up * n_steps, callbacks[name])
    turns: dict[str, Callable[[], tuple[float, float]]] = {
        name: partial(one_update, model, n_steps, callbacks[name]) for name, model in models.items()
    }
    if find_spec("sbx"):
        sbx = InAnotherProcess(env_id, setting, warm_up * n_steps)
        sbx.one_update(n_steps)
        turns[SBX] = partial(sbx.one_update, n_steps)
    totals: dict[str, list[float]] = defaultdict(list)
    trains: dict[str, list[float]] = defaultdict(list)
    bare, bound = [], []
    bare_env = gym.make(env_id)
    for _ in range(repetitions):
        bare.append(bare_env_seconds(bare_env, n_steps))
        bound.append(matrix_product_seconds(models["UATRPO"], n_steps))  # type: ignore[arg-type]
        for name, turn in turns.items():
            total, train = turn()
            totals[name].append(total)
            trains[name].append(train)

    def ratio(ours: list[float], theirs: list[float]) -> float:
        return float(np.median(np.divide(ours, theirs)))

    if find_spec("sbx"):
        sbx.pool.shutdown()
    rows = [
        {
            "task": env_id,
            "algorithm": name,
            "steps/s": n_steps / np.median(totals[name]),
            "slowest": n_steps / np.max(totals[name]),
            "fastest": n_steps / np.min(totals[name]),
            "time / TRPO's": ratio(totals[name], totals["TRPO"]),
            "time / PPO's": ratio(totals[name], totals["PPO"]),
            "train() ms": 1e3 * np.median(trains[name]),
            "train() / TRPO's": ratio(trains[name], trains["TRPO"]),
        }
        for name in turns
    ]
    bare_speed = {"steps/s": n_steps / np.median(bare), "slowest": n_steps / max(bare), "fastest": n_steps / min(bare)}
    rows.append({"task": env_id, "algorithm": "bare environment", **bare_speed})
    rows.append({"task": env_id, "algorithm": "matrix products", "train() ms": 1e3 * np.median(bound)})

    breakdowns = []
    for name in OURS:
        clock = Clock()
        with clocks_in_every_stage(models[name], clock):
            total = sum(one_update(models[name], n_steps, callbacks[name])[0] for _ in range(repetitions))
        stages = {stage: 1e3 * clock.seconds[stage] / repetitions for stage in STAGES}
        rest = 1e3 * total / repetitions - sum(stages.values())
        breakdowns.append({"task": env_id, "algorithm": name, **stages, "rest": rest})
    return pd.DataFrame(rows), pd.DataFrame(breakdowns)


def draw(table: pd.DataFrame, breakdown: pd.DataFrame, n_steps: int, picture: Path) -> None:
    """Speeds with their ranges, and the stages of our updates."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.6), layout="constrained")
    environments = list(table["task"].unique())
    bare = table[table["algorithm"] == "bare environment"].set_index("task")["steps/s"]
    speeds = table.dropna(subset=["time / TRPO's"])
    names = list(speeds["algorithm"].unique())
    width = 0.8 / len(names)
    for i, name in enumerate(names):
        own = speeds[speeds["algorithm"] == name].set_index("task").loc[environments]
        errors = np.abs(own[["slowest", "fastest"]].to_numpy().T - own["steps/s"].to_numpy())
        places = np.arange(len(environments)) + (i - (len(names) - 1) / 2) * width
        left.bar(places, own["steps/s"], width, yerr=errors, label=name, color=f"C{i}", error_kw={"elinewidth": 0.8})
    labels = [f"{env_id}\n(alone {bare[env_id]:,.0f})" for env_id in environments]
    left.set_xticks(range(len(environments)), labels)
    left.set(ylabel="environment steps per second", title="median, slowest and fastest update")
    left.grid(axis="y", alpha=0.3)
    bars = breakdown["task"] + ", " + breakdown["algorithm"]
    before = np.zeros(len(breakdown))
    for i, stage in enumerate([*STAGES, "rest"]):
        right.barh(bars, breakdown[stage], left=before, label=stage, color=f"C{i}")
        before += breakdown[stage].to_numpy()
    right.invert_yaxis()
    right.set(xlabel=f"ms for {n_steps} steps and one update", title="where the time goes")
    right.grid(axis="x", alpha=0.3)
    for ax in (left, right):
        ax.legend(fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=4)
        ax.set_axisbelow(True)
    figure.savefig(picture, dpi=110)
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--env", nargs="+", default=["Hopper-v4", "HalfCheetah-v4", "Walker2d-v4"])
    parser.add_argument("--n-steps", type=int, default=Setting.n_steps, help="steps per update, over all environments")
    parser.add_argument("--n-envs", type=int, default=Setting.n_envs)
    parser.add_argument("--batch-size", type=int, default=Setting.batch_size, help="minibatch size of critics and PPO")
    parser.add_argument("--callbacks", action="store_true", help="attach the callbacks of RL Zoo and of studies")
    parser.add_argument("--repetitions", type=int, default=15, help="updates of each algorithm")
    parser.add_argument("--warm-up", type=int, default=5, help="untimed updates before the timed ones")
    parser.add_argument("--threads", type=int, default=1, help="threads of torch")
    parser.add_argument("--folder", type=Path, default=Path("runs/speed"))
    args = parser.parse_args()
    for env_id in args.env:
        if env_id not in gym.registry:
            parser.error(f"--env: Gymnasium knows no environment {env_id!r}")
    for name in ("repetitions", "warm_up", "threads", "n_steps", "n_envs", "batch_size"):
        if getattr(args, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1, but it is {getattr(args, name)}")
    if args.n_steps % args.n_envs:
        parser.error(f"--n-envs must divide --n-steps={args.n_steps}, but it is {args.n_envs}")
    th.set_num_threads(args.threads)
    setting = Setting(args.n_steps, args.n_envs, args.batch_size)
    args.folder.mkdir(parents=True, exist_ok=True)

    with TemporaryDirectory() as temporary:
        measured = [
            measure(env_id, setting, args.repetitions, args.warm_up, args.callbacks, temporary) for env_id in args.env
        ]
    table = pd.concat([rows for rows, _ in measured], ignore_index=True)
    breakdown = pd.concat([rows for _, rows in measured], ignore_index=True)
    modules = (sb3_uatrpo, stable_baselines3, sb3_contrib, th, gym, mujoco, np)
    versions = {module.__name__: module.__version__ for module in modules}
    if find_spec("sbx"):
        versions["sbx"] = version("sbx-rl")
    about = {
        "python": platform.python_version(),
        "machine": platform.machine(),
        "threads": args.threads,
        **asdict(setting),
        **versions,
    }
    with pd.option_context("display.width", 200, "display.float_format", "{:.2f}".format):
        print(table.to_string(index=False, na_rep="", float_format="{:.2f}".format))
        print(f"\nms for {setting.n_steps} steps of {setting.n_envs} environment(s) and one update")
        print(breakdown.to_string(index=False, float_format="{:.1f}".format))
    print("\n" + ", ".join(f"{name} {value}" for name, value in about.items()))
    records = {"about": about, "speed": table.to_dict("records"), "breakdown": breakdown.to_dict("records")}
    (args.folder / "speed.json").write_text(json.dumps(records, indent=1, default=float) + "\n")
    draw(table, breakdown, setting.n_steps, args.folder / "speed.png")
    print(f"written: {args.folder / 'speed.json'} and {args.folder / 'speed.png'}")


if __name__ == "__main__":
    main()
