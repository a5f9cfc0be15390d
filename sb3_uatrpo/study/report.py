"""The report of a study: records in, one Markdown file and its pictures out."""

import os
from pathlib import Path

from sb3_uatrpo.study.errors import StudyError
from sb3_uatrpo.study.groups import group_records, in_order
from sb3_uatrpo.study.markdown import markdown
from sb3_uatrpo.study.record import Record
from sb3_uatrpo.study.results import Pair, Results, pairs_of
from sb3_uatrpo.study.study_folder import MARKER, StudyFolder
from sb3_uatrpo.study.zoo_folder import find_runs, read_zoo_folder


def report(
    folder: str | os.PathLike[str],
    output: str | os.PathLike[str],
    algorithms: Pair | None = None,
    kappa: float = 0.2,
    separate_settings: bool = False,
) -> Path:
    """
    Write ``report.md`` and its pictures, PNG and SVG.

    :param folder: a study's folder, or one that RL Zoo wrote itself
    :param output: where to write, made if it is not there
    :param algorithms: the two labels that are compared, the first minus the second. By default ``uatrpo`` is compared
        with every other one, and without it each with each.
    :param kappa: the share of worst runs in tables and over training, in (0, 1]
    :param separate_settings: whether runs of one algorithm with different settings are told apart, not refused
    :return: the report's path
    :raises StudyError: if the folder is neither, holds no run that is done, or holds runs that may not be averaged; if
        ``algorithms`` or ``kappa`` cannot be
    """
    if not 0 < kappa <= 1:
        raise StudyError(f"kappa must be in (0, 1], but it is {kappa}")
    records, unreadable = read_folder(folder)
    if not records:
        reasons = f" ({len(unreadable)} unreadable, the first: {unreadable[0][1]})" if unreadable else ""
        raise StudyError(f"{folder}: no records{reasons}")
    groups = group_records(records, separate_settings)
    if not any(group.records for group in groups):
        raise StudyError(
            f"{folder}: no run is done and has a training return; of {len(records)}, all failed or have none"
        )
    labels = in_order(group.label for group in groups if group.records)
    results = Results(Path(folder), tuple(groups), tuple(unreadable), pairs_of(labels, algorithms), kappa)

    # matplotlib takes a second to import, and bad input should not
    from sb3_uatrpo.study.pictures import draw_pictures

    output = Path(output)
    output.mkdir(parents=True, exist_ok=True)
    pictures = draw_pictures(results, output)
    path = output / "report.md"
    path.write_text(markdown(results, pictures), encoding="utf-8")
    return path


def read_folder(folder: str | os.PathLike[str]) -> tuple[list[Record], list[tuple[Path, str]]]:
    """
    :param folder: a study's folder, or one that RL Zoo wrote itself
    :return: records, and (path, reason) of what cannot be read
    :raises StudyError: if the folder is neither
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise StudyError(f"{folder}: no such folder")
    if (folder / MARKER).exists():
        return StudyFolder(folder).read_all()
    if find_runs(folder):
        return read_zoo_folder(folder)
    raise StudyError(
        f"{folder}: neither a study (no study.json) nor a folder that RL Zoo wrote (no ALGO/ENV_1/ENV/args.yml)"
    )
