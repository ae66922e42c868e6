import os
import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import raymm
from raymm.errors import DTypeError, PlanError, SourceError
from raymm.kernels.buffers import Buffer
from raymm.sources import open_source
from raymm.sources.files import FileSource, from_memmap
from raymm.sources.memory import ArraySource
from tests.contracts import FileSourceContract
from tests.sources.test_memory import slices


class TestNpy(FileSourceContract):
    @pytest.fixture(params=["C", "F", "turned", "version 2"])
    def source(self, request, tmp_path):
        def make(values):
            path = tmp_path / "C.npy"
            if request.param == "turned":
                np.save(path, np.ascontiguousarray(values.T))
                return open_source(f"{path}.T", "C")
            array = np.asarray(values, order="F" if request.param == "F" else "C")
            if request.param == "version 2":
                with path.open("wb") as file:
                    np.lib.format.write_array(file, array, version=(2, 0))
            else:
                np.save(path, array)
            return open_source(path, "C")

        return make


class TestMemmap(FileSourceContract):
    @pytest.fixture(params=["whole", "offset", "strided", "negative", "as array"])
    def source(self, request, tmp_path):
        def make(values):
            return open_source(MAPS[request.param](values, tmp_path / "C.npy"), "C")

        return make


def mapped(values, path):
    np.save(path, values)
    return np.load(path, mmap_mode="r")


def mapped_at_an_offset(values, path):
    path.write_bytes(b"x" * 4099 + values.tobytes())
    return np.memmap(path, values.dtype, "r", 4099, values.shape)


MAPS = {
    "whole": mapped,
    "offset": mapped_at_an_offset,
    "strided": lambda values, path: mapped(np.repeat(values, 3, axis=-1), path)[..., ::3],
    "negative": lambda values, path: mapped(np.flip(values), path)[
        (slice(None, None, -1),) * values.ndim
    ],
    "as array": lambda values, path: np.asarray(mapped(values, path)),
}


@pytest.fixture
def wide(tmp_path):
    values = np.arange(20 * 30.0).reshape(20, 30)
    np.save(tmp_path / "wide.npy", values)
    return values, np.load(tmp_path / "wide.npy", mmap_mode="r")


@given(st.data())
def test_any_view_of_a_map_reads_as_itself(tmp_path_factory, data):
    path = tmp_path_factory.getbasetemp() / "views.npy"
    values = np.arange(6 * 8.0).reshape(6, 8)
    if not path.exists():
        np.save(path, values)
    whole = np.load(path, mmap_mode="r")
    rows, columns = data.draw(slices(6)), data.draw(slices(8))
    is_turned = data.draw(st.booleans())
    view, expected = whole[rows, columns], values[rows, columns]
    if is_turned:
        view, expected = view.T, expected.T
    start = data.draw(st.integers(0, view.shape[1]))
    stop = data.draw(st.integers(start, view.shape[1]))
    source = open_source(view, "C")
    np.testing.assert_array_equal(source.read(start, stop, Buffer()), expected[:, start:stop])
    if view.size:
        assert isinstance(source, FileSource)
        assert len(pickle.dumps(source)) < 10_000


def test_views_with_equal_neighbours(wide):
    values, whole = wide
    spread = np.lib.stride_tricks.as_strided(whole, (4, 30), (0, 8))
    read = open_source(spread, "C").read(3, 9, Buffer())
    np.testing.assert_array_equal(read, np.broadcast_to(values[0, 3:9], (4, 6)))
    windows = np.lib.stride_tricks.as_strided(whole, (5, 4), (8, 8))
    read = open_source(windows, "C").read(1, 4, Buffer())
    np.testing.assert_array_equal(read, np.add.outer(np.arange(5.0), np.arange(1.0, 4)))


def test_copy_on_write_maps_stay_arrays(wide, tmp_path):
    changed = np.load(tmp_path / "wide.npy", mmap_mode="c")
    changed[0, 0] = -1
    source = open_source(changed, "C")
    assert isinstance(source, ArraySource)
    assert source.load()[0, 0] == -1


def test_writes_through_a_map_are_seen(wide, tmp_path):
    changed = np.load(tmp_path / "wide.npy", mmap_mode="r+")
    changed[1, 2] = -7
    assert open_source(changed, "C").read(2, 3, Buffer())[1, 0] == -7


def test_maps_of_a_deleted_file_stay_arrays(wide, tmp_path):
    values, whole = wide
    (tmp_path / "wide.npy").unlink()
    source = open_source(whole, "C")
    assert isinstance(source, ArraySource)
    np.testing.assert_array_equal(source.load(), values)


def test_maps_of_a_file_that_was_replaced_keep_their_values(wide, tmp_path):
    # Writing D.npy again with overwrite=True does this to the map that the first run returned.
    values, whole = wide
    np.save(tmp_path / "new.npy", -values)
    (tmp_path / "new.npy").replace(tmp_path / "wide.npy")
    np.testing.assert_array_equal(open_source(whole, "C").load(), values)


def test_copies_of_maps_are_arrays(wide):
    values, whole = wide
    for copied in (np.array(whole), whole + 0, whole.copy()):
        source = open_source(copied, "C")
        assert isinstance(source, ArraySource)
        np.testing.assert_array_equal(source.load(), values)


def test_arrays_are_no_maps():
    assert from_memmap(np.ones((2, 2)), "C") is None
    assert from_memmap(np.frombuffer(b"12345678", np.uint8).reshape(2, 4), "C") is None


@pytest.mark.parametrize("dtype", [">f8", ">i2", "?", "<f2", "<c8"])
def test_dtypes_of_files(tmp_path, dtype):
    values = np.arange(6).reshape(2, 3).astype(dtype)
    np.save(tmp_path / "C.npy", values)
    source = open_source(tmp_path / "C.npy", "C")
    assert source.operand.dtype == np.dtype(dtype)
    np.testing.assert_array_equal(source.read(1, 3, Buffer()), values[:, 1:])


@pytest.mark.parametrize("spelled", ["str", "bytes", "path", "address", "home", "relative"])
def test_spellings_of_a_path(tmp_path, monkeypatch, spelled):
    np.save(tmp_path / "C.npy", np.eye(3))
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    path = {
        "str": str(tmp_path / "C.npy"),
        "bytes": os.fsencode(tmp_path / "C.npy"),
        "path": tmp_path / "C.npy",
        "address": f"file://{tmp_path}/C.npy",
        "home": "~/C.npy",
        "relative": "C.npy",
    }[spelled]
    source = open_source(path, "C")
    monkeypatch.chdir("/")  # a description must not depend on where the worker runs
    np.testing.assert_array_equal(source.load(), np.eye(3))


def test_a_file_whose_name_ends_in_t_is_that_file(tmp_path):
    np.save(tmp_path / "C.npy", np.ones((2, 3)))
    (tmp_path / "C.npy").rename(tmp_path / "x.T")
    with pytest.raises(PlanError, match=r"does not end in \.npy"):
        open_source(tmp_path / "x.T", "C")


def test_the_name_in_messages_is_the_path(tmp_path):
    np.save(tmp_path / "C.npy", np.ones((2, 3)))
    assert open_source(tmp_path / "C.npy", "C").operand.name == str(tmp_path / "C.npy")


def test_missing_file(tmp_path):
    with pytest.raises(SourceError, match=r"missing\.npy") as caught:
        open_source(tmp_path / "missing.npy", "C")
    assert caught.value.errno == 2


def test_folders_and_other_kinds(tmp_path):
    with pytest.raises(SourceError, match="no Parquet or Arrow"):
        open_source(tmp_path, "C")
    (tmp_path / "C.csv").write_text("1,2")
    with pytest.raises(PlanError, match=r"does not end in \.npy"):
        open_source(tmp_path / "C.csv", "C")
    with pytest.raises(PlanError, match="from a local path only"):
        open_source("s3://bucket/C.npy", "C")


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\x93NUM",
        b"not a npy file at all",
        b"\x93NUMPY\x01\x00\x10\x00{'descr': oh no",
        b"PK\x03\x04",
    ],
    ids=["empty", "short", "text", "header", "zip"],
)
def test_files_that_are_not_npy(tmp_path, content):
    (tmp_path / "C.npy").write_bytes(content)
    with pytest.raises(SourceError, match=r"C\.npy"):
        open_source(tmp_path / "C.npy", "C")


def test_pickles_are_never_loaded(tmp_path):
    np.save(tmp_path / "C.npy", np.array([[{"a": 1}]]), allow_pickle=True)
    with pytest.raises(DTypeError, match="object"):
        open_source(tmp_path / "C.npy", "C")


def test_a_file_that_is_shorter_than_its_header_says(tmp_path):
    path = tmp_path / "C.npy"
    np.save(path, np.ones((10, 100)))
    size = path.stat().st_size
    os.truncate(path, size - 8)
    with pytest.raises(SourceError, match=f"{size:,} bytes.*{size - 8:,}"):
        open_source(path, "C")


@pytest.mark.parametrize("view", ["whole", "strided"])
def test_a_file_that_is_cut_short_while_it_is_used(tmp_path, view):
    path = tmp_path / "C.npy"
    np.save(path, np.ones((10, 100)))
    array = np.load(path, mmap_mode="r")
    source = open_source(array if view == "whole" else array[:, ::2], "C")
    os.truncate(path, 1000)
    with pytest.raises(SourceError, match=r"cut short.*1,000"):
        source.read(0, 20, Buffer())


def test_a_file_that_disappears(tmp_path):
    np.save(tmp_path / "C.npy", np.ones((10, 100)))
    source = open_source(tmp_path / "C.npy", "C")
    (tmp_path / "C.npy").unlink()
    with pytest.raises(SourceError, match=r"C\.npy") as caught:
        source.read(0, 5, Buffer())
    assert caught.value.errno == 2


def test_tiles_are_read_into_the_buffer_of_the_worker(tmp_path):
    np.save(tmp_path / "C.npy", np.arange(40.0).reshape(4, 10))
    source, buffer = open_source(tmp_path / "C.npy", "C"), Buffer()
    first = source.read(0, 5, buffer)
    second = source.read(5, 10, buffer)
    assert np.shares_memory(first, second)


class TestReadVolume:
    """Every byte of C is read once, in runs as long as a tile is wide."""

    @pytest.fixture
    def preads(self, monkeypatch):
        calls, plain = [], os.preadv

        def counted(file, buffers, offset):
            got = plain(file, buffers, offset)
            calls.append(got)
            return got

        monkeypatch.setattr(os, "preadv", counted)
        return calls

    @pytest.mark.parametrize("tile_columns", [None, 8192])
    @pytest.mark.parametrize("shape", ["wide", "tall"])
    def test_of_a_wide_and_a_tall_file(self, tmp_path, preads, shape, tile_columns, local_engine):
        values = np.arange(10 * 100_000, dtype=np.float32).reshape(10, 100_000) % 7
        path = tmp_path / "C.npy"
        np.save(path, values if shape == "wide" else np.ascontiguousarray(values.T))
        operand = path if shape == "wide" else f"{path}.T"
        factor = np.ones((4, 10), np.float32)
        product = raymm.chain([factor, operand]).compute(
            engine=local_engine, tile_columns=tile_columns
        )
        np.testing.assert_array_equal(product, factor @ values)
        assert values.nbytes <= sum(preads) <= 1.2 * values.nbytes
        assert np.median(preads) >= 32 * 1024  # all but the last tile's, which may be short


def test_a_pipe_is_no_operand(tmp_path):
    os.mkfifo(tmp_path / "f.npy")
    with pytest.raises(SourceError, match="not a regular file"):
        raymm.chain([tmp_path / "f.npy", np.eye(2)])
