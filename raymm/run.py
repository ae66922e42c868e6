"""Open, dispatch, commit or abort: the one loop under all verbs."""

import contextlib
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from raymm.engines.base import Call, Engine, Outcome
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
from raymm.kernels import blas, exact
from raymm.kernels.buffers import Buffer
from raymm.kernels.cpu import Arithmetic
from raymm.kernels.fold import fold
from raymm.kernels.threads import count_cores, count_threads, one_blas_thread
from raymm.order import Fold
from raymm.plan import Plan
from raymm.sinks.base import OutputSpec, Sink
from raymm.sources.base import Source
from raymm.verification import check_product
from raymm.worker import Job, factor_key

Values = NDArray[Any]


@dataclass(frozen=True)
class Prepared:
    """The resident factors of a plan, folded, and the arithmetic their values allow."""

    factors: tuple[Values, ...]
    arithmetic: Arithmetic


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
    loaded = [source.load() for source in sources[:-1]]
    dtype = plan.compute_dtype
    with (
        one_blas_thread(),
        ThreadPoolExecutor(count_threads(count_cores()), initializer=blas.prepare_thread) as pool,
    ):
        if dtype.kind not in "iu":
            wide = [np.ascontiguousarray(values, dtype) for values in loaded]
            multiply = _folder(lambda left, right: fold(left, right, pool.map), wide)
            rounds = plan.request.precision == "bf16" and dtype == np.float32
            is_checked = plan.request.dtype is not None
            arithmetic = Arithmetic(dtype, plan.dtype, rounds, is_checked)
            return Prepared(tuple(multiply(group) for group in plan.groups), arithmetic)
        limited = [exact.bounded(values, dtype) for values in loaded]
        multiply = _folder(lambda left, right: exact.fold_exact(left, right, pool.map), limited)
        groups = tuple(multiply(group) for group in plan.groups)
    chosen = _exact_dtype(plan, groups, sources[-1])
    return Prepared(
        tuple(group.values for group in groups), Arithmetic(chosen, plan.dtype, False, True)
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


def execute(
    plan: Plan,
    sources: tuple[Source, ...],
    sinks: tuple[Sink, ...],
    engine: Engine,
    notify: Callback,
) -> tuple[Any, ...]:
    """Carry out a plan; return what each sink's ``commit`` returns.

    Everything that can fail without a worker fails before the engine starts: outputs and their
    space, then operands and exactness. An error or an interrupt aborts all outputs.
    """
    begin = time.perf_counter()
    plan.check_memory()
    spec = output_spec(plan)
    totals = _Totals(notify)
    with contextlib.ExitStack() as opened:
        for sink in sinks:
            opened.callback(sink.abort)  # first: an interrupt may come in the middle of open()
            sink.open(spec, plan.request.overwrite)
        prepared = prepare(plan, sources)
        notify(RunStarted(plan.tiles, plan.output_nbytes, engine.name))
        _run_tiles(plan, prepared, sources[-1], sinks, engine, totals)
        computed = time.perf_counter()
        residual = _verify(plan, sources, sinks, notify) if plan.request.verify else None
        verify_seconds = time.perf_counter() - computed if plan.request.verify else 0.0
        results = tuple(sink.commit() for sink in sinks)
        opened.pop_all()
    seconds = time.perf_counter() - begin
    notify(totals.finished(plan, engine, seconds, verify_seconds, residual))
    return results


def _verify(
    plan: Plan, sources: tuple[Source, ...], sinks: tuple[Sink, ...], notify: Callback
) -> float | None:
    """Check every output that holds D, before it appears under its name."""
    views = [view for sink in sinks if (view := sink.view()) is not None]
    precision, is_transposed = plan.request.precision, plan.chained.is_transposed
    notify(VerificationStarted(sum(view.nbytes for view in views)))
    residuals = [check_product(view, sources, precision, is_transposed) for view in views]
    return max(residuals, default=None)


def output_spec(plan: Plan) -> OutputSpec:
    """Return what sinks must know of a plan's result."""
    chained = plan.chained
    return OutputSpec(
        chained.rows, chained.columns, chained.is_transposed, chained.shape, plan.dtype, plan.grid
    )


def _run_tiles(
    plan: Plan,
    prepared: Prepared,
    huge: Source,
    sinks: tuple[Sink, ...],
    engine: Engine,
    totals: "_Totals",
) -> None:
    """Send every tile through the engine; afterwards all workers have let go of the sinks."""
    job, factors = _make_job(plan, prepared, sinks)
    engine.open(plan.store_nbytes)
    depth = engine.depth(plan.request.max_in_flight, plan.store_tile_nbytes)
    calls: Iterator[Call] = ((tile, huge) for tile in plan.grid)
    outcomes = engine.run(job, factors, calls, depth, totals)
    with contextlib.closing(outcomes):
        for outcome in outcomes:
            _receive(outcome, sinks)
            totals.add(plan, outcome)


def _make_job(
    plan: Plan, prepared: Prepared, sinks: tuple[Sink, ...]
) -> tuple[Job, dict[str, Values]]:
    """Return what workers must know, and the resident factors by their content keys."""
    spec = output_spec(plan)
    keys = tuple(map(factor_key, prepared.factors))
    travelling = sum(sink.layout(spec).travels for sink in sinks)
    job = Job(
        uuid.uuid4().hex,
        keys,
        plan.grid,
        plan.layout,
        prepared.arithmetic,
        sinks,
        travelling,
        plan.lanes,
    )
    return job, dict(zip(keys, prepared.factors, strict=True))


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
