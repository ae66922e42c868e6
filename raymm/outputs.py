"""The outputs of a pass, taken together: what they ask of the plan, whether they may be written."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from raymm.errors import PlanError
from raymm.filesystems import is_remote
from raymm.order import Chained, output_dtype
from raymm.paths import free_nbytes
from raymm.plan import Target
from raymm.request import Request
from raymm.sinks import Array, Sink
from raymm.sinks.base import OutputSpec
from raymm.sources.base import Source


def describe_outputs(sinks: tuple[Sink, ...], chained: Chained, request: Request) -> Target:
    """Describe the outputs to the plan."""
    dtype = output_dtype(chained.result_dtype, request.dtype)
    spec = OutputSpec(chained.rows, chained.columns, chained.is_transposed, chained.shape, dtype)
    path = next((path for sink in sinks if (path := getattr(sink, "path", None))), None)
    layouts = [sink.layout(spec) for sink in sinks]
    if sum(each.stays is not None for each in layouts) > 1:
        raise PlanError("a pass keeps D in the cluster once: give one Refs()")
    # Files shape the blocks, those in Fortran order first: their runs are the longer ones.
    first = min(layouts, key=lambda each: (each.travels or bool(each.stays), each.order == "C"))
    return Target(
        ", ".join(sink.name for sink in sinks),
        replace(
            first,
            halo_columns=max(each.halo_columns for each in layouts),
            is_mixed=len({each.order for each in layouts}) > 1,
            travels=any(each.travels for each in layouts),
            holds_tile=any(each.holds_tile for each in layouts),
            stays=next((each.stays for each in layouts if each.stays), None),
        ),
        any(isinstance(sink, Array) for sink in sinks),
        None if path is None else free_nbytes(path),
    )


def check_outputs(sinks: tuple[Sink, ...], sources: tuple[Source, ...]) -> None:
    """Raise `PlanError` if an output would overwrite an operand, or two outputs are one."""
    for place, sink in enumerate(sinks):
        for source in sources:
            array = getattr(source, "array", None)
            if any(sink.overwrites(path, array) for path in _places(source)):
                raise PlanError(
                    f"the output {sink.name} would overwrite the operand {source.operand}: "
                    "choose another output"
                )
        for other in sinks[:place]:
            if sink.overwrites(getattr(other, "path", None), getattr(other, "out", None)):
                raise PlanError(f"two outputs are the same: {sink.name}")


def _places(source: Source) -> Iterator[str | None]:
    """Yield where an operand is stored: its path, its files, and the folders that they are in."""
    path = source.operand.path
    yield path
    yield from getattr(source, "paths", ())
    if path is not None and not is_remote(path):
        yield from map(str, Path(path).parents)
