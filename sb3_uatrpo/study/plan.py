"""From the user's request to the specifications of all runs. RL Zoo reads the hyperparameters."""

import argparse
import ast
import difflib
import inspect
import io
import itertools
import json
import math
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import redirect_stdout
from importlib import import_module
from pathlib import Path
from typing import Any

from sb3_uatrpo.study.record import RunSpec, StudyError, check_schema

# What RL Zoo's files may set besides arguments of the constructor
ZOO_HYPERPARAMETERS = {
    "callback",
    "env_kwargs",
    "env_wrapper",
    "frame_stack",
    "monitor_kwargs",
    "n_envs",
    "noise_std",
    "noise_type",
    "normalize",
    "policy",
    "vec_env_wrapper",
}
# Arguments of the constructor that the run sets itself
NOT_HYPERPARAMETERS = {"self", "env", "seed", "device", "verbose", "tensorboard_log", "_init_setup_model"}
NOISE = "adversarial_noise"
# A longer range is a mistake in writing
MAX_SEEDS = 100_000


def plan(
    algos: Sequence[str],
    env_ids: Sequence[str],
    seeds: Sequence[int],
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
    :param seeds: each is combined with everything else
    :param n_timesteps: steps of each run, ``None`` for the number in the hyperparameter file
    :param params: overridden hyperparameters, ``name:value`` for all algorithms or ``algo.name:value`` for one
    :param vary: values to try, by name of the hyperparameter. The value 0 of ``adversarial_noise`` means the plain
        algorithm.
    :param conf_files: hyperparameter files instead of the algorithms' own, ``file`` for all or ``algo:file`` for one
    :param eval_freq: steps between deterministic evaluations, 0 for none
    :param n_eval_episodes: episodes of each evaluation
    :param variants: for each name, as reports show it, and each algorithm: the hyperparameters that the variant changes
    :return: the specification of each run, seed after seed, so that a study that was cut short is balanced
    :raises StudyError: if an algorithm, environment, hyperparameter or file does not exist, or a value is invalid
    """
    for seed in seeds:
        if not 0 <= seed < 2**32:
            raise StudyError(f"a seed must be an integer from 0 to 2**32-1, but it is {seed}")
    named = _named_variants(algos, variants or {})
    every_algo = list(dict.fromkeys(algo for algo, _, _ in named))
    algorithms = _known_algorithms()
    for algo in every_algo:
        if algo not in algorithms:
            raise StudyError(f"unknown algorithm {algo!r}{_close_to(algo, algorithms)}")
    overrides = {
        algo: dict(map(split_assignment, texts))
        for algo, texts in _by_algorithm("a hyperparameter", params, ".", every_algo, str.isidentifier).items()
    }
    if n_timesteps is not None and any(
        "n_timesteps" in changes for changes in [*overrides.values(), *(changes for _, _, changes in named)]
    ):
        raise StudyError(f"n_timesteps is given twice: for all runs ({n_timesteps}), and as a hyperparameter")
    # other colons belong to the path of a file
    configs = _by_algorithm("a file", conf_files, ":", every_algo, algorithms.__contains__)
    conditions = _conditions(vary or {})
    for name in vary or {}:
        if any(name in changes for changes in [*overrides.values(), *(changes for _, _, changes in named)]):
            raise StudyError(f"{name} is both overridden and varied: the names of the variants would be wrong")
    # algorithm, environment, steps, variant and hyperparameters
    kinds: list[tuple[str, str, int, str, dict[str, Any]]] = []
    for env_id, (algo, name, changes) in itertools.product(env_ids, named):
        config = configs[algo][-1] if configs[algo] else None
        hyperparameters = _hyperparameters(algo, env_id, overrides[algo] | changes, config)
        configured = hyperparameters.pop("n_timesteps", None)
        steps = _whole(configured if n_timesteps is None else n_timesteps, f"{algo} on {env_id}")
        if algo == "ars" and hyperparameters.get("n_envs", 1) != 1:
            # RL Zoo evaluates its candidates in processes of their own, whose episodes no record would contain
            raise StudyError(f"ars takes n_envs 1 in a study, but on {env_id} it is {hyperparameters['n_envs']}")
        for condition, values in conditions:
            varied = hyperparameters | values
            # noise 0 means the plain algorithm, even if a file sets some noise
            if values.get(NOISE) == 0:
                del varied[NOISE]
            _check_names(algo, algorithms, varied)
            plain = _plain(varied, f"{algo} on {env_id}")
            variant = ",".join(filter(None, [name, condition]))
            kinds.append((algo, env_id, steps, variant, plain))
    specs = [
        RunSpec(algo, env_id, seed, steps, variant, plain, eval_freq, n_eval_episodes)
        for seed in seeds
        for algo, env_id, steps, variant, plain in kinds
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
    :param path: a YAML file with ``algorithms``, ``environments``, ``seeds``, ``n_timesteps``, ``noise``,
        ``eval_freq``, ``n_eval_episodes`` and ``variants``, all optional
    :return: arguments of ``plan`` by name
    :raises StudyError: naming the file, if it cannot be read or has other content
    """
    import yaml

    try:
        content = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
        _check_keys(content)
        check_schema(content, STUDY_FILE)
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise StudyError(f"{path}: {' '.join(str(error).split())}") from error
    seeds = content.pop("seeds", 0)
    noise = content.pop("noise", [])
    names = {"algorithms": "algos", "environments": "env_ids"}
    study = {names.get(name, name): value for name, value in content.items()}
    study["seeds"] = parse_seeds(seeds if isinstance(seeds, list) else [seeds])
    return study | ({"vary": {NOISE: [float(value) for value in noise]}} if noise else {})


def parse_seeds(texts: Iterable[int | str]) -> list[int]:
    """
    :param texts: seeds, and ranges such as ``0-49``
    :return: all these seeds, each once
    :raises StudyError: if one is invalid
    """
    seeds: list[int] = []
    for text in texts:
        match = re.fullmatch(r"(\d{1,10})(?:-(\d{1,10}))?", str(text))
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (0, -1)
        if not first <= last < 2**32:
            raise StudyError(f"a seed must be an integer from 0 to 2**32-1, or a range like 0-49, but it is {text!r}")
        if last - first >= MAX_SEEDS:
            raise StudyError(f"a range may have up to {MAX_SEEDS:,} seeds, but {text} has {last - first + 1:,}")
        seeds += range(first, last + 1)
    return list(dict.fromkeys(seeds))


def shard(specs: Sequence[RunSpec], part: str) -> list[RunSpec]:
    """
    :param specs: the runs of a study
    :param part: ``i/n``, with i from 1 to n
    :return: the runs of this part; the parts are disjoint, and together they are all runs
    :raises StudyError: if there is no such part
    """
    match = re.fullmatch(r"(\d+)/(\d+)", part)
    if not match or not 1 <= int(match[1]) <= int(match[2]):
        raise StudyError(f"a part must be written i/n with 1 <= i <= n, but it is {part!r}")
    return list(specs[int(match[1]) - 1 :: int(match[2])])


def register_environment(env_id: str) -> str:
    """
    Import the module that registers an environment, if one is given.

    :param env_id: ``name`` or ``module:name``
    :return: Gymnasium's name of the environment, without the module
    """
    module, _, name = env_id.rpartition(":")
    if module:
        import_module(module)
    return name


def _hyperparameters(algo: str, env_id: str, overrides: dict[str, Any], config: str | None) -> dict[str, Any]:
    """The entry of a hyperparameter file, as ``python -m rl_zoo3.train`` would find it."""
    import gymnasium as gym
    import yaml
    from rl_zoo3.exp_manager import ExperimentManager

    try:
        name = register_environment(env_id)
    # importing a module may raise anything, or end the process
    except (Exception, SystemExit) as error:
        reason = f"{type(error).__name__}: {' '.join(str(error).split())}"
        raise StudyError(f"environment {env_id!r}: {reason}") from error
    if name not in gym.registry or env_id.startswith(":"):
        raise StudyError(f"unknown environment {env_id!r}{_close_to(name, gym.registry)}")
    try:
        with redirect_stdout(io.StringIO()):
            manager = ExperimentManager(
                argparse.Namespace(), algo, name, os.devnull, hyperparams=dict(overrides), config=config
            )
            _, hyperparameters = manager.read_hyperparameters()
    # a file of Python may raise anything, or end the process
    except (Exception, SystemExit) as error:
        source = f" in {config}" if config else ""
        known = isinstance(error, OSError | ValueError | yaml.YAMLError)
        reason = " ".join(f"{'' if known else f'{type(error).__name__}: '}{error}".split())
        raise StudyError(f"hyperparameters of {algo} on {env_id}{source}: {reason}") from error
    return hyperparameters


def parse_value(text: str) -> Any:
    """
    :param text: a Python literal, such as a number or a list, or any other text
    :return: the literal's value, or the text unchanged, which RL Zoo evaluates where its files may contain code
    """
    try:
        return ast.literal_eval(text.strip())
    except (ValueError, SyntaxError):
        return text


def split_assignment(text: str) -> tuple[str, Any]:
    """
    :param text: ``name:value``
    :return: the name and the value
    :raises StudyError: if one of them is missing
    """
    name, _, value = text.partition(":")
    if not name or not value:
        raise StudyError(f"a hyperparameter must be written name:value, but it is {text!r}")
    return name, parse_value(value)


def _known_algorithms() -> dict[str, type]:
    from rl_zoo3.utils import ALGOS

    from sb3_uatrpo.zoo import register

    register()
    return ALGOS


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
            raise StudyError(f"{what} of {algo!r}, which is not in the study: {text}")
    return {algo: for_all + texts for algo, texts in for_one.items()}


def _named_variants(
    algos: Sequence[str], variants: Mapping[str, Mapping[str, Mapping[str, Any]]]
) -> list[tuple[str, str, dict[str, Any]]]:
    """The plain algorithms and their variants: algorithm, name of the variant, hyperparameters."""
    for name in variants:
        if not re.fullmatch(r"(?=.*\S)[^=,]+", str(name)):
            raise StudyError(f"the name of a variant must not be empty or contain '=' or ',', but it is {name!r}")
    named = [
        (algo, str(name), dict(changes)) for name, by_algo in variants.items() for algo, changes in by_algo.items()
    ]
    return [*((algo, "", {}) for algo in algos), *named]


def _conditions(vary: Mapping[str, Sequence[Any]]) -> list[tuple[str, dict[str, Any]]]:
    """Every combination of the values, with its name."""
    conditions: dict[str, dict[str, Any]] = {}
    for values in itertools.product(*vary.values()):
        condition = dict(zip(vary, values, strict=True))
        named = [
            f"{'noise' if name == NOISE else name}={_short(value)}"
            for name, value in condition.items()
            if name != NOISE or value != 0
        ]
        # 1 and 1.0 have one name, and are one value
        conditions.setdefault(",".join(named), condition)
    return list(conditions.items())


def _short(value: Any) -> str:
    """A value in the name of a variant. Commas without a space separate the values of a variant."""
    if isinstance(value, float):
        return f"{value:g}" if float(f"{value:g}") == value else repr(value)
    return re.sub(r",(?! )", ", ", str(value))


def _check_keys(content: Any) -> None:
    """:raises ValueError: if a key of a mapping is not text, as in ``{1: 2}``; JSON has no other keys"""
    if isinstance(content, dict):
        for key, value in content.items():
            if not isinstance(key, str):
                raise ValueError(f"a key must be text, but it is {key!r}")
            _check_keys(value)
    elif isinstance(content, list | tuple):
        for value in content:
            _check_keys(value)


def _whole(steps: Any, of: str) -> int:
    """The number of steps as an integer: 1e6 is given as a float or a string."""
    if steps is None:
        raise StudyError(f"the hyperparameters of {of} have no n_timesteps: give it with --n-timesteps")
    try:
        number = float(steps)
    except (TypeError, ValueError):
        number = math.nan
    if number < 1 or not number.is_integer():
        raise StudyError(f"n_timesteps of {of} must be an integer of at least 1, but it is {steps!r}")
    return int(number)


def _plain(hyperparameters: Mapping[str, Any], of: str) -> dict[str, Any]:
    """The hyperparameters as a record returns them, for example with lists instead of tuples."""
    plain = {}
    for name, value in hyperparameters.items():
        try:
            _check_keys({name: value})
            plain[name] = json.loads(json.dumps(value, allow_nan=False))
        except (TypeError, ValueError) as error:
            raise StudyError(
                f"{name} of {of} must be a finite number or a value that JSON can hold, but it is {value!r}; code "
                "is written as a string, as in RL Zoo's YAML files"
            ) from error
    return plain


def _check_names(algo: str, algorithms: Mapping[str, type], hyperparameters: Iterable[str]) -> None:
    accepted = (set(inspect.signature(algorithms[algo]).parameters) | ZOO_HYPERPARAMETERS) - NOT_HYPERPARAMETERS
    for name in hyperparameters:
        if name == NOISE and name not in accepted:
            noisy = [other for other, cls in algorithms.items() if NOISE in inspect.signature(cls).parameters]
            raise StudyError(f"{algo} has no adversarial_noise (--noise), only {', '.join(sorted(noisy))}")
        if name not in accepted:
            raise StudyError(f"unknown hyperparameter {name!r} of {algo}{_close_to(name, accepted)}")
