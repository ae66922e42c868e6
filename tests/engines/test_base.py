"""Dispatch, retry and deduplication, on workers that follow a script."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from raymm.engines import base
from raymm.engines.base import ATTEMPTS, START_SECONDS
from raymm.errors import SinkError, TileError, WorkerStartError
from raymm.events import TileRetried, WorkerLost, WorkerReady
from tests.doubles import CountingCallback, FakeEngine, NullSink, make_job


def start(engine, tiles=20, depth=2, callback=None, in_runs=False):
    """Return the outcomes of a job of so many tiles, and what was taken of its calls."""
    job, factors = make_job([np.eye(1)], tiles, [NullSink()])
    taken = []
    if in_runs:
        calls = [(tile, None) for tile in job.grid]
        return engine.run(job, factors, calls, depth, callback or CountingCallback()), calls

    def calls():
        for tile in job.grid:
            taken.append(tile.index)
            yield tile, None

    return engine.run(job, factors, calls(), depth, callback or CountingCallback()), taken


def indices(outcomes):
    return sorted(outcome.receipt.tile.index for outcome in outcomes)


@pytest.fixture(autouse=True)
def clock(monkeypatch):
    """Let time pass only when an engine waits in vain."""
    engines = []
    monkeypatch.setattr(base.time, "monotonic", lambda: sum(each.clock for each in engines))

    def watch(engine):
        engines.append(engine)
        return engine

    return watch


@given(
    workers=st.integers(1, 5),
    tiles=st.integers(0, 40),
    depth=st.integers(1, 4),
    seed=st.integers(0, 100),
)
def test_every_tile_once_and_never_too_many_in_flight(workers, tiles, depth, seed):
    engine = FakeEngine(workers=workers, order=np.random.default_rng(seed))
    outcomes, taken = start(engine, tiles, depth)
    assert indices(outcomes) == list(range(tiles))
    assert taken == list(range(tiles))
    assert max(engine.most_in_flight.values()) <= depth
    assert sorted(engine.finished) == list(range(tiles))
    assert Counter(index for _, index in engine.submitted) == Counter(range(tiles))


@given(
    workers=st.integers(1, 4),
    depth=st.integers(1, 3),
    fates=st.dictionaries(
        st.integers(0, 19), st.lists(st.sampled_from(["lost", "dies"]), max_size=1)
    ),
    seed=st.integers(0, 100),
)
def test_losses_are_made_good(workers, depth, fates, seed):
    fates = {index: list(each) for index, each in fates.items()}

    def script(worker, tile, attempt):
        pending = fates.get(tile.index)
        return pending.pop() if pending else "ok"

    # Deaths are budgeted; this many workers may be lost.
    if sum(map(len, fates.values())) > ATTEMPTS * workers:
        return
    engine = FakeEngine(workers=workers, script=script, order=np.random.default_rng(seed))
    outcomes, _ = start(engine, depth=depth)
    assert indices(outcomes) == list(range(20))
    assert sorted(engine.finished) == list(range(20))
    assert len(engine.live) == workers


class FairEngine(FakeEngine):
    """Asserts that each tile goes to the least loaded of the workers that are ready."""

    def __post_init__(self):
        super().__post_init__()
        self.flying, self.owners = {}, {}

    def _queue(self, worker, tile):
        handle = super()._queue(worker, tile)
        self.owners[handle] = worker, tile
        return handle

    def _submit(self, worker, job, call):
        assert self.flying[worker] == min(self.flying.values())
        self.flying[worker] += 1
        return super()._submit(worker, job, call)

    def _result(self, handle):
        worker, tile = self.owners[handle]
        self.flying[worker] = 0 if tile is None else self.flying[worker] - 1
        return super()._result(handle)


@given(depth=st.integers(1, 4), seed=st.integers(0, 50))
def test_the_least_loaded_worker_is_next(depth, seed):
    engine = FairEngine(workers=4, order=np.random.default_rng(seed))
    assert indices(start(engine, tiles=50, depth=depth)[0]) == list(range(50))


def test_the_consumer_s_speed_is_the_backpressure():
    engine = FakeEngine(workers=2)
    outcomes, taken = start(engine, tiles=1000, depth=2)
    for done, _ in enumerate(outcomes, 1):
        assert len(taken) - done <= 4
        if done == 500:
            break
    outcomes.close()
    assert len(taken) <= 504


def test_a_lost_tile_is_repeated_and_reported():
    def script(worker, tile, attempt):
        return "lost" if tile.index == 3 and attempt == 1 else "ok"

    engine, callback = FakeEngine(workers=2, script=script), CountingCallback()
    outcomes, _ = start(engine, callback=callback)
    assert indices(outcomes) == list(range(20))
    (retried,) = callback.of(TileRetried)
    assert (retried.tile.index, retried.attempt) == (3, 1)
    assert retried.reason == "its object is lost"
    assert callback.of(WorkerLost) == []
    assert engine.replaced == []


def test_a_dead_worker_is_replaced_and_its_tiles_repeated():
    def script(worker, tile, attempt):
        return "dies" if worker == "fake-1" else "ok"

    engine, callback = FakeEngine(workers=2, script=script), CountingCallback()
    outcomes, _ = start(engine, callback=callback)
    assert indices(outcomes) == list(range(20))
    assert engine.replaced == ["fake-1"]
    assert engine.live == ["fake-0", "fake-2"]
    (lost,) = callback.of(WorkerLost)
    assert lost.worker == "fake-1"
    assert {event.worker for event in callback.of(WorkerReady)} == {"fake-0", "fake-1", "fake-2"}


def test_a_worker_is_replaced_once_however_many_of_its_calls_are_lost():
    def script(worker, tile, attempt):
        return "dies" if worker == "fake-0" else "ok"

    engine = FakeEngine(workers=1, script=script)
    outcomes, _ = start(engine, depth=4)
    assert indices(outcomes) == list(range(20))
    assert engine.replaced == ["fake-0"]


@pytest.mark.parametrize("workers", [1, 2, 3])
@pytest.mark.parametrize("depth", [1, 2, 4])
@pytest.mark.parametrize("fate", ["dies", "lost"])
def test_a_tile_that_can_never_be_computed_is_named(workers, depth, fate):
    def script(worker, tile, attempt):
        return fate if tile.index == 7 else "ok"

    engine, callback = FakeEngine(workers=workers, script=script), CountingCallback()
    outcomes, _ = start(engine, depth=depth, callback=callback)
    with pytest.raises(TileError, match="tile 7 ") as caught:
        list(outcomes)
    error = caught.value
    assert (error.tile.index, error.attempts) == (7, ATTEMPTS)
    assert error.__cause__ is not None
    assert engine.attempts[7] == ATTEMPTS
    # Innocent tiles that were queued behind it are charged at most once: it then runs alone.
    others = Counter(event.tile.index for event in callback.of(TileRetried))
    assert all(count == 1 for index, count in others.items() if index != 7)
    assert engine.drained


def test_a_tile_that_was_lost_runs_alone():
    alone = []

    def script(worker, tile, attempt):
        if tile.index == 5 and attempt > 1:
            alone.append(len(engine.queues[worker]))
        return "dies" if tile.index == 5 and attempt < 3 else "ok"

    engine = FakeEngine(workers=2, script=script)
    outcomes, _ = start(engine, depth=3)
    assert indices(outcomes) == list(range(20))
    assert alone == [0, 0]


def test_an_exception_is_not_repeated():
    def script(worker, tile, attempt):
        return ZeroDivisionError("by tile 4") if tile.index == 4 else "ok"

    engine = FakeEngine(workers=2, script=script)
    outcomes, _ = start(engine)
    with pytest.raises(TileError, match=r"tile 4 .*by tile 4") as caught:
        list(outcomes)
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
    assert (caught.value.tile.index, caught.value.attempts) == (4, 1)
    assert caught.value.device == "cpu"
    assert engine.attempts[4] == 1
    assert len(engine.drained) == 1


def test_an_error_of_ours_passes_through():
    error = SinkError(28, "full")
    engine = FakeEngine(script=lambda worker, tile, attempt: error)
    outcomes, _ = start(engine)
    with pytest.raises(SinkError) as caught:
        list(outcomes)
    assert caught.value is error
    assert engine.drained


def test_attempts_count_the_losses_before_an_exception():
    def script(worker, tile, attempt):
        if tile.index != 2:
            return "ok"
        return "lost" if attempt < 3 else ValueError("third time")

    outcomes, _ = start(FakeEngine(script=script))
    with pytest.raises(TileError) as caught:
        list(outcomes)
    assert caught.value.attempts == 3


def test_a_worker_that_dies_while_loading_is_replaced():
    engine = FakeEngine(workers=2, starting=lambda w: "dies" if w in ("fake-0", "fake-2") else "ok")
    callback = CountingCallback()
    outcomes, _ = start(engine, callback=callback)
    assert indices(outcomes) == list(range(20))
    assert engine.replaced[0] == "fake-0"
    assert len(callback.of(WorkerLost)) >= 1


def test_workers_that_always_die_are_given_up():
    engine = FakeEngine(workers=2, starting=lambda worker: "dies")
    outcomes, _ = start(engine)
    with pytest.raises(WorkerStartError, match="workers died"):
        list(outcomes)
    assert len(engine.replaced) <= ATTEMPTS * 2 + 1
    assert engine.drained


def test_a_load_that_raises_is_a_start_error_with_its_cause():
    error = MemoryError("no room")
    engine = FakeEngine(starting=lambda worker: error)
    outcomes, _ = start(engine)
    with pytest.raises(WorkerStartError, match=r"could not load.*no room") as caught:
        list(outcomes)
    assert caught.value.__cause__ is error


def test_a_sink_that_cannot_attach_keeps_its_error():
    error = SinkError(13, "no permission")
    outcomes, _ = start(FakeEngine(starting=lambda worker: error))
    with pytest.raises(SinkError) as caught:
        list(outcomes)
    assert caught.value is error


def test_no_worker_ever_becomes_ready(clock):
    engine = clock(FakeEngine(starting=lambda worker: "never"))
    outcomes, taken = start(engine)
    with pytest.raises(WorkerStartError, match="no worker became ready"):
        list(outcomes)
    assert START_SECONDS < engine.clock < START_SECONDS + 5
    assert len(taken) <= 1


def test_one_ready_worker_is_enough(clock):
    engine = clock(FakeEngine(workers=3, starting=lambda w: "ok" if w == "fake-1" else "never"))
    outcomes, _ = start(engine)
    assert indices(outcomes) == list(range(20))


def test_a_slow_tile_is_no_start_that_fails(clock):
    # Waiting for tiles may take any time, as long as a worker is ready.
    engine = clock(FakeEngine(workers=1))
    outcomes, _ = start(engine)
    next(outcomes)
    engine.clock += 100 * START_SECONDS
    assert len(list(outcomes)) == 19


def test_a_replacement_has_as_long_to_start_as_the_first(clock):
    # The run is older than START_SECONDS when its only worker dies.
    waits = []

    def starting(worker):
        if worker == "fake-1" and len(waits) < 3:
            waits.append(worker)
            return "never"
        return "ok"

    def script(worker, tile, attempt):
        return "dies" if tile.index == 10 and attempt == 1 else "ok"

    engine = clock(FakeEngine(workers=1, starting=starting, script=script))
    outcomes, _ = start(engine)
    next(outcomes)
    engine.clock += 100 * START_SECONDS
    assert len(list(outcomes)) == 19
    assert waits == ["fake-1"] * 3


def test_a_replacement_that_never_starts_is_an_error(clock):
    engine = clock(
        FakeEngine(
            workers=1,
            starting=lambda worker: "ok" if worker == "fake-0" else "never",
            script=lambda worker, tile, attempt: "dies" if tile.index == 10 else "ok",
        )
    )
    outcomes, _ = start(engine)
    with pytest.raises(WorkerStartError, match="no worker became ready"):
        list(outcomes)


def test_a_tile_that_finishes_twice_counts_once():
    # A worker that was cut off may still finish what was given to another.
    engine = FakeEngine(workers=2)
    job, factors = make_job([np.eye(1)], 4, [NullSink()])
    doubled = [(tile, None) for tile in job.grid for _ in range(2)]
    outcomes = engine.run(job, factors, doubled, 2, CountingCallback())
    assert indices(outcomes) == [0, 1, 2, 3]
    assert sorted(engine.finished) == [0, 1, 2, 3]


def test_an_early_close_drains():
    engine = FakeEngine(workers=2)
    outcomes, taken = start(engine)
    next(outcomes)
    outcomes.close()
    assert engine.drained[0] >= 1
    assert len(taken) < 20
    assert indices(start(engine)[0]) == list(range(20))


def test_an_error_in_a_callback_drains():
    engine = FakeEngine(workers=2)

    def callback(event):
        raise RuntimeError("in the callback")

    outcomes, _ = start(engine, callback=callback)
    with pytest.raises(RuntimeError, match="in the callback"):
        list(outcomes)
    assert engine.drained


def test_an_error_in_the_calls_drains():
    engine = FakeEngine(workers=2)
    job, factors = make_job([np.eye(1)], 9, [NullSink()])

    def calls():
        yield job.grid[0], None
        raise RuntimeError("the input is gone")

    with pytest.raises(RuntimeError, match="the input is gone"):
        list(engine.run(job, factors, calls(), 2, CountingCallback()))
    assert engine.drained


def test_no_tiles_need_no_worker(clock):
    engine = clock(FakeEngine(starting=lambda worker: "never"))
    outcomes, _ = start(engine, tiles=0)
    assert list(outcomes) == []
    assert engine.clock == 0


def test_the_engine_can_be_used_again_after_each_end():
    fates = iter(["dies", ValueError("once"), *["ok"] * 100])
    engine = FakeEngine(workers=2, script=lambda *_: next(fates))
    with pytest.raises(TileError):
        list(start(engine)[0])
    assert indices(start(engine)[0]) == list(range(20))


@given(
    workers=st.integers(1, 5),
    tiles=st.integers(0, 40),
    depth=st.integers(1, 4),
    seed=st.integers(0, 100),
    deadly=st.sets(st.integers(0, 39), max_size=3),
)
def test_every_tile_once_where_each_worker_gets_neighbours(workers, tiles, depth, seed, deadly):
    def script(worker, tile, attempt):
        return "dies" if tile.index in deadly and attempt == 1 else "ok"

    engine = FakeEngine(workers=workers, script=script, order=np.random.default_rng(seed))
    outcomes, _ = start(engine, tiles, depth, in_runs=True)
    assert indices(outcomes) == list(range(tiles))
    assert max(engine.most_in_flight.values()) <= depth
    if not deadly:
        assert Counter(index for _, index in engine.submitted) == Counter(range(tiles))
