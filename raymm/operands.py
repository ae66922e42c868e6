"""What an operand is before it is read: shape, dtype, strides, where it lives."""

from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np

from raymm.errors import DTypeError, ShapeError

INDEX_NBYTES = 8
"""Of the position of a stored entry of a sparse operand, at most."""


@dataclass(frozen=True, slots=True)
class Operand:
    """The description of one matrix; enough for planning, small enough for any message."""

    name: str
    """What to call it in messages: a path, or a letter by its place in the chain."""
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    strides: tuple[int, ...]
    """Distance between neighbours along each axis, in bytes."""
    path: str | None = None
    """The file it lives in, or None for memory."""
    bfloat16: bool = False
    """Whether the values are bfloat16, held as float32 (NumPy has no bfloat16)."""
    is_held: bool = True
    """Whether the values lie in the driver's memory: tiles are then copied to be sent to workers
    that are other processes. False for files and for objects in a cluster."""
    nonzeros: int | None = None
    """Stored entries of a sparse operand; None for a dense one."""
    reading_nbytes: int = 0
    """What reading holds beside a tile, in bytes: a row group that is decoded."""

    @property
    def nbytes(self) -> int:
        """Size of the values, in bytes; of a sparse operand, of what is stored."""
        if self.nonzeros is not None:
            return self.nonzeros * (self.dtype.itemsize + INDEX_NBYTES)
        return self.dense_nbytes

    @property
    def column_entries(self) -> float | None:
        """Stored entries of a column of a sparse matrix, on average."""
        return None if self.nonzeros is None else self.nonzeros / max(1, self.shape[-1])

    @property
    def dense_nbytes(self) -> int:
        """Size of all entries, in bytes."""
        size = self.dtype.itemsize
        for length in self.shape:
            size *= length
        return size

    @property
    def is_c_ordered(self) -> bool:
        """Whether the values lie one after another, row by row."""
        step = self.dtype.itemsize
        for length, stride in zip(reversed(self.shape), reversed(self.strides), strict=True):
            if length > 1 and stride != step:
                return False
            step *= length
        return True

    @property
    def T(self) -> "Operand":
        """The transpose."""
        return replace(self, shape=self.shape[::-1], strides=self.strides[::-1])

    def __str__(self) -> str:
        return f"{self.name} {format_shape(self.shape)}"


def format_shape(shape: tuple[int, ...]) -> str:
    """Return a shape as it is written in messages: ``(3000, 100)``."""
    inside = ", ".join(str(length) for length in shape)
    return f"({inside},)" if len(shape) == 1 else f"({inside})"


def check_chain(operands: tuple[Operand, ...]) -> None:
    """Raise `ShapeError` unless neighbours agree; the first and last may be vectors."""
    everything = " @ ".join(map(str, operands))
    for place, operand in enumerate(operands):
        is_end = place in (0, len(operands) - 1)
        if len(operand.shape) == 2 or (len(operand.shape) == 1 and is_end):
            continue
        wanted = "a matrix or a vector" if is_end else "a matrix"
        raise ShapeError(
            f"{operand} has {len(operand.shape)} axes, {wanted} is needed there; "
            f"the chain is {everything}"
        )
    for left, right in pairwise(operands):
        if left.shape[-1] != right.shape[0]:
            raise ShapeError(
                f"{left} @ {right}: {left.shape[-1]} != {right.shape[0]}; "
                f"the chain is {everything} (axes of length 1 are not stretched)"
            )


def check_dtype(dtype: np.dtype[Any], name: str) -> None:
    """Raise `DTypeError` unless the dtype is boolean, an integer, real or complex."""
    if dtype.kind not in "biufc":
        hint = "give numbers" if dtype.kind != "O" else "give it a number dtype with .astype()"
        raise DTypeError(f"{name} has dtype {dtype}, which has no matrix product here: {hint}")


def result_dtype(operands: tuple[Operand, ...]) -> np.dtype[Any]:
    """Return D's dtype: `numpy.result_type`; integers and booleans widen as in `numpy.sum`."""
    for operand in operands:
        check_dtype(operand.dtype, str(operand))
    dtypes = [operand.dtype.newbyteorder("=") for operand in operands]
    kinds = {dtype.kind for dtype in dtypes}
    if kinds <= set("b"):
        return np.dtype(np.int64)
    if kinds <= set("u"):
        return np.dtype(np.uint64)
    if kinds <= set("biu"):
        # All unsigned stays unsigned with booleans among them; any sign makes it int64, where
        # NumPy would fall to float64 for uint64 with int64.
        return np.dtype(np.int64 if "i" in kinds else np.uint64)
    return np.result_type(*dtypes)
