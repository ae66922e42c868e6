"""Open, dispatch, commit or abort: the one loop under all verbs."""

import contextlib
import time
import uuid
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from raymm.engines.base import Call, Engine, Outcome
from raymm.errors import PlanError
from raymm.events import (
    Callback,
    Event,
    RunFinished,
    RunStarted,
    TileFinished,
    TileRetried,
    VerificationStarted,
    WorkerLost,
    WorkerReady,
)
from raymm.keeping import Kept
from raymm.kernels import blas, exact
from raymm.kernels.buffers import Buffer
from raymm.kernels.cpu import Arithmetic, apply_functions
from raymm.kernels.structure import Factor, fold_factors
from raymm.kernels.threads import count_cores, count_threads, one_blas_thread
from raymm.order import Fold
from raymm.plan import Plan
from raymm.sinks.base import OutputSpec, Piece, Sink, Stored
from raymm.sinks.refs import Placed
from raymm.sinks.stream import Stream
from raymm.sources.base import Source
from raymm.sources.ray_objects import RaySource, from_blocks
from raymm.sources.sparse import load_factor
from raymm.tiles import Grid, Tile
from raymm.verification import FAILING, check_file, check_product
from raymm.worker import Job, factor_key

Values = NDArray[Any]


@dataclass(frozen=True)
class Prepared:
    """The resident factors of a plan, folded, and the arithmetic their values allow."""

    factors: tuple[Factor, ...]
    arithmetic: Arithmetic


@dataclass(frozen=True)
class Pass:
    """One pass over a plan's tiles: what it reads, where it runs, who is told."""

    plan: Plan
    sources: Callable[[], tuple[Source, ...]]
    """Opens the canonical operands, the huge one last; may compute some of them."""
    engine: Engine
    notify: Callback
    functions: tuple[Callable[[Any], Any], ...] = ()
    """Applied to each block before any sink."""
    provenance: Callable[[], dict[str, Any]] = dict
    """What outputs that have metadata say of the run: precision, operands."""


def prepare(plan: Plan, sources: tuple[Source, ...]) -> Prepared:
    """Read and fold the small factors; for integers choose an arithmetic that is exact.

    Parameters
    ----------
    plan : Plan
    sources : tuple of Source
        The canonical operands, the huge one last.

    Raises
    ------
    DTypeError
        64 bits might not hold an integer result.
    """
    loaded = [load_factor(source) for source in sources[:-1]]
    dtype = plan.compute_dtype
    with (
        one_blas_thread(),
        ThreadPoolExecutor(count_threads(count_cores()), initializer=blas.prepare_thread) as pool,
    ):
        if dtype.kind not in "iu":
            wide = [factor.astype(dtype) for factor in loaded]
            multiply = _folder(lambda left, right: fold_factors(left, right, pool.map), wide)
            rounds = plan.request.precision == "bf16" and dtype == np.float32
            is_checked = plan.request.dtype is not None
            arithmetic = Arithmetic(dtype, plan.dtype, rounds, is_checked)
            return Prepared(tuple(multiply(group) for group in plan.groups), arithmetic)
        limited = [exact.bounded(factor.values, dtype) for factor in loaded]
        multiply = _folder(lambda left, right: exact.fold_exact(left, right, pool.map), limited)
        groups = tuple(multiply(group) for group in plan.groups)
    chosen = _exact_dtype(plan, groups, sources[-1])
    return Prepared(
        tuple(Factor(group.values) for group in groups), Arithmetic(chosen, plan.dtype, False, True)
    )


def _folder(product: Callable[[Any, Any], Any], factors: list[Any]) -> Callable[[Fold], Any]:
    def multiply(group: Fold) -> Any:
        if group.left is None or group.right is None:
            return factors[group.factor or 0]
        return product(multiply(group.left), multiply(group.right))

    return multiply


def _exact_dtype(plan: Plan, groups: tuple[exact.Bounded, ...], huge: Source) -> np.dtype[Any]:
    """Choose by the huge operand's dtype; if that rules out float64, by its values, read once."""
    bound = exact.largest(huge.operand.dtype)
    chosen = exact.choose_dtype(groups, bound, plan.compute_dtype)
    if chosen is None or chosen.kind in "iu":
        bound = _largest_value(plan, huge)
        chosen = exact.choose_dtype(groups, bound, plan.compute_dtype)
    if chosen is None:
        text = " @ ".join(map(str, plan.chained.operands))
        raise exact.overflow_error(groups, bound, text)
    return chosen


def _largest_value(plan: Plan, huge: Source) -> int:
    buffer, largest = Buffer(), 0
    for tile in plan.grid:
        values = huge.read(tile.start, tile.stop, buffer)
        if values.size:
            largest = max(largest, abs(int(values.min())), abs(int(values.max())))
    return largest


def execute(work: Pass, sinks: tuple[Sink, ...]) -> tuple[Any, ...]:
    """Carry out a plan; return what each sink's ``commit`` returns.

    Everything that can fail without a worker fails before the engine starts: outputs and their
    space, then operands and exactness. An error or an interrupt aborts all outputs.
    """
    begin = time.perf_counter()
    plan, engine, notify = work.plan, work.engine, work.notify
    plan.check_memory()
    spec = output_spec(plan, work.provenance() if _are_described(sinks) else None)
    totals = _Totals(notify)
    with contextlib.ExitStack() as opened:
        for sink in sinks:
            opened.callback(sink.abort)  # first: an interrupt may come in the middle of open()
            sink.open(spec, plan.request.overwrite)
        sources = work.sources()
        with contextlib.closing(_run_tiles(work, sources, sinks, plan.grid, totals)) as run:
            for outcome in run:
                _receive(outcome, sinks)
                totals.add(plan, outcome)
        computed = time.perf_counter()
        residual = _verify(work, sources, sinks) if plan.request.verify else None
        verify_seconds = time.perf_counter() - computed if plan.request.verify else 0.0
        results = tuple(sink.commit() for sink in sinks)
        opened.pop_all()
    seconds = time.perf_counter() - begin
    notify(totals.finished(plan, engine, seconds, verify_seconds, residual))
    return results


def _are_described(sinks: tuple[Sink, ...]) -> bool:
    return any(getattr(sink, "has_metadata", False) for sink in sinks)


def _verify(work: Pass, sources: tuple[Source, ...], sinks: tuple[Sink, ...]) -> float | None:
    """Check every output that holds D, before it appears under its name."""
    plan, engine, notify = work.plan, work.engine, work.notify
    views = [view for sink in sinks if (view := sink.view()) is not None]
    precision, chained = plan.request.precision, plan.chained
    notify(VerificationStarted(plan.output_nbytes * len(views)))
    residuals = [
        check_file(view.path, chained, sources, precision, FAILING).residual
        if isinstance(view, Stored)
        else check_product(_readable(view, engine), sources, precision, chained.is_transposed)
        for view in views
    ]
    return max(residuals, default=None)


def _readable(view: Any, engine: Any) -> Any:
    """Return D as something that opens as an operand."""
    return placed_source(view, engine, view.places).T if isinstance(view, Placed) else view


def placed_source(placed: Placed, engine: Any, tiles: Iterable[int]) -> RaySource:
    """Return the columns of some tiles that stay in the cluster, as the rows of an operand."""
    tiles = sorted(tiles)
    places = [placed.places[tile] for tile in tiles]
    refs = [
        place.ref if placed.on == "store" else Kept(engine.worker(place.worker), place.key, tile)
        for tile, place in zip(tiles, places, strict=True)
    ]
    widths = [placed.grid[tile].width for tile in tiles]
    return from_blocks(refs, widths, placed.spec.rows, placed.spec.dtype, min(tiles, default=0))


def output_spec(plan: Plan, provenance: dict[str, Any] | None = None) -> OutputSpec:
    """Return what sinks must know of a plan's result."""
    chained = plan.chained
    spec = OutputSpec(
        chained.rows, chained.columns, chained.is_transposed, chained.shape, plan.dtype, plan.grid
    )
    return spec if provenance is None else replace(spec, provenance=provenance)


def stream(work: Pass) -> Generator[tuple[Tile, Values], None, None]:
    """Yield each tile and its part of D, in canonical orientation, in order.

    A tile is handed out only when it is near the next one to be yielded: what waits for its turn
    is bounded. Closing the generator stops the workers.
    """
    plan = work.plan
    plan.check_memory()
    sink, totals = Stream(), _Totals(work.notify)
    most = plan.request.max_in_flight * max(1, plan.resources.workers)
    window = _Window(plan.grid, 2 * most)
    waiting: dict[int, tuple[Tile, Values]] = {}
    with contextlib.closing(_run_tiles(work, work.sources(), (sink,), window, totals)) as run:
        for outcome in run:
            tile = outcome.receipt.tile
            waiting[tile.index] = tile, _assemble(plan, tile, list(outcome.pieces))
            del outcome
            while window.next_wanted in waiting:
                ready = waiting.pop(window.next_wanted)
                window.next_wanted += 1
                yield ready
                del ready


def repeat(work: Pass, sink: Sink, tiles: Iterable[Tile]) -> None:
    """Compute some tiles of a pass again, into an output that is open."""
    totals = _Totals(work.notify)
    run = _run_tiles(work, work.sources(), (sink,), iter(tiles), totals)
    with contextlib.closing(run):
        for outcome in run:
            _receive(outcome, (sink,))


class _Window(Iterator[Tile]):
    """The tiles up to a distance from the next one wanted; later it goes on."""

    def __init__(self, grid: Grid, distance: int) -> None:
        self._grid, self._distance = grid, distance
        self._place = self.next_wanted = 0

    def __next__(self) -> Tile:
        if self._place >= min(len(self._grid), self.next_wanted + self._distance):
            raise StopIteration
        self._place += 1
        return self._grid[self._place - 1]


def _assemble(plan: Plan, tile: Tile, pieces: list[Piece]) -> Values:
    """Return a tile's part of D from its blocks."""
    if len(pieces) == 1:
        return pieces[0].values
    part = np.empty((plan.grid.rows, tile.width), plan.dtype, plan.layout.order)
    for piece in pieces:
        where = piece.bounds
        columns = slice(where.column_start - tile.start, where.column_stop - tile.start)
        part[where.row_start : where.row_stop, columns] = piece.values
    return part


def _run_tiles(
    work: Pass,
    sources: tuple[Source, ...],
    sinks: tuple[Sink, ...],
    tiles: Iterable[Tile],
    totals: "_Totals",
) -> Generator[Outcome, None, None]:
    """Send tiles through the engine; afterwards all workers have let go of the sinks."""
    plan, engine, huge = work.plan, work.engine, sources[-1]
    prepared = prepare(plan, sources)
    work.notify(RunStarted(plan.tiles, plan.output_nbytes, engine.name))
    job, factors = _make_job(work, prepared, sinks)
    engine.open(plan.store_nbytes)
    depth = engine.depth(plan.request.max_in_flight, plan.store_tile_nbytes)
    is_read_in_groups = huge.operand.reading_nbytes > 0 and tiles is plan.grid
    calls = _Neighbours(plan.grid, huge) if is_read_in_groups else _Calls(iter(tiles), huge)
    yield from engine.run(job, factors, calls, depth, totals)


class _Neighbours(Sequence[Call]):
    """All tiles of a grid with what they read: an operand of which workers keep what they read."""

    def __init__(self, grid: Grid, huge: Source) -> None:
        self._grid, self._huge = grid, huge

    def __len__(self) -> int:
        return len(self._grid)

    def __getitem__(self, place: Any) -> Any:
        return self._grid[place], self._huge


class _Calls(Iterator[Call]):
    """Tiles with what they read; like `_Window` it may end and go on later."""

    def __init__(self, tiles: Iterator[Tile], huge: Source) -> None:
        self._tiles, self._huge = tiles, huge

    def __next__(self) -> Call:
        return next(self._tiles), self._huge


def _make_job(
    work: Pass, prepared: Prepared, sinks: tuple[Sink, ...]
) -> tuple[Job, dict[str, Values]]:
    """Return what workers must know, and the resident factors by their content keys."""
    plan, arithmetic = work.plan, prepared.arithmetic
    if work.functions:
        product = plan.chained.dtype if plan.chained.dtype.kind in "iu" else None
        arithmetic = replace(arithmetic, functions=work.functions, product_dtype=product)
    spec = output_spec(plan)
    structures = [factor.structure for factor in prepared.factors]
    resident = [factor.values for factor in prepared.factors]
    resident += [structure for structure in structures if structure is not None]
    keys = tuple(map(factor_key, resident))
    travelling = sum(sink.layout(spec).travels for sink in sinks)
    job = Job(
        uuid.uuid4().hex,
        keys,
        plan.grid,
        plan.layout,
        arithmetic,
        sinks,
        travelling,
        plan.lanes,
        tuple(structure is not None for structure in structures),
        staying=sum(sink.layout(spec).stays is not None for sink in sinks),
    )
    return job, dict(zip(keys, resident, strict=True))


def _receive(outcome: Outcome, sinks: tuple[Sink, ...]) -> None:
    for place, piece in zip(outcome.receipt.pieces, outcome.pieces, strict=True):
        sinks[place].receive(piece)


class _Totals:
    """Counts what the summary needs, and passes events on."""

    def __init__(self, notify: Callback) -> None:
        self._notify = notify
        self.done = self.retries = self.threads = self.workers = 0
        self.read = self.multiply = self.write = 0.0

    def __call__(self, event: Event) -> None:
        if isinstance(event, TileRetried):
            self.retries += 1
        if isinstance(event, WorkerLost):
            self.workers -= 1
        if isinstance(event, WorkerReady):
            self.workers += 1
            self.threads = max(self.threads, event.threads)
        self._notify(event)

    def add(self, plan: Plan, outcome: Outcome) -> None:
        """Count a tile."""
        receipt = outcome.receipt
        self.done += 1
        self.read += receipt.read_seconds
        self.multiply += receipt.multiply_seconds
        self.write += receipt.write_seconds
        nbytes = plan.chained.rows * receipt.tile.width * plan.dtype.itemsize
        self._notify(
            TileFinished(
                receipt.tile,
                receipt.worker,
                self.done,
                nbytes,
                receipt.seconds,
                receipt.read_seconds,
                receipt.multiply_seconds,
                receipt.write_seconds,
            )
        )

    def finished(
        self,
        plan: Plan,
        engine: Engine,
        seconds: float,
        verify_seconds: float,
        residual: float | None,
    ) -> RunFinished:
        """Return the summary."""
        stages = {"read": self.read, "multiply": self.multiply, "write": self.write}
        return RunFinished(
            plan.chained.shape,
            plan.output_nbytes,
            seconds,
            engine.name,
            self.workers,
            self.threads,
            self.retries,
            max(stages, key=lambda stage: stages[stage]),
            verify_seconds,
            residual,
        )


def mapped_dtype(function: Callable[[Any], Any], dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Return the dtype that a function makes of values of `dtype`, by trying it on one zero.

    Raises
    ------
    PlanError
        It is not callable, fails, or returns something else than a tensor of the same shape.
    """
    if not callable(function):
        raise PlanError(f"map() needs a function of a torch tensor, not {function!r}")
    try:
        block = np.zeros((1, 1), dtype)
        return apply_functions(block, Arithmetic(dtype, dtype, functions=(function,))).dtype
    except Exception as error:
        raise PlanError(
            f"the function given to map() fails on a block of one zero of {dtype}: {error}"
        ) from error
