"""From the user's request to the runs of a study, and what else their numbers depend on: versions."""

import argparse
import ast
import hashlib
import inspect
import io
import itertools
import json
import os
import platform
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout, suppress
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import sb3_uatrpo

NOISE = "adversarial_noise"
# What users call runs without a variant; failed runs have a folder of their own, and so has the report
PLAIN, FAILED, REPORT = "plain", "failed", "report"
# What RL Zoo's files may set besides arguments of the constructor
ZOO_HYPERPARAMETERS = {
    "callback", "env_kwargs", "env_wrapper", "frame_stack", "monitor_kwargs", "n_envs", "noise_std", "noise_type",
    "normalize", "vec_env_wrapper",
}  # fmt: skip
SET_BY_ZOO = {"self", "env", "seed", "device", "verbose", "tensorboard_log", "_init_setup_model"}
PACKAGES = ("gymnasium", "mujoco", "numpy", "rl_zoo3", "sb3_contrib", "stable_baselines3", "torch")
# What a study file may contain, and its types: YAML reads 1e6 as text
STUDY_FILE: dict[str, Any] = {
    "algorithms": list, "environments": list, "seeds": int | str | list, "n_timesteps": int | float | str,
    "noise": list, "eval_freq": int, "n_eval_episodes": int, "variants": dict,
}  # fmt: skip


class StudyError(Exception):
    """A request that cannot be met. The one-line message names what was given and what would be accepted."""


@dataclass(frozen=True)
class Run:
    """
    One run of RL Zoo, whose names its fields have. Steps are those of all environments of the run.

    :param variant: a name without ``=``, or varied values such as ``"noise=1"``, or both; ``""`` if there are none
    :param hyperparameters: as in RL Zoo's YAML files, with all overrides, without ``n_timesteps``; JSON values
    """

    algo: str
    env: str
    seed: int
    variant: str
    n_timesteps: int
    eval_freq: int
    n_eval_episodes: int
    hyperparameters: dict[str, Any]

    @property
    def path(self) -> Path:
        """:return: its place in the study's folder, as RL Zoo has it: ``plain/uatrpo/Hopper-v4_1`` for seed 0"""
        variant = re.sub(r"[^\w.=,-]+", "-", self.variant, flags=re.ASCII)[:200] or PLAIN
        # 0 stands for the latest run in RL Zoo's commands
        return Path(variant, self.algo, f"{self.env.rpartition(':')[2].replace('/', '-')}_{self.seed + 1}")

    def __str__(self) -> str:
        variant = f" ({self.variant})" if self.variant else ""
        return f"{self.algo}{variant} on {self.env}, seed {self.seed}"


def split_variant(variant: str) -> tuple[str, list[str]]:
    """:return: the name of the variant, ``""`` if it has none, and the varied values, such as ``["noise=1"]``"""
    # the comma within a value is followed by a space
    parts = [part for part in re.split(r",(?! )", variant) if part]
    return (parts[0], parts[1:]) if parts and "=" not in parts[0] else ("", parts)


def versions() -> dict[str, str]:
    """:return: versions of what affects the numbers; of this package, with a hash of its source"""
    versions = {"platform": f"{platform.system()} {platform.machine()}", "python": platform.python_version()}
    for name in PACKAGES:
        with suppress(PackageNotFoundError):
            versions[name] = version(name)
    root, source = Path(sb3_uatrpo.__file__).parent, hashlib.sha256()
    for path in sorted(path for path in root.rglob("*") if path.suffix in (".py", ".yml")):
        source.update(f"{path.relative_to(root).as_posix()}\n".encode() + path.read_bytes())
    return versions | {"sb3_uatrpo": f"{sb3_uatrpo.__version__} (source {source.hexdigest()[:12]})"}


def plan(
    algos: Sequence[str],
    env_ids: Sequence[str],
    seeds: Iterable[int | str],
    n_timesteps: int | str | None = None,
    params: Sequence[str] = (),
    vary: Mapping[str, Sequence[Any]] | None = None,
    conf_files: Sequence[str] = (),
    eval_freq: int = 25_000,
    n_eval_episodes: int = 5,
    variants: Mapping[str, Mapping[str, Mapping[str, Any]]] | None = None,
) -> list[Run]:
    """
    All runs of a study: algorithms and their named variants × environments × seeds × varied hyperparameters.

    The arguments are written as the options of the command line (``docs/study.md``), except for these:

    :param vary: values to try, by name of the hyperparameter. The value 0 of ``adversarial_noise`` means none.
    :param variants: for each name and algorithm, the hyperparameters that the variant changes
    :return: the runs, seed after seed, so that a study that was cut short is balanced
    :raises StudyError: if something does not exist, a value is invalid, or runs on one environment have other lengths
    """
    from rl_zoo3.utils import ALGOS

    from sb3_uatrpo.zoo import register

    register()
    n_eval_episodes = _whole(n_eval_episodes, "n_eval_episodes (--eval-episodes)")
    named: list[tuple[str, str, dict[str, Any]]] = [(str(algo), "", {}) for algo in algos]
    for name, by_algo in (variants or {}).items():
        with errors_of(f"variant {name!r} (name: {{algorithm: {{hyperparameter: value}}}})"):
            if not re.fullmatch(r"(?=.*\S)[^=,.][^=,]*", name) or name in (PLAIN, FAILED, REPORT):
                raise StudyError(f"it must not be {PLAIN}, {FAILED} or {REPORT}, or have '=' or ',' or '.' first")
            named += [(algo, name, dict(changes)) for algo, changes in by_algo.items()]
    every_algo = {algo for algo, _, _ in named}
    if unknown := sorted(every_algo - ALGOS.keys()):
        raise StudyError(f"unknown algorithm {unknown[0]!r}; RL Zoo knows {', '.join(sorted(ALGOS))}")

    def own(algo: str, texts: Sequence[str], separator: str) -> list[str]:
        others = tuple(f"{other}{separator}" for other in every_algo - {algo})
        ours = [text for text in texts if not text.startswith(others)]
        # those for one algorithm come last, and win
        ours.sort(key=lambda text: text.startswith(f"{algo}{separator}"))
        return [text.removeprefix(f"{algo}{separator}") for text in ours]

    kinds = []
    varied = _conditions(vary or {}).items()
    for env_id, (algo, name, changes), (condition, values) in itertools.product(map(str, env_ids), named, varied):
        overrides = dict(map(split_assignment, own(algo, params, "."))) | changes
        settings = _hyperparameters(algo, env_id, overrides, own(algo, conf_files, ":"), values)
        if n_timesteps is not None and "n_timesteps" in overrides:
            raise StudyError(f"n_timesteps is given twice: for all runs ({n_timesteps}), and as a hyperparameter")
        if twice := overrides.keys() & values.keys():
            raise StudyError(f"{twice.pop()} is both overridden and varied: the names of the variants would be wrong")
        configured = settings.pop("n_timesteps", None)
        steps = _whole(configured if n_timesteps is None else n_timesteps, f"n_timesteps of {algo} on {env_id}")
        kinds.append((algo, env_id, ",".join(filter(None, [name, condition])), steps, settings))
    remedy = "give all runs one number (--n-timesteps), or each algorithm a study of its own"
    refuse_unequal_lengths([(env_id, algo, steps) for algo, env_id, _, steps, _ in kinds], remedy)
    runs: dict[Path, Run] = {}
    for seed, (algo, env_id, variant, steps, settings) in itertools.product(parse_seeds(seeds), kinds):
        run = Run(algo, env_id, seed, variant, steps, max(0, eval_freq), n_eval_episodes, settings)
        if (other := runs.setdefault(run.path, run)) != run:
            raise StudyError(f"{other} and {run} would have one folder, {run.path}: give them names that differ more")
    return list(runs.values())


def refuse_unequal_lengths(runs: Iterable[tuple[str, str, int]], remedy: str) -> None:
    """:raises StudyError: if runs (environment, algorithm, steps) on one environment have different numbers of steps"""
    first: dict[str, tuple[str, int]] = {}
    for env_id, algorithm, steps in runs:
        other, others = first.setdefault(env_id, (algorithm, steps))
        if others != steps:
            lengths = f"{other} has {others:,} steps and {algorithm} {steps:,}"
            raise StudyError(f"reports do not compare runs of different length: on {env_id}, {lengths}; {remedy}")


def read_study_file(path: str | os.PathLike[str]) -> dict[str, Any]:
    """:return: arguments of ``plan``, from a YAML file with some of ``STUDY_FILE``"""
    import yaml

    with errors_of(path):
        study = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
        unknown = study.keys() - STUDY_FILE.keys() if isinstance(study, dict) else {f"{study!r:.100}"}
        if unknown:
            raise ValueError(f"it must hold {', '.join(STUDY_FILE)}, all optional, not {', '.join(map(str, unknown))}")
        for name, value in study.items():
            if not isinstance(value, STUDY_FILE[name]):
                kind = getattr(STUDY_FILE[name], "__name__", STUDY_FILE[name])
                raise ValueError(f"{name} must be a {kind}, but it is {value!r:.100}")
        seeds, noise = study.pop("seeds", 0), list(map(float, study.pop("noise", ())))
        study = {{"algorithms": "algos", "environments": "env_ids"}.get(k, k): value for k, value in study.items()}
        study["seeds"] = parse_seeds(seeds if isinstance(seeds, list) else [seeds])
        return study | ({"vary": {NOISE: noise}} if noise else {})


def parse_seeds(texts: Iterable[int | str]) -> list[int]:
    """:return: all seeds, and all of ranges such as ``0-49``, each once"""
    seeds: list[int] = []
    for text in texts:
        match = re.fullmatch(r"(\d{1,10})(?:-(\d{1,10}))?", str(text))
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (0, -1)
        if not first <= last < min(2**32, first + 100_000):
            accepted = "an integer from 0 to 2**32-1, or a range such as 0-49 of up to 100,000 seeds"
            raise StudyError(f"a seed must be {accepted}, but it is {text}")
        seeds += range(first, last + 1)
    return list(dict.fromkeys(seeds))


def split_assignment(text: str) -> tuple[str, Any]:
    """:return: the name and the value of ``name:value``: a Python literal, a word of YAML, or text such as code"""
    name, _, value = text.partition(":")
    if not name or not value:
        raise StudyError(f"a hyperparameter must be written name:value, but it is {text!r}")
    with suppress(ValueError, SyntaxError):
        return name, ast.literal_eval(value.strip())
    return name, {"true": True, "false": False, "null": None, "none": None}.get(value.strip().lower(), value)


def _hyperparameters(
    algo: str, env_id: str, overrides: dict[str, Any], configs: list[str], varied: dict[str, Any]
) -> dict[str, Any]:
    """The entry of the last hyperparameter file, as RL Zoo's ``train`` would find it, with the varied values."""
    import gymnasium as gym
    from rl_zoo3.exp_manager import ExperimentManager
    from rl_zoo3.utils import ALGOS

    with errors_of(f"environment {env_id!r}"):
        module, _, name = env_id.rpartition(":")
        if module:
            import_module(module)
        if name not in gym.registry or env_id.startswith(":"):
            raise ValueError("Gymnasium does not know it; module:name imports the module that registers it")
    with errors_of(f"hyperparameters of {algo} on {env_id}{f' in {configs[-1]}' if configs else ''}"):
        options: dict[str, Any] = {"hyperparams": overrides, "config": configs[-1] if configs else None}
        with redirect_stdout(io.StringIO()):
            manager = ExperimentManager(argparse.Namespace(), algo, name, os.devnull, **options)
            hyperparameters = {**manager.read_hyperparameters()[1], **varied}
        # without noise it is the algorithm itself, even if a file sets some
        with_noise = varied.get(NOISE) != 0
        settings = {key: value for key, value in hyperparameters.items() if key != NOISE or with_noise}
        known = {*inspect.signature(ALGOS[algo]).parameters, *ZOO_HYPERPARAMETERS} - SET_BY_ZOO
        if unknown := sorted((settings.keys() - {"n_timesteps"} | varied.keys()) - known):
            raise ValueError(f"unknown {unknown[0]!r}; known are {', '.join(sorted(known))}")
        # as a file returns them
        return dict(json.loads(json.dumps(settings, allow_nan=False)))


@contextmanager
def errors_of(source: Any) -> Iterator[None]:
    """A user's module, or a hyperparameter file of Python, may raise anything, or end the process."""
    try:
        yield
    except (Exception, SystemExit) as error:
        kind = "" if type(error) in (StudyError, ValueError) else f"{type(error).__name__}: "
        raise StudyError(f"{source}: {kind}{' '.join(str(error).split())}") from error


def _conditions(vary: Mapping[str, Sequence[Any]]) -> dict[str, dict[str, Any]]:
    """Every combination of the values, by its name."""
    conditions: dict[str, dict[str, Any]] = {}
    for values in itertools.product(*vary.values()):
        condition = dict(zip(vary, values, strict=True))
        shown = []
        for name, value in condition.items():
            text = f"{value:g}" if isinstance(value, float) and float(f"{value:g}") == value else str(value)
            # commas without a space separate the values of a variant
            text = f"{name.removeprefix('adversarial_')}=" + re.sub(r",(?! )", ", ", text)
            shown += [text] if (name, value) != (NOISE, 0) else []
        # 1 and 1.0 have one name, and are one value
        conditions.setdefault(",".join(shown), condition)
    return conditions


def _whole(value: Any, name: str) -> int:
    """A number as an integer: 1e6 is given as a float or a string."""
    with suppress(TypeError, ValueError):
        if (number := float(value)) >= 1 and number.is_integer():
            return int(number)
    raise StudyError(f"{name} must be an integer of at least 1, but it is {value!r}")
