"""Cases from public reports about Ray, threads and failures, each named after its id."""

import gc
import os
import pickle
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path

import numpy as np
import psutil
import pytest
import threadpoolctl

import raymm
from raymm.engines.base import ATTEMPTS
from raymm.errors import ExecutionError, TileError, WorkerStartError
from raymm.events import TileFinished, TileRetried, WorkerLost, WorkerReady
from raymm.worker import Worker
from tests.conftest import RAY_STORE_NBYTES
from tests.contracts import names_in
from tests.doubles import (
    CountingCallback,
    FolderSink,
    KillingSink,
    ThreadSink,
    Unpicklable,
)

pytestmark = pytest.mark.ray

ROOT = Path(__file__).parents[1]


@pytest.fixture
def report(tmp_path):
    (tmp_path / "report").mkdir()
    return tmp_path / "report"


@pytest.fixture
def out(tmp_path):
    (tmp_path / "out").mkdir()
    return tmp_path / "out" / "D.npy"


@pytest.fixture
def puts(ray_cluster, monkeypatch):
    """The sizes of all that the driver puts into the object store."""
    sizes, plain = [], ray_cluster.put

    def put(value, *arguments, **options):
        sizes.append(len(pickle.dumps(value)))
        return plain(value, *arguments, **options)

    monkeypatch.setattr(ray_cluster, "put", put)
    return sizes


def wait_until(condition, seconds=60):
    """Wait for what another process is about to do; fail if it does not."""
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.02)
    return found


def references(ray):
    """Return the objects that this process keeps alive in the object store."""
    return set(ray._private.worker.global_worker.core_worker.get_all_reference_counts())


def assert_released(ray, before):
    """Wait until no object is kept alive that was not before; Ray frees them in batches."""

    def released():
        gc.collect()  # what an error's traceback still holds
        return references(ray) <= before

    wait_until(released, 20)


def spilled(ray):
    """Return what Ray's log says of objects that did not fit and went to the disk."""
    session = Path(ray._private.worker.global_worker.node.get_session_dir_path())
    lines = (session / "logs" / "raylet.out").read_text().splitlines()
    return [line for line in lines if "Spilled " in line]


class TestU74ResultsPinnedInTheObjectStore:
    def test_u74_c_from_memory_through_a_small_store(self, ray_room, out):
        # 160 MB of C through a store of 100 MB, 200 tiles of 0.8 MB; D has 8 MB a tile.
        rng = np.random.default_rng(0)
        left = rng.integers(-4, 5, (1000, 100)).astype(np.float32)
        right = rng.integers(-4, 5, (100, 400_000)).astype(np.float32)
        before, spilled_before = references(ray_room), spilled(ray_room)
        most = []
        with raymm.RayEngine(num_workers=2) as engine:

            def callback(event):
                most.append(len(references(ray_room) - before))

            product = raymm.multi_dot(
                [left, np.eye(100, dtype=np.float32), right],
                out=out,
                tile_columns=2000,
                engine=engine,
                progress=callback,
            )
            # At most 3 tiles a worker; beside them the factor, two actors and their receipts.
            assert max(most) <= 2 * 3 + 1 + 2 + 2 * 2 + 2
        assert_released(ray_room, before)
        assert spilled(ray_room) == spilled_before
        for columns in (slice(0, 3), slice(199_999, 200_002), slice(-3, None)):
            np.testing.assert_array_equal(product[:, columns], left @ right[:, columns])
        weights = np.ones(1000, np.float32)
        np.testing.assert_array_equal(weights @ product, (weights @ left) @ right)
        out.unlink()

    def test_u74_d_into_memory_through_a_small_store(self, ray_room):
        # 160 MB of D come back through a store of 100 MB, block by block.
        left = np.arange(1000, dtype=np.float32)[:, None] % 7
        right = np.arange(40_000, dtype=np.float32)[None, :] % 11
        before, spilled_before = references(ray_room), spilled(ray_room)
        with raymm.RayEngine(num_workers=2) as engine:
            product = raymm.multi_dot([left, right], tile_columns=2000, engine=engine)
        np.testing.assert_array_equal(product, left * right)
        assert_released(ray_room, before)
        assert spilled(ray_room) == spilled_before

    def test_u74_nothing_is_kept_after_an_error(self, ray_room, out, report):
        before = references(ray_room)
        with raymm.RayEngine(num_workers=2) as engine, pytest.raises(TileError):
            raymm.chain([np.eye(20), np.ones((20, 20_000))]).run(
                out, KillingSink(report, tile=3), tile_columns=1000, engine=engine
            )
        assert_released(ray_room, before)


class TestU80ThreadsTooManyOrTooFew:
    @pytest.fixture
    def settings(self):
        import torch  # noqa: PLC0415  two seconds, for this test only

        def read():
            pools = threadpoolctl.threadpool_info()
            return torch.get_num_threads(), [
                (pool["filepath"], pool["num_threads"]) for pool in pools
            ]

        return read

    @pytest.mark.parametrize(
        ("workers", "wanted", "threads"),
        [(1, None, 2), (2, None, 1), (1, "1", 1), (2, "1", 1)],
    )
    def test_u80_workers_times_threads_fit_the_cores(  # noqa: PLR0913  fixtures and a table
        self, ray_room, report, settings, monkeypatch, workers, wanted, threads
    ):
        if wanted is not None:
            monkeypatch.setenv("OMP_NUM_THREADS", wanted)
        before = settings()
        sink, callback = ThreadSink(report), CountingCallback()
        with raymm.RayEngine(num_workers=workers) as engine:
            assert engine.resources().threads == threads
            raymm.chain([np.ones((200, 50)), np.ones((50, 20_000))]).run(
                sink, tile_columns=2000, engine=engine, progress=callback
            )
        assert {event.threads for event in callback.of(WorkerReady)} == {threads}
        assert {note.split("-")[1] for note in sink.notes("blas-")} == {"1"}
        assert settings() == before

    def test_u80_a_single_worker_keeps_two_threads_busy(self, ray_room, report):
        sink = ThreadSink(report)
        with raymm.RayEngine(num_workers=1) as engine:
            raymm.chain([np.ones((2000, 50)), np.ones((50, 2000))]).run(
                sink, tile_columns=500, engine=engine
            )
        assert len(sink.notes("thread-")) >= 2


class TestU81ResidentFactorsSentAgainForEveryTile:
    def test_u81_once_per_worker_and_not_again(self, ray_room, puts, out):
        left = np.random.default_rng(0).normal(size=(2000, 2000))
        right = np.broadcast_to(np.arange(2000.0), (2000, 2000))
        with warnings.catch_warnings(), raymm.RayEngine(num_workers=2) as engine:
            warnings.simplefilter("error")
            for _ in range(2):
                product = raymm.multi_dot([left, right], tile_columns=40, engine=engine)
                np.testing.assert_allclose(product[:, 1], left.sum(axis=1), atol=1e-9)
        factors = [size for size in puts if size > 10_000_000]
        assert len(factors) == 1  # the second call sends nothing of it
        assert factors[0] < 1.01 * left.nbytes
        # C travels tile by tile: never the whole of it, and no tile twice in a call.
        tiles = [size for size in puts if size <= 10_000_000]
        assert len(tiles) == 2 * 50
        assert max(tiles) < 2000 * 40 * 8 + 2000

    def test_u81_a_factor_larger_than_the_store(self, ray_room, capfd):
        left = np.ones((4400, 4400))
        right = np.broadcast_to(np.arange(4500.0), (4400, 4500))
        assert left.nbytes > 150_000_000 > RAY_STORE_NBYTES
        with warnings.catch_warnings(), raymm.RayEngine(num_workers=2) as engine:
            warnings.simplefilter("error")
            product = raymm.multi_dot([left, right], tile_columns=100, engine=engine)
        np.testing.assert_array_equal(
            product, np.broadcast_to(4400 * np.arange(4500.0), (4400, 4500))
        )
        assert "too large" not in "".join(capfd.readouterr())

    def test_u81_of_folded_factors_only_the_product_travels(self, ray_room, puts):
        left = np.ones((1000, 2))
        middle = np.ones((2, 1000))
        with raymm.RayEngine(num_workers=2) as engine:
            # Cheaper kept apart: two thin factors, not their product of 8 MB.
            raymm.multi_dot([left, middle, np.ones((1000, 2000))], engine=engine, tile_columns=500)
        assert max(puts) < 5_000_000

    def test_u81_a_file_is_never_put(self, ray_room, puts, tmp_path):
        np.save(tmp_path / "C.npy", np.ones((100, 10_000)))
        with raymm.RayEngine(num_workers=2) as engine:
            raymm.multi_dot(
                [np.ones((3, 100)), tmp_path / "C.npy"], tile_columns=100, engine=engine
            )
        assert len(puts) == 1
        assert puts[0] < 10_000

    def test_u81_a_worker_is_started_with_little(self):
        # What a worker's start sends is its name and thread count, whatever the factors.
        assert len(pickle.dumps(Worker)) < 1000


class TestU85WorkerKilledMidRun:
    TILES = 40

    @pytest.fixture
    def operands(self):
        rng = np.random.default_rng(0)
        return [rng.normal(size=shape).astype(np.float32) for shape in ((300, 40), (40, 40 * 50))]

    @pytest.fixture
    def undisturbed(self, operands):
        return raymm.multi_dot(operands, tile_columns=50, engine="local")

    def test_u85_one_worker_then_each(self, ray_room, out, operands, undisturbed):
        callback = CountingCallback()

        def kill(event):
            callback(event)
            done = len(callback.of(TileFinished))
            ready = callback.of(WorkerReady)
            if type(event) is TileFinished and done in (10, 25):
                alive = [each.pid for each in ready if psutil.pid_exists(each.pid)]
                os.kill(alive[0 if done == 10 else -1], signal.SIGKILL)

        with raymm.RayEngine(num_workers=2) as engine:
            product = raymm.multi_dot(
                operands, out=out, tile_columns=50, engine=engine, progress=kill
            )
        np.testing.assert_array_equal(product, undisturbed)
        tiles = callback.of(TileFinished)
        assert sorted(event.tile.index for event in tiles) == list(range(self.TILES))
        assert [event.done for event in tiles] == list(range(1, self.TILES + 1))
        assert len(callback.of(WorkerLost)) == 2

    def test_u85_into_memory(self, ray_room, report, operands, undisturbed):
        killing, callback = KillingSink(report, tile=7, times=2), CountingCallback()
        with raymm.RayEngine(num_workers=2) as engine:
            product, _ = raymm.chain(operands).run(
                raymm.Array(), killing, tile_columns=50, engine=engine, progress=callback
            )
        np.testing.assert_array_equal(product, undisturbed)
        assert len(killing.notes("kill-")) == 2
        assert len(callback.of(TileRetried)) >= 2

    def test_u85_a_tile_that_kills_its_worker_every_time(self, ray_room, out, report, operands):
        killing, callback = KillingSink(report, tile=11), CountingCallback()
        with raymm.RayEngine(num_workers=2) as engine:
            with pytest.raises(TileError, match="tile 11 ") as caught:
                raymm.chain(operands).run(
                    out, killing, tile_columns=50, engine=engine, progress=callback
                )
            error = caught.value
            assert (error.tile.index, error.attempts) == (11, ATTEMPTS)
            assert error.__cause__ is not None
            assert len(killing.notes("kill-")) == ATTEMPTS
            assert names_in(out.parent) == []
            again = raymm.multi_dot(operands, engine=engine)
            np.testing.assert_array_equal(again.shape, (300, 2000))


class TestU86DriverWaitsForEverOrMissesTheError:
    def test_u86_a_tile_that_ends_its_process(self, ray_room, out, report):
        killing = KillingSink(report, tile=3)
        callback = CountingCallback()
        with raymm.RayEngine(num_workers=2) as engine, pytest.raises(TileError) as caught:
            raymm.chain([np.eye(3), np.ones((3, 40))]).run(
                out, killing, tile_columns=4, engine=engine, progress=callback
            )
        assert caught.value.tile.index == 3
        assert isinstance(caught.value, ExecutionError)
        assert isinstance(caught.value, RuntimeError)
        assert caught.value.__cause__ is not None
        self.assert_gone({event.pid for event in callback.of(WorkerReady)} | set(killing.pids()))

    def test_u86_a_factor_that_cannot_be_unpickled(self, ray_room, monkeypatch, out):
        plain = ray_room.put
        monkeypatch.setattr(ray_room, "put", lambda value: plain(Unpicklable()))
        engine = raymm.RayEngine(num_workers=2)
        with engine, pytest.raises(WorkerStartError, match="no room for this factor") as caught:
            raymm.multi_dot([np.eye(3), np.ones((3, 40))], out=out, engine=engine)
        assert isinstance(caught.value.__cause__, MemoryError)
        assert isinstance(caught.value, RuntimeError)
        assert names_in(out.parent) == []

    def assert_gone(self, pids):
        assert pids
        for pid in pids:
            wait_until(lambda pid=pid: is_gone(pid), 30)


def is_gone(pid):
    """Whether a process has ended; the name may be taken again only much later."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


SCRIPT = """
import sys
import numpy as np
import raymm
from raymm.events import TileFinished, WorkerReady

def report(event):
    if isinstance(event, WorkerReady):
        print("pid", event.pid, flush=True)
    if isinstance(event, TileFinished):
        print("tile", flush=True)

address = sys.argv[2] if len(sys.argv) > 2 else None
huge = np.broadcast_to(np.float32(1), (8, 20_000_000))
with raymm.RayEngine(num_workers=2, address=address) as engine:
    raymm.multi_dot(
        [np.ones((10, 8), np.float32), huge],
        out=sys.argv[1],
        tile_columns=1000,
        engine=engine,
        progress=report,
    )
"""


class TestU87CtrlCAndCrashesLeaveProcessesBehind:
    @pytest.fixture
    def start(self, out):
        started = []

        def run(code, *arguments):
            process = subprocess.Popen(
                [sys.executable, "-c", code, str(out), *map(str, arguments)],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                cwd=out.parent.parent,
                # An interrupt of the terminal goes to the whole group; ours is for one process.
                start_new_session=True,
            )
            started.append(process)
            return process

        yield run
        for process in started:
            if process.poll() is None:
                process.kill()
            process.communicate()

    def first_tiles(self, process):
        """Return the workers' processes once some tiles are done."""
        pids, tiles = set(), 0
        for line in process.stdout:
            kind, _, pid = line.strip().partition(" ")
            if kind == "pid":
                pids.add(int(pid))
            tiles += kind == "tile"
            if tiles >= 5 and len(pids) == 2:
                return pids
        raise AssertionError(process.stderr.read())

    def test_u87_interrupt(self, start, out):
        process = start(SCRIPT)
        pids = self.first_tiles(process)
        assert names_in(out.parent) == ["D.npy.partial"]
        family = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(signal.SIGINT)
        _, stderr = process.communicate(timeout=60)
        assert process.returncode != 0
        assert "KeyboardInterrupt" in stderr
        assert names_in(out.parent) == []
        for each in pids | {each.pid for each in family}:
            wait_until(lambda each=each: is_gone(each), 15)

    def test_u87_kill(self, start, out):
        process = start(SCRIPT)
        pids = self.first_tiles(process)
        process.kill()
        process.wait(timeout=60)
        assert not out.exists()
        for each in pids:  # agents of Ray's own take a minute
            wait_until(lambda each=each: is_gone(each), 15)
        # What it left behind is in nobody's way.
        assert names_in(out.parent) == ["D.npy.partial"]
        raymm.multi_dot([np.eye(2), np.ones((2, 3))], out=out, engine="local")
        assert names_in(out.parent) == ["D.npy"]

    def test_u87_interrupt_leaves_the_user_s_ray_up(self, ray_room, start, out):
        address = ray_room.get_runtime_context().gcs_address
        process = start(SCRIPT, address)
        pids = self.first_tiles(process)
        process.send_signal(signal.SIGINT)
        _, stderr = process.communicate(timeout=60)
        assert "KeyboardInterrupt" in stderr
        assert names_in(out.parent) == []
        for each in pids:
            wait_until(lambda each=each: is_gone(each), 15)
        assert ray_room.get(ray_room.remote(lambda: 7).remote(), timeout=60) == 7


class TestU88RayAlreadyRunningOrCalledFromInsideATask:
    def test_u88_a_the_user_s_cluster_is_used_and_left_up(self, ray_room):
        address = ray_room.get_runtime_context().gcs_address
        with raymm.RayEngine() as engine:
            product = raymm.multi_dot([np.eye(3), np.ones((3, 40))], engine=engine)
        np.testing.assert_array_equal(product, np.ones((3, 40)))
        assert ray_room.is_initialized()
        assert ray_room.get_runtime_context().gcs_address == address
        product = raymm.multi_dot([np.eye(3), np.ones((3, 40))], engine="ray")
        np.testing.assert_array_equal(product, np.ones((3, 40)))
        assert ray_room.is_initialized()

    def test_u88_a_auto_takes_a_ray_that_is_up(self, ray_room):
        callback = CountingCallback()
        product = raymm.multi_dot([np.eye(3), np.ones((3, 40))], progress=callback)
        np.testing.assert_array_equal(product, np.ones((3, 40)))
        assert os.getpid() not in {event.pid for event in callback.of(WorkerReady)}
        plan = raymm.chain([np.eye(3), np.ones((3, 40))]).plan()
        assert "Ray is up" in str(plan)

    def test_u88_b_inside_a_task(self, ray_room):
        @ray_room.remote(num_cpus=1)
        def task():
            address = ray_room.get_runtime_context().gcs_address
            with raymm.RayEngine() as engine:
                product = raymm.multi_dot(
                    [np.eye(3), np.ones((3, 40))], tile_columns=4, engine=engine
                )
            return product, address, ray_room.is_initialized()

        product, address, is_up = ray_room.get(task.remote(), timeout=100)
        np.testing.assert_array_equal(product, np.ones((3, 40)))
        assert address == ray_room.get_runtime_context().gcs_address
        assert is_up

    def test_u88_c_two_engines_in_turn_start_and_end_a_ray_of_their_own(self, run_python):
        printed = run_python(
            "import signal, numpy as np, ray, raymm\n"
            "handler = signal.getsignal(signal.SIGTERM)\n"
            "with raymm.RayEngine(num_workers=1) as engine:\n"
            "    D = raymm.multi_dot([np.eye(3), np.ones((3, 40))], engine=engine)\n"
            "    assert (D == 1).all() and ray.is_initialized()\n"
            "assert not ray.is_initialized()\n"
            "assert signal.getsignal(signal.SIGTERM) is handler\n"
            "D = raymm.multi_dot([np.eye(3), np.ones((3, 40))], engine='ray')\n"
            "assert (D == 1).all() and not ray.is_initialized()\n"
            "print('done')\n"
        )
        assert printed == "done\n"  # the library itself prints nothing

    def test_u88_d_e_the_caller_holds_the_only_cpu(self, run_python):
        printed = run_python(
            "import numpy as np, ray, raymm, raymm.engines.base as base\n"
            "ray.init(address='local', num_cpus=1, include_dashboard=False, log_to_driver=False)\n"
            "def product():\n"
            "    with raymm.RayEngine() as engine:\n"
            "        return raymm.multi_dot([np.eye(3), np.ones((3, 9))], engine=engine)\n"
            "@ray.remote(num_cpus=1)\n"
            "def task():\n"
            "    return product()\n"
            "@ray.remote(num_cpus=1)\n"
            "class Actor:\n"
            "    def product(self):\n"
            "        base.START_SECONDS = 3\n"
            "        try:\n"
            "            product()\n"
            "        except raymm.WorkerStartError as error:\n"
            "            return str(error)\n"
            "assert (ray.get(task.remote(), timeout=60) == 1).all()\n"
            "print('task done')\n"
            "print(ray.get(Actor.remote().product.remote(), timeout=60))\n"
        )
        assert printed.startswith("task done\n")
        assert "1 workers of 1 CPU" in printed
        assert "the cluster has 1 CPUs, 0 of them free" in printed


class TestU90WorkerSeesNoGpu:
    def test_u90_an_explicit_request_is_refused_at_once(self, ray_room, out):
        engine = raymm.RayEngine(num_gpus_per_worker=1)
        with engine, pytest.raises(WorkerStartError) as caught:
            raymm.multi_dot([np.eye(3), np.ones((3, 40))], out=out, engine=engine)
        assert "1 GPU per worker" in str(caught.value)
        assert "the cluster has 0" in str(caught.value)
        assert isinstance(caught.value, ExecutionError)
        assert names_in(out.parent) == []
        assert engine._workers() == []

    @pytest.mark.parametrize("visible", [None, ""])
    def test_u90_auto_uses_the_processor_and_says_so(self, ray_room, monkeypatch, visible):
        if visible is not None:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        callback = CountingCallback()
        chain = raymm.chain([np.eye(3), np.ones((3, 40))])
        chain.compute(engine="auto", progress=callback)
        assert {event.device for event in callback.of(WorkerReady)} == {"cpu"}
        assert "threads" in str(chain.plan(engine="auto"))


def test_doubles_report_from_workers(ray_engine, report):
    # What these cases rest on: a sink of the tests reaches the workers and reports back.
    sink, callback = FolderSink(report), CountingCallback()
    raymm.chain([np.eye(3), np.ones((3, 40))]).run(
        sink, tile_columns=1, engine=ray_engine, progress=callback
    )
    assert set(sink.pids()) >= {event.pid for event in callback.of(WorkerReady)}
    assert os.getpid() not in sink.pids()
