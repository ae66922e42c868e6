"""A chain before it is tiled: its orientation, the order of multiplication, the dtypes. Pure."""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from raymm.errors import DTypeError, PlanError
from raymm.operands import Operand, check_chain, result_dtype


@dataclass(frozen=True, slots=True)
class Fold:
    """A product of neighbouring factors, multiplied once: a leaf, or two folds."""

    shape: tuple[int, int]
    factor: int | None = None
    """Place of a single factor in the canonical chain."""
    left: "Fold | None" = None
    right: "Fold | None" = None

    @property
    def flop(self) -> int:
        """Multiplications and additions to form it."""
        if self.left is None or self.right is None:
            return 0
        own = 2 * self.left.shape[0] * self.left.shape[1] * self.right.shape[1]
        return own + self.left.flop + self.right.flop

    @property
    def entries(self) -> int:
        """Entries of all products formed on the way, in memory at the same time at worst."""
        if self.left is None or self.right is None:
            return 0
        return self.shape[0] * self.shape[1] + self.left.entries + self.right.entries

    def text(self, names: tuple[str, ...]) -> str:
        """Return it as a formula."""
        if self.left is None or self.right is None:
            return names[self.factor or 0]
        return f"({self.left.text(names)} @ {self.right.text(names)})"


@dataclass(frozen=True, slots=True)
class Chained:
    """A chain in canonical orientation: resident factors, then the huge operand last."""

    operands: tuple[Operand, ...]
    """As given by the user."""
    canonical: tuple[Operand, ...]
    """Matrices; transposed and reversed where D is tall."""
    is_transposed: bool
    shape: tuple[int, ...]
    """D's shape as the user sees it: axes of vector operands are gone."""
    dtype: np.dtype[Any]
    """The product's dtype."""
    mapped_dtype: np.dtype[Any] | None = None
    """What functions applied to the product make of it; None without any."""

    @property
    def result_dtype(self) -> np.dtype[Any]:
        """D's dtype before `dtype=`."""
        return self.mapped_dtype or self.dtype

    @property
    def shapes(self) -> tuple[tuple[int, int], ...]:
        """Shapes of the matrices, in canonical orientation."""
        return tuple((each.shape[0], each.shape[1]) for each in self.canonical)

    @property
    def rows(self) -> int:
        """Rows of D in canonical orientation."""
        return self.canonical[0].shape[0]

    @property
    def columns(self) -> int:
        """Columns of D in canonical orientation, the huge axis."""
        return self.canonical[-1].shape[1]


def arrange(operands: tuple[Operand, ...]) -> Chained:
    """Check a chain and turn it so that the longest axis of D is its columns."""
    if len(operands) < 2:
        raise PlanError(f"a chain needs at least 2 operands, {len(operands)} given")
    check_chain(operands)
    dtype = result_dtype(operands)
    matrices = list(operands)
    shape: tuple[int, ...] = ()
    if len(matrices[0].shape) == 1:
        matrices[0] = _as_matrix(matrices[0], row=True)
    else:
        shape += matrices[0].shape[:1]
    if len(matrices[-1].shape) == 1:
        matrices[-1] = _as_matrix(matrices[-1], row=False)
    else:
        shape += matrices[-1].shape[-1:]
    # Without columns it stays as it is: no tiles, rather than tiles without rows.
    is_transposed = matrices[0].shape[0] > matrices[-1].shape[1] > 0
    if is_transposed:
        matrices = [matrix.T for matrix in reversed(matrices)]
    return Chained(operands, tuple(matrices), is_transposed, shape, dtype)


INNER_NBYTES = 2**26
"""Neighbours that share an inner axis are tiled along it when both together are larger ..."""


def huge_inner(operands: tuple[Operand, ...], memory_limit: int | None = None) -> int | None:
    """Return the place of the left one of two neighbours whose shared axis is the huge one.

    That is so if this axis is longer than every other and the two do not fit into memory as a
    matter of course: their product is then summed tile by tile, and neither is held.
    """
    if len(operands) < 2:
        return None
    inner = [left.shape[-1] for left in operands[:-1]]
    longest = max(range(len(inner)), key=inner.__getitem__)
    lengths = [length for operand in operands for length in operand.shape]
    left, right = operands[longest], operands[longest + 1]
    # Strictly longer than what is left of the two: contracting always makes a chain smaller.
    outer = max([*left.shape[:-1], *right.shape[1:]], default=0)
    if inner[longest] < max(lengths) or inner[longest] <= outer:
        return None
    nbytes = left.nbytes + right.nbytes
    is_large = nbytes > min(INNER_NBYTES, memory_limit or INNER_NBYTES)
    return longest if is_large else None


def _as_matrix(vector: Operand, row: bool) -> Operand:
    (length,), (stride,) = vector.shape, vector.strides
    shape, strides = ((1, length), (stride, stride)) if row else ((length, 1), (stride, stride))
    return replace(vector, shape=shape, strides=strides)


def multiplication_order(shapes: tuple[tuple[int, int], ...]) -> tuple[Fold, ...]:
    """Return the factors to keep resident, outermost first; the last shape is the huge operand.

    The classic dynamic programme over all orders (Cormen et al., "Matrix-chain multiplication"),
    cheapest first, the earlier split on a tie. A product that contains the huge operand is only
    ever formed tile by tile, so every order is open to it; one that does not is folded once.
    """
    count = len(shapes)
    sizes = [shape[0] for shape in shapes] + [shapes[-1][1]]
    cost = [[0] * count for _ in range(count)]
    split = [[0] * count for _ in range(count)]
    for length in range(2, count + 1):
        for first in range(count - length + 1):
            last = first + length - 1
            cost[first][last], split[first][last] = min(
                (
                    cost[first][middle]
                    + cost[middle + 1][last]
                    + sizes[first] * sizes[middle + 1] * sizes[last + 1],
                    # On a tie fold as much as can be: less is done per tile.
                    -middle,
                )
                for middle in range(first, last)
            )
            split[first][last] = -split[first][last]

    def fold(first: int, last: int) -> Fold:
        shape = (sizes[first], sizes[last + 1])
        if first == last:
            return Fold(shape, factor=first)
        middle = split[first][last]
        return Fold(shape, left=fold(first, middle), right=fold(middle + 1, last))

    groups: list[Fold] = []
    first = 0
    while first < count - 1:
        middle = split[first][count - 1]
        groups.append(fold(first, middle))
        first = middle + 1
    return tuple(groups)


def output_dtype(dtype: np.dtype[Any], wanted: np.dtype[Any] | None) -> np.dtype[Any]:
    """Return D's dtype after `dtype=`; what cannot follow from D raises `DTypeError`."""
    if wanted is None:
        return dtype
    families = {"b": 0, "u": 1, "i": 1, "f": 2, "c": 3}
    if wanted == dtype:
        return dtype
    if wanted.kind not in "uifc" or families[wanted.kind] < families[dtype.kind]:
        raise DTypeError(
            f"the result is {dtype} and dtype={wanted} was asked for: "
            "complex cannot become real, real cannot become integer; convert the operands first"
        )
    return wanted.newbyteorder("=")


def compute_dtype(dtype: np.dtype[Any], output: np.dtype[Any], precision: str) -> np.dtype[Any]:
    """Return the dtype of the arithmetic for float and complex results.

    Half precision accumulates in float32, `dtype=` wider than the operands widens the arithmetic.
    Integers are decided later, from the factors' values (`kernels.exact`).
    """
    if dtype.kind in "iu":
        return np.dtype(np.int64 if dtype.kind == "i" else np.uint64)
    widest = np.promote_types(dtype, np.float32)
    if output.kind in "fc":
        widest = np.promote_types(widest, output)
    if precision == "float64":
        widest = np.promote_types(widest, np.float64)
    return widest
