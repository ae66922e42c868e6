"""Byte sizes, and the cost model: what one tile needs, where, and how long it takes."""

import math
import re
from dataclasses import dataclass, replace
from numbers import Integral

from raymm.errors import PlanError
from raymm.operands import INDEX_NBYTES
from raymm.tiles import PAGE_NBYTES, Grid

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_BINARY_UNITS = {"ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}

LANES_PER_THREAD = 2
"""Blocks under way per thread over a tile: one is multiplied while another is written."""


@dataclass(frozen=True, slots=True)
class Rates:
    """What one machine does, for predictions only; no result depends on it.

    Measured on 2 cores of a 2025 server CPU with a local disk; a prediction is good to a factor of
    two or so, enough to choose an engine and to name the bottleneck.
    """

    flop_per_second: float = 100e9
    """One core, float32; float64 runs at half, integers beyond 2**53 at a hundredth."""
    read_bytes_per_second: float = 2e9
    write_bytes_per_second: float = 2e9
    """To a file, for the whole machine."""
    memory_bytes_per_second: float = 4e9
    """Into fresh memory, one core."""
    store_bytes_per_second: float = 1e9
    """Through the object store: put, get and copy."""
    call_seconds: float = 0.002
    """One call to a worker in another process."""


RATES = Rates()


def parse_nbytes(value: int | str, name: str = "memory_limit") -> int:
    """Return a size in bytes from an int or a string such as ``"8GiB"`` or ``"500 MB"``."""
    if isinstance(value, str):
        match = re.fullmatch(r"\s*([0-9]*\.?[0-9]+)\s*([kmgt]i?)?b?\s*", value.lower())
        if match is None:
            raise PlanError(f'{name}={value!r} is no size: give bytes, or like "8GiB" or "500MB"')
        unit = match[2] or ""
        nbytes = math.floor(float(match[1]) * (_UNITS | _BINARY_UNITS)[unit])
    elif isinstance(value, bool) or not isinstance(value, Integral):
        raise PlanError(f'{name}={value!r} is no size: give whole bytes, or like "8GiB"')
    else:
        nbytes = int(value)
    if nbytes <= 0:
        raise PlanError(f"{name}={value!r} must be at least one byte")
    return nbytes


def format_nbytes(nbytes: float) -> str:
    """Return a size with three digits and a decimal unit: ``43.2 GB``."""
    for unit in ("B", "kB", "MB", "GB"):
        if abs(nbytes) < 999.5 or (unit == "B" and abs(nbytes) < 1000):
            break
        nbytes /= 1000
    else:
        unit = "TB"
    return f"{nbytes:.0f} {unit}" if unit == "B" else f"{nbytes:.3g} {unit}"


@dataclass(frozen=True, slots=True)
class TileCost:
    """What one worker holds for a job, in bytes; blocks under way come on top, one per lane."""

    resident_nbytes: int
    """The folded factors."""
    staged_nbytes: int
    """One tile of the huge operand, as read and in the dtype of the arithmetic."""
    inner_nbytes: int
    """The product of a tile with all factors but the outermost, where these are kept apart."""
    block_nbytes: int
    """One block's output buffer, and its scratch where the dtype of the arithmetic differs."""

    def worker_nbytes(self, lanes: int) -> int:
        """Return the private bytes of a worker with `lanes` blocks under way."""
        fixed = self.resident_nbytes + self.staged_nbytes + self.inner_nbytes
        return fixed + lanes * self.block_nbytes


def tile_cost(  # noqa: PLR0913  what the model knows
    grid: Grid,
    group_shapes: tuple[tuple[int, int], ...],
    itemsizes: tuple[int, int, int],
    is_converted: bool,
    is_mixed: bool = False,
    is_mapped: bool = False,
    entries: float | None = None,
) -> TileCost:
    """Return what a worker holds for one tile.

    Parameters
    ----------
    grid : Grid
    group_shapes : tuple of (int, int)
        Shapes of the resident factors, outermost first.
    itemsizes : (int, int, int)
        Bytes of one value of the huge operand, of the arithmetic and of D.
    is_converted : bool
        Whether a tile is held twice: as read, and as the arithmetic needs it.
    is_mixed : bool
        Whether another output of the pass turns each block into its own order, in a copy.
    is_mapped : bool
        Whether functions are applied to each block: they hold what they were given, in 8 bytes a
        value at most, and what they make of it.
    entries : float, optional
        Stored entries of a column of a sparse huge operand, on average: blocks are multiplied
        without empty columns, and then spread.
    """
    source_itemsize, compute_itemsize, output_itemsize = itemsizes
    inner_length = group_shapes[-1][1]
    width = min(grid.tile_columns + grid.halo_columns, grid.columns)
    staged = inner_length * width * source_itemsize
    if is_converted:
        staged += inner_length * width * compute_itemsize
    inner = sum(rows for rows, _ in group_shapes[1:]) * width * compute_itemsize
    rows = min(grid.block_rows, grid.rows)
    columns = min(grid.panel_columns + grid.halo_columns, width)
    values = rows * columns
    # Rows lie as far apart as in the file modulo a page, and the first begins within one.
    block = values * output_itemsize + (min(rows, columns) + 1) * PAGE_NBYTES
    if is_mixed:
        block += values * output_itemsize
    if is_mapped:
        block += values * (compute_itemsize + 2 * 8)
    elif compute_itemsize != output_itemsize:
        block += values * compute_itemsize
    if max(columns for _, columns in group_shapes) > LONG_INNER:
        block += values * 2 * 8
    resident = sum(rows * columns for rows, columns in group_shapes) * compute_itemsize
    cost = TileCost(resident, staged, inner, block)
    if entries is None:
        return cost
    spread = values * max(compute_itemsize if is_mapped else 0, output_itemsize)
    held = math.ceil(width * max(1, entries) * (source_itemsize + INDEX_NBYTES))
    transposed = group_shapes[-1][0] * inner_length * compute_itemsize
    return _sparse_cost(cost, inner_length, entries, (spread, held, transposed))


def _sparse_cost(
    cost: TileCost, inner: int, entries: float, sizes: tuple[int, int, int]
) -> TileCost:
    """Add what sparse tiles take: spread blocks, entries, the transpose of a factor."""
    spread, held, transposed = sizes
    staged, block = cost.staged_nbytes, cost.block_nbytes + spread
    if is_entrywise(inner, entries):
        staged = 3 * held + min(staged, GATHERED_NBYTES)
    if not is_gathered(max(1, entries), inner, 1):
        return replace(cost, staged_nbytes=staged, block_nbytes=block)
    return TileCost(
        cost.resident_nbytes + transposed, staged, cost.inner_nbytes, block + 2 * GATHERED_NBYTES
    )


GATHER_COST = 100
"""An entry of a sparse tile that is multiplied on its own takes as long as so many dense ones."""
GATHERED_NBYTES = 2**20
"""Terms of such a product at a time."""
LARGEST_DENSE_NBYTES = 2**29
"""Sparse tiles that would be larger dense are multiplied entry by entry however many there are."""


def is_gathered(entries: float, rows: int, columns: int) -> bool:
    """Whether so many entries in a tile's non-empty columns are faster multiplied one by one."""
    return GATHER_COST * entries < rows * columns


def is_entrywise(inner: int, entries: float | None) -> bool:
    """Whether a plan expects an operand with so many entries a column never to be densified."""
    return entries is not None and inner > LONG_INNER and is_gathered(max(1, entries), inner, 1)


def inner_work(inner: int, entries: float | None) -> int:
    """Return the length of a dense inner axis that takes as long."""
    is_short = is_entrywise(inner, entries)
    return math.ceil(GATHER_COST * max(1, entries or 0)) if is_short else inner


LONG_INNER = 4096
"""Inner dimension from which partial products in less than float64 are summed in float64."""
