import errno
import fcntl
import os
import pickle

import numpy as np
import pytest

import raymm
from raymm.errors import SinkError
from raymm.sinks import Npy, npy, partial, runs
from raymm.sinks.npy import npy_header
from raymm.tiles import PAGE_NBYTES
from tests.contracts import FileSinkContract, names_in
from tests.doubles import make_spec


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "out").mkdir()
    return tmp_path / "out"


@pytest.fixture
def path(folder):
    return folder / "D.npy"


@pytest.fixture(params=["cached", "direct"])
def writing(request, monkeypatch):
    """Both ways to write: through the page cache, and past it wherever a run allows."""
    if request.param == "direct":
        monkeypatch.setattr(npy, "DIRECT_NBYTES", 0)
        monkeypatch.setattr(runs, "SMALLEST_DIRECT_RUN", PAGE_NBYTES)
    return request.param


class TestNpy(FileSinkContract):
    @pytest.fixture(params=["C", "F"])
    def sink(self, request, path, writing):
        def make(shape, dtype):
            self.order = request.param
            return Npy(path, order=request.param)

        return make

    @pytest.fixture
    def read_back(self, path):
        def read(sink, result):
            assert isinstance(result, np.memmap)
            assert not result.flags.writeable
            np.testing.assert_array_equal(result, np.load(path))
            if result.ndim == 2 and min(result.shape) > 1:
                assert result.flags[f"{self.order}_CONTIGUOUS"]
            assert names_in(path.parent) == ["D.npy"]
            path.unlink()
            return np.array(result)

        return read


# Widths whose rows begin on a page, near one, and nowhere near; and fewer than a page.
WIDTHS = [1024, 2048, 1025, 1023, 3001, 7, 700]


@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("columns", WIDTHS)
def test_unaligned_widths(path, writing, order, columns, local_engine):
    rng = np.random.default_rng(columns)
    left = rng.integers(-8, 8, (13, 5)).astype(np.float32)
    right = rng.integers(-8, 8, (5, columns)).astype(np.float32)
    for place, tile_columns in enumerate([None, 1, 500, 1024, 1025]):
        if tile_columns == 1 and columns > 1000:
            continue
        out = path.with_name(f"{place}.npy")
        raymm.multi_dot(
            [left, right], out=Npy(out, order=order), tile_columns=tile_columns, engine=local_engine
        )
        np.testing.assert_array_equal(np.load(out), left @ right)


@pytest.mark.parametrize("dtype", [np.float16, np.float64, np.complex128, np.uint8])
@pytest.mark.parametrize("order", ["C", "F"])
def test_unaligned_widths_of_other_dtypes(path, writing, order, dtype, local_engine):
    rng = np.random.default_rng(1)
    left = rng.integers(0, 4, (9, 3)).astype(dtype)
    right = rng.integers(0, 4, (3, 4999)).astype(dtype)
    raymm.multi_dot(
        [left, right],
        out=Npy(path, order=order),
        dtype=dtype,
        tile_columns=1111,
        engine=local_engine,
    )
    np.testing.assert_array_equal(np.load(path), left @ right)


@pytest.mark.parametrize("order", ["C", "F"])
def test_a_tall_result(path, writing, order, local_engine):
    rng = np.random.default_rng(2)
    left = rng.integers(-8, 8, (5003, 6)).astype(np.float32)
    right = rng.integers(-8, 8, (6, 11)).astype(np.float32)
    raymm.multi_dot(
        [left, right], out=Npy(path, order=order), tile_columns=900, engine=local_engine
    )
    np.testing.assert_array_equal(np.load(path), left @ right)


def test_blocks_narrower_than_a_page_in_every_row(path, writing, local_engine):
    # Each row's pages are shared by several tiles, none of which holds a whole one.
    right = np.arange(3 * 2500.0).reshape(3, 2500)
    raymm.multi_dot([np.eye(3), right], out=path, tile_columns=100, engine=local_engine)
    np.testing.assert_array_equal(np.load(path), right)


@pytest.mark.parametrize("first", ["C", "F"])
def test_two_files_in_one_pass(path, writing, first, local_engine):
    rng = np.random.default_rng(3)
    left = rng.integers(-8, 8, (13, 5)).astype(np.float32)
    right = rng.integers(-8, 8, (5, 3001)).astype(np.float32)
    second = "F" if first == "C" else "C"
    sinks = [Npy(path, order=first), Npy(path.with_name("E.npy"), order=second), raymm.Array()]
    results = raymm.chain([left, right]).run(*sinks, tile_columns=1000, engine=local_engine)
    for result in results:
        np.testing.assert_array_equal(result, left @ right)


def test_an_array_and_a_file_in_one_pass(path, writing, local_engine):
    right = np.arange(3 * 2500.0).reshape(3, 2500)
    memory, file = raymm.chain([np.eye(3), right]).run(
        raymm.Array(), path, tile_columns=700, engine=local_engine
    )
    np.testing.assert_array_equal(memory, right)
    np.testing.assert_array_equal(file, right)


def test_header_is_read_by_numpy_and_holds_plain_integers(tmp_path):
    for shape in [(), (3,), (np.int64(100), np.int64(100)), (10**12, 3)]:
        header = npy_header(shape, np.dtype("<f4"), False)
        assert len(header) == PAGE_NBYTES
        assert b"int64" not in header
        (tmp_path / "header").write_bytes(header)
        with (tmp_path / "header").open("rb") as file:
            assert np.lib.format.read_magic(file) == (1, 0)
            found, is_fortran, dtype = np.lib.format.read_array_header_1_0(file)
            assert file.tell() == PAGE_NBYTES
        assert (found, is_fortran, dtype) == (tuple(map(int, shape)), False, np.float32)


def test_order_of_neither_kind(path):
    with pytest.raises(ValueError, match='"C" or "F"'):
        Npy(path, order="K")


def test_file_size_is_header_and_values(path, local_engine):
    raymm.multi_dot([np.ones((7, 2)), np.ones((2, 5))], out=path, engine=local_engine)
    assert path.stat().st_size == PAGE_NBYTES + 7 * 5 * 8


class TestFullDisk:
    @pytest.fixture(params=["free space", "reservation", "quota"])
    def full(self, request, monkeypatch):
        if request.param == "free space":
            monkeypatch.setattr(partial, "free_nbytes", lambda path: 1000)
            return errno.ENOSPC
        number = errno.ENOSPC if request.param == "reservation" else errno.EDQUOT

        def refuse(*_):
            raise OSError(number, os.strerror(number))

        monkeypatch.setattr(os, "posix_fallocate", refuse)
        return number

    def test_nothing_is_left(self, path, full):
        spec = make_spec((100, 100))
        with pytest.raises(SinkError, match=r"D\.npy needs 84,096 bytes") as caught:
            Npy(path).open(spec, False)
        assert caught.value.errno == errno.ENOSPC
        assert "free" in str(caught.value)
        assert names_in(path.parent) == []

    def test_the_old_file_stays(self, path, full):
        path.write_bytes(b"old" * 40_000)
        with pytest.raises(SinkError, match="delete it"):
            Npy(path).open(make_spec((100, 100)), True)
        assert path.read_bytes() == b"old" * 40_000
        assert names_in(path.parent) == ["D.npy"]


def test_an_error_while_writing_keeps_its_number(path, monkeypatch, local_engine):
    def refuse(*_):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    chain = raymm.chain([np.eye(3), np.ones((3, 5))])
    header, plain = [], os.pwrite

    def pwrite(file, data, position):
        if position == 0:
            header.append(position)
            return plain(file, data, position)
        return refuse()

    monkeypatch.setattr(os, "pwrite", pwrite)
    with pytest.raises(SinkError, match=r"D\.npy could not be written") as caught:
        chain.write(path, engine=local_engine)
    assert caught.value.errno == errno.EIO
    assert names_in(path.parent) == []


def test_an_error_while_syncing_is_an_error(path, monkeypatch, local_engine):
    def refuse(file):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "fdatasync", refuse)
    monkeypatch.setattr(os, "fsync", refuse)
    with pytest.raises(SinkError) as caught:
        raymm.multi_dot([np.eye(3), np.ones((3, 5))], out=path, engine=local_engine)
    assert caught.value.errno == errno.EIO
    assert names_in(path.parent) == []


def test_short_writes_are_continued(path, writing, monkeypatch, local_engine):
    plain = os.pwrite
    monkeypatch.setattr(
        os, "pwrite", lambda file, data, position: plain(file, data[:PAGE_NBYTES], position)
    )
    right = np.arange(3 * 3001.0).reshape(3, 3001)
    raymm.multi_dot([np.eye(3), right], out=path, engine=local_engine)
    np.testing.assert_array_equal(np.load(path), right)


def test_an_incomplete_file_of_an_earlier_run_is_replaced(path, local_engine):
    path.with_name("D.npy.partial").write_bytes(b"\xff" * 100_000)
    raymm.multi_dot([np.eye(3), np.ones((3, 5))], out=path, engine=local_engine)
    np.testing.assert_array_equal(np.load(path), np.ones((3, 5)))
    assert names_in(path.parent) == ["D.npy"]


def test_a_link_to_nowhere_exists(path):
    path.symlink_to(path.with_name("missing"))
    with pytest.raises(FileExistsError):
        Npy(path).open(make_spec((2, 2)), False)


def test_direct_output_is_used_for_large_runs(path, monkeypatch, local_engine):
    monkeypatch.setattr(npy, "DIRECT_NBYTES", 0)
    monkeypatch.setattr(runs, "SMALLEST_DIRECT_RUN", PAGE_NBYTES)
    path.touch()
    if not runs.takes_direct(path):
        pytest.skip("this file system has no direct output")
    path.unlink()
    direct, plain = [], os.pwrite

    def pwrite(file, data, position):
        if os.O_DIRECT & fcntl.fcntl(file, fcntl.F_GETFL):
            direct.append((position, len(data)))
        return plain(file, data, position)

    monkeypatch.setattr(os, "pwrite", pwrite)
    right = np.arange(3 * 5000.0).reshape(3, 5000)
    raymm.multi_dot([np.eye(3), right], out=path, engine=local_engine)
    assert sum(length for _, length in direct) >= 0.8 * right.nbytes
    assert all(position % PAGE_NBYTES == length % PAGE_NBYTES == 0 for position, length in direct)


def test_a_sink_travels_small_and_without_open_files(path):
    sink = Npy(path)
    sink.open(make_spec((6, 8)), False)
    assert len(pickle.dumps(sink)) < 10_000
    sink.abort()


@pytest.mark.parametrize("orders", ["FC", "CF", "CC"])
def test_two_files_of_one_pass_are_whole_with_direct_output(orders, tmp_path, monkeypatch):
    # Rows of 30,011 float64 do not begin on a page: a C-order file relies on halo columns, which
    # the pass must provide even if another output shapes it.
    monkeypatch.setattr(npy, "DIRECT_NBYTES", 0)
    monkeypatch.setattr(runs, "SMALLEST_DIRECT_RUN", PAGE_NBYTES)
    rng = np.random.default_rng(0)
    A, C = rng.integers(-9, 9, (7, 5)).astype(float), rng.integers(-9, 9, (5, 30_011)).astype(float)
    sinks = [Npy(tmp_path / f"{place}.npy", order) for place, order in enumerate(orders)]
    for D in raymm.chain([A, C]).run(*sinks, engine="local", tile_columns=7001):
        assert np.array_equal(D, A @ C)


def test_a_second_run_never_touches_what_the_first_one_committed(path, monkeypatch):
    """The second run opens the unfinished file just before the first one renames it."""
    first, second = Npy(path), Npy(path)
    spec = make_spec((2, 3))
    first.open(spec, False)
    lock = fcntl.flock

    def late(file, operation):
        if first is not None and not path.exists():
            first.commit()
        lock(file, operation)

    monkeypatch.setattr(fcntl, "flock", late)
    second.open(spec, False)  # it locks a new file, and finds when it commits that it is late
    with pytest.raises(SinkError):
        second.commit()
    assert np.load(path).shape == (2, 3)
    second.abort()
    assert names_in(path.parent) == ["D.npy"]


def test_another_file_of_that_name_is_not_written_to(path):
    """As on a node whose folder of that name is on another disk."""
    sink = Npy(path)
    sink.open(make_spec((2, 3)), False)
    elsewhere = pickle.loads(pickle.dumps(sink))
    path.with_name("D.npy.partial").rename(path.with_name("aside"))
    stale = Npy(path)
    stale.open(make_spec((2, 3)), False)
    with pytest.raises(SinkError, match="another file") as caught:
        elsewhere.attach()
    assert caught.value.errno == errno.ESTALE
    stale.abort()
    sink.abort()


def test_the_mark_of_a_run_is_gone_from_the_file(path):
    for _ in range(2):
        sink = Npy(path)
        sink.open(make_spec((2, 3)), True)
        sink.commit()
        content = path.read_bytes()
        assert content[: npy.HEADER_NBYTES] == npy_header((2, 3), np.dtype(np.float64), False)


def test_an_interrupt_while_space_is_reserved_leaves_nothing(path, monkeypatch):
    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "posix_fallocate", interrupt)
    with pytest.raises(KeyboardInterrupt):
        Npy(path).open(make_spec((2, 3)), False)
    assert names_in(path.parent) == []


@pytest.mark.parametrize("link", ["symlink_to", "hardlink_to"])
def test_a_link_named_like_the_unfinished_file_is_not_written_through(path, link):
    precious = path.with_name("precious")
    precious.write_bytes(b"precious")
    getattr(path.with_name("D.npy.partial"), link)(precious)
    with pytest.raises(SinkError, match="remove it"):
        Npy(path).open(make_spec((2, 3)), False)
    assert precious.read_bytes() == b"precious"
    assert not path.exists()


def test_a_pipe_named_like_the_unfinished_file_is_refused(path):
    os.mkfifo(path.with_name("D.npy.partial"))
    with pytest.raises(SinkError):
        Npy(path).open(make_spec((2, 3)), False)
