"""
What the file of a record holds, as JSON Schema. The data of packed columns, lists of one length, and their order are
beyond it.
"""

from collections.abc import Sequence
from typing import Any

from sb3_uatrpo.study.columns import MOST_VALUES, TYPES

TEXT = {"type": "string"}
INTEGER = {"type": "integer"}
# what was not finite is written as null
NUMBER_OR_NULL = {"type": ["number", "null"]}


def _list_of(items: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"type": "array", "items": items, **more}


def _object(**properties: Any) -> dict[str, Any]:
    """One that has all these properties."""
    return {"type": "object", "properties": properties, "required": list(properties)}


def _column_of(items: dict[str, Any] | None = None, encodings: Sequence[str] = tuple(TYPES)) -> dict[str, Any]:
    """A list, or a packed column."""
    packed = _object(
        encoding={"enum": list(encodings)},
        length={"type": "integer", "minimum": 1, "maximum": MOST_VALUES},
        data=TEXT,
    )
    return {"if": {"type": "object"}, "then": packed, "else": _list_of(items or {})}


# Keywords of a release to come are not refused here, but an unknown one of a specification would change its key
SPECIFICATION = _object(
    algo=TEXT,
    env_id=TEXT,
    seed={"type": "integer", "minimum": 0},
    n_timesteps={"type": "integer", "minimum": 1},
    variant=TEXT,
    settings={"type": "object"},
    eval_freq={"type": "integer", "minimum": 0},
    n_eval_episodes=INTEGER,
) | {"additionalProperties": False}

INTEGERS = _column_of(INTEGER, ["delta-int64"])
NUMBERS = _column_of(NUMBER_OR_NULL)

RECORD = _object(
    key=TEXT,
    spec=SPECIFICATION,
    status={"enum": ["done", "failed"]},
    traceback={"type": ["string", "null"]},
    episodes=_object(
        timesteps=INTEGERS,
        returns=NUMBERS,
        lengths=INTEGERS,
    ),
    evaluations=_object(
        timesteps=_list_of(INTEGER),
        returns=_list_of(_list_of(NUMBER_OR_NULL, minItems=1)),
    ),
    # an algorithm may log what it likes; these are what a report reads
    updates=_object(timesteps=INTEGERS)
    | {
        "patternProperties": {"^kl_(ratio|proposed)$": NUMBERS},
        "additionalProperties": _column_of(),
    },
    versions={"type": "object", "additionalProperties": TEXT},
    machine={"type": "object", "additionalProperties": TEXT},
    wall_time={"type": "number"},
    started=TEXT,
)
