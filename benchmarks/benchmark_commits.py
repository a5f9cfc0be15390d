"""
Is one commit faster than another?

    git worktree add /tmp/earlier 45d4dfb
    OMP_NUM_THREADS=1 python benchmarks/benchmark_commits.py /tmp/earlier . --env Hopper-v4 --rounds 30

Each checkout learns in a process of its own. The two take turns, one rollout and one update each, so that slower and
faster moments of the machine affect both, and the one that goes first changes from round to round. The ratios are the
second checkout's time over the first's, in the same round.

Prints the medians of ``learn()`` and of ``train()`` alone in ms, and the median ratios with their quartiles.
"""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
from command_line import parser_of, refuse_below


def work(env_id: str, n_envs: int, n_steps: int) -> None:
    """For each line of the input: one rollout and one update, and the seconds of both and of the update alone."""
    import torch as th
    from measuring import normalized, one_update

    # that of the checkout
    from sb3_uatrpo import UATRPO

    th.set_num_threads(1)
    model = UATRPO("MlpPolicy", normalized(env_id, n_envs), n_steps=n_steps // n_envs, seed=0, device="cpu")
    for _ in sys.stdin:
        print("seconds", *one_update(model, n_steps), flush=True)


class Learner:
    """A checkout that learns in a process of its own."""

    def __init__(self, checkout: Path, env_id: str, n_envs: int, n_steps: int) -> None:
        command = [sys.executable, "-W", "ignore", __file__, "--worker", env_id, str(n_envs), str(n_steps)]
        path = os.pathsep.join([str(checkout.resolve()), os.environ.get("PYTHONPATH", "")])
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": path}
        )

    def one_update(self) -> tuple[float, float]:
        """One rollout and one update: the seconds of ``learn()``, and those of ``train()``."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        print("go", file=self.process.stdin, flush=True)
        for line in self.process.stdout:
            if line.startswith("seconds "):
                _, total, train = line.split()
                return float(total), float(train)
        raise RuntimeError("a process has ended; its error is above")


def compare(checkouts: list[Path], env_id: str, n_envs: int, n_steps: int, rounds: int, warm_up: int) -> None:
    """Let both checkouts take turns, and print the times and their ratios."""
    learners = [Learner(checkout, env_id, n_envs, n_steps) for checkout in checkouts]
    times = np.empty((warm_up + rounds, 2, 2))
    for i in range(len(times)):
        for place in (0, 1) if i % 2 == 0 else (1, 0):
            times[i, place] = learners[place].one_update()
    for learner in learners:
        learner.process.communicate()
    times = times[warm_up:]
    for what, (first, second) in zip(("learn()", "train()"), np.moveaxis(times, 0, 2).swapaxes(0, 1), strict=True):
        low, median, high = np.quantile(second / first, [0.25, 0.5, 0.75])
        print(
            f"{env_id:15s} {n_envs} envs  {what}  {1e3 * np.median(first):6.1f} ms, {1e3 * np.median(second):6.1f} ms"
            f"  ratio {median:.3f} ({low:.3f} to {high:.3f})",
            flush=True,
        )


def main() -> None:
    if sys.argv[1:2] == ["--worker"]:
        work(sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
        return
    parser = parser_of(__doc__)
    parser.add_argument("checkouts", type=Path, nargs=2, help="folders of two checkouts of this repository")
    parser.add_argument("--env", nargs="+", default=["Hopper-v4", "HalfCheetah-v4", "Walker2d-v4"])
    parser.add_argument("--n-envs", type=int, default=1)
    parser.add_argument("--n-steps", type=int, default=1000, help="steps per update, over all environments")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--warm-up", type=int, default=3, help="untimed updates before the timed ones")
    args = parser.parse_args()
    for checkout in args.checkouts:
        if not (checkout / "sb3_uatrpo" / "__init__.py").is_file():
            parser.error(f"checkouts: there is no sb3_uatrpo in {checkout}")
    refuse_below(parser, args, n_envs=1, n_steps=1, rounds=1, warm_up=1)
    if args.n_steps % args.n_envs:
        parser.error(f"--n-envs must divide --n-steps={args.n_steps}, but it is {args.n_envs}")
    for env_id in args.env:
        compare(args.checkouts, env_id, args.n_envs, args.n_steps, args.rounds, args.warm_up)


if __name__ == "__main__":
    main()
