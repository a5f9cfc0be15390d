"""
Copy agents of a study into one folder, each with the model card, results and video that the Hugging Face Hub shows.

    python -m sb3_uatrpo.study run --folder runs/agents --algo uatrpo --env Hopper-v4 Walker2d-v4 --save-models
    python examples/collect_agents.py runs/agents --algo uatrpo --seed 0 --output agents
    python -m rl_zoo3.enjoy --algo uatrpo --env Hopper-v4 -f agents

There is one agent for each algorithm and task: that of the run with the given seed, whatever its return. Its model is
compressed, which the study's is not. Its model card says how it was trained and what return it reaches in deterministic
episodes. The return is also in the card's metadata and in ``results.json``, and ``replay.mp4`` shows the first of these
episodes, all as ``rl_zoo3.push_to_hub`` would write them. ``README.md`` in the folder lists all agents. Leave out the
study to evaluate and film those that are already there:

    python examples/collect_agents.py --output agents
"""

import argparse
import io
import json
import re
import shutil
from collections.abc import Sequence
from contextlib import redirect_stdout
from datetime import datetime
from importlib import import_module
from pathlib import Path
from typing import Any
from zipfile import ZIP_DEFLATED, ZipFile

import imageio.v3 as iio
import numpy as np
import pandas as pd
from film_agents import Agent, film, load_run, set_up_rendering
from huggingface_hub import ModelCard, ModelCardData
from huggingface_hub.repocard import metadata_eval_result
from rl_zoo3.utils import ALGOS
from stable_baselines3.common.evaluation import evaluate_policy

from sb3_uatrpo import UATRPO
from sb3_uatrpo.study import StudyError, read_study
from sb3_uatrpo.study.results import tabulate
from sb3_uatrpo.zoo import register

# Seed of the environments here, far from those used in training and its evaluations
SEED = 2_000_000
# Length of a video in seconds (a fast HalfCheetah soon leaves the floor that MuJoCo draws), frames per second, pixels
SECONDS, FPS, HEIGHT = 6, 20, 240
EVALUATION = "\n## Evaluation\n\n"
FINAL_RETURN = "mean training return over the last tenth of the steps"
PAGE = """\
# Agents

The seed of each run was fixed beforehand, so no agent was chosen for its return. Each link leads to the agent's model
card. *Deterministic episodes*: mean return ± standard deviation over the episodes; both depend on the environment's
seed (here {seed}) and on the machine, since differences in rounding grow during an episode. *End of training*: mean
return of the training episodes in the last tenth of the steps, where actions are sampled. Each folder has a video.

{table}

To watch one, put its names in place of ALGORITHM and TASK:

```bash
python -m rl_zoo3.enjoy --algo ALGORITHM --env TASK -f {folder}
```
"""


def save_video(agent: Agent, file: Path) -> None:
    """
    :param agent: its first episodes are filmed
    :param file: the video to write, in H.264 at a quality with which MuJoCo tasks take some 100 kB
    """
    agent.env.seed(SEED)
    frames = [np.asarray(frame) for frame in film(agent, SECONDS * FPS, FPS, HEIGHT)]
    # H.264 wants even numbers of pixels
    iio.imwrite(file, np.stack(frames), fps=FPS, codec="libx264", macro_block_size=2, output_params=["-crf", "30"])


def hub_metadata(algorithm: str, task: str, results: dict[str, Any]) -> dict[str, Any]:
    """
    :param algorithm: name of the class
    :param task: Gymnasium's name of the environment
    :param results: contents of ``results.json``
    :return: what ``rl_zoo3.push_to_hub`` writes above a model card
    """
    return {
        "library_name": "stable-baselines3",
        "tags": [task, "deep-reinforcement-learning", "reinforcement-learning", "stable-baselines3"],
        **metadata_eval_result(
            model_pretty_name=algorithm,
            task_pretty_name="reinforcement-learning",
            task_id="reinforcement-learning",
            metrics_pretty_name="mean_reward",
            metrics_id="mean_reward",
            metrics_value=f"{results['mean_reward']:.2f} +/- {results['std_reward']:.2f}",
            dataset_pretty_name=task,
            dataset_id=task,
        ),
    }


def evaluate_and_film(run: Path, n_episodes: int) -> dict[str, Any]:
    """
    Write what the Hub shows into the folder of a run. The text of its model card is kept, but for the evaluation.

    :param run: folder of one run, as RL Zoo writes it, with a model card
    :param n_episodes: number of deterministic episodes
    :return: the contents of ``results.json``
    """
    # RL Zoo prints what it loads
    with redirect_stdout(io.StringIO()):
        agent = load_run(run, SEED)
    evaluated, _ = evaluate_policy(agent.model, agent.env, n_eval_episodes=n_episodes, return_episode_rewards=True)
    returns = np.asarray(evaluated)
    save_video(agent, run / "replay.mp4")
    agent.env.close()
    results = {
        "mean_reward": returns.mean(),
        "std_reward": returns.std(),
        "is_deterministic": True,
        "n_eval_episodes": n_episodes,
        "eval_datetime": datetime.now().isoformat(),
    }
    (run / "results.json").write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")

    card = ModelCard.load(run / "README.md")
    metadata = hub_metadata(type(agent.model).__name__, agent.env_id.rpartition(":")[2], results)
    card.data = ModelCardData(license=card.data.license, **metadata)
    rows = [
        (f"return over {n_episodes} deterministic episodes, environment seed {SEED}", mean_and_deviation(results)),
        ("lowest and highest of them", f"{returns.min():,.0f} and {returns.max():,.0f}"),
        (f"first {SECONDS} seconds of them", "[`replay.mp4`](replay.mp4)"),
    ]
    card.text = card.text.partition(EVALUATION)[0] + EVALUATION + table(("", ""), rows) + "\n"
    card.save(run / "README.md")
    return results


def compress(model: Path) -> None:
    """
    :param model: a model's file; Stable-Baselines3 writes it without compression, and reads it with
    """
    with ZipFile(model) as stored:
        contents = {name: stored.read(name) for name in stored.namelist()}
    with ZipFile(model, "w", ZIP_DEFLATED) as compressed:
        for name, content in contents.items():
            compressed.writestr(name, content)


def model_card(trained: pd.Series, folder: Path) -> str:
    """
    :param trained: the run, as ``tabulate`` describes it
    :param folder: folder of all agents, to be given to ``enjoy``
    :return: the card without the evaluation, in Markdown
    """
    rows = [
        ("training", f"{trained.n_timesteps:,} steps, seed {trained.seed}"),
        (FINAL_RETURN, f"{trained.final_return:,.0f}"),
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
license: mit
---

# {trained.algo} on {trained.env}

This agent was trained with sb3_uatrpo. Its seed was fixed beforehand, so it was not chosen for its return.

{table(("", ""), rows)}

{sketch}Watch it:

```bash
python -m rl_zoo3.enjoy --algo {trained.algo} --env {name}{module} -f {folder.as_posix()}
```
"""


def mean_and_deviation(results: dict[str, Any]) -> str:
    """
    :param results: contents of ``results.json``
    :return: mean and standard deviation of the returns
    """
    return f"{results['mean_reward']:,.0f} ± {results['std_reward']:,.0f}"


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """
    :param header: names of the columns
    :param rows: their cells
    :return: a table in Markdown
    """
    return "\n".join(f"| {' | '.join(row)} |" for row in [header, ["---"] * len(header), *rows])


def copy_runs(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """
    :param parser: reports what is missing in the study
    :param options: the command's arguments; models, and cards without evaluations, go to folders in ``output``
    """
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
    for _, trained in done.iterrows():
        task = trained.env.rpartition(":")[2].replace("/", "-")
        copy = options.output / trained.algo / f"{task}_1"
        ignored = shutil.ignore_patterns("*.csv*", "*.json", "*.npz", "command.txt")
        shutil.copytree(trained.folder, copy, dirs_exist_ok=True, ignore=ignored)
        (model,) = copy.glob("*.zip")
        compress(model)
        (copy / "README.md").write_text(model_card(trained, options.output), encoding="utf-8")


def main(args: list[str] | None = None) -> Path:
    register()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("study", type=Path, nargs="?", help="the folder of a study with --save-models")
    parser.add_argument("--algo", nargs="+", default=["uatrpo"], help="RL Zoo's names of algorithms")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=Path("agents"))
    parser.add_argument("--n-episodes", type=int, default=100, help="deterministic episodes of each agent")
    options = parser.parse_args(args)
    if options.n_episodes < 2:
        parser.error(f"--n-episodes must be at least 2, but it is {options.n_episodes}")
    if options.study is not None:
        copy_runs(parser, options)
    if not (cards := sorted(options.output.glob("*/*_1/README.md"))):
        parser.error(f"{options.output}: there is no agent in it; name a study")
    set_up_rendering()

    rows = []
    for card in cards:
        results = mean_and_deviation(evaluate_and_film(card.parent, options.n_episodes))
        print(f"{card.parent}: {results} over {options.n_episodes} episodes")
        link = f"[{card.parts[-3]}]({card.relative_to(options.output).as_posix()})"
        (final_return,) = re.findall(rf"^\| {FINAL_RETURN} \| (.+) \|$", card.read_text(encoding="utf-8"), re.M)
        rows.append((card.parent.name.removesuffix("_1"), link, results, final_return))
    header = ("task", "algorithm", f"{options.n_episodes} deterministic episodes", "end of training")
    page = options.output / "README.md"
    text = PAGE.format(seed=SEED, table=table(header, sorted(rows)), folder=options.output.as_posix())
    page.write_text(text, encoding="utf-8")
    return page


if __name__ == "__main__":
    main()
