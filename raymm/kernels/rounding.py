"""How far rounding may take a right result from a float64 reference.

Both bounds compare with float64 (integers: with the exact product modulo 2**64).

**A weighted sum over a column of D.** With a weight r_i for every row, drawn from [-1, -1/2] and
[1/2, 1], ``r^T D`` is compared with ``((r^T A) B) C`` (Freivalds, "Probabilistic machines can use
less running time", 1977): a wrong entry, tile or order of rows moves a column by its error times
the weights. What rounding may move it by:

Every rounding error of column j is at most ``u (W~ |c_j|)_i`` in row i, with ``W~ = |A| |B|``, and
n of them meet in one entry, n the sum of the inner dimensions. Taken as independent with mean zero,
as are the weights, their weighted sum is below ``lam`` times the 2-norm of its terms with
probability ``1 - 2 exp(-lam**2 / 2)`` (Hoeffding, 1963; the same step gives ``lam sqrt(n) u`` for
one entry: Higham and Mary, "A new approach to probabilistic rounding error analysis", 2019,
section 2). By the triangle inequality, which is never worse than ``||W~||_F ||c_j||_2`` ::

    |r^T D_j - r^T A B c_j|  <=  lam sqrt(n) u         sum_k ||W~_k||_2 |c_kj|    arithmetic
                               + lam sqrt(n + m) u64   sum_k ||W~_k||_1 |c_kj|    this reference
                               + lam u_out             ||D_j||_2                  D's dtype
                               + lam u_b          sqrt(sum_k t_k |c_kj|**2)       bf16, tf32

plus what underflow may cost; the last line is the same step for operands that were rounded to a
shorter format (t: see `raymm.kernels.reference`). ``lam`` is 8: once in 4e13 columns by chance.
Rounding errors of constant data are not independent: a column beyond this bound is suspected, not
wrong.

**One entry** is wrong beyond ``n u / (1 - n u) |A| |B| |c_j|`` (Higham, "Accuracy and Stability of
Numerical Algorithms", 2002, section 3.5), whatever the data; NaN and infinities must be where the
reference has them.

A sum longer than `LONG_INNER` is taken in parts that are added in float64: n counts one part.
"""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from raymm.memory import LONG_INNER
from raymm.operands import Operand, result_dtype
from raymm.order import compute_dtype

LAM = 8.0

_OPERAND_UNITS = {"bf16": 2.0**-8, "tf32": 2.0**-11}
_UNIT64 = 2.0**-53


@dataclass(frozen=True, slots=True)
class Format:
    """A floating-point format: relative error of a rounding, and its ends."""

    unit: float = 0.0
    smallest: float = 0.0
    largest: float = math.inf


def _format(dtype: np.dtype[Any]) -> Format:
    if dtype.kind not in "fc":
        return Format()
    info = np.finfo(dtype)
    return Format(float(info.eps) / 2, float(info.smallest_subnormal), float(info.max))


@dataclass(frozen=True, slots=True)
class Rounding:
    """What errors the arithmetic that made D may have, and those of the reference."""

    arithmetic: Format
    output: Format
    """Of D's dtype if the arithmetic was in a wider one; else without error."""
    terms: int
    """n, the sum of the inner dimensions."""
    reference_terms: int
    scale: float
    """A complex product is four real ones: Higham, section 3.6."""
    operand_unit: float
    """Of operands rounded to a shorter format; 0 if they are not."""
    rounded: int
    """How many of those meet in an entry."""

    @property
    def entry(self) -> float:
        """Bound of one entry's error relative to ``|A| |B| |c|``, D's own rounding excepted."""
        own = (1 + _gamma(self.terms, self.scale * self.arithmetic.unit)) * (
            1 + self.operand_unit
        ) ** self.rounded - 1
        return own + _gamma(self.reference_terms, self.scale * _UNIT64)

    @property
    def norm(self) -> float:
        """Bound of a weighted sum's error relative to ``sum_k ||W~_k||_2 |c_kj|``."""
        first = LAM * math.sqrt(self.terms) * self.scale * self.arithmetic.unit
        return math.expm1(first) + LAM * math.comb(self.rounded, 2) * self.operand_unit**2

    def reference(self, rows: int) -> float:
        """Bound of this reference's error relative to ``sum_k ||W~_k||_1 |c_kj|``."""
        return LAM * math.sqrt(self.reference_terms + rows) * self.scale * _UNIT64


def _gamma(terms: int, unit: float) -> float:
    return terms * unit / (1 - terms * unit) if terms * unit < 1 else math.inf


def rounding_of(
    operands: tuple[Operand, ...], output: np.dtype[Any], precision: str, groups: int
) -> Rounding:
    """Return what may happen on the way from operands to D, by dtypes and lengths alone."""
    computed = compute_dtype(result_dtype(operands), output, precision)
    arithmetic, narrowed = _format(computed), _format(output)
    inner = [operand.shape[0] for operand in operands[1:]]
    parts = inner
    if computed in (np.float32, np.complex64):
        parts = [min(length, LONG_INNER + 1) for length in inner]
    return Rounding(
        arithmetic,
        narrowed if narrowed.unit > arithmetic.unit else Format(),
        sum(parts),
        sum(inner) + len(inner),
        2 * math.sqrt(2) if computed.kind == "c" else 1.0,
        _OPERAND_UNITS.get(precision, 0.0) if computed == np.float32 else 0.0,
        groups + 1,
    )
