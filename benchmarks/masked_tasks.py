"""Connect Four with action masks, and a count of the actions that masks exclude."""

from importlib import import_module
from typing import Any

import gymnasium as gym
import numpy as np


class ConnectFour(gym.Env[Any, Any]):
    """
    PettingZoo's game as one of two players, drawn by reset; the other plays legal moves at random. The reward, 1, 0 or
    -1, comes at the end, and an illegal move ends the game with -1.
    """

    def __init__(self) -> None:
        self.game = import_module("pettingzoo.classic.connect_four.connect_four").env()
        first = self.game.possible_agents[0]
        self.observation_space = self.game.observation_space(first)["observation"]
        self.action_space = self.game.action_space(first)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.game.reset()
        self.player = self.game.possible_agents[self.np_random.integers(2)]
        return self._after_the_opponent(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.game.step(int(action))
        observation = self._after_the_opponent()
        return observation, float(self.game.rewards[self.player]), self.game.terminations[self.player], False, {}

    def _after_the_opponent(self) -> Any:
        opponent = self.game.agent_selection
        if opponent != self.player and not self.game.terminations[opponent]:
            legal = np.flatnonzero(self.game.observe(opponent)["action_mask"])
            self.game.step(int(self.np_random.choice(legal)))
        return self.game.observe(self.player)["observation"]

    def action_masks(self) -> Any:
        return self.game.observe(self.player)["action_mask"].astype(bool)


class Counted(gym.Wrapper[Any, Any, Any, Any]):
    """Counts actions, and those that the mask excludes."""

    n_actions = n_invalid = 0

    def step(self, action: Any) -> Any:
        self.n_actions += 1
        self.n_invalid += not self.get_wrapper_attr("action_masks")()[action]
        return self.env.step(action)
