"""
How fast is UATRPO compared with other algorithms, and where does the time of an update go?

    OMP_NUM_THREADS=1 python benchmarks/benchmark_speed.py
    OMP_NUM_THREADS=1 python benchmarks/benchmark_speed.py --n-envs 8 --n-steps 2048 --batch-size 64

UATRPO, MatchedTRPO, sb3-contrib's TRPO, PPO and A2C, and SBX's PPO where that is installed, learn in turns, one update
at a time, with equal batches, critics and networks, so that slower and faster moments of the machine affect all of
them. With ``--callbacks``, each algorithm except SBX's gets RL Zoo's callbacks (evaluations and checkpoints) and the
recorder of studies. "UATRPO, general" is UATRPO with SB3's own rollouts (`fast_rollouts=False`).

The table has medians and ranges over the updates; ratios are medians of the ratios to sb3-contrib's TRPO and to PPO of
the same round. Then our two algorithms are timed again, with a clock in every stage. For comparison: the bare
environment loop, which no algorithm can beat. The tables are printed, written as JSON, and drawn.
"""

import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, contextmanager
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
import numpy as np
import pandas as pd
import torch as th
from command_line import parser_of, refuse_below
from measuring import about, in_a_line, in_turns, normalized, one_update, write_json
from sb3_contrib import TRPO
from stable_baselines3 import A2C, PPO
from stable_baselines3.common.callbacks import BaseCallback, CheckpointCallback, EvalCallback
from stable_baselines3.common.on_policy_algorithm import OnPolicyAlgorithm

from sb3_uatrpo import UATRPO, MatchedTRPO, trust_region_algorithm, uatrpo
from sb3_uatrpo.core.estimates import SampleEstimates
from sb3_uatrpo.study.callback import StudyCallback

# the paper's tasks have newer versions
warnings.filterwarnings("ignore", message=r".*The environment \S+ is out of date.*", category=DeprecationWarning)

SBX = "PPO (SBX)"
sbx_model: Any = None
OURS = ("UATRPO", "MatchedTRPO")
STAGES = ("env", "policy", "buffer", "products", "basis", "line search", "critic")


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
    def ppo(self) -> dict[str, Any]:
        return {**self.shared, "batch_size": self.batch_size, "n_epochs": 10}

    def contenders(self, env_id: str) -> dict[str, OnPolicyAlgorithm]:
        trust_region = {**self.shared, "batch_size": self.batch_size, "n_critic_updates": 5}
        contenders: dict[str, tuple[type[OnPolicyAlgorithm], dict[str, Any]]] = {
            "UATRPO": (UATRPO, trust_region),
            "UATRPO, general": (UATRPO, {**trust_region, "fast_rollouts": False}),
            "MatchedTRPO": (MatchedTRPO, trust_region),
            "TRPO": (TRPO, {**trust_region, "sub_sampling_factor": 10, "cg_max_steps": 20, "target_kl": 0.01}),
            "PPO": (PPO, self.ppo),
            "A2C": (A2C, self.shared),
        }
        return {
            name: cls("MlpPolicy", normalized(env_id, self.n_envs), **arguments, device="cpu")
            for name, (cls, arguments) in contenders.items()
        }


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


def usual_callbacks(env: Any, folder: str) -> list[BaseCallback]:
    """What RL Zoo and studies attach; evaluations and checkpoints are rarer than the updates that are timed."""
    evaluations = EvalCallback(env, eval_freq=25_000, n_eval_episodes=5, log_path=folder, verbose=0, warn=False)
    return [evaluations, CheckpointCallback(25_000, folder), Recorder()]


def make_sbx(env_id: str, setting: Setting) -> None:
    """
    SBX's PPO, Stable-Baselines3's PPO in JAX. It waits for its turns in a process of its own, where the threads and the
    memory of one framework do not get in the way of the other.
    """
    global sbx_model
    sbx_model = import_module("sbx").PPO("MlpPolicy", normalized(env_id, setting.n_envs), **setting.ppo)


def update_sbx(n_steps: int) -> tuple[float, float]:
    return one_update(sbx_model, n_steps)


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
    with ExitStack() as stack:
        for owner, name, stage in places:
            stack.enter_context(mock.patch.object(owner, name, clock.around(stage, getattr(owner, name))))
        yield


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


def measure(
    env_id: str, setting: Setting, repetitions: int, warm_up: int, with_callbacks: bool, folder: str
) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Let the algorithms take turns: a row for each of them, and a row for each of our breakdowns."""
    n_steps, models, bare_env = setting.n_steps, setting.contenders(env_id), gym.make(env_id)
    updates: dict[str, Callable[[], tuple[float, float]]] = {}
    for name, model in models.items():
        callbacks = usual_callbacks(normalized(env_id, setting.n_envs), folder) if with_callbacks else []
        updates[name] = partial(one_update, model, n_steps, callbacks)
    turns = {"bare environment": lambda: (bare_env_seconds(bare_env, n_steps), np.nan), **updates}
    if find_spec("sbx"):
        pool = ProcessPoolExecutor(1, get_context("spawn"), make_sbx, (env_id, setting))
        turns[SBX] = lambda: pool.submit(update_sbx, n_steps).result()
    seconds = {name: np.transpose(times) for name, times in in_turns(turns, repetitions, warm_up).items()}
    if find_spec("sbx"):
        pool.shutdown()
    rows = []
    for name in (*(name for name in turns if name != "bare environment"), "bare environment"):
        total, train = seconds[name]
        row = {"task": env_id, "algorithm": name, "steps/s": n_steps / np.median(total)}
        row |= {"slowest": n_steps / max(total), "fastest": n_steps / min(total)}
        if name != "bare environment":
            row |= {f"time / {other}'s": np.median(total / seconds[other][0]) for other in ("TRPO", "PPO")}
            row |= {"train() ms": 1e3 * np.median(train), "train() / TRPO's": np.median(train / seconds["TRPO"][1])}
        rows.append(row)

    breakdowns = []
    for name in OURS:
        clock = Clock()
        with clocks_in_every_stage(models[name], clock):
            total = sum(updates[name]()[0] for _ in range(repetitions))
        stages = {stage: 1e3 * clock.seconds[stage] / repetitions for stage in STAGES}
        rest = 1e3 * total / repetitions - sum(stages.values())
        breakdowns.append({"task": env_id, "algorithm": name, **stages, "rest": rest})
    return pd.DataFrame(rows), pd.DataFrame(breakdowns)


def draw(table: pd.DataFrame, breakdown: pd.DataFrame, n_steps: int, picture: Path) -> None:
    """Speeds with their ranges, and the stages of our updates."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.6), layout="constrained")
    bare = table[table["algorithm"] == "bare environment"].set_index("task")["steps/s"]
    speeds = table.dropna(subset=["time / TRPO's"])
    medians, low, high = (
        speeds.pivot_table(column, "task", "algorithm", sort=False) for column in ("steps/s", "slowest", "fastest")
    )
    errors = np.stack([(medians - low).T, (high - medians).T], axis=1)
    medians.plot.bar(ax=left, yerr=errors, width=0.8, rot=0, error_kw={"elinewidth": 0.8})
    left.set_xticklabels([f"{env_id}\n(alone {bare[env_id]:,.0f})" for env_id in medians.index])
    left.set(xlabel="", ylabel="environment steps per second", title="median, slowest and fastest update")
    bars = breakdown.set_index(breakdown["task"] + ", " + breakdown["algorithm"])[[*STAGES, "rest"]]
    bars.plot.barh(ax=right, stacked=True, width=0.8)
    right.invert_yaxis()
    right.set(xlabel=f"ms for {n_steps} steps and one update", title="where the time goes")
    for ax, axis in ((left, "y"), (right, "x")):
        ax.grid(axis=axis, alpha=0.3)
        ax.legend(fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=4)
        ax.set_axisbelow(True)
    figure.savefig(picture, dpi=110)
    plt.close(figure)


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--env", nargs="+", default=["Hopper-v4", "HalfCheetah-v4", "Walker2d-v4"])
    parser.add_argument("--n-steps", type=int, default=Setting.n_steps, help="steps per update, over all environments")
    parser.add_argument("--n-envs", type=int, default=Setting.n_envs)
    parser.add_argument("--batch-size", type=int, default=Setting.batch_size, help="minibatch size of critics and PPO")
    parser.add_argument("--callbacks", action="store_true", help="attach the callbacks of RL Zoo and of studies")
    parser.add_argument("--repetitions", type=int, default=15, help="updates of each algorithm")
    parser.add_argument("--warm-up", type=int, default=5, help="untimed updates before the timed ones")
    parser.add_argument("--folder", type=Path, default=Path("runs/speed"))
    args = parser.parse_args()
    for env_id in args.env:
        if env_id not in gym.registry:
            parser.error(f"--env: Gymnasium knows no environment {env_id!r}")
    refuse_below(parser, args, repetitions=1, warm_up=1, n_steps=1, n_envs=1, batch_size=1)
    if args.n_steps % args.n_envs:
        parser.error(f"--n-envs must divide --n-steps={args.n_steps}, but it is {args.n_envs}")
    th.set_num_threads(1)
    setting = Setting(args.n_steps, args.n_envs, args.batch_size)
    args.folder.mkdir(parents=True, exist_ok=True)

    with TemporaryDirectory() as temporary:
        options = (setting, args.repetitions, args.warm_up, args.callbacks, temporary)
        tables = zip(*(measure(env_id, *options) for env_id in args.env), strict=True)
        table, breakdown = (pd.concat(of_tasks, ignore_index=True) for of_tasks in tables)
    facts = about() | asdict(setting) | ({"sbx": version("sbx-rl")} if find_spec("sbx") else {})
    print(table.to_string(index=False, na_rep="", float_format="{:.2f}".format))
    print(f"\nms for {setting.n_steps} steps of {setting.n_envs} environment(s) and one update")
    print(breakdown.to_string(index=False, float_format="{:.1f}".format))
    print(f"\n{in_a_line(facts)}")
    records = {"about": facts, "speed": table.to_dict("records"), "breakdown": breakdown.to_dict("records")}
    write_json(args.folder / "speed.json", records)
    draw(table, breakdown, setting.n_steps, args.folder / "speed.png")
    print(f"written: {args.folder / 'speed.json'} and {args.folder / 'speed.png'}")


if __name__ == "__main__":
    main()
