"""
May the fast path be taken? Whose code runs, and has anything changed since?

The fast path repeats in NumPy what a standard MLP policy (``plain_mlp.py``) computes. Rollouts, the critic's regression
and the products with F̂ and Σ̂ decide about it separately. In each, the policy itself computes first: the first step of a
rollout, the first minibatch, the action distribution of all steps. The fast path follows only if all of these hold:

1. The policy's parts are exactly the standard ones, with the methods that their libraries gave them (``is_as_built``).
2. While the policy computed, only these libraries' Python code ran in this thread, and no profiler (``RunningCode``).
3. The fast path finds the same, up to rounding (``same_but_for_rounding``); if not, ``warn_if_different`` warns.
4. During a rollout, nothing has changed since (``Watch``).

Each has further conditions of its own: ``DeferredRollouts._may_be_fast``, ``FastSteps.let_act``, ``ActingMLP.of`` and
``StandardMLP.is_fast_with`` on buffers and sizes, ``ArrayGradients.of`` on optimizers and hooks, ``Actor.find_params``
on the parameters of the actor. Otherwise the policy computes everything itself: the general path.
"""

import gc
import operator
import sys
import threading
import types
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import chain
from typing import Any
from weakref import WeakSet

import torch as th
from stable_baselines3.common.policies import ActorCriticPolicy
from torch import nn
from torch.nn.modules import module as torch_module

#: The packages whose code runs if nothing was added to a policy. All of Python's own would be too many: a hook may be a
#: ``unittest.mock.Mock``.
LIBRARIES = frozenset({"torch", "stable_baselines3", "gymnasium", "numpy", "sb3_uatrpo"})
_PYTHONS_OWN = frozenset({"abc", "collections", "contextlib", "logging", "typing"})
#: Difference that counts as rounding, relative to an output and to the largest of all: far above the effect of another
#: order of summation in float32, and far below that of any deliberate change.
_RELATIVE_TOLERANCE = 1e-4
#: Classes that were found to have only their own methods, with what they contained.
_looked_at: dict[type, dict[str, Any]] = {}
_children, _own_params = map(operator.itemgetter, ("_modules", "_parameters"))
_warned: WeakSet[ActorCriticPolicy] = WeakSet()


class RunningCode:
    """The Python code that runs within ``noted``: calls of functions, in this thread."""

    def __init__(self) -> None:
        self._globals: dict[types.CodeType, dict[str, Any]] = {}
        self._is_known = True

    @contextmanager
    def noted(self) -> Iterator[None]:
        """Within this context, code is noted. If another profiler is active, it stays, and no code is known."""
        # a profiler written in C may be known to threading alone
        if sys.getprofile() is not None or threading.getprofile() is not None:
            self._is_known = False
            yield
            return

        def note(frame: types.FrameType, event: str, _: Any) -> None:
            if event == "call":
                self._globals[frame.f_code] = frame.f_globals

        collects_garbage = gc.isenabled()
        try:
            # finalizers of garbage, whose time depends on all else in the process, would be noted too, and the choice
            # between the two paths would change the last digits
            gc.disable()
            sys.setprofile(note)
            yield
        finally:
            # not a profiler that somebody started within the context
            if sys.getprofile() is note:
                sys.setprofile(None)
            if collects_garbage:
                gc.enable()

    @property
    def is_library_code(self) -> bool:
        """Whether all of the code belongs to the libraries, as far as it is known."""
        packages = {str(names.get("__name__")).partition(".")[0] for names in self._globals.values()}
        return self._is_known and packages <= LIBRARIES | _PYTHONS_OWN

    def methods_of(self, kind: type) -> list[str]:
        """:return: the names of the methods of a class, without its base classes, that ran"""
        return [name for name, value in vars(kind).items() if getattr(value, "__code__", None) in self._globals]


def has_library_methods(owner: Any, *names: str) -> bool:
    """
    :param owner: any object
    :param names: of its methods
    :return: whether all of them are the functions that a library's class defines under these names
    """
    return not vars(owner).keys() & set(names) and all(
        _package(base) in LIBRARIES and is_own(base, name)
        for name in names
        for base in type(owner).__mro__
        if name in vars(base)
    )


def _package(kind: type) -> str:
    return kind.__module__.partition(".")[0]


def is_own(kind: type, name: str) -> bool:
    """
    :param kind: a library's class
    :param name: of one of its attributes
    :return: whether it is a function of the class itself, or plain data
    """
    value = vars(kind)[name]
    function = getattr(value, "__func__", getattr(value, "fget", value))
    if not isinstance(function, types.FunctionType):
        # a descriptor may call anything
        is_data = not callable(function) and not hasattr(type(function), "__get__")
        return is_data or isinstance(function, (type, types.GetSetDescriptorType, types.MemberDescriptorType))
    module = str(function.__globals__.get("__name__"))
    if kind is nn.Module:
        # has functions under two names, and torch.compile replaces some
        return module.startswith("torch.")
    return module == kind.__module__ and function.__qualname__ == f"{kind.__qualname__}.{name}"


def is_as_built(policy: ActorCriticPolicy) -> bool:
    """
    Whether a policy is unmodified also in ways that ``RunningCode`` cannot see: by functions implemented in C, or by
    those of the libraries themselves.

    :param policy: a policy of Stable-Baselines3
    :return: whether no module has a forward hook, no attribute of an object shadows one of its class, and no method of
        their classes was replaced
    """
    modules = list(policy.modules())
    owners: list[Any] = [*modules, policy.action_dist]
    return (
        not any(_forward_hooks(modules))
        and not any(hasattr(type(owner), name) for owner in owners for name in vars(owner))
        and all(map(_has_own_methods, _classes(owners)))
    )


def _classes(owners: Iterable[Any]) -> set[type]:
    """The libraries' classes that define what some objects do."""
    kinds = {base for kind in set(map(type, owners)) for base in kind.__mro__}
    return {kind for kind in kinds if _package(kind) in LIBRARIES}


def _has_own_methods(kind: type) -> bool:
    """Whether a library's class has only its own methods; a class that has not changed is looked at once."""
    kept = _looked_at.get(kind, {})
    # by identity: not all data can be compared
    if kept.keys() == vars(kind).keys() and all(map(operator.is_, kept.values(), vars(kind).values())):
        return True
    if not all(is_own(kind, name) for name in vars(kind)):
        return False
    _looked_at[kind] = dict(vars(kind))
    return True


def _forward_hooks(modules: Iterable[nn.Module]) -> list[dict]:
    own = [hooks for module in modules for hooks in (module._forward_hooks, module._forward_pre_hooks)]
    return [torch_module._global_forward_hooks, torch_module._global_forward_pre_hooks, *own]


class Watch:
    """
    Notices whether anything has changed that decides what a policy computes: the numbers of its parameters, its parts
    and its hooks, the methods of their classes, and attributes that hide them. Functions that torch or
    Stable-Baselines3 find in their modules are looked at only when a rollout starts, by what runs then. The watch is
    asked at each step, so it makes few calls, each of which compares many things.

    :param policy: a standard MLP policy on the CPU
    :param code: what ran when it computed
    """

    def __init__(self, policy: ActorCriticPolicy, code: RunningCode) -> None:
        modules = list(policy.modules())
        self._hooks = _forward_hooks(modules)
        self._objects = [*modules, policy.action_dist, policy.action_dist.distribution]
        self._types = list(map(type, self._objects))
        kinds = _classes(self._objects)
        self._dicts = [*map(vars, self._objects), *map(vars, kinds)]
        self._lengths = list(map(len, self._dicts))
        self._parents = [vars(module) for module in modules if module._modules]
        self._modules = _values(map(_children, self._parents))
        self._owners = [vars(module) for module in modules if module._parameters]
        params = _values(map(_own_params, self._owners))
        self._kinds, self._addresses = list(map(type, params)), list(map(th.Tensor.data_ptr, params))

        names: dict[Any, list[str]] = {kind: code.methods_of(kind) for kind in kinds}
        names[policy] = ["action_dist", "_squash_output", "share_features_extractor"]
        self._looks = [(operator.attrgetter(*names[owner]), owner) for owner in names if names[owner]]
        self._found = [look(owner) for look, owner in self._looks]

        self._memory = [memoryview(param.detach().numpy()).cast("B") for param in policy.parameters()]  # type: ignore[arg-type]
        self._numbers = list(map(bytes, self._memory))

    def sees_no_change(self) -> bool:
        """
        :return: whether everything is as it was when the watch began
        """
        return (
            list(map(len, self._dicts)) == self._lengths
            and not any(self._hooks)
            and list(map(type, self._objects)) == self._types
            and _values(map(_children, self._parents)) == self._modules
            and list(map(type, params := _values(map(_own_params, self._owners)))) == self._kinds
            # a parameter that was replaced by another has another address, and None has none
            and list(map(th.Tensor.data_ptr, params)) == self._addresses
            and [look(owner) for look, owner in self._looks] == self._found
            # lengths are equal, so startswith compares the whole buffers, without copying them
            and all(map(bytes.startswith, self._numbers, self._memory))
        )


def _values(tables: Iterable[dict[str, Any]]) -> list[Any]:
    return list(chain.from_iterable(map(dict.values, tables)))


def same_but_for_rounding(ours: Any, theirs: Any, scale: float = 0.0) -> bool:
    """
    :param ours: outputs of the fast path
    :param theirs: the policy's own
    :param scale: size of the numbers that the outputs are sums of; at least the largest output is assumed
    :return: whether they have the same type and agree up to rounding
    """
    ours, theirs = (th.as_tensor(outputs, device="cpu") for outputs in (ours, theirs))
    # another type is a difference: under autocast, outputs have fewer digits than the parameters
    if ours.shape != theirs.shape or ours.dtype != theirs.dtype:
        return False
    ours, theirs = ours.double(), theirs.double()
    if theirs.numel():
        scale = max(scale, theirs.abs().nan_to_num(0.0, 0.0).amax().item())
    return th.allclose(ours, theirs, rtol=_RELATIVE_TOLERANCE, atol=_RELATIVE_TOLERANCE * scale, equal_nan=True)


def warn_if_different(policy: ActorCriticPolicy, outputs: Mapping[str, tuple[Any, ...]]) -> bool:
    """
    :param policy: a standard MLP policy
    :param outputs: for each name, what ``same_but_for_rounding`` compares; the first time, a warning lists differences
    :return: whether there are any
    """
    differences = [name for name, compared in outputs.items() if not same_but_for_rounding(*compared)]
    if differences and policy not in _warned:
        _warned.add(policy)
        warnings.warn(
            "The policy looks like a standard MLP, but its layers alone do not reproduce "
            f"{' and '.join(differences)} that the policy itself computes. The slower general code path is used.",
            stacklevel=4,
        )
    return bool(differences)
