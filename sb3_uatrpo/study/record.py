"""What is kept of a run: one small JSON file, whole or not there at all."""

import json
import math
import os
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sb3_uatrpo.study.columns import pack_table, round_float, unpack_table
from sb3_uatrpo.study.errors import StudyError
from sb3_uatrpo.study.record_schema import RECORD
from sb3_uatrpo.study.specification import RunSpec

if TYPE_CHECKING:
    from jsonschema.protocols import Validator

FORMAT = 2
# Format 1 had no packed columns
READ_FORMATS = (1, 2)
SERIES = ("episodes", "evaluations", "updates")
# Evaluations are few
PACKED = ("episodes", "updates")
# Stands in a failed run's traceback before what the run itself printed
OUTPUT_HEADING = "\nThe last that it printed:\n"


@dataclass(frozen=True)
class Record:
    """
    What a run left.

    :param spec: what was run
    :param status: ``"done"`` or ``"failed"``
    :param traceback: what went wrong, ``None`` if nothing did
    :param episodes: training episodes in the order of their ends: ``"timesteps"`` at the end (over all environments
        of the run), ``"returns"`` (undiscounted, before any normalisation) and ``"lengths"`` (steps); each of
        shape ``(n_episodes,)``
    :param evaluations: deterministic evaluations: ``"timesteps"``, shape ``(n_evaluations,)``, and ``"returns"``,
        shape ``(n_evaluations, n_eval_episodes)``
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


def write_record(record: Record, folder: str | os.PathLike[str]) -> Path:
    """
    Write a record. Whoever reads at the same time, or after a crash in between, sees the old file or the new one.

    :param record: what to keep; numbers of its series are rounded to six significant digits
    :param folder: where to, made if it is not there
    :return: the file, whose name follows from ``record.spec``
    """
    content = {"format": FORMAT, "key": record.spec.key(), **asdict(record)}
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
    if not isinstance(content, dict) or content.get("format") not in READ_FORMATS:
        raise ValueError(f"not a record of format {' or '.join(map(str, READ_FORMATS))}, which this version reads")
    problem = next(_validator().iter_errors(content), None)
    if problem:
        # the message begins with what was found, however long it is, and ends with what was expected
        raise ValueError(f"{problem.json_path.removeprefix('$.')}: {problem.message[-150:]}")
    spec = RunSpec(**content["spec"])
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
    for name in ("episodes", "evaluations"):
        content[name]["returns"] = _with_nan(content[name]["returns"])
    return Record(**{field.name: content[field.name] for field in fields(Record)} | {"spec": spec})


@cache
def _validator() -> "Validator":
    from jsonschema import Draft202012Validator

    return Draft202012Validator(RECORD)


def _rounded(values: Any) -> Any:
    """Floats to six significant digits, and ``None`` for what JSON cannot write: NaN and infinity."""
    if isinstance(values, Mapping):
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
