"""Operands in a Ray cluster: references to blocks, datasets. The driver never holds the blocks."""

from bisect import bisect_left, bisect_right
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise
from typing import Any, TypeAlias

import numpy as np

from raymm import keeping
from raymm.errors import RaymmError, SourceError
from raymm.keeping import Kept
from raymm.kernels.buffers import Buffer
from raymm.operands import Operand
from raymm.sources.base import Array
from raymm.sources.columns import Null
from raymm.sources.ray_values import open_value

Ref: TypeAlias = Any
"""Ray's handles are untyped."""


class LostBlockError(SourceError):
    """A block is gone, and with it what only it held."""

    place = 0
    """Which block it was."""


@dataclass(frozen=True, slots=True)
class Shard:
    """A block of the operand: an object in the cluster's store, or in a worker's memory."""

    ref: Ref | Kept
    place: int
    """Which block it is, for messages."""
    start: int
    """Where it begins along the axis on which the blocks follow each other."""
    stop: int


@dataclass(frozen=True)
class RaySource:
    """Blocks side by side or beneath each other; a worker reads those that its tile touches."""

    shards: tuple[Shard, ...]
    name: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    column: str | None = None
    """Of tables: which column holds the vectors."""
    null: Null = None
    """Of tables: what becomes of missing values."""
    is_beneath: bool = False
    """Whether the blocks lie beneath each other, in this orientation."""
    is_turned: bool = False
    """Whether each block is the transpose of what its reference holds."""
    is_bfloat16: bool = False
    hint: str = "put it into the cluster again and give its new reference"
    """What to do about a lost block."""
    holder: Any = field(default=None, compare=False, repr=False)
    """Keeps blocks in workers' memory from being dropped; stays in this process."""

    def __getstate__(self) -> dict[str, Any]:
        """Leave the holder behind."""
        return {**self.__dict__, "holder": None}

    @property
    def operand(self) -> Operand:
        """Its description."""
        item = self.dtype.itemsize
        strides = (self.shape[-1] * item, item)[-len(self.shape) :]
        if self.is_turned:
            strides = (item, self.shape[0] * item)
        return Operand(
            self.name, self.shape, self.dtype, strides, None, self.is_bfloat16, is_held=False
        )

    @property
    def T(self) -> "RaySource":
        """The transpose: the same references, read the other way."""
        if len(self.shape) == 1:
            return self
        shape = self.shape[::-1]
        return replace(
            self, shape=shape, is_beneath=not self.is_beneath, is_turned=not self.is_turned
        )

    def as_row(self) -> "RaySource":
        """Return a vector as a matrix of one row."""
        return replace(self, shape=(1, *self.shape))

    def as_column(self) -> "RaySource":
        """Return a vector as a matrix of one column."""
        return self.as_row().T

    def load(self) -> Array:
        """Read all of it into this process, one block at a time."""
        matrix = self if len(self.shape) == 2 else self.as_row()
        return matrix.read(0, matrix.shape[1], Buffer()).reshape(self.shape)

    def cut(self, start: int, stop: int) -> "RaySource":
        """Return the references that these columns need."""
        if self.is_beneath:
            return self
        return replace(self, shards=self._touched(start, stop))

    def read(self, start: int, stop: int, buffer: Buffer) -> Array:
        """Return columns ``start:stop``: a view of one block, or copied from several."""
        shards = self.shards if self.is_beneath else self._touched(start, stop)
        if len(shards) == 1:
            return self._part(shards[0], start, stop)
        values = buffer.array((self.shape[0], stop - start), self.dtype)
        for shard in shards:
            if self.is_beneath:
                place = values[shard.start : shard.stop]
            else:
                place = values[:, max(shard.start, start) - start : min(shard.stop, stop) - start]
            place[...] = self._part(shard, start, stop)
        return values

    def _touched(self, start: int, stop: int) -> tuple[Shard, ...]:
        """Return the blocks that hold some of these columns."""
        first = bisect_right(self.shards, start, key=lambda each: each.stop)
        last = bisect_left(self.shards, stop, key=lambda each: each.start)
        return tuple(each for each in self.shards[first:last] if each.start < each.stop)

    def _part(self, shard: Shard, start: int, stop: int) -> Array:
        """Return a block's share of these columns."""
        if not self.is_beneath:
            start, stop = max(shard.start, start) - shard.start, min(shard.stop, stop) - shard.start
        try:
            if isinstance(shard.ref, Kept):
                return self._kept_part(shard.ref, start, stop)
            source = open_value(fetch(shard.ref), self.name, self.column, self.null)
        except Exception as error:
            raise explained(error, self.name, shard.place, self.hint) from error
        source = source if len(source.operand.shape) == 2 else source.as_row()
        part: Array = (source.T if self.is_turned else source).read(start, stop, Buffer())
        return part

    def _kept_part(self, kept: Kept, start: int, stop: int) -> Array:
        """Return a share of a block in a worker's memory, of this one or another."""
        values = keeping.find(kept.key, kept.tile)
        if values is not None:
            return (values.T if self.is_turned else values)[:, start:stop]
        wanted = slice(start, stop)
        key = (wanted, slice(None)) if self.is_turned else (slice(None), wanted)
        part: Array = fetch(kept.actor.kept.remote(kept.key, kept.tile, key))
        return part.T if self.is_turned else part


def from_blocks(
    refs: Iterable[Ref | Kept], lengths: Iterable[int], width: int, dtype: np.dtype[Any], first: int
) -> RaySource:
    """Return blocks of known shapes (length, `width`), beneath each other, as a source.

    The first of them is called block `first`.
    """
    edges = list(accumulate(lengths, initial=0))
    shards = tuple(
        Shard(ref, place, start, stop)
        for place, (ref, (start, stop)) in enumerate(zip(refs, pairwise(edges), strict=True), first)
    )
    return RaySource(shards, "D", (edges[-1], width), dtype, is_beneath=True)


def fetch(ref: Ref) -> Any:
    """Return an object, without a copy if it is on this node; `SourceError` without Ray."""
    ray = ray_module()
    if not ray.is_initialized():  # ray.get would start another
        raise SourceError("the Ray that held it has ended")
    return ray.get(ref)


def ray_module() -> Any:
    """Return Ray, loaded when it is first needed."""
    import ray  # noqa: PLC0415  such operands exist only where it is loaded

    return ray


def is_lost(error: Exception) -> bool:
    """Whether an error of Ray's, or of a call's, says that an object or its holder is gone."""
    errors = ray_module().exceptions
    found = getattr(error, "cause", None) if isinstance(error, errors.RayTaskError) else error
    gone = errors.ObjectLostError, errors.RayActorError, errors.WorkerCrashedError
    return isinstance(found, (*gone, errors.NodeDiedError, LostBlockError))


def explained(error: Exception, name: str, place: int, hint: str = RaySource.hint) -> RaymmError:
    """Return why a block cannot be read, as an error of raymm's."""
    cause = getattr(error, "cause", None)
    if not is_lost(error):
        found = cause if isinstance(error, ray_module().exceptions.RayTaskError) else error
        if isinstance(found, RaymmError):
            return found
        return SourceError(f"{name}: the task that was to make block {place} failed: {found!r}")
    reason = str(error).strip().partition("\n")[0].partition(". ")[0] or type(error).__name__
    lost = LostBlockError(f"{name}: block {place} is lost ({reason}): {hint}")
    lost.place = place
    return lost
