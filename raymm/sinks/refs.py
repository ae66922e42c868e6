"""D kept in the cluster, block by block: nothing of it passes through the driver."""

import threading
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from raymm import keeping
from raymm.errors import PlanError
from raymm.operands import format_shape
from raymm.sinks.base import Block, OutputSpec, Piece, Values
from raymm.tiles import Bounds, Grid, Layout, Stays, Tile

_RUN_NBYTES = 2**15


class Place(NamedTuple):
    """Where a tile is."""

    ref: Any
    """Its reference in the object store."""
    worker: str
    """Which worker made it."""
    key: str
    """What that worker knows the matrix by."""


@dataclass(frozen=True)
class Placed:
    """What `Refs` commits: where the tiles of D are."""

    spec: OutputSpec
    on: Stays
    places: Mapping[int, Place]
    """By tile."""

    @property
    def grid(self) -> Grid:
        """How D is cut."""
        assert self.spec.grid is not None  # a committed output has one
        return self.spec.grid


class Refs:
    """D stays where it is computed, as one `ShardedMatrix`.

    Parameters
    ----------
    on : {"store", "worker"}
        In the cluster's object store, or in the memory of the workers (on GPUs, of the device),
        which must be those of an engine that stays open.

    Notes
    -----
    A tile is one block: an array whose rows are the tile's columns, in C order, which NumPy, Arrow
    and Ray Data take without a copy. It is the returned value of the worker's call, so it is owned
    by the driver and outlives the worker.

    Memory: one tile per worker while it is multiplied, D in the object store (``on="store"``) or
    spread over the workers (``on="worker"``).
    """

    def __init__(self, on: Stays = "store") -> None:
        if on not in ("store", "worker"):
            raise PlanError(f'on={on!r}: choose "store" or "worker"')
        self.on, self._key = on, uuid.uuid4().hex
        self._spec: OutputSpec | None = None
        self._places: dict[int, Place] = {}
        self._tiles: dict[int, Values] = {}
        """Tiles under way in this process, each as an array of its columns."""
        self._lock = threading.Lock()

    @property
    def name(self) -> str:
        """Where D stays."""
        return "the object store" if self.on == "store" else "the workers' memory"

    def layout(self, spec: OutputSpec) -> Layout:
        """Return how it wants D: the columns one after another."""
        if len(spec.shape) != 2:
            raise PlanError(
                f"Refs() keeps matrices in blocks, the result is {format_shape(spec.shape)}: use "
                "compute()"
            )
        item = spec.dtype.itemsize
        column = max(1, spec.rows) * item
        return Layout("F", _RUN_NBYTES, 0, item, column, holds_tile=True, stays=self.on)

    def overwrites(self, path: str | None, array: Values | None) -> bool:
        """Return False: it overwrites nothing."""
        del path, array
        return False

    def open(self, spec: OutputSpec, overwrite: bool) -> None:
        """Begin a matrix of its own."""
        del overwrite
        self.layout(spec)
        self._spec, self._key, self._places = spec, uuid.uuid4().hex, {}

    def attach(self) -> None:
        """Make ready in this process."""
        self._tiles.clear()

    def write(self, block: Block) -> None:
        """Put a block into its tile."""
        part = self._part(block.tile)
        where, start = block.bounds, block.tile.start
        columns = slice(where.column_start - start, where.column_stop - start)
        part[columns, where.row_start : where.row_stop] = block.host.T

    def finish(self, tile: Tile) -> Piece:
        """Keep a whole tile in this process, or hand it to the object store."""
        part = self._part(tile)
        with self._lock:
            self._tiles.pop(tile.index, None)
        bounds = Bounds(0, part.shape[1], tile.start, tile.stop)
        if self.on == "store":
            return Piece(bounds, part)
        keeping.keep(self._key, tile.index, part)
        return Piece(bounds, part[:0])

    def detach(self, sync: bool) -> None:
        """Let go of unfinished tiles; without `sync` the matrix comes to nothing."""
        self._tiles.clear()
        if not sync:
            keeping.drop(self._key)

    def receive(self, piece: Piece) -> None:
        """Note where a tile is; it is not fetched."""
        assert self._spec is not None  # open() came first
        assert self._spec.grid is not None
        tile = piece.bounds.column_start // self._spec.grid.tile_columns
        self._places[tile] = Place(piece.values, piece.worker, self._key)

    def view(self) -> Any:
        """Return where D is."""
        return self.commit()

    def commit(self) -> Placed:
        """Return where D is."""
        assert self._spec is not None  # open() came first
        return Placed(self._spec, self.on, dict(self._places))

    def abort(self) -> None:
        """Let go of what is there."""
        self._places.clear()

    def _part(self, tile: Tile) -> Values:
        """Return the memory of a tile."""
        assert self._spec is not None  # open() came first
        with self._lock:
            if tile.index not in self._tiles:
                shape = (tile.width, self._spec.rows)
                self._tiles[tile.index] = np.empty(shape, self._spec.dtype)
            return self._tiles[tile.index]

    def __getstate__(self) -> dict[str, Any]:
        """Leave tiles and the lock behind."""
        return {"on": self.on, "_key": self._key, "_spec": self._spec}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Arrive in a worker."""
        self.__dict__.update(state, _places={}, _tiles={}, _lock=threading.Lock())
