"""Products of resident factors, and products with a long inner dimension.

Shapes: M rows of D, J and K inner dimensions, N columns of one panel.
"""

from collections.abc import Callable, Iterable
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from raymm.kernels import blas
from raymm.memory import LONG_INNER

Array: TypeAlias = NDArray[Any]
Mapper: TypeAlias = Callable[[Callable[[tuple[int, int]], None], Iterable[tuple[int, int]]], object]
"""`map` of a pool of threads, or `serially`."""

_FOLD_ROWS, _FOLD_COLUMNS = 256, 4096


def serially(function: Callable[[tuple[int, int]], None], items: Iterable[tuple[int, int]]) -> None:
    """Call `function` for each item, here and now."""
    for item in items:
        function(item)


def accumulate(left_MK: Array, right_KN: Array, out_MN: Array) -> None:
    """Write ``left_MK @ right_KN`` into `out_MN`; the sum over a long K is taken in float64.

    In float32 a plain sum over millions of terms loses up to a few percent; partial products over
    `LONG_INNER` terms, added in float64, keep the error of one such part. NaN and infinities
    follow IEEE, without NumPy's warnings: those would come from a thread of ours.
    """
    inner = left_MK.shape[1]
    with np.errstate(all="ignore"):
        if inner == 0:
            out_MN[...] = 0
        elif inner <= LONG_INNER or out_MN.dtype not in (np.float32, np.complex64):
            blas.multiply(left_MK, right_KN, out_MN)
        else:
            wide = np.float64 if out_MN.dtype == np.float32 else np.complex128
            total, part = np.zeros(out_MN.shape, wide), np.empty(out_MN.shape, out_MN.dtype)
            for start in range(0, inner, LONG_INNER):
                piece = slice(start, start + LONG_INNER)
                blas.multiply(left_MK[:, piece], right_KN[piece], part)
                total += part
            out_MN[...] = total


def fold(left_MJ: Array, right_JK: Array, run: Mapper = serially) -> Array:
    """Return ``left_MJ @ right_JK`` of two arrays of one dtype, block by block through `run`.

    The blocks are fixed, so the bits do not depend on how many threads `run` has.
    """
    rows, columns = left_MJ.shape[0], right_JK.shape[1]
    out_MK = np.empty((rows, columns), left_MJ.dtype)

    def one(start: tuple[int, int]) -> None:
        band = slice(start[0], start[0] + _FOLD_ROWS)
        panel = slice(start[1], start[1] + _FOLD_COLUMNS)
        accumulate(left_MJ[band], right_JK[:, panel], out_MK[band, panel])

    starts = [
        (row, column)
        for column in range(0, columns, _FOLD_COLUMNS)
        for row in range(0, rows, _FOLD_ROWS)
    ]
    # A list takes the results, so that an error in a thread is raised here.
    list(run(one, starts) or ())  # type: ignore[call-overload]
    return out_MK


def round_to_bfloat16(values: NDArray[np.float32]) -> NDArray[np.float32]:
    """Round float32 to the nearest bfloat16 (ties to even), in place; NaN and Inf stay."""
    for row in np.atleast_2d(values):  # one at a time: what is needed on the way stays small
        bits = row.view(np.uint32)
        rounded = bits + (((bits >> np.uint32(16)) & np.uint32(1)) + np.uint32(0x7FFF))
        np.copyto(bits, rounded & np.uint32(0xFFFF0000), where=np.isfinite(row))
    return values
