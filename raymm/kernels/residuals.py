"""Sums and products in float64 (integers: modulo 2**64), for checking a result. No bounds here.

Shapes: M rows of D, J and K inner dimensions, R rows and N columns of one block.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from raymm.kernels.sparse import SparseMatrix

Array: TypeAlias = NDArray[Any]
Vector: TypeAlias = NDArray[Any]

_CHUNK = 2**16
"""Values converted at a time: 512 KB, half of a core's L2 cache. Conversion and sum of float32 run
at 17 GB/s on one core, three times as fast as the same values come from the page cache."""
_LINE = 2**14
_PRODUCT = 2**22
"""Values of both operands of `product` converted at a time: 32 MB."""


@dataclass(frozen=True, slots=True)
class Weights:
    """What to sum a matrix's columns with, one number for each row."""

    plain: Vector
    """Of the values, in the wide dtype."""
    sizes: Vector | None = None
    """Of the absolute values."""
    squares: Vector | None = None
    """Of the squared absolute values."""
    dropped: NDArray[np.bool_] | None = None
    """Rows that count as zero."""


class Sums:
    """Weighted sums of the columns of a panel, from the blocks it arrives in.

    Memory: three vectors as long as the panel is wide, and two chunks.
    """

    def __init__(self, columns: int, dtype: np.dtype[Any], weights: Weights) -> None:
        self._weights, self._dtype = weights, dtype
        self._wide = np.empty(_CHUNK, dtype)
        self._needs_sizes = weights.sizes is not None or weights.squares is not None
        self._real = np.empty(_CHUNK if self._needs_sizes else 0, np.float64)
        self.plain = np.zeros(columns, dtype)
        self.sizes = np.zeros(columns, np.float64)
        self.squares = np.zeros(columns, np.float64)

    def add(self, first_row: int, first_column: int, values_RN: Array) -> None:
        """Add a block, in chunks that stay in the cache, whatever the order it lies in."""
        rows, columns = values_RN.shape
        is_tall = abs(values_RN.strides[0]) < abs(values_RN.strides[1])
        if is_tall:
            height = max(1, min(rows, _LINE))
            width = _CHUNK // height
        else:
            width = max(1, min(columns, _LINE))
            height = _CHUNK // width
        for row in range(0, rows, height):
            for column in range(0, columns, width):
                part = values_RN[row : row + height, column : column + width]
                chunk = _shaped(self._wide, part.shape, is_tall)
                np.copyto(chunk, part, casting="unsafe")
                row_start, column_start = first_row + row, first_column + column
                self._add_chunk(
                    slice(row_start, row_start + part.shape[0]),
                    slice(column_start, column_start + part.shape[1]),
                    chunk,
                )

    def add_entries(self, first_column: int, matrix: SparseMatrix) -> None:
        """Add whole columns of a sparse matrix; a structural zero adds nothing, not even NaN."""
        weights, rows, columns = self._weights, matrix.indices, first_column + matrix.nonzero
        starts = matrix.indptr[matrix.nonzero]
        if not len(starts):
            return
        values = matrix.data.astype(self._dtype)
        self.plain[columns] += np.add.reduceat(weights.plain[rows] * values, starts)
        if not self._needs_sizes:
            return
        sizes = np.abs(values)
        if weights.sizes is not None:
            self.sizes[columns] += np.add.reduceat(weights.sizes[rows] * sizes, starts)
        if weights.squares is not None:
            self.squares[columns] += np.add.reduceat(weights.squares[rows] * sizes**2, starts)

    def _add_chunk(self, rows: slice, columns: slice, chunk: Array) -> None:
        weights = self._weights
        if weights.dropped is not None:
            chunk[weights.dropped[rows]] = 0
        plain = weights.plain[rows]
        if chunk.dtype.kind == "u":  # NumPy has no BLAS for integers: half as fast
            np.multiply(chunk, plain[:, np.newaxis], out=chunk)
            self.plain[columns] += chunk.sum(axis=0)
            return
        self.plain[columns] += plain @ chunk
        if not self._needs_sizes:
            return
        sizes = _shaped(self._real, chunk.shape, chunk.strides[0] < chunk.strides[1])
        np.abs(chunk, out=sizes)
        if weights.sizes is not None:
            self.sizes[columns] += weights.sizes[rows] @ sizes
        if weights.squares is not None:
            np.multiply(sizes, sizes, out=sizes)
            self.squares[columns] += weights.squares[rows] @ sizes


def _shaped(memory: Array, shape: tuple[int, ...], is_tall: bool) -> Array:
    rows, columns = shape
    flat = memory[: rows * columns]
    return flat.reshape(columns, rows).T if is_tall else flat.reshape(rows, columns)


def product(left_MJ: Array, right_JN: Array, dtype: np.dtype[Any], sizes: bool = False) -> Array:
    """Return ``left_MJ @ right_JN`` (with `sizes`: of their absolute values) in a wide dtype.

    Memory: the product, and 32 MB for a part of the inner dimension of both, converted.
    """
    rows, inner, columns = *left_MJ.shape, right_JN.shape[1]
    out_MN = np.zeros((rows, columns), dtype)
    step = max(1, _PRODUCT // max(1, rows + columns))
    for start in range(0, inner, step):
        left = _widened(left_MJ[:, start : start + step], dtype, sizes)
        right = _widened(right_JN[start : start + step], dtype, sizes)
        out_MN += left @ right
    return out_MN


def _widened(values: Array, dtype: np.dtype[Any], sizes: bool) -> Array:
    if sizes:
        wide = np.complex128 if values.dtype.kind == "c" else np.float64
        values = np.abs(values.astype(wide))
    return values.astype(dtype, copy=False)


def weigh(weights_M: Vector, factors: Sequence[Array]) -> Vector:
    """Return ``weights_M @ F1 @ F2 @ ...``, in the weights' dtype."""
    column = weights_M[:, np.newaxis]
    for factor in factors:
        column = product(factor.T, column, weights_M.dtype)
    return column[:, 0]


@dataclass(frozen=True, slots=True)
class Sizes:
    """What ``|F1| @ |F2| @ ... @ |Fk|`` amounts to; it is never formed as a whole."""

    norms: Vector
    """2-norms of its columns."""
    sums: Vector
    """Sums of its columns."""
    largest: float
    """The largest finite entry of a product of neighbours, 0 if there is one factor only."""


def measure(factors: Sequence[Array]) -> Sizes:
    """Measure the product of the factors' absolute values, a band of its rows at a time."""
    double = np.dtype(np.float64)
    widest = max(length for factor in factors for length in factor.shape)
    step = max(1, _PRODUCT // 2 // max(1, widest))
    squares, sums = np.zeros((2, factors[-1].shape[1]))
    largest = 0.0
    for row in range(0, factors[0].shape[0], step):
        band = _widened(factors[0][row : row + step], double, True)
        for factor in factors[1:]:
            band = product(band, factor, double, sizes=True)
            largest = max(largest, float(band[np.isfinite(band)].max(initial=0.0)))
        squares += (band * band).sum(axis=0)
        sums += band.sum(axis=0)
    return Sizes(np.sqrt(squares), sums, largest)
