"""
Studies: many runs, their statistics, and their pictures.

Functions that need pandas or matplotlib are not imported here: import them from ``results``, ``report`` and ``plots``.
"""

from sb3_uatrpo.study.record import Record, RunSpec, StudyError, read_record, read_records, write_record
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
    "Estimate", "Record", "RunSpec", "StudyError", "Welch", "bootstrap", "bootstrap_cvar", "bootstrap_mean", "cvar",
    "difference_of_cvars", "difference_of_means", "final_return", "interquartile_mean", "learning_curve",
    "performance_profile", "probability_of_improvement", "read_record", "read_records", "share_at_least",
    "standard_error", "welch_test", "write_record",
]  # fmt: skip
