"""What RL Zoo's own files lack of a run: all updates, the steps at which episodes ended, successes, and its end."""

import json
import os
import sys
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from stable_baselines3.common.callbacks import BaseCallback, EvalCallback

from sb3_uatrpo.study.plan import versions
from sb3_uatrpo.study.tables import GZIP
from sb3_uatrpo.trust_region_algorithm import TrustRegionAlgorithm

# Distance between the seeds of training and of evaluation environments
EVAL_SEED_OFFSET = 1_000_000
STEPS_BETWEEN_UPDATES = 200
# In the environment of a study's run, whose standard input the study holds open
OF_A_STUDY = "SB3_UATRPO_STUDY"


class StudyCallback(BaseCallback):
    """
    Writes ``episodes.csv.gz``, ``updates.csv.gz`` and ``ended.json`` at the end of the training, into RL Zoo's folder
    of the run, or into the logger's if there are no evaluations. Evaluation environments get seeds of their own, where
    RL Zoo gives them those of training. It is for the ``callback:`` of any of RL Zoo's hyperparameter files.

    As a part of a study, it also ends the process when the study is gone, keeps sketches from being saved, and has a
    run fail that was stopped early or whose Monitor has missed episodes.
    """

    def __init__(self) -> None:
        super().__init__()
        self.updates: list[dict[str, Any]] = []
        self.episodes: list[dict[str, Any]] = []
        self.seen: Any = None
        self.of_a_study = OF_A_STUDY in os.environ
        if self.of_a_study:
            # the study never writes, so there is an end of file or nothing. Not sys.stdin: it would be locked at exit.
            threading.Thread(target=lambda: os.read(0, 1) or os._exit(1), daemon=True).start()

    def _on_training_start(self) -> None:
        self.started, self.folder = time.time(), Path(self.logger.dir or ".")
        for callback in getattr(self.locals["callback"], "callbacks", ()):
            if isinstance(callback, EvalCallback):
                callback.eval_env.seed((self.model.seed or 0) + EVAL_SEED_OFFSET)
                self.folder = Path(callback.log_path).parent if callback.log_path else self.folder
                if self.of_a_study:
                    callback.best_model_save_path = callback.callback_on_new_best = None
                    # SB3's own could not write the lists where only some episodes report their success
                    callback._log_success_callback = partial(_keep_success, callback)  # type: ignore[method-assign]

    def _on_step(self) -> bool:
        # sb3-contrib's ARS shows its callbacks none
        for i, (done, info) in enumerate(zip(self.locals.get("dones", ()), self.locals.get("infos", ()), strict=True)):
            if "episode" in info:
                row = {"step": self.num_timesteps, "is_success": _success(info), "return": float(info["episode"]["r"])}
                self.episodes.append({**row, "length": float(info["episode"]["l"]), "env_index": i})
            # a life is over where Monitor's episode goes on
            elif done and self.of_a_study and not self.training_env.get_attr("rewards", i)[0]:
                ended = "a wrapper around Monitor ended episodes that Monitor does not report"
                raise RuntimeError(f"{ended}: end them by a wrapper within Monitor, or by max_episode_steps")
        return True

    def _on_rollout_start(self) -> None:
        # An update lies between the end of one rollout and the start of the next. Some of the others' algorithms learn
        # after every few steps: of updates that are closer to each other, only the first is kept.
        least = 0 if isinstance(self.model, TrustRegionAlgorithm) else STEPS_BETWEEN_UPDATES
        if not self.updates or self.num_timesteps - self.updates[-1]["step"] >= least:
            self._keep_update()

    def _keep_update(self) -> None:
        logged = {k[6:]: v for k, v in self.logger.name_to_value.items() if k.startswith("train/")}
        if logged.get("n_updates") not in (None, self.seen):
            self.seen = logged["n_updates"]
            # not figures, and of arrays and tensors those of one number
            values = {k: v.item() if hasattr(v, "item") and np.prod(np.shape(v)) == 1 else v for k, v in logged.items()}
            kept = {name: value for name, value in values.items() if isinstance(value, int | float | str)}
            self.updates.append({"step": self.num_timesteps, **kept})

    def _on_training_end(self) -> None:
        # RL Zoo also calls this when an exception has ended the training
        if sys.exc_info()[0] is not None:
            return
        total = self.locals["total_timesteps"]
        if self.of_a_study and self.num_timesteps < total:
            # its last episodes are not those at the end of a run of this length
            raise RuntimeError(f"a callback stopped it after {self.num_timesteps:,} of {total:,} steps")
        if self.of_a_study and (sketch := getattr(self.model, "sketch", None)) is not None:
            # it would be most of the saved model
            sketch.clear()
        # SB3 never dumps the last one
        self._keep_update()
        for name, rows in (("episodes", self.episodes), ("updates", self.updates)):
            # six digits are enough for a picture, in a third of the space
            table = pd.DataFrame(rows).dropna(axis=1, how="all") if rows else pd.DataFrame(columns=["step"])
            table.to_csv(self.folder / f"{name}.csv.gz", index=False, float_format="%.6g", compression=GZIP)
        ended = {"steps": self.num_timesteps, "seconds": round(time.time() - self.started, 3), "versions": versions()}
        (self.folder / "ended.json").write_text(json.dumps(ended, indent=1) + "\n")


def _keep_success(evaluation: EvalCallback, locals_: dict[str, Any], globals_: dict[str, Any]) -> None:
    if locals_["done"]:
        evaluation._is_success_buffer.append(_success(locals_["info"]))  # type: ignore[arg-type]


def _success(info: dict[str, Any]) -> float:
    # tasks report it as a flag, or as an array of one
    is_success = info.get("is_success")
    return np.nan if is_success is None else float(np.mean(is_success))
