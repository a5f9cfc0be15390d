"""
How many minutes does a million steps take with RL Zoo's settings?

    export OMP_NUM_THREADS=1
    python benchmarks/benchmark_recommended.py --rounds 3 --output benchmarks/results/recommended/minutes.json

UATRPO, sb3-contrib's TRPO and PPO learn in turns, each run in a process of its own, for 50,000 steps of each task. The
clock starts when the training starts and stops after the last update. What a million steps would take is printed as a
table and written as JSON, in minutes, with the machine and the versions. Nothing else should run meanwhile.
"""

import json
import platform
from dataclasses import asdict
from pathlib import Path

import pandas as pd
from command_line import parser_of, refuse_below
from measuring import write_json

from sb3_uatrpo.study.plan import Run, plan, read_study_file
from sb3_uatrpo.study.run import train

TASKS = ["HalfCheetah-v4", "Hopper-v4", "Walker2d-v4", "Swimmer-v4", "Ant-v4", "Humanoid-v4"]
ALGORITHMS = ["uatrpo", "trpo", "ppo"]
A_MILLION = 1_000_000
RIVALS = Path(__file__).parent / "results" / "rivals"


def minutes_of(run: Run) -> tuple[float, dict[str, str]]:
    """:return: the minutes that a million steps would take, and the versions; of a run in a process of its own"""
    files, error = train(run)
    if error:
        raise SystemExit(f"{run}: {error}")
    ended = json.loads(files["ended.json"])
    return ended["seconds"] / 60 * A_MILLION / ended["steps"], ended["versions"]


def main(args: list[str] | None = None) -> pd.DataFrame:
    parser = parser_of(__doc__)
    parser.add_argument("--env", nargs="+", default=TASKS)
    parser.add_argument("--n-timesteps", type=int, default=50_000)
    parser.add_argument("--rounds", type=int, default=1, help="turns of each algorithm on each task")
    parser.add_argument("--output", type=Path, default=Path("runs/minutes.json"))
    options = parser.parse_args(args)
    refuse_below(parser, options, n_timesteps=1, rounds=1)
    shared = {"n_timesteps": options.n_timesteps, "eval_freq": 0}
    runs = plan(ALGORITHMS, options.env, [0], **shared)
    if "Hopper-v4" in options.env:
        second = read_study_file(RIVALS / "ppo_on_hopper.yml")
        runs += plan(**{**second, **shared}, conf_files=[f"ppo:{RIVALS / 'ppo_defaults.yml'}"])
    # task after task, so that what is compared is timed together
    runs.sort(key=lambda run: options.env.index(run.env))
    rows = []
    versions: dict[str, str] = {}
    for run in runs * options.rounds:
        minutes, versions = minutes_of(run)
        label = f"{run.algo} ({run.variant})" if run.variant else run.algo
        rows.append({"task": run.env, "algorithm": label, "minutes": minutes})
        print(f"{run}: {minutes:.1f} minutes per million steps", flush=True)
    times = pd.DataFrame(rows)
    table = times.groupby(["task", "algorithm"]).minutes.median().unstack().loc[options.env]
    print(table.to_string(float_format="{:.1f}".format, na_rep="–"))
    content = {"machine": f"{platform.system()} {platform.machine()}", "versions": versions}
    write_json(options.output, content | {"settings": [asdict(run) for run in runs], "minutes": rows})
    return table


if __name__ == "__main__":
    main()
