"""Stand-ins for sources, sinks, callbacks and engines; importable by Ray workers."""

import os
import signal
import threading
import uuid
from collections import Counter, defaultdict, deque
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import threadpoolctl

from raymm.engines.base import Engine, LostError, Outcome
from raymm.kernels.cpu import Arithmetic
from raymm.request import Resources
from raymm.sinks.base import OutputSpec
from raymm.sources.memory import ArraySource
from raymm.tiles import Grid, Layout
from raymm.worker import Job, Receipt, factor_key


def make_job(  # noqa: PLR0913  what a test leaves out has a default
    factors, columns, sinks, *, tile_columns=1, dtype=np.float64, layout=None, lanes=1
):
    """Return a job for folded `factors`, and the factors by their keys."""
    rows = factors[0].shape[0]
    spec = make_spec((rows, columns), dtype)
    layout = layout or sinks[0].layout(spec)
    grid = Grid(rows, columns, tile_columns, tile_columns, rows, layout.halo_columns)
    dtype = np.dtype(dtype)
    job = Job(
        id=uuid.uuid4().hex,
        factor_keys=tuple(map(factor_key, factors)),
        grid=grid,
        layout=layout,
        arithmetic=Arithmetic(dtype, dtype),
        sinks=tuple(sinks),
        travelling=sum(sink.layout(spec).travels for sink in sinks),
        lanes=lanes,
    )
    return job, {factor_key(factor): factor for factor in factors}


def make_spec(shape, dtype=np.float64, *, is_transposed=False, grid=None):
    """Return what a sink is told of a result of this shape, as the user sees it."""
    matrix = shape if len(shape) == 2 else (1, *shape) if len(shape) == 1 else (1, 1)
    rows, columns = matrix[::-1] if is_transposed else matrix
    return OutputSpec(rows, columns, is_transposed, shape, np.dtype(dtype), grid)


class NullSink:
    """Accepts everything and keeps nothing; what the other doubles begin with."""

    name = "nothing"

    def layout(self, spec):
        item = spec.dtype.itemsize
        return Layout("C", 2**15, 0, spec.columns * item, item)

    def overwrites(self, path, array):
        return False

    def open(self, spec, overwrite):
        pass

    def attach(self):
        pass

    def write(self, block):
        return None

    def detach(self, sync):
        pass

    def receive(self, piece):
        raise AssertionError(piece)

    def view(self):
        return None

    def commit(self):
        return None

    def abort(self):
        pass


class RecordingSink(NullSink):
    """Remembers in which order its methods were called; for engines in this process."""

    def __init__(self):
        self.calls = []
        self.tiles = Counter()
        self._lock = threading.Lock()

    def _note(self, name):
        with self._lock:
            self.calls.append(name)

    def open(self, spec, overwrite):
        self._note("open")

    def attach(self):
        self._note("attach")

    def write(self, block):
        self._note("write")
        with self._lock:
            self.tiles[block.tile.index] += 1

    def detach(self, sync):
        self._note(f"detach {sync}")

    def commit(self):
        self._note("commit")
        return "committed"

    def abort(self):
        self._note("abort")


class FlakySink(RecordingSink):
    """Raises `error` on the n-th write, counted from 1."""

    def __init__(self, fail_on, error):
        super().__init__()
        self.fail_on, self.error = fail_on, error

    def write(self, block):
        super().write(block)
        if sum(self.tiles.values()) == self.fail_on:
            raise self.error


class SlowSink(RecordingSink):
    """Blocks every write of the tiles in `held` until `release` is set."""

    def __init__(self, held=()):
        super().__init__()
        self.held, self.release, self.reached = (
            frozenset(held),
            threading.Event(),
            threading.Event(),
        )

    def write(self, block):
        super().write(block)
        if block.tile.index in self.held:
            self.reached.set()
            assert self.release.wait(60)


class FolderSink(NullSink):
    """Reports from any process, by empty files in a folder that all of them see."""

    def __init__(self, folder):
        self.folder = str(folder)

    def note(self, name):
        (Path(self.folder) / name).touch()

    def notes(self, prefix):
        """Return what follows `prefix` in the notes' names, sorted."""
        names = (path.name for path in Path(self.folder).iterdir())
        return sorted(name.removeprefix(prefix) for name in names if name.startswith(prefix))

    def pids(self):
        """Return the processes that attached this sink."""
        return [int(each) for each in self.notes("pid-")]

    def attach(self):
        self.note(f"pid-{os.getpid()}")

    def write(self, block):
        self.note(f"tile-{block.tile.index}")


class ThreadSink(FolderSink):
    """Reports how many threads BLAS has in each process, and which thread wrote."""

    def write(self, block):
        pools = threadpoolctl.threadpool_info()
        blas = max((pool["num_threads"] for pool in pools if pool["user_api"] == "blas"), default=1)
        self.note(f"blas-{os.getpid()}-{blas}")
        self.note(f"thread-{os.getpid()}-{threading.get_ident()}")


class RaisingSink(FolderSink):
    """Raises in the worker when it receives a block of one tile."""

    def __init__(self, folder, tile, error):
        super().__init__(folder)
        self.tile, self.error = tile, error

    def write(self, block):
        super().write(block)
        if block.tile.index == self.tile:
            raise self.error


class KillingSink(FolderSink):
    """Kills its process when it receives a block of one tile, the first `times` times."""

    def __init__(self, folder, tile, times=10**6):
        super().__init__(folder)
        self.tile, self.times = tile, times

    def write(self, block):
        super().write(block)
        if block.tile.index == self.tile and len(self.notes("kill-")) < self.times:
            self.note(f"kill-{uuid.uuid4().hex}")
            os.kill(os.getpid(), signal.SIGKILL)


class Unpicklable:
    """A value that arrives nowhere: unpickling it raises."""

    def __reduce__(self):
        return _raise_memory_error, ()


def _raise_memory_error():
    raise MemoryError("no room for this factor")


@dataclass(frozen=True)
class CountingSource(ArraySource):
    """An array that counts what is read of it."""

    reads: list = field(default_factory=list, compare=False)

    def read(self, start, stop, buffer):
        self.reads.append((start, stop))
        return super().read(start, stop, buffer)


@dataclass(frozen=True)
class FlakySource(ArraySource):
    """An array one column of which cannot be read."""

    broken: int = 0
    error: BaseException = field(default_factory=lambda: OSError(5, "this column is unreadable"))

    def read(self, start, stop, buffer):
        if start <= self.broken < stop:
            raise self.error
        return super().read(start, stop, buffer)


class CountingCallback:
    """Keeps the events of a run, in order."""

    def __init__(self):
        self.events = []

    def __call__(self, event):
        self.events.append(event)

    def of(self, kind):
        """Return the events of one class."""
        return [event for event in self.events if type(event) is kind]


class InterruptingCallback(CountingCallback):
    """Raises `error` in the driver at the n-th event of one class."""

    def __init__(self, kind, count, error=KeyboardInterrupt):
        super().__init__()
        self.kind, self.count, self.error = kind, count, error

    def __call__(self, event):
        super().__call__(event)
        if type(event) is self.kind and len(self.of(self.kind)) == self.count:
            raise self.error


class RaisingEngine(Engine):
    """An engine that must not be started: what is refused is refused before."""

    name = "raising"

    def resources(self):
        return Resources("raising", 1, 1, 10**18)

    def open(self, in_flight_nbytes=0):
        raise AssertionError("the engine was started")

    def close(self):
        pass

    def _unload(self, job_id, sync):
        raise AssertionError("the engine was started")

    _workers = _load = _submit = _wait = _result = _replace = _finish = _drain = open


@dataclass
class FakeEngine(Engine):
    """Workers that follow a script, one call at a time, in this thread and without a clock.

    ``script(worker, tile, attempt)`` says what comes of a tile: ``"ok"``, ``"lost"`` (the worker
    lives), ``"dies"`` (the worker and all that is queued on it are gone), or an exception to raise.
    ``starting(worker)`` says it of a worker's load: also ``"never"``.
    """

    workers: int = 2
    script: object = None
    starting: object = None
    order: object = field(default_factory=lambda: np.random.default_rng(0))
    clock: float = 0.0
    """Seconds that have passed: every empty wait adds its time-out."""

    name = "fake"

    def __post_init__(self):
        super().__init__()
        self.live, self.queues = [], defaultdict(deque)
        self.results, self.attempts = {}, Counter()
        self.submitted, self.finished, self.drained, self.replaced = [], [], [], []
        self.most_in_flight = Counter()
        self.count = 0

    def resources(self):
        return Resources("fake", self.workers, 1, 10**12)

    def open(self, in_flight_nbytes=0):
        while len(self.live) < self.workers:
            self._start()

    def close(self):
        self.live.clear()

    def _unload(self, job_id, sync):
        pass

    def _start(self):
        worker = f"fake-{self.count}"
        self.count += 1
        self.live.append(worker)
        return worker

    def _workers(self):
        return list(self.live)

    def _load(self, worker, job, factors):
        return self._queue(worker, None)

    def _submit(self, worker, job, call):
        self.submitted.append((worker, call[0].index))
        return self._queue(worker, call[0])

    def _queue(self, worker, tile):
        handle = object()
        self.queues[worker].append((handle, tile))
        tiles = sum(1 for _, each in self.queues[worker] if each is not None)
        self.most_in_flight[worker] = max(self.most_in_flight[worker], tiles)
        return handle

    def _wait(self, handles, timeout):
        asked = set(handles)
        assert len(asked) == len(handles)
        assert asked == self.results.keys() | {
            handle for queue in self.queues.values() for handle, _ in queue
        }
        able = [worker for worker in self.queues if self._is_able(worker)]
        if not self.results and able:
            self._step(able[self.order.integers(len(able))])
        if not self.results:
            self.clock += timeout
        return list(self.results)

    def _is_able(self, worker):
        queue = self.queues[worker]
        return bool(queue) and (queue[0][1] is not None or self._fate(worker, None) != "never")

    def _fate(self, worker, tile):
        if tile is None:
            return "ok" if self.starting is None else self.starting(worker)
        if self.script is None:
            return "ok"
        return self.script(worker, tile, self.attempts[tile.index])

    def _step(self, worker):
        handle, tile = self.queues[worker].popleft()
        if tile is not None:
            self.attempts[tile.index] += 1
        fate = self._fate(worker, tile)
        if fate == "ok":
            self.results[handle] = ("cpu", 1, 1) if tile is None else outcome_of(tile, worker)
        elif fate == "lost":
            self.results[handle] = LostError("its object is lost", False)
        elif fate == "dies":
            gone = LostError(f"{worker} died", True)
            self.results[handle] = gone
            for queued, _ in self.queues.pop(worker):
                self.results[queued] = gone
        else:
            self.results[handle] = fate

    def _result(self, handle):
        result = self.results.pop(handle)
        if isinstance(result, BaseException):
            raise result
        return result

    def _replace(self, worker):
        self.live.remove(worker)
        self.replaced.append(worker)
        return self._start()

    def _finish(self, tile):
        self.finished.append(tile.index)

    def _drain(self, handles):
        self.drained.append(len(handles))
        self.queues.clear()
        self.results.clear()


def outcome_of(tile, worker):
    """Return the outcome of a tile that took no time."""
    return Outcome(Receipt(tile, worker, 0.0, 0.0, 0.0, 0.0), ())
