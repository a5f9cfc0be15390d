"""
Records from RL Zoo's log folders: ``logs/ALGO/ENV_1/`` with ``0.monitor.csv``, ``evaluations.npz``, ``ENV/config.yml``
and ``ENV/args.yml``. They hold no ``train/`` values, so these records have no KL ratio.
"""

import json
import zipfile
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import numpy as np

from sb3_uatrpo.study.record import Record, RunSpec

# Arguments of rl_zoo3.train that affect a run's numbers, besides those in config.yml
ARGUMENTS = ("env_kwargs", "eval_env_kwargs", "trained_agent")


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
            # a line that was being written has too few fields
            frame = pd.read_csv(lines, usecols=["r", "l", "t"]).dropna()
        # environments step together: n steps of one are n of each
        frames.append(frame.assign(timesteps=frame["l"].cumsum() * len(monitors)))
    episodes = pd.concat(frames).sort_values("timesteps", kind="stable")

    evaluations: dict[str, list[Any]] = {"timesteps": [], "returns": []}
    if (run / "evaluations.npz").exists():
        with np.load(run / "evaluations.npz", allow_pickle=False) as data:
            evaluations = {"timesteps": data["timesteps"].tolist(), "returns": data["results"].tolist()}

    reason = _why_unfinished(run / f"{arguments_file.parent.name}.zip", n_timesteps)
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


def _why_unfinished(model: Path, n_timesteps: int) -> str | None:
    # RL Zoo saves the model when the run ends, early or not
    if not model.exists():
        return f"no {model.name}: the run was killed, or is under way"
    with zipfile.ZipFile(model) as archive:
        taken = json.loads(archive.read("data"))["num_timesteps"]
    return None if taken >= n_timesteps else f"stopped after {taken:,} of {n_timesteps:,} steps"


def _read_yaml(path: Path) -> dict[str, Any]:
    """Read a file in which RL Zoo has dumped an OrderedDict; no other Python object is constructed."""
    import yaml

    class Loader(yaml.SafeLoader):
        pass

    tag = "tag:yaml.org,2002:python/object/apply:collections.OrderedDict"
    Loader.add_constructor(tag, lambda loader, node: dict(*loader.construct_sequence(node, deep=True)))
    content: dict[str, Any] = yaml.load(path.read_text(), Loader)
    return content
