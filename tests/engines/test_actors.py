"""Ray: what holds for every engine, and what only an engine of processes can get wrong."""

import os
import signal
import subprocess
import sys
import threading

import numpy as np
import pytest

import raymm
from raymm.engines.base import LostError
from raymm.errors import (
    ExecutionError,
    MemoryLimitError,
    PlanError,
    SinkError,
    TileError,
    WorkerStartError,
)
from raymm.events import RunFinished, TileFinished, TileRetried, WorkerLost, WorkerReady
from tests.contracts import EngineContract, names_in
from tests.doubles import (
    CountingCallback,
    FolderSink,
    InterruptingCallback,
    KillingSink,
    NullSink,
    RaisingSink,
)

pytestmark = pytest.mark.ray

LEFT = np.arange(12.0).reshape(3, 4)
RIGHT = np.arange(4 * 40.0).reshape(4, 40)


class TestRayEngine(EngineContract):
    @pytest.fixture
    def engine(self, ray_engine):
        return ray_engine


@pytest.fixture
def report(tmp_path):
    (tmp_path / "report").mkdir()
    return tmp_path / "report"


@pytest.fixture
def out(tmp_path):
    (tmp_path / "out").mkdir()
    return tmp_path / "out" / "D.npy"


class TestProducts:
    """A few end-to-end runs; the numerics are tested without Ray."""

    @pytest.mark.parametrize("order", ["C", "F"])
    def test_into_a_file(self, ray_engine, out, order):
        mapped = raymm.multi_dot(
            [LEFT, RIGHT], out=raymm.Npy(out, order=order), tile_columns=7, engine=ray_engine
        )
        np.testing.assert_array_equal(mapped, LEFT @ RIGHT)
        assert names_in(out.parent) == ["D.npy"]

    @pytest.mark.parametrize("tile_columns", [None, 7])
    def test_into_memory(self, ray_engine, tile_columns):
        product = raymm.multi_dot([LEFT, RIGHT], tile_columns=tile_columns, engine=ray_engine)
        np.testing.assert_array_equal(product, LEFT @ RIGHT)
        assert product.flags.writeable
        assert product.flags.owndata or product.base.flags.owndata

    def test_into_an_array_of_the_caller(self, ray_engine):
        whole = np.full((40, 6), 7.0)
        out = whole[::-1, ::2].T
        assert raymm.multi_dot([LEFT, RIGHT], out=out, tile_columns=7, engine=ray_engine) is out
        np.testing.assert_array_equal(out, LEFT @ RIGHT)
        assert (whole[:, 1::2] == 7).all()

    def test_into_several_outputs(self, ray_engine, out, report):
        sink = FolderSink(report)
        memory, file, nothing, second = raymm.chain([LEFT, RIGHT]).run(
            raymm.Array(), out, sink, raymm.Array(), tile_columns=7, engine=ray_engine
        )
        for found in (memory, file, second):
            np.testing.assert_array_equal(found, LEFT @ RIGHT)
        assert nothing is None
        assert sink.notes("tile-") == [str(index) for index in range(6)]

    def test_of_a_tall_result(self, ray_engine, out):
        mapped = raymm.multi_dot([RIGHT.T, LEFT.T], out=out, tile_columns=9, engine=ray_engine)
        np.testing.assert_array_equal(mapped, RIGHT.T @ LEFT.T)
        memory = raymm.multi_dot([RIGHT.T, LEFT.T], tile_columns=9, engine=ray_engine)
        np.testing.assert_array_equal(memory, RIGHT.T @ LEFT.T)

    def test_of_vectors_and_empty_operands(self, ray_engine, out):
        vector = raymm.multi_dot([LEFT[0], RIGHT], tile_columns=9, engine=ray_engine)
        np.testing.assert_array_equal(vector, LEFT[0] @ RIGHT)
        assert raymm.multi_dot([LEFT[0], RIGHT[:, 0]], engine=ray_engine) == LEFT[0] @ RIGHT[:, 0]
        empty = raymm.multi_dot([LEFT, RIGHT[:, :0]], out=out, engine=ray_engine)
        assert empty.shape == (3, 0)
        zeros = raymm.multi_dot([LEFT[:, :0], RIGHT[:0]], engine=ray_engine)
        np.testing.assert_array_equal(zeros, np.zeros((3, 40)))

    @pytest.mark.parametrize("dtype", ["f2", "c8", "?", "u1", "i8"])
    def test_of_other_dtypes(self, ray_engine, dtype):
        left, right = (LEFT % 2).astype(dtype), (RIGHT % 3).astype(dtype)
        found = raymm.multi_dot([left, right], tile_columns=7, engine=ray_engine)
        local = raymm.multi_dot([left, right], tile_columns=7, engine="local")
        np.testing.assert_array_equal(found, local, strict=True)

    def test_of_tensors(self, ray_engine):
        import torch  # noqa: PLC0415  two seconds, for this test only

        operands = [torch.from_numpy(LEFT), torch.from_numpy(RIGHT.T.copy()).t()]
        found = raymm.multi_dot(operands, tile_columns=7, engine=ray_engine)
        np.testing.assert_array_equal(found, LEFT @ RIGHT)
        small = [operand.to(torch.bfloat16) for operand in operands]
        found = raymm.multi_dot(small, tile_columns=7, engine=ray_engine)
        expected = small[0].float().numpy() @ small[1].float().numpy()
        np.testing.assert_array_equal(found, expected)

    def test_of_files(self, ray_engine, tmp_path):
        np.save(tmp_path / "C.npy", RIGHT)
        np.save(tmp_path / "T.npy", RIGHT.T)
        mapped = np.load(tmp_path / "C.npy", mmap_mode="r")
        for operand in (tmp_path / "C.npy", f"{tmp_path}/T.npy.T", mapped):
            found = raymm.multi_dot([LEFT, operand], tile_columns=7, engine=ray_engine)
            np.testing.assert_array_equal(found, LEFT @ RIGHT)

    def test_verified(self, ray_engine, out):
        callback = CountingCallback()
        raymm.multi_dot(
            [LEFT, RIGHT],
            out=out,
            tile_columns=7,
            engine=ray_engine,
            verify=True,
            progress=callback,
        )
        assert 0 <= callback.of(RunFinished)[0].residual <= 1


class TestEvents:
    def test_workers_name_themselves(self, ray_engine, out):
        callback = CountingCallback()
        raymm.multi_dot(
            [LEFT, RIGHT], out=out, tile_columns=1, engine=ray_engine, progress=callback
        )
        ready = callback.of(WorkerReady)
        assert len({event.worker for event in ready}) == len(ready) >= 1
        assert os.getpid() not in {event.pid for event in ready}
        finished = callback.of(RunFinished)[0]
        assert finished.engine == "ray"
        assert finished.workers == len(ready)
        assert finished.retries == 0
        assert len(callback.of(TileFinished)) == 40


class TestErrors:
    def test_in_a_sink_on_a_worker(self, ray_engine, report, out):
        error = ZeroDivisionError("in the sink")
        sink = RaisingSink(report, 3, error)
        with pytest.raises(TileError, match=r"tile 3 .*on worker-.*in the sink") as caught:
            raymm.chain([LEFT, RIGHT]).run(out, sink, tile_columns=4, engine=ray_engine)
        assert isinstance(caught.value.__cause__, ZeroDivisionError)
        assert caught.value.attempts == 1
        assert caught.value.device == "cpu"
        assert "in the sink" in "".join(caught.value.__cause__.__notes__)  # the worker's traceback
        assert names_in(out.parent) == []

    def test_of_ours_in_a_worker_keeps_its_type_and_number(self, ray_engine, report, out):
        sink = RaisingSink(report, 3, SinkError(28, "the disk is full"))
        with pytest.raises(SinkError, match="the disk is full") as caught:
            raymm.chain([LEFT, RIGHT]).run(out, sink, tile_columns=4, engine=ray_engine)
        assert caught.value.errno == 28
        assert names_in(out.parent) == []

    def test_overflow_of_the_result(self, ray_engine, out):
        with pytest.raises(raymm.ResultOverflowError, match="int8"):
            raymm.multi_dot(
                [np.array([[100]]), np.array([[1, 2, 3]])],
                out=out,
                dtype=np.int8,
                engine=ray_engine,
            )
        assert names_in(out.parent) == []

    def test_a_file_that_is_cut_short_while_it_is_read(self, ray_engine, tmp_path, out):
        path = tmp_path / "C.npy"
        np.save(path, RIGHT)
        chain = raymm.chain([LEFT, path])
        os.truncate(path, 300)
        with pytest.raises(raymm.SourceError, match="cut short"):
            chain.write(out, tile_columns=4, engine=ray_engine)
        assert names_in(out.parent) == []

    @pytest.mark.parametrize("kind", [WorkerReady, TileFinished])
    def test_an_interrupt(self, ray_engine, report, out, kind):
        sink = FolderSink(report)
        with pytest.raises(KeyboardInterrupt):
            raymm.chain([LEFT, RIGHT]).run(
                out,
                sink,
                tile_columns=1,
                engine=ray_engine,
                progress=InterruptingCallback(kind, 1),
            )
        assert len(sink.notes("tile-")) <= 5
        assert names_in(out.parent) == []
        np.testing.assert_array_equal(
            raymm.multi_dot([LEFT, RIGHT], engine=ray_engine), LEFT @ RIGHT
        )


class TestLostWorkers:
    @pytest.mark.parametrize("sinks", ["file", "memory"])
    def test_a_tile_that_kills_its_worker_once(self, ray_engine, report, out, sinks):
        killing, callback = KillingSink(report, tile=5, times=1), CountingCallback()
        kept = raymm.Npy(out) if sinks == "file" else raymm.Array()
        found, _ = raymm.chain([LEFT, RIGHT]).run(
            kept, killing, tile_columns=2, engine=ray_engine, progress=callback
        )
        np.testing.assert_array_equal(found, LEFT @ RIGHT)
        assert len(callback.of(WorkerLost)) == 1
        assert 1 <= len(callback.of(TileRetried)) <= 2
        assert callback.of(RunFinished)[0].retries == len(callback.of(TileRetried))
        assert sorted(event.tile.index for event in callback.of(TileFinished)) == list(range(20))
        # The one that takes its place may still be starting when the other is done.
        assert 2 <= len(callback.of(WorkerReady)) <= 3

    def test_the_only_worker(self, ray_room, report, out):
        killing = KillingSink(report, tile=3, times=2)
        with raymm.RayEngine(num_workers=1) as engine:
            found, _ = raymm.chain([LEFT, RIGHT]).run(out, killing, tile_columns=5, engine=engine)
        np.testing.assert_array_equal(found, LEFT @ RIGHT)
        assert len(killing.notes("kill-")) == 2
        assert len(set(killing.pids())) == 3

    def test_a_worker_that_died_between_two_calls(self, ray_engine, out):
        callback = CountingCallback()
        raymm.multi_dot([LEFT, RIGHT], tile_columns=1, engine=ray_engine, progress=callback)
        os.kill(callback.of(WorkerReady)[0].pid, signal.SIGKILL)
        found = raymm.multi_dot([LEFT, RIGHT], out=out, tile_columns=1, engine=ray_engine)
        np.testing.assert_array_equal(found, LEFT @ RIGHT)


class TestResources:
    def test_a_worker_per_cpu_by_default(self, ray_room):
        resources = raymm.RayEngine().resources()
        assert (resources.engine, resources.workers, resources.threads) == ("ray", 2, 1)
        assert (resources.nodes, resources.gpus, resources.shares_memory) == (1, 0, False)
        assert resources.store_nbytes <= 100_000_000

    def test_workers_share_the_cpus(self, ray_room):
        for workers, threads in ((1, 2), (2, 1), (5, 1)):
            resources = raymm.RayEngine(num_workers=workers).resources()
            assert (resources.workers, resources.threads) == (workers, threads)
        assert raymm.RayEngine(num_workers=1, threads_per_worker=7).resources().threads == 7

    def test_asking_starts_no_worker(self, ray_room):
        engine = raymm.RayEngine()
        engine.resources()
        assert engine._workers() == []
        print_of = str(raymm.chain([LEFT, RIGHT]).plan(engine=engine))
        assert "ray, 2 x 1 threads" in print_of
        assert engine._workers() == []

    def test_more_workers_than_cpus_start_as_far_as_they_can(self, ray_room, out):
        with raymm.RayEngine(num_workers=4) as engine:
            found = raymm.multi_dot([LEFT, RIGHT], out=out, tile_columns=1, engine=engine)
        np.testing.assert_array_equal(found, LEFT @ RIGHT)

    @pytest.mark.parametrize("workers", [0, -1])
    def test_no_workers(self, workers):
        with pytest.raises(PlanError, match="num_workers"):
            raymm.RayEngine(num_workers=workers)

    def test_blocks_that_travel_stay_within_a_share_of_the_store(self, ray_engine):
        store = ray_engine.resources().store_nbytes
        assert ray_engine.depth(2, 0) == 2
        assert ray_engine.depth(2, 1000) == 2
        assert ray_engine.depth(5, store // 20) < 5
        assert ray_engine.depth(2, store) == 1


def test_ray_client_is_refused(ray_cluster, monkeypatch):
    monkeypatch.setattr(ray_cluster, "is_initialized", lambda: False)
    with pytest.raises(PlanError, match="ray job submit"):
        raymm.multi_dot([LEFT, RIGHT], engine=raymm.RayEngine(address="ray://localhost:1"))


def test_two_threads_take_turns(ray_engine):
    found = []
    threads = [
        threading.Thread(
            target=lambda scale=scale: found.append(
                (scale, raymm.multi_dot([LEFT * scale, RIGHT], tile_columns=7, engine=ray_engine))
            )
        )
        for scale in (1, 2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 2
    for scale, product in found:
        np.testing.assert_array_equal(product, scale * LEFT @ RIGHT)


def test_a_closed_engine_opens_again(ray_room):
    engine = raymm.RayEngine(num_workers=1)
    for _ in range(2):
        with engine:
            found = raymm.multi_dot([LEFT, RIGHT], engine=engine)
        np.testing.assert_array_equal(found, LEFT @ RIGHT)
        assert engine._workers() == []


def test_an_actor_of_a_worker_that_failed_to_load_is_not_used(ray_engine, report, out):
    class Unattachable(FolderSink):
        def attach(self):
            raise OSError("cannot attach")

    with pytest.raises((WorkerStartError, ExecutionError), match="cannot attach"):
        raymm.chain([LEFT * 3, RIGHT]).run(out, Unattachable(report), engine=ray_engine)
    found = raymm.multi_dot([LEFT * 3, RIGHT], engine=ray_engine)
    np.testing.assert_array_equal(found, 3 * LEFT @ RIGHT)


def test_workers_answer_after_many_runs_that_ended_early(ray_engine, report, out):
    # A worker whose queued calls were cancelled once kept silent for half a minute (Ray 2.60).
    chain = raymm.chain([LEFT, RIGHT])
    for count in (1, 2, 3, 5, 8) * 4:
        with pytest.raises(KeyboardInterrupt):
            chain.write(
                out,
                tile_columns=1,
                max_in_flight=3,
                engine=ray_engine,
                progress=InterruptingCallback(TileFinished, count),
            )
        assert names_in(out.parent) == []
    callback = CountingCallback()
    chain.write(out, tile_columns=1, engine=ray_engine, progress=callback)
    assert callback.of(WorkerLost) == []
    np.testing.assert_array_equal(np.load(out), LEFT @ RIGHT)


def test_what_ray_reports_of_a_lost_tile(ray_engine, monkeypatch):
    from ray import exceptions  # noqa: PLC0415  Ray is loaded only where it is used

    from raymm.engines import actors  # noqa: PLC0415

    reported = {
        exceptions.OutOfMemoryError("killed"): True,
        exceptions.WorkerCrashedError(): True,
        exceptions.NodeDiedError("gone"): True,
        exceptions.ObjectLostError("00" * 28, None, ""): False,
    }
    for error, is_gone in reported.items():

        def get(reference, error=error):
            raise error

        with monkeypatch.context() as patch:
            patch.setattr(actors.RAY, "get", get)
            with pytest.raises(LostError) as caught:
                ray_engine._result("a call")
        assert caught.value.is_worker_gone is is_gone


def test_the_caller_may_start_ray_anew_between_two_calls(tmp_path):
    """In a process of its own: Ray stops and starts there."""
    script = tmp_path / "again.py"
    script.write_text(
        "import numpy as np, ray, raymm\n"
        "chain = raymm.chain([np.eye(2), np.ones((2, 4))])\n"
        "engine = raymm.RayEngine(num_workers=1)\n"
        "for _ in range(2):\n"
        "    ray.init(address='local', num_cpus=1, include_dashboard=False)\n"
        "    assert chain.compute(engine=engine).sum() == 8\n"
        "    ray.shutdown()\n"
        "engine.close()\n"
    )
    done = subprocess.run(
        [sys.executable, script], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr


def test_tiles_that_the_object_store_cannot_hold_are_refused(ray_engine):
    C = np.broadcast_to(np.float32(1), (4, 40_000_000))
    with pytest.raises(MemoryLimitError, match="object store"):
        raymm.chain([np.ones((1, 4), np.float32), C]).run(
            NullSink(), engine=ray_engine, tile_columns=20_000_000
        )


def test_arguments_of_the_engine_are_checked():
    for wrong in ({"num_workers": 0}, {"threads_per_worker": -1}, {"num_gpus_per_worker": -1}):
        with pytest.raises(PlanError, match="must"):
            raymm.RayEngine(**wrong)


def test_another_cluster_than_the_one_that_is_up_is_refused(ray_engine, ray_cluster):
    chain = raymm.chain([LEFT, RIGHT])
    with pytest.raises(PlanError, match="is connected to"):
        chain.compute(engine=raymm.RayEngine(address="127.0.0.1:1"))
    here = ray_cluster.get_runtime_context().gcs_address
    assert raymm.RayEngine(address=here).resources().workers >= 1
