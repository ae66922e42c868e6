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
from raymm.kernels.fold import Mapper, accumulate
from raymm.kernels.gather import multiply_gathered
from raymm.kernels.sparse import Index, SparseMatrix
from raymm.kernels.staging import Stage, Staged
from raymm.kernels.structure import (
    Structure,
    is_plain,
    multiply_structured,
)
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
        self.output, self.scratch, self.spread = Buffer(), Buffer(), Buffer()


class CpuKernel:
    """The three stages of a tile; `multiply` may run on several threads, a lane each.

    Memory: the factors, one staged tile, the tile's product with all factors but the outermost
    where these are kept apart; see `raymm.memory.tile_cost`.
    """

    def __init__(
        self,
        factors: tuple[Array, ...],
        arithmetic: Arithmetic,
        layout: Layout,
        structures: tuple[Structure, ...] = (),
    ) -> None:
        self.arithmetic, self.layout = arithmetic, layout
        self._stage = Stage(
            factors, structures, arithmetic.compute_dtype, arithmetic.rounds_to_bfloat16
        )

    def stage_in(self, tile_KN: Array | SparseMatrix, run: Mapper) -> Staged:
        """Return the tile times all factors but the outermost, in memory that BLAS takes."""
        return self._stage.stage_in(tile_KN, run)

    def multiply(
        self,
        operand: Staged,
        bounds: Bounds,
        start: int,
        lane: Lane,
        target_MN: Array | None = None,
    ) -> Array:
        """Multiply one block of D, whose tile begins at column `start`.

        The product is in `target_MN` if it can be formed there, else in the lane's memory. Of a
        compact tile it has the non-empty columns only.
        """
        columns, places = operand.places(bounds, start)
        rows = slice(bounds.row_start, bounds.row_stop)
        if operand.entries is not None:
            return self._multiply_entries(
                operand.entries.slice(columns.start, columns.stop), rows, lane
            )
        panel_KN = operand.values[:, columns]
        factor, its = self._stage.resident[0]
        band_MK = factor[rows]
        if self.layout.order == "C":
            left, right = band_MK, panel_KN
        else:
            left, right = panel_KN.T, band_MK.T
        if target_MN is not None and self._can_fill(target_MN):
            product = target_MN if self.layout.order == "C" else target_MN.T
        else:
            product = self._output(bounds, places, lane)
        product_MN = product if self.layout.order == "C" else product.T
        band = its if its is None else its[rows]
        part = operand.structure if operand.structure is None else operand.structure[:, columns]
        if is_plain(band_MK, band, panel_KN, part):
            accumulate(left, right, product)
        else:
            multiply_structured(band_MK, band, panel_KN, part, product_MN)
        return product_MN

    def _multiply_entries(self, panel_KN: SparseMatrix, rows: slice, lane: Lane) -> Array:
        """Multiply a block's non-empty columns entry by entry."""
        factor, its = self._stage.turned(0)
        band = factor[:, rows], its if its is None else its[:, rows]
        buffer = lane.scratch if self._is_narrowed else lane.output
        shape = band[0].shape[1], panel_KN.shape[1]
        product = self._packed(*shape, self.arithmetic.compute_dtype, buffer)
        product_MN = product if self.layout.order == "C" else product.T
        multiply_gathered(*band, panel_KN, product_MN.T)
        return product_MN

    def stage_out(
        self, product_MN: Array, bounds: Bounds, lane: Lane, places: Index | None = None
    ) -> Array:
        """Return a block in D's dtype: itself, or narrowed into the lane's output buffer.

        Of a compact one, whose columns are at `places`, only these; a mapped block has all.
        """
        if not self._is_narrowed:
            return product_MN
        if self.arithmetic.functions:
            if places is not None:
                product_MN = self.spread(product_MN, places, bounds, lane)
            product_MN, places = apply_functions(product_MN, self.arithmetic), None
        block = self._output(bounds, places, lane, is_final=True)
        block_MN = block if self.layout.order == "C" else block.T
        narrow(product_MN, block_MN, self.arithmetic.is_checked)
        return block_MN

    def spread(self, block_MN: Array, places: Index, bounds: Bounds, lane: Lane) -> Array:
        """Return a compact block with its zero columns, laid out as the output wants it."""
        if block_MN.dtype == self.arithmetic.output_dtype:
            dense = self._block(bounds, lane.spread)
        else:
            dense = self._packed(*bounds.shape, block_MN.dtype, lane.spread)
        dense[...] = 0
        if self.layout.order == "C":
            dense[:, places] = block_MN
            return dense
        dense[places] = block_MN.T
        return dense.T

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

    def _output(
        self, bounds: Bounds, places: Index | None, lane: Lane, is_final: bool = False
    ) -> Array:
        """Return an array for a product, or for a final block, of which `places` are kept."""
        rows, columns = bounds.shape[0], bounds.shape[1] if places is None else len(places)
        if self._is_narrowed and not is_final:
            return self._packed(rows, columns, self.arithmetic.compute_dtype, lane.scratch)
        if places is not None:
            return self._packed(rows, columns, self.arithmetic.output_dtype, lane.output)
        return self._block(bounds, lane.output)

    def _block(self, bounds: Bounds, buffer: Buffer) -> Array:
        """Return an array for a block with its runs contiguous and congruent with the output."""
        layout = self.layout
        position = layout.position(bounds.row_start, bounds.column_start)
        rows, columns = bounds.shape
        shape, pitch = (rows, columns), layout.row_nbytes
        if layout.order == "F":
            shape, pitch = (columns, rows), layout.column_nbytes
        item = self.arithmetic.output_dtype.itemsize
        if shape[1] * item < SMALLEST_CONGRUENT_RUN and shape[1] * item != pitch:
            position = pitch = 0  # written through the page cache: no need to be congruent
        return buffer.array(shape, self.arithmetic.output_dtype, position, pitch)

    def _packed(self, rows: int, columns: int, dtype: np.dtype[Any], buffer: Buffer) -> Array:
        """Return an array for a block that is not written as it lies."""
        return buffer.array((rows, columns) if self.layout.order == "C" else (columns, rows), dtype)


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
