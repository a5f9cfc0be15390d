"""The reader of version 0.1's records, which nothing writes any more: one compressed JSON file for each run."""

import gzip
import hashlib
import json
import os
from pathlib import Path
from typing import Any

import numpy as np

from sb3_uatrpo.study.plan import StudyError
from sb3_uatrpo.study.tables import LeftOut, Part, Study, collect, read_evaluations, series

FORMAT = 3
# Columns that have another name today
NAMES = {"timesteps": "step", "returns": "return", "lengths": "length"}


def read_records(folder: str | os.PathLike[str]) -> Study:
    """:return: the tables of a folder of records, such as ``benchmarks/results/paper/records``"""
    if not Path(folder).is_dir():
        raise StudyError(f"{folder}: no such folder")
    return collect(*read_parts(Path(folder)))


def read_parts(folder: Path) -> tuple[list[Part], LeftOut]:
    """:return: what ``collect`` takes, and (path, reason) of files that cannot be read"""
    parts: list[Part] = []
    bad: LeftOut = []
    for path in sorted(folder.glob("[!.]*.json*")):
        try:
            parts.append(_read(path))
        # a truncated or foreign file may raise anything; the report names it
        except Exception as error:
            bad.append((path, f"{type(error).__name__}: {' '.join(str(error).split())[-150:]}"))
    return parts, bad


def _read(path: Path) -> Part:
    record = json.loads(gzip.decompress(path.read_bytes()))
    spec = record["spec"]
    canonical = json.dumps(spec, sort_keys=True, separators=(",", ":"))
    if record["format"] != FORMAT or hashlib.sha256(canonical.encode()).hexdigest()[:10] != record["key"]:
        raise ValueError("its format is another, or its key does not match its specification")
    row = {"algo": spec["algo"], "env": spec["env_id"], "hyperparameters": json.dumps(spec["settings"], sort_keys=True)}
    row |= {name: spec[name] for name in ("seed", "variant", "n_timesteps", "eval_freq", "n_eval_episodes")}
    error = "" if record["status"] == "done" else record["traceback"] or "failed"
    row |= {"error": error, "seconds": float(record["wall_time"]), "versions": json.dumps(record["versions"])}
    tables = {}
    for name in ("episodes", "updates"):
        tables[name] = series(name, {NAMES.get(of, of): _array(values) for of, values in record[name].items()})
    evaluated = [_array(record["evaluations"].get(name, [])) for name in ("timesteps", "returns", "is_success")]
    return row | {"folder": str(path)}, tables | {"evaluations": read_evaluations(*evaluated)}


def _array(values: list[Any]) -> np.ndarray:
    array = np.array(values)
    # ``None`` stands for a number that was not finite; an algorithm may also have logged text
    is_number = array.dtype == object and not any(isinstance(value, str) for value in values)
    return array.astype(np.float64) if is_number else array
