"""Rows of a table in files: where they are, and how they are found."""

import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from raymm.errors import PlanError, SourceError
from raymm.filesystems import explicit, resolve
from raymm.sources.base import Array
from raymm.sources.columns import Column, Null, Reading, choose_column, list_width
from raymm.sources.formats import TableFile, as_source_error, open_table
from raymm.sources.parts import Parts
from raymm.sources.readers import OVERLAP_ROWS, Group, Reader

OPENERS = 16
"""Files whose footers are read at a time."""
HEAD_ROWS = 64
"""Read at a time of lists, until one tells how long they are."""
GROUP_NBYTES, BATCH_NBYTES = 2**27, 2**22
"""A group up to the first size is read at once; all are decoded in batches of the second, which
stay in the processor's cache."""


@dataclass(frozen=True)
class StoredRows:
    """Where rows are stored: files, their groups, the rows these begin with."""

    parts: Parts
    first_groups: NDArray[np.int64]
    """Of each file, and the end."""
    first_rows: NDArray[np.int64]
    """Of each group, and the end."""
    reading: Reading
    reader: Reader
    reading_nbytes: int = 0
    """Most bytes held while a group is read."""

    @property
    def count(self) -> int:
        """Number of rows."""
        return int(self.first_rows[-1])

    def pieces(self, start: int, stop: int) -> Iterator[tuple[int, Array]]:
        """Yield (first row, values) of rows ``start:stop``, in order."""
        index = max(0, int(np.searchsorted(self.first_rows, start, side="right")) - 1)
        while start < stop:
            group, begin = self.group(index), int(self.first_rows[index])
            end = min(stop, begin + group.rows)
            while start < end:
                first, values = self.reader.piece(group, start - begin)
                first += begin
                last = min(end, first + len(values))
                yield start, values[start - first : last - first]
                start = last
            index += 1

    def group(self, index: int) -> Group:
        """Return a group, counted through all files."""
        part = int(np.searchsorted(self.first_groups, index, side="right")) - 1
        first_of_part = int(self.first_groups[part])
        begin, end = (int(row) for row in self.first_rows[index : index + 2])
        row_nbytes = _row_nbytes(self.reading)
        return Group(
            self.parts.paths[part],
            index - first_of_part,
            end - begin,
            begin - int(self.first_rows[first_of_part]),
            self.parts.nbytes[part],
            self.parts.where(part),
            self.reading,
            _batch_rows(row_nbytes),
            (end - begin) * row_nbytes > GROUP_NBYTES,
        )

    def cut(self, start: int, stop: int) -> "StoredRows":
        """Return the description of no more files than these rows are in."""
        groups = np.searchsorted(self.first_rows, [start, max(start, stop - 1)], side="right") - 1
        groups = np.clip(groups, 0, max(0, len(self.first_rows) - 2))
        first, last = (
            max(0, int(np.searchsorted(self.first_groups, group, side="right")) - 1)
            for group in groups
        )
        last = min(last + 1, len(self.parts.paths))
        parts = replace(
            self.parts, paths=self.parts.paths[first:last], nbytes=self.parts.nbytes[first:last]
        )
        begin, end = int(self.first_groups[first]), int(self.first_groups[last])
        return replace(
            self,
            parts=parts,
            first_groups=self.first_groups[first : last + 1] - begin,
            first_rows=self.first_rows[begin : end + 1],
        )


def _row_nbytes(reading: Reading) -> int:
    return max(1, reading.width * reading.column.dtype.itemsize)


def _batch_rows(row_nbytes: int) -> int:
    """Return how many rows to decode at a time; two batches hold a halo."""
    return max(OVERLAP_ROWS, BATCH_NBYTES // row_nbytes)


@dataclass(frozen=True)
class _Footer:
    """What a file's footer tells."""

    group_rows: list[int]
    suspects: list[int]
    """Groups that hold nulls, or rows of other lengths."""
    reading_nbytes: int


def open_rows(parts: Parts, name: str, column: str | None, null: Null) -> tuple[StoredRows, Any]:
    """Return the description of one column of a table's files, and the first one's schema.

    All footers are read, and some rows where only they tell how long they are.

    Raises
    ------
    SourceError
        A file cannot be read, or its footer tells of nulls or of rows that are not equally long.
    PlanError, DTypeError
        There is no such column, or several that could be meant; it holds no numbers.
    """
    filesystem, _ = resolve(parts.uri)
    chosen, width, schema = _choose(filesystem, parts, name, column)
    reading = Reading(chosen, width, null, name)
    with ThreadPoolExecutor(OPENERS) as pool:
        places = range(len(parts.paths))
        footers = list(pool.map(lambda place: _footer(filesystem, parts, place, reading), places))
    described = StoredRows(
        replace(parts, rows=None),
        np.cumsum([0, *(len(each.group_rows) for each in footers)], dtype=np.int64),
        np.cumsum([0, *(rows for each in footers for rows in each.group_rows)], dtype=np.int64),
        reading,
        Reader(uuid.uuid4().hex, explicit(parts.uri)),
        max(each.reading_nbytes for each in footers),
    )
    if null is None or chosen.dtype.kind != "f":
        _check_suspects(described, footers)
    return described, schema


def _check_suspects(rows: StoredRows, footers: list[_Footer]) -> None:
    """Read the groups that are suspect: that raises an error with the row and the count."""
    for place, footer in enumerate(footers):
        for group in footer.suspects:
            index = int(rows.first_groups[place]) + group
            start, stop = rows.first_rows[index : index + 2]
            for _ in rows.pieces(int(start), int(stop)):
                pass


def _choose(
    filesystem: Any, parts: Parts, name: str, column: str | None
) -> tuple[Column, int, Any]:
    """Return the column, the length of its rows, and the schema, by the first file with rows."""
    chosen, schema, width = None, None, None
    for place, path in enumerate(parts.paths):
        where = parts.where(place)
        file = open_table(filesystem, path, where)
        try:
            if chosen is None:
                schema = file.schema
                chosen = choose_column(schema, column, name)
                width = chosen.width
            if width is None and chosen.name in file.schema.names:
                width = _first_width(file, chosen)
        except (OSError, ValueError, NotImplementedError) as error:
            if isinstance(error, PlanError):
                raise
            raise as_source_error(error, where) from error
        finally:
            file.close()
        if width is not None:
            break
    assert chosen is not None
    return chosen, width or 0, schema


def _first_width(file: TableFile, column: Column) -> int | None:
    """Return the length of the first list in a file that is not null."""
    for place, count in enumerate(file.group_rows):
        if count:
            for batch in file.batches(place, column, HEAD_ROWS, True):
                width = list_width(batch)
                if width is not None:
                    return width
    return None


def _footer(filesystem: Any, parts: Parts, place: int, reading: Reading) -> _Footer:
    """Read a file's footer; `SourceError` unless it goes with the first file."""
    where, chosen, width = parts.where(place), reading.column, reading.width
    file = open_table(filesystem, parts.paths[place], where)
    try:
        if file.schema.names.count(chosen.name) != 1:
            raise SourceError(f"{where} has no column {chosen.name!r}, the first file has one")
        here = choose_column(file.schema, chosen.name, where)
        if (here.dtype, here.is_plain) != (chosen.dtype, chosen.is_plain):
            raise SourceError(
                f"{where}, column {chosen.name!r} has the type "
                f"{file.schema.field(chosen.name).type}, the first file has {chosen.dtype}"
            )
        count = sum(file.group_rows)
        if here.width not in (None, width) and count:
            raise SourceError(
                f"{where}, column {chosen.name!r}: rows have {here.width} values, in the first "
                f"file they have {width}"
            )
        if parts.rows is not None and parts.rows[place] != count:
            raise SourceError(
                f"{where} has {count:,} rows, the manifest says {parts.rows[place]:,}"
            )
        row_nbytes = _row_nbytes(reading)
        nbytes = file.reading_nbytes(row_nbytes, GROUP_NBYTES, _batch_rows(row_nbytes))
        return _Footer(file.group_rows, file.suspects(chosen.name, width), nbytes)
    finally:
        file.close()
