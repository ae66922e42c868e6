"""Matrices of which only some entries are stored, compressed by columns. NumPy only.

Shapes: K rows, N columns, E stored entries.
"""

from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from raymm.errors import SourceError

Array: TypeAlias = NDArray[Any]
Index: TypeAlias = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class SparseMatrix:
    """Stored entries, column after column, rows ascending within each; no entry twice.

    A stored entry counts as a value even if it is zero or NaN; what is not stored is a *structural
    zero* and contributes nothing to a product.
    """

    shape: tuple[int, int]
    indptr: Index
    """(N + 1,): where each column begins among the entries."""
    indices: NDArray[Any]
    """(E,): the entries' rows, int32 or int64."""
    data: Array
    """(E,): the entries' values."""

    @property
    def dtype(self) -> np.dtype[Any]:
        """Dtype of the values."""
        return self.data.dtype

    @property
    def size(self) -> int:
        """Number of stored entries."""
        return len(self.data)

    @property
    def nbytes(self) -> int:
        """Memory of the entries, in bytes."""
        return self.indptr.nbytes + self.indices.nbytes + self.data.nbytes

    @property
    def counts(self) -> Index:
        """Number of stored entries of each column."""
        return np.diff(self.indptr)

    @property
    def nonzero(self) -> Index:
        """The columns that have stored entries."""
        return np.flatnonzero(self.counts)

    def min(self) -> Any:
        """Return the smallest stored value; there must be one."""
        return self.data.min()

    def max(self) -> Any:
        """Return the largest stored value; there must be one."""
        return self.data.max()

    @property
    def T(self) -> "SparseMatrix":
        """The transpose, compressed by columns again: the entries are sorted into new memory."""
        rows, columns = self.shape
        order = np.argsort(self.indices, kind="stable")
        counts = np.bincount(self.indices, minlength=rows)
        turned = self._columns_of_entries().astype(_index_dtype(columns))[order]
        return SparseMatrix((columns, rows), _starts(counts), turned, self.data[order])

    def slice(self, start: int, stop: int) -> "SparseMatrix":
        """Return columns ``start:stop``; the entries are not copied."""
        starts = self.indptr[start : stop + 1]
        entries = slice(int(starts[0]), int(starts[-1]))
        return SparseMatrix(
            (self.shape[0], stop - start),
            starts - starts[0],
            self.indices[entries],
            self.data[entries],
        )

    def take(self, columns: Index) -> "SparseMatrix":
        """Return columns by number, in any order, repeated or not."""
        starts = _starts(self.counts[columns])
        entries = _expanded(self.indptr[:-1][columns], starts)
        shape = self.shape[0], len(columns)
        return SparseMatrix(shape, starts, self.indices[entries], self.data[entries])

    def rows(self, index: Index) -> "SparseMatrix":
        """Return rows by number, in any order, repeated or not."""
        order = np.argsort(index, kind="stable")
        repeats = np.bincount(index, minlength=self.shape[0])
        starts = _starts(repeats[self.indices])
        entries = np.repeat(np.arange(self.size), np.diff(starts))
        places = _expanded(_starts(repeats)[self.indices], starts)
        return from_entries(
            (len(index), self.shape[1]),
            order[places],
            self._columns_of_entries()[entries],
            self.data[entries],
        )

    def copy(self) -> "SparseMatrix":
        """Return it in memory of its own."""
        return SparseMatrix(self.shape, self.indptr, self.indices.copy(), self.data.copy())

    def dense(self, dtype: np.dtype[Any] | None = None, out_NK: Array | None = None) -> Array:
        """Return it with its zeros, columns contiguous: in new memory, or in `out_NK`, turned."""
        rows, columns = self.shape
        return (
            self._fill(columns, self._columns_of_entries(), dtype, out_NK).reshape(columns, rows).T
        )

    def compact(
        self, dtype: np.dtype[Any] | None = None, out_NK: Array | None = None
    ) -> tuple[Index, Array]:
        """Return the columns that have entries, and these columns as a dense matrix.

        Parameters
        ----------
        dtype : dtype, optional
            Of the dense matrix; default: that of the values.
        out_NK : ndarray, optional
            Contiguous memory for it, a row for each of these columns.
        """
        counts = self.counts
        nonzero = np.flatnonzero(counts)
        owners = np.repeat(np.arange(len(nonzero)), counts[nonzero])
        panel = self._fill(len(nonzero), owners, dtype, out_NK)
        return nonzero, panel.reshape(len(nonzero), self.shape[0]).T

    def structure(self) -> NDArray[np.bool_]:
        """Return where entries are stored, as a dense matrix."""
        marks = SparseMatrix(self.shape, self.indptr, self.indices, np.ones(self.size, np.bool_))
        return marks.dense()

    def _fill(
        self, columns: int, owners: Index, dtype: np.dtype[Any] | None, out_NK: Array | None
    ) -> Array:
        rows = self.shape[0]
        dtype = dtype or self.dtype.newbyteorder("=")
        if out_NK is None:
            flat = np.zeros(columns * rows, dtype)
        else:
            flat = out_NK.reshape(-1)
            flat[...] = 0
        flat[owners * rows + self.indices] = self.data
        return flat

    def _columns_of_entries(self) -> Index:
        return np.repeat(np.arange(self.shape[1]), self.counts)


def identity(length: int, dtype: np.dtype[Any]) -> SparseMatrix:
    """Return the identity matrix."""
    places = np.arange(length)
    return SparseMatrix((length, length), np.arange(length + 1), places, np.ones(length, dtype))


def from_entries(
    shape: tuple[int, int], rows: NDArray[Any], columns: NDArray[Any], data: Array
) -> SparseMatrix:
    """Return a matrix of entries in any order; those at the same place are added up.

    Raises
    ------
    SourceError
        An entry lies outside of the matrix.
    """
    _check_places(rows, shape[0])
    _check_places(columns, shape[1])
    places = columns.astype(np.int64) * max(1, shape[0]) + rows
    if (np.diff(places) <= 0).any():
        order = np.argsort(places, kind="stable")
        places, rows, columns, data = places[order], rows[order], columns[order], data[order]
        is_first = np.diff(places, prepend=-1) > 0
        if not is_first.all():
            firsts = np.flatnonzero(is_first)
            rows, columns, data = rows[firsts], columns[firsts], np.add.reduceat(data, firsts)
    starts = _starts(np.bincount(columns, minlength=shape[1]))
    return SparseMatrix(shape, starts, rows.astype(_index_dtype(shape[0]), copy=False), data)


def from_compressed(
    shape: tuple[int, int], indptr: NDArray[Any], indices: NDArray[Any], data: Array
) -> SparseMatrix:
    """Return a matrix compressed by columns, as it is if it is in order, else sorted.

    Raises
    ------
    SourceError
        An entry lies outside of the matrix, or the columns' ends are not in order.
    """
    starts = np.asarray(indptr, np.int64)
    check_compressed(shape, starts, indices, len(data))
    rows, values = indices[: starts[-1]], data[: starts[-1]]
    matrix = SparseMatrix(shape, starts, rows, values)
    steps = np.diff(rows)
    bounds = starts[1:-1]
    steps[bounds[(bounds > 0) & (bounds < len(rows))] - 1] = 1
    if (steps > 0).all():
        return matrix
    return from_entries(shape, rows, matrix._columns_of_entries(), values)


def check_compressed(
    shape: tuple[int, int], indptr: NDArray[Any], indices: NDArray[Any], length: int
) -> None:
    """Raise `SourceError` unless a matrix of `length` values, compressed by columns, is whole."""
    ends = np.diff(indptr)
    is_whole = len(indptr) == shape[1] + 1 and indptr[0] == 0 and (ends >= 0).all()
    if not is_whole or indptr[-1] > min(len(indices), length):
        raise SourceError(
            "the pointers of a sparse matrix do not fit its entries: it is damaged, make it again"
        )
    _check_places(indices[: indptr[-1]], shape[0])


def _check_places(places: NDArray[Any], length: int) -> None:
    if len(places) and (places.min() < 0 or places.max() >= length):
        found = places.min() if places.min() < 0 else places.max()
        raise SourceError(
            f"an entry of a sparse matrix has index {found} along an axis of length {length}: "
            "its indices are damaged, make it again"
        )


def _index_dtype(length: int) -> np.dtype[Any]:
    return np.dtype(np.int32 if length <= 2**31 else np.int64)


def _starts(counts: Index) -> Index:
    """Return where each of runs of these lengths begins, and the end."""
    starts = np.zeros(len(counts) + 1, np.int64)
    np.cumsum(counts, out=starts[1:])
    return starts


def _expanded(firsts: Index, starts: Index) -> Index:
    """Return the numbers of runs that begin at `firsts` and are as long as `starts` says."""
    shifts: Index = np.repeat(firsts - starts[:-1], np.diff(starts)) + np.arange(starts[-1])
    return shifts
