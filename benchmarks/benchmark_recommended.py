"""
How many minutes does a million steps take with RL Zoo's settings?

    OMP_NUM_THREADS=1 python benchmarks/benchmark_recommended.py --output benchmarks/results/recommended/minutes.json

UATRPO, sb3-contrib's TRPO and PPO learn in turns, each run in a process of its own, for 50,000 steps of each task. The
clock starts with the first step and stops after the last update. What a million steps would take is printed as a table
and written as JSON, in minutes, with the machine and the versions. Nothing else should run meanwhile.
"""

import argparse
import json
import platform
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from multiprocessing import get_context
from pathlib import Path

import pandas as pd

from sb3_uatrpo.study import RunSpec
from sb3_uatrpo.study.plan import plan, read_study_file
from sb3_uatrpo.study.worker import run_one

TASKS = ["HalfCheetah-v4", "Hopper-v4", "Walker2d-v4", "Swimmer-v4", "Ant-v4", "Humanoid-v4"]
ALGORITHMS = ["uatrpo", "trpo", "ppo"]
A_MILLION = 1_000_000
RIVALS = Path(__file__).parent / "results" / "rivals"


def minutes_of(spec: RunSpec) -> tuple[float, dict[str, str]]:
    """:return: the minutes that a million steps would take, and the versions; of a run in this process"""
    reported: list[tuple[int, float]] = []
    record = run_one(spec, lambda n_steps: reported.append((n_steps, time.perf_counter())))
    if record.status != "done":
        raise SystemExit(f"{spec}: {record.traceback}")
    (first, start), (last, end) = reported[0], reported[-1]
    return (end - start) / 60 * A_MILLION / (last - first), record.versions


def main(args: list[str] | None = None) -> pd.DataFrame:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--env", nargs="+", default=TASKS)
    parser.add_argument("--n-timesteps", type=int, default=50_000)
    parser.add_argument("--rounds", type=int, default=1, help="turns of each algorithm on each task")
    parser.add_argument("--output", type=Path, default=Path("runs/minutes.json"))
    options = parser.parse_args(args)
    for name in ("n_timesteps", "rounds"):
        if getattr(options, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1, but it is {getattr(options, name)}")
    shared = {"n_timesteps": options.n_timesteps, "eval_freq": 0}
    specs = plan(ALGORITHMS, options.env, [0], **shared)
    if "Hopper-v4" in options.env:
        second = read_study_file(RIVALS / "ppo_on_hopper.yml")
        specs += plan(**{**second, **shared}, conf_files=[f"ppo:{RIVALS / 'ppo_defaults.yml'}"])
    # task after task, so that what is compared is timed together
    specs.sort(key=lambda spec: options.env.index(spec.env_id))
    rows = []
    versions: dict[str, str] = {}
    for spec in specs * options.rounds:
        # a fresh process for each, as for a study's runs
        with ProcessPoolExecutor(1, get_context("spawn")) as pool:
            minutes, versions = pool.submit(minutes_of, spec).result()
        label = f"{spec.algo} ({spec.variant_name})" if spec.variant_name else spec.algo
        rows.append({"task": spec.env_id, "algorithm": label, "minutes": minutes})
        print(f"{spec}: {minutes:.1f} minutes per million steps", flush=True)
    times = pd.DataFrame(rows)
    table = times.groupby(["task", "algorithm"]).minutes.median().unstack().loc[options.env]
    print(table.to_string(float_format="{:.1f}".format, na_rep="–"))
    options.output.parent.mkdir(parents=True, exist_ok=True)
    content = {
        "machine": f"{platform.system()} {platform.machine()}",
        "versions": versions,
        "settings": [asdict(spec) for spec in specs],
        "minutes": rows,
    }
    options.output.write_text(json.dumps(content, indent=1) + "\n")
    return table


if __name__ == "__main__":
    main()
