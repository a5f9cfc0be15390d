"""What decides a run's numbers."""

import hashlib
import json
import re
from dataclasses import asdict, dataclass
from typing import Any

# File systems take 255 bytes; the key and the endings of the record and of its lock need 21 of them
LONGEST_STEM = 255 - 21


@dataclass(frozen=True, eq=False)
class RunSpec:
    """
    One run: two of the same key give the same numbers.

    :param algo: name that RL Zoo knows, such as ``"uatrpo"`` or ``"ppo"``
    :param env_id: Gymnasium's name of the environment
    :param seed: seed of the run, at least 0
    :param n_timesteps: steps to learn for, over all environments of the run
    :param variant: how the run differs from the algorithm's plain settings, such as ``"noise=1"``; ``""`` if not
    :param settings: hyperparameters as in RL Zoo's YAML files, with everything that was overridden, without
        ``n_timesteps``; values that JSON has
    :param eval_freq: steps between deterministic evaluations, over all environments of the run; 0 for none
    :param n_eval_episodes: episodes of each evaluation
    """

    algo: str
    env_id: str
    seed: int
    n_timesteps: int
    variant: str
    settings: dict[str, Any]
    eval_freq: int
    n_eval_episodes: int

    def key(self) -> str:
        """
        :return: ten hexadecimal digits of a hash over all fields. It does not depend on the order of the settings.
        """
        canonical = json.dumps(asdict(self), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(canonical.encode()).hexdigest()[:10]

    # By the key, as on disk: 1 and 1.0 are two runs, and a tuple that comes back as a list is the same one

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RunSpec) and self.key() == other.key()

    def __hash__(self) -> int:
        return hash(self.key())

    @property
    def label(self) -> str:
        """:return: the algorithm with its variant, such as ``"uatrpo (noise=1)"``"""
        return f"{self.algo} ({self.variant})" if self.variant else self.algo

    def __str__(self) -> str:
        return f"{self.label} on {self.env_id}, seed {self.seed}"

    @property
    def file_name(self) -> str:
        """:return: name of the record's file; what no file system would refuse"""
        parts = [self.algo, self.env_id, self.variant, f"s{self.seed}"]
        stem = "_".join(re.sub(r"[^\w.=-]+", "-", part) for part in parts if part)
        # the key alone tells runs apart
        return f"{stem.encode()[:LONGEST_STEM].decode(errors='ignore')}_{self.key()}.json"
