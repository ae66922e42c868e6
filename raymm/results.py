"""Results opened again: something with a shape and a dtype that can be sliced."""

import os
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from raymm.indexing import select_axes
from raymm.kernels.buffers import Buffer
from raymm.operands import format_shape
from raymm.sinks.base import Stored
from raymm.sources import Source, open_source
from raymm.sources.files import FileSource
from raymm.sources.selection import select


@dataclass(frozen=True)
class Matrix:
    """A stored matrix of which parts are read when they are asked for."""

    _source: Source

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape, as D had it."""
        return self._source.operand.shape

    @property
    def dtype(self) -> np.dtype[Any]:
        """Dtype of the values."""
        return self._source.operand.dtype

    @property
    def ndim(self) -> int:
        """Number of axes."""
        return len(self.shape)

    @property
    def nbytes(self) -> int:
        """Size of the values, in bytes."""
        return self._source.operand.nbytes

    @property
    def T(self) -> "Matrix":
        """The transpose; nothing is read."""
        return Matrix(self._source.T)

    def __len__(self) -> int:
        return self.shape[0]

    def __raymm_source__(self) -> Source:
        """Return itself as an operand of a further chain: it is read tile by tile."""
        return self._source

    def __repr__(self) -> str:
        return f"<raymm matrix {self._source.operand.name} {format_shape(self.shape)} {self.dtype}>"

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        """Return all of it, in memory."""
        if copy is False:
            raise ValueError("a stored matrix cannot be had in memory without a copy")
        return np.array(self[...], dtype)

    def __getitem__(self, key: Any) -> Any:
        """Return a part, as NumPy does; only what it needs is read.

        Parameters
        ----------
        key : int, slice, array of int, mask, or a tuple of two of them
            Two arrays pick pairs, as in NumPy.
        """
        if not self.shape:
            select_axes(key, ())
            return self._source.load().reshape(())[()]
        if len(self.shape) == 1:
            (axis,) = select_axes(key, self.shape)
            row = Matrix(self._source.as_row())
            return row[0, axis.wanted].reshape(_shape(axis, self.shape[0]))[()]
        rows, columns = select_axes(key, self.shape)
        if rows.is_array and columns.is_array:
            # Of all rows that are wanted the columns that are: more than the pairs, but bounded.
            index, places = np.unique(columns.index, return_inverse=True)
            values = (
                self[rows.index, :][:, index]
                if len(index) > self.shape[0]
                else (self[:, index][rows.index])
            )
            taken = values[np.arange(len(values)), places]
            return taken.reshape(np.broadcast_shapes(rows.shape, columns.shape))
        part = select(select(self._source, 0, rows.wanted), 1, columns.wanted)
        values = np.array(part.read(0, part.operand.shape[1], Buffer()))
        shape = _shape(rows, values.shape[0]) + _shape(columns, values.shape[1])
        return values.reshape(shape)[()]


def _shape(axis: Any, length: int) -> tuple[int, ...]:
    """Return the axes that are left of one axis of a part."""
    if axis.is_scalar:
        return ()
    return axis.shape if axis.is_array else (length,)


def open_result(path: str | bytes | os.PathLike[str] | os.PathLike[bytes]) -> Any:
    """Open any stored result again; nothing but its header is read.

    Parameters
    ----------
    path : path or URI
        A `.npy` file or a member of a `.npz` archive; a Parquet folder or URI, an Arrow file, a
        Zarr store that raymm wrote (or anybody's table of vectors, as (n, d)).

    Returns
    -------
    Matrix or ndarray
        With ``shape``, ``dtype`` and slicing, in D's own orientation. A `.npy` file is a read-only
        memory map.
    """
    source = open_source(path, os.fsdecode(path))
    if isinstance(source, FileSource) and os.fsdecode(path).endswith(".npy"):
        return np.load(source.path, mmap_mode="r")
    return Matrix(source)


def open_stored(result: Any) -> Any:
    """Open what a sink says it has stored; pass on anything else."""
    return open_result(result.path) if isinstance(result, Stored) else result
