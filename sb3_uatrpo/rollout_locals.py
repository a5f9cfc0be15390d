"""What callbacks see of a rollout: its local variables, some of which are computed only when they are read."""

from collections.abc import Callable, ItemsView, Iterator, ValuesView
from typing import Any

from stable_baselines3.common.callbacks import BaseCallback, CallbackList


class _Deferred:
    """Placeholder in the dict for a value that has not been read yet."""

    __slots__ = ("find",)

    def __init__(self, find: Callable[[], Any]) -> None:
        self.find = find


class RolloutLocals(dict[str, Any]):
    """
    A dict that computes some of its values when they are first read, by whatever method, and then keeps them.

    Readers always get the value itself, never a placeholder. Only ``update`` from another dict of this class copies
    unread values without computing them.
    """

    def defer(self, name: str, find: Callable[[], Any]) -> None:
        """
        :param name: name of the value
        :param find: returns the value; every call must return the same one
        """
        dict.__setitem__(self, name, _Deferred(find))

    def __getitem__(self, name: str) -> Any:
        value = super().__getitem__(name)
        if type(value) is _Deferred:
            value = value.find()
            super().__setitem__(name, value)
        return value

    # The methods below read through __getitem__; dict's own methods do not. dict(found), {**found} and f(**found) read
    # through it too, but only if __iter__ is overridden.

    def __iter__(self) -> Iterator[str]:
        return super().__iter__()

    def get(self, name: str, default: Any = None) -> Any:
        try:
            return self[name]
        except KeyError:
            return default

    def values(self) -> ValuesView:  # type: ignore[override]
        return dict(self).values()

    def items(self) -> ItemsView:  # type: ignore[override]
        return dict(self).items()

    def pop(self, name: str, *default: Any) -> Any:
        if name in self:
            self[name]
        return super().pop(name, *default)

    def popitem(self) -> tuple[str, Any]:
        name = next(reversed(self))
        return name, self.pop(name)

    def setdefault(self, name: str, default: Any = None) -> Any:
        if name not in self:
            self[name] = default
        return self[name]

    def copy(self) -> dict[str, Any]:
        return dict(self)

    def __or__(self, other: Any) -> dict[str, Any]:  # type: ignore[override]
        return dict(self) | other

    def __eq__(self, other: object) -> bool:
        return dict(self) == other

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __repr__(self) -> str:
        return repr(dict(self))

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, (dict(self),)

    def update(self, *others: Any, **named: Any) -> None:
        # called for each callback at each step: looking up super() would take as long as the rest
        for other in others:
            # dict's own items, which do not compute deferred values
            dict.update(self, dict.items(other) if type(other) is RolloutLocals else other)
        if named:
            dict.update(self, named)


class CallbacksWithRolloutLocals(CallbackList):
    """
    Shares one ``RolloutLocals`` among all callbacks, nested ones included, so that a value that no callback reads is
    not computed at each step. Otherwise it passes for the user's callback: it has its attributes, and the local
    variable ``callback`` is that of the user.

    :param callback: a callback that has already been initialised
    """

    def __init__(self, callback: BaseCallback) -> None:
        super().__init__([callback])
        self.model = callback.model

    def __getattr__(self, name: str) -> Any:
        # only for what this object lacks; nothing can be asked before it has its callback, as while it is copied
        if name.startswith("__") or "callbacks" not in vars(self):
            raise AttributeError(name)
        return getattr(self.callbacks[0], name)

    def on_training_start(self, locals_: dict[str, Any], globals_: dict[str, Any]) -> None:
        seen = RolloutLocals(locals_)
        self._show_the_users(seen)
        super().on_training_start(seen, globals_)

    def update_locals(self, locals_: dict[str, Any]) -> None:
        self._show_the_users(locals_)
        super().update_locals(locals_)

    def _show_the_users(self, locals_: dict[str, Any]) -> None:
        if dict.get(locals_, "callback") is self:
            dict.__setitem__(locals_, "callback", self.callbacks[0])
