"""
Copy agents of a study into one folder, each with a model card.

    python -m sb3_uatrpo.study run --folder runs/agents --algo uatrpo --env Hopper-v4 Walker2d-v4 --save-models
    python examples/collect_agents.py runs/agents --algo uatrpo --seed 0 --output agents
    python -m rl_zoo3.enjoy --algo uatrpo --env Hopper-v4 -f agents

There is one agent for each algorithm and task: that of the run with the given seed, whatever its return. Its model card
says how it was trained and what return it reaches in deterministic episodes. Its model is compressed, which the study's
is not. ``README.md`` in the folder lists all agents.
"""

import argparse
import io
import shutil
from collections.abc import Sequence
from contextlib import redirect_stdout
from pathlib import Path
from zipfile import ZIP_DEFLATED, ZipFile

import numpy as np
import torch as th
import yaml
from film_agents import load_run, set_up_rendering
from rl_zoo3.utils import ALGOS
from stable_baselines3.common.evaluation import evaluate_policy

from sb3_uatrpo import UATRPO
from sb3_uatrpo.study import Record, StudyError, final_return
from sb3_uatrpo.study.folders import StudyFolder, find_runs
from sb3_uatrpo.study.plan import register_environment
from sb3_uatrpo.zoo import register

# Seed of the environments here, far from those used in training and its evaluations
SEED = 2_000_000
PAGE = """\
# Agents

Each agent comes from the run with seed {seed}. The seed was fixed beforehand, so no agent was chosen for its return.
Each link leads to the agent's model card. *Deterministic episodes*: mean return ± standard deviation over the
episodes; both depend on the environment's seed (here {evaluation_seed}). *End of training*: mean return of the
training episodes in the last tenth of the steps, where actions are sampled.

{table}

To watch one, put its names in place of ALGORITHM and TASK:

```bash
python -m rl_zoo3.enjoy --algo ALGORITHM --env TASK -f {folder}
```
"""


def evaluate(run: Path, n_episodes: int) -> np.ndarray:
    """
    :param run: folder of one run, as RL Zoo writes it
    :param n_episodes: number of deterministic episodes
    :return: their returns (``n_episodes``)
    """
    # RL Zoo prints what it loads
    with redirect_stdout(io.StringIO()):
        agent = load_run(run, SEED)
    returns, _ = evaluate_policy(agent.model, agent.env, n_eval_episodes=n_episodes, return_episode_rewards=True)
    agent.env.close()
    return np.asarray(returns)


def compress(model: Path) -> None:
    """
    :param model: a model's file; Stable-Baselines3 writes it without compression, and reads it with
    """
    with ZipFile(model) as stored:
        contents = {name: stored.read(name) for name in stored.namelist()}
    with ZipFile(model, "w", ZIP_DEFLATED) as compressed:
        for name, content in contents.items():
            compressed.writestr(name, content)


def model_card(record: Record, returns: np.ndarray, folder: Path) -> str:
    """
    :param record: record of the training
    :param returns: returns of deterministic episodes (``n_episodes``)
    :param folder: folder of all agents, to be given to ``enjoy``
    :return: the card, in Markdown
    """
    spec = record.spec
    metadata = {"license": "mit", "library_name": "stable-baselines3", "tags": ["reinforcement-learning", spec.env_id]}
    rows = [
        ("training", f"{spec.n_timesteps:,} steps, seed {spec.seed}"),
        ("mean training return over the last tenth of the steps", f"{training_return(record):,.0f}"),
        (f"return over {len(returns)} deterministic episodes, environment seed {SEED}", mean_and_deviation(returns)),
        ("lowest and highest of them", f"{returns.min():,.0f} and {returns.max():,.0f}"),
        *((f"`{name}`", f"`{value}`") for name, value in sorted(spec.hyperparameters.items())),
        ("versions", ", ".join(f"{name} {version}" for name, version in record.versions.items())),
        ("licence", "MIT"),
    ]
    module, _, name = spec.env_id.rpartition(":")
    module = module and f" --gym-packages {module}"
    # MatchedTRPO has no sketch
    sketch = (
        "The file holds no sketch of the trust region. Further training starts a new sketch.\n\n"
        if issubclass(ALGOS[spec.algo], UATRPO)
        else ""
    )
    return f"""\
---
{yaml.safe_dump(metadata, sort_keys=False).strip()}
---

# {spec.algo} on {spec.env_id}

This agent was trained with sb3_uatrpo. Its seed was fixed beforehand, so it was not chosen for its return.

{table(("", ""), rows)}

{sketch}Watch it:

```bash
python -m rl_zoo3.enjoy --algo {spec.algo} --env {name}{module} -f {folder.as_posix()}
```
"""


def training_return(record: Record) -> float:
    """
    :param record: record of a run
    :return: its final return
    """
    return final_return(record.episodes["timesteps"], record.episodes["returns"], record.spec.n_timesteps)


def mean_and_deviation(returns: np.ndarray) -> str:
    """
    :param returns: returns of some episodes (``n_episodes``)
    :return: their mean and standard deviation
    """
    return f"{returns.mean():,.0f} ± {returns.std(ddof=1):,.0f}"


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """
    :param header: names of the columns
    :param rows: their cells
    :return: a table in Markdown
    """
    return "\n".join(f"| {' | '.join(row)} |" for row in [header, ["---"] * len(header), *rows])


def main(args: list[str] | None = None) -> Path:
    register()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("study", type=Path, help="the folder of a study with --save-models")
    parser.add_argument("--algo", nargs="+", default=["uatrpo"], help="RL Zoo's names of algorithms")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=Path("agents"))
    parser.add_argument("--n-episodes", type=int, default=20, help="deterministic episodes of each agent")
    options = parser.parse_args(args)
    if options.n_episodes < 2:
        parser.error(f"--n-episodes must be at least 2, but it is {options.n_episodes}")
    try:
        folder = StudyFolder(options.study)
    except StudyError as error:
        parser.error(str(error))
    records = [
        record
        for record in folder.read_all()[0]
        if record.spec.algo in options.algo
        and (record.spec.seed, record.spec.variant, record.status) == (options.seed, "", "done")
    ]
    # look for all models before anything is copied
    runs = []
    for algo in options.algo:
        if not any(record.spec.algo == algo for record in records):
            parser.error(f"{options.study} has no finished run of {algo} with seed {options.seed}")
    places = [(record.spec.algo, record.spec.env_id) for record in records]
    for algo, env_id in places:
        if places.count((algo, env_id)) > 1:
            parser.error(f"{options.study} has several runs of {algo} on {env_id} with seed {options.seed}")
    for record in records:
        register_environment(record.spec.env_id)
        found = find_runs(folder.model_path(record.spec))
        if not found:
            parser.error(f"{record.spec}: its model was not saved; run the study with --save-models")
        runs += found
    set_up_rendering()
    th.set_num_threads(1)

    rows = []
    for record, run in zip(records, runs, strict=True):
        returns = evaluate(run, options.n_episodes)
        copy = options.output / record.spec.algo / run.name
        shutil.copytree(run, copy, dirs_exist_ok=True)
        (model,) = copy.glob("*.zip")
        compress(model)
        (copy / "README.md").write_text(model_card(record, returns, options.output), encoding="utf-8")
        link = f"[{record.spec.algo}]({copy.relative_to(options.output).as_posix()}/README.md)"
        others = mean_and_deviation(returns), f"{training_return(record):,.0f}"
        rows.append((record.spec.env_id.rpartition(":")[2], link, *others))
        print(f"{copy}: {others[0]} over {len(returns)} episodes")
    header = ("task", "algorithm", f"{options.n_episodes} deterministic episodes", "end of training")
    page = options.output / "README.md"
    text = PAGE.format(
        seed=options.seed, evaluation_seed=SEED, table=table(header, sorted(rows)), folder=options.output.as_posix()
    )
    page.write_text(text, encoding="utf-8")
    return page


if __name__ == "__main__":
    main()
