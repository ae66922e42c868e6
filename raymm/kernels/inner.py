"""Products over a huge inner axis: one tile's share of the sum, in float64 or exact integers.

Shapes: J rows of the product, L columns, N places of the inner axis in one tile.
"""

from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from raymm.kernels import blas
from raymm.kernels.fold import Mapper, round_to_bfloat16
from raymm.kernels.sparse import SparseMatrix
from raymm.kernels.structure import Structure, is_plain, multiply_structured
from raymm.memory import LONG_INNER

Array: TypeAlias = NDArray[Any]
Side: TypeAlias = Array | SparseMatrix

SHARED = 0.5
"""Places that matter are gathered if they are no more than this share of a tile."""
PARTS = 8
"""Shares of a tile that threads sum on their own; fixed, so that the bits are."""


def sum_dtype(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Return the dtype in which partial products of `dtype` are added."""
    if dtype.kind in "iu":
        return dtype
    return np.dtype(np.complex128 if dtype.kind == "c" else np.float64)


def inner_product(
    left_JN: Side, right_LN: Side, dtype: np.dtype[Any], rounds: bool, run: Mapper
) -> Array:
    """Return ``left_JN @ right_LN.T``; products in `dtype`, sums in float64 (integers: int64).

    Each product covers `LONG_INNER` places, whatever the tile; `rounds` takes the operands to
    bfloat16 first. Of sparse operands only the places count where all of them have entries, and
    they are densified in panels.
    """
    left_JN, right_LN = _shared(left_JN, right_LN)
    length = left_JN.shape[1]
    totals: list[Array | None] = [None] * PARTS
    step = max(1, -(-length // (PARTS * LONG_INNER))) * LONG_INNER

    def one(part: tuple[int, int]) -> None:
        stop = min(part[1] + step, length)
        starts = range(part[1], stop, LONG_INNER)
        totals[part[0]] = _sum(left_JN, right_LN, starts, stop, dtype, rounds)

    parts = [(place, start) for place, start in enumerate(range(0, length, step))]
    list(run(one, parts) or ())  # type: ignore[call-overload]
    result = np.zeros((left_JN.shape[0], right_LN.shape[0]), sum_dtype(dtype))
    for total in totals:
        if total is not None:
            result += total
    return result


def _shared(left: Side, right: Side) -> tuple[Side, Side]:
    """Return both without the places where a sparse one has no entries."""
    counts = [side.counts for side in (left, right) if isinstance(side, SparseMatrix)]
    if not counts:
        return left, right
    places = np.flatnonzero(np.all([each > 0 for each in counts], axis=0))
    if len(places) > SHARED * left.shape[1]:
        return left, right
    first, second = (
        side.take(places) if isinstance(side, SparseMatrix) else side[:, places]
        for side in (left, right)
    )
    return first, second


def _sum(
    left: Side, right: Side, starts: range, stop: int, dtype: np.dtype[Any], rounds: bool
) -> Array:
    total = np.zeros((left.shape[0], right.shape[0]), sum_dtype(dtype))
    part = np.empty(total.shape, dtype)
    with np.errstate(all="ignore"):
        for start in starts:
            places = slice(start, min(start + LONG_INNER, stop))
            first, its = _as(left, places, dtype, rounds)
            second, other = _as(right, places, dtype, rounds)
            other = None if other is None else other.T
            if dtype.kind in "iu":
                np.matmul(first, second.T, out=part)
            elif is_plain(first, its, second.T, other):
                blas.multiply(first, second.T, part)
            else:
                multiply_structured(first, its, second.T, other, part)
            total += part
    return total


def _as(side: Side, places: slice, dtype: np.dtype[Any], rounds: bool) -> tuple[Array, Structure]:
    """Return some columns in `dtype` as BLAS takes them: a copy of one panel at most."""
    if isinstance(side, SparseMatrix):
        panel = side.slice(places.start, places.stop)
        copied = panel.dense(dtype)
        if rounds and dtype == np.float32:
            round_to_bfloat16(copied.T)
        return copied, panel.structure() if dtype.kind in "fc" else None
    values = side[:, places]
    is_ready = values.dtype == dtype and not rounds and values.flags.writeable
    if is_ready and values.itemsize in (values.strides[0], values.strides[1]):
        return values, None
    copied = np.array(values, dtype, order="K")
    if rounds and dtype == np.float32:
        round_to_bfloat16(copied)
    return copied, None
