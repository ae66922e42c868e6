"""An Arrow IPC file as known bytes around raw values.

The layout is that of the Arrow columnar format (Columnar.rst, File.fbs, Message.fbs): one record
batch per group, uncompressed. Its metadata are FlatBuffers of a few fixed shapes.
"""

import struct
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from raymm.errors import ShapeError
from raymm.sinks.groups import Group, congruent, number_columns, split
from raymm.tiles import PAGE_NBYTES, round_up

MOST_ELEMENTS = 2**31 - 1
"""Values of one batch, at most: some readers count them in an int32."""
_MAGIC = b"ARROW1"
_CONTINUATION = b"\xff\xff\xff\xff"
_VERSION, _RECORD_BATCH = 4, 3
_ALIGNMENT = 8


class ArrowFile:
    """The file of a run of tiles.

    Parameters
    ----------
    length : int
        Values in each row of the table.
    dtype : dtype
        Of D.
    tiles : iterable of (int, int)
        Columns ``start, stop`` of D, in order; no batch has columns of two of them.
    schema : bytes
        The Arrow schema, as pyarrow serialises it, with its metadata.
    """

    def __init__(
        self, length: int, dtype: np.dtype[Any], tiles: Iterable[tuple[int, int]], schema: bytes
    ) -> None:
        self.length, self.stored = length, dtype.newbyteorder("<")
        self.column_nbytes = length * dtype.itemsize
        if length > MOST_ELEMENTS:
            raise ShapeError(f"a row of {length:,} values is too long for an Arrow list")
        self.header = _header(schema)
        groups, at = [], len(self.header)
        for start, stop in tiles:
            for columns in split(start, stop, self.column_nbytes, MOST_ELEMENTS // max(1, length)):
                group = self._place(columns, at)
                groups.append(group)
                at = self._stop(group)
        self.groups = tuple(groups)
        blocks = [(each.head, self._metadata_nbytes, self._body_nbytes(each)) for each in groups]
        self.tail = _footer(schema, blocks)
        self.nbytes = at + len(self.tail)

    @property
    def _metadata_nbytes(self) -> int:
        return len(_record_batch(0, [0] * 3, [(0, 0)] * 5, 0))

    def _place(self, columns: range, at: int) -> Group:
        numbers = at + self._metadata_nbytes + 8 * len(columns)
        position = congruent(numbers, columns.start, self.column_nbytes, _ALIGNMENT)
        return Group(columns.start, columns.stop, at, position)

    def _stop(self, group: Group) -> int:
        return round_up(group.position + group.width * self.column_nbytes, _ALIGNMENT)

    def _body_nbytes(self, group: Group) -> int:
        return self._stop(group) - group.head - self._metadata_nbytes

    def head(self, group: Group) -> Iterator[tuple[int, bytes]]:
        """Yield (position, bytes) of what lies before a group's values."""
        rows = group.width
        begin = group.head + self._metadata_nbytes
        values = group.position - begin
        buffers = [(0, 0), (0, 8 * rows), (8 * rows, 0), (values, 0)]
        buffers.append((values, rows * self.column_nbytes))
        nodes = [rows, rows, rows * self.length]
        yield group.head, _record_batch(rows, nodes, buffers, self._body_nbytes(group))
        yield from number_columns(group, begin)

    def ends(self) -> tuple[tuple[int, bytes], ...]:
        """Return (position, bytes) of the beginning and the end of the file."""
        return (0, self.header), (self.nbytes - len(self.tail), self.tail)


def _header(schema: bytes) -> bytes:
    """Return the beginning of the file, padded to a page: the schema's message has room for it."""
    nbytes = round_up(16 + len(schema) + 64, PAGE_NBYTES)  # 64: room for a token in the padding
    sizes = _CONTINUATION + struct.pack("<i", nbytes - 16)
    return (_MAGIC + b"\0\0" + sizes + schema[8:]).ljust(nbytes, b"\0")


def _record_batch(
    rows: int, nodes: list[int], buffers: list[tuple[int, int]], body_nbytes: int
) -> bytes:
    """Return the message of a batch without nulls: tables, then vectors of structs of int64."""
    # Message at 16 (its vtable at 4), RecordBatch at 52 (at 40), the nodes' vector at 80.
    packed = struct.pack("<I6H", 16, 12, 24, 16, 18, 4, 8)
    packed += struct.pack("<iIqhBx4x", 12, 52 - 20, body_nbytes, _VERSION, _RECORD_BATCH)
    place = 80 + 16 * len(nodes) + 4
    packed += struct.pack("<5H2x", 10, 20, 4, 12, 16)
    packed += struct.pack("<iqII4x", 12, rows, 76 - 64, place - 68)
    packed += struct.pack("<I", len(nodes))
    packed += b"".join(struct.pack("<qq", count, 0) for count in nodes)
    packed += struct.pack("<4xI", len(buffers))
    packed += b"".join(struct.pack("<qq", *each) for each in buffers)
    packed = packed.ljust(round_up(len(packed), _ALIGNMENT), b"\0")
    return _CONTINUATION + struct.pack("<i", len(packed)) + packed


def _footer(schema: bytes, blocks: list[tuple[int, int, int]]) -> bytes:
    """Return the end of the file: where the batches are, and the schema once more."""
    message = schema[8:]
    begin = 40 + 24 * len(blocks)
    # Footer at 16 (its vtable at 4), the blocks' vector at 40, then the schema's own buffer.
    packed = struct.pack("<I6H", 16, 12, 16, 12, 4, 0, 8)
    packed += struct.pack("<iIIh2x", 12, begin + _schema_place(message) - 20, 36 - 24, _VERSION)
    packed += struct.pack("<4xI", len(blocks))
    packed += b"".join(struct.pack("<qi4xq", *block) for block in blocks)
    packed += message
    packed = packed.ljust(round_up(len(packed), _ALIGNMENT), b"\0")
    end = _CONTINUATION + struct.pack("<i", 0)
    return end + packed + struct.pack("<i", len(packed)) + _MAGIC


def _schema_place(message: bytes) -> int:
    """Return where the Schema table lies in a message: its field ``header``."""
    (table,) = struct.unpack_from("<I", message, 0)
    (distance,) = struct.unpack_from("<i", message, table)
    (field,) = struct.unpack_from("<H", message, table - distance + 4 + 2 * 2)
    (offset,) = struct.unpack_from("<I", message, table + field)
    return int(table + field + offset)
