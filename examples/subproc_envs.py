"""
Several environments, each in its own process.

    python examples/subproc_envs.py

More environments raise the number of trajectories n, which is at least one per environment, and c·R_n² falls. Here each
update also sees more data, so the uncertainty really is smaller. If the amount of data stays the same, multiply
``uncertainty_coef`` by the factor by which n has grown (docs/using.md).
"""

import argparse

from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.utils import safe_mean
from stable_baselines3.common.vec_env import SubprocVecEnv, VecNormalize

from sb3_uatrpo import UATRPO


def main(args: list[str] | None = None) -> UATRPO:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--n-timesteps", type=int, default=50_000)
    parser.add_argument("--n-envs", type=int, default=2)
    options = parser.parse_args(args)
    if options.n_envs < 1:
        parser.error(f"--n-envs must be at least 1, but it is {options.n_envs}")

    env = make_vec_env("Pendulum-v1", n_envs=options.n_envs, seed=0, vec_env_cls=SubprocVecEnv)
    env = VecNormalize(env, norm_reward=False, gamma=0.95)
    model = UATRPO("MlpPolicy", env, n_steps=500, gamma=0.95, seed=0, device="cpu", verbose=1)
    model.learn(options.n_timesteps)
    env.close()
    returns = [episode["r"] for episode in model.ep_info_buffer or ()]
    print(f"mean return of the last {len(returns)} episodes: {safe_mean(returns):.0f}")
    return model


# each process imports this file; without the guard it would start further processes
if __name__ == "__main__":
    main()
