import numpy as np
import pytest

from raymm.kernels import gather
from raymm.kernels.gather import multiply_gathered
from raymm.kernels.sparse import from_entries
from tests.tolerances import assert_product


def filled(rng, shape, entries, dtype=np.float32):
    """Return a sparse matrix with entries in every column."""
    rows = np.concatenate([rng.integers(0, shape[0], entries) for _ in range(shape[1])])
    columns = np.repeat(np.arange(shape[1]), entries)
    return from_entries(shape, rows, columns, rng.normal(size=len(rows)).astype(dtype))


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.complex64])
@pytest.mark.parametrize("entries", [1, 7])
@pytest.mark.parametrize("nbytes", [2**20, 100, 1])
def test_parts_of_any_size(dtype, entries, nbytes, monkeypatch):
    monkeypatch.setattr(gather, "GATHERED_NBYTES", nbytes)
    rng = np.random.default_rng(0)
    left, matrix = rng.normal(size=(5, 40)).astype(dtype), filled(rng, (40, 30), entries)
    out = np.empty((30, 5), dtype)
    multiply_gathered(np.ascontiguousarray(left.T), None, matrix, out)
    assert_product(out.T, [left, matrix.dense()])
    strided = np.empty((5, 30), dtype)
    multiply_gathered(np.ascontiguousarray(left.T), None, matrix, strided.T)
    assert_product(strided, [left, matrix.dense()])


def test_a_long_column_is_summed_in_float64():
    count = 2**21
    places = np.arange(count)
    matrix = from_entries((count, 1), places, np.zeros(count, int), np.ones(count, np.float32))
    left = np.full((count, 1), 0.1, np.float32)
    out = np.empty((1, 1), np.float32)
    multiply_gathered(left, None, matrix, out)
    np.testing.assert_allclose(out, count * float(np.float32(0.1)), rtol=1e-6)


def test_structural_zeros_on_both_sides():
    matrix = from_entries(
        (3, 2), np.array([0, 1, 2]), np.array([0, 0, 1]), np.array([np.nan, 2.0, np.inf])
    )
    left = np.array([[0.0, 3, 0], [np.nan, 1, 1]])
    structure = np.array([[False, True, False], [True, True, True]])
    out = np.empty((2, 2))
    multiply_gathered(np.ascontiguousarray(left.T), np.ascontiguousarray(structure.T), matrix, out)
    np.testing.assert_array_equal(out.T, [[6, 0], [np.nan, np.inf]])


def test_no_columns():
    out = np.empty((0, 4))
    multiply_gathered(
        np.ones((3, 4)), None, from_entries((3, 0), *np.empty((2, 0), int), np.empty(0)), out
    )
