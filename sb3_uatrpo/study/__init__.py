"""Studies: many runs of RL Zoo, their tables, their statistics, and their pictures."""

from sb3_uatrpo.study.frozen import read_records
from sb3_uatrpo.study.plan import Run, StudyError
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
from sb3_uatrpo.study.tables import Study, read_study

__all__ = [
    "Estimate", "Run", "Study", "StudyError", "Welch", "bootstrap", "bootstrap_cvar", "bootstrap_mean", "cvar",
    "difference_of_cvars", "difference_of_means", "final_return", "interquartile_mean", "learning_curve",
    "performance_profile", "probability_of_improvement", "read_records", "read_study", "share_at_least",
    "standard_error", "welch_test",
]  # fmt: skip
