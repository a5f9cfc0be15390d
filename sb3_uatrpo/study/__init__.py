"""
Studies: many runs, their statistics, and their pictures.

Names are imported when they are used, so that a command line asks for nothing that it does not need.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sb3_uatrpo.study.errors import StudyError
    from sb3_uatrpo.study.groups import Group, group_records
    from sb3_uatrpo.study.plots import (
        plot_cvar,
        plot_cvar_over_training,
        plot_estimates,
        plot_kl_ratio,
        plot_learning_curves,
        plot_performance_profile,
        styles,
    )
    from sb3_uatrpo.study.record import Record, read_record, read_records, write_record
    from sb3_uatrpo.study.report import read_folder
    from sb3_uatrpo.study.specification import RunSpec
    from sb3_uatrpo.study.statistics import (
        Estimate,
        Welch,
        bootstrap,
        bootstrap_cvar,
        bootstrap_mean,
        cvar,
        difference_of_cvars,
        difference_of_means,
        final_return,
        interquartile_mean,
        learning_curve,
        performance_profile,
        probability_of_improvement,
        share_at_least,
        standard_error,
        welch_test,
    )

__all__ = [
    "Estimate",
    "Group",
    "Record",
    "RunSpec",
    "StudyError",
    "Welch",
    "bootstrap",
    "bootstrap_cvar",
    "bootstrap_mean",
    "cvar",
    "difference_of_cvars",
    "difference_of_means",
    "final_return",
    "group_records",
    "interquartile_mean",
    "learning_curve",
    "performance_profile",
    "plot_cvar",
    "plot_cvar_over_training",
    "plot_estimates",
    "plot_kl_ratio",
    "plot_learning_curves",
    "plot_performance_profile",
    "probability_of_improvement",
    "read_folder",
    "read_record",
    "read_records",
    "share_at_least",
    "standard_error",
    "styles",
    "welch_test",
    "write_record",
]

_MODULES = ("errors", "specification", "record", "statistics", "groups", "plots", "report")


if not TYPE_CHECKING:  # a type checker would take any name for one of ours

    def __getattr__(name: str) -> Any:
        if name in __all__:
            for module in _MODULES:
                found = getattr(import_module(f"{__name__}.{module}"), name, None)
                if found is not None:
                    return found
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
