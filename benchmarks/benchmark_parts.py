"""
What does each part of the fast path gain?

    OMP_NUM_THREADS=1 python benchmarks/benchmark_parts.py

For each part, the time that it takes for one rollout and its update, and the time of what takes its place without it,
in ms: the smallest of several averages, each part by itself. In a rollout, where the environment fills the processor's
cache, the parts of a step cost up to twice as much.
"""

import argparse
import timeit
from collections.abc import Callable
from unittest import mock

import numpy as np
import torch as th
from stable_baselines3.common.callbacks import CallbackList
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.vec_env import VecNormalize

from sb3_uatrpo import UATRPO, rollouts
from sb3_uatrpo.critic import ArrayGradients
from sb3_uatrpo.plain_mlp import StandardMLP


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
        with mock.patch.object(StandardMLP, "recognise", staticmethod(lambda policy: None)):
            model.train()

    def general_critic() -> None:
        with mock.patch.object(ArrayGradients, "of", staticmethod(lambda *args: None)):
            model.train()

    found = {
        "products layer by layer, and the critic on arrays": (
            milliseconds(model.train, repetitions, 1),
            milliseconds(general_update, repetitions, 1),
        ),
        "the critic on arrays": (
            milliseconds(model.train, repetitions, 1),
            milliseconds(general_critic, repetitions, 1),
        ),
    }
    policy.set_training_mode(False)
    buffer.reset()
    fast = rollouts.FastSteps(buffer)
    values, log_probs = fast.let_act(policy, tensor)[1:]
    fast._writes_directly = True
    fast.act(policy, observations)
    rewards, starts = np.zeros(1, np.float32), np.zeros(1, bool)
    step = fast.step
    assert step is not None
    local = {str(i): i for i in range(14)}
    callback = model._init_callback(None)
    callback.on_training_start({}, {})
    plain = CallbackList([])

    def store() -> None:
        buffer.pos = 0
        fast.store(observations, step.actions, rewards, starts, values, log_probs)

    def add() -> None:
        buffer.pos = 0
        buffer.add(observations, step.actions, rewards, starts, values, log_probs)

    found["acting on arrays, and looking for changes"] = (
        milliseconds(lambda: fast.act(policy, observations), repetitions),
        milliseconds(lambda: fast.let_act(policy, tensor), repetitions),
    )
    found["of it, looking for changes"] = milliseconds(fast._watch.sees_no_change, repetitions), 0.0
    found["the first step of a rollout"] = (
        milliseconds(lambda: rollouts.FastSteps(buffer).let_act(policy, tensor), repetitions, 10) / 10,
        milliseconds(lambda: fast.let_act(policy, tensor), repetitions, 10) / 10,
    )
    fast.step = step
    found["writing into the buffer's arrays"] = milliseconds(store, repetitions), milliseconds(add, repetitions)
    found["locals that callbacks may read later"] = (
        milliseconds(lambda: callback.update_locals(fast.as_callbacks_see(local)), repetitions),
        milliseconds(lambda: plain.update_locals(dict(local)), repetitions),
    )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--env", default="HalfCheetah-v4")
    parser.add_argument("--repetitions", type=int, default=10)
    args = parser.parse_args()
    if args.repetitions < 1:
        parser.error(f"--repetitions must be at least 1, but it is {args.repetitions}")
    th.set_num_threads(1)
    print("| part | ms | ms without it |\n|---|---|---|")
    for name, (ours, others) in parts(args.env, args.repetitions).items():
        print(f"| {name} | {ours:.1f} | {others:.1f} |")


if __name__ == "__main__":
    main()
