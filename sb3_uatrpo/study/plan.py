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
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout, suppress
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import sb3_uatrpo

NOISE = "adversarial_noise"
# What users call runs without a variant; failed runs have a folder of their own
PLAIN, FAILED = "plain", "failed"
# What RL Zoo's files may set besides arguments of the constructor
ZOO_HYPERPARAMETERS = {
    "callback", "env_kwargs", "env_wrapper", "frame_stack", "monitor_kwargs", "n_envs", "noise_std", "noise_type",
    "normalize", "policy", "vec_env_wrapper",
}  # fmt: skip
# Arguments of the constructor that RL Zoo sets itself
NOT_HYPERPARAMETERS = {"self", "env", "seed", "device", "verbose", "tensorboard_log", "_init_setup_model"}
PACKAGES = ("gymnasium", "mujoco", "numpy", "rl_zoo3", "sb3_contrib", "stable_baselines3", "torch")
# Greek letters of variants, in the names of folders
ASCII = str.maketrans({"γ": "gamma", "λ": "lambda", "ρ": "rho", "Σ": "Sigma"})
LONGEST_NAME = 100
# As YAML and Python write them
WORDS = {"true": True, "false": False, "null": None, "none": None}
# A longer range is a mistake in writing
MAX_SEEDS = 100_000


class StudyError(Exception):
    """A request that cannot be met. The one-line message names what was given and what would be accepted."""


@dataclass(frozen=True)
class Run:
    """
    One run of RL Zoo.

    :param algo: name that RL Zoo knows, such as ``"uatrpo"`` or ``"ppo"``
    :param env: Gymnasium's name of the environment, or ``module:name``
    :param seed: seed of the run, at least 0
    :param variant: how the run differs from the algorithm's settings: a name without ``=``, or varied values such as
        ``"noise=1"``, or both, separated by a comma; ``""`` if not at all
    :param n_timesteps: steps to learn for, over all environments of the run
    :param eval_freq: steps between deterministic evaluations, over all environments of the run; 0 for none
    :param n_eval_episodes: episodes of each evaluation
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
        """:return: where the run is in the study's folder, as RL Zoo names it: ``plain/uatrpo/Hopper-v4_1`` for seed 0"""
        variant = re.sub(r"[^\w.=,-]+", "-", self.variant.translate(ASCII), flags=re.ASCII) or PLAIN
        if len(variant) > LONGEST_NAME:
            variant = f"{variant[:LONGEST_NAME]}_{hashlib.sha256(self.variant.encode()).hexdigest()[:8]}"
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
    """
    :return: versions of what affects the numbers, by name. Of this package, it has the hash of its source too, which
        changes with every line.
    """
    found = {"platform": f"{platform.system()} {platform.machine()}", "python": platform.python_version()}
    for name in PACKAGES:
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    root = Path(sb3_uatrpo.__file__).parent
    source = hashlib.sha256()
    for path in sorted(path for path in root.rglob("*") if path.suffix in (".py", ".yml")):
        source.update(f"{path.relative_to(root).as_posix()}\n".encode() + path.read_bytes())
    return found | {"sb3_uatrpo": f"{sb3_uatrpo.__version__} (source {source.hexdigest()[:12]})"}


def plan(
    algos: Sequence[str],
    env_ids: Sequence[str],
    seeds: Iterable[int | str],
    n_timesteps: int | None = None,
    params: Sequence[str] = (),
    vary: Mapping[str, Sequence[Any]] | None = None,
    conf_files: Sequence[str] = (),
    eval_freq: int = 25_000,
    n_eval_episodes: int = 5,
    variants: Mapping[str, Mapping[str, Mapping[str, Any]]] | None = None,
) -> list[Run]:
    """
    All runs of a study: algorithms and their named variants × environments × seeds × varied hyperparameters.

    :param algos: names that RL Zoo knows
    :param env_ids: Gymnasium's names; ``module:name`` first imports the module that registers the environment
    :param seeds: seeds, and ranges such as ``"0-49"``; each is combined with everything else
    :param n_timesteps: steps of each run, ``None`` for the number in the hyperparameter file
    :param params: overridden hyperparameters, ``name:value`` for all algorithms or ``algo.name:value`` for one
    :param vary: values to try, by name of the hyperparameter. The value 0 of ``adversarial_noise`` means none.
    :param conf_files: hyperparameter files instead of the algorithms' own, ``file`` for all or ``algo:file`` for one
    :param eval_freq: steps between deterministic evaluations, 0 for none
    :param n_eval_episodes: episodes of each evaluation
    :param variants: for each name, as reports show it, and each algorithm: the hyperparameters that the variant changes
    :return: the runs, seed after seed, so that a study that was cut short is balanced
    :raises StudyError: if an algorithm, environment, hyperparameter or file does not exist, a value is invalid, or
        runs on one environment would have different numbers of steps
    """
    from rl_zoo3.utils import ALGOS

    from sb3_uatrpo.zoo import register

    # algorithm, name of its variant, and what that changes
    named: list[tuple[str, str, Mapping[str, Any]]] = [(algo, "", {}) for algo in algos]
    for variant, by_algo in (variants or {}).items():
        if not re.fullmatch(r"(?=.*\S)[^=,]+", variant) or variant in (PLAIN, FAILED):
            raise StudyError(
                f"the name of a variant must have neither '=' nor ',', and be none of '', {PLAIN!r} and {FAILED!r}, "
                f"but it is {variant!r}"
            )
        named += [(algo, variant, changes) for algo, changes in by_algo.items()]
    every_algo = list(dict.fromkeys(algo for algo, _, _ in named))
    register()
    for algo in every_algo:
        if algo not in ALGOS:
            raise StudyError(f"unknown algorithm {algo!r}; RL Zoo knows {', '.join(sorted(ALGOS))}")
    texts_of = _by_algorithm("a hyperparameter", params, ".", every_algo, str.isidentifier)
    overrides = {algo: dict(map(split_assignment, texts)) for algo, texts in texts_of.items()}
    changed = set().union(*overrides.values(), *(changes for _, _, changes in named))
    if n_timesteps is not None and "n_timesteps" in changed:
        raise StudyError(f"n_timesteps is given twice: for all runs ({n_timesteps}), and as a hyperparameter")
    for name in changed.intersection(vary or {}):
        raise StudyError(f"{name} is both overridden and varied: the names of the variants would be wrong")
    # other colons belong to the path of a file
    configs = _by_algorithm("a file", conf_files, ":", every_algo, ALGOS.__contains__)
    kinds = []
    for env_id, (algo, name, changes) in itertools.product(env_ids, named):
        of = f"{algo} on {env_id}"
        hyperparameters = _hyperparameters(algo, env_id, {**overrides[algo], **changes}, configs[algo])
        configured = hyperparameters.pop("n_timesteps", None)
        steps = _whole(configured if n_timesteps is None else n_timesteps, of)
        if algo == "ars" and hyperparameters.get("n_envs", 1) != 1:
            # RL Zoo evaluates its candidates in processes of their own, whose episodes nobody sees
            raise StudyError(f"ars takes n_envs 1 in a study, but on {env_id} it is {hyperparameters['n_envs']}")
        for condition, values in _conditions(vary or {}).items():
            # without noise it is the algorithm itself, even if a file sets some
            settings = {k: v for k, v in {**hyperparameters, **values}.items() if k != NOISE or values.get(NOISE) != 0}
            _check_hyperparameters(algo, ALGOS[algo], settings, of)
            kinds.append((algo, env_id, ",".join(filter(None, [name, condition])), steps, as_json(settings)))
    refuse_unequal_lengths(
        ((env_id, algo, steps) for algo, env_id, _, steps, _ in kinds),
        "give all runs one number (--n-timesteps), or each algorithm a study of its own",
    )
    runs: dict[Path, Run] = {}
    for seed, (algo, env_id, variant, steps, settings) in itertools.product(parse_seeds(seeds), kinds):
        run = Run(algo, env_id, seed, variant, steps, eval_freq, n_eval_episodes, settings)
        if (other := runs.setdefault(run.path, run)) != run:
            raise StudyError(f"{other} and {run} would have one folder, {run.path}: they need names that differ more")
    return list(runs.values())


def refuse_unequal_lengths(runs: Iterable[tuple[str, str, int]], remedy: str) -> None:
    """
    :param runs: environment, algorithm and number of steps of each run
    :param remedy: what the user can do about it
    :raises StudyError: if runs on one environment have different numbers of steps, since reports do not compare them
    """
    lengths: dict[str, dict[int, set[str]]] = defaultdict(lambda: defaultdict(set))
    for env_id, algorithm, steps in runs:
        lengths[env_id][steps].add(algorithm)
    for env_id, of in lengths.items():
        if len(of) > 1:
            listed = " and ".join(f"{steps:,} ({', '.join(sorted(of[steps]))})" for steps in sorted(of))
            raise StudyError(
                f"reports do not compare runs of different length: on {env_id} they have {listed} steps; {remedy}"
            )


# What a study's file may contain: the argument of ``plan``, what it must be, and how that is found out
STUDY_FILE: dict[str, tuple[str, str, Callable[[Any], bool]]] = {
    "algorithms": ("algos", "a list of names", lambda of: _is_list(of, str)),
    "environments": ("env_ids", "a list of names", lambda of: _is_list(of, str)),
    "seeds": ("seeds", "a seed, a range such as 0-4, or a list of these", lambda of: of not in ([], None)),
    "n_timesteps": ("n_timesteps", "a number of at least 1", lambda of: _whole(of, "the study") > 0),
    "noise": ("noise", "a list of numbers of at least 0", lambda of: _is_list(of, int, float) and min(of) >= 0),
    "eval_freq": ("eval_freq", "an integer of at least 0", lambda of: type(of) is int and of >= 0),
    "n_eval_episodes": ("n_eval_episodes", "an integer of at least 1", lambda of: type(of) is int and of >= 1),
    "variants": (
        "variants",
        "hyperparameters by name and algorithm",
        lambda of: all(isinstance(x, dict) and x and all(isinstance(y, dict) for y in x.values()) for x in of.values()),
    ),
}


def _is_list(value: Any, *types: type) -> bool:
    return isinstance(value, list) and value != [] and all(type(each) in types for each in value)


def read_study_file(path: str | os.PathLike[str]) -> dict[str, Any]:
    """
    :return: arguments of ``plan`` by name, from a YAML file with ``algorithms``, ``environments``, ``seeds``,
        ``n_timesteps``, ``noise``, ``eval_freq``, ``n_eval_episodes`` and ``variants``, all optional
    :raises StudyError: naming the file, if it cannot be read or has other content
    """
    import yaml

    with _errors_of(path):
        content = as_json(yaml.safe_load(Path(path).read_text(encoding="utf-8")))
        if not isinstance(content, dict) or content.keys() - STUDY_FILE.keys():
            raise ValueError(f"it must have some of {', '.join(STUDY_FILE)}, but it has {', '.join(content or ())}")
        study: dict[str, Any] = {"seeds": 0}
        for name, value in content.items():
            argument, wanted, is_valid = STUDY_FILE[name]
            if not is_valid(value):
                raise ValueError(f"{name} must be {wanted}, but it is {value!r}")
            study[argument] = value
        study["seeds"] = parse_seeds(study["seeds"] if isinstance(study["seeds"], list) else [study["seeds"]])
    noise = study.pop("noise", None)
    return study | ({"vary": {NOISE: list(map(float, noise))}} if noise else {})


def parse_seeds(texts: Iterable[int | str]) -> list[int]:
    """:return: all seeds, and all of ranges such as ``0-49``, each once"""
    seeds: list[int] = []
    for text in texts:
        match = re.fullmatch(r"(\d{1,10})(?:-(\d{1,10}))?", str(text))
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (0, -1)
        if not first <= last < 2**32:
            raise StudyError(f"a seed must be an integer from 0 to 2**32-1, but it is {text}; 0-49 is a range")
        if last - first >= MAX_SEEDS:
            raise StudyError(f"a range may have up to {MAX_SEEDS:,} seeds, but {text} has {last - first + 1:,}")
        seeds += range(first, last + 1)
    return list(dict.fromkeys(seeds))


def register_environment(env_id: str) -> str:
    """:return: Gymnasium's name of ``name`` or ``module:name``, after the import of the module that registers it"""
    module, _, name = env_id.rpartition(":")
    if module:
        import_module(module)
    return name


def split_assignment(text: str) -> tuple[str, Any]:
    """:return: the name and the value of ``name:value``"""
    name, _, value = text.partition(":")
    if not name or not value:
        raise StudyError(f"a hyperparameter must be written name:value, but it is {text!r}")
    return name, parse_value(value)


def parse_value(text: str) -> Any:
    """
    :return: the value of a Python literal, or of YAML's ``true``, ``false`` and ``null``; other text unchanged, since
        RL Zoo evaluates some code in its files
    """
    with suppress(ValueError, SyntaxError):
        return ast.literal_eval(text.strip())
    return WORDS.get(text.strip().lower(), text)


def as_json(value: Any) -> Any:
    """:return: the value as JSON returns it, with lists for tuples; ValueError or TypeError if it cannot hold it"""
    if isinstance(value, dict):
        if not_text := [key for key in value if not isinstance(key, str)]:
            raise ValueError(f"a key must be text, but it is {not_text[0]!r}")
        return {key: as_json(of) for key, of in value.items()}
    if isinstance(value, list | tuple):
        return [as_json(of) for of in value]
    return json.loads(json.dumps(value, allow_nan=False))


def _hyperparameters(algo: str, env_id: str, overrides: dict[str, Any], configs: Sequence[str]) -> dict[str, Any]:
    """The entry of the last hyperparameter file, as ``python -m rl_zoo3.train`` would find it."""
    import gymnasium as gym
    from rl_zoo3.exp_manager import ExperimentManager

    with _errors_of(f"environment {env_id!r}"):
        name = register_environment(env_id)
    if name not in gym.registry or env_id.startswith(":"):
        raise StudyError(f"unknown environment {env_id!r}")
    options: dict[str, Any] = {"hyperparams": overrides, "config": configs[-1] if configs else None}
    source = f" in {configs[-1]}" if configs else ""
    with _errors_of(f"hyperparameters of {algo} on {env_id}{source}"), redirect_stdout(io.StringIO()):
        return ExperimentManager(argparse.Namespace(), algo, name, os.devnull, **options).read_hyperparameters()[1]


@contextmanager
def _errors_of(source: Any) -> Iterator[None]:
    """A user's module, or a hyperparameter file of Python, may raise anything, or end the process."""
    try:
        yield
    except (Exception, SystemExit) as error:
        kind = "" if type(error) in (StudyError, ValueError) else f"{type(error).__name__}: "
        raise StudyError(f"{source}: {kind}{' '.join(str(error).split())}") from error


def _by_algorithm(
    what: str, texts: Sequence[str], separator: str, algos: Sequence[str], is_algorithm: Callable[[str], bool]
) -> dict[str, list[str]]:
    """What is given for each algorithm: the texts for all, then those that begin with its name and the separator."""
    for_all: list[str] = []
    for_one: dict[str, list[str]] = {algo: [] for algo in algos}
    for text in texts:
        algo, _, rest = text.partition(separator)
        if not rest or not is_algorithm(algo):
            for_all.append(text)
        elif algo in for_one:
            for_one[algo].append(rest)
        else:
            raise StudyError(f"{text} gives {what} to {algo!r}, which is not in the study")
    return {algo: for_all + texts for algo, texts in for_one.items()}


def _conditions(vary: Mapping[str, Sequence[Any]]) -> dict[str, dict[str, Any]]:
    """Every combination of the values, by its name."""
    conditions: dict[str, dict[str, Any]] = {}
    for values in itertools.product(*vary.values()):
        condition = dict(zip(vary, values, strict=True))
        if type(condition.get(NOISE)) is int:
            # as --noise and study files have it, or the same run would have two settings
            condition[NOISE] = float(condition[NOISE])
        named = [
            f"{'noise' if name == NOISE else name}={_short(value)}"
            for name, value in condition.items()
            if name != NOISE or value != 0
        ]
        # 1 and 1.0 have one name, and are one value
        conditions.setdefault(",".join(named), condition)
    return conditions


def _short(value: Any) -> str:
    """A value in the name of a variant. Commas without a space separate the values of a variant."""
    if isinstance(value, float):
        return f"{value:g}" if float(f"{value:g}") == value else repr(value)
    return re.sub(r",(?! )", ", ", str(value))


def _whole(steps: Any, of: str) -> int:
    """The number of steps as an integer: 1e6 is given as a float or a string."""
    if steps is None:
        raise StudyError(f"the hyperparameters of {of} have no n_timesteps: give it with --n-timesteps")
    with suppress(TypeError, ValueError):
        if (number := float(steps)) >= 1 and number.is_integer():
            return int(number)
    raise StudyError(f"n_timesteps of {of} must be an integer of at least 1, but it is {steps!r}")


def _check_hyperparameters(algo: str, algorithm: type, hyperparameters: Mapping[str, Any], of: str) -> None:
    accepted = (set(inspect.signature(algorithm).parameters) | ZOO_HYPERPARAMETERS) - NOT_HYPERPARAMETERS
    for name, value in hyperparameters.items():
        if name not in accepted:
            raise StudyError(f"unknown hyperparameter {name!r} of {algo}; it has {', '.join(sorted(accepted))}")
        try:
            as_json(value)
        except (TypeError, ValueError) as error:
            raise StudyError(
                f"{name} of {of} must be a finite number or a value that JSON can hold, but it is {value!r}; code is "
                "written as a string, as in RL Zoo's YAML files"
            ) from error
