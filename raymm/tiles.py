"""The grid: how D is cut into tiles and blocks. Integers only.

Everything below the public verbs works in *canonical orientation*: the huge axis is the columns of
D, and C is the last operand. A tall result is planned as its transpose.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

Order = Literal["C", "F"]
Stays = Literal["store", "worker"]
"""Where blocks stay that nobody fetches: the object store, or the memory of the workers."""

PAGE_NBYTES = 4096
"""The alignment of direct input and output, of memory and of a file's data, in bytes."""


@dataclass(frozen=True, slots=True)
class Tile:
    """A run of columns of D and of the huge operand: the unit of work."""

    index: int
    start: int
    stop: int

    @property
    def width(self) -> int:
        """Number of columns."""
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class Bounds:
    """Where a block lies in D: rows and columns, half open, absolute."""

    row_start: int
    row_stop: int
    column_start: int
    column_stop: int

    @property
    def shape(self) -> tuple[int, int]:
        """``(rows, columns)``."""
        return self.row_stop - self.row_start, self.column_stop - self.column_start

    def widened(self, columns: int, limit: int) -> "Bounds":
        """Return them with up to `columns` more to the right, none beyond `limit`."""
        stop = min(self.column_stop + columns, limit)
        return Bounds(self.row_start, self.row_stop, self.column_start, stop)


@dataclass(frozen=True, slots=True)
class Layout:
    """How a sink wants D: the order, how long one run should be, where an entry lies.

    ``row_nbytes`` and ``column_nbytes`` are the distances in the output between neighbours along
    each axis, so that a block can be computed in memory congruent with the file (modulo a page)
    and handed to direct output without a copy.
    """

    order: Order
    """``"C"``: rows of D are contiguous; ``"F"``: columns are."""
    run_nbytes: int
    """Shortest contiguous run the sink likes to write at once, in bytes."""
    offset: int
    """Position of D[0, 0], in bytes."""
    row_nbytes: int
    column_nbytes: int
    halo_columns: int = 0
    """How many columns beyond its own a block should also hold, where D has them: rows of a C-order
    file do not begin on a page, so each row's run is cut at the page after the block's end."""
    is_mixed: bool = False
    """Whether another output of the pass wants the other order: blocks are then long both ways."""
    travels: bool = False
    """Whether blocks pass through the object store when workers are other processes."""
    holds_tile: bool = False
    """Whether a worker keeps one whole tile of D in memory until it is finished."""
    stays: Stays | None = None
    """Where whole tiles stay in the cluster, if they do."""

    def position(self, row: int, column: int) -> int:
        """Return where D[row, column] lies in the output, in bytes."""
        return self.offset + row * self.row_nbytes + column * self.column_nbytes


@dataclass(frozen=True, slots=True)
class Grid:
    """D's tiles, and every tile's blocks: row bands of fixed-width panels."""

    rows: int
    columns: int
    tile_columns: int
    panel_columns: int
    block_rows: int
    halo_columns: int = 0
    """Columns to the right that a block also holds, where D has them; see `Layout`."""

    def __len__(self) -> int:
        return ceil_div(self.columns, self.tile_columns)

    def __getitem__(self, index: int) -> Tile:
        if not 0 <= index < len(self):
            raise IndexError(index)
        start = index * self.tile_columns
        return Tile(index, start, min(start + self.tile_columns, self.columns))

    def __iter__(self) -> Iterator[Tile]:
        return map(self.__getitem__, range(len(self)))

    def blocks(self, tile: Tile) -> Iterator[Bounds]:
        """Yield the tile's blocks, panel after panel."""
        for column in range(tile.start, tile.stop, self.panel_columns):
            column_stop = min(column + self.panel_columns, tile.stop)
            for row in range(0, self.rows, self.block_rows):
                row_stop = min(row + self.block_rows, self.rows)
                yield Bounds(row, row_stop, column, column_stop)


def ceil_div(dividend: int, divisor: int) -> int:
    """Return ``dividend / divisor``, rounded up."""
    return -(-dividend // divisor)


def round_up(value: int, multiple: int) -> int:
    """Return the smallest multiple of `multiple` that is not below `value`."""
    return ceil_div(value, multiple) * multiple
