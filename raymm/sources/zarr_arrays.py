"""Operands that are Zarr arrays."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from raymm.errors import PlanError, SourceError
from raymm.kernels.buffers import Buffer
from raymm.operands import Operand, check_dtype
from raymm.sources.base import Array


@dataclass(frozen=True)
class ZarrSource:
    """A Zarr array, described by its path; chunks are decoded as they are read."""

    path: str
    name: str
    stored_shape: tuple[int, ...]
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    is_turned: bool = False
    """Whether it is read as its transpose."""

    @property
    def operand(self) -> Operand:
        """Its description."""
        strides = [self.dtype.itemsize]
        for length in reversed(self.shape[1:]):
            strides.append(strides[-1] * length)
        ordered = tuple(strides if self.is_turned else strides[::-1])[: len(self.shape)]
        return Operand(self.name, self.shape, self.dtype, ordered, self.path, is_held=False)

    @property
    def T(self) -> "ZarrSource":
        """The transpose; nothing is read."""
        is_turned = self.is_turned ^ (len(self.shape) == 2)
        return replace(self, shape=self.shape[::-1], is_turned=is_turned)

    def as_row(self) -> "ZarrSource":
        """Return a vector as a matrix of one row."""
        return replace(self, shape=(1, *self.shape))

    def as_column(self) -> "ZarrSource":
        """Return a vector as a matrix of one column."""
        return replace(self, shape=(*self.shape, 1))

    def cut(self, start: int, stop: int) -> "ZarrSource":
        """Return itself: a description is small however much it describes."""
        del start, stop
        return self

    def load(self) -> Array:
        """Return all of it."""
        values = np.asarray(self._array()[...]).reshape(self.stored_shape)
        return (values.T if self.is_turned else values).reshape(self.shape)

    def read(self, start: int, stop: int, buffer: Buffer) -> Array:
        """Return columns ``start:stop``."""
        del buffer
        array = self._array()
        if len(self.stored_shape) < 2:
            vector = np.asarray(array[...] if not self.stored_shape else array[:])
            return vector.reshape(self.shape)[:, start:stop]
        if self.is_turned:
            return np.asarray(array[start:stop]).T
        return np.asarray(array[:, start:stop])

    def _array(self) -> Any:
        return _open(self.path)


def is_zarr(path: Path) -> bool:
    """Whether a folder is a Zarr array of version 3 or 2."""
    return (path / "zarr.json").is_file() or (path / ".zarray").is_file()


def from_zarr(path: Path, name: str) -> ZarrSource:
    """Return the description of a Zarr array."""
    array = _open(str(path))
    dtype = np.dtype(array.dtype)
    check_dtype(dtype, name)
    shape = tuple(int(length) for length in array.shape)
    return ZarrSource(str(path.absolute()), name, shape, dtype, shape)


def _open(path: str) -> Any:
    try:
        import zarr  # noqa: PLC0415  optional
    except ImportError as error:
        raise PlanError(f'{path} needs zarr to be read: pip install "raymm[zarr]"') from error
    try:
        return zarr.open_array(path, mode="r")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise SourceError(f"cannot read {path} as a Zarr array: {error}") from error
