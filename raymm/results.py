"""Results opened again: something with a shape and a dtype that can be sliced."""

import os
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from raymm.indexing import Wanted, select_product
from raymm.kernels.buffers import Buffer
from raymm.operands import format_shape
from raymm.sinks.base import Stored
from raymm.sources import Source, open_source
from raymm.sources.files import FileSource
from raymm.sources.selection import select

READ_NBYTES = 2**26
"""Of a stored matrix, at a time, while a part is taken from it."""


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
        return np.asarray(self[...], dtype)

    def __getitem__(self, key: Any) -> Any:
        """Return a part, as NumPy does; only what it needs is read.

        Memory: the part, and 64 MB at a time of what it is taken from.

        Parameters
        ----------
        key : int, slice, array of int, mask, or a tuple of two of them
            Two arrays pick pairs, as in NumPy.
        """
        source, are_vectors = self._source, [False, False]
        if len(self.shape) == 1:
            source, are_vectors = source.as_row(), [True, False]
        elif not self.shape:
            source, are_vectors = open_source(source.load().reshape(1, 1), "D"), [True, True]
        return select_product(key, self.shape, are_vectors, partial(_read, source), self.dtype)


def _read(source: Source, rows: Wanted, columns: Wanted) -> NDArray[Any]:
    """Return some rows and columns, in memory of their own; the rest passes through in portions.

    What is stored is read along its longer axis: all of a table's rows, say, for one entry of each.
    """
    part = select(select(source, 0, rows), 1, columns)
    is_tall = source.operand.shape[0] > source.operand.shape[1]
    wide = part.T if is_tall else part
    values = np.empty(wide.operand.shape, wide.operand.dtype)
    height = min(source.operand.shape)
    step, buffer = max(1, READ_NBYTES // max(1, height * values.itemsize)), Buffer()
    for start in range(0, values.shape[1], step):
        stop = min(start + step, values.shape[1])
        values[:, start:stop] = wide.read(start, stop, buffer)
    return values.T if is_tall else values


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
