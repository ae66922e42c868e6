"""Operands in this process's memory: NumPy arrays of any layout, torch tensors."""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from raymm.errors import DTypeError, PlanError
from raymm.kernels.buffers import Buffer
from raymm.operands import Operand, check_dtype
from raymm.sources.base import Array


@dataclass(frozen=True)
class ArraySource:
    """An array. It is never written to and never copied as a whole."""

    array: Array
    name: str
    is_bfloat16: bool = False
    """Whether the array's uint16 values are the upper halves of float32 ones."""
    start: int = 0
    """Column of the whole operand that the array begins with."""

    @property
    def operand(self) -> Operand:
        """Its description."""
        dtype = np.dtype(np.float32) if self.is_bfloat16 else self.array.dtype
        shape = tuple(int(length) for length in self.array.shape)
        return Operand(self.name, shape, dtype, self.array.strides, None, self.is_bfloat16)

    @property
    def T(self) -> "ArraySource":
        """The transpose, a view."""
        return replace(self, array=self.array.T)

    def as_row(self) -> "ArraySource":
        """Return a vector as a matrix of one row."""
        return replace(self, array=self.array[np.newaxis, :])

    def as_column(self) -> "ArraySource":
        """Return a vector as a matrix of one column."""
        return replace(self, array=self.array[:, np.newaxis])

    def load(self) -> Array:
        """Return all of it: the array itself, or converted where NumPy cannot hold it."""
        return self.read(0, self.array.shape[-1], Buffer())

    def read(self, start: int, stop: int, buffer: Buffer) -> Array:
        """Return columns ``start:stop``: a view, or converted where NumPy cannot hold them."""
        del buffer
        columns = self.array[..., start - self.start : stop - self.start]
        if self.is_bfloat16:
            return (columns.astype(np.uint32) << np.uint32(16)).view(np.float32)
        return columns

    def cut(self, start: int, stop: int) -> "ArraySource":
        """Return these columns, copied in the order they lie in, to travel on their own."""
        columns = self.array[:, start - self.start : stop - self.start]
        is_tall = abs(columns.strides[0]) < abs(columns.strides[1])
        copied = columns.copy(order="F" if is_tall else "C")
        return replace(self, array=copied, start=start)


def from_array(array: Array, name: str) -> ArraySource:
    """Return a NumPy array as a source."""
    if isinstance(array, np.ma.MaskedArray):
        raise DTypeError(
            f"{name} is a masked array: fill it first, e.g. with .filled(0) or .filled(numpy.nan)"
        )
    check_dtype(array.dtype, name)
    return ArraySource(np.asarray(array), name)


def from_tensor(tensor: Any, name: str) -> ArraySource:
    """Return a torch tensor as a source; its gradient settings stay as they are."""
    import torch  # noqa: PLC0415  only loaded if the caller has a tensor

    if tensor.is_meta:
        raise PlanError(f"{name} is a meta tensor: it has no values")
    if tensor.is_quantized:
        raise DTypeError(f"{name} is a quantized tensor: use .dequantize()")
    plain = tensor.detach().cpu().resolve_conj().resolve_neg()
    if plain.dtype == torch.bfloat16:
        return ArraySource(plain.view(torch.uint16).numpy(), name, is_bfloat16=True)
    if plain.dtype.is_floating_point and plain.dtype.itemsize == 1:
        raise DTypeError(f"{name} has dtype {plain.dtype}: convert it with .float()")
    return ArraySource(plain.numpy(), name)


def from_dlpack(value: Any, name: str) -> ArraySource | None:
    """Return what another library exchanges by DLPack as a source; None where it cannot be had.

    On the host it stays where it is; of another device it is copied.
    """
    refused = (BufferError, RuntimeError, TypeError, ValueError, AttributeError)
    try:
        array = np.from_dlpack(value)
    except refused:  # on another device, or bfloat16, which NumPy has not
        return _from_dlpack_by_torch(value, name, refused)
    return from_array(array, name)


def _from_dlpack_by_torch(
    value: Any, name: str, refused: tuple[type[Exception], ...]
) -> ArraySource | None:
    from torch.utils import dlpack  # noqa: PLC0415  only for what NumPy does not take

    try:
        tensor = dlpack.from_dlpack(value)
    except refused:
        return None
    return from_tensor(tensor, name)
