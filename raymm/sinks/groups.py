"""Tables of known bytes: runs of columns of D as groups of rows, each with raw values in place.

A table has one row per column of D (in canonical orientation): its number and its values.
"""

import bisect
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, BinaryIO, Protocol

import numpy as np

from raymm.sinks.base import Block, Values
from raymm.tiles import PAGE_NBYTES, ceil_div, round_up

GROUP_NBYTES = 2**27
"""Values of one group, at most: what a reader holds at a time."""
_CHUNK = 2**16


@dataclass(frozen=True, slots=True)
class Group:
    """A run of columns of D that lie one after another in a file."""

    start: int
    stop: int
    head: int
    """Position of what precedes the values, in bytes."""
    position: int
    """Position of the first value, in bytes."""

    @property
    def width(self) -> int:
        """Number of columns."""
        return self.stop - self.start


def split(start: int, stop: int, column_nbytes: int, most_columns: int) -> Iterator[range]:
    """Cut a run of columns into groups, nearly equal, of whole pages where that is possible."""
    most = max(1, min(most_columns, GROUP_NBYTES // max(1, column_nbytes)))
    width = ceil_div(stop - start, max(1, ceil_div(stop - start, most)))
    step = PAGE_NBYTES // int(np.gcd(PAGE_NBYTES, max(1, column_nbytes)))
    width = min(round_up(width, step), most) if width >= 8 * step else width
    for first in range(start, stop, max(1, width)):
        yield range(first, min(first + width, stop))


def congruent(position: int, column: int, column_nbytes: int, alignment: int = 1) -> int:
    """Return the next position that lies in its page where a column lies in D's bytes.

    Blocks are computed in memory congruent with D, so that direct output needs no copy. Where the
    alignment of the format does not allow it, the next aligned position.
    """
    found = position + (column * column_nbytes - position) % PAGE_NBYTES
    return found if found % alignment == 0 else round_up(position, alignment)


def number_columns(group: Group, position: int) -> Iterator[tuple[int, bytes]]:
    """Yield (position, bytes) of the column ``index``: the numbers of the group's columns."""
    for start in range(group.start, group.stop, _CHUNK):
        numbers = np.arange(start, min(start + _CHUNK, group.stop), dtype="<i8")
        yield position + 8 * (start - group.start), numbers.tobytes()


def repeat(unit: bytes, count: int, position: int) -> Iterator[tuple[int, bytes]]:
    """Yield (position, bytes) of the same bytes many times over."""
    for done in range(0, count, _CHUNK):
        yield position + done * len(unit), unit * min(_CHUNK, count - done)


def within(groups: tuple[Group, ...], start: int, stop: int) -> tuple[Group, ...]:
    """Return the groups that hold any of these columns."""
    first = bisect.bisect_right(groups, start, key=lambda group: group.stop)
    last = bisect.bisect_left(groups, stop, key=lambda group: group.start)
    return groups[first:last]


def runs(
    block: Block, groups: tuple[Group, ...], dtype: np.dtype[Any], length: int
) -> Iterator[tuple[Values, int]]:
    """Yield (run, position) for all values of a block, in the dtype of a table.

    Parameters
    ----------
    block : Block
    groups : tuple of Group
        Those of the block's tile at least.
    dtype : dtype
    length : int
        Rows of D: values in a row of the table.
    """
    columns: Values = block.host.T
    if columns.dtype != dtype:
        columns = columns.astype(dtype, order="C")
    elif columns.strides[1] != columns.itemsize:
        columns = np.ascontiguousarray(columns)  # the pass was planned for another order
    bounds, item, column_nbytes = block.bounds, dtype.itemsize, length * dtype.itemsize
    for group in within(groups, bounds.column_start, bounds.column_stop):
        start, stop = max(group.start, bounds.column_start), min(group.stop, bounds.column_stop)
        part = columns[start - bounds.column_start : stop - bounds.column_start]
        position = group.position + (start - group.start) * column_nbytes + bounds.row_start * item
        if bounds.shape[0] == length and part.flags.c_contiguous:
            yield part.reshape(-1), position
            continue
        for place, column in enumerate(part):
            yield column, position + place * column_nbytes


class Image(Protocol):
    """A file of which all bytes but the values are known."""

    groups: tuple[Group, ...]
    stored: np.dtype[Any]
    """Dtype of the raw values."""
    nbytes: int

    def head(self, group: Group) -> Iterator[tuple[int, bytes]]:
        """Yield (position, bytes) of what lies before a group's values."""
        ...

    def ends(self) -> tuple[tuple[int, bytes], ...]:
        """Return (position, bytes) of the beginning and the end of the file."""
        ...


def write_image(out: BinaryIO, image: Image, tile: Values, start: int) -> None:
    """Write a file from its beginning to its end.

    Parameters
    ----------
    out : binary file
    image : Image
    tile : ndarray
        All columns of D in the file, (columns, rows).
    start : int
        Number of the first of them.
    """
    (_, begin), (end, tail) = image.ends()
    at = out.write(begin)

    def write(position: int, memory: Any, nbytes: int) -> int:
        out.write(bytes(position - at))
        out.write(memory)
        return position + nbytes

    for group in image.groups:
        for position, known in image.head(group):
            at = write(position, known, len(known))
        values = np.ascontiguousarray(tile[group.start - start : group.stop - start], image.stored)
        at = write(group.position, values.view(np.uint8).data, values.nbytes)
    write(end, tail, len(tail))
