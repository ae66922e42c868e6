"""Choosing the grid: how wide a tile is, and what a block of it looks like. Pure."""

import math
from dataclasses import dataclass, replace

from raymm.errors import MemoryLimitError
from raymm.memory import TileCost, format_nbytes, is_entrywise, tile_cost
from raymm.operands import INDEX_NBYTES
from raymm.order import Chained
from raymm.request import Request
from raymm.tiles import PAGE_NBYTES, Grid, Layout, ceil_div, round_up

C_RUN_NBYTES = 2**19
"""Run of a C-order file: direct output of 512 KB runs reaches 0.9 of one contiguous stream, as 1 MB
does; 256 KB reaches 0.8 (each run splits a reserved extent of the file)."""
BLOCK_NBYTES = {"C": 64 * 2**20, "F": 6 * 2**20}
"""Output buffer of one block: C order pays for few rows per read of C, F order fits the cache."""
MIXED_BLOCK_NBYTES = 48 * 2**20
"""Of a pass with outputs in both orders: the other order's runs are as long as a panel is wide."""
TILE_NBYTES = {"C": 1536 * 2**20, "F": 192 * 2**20}
"""D of one tile written to a file: about 0.1 to 1 s of a worker."""
TRAVEL_NBYTES = 64 * 2**20
"""D of one tile that passes through the object store."""
STAGED_NBYTES, LARGEST_STAGED_NBYTES = 64 * 2**20, 256 * 2**20
"""Of the huge operand's tile: as a rule, and where long runs of the output need more."""
TILE_FLOP = 100e9
"""Work of one tile: about a second of a core."""
HALO_RUN_NBYTES = 2**17
"""Runs from this length on are cut at pages of the output, for less than 4 % of halo columns."""
ROUND = 4
"""Few tiles come in multiples of so many, so that no worker idles at the end of the run ..."""
SPREAD_NBYTES, SPREAD_RUN_NBYTES = 16 * 2**20, 2**16
"""... while each keeps this much of D, and runs of this length."""
SPARSE_WIDENING = 4
"""Panels of a sparse operand are so many times wider at most: some outputs spread their blocks."""
BLOCKS, BLOCKS_NBYTES = 16, 2**18
"""A tile has about so many blocks, unless they would be smaller than this."""


@dataclass(frozen=True, slots=True)
class CostOf:
    """The cost model with everything but the grid filled in."""

    group_shapes: tuple[tuple[int, int], ...]
    source_itemsize: int
    compute_itemsize: int
    output_itemsize: int
    is_converted: bool
    is_mixed: bool = False
    is_mapped: bool = False
    entries: float | None = None
    """Of a column of a sparse huge operand, on average."""

    @property
    def staged_column_nbytes(self) -> int:
        """One column of the huge operand as it is staged, in bytes."""
        inner = self.group_shapes[-1][1]
        if is_entrywise(inner, self.entries):
            return math.ceil(max(1, self.entries or 0) * (self.source_itemsize + INDEX_NBYTES))
        return max(1, inner * self.source_itemsize)

    def __call__(self, grid: Grid) -> TileCost:
        """Return what a worker holds for a tile of this grid."""
        sizes = self.source_itemsize, self.compute_itemsize, self.output_itemsize
        return tile_cost(
            grid,
            self.group_shapes,
            sizes,
            self.is_converted,
            self.is_mixed,
            self.is_mapped,
            self.entries,
        )


def choose_grid(
    chained: Chained, cost_of: CostOf, layout: Layout, request: Request, flop_per_column: int
) -> Grid:
    """Cut D into tiles and blocks.

    The grid follows from shapes, dtypes, the layout of the outputs, `tile_columns` and an explicit
    `memory_limit`, never from workers or free memory: it decides the last bits of the result.
    """
    rows, columns = chained.rows, chained.columns
    column_nbytes = max(1, rows * cost_of.output_itemsize)
    if request.tile_columns is not None:
        width = min(request.tile_columns, max(columns, 1))
    else:
        width = _tile_width(rows, columns, cost_of, layout, flop_per_column)
    block = _block_shape(rows, width, cost_of.output_itemsize, layout, column_nbytes)
    if layout.order == "F" and block[1] >= rows and request.memory_limit is None:
        block = min(width, block[0] * _widening(cost_of.entries)), block[1]
    grid = _with_halo(Grid(rows, columns, width, *block), cost_of, layout)
    if request.memory_limit is not None:
        grid = _with_halo(_shrink(grid, cost_of, layout, request), cost_of, layout)
    return grid


def _widening(entries: float | None) -> int:
    """Return how many times wider panels are where empty columns of a sparse operand are left out.

    What is multiplied is the panel without them: BLAS is slow on a few dozen columns.
    """
    if entries is None:
        return 1
    kept = -math.expm1(-entries)  # columns that are not empty, if entries fall anywhere
    return max(1, min(SPARSE_WIDENING, round(1 / max(kept, 1e-9))))


def _with_halo(grid: Grid, cost_of: CostOf, layout: Layout) -> Grid:
    """Give blocks their halo, unless their runs are so short that it costs more than it saves."""
    is_long = grid.panel_columns * cost_of.output_itemsize >= HALO_RUN_NBYTES
    return replace(grid, halo_columns=layout.halo_columns if is_long else 0)


def _tile_width(
    rows: int, columns: int, cost_of: CostOf, layout: Layout, flop_per_column: int
) -> int:
    """Return the width of all tiles but the last, so that a tile is worth a call."""
    itemsize = cost_of.output_itemsize
    column_nbytes = max(1, rows * itemsize)
    staged_nbytes = cost_of.staged_column_nbytes
    target = TRAVEL_NBYTES if layout.travels or layout.holds_tile else TILE_NBYTES[layout.order]
    width = min(
        target // column_nbytes,
        STAGED_NBYTES // staged_nbytes,
        int(TILE_FLOP / max(1, flop_per_column)),
    )
    # A C-order file is written in runs as long as a tile is wide, and C is read likewise.
    shortest = layout.run_nbytes // itemsize if layout.order == "C" else 1
    width = max(width, min(shortest, LARGEST_STAGED_NBYTES // staged_nbytes), 1)
    count = ceil_div(columns, width)
    if count < ROUND:
        smallest = max(SPREAD_NBYTES, SPREAD_RUN_NBYTES // itemsize * column_nbytes)
        count = max(count, min(ROUND, columns * column_nbytes // smallest))
    elif count <= ROUND**3:
        count = round_up(count, ROUND)
    width = max(1, ceil_div(columns, max(count, 1)))
    step = _page_columns(rows, itemsize, layout)
    return min(max(columns, 1), round_up(width, step) if width >= 8 * step else width)


def _page_columns(rows: int, itemsize: int, layout: Layout) -> int:
    """Return how many columns it takes to get from one page of the output to another."""
    step_nbytes = itemsize if layout.order == "C" else max(1, rows * itemsize)
    return PAGE_NBYTES // math.gcd(PAGE_NBYTES, step_nbytes)


def _block_shape(
    rows: int, width: int, itemsize: int, layout: Layout, column_nbytes: int
) -> tuple[int, int]:
    """Return a block's columns (the panel) and rows for a tile of this width."""
    # At least so many blocks that the threads of a worker share even a small tile.
    most = MIXED_BLOCK_NBYTES if layout.is_mixed else BLOCK_NBYTES[layout.order]
    target = min(most, max(BLOCKS_NBYTES, width * column_nbytes // BLOCKS))
    if layout.order == "C":
        panel = min(width, max(1, C_RUN_NBYTES // itemsize))
        if panel * column_nbytes < target:
            panel = min(width, max(panel, target // 4 // column_nbytes))
        return max(1, panel), min(max(rows, 1), max(16, target // (panel * itemsize)))
    panel = max(16, target // column_nbytes)
    step = _page_columns(rows, itemsize, layout)
    panel = min(width, panel - panel % step if panel >= step else panel)
    block_rows = max(1, target // (panel * itemsize))
    if block_rows >= rows:
        return panel, max(rows, 1)
    return panel, min(rows, round_up(block_rows, PAGE_NBYTES))


def _shrink(grid: Grid, cost_of: CostOf, layout: Layout, request: Request) -> Grid:
    """Halve blocks, then tiles, until a worker keeps within `memory_limit` with one block."""
    limit = request.memory_limit or 0
    while cost_of(grid).worker_nbytes(1) > limit:
        cost = cost_of(grid)
        if cost.block_nbytes > limit // 4 and grid.block_rows * grid.panel_columns > 1:
            if (layout.order == "C" and grid.block_rows > 16) or grid.panel_columns == 1:
                grid = replace(grid, block_rows=ceil_div(grid.block_rows, 2))
            else:
                grid = replace(grid, panel_columns=ceil_div(grid.panel_columns, 2))
        elif grid.tile_columns > 1 and request.tile_columns is None:
            width = ceil_div(grid.tile_columns, 2)
            panel = min(grid.panel_columns, width)
            grid = replace(grid, tile_columns=width, panel_columns=panel)
        else:
            needed = cost.worker_nbytes(1)
            raise MemoryLimitError(
                f"one tile of {grid.tile_columns} columns needs {needed:,} bytes on a worker "
                f"({format_nbytes(needed)}), of which {format_nbytes(cost.resident_nbytes)} are "
                f"the resident factors; memory_limit is {limit:,} bytes: raise it"
                + (" or lower tile_columns" if request.tile_columns else ""),
                needed,
                limit,
            )
    return grid
