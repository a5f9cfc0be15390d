"""
Train UATRPO in a MuJoCo environment with the preset, with evaluations and checkpoints.

    python examples/train_mujoco.py --env Hopper-v4 --n-timesteps 300000 --seed 0

The folder of the run then holds the model, the statistics of VecNormalize, checkpoints, CSV and TensorBoard logs, and a
picture of the learning curve.
"""

import argparse
import shlex
import sys
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
from stable_baselines3.common.callbacks import BaseCallback, CheckpointCallback, EvalCallback
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.logger import configure
from stable_baselines3.common.monitor import load_results
from stable_baselines3.common.vec_env import VecNormalize

from sb3_uatrpo import RECOMMENDED, UATRPO, MatchedTRPO

try:
    import matplotlib.pyplot as plt
    import mujoco
    import pandas as pd
    import rich  # noqa: F401
    import tensorboard  # noqa: F401
    import tqdm  # noqa: F401
except ModuleNotFoundError as error:
    sys.exit(f'{error}: run pip install ".[mujoco,train]" in a clone of sb3_uatrpo')

plt.switch_backend("Agg")

# The paper's tasks are old versions, and Gymnasium warns each time one is made
warnings.filterwarnings("ignore", message=r".*The environment \S+ is out of date.*", category=DeprecationWarning)


def warn_of_mujoco(message: str) -> None:
    """Pass on MuJoCo's warnings, except the one about an attribute in Gymnasium's own file for HalfCheetah."""
    if "settotalmass" not in message:
        warnings.warn(f"MuJoCo: {message}", stacklevel=2)


mujoco.set_mju_user_warning(warn_of_mujoco)

# RL Zoo's names: the preset, and the hyperparameters of the paper's experiments
ALGORITHMS: dict[str, tuple[type[UATRPO | MatchedTRPO], Mapping[str, Any]]] = {
    "uatrpo": (UATRPO, RECOMMENDED),
    "uatrpo_paper": (UATRPO, {}),
    "trpo_matched": (MatchedTRPO, {}),
}
# What tasks want instead, as in RL Zoo's file hyperparams/uatrpo.yml
CHANGES: dict[str, dict[str, Any]] = {
    "Hopper": {"gamma": 0.995, "gae_lambda": 0.97, "policy_kwargs": {"log_std_init": 0}},
    "Walker2d": {"gamma": 0.995, "gae_lambda": 0.97},
    "Swimmer": {"n_steps": 1000, "gamma": 0.9999, "gae_lambda": 0.99, "policy_kwargs": {"log_std_init": 0}},
    "Ant": {"gae_lambda": 0.9, "policy_kwargs": {"log_std_init": -2}},
}
# Elsewhere one
N_ENVS = {"Swimmer": 2}


def make_env(
    env_id: str, gamma: float, seed: int | None = None, monitor_dir: str | None = None, n_envs: int = 1
) -> VecNormalize:
    """Observations are normalised with running statistics, and rewards are not scaled, as in the paper."""
    envs = make_vec_env(env_id, n_envs=n_envs, seed=seed, monitor_dir=monitor_dir)
    return VecNormalize(envs, norm_reward=False, gamma=gamma)


def plot_learning_curve(folder: Path, title: str) -> Path:
    """Draw the return of every training episode, its rolling mean and the evaluations."""
    episodes: pd.DataFrame = load_results(str(folder))
    steps = episodes["l"].cumsum()
    figure, ax = plt.subplots(figsize=(7, 4), layout="constrained")
    ax.plot(steps, episodes["r"], ".", markersize=2, alpha=0.35, label="training episode")
    window = max(1, min(20, len(episodes) // 5))
    ax.plot(steps, episodes["r"].rolling(window, min_periods=1).mean(), label=f"mean of the last {window}")
    evaluations = folder / "evaluations.npz"
    if evaluations.exists():
        data = np.load(evaluations)
        ax.plot(data["timesteps"], data["results"].mean(axis=1), "o-", markersize=3, label="deterministic evaluation")
    ax.set(title=title, xlabel="environment steps", ylabel="return")
    ax.grid(alpha=0.3)
    ax.legend()
    path = folder / "learning_curve.png"
    figure.savefig(path, dpi=120)
    plt.close(figure)
    return path


class SaveStatistics(BaseCallback):
    """Save VecNormalize's statistics with the best model, which is useless without them."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path

    def _on_step(self) -> bool:
        statistics = self.model.get_vec_normalize_env()
        assert statistics is not None
        statistics.save(str(self.path))
        return True


def main(args: list[str] | None = None) -> Path:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--algo", choices=ALGORITHMS, default="uatrpo")
    parser.add_argument("--env", default="Hopper-v4", help="a Gymnasium task with continuous or discrete actions")
    parser.add_argument("--n-timesteps", type=int, default=300_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, help="default: runs/ALGO_ENV_SEED")
    parser.add_argument("--eval-freq", type=int, default=20_000, help="steps between evaluations, 0 for none")
    parser.add_argument("--no-progress-bar", action="store_true")
    options = parser.parse_args(args)
    try:
        gym.make(options.env).close()
    except (gym.error.Error, ImportError) as error:
        parser.error(f"--env: {error} Examples are Hopper-v4 and HalfCheetah-v4.")
    if options.eval_freq < 0:
        parser.error(f"--eval-freq must be at least 0, but it is {options.eval_freq}")
    if options.seed < 0:
        parser.error(f"--seed must be at least 0, but it is {options.seed}")
    if options.n_timesteps < 1:
        parser.error(f"--n-timesteps must be at least 1, but it is {options.n_timesteps}")
    folder: Path = options.folder or Path("runs") / f"{options.algo}_{options.env}_{options.seed}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        parser.error(f"--folder: {error}")
    # otherwise the picture would show the evaluations of an earlier run, and the episodes of its second environment
    for earlier in (folder / "evaluations.npz", *folder.glob("*.monitor.csv")):
        earlier.unlink(missing_ok=True)

    cls, settings = ALGORITHMS[options.algo]
    n_envs = 1
    if options.algo == "uatrpo":
        task = options.env.partition("-v")[0]
        settings = RECOMMENDED(**CHANGES.get(task, {}))
        n_envs = N_ENVS.get(task, 1)
    gamma = settings.get("gamma", 0.995)
    env = make_env(options.env, gamma, seed=options.seed, monitor_dir=str(folder), n_envs=n_envs)
    model = cls("MlpPolicy", env, seed=options.seed, device="cpu", **settings)
    model.set_logger(configure(str(folder), ["csv", "tensorboard"]))

    # Callbacks count the steps of each environment
    callbacks: list[BaseCallback] = [
        CheckpointCallback(
            max(1, options.n_timesteps // 3 // n_envs), str(folder / "checkpoints"), save_vecnormalize=True
        )
    ]
    if options.eval_freq > 0:
        # EvalCallback copies the training environment's statistics to this one
        eval_env = make_env(options.env, gamma, seed=options.seed + 1000)
        eval_env.training = False
        callbacks.append(
            EvalCallback(
                eval_env,
                callback_on_new_best=SaveStatistics(folder / "best_vecnormalize.pkl"),
                eval_freq=max(1, options.eval_freq // n_envs),
                log_path=str(folder),
                best_model_save_path=str(folder),
                verbose=0,
            )
        )
    try:
        model.learn(options.n_timesteps, callback=callbacks, progress_bar=not options.no_progress_bar)
    except KeyboardInterrupt:
        print(f"interrupted after {model.num_timesteps} steps; the model so far is saved")

    model.save(folder / "model.zip")
    env.save(str(folder / "vecnormalize.pkl"))
    env.close()
    picture = plot_learning_curve(folder, f"{options.algo} on {options.env}, seed {options.seed}")
    print(f"model:           {folder / 'model.zip'}, with {folder / 'vecnormalize.pkl'}")
    print(f"logs:            {folder / 'progress.csv'}; tensorboard --logdir {shlex.quote(str(folder))}")
    print(f"learning curve:  {picture}")
    episodes: pd.DataFrame = load_results(str(folder))
    last = episodes["r"][episodes["l"].cumsum() > 0.9 * model.num_timesteps]
    print(f"final return:    {last.mean():.1f} (mean of the {len(last)} episodes in the last tenth of the steps)")
    script = Path(__file__).with_name("watch_agent.py")
    watch = [sys.executable, str(script), str(folder), "--algo", options.algo, "--env", options.env]
    print(f"watch the agent: {shlex.join(watch)}")
    print("                 (without a screen, add --no-render)")
    return folder


if __name__ == "__main__":
    main()
