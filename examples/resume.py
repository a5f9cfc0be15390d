"""
Stop a training run and resume it from a checkpoint.

    python examples/resume.py

A checkpoint holds the policy, the critic's optimizer and the sketch of the trust region, with its moving averages and
its generator. The running statistics of VecNormalize have their own file. No checkpoint of Stable-Baselines3 holds the
state of the environment and of the global random generators: training resumes with a fresh episode.
"""

import argparse
from pathlib import Path

from stable_baselines3.common.callbacks import CheckpointCallback
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.vec_env import VecNormalize

from sb3_uatrpo import UATRPO


def main(args: list[str] | None = None) -> UATRPO:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--n-timesteps", type=int, default=20_000, help="steps before the stop, and again after it")
    parser.add_argument("--folder", type=Path, default=Path("runs/resume"))
    options = parser.parse_args(args)
    if options.n_timesteps < 1:
        parser.error(f"--n-timesteps must be at least 1, but it is {options.n_timesteps}")

    env = VecNormalize(make_vec_env("Pendulum-v1", seed=0), norm_reward=False, gamma=0.95)
    model = UATRPO("MlpPolicy", env, gamma=0.95, seed=0, device="cpu", verbose=1)
    checkpoints = CheckpointCallback(options.n_timesteps, str(options.folder), save_vecnormalize=True)
    model.learn(options.n_timesteps, callback=checkpoints)

    env = VecNormalize.load(
        str(options.folder / f"rl_model_vecnormalize_{options.n_timesteps}_steps.pkl"),
        make_vec_env("Pendulum-v1"),
    )
    # load() seeds the environment and the global generators; the old seed would repeat the first run's random numbers
    model = UATRPO.load(options.folder / f"rl_model_{options.n_timesteps}_steps", env=env, device="cpu", seed=1)
    # without reset_num_timesteps=False the count of steps, and with it the schedules, would start again
    model.learn(options.n_timesteps, reset_num_timesteps=False)
    print(f"resumed at step {options.n_timesteps} and trained to step {model.num_timesteps}")
    return model


if __name__ == "__main__":
    main()
