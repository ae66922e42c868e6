"""From what Ray hands out to a source: references, lists of them, datasets."""

import sys
import time
from collections import deque
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import numpy as np

from raymm.errors import DTypeError, PlanError, ShapeError
from raymm.operands import format_shape
from raymm.sources.columns import Null
from raymm.sources.ray_objects import RaySource, Ref, Shard, explained, ray_module
from raymm.sources.ray_values import open_value

MOST_CALLS_AT_ONCE = 16
FREE_CPU_SECONDS = 5.0
"""How long to wait for a CPU without which a dataset is never executed."""


@dataclass(frozen=True, slots=True)
class _Opened:
    """How to open blocks; see `from_ray`."""

    name: str
    column: str | None
    null: Null


@dataclass(frozen=True, slots=True)
class _Found:
    """What a block holds."""

    shape: tuple[int, ...]
    dtype: str
    is_bfloat16: bool
    is_table: bool = False
    index: tuple[int, int] | None = None
    """First and last number of the rows of a table of raymm's; (1, 0) if they do not ascend."""


def is_ray(value: Any) -> bool:
    """Whether it is a reference, a list of them or a dataset; Ray is not imported to find out."""
    ray = sys.modules.get("ray")
    if ray is None or not hasattr(ray, "ObjectRef"):
        return False
    if _is_dataset(value):
        return True
    while isinstance(value, (list, tuple)) and value:
        value = value[0]
    return isinstance(value, ray.ObjectRef)


def from_ray(value: Any, name: str, column: str | None = None, null: Null = None) -> RaySource:
    """Return what lies in a Ray cluster as a source; blocks stay where they are.

    Parameters
    ----------
    value : ObjectRef, list of ObjectRef, list of lists of ObjectRef, or ray.data.Dataset
        A list holds blocks in order, as in ``numpy.block``: matrices side by side, of any widths;
        ``[[first], [second]]`` lie beneath each other. Tables hold a vector per row and always lie
        beneath each other, (n, d). Vectors are joined to one vector. A dataset is executed, with
        its order kept.
    name : str
        What to call it in messages.
    column : str, optional
        Of tables: the column of vectors.
    null : {None, "nan"}
        Of tables: refuse missing values, or take them for NaN.

    Raises
    ------
    ShapeError, DTypeError
        The blocks do not fit together, or hold no numbers.
    SourceError
        A block is lost, or the task that was to make it failed.
    """
    if _is_dataset(value):
        return _from_dataset(value, _Opened(name, column, null))
    opened = _Opened(name, column, null)
    refs, is_beneath = _flatten(value, name)
    return _assemble(refs, _describe_all(refs, opened), opened, is_beneath)


def _from_dataset(dataset: Any, opened: _Opened) -> RaySource:
    """Execute a dataset in order; its blocks are then as references to tables."""
    name = opened.name
    check_free_cpu(f"{name}, a dataset,")
    ordered = type(dataset).copy(dataset, _deep_copy=True)  # with a context of its own
    # What an earlier execution left may not be in order. The plan: of versions before Ray 2.56.
    for cached in (ordered, getattr(ordered, "_plan", ordered)):
        if hasattr(cached, "_cache"):
            cached._cache = type(cached._cache)()
    ordered.context.execution_options.preserve_order = True
    ordered.context.enable_progress_bars = False
    refs = ordered.materialize().to_arrow_refs()
    if not refs:
        raise PlanError(f"{name} is a dataset without blocks: it has no rows to multiply")
    found = _describe_all(refs, opened)
    kept = [place for place, each in enumerate(found) if each.shape[0]] or [0]
    refs, found = [refs[place] for place in kept], [found[place] for place in kept]
    _check_order(found, name)
    return _assemble(refs, found, opened, True)


def _check_order(found: list[_Found], name: str) -> None:
    """Refuse rows that raymm has numbered and that are no longer in order."""
    ends = [each.index for each in found if each.index is not None]
    if any(first > last for first, last in ends) or any(
        before[1] >= after[0] for before, after in pairwise(ends)
    ):
        raise PlanError(
            f"{name} is a dataset whose column 'index' does not ascend: its rows are not in the "
            "order of the matrix; use .sort('index')"
        )


def _describe_all(refs: list[Ref], opened: _Opened) -> list[_Found]:
    """Look at each block where it is, a few at a time."""
    ray = ray_module()
    # No CPU is asked for: workers of an open engine may hold them all.
    describe = ray.remote(_describe).options(num_cpus=0, name="raymm:describe")
    calls: deque[Ref] = deque()
    found: list[_Found] = []
    at_once = calls_at_once()
    for place, ref in enumerate([*refs, *[None] * at_once]):
        if ref is not None:
            calls.append(describe.remote(ref, opened, place))
        if calls and (ref is None or len(calls) >= at_once):
            try:
                found.append(ray.get(calls.popleft()))
            except ray.exceptions.RayError as error:
                raise explained(error, opened.name, len(found)) from error
    return found


def _describe(value: Any, opened: _Opened, place: int) -> _Found:
    """Describe a block; runs in a worker."""
    name = f"{opened.name}, block {place}"
    operand = open_value(value, name, opened.column, opened.null).operand
    if len(operand.shape) not in (1, 2):
        raise ShapeError(f"{operand}: blocks are matrices or vectors")
    is_table = type(value).__module__.partition(".")[0] == "pyarrow"
    ends = _index_ends(value) if is_table else None
    return _Found(operand.shape, operand.dtype.str, operand.bfloat16, is_table, ends)


def _index_ends(value: Any) -> tuple[int, int] | None:
    """Return the first and last row number of a table that raymm wrote."""
    names = getattr(value, "column_names", ())
    if "index" not in names or "D" not in names or getattr(value, "num_rows", 0) == 0:
        return None
    index = value.column("index").to_numpy()
    if index.dtype.kind not in "iu":
        return None
    is_ascending = bool((index[1:] > index[:-1]).all())
    return (int(index[0]), int(index[-1])) if is_ascending else (1, 0)


def _flatten(value: Any, name: str) -> tuple[list[Ref], bool]:
    """Return the references in order, and whether they are said to lie beneath each other."""
    reference = ray_module().ObjectRef
    if isinstance(value, reference):
        return [value], False
    rows = [list(each) if isinstance(each, (list, tuple)) else each for each in value]
    is_beneath = all(isinstance(each, list) for each in rows)
    if is_beneath:
        if len(rows) > 1 and any(len(each) != 1 for each in rows):
            raise ShapeError(
                f"{name} is a grid of blocks: give one row [first, second] or one column "
                "[[first], [second]] of them"
            )
        is_beneath = len(rows) > 1
        rows = [ref for each in rows for ref in each]
    wrong = next((each for each in rows if not isinstance(each, reference)), None)
    if wrong is not None:
        raise PlanError(f"{name} mixes references with a {type(wrong).__qualname__}")
    return rows, is_beneath


def _assemble(refs: list[Ref], found: list[_Found], opened: _Opened, is_beneath: bool) -> RaySource:
    """Put the blocks together; they must be of one dtype."""
    name, first = opened.name, found[0]
    for place, each in enumerate(found):
        if (each.dtype, each.is_bfloat16) != (first.dtype, first.is_bfloat16):
            raise DTypeError(
                f"{name} has blocks of different dtypes: block {place} is {np.dtype(each.dtype)}, "
                f"block 0 {np.dtype(first.dtype)}: convert them with .astype()"
            )
    is_beneath = is_beneath or first.is_table
    axis = 0 if len(first.shape) == 1 or is_beneath else 1
    _check_shapes([each.shape for each in found], axis, name)
    edges = list(accumulate((each.shape[axis] for each in found), initial=0))
    shape = (*first.shape[:axis], edges[-1], *first.shape[axis + 1 :])
    shards = tuple(
        Shard(ref, place, start, stop)
        for place, (ref, (start, stop)) in enumerate(zip(refs, pairwise(edges), strict=True))
    )
    return RaySource(
        shards,
        name,
        shape,
        np.dtype(first.dtype),
        opened.column,
        opened.null,
        is_beneath=axis == 0 and len(shape) == 2,
        is_bfloat16=first.is_bfloat16,
    )


def _check_shapes(shapes: list[tuple[int, ...]], axis: int, name: str) -> None:
    """Raise `ShapeError` for the first block that does not fit to block 0."""
    first = shapes[0]
    for place, shape in enumerate(shapes):
        if len(shape) == len(first) and all(
            length == other
            for each, (length, other) in enumerate(zip(shape, first, strict=True))
            if each != axis
        ):
            continue
        hint = "beneath each other need one width"
        if axis == 1:
            hint = "side by side need one height; [[first], [second]] lie beneath each other"
        raise ShapeError(
            f"{name}: block {place} {format_shape(shape)} does not fit to block 0 "
            f"{format_shape(first)}: blocks {hint}"
        )


def calls_at_once() -> int:
    """Return how many calls on blocks may be under way: each may need a process of its own."""
    cpus = int(ray_module().cluster_resources().get("CPU", 1))
    return max(2, min(cpus, MOST_CALLS_AT_ONCE))


def check_free_cpu(what: str) -> None:
    """Raise `PlanError` if no CPU becomes free: Ray Data would wait for one for ever."""
    ray = ray_module()
    deadline = time.monotonic() + FREE_CPU_SECONDS
    while ray.is_initialized() and ray.available_resources().get("CPU", 0) < 1:
        if time.monotonic() > deadline:
            total = ray.cluster_resources().get("CPU", 0)
            raise PlanError(
                f"{what} needs a CPU to be executed, and none of the cluster's {total:g} is free: "
                "open it before the engine, start the engine with fewer workers, or give Ray more "
                "CPUs (num_cpus=)"
            )
        time.sleep(0.1)


def _is_dataset(value: Any) -> bool:
    data = sys.modules.get("ray.data")
    return data is not None and hasattr(data, "Dataset") and isinstance(value, data.Dataset)
