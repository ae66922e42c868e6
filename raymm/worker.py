"""What runs on one device: resident factors, and tiles multiplied and handed to sinks."""

import contextlib
import hashlib
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from raymm.errors import ExecutionError, WorkerStartError
from raymm.kernels import blas
from raymm.kernels.buffers import Buffer
from raymm.kernels.cpu import Arithmetic, CpuKernel, Lane
from raymm.kernels.inner import inner_product
from raymm.kernels.staging import Staged
from raymm.memory import LANES_PER_THREAD
from raymm.sinks.base import Block, Piece, Sink
from raymm.sources.base import Source
from raymm.sources.pairs import Pair
from raymm.tiles import Bounds, Grid, Layout, Tile

Values: TypeAlias = NDArray[Any]


@dataclass(frozen=True)
class Job:
    """What a worker must know before its first tile; the factors are loaded by their keys."""

    id: str
    factor_keys: tuple[str, ...]
    """Content keys of the resident factors, outermost first, then of their structures."""
    grid: Grid
    layout: Layout
    arithmetic: Arithmetic
    sinks: tuple[Sink, ...]
    travelling: int
    """How many of the sinks have their blocks handed back by workers in other processes."""
    lanes: int
    """Blocks under way at a time."""
    structures: tuple[bool, ...] = ()
    """For each factor, whether there is an array that says where it has entries; none do if empty.
    Others' zeros are like any value."""
    staying: int = 0
    """How many of the sinks have whole tiles stay in the cluster."""
    is_inner: bool = False
    """Whether tiles are runs of an inner axis: their sources are pairs, and each gives its share
    of the sum as one piece."""

    def target(self, bounds: Bounds) -> Values | None:
        """Return memory in which a block is wanted, if there is one sink and it has some."""
        find = getattr(self.sinks[0], "target", None) if len(self.sinks) == 1 else None
        return find(bounds) if find is not None else None

    def read_stop(self, tile: Tile) -> int:
        """Return up to which column of the huge operand a tile is read: the halo included."""
        return min(tile.stop + self.grid.halo_columns, self.grid.columns)


@dataclass(frozen=True, slots=True)
class Receipt:
    """Proof that a tile has arrived in every sink; small, whatever the tile."""

    tile: Tile
    worker: str
    seconds: float
    read_seconds: float
    multiply_seconds: float
    write_seconds: float
    pieces: tuple[int, ...] = ()
    """For each piece that follows, the place of the sink that receives it."""


@dataclass(slots=True)
class _Loaded:
    job: Job
    kernel: CpuKernel

    def finish(self, tile: Tile) -> list[tuple[int, Piece]]:
        """Tell sinks that all blocks of a tile are there; return the tiles that stay."""
        found = [getattr(sink, "finish", None) for sink in self.job.sinks]
        pieces = [finish(tile) if finish is not None else None for finish in found]
        return [(place, piece) for place, piece in enumerate(pieces) if piece is not None]


@dataclass
class _TileRun:
    """One tile under way: the lanes share its blocks, its clock and its first error."""

    job_id: str
    blocks: Iterator[Bounds]
    pieces: list[tuple[int, Piece]] = field(default_factory=list)
    multiply_seconds: float = 0.0
    write_seconds: float = 0.0
    is_failed: bool = False
    """No further block is begun."""
    lock: threading.Lock = field(default_factory=threading.Lock)

    def next_block(self) -> Bounds | None:
        with self.lock:
            return None if self.is_failed else next(self.blocks, None)

    def note(self, multiply: float, write: float, pieces: list[tuple[int, Piece]]) -> None:
        with self.lock:
            self.multiply_seconds += multiply
            self.write_seconds += write
            self.pieces += pieces


class Worker:
    """One device's share of the work.

    1. ``load(job, factors)`` once per job; several may be loaded, equal factors are held once.
    2. ``run(job_id, tile, source)`` any number of times, one tile at a time.
    3. ``unload(job_id, sync)`` detaches its sinks; the factors stay until ``retain``.

    Blocks are multiplied by at most `threads` threads at a time, one BLAS thread each, and written
    meanwhile by as many more. Which thread takes which block changes nothing in the result.
    """

    def __init__(self, name: str = "worker", threads: int = 1) -> None:
        self.name, self.threads = name, threads
        self._factors: dict[str, Values] = {}
        self._jobs: dict[str, _Loaded] = {}
        self._slots = threading.Semaphore(threads)
        self._pool: ThreadPoolExecutor | None = None
        self._current: _TileRun | None = None
        # Touching fresh memory costs as much as writing it out: buffers outlive their job.
        self._lanes: list[Lane] = []
        self._staging, self._second_staging = Buffer(), Buffer()

    @property
    def device(self) -> str:
        """The device it multiplies on."""
        return "cpu"

    def missing(self, keys: tuple[str, ...]) -> tuple[str, ...]:
        """Return the keys of factors that are not here yet."""
        return tuple(key for key in keys if key not in self._factors)

    def load(self, job: Job, factors: dict[str, Values]) -> None:
        """Make a job's factors resident and attach its sinks."""
        self._factors.update(factors)
        missing = self.missing(job.factor_keys)
        if missing:
            raise WorkerStartError(f"{self.name} was not given the factors {', '.join(missing)}")
        resident = [self._factors[key] for key in job.factor_keys]  # of an inner axis: none
        marks = iter(resident[len(resident) - sum(job.structures) :])
        structures = tuple(next(marks) if is_there else None for is_there in job.structures)
        factors_only = tuple(resident[: len(resident) - sum(job.structures)])
        kernel = CpuKernel(factors_only, job.arithmetic, job.layout, structures)
        with contextlib.ExitStack() as attached:
            for sink in job.sinks:
                sink.attach()
                attached.callback(sink.detach, False)
            attached.pop_all()
        if self._pool is None:
            self._pool = ThreadPoolExecutor(
                max_workers=max(64, LANES_PER_THREAD * self.threads),
                thread_name_prefix="raymm",
                initializer=blas.prepare_thread,
            )
        self._lanes += [Lane() for _ in range(job.lanes - len(self._lanes))]
        self._jobs[job.id] = _Loaded(job, kernel)

    def run(self, job_id: str, tile: Tile, source: Source | Pair) -> tuple[Receipt, list[Piece]]:
        """Multiply a tile and hand its blocks to the sinks.

        Returns
        -------
        Receipt
        list of Piece
            What the driver must pass to ``receive``; empty for sinks that write by themselves.
        """
        begin = time.perf_counter()
        loaded = self._jobs[job_id]
        if isinstance(source, Pair):
            return self._run_inner(loaded.job, tile, source, begin)
        self._current = current = _TileRun(job_id, loaded.job.grid.blocks(tile))
        values = source.read(tile.start, loaded.job.read_stop(tile), self._staging)
        read = time.perf_counter() - begin
        operand = loaded.kernel.stage_in(values, self._map)
        assert self._pool is not None
        lanes = [
            self._pool.submit(self._run_lane, loaded, tile, operand, lane, current)
            for lane in self._lanes[: loaded.job.lanes]
        ]
        _wait(lanes)
        if current.is_failed:
            raise ExecutionError(f"tile {tile.index} was interrupted")
        current.pieces += loaded.finish(tile)
        receipt = Receipt(
            tile,
            self.name,
            time.perf_counter() - begin,
            read,
            current.multiply_seconds,
            current.write_seconds,
            tuple(place for place, _ in current.pieces),
        )
        return receipt, [piece for _, piece in current.pieces]

    def _run_inner(
        self, job: Job, tile: Tile, source: Pair, begin: float
    ) -> tuple[Receipt, list[Piece]]:
        """Multiply a run of an inner axis; its share of the sum is handed back."""
        left = source.left.read(tile.start, tile.stop, self._staging)
        right = source.right.read(tile.start, tile.stop, self._second_staging)
        read = time.perf_counter() - begin
        arithmetic = job.arithmetic
        total = inner_product(
            left, right, arithmetic.compute_dtype, arithmetic.rounds_to_bfloat16, self._map
        )
        bounds = Bounds(0, total.shape[0], 0, total.shape[1])
        seconds = time.perf_counter() - begin
        receipt = Receipt(tile, self.name, seconds, read, seconds - read, 0.0, (0,))
        return receipt, [Piece(bounds, total)]

    def interrupt(self, job_id: str | None = None) -> None:
        """End the tile under way after its current blocks, if it is of that job; it raises then."""
        current = self._current
        if current is not None and job_id in (None, current.job_id):
            current.is_failed = True

    def unload(self, job_id: str, sync: bool) -> None:
        """Detach a job's sinks; buffers and factors stay for the next job."""
        loaded = self._jobs.pop(job_id, None)
        if loaded is not None:
            for sink in loaded.job.sinks:
                sink.detach(sync)

    def retain(self, keys: tuple[str, ...]) -> None:
        """Drop all factors but these."""
        self._factors = {key: self._factors[key] for key in keys if key in self._factors}

    def close(self) -> None:
        """End the threads."""
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)
            self._pool = None

    def _map(self, function: Any, items: Any) -> Any:
        """Map over items on the pool, at most `threads` at a time."""

        def limited(item: Any) -> Any:
            with self._slots:
                return function(item)

        assert self._pool is not None
        return self._pool.map(limited, items)

    def _run_lane(
        self, loaded: _Loaded, tile: Tile, operand: Staged, lane: Lane, current: _TileRun
    ) -> None:
        """Take blocks until there are none left: multiply in a slot, write outside of it."""
        job = loaded.job
        try:
            while (bounds := current.next_block()) is not None:
                with self._slots:
                    begin = time.perf_counter()
                    block = _multiply(loaded, tile, operand, bounds, lane)
                    multiplied = time.perf_counter()
                written = [(place, sink.write(block)) for place, sink in enumerate(job.sinks)]
                pieces = [(place, piece) for place, piece in written if piece is not None]
                current.note(multiplied - begin, time.perf_counter() - multiplied, pieces)
        except BaseException:
            current.is_failed = True
            raise


def _multiply(loaded: _Loaded, tile: Tile, operand: Staged, bounds: Bounds, lane: Lane) -> Block:
    """Return a block of D; of a compact tile, its non-zero columns."""
    kernel, job = loaded.kernel, loaded.job
    widened = bounds.widened(job.grid.halo_columns, job.grid.columns)
    _, places = operand.places(widened, tile.start)
    target = job.target(widened) if places is None else None
    product = kernel.multiply(operand, widened, tile.start, lane, target)
    values = kernel.stage_out(product, widened, lane, places)
    if places is None or job.arithmetic.functions:  # a function may make something of zeros
        return Block(tile, bounds, values)
    inside = places[: np.searchsorted(places, bounds.shape[1])]
    return Block(
        tile,
        bounds,
        values[:, : len(inside)],
        inside + bounds.column_start,
        lambda: kernel.spread(values, places, widened, lane),
    )


def _wait(lanes: list[Future[None]]) -> None:
    """Wait for all lanes, then raise the first error: nothing may still be writing."""
    errors = [error for lane in lanes if (error := lane.exception()) is not None]
    if errors:
        raise errors[0]


def factor_key(values: Values) -> str:
    """Return the content key of a resident factor."""
    digest = hashlib.blake2b(digest_size=16)
    digest.update(repr((values.shape, values.dtype.str)).encode())
    digest.update(np.ascontiguousarray(values).view(np.uint8).data)
    return digest.hexdigest()
