"""Which errors a result may have follows from dtypes and lengths."""

import itertools
import math

import numpy as np
import pytest

from raymm.kernels.rounding import LAM, rounding_of
from raymm.memory import LONG_INNER
from raymm.operands import Operand


def of(dtype, output=None, precision="strict", inner=(100, 100), groups=1):
    lengths = (3000, *inner, 10**6)
    operands = tuple(
        Operand("X", shape, np.dtype(dtype), (0, 0)) for shape in itertools.pairwise(lengths)
    )
    return rounding_of(operands, np.dtype(output or dtype), precision, groups)


@pytest.mark.parametrize(
    ("dtype", "output", "precision", "unit"),
    [
        ("float32", None, "strict", 2.0**-24),
        ("float64", None, "strict", 2.0**-53),
        ("float32", None, "float64", 2.0**-53),
        ("float16", None, "strict", 2.0**-24),
        ("float32", "float64", "strict", 2.0**-53),
    ],
)
def test_one_entry_by_the_classic_bound(dtype, output, precision, unit):
    gamma = 200 * unit / (1 - 200 * unit)
    reference = 202 * 2.0**-53 / (1 - 202 * 2.0**-53)
    assert of(dtype, output, precision).entry == pytest.approx(gamma + reference, rel=1e-12)


def test_sums_by_the_probabilistic_bound():
    assert of("float32").norm == pytest.approx(LAM * math.sqrt(200) * 2.0**-24, rel=1e-3)
    assert of("float32").reference(3000) == LAM * math.sqrt(202 + 3000) * 2.0**-53


def test_operands_rounded_to_bfloat16():
    rounding = of("float32", precision="bf16")
    assert rounding.entry == pytest.approx((1 + 200 * 2.0**-24) * (1 + 2.0**-8) ** 2 - 1, rel=1e-4)
    assert of("float64", precision="bf16").operand_unit == 0  # computed in float64


def test_a_long_sum_counts_one_part():
    assert of("float32", inner=(10**6,)).terms == LONG_INNER + 1
    assert of("float64", inner=(10**6,)).terms == 10**6


@pytest.mark.parametrize(
    ("dtype", "output", "unit"),
    [
        ("float16", "float16", 2.0**-11),
        ("float64", "float32", 2.0**-24),
        ("int64", "float32", 2.0**-24),
        ("float32", "float32", 0),
        ("float32", "float64", 0),
        ("int64", "int64", 0),
    ],
)
def test_the_dtype_of_the_result_rounds_once_more_if_it_is_narrower(dtype, output, unit):
    assert of(dtype, output).output.unit == unit


def test_integers_are_exact_and_complex_products_are_four():
    assert of("int64").arithmetic.unit == 0
    assert of("complex64").norm == pytest.approx(2 * math.sqrt(2) * of("float32").norm, rel=1e-3)


def test_a_bound_beyond_its_range_is_infinite():
    assert of("float64", inner=(2**53,)).entry == math.inf
