"""Products with a sparse matrix, entry by entry: what a very high tile with few entries takes.

Shapes: M rows of the product, K inner dimension, N columns.
"""

from collections.abc import Iterator
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from raymm.kernels.fold import Mapper, serially
from raymm.kernels.sparse import SparseMatrix
from raymm.kernels.structure import Structure, is_finite
from raymm.memory import GATHERED_NBYTES, LONG_INNER

Array: TypeAlias = NDArray[Any]


def multiply_gathered(
    left_KM: Array,
    structure_KM: Structure,
    matrix_KN: SparseMatrix,
    out_NM: Array,
    run: Mapper = serially,
) -> None:
    """Write the transpose of ``left @ matrix`` into `out_NM`; every column has entries.

    Parameters
    ----------
    left_KM : ndarray
        The transpose of the left factor, its rows contiguous.
    structure_KM : ndarray of bool, optional
        Where it has entries.
    matrix_KN : SparseMatrix
    out_NM : ndarray
    run : callable
        Maps over parts, which are fixed: the bits do not depend on it.
    """

    def one(part: tuple[int, int]) -> None:
        with np.errstate(all="ignore"):
            _part(left_KM, structure_KM, matrix_KN.slice(*part), out_NM[slice(*part)])

    entries = max(1, GATHERED_NBYTES // max(1, left_KM.shape[1] * out_NM.itemsize))
    list(run(one, list(_parts(matrix_KN, entries))) or ())  # type: ignore[call-overload]


def _parts(matrix: SparseMatrix, entries: int) -> Iterator[tuple[int, int]]:
    """Yield runs of columns with so many entries at most, or of one column."""
    first, columns = 0, matrix.shape[1]
    while first < columns:
        end = int(matrix.indptr[first]) + entries
        last = max(first + 1, int(np.searchsorted(matrix.indptr, end, "right")) - 1)
        yield first, min(last, columns)
        first = last


def _part(left: Array, structure: Structure, part: SparseMatrix, out: Array) -> None:
    dtype = out.dtype
    wide = {"f": np.dtype(np.float64), "c": np.dtype(np.complex128)}.get(dtype.kind, dtype)
    if part.size * left.shape[1] * dtype.itemsize > GATHERED_NBYTES:  # one long column
        step = max(1, GATHERED_NBYTES // max(1, left.shape[1] * dtype.itemsize))
        total = np.zeros(left.shape[1], wide)
        for start in range(0, part.size, step):
            total += _terms(left, structure, part, slice(start, start + step), dtype).sum(axis=0)
        out[0] = total
        return
    terms = _terms(left, structure, part, slice(None), dtype)
    counts = part.counts
    summed = wide if counts.max(initial=0) > LONG_INNER else dtype
    if (counts == 1).all():
        out[...] = terms
    else:
        out[...] = np.add.reduceat(terms, part.indptr[:-1], axis=0, dtype=summed)


def _terms(
    left: Array, structure: Structure, part: SparseMatrix, entries: slice, dtype: np.dtype[Any]
) -> Array:
    rows, data = part.indices[entries], part.data[entries].astype(dtype, copy=False)
    terms: Array = left[rows]
    terms *= data[:, np.newaxis]
    if structure is not None and not is_finite(data):
        terms[~structure[rows]] = 0
    return terms
