"""
What RL Zoo has to know about this package: the algorithms, their search spaces and their hyperparameter files.

RL Zoo has no plug-in mechanism, so its modules are patched in place, each right after it is imported: entries are added
to its dictionaries, and our hyperparameter file becomes the default configuration. A name that somebody else has taken
stays theirs in all of these.
"""

import functools
import inspect
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

from sb3_uatrpo.matched_trpo import MatchedTRPO
from sb3_uatrpo.uatrpo import UATRPO
from sb3_uatrpo.zoo import search_space

# The names of UATRPO differ in their hyperparameter files and search spaces
ALGORITHMS = {"uatrpo": UATRPO, "uatrpo_small_batches": UATRPO, "uatrpo_paper": UATRPO, "trpo_matched": MatchedTRPO}
SAMPLERS = search_space.SAMPLERS
HYPERPARAMS = Path(__file__).parents[1] / "hyperparams"


def register() -> None:
    """
    Register the names in ``ALGORITHMS`` with RL Zoo. A second call changes nothing, and existing entries stay.

    :raises ImportError: if rl_zoo3 is not installed
    """
    for name in AMENDMENTS:
        patch(import_module(name))


def patch(module: ModuleType) -> None:
    """Add our entries to a module of RL Zoo, one of those in ``AMENDMENTS``."""
    AMENDMENTS[module.__name__](module)


def _add_algorithms(utils: ModuleType) -> None:
    for name, algorithm in ALGORITHMS.items():
        utils.ALGOS.setdefault(name, algorithm)


def _is_ours(name: str | None) -> bool:
    return name in ALGORITHMS and import_module("rl_zoo3.utils").ALGOS.get(name) is ALGORITHMS[name]


def _add_search_spaces(hyperparams_opt: ModuleType) -> None:
    for name, sampler in SAMPLERS.items():
        if _is_ours(name):
            hyperparams_opt.HYPERPARAMS_SAMPLER.setdefault(name, sampler)
            hyperparams_opt.HYPERPARAMS_CONVERTER.setdefault(name, search_space.convert_params)


def _add_default_configuration(exp_manager: ModuleType) -> None:
    """RL Zoo looks for hyperparameter files beside its own package; ours are beside this one."""
    manager = exp_manager.ExperimentManager
    original: Callable[..., None] = manager.__init__
    if getattr(original, "_sb3_uatrpo", False):
        return
    signature = inspect.signature(original)

    @functools.wraps(original)
    def with_our_default(*args: Any, **kwargs: Any) -> None:
        given = signature.bind(*args, **kwargs)
        algo = given.arguments.get("algo")
        if _is_ours(algo) and not given.arguments.get("config"):
            given.arguments["config"] = str(HYPERPARAMS / f"{algo}.yml")
        original(*given.args, **given.kwargs)

    with_our_default._sb3_uatrpo = True  # type: ignore[attr-defined]
    manager.__init__ = with_our_default


AMENDMENTS: dict[str, Callable[[ModuleType], None]] = {
    "rl_zoo3.utils": _add_algorithms,
    "rl_zoo3.hyperparams_opt": _add_search_spaces,
    "rl_zoo3.exp_manager": _add_default_configuration,
}
