"""
How do the time and memory of an update grow with the network, projections, steps, actions and environments?

    OMP_NUM_THREADS=1 python benchmarks/benchmark_scaling.py
    OMP_NUM_THREADS=1 python benchmarks/benchmark_scaling.py --beside-others

One quantity varies at a time, around a 64×64 network, m = 200, 1,000 steps, 3 actions and one environment. The rollout
is noise and the critic is not trained, so only the trust region step is timed. Each case runs in its own process: its
peak memory is the amount by which ``train()`` raises the process's peak above what model, sketch and rollout took.

With ``--beside-others``, the whole ``train()``, critic included, is timed beside that of MatchedTRPO, sb3-contrib's
TRPO with and without subsampling, and PPO, for networks of four sizes. The methods take turns, each with rollouts of
its own. UATRPO has the preset ``RECOMMENDED``, MatchedTRPO what it shares with it, and the others have their defaults,
but for rollouts, minibatches, γ, λ, networks and the critic's epochs, which are the same for all. Figures are medians.
"""

import platform
import resource
import statistics
import sys
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pandas as pd
import torch as th
from command_line import parser_of, refuse_below
from gymnasium import spaces
from measuring import about, in_a_line, in_turns, normalized, one_update, write_json
from sb3_contrib import TRPO
from stable_baselines3 import PPO
from stable_baselines3.common.logger import Logger
from stable_baselines3.common.on_policy_algorithm import OnPolicyAlgorithm
from stable_baselines3.common.vec_env import DummyVecEnv

from sb3_uatrpo import RECOMMENDED, UATRPO, MatchedTRPO

#: the sizes of the networks of actor and critic with --beside-others
NETWORKS = ((64, 64), (256, 256), (400, 300), (512, 512))
STEPS = (1000, 5000, 20_000, 50_000)


@dataclass(frozen=True)
class Case:
    """One model and one rollout."""

    sweep: str
    net_arch: tuple[int, ...] = (64, 64)
    n_projections: int = 200
    n_steps: int = 1000
    n_actions: int = 3
    n_envs: int = 1
    sub_sampling_factor: int = 10
    cnn: bool = False
    repetitions: int = 3


class Still(gym.Env):
    """Spaces without a task: the benchmark writes the rollout itself."""

    def __init__(self, observation_space: spaces.Space, n_actions: int):
        self.observation_space = observation_space
        self.action_space = spaces.Box(-1.0, 1.0, (n_actions,), np.float32)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[np.ndarray, dict]:
        super().reset(seed=seed)
        return np.zeros(self.observation_space.shape or (), self.observation_space.dtype), {}


def cases(with_cnn: bool, most_steps: int) -> Iterator[Case]:
    base = Case("")
    for net_arch in NETWORKS[:3]:
        yield replace(base, sweep="network", net_arch=net_arch)
    if with_cnn:
        yield replace(base, sweep="NatureCNN", cnn=True, net_arch=(), repetitions=1)
    for m in (25, 50, 100, 200, 400):
        yield replace(base, sweep="projections", n_projections=m)
    steps = [n_steps for n_steps in STEPS if n_steps <= most_steps]
    for n_steps in steps:
        yield replace(base, sweep="steps", n_steps=n_steps)
    in_all = replace(base, sweep="steps, all in F and Sigma", sub_sampling_factor=1, repetitions=1)
    for n_steps in steps:
        yield replace(in_all, n_steps=n_steps)
    if most_steps >= STEPS[-1]:
        yield replace(base, sweep="largest network", net_arch=NETWORKS[2], n_steps=STEPS[-1], repetitions=1)
    for n_actions in (2, 6, 17):
        yield replace(base, sweep="actions", n_actions=n_actions)
    for n_envs in (1, 4, 8):
        yield replace(base, sweep="environments", n_envs=n_envs)


def warm_up() -> None:
    """Run a small update first, so that what the libraries load at their first use is not counted."""
    model = UATRPO("MlpPolicy", DummyVecEnv([lambda: Still(spaces.Box(-1.0, 1.0, (2,), np.float32), 1)]), n_steps=50)
    model.set_logger(Logger(folder=None, output_formats=[]))
    model.rollout_buffer.advantages[:] = np.linspace(-1.0, 1.0, 50)[:, None]
    model.rollout_buffer.full = True
    model.train()


def measure(case: Case) -> dict[str, float]:
    """
    Time the trust region step of one case. Runs in its own process.

    :return: d, m after the limit on the sketch, n, milliseconds, MB beyond what was allocated before, and of the sketch
    """
    th.set_num_threads(1)
    warm_up()
    space = spaces.Box(0, 255, (4, 84, 84), np.uint8) if case.cnn else spaces.Box(-np.inf, np.inf, (17,), np.float32)
    model = UATRPO(
        "CnnPolicy" if case.cnn else "MlpPolicy",
        DummyVecEnv([lambda: Still(space, case.n_actions)] * case.n_envs),
        n_steps=case.n_steps,
        batch_size=case.n_steps,
        n_projections=case.n_projections,
        sub_sampling_factor=case.sub_sampling_factor,
        n_critic_updates=0,
        policy_kwargs={"net_arch": list(case.net_arch)},
        seed=0,
        device="cpu",
    )
    model.set_logger(Logger(folder=None, output_formats=[]))
    buffer = model.rollout_buffer
    generator = np.random.default_rng(0)
    if case.cnn:
        buffer.observations[:] = generator.integers(0, 256, buffer.observations.shape)
    else:
        buffer.observations[:] = generator.normal(size=buffer.observations.shape)
    buffer.actions[:] = generator.normal(size=buffer.actions.shape)
    buffer.advantages[:] = generator.normal(size=buffer.advantages.shape)
    buffer.episode_starts[::100] = 1.0
    buffer.pos, buffer.full = buffer.buffer_size, True
    model.sketch.draw_once()
    for average in (model.sketch.y_fisher, model.sketch.y_covariance):
        average.add_(0.0)  # pages never written are not resident yet, and would count as the update's

    def peak() -> float:
        # kilobytes on Linux, bytes on macOS
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (1e6 if sys.platform == "darwin" else 1e3)

    before = peak()
    times = []
    for _ in range(case.repetitions):
        start = time.perf_counter()
        model.train()
        times.append(1e3 * (time.perf_counter() - start))
    d, m = model.sketch.shape
    found = {"d": d, "m": m, "n": case.n_steps * case.n_envs, "ms": statistics.median(times)}
    return found | {"peak_mb": peak() - before, "sketch_mb": model.sketch.n_bytes / 1e6}


def contenders(env_id: str, net_arch: tuple[int, ...], n_steps: int) -> dict[str, OnPolicyAlgorithm]:
    """
    :param env_id: the task
    :param net_arch: hidden layers of actor and critic
    :param n_steps: size of the rollouts
    :return: a model of each method, by name, each with an environment of its own
    """
    shared: dict[str, Any] = {"n_steps": n_steps, "gamma": 0.99, "gae_lambda": 0.95, "batch_size": 50, "seed": 0}
    shared["policy_kwargs"] = {"net_arch": list(net_arch), "log_std_init": -1}
    methods: dict[str, tuple[type[OnPolicyAlgorithm], dict[str, Any]]] = {
        "UATRPO": (UATRPO, RECOMMENDED),
        "MatchedTRPO": (MatchedTRPO, {"target_kl": RECOMMENDED["target_kl"]}),
        "TRPO": (TRPO, {"n_critic_updates": 5}),
        "TRPO, 1 of 10 steps": (TRPO, {"n_critic_updates": 5, "sub_sampling_factor": 10}),
        "PPO": (PPO, {}),
    }
    return {
        name: cls("MlpPolicy", normalized(env_id, gamma=shared["gamma"]), **{**settings, **shared}, device="cpu")
        for name, (cls, settings) in methods.items()
    }


def measure_beside_others(env_id: str, n_steps: int, rounds: int, warm_up: int) -> pd.DataFrame:
    """
    :param env_id: the task
    :param n_steps: size of the rollouts
    :param rounds: timed updates of each method, which take turns
    :param warm_up: updates before them that are not timed
    :return: for each network and method, the milliseconds of each ``train()`` and their median
    """
    rows = []
    for net_arch in NETWORKS:
        models = contenders(env_id, net_arch, n_steps)
        turns = {name: partial(one_update, model, n_steps) for name, model in models.items()}
        uatrpo = models["UATRPO"]
        assert isinstance(uatrpo, UATRPO)
        place = {"network": "×".join(map(str, net_arch)), "d": uatrpo.sketch.shape[0]}
        for name, times in in_turns(turns, rounds, warm_up).items():
            each = [1e3 * seconds for _, seconds in times]
            rows.append({**place, "method": name, "ms": statistics.median(each), "each": each})
            print(f"{place['network']}, {name}: {rows[-1]['ms']:.0f} ms", file=sys.stderr, flush=True)
    return pd.DataFrame(rows)


def compare(parser: ArgumentParser, args: Namespace) -> None:
    """Print the table of ``--beside-others``, and write what it is made of."""
    if args.n_steps % 50 > 0:
        parser.error(f"--n-steps must be a multiple of 50, the size of minibatches, but it is {args.n_steps}")
    if args.env not in gym.registry:
        parser.error(f"--env: Gymnasium knows no environment {args.env!r}")
    th.set_num_threads(1)
    measured = measure_beside_others(args.env, args.n_steps, args.rounds, args.warm_up)
    table = measured.pivot_table("ms", ["network", "d"], "method", sort=False)[measured["method"].unique()]
    print(f"median ms of train() with {args.n_steps} steps of {args.env}, {args.rounds} rounds")
    print(table.reset_index().to_string(index=False, float_format="{:.0f}".format))
    setting = about() | {name: getattr(args, name) for name in ("env", "n_steps", "rounds", "warm_up")}
    path = args.folder / "scaling_beside_others.json"
    write_json(path, {"about": setting, "rows": measured.to_dict("records")})
    print(f"\n{in_a_line(setting)}\nwritten: {path}")


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--cnn", action="store_true", help="NatureCNN on 84×84×4 images too: about a minute")
    parser.add_argument("--most-steps", type=int, default=50_000, help="leave out cases with more steps")
    parser.add_argument("--sweep", nargs="+", help="only these quantities, for example projections environments")
    parser.add_argument("--beside-others", action="store_true", help="time train() beside other methods instead")
    parser.add_argument("--env", default="HalfCheetah-v4", help="the task of --beside-others")
    parser.add_argument("--n-steps", type=int, default=2000, help="size of the rollouts of --beside-others")
    parser.add_argument("--rounds", type=int, default=15, help="timed updates of each method of --beside-others")
    parser.add_argument("--warm-up", type=int, default=2, help="untimed updates before them")
    parser.add_argument("--folder", type=Path, default=Path("runs/speed"))
    args = parser.parse_args()
    refuse_below(parser, args, n_steps=100, rounds=1, warm_up=0)
    if args.beside_others:
        compare(parser, args)
        return
    chosen = list(cases(args.cnn, args.most_steps))
    sweeps = list(dict.fromkeys(case.sweep for case in chosen))
    if unknown := set(args.sweep or ()) - set(sweeps):
        parser.error(f"--sweep must be among {', '.join(map(repr, sweeps))}, but it is {sorted(unknown)[0]!r}")
    rows = []
    for case in (case for case in chosen if case.sweep in (args.sweep or sweeps)):
        # one process per case, since a peak never falls
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
            row = asdict(case) | pool.submit(measure, case).result()
        rows.append(row)
        print(case.sweep, *(f"{name} {row[name]:.0f}" for name in ("d", "m", "n", "ms")), file=sys.stderr, flush=True)
    table = pd.DataFrame(rows)
    shown = ["sweep", "d", "m", "n", "n_actions", "n_envs", "ms", "peak_mb", "sketch_mb"]
    print(table[shown].round(1).to_string(index=False))
    print(f"\npython {platform.python_version()} on {platform.machine()}, torch {th.__version__}, one thread")
    write_json(args.folder / "scaling.json", rows)


if __name__ == "__main__":
    main()
