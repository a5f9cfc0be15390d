"""
Records from folders that RL Zoo wrote itself: ``logs/ALGO/ENV_1/`` with ``0.monitor.csv``, ``evaluations.npz``,
``ENV/config.yml`` and ``ENV/args.yml``.

RL Zoo keeps no ``train/`` values in them, so such records have no KL ratio.
"""

import json
import zipfile
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import numpy as np

from sb3_uatrpo.study.record import Record, RunSpec

# Arguments of rl_zoo3.train that change a run's numbers, besides what config.yml holds
ARGUMENTS = ("env_kwargs", "eval_env_kwargs", "trained_agent")


def find_runs(folder: Path) -> list[Path]:
    """
    :param folder: RL Zoo's log folder, that of an algorithm in it, or that of a run
    :return: the folders of the runs in it, sorted
    """
    levels = ("*/args.yml", "*/*/args.yml", "*/*/*/args.yml")
    return sorted({arguments.parents[1] for level in levels for arguments in folder.glob(level)})


def read_zoo_folder(folder: Path) -> tuple[list[Record], list[tuple[Path, str]]]:
    """
    :param folder: RL Zoo's log folder, that of an algorithm in it, or that of a run
    :return: records, and (path, reason) of run folders that cannot be read or that repeat another one. A run that
        has not come to its end has status "failed".
    """
    records: dict[str, tuple[Record, Path]] = {}
    bad = []
    for run in find_runs(folder):
        try:
            record = read_zoo_run(run)
        # whatever a truncated or foreign file brings about: it is named in the report
        except Exception as error:
            bad.append((run, f"{type(error).__name__}: {error}".splitlines()[0]))
            continue
        key = record.spec.key()
        if key in records and records[key][0].status == record.status == "done":
            bad.append((run, f"the same run as {records[key][1].name}: equal settings and seed"))
        elif key not in records or record.status == "done":
            records[key] = (record, run)
    return [record for record, _ in records.values()], bad


def read_zoo_run(run: Path) -> Record:
    """
    :param run: for example ``logs/uatrpo/Hopper-v4_1``
    :return: its record
    :raises Exception: whatever comes of a file that is missing or broken
    """
    import pandas as pd

    (arguments_file,) = run.glob("*/args.yml")
    arguments = _read_yaml(arguments_file)
    settings = _read_yaml(arguments_file.with_name("config.yml"))
    settings |= {name: arguments[name] for name in ARGUMENTS if arguments.get(name)}
    configured = settings.pop("n_timesteps")
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
        # environments are stepped together, so that a step of one stands for a step of each
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
            hyperparameters=settings,
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
    """RL Zoo saves the model when the run ends, early or not."""
    if not model.exists():
        return f"no {model.name}: the run was killed, or is under way"
    with zipfile.ZipFile(model) as archive:
        taken = json.loads(archive.read("data"))["num_timesteps"]
    return None if taken >= n_timesteps else f"stopped after {taken:,} of {n_timesteps:,} steps"


def _read_yaml(path: Path) -> dict[str, Any]:
    """RL Zoo dumps an OrderedDict; no other Python object is made from the file."""
    import yaml

    class Loader(yaml.SafeLoader):
        pass

    def pairs(loader: yaml.SafeLoader, node: yaml.SequenceNode) -> dict[str, Any]:
        (content,) = loader.construct_sequence(node, deep=True)
        return dict(content)

    Loader.add_constructor("tag:yaml.org,2002:python/object/apply:collections.OrderedDict", pairs)
    content: dict[str, Any] = yaml.load(path.read_text(), Loader)
    return content
