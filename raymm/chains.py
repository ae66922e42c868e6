"""A product of matrices that has not been computed, and its verbs."""

import os
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import DTypeLike, NDArray

from raymm.engines.base import Engine
from raymm.engines.choosing import make_engine
from raymm.errors import DTypeError, PlanError
from raymm.events import Callback
from raymm.memory import parse_nbytes
from raymm.order import Chained, arrange
from raymm.outputs import check_outputs, describe_outputs
from raymm.plan import Plan, make_plan
from raymm.progress import as_callback
from raymm.request import Precision, Request, Resources
from raymm.run import execute
from raymm.sinks import Array, Sink, as_sink
from raymm.sources import Source
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

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of D."""
        return self._chained.shape

    @property
    def dtype(self) -> np.dtype[Any]:
        """Dtype of D unless a verb is given ``dtype=``."""
        return self._chained.dtype

    @property
    def T(self) -> "Chain":
        """The transpose, without a copy."""
        turned = tuple(source.T for source in reversed(self._sources))
        return chain_of(turned)

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
        return check_file(os.fsdecode(path), self._chained, self._canonical(), precision)

    def _execute(
        self, sinks: tuple[Sink, ...], request: Request, engine: str | Engine, progress: Progress
    ) -> tuple[Any, ...]:
        check_outputs(sinks, self._sources)
        chosen, plan = self._plan(sinks, request, engine)
        try:
            with as_callback(progress) as notify:
                return execute(plan, self._canonical(), sinks, chosen, notify)
        finally:
            if chosen is not engine:
                chosen.close()

    def _plan(
        self, sinks: tuple[Sink, ...], request: Request, engine: str | Engine
    ) -> tuple[Engine, Plan]:
        chained = self._chained
        target = describe_outputs(sinks, chained, request)

        def plan_for(resources: Resources, reason: str) -> Plan:
            return make_plan(chained, target, request, resources, reason)

        chosen, reason = make_engine(
            engine, lambda each: plan_for(each.resources(), "").predicted_seconds
        )
        try:
            return chosen, plan_for(chosen.resources(), reason)
        except BaseException:
            if chosen is not engine:
                chosen.close()
            raise

    def _canonical(self) -> tuple[Source, ...]:
        """Return the sources as the plan sees them: matrices, the huge one last."""
        sources = list(self._sources)
        if len(sources[0].operand.shape) == 1:
            sources[0] = sources[0].as_row()
        if len(sources[-1].operand.shape) == 1:
            sources[-1] = sources[-1].as_column()
        if self._chained.is_transposed:
            return tuple(source.T for source in reversed(sources))
        return tuple(sources)


def chain_of(sources: tuple[Source, ...]) -> Chain:
    """Return the product of opened operands."""
    return Chain(sources, arrange(tuple(source.operand for source in sources)))


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
