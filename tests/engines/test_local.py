import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import psutil
import pytest
import threadpoolctl

import raymm
from raymm.errors import PlanError
from raymm.events import RunStarted, TileFinished
from raymm.sources.memory import ArraySource
from raymm.tiles import Grid
from tests.contracts import EngineContract
from tests.doubles import (
    CountingCallback,
    InterruptingCallback,
    RecordingSink,
    SlowSink,
    make_job,
)


class TestLocalEngine(EngineContract):
    @pytest.fixture(params=[1, 3])
    def engine(self, request):
        with raymm.LocalEngine(threads=request.param) as engine:
            yield engine


def test_resources_are_this_process():
    resources = raymm.LocalEngine(threads=3).resources()
    assert (resources.engine, resources.workers, resources.threads) == ("local", 1, 3)
    assert resources.shares_memory
    assert 0 < resources.memory_nbytes <= psutil.virtual_memory().total


def test_threads_default_to_the_cores(monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert raymm.LocalEngine().threads == len(psutil.Process().cpu_affinity())
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert raymm.LocalEngine().threads == 1


def test_blas_settings_of_the_caller_are_set_back(local_engine):
    def settings():
        return [(pool["filepath"], pool["num_threads"]) for pool in threadpoolctl.threadpool_info()]

    inside = CountingCallback()
    with threadpoolctl.threadpool_limits(2, user_api="blas"):
        before = settings()
        raymm.multi_dot([np.eye(3), np.ones((3, 5))], engine=local_engine, progress=inside)
        assert settings() == before
        with pytest.raises(KeyboardInterrupt):
            raymm.multi_dot(
                [np.eye(3), np.ones((3, 5))],
                engine=local_engine,
                progress=InterruptingCallback(TileFinished, 1),
            )
        assert settings() == before


def test_an_engine_given_by_the_user_stays_open(local_engine):
    raymm.multi_dot([np.eye(3), np.ones((3, 5))], engine=local_engine)
    worker = local_engine._worker
    raymm.multi_dot([np.eye(3), np.ones((3, 5))], engine=local_engine)
    assert local_engine._worker is worker


def test_no_thread_is_left_after_a_verb():
    before = threading.active_count()
    raymm.multi_dot([np.eye(3), np.ones((3, 5))], engine="local")
    assert threading.active_count() == before


def test_two_threads_take_turns(local_engine):
    slow = SlowSink(held=[0])
    results = []
    chain = raymm.chain([np.eye(2), np.ones((2, 4))])

    def first():
        results.append(chain.run(slow, engine=local_engine, tile_columns=1))

    def second():
        results.append(chain.compute(engine=local_engine))

    one, two = threading.Thread(target=first), threading.Thread(target=second)
    one.start()
    assert slow.reached.wait(60)
    two.start()
    assert results == []
    slow.release.set()
    one.join()
    two.join()
    assert results[0] == ("committed",)
    np.testing.assert_array_equal(results[1], np.ones((2, 4)))


def test_an_early_close_ends_the_tile_under_way(local_engine):
    # The second tile has many blocks; the first of them is held until the run is being closed.
    sink = SlowSink(held=[1])
    job, factors = make_job([np.ones((64, 1))], 2, [sink])
    job = replace(job, grid=Grid(64, 2, 1, 1, 1))
    source = ArraySource(np.ones((1, 2)), "C")
    interrupt = threading.Event()

    def calls():
        for tile in job.grid:
            yield tile, source

    outcomes = local_engine.run(job, factors, calls(), 2, CountingCallback())
    next(outcomes)
    assert sink.reached.wait(60)
    worker, plain = local_engine._worker, local_engine._worker.interrupt

    def interrupted():
        plain()
        interrupt.set()
        sink.release.set()

    worker.interrupt = interrupted
    outcomes.close()
    assert interrupt.is_set()
    assert 1 <= sink.tiles[1] <= 2
    assert sink.calls.count("write") == sum(sink.tiles.values())


def test_the_order_of_calls_of_a_sink(local_engine):
    sink = RecordingSink()
    (result,) = raymm.chain([np.eye(2), np.ones((2, 4))]).run(
        sink, tile_columns=2, engine=local_engine
    )
    assert result == "committed"
    assert sink.calls == ["open", "attach", "write", "write", "detach True", "commit"]


def test_events_begin_with_the_run_and_end_with_its_summary(local_engine):
    callback = CountingCallback()
    raymm.multi_dot(
        [np.eye(2), np.ones((2, 4))], tile_columns=2, engine=local_engine, progress=callback
    )
    kinds = [type(event).__name__ for event in callback.events]
    assert kinds == ["RunStarted", "WorkerReady", "TileFinished", "TileFinished", "RunFinished"]
    assert callback.of(RunStarted)[0].tiles == 2


def test_a_callback_cannot_use_the_engine_that_calls_it(local_engine):
    chain = raymm.chain([np.eye(2), np.ones((2, 4))])

    def callback(event):
        if isinstance(event, TileFinished):
            chain.compute(engine=local_engine)

    with pytest.raises(PlanError, match="one of its own"):
        chain.compute(engine=local_engine, progress=callback)
    np.testing.assert_array_equal(chain.compute(engine=local_engine), np.ones((2, 4)))


def test_runs_of_several_threads_on_several_engines_do_not_disturb_each_other():
    rng = np.random.default_rng(0)
    A, C = (
        rng.integers(-9, 9, (20, 30)).astype(float),
        rng.integers(-9, 9, (30, 5000)).astype(float),
    )
    before = [pool["num_threads"] for pool in threadpoolctl.threadpool_info()]
    with ThreadPoolExecutor(4) as pool:
        products = pool.map(
            lambda _: raymm.multi_dot([A, C], engine="local", tile_columns=100), range(8)
        )
    assert all(np.array_equal(product, A @ C) for product in products)
    assert [pool["num_threads"] for pool in threadpoolctl.threadpool_info()] == before


def test_threads_must_be_positive():
    with pytest.raises(PlanError, match="threads=-1"):
        raymm.LocalEngine(threads=-1)
