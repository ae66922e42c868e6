"""Blocks cover a run of columns once, are small, and run along the contiguous axis."""

import numpy as np
import pytest

from raymm.kernels.buffers import Buffer
from raymm.sources import open_source
from raymm.sources.blocks import read_blocks


class OtherSource:
    """A source of a kind that cannot be cut in both directions."""

    def __init__(self, array):
        self.array, self.operand = array, open_source(array, "C").operand

    def read(self, start, stop, buffer):
        return self.array[:, start:stop]


def covered(source, start, stop, nbytes, shape):
    found, blocks = np.full(shape, -1.0), []
    for row, column, values in read_blocks(source, start, stop, nbytes, Buffer()):
        rows, columns = values.shape
        target = found[row : row + rows, column : column + columns]
        assert (target == -1).all()
        target[...] = values
        blocks.append(values.shape)
    return found, blocks


@pytest.mark.parametrize("nbytes", [8, 40, 100, 10_000])
@pytest.mark.parametrize("storage", ["file", "array", "columns"])
@pytest.mark.parametrize("order", ["C", "F"])
def test_blocks_cover_the_columns_once(order, storage, nbytes, tmp_path):
    values = np.array(np.arange(17.0 * 23).reshape(17, 23), order=order)
    if storage == "file":
        np.save(tmp_path / "C.npy", values)
        source = open_source(tmp_path / "C.npy", "C")
    else:
        source = open_source(values if storage == "array" else np.repeat(values, 2, 1)[:, ::2], "C")
    found, blocks = covered(source, 4, 20, nbytes, values.shape)
    assert (found[:, 4:20] == values[:, 4:20]).all()
    assert (found[:, :4] == -1).all()
    assert (found[:, 20:] == -1).all()
    assert max(rows * columns * 8 for rows, columns in blocks) <= nbytes


def test_blocks_run_along_the_contiguous_axis():
    values = np.zeros((6, 8))
    assert covered(open_source(values, "C"), 0, 8, 128, (6, 8))[1] == [(2, 8)] * 3
    assert covered(open_source(np.asfortranarray(values), "C"), 0, 8, 96, (6, 8))[1] == [(6, 2)] * 4


def test_a_source_of_another_kind_comes_whole():
    values = np.arange(12.0).reshape(3, 4)
    found, blocks = covered(OtherSource(values), 1, 3, 8, (3, 4))
    assert (found[:, 1:3] == values[:, 1:3]).all()
    assert blocks == [(3, 2)]


def test_no_rows_no_blocks():
    assert list(read_blocks(open_source(np.empty((0, 5)), "C"), 0, 5, 100, Buffer())) == []
