"""
Dict observations of images and vectors, with MultiInputPolicy.

    python examples/dict_observations.py
"""

import argparse

import torch as th
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.envs import SimpleMultiObsEnv
from stable_baselines3.common.utils import safe_mean

from sb3_uatrpo import UATRPO


def main(args: list[str] | None = None) -> UATRPO:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--n-timesteps", type=int, default=8_000)
    options = parser.parse_args(args)
    th.set_num_threads(1)

    # a maze that shows its state as an image and as a vector
    env = make_vec_env(lambda: SimpleMultiObsEnv(random_start=False), n_envs=2, seed=0)
    # a small network for the images, one each for actor and critic; 50 projections keep updates quick
    model = UATRPO(
        "MultiInputPolicy",
        env,
        n_steps=500,
        n_projections=50,
        policy_kwargs={"features_extractor_kwargs": {"cnn_output_dim": 16}, "share_features_extractor": False},
        seed=0,
        device="cpu",
        verbose=1,
    )
    model.learn(options.n_timesteps)
    returns = [episode["r"] for episode in model.ep_info_buffer or ()]
    print(f"mean return of the last {len(returns)} episodes: {safe_mean(returns):.1f}")
    return model


if __name__ == "__main__":
    main()
