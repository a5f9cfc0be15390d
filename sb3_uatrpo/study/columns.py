"""
Columns of numbers as short text: what keeps the record of a long run small in a file that is still JSON.

A packed column is ``{"encoding": ..., "length": ..., "data": ...}``. Its data are base64 of zlib of the values as
little-endian numbers of one type, all first bytes first, then all second bytes, and so on: the bytes that hold the
exponents repeat themselves, and those of the digits do not get in between. There are two encodings:

* ``"float32"``: floats of at most six significant digits, which it keeps; NaN stands for ``None``.
* ``"delta-int64"``: integers, the first one and then the difference of each from the one before.
"""

import base64
import binascii
import math
import zlib
from typing import Any

import numpy as np

TYPES: dict[str, np.dtype[Any]] = {"float32": np.dtype("<f4"), "delta-int64": np.dtype("<i8")}
# float32 has seven: enough for a picture, and a third of the space
SIGNIFICANT_DIGITS = 6
# Values of a table, rows times columns, that are packed. A few bytes can claim to be a thousand times as many.
MOST_VALUES = 2**22

Table = dict[str, list[Any]]


def round_float(value: float) -> float:
    """:return: a finite float to six significant digits"""
    return float(f"{value:.{SIGNIFICANT_DIGITS}g}")


def pack_table(table: Table) -> dict[str, Any]:
    """
    :param table: columns of one length, finite floats rounded to six significant digits
    :return: the same with packed columns in the place of those that this makes shorter without changing a value
    """
    if sum(map(len, table.values())) > MOST_VALUES:
        return dict(table)
    return {name: _pack(values) for name, values in table.items()}


def unpack_table(table: dict[str, Any]) -> Table:
    """
    :param table: what ``pack_table`` returned, checked against the schema of a record
    :return: its columns
    :raises ValueError: naming the column whose data are not what it says that they are
    """
    packed = [column for column in table.values() if isinstance(column, dict)]
    n_values = sum(column["length"] for column in packed)
    if n_values > MOST_VALUES:
        raise ValueError(f"its packed columns have {n_values} values, and at most {MOST_VALUES} are unpacked")
    columns = {}
    for name, column in table.items():
        try:
            columns[name] = _unpack(column) if isinstance(column, dict) else column
        except (binascii.Error, zlib.error, ValueError) as error:
            raise ValueError(f"{name} cannot be unpacked: {error}") from error
    return columns


def _pack(values: list[Any]) -> Any:
    types = set(map(type, values))
    if types == {int} and max(map(abs, values)) < 2**62:
        encoding = "delta-int64"
        numbers = np.diff(np.array(values, dtype=np.int64), prepend=0)
    elif float in types and types <= {float, type(None)}:
        encoding = "float32"
        # what is too large for it becomes infinite, and is found out below
        with np.errstate(over="ignore"):
            numbers = np.array(values, dtype=np.float64).astype(np.float32)
    else:
        return values
    rows = numbers.astype(TYPES[encoding]).view(np.uint8).reshape(len(values), -1)
    data = base64.b64encode(zlib.compress(rows.T.tobytes(), 9)).decode("ascii")
    packed = {"encoding": encoding, "length": len(values), "data": data}
    if len(data) > sum(len(repr(value)) for value in values) or _unpack(packed) != values:
        return values
    return packed


def _unpack(column: dict[str, Any]) -> list[Any]:
    dtype = TYPES[column["encoding"]]
    # JSON Schema takes 3.0 for an integer
    length = int(column["length"])
    decompressor = zlib.decompressobj()
    # one byte more than there may be, as 0 would mean any number of them
    content = decompressor.decompress(base64.b64decode(column["data"], validate=True), length * dtype.itemsize + 1)
    if len(content) != length * dtype.itemsize or not decompressor.eof or decompressor.unused_data:
        raise ValueError(f"its data are not those of {length} numbers")
    numbers = np.frombuffer(content, np.uint8).reshape(dtype.itemsize, length).T.copy().view(dtype)[:, 0]
    if dtype.kind == "i":
        return np.cumsum(numbers).tolist()
    return [None if math.isnan(value) else round_float(value) for value in numbers.tolist()]
