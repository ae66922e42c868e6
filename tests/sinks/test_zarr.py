"""Zarr outputs, read back with zarr itself."""

import shutil

import numpy as np
import pytest
import zarr

import raymm
from raymm.errors import PlanError, SinkError
from raymm.sinks import Zarr
from raymm.sinks.zarr import shapes
from tests.contracts import FileSinkContract, names_in
from tests.doubles import make_spec


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "out").mkdir()
    return tmp_path / "out"


@pytest.fixture
def path(folder):
    return folder / "D.zarr"


class TestZarr(FileSinkContract):
    @pytest.fixture
    def sink(self, path):
        return lambda shape, dtype: Zarr(path)

    @pytest.fixture
    def read_back(self, path):
        def read(sink, result):
            assert result.path == str(path)
            assert names_in(path.parent) == ["D.zarr"]
            found = np.asarray(zarr.open_array(path, mode="r")[...])
            shutil.rmtree(path)
            return found

        return read

    def test_view_is_the_product_in_canonical_orientation(self, sink, path):
        values = np.random.default_rng(2).normal(size=(6, 8))
        one, spec = sink((6, 8), np.float64), self.spec((6, 8))
        one.open(spec, False)
        self.send(one, spec, values)
        np.testing.assert_array_equal(raymm.open(one.view().path)[...], values)
        one.abort()

    def test_the_name_of_a_folder(self, sink, path):
        path.mkdir()
        with pytest.raises(SinkError, match="exists"):
            sink((6, 8), np.float64).open(self.spec((6, 8)), False)


@pytest.mark.parametrize(
    ("left", "right"),
    [((7, 5), (5, 1003)), ((1003, 5), (5, 7)), ((5,), (5, 90)), ((5,), (5,)), ((9, 5), (5, 0))],
)
def test_opened_again_and_used_as_an_operand(path, left, right, local_engine):
    rng = np.random.default_rng(6)
    operands = [rng.integers(-8, 8, shape).astype(np.float64) for shape in (left, right)]
    expected = operands[0] @ operands[1]
    found = raymm.multi_dot(operands, out=path, engine=local_engine, verify=True)
    assert found.shape == expected.shape
    np.testing.assert_array_equal(np.asarray(found), expected)
    if expected.ndim == 2 and expected.size:
        np.testing.assert_array_equal(found[-1, ::-1], expected[-1, ::-1])
        again = raymm.multi_dot([expected.T, path], engine=local_engine)
        np.testing.assert_array_equal(again, expected.T @ expected)
        again = raymm.multi_dot([f"{path}.T", expected], engine=local_engine)
        np.testing.assert_array_equal(again, expected.T @ expected)


def test_a_tile_is_a_shard(path, local_engine):
    left, right = np.ones((64, 3), np.float32), np.ones((3, 40_000), np.float32)
    raymm.multi_dot([left, right], out=path, tile_columns=20_000, engine=local_engine)
    array = zarr.open_array(path, mode="r")
    assert array.shards == (64, 20_000)
    assert array.chunks == (64, 10_000)
    assert len([each for each in (path / "c").rglob("*") if each.is_file()]) == 2


@pytest.mark.parametrize("width", [1, 8191, 8192, 20_000, 104_729])
@pytest.mark.parametrize("rows", [1, 64, 3000])
def test_chunks_divide_shards(rows, width):
    spec = make_spec((rows, 10 * width), np.float32)
    grid = TestZarr().spec((rows, 10 * width), np.float32, tile_columns=width).grid
    shard, chunk = shapes(make_spec((rows, 10 * width), spec.dtype, grid=grid))
    assert chunk[0] == rows
    assert width % chunk[1] == 0
    assert (shard or chunk) == (rows, width)


def test_an_address_is_refused():
    with pytest.raises(PlanError, match="Parquet"):
        Zarr("s3://bucket/D.zarr")
