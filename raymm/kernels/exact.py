"""Exact integer products: which arithmetic cannot lose a bit.

A product of integers is exact in float32 or float64 as long as no partial sum can pass 2**24 or
2**53 (every integer up to there is representable, so every addition is exact in any order). The
bound is ``|F1| @ |F2| @ ... @ (max|C| * 1)``. Beyond it NumPy's integer product is used: it works
modulo 2**64, which is exact because the bound of the final result is below the dtype's range.
"""

import math
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from raymm.errors import DTypeError
from raymm.kernels.fold import Mapper, fold, serially

Array: TypeAlias = NDArray[Any]

_FLOAT32_EXACT, _FLOAT64_EXACT = 2.0**24, 2.0**53
_NEAR = 2.0**-30
_LARGEST = {"i": 2.0**63, "u": 2.0**64}


@dataclass(frozen=True, slots=True)
class Bounded:
    """An integer matrix with an upper bound for the size of each entry, in float64."""

    values: Array
    bound: NDArray[np.float64]
    is_whole: bool = True
    """Whether the values are the integers themselves, and not only equal to them modulo 2**64."""


def bounded(values: Array, dtype: np.dtype[Any]) -> Bounded:
    """Return integers as `dtype` (modulo 2**64) with the bound of their sizes."""
    size = np.abs(values.astype(np.float64))
    is_whole = dtype.kind == "u" or values.dtype != np.uint64 or not (values >> np.uint64(63)).any()
    return Bounded(np.ascontiguousarray(values.astype(dtype)), _upwards(size, 1), bool(is_whole))


def largest(dtype: np.dtype[Any]) -> int:
    """Return the largest absolute value that an integer or boolean dtype can hold."""
    if dtype.kind == "b":
        return 1
    info = np.iinfo(dtype)
    return max(abs(int(info.min)), int(info.max))


def fold_exact(left: Bounded, right: Bounded, run: Mapper = serially) -> Bounded:
    """Return the exact product of two resident factors."""
    bound = _upwards(left.bound @ right.bound, left.bound.shape[1])
    top = float(bound.max(initial=0.0))
    dtype = left.values.dtype
    if top < _FLOAT64_EXACT:
        product = fold(left.values.astype(np.float64), right.values.astype(np.float64), run)
        values = product.astype(dtype)
    else:
        values = fold(left.values, right.values, run)
    is_whole = left.is_whole and right.is_whole and top < _LARGEST[dtype.kind]
    if top < _LARGEST[dtype.kind]:
        bound = _upwards(np.abs(values.astype(np.float64)), 1)  # tighter than |left| @ |right|
    return Bounded(values, bound, is_whole)


def choose_dtype(
    factors: tuple[Bounded, ...], largest_value: int, dtype: np.dtype[Any]
) -> np.dtype[Any] | None:
    """Return the dtype in which all products with a tile are exact; None if 64 bits may overflow.

    Parameters
    ----------
    factors : tuple of Bounded
        The resident factors, outermost first.
    largest_value : int
        Bound of the absolute values of the huge operand.
    dtype : dtype
        Of the result, int64 or uint64.
    """
    vector = np.full(factors[-1].bound.shape[1], float(largest_value) * (1 + 2.0**-52))
    top = float(largest_value)
    final = 0.0
    for factor in reversed(factors):
        vector = _upwards(factor.bound @ vector, factor.bound.shape[1])
        final = float(vector.max(initial=0.0))
        top = max(top, final, float(factor.bound.max(initial=0.0)))
    if not final < _LARGEST[dtype.kind]:
        # The bound is rounded upwards: near the edge Python's integers decide.
        near = final < _LARGEST[dtype.kind] * (1 + _NEAR) and all(each.is_whole for each in factors)
        if not (near and _exact_bound(factors, largest_value) < int(_LARGEST[dtype.kind])):
            return None
    if top < _FLOAT32_EXACT:
        return np.dtype(np.float32)
    return np.dtype(np.float64) if top < _FLOAT64_EXACT else dtype


def _exact_bound(factors: tuple[Bounded, ...], largest_value: int) -> int:
    """Return the bound of the result's sizes in Python's integers."""
    vector = np.full(factors[-1].values.shape[1], largest_value, object)
    for factor in reversed(factors):
        vector = abs(factor.values.astype(object)) @ vector
    return max(vector, default=0)


def overflow_error(factors: tuple[Bounded, ...], largest_value: int, text: str) -> DTypeError:
    """Return the error for a product that 64 bits might not hold."""
    size = float(largest_value)
    for factor in reversed(factors):
        size *= max(1.0, float(factor.bound.sum(axis=1).max(initial=0.0)))
    return DTypeError(
        f"{text}: the values allow a result of up to about 2**{math.log2(max(size, 1)):.0f}, "
        "and 64 bits might not hold it; give float64 operands or scale them"
    )


def _upwards(values: NDArray[np.float64], terms: int) -> NDArray[np.float64]:
    """Raise sums of `terms` rounded products to upper bounds of the exact ones."""
    return values * (1 + (terms + 2) * 2.0**-52)
