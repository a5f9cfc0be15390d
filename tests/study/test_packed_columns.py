import base64
import json
import math
import struct
import tracemalloc
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sb3_uatrpo.study.record import MAX_VALUES, pack_table, round_float, unpack_table

FINITE = st.floats(allow_nan=False, allow_infinity=False)
CELL = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.text(max_size=3),
    FINITE.map(round_float),
    st.sampled_from([0.0, -0.0, 1e38, 3.40282e38, 3.40283e38, 1.17549e-38, 1e-45, 1.79769e308]),
)
COLUMN = st.one_of(
    st.lists(st.integers()),
    st.lists(st.integers(-(2**63), 2**63 - 1)),
    st.lists(st.one_of(st.none(), FINITE.map(round_float))),
    st.lists(st.one_of(st.none(), st.floats(width=32, allow_nan=False, allow_infinity=False).map(round_float))),
    st.lists(CELL),
    # long enough to become shorter
    st.builds(lambda values, n: values * n, st.lists(CELL, max_size=3), st.integers(1, 200)),
)


def by_value_and_type(values):
    return [(type(value), repr(value)) for value in values]


@given(COLUMN)
def test_nothing_changes(values):
    packed = pack_table({"column": values})
    assert by_value_and_type(unpack_table(json.loads(json.dumps(packed)))["column"]) == by_value_and_type(values)


def packed(values):
    return pack_table({"column": values})["column"]


PACKED = packed([1.5] * 100)


def test_what_is_packed():
    n = 1000
    timesteps, ratios = list(range(1000, 1_001_000, 1000)), [round_float(math.exp(math.sin(i))) for i in range(n)]
    assert len(packed(timesteps)["data"]) < 0.1 * n
    assert len(packed(ratios)["data"]) < 5 * n
    assert packed([None, *ratios])["encoding"] == "float32"
    # neither short columns, nor what no array of these types holds
    too_large, mixed = [1e39, *ratios], [1, *ratios]
    for column in ([], [1, 2], [1.5, None], [None] * n, [True] * n, ["text"] * n, [2**70] * n, too_large, mixed):
        assert packed(column) == column
    assert list(pack_table({"a": [1.0] * MAX_VALUES, "b": [1.0]}).values()) == [[1.0] * MAX_VALUES, [1.0]]


def numbers_in(column, size, letter):
    """Read by a second way, which has nothing but the description."""
    content = zlib.decompress(base64.b64decode(column["data"]))
    n = column["length"]
    return [struct.unpack(f"<{letter}", content[i::n])[0] for i in range(n) if len(content) == n * size]


def test_columns_are_packed_as_described():
    floats = numbers_in(packed([None, *(i / 8 for i in range(8))] * 20), 4, "f")
    assert math.isnan(floats[0])
    assert floats[1:9] == [i / 8 for i in range(8)]
    integers = numbers_in(packed([7, 5, 5, 900] * 50), 8, "q")
    assert integers == [7, -2, 0, 895] + [-893, -2, 0, 895] * 49


def bomb(n_bytes):
    return base64.b64encode(zlib.compress(bytes(n_bytes), 9)).decode()


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"length": 99}, "its data are not those of 99 numbers"),
        ({"length": 101}, "its data are not those of 101 numbers"),
        ({"data": PACKED["data"][:-4]}, "column cannot be unpacked"),
        ({"data": PACKED["data"][1:]}, "column cannot be unpacked"),
        ({"data": ""}, "its data are not those of 100 numbers"),
        ({"data": "AAAA"}, "column cannot be unpacked"),
        ({"data": base64.b64encode(base64.b64decode(PACKED["data"]) + b"more").decode()}, "its data are not those"),
        ({"data": "\N{BLACK STAR}"}, "column cannot be unpacked"),
        ({"data": bomb(10**8)}, "its data are not those of 100 numbers"),
        ({"length": MAX_VALUES + 1}, f"have {MAX_VALUES + 1} values, but at most {MAX_VALUES} are unpacked"),
    ],
)
def test_damage_is_named(changes, reason):
    with pytest.raises(ValueError, match=reason):
        unpack_table({"column": {**PACKED, **changes}})


def test_a_bomb_is_not_unpacked():
    """Neither in one column, nor in many that are small."""
    large = {**PACKED, "data": bomb(10**8)}
    half = {**PACKED, "length": MAX_VALUES // 2, "data": bomb(2 * MAX_VALUES)}
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match="not those of 100 numbers"):
            unpack_table({"column": large})
        with pytest.raises(ValueError, match="values, but at most"):
            unpack_table(dict.fromkeys("abc", half))
        assert tracemalloc.get_traced_memory()[1] < 10**6
    finally:
        tracemalloc.stop()
