"""Products of matrices with structural zeros, which contribute nothing, not even to NaN.

Zero times NaN or infinity is NaN, and in the memory of a dense array a structural zero looks like
any other. Where everything is finite that makes no difference and the plain product is taken;
else the terms of the places that are not finite are added one by one, those of structural zeros
left out.

Shapes: M rows, K inner dimension, N columns.
"""

from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from raymm.kernels.fold import Mapper, accumulate, fold, serially

Array: TypeAlias = NDArray[Any]
Mask: TypeAlias = NDArray[np.bool_]
Structure: TypeAlias = Mask | None
"""Where a matrix has entries; None if everywhere."""

_TERMS = 2**17
"""Terms added at a time: they stay in the cache."""


@dataclass(frozen=True, slots=True, eq=False)
class Factor:
    """A resident factor."""

    values: Array
    structure: Structure = None

    def astype(self, dtype: np.dtype[Any]) -> "Factor":
        """Return it in C order in another dtype; itself if it is so already."""
        return replace(self, values=np.ascontiguousarray(self.values, dtype))


def fold_factors(left: Factor, right: Factor, run: Mapper = serially) -> Factor:
    """Return the product of two resident factors, and where it has entries."""
    structure = structure_of_product(left.structure, right.structure, *_outer(left, right))
    if is_plain(left.values, left.structure, right.values, right.structure):
        return Factor(fold(left.values, right.values, run), structure)
    values = np.empty(_outer(left, right), left.values.dtype)
    multiply_structured(left.values, left.structure, right.values, right.structure, values)
    return Factor(values, structure)


def _outer(left: Factor, right: Factor) -> tuple[int, int]:
    return left.values.shape[0], right.values.shape[1]


def structure_of_product(left: Structure, right: Structure, rows: int, columns: int) -> Structure:
    """Return where the product of two matrices has entries."""
    if left is None and right is None:
        return None
    found: Mask
    if left is None:
        assert right is not None
        found = np.broadcast_to(right.any(axis=0), (rows, columns))
    elif right is None:
        found = np.broadcast_to(left.any(axis=1, keepdims=True), (rows, columns))
    else:
        found = np.greater(left.astype(np.float32) @ right.astype(np.float32), 0)
    return None if found.all() else np.ascontiguousarray(found)


def is_plain(left_MK: Array, left: Structure, right_KN: Array, right: Structure) -> bool:
    """Whether structural zeros make no difference to a product."""
    if left is None and right is None:
        return True
    # A factor's own structural zeros meet what is on the other side.
    return (left is None or is_finite(right_KN)) and (right is None or is_finite(left_MK))


def is_finite(values: Array) -> bool:
    """Whether there is no NaN and no infinity."""
    return values.dtype.kind not in "fc" or bool(np.isfinite(values).all())


def multiply_structured(
    left_MK: Array, left: Structure, right_KN: Array, right: Structure, out_MN: Array
) -> None:
    """Write ``left_MK @ right_KN`` into `out_MN`; structural zeros contribute nothing."""
    is_strange = ~(np.isfinite(left_MK).all(axis=0) & np.isfinite(right_KN).all(axis=1))
    accumulate(left_MK[:, ~is_strange], np.ascontiguousarray(right_KN[~is_strange]), out_MN)
    strange = np.flatnonzero(is_strange)
    step = max(1, _TERMS // max(1, len(left_MK)))
    with np.errstate(all="ignore"):
        for start in range(0, right_KN.shape[1] if len(strange) else 0, step):
            columns = slice(start, start + step)
            for place in strange:
                terms = left_MK[:, place, np.newaxis] * right_KN[place, columns]
                if left is not None:
                    terms[~left[:, place]] = 0
                if right is not None:
                    terms[:, ~right[place, columns]] = 0
                out_MN[:, columns] += terms
