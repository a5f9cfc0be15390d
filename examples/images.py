"""
Image observations with CnnPolicy, and the size of its sketch.

    python examples/images.py

The sketch of the trust region holds three matrices of d × m numbers. With the 1.7 million parameters of the NatureCNN
on Atari-like frames, m = 200 projections would take 4 GB. ``sketch_memory_limit`` lowers m to what fits, with a
warning; or choose m yourself. A smaller network and fewer projections make updates quick, as here.
"""

import argparse

import torch as th
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.envs import FakeImageEnv
from stable_baselines3.common.utils import safe_mean

from sb3_uatrpo import UATRPO


def main(args: list[str] | None = None) -> UATRPO:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--n-timesteps", type=int, default=2_000)
    options = parser.parse_args(args)
    th.set_num_threads(1)

    # stands in for your own environment: random images
    env = make_vec_env(lambda: FakeImageEnv(screen_height=48, screen_width=48, n_channels=3, discrete=True), n_envs=2)
    model = UATRPO(
        "CnnPolicy",
        env,
        n_steps=250,
        n_projections=25,
        policy_kwargs={"features_extractor_kwargs": {"features_dim": 32}, "share_features_extractor": False},
        seed=0,
        device="cpu",
        verbose=1,
    )
    model.learn(options.n_timesteps)
    returns = [episode["r"] for episode in model.ep_info_buffer or ()]
    print(f"mean return of the last {len(returns)} episodes: {safe_mean(returns):.1f}; images and rewards are random")
    return model


if __name__ == "__main__":
    main()
