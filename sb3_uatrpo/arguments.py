"""
Checks of constructor arguments.

Each takes the argument's name and the value that was given, and returns the value, or raises a ``ValueError`` that
names both and what would be accepted. Numbers are returned as Python's own: NumPy's may overflow in sums and products,
and torch refuses some.
"""

import difflib
import functools
import inspect
import math
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from numbers import Integral, Real
from typing import Any, NoReturn, ParamSpec

import numpy as np
from stable_baselines3.common.buffers import RolloutBuffer
from stable_baselines3.common.policies import ActorCriticPolicy

#: A check with all but name and value settled
Rule = Callable[[str, Any], Any]
P = ParamSpec("P")

# Arguments of PPO, A2C and sb3-contrib's TRPO
_INSTEAD = {
    **dict.fromkeys(("clip_range", "max_grad_norm"), "the trust region bounds the step"),
    **dict.fromkeys(("clip_range_vf", "vf_coef"), "the value function has a loss of its own, which is not clipped"),
    **dict.fromkeys(("cg_max_steps", "cg_damping"), "random projections and shrinkage replace conjugate gradients"),
    **dict.fromkeys(("use_rms_prop", "rms_prop_eps"), "policy_kwargs has optimizer_class and optimizer_kwargs"),
    **dict.fromkeys(("shrinkage", "step_length_samples"), "only UATRPO has it: docs/using.md has MatchedTRPO's preset"),
    "ent_coef": "there is no entropy bonus",
    "n_epochs": "n_critic_updates is the number of epochs of the value function, and the actor takes one step",
}


def explain_unknown(init: Callable[P, None]) -> Callable[P, None]:
    """Let the ``TypeError`` of a constructor say what an unknown argument may be meant for."""
    known = list(inspect.signature(init).parameters)

    @functools.wraps(init)
    def explained(*args: P.args, **kwargs: P.kwargs) -> None:
        for name in kwargs.keys() - set(known):
            similar = difflib.get_close_matches(name, known, n=1)
            if name in _INSTEAD:
                advice = f": {_INSTEAD[name]}"
            elif name in inspect.signature(ActorCriticPolicy).parameters:
                advice = f": it belongs in policy_kwargs, as in policy_kwargs={{{name!r}: …}}"
            else:
                advice = f": did you mean {similar[0]!r}?" if similar else ""
            raise TypeError(f"{init.__qualname__}() got an unexpected keyword argument {name!r}{advice}")
        init(*args, **kwargs)

    return explained


def _refuse(name: str, value: Any, accepted: str) -> NoReturn:
    raise ValueError(f"{name} must be {accepted}, but it is {value!r}")


def check_integer(name: str, value: Any, low: int, high: int | None = None) -> int:
    """An integer of at least ``low``, and at most ``high`` if there is one."""
    number = int(value) if not isinstance(value, bool) and isinstance(value, Integral) else None
    if number is None or number < low or (high is not None and number > high):
        _refuse(name, value, f"an integer of at least {low}" if high is None else f"an integer from {low} to {high}")
    return number


def check_real(
    name: str,
    value: Any,
    low: float,
    high: float = math.inf,
    low_included: bool = False,
    high_included: bool = False,
    or_none: bool = False,
) -> float:
    """A finite number between the bounds. With ``or_none``, the error says that ``None`` is accepted too."""
    if not isinstance(value, bool) and isinstance(value, Real):
        try:
            number = float(value)
        except OverflowError:
            number = math.inf
        above = number >= low if low_included else number > low
        below = number <= high if high_included else number < high
        if math.isfinite(number) and above and below:
            return number
    if high == math.inf:
        accepted = f"a finite number {'of at least' if low_included else 'above'} {low:g}"
    else:
        accepted = f"a number in {'[' if low_included else '('}{low:g}, {high:g}{']' if high_included else ')'}"
    _refuse(name, value, f"{accepted}, or None" if or_none else accepted)


def check_rate(name: str, value: Any) -> float:
    """A finite number of at least zero."""
    return check_real(name, value, 0.0, low_included=True)


def check_choice(name: str, value: Any, choices: Sequence[str]) -> str:
    """One of the choices."""
    if not (isinstance(value, str) and value in choices):
        _refuse(name, value, "one of " + ", ".join(map(repr, choices)))
    return value


def check_optional(name: str, value: Any, kinds: type | tuple[type, ...], accepted: str) -> Any:
    """``None``, or an instance of one of the classes, which the error calls ``accepted``."""
    if value is not None and not isinstance(value, kinds):
        _refuse(name, value, f"{accepted} or None")
    return value


def check_class(name: str, value: Any, base: type, choices: Sequence[str] = ()) -> Any:
    """A subclass of ``base``, a function that might return an instance of it, or one of the names in ``choices``."""
    is_fine = issubclass(value, base) if isinstance(value, type) else callable(value) or value in choices
    if not is_fine:
        _refuse(name, value, ", ".join(["a subclass of " + base.__name__, *map(repr, choices)]))
    return value


def check_bool(name: str, value: Any) -> bool:
    """``True`` or ``False``."""
    if not isinstance(value, bool | np.bool_):
        _refuse(name, value, "True or False")
    return bool(value)


#: The rules of the arguments that all of this package's algorithms take
RULES: dict[str, Rule] = {
    "learning_rate": lambda name, x: x if callable(x) and not isinstance(x, dict) else check_rate(name, x),
    "n_steps": partial(check_integer, low=1),
    "batch_size": partial(check_integer, low=1),
    "gamma": partial(check_real, low=0.0, high=1.0, low_included=True, high_included=True),
    "gae_lambda": partial(check_real, low=0.0, high=1.0, low_included=True, high_included=True),
    "sub_sampling_factor": partial(check_integer, low=1),
    "n_reused_rollouts": partial(check_integer, low=0),
    "normalize_advantage": check_bool,
    "adversarial_noise": check_rate,
    "line_search_shrinking_factor": partial(check_real, low=0.0, high=1.0),
    "line_search_max_iter": partial(check_integer, low=1),
    "line_search_kl_factor": partial(check_real, low=0.0),
    "n_critic_updates": partial(check_integer, low=0),
    "use_sde": check_bool,
    "verbose": lambda name, value: check_integer(name, int(value) if isinstance(value, bool) else value, 0),
    "sde_sample_freq": partial(check_integer, low=-1),
    "fast_rollouts": check_bool,
    "rollout_buffer_class": lambda name, value: None if value is None else check_class(name, value, RolloutBuffer),
    "rollout_buffer_kwargs": partial(check_optional, kinds=Mapping, accepted="a dict"),
    "tensorboard_log": partial(check_optional, kinds=(str, os.PathLike), accepted="a path"),
    # no deque may be longer
    "stats_window_size": partial(check_integer, low=1, high=sys.maxsize),
    "seed": lambda name, value: None if value is None else check_integer(name, value, 0, 2**32 - 1),
}
