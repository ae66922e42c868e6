"""``D[key]`` as NumPy has it, taken apart into rows and columns. Pure."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from raymm.operands import format_shape

Index: TypeAlias = NDArray[np.int64]
Wanted: TypeAlias = slice | Index


@dataclass(frozen=True)
class Selected:
    """What a key asks of one axis."""

    wanted: Wanted
    is_scalar: bool = False
    """Whether the axis is gone from the result."""
    is_array: bool = False
    """Whether it was an array of indices."""
    shape: tuple[int, ...] = ()
    """Of the array of indices."""

    @property
    def index(self) -> Index:
        """The indices, where it was an array of them."""
        assert not isinstance(self.wanted, slice)  # is_array said so
        return self.wanted


def select_axes(key: Any, shape: tuple[int, ...]) -> tuple[Selected, ...]:
    """Return what `key` asks of each axis of an array of `shape`.

    Raises
    ------
    IndexError
        Too many indices, one outside its axis, a new axis, a mask of another length.
    """
    keys = list(key) if isinstance(key, tuple) else [key]
    dots = [place for place, each in enumerate(keys) if each is Ellipsis]
    if len(dots) > 1:
        raise IndexError("an index can have only one ellipsis (...)")
    if len(keys) - len(dots) > len(shape):
        raise IndexError(
            f"{len(keys) - len(dots)} indices for a product of shape {format_shape(shape)}"
        )
    missing = [slice(None)] * (len(shape) - len(keys) + len(dots))
    if dots:
        keys[dots[0] : dots[0] + 1] = missing
    else:
        keys += missing
    return tuple(
        _select(each, length, axis)
        for axis, (each, length) in enumerate(zip(keys, shape, strict=True))
    )


def _select(key: Any, length: int, axis: int) -> Selected:
    if isinstance(key, slice):
        return Selected(key)
    if key is None:
        raise IndexError("a product has no new axes (None): index the result instead")
    try:
        array = np.asarray(key)
    except ValueError as error:
        raise IndexError(f"index {key!r} of axis {axis}: {error}") from error
    if array.size == 0 and not isinstance(key, np.ndarray):
        array = array.astype(np.int64)
    if array.dtype == np.bool_:
        return _select_mask(array, length, axis)
    if array.dtype.kind not in "iu":
        raise IndexError(
            f"index {key!r} of axis {axis} is {array.dtype}: give integers, slices or a mask"
        )
    index = array.astype(np.int64)
    outside = (index < -length) | (index >= length)
    if outside.any():
        raise IndexError(
            f"index {int(index[outside].flat[0])} is out of bounds for axis {axis} of {length}"
        )
    index = np.where(index < 0, index + length, index)
    return Selected(index.reshape(-1), array.ndim == 0, array.ndim > 0, array.shape)


def _select_mask(mask: NDArray[np.bool_], length: int, axis: int) -> Selected:
    if mask.shape != (length,):
        raise IndexError(
            f"a mask of shape {format_shape(mask.shape)} for axis {axis} of {length}: "
            "give one boolean for each index"
        )
    index = np.flatnonzero(mask).astype(np.int64)
    return Selected(index, False, True, index.shape)


PAIRS = 256
"""Pairs of row and column computed at a time, as the square that holds them."""


def select_product(
    key: Any,
    shape: tuple[int, ...],
    vectors: list[bool],
    part: Callable[[Wanted, Wanted], NDArray[Any]],
    dtype: np.dtype[Any],
) -> Any:
    """Return ``D[key]`` by computing parts of D.

    Parameters
    ----------
    key : int, slice, array of int, mask, or a tuple of two of them
    shape : tuple of int
        Of D.
    vectors : [bool, bool]
        Whether D's rows, or its columns, are gone, for an end of the chain is a vector.
    part : callable
        Returns the matrix of some rows and columns.
    dtype : dtype
        Of D.
    """
    given = list(select_axes(key, shape))
    rows = Selected(slice(None)) if vectors[0] else given.pop(0)
    columns = Selected(slice(None)) if vectors[1] else given.pop(0)
    if rows.is_array and columns.is_array:
        return _select_pairs(rows, columns, part, dtype)
    values = part(rows.wanted, columns.wanted)
    left: tuple[int, ...] = ()
    for length, axis, is_vector in zip(values.shape, (rows, columns), vectors, strict=True):
        if not is_vector and not axis.is_scalar:
            left += axis.shape if axis.is_array else (length,)
    return values.reshape(left)[()]


def _select_pairs(
    rows: Selected,
    columns: Selected,
    part: Callable[[Wanted, Wanted], NDArray[Any]],
    dtype: np.dtype[Any],
) -> NDArray[Any]:
    """Return the entries at pairs of row and column, like NumPy's advanced indexing."""
    try:
        pairs = np.broadcast_arrays(*(each.index.reshape(each.shape) for each in (rows, columns)))
    except ValueError as error:
        raise IndexError(
            f"index arrays of shapes {rows.shape} and {columns.shape} do not fit together: "
            "use D[rows][:, columns] for all combinations"
        ) from error
    row, column = (each.reshape(-1) for each in pairs)
    values = np.empty(row.shape, dtype)
    order = np.argsort(column, kind="stable")
    for start in range(0, len(order), PAIRS):
        chosen = order[start : start + PAIRS]
        row_index, row_place = np.unique(row[chosen], return_inverse=True)
        column_index, column_place = np.unique(column[chosen], return_inverse=True)
        values[chosen] = part(row_index, column_index)[row_place, column_place]
    return values.reshape(pairs[0].shape)
