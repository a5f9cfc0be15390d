"""What decides a run's numbers, and what is kept of it: one small JSON file, whole or not there at all."""

import hashlib
import json
import math
import os
import re
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sb3_uatrpo.study.columns import MOST_VALUES, TYPES, pack_table, round_float, unpack_table

if TYPE_CHECKING:
    from jsonschema.protocols import Validator

# Format 1 had no packed columns
FORMAT = 2
READABLE_FORMATS = (1, FORMAT)
SERIES = ("episodes", "evaluations", "updates")
# Evaluations are few
PACKED = ("episodes", "updates")
# Stands in a failed run's traceback before what the run itself printed
OUTPUT_HEADING = "\nThe last that it printed:\n"
# File systems take 255 bytes; the key and the endings of the record and of its lock need 21 of them
LONGEST_STEM = 255 - 21


class StudyError(Exception):
    """
    Something that was asked for cannot be done. The message is one line, and names what was given and what would be
    accepted.
    """


@dataclass(frozen=True, eq=False)
class RunSpec:
    """
    One run: two of the same key give the same numbers.

    :param algo: name that RL Zoo knows, such as ``"uatrpo"`` or ``"ppo"``
    :param env_id: Gymnasium's name of the environment
    :param seed: seed of the run, at least 0
    :param n_timesteps: steps to learn for, over all environments of the run
    :param variant: how the run differs from the algorithm's plain hyperparameters: a name without ``=``, or what was
        varied, such as ``"noise=1"``, or both with a comma between them; ``""`` if not at all
    :param hyperparameters: as in RL Zoo's YAML files, with everything that was overridden, without ``n_timesteps``;
        values that JSON has
    :param eval_freq: steps between deterministic evaluations, over all environments of the run; 0 for none
    :param n_eval_episodes: episodes of each evaluation
    """

    algo: str
    env_id: str
    seed: int
    n_timesteps: int
    variant: str
    hyperparameters: dict[str, Any]
    eval_freq: int
    n_eval_episodes: int

    def to_json(self) -> dict[str, Any]:
        """:return: the fields as the file of a record has them, where hyperparameters are called settings"""
        content = asdict(self)
        return {"settings" if name == "hyperparameters" else name: value for name, value in content.items()}

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> "RunSpec":
        """
        :param content: what ``to_json`` returned
        :return: the specification
        """
        return cls(**{"hyperparameters" if name == "settings" else name: value for name, value in content.items()})

    def key(self) -> str:
        """
        :return: ten hexadecimal digits of a hash over all fields. It does not depend on the order of hyperparameters.
        """
        canonical = json.dumps(self.to_json(), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(canonical.encode()).hexdigest()[:10]

    # By the key, as on disk: 1 and 1.0 are two runs, and a tuple that comes back as a list is the same one

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RunSpec) and self.key() == other.key()

    def __hash__(self) -> int:
        return hash(self.key())

    @property
    def label(self) -> str:
        """:return: the algorithm with the name of its variant, if it has one, such as ``"uatrpo (no covariance)"``"""
        name, _, _ = self.variant.partition(",")
        return f"{self.algo} ({name})" if name and "=" not in name else self.algo

    @property
    def condition(self) -> str:
        """:return: the rest of the variant: values that were varied for several algorithms, such as ``"noise=1"``"""
        name, _, rest = self.variant.partition(",")
        return self.variant if "=" in name else rest

    def __str__(self) -> str:
        variant = f" ({self.variant})" if self.variant else ""
        return f"{self.algo}{variant} on {self.env_id}, seed {self.seed}"

    @property
    def file_name(self) -> str:
        """:return: name of the record's file; what no file system would refuse"""
        parts = [self.algo, self.env_id, self.variant, f"s{self.seed}"]
        stem = "_".join(re.sub(r"[^\w.=-]+", "-", part) for part in parts if part)
        # the key alone tells runs apart
        return f"{stem.encode()[:LONGEST_STEM].decode(errors='ignore')}_{self.key()}.json"


@dataclass(frozen=True)
class Record:
    """
    What a run left.

    :param spec: what was run
    :param status: ``"done"`` or ``"failed"``
    :param traceback: what went wrong, ``None`` if nothing did
    :param episodes: training episodes in the order of their ends: ``"timesteps"`` at the end (over all environments
        of the run), ``"returns"`` (undiscounted, before any normalisation) and ``"lengths"`` (steps); where the
        environment reports it, ``"is_success"``: 1, 0, or ``None`` where an episode did not say; each of shape
        ``(n_episodes,)``
    :param evaluations: deterministic evaluations: ``"timesteps"``, shape ``(n_evaluations,)``, and ``"returns"``,
        shape ``(n_evaluations, n_eval_episodes)``; where the environment reports it, ``"is_success"``, of that shape
    :param updates: ``"timesteps"`` before each update, and what was logged of it under ``train/``, by name without
        the prefix, ``None`` where nothing finite was; each of shape ``(n_updates,)``
    :param versions: versions of Python and of the packages that the numbers depend on, by name
    :param machine: what the run ran on, by name
    :param wall_time: seconds from the making of the environment to the end of the run
    :param started: when the run started, in UTC, as ISO 8601 writes it
    """

    spec: RunSpec
    status: str
    traceback: str | None
    episodes: dict[str, list]
    evaluations: dict[str, list]
    updates: dict[str, list]
    versions: dict[str, str]
    machine: dict[str, str]
    wall_time: float
    started: str

    @property
    def reason(self) -> str:
        """:return: the first line of the error that ended the run, ``""`` if none did"""
        lines = (self.traceback or "").partition(OUTPUT_HEADING)[0].splitlines()
        # the error follows the last frame; its further lines, and what the run printed, say less
        frames = [i for i, line in enumerate(lines) if line.startswith('  File "')]
        after = lines[frames[-1] + 1 :] if frames else lines
        return next((line for line in after if line.strip() and not line.startswith(" ")), "")

    def without_series(self) -> "Record":
        """:return: what is small of it"""
        return replace(self, episodes={}, evaluations={}, updates={})


# --------------------------------------------------------------------------------------------------------------- files


def write_record(record: Record, folder: str | os.PathLike[str]) -> Path:
    """
    Write a record. Whoever reads at the same time, or after a crash in between, sees the old file or the new one.

    :param record: what to keep; numbers of its series are rounded to six significant digits
    :param folder: where to, made if it is not there
    :return: the file, whose name follows from ``record.spec``
    """
    content = {field.name: getattr(record, field.name) for field in fields(record)}
    content = {"format": FORMAT, "key": record.spec.key(), **content, "spec": record.spec.to_json()}
    content |= {name: _rounded(content[name]) for name in SERIES}
    content |= {name: pack_table(content[name]) for name in PACKED}
    path = Path(folder) / record.spec.file_name
    write_atomically(path, json.dumps(content, allow_nan=False, separators=(",", ":")) + "\n")
    return path


def write_atomically(path: Path, text: str) -> None:
    """
    :param path: file to write or to replace; its folder is made if it is not there
    :param text: its content
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, temporary = tempfile.mkstemp(prefix=".", suffix=".tmp", dir=path.parent)
    try:
        with open(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        # mkstemp's files are for their owner alone, whatever the user's mask says
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def read_record(path: str | os.PathLike[str]) -> Record:
    """
    :param path: a file that ``write_record`` wrote
    :return: its record
    :raises StudyError: naming the file, if it cannot be read, is cut off, or does not hold what a record holds
    """
    try:
        return _record_of(json.loads(Path(path).read_text(encoding="utf-8")))
    # the last is of lists in lists in lists
    except (OSError, ValueError, RecursionError) as error:
        raise StudyError(f"{path}: {' '.join(str(error).split())}") from error


def read_records(folder: str | os.PathLike[str], series: bool = True) -> tuple[list[Record], list[tuple[Path, str]]]:
    """
    :param folder: where ``write_record`` wrote to
    :param series: whether to keep what makes records large
    :return: the records in the order of their files' names, and each file that is none, or the copy of one under
        another name, with the reason
    """
    records, bad = [], []
    for path in sorted(Path(folder).glob("[!.]*.json")):
        try:
            record = read_record(path)
        except StudyError as error:
            bad.append((path, str(error).removeprefix(f"{path}: ")))
            continue
        # a run counts once
        if path.name == record.spec.file_name:
            records.append(record if series else record.without_series())
        else:
            bad.append((path, f"a copy: the file of this record is called {record.spec.file_name}"))
    return records, bad


def _record_of(content: Any) -> Record:
    """
    :raises ValueError: saying what keeps a file's content from being a record
    """
    if not isinstance(content, dict) or content.get("format") not in READABLE_FORMATS:
        raise ValueError(f"not a record of format {' or '.join(map(str, READABLE_FORMATS))}, which this version reads")
    problem = next(_validator().iter_errors(content), None)
    if problem:
        # the message begins with what was found, however long it is, and ends with what was expected
        raise ValueError(f"{problem.json_path.removeprefix('$.')}: {problem.message[-150:]}")
    spec = RunSpec.from_json(content["spec"])
    if spec.key() != content["key"]:
        raise ValueError(f"its key {content['key']!r} does not belong to its settings")
    for name in PACKED:
        try:
            content[name] = unpack_table(content[name])
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from error
    for name in SERIES:
        if len({len(values) for values in content[name].values()}) > 1:
            raise ValueError(f"its {name} are not lists of one length")
    if any(later < earlier for earlier, later in pairwise(content["episodes"]["timesteps"])):
        raise ValueError("the timesteps of its episodes do not ascend")
    content["episodes"]["returns"] = _with_nan(content["episodes"]["returns"])
    content["evaluations"] = {name: _with_nan(values) for name, values in content["evaluations"].items()}
    return Record(**{field.name: content[field.name] for field in fields(Record)} | {"spec": spec})


def _rounded(values: Any) -> Any:
    """Floats to six significant digits, and ``None`` for what JSON cannot write: NaN and infinity."""
    if isinstance(values, dict):
        return {name: _rounded(value) for name, value in values.items()}
    if isinstance(values, (list, tuple)):
        return [_rounded(value) for value in values]
    if isinstance(values, float):
        return round_float(values) if math.isfinite(values) else None
    return values


def _with_nan(values: Any) -> Any:
    if isinstance(values, list):
        return [_with_nan(value) for value in values]
    return math.nan if values is None else values


# -------------------------------------------------------------------------------------------------------------- schema
# What the file of a record holds. The data of packed columns, lists of one length, and their order are beyond it.


@cache
def _validator() -> "Validator":
    from jsonschema import Draft202012Validator

    return Draft202012Validator(SCHEMA)


def _list_of(items: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"type": "array", "items": items, **more}


def _object(optional: dict[str, Any] | None = None, **properties: Any) -> dict[str, Any]:
    """One that has all these properties."""
    return {"type": "object", "properties": properties | (optional or {}), "required": list(properties)}


def _column_of(items: dict[str, Any] | None = None, encodings: Sequence[str] = tuple(TYPES)) -> dict[str, Any]:
    """A list, or a packed column."""
    packed = _object(
        encoding={"enum": list(encodings)},
        length={"type": "integer", "minimum": 1, "maximum": MOST_VALUES},
        data=TEXT,
    )
    return {"if": {"type": "object"}, "then": packed, "else": _list_of(items or {})}


TEXT = {"type": "string"}
INTEGER = {"type": "integer"}
# what was not finite is written as null
NUMBER_OR_NULL = {"type": ["number", "null"]}
INTEGERS = _column_of(INTEGER, ["delta-int64"])
NUMBERS = _column_of(NUMBER_OR_NULL)
ROWS = _list_of(_list_of(NUMBER_OR_NULL, minItems=1))

# Keywords of a release to come are not refused here, but an unknown one of a specification would change its key
SPECIFICATION = _object(
    algo=TEXT,
    env_id=TEXT,
    seed={"type": "integer", "minimum": 0},
    n_timesteps={"type": "integer", "minimum": 1},
    variant=TEXT,
    settings={"type": "object"},
    eval_freq={"type": "integer", "minimum": 0},
    n_eval_episodes=INTEGER,
) | {"additionalProperties": False}

SCHEMA = _object(
    key=TEXT,
    spec=SPECIFICATION,
    status={"enum": ["done", "failed"]},
    traceback={"type": ["string", "null"]},
    episodes=_object({"is_success": NUMBERS}, timesteps=INTEGERS, returns=NUMBERS, lengths=INTEGERS),
    evaluations=_object({"is_success": ROWS}, timesteps=_list_of(INTEGER), returns=ROWS),
    # an algorithm may log what it likes; these are what a report reads
    updates=_object(timesteps=INTEGERS)
    | {"patternProperties": {"^kl_(ratio|proposed)$": NUMBERS}, "additionalProperties": _column_of()},
    versions={"type": "object", "additionalProperties": TEXT},
    machine={"type": "object", "additionalProperties": TEXT},
    wall_time={"type": "number"},
    started=TEXT,
)
