"""The folder of a study: the marker ``study.json``, ``records/``, ``models/`` and ``locks/``."""

import json
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from sb3_uatrpo.study.record import (
    Record,
    RunSpec,
    StudyError,
    read_record,
    read_records,
    write_atomically,
    write_record,
)

if TYPE_CHECKING:
    from filelock import FileLock

MARKER = "study.json"
# Format of the folder; records have their own
FORMAT = 1

# Contents of files by relative path
Files = dict[str, bytes]


class StudyFolder:
    """
    :param path: a study's folder
    :param create: whether to turn a missing or empty folder into one
    :raises StudyError: if it is not the folder of a study
    :raises OSError: if records cannot be written there
    """

    def __init__(self, path: str | os.PathLike[str], create: bool = False) -> None:
        self.path = Path(path)
        self.records_path = self.path / "records"
        marker = self.path / MARKER
        try:
            # another driver may be writing its marker, to a file that begins with a dot
            if create and not marker.exists() and not any(self.path.glob("[!.]*")):
                write_atomically(marker, json.dumps({"format": FORMAT}) + "\n")
            content = json.loads(marker.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise StudyError(f"{self.path} is not the folder of a study (no readable {MARKER}): {error}") from error
        if not isinstance(content, dict) or content.get("format") != FORMAT:
            raise StudyError(f"{self.path} is a study of another format; this version reads format {FORMAT}")
        if create:
            self.records_path.mkdir(exist_ok=True)

    def read_all(self, series: bool = True) -> tuple[list[Record], list[tuple[Path, str]]]:
        """:return: what ``read_records`` returns"""
        return read_records(self.records_path, series)

    def read(self, spec: RunSpec) -> Record | None:
        """:return: the record of a run, ``None`` if there is no readable one"""
        try:
            record = read_record(self.records_path / spec.file_name)
        except StudyError:
            return None
        # not a copy of another run's record
        return record if record.spec == spec else None

    def write(self, record: Record) -> Path:
        """:return: the record's file"""
        return write_record(record, self.records_path)

    def write_model(self, spec: RunSpec, files: Files) -> None:
        """
        :param spec: a run
        :param files: what RL Zoo's ``enjoy`` needs of it, in the layout of its log folder; may be empty
        """
        for name, content in files.items():
            path = self.model_path(spec) / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)

    def model_path(self, spec: RunSpec) -> Path:
        """:return: where a run's model is, if it was saved"""
        return self.path / "models" / Path(spec.file_name).stem

    @contextmanager
    def claims(self) -> Iterator["Claims"]:
        """:return: within the context, claims on runs; they are released at its end"""
        claims = Claims(self.path / "locks")
        try:
            yield claims
        finally:
            for spec in list(claims.held):
                claims.release(spec)


def merge_studies(sources: Sequence[StudyFolder], target: StudyFolder) -> tuple[int, list[tuple[Path, str]]]:
    """
    Copy records, with their models, into one study. Of two records of the same run, one that is done is preferred to
    one that failed; otherwise the one in the target stays, or the first source's.

    :param sources: studies to copy from
    :param target: study to copy to
    :return: the number of records copied, and (path, reason) of each unreadable record in the sources
    """
    n_copied, bad = 0, []
    for source in sources:
        records, unreadable = source.read_all()
        bad += unreadable
        for record in records:
            present = target.read(record.spec)
            if present is None or (present.status, record.status) == ("failed", "done"):
                if source.model_path(record.spec).is_dir():
                    shutil.copytree(source.model_path(record.spec), target.model_path(record.spec), dirs_exist_ok=True)
                target.write(record)
                n_copied += 1
    return n_copied, bad


class Claims:
    """
    Claims on the runs that this driver has under way, which keep other drivers off them. The operating system releases
    the claims of a process that dies, so that a killed driver leaves nothing to clean up.

    :param folder: of the lock files; created if missing, and left for other drivers
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir(exist_ok=True)
        self.folder = folder
        self.held: dict[RunSpec, FileLock] = {}

    def take(self, spec: RunSpec) -> bool:
        """:return: whether the run is now claimed; not if another driver has it under way"""
        from filelock import FileLock, Timeout

        lock = FileLock(self.folder / f"{spec.file_name}.lock")
        try:
            lock.acquire(blocking=False)
        except Timeout:
            return False
        self.held[spec] = lock
        return True

    def release(self, spec: RunSpec) -> None:
        """
        :param spec: a claimed run. Whoever claims it next has to look for its record.
        """
        lock = self.held.pop(spec)
        # before the release: afterwards, it might be the file of another driver's claim
        with suppress(OSError):
            os.unlink(lock.lock_file)
        lock.release()
