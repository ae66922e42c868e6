import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest

from raymm.errors import ExecutionError, WorkerStartError
from raymm.kernels import cpu
from raymm.sources.memory import ArraySource
from raymm.tiles import Grid
from raymm.worker import Worker, factor_key
from tests.doubles import FlakySink, NullSink, RecordingSink, SlowSink, make_job, make_spec


@pytest.fixture
def source():
    return ArraySource(np.arange(40.0).reshape(2, 20), "C")


@pytest.fixture
def worker():
    worker = Worker("here", 2)
    yield worker
    worker.close()


class KeepingSink(NullSink):
    """Keeps what it is given, by the block's place."""

    def __init__(self):
        self.blocks = {}

    def write(self, block):
        self.blocks[block.bounds] = block.host.copy()


def blocks_of(job, **shape):
    """Return the job with other blocks."""
    return replace(job, grid=replace(job.grid, **shape))


def test_a_receipt_for_each_tile(worker, source):
    job, factors = make_job([np.eye(2)], 20, [NullSink()], tile_columns=7)
    worker.load(job, factors)
    for tile in job.grid:
        receipt, pieces = worker.run(job.id, tile, source)
        assert receipt.tile == tile
        assert receipt.worker == "here"
        assert pieces == []
        assert receipt.seconds >= receipt.read_seconds >= 0


@pytest.mark.parametrize("lanes", [1, 2, 5])
def test_every_block_of_a_tile_goes_to_every_sink(worker, source, lanes):
    sinks = [KeepingSink(), KeepingSink()]
    job, factors = make_job([np.ones((6, 2))], 20, sinks, tile_columns=7, lanes=lanes)
    job = blocks_of(job, panel_columns=3, block_rows=4)
    worker.load(job, factors)
    tile = job.grid[1]
    worker.run(job.id, tile, source)
    for sink in sinks:
        assert set(sink.blocks) == set(job.grid.blocks(tile))
        for bounds, values in sink.blocks.items():
            expected = source.array[:, bounds.column_start : bounds.column_stop].sum(axis=0)
            np.testing.assert_array_equal(values, np.tile(expected, (bounds.shape[0], 1)))


@pytest.mark.parametrize("threads", [1, 2, 4])
def test_bits_do_not_depend_on_threads_or_lanes(threads):
    rng = np.random.default_rng(0)
    factor = rng.normal(size=(50, 700)).astype(np.float32)
    source = ArraySource(rng.normal(size=(700, 900)).astype(np.float32), "C")
    found = []
    for count, lanes in ((threads, 2 * threads), (1, 1)):
        sink = KeepingSink()
        job, factors = make_job([factor], 900, [sink], tile_columns=900, dtype="f4", lanes=lanes)
        job = blocks_of(job, panel_columns=130, block_rows=20)
        worker = Worker("here", count)
        worker.load(job, factors)
        worker.run(job.id, job.grid[0], source)
        worker.close()
        found.append(sink.blocks)
    assert found[0].keys() == found[1].keys()
    for bounds, values in found[0].items():
        np.testing.assert_array_equal(values, found[1][bounds])


def test_as_many_threads_multiply_as_were_asked_for(worker, source, monkeypatch):
    # Two multiplications meet at the barrier, so two run at a time; the count says never three.
    barrier, lock, now, most = threading.Barrier(2), threading.Lock(), [0], [0]
    plain = cpu.CpuKernel.multiply

    def multiply(*arguments):
        with lock:
            now[0] += 1
            most[0] = max(most[0], now[0])
        barrier.wait(60)
        product = plain(*arguments)
        with lock:
            now[0] -= 1
        return product

    monkeypatch.setattr(cpu.CpuKernel, "multiply", multiply)
    job, factors = make_job([np.ones((8, 2))], 20, [NullSink()], tile_columns=20, lanes=6)
    job = blocks_of(job, block_rows=1)
    worker.load(job, factors)
    worker.run(job.id, job.grid[0], source)
    assert most[0] == 2


def test_a_block_is_written_while_another_is_multiplied(source):
    # One thread multiplies; the first block's write ends only once a second block is written.
    barrier = threading.Barrier(2)

    class MeetingSink(NullSink):
        def write(self, block):
            barrier.wait(60)

    job, factors = make_job([np.ones((4, 2))], 20, [MeetingSink()], tile_columns=20, lanes=2)
    job = blocks_of(job, block_rows=1)
    worker = Worker("here", 1)
    worker.load(job, factors)
    worker.run(job.id, job.grid[0], source)
    worker.close()


def test_an_error_is_raised_once_nothing_is_written_any_more(worker, source):
    sink = FlakySink(3, ValueError("third block"))
    job, factors = make_job([np.ones((100, 2))], 20, [sink], tile_columns=20, lanes=4)
    job = blocks_of(job, block_rows=1)
    worker.load(job, factors)
    with pytest.raises(ValueError, match="third block"):
        worker.run(job.id, job.grid[0], source)
    written = sum(sink.tiles.values())
    assert written < 100
    worker.unload(job.id, sync=False)
    assert sum(sink.tiles.values()) == written


def test_it_works_on_after_an_error(worker, source):
    sink = FlakySink(1, ValueError("first block"))
    job, factors = make_job([np.eye(2)], 20, [sink], tile_columns=20)
    worker.load(job, factors)
    with pytest.raises(ValueError, match="first block"):
        worker.run(job.id, job.grid[0], source)
    receipt, _ = worker.run(job.id, job.grid[0], source)
    assert receipt.tile == job.grid[0]


def test_interrupt_ends_a_tile_early(worker, source):
    sink = SlowSink(held=[0])
    job, factors = make_job([np.ones((100, 2))], 20, [sink], tile_columns=20)
    job = blocks_of(job, block_rows=1)
    worker.load(job, factors)
    with ThreadPoolExecutor(1) as pool:
        run = pool.submit(worker.run, job.id, job.grid[0], source)
        assert sink.reached.wait(60)
        worker.interrupt("another job")
        worker.interrupt(job.id)
        sink.release.set()
        with pytest.raises(ExecutionError, match="interrupted"):  # never a receipt
            run.result(60)
    assert sink.tiles[0] <= 2


def test_interrupt_of_another_job_changes_nothing(worker, source):
    # On a worker of Ray it may arrive when the next job is already running.
    sink = SlowSink(held=[0])
    job, factors = make_job([np.ones((100, 2))], 20, [sink], tile_columns=20)
    job = blocks_of(job, block_rows=1)
    worker.load(job, factors)
    with ThreadPoolExecutor(1) as pool:
        run = pool.submit(worker.run, job.id, job.grid[0], source)
        assert sink.reached.wait(60)
        worker.interrupt("the job before")
        sink.release.set()
        receipt, _ = run.result(60)
    assert receipt.tile == job.grid[0]
    assert sink.tiles[0] == 100


def test_interrupt_without_a_tile_does_nothing(worker):
    worker.interrupt()


def test_equal_factors_are_sent_and_held_once(worker):
    job, factors = make_job([np.eye(2)], 20, [NullSink()])
    assert worker.missing(job.factor_keys) == job.factor_keys
    worker.load(job, factors)
    assert worker.missing(job.factor_keys) == ()
    again, _ = make_job([np.eye(2)], 20, [NullSink()])
    worker.load(again, {})
    worker.unload(job.id, sync=True)
    assert worker.missing(job.factor_keys) == ()  # kept for the next call
    other, others = make_job([np.eye(2) * 2], 20, [NullSink()])
    worker.load(other, others)
    worker.retain(other.factor_keys)
    assert worker.missing(job.factor_keys) == job.factor_keys
    assert worker.missing(other.factor_keys) == ()


def test_factors_that_never_arrived_are_named(worker):
    job, _ = make_job([np.eye(2)], 20, [NullSink()])
    with pytest.raises(WorkerStartError, match=job.factor_keys[0]):
        worker.load(job, {})


def test_several_jobs_at_a_time(worker, source):
    sinks = [KeepingSink(), KeepingSink()]
    jobs = []
    for scale, sink in enumerate(sinks, 1):
        job, factors = make_job([np.eye(2) * scale], 20, [sink], tile_columns=20)
        worker.load(job, factors)
        jobs.append(job)
    for job in reversed(jobs):
        worker.run(job.id, job.grid[0], source)
    for scale, sink in enumerate(sinks, 1):
        (values,) = sink.blocks.values()
        np.testing.assert_array_equal(values, source.array * scale)


def test_sinks_are_attached_and_detached_once(worker, source):
    sink = RecordingSink()
    job, factors = make_job([np.eye(2)], 20, [sink], tile_columns=10)
    worker.load(job, factors)
    for tile in job.grid:
        worker.run(job.id, tile, source)
    worker.unload(job.id, sync=True)
    worker.unload(job.id, sync=True)
    assert sink.calls == ["attach", "write", "write", "detach True"]


def test_a_halo_is_read_and_multiplied_but_stays_outside_the_bounds(worker, source):
    sink = WidenedSink()
    layout = replace(sink.layout(make_spec((2, 20))), halo_columns=3)
    job, factors = make_job([np.eye(2)], 20, [sink], tile_columns=8, layout=layout)
    worker.load(job, factors)
    for tile in job.grid:
        worker.run(job.id, tile, source)
    for bounds, (host, widened) in sink.blocks.items():
        stop = min(bounds.column_stop + 3, 20)
        np.testing.assert_array_equal(widened, source.array[:, bounds.column_start : stop])
        assert host.shape == bounds.shape


class WidenedSink(NullSink):
    def __init__(self):
        self.blocks = {}

    def write(self, block):
        self.blocks[block.bounds] = block.host.copy(), block.widened.copy()


def test_keys_follow_from_shape_dtype_and_values():
    factor = np.arange(6.0).reshape(2, 3)
    key = factor_key(factor)
    assert factor_key(factor.copy()) == key
    assert factor_key(np.asfortranarray(factor)) == key
    others = [factor.reshape(3, 2), factor.astype(np.float32), factor + 1, -factor, factor[:, :2]]
    assert len({key, *map(factor_key, others)}) == len(others) + 1


def test_keys_of_empty_factors():
    assert factor_key(np.zeros((0, 3))) != factor_key(np.zeros((3, 0)))


def test_grid_of_a_job_is_what_the_worker_follows(worker, source):
    job, factors = make_job([np.eye(2)], 20, [sink := KeepingSink()])
    job = replace(job, grid=Grid(2, 20, 20, 20, 2))
    worker.load(job, factors)
    worker.run(job.id, job.grid[0], source)
    assert len(sink.blocks) == 1
