"""
Track a run with TensorBoard, Weights & Biases or MLflow, or with all of them.

    pip install wandb mlflow
    python examples/track_run.py --trackers tensorboard wandb mlflow

Stable-Baselines3's logger sends everything to each of its outputs. ``Tracker`` is such an output: it passes the numbers
on to a tracker's own function. Everything stays in ``--folder``: Weights & Biases runs offline, and MLflow writes to an
SQLite file.
"""

import argparse
import numbers
from collections.abc import Callable
from pathlib import Path
from typing import Any

from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.logger import KVWriter, Logger, TensorBoardOutputFormat
from stable_baselines3.common.vec_env import VecNormalize

from sb3_uatrpo import UATRPO


class Tracker(KVWriter):
    """
    An output of Stable-Baselines3's logger.

    :param log: takes a dict of numbers and the number of environment steps, as ``step``
    :param close: called when training is over
    """

    def __init__(self, log: Callable[..., Any], close: Callable[[], Any]) -> None:
        self.log = log
        self.close = close  # type: ignore[method-assign]

    def write(self, key_values: dict[str, Any], key_excluded: dict[str, tuple[str, ...]], step: int = 0) -> None:
        self.log({key: float(value) for key, value in key_values.items() if isinstance(value, numbers.Real)}, step=step)


def tensorboard(folder: Path, settings: dict[str, Any]) -> KVWriter:
    print(f"tensorboard --logdir {folder}")
    return TensorBoardOutputFormat(str(folder))


def wandb(folder: Path, settings: dict[str, Any]) -> KVWriter:
    import wandb

    # when the run ends, wandb prints the command that uploads it
    run = wandb.init(project="sb3_uatrpo", config=settings, dir=folder, mode="offline")
    return Tracker(run.log, run.finish)


def mlflow(folder: Path, settings: dict[str, Any]) -> KVWriter:
    import mlflow

    store = f"sqlite:///{folder / 'mlflow.db'}"
    mlflow.set_tracking_uri(store)
    mlflow.set_experiment("sb3_uatrpo")
    mlflow.start_run()
    mlflow.log_params(settings)
    print(f"mlflow ui --backend-store-uri {store}")
    return Tracker(mlflow.log_metrics, mlflow.end_run)


TRACKERS = {"tensorboard": tensorboard, "wandb": wandb, "mlflow": mlflow}


def main(args: list[str] | None = None) -> UATRPO:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trackers", nargs="+", choices=TRACKERS, default=["tensorboard"])
    parser.add_argument("--env", default="Pendulum-v1")
    parser.add_argument("--n-timesteps", type=int, default=50_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, default=Path("runs/tracked"))
    options = parser.parse_args(args)
    folder: Path = options.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)

    env = VecNormalize(make_vec_env(options.env, seed=options.seed), norm_reward=False, gamma=0.95)
    model = UATRPO("MlpPolicy", env, gamma=0.95, seed=options.seed, device="cpu")
    settings = {"algo": "uatrpo", "env": options.env, "gamma": model.gamma, "seed": options.seed}
    try:
        outputs = [TRACKERS[name](folder, settings) for name in options.trackers]
    except ModuleNotFoundError as error:
        parser.error(f"--trackers: {error}; run pip install {error.name}")
    model.set_logger(Logger(str(folder), outputs))
    try:
        model.learn(options.n_timesteps)
    finally:
        model.logger.close()
    print(f"{model.num_timesteps} steps are tracked in {folder}")
    return model


if __name__ == "__main__":
    main()
