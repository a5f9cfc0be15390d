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
import json
import shutil
from collections.abc import Sequence
from contextlib import redirect_stdout
from importlib import import_module
from pathlib import Path
from zipfile import ZIP_DEFLATED, ZipFile

import numpy as np
import pandas as pd
import yaml
from film_agents import load_run, set_up_rendering
from rl_zoo3.utils import ALGOS
from stable_baselines3.common.evaluation import evaluate_policy

from sb3_uatrpo import UATRPO
from sb3_uatrpo.study import StudyError, read_study
from sb3_uatrpo.study.results import tabulate
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


def model_card(trained: pd.Series, returns: np.ndarray, folder: Path) -> str:
    """
    :param trained: the run, as ``tabulate`` describes it
    :param returns: returns of deterministic episodes (``n_episodes``)
    :param folder: folder of all agents, to be given to ``enjoy``
    :return: the card, in Markdown
    """
    metadata = {"license": "mit", "library_name": "stable-baselines3", "tags": ["reinforcement-learning", trained.env]}
    rows = [
        ("training", f"{trained.n_timesteps:,} steps, seed {trained.seed}"),
        ("mean training return over the last tenth of the steps", f"{trained.final_return:,.0f}"),
        (f"return over {len(returns)} deterministic episodes, environment seed {SEED}", mean_and_deviation(returns)),
        ("lowest and highest of them", f"{returns.min():,.0f} and {returns.max():,.0f}"),
        *((f"`{name}`", f"`{value}`") for name, value in sorted(json.loads(trained.hyperparameters).items())),
        ("versions", ", ".join(f"{name} {version}" for name, version in json.loads(trained.versions).items())),
        ("licence", "MIT"),
    ]
    module, _, name = trained.env.rpartition(":")
    module = module and f" --gym-packages {module}"
    # MatchedTRPO has no sketch
    sketch = (
        "The file holds no sketch of the trust region. Further training starts a new sketch.\n\n"
        if issubclass(ALGOS[trained.algo], UATRPO)
        else ""
    )
    return f"""\
---
{yaml.safe_dump(metadata, sort_keys=False).strip()}
---

# {trained.algo} on {trained.env}

This agent was trained with sb3_uatrpo. Its seed was fixed beforehand, so it was not chosen for its return.

{table(("", ""), rows)}

{sketch}Watch it:

```bash
python -m rl_zoo3.enjoy --algo {trained.algo} --env {name}{module} -f {folder.as_posix()}
```
"""


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
        study = tabulate(read_study(options.study))
    except StudyError as error:
        parser.error(str(error))
    done = study.runs[(study.runs.error == "") & (study.runs.variant == "")]
    done = done[done.algo.isin(options.algo) & (done.seed == options.seed)]
    if missing := set(options.algo).difference(done.algo):
        parser.error(f"{options.study} has no finished run of {missing.pop()} with seed {options.seed}")
    # look for all models before anything is copied
    for _, trained in done.iterrows():
        if module := trained.env.rpartition(":")[0]:
            import_module(module)
        if not list(Path(trained.folder).glob("*.zip")):
            parser.error(f"{trained.folder}: its model was not saved; run the study with --save-models")
    set_up_rendering()

    rows = []
    for _, trained in done.iterrows():
        run = Path(trained.folder)
        returns = evaluate(run, options.n_episodes)
        task = trained.env.rpartition(":")[2]
        copy = options.output / trained.algo / f"{task.replace('/', '-')}_1"
        ignored = shutil.ignore_patterns("*.csv*", "*.json", "*.npz", "command.txt")
        shutil.copytree(run, copy, dirs_exist_ok=True, ignore=ignored)
        (model,) = copy.glob("*.zip")
        compress(model)
        (copy / "README.md").write_text(model_card(trained, returns, options.output), encoding="utf-8")
        link = f"[{trained.algo}]({copy.relative_to(options.output).as_posix()}/README.md)"
        others = mean_and_deviation(returns), f"{trained.final_return:,.0f}"
        rows.append((task, link, *others))
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
