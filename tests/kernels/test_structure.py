import numpy as np
import pytest

from raymm.kernels.structure import (
    Factor,
    fold_factors,
    is_plain,
    multiply_structured,
    structure_of_product,
)


def by_terms(left, left_structure, right, right_structure):
    """Add the terms of two entries one by one."""
    product = np.zeros((left.shape[0], right.shape[1]), np.result_type(left, right))
    for row, column in np.ndindex(product.shape):
        for place in range(left.shape[1]):
            if left_structure[row, place] and right_structure[place, column]:
                with np.errstate(all="ignore"):
                    product[row, column] += left[row, place] * right[place, column]
    return product


def strange(rng, shape, share, dtype):
    """Return values of which some are not finite, and where there are entries."""
    values = rng.integers(-3, 4, shape).astype(dtype)
    values[rng.random(shape) < 0.1] = np.nan
    values[rng.random(shape) < 0.1] = np.inf
    structure = rng.random(shape) < share
    values[~structure] = 0
    return values, structure


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.complex128])
@pytest.mark.parametrize("shares", [(1, 0.3), (0.3, 1), (0.4, 0.4)])
def test_structural_zeros_contribute_nothing(dtype, shares):
    rng = np.random.default_rng(0)
    left, its = strange(rng, (7, 5), shares[0], dtype)
    right, other = strange(rng, (5, 11), shares[1], dtype)
    out = np.empty((7, 11), dtype)
    none = [
        structure if share < 1 else None
        for structure, share in zip((its, other), shares, strict=True)
    ]
    multiply_structured(left, none[0], right, none[1], out)
    np.testing.assert_array_equal(out, by_terms(left, its, right, other))


def test_structure_of_a_product():
    rng = np.random.default_rng(1)
    left, right = rng.random((6, 5)) < 0.3, rng.random((5, 7)) < 0.3
    whole = np.ones((6, 5), bool), np.ones((5, 7), bool)
    for one, other in ((left, right), (left, None), (None, right)):
        pair = whole[0] if one is None else one, whole[1] if other is None else other
        expected = pair[0].astype(int) @ pair[1].astype(int) > 0
        np.testing.assert_array_equal(structure_of_product(one, other, 6, 7), expected)
    assert structure_of_product(None, None, 6, 7) is None
    assert structure_of_product(whole[0], None, 6, 7) is None


def test_only_what_is_not_finite_on_the_other_side_matters():
    finite, lost = np.ones((2, 2)), np.array([[1, np.nan], [1, 1]])
    some = np.eye(2, dtype=bool)
    assert is_plain(lost, None, lost, None)
    assert is_plain(lost, some, finite, None)
    assert not is_plain(lost, None, finite, some)
    assert not is_plain(finite, some, lost, None)


def test_folding_keeps_the_structure():
    left = Factor(np.array([[np.nan, 1], [2, 3]]))
    right = Factor(np.array([[0.0, 0], [0, 1]]), np.array([[False, False], [False, True]]))
    folded = fold_factors(left, right)
    np.testing.assert_array_equal(folded.values, [[0, 1], [0, 3]])
    np.testing.assert_array_equal(folded.structure, [[False, True], [False, True]])
