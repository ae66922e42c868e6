"""What every source, sink and engine must do; a module's tests subclass these."""

import pickle
import threading
from pathlib import Path

import numpy as np
import pytest

from raymm.errors import SinkError, TileError
from raymm.events import WorkerReady
from raymm.kernels.buffers import Buffer
from raymm.sinks.base import Block
from raymm.sources.memory import ArraySource
from raymm.tiles import Bounds, Grid
from tests.doubles import (
    CountingCallback,
    FlakySource,
    FolderSink,
    NullSink,
    make_job,
    make_spec,
)

LARGEST_DESCRIPTION = 10_000
"""Bytes of a pickled description, at most."""


class SourceContract:
    """Any run of columns is that slice of the whole; a subclass supplies `source`.

    ``source(values)`` returns a Source of a 2-D or 1-D array.
    """

    is_file = False

    @pytest.fixture
    def values(self):
        return np.arange(5 * 7, dtype=np.float64).reshape(5, 7) - 11

    def test_operand_describes_the_values(self, source, values):
        operand = source(values).operand
        assert operand.shape == values.shape
        assert all(type(length) is int for length in operand.shape)
        assert operand.dtype == values.dtype
        assert (operand.path is not None) == self.is_file

    def test_load_is_the_whole(self, source, values):
        np.testing.assert_array_equal(source(values).load(), values, strict=True)

    def test_any_columns_are_that_slice(self, source, values):
        opened, buffer = source(values), Buffer()
        for start in range(8):
            for stop in range(start, 8):
                read = opened.read(start, stop, buffer)
                np.testing.assert_array_equal(read, values[:, start:stop], strict=True)

    def test_transpose(self, source, values):
        turned, buffer = source(values).T, Buffer()
        assert turned.operand.shape == (7, 5)
        assert turned.T.operand == source(values).operand
        np.testing.assert_array_equal(turned.load(), values.T)
        for start in range(6):
            read = turned.read(start, 5, buffer)
            np.testing.assert_array_equal(read, values.T[:, start:])

    def test_a_cut_reads_the_same_in_another_process(self, source, values):
        for opened, whole in ((source(values), values), (source(values).T, values.T)):
            cut = pickle.loads(pickle.dumps(opened.cut(2, 4)))
            np.testing.assert_array_equal(cut.read(2, 4, Buffer()), whole[:, 2:4])
            np.testing.assert_array_equal(cut.read(3, 4, Buffer()), whole[:, 3:4])

    def test_vectors_become_rows_and_columns(self, source, values):
        vector = values[:, 3].copy()
        opened = source(vector)
        np.testing.assert_array_equal(opened.load(), vector)
        row, column = opened.as_row(), opened.as_column()
        assert row.operand.shape == (1, 5)
        assert column.operand.shape == (5, 1)
        np.testing.assert_array_equal(row.read(1, 4, Buffer()), vector[None, 1:4])
        np.testing.assert_array_equal(column.read(0, 1, Buffer()), vector[:, None])
        np.testing.assert_array_equal(row.T.read(0, 1, Buffer()), vector[:, None])

    def test_empty_axes(self, source):
        for shape in ((0, 3), (3, 0), (0, 0)):
            opened = source(np.zeros(shape))
            assert opened.operand.shape == shape
            assert opened.load().shape == shape
            assert opened.read(0, shape[1], Buffer()).shape == shape

    def test_reading_leaves_the_operand_alone(self, source, values):
        opened = source(values)
        read = opened.read(0, 7, Buffer())
        again = opened.read(0, 7, Buffer())
        np.testing.assert_array_equal(read, again)
        np.testing.assert_array_equal(opened.load(), values)


class FileSourceContract(SourceContract):
    """What holds beside that for operands in a file."""

    is_file = True

    def test_it_travels_as_a_description(self, source):
        opened = source(np.zeros((300, 1000)))
        for travelling in (opened, opened.T, opened.cut(0, 1000)):
            assert len(pickle.dumps(travelling)) < LARGEST_DESCRIPTION


class SinkContract:
    """Blocks in any order, every one twice, from another process: one output.

    A subclass supplies ``sink(shape, dtype)``, a new sink, and ``read_back(sink, result)``, what
    foreign code makes of the committed output; ``folder``, where its files go.
    """

    shapes = ((6, 8), (1, 8), (6, 1), (3, 5))

    def spec(self, shape, dtype=np.float64, is_transposed=False, tile_columns=3, panel=2, band=4):
        spec = make_spec(shape, dtype, is_transposed=is_transposed)
        grid = Grid(spec.rows, spec.columns, tile_columns, min(panel, tile_columns), band)
        return make_spec(shape, dtype, is_transposed=is_transposed, grid=grid)

    def send(self, sink, spec, values, *, order=None, travel=True):
        """Write all blocks of `values` (as the user sees them) as a worker would."""
        canonical = values.reshape(spec.shape if len(spec.shape) == 2 else (spec.rows, -1))
        canonical = canonical.T if spec.is_transposed else canonical
        worker = pickle.loads(pickle.dumps(sink)) if travel else sink
        worker.attach()
        layout = sink.layout(spec)
        blocks = [(tile, bounds) for tile in spec.grid for bounds in spec.grid.blocks(tile)]
        for place in order if order is not None else range(len(blocks)):
            tile, bounds = blocks[place % len(blocks)]
            piece = worker.write(Block(tile, bounds, block_of(canonical, bounds, layout)))
            if piece is not None:
                sink.receive(pickle.loads(pickle.dumps(piece)))
        finish_tiles(worker, spec)
        worker.detach(sync=True)

    @pytest.fixture
    def shuffled(self):
        return np.random.default_rng(1).permutation(400)

    @pytest.mark.parametrize("is_transposed", [False, True])
    def test_any_order_twice_from_another_process(self, sink, read_back, shuffled, is_transposed):
        for shape in self.shapes:
            spec = self.spec(shape, is_transposed=is_transposed)
            values = np.random.default_rng(0).normal(size=shape)
            one = sink(shape, np.float64)
            one.open(spec, False)
            self.send(one, spec, values, order=shuffled)
            read = read_back(one, one.commit())
            np.testing.assert_array_equal(read, values, strict=True)

    @pytest.mark.parametrize("dtype", ["<f2", "<f4", "<f8", "<c16", "<i8", "<u8", "|u1"])
    def test_dtypes(self, sink, read_back, dtype):
        spec = self.spec((6, 8), dtype)
        values = (np.arange(48).reshape(6, 8) * 5).astype(dtype)
        one = sink((6, 8), np.dtype(dtype))
        one.open(spec, False)
        self.send(one, spec, values)
        np.testing.assert_array_equal(read_back(one, one.commit()), values, strict=True)

    @pytest.mark.parametrize("shape", [(8,), ()])
    def test_vector_and_scalar_results(self, sink, read_back, shape):
        values = np.arange(8.0)[: int(np.prod(shape))].reshape(shape)
        spec = self.spec(shape)
        one = sink(shape, np.float64)
        one.open(spec, False)
        self.send(one, spec, values)
        read = read_back(one, one.commit())
        assert read.shape == shape
        np.testing.assert_array_equal(read, values)

    @pytest.mark.parametrize("shape", [(0, 5), (3, 0), (0, 0)])
    def test_empty_results(self, sink, read_back, shape):
        one = sink(shape, np.float64)
        one.open(self.spec(shape), False)
        view = one.view()
        assert not isinstance(view, np.ndarray) or view.shape == shape
        assert read_back(one, one.commit()).shape == shape

    def test_view_is_the_product_in_canonical_orientation(self, sink):
        for is_transposed in (False, True):
            spec = self.spec((6, 8), is_transposed=is_transposed)
            values = np.random.default_rng(2).normal(size=(6, 8))
            one = sink((6, 8), np.float64)
            one.open(spec, False)
            self.send(one, spec, values)
            view = np.array(one.view())
            np.testing.assert_array_equal(view, values.T if is_transposed else values)
            one.abort()

    def test_planning_touches_nothing(self, sink, folder):
        one = sink((6, 8), np.float64)
        assert isinstance(one.name, str)
        assert one.layout(self.spec((6, 8))).order in ("C", "F")
        assert one.overwrites(None, None) is False
        assert list(folder.iterdir()) == []

    def test_abort_leaves_nothing_and_can_be_repeated(self, sink, folder):
        one = sink((6, 8), np.float64)
        one.abort()  # before open
        spec = self.spec((6, 8))
        one.open(spec, False)
        self.send(one, spec, np.ones((6, 8)), order=range(5))
        one.abort()
        one.abort()
        assert list(folder.iterdir()) == []

    def test_blocks_may_come_from_several_threads(self, sink, read_back):
        spec = self.spec((8, 40), tile_columns=4, panel=2, band=2)
        values = np.random.default_rng(3).normal(size=(8, 40))
        one = sink((8, 40), np.float64)
        one.open(spec, False)
        one.attach()
        layout = one.layout(spec)
        blocks = [(tile, bounds) for tile in spec.grid for bounds in spec.grid.blocks(tile)]

        def write(part):
            for tile, bounds in blocks[part::4]:
                one.write(Block(tile, bounds, block_of(values, bounds, layout)))

        threads = [threading.Thread(target=write, args=(part,)) for part in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        finish_tiles(one, spec)
        one.detach(sync=True)
        np.testing.assert_array_equal(read_back(one, one.commit()), values)


def finish_tiles(sink, spec):
    """Tell a sink that wants to know that each tile is whole."""
    for tile in spec.grid if hasattr(sink, "finish") else ():
        sink.finish(tile)


def block_of(canonical, bounds, layout):
    """Return a block in memory as the kernel hands it out: runs contiguous, halo included."""
    widened = bounds.widened(layout.halo_columns, canonical.shape[1])
    values = canonical[
        widened.row_start : widened.row_stop, widened.column_start : widened.column_stop
    ]
    rows, columns = values.shape
    position = layout.position(bounds.row_start, bounds.column_start)
    shape, pitch = (rows, columns), layout.row_nbytes
    if layout.order == "F":
        shape, pitch = (columns, rows), layout.column_nbytes
    array = Buffer().array(shape, values.dtype, position, pitch)
    array = array if layout.order == "C" else array.T
    array[...] = values
    return array


class FileSinkContract(SinkContract):
    """What holds beside that for outputs that are files; ``path`` is where the file goes."""

    def test_nothing_under_the_final_name_before_commit(self, sink, path):
        one, spec = sink((6, 8), np.float64), self.spec((6, 8))
        one.open(spec, False)
        assert not path.exists()
        self.send(one, spec, np.ones((6, 8)))
        assert not path.exists()
        assert len(list(path.parent.iterdir())) >= 1
        one.commit()
        assert path.exists()

    def test_existing_output_is_kept(self, sink, path):
        path.write_bytes(b"precious")
        with pytest.raises(FileExistsError, match="overwrite=True"):
            sink((6, 8), np.float64).open(self.spec((6, 8)), False)
        assert path.read_bytes() == b"precious"
        assert list(path.parent.iterdir()) == [path]

    def test_overwrite_keeps_the_old_file_until_commit(self, sink, path, read_back):
        path.write_bytes(b"old")
        one, spec = sink((6, 8), np.float64), self.spec((6, 8))
        one.open(spec, True)
        self.send(one, spec, np.ones((6, 8)))
        assert path.read_bytes() == b"old"
        np.testing.assert_array_equal(read_back(one, one.commit()), np.ones((6, 8)))

    def test_overwrite_and_abort_keep_the_old_file(self, sink, path):
        path.write_bytes(b"old")
        one, spec = sink((6, 8), np.float64), self.spec((6, 8))
        one.open(spec, True)
        self.send(one, spec, np.ones((6, 8)))
        one.abort()
        assert path.read_bytes() == b"old"
        assert list(path.parent.iterdir()) == [path]

    def test_a_file_that_appears_during_the_run_is_kept(self, sink, path):
        one, spec = sink((6, 8), np.float64), self.spec((6, 8))
        one.open(spec, False)
        self.send(one, spec, np.ones((6, 8)))
        path.write_bytes(b"somebody else's")
        with pytest.raises(FileExistsError):
            one.commit()
        one.abort()
        assert path.read_bytes() == b"somebody else's"

    def test_missing_folder(self, sink, path):
        path.parent.rmdir()
        with pytest.raises(SinkError, match="folder") as caught:
            sink((6, 8), np.float64).open(self.spec((6, 8)), False)
        assert caught.value.errno == 2

    def test_the_name_of_a_folder(self, sink, path):
        path.mkdir()
        with pytest.raises(SinkError, match="folder"):
            sink((6, 8), np.float64).open(self.spec((6, 8)), False)

    def test_two_runs_cannot_write_one_file(self, sink, path):
        first = sink((6, 8), np.float64)
        first.open(self.spec((6, 8)), False)
        with pytest.raises(SinkError, match="another run"):
            sink((6, 8), np.float64).open(self.spec((6, 8)), False)
        assert len(list(path.parent.iterdir())) == 1  # the first run's file is still there
        first.abort()

    def test_overwrites_through_links(self, sink, path, tmp_path):
        path.write_bytes(b"operand")
        soft, hard, other = tmp_path / "soft", tmp_path / "hard", tmp_path / "other"
        soft.symlink_to(path)
        hard.hardlink_to(path)
        other.write_bytes(b"operand")
        one = sink((6, 8), np.float64)
        spelled = path.parent / ".." / path.parent.name / path.name
        for alias in (path, soft, hard, spelled):
            assert one.overwrites(str(alias), None) is True
        assert one.overwrites(str(other), None) is False


class EngineContract:
    """Each tile's receipt once; a subclass supplies ``engine``, opened workers or none yet."""

    def run(self, engine, job, factors, source, *, depth=2, callback=None):
        calls = ((tile, source) for tile in job.grid)
        return engine.run(job, factors, calls, depth, callback or CountingCallback())

    @pytest.fixture
    def source(self):
        return ArraySource(np.arange(2.0 * 30).reshape(2, 30), "C")

    @pytest.fixture
    def report(self, tmp_path):
        folder = tmp_path / "report"
        folder.mkdir()
        return folder

    def test_one_outcome_for_each_tile(self, engine, source, report):
        sink = FolderSink(report)
        job, factors = make_job([np.eye(2)], 30, [sink], tile_columns=4)
        callback = CountingCallback()
        outcomes = list(self.run(engine, job, factors, source, callback=callback))
        assert sorted(each.receipt.tile.index for each in outcomes) == list(range(8))
        assert sink.notes("tile-") == [str(index) for index in range(8)]
        assert len(callback.of(WorkerReady)) >= 1
        assert {each.receipt.worker for each in outcomes} <= {
            event.worker for event in callback.of(WorkerReady)
        }

    def test_no_tiles(self, engine, source):
        job, factors = make_job([np.eye(2)], 0, [NullSink()])
        assert list(self.run(engine, job, factors, source)) == []

    @pytest.mark.parametrize("depth", [1, 3])
    def test_max_in_flight_holds(self, engine, source, depth):
        job, factors = make_job([np.eye(2)], 30, [NullSink()], tile_columns=1)
        taken = []

        def calls():
            for tile in job.grid:
                taken.append(tile.index)
                yield tile, source

        done = 0
        most = depth * engine.resources().workers
        for _ in engine.run(job, factors, calls(), depth, CountingCallback()):
            done += 1
            # While an outcome is held none is handed out; one may have been looked up in advance.
            assert len(taken) - done <= most
        assert done == len(taken) == 30

    def test_a_failing_tile_is_named(self, engine, report):
        source = FlakySource(np.ones((2, 30)), "C", broken=9, error=ZeroDivisionError("broken"))
        job, factors = make_job([np.eye(2)], 30, [NullSink()], tile_columns=4)
        with pytest.raises(TileError, match=r"tile 2 \(columns 8:12\)") as caught:
            list(self.run(engine, job, factors, source))
        error = caught.value
        assert (error.tile.start, error.tile.stop, error.attempts) == (8, 12, 1)
        assert isinstance(error.__cause__, ZeroDivisionError)
        assert str(error.__cause__) == "broken"

    def test_errors_of_ours_pass_through(self, engine):
        raised = SinkError(28, "the disk is full")
        source = FlakySource(np.ones((2, 30)), "C", broken=9, error=raised)
        job, factors = make_job([np.eye(2)], 30, [NullSink()], tile_columns=4)
        with pytest.raises(SinkError, match="the disk is full") as caught:
            list(self.run(engine, job, factors, source))
        assert caught.value.errno == 28

    def test_an_early_close_stops_everything(self, engine, source, report):
        sink = FolderSink(report)
        job, factors = make_job([np.eye(2)], 30, [sink], tile_columns=1)
        outcomes = self.run(engine, job, factors, source)
        next(outcomes)
        outcomes.close()
        written = sink.notes("tile-")
        most = 1 + 2 * engine.resources().workers
        assert 1 <= len(written) <= most
        assert sink.notes("tile-") == written

    def test_it_works_again_after_an_error_and_an_early_close(self, engine, source, report):
        broken = FlakySource(np.ones((2, 30)), "C", broken=0, error=ZeroDivisionError("broken"))
        factor = np.array([[0.0, 1.0], [1.0, 0.0]])
        job, factors = make_job([factor], 30, [NullSink()], tile_columns=4)
        with pytest.raises(TileError):
            list(self.run(engine, job, factors, broken))
        job, factors = make_job([factor], 30, [NullSink()], tile_columns=4)
        outcomes = self.run(engine, job, factors, source)
        next(outcomes)
        outcomes.close()
        job, factors = make_job([factor], 30, [NullSink()], tile_columns=4)
        assert len(list(self.run(engine, job, factors, source))) == 8

    def test_fewer_tiles_than_workers_then_more(self, engine, source):
        # The first run may end while a worker is still loading; the factors are the same.
        for columns, tile_columns, count in ((1, 1, 1), (30, 1, 30)):
            job, factors = make_job(
                [np.eye(2) * 3], columns, [NullSink()], tile_columns=tile_columns
            )
            assert len(list(self.run(engine, job, factors, source))) == count

    def test_jobs_with_other_factors_follow_each_other(self, engine, source):
        for scale in (1.0, 2.0, 1.0):
            job, factors = make_job([np.eye(2) * scale], 30, [NullSink()], tile_columns=8)
            assert len(list(self.run(engine, job, factors, source))) == 4

    def test_close_can_be_repeated(self, engine, source):
        engine.close()
        engine.close()
        job, factors = make_job([np.eye(2)], 3, [NullSink()])
        assert len(list(self.run(engine, job, factors, source))) == 3  # opens again by itself
        engine.close()


def names_in(folder):
    """Return the names of the files in a folder."""
    return sorted(path.name for path in Path(folder).iterdir())


def whole(bounds):
    """Return the slices of a block."""
    assert isinstance(bounds, Bounds)
    return slice(bounds.row_start, bounds.row_stop), slice(bounds.column_start, bounds.column_stop)
