"""
The specification of a run, and its record: one small compressed JSON file, written as a whole or not at all.
"""

import gzip
import hashlib
import json
import math
import os
import re
import zlib
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, fields, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

FORMAT = 3
SERIES = ("episodes", "evaluations", "updates")
# Of the floats in a record: enough for a picture, in a third of the space
SIGNIFICANT_DIGITS = 6
# Bytes of a record's text: a small file could otherwise unpack to a thousand times its size, and exhaust the memory
MAX_SIZE = 2**28
# In a failed run's traceback, separates the error from the run's own output
OUTPUT_HEADING = "\nThe last that it printed:\n"
# File systems allow 255 bytes; the key, the suffix of the record and what its temporary file adds need 24 of them
LONGEST_STEM = 255 - 24
# Greek letters of variants, in file names
ASCII = str.maketrans({"γ": "gamma", "λ": "lambda", "ρ": "rho"})
# What users call runs without varied values
UNVARIED = "plain"

Table = dict[str, list[Any]]
# Files that were left out, with the reason
LeftOut = list[tuple[Path, str]]


class StudyError(Exception):
    """A request that cannot be met. The one-line message names what was given and what would be accepted."""


def refuse_unequal_lengths(runs: Iterable[tuple[str, str, int]], remedy: str) -> None:
    """
    :param runs: environment, algorithm and number of steps of each run
    :param remedy: what the user can do about it
    :raises StudyError: if runs on one environment have different numbers of steps, since reports do not compare them
    """
    algorithms: dict[str, dict[int, set[str]]] = defaultdict(lambda: defaultdict(set))
    for env_id, algorithm, steps in runs:
        algorithms[env_id][steps].add(algorithm)
    for env_id, of in algorithms.items():
        if len(of) > 1:
            listed = " and ".join(f"{steps:,} ({', '.join(sorted(of[steps]))})" for steps in sorted(of))
            raise StudyError(
                f"reports do not compare runs of different length: on {env_id} they have {listed} steps; {remedy}"
            )


@dataclass(frozen=True, eq=False)
class RunSpec:
    """
    What determines the results of a run: two runs with the same key have the same results.

    :param algo: name that RL Zoo knows, such as ``"uatrpo"`` or ``"ppo"``
    :param env_id: Gymnasium's name of the environment
    :param seed: seed of the run, at least 0
    :param n_timesteps: steps to learn for, over all environments of the run
    :param variant: how the run differs from the algorithm's settings: a name without ``=``, or varied values such as
        ``"noise=1"``, or both, separated by a comma; ``""`` if not at all
    :param hyperparameters: as in RL Zoo's YAML files, with all overrides, without ``n_timesteps``; JSON values
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
        """:return: the fields as in a record's file, where ``hyperparameters`` is called ``settings``"""
        return {"settings" if name == "hyperparameters" else name: value for name, value in asdict(self).items()}

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> "RunSpec":
        """:return: the specification of which ``to_json`` returned the content"""
        return cls(**{"hyperparameters" if name == "settings" else name: value for name, value in content.items()})

    def key(self) -> str:
        """:return: ten hexadecimal digits of a hash over all fields; the order of hyperparameters does not matter"""
        canonical = json.dumps(self.to_json(), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(canonical.encode()).hexdigest()[:10]

    # Compared by key, as on disk: 1 and 1.0 make different runs, a tuple and a list the same one

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RunSpec) and self.key() == other.key()

    def __hash__(self) -> int:
        return hash(self.key())

    @property
    def variant_name(self) -> str:
        """:return: the name of the variant, ``""`` if it has none"""
        name, _, _ = self.variant.partition(",")
        return "" if "=" in name else name

    @property
    def varied(self) -> list[str]:
        """:return: the varied values, such as ``["noise=1", "net_arch=[64, 64]"]``"""
        # the comma within a value is followed by a space
        parts = re.split(r",(?! )", self.variant)
        return parts[1:] if self.variant_name else list(filter(None, parts))

    def __str__(self) -> str:
        variant = f" ({self.variant})" if self.variant else ""
        return f"{self.algo}{variant} on {self.env_id}, seed {self.seed}"

    @property
    def file_name(self) -> str:
        """:return: name of the record's file, valid on every file system"""
        parts = [self.algo, self.env_id, self.variant, f"s{self.seed}"]
        stem = "_".join(re.sub(r"[^\w.=-]+", "-", part.translate(ASCII)) for part in parts if part)
        # the key alone makes it unique
        return f"{stem.encode()[:LONGEST_STEM].decode(errors='ignore')}_{self.key()}.json.gz"


@dataclass(frozen=True)
class Record:
    """
    The result of a run.

    :param spec: what was run
    :param status: ``"done"`` or ``"failed"``
    :param traceback: what went wrong, ``None`` if nothing did
    :param episodes: training episodes in the order in which they ended: ``"timesteps"`` at the end (over all
        environments of the run), ``"returns"`` (undiscounted, before normalisation) and ``"lengths"`` (steps); where
        the environment reports it, ``"is_success"``: 1, 0, or ``None`` for an episode that did not report it; each of
        shape ``(n_episodes,)``
    :param evaluations: deterministic evaluations: ``"timesteps"``, shape ``(n_evaluations,)``, and ``"returns"``,
        shape ``(n_evaluations, n_eval_episodes)``; where the environment reports it, ``"is_success"``, of that shape
    :param updates: ``"timesteps"`` before each update, and the values that it logged under ``train/``, by name without
        the prefix, ``None`` where a value is missing or not finite; each of shape ``(n_updates,)``
    :param versions: versions of Python and of the packages that affect the numbers, by name
    :param machine: properties of the machine, by name
    :param wall_time: seconds that the run took, including the import of RL Zoo and the creation of the environment
    :param started: start of the run in UTC, in ISO 8601
    """

    spec: RunSpec
    status: str
    traceback: str | None
    episodes: Table = field(default_factory=lambda: {"timesteps": [], "returns": [], "lengths": []})
    evaluations: Table = field(default_factory=lambda: {"timesteps": [], "returns": []})
    updates: Table = field(default_factory=lambda: {"timesteps": []})
    versions: dict[str, str] = field(default_factory=dict)
    machine: dict[str, str] = field(default_factory=dict)
    wall_time: float = 0.0
    started: str = ""

    @property
    def reason(self) -> str:
        """:return: the first line of the error that ended the run, ``""`` if none did"""
        lines = (self.traceback or "").partition(OUTPUT_HEADING)[0].splitlines()
        # the error follows the last frame; its further lines and the run's output say less
        frames = [i for i, line in enumerate(lines) if line.startswith('  File "')]
        after = lines[frames[-1] + 1 :] if frames else lines
        return next((line for line in after if line.strip() and not line.startswith(" ")), "")

    def without_series(self) -> "Record":
        """:return: a copy without the episodes, evaluations and updates, which make a record large"""
        return replace(self, episodes={}, evaluations={}, updates={})


def write_record(record: Record, folder: str | os.PathLike[str]) -> Path:
    """
    Write a record. Concurrent readers, and readers after a crash, see the old file or the new one.

    :param record: what to write; the numbers of its series are rounded to six significant digits
    :return: the file in the folder, which is created if missing, named after ``record.spec``
    :raises StudyError: if the record does not match the schema
    """
    content = {"format": FORMAT, "key": record.spec.key(), **vars(record), "spec": record.spec.to_json()}
    content |= {name: _rounded(content[name]) for name in SERIES}
    path = Path(folder) / record.spec.file_name
    try:
        check_schema(content, SCHEMA)
    except ValueError as error:
        raise StudyError(f"{path} is not written: {error}") from error
    text = json.dumps(content, allow_nan=False, separators=(",", ":")) + "\n"
    # without the time, so that equal records are equal files
    write_atomically(path, gzip.compress(text.encode(), mtime=0))
    return path


def write_atomically(path: Path, data: bytes) -> None:
    """Write or replace a file, and create its folder. Readers see the old content or the new one, never a part."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        with open(temporary, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def read_record(path: str | os.PathLike[str]) -> Record:
    """
    :param path: a file that ``write_record`` wrote
    :return: its record
    :raises StudyError: naming the file, if it cannot be read, is truncated, or is not a valid record
    """
    try:
        with gzip.open(path) as file:
            text = file.read(MAX_SIZE)
            if file.read(1):
                raise ValueError(f"its text is longer than {MAX_SIZE} bytes")
        content = json.loads(text)
        check_schema(content, SCHEMA)
        spec = RunSpec.from_json(content["spec"])
        if spec.key() != content["key"]:
            raise ValueError(f"its key {content['key']!r} does not match its specification")
        for name in SERIES:
            if len({len(values) for values in content[name].values()}) > 1:
                raise ValueError(f"its {name} are not lists of equal length")
        if any(later < earlier for earlier, later in pairwise(content["episodes"]["timesteps"])):
            raise ValueError("the timesteps of its episodes do not ascend")
    # what gzip raises is among them, and deeply nested lists raise a RecursionError
    except (OSError, EOFError, zlib.error, ValueError, RecursionError) as error:
        raise StudyError(f"{path}: {' '.join(str(error).split())}") from error
    content["episodes"]["returns"] = _with_nan(content["episodes"]["returns"])
    content["evaluations"] = {name: _with_nan(values) for name, values in content["evaluations"].items()}
    return Record(**{of.name: content[of.name] for of in fields(Record)} | {"spec": spec})


def read_records(folder: str | os.PathLike[str], series: bool = True) -> tuple[list[Record], LeftOut]:
    """
    :return: the records in a folder, with their series if wanted, sorted by file name, and (path, reason) of each file
        that is not a record or is a copy of one under another name
    :raises StudyError: if there is no such folder
    """
    if not Path(folder).is_dir():
        raise StudyError(f"{folder}: no such folder")
    records, bad = [], []
    for path in sorted(Path(folder).glob("[!.]*.json*")):
        try:
            record = read_record(path)
        except StudyError as error:
            bad.append((path, str(error).removeprefix(f"{path}: ")))
            continue
        # a run counts only once
        if path.name == record.spec.file_name:
            records.append(record if series else record.without_series())
        else:
            bad.append((path, f"a copy: the file of this record is called {record.spec.file_name}"))
    return records, bad


def each_run_once(records: Iterable[Record]) -> list[Record]:
    """
    :return: one record of each run: a finished one if there is one, a study's rather than RL Zoo's, which has no values
        of updates and other evaluations; otherwise the first
    """
    kept: dict[RunSpec, Record] = {}
    for record in records:
        other = kept.setdefault(record.spec, record)
        if _worth(record) > _worth(other):
            kept[record.spec] = record
    return list(kept.values())


def _worth(record: Record) -> tuple[bool, bool]:
    return record.status == "done", bool(record.updates.get("timesteps"))


def _rounded(series: Table) -> Table:
    """Floats to six significant digits, and ``None`` for NaN and infinity, which JSON does not have."""

    def rounded(digits: str) -> float:
        return float(f"{float(digits):.{SIGNIFICANT_DIGITS}g}")

    return json.loads(json.dumps(series), parse_float=rounded, parse_constant=lambda name: None)


def _with_nan(values: Any) -> Any:
    if isinstance(values, list):
        return [_with_nan(value) for value in values]
    return math.nan if values is None else values


def check_schema(content: Any, schema: dict[str, Any]) -> None:
    """:raises ValueError: if the content of a JSON or YAML file does not match the JSON Schema, naming the place"""
    from jsonschema import Draft202012Validator

    problem = next(Draft202012Validator(schema).iter_errors(content), None)
    if problem:
        # the message begins with what was found, of any length, and ends with what was expected
        raise ValueError(f"{problem.json_path}: {problem.message[-150:]}".lstrip("$.: "))


def _object(optional: dict[str, Any] | None = None, **properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties | (optional or {}), "required": list(properties)}


TEXT = {"type": "string"}
TEXTS = {"type": "object", "additionalProperties": TEXT}
COUNT = {"type": "integer", "minimum": 0}
INTEGERS = {"type": "array", "items": {"type": "integer"}}
# a number that was not finite is written as null
NUMBERS = {"type": "array", "items": {"type": ["number", "null"]}}
ROWS = {"type": "array", "items": NUMBERS | {"minItems": 1}}

SCHEMA = _object(
    format={"const": FORMAT},
    key=TEXT,
    spec=_object(
        **dict.fromkeys(("algo", "env_id", "variant"), TEXT),
        **dict.fromkeys(("seed", "eval_freq", "n_eval_episodes"), COUNT),
        n_timesteps={"type": "integer", "minimum": 1},
        settings={"type": "object"},
    )
    # elsewhere, records of a later release may have more properties, but here one more would change the key
    | {"additionalProperties": False},
    status={"enum": ["done", "failed"]},
    traceback={"type": ["string", "null"]},
    episodes=_object({"is_success": NUMBERS}, timesteps=INTEGERS, returns=NUMBERS, lengths=INTEGERS),
    evaluations=_object({"is_success": ROWS}, timesteps=INTEGERS, returns=ROWS),
    # an algorithm may log anything; a report reads these
    updates=_object(timesteps=INTEGERS)
    | {"patternProperties": {"^kl_(ratio|proposed)$": NUMBERS}, "additionalProperties": {"type": "array"}},
    versions=TEXTS,
    machine=TEXTS,
    wall_time={"type": "number"},
    started=TEXT,
)
