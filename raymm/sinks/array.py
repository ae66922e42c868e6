"""D in the driver's memory."""

from pathlib import Path
from typing import Any

import numpy as np

from raymm.errors import DTypeError, PlanError, ShapeError
from raymm.operands import format_shape
from raymm.paths import is_same_file
from raymm.sinks.base import Block, OutputSpec, Piece, Values
from raymm.tiles import Bounds, Layout

_RUN_NBYTES = 2**15


class Array:
    """An array, preallocated and filled in place.

    Parameters
    ----------
    out : ndarray, optional
        Where to put D: its shape and dtype, any strides. Default: a new array in C order.

    Notes
    -----
    Memory: D, never twice. Workers that are threads write into it, other processes send their
    blocks through the object store, one tile at a time.
    """

    name = "memory"

    def __init__(self, out: Values | None = None) -> None:
        self.out = out
        self._result: Values | None = None
        self._canonical: Values | None = None

    def layout(self, spec: OutputSpec) -> Layout:
        """Return how it wants D."""
        if self.out is None:
            order = "F" if spec.is_transposed else "C"
        else:
            canonical = _canonical_view(self.out, spec)
            order = "C" if abs(canonical.strides[1]) <= abs(canonical.strides[0]) else "F"
        item = spec.dtype.itemsize
        return Layout("C" if order == "C" else "F", _RUN_NBYTES, 0, item, item, travels=True)

    def overwrites(self, path: str | None, array: Values | None) -> bool:
        """Whether that array, or the file it maps, shares memory with this one."""
        if self.out is None:
            return False
        if array is not None and np.may_share_memory(self.out, array):
            return True
        mapped = getattr(self.out, "filename", None)
        return path is not None and mapped is not None and is_same_file(Path(mapped), Path(path))

    def open(self, spec: OutputSpec, overwrite: bool) -> None:
        """Allocate the array, or check the one given."""
        del overwrite
        out = self.out
        if out is None:
            out = np.empty(spec.shape, spec.dtype)
        canonical = _canonical_view(out, spec)
        if out.dtype != spec.dtype:
            raise DTypeError(
                f"out has dtype {out.dtype}, the result {spec.dtype}: pass dtype={out.dtype.name!r}"
            )
        if _overlaps_itself(out):
            raise PlanError("entries of out share memory with each other: give an array of its own")
        if not out.flags.writeable:
            raise DTypeError("out is read-only: give an array that can be written to")
        self._result, self._canonical = out, canonical

    def attach(self) -> None:
        """Do nothing: the array is here, or its blocks go back to where it is."""

    def target(self, bounds: Bounds) -> Values | None:
        """Return the block's place in the array."""
        if self._canonical is None:
            return None
        rows = slice(bounds.row_start, bounds.row_stop)
        return self._canonical[rows, bounds.column_start : bounds.column_stop]

    def write(self, block: Block) -> Piece | None:
        """Copy a block into the array, or hand it back where the array is in another process."""
        if self._canonical is None:
            return Piece(block.bounds, block.host.copy(order="K"))
        if block.nonzero is not None:
            place = self._canonical[block.bounds.row_start : block.bounds.row_stop]
            place[:, block.bounds.column_start : block.bounds.column_stop] = 0
            place[:, block.nonzero] = block.compact
            return None
        self._put(block.bounds.row_start, block.bounds.column_start, block.host)
        return None

    def detach(self, sync: bool) -> None:
        """Do nothing: memory is memory."""

    def receive(self, piece: Piece) -> None:
        """Copy a block from a worker into the array."""
        self._put(piece.bounds.row_start, piece.bounds.column_start, piece.values)

    def view(self) -> Values | None:
        """Return the array, in canonical orientation."""
        return self._canonical

    def commit(self) -> Values:
        """Return the array."""
        result, self._result, self._canonical = self._result, None, None
        assert result is not None
        return result

    def abort(self) -> None:
        """Let go of the array."""
        self._result = self._canonical = None

    def _put(self, row: int, column: int, values: Values) -> None:
        assert self._canonical is not None
        rows, columns = values.shape
        place = self._canonical[row : row + rows, column : column + columns]
        if place.__array_interface__["data"] != values.__array_interface__["data"]:
            place[...] = values

    def __getstate__(self) -> dict[str, Any]:
        """Leave the array behind: a worker in another process sends blocks back."""
        return {"out": None, "_result": None, "_canonical": None}


def _overlaps_itself(array: Values) -> bool:
    """Whether two entries may lie in the same place; stepping over gaps is fine."""
    if array.size == 0:
        return False
    reach = array.itemsize
    for stride, length in sorted(
        (abs(stride), length) for stride, length in zip(array.strides, array.shape, strict=True)
    ):
        if length > 1 and stride < reach:
            return True
        reach += stride * (length - 1) if length > 1 else 0
    return False


def _canonical_view(out: Values, spec: OutputSpec) -> Values:
    """Return `out` with the huge axis as its columns, a view; `ShapeError` if D does not fit."""
    if tuple(out.shape) != spec.shape:
        raise ShapeError(
            f"out has shape {format_shape(out.shape)}, the result {format_shape(spec.shape)}"
        )
    if out.ndim == 2:
        return out.T if spec.is_transposed else out
    view = out.view()
    view.shape = (spec.rows, spec.columns)
    return view
