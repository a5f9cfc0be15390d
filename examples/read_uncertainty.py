"""
Read UATRPO's uncertainty diagnostics in a callback after each update, and draw them.

    python examples/read_uncertainty.py --env Pendulum-v1 --n-timesteps 50000

``train/uncertainty_share`` is the share of the trust region that the gradient's noise takes up. Near one, steps are
short because the gradient is not known well enough, and more data per update would lengthen them. Near zero, the Fisher
matrix bounds the steps, as in TRPO. ``train/gradient_snr`` is the gradient's signal over its noise: below one, most of
the step is noise. ``train/noise_scale`` is the batch size, in timesteps, at which the two are equal.
"""

import argparse
import sys
from pathlib import Path

import gymnasium as gym
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.vec_env import VecNormalize

from sb3_uatrpo import UATRPO

try:
    import matplotlib.pyplot as plt
    import pandas as pd
except ModuleNotFoundError as error:
    sys.exit(f'{error}: run pip install ".[train]" in a clone of sb3_uatrpo')

plt.switch_backend("Agg")
# with the value to compare each with
DRAWN = {"kl_ratio": 1.0, "uncertainty_share": None, "gradient_snr": 1.0}
KEYS = (*DRAWN, "noise_scale", "subspace_rank", "n_trajectories", "kl_proposed", "step_fraction")


class UncertaintyCallback(BaseCallback):
    """Collects the diagnostics of every update."""

    def __init__(self) -> None:
        super().__init__()
        self.updates: list[dict[str, float]] = []

    def _on_step(self) -> bool:
        return True

    def _read(self) -> None:
        # train() runs after a rollout, and the logger dumps its values after the next one: in between they can be read
        recorded = self.logger.name_to_value
        if "train/step_fraction" in recorded:
            update = {key: recorded[f"train/{key}"] for key in KEYS if f"train/{key}" in recorded}
            self.updates.append({"timesteps": self.num_timesteps, **update})

    def _on_rollout_start(self) -> None:
        self._read()

    def _on_training_end(self) -> None:
        self._read()


def main(args: list[str] | None = None) -> pd.DataFrame:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--env", default="Pendulum-v1")
    parser.add_argument("--n-timesteps", type=int, default=50_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--picture", type=Path, default=Path("uncertainty.png"))
    options = parser.parse_args(args)
    if options.n_timesteps < 1:
        parser.error(f"--n-timesteps must be at least 1, but it is {options.n_timesteps}")
    try:
        gym.make(options.env).close()
    except (gym.error.Error, ImportError) as error:
        parser.error(f"--env: {error}")
    if not options.picture.parent.is_dir():
        parser.error(f"--picture: there is no folder {options.picture.parent}")

    env = VecNormalize(make_vec_env(options.env, seed=options.seed), norm_reward=False)
    callback = UncertaintyCallback()
    UATRPO("MlpPolicy", env, seed=options.seed, device="cpu").learn(options.n_timesteps, callback=callback)

    updates = pd.DataFrame(callback.updates)
    print(updates.describe().loc[["min", "50%", "mean", "max"]].round(3).to_string())
    figure, axes = plt.subplots(3, 1, sharex=True, figsize=(7, 6), layout="constrained")
    for ax, (key, wanted) in zip(axes, DRAWN.items(), strict=True):
        ax.plot(updates["timesteps"], updates[key], ".-", linewidth=0.7, markersize=3)
        ax.set_ylabel(key)
        ax.grid(alpha=0.3)
        if wanted is not None:
            ax.axhline(wanted, color="black", linewidth=0.7)
    axes[-1].set_xlabel("environment steps")
    figure.suptitle(f"UATRPO on {options.env}")
    figure.savefig(options.picture, dpi=120)
    plt.close(figure)
    print(f"picture: {options.picture}")
    return updates


if __name__ == "__main__":
    main()
