import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from raymm.kernels.buffers import Buffer
from raymm.tiles import PAGE_NBYTES


def address(array):
    return array.__array_interface__["data"][0]


@given(
    rows=st.integers(1, 9),
    columns=st.integers(1, 5000),
    dtype=st.sampled_from(["f2", "f4", "f8", "c16", "u1"]),
    position=st.integers(0, 10**7),
    slack=st.integers(0, 10**5),
)
def test_every_row_is_congruent_with_the_output(rows, columns, dtype, position, slack):
    dtype = np.dtype(dtype)
    pitch = (columns + slack) * dtype.itemsize
    array = Buffer().array((rows, columns), dtype, position, pitch)
    assert array.shape == (rows, columns)
    assert array.strides[1] == dtype.itemsize
    for row in range(rows):
        assert (address(array[row:]) - (position + row * pitch)) % PAGE_NBYTES == 0
    array[...] = 1  # the memory is there, and writable
    assert (array == 1).all()


def test_rows_that_fill_the_pitch_are_contiguous():
    array = Buffer().array((3, 10), np.dtype("f8"), 48, 80)
    assert array.flags.c_contiguous


def test_rows_do_not_overlap():
    array = Buffer().array((50, 33), np.dtype("f4"), 12, 33 * 4 + 4096 * 7 + 8)
    array[...] = np.arange(50)[:, None]
    np.testing.assert_array_equal(array, np.broadcast_to(np.arange(50)[:, None], (50, 33)))


def test_memory_is_used_again():
    buffer = Buffer()
    first = buffer.array((100, 100), np.dtype("f8"))
    second = buffer.array((50, 10), np.dtype("f4"))
    assert address(first) == address(second)
    assert np.shares_memory(first, second)


def test_growing_gives_memory_of_the_new_size():
    buffer = Buffer()
    buffer.array((2, 2), np.dtype("f8"))[...] = 1
    grown = buffer.array((600, 1000), np.dtype("f8"))
    grown[...] = 2
    assert (grown == 2).all()


@pytest.mark.parametrize("shape", [(0, 5), (5, 0), (0, 0)])
def test_empty_arrays(shape):
    assert Buffer().array(shape, np.dtype("f8"), 4097, 5 * 8).shape == shape
