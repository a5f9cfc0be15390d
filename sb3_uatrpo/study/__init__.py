"""Studies: many runs of RL Zoo, their tables, their statistics, and their pictures."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from sb3_uatrpo.study.plan import Run, StudyError

if TYPE_CHECKING:
    from sb3_uatrpo.study.tables import Study, read_study

__all__ = ["Run", "Study", "StudyError", "read_study"]


def __getattr__(name: str) -> Any:
    """Tables need pandas, without which the command line says in a line what to install."""
    if name in ("Study", "read_study"):
        return getattr(import_module("sb3_uatrpo.study.tables"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
