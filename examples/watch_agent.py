"""
Watch a trained agent.

    python examples/watch_agent.py runs/uatrpo_Hopper-v4_0 --env Hopper-v4
    python examples/watch_agent.py uatrpo_hopper.zip --env Hopper-v5

The agent is the folder of a run of ``train_mujoco.py`` or RL Zoo, or a saved model. The statistics of VecNormalize are
read from the ``.pkl`` file with the model's name or from ``vecnormalize.pkl``, beside the model or where RL Zoo keeps
them. A model without such a file gets observations as they are.

In the window of a MuJoCo task, Tab switches to the camera that follows the agent.
Without a screen, add ``--no-render``.
"""

import argparse
import os
import re
import sys
import warnings
from pathlib import Path

import gymnasium as gym
import numpy as np
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.evaluation import evaluate_policy
from stable_baselines3.common.utils import check_for_correct_spaces
from stable_baselines3.common.vec_env import VecEnv, VecNormalize

from sb3_uatrpo import UATRPO, MatchedTRPO

# As in train_mujoco.py
warnings.filterwarnings("ignore", message=r".*The environment \S+ is out of date.*", category=DeprecationWarning)


def has_screen() -> bool:
    """:return: whether a window can be opened, as far as the environment variables say"""
    return sys.platform != "linux" or bool({"DISPLAY", "WAYLAND_DISPLAY"} & os.environ.keys())


def find_statistics(model: Path) -> Path | None:
    """
    :param model: a saved model
    :return: the file with its statistics of VecNormalize, ``None`` if there is none
    """
    name = model.stem
    # best_model as train_mujoco.py saves it, rl_model_1000_steps as CheckpointCallback does
    for_name = [name, name.replace("model", "vecnormalize"), re.sub(r"_(\d+_steps)$", r"_vecnormalize_\1", name)]
    candidates = [model.with_name(f"{stem}.pkl") for stem in (*for_name, "vecnormalize")]
    # RL Zoo's are in a folder of the task's name
    candidates += [file.with_name("vecnormalize.pkl") for file in model.parent.glob("*/args.yml")]
    return next((file for file in candidates if file.exists()), None)


def add_agent_arguments(parser: argparse.ArgumentParser) -> None:
    """
    :param parser: gets the arguments that ``load_agent`` reads
    """
    parser.add_argument("agent", type=Path, help="the folder of a run of train_mujoco.py or RL Zoo, or a saved model")
    parser.add_argument("--env", default="Hopper-v4")
    parser.add_argument("--algo", choices=["uatrpo", "uatrpo_paper", "trpo_matched"], default="uatrpo")
    parser.add_argument("--statistics", type=Path, help="the file of VecNormalize, if it has another name")


def check_environment(parser: argparse.ArgumentParser, option: str, env_id: str) -> None:
    """
    :param parser: reports an error, and ends the script
    :param option: where the environment was given
    :param env_id: name of a task that Gymnasium should know, such as ``Hopper-v4`` or ``module:Name-v0``
    """
    try:
        gym.make(env_id).close()
    except (gym.error.Error, ImportError) as error:
        parser.error(f"{option}: {error}")


def load_agent(
    parser: argparse.ArgumentParser, options: argparse.Namespace, render_mode: str | None = None
) -> tuple[UATRPO | MatchedTRPO, VecEnv]:
    """
    :param parser: reports errors, and ends the script
    :param options: what ``parser`` has parsed
    :param render_mode: render mode of the environment
    :return: the model, and an environment that gives it observations as in training
    """
    file: Path = options.agent
    if file.is_dir():
        names = [arguments.parent.name for arguments in file.glob("*/args.yml")]
        file /= f"{names[0]}.zip" if names else "model.zip"
    statistics = options.statistics or find_statistics(file)
    for path in filter(None, (file, statistics)):
        if not path.is_file():
            parser.error(f"there is no file {path}")
    check_environment(parser, "--env", options.env)
    cls = MatchedTRPO if options.algo == "trpo_matched" else UATRPO
    try:
        model = cls.load(file, device="cpu")
    except ValueError as error:
        parser.error(f"--algo {options.algo}: {error}")
    env: VecEnv = make_vec_env(options.env, seed=0, env_kwargs={"render_mode": render_mode})
    try:
        check_for_correct_spaces(env, model.observation_space, model.action_space)
    except ValueError as error:
        parser.error(f"{file} was not trained on {options.env}: {error}")
    if statistics is not None:
        env = VecNormalize.load(str(statistics), env)
        env.training = False
    print(f"{file}, statistics of VecNormalize: {statistics or 'none'}")
    return model, env


def main(args: list[str] | None = None) -> list[float]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_agent_arguments(parser)
    parser.add_argument("--n-episodes", type=int, default=3)
    parser.add_argument("--no-render", action="store_true", help="only print returns, as without a screen")
    options = parser.parse_args(args)
    if options.n_episodes < 1:
        parser.error(f"--n-episodes must be at least 1, but it is {options.n_episodes}")
    model, env = load_agent(parser, options, None if options.no_render else "human")
    if not (options.no_render or has_screen()):
        parser.error("there is no screen: add --no-render")
    returns, _ = evaluate_policy(
        model, env, n_eval_episodes=options.n_episodes, render=not options.no_render, return_episode_rewards=True
    )
    assert isinstance(returns, list)
    for i, value in enumerate(returns):
        print(f"episode {i + 1}: return {value:.1f}")
    print(f"mean return: {np.mean(returns):.1f}")
    env.close()
    return returns


if __name__ == "__main__":
    main()
