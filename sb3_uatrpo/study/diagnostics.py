"""What an algorithm logs of each update."""

from collections.abc import Callable
from typing import Any

from stable_baselines3.common.callbacks import BaseCallback


class UpdateRecorder(BaseCallback):
    """
    Keeps the numbers and strings that are logged under ``train/``, of the last update too, which SB3 logs but never
    writes.

    :param report: called with the number of steps so far
    :param n_steps: least steps between two reports, and between two updates that are kept: of an algorithm that
        learns after every few steps, such as SAC, only a part is
    """

    def __init__(self, report: Callable[[int], None], n_steps: int) -> None:
        super().__init__()
        self.report = report
        self.n_steps = n_steps
        self.updates: list[dict[str, Any]] = []
        self.reported = 0
        self.seen: Any = None

    def _on_step(self) -> bool:
        if self.num_timesteps - self.reported >= self.n_steps:
            self.reported = self.num_timesteps
            self.report(self.num_timesteps)
        return True

    def _on_rollout_start(self) -> None:
        # An update lies between the end of one rollout and the start of the next
        values = self.logger.name_to_value
        number = values.get("train/n_updates")
        if number is None or number == self.seen:
            return
        if self.updates and self.num_timesteps - self.updates[-1]["timesteps"] < self.n_steps:
            return
        self.seen = number
        logged = {name.removeprefix("train/"): _plain(v) for name, v in values.items() if name.startswith("train/")}
        plain = {name: value for name, value in logged.items() if isinstance(value, (int, float, str))}
        self.updates.append({"timesteps": self.num_timesteps, **plain})

    def _on_training_end(self) -> None:
        self._on_rollout_start()

    def columns(self) -> dict[str, list]:
        """
        :return: a list for each name, as long as there are updates, with ``None`` where an update did not log it
        """
        names = dict.fromkeys(["timesteps", *(name for update in self.updates for name in update)])
        return {name: [update.get(name) for update in self.updates] for name in names}


def _plain(value: Any) -> Any:
    """Numbers of NumPy and torch as Python's own; anything else, such as pictures and arrays, as it is."""
    try:
        return value.item()
    except (AttributeError, RuntimeError, ValueError):
        return value
