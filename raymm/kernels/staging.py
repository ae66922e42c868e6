"""The resident factors, and a tile made ready to be multiplied by the outermost of them.

Shapes: J rows of a factor, K inner dimension, N columns of one tile.
"""

import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from raymm.kernels.buffers import Buffer
from raymm.kernels.fold import Mapper, fold, round_to_bfloat16
from raymm.kernels.gather import multiply_gathered
from raymm.kernels.sparse import Index, SparseMatrix
from raymm.kernels.structure import (
    Structure,
    is_finite,
    is_plain,
    multiply_structured,
    structure_of_product,
)
from raymm.memory import LARGEST_DENSE_NBYTES, is_gathered
from raymm.tiles import Bounds

Array: TypeAlias = NDArray[Any]

COMPACT_SHARE = 0.5
"""A sparse tile is multiplied without its empty columns if no more than this share has entries:
spreading the product over a dense block costs less than half of multiplying it."""


@dataclass(frozen=True, slots=True, eq=False)
class Staged:
    """A tile times all factors but the outermost, ready to be multiplied."""

    values: Array
    """(K, N) of the whole tile, or of its non-empty columns."""
    nonzero: Index | None = None
    """Of a sparse tile multiplied without its empty columns: the others, counted within it."""
    structure: Structure = None
    """Where `values` has entries, if that can make a difference."""
    entries: SparseMatrix | None = None
    """The non-empty columns themselves, instead of `values`: few entries in many rows."""

    def places(self, bounds: Bounds, start: int) -> tuple[slice, Index | None]:
        """Return a block's columns within `values` and, of a compact tile, within the block."""
        first, last = bounds.column_start - start, bounds.column_stop - start
        if self.nonzero is None:
            return slice(first, last), None
        begin, end = np.searchsorted(self.nonzero, (first, last))
        return slice(int(begin), int(end)), self.nonzero[begin:end] - first


class Stage:
    """The factors that stay, and the memory of the one tile that is multiplied by them.

    Parameters
    ----------
    factors : sequence of ndarray
        Outermost first; they are copied.
    structures : sequence of ndarray of bool or None
        Where sparse ones have entries; empty if none is sparse.
    dtype : dtype
        Of the arithmetic.
    rounds : bool
        Whether operands are rounded to bfloat16.
    """

    def __init__(
        self,
        factors: Sequence[Array],
        structures: Sequence[Structure],
        dtype: np.dtype[Any],
        rounds: bool,
    ) -> None:
        # Private, writable and in the dtype of the arithmetic: resident from here on.
        copies = [np.array(factor, dtype, order="C") for factor in factors]
        if rounds:
            for factor in copies:
                round_to_bfloat16(factor)
        self.resident = list(zip(copies, structures or (None,) * len(copies), strict=True))
        self._dtype, self._rounds = dtype, rounds
        self._is_finite = all(map(is_finite, copies))
        self._transposes: dict[int, tuple[Array, Structure]] = {}
        self._lock = threading.Lock()
        self._staged = Buffer()

    def stage_in(self, tile_KN: Array | SparseMatrix, run: Mapper) -> Staged:
        """Return the tile times all factors but the outermost, in memory that BLAS takes."""
        if isinstance(tile_KN, SparseMatrix):
            staged = self._densify(tile_KN)
        else:
            staged = Staged(self._convert(tile_KN))
        inner = self.resident[1:]
        if staged.entries is not None and inner:
            staged = self._gather(staged.entries, staged.nonzero, run)
            inner = inner[:-1]
        values, structure = staged.values, staged.structure
        for factor, its in reversed(inner):
            shape = factor.shape[0], values.shape[1]
            if is_plain(factor, its, values, structure):
                product = fold(factor, values, run)
            else:
                product = np.empty(shape, factor.dtype)
                multiply_structured(factor, its, values, structure, product)
            if structure is not None or not self._is_finite:
                structure = structure_of_product(its, structure, *shape)
            values = product
        return replace(staged, values=values, structure=structure)

    def _gather(self, tile: SparseMatrix, nonzero: Index | None, run: Mapper) -> Staged:
        """Return the last factor times the non-empty columns of a tile."""
        factor, its = self.turned(-1)
        out_NJ = np.empty((tile.shape[1], factor.shape[1]), factor.dtype)
        multiply_gathered(factor, its, tile, out_NJ, run)
        structure = None
        if its is not None and not self._is_finite:
            ones = replace(tile, data=np.ones(tile.size, np.float32))
            marks = np.empty(out_NJ.shape, np.float32)
            multiply_gathered(its.astype(np.float32), None, ones, marks, run)
            structure = np.ascontiguousarray(np.greater(marks, 0).T)
        return Staged(out_NJ.T, nonzero, structure)

    def turned(self, place: int) -> tuple[Array, Structure]:
        """Return a factor's transpose with its rows contiguous, kept from now on."""
        with self._lock:
            if place not in self._transposes:
                factor, its = self.resident[place]
                turned = None if its is None else np.ascontiguousarray(its.T)
                self._transposes[place] = np.ascontiguousarray(factor.T), turned
            return self._transposes[place]

    def _densify(self, tile: SparseMatrix) -> Staged:
        """Return a sparse tile's non-empty columns, or all where most have entries.

        Only a factor that is not finite tells a structural zero from another one.
        """
        dtype, (rows, columns) = self._dtype, tile.shape
        if self._rounds:
            tile = replace(tile, data=round_to_bfloat16(tile.data.astype(dtype)))
        nonzero = tile.nonzero
        count = len(nonzero)
        dense_nbytes = count * rows * dtype.itemsize
        if is_gathered(tile.size, rows, count) or dense_nbytes > LARGEST_DENSE_NBYTES:
            return Staged(np.empty((rows, 0), dtype), nonzero, None, tile.take(nonzero))
        if self._is_finite and count > COMPACT_SHARE * columns:
            return Staged(tile.dense(dtype, self._staged.array((columns, rows), dtype)))
        nonzero, values = tile.compact(dtype, self._staged.array((count, rows), dtype))
        structure = None if self._is_finite else tile.take(nonzero).structure()
        return Staged(values, nonzero, structure)

    def _convert(self, tile_KN: Array) -> Array:
        dtype = self._dtype
        rounds = self._rounds
        if tile_KN.dtype == dtype and not rounds and _suits_blas(tile_KN):
            return tile_KN
        is_tall = abs(tile_KN.strides[0]) < abs(tile_KN.strides[1])
        source = tile_KN.T if is_tall else tile_KN
        staged = self._staged.array((source.shape[0], source.shape[1]), dtype)
        np.copyto(staged, source, casting="unsafe")
        if rounds:
            round_to_bfloat16(staged)
        return staged.T if is_tall else staged


def _suits_blas(tile: Array) -> bool:
    """Whether BLAS reads the tile without a copy, and torch without a warning."""
    outer, inner = (0, 1) if tile.strides[1] == tile.itemsize else (1, 0)
    small, large = tile.strides[inner], tile.strides[outer]
    is_dense = small == tile.itemsize and large >= tile.itemsize * tile.shape[inner]
    is_packed = is_dense and tile.dtype.isnative and tile.flags.writeable and tile.flags.aligned
    return is_packed and large % tile.itemsize == 0
