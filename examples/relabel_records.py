"""
Gives records the names that RL Zoo's algorithms have now.

    python examples/relabel_records.py docs/results/paper docs/results/first

Before, `uatrpo` was the paper's setting and `uatrpo_shrinkage` the one that today's `uatrpo` grew out of. They become
`uatrpo_paper`, and `uatrpo` with the variant `paper-batches`, so that no report averages them with today's `uatrpo`.
The rest of a record stays, except for its key, which covers the names, and its file name. Records that have today's
names stay as they are.
"""

import argparse
from dataclasses import replace
from pathlib import Path

from sb3_uatrpo.study import RunSpec, StudyError, read_records, write_record

VARIANT = "paper-batches"


def relabelled(spec: RunSpec) -> RunSpec:
    """:return: the specification under today's names; itself, if it has them already"""
    if spec.algo == "uatrpo_shrinkage":
        return replace(spec, algo="uatrpo", variant=",".join(filter(None, [VARIANT, spec.variant])))
    # today's setting takes the length of a step from target_kl
    if spec.algo == "uatrpo" and "target_kl" not in spec.hyperparameters:
        return replace(spec, algo="uatrpo_paper")
    return spec


def relabel(folder: Path) -> int:
    """
    :param folder: a study's folder
    :return: how many of its records were renamed
    :raises SystemExit: if one cannot be read; then none is changed
    """
    records, bad = read_records(folder / "records")
    if bad:
        raise SystemExit("\n".join(f"{path}: {reason}" for path, reason in bad))
    n_renamed = 0
    for record in records:
        spec = relabelled(record.spec)
        if spec != record.spec:
            write_record(replace(record, spec=spec), folder / "records")
            (folder / "records" / record.spec.file_name).unlink()
            n_renamed += 1
    return n_renamed


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="+", type=Path, help="folders of studies")
    for folder in parser.parse_args().folders:
        try:
            print(f"{folder}: {relabel(folder)} renamed")
        except StudyError as error:
            parser.error(str(error))
