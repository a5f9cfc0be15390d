"""
The four tidy tables of many runs, from studies, RL Zoo's log folders, saved tables and records of version 0.1.

A run of a study is a folder of RL Zoo's with ``run.json``, ``episodes.csv.gz``, ``updates.csv.gz`` and ``ended.json``,
or, if it failed, ``error.txt``. RL Zoo alone writes ``ENV/args.yml``, ``ENV/config.yml``, ``0.monitor.csv`` and
``evaluations.npz``: such a run has no updates, and so no KL ratio.
"""

import json
import os
import zipfile
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from sb3_uatrpo.study.plan import FAILED, StudyError

# Arguments of rl_zoo3.train that affect a run's numbers, besides those in config.yml
ARGUMENTS = ("env_kwargs", "eval_env_kwargs", "trained_agent")
# What says which run it is; hyperparameters are JSON
KEY = ["algo", "env", "seed", "variant", "n_timesteps", "hyperparameters", "eval_freq", "n_eval_episodes"]
SERIES = ("episodes", "updates", "evaluations")

# Of one run: what is in its row of the runs, and its series by name
Part = tuple[dict[str, Any], dict[str, pd.DataFrame]]


@dataclass(frozen=True)
class Study:
    """
    Tables of many runs. The number of a run is the index of ``runs``, and the column ``run`` of the others.

    :param runs: ``algo``, ``env``, ``seed``, ``variant``, ``n_timesteps``, ``hyperparameters`` (JSON), ``eval_freq``,
        ``n_eval_episodes``, ``error`` (empty if the run is done), ``seconds``, ``versions`` (JSON) and ``folder``
    :param episodes: training episodes: ``step`` at the end, over all environments of the run, undiscounted ``return``,
        ``length``, and maybe ``is_success``, NaN where an episode did not report it
    :param updates: ``step`` before each update, and what it logged under ``train/``
    :param evaluations: deterministic evaluations: ``step``, ``return``, and maybe ``is_success``; a row per episode
    :param left_out: files or folders that cannot be read, with the reason
    """

    runs: pd.DataFrame
    episodes: pd.DataFrame
    updates: pd.DataFrame
    evaluations: pd.DataFrame
    left_out: list[tuple[Path, str]] = field(default_factory=list)

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Write the tables as four small files, for example to commit them. ``read_study`` reads the folder."""
        Path(folder).mkdir(parents=True, exist_ok=True)
        for name in ("runs", *SERIES):
            compression = {"method": "gzip", "mtime": 0}
            getattr(self, name).to_csv(Path(folder) / f"{name}.csv.gz", index=name == "runs", compression=compression)


def read_study(*folders: str | os.PathLike[str]) -> Study:
    """
    :param folders: studies, RL Zoo's log folders, folders that ``Study.save`` wrote, or studies of version 0.1
    :return: their tables. A run that is there more than once counts once, a finished one rather than a failed one.
    :raises StudyError: if a folder is none of these, or a run is there twice with different episodes
    """
    from sb3_uatrpo.study.frozen import read_parts

    parts: list[Part] = []
    left_out: list[tuple[Path, str]] = []
    for folder in map(Path, folders):
        if not folder.is_dir():
            raise StudyError(f"{folder}: no such folder")
        if (folder / "study.json").exists():
            found, bad = read_parts(folder / "records")
        elif (folder / "runs.csv.gz").exists():
            found, bad = _read_saved(folder), []
        else:
            found, bad = _read_folders(folder)
        if not found and not bad and not (folder / "study.json").exists():
            raise StudyError(f"{folder}: neither a study nor a folder that RL Zoo wrote (no ALGO/ENV_1/ENV/args.yml)")
        parts += found
        left_out += bad
    return collect(parts, left_out)


def collect(parts: Iterable[Part], left_out: list[tuple[Path, str]]) -> Study:
    """
    :return: the tables of the parts, each run once
    :raises StudyError: if two finished ones are the same run with different episodes
    """
    kept: dict[str, Part] = {}
    for part in parts:
        key = json.dumps([part[0][name] for name in KEY])
        other = kept.setdefault(key, part)
        if other is part:
            continue
        if not (part[0]["error"] or other[0]["error"]) and not _are_equal(part, other):
            raise StudyError(
                f"{other[0]['folder']} and {part[0]['folder']} are the same run with different episodes: "
                "delete one, or report on them apart"
            )
        # RL Zoo's own folder has no updates
        if [not part[0]["error"], len(part[1]["updates"])] > [not other[0]["error"], len(other[1]["updates"])]:
            kept[key] = part
    tables = {}
    for name in SERIES:
        series = [part[1][name].assign(run=i) for i, part in enumerate(kept.values()) if len(part[1][name])]
        tables[name] = pd.concat(series, ignore_index=True) if series else pd.DataFrame(columns=["run", "step", "return"])
    return Study(pd.DataFrame([row for row, _ in kept.values()]), **tables, left_out=left_out)


def _are_equal(part: Part, other: Part) -> bool:
    (a, b), columns = (each[1]["episodes"] for each in (part, other)), ["step", "return", "length"]
    # RL Zoo and studies keep different numbers of digits
    return len(a) == len(b) and np.allclose(a[columns], b[columns], rtol=1e-5, atol=1e-6, equal_nan=True)


def series(name: str, step: Any, columns: dict[str, Any]) -> pd.DataFrame:
    """
    :param name: what the table is about
    :param step: the step of each row
    :param columns: the other columns, each of the same length; numbers, except for what updates log
    :return: the table
    :raises ValueError: if a step or a number cannot be one
    """
    table = pd.DataFrame({"step": np.asarray(step), **{k: np.asarray(v) for k, v in columns.items()}})
    if table.empty:
        return table.astype(float)
    for column, values in table.items():
        if values.dtype.kind not in "iuf" and (name != "updates" or column in ("step", "kl_ratio", "kl_proposed")):
            raise ValueError(f"{column} of its {name} has values that are not numbers")
    steps = table.step.to_numpy()
    if steps.dtype.kind == "f" or steps[0] < 0 or np.any(np.diff(steps) < 0):
        raise ValueError(f"the steps of its {name} are not ascending integers")
    if "is_success" in table and not table.is_success.dropna().between(0, 1).all():
        raise ValueError(f"is_success of its {name} must be from 0 to 1")
    return table


def read_evaluations(steps: Any, results: Any, successes: Any = None) -> pd.DataFrame:
    """:return: the table of evaluations at some steps, of shape ``n_evaluations x n_eval_episodes``"""
    if not len(steps):
        return series("evaluations", [], {})
    steps, results = np.asarray(steps), np.asarray(results, dtype=np.float64)
    if results.ndim != 2 or results.shape[0] != len(steps) or np.any(np.diff(steps) <= 0):
        raise ValueError("the steps of its evaluations are repeated, or some evaluations have other numbers of episodes")
    columns = {"return": results.ravel()}
    # Stable-Baselines3 lists only the episodes that reported whether they succeeded, and no evaluation without any
    if successes is not None and np.shape(successes) == results.shape and not np.isnan(successes).any():
        columns["is_success"] = np.ravel(successes).astype(float)
    return series("evaluations", np.repeat(steps, results.shape[-1]), columns)


def _read_folders(folder: Path) -> tuple[list[Part], list[tuple[Path, str]]]:
    parts: list[Part] = []
    bad: list[tuple[Path, str]] = []
    found = {*(path.parent for path in folder.rglob("run.json")), *(path.parents[1] for path in folder.rglob("args.yml"))}
    for run in sorted(found):
        # what is not done yet is in a hidden folder
        if any(part.startswith(".") for part in run.relative_to(folder).parts):
            continue
        try:
            parts.append(_read_run(run) if (run / "run.json").exists() else _read_zoo_run(run))
        # a truncated or foreign file may raise anything; the report names it
        except Exception as error:
            bad.append((run, f"{type(error).__name__}: {error}".splitlines()[0]))
    return _named(parts), bad


def _read_run(folder: Path) -> Part:
    row = json.loads((folder / "run.json").read_text())
    row["hyperparameters"] = json.dumps(row["hyperparameters"], sort_keys=True)
    row |= {"error": "", "seconds": 0.0, "versions": "{}", "folder": str(folder)}
    if unknown := [name for name in KEY if type(row[name]) is not (str if name in ("algo", "env", "variant", "hyperparameters") else int)]:
        raise ValueError(f"{unknown[0]} in run.json cannot be {row[unknown[0]]!r}")
    if FAILED in folder.parts and (folder / "error.txt").exists():
        return row | {"error": (folder / "error.txt").read_text() or "failed"}, dict.fromkeys(SERIES, series("", [], {}))
    ended = json.loads((folder / "ended.json").read_text())
    row |= {"seconds": float(ended["seconds"]), "versions": json.dumps(ended["versions"])}
    tables = {}
    for name in ("episodes", "updates"):
        columns = pd.read_csv(folder / f"{name}.csv.gz")
        tables[name] = series(name, columns.pop("step"), dict(columns.items()))
    return row, tables | {"evaluations": _evaluations_in(folder)}


def _evaluations_in(folder: Path) -> pd.DataFrame:
    path = folder / "evaluations.npz"
    if not path.exists():
        return read_evaluations([], [])
    with np.load(path, allow_pickle=False) as data:
        return read_evaluations(data["timesteps"], data["results"], data.get("successes"))


def _read_zoo_run(run: Path) -> Part:
    (arguments_file,) = run.glob("*/args.yml")
    arguments, settings = _read_yaml(arguments_file), _read_yaml(arguments_file.with_name("config.yml"))
    settings |= {name: arguments[name] for name in ARGUMENTS if arguments.get(name)}
    configured = settings.pop("n_timesteps")
    n_timesteps = int(arguments["n_timesteps"] if arguments["n_timesteps"] > 0 else configured)
    monitors, frames = sorted(run.glob("*monitor.csv")), []
    for monitor in monitors:
        # a line that was being written has too few fields; a return may be NaN
        frame = pd.read_csv(monitor, skiprows=1, dtype={"r": float, "l": float, "t": float}).dropna(subset=["l", "t"])
        # environments step together: n steps of one are n of each
        frames.append(frame.assign(step=frame["l"].cumsum() * len(monitors)))
    if not frames:
        raise FileNotFoundError("no monitor.csv")
    episodes = pd.concat(frames).sort_values("step", kind="stable").astype({"step": int, "l": int})
    model = run / f"{arguments_file.parent.name}.zip"
    # RL Zoo saves the model when the run ends, early or not
    error = f"no {model.name}: the run was killed, or is under way"
    if model.exists():
        with zipfile.ZipFile(model) as archive:
            taken = int(json.loads(archive.read("data"))["num_timesteps"])
        error = f"stopped after {taken:,} of {n_timesteps:,} steps" if taken < n_timesteps else ""
        if max(episodes["step"], default=0) > taken >= n_timesteps:
            raise ValueError(
                f"its monitor files count more than the {taken:,} steps that were taken: a wrapper around Monitor "
                "repeats steps, so it is not known when episodes ended"
            )
    row = {"algo": arguments["algo"], "env": arguments["env"], "seed": int(arguments["seed"]), "variant": None}
    row |= {"n_timesteps": n_timesteps, "hyperparameters": json.dumps(settings, sort_keys=True, allow_nan=False)}
    row |= {"eval_freq": max(0, int(arguments["eval_freq"])), "n_eval_episodes": int(arguments["eval_episodes"])}
    row |= {"error": error, "seconds": float(max(episodes["t"], default=0)), "versions": "{}", "folder": str(run)}
    ended = series("episodes", episodes["step"], {"return": episodes["r"], "length": episodes["l"]})
    return row, {"episodes": ended, "updates": series("updates", [], {}), "evaluations": _evaluations_in(run)}


def _named(parts: list[Part]) -> list[Part]:
    """
    RL Zoo's runs have no variant. Where those of an algorithm have different settings in an environment, it is the name
    of the first folder with these settings: a number alone would be that of other settings in other environments.
    """
    names: dict[tuple[str, str], dict[tuple[int, str], str]] = {}
    unnamed = [row for row, _ in parts if row["variant"] is None]
    for row in sorted(unnamed, key=lambda row: (bool(row["error"]), len(row["folder"]), row["folder"])):
        of = names.setdefault((row["algo"], row["env"]), {})
        if not row["error"]:
            of.setdefault((row["n_timesteps"], row["hyperparameters"]), Path(row["folder"]).name)
    for row in unnamed:
        of = names[row["algo"], row["env"]]
        row["variant"] = of.get((row["n_timesteps"], row["hyperparameters"]), "") if len(of) > 1 else ""
    return parts


def _read_saved(folder: Path) -> list[Part]:
    runs = pd.read_csv(folder / "runs.csv.gz", index_col=0, keep_default_na=False)
    tables = {name: dict(list(pd.read_csv(folder / f"{name}.csv.gz").groupby("run"))) for name in SERIES}
    none = series("", [], {})
    return [
        (dict(row), {name: of[i].drop(columns="run") if i in of else none for name, of in tables.items()})
        for i, row in runs.iterrows()
    ]


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
