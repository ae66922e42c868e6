import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from raymm.errors import SourceError
from raymm.kernels.sparse import from_compressed, from_entries, identity

MATRICES = st.tuples(st.integers(1, 6), st.integers(1, 9)).flatmap(
    lambda shape: arrays(np.int64, shape, elements=st.integers(-1, 1))
)


def sparse(dense):
    """Return the non-zero entries of an array, given in no particular order."""
    rows, columns = np.nonzero(dense)
    order = np.random.default_rng(0).permutation(len(rows))
    rows, columns = rows[order], columns[order]
    return from_entries(dense.shape, rows, columns, dense[rows, columns])


@given(MATRICES)
def test_entries_in_any_order_are_the_matrix(dense):
    matrix = sparse(dense)
    np.testing.assert_array_equal(matrix.dense(), dense, strict=True)
    np.testing.assert_array_equal(matrix.T.dense(), dense.T, strict=True)
    np.testing.assert_array_equal(matrix.structure(), dense != 0)
    np.testing.assert_array_equal(matrix.nonzero, np.flatnonzero((dense != 0).any(axis=0)))
    assert matrix.size == (dense != 0).sum()


@given(MATRICES, st.data())
def test_any_rows_and_columns(dense, data):
    matrix, (rows, columns) = sparse(dense), dense.shape
    start = data.draw(st.integers(0, columns))
    stop = data.draw(st.integers(start, columns))
    np.testing.assert_array_equal(matrix.slice(start, stop).dense(), dense[:, start:stop])
    index = np.array(data.draw(st.lists(st.integers(0, columns - 1), max_size=12)), np.int64)
    np.testing.assert_array_equal(matrix.take(index).dense(), dense[:, index])
    index = np.array(data.draw(st.lists(st.integers(0, rows - 1), max_size=12)), np.int64)
    np.testing.assert_array_equal(matrix.rows(index).dense(), dense[index])


@given(MATRICES)
def test_compact_keeps_the_columns_that_have_entries(dense):
    columns, panel = sparse(dense).compact()
    np.testing.assert_array_equal(panel, dense[:, columns])
    rest = np.delete(dense, columns, axis=1)
    assert not rest.any()


def test_slices_of_slices_share_the_entries():
    matrix = sparse(np.arange(40).reshape(4, 10))
    part = matrix.slice(2, 9).slice(1, 4)
    np.testing.assert_array_equal(part.dense(), np.arange(40).reshape(4, 10)[:, 3:6])
    assert np.shares_memory(part.data, matrix.data)
    assert not np.shares_memory(part.copy().data, matrix.data)


def test_entries_at_the_same_place_are_added():
    matrix = from_entries((2, 3), np.array([1, 0, 1]), np.array([2, 0, 2]), np.array([1.5, 2, 3]))
    np.testing.assert_array_equal(matrix.dense(), [[2, 0, 0], [0, 0, 4.5]])
    assert matrix.size == 2


def test_stored_zeros_are_entries():
    matrix = from_entries((2, 2), np.array([1]), np.array([0]), np.array([0.0]))
    np.testing.assert_array_equal(matrix.structure(), [[False, False], [True, False]])
    np.testing.assert_array_equal(matrix.nonzero, [0])


def test_dense_in_given_memory_and_another_dtype():
    memory = np.full((3, 2), 9, np.float32)
    dense = sparse(np.array([[0, 5, 0], [7, 0, 0]])).dense(memory.dtype, memory)
    np.testing.assert_array_equal(dense, [[0, 5, 0], [7, 0, 0]])
    assert np.shares_memory(dense, memory)


def test_compressed_in_order_is_taken_as_it_is():
    indices, data = np.array([0, 2, 1], np.int32), np.array([1.0, 2, 3])
    matrix = from_compressed((3, 3), np.array([0, 2, 2, 3], np.int32), indices, data)
    assert matrix.data is data or np.shares_memory(matrix.data, data)
    assert np.shares_memory(matrix.indices, indices)
    np.testing.assert_array_equal(matrix.dense(), [[1, 0, 0], [0, 0, 3], [2, 0, 0]])


def test_compressed_out_of_order_or_twice_is_sorted():
    indices, data = np.array([2, 0, 1, 1]), np.array([2.0, 1, 3, 4])
    matrix = from_compressed((3, 2), np.array([0, 2, 4]), indices, data)
    np.testing.assert_array_equal(matrix.dense(), [[1, 0], [0, 7], [2, 0]])
    np.testing.assert_array_equal(matrix.indices, [0, 2, 1])


@pytest.mark.parametrize("row", [-1, 3])
def test_an_entry_outside_is_refused(row):
    with pytest.raises(SourceError, match="damaged"):
        from_compressed((3, 1), np.array([0, 1]), np.array([row]), np.ones(1))
    with pytest.raises(SourceError, match="damaged"):
        from_entries((1, 3), np.array([0]), np.array([row]), np.ones(1))


@pytest.mark.parametrize("indptr", [[0, 2, 1], [0, 1], [1, 1, 1], [0, 1, 9]])
def test_pointers_that_do_not_fit_are_refused(indptr):
    with pytest.raises(SourceError, match="pointers"):
        from_compressed((3, 2), np.array(indptr), np.zeros(2, int), np.ones(2))


@pytest.mark.parametrize("shape", [(0, 3), (3, 0), (0, 0)])
def test_empty_axes(shape):
    nothing = np.empty(0, np.int64)
    matrix = from_entries(shape, nothing, nothing, np.empty(0))
    assert matrix.dense().shape == shape
    assert matrix.T.dense().shape == shape[::-1]
    assert matrix.compact()[1].shape == (shape[0], 0)


def test_identity():
    np.testing.assert_array_equal(identity(3, np.dtype(np.float32)).dense(), np.eye(3))
