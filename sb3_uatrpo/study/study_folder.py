"""The folder of a study: ``study.json``, which tells it apart from other folders, ``records/``, and ``models/``."""

import json
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from sb3_uatrpo.study.record import (
    Record,
    RunSpec,
    StudyError,
    read_record,
    read_records,
    write_atomically,
    write_record,
)

MARKER = "study.json"
# of the folder; records have their own
FORMAT = 1

# The content of files by relative path
Files = dict[str, bytes]


class StudyFolder:
    """
    :param path: a study's folder
    :param create: whether to make it one, if it is empty or not there
    :raises StudyError: if it is not the folder of a study
    :raises OSError: if there is no place for records
    """

    def __init__(self, path: str | os.PathLike[str], create: bool = False) -> None:
        self.path = Path(path)
        self.records_path = self.path / "records"
        marker = self.path / MARKER
        try:
            # what begins with a dot may be the marker of another driver, half-way
            if create and not marker.exists() and not any(self.path.glob("[!.]*")):
                write_atomically(marker, json.dumps({"format": FORMAT}) + "\n")
            content = json.loads(marker.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise StudyError(f"{self.path} is not the folder of a study, for want of a {MARKER}: {error}") from error
        if not isinstance(content, dict) or content.get("format") != FORMAT:
            raise StudyError(f"{self.path} is a study of another format than {FORMAT}, the one that this version reads")
        if create:
            self.records_path.mkdir(exist_ok=True)

    def read_all(self, series: bool = True) -> tuple[list[Record], list[tuple[Path, str]]]:
        """:return: what ``read_records`` returns"""
        return read_records(self.records_path, series)

    def read(self, spec: RunSpec) -> Record | None:
        """:return: the record of a run, ``None`` if there is none that can be read"""
        try:
            record = read_record(self.records_path / spec.file_name)
        except StudyError:
            return None
        # not what somebody has copied there
        return record if record.spec == spec else None

    def write(self, record: Record) -> Path:
        """:return: the record's file"""
        return write_record(record, self.records_path)

    def write_model(self, spec: RunSpec, files: Files) -> None:
        """
        :param spec: a run
        :param files: what RL Zoo's ``enjoy`` needs of it, in the layout of its log folder; nothing is written of none
        """
        for name, content in files.items():
            path = self.model_path(spec) / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)

    def model_path(self, spec: RunSpec) -> Path:
        """:return: where what a run learned is, if it was kept"""
        return self.path / "models" / Path(spec.file_name).stem

    @contextmanager
    def claims(self) -> Iterator["Claims"]:
        """:return: for the time of the context, the means to keep other drivers off a run"""
        claims = Claims(self.path / "locks")
        try:
            yield claims
        finally:
            claims.release_all()


def merge_studies(sources: Sequence[StudyFolder], target: StudyFolder) -> tuple[int, list[tuple[Path, str]]]:
    """
    Copy records into one study, with the models that were kept. Of two of the same run, one that is done beats one that
    failed, and then the one in the target stays, or the first that comes.

    :param sources: studies to copy from, left as they are
    :param target: study to copy to
    :return: the number of records copied, and (path, reason) of each file in the sources that holds no record
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
    Runs that this driver has under way. The operating system drops a claim with the process that holds it, so that
    a driver that was killed leaves nothing to clean up.

    :param folder: where the lock files are while they are needed; made if it is not there, and left for other drivers
    """

    def __init__(self, folder: Path) -> None:
        from filelock import FileLock

        folder.mkdir(exist_ok=True)
        self.folder = folder
        self.held: dict[RunSpec, FileLock] = {}

    def take(self, spec: RunSpec) -> bool:
        """:return: whether nobody else has the run under way"""
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
        :param spec: a run that was taken. Whoever takes it next has to look for its record.
        """
        lock = self.held.pop(spec)
        # before the release, so that the file of another driver's claim is not the one that goes
        with suppress(OSError):
            os.unlink(lock.lock_file)
        lock.release()

    def release_all(self) -> None:
        """Let go of everything."""
        for spec in list(self.held):
            self.release(spec)
