"""Sparse operands: SciPy's matrices and arrays, torch's sparse tensors."""

import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from raymm.errors import DTypeError, PlanError, ShapeError, SourceError
from raymm.kernels.buffers import Buffer
from raymm.kernels.sparse import (
    SparseMatrix,
    check_compressed,
    from_compressed,
    from_entries,
)
from raymm.kernels.structure import Factor
from raymm.operands import Operand, check_dtype
from raymm.sources.base import Array, Source


class Compressed:
    """The stored entries, compressed by columns, and by columns of the transpose: each when asked.

    Memory: what the caller's object holds is used as it is where it is compressed that way; else
    the entries are copied once.
    """

    def __init__(self, make: Callable[[bool], SparseMatrix], name: str) -> None:
        self._make: Callable[[bool], SparseMatrix] | None = make
        self._name = name
        self._sides: dict[bool, SparseMatrix] = {}
        self._lock = threading.Lock()

    def side(self, is_turned: bool) -> SparseMatrix:
        """Return the matrix, or its transpose, compressed by columns."""
        with self._lock:
            if is_turned not in self._sides:
                if self._make is not None:
                    try:
                        self._sides[is_turned] = self._make(is_turned)
                    except SourceError as error:
                        raise SourceError(f"{self._name}: {error}") from error
                else:
                    self._sides[is_turned] = self._sides[not is_turned].T
            return self._sides[is_turned]

    def __getstate__(self) -> dict[bool, SparseMatrix]:
        """Leave the caller's object behind."""
        return self._sides or {False: self.side(False)}

    def __setstate__(self, sides: dict[bool, SparseMatrix]) -> None:
        self._make, self._sides, self._lock = None, sides, threading.Lock()


@dataclass(frozen=True, eq=False)
class SparseSource:
    """A sparse matrix in this process's memory; it is never densified whole unless it is loaded."""

    held: Compressed
    name: str
    shape: tuple[int, int]
    dtype: np.dtype[Any]
    nonzeros: int
    is_turned: bool = False
    """Whether this is the transpose of what is held."""
    is_vector: bool = False
    """Whether the matrix of one row is a vector to the user."""
    is_bfloat16: bool = False
    start: int = 0
    """Column of the whole operand that what is held begins with."""

    @property
    def operand(self) -> Operand:
        """Its description."""
        first = 1 if self.is_vector else 0
        strides = self.dtype.itemsize, self.dtype.itemsize * self.shape[0]
        return Operand(
            self.name,
            self.shape[first:],
            self.dtype,
            strides[first:],
            bfloat16=self.is_bfloat16,
            nonzeros=self.nonzeros,
        )

    @property
    def T(self) -> "SparseSource":
        """The transpose; nothing is moved."""
        return replace(self, shape=self.shape[::-1], is_turned=not self.is_turned)

    def as_row(self) -> "SparseSource":
        """Return a vector as a matrix of one row."""
        return replace(self, is_vector=False)

    def as_column(self) -> "SparseSource":
        """Return a vector as a matrix of one column."""
        return replace(self, is_vector=False).T

    def load(self) -> Array:
        """Return all of it as a dense array, for a factor that stays resident."""
        values = self.held.side(self.is_turned).dense()
        return values[0] if self.is_vector else values

    def read(self, start: int, stop: int, buffer: Buffer) -> SparseMatrix:
        """Return columns ``start:stop``; the entries are not copied."""
        del buffer
        return self.held.side(self.is_turned).slice(start - self.start, stop - self.start)

    def cut(self, start: int, stop: int) -> "SparseSource":
        """Return these columns, copied, to travel on their own."""
        columns = self.read(start, stop, Buffer()).copy()
        return replace(held(columns, self.name), is_bfloat16=self.is_bfloat16, start=start)


def held(matrix: SparseMatrix, name: str) -> SparseSource:
    """Return a sparse matrix as a source."""
    whole = Compressed(lambda is_turned: matrix.T if is_turned else matrix, name)
    return SparseSource(whole, name, matrix.shape, matrix.dtype, matrix.size)


def load_factor(source: Source) -> Factor:
    """Return all of an operand as a dense array, and where a sparse one has entries."""
    if source.operand.nonzeros is None or len(source.operand.shape) != 2:
        return Factor(source.load())
    matrix: Any = source.read(0, source.operand.shape[1], Buffer())
    structure = matrix.structure() if matrix.dtype.kind in "fc" else None
    return Factor(matrix.dense(), None if structure is None or structure.all() else structure)


def from_scipy(value: Any, name: str) -> SparseSource:
    """Return a SciPy sparse matrix or array of any format as a source; nothing is read yet."""
    check_dtype(value.dtype, name)
    shape = _matrix_shape(tuple(int(length) for length in value.shape), name)
    vector = value.ndim == 1

    def make(is_turned: bool) -> SparseMatrix:
        matrix = value.reshape(1, -1) if vector else value
        if matrix.format == "coo":  # sorted here: SciPy would add equal places up in its own way
            rows, columns = matrix.coords if hasattr(matrix, "coords") else (matrix.row, matrix.col)
            return _of_entries(shape, rows, columns, matrix.data, is_turned)
        if matrix.format != ("csr" if is_turned else "csc"):
            matrix = _checked(matrix)
        compressed = matrix.tocsr() if is_turned else matrix.tocsc()
        side = shape[::-1] if is_turned else shape
        return from_compressed(side, compressed.indptr, compressed.indices, compressed.data)

    nonzeros = int(value.nnz)
    return SparseSource(
        Compressed(make, name), name, shape, value.dtype, nonzeros, is_vector=vector
    )


def _checked(matrix: Any) -> Any:
    """Return a SciPy matrix that is whole: converting a damaged one, SciPy writes out of bounds."""
    matrix = matrix.tocsr() if matrix.format == "lil" else matrix  # only joins its lists
    if matrix.format in ("csr", "csc", "bsr"):
        height, width = matrix.blocksize if matrix.format == "bsr" else (1, 1)
        blocks = matrix.shape[0] // height, matrix.shape[1] // width
        side = blocks if matrix.format == "csc" else blocks[::-1]
        check_compressed(side, matrix.indptr, matrix.indices, len(matrix.data))
    return matrix


def from_sparse_tensor(tensor: Any, name: str) -> SparseSource:
    """Return a torch sparse tensor as a source: COO, coalesced or not, CSR, CSC, BSR or BSC."""
    import torch  # noqa: PLC0415  only loaded if the caller has a tensor

    if tensor.is_meta:
        raise PlanError(f"{name} is a meta tensor: it has no values")
    plain = tensor.detach().cpu()
    if plain.layout not in (torch.sparse_coo, torch.sparse_csr, torch.sparse_csc):
        if plain.layout not in (torch.sparse_bsr, torch.sparse_bsc):
            raise PlanError(f"{name} has the layout {plain.layout}: use .to_dense()")
        plain = plain.to_sparse_coo()
    shape = _matrix_shape(tuple(plain.shape), name)
    values = plain._values() if plain.layout == torch.sparse_coo else plain.values()
    if values.ndim != 1:
        raise PlanError(f"{name} has dense parts or several matrices: use .to_dense()")
    is_bfloat16 = values.dtype == torch.bfloat16
    if values.dtype.is_floating_point and values.dtype.itemsize == 1:
        raise DTypeError(f"{name} has dtype {values.dtype}: convert it with .float()")
    data = (values.float() if is_bfloat16 else values.resolve_conj().resolve_neg()).numpy()

    def make(is_turned: bool) -> SparseMatrix:
        if plain.layout == torch.sparse_coo:
            places = plain._indices().numpy()
            rows, columns = (np.zeros_like(places[0]), places[0]) if plain.ndim == 1 else places
            return _of_entries(shape, rows, columns, data, is_turned)
        is_by_rows = plain.layout == torch.sparse_csr
        parts = (
            (plain.crow_indices(), plain.col_indices())
            if is_by_rows
            else (plain.ccol_indices(), plain.row_indices())
        )
        indptr, indices = (part.numpy() for part in parts)
        given = from_compressed(shape[::-1] if is_by_rows else shape, indptr, indices, data)
        return given if is_by_rows == is_turned else given.T

    return SparseSource(
        Compressed(make, name),
        name,
        shape,
        data.dtype,
        len(data),
        is_vector=plain.ndim == 1,
        is_bfloat16=is_bfloat16,
    )


def _of_entries(
    shape: tuple[int, int], rows: Any, columns: Any, data: Array, is_turned: bool
) -> SparseMatrix:
    if is_turned:
        return from_entries(shape[::-1], columns, rows, data)
    return from_entries(shape, rows, columns, data)


def _matrix_shape(shape: tuple[int, ...], name: str) -> tuple[int, int]:
    if len(shape) not in (1, 2):
        raise ShapeError(f"{name} {shape} is sparse with {len(shape)} axes: give a matrix")
    return (shape[0], shape[1]) if len(shape) == 2 else (1, shape[0])
