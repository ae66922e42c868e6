"""What a product should be: weighted sums of its columns, and entries; the bounds are applied.

`raymm.kernels.rounding` derives them.

Shapes: M rows of D, K length of C's columns, S columns compared.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from raymm.kernels.residuals import Sums, Weights, measure, product, weigh
from raymm.kernels.rounding import LAM, rounding_of
from raymm.kernels.structure import (
    Factor,
    Structure,
    is_plain,
    multiply_structured,
    structure_of_product,
)
from raymm.operands import Operand, result_dtype
from raymm.order import Fold, multiplication_order

Values: TypeAlias = NDArray[Any]
Mask: TypeAlias = NDArray[np.bool_]

SEED = 20190515


@dataclass(frozen=True, slots=True)
class Entries:
    """Columns of D beside what they should be, all (M, S)."""

    found: Values
    expected: Values
    bound: Values
    ratio: NDArray[np.float64]
    """The error relative to its bound; infinite where NaN, Inf or an integer is wrong."""


class Reference:
    """The resident factors in float64, and what follows from them.

    Parameters
    ----------
    operands : tuple of Operand
        The canonical operands, the huge one last.
    factors : sequence of ndarray
        The values of all but the last.
    output : dtype
        Of D.
    precision : str
        Of the arithmetic that made D.
    structures : sequence of ndarray of bool or None
        Where sparse ones among the factors have entries.

    Attributes
    ----------
    output_weights, huge_weights : Weights
        What to sum the columns of D and of C with; the two sums are equal but for rounding.
    """

    def __init__(
        self,
        operands: tuple[Operand, ...],
        factors: Sequence[Values],
        output: np.dtype[Any],
        precision: str,
        structures: Sequence[Structure] = (),
    ) -> None:
        kinds = result_dtype(operands).kind, output.kind
        self.is_exact = kinds[0] in "iu" and kinds[1] in "iu"
        self.dtype = np.dtype("u8" if self.is_exact else "c16" if "c" in kinds else "f8")
        self._factors = factors
        self._structures = list(structures) or [None] * len(factors)
        is_sparse = [each is not None for each in self._structures]
        self._is_sparse = any(is_sparse) or operands[-1].nonzeros is not None
        shapes = tuple((operand.shape[0], operand.shape[1]) for operand in operands)
        groups = multiplication_order(shapes)
        # In the order of the plan, on which NaN and infinities depend.
        folds = [self._fold(group) for group in groups]
        self._folded = [fold.values for fold in folds]
        self._folded_structures = [fold.structure for fold in folds]
        self._rounding = rounding_of(operands, output, precision, len(groups))
        self._constant, self._slope = self._underflow()
        self._largest = 0.0
        if self.is_exact:
            self.output_weights, self.huge_weights = self._exact_weights()
        else:
            self.output_weights, self.huge_weights = self._weights()

    def _fold(self, group: Fold) -> Factor:
        if group.left is None or group.right is None:
            place = group.factor or 0
            return Factor(self._factors[place].astype(self.dtype), self._structures[place])
        return _times(self._fold(group.left), self._fold(group.right), self.dtype)

    def _underflow(self) -> tuple[float, float]:
        """Return what underflow may add to an entry: a constant, and per unit of ``||c_j||_1``.

        A product that underflows is off by less than the smallest number; that is multiplied by
        what stands left and right of it.
        """
        left = right = 1.0
        for factor in self._factors:
            sizes = np.abs(factor.astype(np.complex128 if factor.dtype.kind == "c" else np.float64))
            sizes[~np.isfinite(sizes)] = 0
            left *= max(1.0, float(sizes.sum(axis=1).max(initial=0.0)))
            right *= max(1.0, float(sizes.sum(axis=0).max(initial=0.0)))
        rounding = self._rounding
        each = rounding.arithmetic.smallest * max(1, rounding.terms) * left
        return each + rounding.output.smallest, each * right

    def _exact_weights(self) -> tuple[Weights, Weights]:
        """Draw odd numbers of 64 bits: a wrong column passes with a chance of 2**-63 or so."""
        rows = self._factors[0].shape[0]
        drawn = np.random.default_rng(SEED).integers(0, 2**63, rows, np.uint64) * np.uint64(2)
        drawn += np.uint64(1)
        return Weights(drawn), Weights(weigh(drawn, self._folded))

    def _weights(self) -> tuple[Weights, Weights]:
        generator = np.random.default_rng(SEED)
        rows = self._factors[0].shape[0]
        drawn = generator.uniform(0.5, 1, rows) * generator.choice([-1.0, 1.0], rows)
        factors, folded = list(self._factors), list(self._folded)
        is_lost = np.array(~np.isfinite(factors[0]).all(axis=1, keepdims=True))
        if is_lost.any():
            # One row of NaN would hide all others: it is left out, as a row of zeros.
            factors[0] = np.where(is_lost, 0, factors[0])
            folded[0] = np.where(is_lost, 0, folded[0])
        rounding, size = self._rounding, measure(factors)
        self._largest = size.largest
        sizes = rounding.norm * size.norms + rounding.reference(rows) * size.sums
        wide = drawn.astype(self.dtype)
        return (
            Weights(
                wide,
                squares=np.ones(rows) if rounding.output.unit else None,
                dropped=is_lost[:, 0] if is_lost.any() else None,
            ),
            Weights(
                weigh(wide, folded),
                sizes + rows * self._slope,
                _rounded_operands(drawn, folded, rounding.operand_unit),
            ),
        )

    def difference(self, output: Sums, huge: Sums) -> NDArray[np.float64]:
        """Return each column's difference relative to its bound.

        NaN: nothing to compare, the product is not finite, or D's dtype may have overflowed.
        """
        if self.is_exact:
            return np.where(output.plain == huge.plain, 0.0, math.inf)
        rounding = self._rounding
        bound = huge.sizes + LAM * np.sqrt(huge.squares)
        bound += len(self.output_weights.plain) * self._constant
        bound += LAM * rounding.output.unit * np.sqrt(output.squares)
        is_finite, is_expected = np.isfinite(output.plain), np.isfinite(huge.plain)
        may_overflow = rounding.output.unit or self._largest >= rounding.arithmetic.largest
        # In the sums a structural zero makes NaN of NaN: entry by entry it does not.
        other = math.nan if may_overflow or self._is_sparse else math.inf
        ratio = np.where(is_finite == is_expected, math.nan, other)
        np.divide(
            np.abs(output.plain - huge.plain), bound, out=ratio, where=is_finite & is_expected
        )
        return ratio

    def compare(self, found: Values, huge: Values, structure: Structure = None) -> Entries:
        """Compare columns of D, (M, S), with the product by columns of C, (K, S)."""
        columns = Factor(huge.astype(self.dtype), structure)
        for factor in map(Factor, reversed(self._folded), reversed(self._folded_structures)):
            columns = _times(factor, columns, self.dtype)
        expected = columns.values
        if self.is_exact:
            ratio = np.where(found.astype(self.dtype) == expected, 0.0, math.inf)
            return Entries(found, expected.astype(found.dtype), np.zeros(ratio.shape), ratio)
        sizes = np.abs(huge.astype(self.dtype))
        underflow = self._constant + self._slope * sizes.sum(axis=0)
        columns = Factor(sizes, structure)
        for factor in map(Factor, reversed(self._factors), reversed(self._structures)):
            columns = _times(factor, columns, np.dtype(np.float64), sizes=True)
        sizes = columns.values
        rounding, wide = self._rounding, found.astype(self.dtype)
        bound = rounding.entry * (1 + rounding.output.unit) * sizes + underflow
        bound += rounding.output.unit * np.abs(expected)
        is_finite = np.isfinite(wide) & np.isfinite(expected)
        is_right = _is_alike(wide, expected) | self._may_overflow(wide, expected, sizes, bound)
        ratio = np.where(is_right, 0.0, math.inf)
        np.divide(np.abs(wide - expected), bound, out=ratio, where=is_finite)
        ratio[np.isnan(ratio)] = 0  # the bound itself is beyond float64
        return Entries(found, expected, bound, ratio)

    def _may_overflow(self, wide: Values, expected: Values, sizes: Values, bound: Values) -> Mask:
        """Whether an entry that is not finite has become so by the range of a format."""
        rounding = self._rounding
        on_the_way = np.maximum(sizes, self._largest) >= rounding.arithmetic.largest
        at_the_end = np.abs(expected) + bound >= rounding.output.largest
        on_the_way &= np.isfinite(sizes) & ~np.isfinite(wide)
        at_the_end &= np.isinf(wide)
        result: Mask = on_the_way | at_the_end
        return result


def _times(left: Factor, right: Factor, dtype: np.dtype[Any], sizes: bool = False) -> Factor:
    """Return the product, with `sizes` of the absolute values, and where it has entries."""
    shape = left.values.shape[0], right.values.shape[1]
    structure = structure_of_product(left.structure, right.structure, *shape)
    if is_plain(left.values, left.structure, right.values, right.structure):
        return Factor(product(left.values, right.values, dtype, sizes), structure)
    pair = [np.abs(each.values) if sizes else each.values for each in (left, right)]
    first, second = (values.astype(dtype, copy=False) for values in pair)
    values = np.empty(shape, dtype)
    multiply_structured(first, left.structure, second, right.structure, values)
    return Factor(values, structure)


def _is_alike(first: Values, second: Values) -> Mask:
    """Whether entries that are not finite agree; of complex ones parts may be either."""
    if first.dtype.kind == "c":
        return ~np.isfinite(first) & ~np.isfinite(second)
    is_alike: Mask = (first == second) | (np.isnan(first) & np.isnan(second))
    return is_alike


def _rounded_operands(drawn: Values, folded: list[Values], unit: float) -> Values | None:
    """Return ``u_b**2 t`` for operands whose entries are each off by ``u_b``.

    With ``s = r^T F1 ... Fg`` the error of C's entries is ``sum_k s_k c_k d_k``, that of the last
    factor's ``sum_ak s'_a F_ak c_k d_ak``: squares of the terms, summed, are t. Those of a factor
    further left pass through the others by the Cauchy-Schwarz inequality.
    """
    if not unit:
        return None
    left, carried = drawn, np.zeros(len(drawn))
    for factor in folded:
        squares = factor**2
        carried = factor.shape[1] * (carried @ squares) + left**2 @ squares
        left = left @ factor
    total: Values = unit**2 * (carried + left**2)
    return total
