"""
Folders with runs.

* A study's: the marker ``study.json``, ``records/``, ``models/`` and ``locks/``.
* RL Zoo's logs: ``logs/ALGO/ENV_1/`` with ``0.monitor.csv``, ``evaluations.npz``, ``ENV/config.yml`` and
  ``ENV/args.yml``. They hold no ``train/`` values, so their records have no KL ratio.
"""

import json
import os
import shutil
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

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

# Arguments of rl_zoo3.train that affect a run's numbers, besides those in config.yml
ARGUMENTS = ("env_kwargs", "eval_env_kwargs", "trained_agent")

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
        """
        :param series: whether to keep the series, which make records large
        :return: the records, and (path, reason) of each file that is not a valid record, as from ``read_records``
        """
        return read_records(self.records_path, series)

    def read(self, spec: RunSpec) -> Record | None:
        """
        :param spec: a run
        :return: its record, ``None`` if there is no readable one
        """
        try:
            record = read_record(self.records_path / spec.file_name)
        except StudyError:
            return None
        # not a copy of another run's record
        return record if record.spec == spec else None

    def write(self, record: Record) -> Path:
        """
        :param record: what to write; it replaces the record of the same run
        :return: the record's file
        """
        return write_record(record, self.records_path)

    def write_model(self, spec: RunSpec, files: Files) -> None:
        """
        :param spec: a run
        :param files: the files that RL Zoo's ``enjoy`` needs, in the layout of RL Zoo's log folder; may be empty
        """
        for name, content in files.items():
            path = self.model_path(spec) / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)

    def model_path(self, spec: RunSpec) -> Path:
        """
        :param spec: a run
        :return: the folder of its model, if the model was saved
        """
        return self.path / "models" / Path(spec.file_name).stem

    @contextmanager
    def claims(self) -> Iterator["Claims"]:
        """:return: a context manager that gives claims on runs and releases them at the end"""
        claims = Claims(self.path / "locks")
        try:
            yield claims
        finally:
            for spec in list(claims.held):
                claims.release(spec)


def read_folder(folder: str | os.PathLike[str]) -> tuple[list[Record], list[tuple[Path, str]]]:
    """
    :param folder: a study's folder, or RL Zoo's log folder
    :return: records, and (path, reason) of each file that cannot be read
    :raises StudyError: if ``folder`` is neither
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise StudyError(f"{folder}: no such folder")
    if (folder / MARKER).exists():
        return StudyFolder(folder).read_all()
    records, unreadable = read_zoo_folder(folder)
    if not records and not unreadable:
        raise StudyError(
            f"{folder}: neither a study (no study.json) nor a folder that RL Zoo wrote (no ALGO/ENV_1/ENV/args.yml)"
        )
    return records, unreadable


def merge_studies(sources: Sequence[StudyFolder], target: StudyFolder) -> tuple[int, list[tuple[Path, str]]]:
    """
    Copy records, with their models, into one study. If there are several records of the same run, one that is done is
    preferred to one that failed; otherwise the target's record is kept, or that of the first source.

    :param sources: studies to copy from
    :param target: study to copy to
    :return: the number of records copied, and (path, reason) of each unreadable record in the sources
    """
    n_copied, bad = 0, []
    for source in sources:
        records, unreadable = source.read_all(series=False)
        bad += unreadable
        for record in records:
            present = target.read(record.spec)
            if present is None or (present.status, record.status) == ("failed", "done"):
                if source.model_path(record.spec).is_dir():
                    shutil.copytree(source.model_path(record.spec), target.model_path(record.spec), dirs_exist_ok=True)
                # the text itself, since a record of a later release may have more in it
                text = (source.records_path / record.spec.file_name).read_text(encoding="utf-8")
                write_atomically(target.records_path / record.spec.file_name, text)
                n_copied += 1
    return n_copied, bad


class Claims:
    """
    Claims on the runs that this driver has under way, so that other drivers leave them alone. The operating system
    releases the claims of a process that dies, so a killed driver leaves nothing to clean up.

    :param folder: folder of the lock files; created if missing, and not removed, since other drivers may use it
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir(exist_ok=True)
        self.folder = folder
        self.held: dict[RunSpec, FileLock] = {}

    def take(self, spec: RunSpec) -> bool:
        """
        :param spec: a run
        :return: whether the run is now claimed; ``False`` if another driver has it under way
        """
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
        # before the release: afterwards, the file might belong to another driver's claim
        with suppress(OSError):
            os.unlink(lock.lock_file)
        lock.release()


# ------------------------------------------------------------------------------------------------- RL Zoo's log folders


def find_runs(folder: Path) -> list[Path]:
    """
    :param folder: RL Zoo's log folder, or that of an algorithm or a run in it
    :return: the folders of its runs, sorted
    """
    levels = ("*/args.yml", "*/*/args.yml", "*/*/*/args.yml")
    return sorted({arguments.parents[1] for level in levels for arguments in folder.glob(level)})


def read_zoo_folder(folder: Path) -> tuple[list[Record], list[tuple[Path, str]]]:
    """
    :param folder: RL Zoo's log folder, or that of an algorithm or a run in it
    :return: records, and (path, reason) of run folders that cannot be read or that repeat another one. An unfinished
        run has status ``"failed"``.
    """
    records: dict[RunSpec, tuple[Record, Path]] = {}
    bad = []
    for run in find_runs(folder):
        try:
            record = _read_run(run)
            # settings that JSON cannot hold have none
            record.spec.key()
        # a truncated or foreign file may raise anything; the report names it
        except Exception as error:
            bad.append((run, f"{type(error).__name__}: {error}".splitlines()[0]))
            continue
        other, where = records.get(record.spec, (None, run))
        if other is not None and other.status == record.status == "done":
            bad.append((run, f"the same run as {where.name}: equal settings and seed"))
        elif other is None or record.status == "done":
            records[record.spec] = (record, run)
    return [record for record, _ in records.values()], bad


def _read_run(run: Path) -> Record:
    import pandas as pd

    (arguments_file,) = run.glob("*/args.yml")
    arguments = _read_yaml(arguments_file)
    hyperparameters = _read_yaml(arguments_file.with_name("config.yml"))
    hyperparameters |= {name: arguments[name] for name in ARGUMENTS if arguments.get(name)}
    configured = hyperparameters.pop("n_timesteps")
    n_timesteps = int(arguments["n_timesteps"] if arguments["n_timesteps"] > 0 else configured)

    headers, frames = [], []
    monitors = sorted(run.glob("*monitor.csv"))
    if not monitors:
        raise FileNotFoundError("no monitor.csv")
    for monitor in monitors:
        with monitor.open() as lines:
            headers.append(json.loads(lines.readline().removeprefix("#")))
            # a line that was being written has too few fields; a return may be NaN
            columns = {"r": float, "l": float, "t": float}
            frame = pd.read_csv(lines, usecols=list(columns), dtype=columns).dropna(subset=["l", "t"])
        # environments step together: n steps of one are n of each
        frames.append(frame.assign(timesteps=frame["l"].cumsum() * len(monitors)))
    episodes = pd.concat(frames).sort_values("timesteps", kind="stable")

    evaluations: dict[str, list[Any]] = {"timesteps": [], "returns": []}
    if (run / "evaluations.npz").exists():
        with np.load(run / "evaluations.npz", allow_pickle=False) as data:
            evaluations = {"timesteps": data["timesteps"].tolist(), "returns": data["results"].tolist()}
            # Stable-Baselines3 lists only the episodes that reported whether they succeeded
            if "successes" in data and data["successes"].shape == data["results"].shape:
                evaluations["is_success"] = data["successes"].astype(float).tolist()

    model = run / f"{arguments_file.parent.name}.zip"
    # RL Zoo saves the model when the run ends, early or not
    taken = _steps_taken(model) if model.exists() else None
    counted = int(episodes["timesteps"].max()) if len(episodes) else 0
    reason = None
    if taken is None:
        reason = f"no {model.name}: the run was killed, or is under way"
    elif taken < n_timesteps:
        reason = f"stopped after {taken:,} of {n_timesteps:,} steps"
    elif counted > taken:
        raise ValueError(
            f"its monitor files count {counted:,} steps, but {taken:,} were taken: a wrapper around Monitor repeats "
            "steps, so it is not known when episodes ended"
        )
    started = min(header["t_start"] for header in headers)
    return Record(
        spec=RunSpec(
            algo=arguments["algo"],
            env_id=arguments["env"],
            seed=int(arguments["seed"]),
            n_timesteps=n_timesteps,
            variant="",
            hyperparameters=hyperparameters,
            eval_freq=max(0, int(arguments["eval_freq"])),
            n_eval_episodes=int(arguments["eval_episodes"]),
        ),
        status="failed" if reason else "done",
        traceback=reason,
        episodes={
            "timesteps": episodes["timesteps"].astype(int).tolist(),
            "returns": episodes["r"].astype(float).tolist(),
            "lengths": episodes["l"].astype(int).tolist(),
        },
        evaluations=evaluations,
        updates={"timesteps": []},
        versions={},
        machine={},
        wall_time=float(episodes["t"].max()) if len(episodes) else 0.0,
        started=datetime.fromtimestamp(started, timezone.utc).isoformat(timespec="seconds"),
    )


def _steps_taken(model: Path) -> int:
    with zipfile.ZipFile(model) as archive:
        return int(json.loads(archive.read("data"))["num_timesteps"])


def _read_yaml(path: Path) -> dict[str, Any]:
    """
    Read a file in which RL Zoo has dumped an OrderedDict. Tuples become lists, classes and functions their names, and
    other objects of Python the text that stands for them: nothing is constructed, imported or run.
    """
    import yaml

    class Loader(yaml.SafeLoader):
        pass

    tag = "tag:yaml.org,2002:python/object/apply:collections.OrderedDict"
    Loader.add_constructor(tag, lambda loader, node: dict(*loader.construct_sequence(node, deep=True)))
    Loader.add_constructor(
        "tag:yaml.org,2002:python/tuple", lambda loader, node: loader.construct_sequence(node, deep=True)
    )
    Loader.add_multi_constructor("tag:yaml.org,2002:python/name:", lambda loader, name, node: name)
    Loader.add_multi_constructor(
        "tag:yaml.org,2002:python/", lambda loader, name, node: f"{name} {yaml.serialize(node)}"
    )
    content = yaml.load(path.read_text(), Loader)
    if not isinstance(content, dict):
        raise ValueError(f"{path.name} holds no settings: {content}")
    return content
