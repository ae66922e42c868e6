"""Results opened again, indexed as NumPy does."""

import numpy as np
import pytest

import raymm

SUFFIXES = ("parquet", "arrow", "zarr")
FACTORS = {
    "wide": ((5, 3), (3, 23)),
    "tall": ((23, 3), (3, 5)),
    "row": ((3,), (3, 23)),
    "column": ((23, 3), (3,)),
    "scalar": ((3,), (3,)),
}


@pytest.fixture(params=SUFFIXES)
def suffix(request):
    return request.param


def stored(folder, suffix, kind):
    random = np.random.default_rng(0)
    factors = [random.integers(-9, 9, shape).astype(np.float64) for shape in FACTORS[kind]]
    path = folder / f"{kind}.{suffix}"
    raymm.chain(factors).write(path, tile_columns=7, engine="local")
    return raymm.open(path), factors[0] @ factors[1]


@pytest.mark.parametrize("kind", ["row", "column"])
def test_a_stored_vector_is_sliced_as_one(tmp_path, suffix, kind):
    opened, expected = stored(tmp_path, suffix, kind)
    mask = np.arange(23) % 3 == 0
    parts = (
        2,
        -1,
        slice(3, 9),
        slice(None, None, -4),
        slice(5, 5),
        [1, -2],
        [[0, 1], [2, 2]],
        mask,
    )
    for part in parts:
        np.testing.assert_array_equal(opened[part], expected[part], strict=True)
        np.testing.assert_array_equal(opened.T[part], expected[part], strict=True)


def test_a_stored_scalar(tmp_path, suffix):
    opened, expected = stored(tmp_path, suffix, "scalar")
    assert opened[()] == opened[...] == expected
    with pytest.raises(IndexError, match="1 indices"):
        opened[0]


@pytest.mark.parametrize("kind", ["wide", "tall"])
def test_arrays_of_indices_pick_pairs_and_are_broadcast(tmp_path, suffix, kind):
    opened, expected = stored(tmp_path, suffix, kind)
    rows, columns = np.array([[4], [0], [-1]]), np.array([1, -2, 0, 0])
    np.testing.assert_array_equal(opened[rows, columns], expected[rows, columns], strict=True)
    np.testing.assert_array_equal(opened[rows, [3]], expected[rows, [3]], strict=True)
    np.testing.assert_array_equal(opened[[2], columns], expected[[2], columns], strict=True)
    with pytest.raises(IndexError, match="do not fit together"):
        opened[[0, 1, 2], [0, 1]]


def test_pairs_of_a_tall_result_read_rows_only_where_they_are(tmp_path, monkeypatch):
    opened, expected = stored(tmp_path, "parquet", "tall")
    read, pieces = [], type(opened._source.rows).pieces

    def watched(self, start, stop):
        for place, values in pieces(self, start, stop):
            read.append(len(values))
            yield place, values

    monkeypatch.setattr(type(opened._source.rows), "pieces", watched)
    np.testing.assert_array_equal(opened[[22, 3], [0, 4]], expected[[22, 3], [0, 4]])
    assert sum(read) < 23
