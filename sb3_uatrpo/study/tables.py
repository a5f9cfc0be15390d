"""The four tidy tables of many runs: of studies, RL Zoo's logs, and saved tables."""

import io
import json
import os
import zipfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from glob import glob
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from sb3_uatrpo.study.plan import StudyError

# What says which run it is
TEXTS, COUNTS = ("algo", "env", "variant", "hyperparameters"), ("seed", "n_timesteps", "eval_freq", "n_eval_episodes")
SERIES = ("episodes", "updates", "evaluations")
GZIP = {"method": "gzip", "mtime": 0}

# The row of a run, and its series by name
Part = tuple[dict[str, Any], dict[str, pd.DataFrame]]
LeftOut = list[tuple[Path, str]]
Reader = Callable[[Path], list[Part]]


@dataclass(frozen=True)
class Study:
    """
    Tables of many runs. The number of a run is the index of ``runs``, and the column ``run`` of the others.

    :param runs: the fields of ``Run``, ``error`` (empty if it is done), ``seconds``, ``versions``, and the ``folder``
        that it was read from
    :param episodes: of the training: ``step`` at the end, over all environments of the run, undiscounted ``return``,
        ``length``, and ``is_success`` where the environment reports it
    :param updates: ``step`` before each update, and what it logged under ``train/``
    :param evaluations: episodes of the deterministic evaluations: ``step``, ``return``, and maybe ``is_success``
    :param left_out: files or folders that cannot be read, with the reason
    """

    runs: pd.DataFrame
    episodes: pd.DataFrame
    updates: pd.DataFrame
    evaluations: pd.DataFrame
    left_out: LeftOut = field(default_factory=list)

    def save(self, folder: str | os.PathLike[str]) -> None:
        """
        Write the tables as four small files, for example to commit them. ``read_study`` reads the folder, which then is
        that of the runs: files have no path of the machine on which they were made.
        """
        Path(folder).mkdir(parents=True, exist_ok=True)
        self.runs.drop(columns="folder").to_csv(Path(folder, "runs.csv.gz"), compression=GZIP)
        for name in SERIES:
            getattr(self, name).to_csv(Path(folder, f"{name}.csv.gz"), index=False, compression=GZIP)


def read_study(*folders: str | os.PathLike[str]) -> Study:
    """
    :param folders: studies, RL Zoo's log folders, or folders that ``Study.save`` wrote
    :return: their tables. A run that is there more than once counts once, a finished one rather than a failed one.
    :raises StudyError: if a folder is none of these, or a run is there twice with different episodes
    """
    parts: list[Part] = []
    left_out: LeftOut = []
    for folder in map(Path, folders):
        if not folder.is_dir():
            raise StudyError(f"{folder}: no such folder")
        readers = _find(folder)
        if not readers and not (folder / ".lock").exists():
            raise StudyError(f"{folder}: neither a study nor a folder that RL Zoo wrote (no ALGO/ENV_1/ENV/args.yml)")
        for path, read in readers.items():
            try:
                parts += read(path)
            # a truncated or foreign file may raise anything; the report names it
            except Exception as error:
                left_out.append((path, f"{type(error).__name__}: {' '.join(str(error).split()):.150}"))
    _name_variants([row for row, _ in parts if row["variant"] is None])
    return _collect(parts, left_out)


def _find(folder: Path) -> dict[Path, Reader]:
    """What can be read in a folder, each with its reader."""

    # not in hidden folders, such as that of what is not done yet
    def find(pattern: str) -> list[Path]:
        return [folder / path for path in glob(pattern, root_dir=folder, recursive=True)]

    # a study's run is also one of RL Zoo's
    readers: dict[Path, Reader] = dict.fromkeys((path.parents[1] for path in find("**/*/args.yml")), _read_zoo_run)
    readers |= dict.fromkeys((path.parent for path in find("**/run.json")), _read_run)
    readers |= dict.fromkeys((path.parent for path in find("runs.csv.gz")), _read_saved)
    return {path: readers[path] for path in sorted(readers)}


def _collect(parts: Iterable[Part], left_out: LeftOut) -> Study:
    kept: dict[str, Part] = {}
    for part in parts:
        key = json.dumps([part[0][name] for name in (*TEXTS, "seed", "n_timesteps")])
        other = kept.setdefault(key, part)
        if other is not part and not (part[0]["error"] or other[0]["error"]):
            a, b = (each[1]["episodes"].reindex(columns=["step", "return", "length"]) for each in (part, other))
            # RL Zoo and studies keep different numbers of digits
            if len(a) != len(b) or not np.allclose(a, b, rtol=1e-5, atol=1e-6, equal_nan=True):
                both = f"{other[0]['folder']} and {part[0]['folder']}"
                raise StudyError(f"{both} are the same run with different episodes: delete one, or report on one")
        # a finished one rather than a failed one, and a study's rather than RL Zoo's own, which has no updates
        kept[key] = max(other, part, key=_completeness)
    tables = {}
    for name in SERIES:
        filled = [part[1][name].assign(run=i) for i, part in enumerate(kept.values()) if len(part[1][name])]
        tables[name] = (
            pd.concat(filled, ignore_index=True) if filled else pd.DataFrame(columns=["run", "step", "return"])
        )
    columns = [*TEXTS, *COUNTS, "error", "seconds", "versions", "folder"]
    return Study(pd.DataFrame([row for row, _ in kept.values()], columns=columns), **tables, left_out=left_out)


def _completeness(part: Part) -> tuple[int, ...]:
    row, series = part
    return (not row["error"], *(len(series[name]) for name in SERIES[1:]))


def _series(name: str, columns: dict[str, Any]) -> pd.DataFrame:
    """:return: the table; ValueError if a number cannot be one. Updates may log anything, but for the KL divergence."""
    arrays = {column: np.asarray(values) for column, values in columns.items()}
    for column in arrays if name != "updates" else arrays.keys() & {"step", "kl_ratio", "kl_proposed"}:
        if len(arrays[column]) and arrays[column].dtype.kind not in "iuf":
            raise ValueError(f"{column} of its {name} has values that are not numbers")
        arrays[column] = arrays[column] if column == "step" else arrays[column].astype(float)
    steps, successes = arrays["step"], arrays.get("is_success", np.zeros(0))
    if len(steps) and (steps.dtype.kind == "f" or steps[0] < 0 or np.any(np.diff(steps) < 0)):
        raise ValueError(f"the steps of its {name} are not ascending integers")
    if np.any((successes < 0) | (successes > 1)):
        raise ValueError(f"is_success of its {name} must be from 0 to 1")
    return pd.DataFrame(arrays)


def _evaluations(steps: Any, results: Any, successes: Any = None) -> pd.DataFrame:
    """:return: the table of evaluations at some steps, from results of shape ``n_evaluations x n_eval_episodes``"""
    if not len(steps):
        return _series("evaluations", {"step": [], "return": []})
    steps, results = np.asarray(steps), np.asarray(results, dtype=np.float64)
    if results.ndim != 2 or results.shape[0] != len(steps) or np.any(np.diff(steps) <= 0):
        raise ValueError("the steps of its evaluations are repeated, or some have other numbers of episodes")
    columns = {"step": np.repeat(steps, results.shape[1]), "return": results.ravel()}
    # Stable-Baselines3 lists only the episodes that reported whether they succeeded, and no evaluation without any
    if successes is not None and np.shape(successes) == results.shape and not np.isnan(successes).any():
        columns["is_success"] = np.ravel(successes).astype(float)
    return _series("evaluations", columns)


def _read_run(folder: Path) -> list[Part]:
    row = json.loads((folder / "run.json").read_text())
    row["hyperparameters"] = json.dumps(row["hyperparameters"], sort_keys=True)
    for name in TEXTS + COUNTS:
        if not isinstance(row[name], str if name in TEXTS else int) or (name in COUNTS and not 0 <= row[name] < 2**63):
            raise ValueError(f"{name} in run.json cannot be {row[name]!r:.50}")
    row |= {"error": "", "seconds": 0.0, "versions": "{}", "folder": str(folder)}
    if (folder / "error.txt").exists():
        row["error"] = (folder / "error.txt").read_text() or "failed"
        return [(row, dict.fromkeys(SERIES, pd.DataFrame()))]
    ended = json.loads((folder / "ended.json").read_text())
    row |= {"seconds": float(ended["seconds"]), "versions": json.dumps(ended["versions"])}
    names = ("episodes", "updates")
    tables = {name: _series(name, dict(pd.read_csv(folder / f"{name}.csv.gz").items())) for name in names}
    return [(row, tables | {"evaluations": _evaluations_in(folder)})]


def _evaluations_in(folder: Path) -> pd.DataFrame:
    if not (path := folder / "evaluations.npz").exists():
        return _evaluations([], [])
    # a damaged file would stay open
    with np.load(io.BytesIO(path.read_bytes()), allow_pickle=False) as data:
        return _evaluations(data["timesteps"], data["results"], data.get("successes"))


def _read_zoo_run(run: Path) -> list[Part]:
    (path,) = run.glob("*/args.yml")
    row, settings = _read_yaml(path), _read_yaml(path.with_name("config.yml"))
    # what affects a run's numbers, besides config.yml
    settings |= {name: row[name] for name in ("env_kwargs", "eval_env_kwargs", "trained_agent") if row.get(name)}
    configured = settings.pop("n_timesteps")
    n_timesteps = int(row["n_timesteps"] if row["n_timesteps"] > 0 else configured)
    record = {"algo": row["algo"], "env": row["env"], "seed": int(row["seed"]), "variant": None, "versions": "{}"}
    record |= {"eval_freq": max(0, int(row["eval_freq"])), "n_eval_episodes": int(row["eval_episodes"])}
    record |= {"hyperparameters": json.dumps(settings, sort_keys=True, allow_nan=False)}
    record |= {"n_timesteps": n_timesteps, "folder": str(run)}
    types = dict.fromkeys("rlt", float)
    monitors = sorted(run.glob("*monitor.csv"), key=lambda path: (len(path.name), path))
    # A line that was being written has too few fields. Environments step together: n steps of one are n of each.
    frames = [pd.read_csv(monitor, skiprows=1, dtype=types).dropna(subset=["l", "t"]) for monitor in monitors]
    frames = [frame.assign(step=frame["l"].cumsum() * len(frames)) for frame in frames]
    episodes = pd.concat(frames).sort_values("step", kind="stable").astype({"step": int, "l": int})
    # RL Zoo saves the model when the run ends, early or not
    model = run / f"{path.parent.name}.zip"
    error = f"no {model.name}: the run was killed, or is under way"
    if model.exists():
        with zipfile.ZipFile(model) as archive:
            taken = int(json.loads(archive.read("data"))["num_timesteps"])
        error = f"stopped after {taken:,} of {n_timesteps:,} steps" if taken < n_timesteps else ""
        if max(episodes["step"], default=0) > taken >= n_timesteps:
            raise ValueError(f"episodes end after the {taken:,} steps taken: a wrapper around Monitor repeats steps")
    record |= {"error": error, "seconds": float(max(episodes["t"], default=0))}
    ended = _series("episodes", {"step": episodes["step"], "return": episodes["r"], "length": episodes["l"]})
    return [(record, {"episodes": ended, "updates": pd.DataFrame(), "evaluations": _evaluations_in(run)})]


def _name_variants(rows: list[dict[str, Any]]) -> None:
    """RL Zoo's runs with different settings in an environment: each has the name of the first folder with its own."""
    names: dict[tuple[str, str], dict[str, str]] = {}
    for row in sorted(rows, key=lambda row: (bool(row["error"]), len(row["folder"]), row["folder"])):
        variants = names.setdefault((row["algo"], row["env"]), {})
        settings = f"{row['n_timesteps']} {row['hyperparameters']}"
        # a failed run names none
        row["variant"] = variants.get(settings, "")
        if not row["error"]:
            row["variant"] = variants.setdefault(settings, Path(row["folder"]).name)
    for row in rows:
        row["variant"] = row["variant"] if len(names[row["algo"], row["env"]]) > 1 else ""


def _read_saved(folder: Path) -> list[Part]:
    runs = pd.read_csv(folder / "runs.csv.gz", index_col=0, keep_default_na=False).assign(folder=str(folder))
    tables = {name: pd.read_csv(folder / f"{name}.csv.gz") for name in SERIES}
    series = {name: dict(list(table.groupby("run"))) for name, table in tables.items()}
    empty = {name: table.iloc[:0] for name, table in tables.items()}
    return [
        (row, {name: series[name].get(i, empty[name]).drop(columns="run") for name in SERIES})
        for i, row in runs.to_dict("index").items()
    ]


def _read_yaml(path: Path) -> dict[str, Any]:
    """What RL Zoo has dumped, with names for classes and text for other objects: nothing is constructed or imported."""
    import yaml

    Loader: Any = type("Loader", (yaml.SafeLoader,), {})
    as_list, tag = Loader.construct_sequence, "tag:yaml.org,2002:python/"
    Loader.add_constructor(f"{tag}object/apply:collections.OrderedDict", lambda *node: dict(*as_list(*node, deep=True)))
    Loader.add_constructor(f"{tag}tuple", lambda *node: as_list(*node, deep=True))
    Loader.add_multi_constructor(f"{tag}name:", lambda loader, name, node: name)
    Loader.add_multi_constructor(tag, lambda loader, name, node: f"{name} {yaml.serialize(node)}")
    return dict(yaml.load(path.read_text(), Loader))
