"""
How long an update takes with one torch thread and with all, by the width of the network and the number of timesteps.
Run it on an idle machine: where other processes use the cores, threads wait for each other. It decided
``ONE_THREAD_WEIGHTS`` in sb3_uatrpo/plain_mlp.py.

    python benchmarks/measure_threads.py --widths 64 256 512
"""

import statistics
import time
import warnings
from functools import partial

import torch as th
from command_line import parser_of
from measuring import in_turns

from sb3_uatrpo import RECOMMENDED, UATRPO, plain_mlp


def seconds_of_update(model: UATRPO, n_threads: int) -> float:
    th.set_num_threads(n_threads)
    start = time.perf_counter()
    model.train()
    return time.perf_counter() - start


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--widths", type=int, nargs="+", default=[64, 128, 256, 512], help="units of both layers")
    parser.add_argument("--n-steps", type=int, nargs="+", default=[2000, 8000], help="timesteps of an update")
    parser.add_argument("--env", default="HalfCheetah-v4")
    parser.add_argument("--repetitions", type=int, default=3)
    options = parser.parse_args()

    n_threads = th.get_num_threads()
    plain_mlp.ONE_THREAD_WEIGHTS = 0  # the number that is set here is used
    print(f"| width | timesteps | one thread, s | {n_threads} threads, s | ratio |\n|---|---|---|---|---|")
    for width in options.widths:
        for n_steps in options.n_steps:
            arguments = RECOMMENDED(n_steps=n_steps, policy_kwargs={"net_arch": [width, width]})
            model = UATRPO("MlpPolicy", options.env, **arguments, seed=0, device="cpu")
            model.learn(n_steps)
            turns = {number: partial(seconds_of_update, model, number) for number in (1, n_threads)}
            one, more = map(statistics.median, in_turns(turns, options.repetitions).values())
            print(f"| {width} | {n_steps:,} | {one:.3f} | {more:.3f} | {more / one:.2f} |", flush=True)


if __name__ == "__main__":
    # HalfCheetah-v4 is not the newest version; the rollout is reused, so its log-probabilities are old
    warnings.filterwarnings("ignore", message=".*(out of date|log-probabilities of the rollout differ).*")
    main()
