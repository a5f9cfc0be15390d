"""What users attach to a policy: hooks that listen to its modules, and to the gradients of its parameters."""

from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager

from stable_baselines3.common.policies import ActorCriticPolicy
from torch import nn
from torch.nn.modules import module as torch_module


def forward_hooks(module: nn.Module) -> tuple[dict, ...]:
    """
    :param module: any module
    :return: the dicts of hooks that see what goes through it: its own two, and the two of all modules
    """
    return (
        module._forward_hooks,
        module._forward_pre_hooks,
        torch_module._global_forward_hooks,
        torch_module._global_forward_pre_hooks,
    )


class GradientHooks:
    """
    The hooks that listen to gradients: of the parameters, and the full backward hooks of the modules.

    :param policy: true if it has any
    """

    def __init__(self, policy: ActorCriticPolicy) -> None:
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
        return bool(self._kept)

    @contextmanager
    def set_aside(self) -> Iterator[None]:
        """No hook is called while this lasts."""
        for owner, name, _, empty in self._kept:
            setattr(owner, name, empty())
        try:
            yield
        finally:
            for owner, name, hooks, _ in self._kept:
                setattr(owner, name, hooks)

    @contextmanager
    def put_back(self) -> Iterator[None]:
        """While they are set aside: they are called again while this lasts."""
        for owner, name, hooks, _ in self._kept:
            setattr(owner, name, hooks)
        try:
            yield
        finally:
            for owner, name, _, empty in self._kept:
                setattr(owner, name, empty())
