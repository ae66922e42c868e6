"""A huge inner axis: the two neighbours that share it are multiplied first, tile by tile."""

import contextlib
import math
import uuid
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from raymm.combining import CombineTree
from raymm.engines.base import Call, Engine
from raymm.errors import DTypeError, MemoryLimitError
from raymm.events import Callback
from raymm.kernels import exact
from raymm.kernels.buffers import Buffer
from raymm.kernels.cpu import Arithmetic
from raymm.kernels.inner import sum_dtype
from raymm.memory import LONG_INNER, format_nbytes
from raymm.operands import result_dtype
from raymm.order import compute_dtype
from raymm.request import Request
from raymm.sources.base import Source
from raymm.sources.memory import ArraySource
from raymm.sources.pairs import Pair
from raymm.tiles import Grid, Layout
from raymm.worker import Job

Values = NDArray[Any]

TILE_NBYTES = 2**27
"""Of both operands' tile."""
TILE_FLOP = 100e9


def contract(
    left: Source, right: Source, request: Request, engine: Engine, notify: Callback
) -> ArraySource:
    """Return ``left @ right``, whose inner axis is huge, as an operand in memory.

    Parameters
    ----------
    left, right : Source
        Matrices of shapes (J, K) and (K, L), K huge.

    Returns
    -------
    ArraySource
        Shape (J, L); float32 operands give float32, summed in float64; integers are exact.

    Notes
    -----
    Tiles are runs of K. Their partial products are added in float64 in a fixed binary tree.

    Memory: a tile of both on each worker (128 MB, less under `memory_limit`), and a few partial
    products of 8 J L bytes.
    """
    pair = Pair(left, right.T)
    computed = _arithmetic(pair, request)
    grid = _grid(pair, request)
    layout = Layout("C", 0, 0, 0, 0, travels=True)
    arithmetic = Arithmetic(computed, computed, request.precision == "bf16")
    job = Job(uuid.uuid4().hex, (), grid, layout, arithmetic, (), 1, 1, is_inner=True)
    tree: CombineTree[Values] = CombineTree(len(grid), np.add)
    engine.open()
    calls: Iterator[Call] = ((tile, pair) for tile in grid)
    with contextlib.closing(engine.run(job, {}, calls, request.max_in_flight, notify)) as outcomes:
        for outcome in outcomes:
            tree.add(outcome.receipt.tile.index, next(iter(outcome.pieces)).values)
    dtype = result_dtype((left.operand, right.operand))
    if dtype.kind not in "iu":
        dtype = np.promote_types(dtype, np.float32)
        if request.precision == "float64" or request.dtype in (np.float64, np.complex128):
            dtype = sum_dtype(dtype)
    with np.errstate(over="ignore"):
        total = tree.root().astype(dtype)
    return ArraySource(total, pair.operand.name)


def _arithmetic(pair: Pair, request: Request) -> np.dtype[Any]:
    """Return the dtype of the products; integers take floats where that is exact."""
    dtype = result_dtype((pair.left.operand, pair.right.operand))
    if dtype.kind not in "iu":
        return compute_dtype(dtype, request.dtype or dtype, request.precision)
    sides = (pair.left, pair.right)
    most = [exact.largest(side.operand.dtype) for side in sides]
    length = pair.left.operand.shape[1]
    if most[0] * most[1] * length >= 2**53:  # only then are the values looked at
        most = [_largest_value(side) for side in sides]
    bound = most[0] * most[1] * length
    if bound >= (2**63 if dtype.kind == "i" else 2**64):
        raise DTypeError(
            f"{pair.left.operand} @ {pair.right.operand.T}: the values allow a result of up to "
            f"about 2**{math.log2(bound):.0f}, and 64 bits might not hold it; give float64 "
            "operands or scale them"
        )
    if bound >= 2**53:
        return dtype
    is_single = most[0] * most[1] * LONG_INNER < 2**24
    return np.dtype(np.float32 if is_single else np.float64)


def _largest_value(source: Source) -> int:
    rows, columns = source.operand.shape
    step = max(1, TILE_NBYTES // max(1, rows * source.operand.dtype.itemsize))
    buffer, largest = Buffer(), 0
    for start in range(0, columns, step):
        values = source.read(start, min(start + step, columns), buffer)
        if values.size:
            largest = max(largest, abs(int(values.min())), abs(int(values.max())))
    return largest


def _grid(pair: Pair, request: Request) -> Grid:
    """Cut the inner axis, into multiples of what one product covers."""
    left, right = pair.left.operand, pair.right.operand
    rows, columns, length = left.shape[0], right.shape[0], left.shape[1]
    place_nbytes = max(1, left.dtype.itemsize * rows + right.dtype.itemsize * columns)
    width = int(min(TILE_NBYTES // place_nbytes, TILE_FLOP / max(1, 2 * rows * columns)))
    if request.memory_limit is not None:
        held = 10 * rows * columns * 8  # a total for each part of a tile, and what is combined
        if held + place_nbytes > request.memory_limit:
            raise MemoryLimitError(
                f"{left} @ {right.T} needs {format_nbytes(held)} for partial products, "
                f"memory_limit is {request.memory_limit:,} bytes: raise it",
                held,
                request.memory_limit,
            )
        width = min(width, (request.memory_limit - held) // (2 * place_nbytes))
    if request.tile_columns is not None:
        width = request.tile_columns
    elif width > LONG_INNER:
        width -= width % LONG_INNER
    width = max(1, min(width, length))
    return Grid(rows, length, width, width, max(1, rows))
