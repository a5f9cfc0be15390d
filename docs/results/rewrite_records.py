"""
Rewrite records of format 1 in the format of today: the same values, with packed columns.

    python docs/results/rewrite_records.py docs/results

Records of today's format stay as they are, so it may be run again.
"""

import json
import sys
import tempfile
from pathlib import Path

from sb3_uatrpo.study.record import FORMAT, read_record, write_record


def rewrite(path: Path) -> bool:
    """
    :param path: the file of a record
    :return: whether it had format 1
    """
    content = json.loads(path.read_text(encoding="utf-8"))
    if content["format"] != 1:
        return False
    # format 1 differs only in that it has no packed columns, and these are optional
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / path.name
        copy.write_text(json.dumps({**content, "format": FORMAT}), encoding="utf-8")
        record = read_record(copy)
    if record.spec.file_name != path.name:
        raise ValueError(f"{path}: its name does not follow from its specification")
    before = {name: content[name] for name in ("status", "traceback", "episodes", "evaluations", "updates")}
    written = read_record(write_record(record, path.parent))
    # NaN, which JSON holds as null, is not equal to itself
    if json.loads(json.dumps({name: getattr(written, name) for name in before}).replace("NaN", "null")) != before:
        raise ValueError(f"{path}: its values have changed")
    return True


if __name__ == "__main__":
    paths = [path for folder in sys.argv[1:] for path in sorted(Path(folder).glob("**/records/*.json"))]
    print(f"{sum(map(rewrite, paths))} of {len(paths)} records rewritten")
