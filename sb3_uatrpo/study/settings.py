"""From what was asked for to the specifications of all runs; RL Zoo reads the hyperparameters."""

import argparse
import ast
import difflib
import inspect
import io
import itertools
import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import redirect_stdout
from importlib import import_module
from typing import Any

from sb3_uatrpo.study.errors import StudyError
from sb3_uatrpo.study.specification import RunSpec

# What RL Zoo's files may say besides arguments of the constructor
ZOO_SETTINGS = {
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
# Arguments of the constructor that the run itself fills in
NOT_SETTINGS = {"self", "env", "seed", "device", "verbose", "tensorboard_log", "_init_setup_model"}
NOISE = "adversarial_noise"
# How a varied setting is called in labels, where not by its own name
SHORT_NAMES = {NOISE: "noise"}


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
) -> list[RunSpec]:
    """
    All runs of a study: algorithms × environments × seeds × variants.

    :param algos: names that RL Zoo knows
    :param env_ids: Gymnasium's names; ``module:name`` imports the module that registers it first
    :param seeds: one run of everything else for each
    :param n_timesteps: steps of each run, ``None`` for what the hyperparameter file says
    :param params: overridden settings, ``name:value`` for all algorithms or ``algo.name:value`` for one
    :param vary: settings to try several values of, by name. The value 0 of ``adversarial_noise`` is the plain setting.
    :param conf_files: hyperparameter files instead of the algorithms' own, ``file`` for all or ``algo:file`` for one
    :param eval_freq: steps between deterministic evaluations, 0 for none
    :param n_eval_episodes: episodes of each
    :return: one specification for each run, seed after seed, so that a study that was cut short is balanced
    :raises StudyError: for an algorithm, environment, hyperparameter or file that there is not, and for a value that
        cannot be
    """
    for seed in seeds:
        if not 0 <= seed < 2**32:
            raise StudyError(f"a seed is an integer from 0 to 2**32-1, but it is {seed}")
    algorithms = _known_algorithms()
    for algo in algos:
        if algo not in algorithms:
            raise StudyError(f"unknown algorithm {algo!r}{_close_to(algo, algorithms)}")
    overrides = _overrides(params, algos)
    configs = _configs(conf_files, algos, algorithms)
    variants = _variants(vary or {})
    for name in vary or {}:
        if any(name in own for own in overrides.values()):
            raise StudyError(f"{name} is both overridden and varied: the variants would not be what they are called")
    specs = []
    for env_id, algo in itertools.product(env_ids, algos):
        settings = read_settings(algo, env_id, overrides[algo], configs[algo])
        configured = settings.pop("n_timesteps", None)
        steps = _whole(configured if n_timesteps is None else n_timesteps, f"{algo} on {env_id}")
        for variant, changes in variants:
            varied = settings | changes
            # whatever a file says, no noise is the plain algorithm
            if changes.get(NOISE) == 0:
                del varied[NOISE]
            _check_names(algo, algorithms[algo], varied)
            plain = _plain(varied, f"{algo} on {env_id}")
            specs += [RunSpec(algo, env_id, seed, steps, variant, plain, eval_freq, n_eval_episodes) for seed in seeds]
    # the same seed of everything first, and nothing twice
    return sorted(dict.fromkeys(specs), key=lambda spec: list(seeds).index(spec.seed))


def register_environment(env_id: str) -> str:
    """
    :param env_id: Gymnasium's name of an environment, or ``module:name``
    :return: the name without the module, which is imported
    """
    module, _, name = env_id.rpartition(":")
    if module:
        import_module(module)
    return name


def read_settings(
    algo: str, env_id: str, overrides: Mapping[str, Any] | None = None, config: str | None = None
) -> dict[str, Any]:
    """
    The entry of a hyperparameter file, as ``python -m rl_zoo3.train`` would find it.

    :param algo: name that RL Zoo knows
    :param env_id: Gymnasium's name of an environment, or ``module:name``
    :param overrides: settings that replace those of the file
    :param config: file instead of the algorithm's own
    :return: settings by name
    :raises StudyError: if the environment or the file is unknown, or the file has no entry for it
    """
    import gymnasium as gym
    import yaml
    from rl_zoo3.exp_manager import ExperimentManager

    try:
        name = register_environment(env_id)
    # whatever a module does when it is imported, ending the process included
    except (Exception, SystemExit) as error:
        reason = f"{type(error).__name__}: {' '.join(str(error).split())}"
        raise StudyError(f"environment {env_id!r}: {reason}") from error
    if name not in gym.registry or env_id.startswith(":"):
        raise StudyError(f"unknown environment {env_id!r}{_close_to(name, gym.registry)}")
    try:
        with redirect_stdout(io.StringIO()):
            manager = ExperimentManager(
                argparse.Namespace(), algo, name, os.devnull, hyperparams=dict(overrides or {}), config=config
            )
            _, settings = manager.read_hyperparameters()
    except (OSError, ImportError, ValueError, LookupError, AttributeError, yaml.YAMLError) as error:
        source = f" in {config}" if config else ""
        raise StudyError(f"hyperparameters of {algo} on {env_id}{source}: {' '.join(str(error).split())}") from error
    return settings


def parse_value(text: str) -> Any:
    """
    :param text: a number, list or the like as Python writes it, or anything else
    :return: what it means; other text stays as it is, and RL Zoo evaluates it where its files may hold code
    """
    try:
        return ast.literal_eval(text.strip())
    except (ValueError, SyntaxError):
        return text


def split_assignment(text: str) -> tuple[str, Any]:
    """
    :param text: ``name:value``
    :return: the name, and what the value means
    :raises StudyError: if there is no name or no value
    """
    name, _, value = text.partition(":")
    if not name or not value:
        raise StudyError(f"a setting is written name:value, but it is {text!r}")
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
    return f"; known are {', '.join(known)}" if len(known) < 50 else ""


def _overrides(params: Sequence[str], algos: Sequence[str]) -> dict[str, dict[str, Any]]:
    """What is overridden, by algorithm; what is said of one algorithm beats what is said of all."""
    common: dict[str, Any] = {}
    own: dict[str, dict[str, Any]] = {algo: {} for algo in algos}
    for name, value in map(split_assignment, params):
        algo, dot, rest = name.partition(".")
        if dot and algo not in own:
            raise StudyError(f"a setting of {algo!r}, which is not in the study: {name}")
        if dot:
            own[algo][rest] = value
        else:
            common[name] = value
    return {algo: common | own[algo] for algo in algos}


def _configs(conf_files: Sequence[str], algos: Sequence[str], known: Iterable[str]) -> dict[str, str | None]:
    """The hyperparameter file of each algorithm, ``None`` for its own."""
    configs: dict[str, str | None] = dict.fromkeys(algos)
    # files for all first, so that those for one replace them
    split = [(text.partition(":"), text) for text in conf_files]
    for (algo, colon, file), text in sorted(split, key=lambda item: item[0][0] in configs):
        if colon and algo in known and algo not in configs:
            raise StudyError(f"a file of {algo!r}, which is not in the study: {text}")
        for target in [algo] if algo in configs else algos:
            configs[target] = file if algo in configs else text
    return configs


def _variants(vary: Mapping[str, Sequence[Any]]) -> list[tuple[str, dict[str, Any]]]:
    """Every combination of the values, with what it is called."""
    axes = []
    for name, values in vary.items():
        short = SHORT_NAMES.get(name, name)
        axis: list[tuple[str, dict[str, Any]]] = []
        for value in values:
            shown = f"{value:g}" if isinstance(value, float) else value
            axis.append(("" if name == NOISE and value == 0 else f"{short}={shown}", {name: value}))
        axes.append(axis)
    return [
        (
            ",".join(label for label, _ in combination if label),
            {k: v for _, part in combination for k, v in part.items()},
        )
        for combination in itertools.product(*axes)
    ]


def _whole(steps: Any, of: str) -> int:
    """The number of steps, which may be written as 1e6."""
    if steps is None:
        raise StudyError(f"the settings of {of} have no n_timesteps: give it")
    try:
        number = float(steps)
    except (TypeError, ValueError):
        number = math.nan
    if number < 1 or not number.is_integer():
        raise StudyError(f"n_timesteps of {of} must be an integer of at least 1, but it is {steps!r}")
    return int(number)


def _plain(settings: Mapping[str, Any], of: str) -> dict[str, Any]:
    """The settings as they come back from a record: a tuple is a list there."""
    plain = {}
    for name, value in settings.items():
        try:
            plain[name] = json.loads(json.dumps(value, allow_nan=False))
        except (TypeError, ValueError) as error:
            raise StudyError(
                f"{name} of {of} must be a finite number or what else JSON can hold, but it is {value!r}; code is "
                "written as a string, as in RL Zoo's YAML files"
            ) from error
    return plain


def _check_names(algo: str, cls: type, settings: Mapping[str, Any]) -> None:
    """
    :raises StudyError: if a setting is none of the algorithm's
    """
    accepted = (set(inspect.signature(cls).parameters) | ZOO_SETTINGS) - NOT_SETTINGS
    for name in settings:
        if name == NOISE and name not in accepted:
            raise StudyError(
                f"{algo} has no adversarial_noise (--noise); uatrpo, uatrpo_shrinkage and trpo_matched have"
            )
        if name not in accepted:
            raise StudyError(f"unknown hyperparameter {name!r} of {algo}{_close_to(name, accepted)}")
