"""An environment that tests can follow and break: ``tests.study.tasks:Waiting-v0``."""

import os
import sys
import time
from pathlib import Path

import gymnasium as gym
import numpy as np
from gymnasium import spaces


def processes_seen(folder: Path) -> list[int]:
    """The ids of the processes that have used an environment with this folder."""
    return [int(path.name) for path in folder.iterdir() if path.name.isdigit()]


class Waiting(gym.Env):
    """
    Episodes of ten steps. Steps fail where its folder contains ``broken``, or ``broken_`` with the process id, and end
    the process as if all were well where it contains ``exits``.

    :param folder: where each process that uses the environment leaves an empty file named after its process id
    :param hold_from: processes from this one on, in order of arrival, wait until the file ``go`` exists, and as long as
        there is a file ``stay_`` with their process id
    :param reports_success: whether episodes report success, alternately that they succeeded and that they did not
    :param first_report: number of the first episode that does, from 1
    :param in_arrays: whether it reports success in arrays of one element
    """

    def __init__(
        self,
        folder: str,
        hold_from: int | None = None,
        reports_success: bool = False,
        first_report: int = 1,
        in_arrays: bool = False,
        render_mode: str | None = None,
    ):
        self.folder, self.hold_from, self.reports_success = Path(folder), hold_from, reports_success
        self.first_report, self.in_arrays = first_report, in_arrays
        self.episodes = 0
        self.observation_space = spaces.Box(-1.0, 1.0, (3,), np.float32)
        self.action_space = spaces.Discrete(2)
        self.steps = 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        (self.folder / str(os.getpid())).touch()
        while self.hold_from is not None and len(processes_seen(self.folder)) >= self.hold_from:
            if (self.folder / "go").exists() and not (self.folder / f"stay_{os.getpid()}").exists():
                break
            time.sleep(0.02)
        self.steps = 0
        return self._observation(), {}

    def step(self, action):
        if any((self.folder / name).exists() for name in ("broken", f"broken_{os.getpid()}")):
            print("this is the last that it says")
            raise RuntimeError("the environment is broken")
        if (self.folder / "exits").exists():
            sys.exit(0)
        self.steps += 1
        done = self.steps == 10
        self.episodes += done
        reports = done and self.reports_success and self.episodes >= self.first_report
        is_success = self.episodes % 2 == 0
        info = {"is_success": np.array([is_success]) if self.in_arrays else is_success} if reports else {}
        return self._observation(), float(action), done, False, info

    def _observation(self):
        return self.np_random.uniform(-1.0, 1.0, 3).astype(np.float32)


class Lives(gym.Wrapper):
    """As Atari's ``EpisodicLifeEnv``: every tenth step ends an episode, of which nothing within this wrapper knows."""

    goes_on = False

    def reset(self, **kwargs):
        self.steps = 0
        return (self.observation, {}) if self.goes_on else self.env.reset(**kwargs)

    def step(self, action):
        self.observation, reward, terminated, truncated, info = self.env.step(action)
        self.steps += 1
        self.goes_on = not (terminated or truncated) and self.steps == 10
        return self.observation, reward, terminated or self.goes_on, truncated, info


gym.register("Waiting-v0", entry_point=Waiting)
