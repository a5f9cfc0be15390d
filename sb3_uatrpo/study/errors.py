"""The one error that a study's user can cause."""


class StudyError(Exception):
    """
    Something that was asked for cannot be done. The message is one line, and names what was given and what would be
    accepted.
    """
