"""A dict that finds values when they are read: a dict in all that can be read of it."""

import copy
import json
import pickle

import pytest

from sb3_uatrpo.rollout_locals import RolloutLocals

READS = {
    "item": lambda found: found["values"],
    "get": lambda found: found.get("values"),
    "items": lambda found: dict(found.items())["values"],
    "values": lambda found: list(found.values())[1],
    "pop": lambda found: found.pop("values"),
    "pop with a default": lambda found: found.pop("values", None),
    "popitem": lambda found: found.popitem()[1],
    "setdefault": lambda found: found.setdefault("values", 0),
    "copy": lambda found: found.copy()["values"],
    "dict": lambda found: dict(found)["values"],
    "copy.copy": lambda found: copy.copy(found)["values"],
    "copy.deepcopy": lambda found: copy.deepcopy(found)["values"],
    "pickle": lambda found: pickle.loads(pickle.dumps(found))["values"],
    "json": lambda found: json.loads(json.dumps(found))["values"],
    "starred": lambda found: {**found}["values"],
    "arguments": lambda found: (lambda n, values: values)(**found),
    "or": lambda found: (found | {})["values"],
    "or, on the right": lambda found: ({} | found)["values"],
    "updated": lambda found: [plain := {}, plain.update(found), plain["values"]][2],
    "format": lambda found: int("{values}".format_map(found)),
    "percent": lambda found: int("%(values)s" % found),  # noqa: UP031
    "repr": lambda found: eval(repr(found))["values"],
    "eval": lambda found: eval("values", {}, found),
    "equal": lambda found: 7 if found == {"n": 1, "values": 7} else 0,
    "not unequal": lambda found: 0 if found != {"n": 1, "values": 7} else 7,
    "match": lambda found: next(found[name] for name in found if name == "values"),
}


def waiting(calls: list) -> RolloutLocals:
    found = RolloutLocals({"n": 1})
    found.defer("values", lambda: calls.append(1) or 7)
    return found


@pytest.mark.parametrize("way", READS)
def test_every_way_of_reading_gets_the_value(way):
    calls: list = []
    assert READS[way](waiting(calls)) == 7
    assert calls


def test_what_is_not_read_is_not_found():
    calls: list = []
    found = waiting(calls)
    other = RolloutLocals()
    other.update(found)
    other["n"] = 2
    assert found["n"] == 1
    assert other["n"] == found.get("n") + 1 == 2
    assert list(found) == list(found.keys()) == ["n", "values"]
    assert "values" in other
    assert len(other) == 2
    assert other.get("absent", 3) == other.pop("absent", 3) == 3
    assert isinstance(other, dict)
    with pytest.raises(KeyError):
        other["absent"]
    assert not calls
    assert other["values"] == other["values"] == 7
    assert len(calls) == 1


def test_what_is_written_takes_its_place():
    calls: list = []
    found = waiting(calls)
    found["values"] = 8
    found.update(n=5)
    assert dict(found) == {"n": 5, "values": 8}
    del found["values"]
    assert found == {"n": 5}
    assert not calls
