"""Some rows or columns of an operand, read without the others."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from raymm.kernels.buffers import Buffer
from raymm.kernels.sparse import SparseMatrix
from raymm.operands import Operand
from raymm.sources.base import Array, Source
from raymm.sources.files import FileSource
from raymm.sources.memory import ArraySource
from raymm.sources.sparse import held

Index = NDArray[np.int64]

GAP_COLUMNS, SPAN_NBYTES = 8, 2**26
"""Columns that are this close are read together, in spans of at most so many bytes."""


def select(source: Source, axis: int, wanted: slice | Index) -> Source:
    """Return a matrix's rows (`axis` 0) or columns (1) in the order wanted; nothing is read.

    Parameters
    ----------
    source : Source
    axis : {0, 1}
    wanted : slice or array of int64
        Within the axis, none negative; a slice may have any step.
    """
    length = source.operand.shape[axis]
    if isinstance(wanted, slice):
        if wanted.indices(length) == (0, length, 1):
            return source
        if isinstance(source, FileSource):
            return _described(source, axis, range(*wanted.indices(length)))
    if isinstance(source, ArraySource) and source.start == 0:
        taken = source.array[wanted] if axis == 0 else source.array[:, wanted]
        return replace(source, array=taken)
    index = np.arange(length)[wanted] if isinstance(wanted, slice) else wanted
    return Selection(source, np.asarray(index, np.int64), axis)


def _described(source: FileSource, axis: int, places: range) -> FileSource:
    """Return a slice of a file as another description of it."""
    shape, strides = list(source.shape), list(source.strides)
    shape[axis] = len(places)
    strides[axis] *= places.step
    start = places.start if len(places) else 0
    offset = source.offset + start * source.strides[axis]
    return replace(source, shape=tuple(shape), strides=tuple(strides), offset=offset)


@dataclass(frozen=True)
class Selection:
    """Rows or columns of another source, by number, in any order, repeated or not."""

    source: Source
    index: Index
    axis: int

    @property
    def operand(self) -> Operand:
        """Its description."""
        whole = self.source.operand
        shape = list(whole.shape)
        shape[self.axis] = len(self.index)
        nonzeros = whole.nonzeros
        if nonzeros is not None:  # no more than that, unless places repeat
            nonzeros = nonzeros * len(self.index) // max(1, whole.shape[self.axis])
        return replace(whole, shape=tuple(shape), nonzeros=nonzeros)

    @property
    def T(self) -> "Selection":
        """The transpose."""
        return Selection(self.source.T, self.index, 1 - self.axis)

    def as_row(self) -> "Selection":
        """Return itself: it is a matrix."""
        return self

    def as_column(self) -> "Selection":
        """Return itself: it is a matrix."""
        return self

    def load(self) -> Array:
        """Return all of it."""
        values = self.read(0, self.operand.shape[1], Buffer())
        return values.dense() if isinstance(values, SparseMatrix) else np.array(values)

    def cut(self, start: int, stop: int) -> Source:
        """Return what another process needs to read these columns."""
        if not self.source.operand.is_held:
            return self
        if self.axis == 0:
            return Selection(self.source.cut(start, stop), self.index, 0)
        values, name = self.read(start, stop, Buffer()), self.operand.name
        if isinstance(values, SparseMatrix):
            return replace(held(values.copy(), name), start=start)
        return ArraySource(np.array(values), name, start=start)

    def read(self, start: int, stop: int, buffer: Buffer) -> Any:
        """Return columns ``start:stop`` of the selection."""
        if self.axis == 0:
            values = self.source.read(start, stop, buffer)
            is_sparse = isinstance(values, SparseMatrix)
            return values.rows(self.index) if is_sparse else values[self.index]
        wanted = self.index[start:stop]
        if len(wanted) and np.array_equal(wanted, np.arange(wanted[0], wanted[0] + len(wanted))):
            return self.source.read(int(wanted[0]), int(wanted[-1]) + 1, buffer)
        if self.operand.nonzeros is not None:
            whole = self.source.read(0, self.source.operand.shape[1], buffer)
            return whole.take(wanted)  # its memory is that of its entries
        return self._gather(wanted, buffer)

    def _gather(self, wanted: Index, buffer: Buffer) -> Array:
        """Read the columns in spans, each once, in ascending order."""
        ordered, places = np.unique(wanted, return_inverse=True)
        rows, dtype = self.operand.shape[0], self.operand.dtype
        taken = buffer.array((len(ordered), rows), dtype)
        span = Buffer()
        for first, last in self._spans(ordered):
            begin = int(ordered[first])
            values = self.source.read(begin, int(ordered[last - 1]) + 1, span)
            taken[first:last] = values[:, ordered[first:last] - begin].T
        is_sorted = np.array_equal(places, np.arange(len(ordered)))
        return taken.T if is_sorted else taken[places].T

    def _spans(self, ordered: Index) -> Iterator[tuple[int, int]]:
        """Yield runs (first place, last place) of `ordered` with small gaps only."""
        column_nbytes = max(1, self.operand.shape[0] * self.operand.dtype.itemsize)
        most = max(1, SPAN_NBYTES // column_nbytes)
        first = 0
        for place in range(1, len(ordered) + 1):
            is_end = place == len(ordered)
            is_far = not is_end and ordered[place] - ordered[place - 1] > GAP_COLUMNS
            is_long = not is_end and ordered[place] - ordered[first] >= most
            if is_end or is_far or is_long:
                if place > first:
                    yield first, place
                first = place
