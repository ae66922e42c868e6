"""D as Arrow IPC: one local file written in place, or a folder of them in an object store."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from raymm.filesystems import is_remote
from raymm.paths import local_path
from raymm.sinks.arrow_format import ArrowFile
from raymm.sinks.base import OutputSpec, Stored
from raymm.sinks.groups import Image
from raymm.sinks.partial import PartialFile
from raymm.sinks.parts import Parts
from raymm.sinks.remote import RemoteFolder
from raymm.sinks.runs import DIRECT_NBYTES
from raymm.sinks.tables import arrow_schema, metadata_of, tiles_of
from raymm.tiles import Tile


class Arrow(Parts):
    """An Arrow IPC file (also called Feather V2): a row for each index of D's longer axis.

    Parameters
    ----------
    path : path or URI
        Exactly this file. At an address such as ``s3://bucket/D`` a folder of such files, one for
        each tile.

    Notes
    -----
    Columns ``index`` (int64) and ``D`` (a list of fixed size: that row of a tall D, that column of
    a wide one), no nulls, uncompressed, so that readers map it; record batches of up to 128 MB. The
    schema's metadata give D back in its own orientation. Local: written in place by all workers at
    once in ``<path>.partial``, whose space is reserved before the first tile; ``commit`` syncs and
    renames. Remote: see `raymm.sinks.remote`.

    Memory: one tile (64 MB, or one row of the table) per worker for remote output.
    """

    suffix = ".arrow"

    def __init__(self, path: str | bytes | os.PathLike[str] | os.PathLike[bytes]) -> None:
        self._whole: ArrowFile | None = None
        self.is_remote = self.holds_tile = is_remote(os.fsdecode(path))
        if self.is_remote:
            super().__init__(RemoteFolder(os.fsdecode(path)))
        else:
            self.path = local_path(path)
            super().__init__(_OneFile(self.path))

    @property
    def name(self) -> str:
        """The file or folder."""
        return str(self._place)

    def open(self, spec: OutputSpec, overwrite: bool) -> None:
        """Check the place and reserve all space; an error leaves nothing behind."""
        self._spec = spec
        if self.is_remote:
            names = {self._name(tile): 0 for tile in tiles_of(spec)}
            self._place.open(names, overwrite, False)
        else:
            self._place.open(self._file_image(), overwrite, spec.nbytes >= DIRECT_NBYTES)
        if spec.nbytes == 0:
            self._write_empty()

    def _write_empty(self) -> None:
        """Write all of an output that has no values."""
        self.attach()
        for tile in tiles_of(self.spec):
            if self.is_remote:
                with self._place.stream(self._name(tile)) as out:
                    self._encode(out, tile, np.empty((tile.width, self.spec.rows), self.spec.dtype))
            else:
                self._surround(tile)
        self.detach(sync=True)

    def view(self) -> Stored:
        """Return the unfinished file or folder, to be read as a table."""
        return Stored(self._place.unfinished)

    def commit(self) -> Stored:
        """Make the file or folder the output."""
        rows = {self._name(tile): tile.width for tile in tiles_of(self.spec)}
        self._place.commit(rows, metadata_of(self.spec))
        return Stored(self._place.finished)

    def _image(self, tile: Tile) -> Image:
        if not self.is_remote:
            return self._file_image()
        return self._make_image([(tile.start, tile.stop)])

    def _file_image(self) -> ArrowFile:
        if self._whole is None:
            tiles = [(tile.start, tile.stop) for tile in tiles_of(self.spec)]
            self._whole = self._make_image(tiles)
        return self._whole

    def _make_image(self, spans: list[tuple[int, int]]) -> ArrowFile:
        schema = arrow_schema(self.spec).serialize().to_pybytes()
        return ArrowFile(self.spec.rows, self.spec.dtype, spans, schema)

    def _ends(self, image: Image) -> tuple[tuple[int, bytes], ...]:
        del image
        return ()  # written when the file was made

    def __getstate__(self) -> dict[str, Any]:
        """Leave what belongs to this process behind."""
        return super().__getstate__() | {"_whole": None}


class _OneFile:
    """A file that all tiles share, as a place for parts."""

    def __init__(self, path: Path) -> None:
        self._file = PartialFile(path)

    def __str__(self) -> str:
        return str(self._file.path)

    @property
    def finished(self) -> str:
        return str(self)

    @property
    def unfinished(self) -> str:
        return str(self._file.partial)

    def is_one_of(self, path: str) -> bool:
        return self._file.is_one_of(path)

    def open(self, image: ArrowFile, overwrite: bool, is_direct: bool) -> None:
        self._file.open(image.header, image.nbytes, overwrite, is_direct, image.tail)

    def attach(self) -> None:
        self._file.attach()

    @contextmanager
    def part(self, name: str) -> Iterator[PartialFile]:
        del name
        yield self._file

    def finish(self, name: str) -> None:
        pass

    def detach(self, sync: bool) -> None:
        self._file.detach(sync)

    def commit(self, rows: dict[str, int], metadata: dict[str, Any]) -> None:
        del rows, metadata  # the file says it all
        self._file.commit()

    def abort(self) -> None:
        self._file.abort()
