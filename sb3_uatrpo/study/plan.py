"""From the user's request to the specifications of all runs. RL Zoo reads the hyperparameters."""

import argparse
import ast
import difflib
import inspect
import io
import itertools
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout, suppress
from importlib import import_module
from pathlib import Path
from typing import Any

from sb3_uatrpo.study.record import RunSpec, StudyError, check_schema, refuse_unequal_lengths

# What RL Zoo's files may set besides arguments of the constructor
ZOO_HYPERPARAMETERS = {
    "callback", "env_kwargs", "env_wrapper", "frame_stack", "monitor_kwargs", "n_envs", "noise_std", "noise_type",
    "normalize", "policy", "vec_env_wrapper",
}  # fmt: skip
# Arguments of the constructor that the run sets itself
NOT_HYPERPARAMETERS = {"self", "env", "seed", "device", "verbose", "tensorboard_log", "_init_setup_model"}
NOISE = "adversarial_noise"
# As YAML and Python write them
WORDS = {"true": True, "false": False, "null": None, "none": None}
# A longer range is a mistake in writing
MAX_SEEDS = 100_000


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
) -> list[RunSpec]:
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
    :return: the specification of each run, seed after seed, so that a study that was cut short is balanced
    :raises StudyError: if an algorithm, environment, hyperparameter or file does not exist, a value is invalid, or
        runs on one environment would have different numbers of steps
    """
    from rl_zoo3.utils import ALGOS

    from sb3_uatrpo.zoo import register

    # algorithm, name of its variant, and what that changes
    named: list[tuple[str, str, Mapping[str, Any]]] = [(algo, "", {}) for algo in algos]
    for variant, by_algo in (variants or {}).items():
        if not re.fullmatch(r"(?=.*\S)[^=,]+", str(variant)):
            raise StudyError(f"the name of a variant must not be empty or contain '=' or ',', but it is {variant!r}")
        named += [(algo, str(variant), changes) for algo, changes in by_algo.items()]
    every_algo = list(dict.fromkeys(algo for algo, _, _ in named))
    register()
    algorithms: dict[str, type] = ALGOS
    for algo in every_algo:
        if algo not in algorithms:
            raise StudyError(f"unknown algorithm {algo!r}{_close_to(algo, algorithms)}")
    texts_of = _by_algorithm("a hyperparameter", params, ".", every_algo, str.isidentifier)
    overrides = {algo: dict(map(split_assignment, texts)) for algo, texts in texts_of.items()}
    changed = set().union(*overrides.values(), *(changes for _, _, changes in named))
    if n_timesteps is not None and "n_timesteps" in changed:
        raise StudyError(f"n_timesteps is given twice: for all runs ({n_timesteps}), and as a hyperparameter")
    for name in changed.intersection(vary or {}):
        raise StudyError(f"{name} is both overridden and varied: the names of the variants would be wrong")
    # other colons belong to the path of a file
    configs = _by_algorithm("a file", conf_files, ":", every_algo, algorithms.__contains__)
    kinds = []
    for env_id, (algo, name, changes) in itertools.product(env_ids, named):
        of = f"{algo} on {env_id}"
        hyperparameters = _hyperparameters(algo, env_id, {**overrides[algo], **changes}, configs[algo])
        configured = hyperparameters.pop("n_timesteps", None)
        steps = _whole(configured if n_timesteps is None else n_timesteps, of)
        if algo == "ars" and hyperparameters.get("n_envs", 1) != 1:
            # RL Zoo evaluates its candidates in processes of their own, whose episodes no record would contain
            raise StudyError(f"ars takes n_envs 1 in a study, but on {env_id} it is {hyperparameters['n_envs']}")
        for condition, values in _conditions(vary or {}).items():
            varied = hyperparameters | values
            # without noise it is the algorithm itself, even if a file sets some
            if values.get(NOISE) == 0:
                del varied[NOISE]
            _check_names(algo, algorithms, varied)
            variant = ",".join(filter(None, [name, condition]))
            settings = {name: _setting(name, value, of) for name, value in varied.items()}
            kinds.append((algo, env_id, steps, variant, settings))
    refuse_unequal_lengths(
        ((env_id, algo, steps) for algo, env_id, steps, _, _ in kinds),
        "give all runs one number (--n-timesteps), or each algorithm a study of its own",
    )
    specs = [
        RunSpec(algo, env_id, seed, steps, variant, settings, eval_freq, n_eval_episodes)
        for seed in parse_seeds(seeds)
        for algo, env_id, steps, variant, settings in kinds
    ]
    return list(dict.fromkeys(specs))


# What a study's file may contain: arguments of ``plan``, and the values of --noise
STUDY_FILE = {
    "type": "object",
    "properties": {
        "algorithms": {"type": "array", "items": {"type": "string"}},
        "environments": {"type": "array", "items": {"type": "string"}, "minItems": 1},
        "seeds": {"type": ["integer", "string", "array"], "minItems": 1},
        # YAML reads 1e6 as a string
        "n_timesteps": {"type": ["number", "string"]},
        "noise": {"type": "array", "items": {"type": "number", "minimum": 0}},
        "eval_freq": {"type": "integer", "minimum": 0},
        "n_eval_episodes": {"type": "integer", "minimum": 1},
        "variants": {
            "type": "object",
            "additionalProperties": {"type": "object", "additionalProperties": {"type": "object"}, "minProperties": 1},
        },
    },
    "additionalProperties": False,
}


def read_study_file(path: str | os.PathLike[str]) -> dict[str, Any]:
    """
    :return: arguments of ``plan`` by name, from a YAML file with ``algorithms``, ``environments``, ``seeds``,
        ``n_timesteps``, ``noise``, ``eval_freq``, ``n_eval_episodes`` and ``variants``, all optional
    :raises StudyError: naming the file, if it cannot be read or has other content
    """
    import yaml

    try:
        content = as_json(yaml.safe_load(Path(path).read_text(encoding="utf-8")))
        check_schema(content, STUDY_FILE)
    except (OSError, TypeError, ValueError, yaml.YAMLError) as error:
        raise StudyError(f"{path}: {' '.join(str(error).split())}") from error
    seeds, noise = content.pop("seeds", 0), content.pop("noise", [])
    names = {"algorithms": "algos", "environments": "env_ids"}
    study = {names.get(name, name): value for name, value in content.items()}
    study["seeds"] = parse_seeds(seeds if isinstance(seeds, list) else [seeds])
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


def _hyperparameters(algo: str, env_id: str, overrides: dict[str, Any], configs: Sequence[str]) -> dict[str, Any]:
    """The entry of the last hyperparameter file, as ``python -m rl_zoo3.train`` would find it."""
    import gymnasium as gym
    from rl_zoo3.exp_manager import ExperimentManager

    with _errors_of(f"environment {env_id!r}"):
        name = register_environment(env_id)
    if name not in gym.registry or env_id.startswith(":"):
        raise StudyError(f"unknown environment {env_id!r}{_close_to(name, gym.registry)}")
    config = configs[-1] if configs else None
    options: dict[str, Any] = {"hyperparams": overrides, "config": config}
    source = f" in {config}" if config else ""
    with _errors_of(f"hyperparameters of {algo} on {env_id}{source}"), redirect_stdout(io.StringIO()):
        return ExperimentManager(argparse.Namespace(), algo, name, os.devnull, **options).read_hyperparameters()[1]


@contextmanager
def _errors_of(source: str) -> Iterator[None]:
    """A user's module, or a hyperparameter file of Python, may raise anything, or end the process."""
    try:
        yield
    except (Exception, SystemExit) as error:
        raise StudyError(f"{source}: {type(error).__name__}: {' '.join(str(error).split())}") from error


def parse_value(text: str) -> Any:
    """
    :return: the value of a Python literal, or of YAML's ``true``, ``false`` and ``null``; other text unchanged, since
        RL Zoo evaluates some code in its files
    """
    with suppress(ValueError, SyntaxError):
        return ast.literal_eval(text.strip())
    return WORDS.get(text.strip().lower(), text)


def split_assignment(text: str) -> tuple[str, Any]:
    """:return: the name and the value of ``name:value``"""
    name, _, value = text.partition(":")
    if not name or not value:
        raise StudyError(f"a hyperparameter must be written name:value, but it is {text!r}")
    return name, parse_value(value)


def as_json(value: Any) -> Any:
    """:return: the value as JSON returns it, with lists for tuples; ValueError or TypeError if it cannot hold it"""
    if isinstance(value, dict):
        if not_text := [key for key in value if not isinstance(key, str)]:
            raise ValueError(f"a key must be text, but it is {not_text[0]!r}")
        return {key: as_json(of) for key, of in value.items()}
    if isinstance(value, list | tuple):
        return [as_json(of) for of in value]
    return json.loads(json.dumps(value, allow_nan=False))


def _close_to(name: str, known: Iterable[str]) -> str:
    known = sorted(known)
    close = difflib.get_close_matches(name, known, n=1)
    if close:
        return f"; did you mean {close[0]!r}?"
    return f"; known names: {', '.join(known)}" if len(known) < 50 else ""


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
            # as --noise and study files have it, or the same run would have two keys
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


def _setting(name: str, value: Any, of: str) -> Any:
    """The value of a hyperparameter as a record returns it."""
    try:
        return as_json(value)
    except (TypeError, ValueError) as error:
        raise StudyError(
            f"{name} of {of} must be a finite number or a value that JSON can hold, but it is {value!r}; code is "
            "written as a string, as in RL Zoo's YAML files"
        ) from error


def _check_names(algo: str, algorithms: Mapping[str, type], hyperparameters: Iterable[str]) -> None:
    accepted = (set(inspect.signature(algorithms[algo]).parameters) | ZOO_HYPERPARAMETERS) - NOT_HYPERPARAMETERS
    for name in hyperparameters:
        if name == NOISE and name not in accepted:
            noisy = [other for other, cls in algorithms.items() if NOISE in inspect.signature(cls).parameters]
            raise StudyError(f"{algo} has no adversarial_noise (--noise), only {', '.join(sorted(noisy))}")
        if name not in accepted:
            raise StudyError(f"unknown hyperparameter {name!r} of {algo}{_close_to(name, accepted)}")
