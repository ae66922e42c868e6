"""D as a Zarr v3 array, a shard for each tile."""

import os
from typing import Any

from raymm.errors import PlanError
from raymm.filesystems import is_remote
from raymm.paths import local_path
from raymm.sinks.base import Block, OutputSpec, Piece, Stored, Values
from raymm.sinks.folder import PartialFolder
from raymm.sinks.tables import HeldTiles, metadata_of
from raymm.tiles import Layout, Tile

CHUNK_NBYTES = 2**22
"""Of what a reader decodes at a time, at most, unless one column is larger."""


class Zarr:
    """A Zarr v3 array in D's own orientation; needs ``pip install "raymm[zarr]"``.

    Parameters
    ----------
    path : path
        Exactly this folder. Local.

    Notes
    -----
    Uncompressed. A tile is a shard (one file), cut into chunks of up to 4 MB where its width can be
    divided so. Free space is checked before the first tile; the array is built in
    ``<path>.partial`` and renamed.

    Memory: one tile (64 MB, or one column of D), three times, per worker.
    """

    has_metadata = True

    def __init__(self, path: str | bytes | os.PathLike[str] | os.PathLike[bytes]) -> None:
        if is_remote(os.fsdecode(path)):
            raise PlanError(f"{os.fsdecode(path)}: a Zarr output is local: write Parquet there")
        self.path = local_path(path)
        self._folder = PartialFolder(self.path)
        self._held = HeldTiles()
        self._spec: OutputSpec | None = None
        self._array: Any = None

    @property
    def name(self) -> str:
        """The folder."""
        return str(self.path)

    def layout(self, spec: OutputSpec) -> Layout:
        """Return how it wants D: whole tiles."""
        item = spec.dtype.itemsize
        return Layout("F", 2**19, 0, item, max(1, spec.rows) * item, holds_tile=True)

    def overwrites(self, path: str | None, array: Values | None) -> bool:
        """Whether that file is in this folder, through any spelling or link."""
        del array
        return path is not None and self._folder.is_one_of(path)

    def open(self, spec: OutputSpec, overwrite: bool) -> None:
        """Check the path and the free space, and make the array."""
        zarr = _library()
        self._spec = spec
        self._folder.open({}, overwrite, False, spec.nbytes)
        shard, chunk = shapes(spec)
        zarr.create_array(
            self._folder.unfinished,
            shape=spec.shape,
            dtype=spec.dtype,
            chunks=chunk,
            shards=shard,
            compressors=None,
            fill_value=0,
            attributes={"raymm": metadata_of(spec)},
        )

    def attach(self) -> None:
        """Open the unfinished array in this process."""
        self._folder.attach()
        self._array = _library().open_array(self._folder.unfinished, mode="r+")

    def write(self, block: Block) -> Piece | None:
        """Keep a block until its tile is whole."""
        assert self._spec is not None  # open() came first
        self._held.put(block, self._spec.rows)
        return None

    def finish(self, tile: Tile) -> None:
        """Write a tile's shard."""
        held, spec = self._held.take(tile), self._spec
        if held is None or spec is None:
            return
        span = slice(tile.start, tile.stop)
        if len(spec.shape) < 2:
            self._array[span if spec.shape else ()] = held.reshape(-1 if spec.shape else ())
        elif spec.is_transposed:
            self._array[span] = held
        else:
            self._array[:, span] = held.T

    def detach(self, sync: bool) -> None:
        """Let go of the array; ``commit`` syncs its files."""
        del sync
        self._held.clear()
        self._array = None

    def receive(self, piece: Piece) -> None:
        """Never called: tiles are written where they are computed."""
        raise AssertionError(piece)

    def view(self) -> Stored:
        """Return the unfinished array."""
        return Stored(self._folder.unfinished)

    def commit(self) -> Stored:
        """Sync all files, and rename."""
        self._folder.commit({}, {})
        return Stored(str(self.path))

    def abort(self) -> None:
        """Remove the unfinished array."""
        self._held.clear()
        self._folder.abort()

    def __getstate__(self) -> dict[str, Any]:
        """Leave the open array behind."""
        return self.__dict__ | {"_array": None}


def shapes(spec: OutputSpec) -> tuple[tuple[int, ...] | None, tuple[int, ...]]:
    """Return the shapes of a shard, which is a tile, and of a chunk; no shard if they are equal."""
    width = max(1, min(spec.grid.tile_columns, spec.columns)) if spec.grid else 1
    column_nbytes = max(1, spec.rows * spec.dtype.itemsize)
    most = max(1, CHUNK_NBYTES // column_nbytes)
    inner = max(each for each in _divisors(width) if each <= most)
    if width > most and inner * 8 < most:  # no good divisor: a shard of crumbs serves nobody
        inner = width
    shard, chunk = _shape(spec, width), _shape(spec, inner)
    return (None if shard == chunk else shard), chunk


def _shape(spec: OutputSpec, width: int) -> tuple[int, ...]:
    if len(spec.shape) < 2:
        return (width,) if spec.shape else ()
    rows = max(1, spec.rows)
    return (width, rows) if spec.is_transposed else (rows, width)


def _divisors(number: int) -> list[int]:
    low = [each for each in range(1, int(number**0.5) + 1) if number % each == 0]
    return low + [number // each for each in low]


def _library() -> Any:
    try:
        import zarr  # noqa: PLC0415  optional
    except ImportError as error:
        raise PlanError('a Zarr output needs zarr: pip install "raymm[zarr]"') from error
    return zarr
