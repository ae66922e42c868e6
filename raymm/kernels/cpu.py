"""The processor's kernel: stage a tile in, multiply its blocks, stage them out.

Shapes: M rows of D, K inner dimension, N columns of one tile or panel.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from raymm.errors import ExecutionError, ResultOverflowError
from raymm.kernels.buffers import Buffer
from raymm.kernels.fold import Mapper, accumulate, fold, round_to_bfloat16
from raymm.tiles import Bounds, Layout

Array: TypeAlias = NDArray[Any]

SMALLEST_CONGRUENT_RUN = 2**16
"""Rows of a block that are shorter are packed: padding them to a page would multiply its memory."""


@dataclass(frozen=True, slots=True)
class Arithmetic:
    """In which dtype to multiply, and what to make of the result."""

    compute_dtype: np.dtype[Any]
    output_dtype: np.dtype[Any]
    rounds_to_bfloat16: bool = False
    is_checked: bool = False
    """Whether a value that `output_dtype` cannot hold is an error (``dtype=`` was given)."""
    functions: tuple[Callable[[Any], Any], ...] = ()
    """Applied to each block as a torch tensor, one after another ..."""
    product_dtype: np.dtype[Any] | None = None
    """... in this dtype: that of the product, which may be multiplied in another one."""


class Lane:
    """The buffers of one block under way."""

    def __init__(self) -> None:
        self.output, self.scratch = Buffer(), Buffer()


class CpuKernel:
    """The three stages of a tile; `multiply` may run on several threads, a lane each.

    Memory: the factors, one staged tile, the tile's product with all factors but the outermost
    where these are kept apart; see `raymm.memory.tile_cost`.
    """

    def __init__(self, factors: tuple[Array, ...], arithmetic: Arithmetic, layout: Layout) -> None:
        self.arithmetic, self.layout = arithmetic, layout
        # Private, writable and in the dtype of the arithmetic: resident from here on.
        self._factors = tuple(
            np.array(factor, arithmetic.compute_dtype, order="C") for factor in factors
        )
        if arithmetic.rounds_to_bfloat16:
            for factor in self._factors:
                round_to_bfloat16(factor)
        self._staged = Buffer()

    def stage_in(self, tile_KN: Array, run: Mapper) -> Array:
        """Return the tile times all factors but the outermost, in memory that BLAS takes."""
        operand_KN = self._convert(tile_KN)
        for factor in reversed(self._factors[1:]):
            operand_KN = fold(factor, operand_KN, run)
        return operand_KN

    def multiply(
        self,
        operand_KN: Array,
        bounds: Bounds,
        start: int,
        lane: Lane,
        target_MN: Array | None = None,
    ) -> Array:
        """Multiply one block of D, whose tile begins at column `start`.

        The product is in `target_MN` if it can be formed there, else in the lane's memory.
        """
        panel_KN = operand_KN[:, bounds.column_start - start : bounds.column_stop - start]
        band_MK = self._factors[0][bounds.row_start : bounds.row_stop]
        if self.layout.order == "C":
            left, right = band_MK, panel_KN
        else:
            left, right = panel_KN.T, band_MK.T
        if target_MN is not None and self._can_fill(target_MN):
            product = target_MN if self.layout.order == "C" else target_MN.T
        else:
            product = self._array(bounds, lane.scratch if self._is_narrowed else lane.output)
        accumulate(left, right, product)
        return product if self.layout.order == "C" else product.T

    def stage_out(self, product_MN: Array, bounds: Bounds, lane: Lane) -> Array:
        """Return a block in D's dtype: itself, or narrowed into the lane's output buffer."""
        if not self._is_narrowed:
            return product_MN
        if self.arithmetic.functions:
            product_MN = apply_functions(product_MN, self.arithmetic)
        block = self._array(bounds, lane.output, self.arithmetic.output_dtype)
        block_MN = block if self.layout.order == "C" else block.T
        narrow(product_MN, block_MN, self.arithmetic.is_checked)
        return block_MN

    def _can_fill(self, target: Array) -> bool:
        """Whether BLAS can write its result there."""
        inner, outer = target.strides[:: -1 if self.layout.order == "C" else 1]
        if self.arithmetic.functions:
            return False
        fits = inner == target.itemsize and outer >= 0 and outer % target.itemsize == 0
        return fits and target.dtype == self.arithmetic.compute_dtype

    @property
    def _is_narrowed(self) -> bool:
        arithmetic = self.arithmetic
        is_other = arithmetic.compute_dtype != arithmetic.output_dtype
        return is_other or bool(arithmetic.functions)

    def _array(self, bounds: Bounds, buffer: Buffer, dtype: np.dtype[Any] | None = None) -> Array:
        """Return an array for a block with its runs contiguous and congruent with the output."""
        layout = self.layout
        position = layout.position(bounds.row_start, bounds.column_start)
        rows, columns = bounds.shape
        shape, pitch = (rows, columns), layout.row_nbytes
        if layout.order == "F":
            shape, pitch = (columns, rows), layout.column_nbytes
        if dtype is None and self._is_narrowed:
            return buffer.array(shape, self.arithmetic.compute_dtype)
        item = self.arithmetic.output_dtype.itemsize
        if shape[1] * item < SMALLEST_CONGRUENT_RUN and shape[1] * item != pitch:
            position = pitch = 0  # written through the page cache: no need to be congruent
        return buffer.array(shape, self.arithmetic.output_dtype, position, pitch)

    def _convert(self, tile_KN: Array) -> Array:
        dtype = self.arithmetic.compute_dtype
        rounds = self.arithmetic.rounds_to_bfloat16
        if tile_KN.dtype == dtype and not rounds and _suits_blas(tile_KN):
            return tile_KN
        is_tall = abs(tile_KN.strides[0]) < abs(tile_KN.strides[1])
        source = tile_KN.T if is_tall else tile_KN
        staged = self._staged.array((source.shape[0], source.shape[1]), dtype)
        np.copyto(staged, source, casting="unsafe")
        if rounds:
            round_to_bfloat16(staged)
        return staged.T if is_tall else staged


def apply_functions(product: Array, arithmetic: Arithmetic) -> Array:
    """Return what the functions make of a product, of the same shape."""
    import torch  # noqa: PLC0415  only loaded for a chain that is mapped

    dtype = arithmetic.product_dtype or product.dtype
    values = torch.from_numpy(product if product.dtype == dtype else product.astype(dtype))
    for function in arithmetic.functions:
        values = function(values)
        if not isinstance(values, torch.Tensor) or values.shape != product.shape:
            found = tuple(getattr(values, "shape", ())) or type(values).__qualname__
            raise ExecutionError(
                f"the function given to map() made {found} of a block of shape {product.shape}: "
                "it must return a tensor of the same shape"
            )
    values = values.detach()
    return (values.float() if values.dtype == torch.bfloat16 else values).numpy()


def narrow(product: Array, block: Array, is_checked: bool) -> None:
    """Convert a product to D's dtype, rounding once.

    With `is_checked`, a value out of range raises `ResultOverflowError`; without, half precision
    overflows to infinity as IEEE has it.
    """
    if is_checked and block.dtype.kind in "iu" and product.size:
        lowest, highest = product.min(), product.max()
        info = np.iinfo(block.dtype)
        if lowest < info.min or highest > info.max:
            _raise_overflow(lowest if lowest < info.min else highest, block.dtype)
    with np.errstate(over="ignore", invalid="ignore"):
        np.copyto(block, product, casting="unsafe")
    if is_checked and block.dtype.kind in "fc":
        lost = np.isinf(block) & ~np.isinf(product)
        if lost.any():
            _raise_overflow(product[lost].flat[0], block.dtype)


def _raise_overflow(value: object, dtype: np.dtype[Any]) -> None:
    raise ResultOverflowError(
        f"the result holds {value}, which dtype={dtype} cannot: ask for a wider dtype"
    )


def _suits_blas(tile: Array) -> bool:
    """Whether BLAS reads the tile without a copy, and torch without a warning."""
    outer, inner = (0, 1) if tile.strides[1] == tile.itemsize else (1, 0)
    small, large = tile.strides[inner], tile.strides[outer]
    is_dense = small == tile.itemsize and large >= tile.itemsize * tile.shape[inner]
    is_packed = is_dense and tile.dtype.isnative and tile.flags.writeable and tile.flags.aligned
    return is_packed and large % tile.itemsize == 0
