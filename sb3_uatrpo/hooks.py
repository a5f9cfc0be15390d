"""Hooks that users attach to a policy: to its modules, and to the gradients of its parameters."""

from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager

from stable_baselines3.common.policies import ActorCriticPolicy
from torch.nn.modules import module as torch_module


class GradientHooks:
    """
    The hooks that see gradients: those of the parameters, and the full backward hooks of the modules, global ones
    included. Truthy if there are any.

    :param policy: the policy that they are attached to
    """

    def __init__(self, policy: ActorCriticPolicy) -> None:
        self._are_global = bool(torch_module._global_backward_hooks or torch_module._global_backward_pre_hooks)
        # without hooks, torch expects None in a parameter, and an empty dict in a module
        self._kept = [
            (owner, name, hooks, empty)
            for owners, names, empty in (
                (policy.parameters(), ("_backward_hooks",), lambda: None),
                (policy.modules(), ("_backward_hooks", "_backward_pre_hooks"), OrderedDict),
            )
            for owner in owners
            for name in names
            if (hooks := getattr(owner, name))
        ]

    def __bool__(self) -> bool:
        return self._are_global or bool(self._kept)

    @contextmanager
    def set_aside(self) -> Iterator[None]:
        """Within this context, only global hooks are called; these stay, since other threads may rely on them."""
        try:
            for owner, name, _, empty in self._kept:
                setattr(owner, name, empty())
            yield
        finally:
            for owner, name, hooks, _ in self._kept:
                setattr(owner, name, hooks)

    @contextmanager
    def put_back(self) -> Iterator[None]:
        """For use within ``set_aside``: in this context, the hooks are called again."""
        try:
            for owner, name, hooks, _ in self._kept:
                setattr(owner, name, hooks)
            yield
        finally:
            for owner, name, _, empty in self._kept:
                setattr(owner, name, empty())
