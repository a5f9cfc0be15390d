"""
The shortest script that trains an agent and lets it act.

    python examples/shortest.py
"""

import argparse

import gymnasium as gym

from sb3_uatrpo import RECOMMENDED_DISCRETE, UATRPO


def main(args: list[str] | None = None) -> UATRPO:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--n-timesteps", type=int, default=30_000)
    options = parser.parse_args(args)

    model = UATRPO("MlpPolicy", "CartPole-v1", **RECOMMENDED_DISCRETE, device="cpu", verbose=1)
    model.learn(total_timesteps=options.n_timesteps)

    env = gym.make("CartPole-v1")
    observation, _ = env.reset()
    done, episode_return = False, 0.0
    while not done:
        action, _ = model.predict(observation, deterministic=True)
        observation, reward, terminated, truncated, _ = env.step(action)
        done, episode_return = terminated or truncated, episode_return + float(reward)
    print(f"return: {episode_return:.0f} of 500")
    return model


if __name__ == "__main__":
    main()
