"""Dispatch, retry and deduplication, once for all engines and without Ray."""

import threading
import time
from abc import ABC, abstractmethod
from collections import Counter, deque
from collections.abc import Generator, Hashable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from numpy.typing import NDArray

from raymm.engines.shares import InOrder, Runs
from raymm.errors import PlanError, RaymmError, TileError, WorkerStartError
from raymm.events import Callback, TileRetried, WorkerLost, WorkerReady
from raymm.request import Resources
from raymm.sinks.base import Piece
from raymm.sources.base import Source
from raymm.sources.pairs import Pair
from raymm.tiles import Tile
from raymm.worker import Job, Receipt

Call: TypeAlias = tuple[Tile, Source | Pair]
Handle: TypeAlias = Hashable
"""One call under way."""
WorkerId: TypeAlias = str

ATTEMPTS = 4
"""How often a tile is tried before `TileError`."""
START_SECONDS = 25.0
"""How long to wait while not one worker is ready."""
LOAD_RATE = 50e6
"""Bytes of factors per second that a slow start is granted on top."""
DRAIN_SECONDS = 5.0
"""How long tiles may still run after an error or an interrupt, before their workers are killed."""


class LostError(Exception):
    """A worker, or what it was to return, is gone; raised by an engine's ``_result``."""

    def __init__(self, reason: str, is_worker_gone: bool) -> None:
        super().__init__(reason, is_worker_gone)
        self.reason, self.is_worker_gone = reason, is_worker_gone


@dataclass(frozen=True, slots=True)
class Outcome:
    """A finished tile."""

    receipt: Receipt
    pieces: Iterable[Piece]
    """Fetched one at a time."""


class Engine(ABC):
    """Workers, and the one way to use them.

    An engine supplies the underscored methods; callers use ``resources``, ``open``, ``depth``,
    ``run`` and ``close``. One thread at a time drives an engine: the others wait.
    """

    name: str
    keeps_blocks = False
    """Whether tiles of D can stay where its workers are."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._is_running = False

    def __enter__(self) -> "Engine":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @abstractmethod
    def resources(self) -> Resources:
        """Return what there is to work with, without starting anything."""

    @abstractmethod
    def open(self, in_flight_nbytes: int = 0) -> None:
        """Start the workers, without waiting for them; again is harmless."""

    @abstractmethod
    def close(self) -> None:
        """End the workers; again is harmless."""

    def run(
        self,
        job: Job,
        factors: dict[str, NDArray[Any]],
        calls: Iterable[Call],
        max_in_flight: int,
        notify: Callback,
    ) -> Generator[Outcome, None, None]:
        """Yield each tile's outcome once, in the order they finish; then detach the job's sinks.

        The consumer's speed is the backpressure: a worker has at most `max_in_flight` tiles, and
        none is handed out while the consumer holds an outcome. Calls go to whichever worker is
        free; of a sequence each worker gets neighbours, as far as that keeps all of them busy.

        Raises
        ------
        TileError
            A tile failed by its own fault, or was lost `ATTEMPTS` times.
        WorkerStartError
            No worker became ready, or too many died.
        RaymmError
            What a source or sink raised in a worker.
        """
        with self._lock, self._limits():
            if self._is_running:
                raise PlanError("this engine is running a job: a callback needs one of its own")
            self._is_running = True
            shares: InOrder[Call] | Runs[Call] = InOrder(iter(calls))
            if isinstance(calls, Sequence):
                shares = Runs(calls, self.resources().workers)
            dispatch = _Dispatch(self, job, factors, shares, max_in_flight, notify)
            try:
                self.open()
                yield from dispatch.run()
            except BaseException:
                self._drain(list(dispatch.flight))
                with suppress(RaymmError):  # the first error is the one to tell
                    self._unload(job.id, sync=False)
                raise
            else:
                self._drain(list(dispatch.flight))
                self._unload(job.id, sync=True)
            finally:
                self._is_running = False

    def depth(self, max_in_flight: int, tile_nbytes: int) -> int:
        """Return how many tiles a worker may have, of so many bytes each in the object store."""
        del tile_nbytes
        return max_in_flight

    @abstractmethod
    def _unload(self, job_id: str, sync: bool) -> None:
        """Make all workers detach a job's sinks, durably if `sync`, and drop its buffers."""

    def _limits(self) -> AbstractContextManager[None]:
        """Return what must hold in this process while tiles are computed."""
        return nullcontext()

    @abstractmethod
    def _workers(self) -> list[WorkerId]: ...

    @abstractmethod
    def _load(self, worker: WorkerId, job: Job, factors: dict[str, NDArray[Any]]) -> Handle: ...

    @abstractmethod
    def _submit(self, worker: WorkerId, job: Job, call: Call) -> Handle: ...

    @abstractmethod
    def _wait(self, handles: list[Handle], timeout: float) -> list[Handle]: ...

    @abstractmethod
    def _result(self, handle: Handle) -> Any:
        """Return a tile's `Outcome` or a load's (device, threads, pid); `LostError` if gone."""

    @abstractmethod
    def _replace(self, worker: WorkerId) -> WorkerId:
        """End a worker that is gone or broken and start another."""

    @abstractmethod
    def _finish(self, tile: Tile) -> None:
        """Forget what was kept for repeating a tile."""

    @abstractmethod
    def _drain(self, handles: list[Handle]) -> None:
        """Make sure that nothing of these calls is running or will run."""

    def _diagnosis(self) -> str:
        """Say why no worker becomes ready."""
        return "no worker became ready"


@dataclass
class _Dispatch:
    """One run of one job."""

    engine: Engine
    job: Job
    factors: dict[str, NDArray[Any]]
    calls: InOrder[Call] | Runs[Call]
    depth: int
    notify: Callback
    flight: dict[Handle, tuple[WorkerId, Call | None]] = field(default_factory=dict)
    busy: dict[WorkerId, int] = field(default_factory=dict)
    """Tiles in flight on each worker that is ready."""
    alone: set[WorkerId] = field(default_factory=set)
    """Workers that run a tile which was lost before, and nothing else."""
    again: deque[Call] = field(default_factory=deque)
    losses: Counter[int] = field(default_factory=Counter)
    deaths: int = 0
    devices: dict[WorkerId, str] = field(default_factory=dict)

    def run(self) -> Iterator[Outcome]:
        """Drive all tiles to their receipts."""
        seen = bytearray(len(self.job.grid))
        for worker in self.engine._workers():
            self._load(worker)
        while True:
            self._fill()
            if not self._has_tiles():
                return
            for handle in self._next():
                worker, call = self.flight.pop(handle)
                outcome = self._take(handle, worker, call)
                if outcome is None or call is None or seen[call[0].index]:
                    continue
                seen[call[0].index] = 1
                yield outcome
                self.engine._finish(call[0])

    def _load(self, worker: WorkerId) -> None:
        self.flight[self.engine._load(worker, self.job, self.factors)] = worker, None

    def _has_tiles(self) -> bool:
        if self.again or any(call for _, call in self.flight.values()):
            return True
        if self.busy:
            return False
        following = self.calls.take(None)  # none is ready yet: is there anything to wait for?
        if following is not None:
            self.again.append(following)
        return following is not None

    def _fill(self) -> None:
        """Hand out tiles, least loaded worker first, a tile that was lost to an idle one alone."""
        served = set(self.alone)  # nothing more for these now
        while free := [worker for worker in self.busy if worker not in served]:
            worker = min(free, key=self.busy.__getitem__)
            if self.busy[worker] >= self.depth:
                return
            lost = self.again[0] if self.again else None
            if lost is not None and self.losses[lost[0].index] and self.busy[worker]:
                return  # wait until a worker is idle
            call = self.again.popleft() if self.again else self.calls.take(worker)
            if call is None:
                served.add(worker)
                continue
            if self.losses[call[0].index]:
                self.alone.add(worker)
                served.add(worker)
            self.busy[worker] += 1
            self.flight[self.engine._submit(worker, self.job, call)] = worker, call

    def _next(self) -> list[Handle]:
        """Return calls that have ended; `WorkerStartError` if no worker becomes ready in time."""
        begin = time.monotonic()
        patience = START_SECONDS + sum(each.nbytes for each in self.factors.values()) / LOAD_RATE
        while True:
            ended = self.engine._wait(list(self.flight), 1.0)
            if ended:
                return ended
            if not self.busy and time.monotonic() - begin > patience:
                raise WorkerStartError(self.engine._diagnosis())

    def _take(self, handle: Handle, worker: WorkerId, call: Call | None) -> Outcome | None:
        """Return a tile's outcome; None if there is none (a load, a loss)."""
        try:
            result = self.engine._result(handle)
        except LostError as error:
            self._note_loss(worker, call, error)
            return None
        except RaymmError as error:
            if call is None and not isinstance(error, (OSError, WorkerStartError)):
                raise WorkerStartError(f"{worker} could not load its factors: {error}") from error
            raise
        except Exception as error:
            raise self._failure(worker, call, error) from error
        if call is None:
            device, threads, pid = result
            self.busy[worker] = 0
            self.devices[worker] = device
            self.notify(WorkerReady(worker, device, threads, pid))
            return None
        if worker in self.busy:
            self.busy[worker] -= 1
            self.alone.discard(worker)
        outcome: Outcome = result
        return outcome

    def _note_loss(self, worker: WorkerId, call: Call | None, error: LostError) -> None:
        """Count a lost tile, replace a lost worker; give up when either happens too often."""
        if call is not None:
            index = call[0].index
            self.losses[index] += 1
            if self.losses[index] >= ATTEMPTS:
                raise TileError(
                    f"tile {index} (columns {call[0].start}:{call[0].stop}) was lost "
                    f"{ATTEMPTS} times, last on {worker}: {error.reason}. If memory is short, "
                    "lower tile_columns or memory_limit",
                    call[0],
                    self.devices.get(worker, ""),
                    ATTEMPTS,
                ) from (error.__cause__ or error)
            self.again.append(call)
            self.notify(TileRetried(call[0], self.losses[index], error.reason))
            if worker in self.busy:
                self.busy[worker] -= 1
                self.alone.discard(worker)
        if (call is None or error.is_worker_gone) and self._drop(worker, call is None):
            self._replace_worker(worker, error)

    def _drop(self, worker: WorkerId, is_loading: bool) -> bool:
        """Forget a worker; False if that was done already."""
        self.alone.discard(worker)
        self.calls.leave(worker)
        return self.busy.pop(worker, None) is not None or is_loading

    def _replace_worker(self, worker: WorkerId, error: LostError) -> None:
        self.deaths += 1
        self.notify(WorkerLost(worker, error.reason))
        if self.deaths > ATTEMPTS * max(1, len(self.engine._workers())):
            raise WorkerStartError(
                f"{self.deaths} workers died, the last one ({worker}) because: {error.reason}"
            ) from error
        self._load(self.engine._replace(worker))

    def _failure(self, worker: WorkerId, call: Call | None, error: Exception) -> RaymmError:
        if call is None:
            return WorkerStartError(f"{worker} could not load its factors: {error!r}")
        tile = call[0]
        return TileError(
            f"tile {tile.index} (columns {tile.start}:{tile.stop}) failed on {worker}: {error!r}",
            tile,
            self.devices.get(worker, ""),
            self.losses[tile.index] + 1,
        )
