"""A Parquet file as known bytes around raw values.

The layout is that of the Apache Parquet format (parquet.thrift, Encodings.md): PLAIN pages without
dictionary or compression, levels in RLE runs, which are constant here, and the footer in Thrift's
compact protocol. One data page per column and row group.
"""

import base64
import struct
from collections.abc import Iterator
from typing import Any, TypeAlias

import numpy as np

from raymm.errors import DTypeError, ShapeError
from raymm.sinks.groups import Group, congruent, number_columns, repeat, split

Fields: TypeAlias = dict[int, Any]
"""A Thrift struct: values by field number."""

_MAGIC = b"PAR1"
_INT32, _INT64, _FLOAT, _DOUBLE, _FIXED = 1, 2, 4, 5, 7
_PLAIN, _RLE = 0, 3
_REQUIRED, _REPEATED = 0, 2
_LIST = 3
_PAGE_NBYTES = 2**31 - 2**16
"""Bytes of one page, at most: their number is an int32."""

PHYSICAL = {
    "int8": _INT32, "uint8": _INT32, "int16": _INT32, "uint16": _INT32, "int32": _INT32,
    "uint32": _INT32, "int64": _INT64, "uint64": _INT64, "float16": _FIXED, "float32": _FLOAT,
    "float64": _DOUBLE,
}  # fmt: skip


class ParquetPart:
    """The file of one tile: rows ``start:stop`` of the table.

    Parameters
    ----------
    length : int
        Values in each row of the table, at least 1.
    dtype : dtype
        Of D.
    start, stop : int
        Columns of D.
    schema : bytes
        The Arrow schema, as pyarrow serialises it.
    metadata : bytes
        JSON under the key ``raymm``.
    """

    def __init__(
        self, length: int, dtype: np.dtype[Any], start: int, stop: int, schema: bytes,
        metadata: bytes,
    ) -> None:  # fmt: skip
        self.length, self.dtype, self.stored = length, dtype, stored_dtype(dtype)
        self.column_nbytes = length * self.stored.itemsize
        levels = len(_row_levels(length)) if length > 1 else 0
        most = _PAGE_NBYTES // (self.column_nbytes + levels + 32)
        if most < 1:
            raise ShapeError(
                f"a row of {length:,} values of {dtype} is too long for a Parquet page (2 GiB): "
                "write .npy or .arrow"
            )
        groups, at = [], len(_MAGIC)
        for columns in split(start, stop, self.column_nbytes, most):
            group = self._place(columns, at)
            groups.append(group)
            at = group.position + group.width * self.column_nbytes
        self.groups = tuple(groups)
        self._end, self._tail = at, self._footer(stop - start, schema, metadata)
        self.nbytes = at + len(self._tail)

    def _place(self, columns: range, at: int) -> Group:
        numbers = 8 * len(columns)
        after = at + len(_page_header(numbers, len(columns))) + numbers
        before = self._value_head_nbytes(len(columns))
        position = congruent(after + before, columns.start, self.column_nbytes)
        return Group(columns.start, columns.stop, at, position)

    def _value_head_nbytes(self, rows: int) -> int:
        levels = self._levels_nbytes(rows)
        nbytes = levels + rows * self.column_nbytes
        return len(_page_header(nbytes, rows * self.length)) + levels

    def _levels_nbytes(self, rows: int) -> int:
        repetition = len(_row_levels(self.length)) * rows if self.length > 1 else len(_run(rows, 0))
        return 8 + repetition + len(_run(rows * self.length, 1))

    def head(self, group: Group) -> Iterator[tuple[int, bytes]]:
        """Yield (position, bytes) of what lies before a group's values."""
        rows, length = group.width, self.length
        header = _page_header(8 * rows, rows)
        yield group.head, header
        yield from number_columns(group, group.head + len(header))
        levels = self._levels_nbytes(rows)
        header = _page_header(levels + rows * self.column_nbytes, rows * length)
        yield group.position - levels - len(header), header
        unit, count = (_row_levels(length), rows) if length > 1 else (_run(rows, 0), 1)
        definition = _run(rows * length, 1)
        end = group.position - len(definition) - 4
        begin = end - len(unit) * count
        yield begin - 4, struct.pack("<I", len(unit) * count)
        yield from repeat(unit, count, begin)
        yield end, struct.pack("<I", len(definition)) + definition

    def ends(self) -> tuple[tuple[int, bytes], ...]:
        """Return (position, bytes) of the beginning and the end of the file."""
        return (0, _MAGIC), (self._end, self._tail)

    def _footer(self, rows: int, schema: bytes, metadata: bytes) -> bytes:
        leaf = {1: _i32(PHYSICAL[self.dtype.name]), 3: _i32(_REQUIRED), 4: b"element"}
        elements = [
            {4: b"schema", 5: _i32(2)},
            {1: _i32(_INT64), 3: _i32(_REQUIRED), 4: b"index"},
            {3: _i32(_REQUIRED), 4: b"D", 5: _i32(1), 6: _i32(_LIST), 10: {3: {}}},
            {3: _i32(_REPEATED), 4: b"list", 5: _i32(1)},
            leaf | _logical_type(self.dtype),
        ]
        pairs = [{1: b"raymm", 2: metadata}, {1: b"ARROW:schema", 2: base64.b64encode(schema)}]
        footer = {
            1: _i32(2),
            2: elements,
            3: _i64(rows),
            4: [self._row_group(group) for group in self.groups],
            5: pairs,
            6: b"raymm",
            7: [{1: {}}, {1: {}}],  # statistics are in the order of the type
        }
        packed = _pack(footer)[1]
        return packed + struct.pack("<I", len(packed)) + _MAGIC

    def _row_group(self, group: Group) -> Fields:
        rows = group.width
        numbers = len(_page_header(8 * rows, rows)) + 8 * rows
        begin = group.position - self._value_head_nbytes(rows)
        values = group.position + rows * self.column_nbytes - begin
        first, last = (struct.pack("<q", number) for number in (group.start, group.stop - 1))
        limits = {12: {3: _i64(0), 5: last, 6: first, 7: True, 8: True}}
        kind = PHYSICAL[self.dtype.name]
        path = [b"D", b"list", b"element"]
        columns = [
            _chunk(_INT64, [b"index"], rows, group.head, numbers, limits),
            _chunk(kind, path, rows * self.length, begin, values, {}),
        ]
        total = numbers + values
        return {1: columns, 2: _i64(total), 3: _i64(rows), 5: _i64(group.head), 6: _i64(total)}


def stored_dtype(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Return the dtype of the raw values: Parquet has no integers of less than 32 bits."""
    if dtype.name not in PHYSICAL:
        raise DTypeError(
            f"a table cannot hold {dtype}: write .npy, or the real and imaginary parts"
            if dtype.kind == "c"
            else f"a table cannot hold {dtype}: write .npy, or convert with dtype="
        )
    if PHYSICAL[dtype.name] == _INT32:
        return np.dtype("<u4" if dtype.kind == "u" else "<i4")
    return dtype.newbyteorder("<")


def _chunk(
    kind: int, path: list[bytes], count: int, begin: int, nbytes: int, statistics: Fields
) -> Fields:
    encodings = [_i32(_PLAIN), _i32(_RLE)]
    sizes = {5: _i64(count), 6: _i64(nbytes), 7: _i64(nbytes), 9: _i64(begin)}
    described = {1: _i32(kind), 2: encodings, 3: path, 4: _i32(0)} | sizes | statistics
    return {2: _i64(0), 3: described}


def _logical_type(dtype: np.dtype[Any]) -> Fields:
    """Return the fields of a schema element that its physical type does not tell."""
    if dtype == np.float16:
        return {2: _i32(2), 10: {15: {}}}
    if dtype.kind in "iu" and dtype.name not in ("int32", "int64"):
        return {10: {10: {1: ("i8", dtype.itemsize * 8), 2: dtype.kind == "i"}}}
    return {}


def _page_header(nbytes: int, count: int) -> bytes:
    """Return the header of an uncompressed PLAIN page of `count` values."""
    page = {1: _i32(count), 2: _i32(_PLAIN), 3: _i32(_RLE), 4: _i32(_RLE)}
    return _pack({1: _i32(0), 2: _i32(nbytes), 3: _i32(nbytes), 5: page})[1]


def _row_levels(length: int) -> bytes:
    """Return the repetition levels of one row of two values or more: 0, then 1."""
    return _run(1, 0) + _run(length - 1, 1)


def _run(count: int, level: int) -> bytes:
    """Return an RLE run of equal levels of one bit."""
    return _varint(count << 1) + bytes([level])


def _i32(number: int) -> tuple[str, int]:
    return "i32", number


def _i64(number: int) -> tuple[str, int]:
    return "i64", number


def _varint(number: int) -> bytes:
    encoded = bytearray()
    while number > 127:
        encoded.append(number & 127 | 128)
        number >>= 7
    return bytes(encoded) + bytes([number])


def _zigzag(number: int) -> bytes:
    return _varint(number << 1 if number >= 0 else (-number << 1) - 1)


def _pack(value: Any) -> tuple[int, bytes]:
    """Return (type, bytes) in Thrift's compact protocol.

    A value is a bool, bytes, a list of one type, a dict (struct), or a number with its type.
    """
    if isinstance(value, bool):
        return (1 if value else 2), b""
    if isinstance(value, tuple):
        kind, number = value
        if kind == "i8":
            return 3, struct.pack("b", number)
        return (5 if kind == "i32" else 6), _zigzag(number)
    if isinstance(value, bytes):
        return 8, _varint(len(value)) + value
    if isinstance(value, list):
        return 9, _pack_list(value)
    return 12, _pack_struct(value)


def _pack_list(values: list[Any]) -> bytes:
    parts = [_pack(each) for each in values]
    kind = parts[0][0] if parts else 12
    few = len(parts) < 15
    head = bytes([len(parts) << 4 | kind]) if few else bytes([0xF0 | kind]) + _varint(len(parts))
    return head + b"".join(body for _, body in parts)


def _pack_struct(fields: Fields) -> bytes:
    packed, last = [], 0
    for number in sorted(fields):
        kind, body = _pack(fields[number])
        step = number - last
        packed.append(bytes([step << 4 | kind]) if step <= 15 else bytes([kind]) + _zigzag(number))
        packed.append(body)
        last = number
    return b"".join(packed) + b"\0"
