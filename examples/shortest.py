"""The shortest use.

python examples/shortest.py
"""

import argparse

import torch as th

from sb3_uatrpo import UATRPO


def main(args: list[str] | None = None) -> UATRPO:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--n-timesteps", type=int, default=30_000)
    options = parser.parse_args(args)

    # the network is small: one thread is faster than many
    th.set_num_threads(1)
    model = UATRPO("MlpPolicy", "CartPole-v1", verbose=1, device="cpu")
    model.learn(total_timesteps=options.n_timesteps)

    env = model.get_env()
    assert env is not None
    observations = env.reset()
    for _ in range(100):
        actions, _ = model.predict(observations, deterministic=True)  # type: ignore[arg-type]
        observations, _, _, _ = env.step(actions)
    return model


if __name__ == "__main__":
    main()
