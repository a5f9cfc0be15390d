"""
A card game in which most actions are not allowed, with action masks and without.

    python examples/masked_cards.py

The best play is known: the smallest card that wins or, without one, the smallest card. The output was:

    the best play: 4.27 tricks
    MaskableUATRPO: 3.98, and 0 of 46000 actions invalid
    UATRPO: 3.10, and 17792 of 46000 actions invalid
"""

import argparse
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from sb3_contrib.common.maskable.evaluation import evaluate_policy as evaluate_with_masks
from sb3_contrib.common.wrappers import ActionMasker
from stable_baselines3.common.evaluation import evaluate_policy
from stable_baselines3.common.monitor import Monitor

from sb3_uatrpo import RECOMMENDED_DISCRETE, UATRPO
from sb3_uatrpo.maskable import MaskableUATRPO

N_CARDS, N_TRICKS = 30, 6


class Cards(gym.Env[Any, Any]):
    """
    Each trick, the table shows one of the cards 0 to 29, and a higher card from the hand of six wins it. The action is
    the card to play; one that is not in the hand costs 1, and a card from the hand is drawn instead.
    """

    action_space = spaces.Discrete(N_CARDS)
    observation_space = spaces.MultiBinary(2 * N_CARDS)

    def __init__(self) -> None:
        self.n_actions = self.n_invalid = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.hand = np.zeros(N_CARDS, bool)
        self.hand[self.np_random.choice(N_CARDS, N_TRICKS, replace=False)] = True
        return self._next_trick(), {}

    def _next_trick(self) -> Any:
        self.table = int(self.np_random.integers(N_CARDS))
        return np.concatenate([self.hand, np.arange(N_CARDS) == self.table]).astype(np.int8)

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        card, is_invalid = int(action), not self.hand[action]
        self.n_actions += 1
        self.n_invalid += is_invalid
        if is_invalid:
            card = int(self.np_random.choice(np.flatnonzero(self.hand)))
        self.hand[card] = False
        reward = -1.0 if is_invalid else float(card > self.table)
        return self._next_trick(), reward, not self.hand.any(), False, {}

    def best_card(self) -> int:
        """A higher card in the hand is never worth less later, and one trick now is worth as much as one later."""
        cards = np.flatnonzero(self.hand)
        winning = cards[cards > self.table]
        return int(winning[0] if len(winning) else cards[0])


def best_return(n_games: int) -> float:
    game, total = Cards(), 0.0
    game.reset(seed=0)
    for _ in range(n_games):
        done = False
        while not done:
            _, reward, done, _, _ = game.step(game.best_card())
            total += reward
        game.reset()
    return total / n_games


def main(args: list[str] | None = None) -> MaskableUATRPO:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--n-timesteps", type=int, default=40_000)
    parser.add_argument("--n-games", type=int, default=1_000, help="games of each evaluation")
    options = parser.parse_args(args)

    print(f"the best play: {best_return(options.n_games):.2f} tricks")

    # the masks are the hand; an environment with a method action_masks() needs no wrapper
    game = Cards()
    env = ActionMasker(game, lambda _: game.hand)
    model = MaskableUATRPO("MlpPolicy", env, **RECOMMENDED_DISCRETE, seed=0, device="cpu")
    model.learn(options.n_timesteps)
    # sb3-contrib annotates its own class
    mean, _ = evaluate_with_masks(model, Monitor(env), options.n_games)  # type: ignore[arg-type]
    print(f"MaskableUATRPO: {mean:.2f}, and {game.n_invalid} of {game.n_actions} actions invalid")

    game = Cards()
    unmasked = UATRPO("MlpPolicy", game, **RECOMMENDED_DISCRETE, seed=0, device="cpu")
    unmasked.learn(options.n_timesteps)
    mean, _ = evaluate_policy(unmasked, Monitor(game), options.n_games)
    print(f"UATRPO: {mean:.2f}, and {game.n_invalid} of {game.n_actions} actions invalid")
    return model


if __name__ == "__main__":
    main()
