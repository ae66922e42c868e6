"""The operands of a chain, arranged for a pass: turned, cut down to a part of D, contracted."""

from dataclasses import replace

import numpy as np

from raymm.contraction import contract
from raymm.engines.base import Engine
from raymm.events import Callback
from raymm.indexing import Wanted
from raymm.kernels.sparse import identity
from raymm.operands import Operand, result_dtype
from raymm.order import Chained, arrange, huge_inner
from raymm.request import Request
from raymm.sources import Source
from raymm.sources.selection import select
from raymm.sources.sparse import held

Sources = tuple[Source, ...]


def as_matrices(sources: Sources) -> Sources:
    """Return the operands with vectors at the ends as matrices."""
    matrices = list(sources)
    if len(matrices[0].operand.shape) == 1:
        matrices[0] = matrices[0].as_row()
    if len(matrices[-1].operand.shape) == 1:
        matrices[-1] = matrices[-1].as_column()
    return tuple(matrices)


def as_canonical(sources: Sources, is_transposed: bool) -> Sources:
    """Return the operands as the plan sees them: matrices, the huge one last."""
    matrices = as_matrices(sources)
    if is_transposed:
        return tuple(source.T for source in reversed(matrices))
    return matrices


def part_of(sources: Sources, rows: Wanted, columns: Wanted) -> Sources:
    """Return operands whose product is those rows and columns of D, as a matrix."""
    matrices = list(as_matrices(sources))
    matrices[0] = select(matrices[0], 0, rows)
    matrices[-1] = select(matrices[-1], 1, columns)
    return tuple(matrices)


def planned(chained: Chained, memory_limit: int | None) -> tuple[Chained, tuple[str, ...]]:
    """Return the chain that tiles of D come from, and what is summed before, in words.

    Neighbours that share a huge inner axis become one operand in memory: their product.
    """
    operands, notes = chained.operands, []
    while (place := huge_inner(operands, memory_limit)) is not None:
        left, right = operands[place], operands[place + 1]
        product = _describe(left, right)
        notes.append(
            f"{product} is formed first: sums over {left.shape[-1]:,} places, tile by tile, "
            "in float64"
        )
        operands = (*operands[:place], product, *operands[place + 2 :])
        if len(operands) == 1:
            operands = (_identity(product.shape[0]), product)
    if not notes:
        return chained, ()
    arranged = arrange(operands)
    return replace(
        arranged,
        operands=chained.operands,
        shape=chained.shape,
        dtype=chained.dtype,
        mapped_dtype=chained.mapped_dtype,
    ), tuple(notes)


def contracted(sources: Sources, request: Request, engine: Engine, notify: Callback) -> Sources:
    """Return operands of the same product, none of whose inner axes is huge; see `planned`."""
    while True:
        operands = tuple(source.operand for source in sources)
        place = huge_inner(operands, request.memory_limit)
        if place is None:
            return sources
        left, right = sources[place], sources[place + 1]
        left = left.as_row() if len(left.operand.shape) == 1 else left
        right = right.as_column() if len(right.operand.shape) == 1 else right
        product = contract(left, right, request, engine, notify)
        sources = (*sources[:place], product, *sources[place + 2 :])
        if len(sources) == 1:
            # Its zeros are structural: what is not finite must not spread.
            sources = (
                held(identity(product.operand.shape[0], product.operand.dtype), "I"),
                product,
            )


def _describe(left: Operand, right: Operand) -> Operand:
    rows = left.shape[0] if len(left.shape) == 2 else 1
    columns = right.shape[1] if len(right.shape) == 2 else 1
    dtype = result_dtype((left, right))
    if dtype.kind not in "iu":
        dtype = np.promote_types(dtype, np.float32)
    strides = (columns * dtype.itemsize, dtype.itemsize)
    return Operand(f"{left.name} @ {right.name}", (rows, columns), dtype, strides)


def _identity(length: int) -> Operand:
    dtype = np.dtype(np.int8)
    return Operand("I", (length, length), dtype, (length, 1))
