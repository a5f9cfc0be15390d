"""What callbacks see of a rollout: its local variables, of which some are found only when they are read."""

from collections.abc import Callable, ItemsView, Iterator, ValuesView
from typing import Any

from stable_baselines3.common.callbacks import BaseCallback, CallbackList


class _Deferred:
    """Stands in a dict for a value that was not read yet."""

    __slots__ = ("find",)

    def __init__(self, find: Callable[[], Any]) -> None:
        self.find = find


class RolloutLocals(dict[str, Any]):
    """
    A dict that finds some of its values when they are read, in whatever way, and keeps them then.

    Whoever reads gets the value itself, never a substitute for it. Only what a dict of this kind takes over from
    another of this kind stays unread.
    """

    def defer(self, name: str, find: Callable[[], Any]) -> None:
        """
        :param name: name of the value
        :param find: returns it, the same at each call
        """
        dict.__setitem__(self, name, _Deferred(find))

    def __getitem__(self, name: str) -> Any:
        value = super().__getitem__(name)
        if type(value) is _Deferred:
            value = value.find()
            super().__setitem__(name, value)
        return value

    # What follows reads through the method above, which those of dict do not. Python's own ways of copying, such as
    # dict(found), {**found} and f(**found), do as well if __iter__ is not dict's.

    def __iter__(self) -> Iterator[str]:
        return super().__iter__()

    def get(self, name: str, default: Any = None) -> Any:
        try:
            return self[name]
        except KeyError:
            return default

    def values(self) -> ValuesView:  # type: ignore[override]
        return ValuesView(self)

    def items(self) -> ItemsView:  # type: ignore[override]
        return ItemsView(self)

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
        # once for each callback at each step: super() would take as long as the rest
        for other in others:
            # the items of dict, which looks at nothing
            dict.update(self, dict.items(other) if type(other) is RolloutLocals else other)
        if named:
            dict.update(self, named)


class CallbacksWithRolloutLocals(CallbackList):
    """
    Gives its callbacks, and through them theirs, one dict of local variables that defers what they do not read.

    :param callback: initialised already
    """

    def __init__(self, callback: BaseCallback) -> None:
        super().__init__([callback])
        self.model = callback.model

    def on_training_start(self, locals_: dict[str, Any], globals_: dict[str, Any]) -> None:
        super().on_training_start(RolloutLocals(locals_), globals_)
