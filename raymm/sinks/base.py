"""The protocol of outputs, and what they receive."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from raymm.tiles import Bounds, Grid, Layout, Tile

if TYPE_CHECKING:
    import torch

Values: TypeAlias = NDArray[Any]


@dataclass(frozen=True, slots=True)
class OutputSpec:
    """What a sink must know of D before the first tile."""

    rows: int
    columns: int
    """In canonical orientation: the columns are the huge axis."""
    is_transposed: bool
    """Whether D as the user sees it is the transpose of that."""
    shape: tuple[int, ...]
    """D's shape as the user sees it; without the axes that vector operands take away."""
    dtype: np.dtype[Any]
    grid: Grid | None = None
    """How D is cut; None while planning, when only the layout is asked for."""
    provenance: dict[str, Any] = field(default_factory=dict)
    """What the result says of its making: precision, operands. For JSON."""

    @property
    def nbytes(self) -> int:
        """Size of D, in bytes."""
        return self.rows * self.columns * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class Stored:
    """What ``commit`` returns for an output that is no array: where it can be opened again."""

    path: str
    """A local path or a URI."""


@dataclass(frozen=True)
class Block:
    """A part of a tile, as a sink receives it. Its memory is used again after ``write``."""

    tile: Tile
    bounds: Bounds
    widened: Values
    """The values, (rows, columns), with the halo columns that the layout asked for; runs along the
    layout's contiguous axis are contiguous. With `nonzero`, only those columns."""
    nonzero: NDArray[np.int64] | None = None
    """Of a product with a sparse huge operand: the columns within `bounds`, numbered as in D, that
    are not zero throughout; None if all are there."""
    spread: Callable[[], Values] | None = None
    """Returns a block given by `nonzero` with all its columns and the halo, in memory that is
    there already."""

    @property
    def compact(self) -> Values:
        """The values of the columns in `nonzero`."""
        return self.host if self.nonzero is None else self.widened

    @property
    def host(self) -> Values:
        """The values within `bounds`."""
        return self.dense[:, : self.bounds.shape[1]]

    @cached_property
    def dense(self) -> Values:
        """The values of all columns, those of the halo included."""
        if self.nonzero is None:
            return self.widened
        if self.spread is not None:
            return self.spread()
        is_c = self.widened.strides[1] <= self.widened.strides[0]
        values = np.zeros(self.bounds.shape, self.widened.dtype, "C" if is_c else "F")
        values[:, self.nonzero - self.bounds.column_start] = self.widened
        return values

    @cached_property
    def device(self) -> "torch.Tensor":
        """The values as a torch tensor on the worker's device."""
        import torch  # noqa: PLC0415  file sinks do without it: 2 s per worker

        return torch.from_numpy(self.host)


@dataclass(frozen=True, slots=True)
class Piece:
    """What a worker hands back for the driver to receive."""

    bounds: Bounds
    values: Values
    """Of a tile that stays in the cluster, the driver gets its reference instead."""
    worker: str = ""
    """Of a tile that stays: which worker made it."""


@runtime_checkable
class Sink(Protocol):
    """An output.

    0. ``name``, ``layout(spec)``, ``overwrites(path, array)`` (driver, while planning; must not
       touch anything): the last says whether writing would change that file or array.
    1. ``open(spec, overwrite)`` (driver, once, before workers start): reserves all space.
    2. ``attach()`` (worker, once, before its first block).
    3. ``write(block)`` (worker, any order, several threads at once, each block at least once:
       idempotent): returns None, or a `Piece` that the driver must receive.
       A sink in memory may also have ``target(bounds)`` (worker, before a block is multiplied): the
       memory where it wants that block; the block that ``write`` receives may then lie there.
       A sink that keeps a tile until it is whole also has ``finish(tile)`` (worker, once all blocks
       of the tile were written; at least once for each tile: idempotent). If its layout says that
       tiles stay in the cluster, ``finish`` returns the tile as a `Piece`, and the driver receives
       one that holds its reference.
    4. ``detach(sync)`` (worker, once, after its last block): lets go; with `sync` what was written
       is durable.
    5. ``receive(piece)`` (driver).
    6. ``view()`` (driver, every tile has its receipt): D as written, in canonical orientation (a
       memory map for a file), for verification; `Stored` for what is opened to be read; None for a
       sink that does not hold D.
    7. ``commit()`` (driver, once, every tile has its receipt): returns what the user gets, or
       `Stored` for what is to be opened again; or
       ``abort()`` (driver, in every other case; must not raise).

    A sink is pickled after ``open`` and sent to workers that are other processes.
    """

    @property
    def name(self) -> str:
        """What to call it."""
        ...

    def layout(self, spec: OutputSpec) -> Layout:
        """0. How it wants D."""
        ...

    def overwrites(self, path: str | None, array: Values | None) -> bool:
        """0. Whether writing would change that file or array."""
        ...

    def open(self, spec: OutputSpec, overwrite: bool) -> None:
        """1. Reserve all space."""
        ...

    def attach(self) -> None:
        """2. Make ready in this process."""
        ...

    def write(self, block: Block) -> Piece | None:
        """3. Put a block where it belongs."""
        ...

    def detach(self, sync: bool) -> None:
        """4. Let go, with `sync` durably."""
        ...

    def receive(self, piece: Piece) -> None:
        """5. Put a block where it belongs, on the driver."""
        ...

    def view(self) -> "Values | Stored | None":
        """6. Return D as written."""
        ...

    def commit(self) -> Any:
        """7. Complete the output."""
        ...

    def abort(self) -> None:
        """7. Give the output up."""
        ...
