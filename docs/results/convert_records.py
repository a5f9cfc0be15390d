"""Rewrites records of format 2, whose long columns are packed, as format 3. Run once, then removed."""

import base64
import json
import math
import sys
import zlib
from pathlib import Path

import numpy as np

from sb3_uatrpo.study.record import Record, RunSpec, read_record, write_record

TYPES = {"float32": np.dtype("<f4"), "delta-int64": np.dtype("<i8")}


def unpack(column):
    if isinstance(column, list):
        return column
    dtype, length = TYPES[column["encoding"]], column["length"]
    content = zlib.decompress(base64.b64decode(column["data"]))
    numbers = np.frombuffer(content, np.uint8).reshape(dtype.itemsize, length).T.copy().view(dtype)[:, 0]
    if dtype.kind == "i":
        return np.cumsum(numbers).tolist()
    return [None if math.isnan(value) else float(f"{value:.6g}") for value in numbers.tolist()]


for path in [path for folder in sys.argv[1:] for path in sorted(Path(folder).rglob("records/*.json"))]:
    content = json.loads(path.read_text(encoding="utf-8"))
    del content["format"], content["key"]
    for name in ("episodes", "updates"):
        content[name] = {key: unpack(column) for key, column in content[name].items()}
    spec = RunSpec.from_json(content.pop("spec"))
    written = write_record(Record(spec=spec, **content), path.parent)
    again = read_record(written)
    assert again.spec == spec, path
    assert again.updates == content["updates"], path
    assert json.dumps(again.episodes).replace("NaN", "null") == json.dumps(content["episodes"]), path
    path.unlink()
