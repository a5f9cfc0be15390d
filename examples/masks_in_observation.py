"""
Action masks without sb3-contrib: they are part of a Dict observation, and the policy applies them. This works where
nobody passes masks to ``predict``, as in RL Zoo. The masks are inputs of the networks, too.

    python examples/masks_in_observation.py

The output was:

    3.78 tricks, and 0 of 46000 actions invalid

RL Zoo finds the module in the current folder:

    cd examples
    python -m rl_zoo3.train --algo uatrpo --gym-packages masks_in_observation --env MaskedCards-v0 \\
        -conf masked_cards.yml
    python -m rl_zoo3.enjoy --algo uatrpo --gym-packages masks_in_observation --env MaskedCards-v0 -f logs --no-render
"""

import argparse
from typing import Any

import gymnasium as gym
import torch as th
from gymnasium import spaces
from masked_cards import N_CARDS, Cards
from stable_baselines3.common.distributions import Distribution
from stable_baselines3.common.evaluation import evaluate_policy
from stable_baselines3.common.monitor import Monitor
from stable_baselines3.common.policies import MultiInputActorCriticPolicy

from sb3_uatrpo import RECOMMENDED_DISCRETE, UATRPO


class MaskedPolicy(MultiInputActorCriticPolicy):
    """Forbidden actions have probability zero."""

    def extract_features(self, obs: Any, *extractors: Any) -> Any:
        self.mask = obs["mask"]
        return super().extract_features(obs, *extractors)

    def get_distribution(self, obs: Any) -> Distribution:
        self.mask = obs["mask"]
        return super().get_distribution(obs)

    def _get_action_dist_from_latent(self, latent_pi: th.Tensor) -> Distribution:
        logits = self.action_net(latent_pi).masked_fill(self.mask == 0, -1e8)
        return self.action_dist.proba_distribution(logits)


class CardsWithMask(gym.ObservationWrapper[Any, Any, Any]):
    """The game, which shows the mask."""

    def __init__(self) -> None:
        self.game = Cards()
        super().__init__(self.game)
        self.observation_space = spaces.Dict(game=self.game.observation_space, mask=spaces.MultiBinary(N_CARDS))

    def observation(self, observation: Any) -> dict[str, Any]:
        return {"game": observation, "mask": self.game.hand.astype("int8")}


gym.register("MaskedCards-v0", entry_point="masks_in_observation:CardsWithMask")


def main(args: list[str] | None = None) -> UATRPO:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--n-timesteps", type=int, default=40_000)
    parser.add_argument("--n-games", type=int, default=1_000, help="games of the evaluation")
    options = parser.parse_args(args)

    env = CardsWithMask()
    model = UATRPO(MaskedPolicy, env, **RECOMMENDED_DISCRETE, seed=0, device="cpu").learn(options.n_timesteps)
    mean, _ = evaluate_policy(model, Monitor(env), options.n_games)
    print(f"{mean:.2f} tricks, and {env.game.n_invalid} of {env.game.n_actions} actions invalid")
    return model


if __name__ == "__main__":
    main()
