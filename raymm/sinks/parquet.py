"""D as a folder of Parquet files, one for each tile, local or in an object store."""

import os
from typing import BinaryIO

import numpy as np

from raymm.errors import PlanError, ShapeError
from raymm.filesystems import is_remote
from raymm.operands import format_shape
from raymm.paths import local_path
from raymm.sinks.base import OutputSpec, Stored, Values
from raymm.sinks.folder import PartialFolder
from raymm.sinks.groups import Image
from raymm.sinks.parquet_format import ParquetPart
from raymm.sinks.parts import Parts
from raymm.sinks.remote import RemoteFolder
from raymm.sinks.runs import DIRECT_NBYTES
from raymm.sinks.tables import arrow_schema, metadata_of, part_name, tiles_of, write_parquet
from raymm.tiles import Layout, Tile

COMPRESSIONS = ("none", "snappy", "gzip", "brotli", "zstd", "lz4")


class Parquet(Parts):
    """A Parquet dataset: a folder of files, a row for each index of D's longer axis.

    Parameters
    ----------
    path : path or URI
        Exactly this folder; ``s3://``, ``gs://`` and other addresses that pyarrow or fsspec knows
        work as well.
    compression : str, optional
        A codec of pyarrow's Parquet writer, which then makes the files: ``"zstd"``, ``"snappy"``
        ... or ``"none"``. By default raymm lays out the pages itself, uncompressed, and workers
        write values in place.

    Notes
    -----
    Columns ``index`` (int64) and ``D`` (a list of fixed size: that row of a tall D, that column of
    a wide one), no nulls, row groups of up to 128 MB, statistics of ``index``. The schema's
    metadata give D back in its own orientation. Local: space is reserved before the first tile in
    ``<path>.partial/``; ``commit`` syncs and renames. Remote: see `raymm.sinks.remote`.

    Memory: one tile (64 MB, or one row of the table) per worker for remote or compressed output.
    """

    suffix = ".parquet"

    def __init__(
        self,
        path: str | bytes | os.PathLike[str] | os.PathLike[bytes],
        *,
        compression: str | None = None,
    ) -> None:
        if compression is not None and compression not in COMPRESSIONS:
            raise PlanError(f"compression={compression!r}: choose one of {', '.join(COMPRESSIONS)}")
        self.compression = compression
        self.is_remote = is_remote(os.fsdecode(path))
        self.holds_tile = self.is_remote or compression is not None
        if self.is_remote:
            super().__init__(RemoteFolder(os.fsdecode(path)))
        else:
            self.path = local_path(path)
            super().__init__(PartialFolder(self.path))

    @property
    def name(self) -> str:
        """The folder."""
        return str(self._place)

    def layout(self, spec: OutputSpec) -> Layout:
        """Return how it wants D: columns one after another; refuses what a table cannot hold."""
        if spec.rows == 0:
            raise ShapeError(
                f"{self.name}: a result of shape {format_shape(spec.shape)} has rows of no values, "
                "which readers of Parquet cannot take: write .arrow or .npy"
            )
        return super().layout(spec)

    def open(self, spec: OutputSpec, overwrite: bool) -> None:
        """Check the place and reserve all space; an error leaves nothing behind."""
        self._spec, self._schema = spec, arrow_schema(spec)
        tiles = tiles_of(spec)
        sizes = {self._name(tile): self._nbytes(tile) for tile in tiles}
        is_direct = spec.nbytes >= DIRECT_NBYTES and not self.holds_tile
        self._place.open(sizes, overwrite, is_direct)
        if spec.columns == 0:
            (tile,) = tiles
            with self._place.stream(self._name(tile)) as out:
                self._encode(out, tile, np.empty((0, spec.rows), spec.dtype))

    def view(self) -> Stored:
        """Return the unfinished folder, to be read as a table."""
        return Stored(self._place.unfinished)

    def commit(self) -> Stored:
        """Make the folder the output."""
        rows = {self._name(tile): tile.width for tile in tiles_of(self.spec)}
        self._place.commit(rows, metadata_of(self.spec))
        return Stored(self._place.finished)

    def _image(self, tile: Tile) -> Image:
        schema, spec = self._schema, self.spec
        packed = schema.serialize().to_pybytes(), schema.metadata[b"raymm"]
        return ParquetPart(spec.rows, spec.dtype, tile.start, tile.stop, *packed)

    def _nbytes(self, tile: Tile) -> int:
        spec = self.spec
        if self.compression is None:
            return self._image(tile).nbytes
        return tile.width * (spec.rows * spec.dtype.itemsize + 8) + 2**14

    def _encode(self, out: BinaryIO, tile: Tile, held: Values) -> None:
        if self.compression is None:
            super()._encode(out, tile, held)
        else:
            write_parquet(out, held, tile.start, self._schema, self.compression)

    def _name(self, tile: Tile) -> str:
        return part_name(tile) + self.suffix
