"""Operands in tables, one vector a row: Arrow in memory; Parquet and Arrow files anywhere."""

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from raymm.errors import PlanError, SourceError
from raymm.filesystems import redacted
from raymm.kernels.buffers import Buffer
from raymm.operands import Operand, format_shape
from raymm.sources.base import Array, Source
from raymm.sources.columns import Null, Reading, check_null, choose_column, list_width
from raymm.sources.memory import ArraySource
from raymm.sources.parts import find_parts
from raymm.sources.stored import StoredRows, open_rows

METADATA_KEY = b"raymm"
"""Of the schema of tables that hold a result; see `_orientation`."""


class Rows(Protocol):
    """Vectors, one a row."""

    @property
    def count(self) -> int:
        """Number of rows."""
        ...

    @property
    def reading(self) -> Reading:
        """Their width and dtype."""
        ...

    def pieces(self, start: int, stop: int) -> Iterator[tuple[int, Array]]:
        """Yield (first row, values) of rows ``start:stop``, in order."""
        ...


@dataclass(frozen=True)
class TableSource:
    """A matrix whose rows, or whose columns if it is turned, are the rows of a table."""

    rows: Rows
    name: str
    shape: tuple[int, ...]
    is_turned: bool
    """Whether the last axis runs over the table's rows."""
    path: str | None = None

    @property
    def operand(self) -> Operand:
        """Its description."""
        dtype, width = self.rows.reading.column.dtype, self.rows.reading.width
        strides: tuple[int, ...] = (width * dtype.itemsize, dtype.itemsize)
        if len(self.shape) < 2:
            strides = strides[1:] * len(self.shape)
        elif self.is_turned:
            strides = strides[::-1]
        is_held = self.path is None
        reading_nbytes = self.rows.reading_nbytes if isinstance(self.rows, StoredRows) else 0
        return Operand(
            self.name,
            self.shape,
            dtype,
            strides,
            self.path,
            is_held=is_held,
            reading_nbytes=reading_nbytes,
        )

    @property
    def paths(self) -> tuple[str, ...]:
        """The files it is read from, where they are local."""
        is_local = isinstance(self.rows, StoredRows) and "://" not in (self.path or "://")
        return self.rows.parts.paths if is_local and isinstance(self.rows, StoredRows) else ()

    @property
    def T(self) -> "TableSource":
        """The transpose; nothing is read."""
        return replace(self, shape=self.shape[::-1], is_turned=self.is_turned ^ (self._ndim == 2))

    @property
    def _ndim(self) -> int:
        return len(self.shape)

    def as_row(self) -> "TableSource":
        """Return a vector as a matrix of one row."""
        length = math.prod(self.shape)
        return replace(self, shape=(1, length), is_turned=self.rows.reading.width == 1)

    def as_column(self) -> "TableSource":
        """Return a vector as a matrix of one column."""
        return self.as_row().T

    def cut(self, start: int, stop: int) -> Source:
        """Return what another process needs: a copy of these columns, or where they are stored."""
        if isinstance(self.rows, StoredRows):
            return replace(self, rows=self.rows.cut(start, stop)) if self.is_turned else self
        values = self.read(start, stop, Buffer())
        copied = values.copy(order="F" if self.is_turned else "C")
        return ArraySource(copied, self.name, start=start)

    def load(self) -> Array:
        """Return all of it."""
        matrix = self if self._ndim == 2 else self.as_row()
        return matrix.read(0, matrix.shape[1], Buffer()).reshape(self.shape)

    def read(self, start: int, stop: int, buffer: Buffer) -> Array:
        """Return columns ``start:stop``: a view of what is decoded, or in `buffer`."""
        width = self.rows.reading.width
        if self.is_turned:
            return self._gathered(start, stop, slice(0, width), buffer).T
        return self._gathered(0, self.rows.count, slice(start, stop), buffer)

    def _gathered(self, start: int, stop: int, wanted: slice, buffer: Buffer) -> Array:
        """Return some entries of rows ``start:stop``."""
        shape = (stop - start, wanted.stop - wanted.start)
        values = None
        for first, piece in self.rows.pieces(start, stop):
            if len(piece) == shape[0]:
                return piece[:, wanted]
            if values is None:
                values = buffer.array(shape, self.rows.reading.column.dtype)
            values[first - start : first - start + len(piece)] = piece[:, wanted]
        return np.empty(shape, self.rows.reading.column.dtype) if values is None else values


@dataclass(frozen=True)
class HeldRows:
    """A column in memory, in chunks that are never joined."""

    chunks: tuple[Any, ...]
    first_rows: NDArray[np.int64]
    """Of each chunk, and the end."""
    reading: Reading

    @property
    def count(self) -> int:
        """Number of rows."""
        return int(self.first_rows[-1])

    def pieces(self, start: int, stop: int) -> Iterator[tuple[int, Array]]:
        """Yield (first row, values) of rows ``start:stop``, chunk by chunk."""
        place = max(0, int(np.searchsorted(self.first_rows, start, side="right")) - 1)
        while start < stop:
            begin, end = (int(row) for row in self.first_rows[place : place + 2])
            last = min(stop, end)
            if start < last:
                part = self.chunks[place].slice(start - begin, last - start)
                yield start, self.reading.rows(part, start)
                start = last
            place += 1


def from_arrow(value: Any, name: str, column: str | None, null: Null) -> Source:
    """Return an Arrow table, record batch, array or chunked array as a source, without a copy.

    Raises
    ------
    SourceError
        There are nulls, or rows that are not equally long.
    PlanError, DTypeError
        It has no such column, or several that could be meant; it holds no numbers.
    """
    import pyarrow as pa  # noqa: PLC0415  the caller has loaded it

    check_null(null)
    if isinstance(value, pa.RecordBatchReader):
        raise PlanError(f"{name} is a stream of record batches: call .read_all(), or name a file")
    if isinstance(value, (pa.Array, pa.ChunkedArray)):
        kind, column = pa.schema([pa.field("values", value.type)]), None
        arrays, where = value, name
        chosen = choose_column(kind, "values", name)
    elif isinstance(value, (pa.Table, pa.RecordBatch)):
        kind = value.schema
        chosen = choose_column(kind, column, name)
        arrays, where = value.column(chosen.name), f"{name}, column {chosen.name!r}"
    else:
        raise PlanError(
            f"{name} is a pyarrow {type(value).__name__}: give a table, an array or a path"
        )
    chunks = tuple(chunk for chunk in getattr(arrays, "chunks", [arrays]) if len(chunk))
    width = chosen.width if chosen.width is not None else list_width(arrays) or 0
    reading = Reading(chosen, width, null, where)
    first_rows = np.cumsum([0, *map(len, chunks)], dtype=np.int64)
    for chunk, first in zip(chunks, first_rows, strict=False):
        reading.check(chunk, int(first))
    source = _oriented(HeldRows(chunks, first_rows, reading), name, None, kind.metadata)
    is_view = len(chunks) == 1 and chosen.dtype.kind != "b" and null is None
    if not is_view or not source.shape:
        return source
    values = reading.rows(chunks[0], 0)
    return ArraySource((values.T if source.is_turned else values).reshape(source.shape), name)


def from_path(text: str, name: str, column: str | None, null: Null) -> TableSource:
    """Return the description of a table's files; their footers are read.

    Parameters
    ----------
    text : str
        A file, folder, glob or URI.

    Raises
    ------
    SourceError
        There are no such files, or they are damaged, incomplete or hold nulls.
    PlanError, DTypeError
        They have no such column, or several that could be meant; it holds no numbers.
    """
    check_null(null)
    parts = find_parts(text)
    rows, schema = open_rows(parts, redacted(name), column, null)
    source = _oriented(rows, redacted(name), parts.path, schema.metadata)
    if parts.is_folder and rows.reading.column.name == "D":
        _check_complete(rows, _metadata(schema.metadata, name), redacted(name))
    return source


def _check_complete(rows: Rows, written: dict[str, Any], name: str) -> None:
    """Raise `SourceError` if a folder holds a part of a result, or several results."""
    shape = tuple(written.get("shape", ()))
    if written and math.prod(shape) != rows.count * rows.reading.width:
        raise SourceError(
            f"{name} holds {rows.count:,} rows of {rows.reading.width} values, a result of shape "
            f"{format_shape(shape)} has {math.prod(shape):,} values: it is incomplete, or holds "
            "several results"
        )


def _metadata(metadata: Any, where: str) -> dict[str, Any]:
    """Return what raymm wrote into a schema."""
    text = (metadata or {}).get(METADATA_KEY)
    if text is None:
        return {}
    try:
        found = json.loads(text)
        if all(isinstance(length, int) for length in found["shape"]):
            found["is_transposed"] = bool(found["is_transposed"])
            return dict(found)
    except (ValueError, KeyError, TypeError):
        pass
    raise SourceError(f"{where}: its metadata {METADATA_KEY.decode()!r} is damaged: {text!r}")


def _oriented(rows: Rows, name: str, path: str | None, metadata: Any) -> TableSource:
    """Return a table as the matrix that it holds.

    A result of raymm is given back as it was: its rows are the columns of a wide D. Any other
    table is (rows, width), a column of numbers a vector.
    """
    reading = rows.reading
    shape: tuple[int, ...] = (rows.count, reading.width)
    if reading.column.is_plain:
        return TableSource(rows, name, shape[:1], True, path)
    written = _metadata(metadata, name) if reading.column.name == "D" else {}
    if not written:
        return TableSource(rows, name, shape, False, path)
    axes = len(written["shape"])
    if axes < 2:
        return TableSource(rows, name, (math.prod(shape),) if axes else (), True, path)
    is_turned = not written["is_transposed"]
    return TableSource(rows, name, shape[::-1] if is_turned else shape, is_turned, path)
