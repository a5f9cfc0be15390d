"""What callbacks see of a rollout: its local variables, some of which are computed only when they are read."""

from collections.abc import Callable, Iterator
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

    def get(self, name: str, default: Any = None) -> Any:
        try:
            return self[name]
        except KeyError:
            return default

    def pop(self, name: str, *default: Any) -> Any:
        self.get(name)
        return super().pop(name, *default)

    def __iter__(self) -> Iterator[str]:
        # dict(found), {**found} and f(**found) read through __getitem__ only if this is overridden
        return super().__iter__()

    def update(self, *others: Any, **named: Any) -> None:
        # called for each callback at each step: looking up super() would take as long as the rest
        for other in others:
            # dict's own items, which do not compute deferred values
            dict.update(self, dict.items(other) if type(other) is RolloutLocals else other)
        if named:
            dict.update(self, named)


def _after_computing_all(method: Callable[..., Any]) -> Callable[..., Any]:
    def read(self: RolloutLocals, *args: Any) -> Any:
        for name in self:
            self[name]
        return method(self, *args)

    return read


# the other ways of reading a dict
for _name in (
    "__eq__", "__ne__", "__or__", "__reduce_ex__", "__repr__", "copy", "items", "popitem", "setdefault", "values"
):  # fmt: skip
    setattr(RolloutLocals, _name, _after_computing_all(getattr(dict, _name)))


class CallbacksWithRolloutLocals(CallbackList):
    """
    Shares one ``RolloutLocals`` among all callbacks, nested ones included, so that a value that no callback reads is
    not computed at each step. Otherwise it acts as the user's callback: it has its attributes, and the local variable
    ``callback`` is that of the user.

    :param callback: a callback that has already been initialised
    """

    def __init__(self, callback: BaseCallback) -> None:
        super().__init__([callback])
        self.verbose = callback.verbose

    def __getattr__(self, name: str) -> Any:
        # only for what this object lacks; nothing can be asked before it has its callback, as while it is copied
        if name.startswith("__") or "callbacks" not in vars(self):
            raise AttributeError(name)
        return getattr(self.callbacks[0], name)

    def __setattr__(self, name: str, value: Any) -> None:
        # a subclass's collect_rollouts may leave something at the callback
        own = vars(self)
        if "callbacks" in own and name not in own:
            setattr(self.callbacks[0], name, value)
        else:
            super().__setattr__(name, value)

    def on_training_start(self, locals_: dict[str, Any], globals_: dict[str, Any]) -> None:
        seen = RolloutLocals(locals_)
        self._show_the_users(seen)
        super().on_training_start(seen, globals_)

    def update_locals(self, locals_: dict[str, Any]) -> None:
        self._show_the_users(locals_)
        # all callbacks share the dict that they were given when training started
        self.update_child_locals(locals_)

    def _show_the_users(self, locals_: dict[str, Any]) -> None:
        if dict.get(locals_, "callback") is self:
            dict.__setitem__(locals_, "callback", self.callbacks[0])
