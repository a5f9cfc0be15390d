"""Hooks that users attach to the gradients of a policy: to its parameters, and full backward hooks to its modules."""

from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch as th
from stable_baselines3.common.policies import ActorCriticPolicy
from torch.nn.modules import module as torch_module


class GradientHooks:
    """
    Truthy if there are any, global ones included.

    :param policy: the policy that they are attached to
    """

    def __init__(self, policy: ActorCriticPolicy) -> None:
        self.are_global = bool(torch_module._global_backward_hooks or torch_module._global_backward_pre_hooks)
        owners: list[Any] = [*policy.parameters(), *policy.modules()]
        self._found = [
            (owner, name, hooks)
            for owner in owners
            for name in ("_backward_hooks", "_backward_pre_hooks")
            if (hooks := getattr(owner, name, None))
        ]

    def __bool__(self) -> bool:
        return self.are_global or bool(self._found)

    @contextmanager
    def attached(self, are_attached: bool) -> Iterator[None]:
        """Attach or detach them, and undo it afterwards. Global ones stay, since other threads may rely on them."""
        try:
            self._attach(are_attached)
            yield
        finally:
            self._attach(not are_attached)

    def _attach(self, are_attached: bool) -> None:
        for owner, name, hooks in self._found:
            # without hooks, torch expects None in a parameter, and an empty dict in a module
            without: Any = None if isinstance(owner, th.Tensor) else OrderedDict()
            setattr(owner, name, hooks if are_attached else without)
