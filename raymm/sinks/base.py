"""The protocol of outputs, and what they receive."""

from dataclasses import dataclass
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

    @property
    def nbytes(self) -> int:
        """Size of D, in bytes."""
        return self.rows * self.columns * self.dtype.itemsize


@dataclass(frozen=True)
class Block:
    """A part of a tile, as a sink receives it. Its memory is used again after ``write``."""

    tile: Tile
    bounds: Bounds
    host: Values
    """The values, (rows, columns); runs along the layout's contiguous axis are contiguous."""

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


@runtime_checkable
class Sink(Protocol):
    """An output.

    0. ``name``, ``layout(spec)``, ``overwrites(path, array)`` (driver, while planning; must not
       touch anything): the last says whether writing would change that file or array.
    1. ``open(spec, overwrite)`` (driver, once, before workers start): reserves all space.
    2. ``attach()`` (worker, once, before its first block).
    3. ``write(block)`` (worker, any order, several threads at once, each block at least once:
       idempotent): returns None, or a `Piece` that the driver must receive.
    4. ``flush()`` (worker, once, after its last block): what was written is durable.
    5. ``receive(piece)`` (driver).
    6. ``view()`` (driver, every tile has its receipt): D as written, in canonical orientation (a
       memory map for a file), for verification; None for a sink that does not hold D.
    7. ``commit()`` (driver, once, every tile has its receipt): returns what the user gets; or
       ``abort()`` (driver, in every other case; must not raise).

    A sink is pickled after ``open`` and sent to workers that are other processes.
    """

    @property
    def name(self) -> str: ...

    def layout(self, spec: OutputSpec) -> Layout: ...

    def overwrites(self, path: str | None, array: Values | None) -> bool: ...

    def open(self, spec: OutputSpec, overwrite: bool) -> None: ...

    def attach(self) -> None: ...

    def write(self, block: Block) -> Piece | None: ...

    def flush(self) -> None: ...

    def receive(self, piece: Piece) -> None: ...

    def view(self) -> Values | None: ...

    def commit(self) -> Any: ...

    def abort(self) -> None: ...
