"""
Folders with runs.

* A study's: the marker ``study.json``, ``records/``, ``models/``, and ``.lock``, which its driver holds.
* RL Zoo's logs: ``logs/ALGO/ENV_1/`` with ``0.monitor.csv``, ``evaluations.npz``, ``ENV/config.yml`` and
  ``ENV/args.yml``. They hold no ``train/`` values, so their records have no KL ratio.
"""

import json
import os
import zipfile
from collections import defaultdict
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import numpy as np

from sb3_uatrpo.study.record import (
    LeftOut,
    Record,
    RunSpec,
    StudyError,
    each_run_once,
    read_records,
    write_atomically,
    write_record,
)

MARKER = "study.json"
# Format of the folder; records have their own
FORMAT = 1
# Arguments of rl_zoo3.train that affect a run's numbers, besides those in config.yml
ARGUMENTS = ("env_kwargs", "eval_env_kwargs", "trained_agent")

# Contents of files by relative path
Files = Mapping[str, bytes]


class StudyFolder:
    """
    A study's folder; with ``create``, a missing or empty one is turned into one.

    :raises StudyError: if it is not the folder of a study
    :raises OSError: if records cannot be written there
    """

    def __init__(self, path: str | os.PathLike[str], create: bool = False) -> None:
        self.path = Path(path)
        self.records_path = self.path / "records"
        marker = self.path / MARKER
        # another driver may be writing its marker, to a file that begins with a dot
        if create and not marker.exists() and not any(self.path.glob("[!.]*")):
            try:
                write_atomically(marker, (json.dumps({"format": FORMAT}) + "\n").encode())
            except OSError as error:
                raise StudyError(f"{self.path} cannot become the folder of a study: {error}") from error
        try:
            content = json.loads(marker.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise StudyError(f"{self.path} is not the folder of a study (no readable {MARKER}): {error}") from error
        if not isinstance(content, dict) or content.get("format") != FORMAT:
            raise StudyError(f"{self.path} is a study of another format; this version reads format {FORMAT}")
        if create:
            self.records_path.mkdir(exist_ok=True)

    def lock(self) -> AbstractContextManager:
        """
        Keep other drivers away, by a lock that the operating system releases when this process ends, however it does.

        :raises StudyError: if another driver is at work in the folder
        """
        from filelock import FileLock, Timeout

        try:
            return FileLock(self.path / ".lock").acquire(blocking=False)
        except Timeout as error:
            raise StudyError(f"another driver is at work in {self.path}: a study has one at a time") from error

    def read_all(self, series: bool = True) -> tuple[list[Record], LeftOut]:
        """:return: the records, and (path, reason) of each file that is not a valid record, as from ``read_records``"""
        # the first run makes it, in a folder that was copied without its empty folders too
        return read_records(self.records_path, series) if self.records_path.is_dir() else ([], [])

    def write(self, record: Record, model: Files | None = None) -> Path:
        """:return: the file of the record; ``model`` are files for RL Zoo's ``enjoy``, as in RL Zoo's log folder"""
        for name, content in (model or {}).items():
            path = self.model_path(record.spec) / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
        return write_record(record, self.records_path)

    def model_path(self, spec: RunSpec) -> Path:
        """:return: the folder of a run's model, if the model was saved"""
        return self.path / "models" / spec.file_name.removesuffix(".json.gz")


def read_folder(*folders: str | os.PathLike[str]) -> tuple[list[Record], LeftOut]:
    """
    :param folders: studies' folders, or RL Zoo's log folders. A run that is in several counts once, as in
        ``each_run_once``.
    :return: records, and (path, reason) of each file that cannot be read
    :raises StudyError: if one is neither
    """
    records: list[Record] = []
    unreadable: LeftOut = []
    for folder in map(Path, folders):
        if not folder.is_dir():
            raise StudyError(f"{folder}: no such folder")
        is_study = (folder / MARKER).exists()
        found, bad = StudyFolder(folder).read_all() if is_study else read_zoo_folder(folder)
        if not is_study and not found and not bad:
            raise StudyError(
                f"{folder}: neither a study (no {MARKER}) nor a folder that RL Zoo wrote (no ALGO/ENV_1/ENV/args.yml)"
            )
        records += found
        unreadable += bad
    return each_run_once(records), unreadable


def find_runs(folder: Path) -> list[Path]:
    """:return: the folders of all runs in RL Zoo's log folder, or in that of an algorithm or a run in it, sorted"""
    levels = ("*/args.yml", "*/*/args.yml", "*/*/*/args.yml")
    return sorted({arguments.parents[1] for level in levels for arguments in folder.glob(level)})


def read_zoo_folder(folder: Path) -> tuple[list[Record], LeftOut]:
    """
    :return: records of ``find_runs``, and (path, reason) of folders that cannot be read or that repeat another one.
        An unfinished run has status ``"failed"``. Where runs of an algorithm in an environment have different settings,
        their variant is the name of the first folder with their settings.
    """
    records: dict[RunSpec, tuple[Record, Path]] = {}
    bad = []
    for run in find_runs(folder):
        try:
            record = _read_run(run)
            # looked up within, because settings that JSON cannot hold have no key
            other, where = records.get(record.spec, (None, run))
        # a truncated or foreign file may raise anything; the report names it
        except Exception as error:
            bad.append((run, f"{type(error).__name__}: {error}".splitlines()[0]))
            continue
        if other is not None and other.status == record.status == "done":
            bad.append((run, f"the same run as {where.name}: equal settings and seed"))
        elif other is None or record.status == "done":
            records[record.spec] = (record, run)
    # for each algorithm and environment, the first folder with some settings. A number alone would be that of other
    # settings in other environments.
    names: dict[tuple[str, str], dict[str, str]] = defaultdict(dict)
    for record, run in sorted(records.values(), key=lambda item: (len(item[1].name), item[1].name)):
        if record.status == "done":
            names[record.spec.algo, record.spec.env_id].setdefault(_settings(record), run.name)
    named = []
    for record, _ in records.values():
        of = names[record.spec.algo, record.spec.env_id]
        variant = of.get(_settings(record), "") if len(of) > 1 else ""
        named.append(replace(record, spec=replace(record.spec, variant=variant)))
    return named, bad


def _settings(record: Record) -> str:
    return json.dumps([record.spec.n_timesteps, record.spec.hyperparameters], sort_keys=True)


def read_evaluations(folder: Path) -> dict[str, list]:
    """:return: a record's evaluations, from the file into which Stable-Baselines3 writes them"""
    path = folder / "evaluations.npz"
    if not path.exists():
        return {"timesteps": [], "returns": []}
    with np.load(path, allow_pickle=False) as data:
        evaluations = {"timesteps": data["timesteps"].tolist(), "returns": data["results"].tolist()}
        successes = data["successes"].astype(float) if "successes" in data else np.full(1, np.nan)
        # Stable-Baselines3 lists only the episodes that reported whether they succeeded, and no evaluation without any
        if successes.shape == data["results"].shape and np.isfinite(successes).all():
            evaluations["is_success"] = successes.tolist()
    return evaluations


def _read_run(run: Path) -> Record:
    import pandas as pd

    (arguments_file,) = run.glob("*/args.yml")
    arguments = _read_yaml(arguments_file)
    hyperparameters = _read_yaml(arguments_file.with_name("config.yml"))
    hyperparameters |= {name: arguments[name] for name in ARGUMENTS if arguments.get(name)}
    configured = hyperparameters.pop("n_timesteps")
    n_timesteps = int(arguments["n_timesteps"] if arguments["n_timesteps"] > 0 else configured)

    starts, frames = [], []
    monitors = sorted(run.glob("*monitor.csv"))
    if not monitors:
        raise FileNotFoundError("no monitor.csv")
    for monitor in monitors:
        with monitor.open() as lines:
            starts.append(json.loads(lines.readline().removeprefix("#"))["t_start"])
            # a line that was being written has too few fields; a return may be NaN
            columns = {"r": float, "l": float, "t": float}
            frame = pd.read_csv(lines, usecols=list(columns), dtype=columns).dropna(subset=["l", "t"])
        # environments step together: n steps of one are n of each
        frames.append(frame.assign(timesteps=frame["l"].cumsum() * len(monitors)))
    episodes = pd.concat(frames).sort_values("timesteps", kind="stable").astype({"timesteps": int, "l": int})
    series = episodes[["timesteps", "r", "l"]].set_axis(["timesteps", "returns", "lengths"], axis=1)

    model = run / f"{arguments_file.parent.name}.zip"
    # RL Zoo saves the model when the run ends, early or not
    reason: str | None = f"no {model.name}: the run was killed, or is under way"
    if model.exists():
        with zipfile.ZipFile(model) as archive:
            taken = int(json.loads(archive.read("data"))["num_timesteps"])
        reason = f"stopped after {taken:,} of {n_timesteps:,} steps" if taken < n_timesteps else None
        counted = max(episodes["timesteps"], default=0)
        if counted > taken >= n_timesteps:
            raise ValueError(
                f"its monitor files count {counted:,} steps, but {taken:,} were taken: a wrapper around Monitor "
                "repeats steps, so it is not known when episodes ended"
            )
    run_of = (arguments["algo"], arguments["env"], int(arguments["seed"]), n_timesteps, "", hyperparameters)
    return Record(
        spec=RunSpec(*run_of, max(0, int(arguments["eval_freq"])), int(arguments["eval_episodes"])),
        status="failed" if reason else "done",
        traceback=reason,
        episodes=series.to_dict("list"),
        evaluations=read_evaluations(run),
        wall_time=max(episodes["t"], default=0.0),
        started=datetime.fromtimestamp(min(starts), timezone.utc).isoformat(timespec="seconds"),
    )


def _read_yaml(path: Path) -> dict[str, Any]:
    """What RL Zoo has dumped, with names for classes and text for other objects: nothing is constructed or imported."""
    import yaml

    class Loader(yaml.SafeLoader):
        pass

    as_list = Loader.construct_sequence
    tag = "tag:yaml.org,2002:python/"
    Loader.add_constructor(f"{tag}object/apply:collections.OrderedDict", lambda *node: dict(*as_list(*node, deep=True)))
    Loader.add_constructor(f"{tag}tuple", lambda *node: as_list(*node, deep=True))
    Loader.add_multi_constructor(f"{tag}name:", lambda loader, name, node: name)
    Loader.add_multi_constructor(tag, lambda loader, name, node: f"{name} {yaml.serialize(node)}")
    content = yaml.load(path.read_text(), Loader)
    if not isinstance(content, dict):
        raise ValueError(f"{path.name} holds no settings: {content}")
    return content
