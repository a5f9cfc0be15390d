"""
What does each part of the NumPy path gain?

    OMP_NUM_THREADS=1 python benchmarks/benchmark_parts.py

For each part, the time that it takes for one rollout and its update, and the time of what takes its place without it,
in ms: the smallest of several averages, each part by itself. In a rollout, where the environment fills the processor's
cache, the parts of a step cost up to twice as much.
"""

import argparse
import timeit
import warnings
from collections.abc import Callable
from unittest import mock

import numpy as np
import torch as th
from stable_baselines3.common.buffers import RolloutBuffer
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.vec_env import VecNormalize

from sb3_uatrpo import UATRPO, actor, critic
from sb3_uatrpo.plain import as_plain_mlp


def milliseconds(run: Callable[[], object], repetitions: int, number: int = 1000) -> float:
    """Of ``number`` runs in a row."""
    run()
    return 1e3 * min(timeit.repeat(run, number=number, repeat=repetitions))


def parts(env_id: str, repetitions: int) -> dict[str, tuple[float, float]]:
    """Part → ms with it and without it, for 1,000 steps of one environment and one update."""
    env = VecNormalize(make_vec_env(env_id, seed=0), norm_reward=False, gamma=0.995)
    model = UATRPO("MlpPolicy", env, seed=0, device="cpu")
    model.learn(2000)
    policy, buffer, observations = model.policy, model.rollout_buffer, model._last_obs
    assert isinstance(observations, np.ndarray)
    tensor = th.as_tensor(observations)

    def general_update() -> None:
        with mock.patch.object(actor, "as_plain_mlp", return_value=None):
            model.train()

    def general_critic() -> None:
        # a subclass of the buffer's is another's
        with mock.patch.object(critic, "LeanRolloutBuffer", RolloutBuffer):
            model.train()

    found = {
        "products layer by layer, and the critic in NumPy": (
            milliseconds(model.train, repetitions, 1),
            milliseconds(general_update, repetitions, 1),
        ),
        "the critic in NumPy": (
            milliseconds(model.train, repetitions, 1),
            milliseconds(general_critic, repetitions, 1),
        ),
    }
    policy.set_training_mode(False)
    step = (np.zeros((1, buffer.action_dim), np.float32), np.zeros(1, np.float32), np.zeros(1, bool))
    last = th.zeros(1, 1), np.zeros(1, bool)

    def add(kind: type[RolloutBuffer]) -> None:
        buffer.pos = 0
        kind.add(buffer, observations, *step, th.zeros(1, 1), th.zeros(1))

    buffer.reset()
    with th.no_grad():
        general = milliseconds(lambda: policy(tensor), repetitions)
        with policy.acting_in_numpy(as_plain_mlp):  # type: ignore[operator]
            found["acting in NumPy"] = milliseconds(lambda: policy(tensor), repetitions), general
    for name, lean, plain in (
        ("adding to the buffer", lambda: add(type(buffer)), lambda: add(RolloutBuffer)),
        (
            "advantages",
            lambda: buffer.compute_returns_and_advantage(*last),
            lambda: RolloutBuffer.compute_returns_and_advantage(buffer, *last),
        ),
    ):
        number = 1000 if name != "advantages" else 1
        found[name] = milliseconds(lean, repetitions, number), milliseconds(plain, repetitions, number)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--env", default="HalfCheetah-v4")
    parser.add_argument("--repetitions", type=int, default=10)
    args = parser.parse_args()
    if args.repetitions < 1:
        parser.error(f"--repetitions must be at least 1, but it is {args.repetitions}")
    th.set_num_threads(1)
    # each update is repeated with the same rollout
    warnings.filterwarnings("ignore", message="The log-probabilities of the rollout differ")
    print("| part | ms | ms without it |\n|---|---|---|")
    for name, (ours, others) in parts(args.env, args.repetitions).items():
        print(f"| {name} | {ours:.1f} | {others:.1f} |")


if __name__ == "__main__":
    main()
