"""Cases from public reports about outputs, each named after its id."""

import errno
import os
import random
import subprocess
import time
from pathlib import Path

import fsspec
import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet as pq

import raymm
from raymm.errors import PlanError, ShapeError, SinkError, SinkExistsError
from raymm.events import TileFinished
from raymm.sinks import arrow_format, groups, npy
from raymm.tiles import PAGE_NBYTES
from tests.contracts import names_in
from tests.doubles import CountingCallback, NullSink, RaisingEngine, make_spec
from tests.measuring import PeakMemory, PidCallback


@pytest.mark.slow
def test_u38_output_with_more_than_2_to_31_elements(tmp_path, local_engine):
    length = 46341
    left = (np.arange(length) % 7 + 1).astype(np.uint8)[:, None]
    right = (np.arange(length) % 11 + 1).astype(np.uint8)[None, :]
    path = tmp_path / "D.npy"
    product = raymm.multi_dot(
        [left, np.ones((1, 1), np.uint8), right], out=path, dtype=np.uint8, engine=local_engine
    )
    assert product.shape == (length, length)
    assert product.size == 2147488281
    assert product.dtype == np.uint8
    assert (product[46340, 46340], product[46339, 46339], product[0, 0]) == (9, 56, 1)
    assert path.stat().st_size == PAGE_NBYTES + 2147488281
    for row in (0, 1, 23170, 46340):
        np.testing.assert_array_equal(product[row], left[row] * right[0])
    for column in (0, 46340):
        np.testing.assert_array_equal(product[:, column], left[:, 0] * right[0, column])
    path.unlink()


class WithNumpyShape:
    """An operand whose lengths are NumPy's integers."""

    shape = (np.int64(100), np.int64(100))

    def __array__(self, dtype=None, copy=None):
        return np.eye(100)


def test_u42_numpy_integers_in_the_npy_header(tmp_path, local_engine):
    raymm.multi_dot(
        [WithNumpyShape(), np.ones((100, 100))], out=tmp_path / "D.npy", engine=local_engine
    )
    sink = raymm.Npy(tmp_path / "E.npy")
    sink.open(make_spec((np.int64(100), np.int64(100))), False)
    sink.commit()
    for name in ("D.npy", "E.npy"):
        assert b"int64" not in (tmp_path / name).read_bytes()[:PAGE_NBYTES]
        for mode in (None, "r"):
            assert np.load(tmp_path / name, mmap_mode=mode).shape == (100, 100)


def warm_up(engine):
    """Have all workers loaded and everything imported; return their processes."""
    callback = PidCallback()
    while len(callback.pids) < engine.resources().workers:
        raymm.multi_dot(
            [np.ones((2, 2), np.float32), np.ones((2, 64), np.float32)],
            tile_columns=1,
            engine=engine,
            progress=callback,
        )
    return callback.pids


def test_u58_dirty_pages_look_like_a_leak(engine, tmp_path):
    rng = np.random.default_rng(0)
    operands = [
        rng.normal(size=(300, 16)).astype(np.float32),
        np.eye(16, dtype=np.float32),
        np.ones((16, 500_000), np.float32),
    ]
    pids = warm_up(engine)
    with PeakMemory(os.getpid(), *pids) as memory:
        product = raymm.multi_dot(
            operands,
            out=tmp_path / "D.npy",
            tile_columns=4096,
            memory_limit=200_000_000,
            engine=engine,
        )
    assert memory.growth < 200_000_000
    expected = operands[0].sum(axis=1)
    np.testing.assert_allclose(product[:, 499_999], expected, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(product[7, ::997], expected[7], rtol=1e-4, atol=1e-5)
    (tmp_path / "D.npy").unlink()


@pytest.mark.parametrize("written", ["cached", "direct"])
def test_u58_whatever_way_it_is_written(tmp_path, local_engine, written, monkeypatch):
    monkeypatch.setattr(npy, "DIRECT_NBYTES", 0 if written == "direct" else 2**62)
    operands = [np.ones((300, 4), np.float32), np.ones((4, 200_000), np.float32)]
    for order in ("C", "F"):
        warm_up(local_engine)
        with PeakMemory() as memory:
            raymm.multi_dot(
                operands,
                out=raymm.Npy(tmp_path / "D.npy", order=order),
                memory_limit=50_000_000,
                engine=local_engine,
                overwrite=True,
            )
        assert memory.growth < 50_000_000


class TestU61KindsOfPathAndSuffixes:
    @pytest.fixture(autouse=True)
    def here(self, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        monkeypatch.setenv("HOME", str(tmp_path))

    @pytest.mark.parametrize("kind", ["str", "Path", "bytes", "home", "address", "sink"])
    def test_u61_local_forms(self, tmp_path, local_engine, kind):
        out, name = {
            "str": ("x.npy", "x.npy"),
            "Path": (Path("x.npy"), "x.npy"),
            "bytes": (b"x.npy", "x.npy"),
            "home": ("~/x.npy", "x.npy"),
            "address": (f"file://{tmp_path}/x.npy", "x.npy"),
            "sink": (raymm.Npy("foo.dat"), "foo.dat"),
        }[kind]
        product = raymm.multi_dot([np.eye(2), np.ones((2, 3))], out=out, engine=local_engine)
        np.testing.assert_array_equal(product, np.ones((2, 3)))
        assert set(names_in(tmp_path)) - {f"{name}.raymm"} == {name}
        np.testing.assert_array_equal(np.load(tmp_path / name), np.ones((2, 3)))

    @pytest.mark.parametrize("out", ["s3://b/x.npy", "memory://x.npy", "gs://b/deep/x.npy"])
    def test_u61_remote_npy_is_refused(self, tmp_path, out):
        for spelled in (out, out.encode()):
            with pytest.raises(PlanError, match=r"local path.*Parquet works remotely"):
                raymm.multi_dot([np.eye(2), np.ones((2, 3))], out=spelled, engine=RaisingEngine())
        with pytest.raises(PlanError):
            raymm.Npy(out)
        assert names_in(tmp_path) == []

    def test_u61_existing_file(self, tmp_path, local_engine):
        (tmp_path / "x.npy").write_bytes(b"precious")
        with pytest.raises(SinkExistsError, match="overwrite=True") as caught:
            raymm.multi_dot([np.eye(2), np.ones((2, 3))], out="x.npy", engine=RaisingEngine())
        assert isinstance(caught.value, FileExistsError)
        assert caught.value.errno == errno.EEXIST
        assert (tmp_path / "x.npy").read_bytes() == b"precious"
        assert names_in(tmp_path) == ["x.npy"]
        raymm.multi_dot(
            [np.eye(2), np.ones((2, 3))], out="x.npy", overwrite=True, engine=local_engine
        )
        np.testing.assert_array_equal(np.load("x.npy"), np.ones((2, 3)))


class TestU60FullDiskBecomesSigbus:
    @pytest.mark.parametrize("query", ["fallocate", "free space"])
    def test_u60_patched(self, tmp_path, monkeypatch, query):
        def full(*_):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        if query == "fallocate":
            monkeypatch.setattr(os, "posix_fallocate", full)
        else:
            fields = list(os.statvfs(tmp_path))
            fields[4] = 0  # f_bavail: what this user may take
            monkeypatch.setattr(os, "statvfs", lambda path: os.statvfs_result(fields))
        callback = CountingCallback()
        operands = [np.ones((1000, 4), np.float32), np.ones((4, 25_000), np.float32)]
        with pytest.raises(SinkError) as caught:
            raymm.multi_dot(
                operands, out=tmp_path / "D.npy", engine=RaisingEngine(), progress=callback
            )
        assert isinstance(caught.value, OSError)
        assert caught.value.errno == errno.ENOSPC
        for part in (str(tmp_path / "D.npy"), "100,004,096", "100 MB", "free"):
            assert part in str(caught.value)
        assert callback.events == []
        assert names_in(tmp_path) == []

    @pytest.mark.slow
    @pytest.mark.skipif(os.geteuid() != 0, reason="mounting needs root")
    def test_u60_on_a_small_tmpfs(self, tmp_path, run_python, monkeypatch):
        mount = tmp_path / "small"
        mount.mkdir()
        found = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", mount], capture_output=True
        )
        if found.returncode:
            pytest.skip("mounting is not allowed here")
        try:
            # In a process of its own: a SIGBUS would end this one.
            printed = run_python(
                "import os, sys, tempfile, numpy as np, raymm\n"
                "temporary = set(os.listdir(tempfile.gettempdir()))\n"
                "operands = [np.ones((1000, 4), 'f4'), np.ones((4, 25_000), 'f4')]\n"
                "try:\n"
                "    raymm.multi_dot(operands, out=sys.argv[1] + '/D.npy', engine='local')\n"
                "except raymm.SinkError as error:\n"
                "    print(error.errno, error)\n"
                "small = [np.ones((1000, 4), 'f4'), np.ones((4, 2_500), 'f4')]\n"
                "raymm.multi_dot(small, out=sys.argv[1] + '/E.npy', engine='local')\n"
                "assert set(os.listdir(tempfile.gettempdir())) <= temporary\n",
                mount,
            )
            assert printed.startswith("28 ")
            for part in (f"{mount}/D.npy", "100,004,096", "67,108,864"):
                assert part in printed
            assert names_in(mount) == ["E.npy"]
        finally:
            subprocess.run(["umount", mount], check=True)


def test_u70_slices_fine_collecting_them_not(engine, tmp_path):
    rng = np.random.default_rng(0)
    operands = [
        rng.normal(size=(4000, 16)).astype(np.float16),
        np.eye(16, dtype=np.float16),
        rng.normal(size=(16, 40_000)).astype(np.float16),
    ]
    pids = warm_up(engine)
    callback = CountingCallback()
    with PeakMemory(os.getpid(), *pids) as memory:
        product = raymm.multi_dot(
            operands,
            out=tmp_path / "D.npy",
            tile_columns=500,
            memory_limit=150_000_000,
            engine=engine,
            progress=callback,
        )
    assert memory.growth < 150_000_000
    assert len(callback.of(TileFinished)) == 80
    assert product.dtype == np.float16
    rows, columns = rng.integers(4000, size=100), rng.integers(40_000, size=100)
    left, right = operands[0].astype(np.float32), operands[2].astype(np.float32)
    exact = (left[rows] * right.T[columns]).sum(axis=1)
    step = np.spacing(np.abs(exact.astype(np.float16)))
    assert (np.abs(product[rows, columns].astype(np.float32) - exact) <= step).all()
    (tmp_path / "D.npy").unlink()


def table_of(path):
    if path.is_dir():
        return pa.concat_tables(pq.read_table(part) for part in sorted(path.iterdir()))
    return pa.ipc.open_file(path).read_all()


def values_of(table):
    flat = table["D"].combine_chunks().flatten().to_numpy(zero_copy_only=False)
    return flat.reshape(table.num_rows, -1)


@pytest.mark.parametrize("suffix", ["npy", "parquet", "arrow"])
def test_u31_zero_length_inner_dimension_in_files(tmp_path, local_engine, suffix):
    path = tmp_path / f"D.{suffix}"
    for operands, shape in [
        ([np.zeros((4, 0)), np.zeros((0, 0)), np.zeros((0, 4))], (4, 4)),
        ([np.zeros((4, 0)), np.zeros((0, 5)), np.ones((5, 7))], (4, 7)),
    ]:
        found = raymm.multi_dot(operands, out=path, overwrite=True, engine=local_engine)
        np.testing.assert_array_equal(np.asarray(found), np.zeros(shape), strict=True)


class TestU32ZeroRowsZeroColumns:
    rows = (np.zeros((0, 3)), np.eye(3), np.ones((3, 5)))
    columns = (np.ones((3, 3)), np.eye(3), np.zeros((3, 0)))

    @pytest.mark.parametrize("suffix", ["parquet", "arrow"])
    def test_u32_zero_columns_in_tables(self, tmp_path, local_engine, suffix):
        path = tmp_path / f"D.{suffix}"
        found = raymm.multi_dot(self.columns, out=path, engine=local_engine)
        assert found.shape == (3, 0)
        table = table_of(path)
        assert table.num_rows == 0
        assert table.schema.names == ["index", "D"]
        assert table.schema.field("index").type == pa.int64()
        assert table.schema.field("D").type.list_size == 3

    def test_u32_zero_rows_in_arrow(self, tmp_path, local_engine):
        found = raymm.multi_dot(self.rows, out=tmp_path / "D.arrow", engine=local_engine)
        assert found.shape == np.asarray(found).shape == (0, 5)
        table = table_of(tmp_path / "D.arrow")
        assert table.num_rows == 5
        assert table.schema.field("D").type.list_size == 0

    @pytest.mark.parametrize("compression", [None, "zstd"])
    def test_u32_zero_rows_in_parquet(self, tmp_path, compression):
        sink = raymm.Parquet(tmp_path / "D.parquet", compression=compression)
        with pytest.raises(ShapeError, match="no values"):
            raymm.multi_dot(self.rows, out=sink, engine=RaisingEngine())
        assert names_in(tmp_path) == []


def test_u42_sizes_from_row_counts(tmp_path, local_engine):
    vectors = pa.FixedSizeListArray.from_arrays(pa.array(np.ones(100 * 100)), 100)
    pq.write_table(pa.table({"C": vectors}), tmp_path / "C.parquet")
    found = raymm.multi_dot(
        [tmp_path / "C.parquet", np.eye(100)], out=tmp_path / "D.npy", engine=local_engine
    )
    assert found.shape == (100, 100)
    assert b"int64" not in (tmp_path / "D.npy").read_bytes()[:PAGE_NBYTES]
    np.testing.assert_array_equal(np.load(tmp_path / "D.npy", mmap_mode="r"), np.ones((100, 100)))


@pytest.mark.parametrize("suffix", ["arrow", "parquet"])
def test_u43_arrow_list_offsets_overflow(tmp_path, local_engine, suffix, monkeypatch):
    monkeypatch.setattr(arrow_format, "MOST_ELEMENTS", 1000)
    monkeypatch.setattr(groups, "GROUP_NBYTES", 4000)
    left = np.arange(30.0, dtype=np.float32)[:, None]
    right = np.arange(200.0, dtype=np.float32)[None, :]
    path = tmp_path / f"D.{suffix}"
    raymm.multi_dot([left, right], out=path, engine=local_engine)
    if suffix == "arrow":
        reader = pa.ipc.open_file(path)
        rows = [reader.get_batch(place).num_rows for place in range(reader.num_record_batches)]
    else:
        metadata = [pq.read_metadata(part) for part in sorted(path.iterdir())]
        rows = [
            each.row_group(place).num_rows
            for each in metadata
            for place in range(each.num_row_groups)
        ]
    assert max(rows) <= 33
    table = table_of(path)
    assert pa.types.is_fixed_size_list(table.schema.field("D").type)
    np.testing.assert_array_equal(values_of(table), (left @ right).T)


def test_u43_chunks_of_a_table_are_never_joined(local_engine, monkeypatch):
    chunk = pa.FixedSizeListArray.from_arrays(pa.array(np.arange(3000.0)), 30)
    table = pa.table({"C": pa.chunked_array([chunk] * 20)})
    for name in ("combine_chunks", "concat_arrays", "concat_tables"):
        if hasattr(pa, name):
            monkeypatch.setattr(pa, name, None)
    before = pa.total_allocated_bytes()
    found = raymm.multi_dot([table, np.eye(30)], engine=local_engine)
    assert pa.total_allocated_bytes() - before < 3000 * 8 * 20
    np.testing.assert_array_equal(found, np.tile(np.arange(3000.0).reshape(100, 30), (20, 1)))


def test_u61_an_address_is_a_parquet_dataset(local_engine):
    found = raymm.multi_dot([np.eye(2), np.ones((2, 3))], out="memory://u61", engine=local_engine)
    np.testing.assert_array_equal(np.asarray(found), np.ones((2, 3)))
    filesystem = fsspec.filesystem("memory")
    assert [path for path in filesystem.find("/u61") if path.endswith(".parquet")]
    filesystem.rm("/u61", recursive=True)


class Straggling(NullSink):
    """Makes blocks end out of order."""

    def write(self, block):
        time.sleep(random.random() * 0.002)


@pytest.mark.ray
def test_u62_unaligned_parallel_writes_lose_nothing(tmp_path, ray_engine):
    rng = np.random.default_rng(62)
    left = rng.integers(-8, 8, (8, 6)).astype(np.float32)
    right = rng.integers(-8, 8, (6, 512)).astype(np.float32)
    expected = left @ right
    for _ in range(20):
        sinks = [tmp_path / f"D.{suffix}" for suffix in ("npy", "parquet", "arrow", "zarr")]
        found = raymm.chain([left, right]).run(
            *sinks, Straggling(), tile_columns=110, overwrite=True, engine=ray_engine
        )
        for each in found[:4]:
            np.testing.assert_array_equal(np.asarray(each), expected)
        for path in sinks[1:3]:
            table = table_of(path)
            np.testing.assert_array_equal(table["index"].to_numpy(), np.arange(512))
    # No two tiles share a file, a row group or a record batch.
    assert [pq.read_metadata(part).num_rows for part in sorted(sinks[1].iterdir())] == [
        110, 110, 110, 110, 72,
    ]  # fmt: skip
    reader = pa.ipc.open_file(sinks[2])
    assert reader.num_record_batches == 5


@pytest.mark.parametrize("compression", [None, "none"])
def test_u67_oversized_row_groups(tmp_path, local_engine, compression):
    left = np.arange(3000, dtype=np.float32)[:, None]
    right = np.arange(20_000, dtype=np.float32)[None, :]
    path = tmp_path / "D.parquet"
    sink = raymm.Parquet(path, compression=compression)
    raymm.multi_dot([left, right], out=sink, engine=local_engine)
    seen = 0
    for part in sorted(path.iterdir()):
        file = pq.ParquetFile(part)
        for place in range(file.num_row_groups):
            group = file.metadata.row_group(place)
            assert group.total_byte_size <= 2**27
            assert all(group.column(each).total_uncompressed_size < 2**31 for each in range(2))
            table = file.read_row_group(place)
            values = values_of(table)
            columns = np.arange(seen, seen + len(values), dtype=np.float32)
            np.testing.assert_array_equal(values, columns[:, None] * left[:, 0])
            seen += len(values)
        file.close()
        part.unlink()
    assert seen == 20_000
