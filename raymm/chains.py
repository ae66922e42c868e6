"""A product of matrices that has not been computed, and its verbs."""

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import DTypeLike, NDArray

from raymm.arrangement import as_canonical, contracted, part_of, planned
from raymm.engines import choosing
from raymm.engines.base import Engine
from raymm.engines.choosing import check_keeps, make_engine
from raymm.errors import DTypeError, PlanError
from raymm.events import Callback
from raymm.fingerprints import describe_operand
from raymm.indexing import Wanted, select_product
from raymm.memory import parse_nbytes
from raymm.order import Chained, arrange
from raymm.outputs import check_outputs, describe_outputs
from raymm.plan import Plan, make_plan
from raymm.progress import as_callback
from raymm.request import Precision, Request, Resources
from raymm.results import open_stored
from raymm.run import Pass, execute, mapped_dtype, stream
from raymm.sharded import open_placed
from raymm.sinks import Array, Sink, as_sink
from raymm.sinks.stream import Stream
from raymm.sources import Source, open_source
from raymm.tiles import Tile
from raymm.verification import Findings, check_file

Path: TypeAlias = str | bytes | os.PathLike[str] | os.PathLike[bytes]
Progress: TypeAlias = bool | Callback


@dataclass(frozen=True)
class Chain:
    """A product of matrices that has not been computed; made by `chain`.

    Nothing is read or computed until a verb is called; `.npy` headers are read at once, so that
    shapes are known and wrong ones are refused.
    """

    _sources: tuple[Source, ...]
    _chained: Chained
    _functions: tuple[Callable[[Any], Any], ...] = ()

    # NumPy must not take a chain for a scalar: ``x @ chain`` is ours.
    __array_ufunc__ = None

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of D."""
        return self._chained.shape

    @property
    def dtype(self) -> np.dtype[Any]:
        """Dtype of D unless a verb is given ``dtype=``."""
        return self._chained.result_dtype

    @property
    def T(self) -> "Chain":
        """The transpose, without a copy."""
        turned = tuple(source.T for source in reversed(self._sources))
        return self._like(turned)

    def map(self, function: Callable[[Any], Any]) -> "Chain":
        """Return the chain with a function applied to every entry of D, before every output.

        Parameters
        ----------
        function : callable
            Takes a torch tensor (a block of D on the worker's device, any shape, in D's dtype or
            float32 for half precision) and returns one of the same shape, entry by entry, e.g.
            ``torch.relu``. It travels to the workers.

        Notes
        -----
        D's dtype becomes what `function` makes of it. A mapped product is no product any more: it
        cannot be verified, nor multiplied further.
        """
        mapped = mapped_dtype(function, self.dtype)
        chained = replace(self._chained, mapped_dtype=mapped)
        return Chain(self._sources, chained, (*self._functions, function))

    def __getitem__(self, key: Any) -> Any:
        """Return a part of D; only that part is computed, and only what it needs is read.

        Parameters
        ----------
        key : int, slice, array of int, mask, or a tuple of two of them
            As in NumPy: two arrays pick pairs of row and column.

        Returns
        -------
        ndarray or scalar
            Computed in this process.
        """
        ends = self._sources[0], self._sources[-1]
        vectors = [len(source.operand.shape) == 1 for source in ends]
        return select_product(key, self.shape, vectors, self._part, self.dtype)

    def __matmul__(self, other: Any) -> NDArray[Any]:
        """Return ``D @ other``, computed in the cheapest order: D is never formed."""
        self._check_product("multiplied further")
        return chain_of((*self._sources, *_factors_of(other, "x"))).compute()

    def __rmatmul__(self, other: Any) -> NDArray[Any]:
        """Return ``other @ D``, computed in the cheapest order: D is never formed."""
        self._check_product("multiplied further")
        return chain_of((*_factors_of(other, "x"), *self._sources)).compute()

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        """Return D in memory, so that ``numpy.asarray(chain)`` works."""
        if copy is False:
            raise ValueError("a product that has not been computed cannot be had without a copy")
        return self.compute(dtype=dtype)

    def __repr__(self) -> str:
        product = " @ ".join(str(source.operand) for source in self._sources)
        return f"<raymm.Chain {product} -> {self.shape} {self.dtype}>"

    def plan(  # noqa: PLR0913  the common keywords
        self,
        out: Any = None,
        *,
        dtype: DTypeLike | None = None,
        precision: Precision = "strict",
        engine: str | Engine = "auto",
        memory_limit: int | str | None = None,
        tile_columns: int | None = None,
        max_in_flight: int = 2,
        overwrite: bool = False,
        verify: bool = False,
    ) -> Plan:
        """Return what `write` would do with the same arguments; computes nothing.

        Returns
        -------
        Plan
            ``print(plan)`` is a table; ``plan.to_dict()`` gives it to programs.

        Raises
        ------
        PlanError, DTypeError
            The request cannot be carried out for any amount of memory or disk.
        """
        request = _request(
            dtype, precision, memory_limit, tile_columns, max_in_flight, overwrite, verify
        )
        chosen, plan = self._plan((as_sink(out),), request, engine)
        if chosen is not engine:
            chosen.close()
        return plan

    def write(  # noqa: PLR0913  the common keywords
        self,
        out: Any,
        *,
        dtype: DTypeLike | None = None,
        precision: Precision = "strict",
        engine: str | Engine = "auto",
        memory_limit: int | str | None = None,
        tile_columns: int | None = None,
        max_in_flight: int = 2,
        overwrite: bool = False,
        verify: bool = False,
        progress: Progress = False,
    ) -> Any:
        """Compute D into one output and return it opened.

        Parameters
        ----------
        out : path, ndarray or Sink
            A path ending in ``.npy``, an array to fill, or a sink such as ``raymm.Npy(path)``.
        dtype : dtype, optional
            Convert D at the end; a value that does not fit raises `ResultOverflowError`.
        precision : {"strict", "tf32", "bf16", "float64"}
            Of the arithmetic: float32 stays float32 by default.
        engine : {"auto", "local", "ray"} or Engine
            Where to compute; an open `RayEngine` keeps its workers and factors for the next call.
        memory_limit : int or str, optional
            Private memory that one process may add, in bytes or like ``"8GiB"``.
        tile_columns : int, optional
            Columns of D in one tile. Default: from shapes, dtype and output.
        max_in_flight : int
            Tiles handed to one worker at a time.
        overwrite : bool
            Replace an existing output, once the new one is complete.
        verify : bool
            Check the output against the operands before it appears under its name.
        progress : bool or callable
            True draws a bar on stderr; a callable receives events (`raymm.events`).

        Returns
        -------
        ndarray
            For a path a read-only memory map; for an array that array.

        Raises
        ------
        PlanError, SourceError, SinkError
            Nothing has run: wrong shapes, dtypes, paths, too little memory or disk.
        ExecutionError
            A worker or tile failed for good; nothing appears under the output's name.
        VerificationError
            The output is not the product; it does not appear under its name.
        """
        request = _request(
            dtype, precision, memory_limit, tile_columns, max_in_flight, overwrite, verify
        )
        return self._execute((as_sink(out),), request, engine, progress)[0]

    def compute(  # noqa: PLR0913  the common keywords
        self,
        *,
        dtype: DTypeLike | None = None,
        precision: Precision = "strict",
        engine: str | Engine = "auto",
        memory_limit: int | str | None = None,
        tile_columns: int | None = None,
        max_in_flight: int = 2,
        verify: bool = False,
        progress: Progress = False,
    ) -> NDArray[Any]:
        """Return D as an array in memory; refused up front if it cannot fit.

        The parameters are those of `write`.

        Raises
        ------
        MemoryLimitError
            D and what computes it need more than `memory_limit`, or than is free.
        """
        request = _request(
            dtype, precision, memory_limit, tile_columns, max_in_flight, False, verify
        )
        result: NDArray[Any] = self._execute((Array(),), request, engine, progress)[0]
        return result

    def run(  # noqa: PLR0913  the common keywords
        self,
        *sinks: Any,
        dtype: DTypeLike | None = None,
        precision: Precision = "strict",
        engine: str | Engine = "auto",
        memory_limit: int | str | None = None,
        tile_columns: int | None = None,
        max_in_flight: int = 2,
        overwrite: bool = False,
        verify: bool = False,
        progress: Progress = False,
    ) -> tuple[Any, ...]:
        """Compute D once for several outputs; return what each of them gives.

        The first output's layout shapes the tiles. The other parameters are those of `write`.
        """
        if not sinks:
            raise PlanError('run() needs an output: give a path, raymm.Npy("D.npy"), ...')
        request = _request(
            dtype, precision, memory_limit, tile_columns, max_in_flight, overwrite, verify
        )
        return self._execute(tuple(map(as_sink, sinks)), request, engine, progress)

    def tiles(
        self,
        *,
        dtype: DTypeLike | None = None,
        precision: Precision = "strict",
        engine: str | Engine = "auto",
        memory_limit: int | str | None = None,
        tile_columns: int | None = None,
        max_in_flight: int = 2,
    ) -> Iterator[tuple[Tile, NDArray[Any]]]:
        """Yield D tile by tile, in order, computed ahead by a bounded number of tiles.

        Yields
        ------
        tile : Tile
            ``tile.start:tile.stop`` of the huge axis: columns of a wide D, rows of a tall one.
        block : ndarray
            That part of D, yours to keep.

        Notes
        -----
        Leaving the loop (or dropping the iterator) stops the workers. The parameters are those of
        `write`.
        """
        request = _request(
            dtype, precision, memory_limit, tile_columns, max_in_flight, False, False
        )
        return self._stream(request, engine)

    def _stream(
        self, request: Request, engine: str | Engine
    ) -> Iterator[tuple[Tile, NDArray[Any]]]:
        chosen, plan = self._plan((Stream(),), request, engine)
        try:
            with as_callback(False) as notify:
                work = self._pass(plan, chosen, notify)
                with contextlib.closing(stream(work)) as tiles:
                    for tile, block in tiles:
                        turned = block.T if plan.chained.is_transposed else block
                        yield tile, turned.reshape(-1) if len(self.shape) < 2 else turned
        finally:
            if chosen is not engine:
                chosen.close()

    def verify(self, path: Path, *, precision: Precision = "strict") -> Findings:
        """Check that a `.npy` file is D, however it was made.

        Parameters
        ----------
        path : path
        precision : {"strict", "tf32", "bf16", "float64"}
            Of the arithmetic that made it.

        Returns
        -------
        Findings
            ``residual``: the largest error relative to what rounding allows.

        Raises
        ------
        VerificationError
            An entry is further from the product than rounding explains.
        ShapeError, DTypeError, SourceError
            It cannot be D.
        """
        self._check_product("verified")
        sources = as_canonical(self._sources, self._chained.is_transposed)
        return check_file(os.fsdecode(path), self._chained, sources, precision)

    def _execute(
        self, sinks: tuple[Sink, ...], request: Request, engine: str | Engine, progress: Progress
    ) -> tuple[Any, ...]:
        check_outputs(sinks, self._sources)
        if request.verify:
            self._check_product("verified")
        chosen, plan = self._plan(sinks, request, engine)
        try:
            with as_callback(progress) as notify:
                results = execute(self._pass(plan, chosen, notify), sinks)
        finally:
            if chosen is not engine:
                chosen.close()
        again, is_open = self._pass(plan, chosen, lambda _event: None), chosen is engine
        return tuple(open_placed(open_stored(each), again, is_open) for each in results)

    def _pass(self, plan: Plan, engine: Engine, notify: Callback) -> Pass:
        def ready() -> tuple[Source, ...]:
            sources = contracted(self._sources, plan.request, engine, notify)
            return as_canonical(sources, plan.chained.is_transposed)

        def provenance() -> dict[str, Any]:
            operands = [describe_operand(source) for source in self._sources]
            return {"precision": plan.request.precision, "operands": operands}

        return Pass(plan, ready, engine, notify, self._functions, provenance)

    def _check_product(self, verb: str) -> None:
        """Raise `PlanError` for what only a product can be."""
        if self._functions:
            raise PlanError(f"a chain with map() cannot be {verb}: it is no product any more")

    def _part(self, rows: Wanted, columns: Wanted) -> NDArray[Any]:
        """Compute some rows and columns of D, as a matrix."""
        return self._like(part_of(self._sources, rows, columns)).compute(engine="local")

    def _like(self, sources: tuple[Source, ...]) -> "Chain":
        """Return the product of other operands with the same functions applied."""
        made = chain_of(sources)
        chained = replace(made._chained, mapped_dtype=self._chained.mapped_dtype)
        return Chain(sources, chained, self._functions)

    def _plan(
        self, sinks: tuple[Sink, ...], request: Request, engine: str | Engine
    ) -> tuple[Engine, Plan]:
        chained, notes = planned(self._chained, request.memory_limit)
        target = describe_outputs(sinks, chained, request)

        def plan_for(resources: Resources, reason: str) -> Plan:
            plan = make_plan(chained, target, request, resources, reason)
            return replace(plan, notes=(*plan.notes, *notes)) if notes else plan

        was_up = choosing.is_ray_up()
        chosen, reason = make_engine(
            engine, lambda each: plan_for(each.resources(), "").predicted_seconds
        )
        try:
            if target.layout.stays:
                check_keeps(target.layout.stays, chosen, chosen is engine, was_up)
            return chosen, _with_room(lambda: plan_for(chosen.resources(), reason))
        except BaseException:
            if chosen is not engine:
                chosen.close()
            raise


FREED_SECONDS = 2.0
"""How long Ray may take to count as free what was freed."""


def _with_room(plan_now: Callable[[], Plan]) -> Plan:
    """Return the plan; if D has no room in the object store, once Ray has counted what is free."""
    end = time.monotonic() + FREED_SECONDS
    while (plan := plan_now()).lacks_store and time.monotonic() < end:
        time.sleep(0.1)
    return plan


def chain_of(sources: tuple[Source, ...]) -> Chain:
    """Return the product of opened operands."""
    return Chain(sources, arrange(tuple(source.operand for source in sources)))


def _factors_of(value: Any, name: str) -> tuple[Source, ...]:
    if isinstance(value, Chain):
        value._check_product("multiplied further")
        return value._sources
    return (open_source(value, name),)


def _request(  # noqa: PLR0913  the common keywords
    dtype: DTypeLike | None,
    precision: Precision,
    memory_limit: int | str | None,
    tile_columns: int | None,
    max_in_flight: int,
    overwrite: bool,
    verify: bool,
) -> Request:
    return Request(
        None if dtype is None else _as_dtype(dtype),
        precision,
        None if memory_limit is None else parse_nbytes(memory_limit),
        tile_columns,
        max_in_flight,
        overwrite,
        verify,
    )


def _as_dtype(dtype: DTypeLike) -> np.dtype[Any]:
    try:
        return np.dtype(dtype)
    except TypeError as error:
        raise DTypeError(f"dtype={dtype!r} is no NumPy dtype: {error}") from error
