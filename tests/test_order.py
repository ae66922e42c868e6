import itertools
from functools import cache

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from raymm.errors import DTypeError, PlanError, ShapeError
from raymm.operands import Operand
from raymm.order import arrange, compute_dtype, multiplication_order, output_dtype


def operand(*shape, dtype=np.float32, name="A"):
    dtype = np.dtype(dtype)
    return Operand(name, shape, dtype, tuple(np.empty(shape, dtype).strides))


def cheapest(shapes):
    """Return the least cost over every way to put parentheses, by trying them all."""

    @cache
    def cost(first, last):
        if first == last:
            return 0
        rows, columns = shapes[first][0], shapes[last][1]
        return min(
            cost(first, middle) + cost(middle + 1, last) + 2 * rows * shapes[middle][1] * columns
            for middle in range(first, last)
        )

    return cost(0, len(shapes) - 1)


def cost_of(groups, columns):
    """Return the cost of folding the groups and applying them to a tile of all columns."""
    applied = sum(2 * group.shape[0] * group.shape[1] * columns for group in groups)
    return applied + sum(group.flop for group in groups)


def leaves(fold):
    return [fold.factor] if fold.left is None else leaves(fold.left) + leaves(fold.right)


def multiply(fold, factors):
    if fold.left is None:
        return factors[fold.factor]
    return multiply(fold.left, factors) @ multiply(fold.right, factors)


@given(st.lists(st.integers(1, 50), min_size=3, max_size=8))
def test_no_order_is_cheaper(sizes):
    shapes = tuple(itertools.pairwise(sizes))
    groups = multiplication_order(shapes)
    assert cost_of(groups, sizes[-1]) == cheapest(shapes)
    assert [leaf for group in groups for leaf in leaves(group)] == list(range(len(shapes) - 1))


@given(st.lists(st.integers(1, 6), min_size=3, max_size=7))
def test_the_groups_multiply_to_the_product(sizes):
    rng = np.random.default_rng(0)
    factors = [rng.integers(-3, 4, shape) for shape in itertools.pairwise(sizes)]
    product = factors[-1]
    for group in reversed(multiplication_order(tuple(factor.shape for factor in factors))):
        folded = multiply(group, factors)
        assert folded.shape == group.shape
        product = folded @ product
    np.testing.assert_array_equal(product, np.linalg.multi_dot(factors))


def test_small_factors_of_the_main_job_are_folded():
    (group,) = multiplication_order(((3000, 100), (100, 100), (100, 3_600_000)))
    assert group.text(("A", "B")) == "(A @ B)"
    assert group.flop == 2 * 3000 * 100 * 100


def test_factors_whose_product_would_be_larger_stay_apart():
    outer, inner = multiplication_order(((3000, 5), (5, 100), (100, 3_600_000)))
    assert (outer.factor, inner.factor) == (0, 1)
    assert outer.flop == inner.flop == 0


def test_order_does_not_depend_on_how_wide_the_huge_operand_is_beyond_the_cost():
    wide = [multiplication_order(((300, 20), (20, 30), (30, width))) for width in (10**5, 10**9)]
    assert wide[0] == wide[1]


@pytest.mark.parametrize(
    ("shapes", "shape", "is_transposed", "canonical"),
    [
        (((2, 3), (3, 9)), (2, 9), False, ((2, 3), (3, 9))),
        (((9, 3), (3, 2)), (9, 2), True, ((2, 3), (3, 9))),
        (((9, 3), (3, 4), (4, 2)), (9, 2), True, ((2, 4), (4, 3), (3, 9))),
        (((4, 3), (3, 4)), (4, 4), False, ((4, 3), (3, 4))),
        (((3,), (3, 9)), (9,), False, ((1, 3), (3, 9))),
        (((9, 3), (3,)), (9,), True, ((1, 3), (3, 9))),
        (((3,), (3,)), (), False, ((1, 3), (3, 1))),
        (((3,), (3, 4), (4,)), (), False, ((1, 3), (3, 4), (4, 1))),
    ],
)
def test_canonical_orientation(shapes, shape, is_transposed, canonical):
    chained = arrange(tuple(operand(*each) for each in shapes))
    assert chained.shape == shape
    assert chained.is_transposed is is_transposed
    assert tuple(each.shape for each in chained.canonical) == canonical
    assert (chained.rows, chained.columns) == (canonical[0][0], canonical[-1][1])


@pytest.mark.parametrize("count", [0, 1])
def test_too_few_operands(count):
    with pytest.raises(PlanError, match=f"{count} given"):
        arrange(tuple(operand(2, 2) for _ in range(count)))


def test_wrong_shapes_are_refused():
    with pytest.raises(ShapeError, match=r"A \(2, 3\) @ A \(4, 5\): 3 != 4"):
        arrange((operand(2, 3), operand(4, 5)))


@pytest.mark.parametrize(
    ("dtype", "wanted", "expected"),
    [
        (np.float32, None, np.float32),
        (np.float32, np.float16, np.float16),
        (np.float32, ">f8", np.float64),
        (np.int64, np.int8, np.int8),
        (np.int64, np.uint8, np.uint8),
        (np.int64, np.float32, np.float32),
        (np.float32, np.complex64, np.complex64),
    ],
)
def test_output_dtype(dtype, wanted, expected):
    wanted = None if wanted is None else np.dtype(wanted)
    found = output_dtype(np.dtype(dtype), wanted)
    assert found == np.dtype(expected)
    assert found.isnative


@pytest.mark.parametrize(
    ("dtype", "wanted"),
    [
        (np.complex64, np.float32),
        (np.float32, np.int32),
        (np.int64, np.bool_),
        (np.float32, object),
        (np.float32, "U3"),
        (np.float32, "M8[s]"),
    ],
)
def test_output_dtype_that_cannot_follow(dtype, wanted):
    with pytest.raises(DTypeError, match="asked for"):
        output_dtype(np.dtype(dtype), np.dtype(wanted))


@pytest.mark.parametrize(
    ("dtype", "output", "precision", "expected"),
    [
        (np.float16, np.float16, "strict", np.float32),
        (np.float32, np.float16, "strict", np.float32),
        (np.float32, np.float32, "strict", np.float32),
        (np.float32, np.float32, "float64", np.float64),
        (np.float32, np.float64, "strict", np.float64),
        (np.float64, np.float32, "strict", np.float64),
        (np.float32, np.float32, "bf16", np.float32),
        (np.complex64, np.complex64, "strict", np.complex64),
        (np.complex64, np.complex64, "float64", np.complex128),
        (np.float32, np.complex64, "strict", np.complex64),
        (np.int64, np.float64, "strict", np.int64),
        (np.uint64, np.uint8, "strict", np.uint64),
    ],
)
def test_compute_dtype(dtype, output, precision, expected):
    assert compute_dtype(np.dtype(dtype), np.dtype(output), precision) == np.dtype(expected)
