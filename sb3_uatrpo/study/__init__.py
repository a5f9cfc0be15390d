"""Studies: many runs of RL Zoo, their tables, their statistics, and their pictures."""

from sb3_uatrpo.study.plan import Run, StudyError
from sb3_uatrpo.study.tables import Study, read_study

read_records = read_study  # its name for records in the earlier format

__all__ = ["Run", "Study", "StudyError", "read_records", "read_study"]
