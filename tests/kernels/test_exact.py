import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from raymm.errors import DTypeError
from raymm.kernels.exact import bounded, choose_dtype, fold_exact, largest, overflow_error

INT64, UINT64 = np.dtype(np.int64), np.dtype(np.uint64)


def matrices(rows, columns, dtype=np.int64):
    small = st.integers(0 if np.dtype(dtype).kind == "u" else -300, 300)
    large = st.sampled_from([0, 1, 2**24 + 1, 2**31, 2**53 - 1, 2**53 + 1, 2**62])
    return hnp.arrays(dtype, (rows, columns), elements=small | large)


@pytest.mark.parametrize(
    ("dtype", "value"),
    [("?", 1), ("u1", 255), ("i1", 128), ("u8", 2**64 - 1), ("i8", 2**63), (">i2", 2**15)],
)
def test_largest_value_of_a_dtype(dtype, value):
    assert largest(np.dtype(dtype)) == value


@given(matrices(3, 4), matrices(4, 2))
def test_a_product_below_2_to_63_is_exact(left, right):
    exact = left.astype(object) @ right.astype(object)
    folded = fold_exact(bounded(left, INT64), bounded(right, INT64))
    # Exact modulo 2**64 in any case, hence exact whenever it fits.
    assert ((folded.values.astype(object) - exact) % 2**64 == 0).all()
    sizes = np.abs(left).astype(object) @ np.abs(right).astype(object)
    if (sizes < 2**63).all():
        np.testing.assert_array_equal(folded.values.astype(object), exact)


@given(matrices(3, 4), matrices(4, 2))
def test_bounds_are_never_below_the_sizes(left, right):
    folded = fold_exact(bounded(left, INT64), bounded(right, INT64))
    exact = np.abs(left.astype(object) @ right.astype(object))
    for bound, value in zip(folded.bound.flat, exact.flat, strict=True):
        assert int(bound) >= value


@given(matrices(2, 3), matrices(3, 2), st.integers(0, 2**63))
def test_a_chosen_dtype_holds_every_partial_sum(left, right, tile_value):
    chosen = choose_dtype((bounded(left, INT64), bounded(right, INT64)), tile_value, INT64)
    size = [abs(int(value)) for value in np.full(2, tile_value, object)]
    inner = np.abs(right.astype(object)) @ np.array(size, object)
    outer = np.abs(left.astype(object)) @ inner
    entries = [*np.abs(left.astype(object)).flat, *np.abs(right.astype(object)).flat]
    top = max([*inner, *outer, tile_value, *entries])
    if chosen == np.float32:
        assert top <= 2**24
    elif chosen == np.float64:
        assert top <= 2**53
    elif chosen is None:
        assert max(outer) * (1 + 2**-40) >= 2**63  # refused only where it might overflow
    else:
        assert chosen == INT64
        assert max(outer) < 2**63


@pytest.mark.parametrize(
    ("factor", "value", "dtype", "expected"),
    [
        ([[1, 1]], 2**22, INT64, np.float32),
        ([[1, 1]], 2**23 + 1, INT64, np.float64),
        ([[1, 1]], 2**50, INT64, np.float64),
        ([[1, 1]], 2**52 + 1, INT64, np.int64),
        ([[1, 1]], 2**61, INT64, np.int64),
        ([[1, 1]], 2**63, INT64, None),
        ([[1, 1]], 2**62, UINT64, np.uint64),
        ([[1, 1]], 2**63, UINT64, None),
        ([[0, 0]], 2**63 - 1, INT64, np.int64),
        ([[1, 0]], 2**64 - 1, UINT64, np.uint64),
        ([[1, 1]], 2**64 - 1, UINT64, None),
    ],
)
def test_choice_at_the_edges(factor, value, dtype, expected):
    chosen = choose_dtype((bounded(np.array(factor).astype(dtype), dtype),), value, dtype)
    assert chosen is None if expected is None else chosen == np.dtype(expected)


def test_refusal_names_the_size():
    factors = (bounded(np.full((1, 4), 2**40), INT64),)
    error = overflow_error(factors, 2**40, "A @ B")
    assert isinstance(error, DTypeError)
    assert "2**82" in str(error)
    assert "64 bits" in str(error)


@pytest.mark.parametrize("value", [2**64 - 1, 2**64 - 2, 2**64 - 2049, 2**63])
def test_the_last_values_of_64_bits_fit(value):
    factors = (bounded(np.array([[value]], np.uint64), np.dtype(np.uint64)),)
    assert choose_dtype(factors, 1, np.dtype(np.uint64)) == np.uint64
    assert choose_dtype(factors, 3, np.dtype(np.uint64)) is None
