"""
What are MaskableUATRPO and MaskableMatchedTRPO worth beside sb3-contrib's MaskablePPO? The rule is in
benchmarks/results/masks/README.md.

    export OMP_NUM_THREADS=1
    python benchmarks/compare_masks.py --folder runs/masks --jobs 2 --report runs/masks/report.md

Each setting is tried on the search seeds, and then each method's best one on others. A run adds a line to runs.jsonl in
the folder, and those that are there are not repeated. Training needs PettingZoo, the report does not.
"""

import json
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import gymnasium as gym
import pandas as pd
import torch as th
import yaml
from command_line import parser_of, refuse_below
from evidence import RESULTS, judge, markdown
from masked_tasks import ConnectFour, Counted
from sb3_contrib import MaskablePPO
from sb3_contrib.common.envs import InvalidActionEnvDiscrete
from sb3_contrib.common.maskable.evaluation import evaluate_policy
from stable_baselines3.common.env_util import make_vec_env

from sb3_uatrpo.maskable import MaskableMatchedTRPO, MaskableUATRPO

SEARCH_SEEDS, SEEDS = range(3), range(10, 15)
METHODS = {kind.__name__: kind for kind in (MaskablePPO, MaskableUATRPO, MaskableMatchedTRPO)}
REFERENCE, *OURS = METHODS
SETTINGS = yaml.safe_load((RESULTS / "masks" / "settings.yml").read_text(encoding="utf-8"))


class Task(NamedTuple):
    make: Callable[[], gym.Env[Any, Any]]
    # Timesteps at which a run is judged, and at which the runs of the best settings are evaluated once more
    length: int
    longer: int
    n_episodes: int


TASKS = {
    "InvalidActionEnv": Task(lambda: InvalidActionEnvDiscrete(80, n_invalid_actions=60), 8_000, 24_000, 50),
    "connect_four_v3": Task(ConnectFour, 40_000, 80_000, 500),
}


class Run(NamedTuple):
    task: str
    method: str
    setting: str
    seed: int


def train(run: Run, path: Path) -> None:
    """Add to the file what came out. Minutes are the CPU time of training, without evaluations."""
    th.set_num_threads(1)
    task, arguments = TASKS[run.task], {"n_envs": 1, **SETTINGS[run.method][run.setting]}
    row: dict[str, Any] = {**run._asdict(), "arguments": {**arguments}}
    sizes = {"training": arguments.pop("n_envs"), "evaluation": 10}
    envs = {name: make_vec_env(lambda: Counted(task.make()), n, run.seed + 1000 * n) for name, n in sizes.items()}
    model: Any = METHODS[run.method]("MlpPolicy", envs["training"], **arguments, seed=run.seed, device="cpu")
    seconds = 0.0
    for end, mark in [("", task.length), *([("longer_", task.longer)] if run.seed in SEEDS else [])]:
        start = time.process_time()
        model.learn(mark - model.num_timesteps, reset_num_timesteps=not end)
        seconds += time.process_time() - start
        mean: Any = evaluate_policy(model, envs["evaluation"], task.n_episodes)[0]
        row |= {f"{end}timesteps": model.num_timesteps, f"{end}return": float(mean), f"{end}minutes": seconds / 60}
    for name, each in envs.items():
        row |= {f"{name}_{what}": int(sum(each.get_attr(what))) for what in ("n_actions", "n_invalid")}
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")


def carry_out(runs: Iterable[Run], path: Path, jobs: int) -> pd.DataFrame:
    """:return: all rows of the file, after the runs that it did not have"""
    path.touch()
    there = {Run(*map(row.get, Run._fields)) for row in map(json.loads, path.read_text("utf-8").splitlines())}
    if missing := [run for run in runs if run not in there]:
        with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
            list(pool.map(train, missing, [path] * len(missing)))
    return pd.read_json(path, lines=True)


def best_of(runs: pd.DataFrame) -> dict[tuple[str, str], str]:
    """:return: for each task and method, the setting with the highest mean return; of equal ones, the first"""
    means = runs[runs.seed.isin(list(SEARCH_SEEDS))].groupby(["task", "method", "setting"])["return"].mean()
    pairs = product(TASKS, METHODS)
    return {(task, method): max(SETTINGS[method], key=lambda each: means[task, method, each]) for task, method in pairs}


def report(runs: pd.DataFrame, folder: Path) -> str:
    """:return: the best setting of each method on the other seeds, the differences, and the search"""
    groups = dict(list(runs.groupby(["task", "method", "setting", runs.seed.isin(list(SEEDS))])))
    best: list[dict[str, str]] = []
    samples = {}
    for (task, method), setting in best_of(runs).items():
        of = groups[task, method, setting, True]
        samples[task, method] = of["return"].to_numpy()
        row = {"task": task, "method": method, "best setting": setting, "return": shown(of["return"])}
        row |= {"later": shown(of.longer_return), "minutes": shown(of.minutes)}
        for when in ("training", "evaluation"):
            row[f"invalid in {when}"] = f"{of[f'{when}_n_invalid'].sum()} of {of[f'{when}_n_actions'].sum():,}"
        best.append(row)
    pairs = {f"{task}: {method}": (samples[task, method], samples[task, REFERENCE]) for task, method in samples}
    verdicts = judge({name: pair for name, pair in pairs.items() if not name.endswith(REFERENCE)}).round(4)
    search = [
        {"method": method, "setting": setting}
        | {task: shown(groups[task, method, setting, False]["return"]) for task in TASKS}
        for method in METHODS
        for setting in SETTINGS[method]
    ]
    lengths = "; ".join(f"{name} {task.length:,}, later {task.longer:,}" for name, task in TASKS.items())
    parts = [
        "# Action masks",
        f"`python benchmarks/compare_masks.py --folder {folder.as_posix()} --report FILE` writes this page. Means ± "
        f"standard errors; timesteps: {lengths}.",
        markdown(best),
        markdown(verdicts.reset_index(names=f"minus {REFERENCE}")),
        "The search:",
        markdown(search),
    ]
    return "\n\n".join(parts) + "\n"


def shown(values: pd.Series) -> str:
    return f"{values.mean():.2f} ± {values.sem():.2f}"


def main(args: list[str] | None = None) -> str:
    """:return: the report"""
    parser = parser_of(__doc__)
    parser.add_argument("--folder", type=Path, default=Path("runs/masks"))
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--report", type=Path, help="a file for the report, in Markdown")
    options = parser.parse_args(args)
    refuse_below(parser, options, jobs=1)
    options.folder.mkdir(parents=True, exist_ok=True)
    path, pairs = options.folder / "runs.jsonl", [*product(TASKS, METHODS)]
    search = [Run(*pair, setting, seed) for pair in pairs for setting in SETTINGS[pair[1]] for seed in SEARCH_SEEDS]
    runs = carry_out(search, path, options.jobs)
    others = [Run(*pair, setting, seed) for pair, setting in best_of(runs).items() for seed in SEEDS]
    text = report(carry_out(others, path, options.jobs), options.folder)
    print(text)
    if options.report:
        options.report.write_text(text, encoding="utf-8")
    return text


if __name__ == "__main__":
    main()
