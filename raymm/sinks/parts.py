"""Outputs that are tables: workers write values where they belong, or whole tiles at once."""

import threading
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any, BinaryIO

from raymm.sinks.base import Block, OutputSpec, Piece, Values
from raymm.sinks.groups import Image, runs, within, write_image
from raymm.sinks.tables import HeldTiles, arrow_schema, part_name
from raymm.tiles import Layout, Tile

RUN_NBYTES = 2**19


class Parts(ABC):
    """A table in one file or in one for each tile; a subclass knows the bytes and the place.

    Where the bytes of a part are known beforehand and its place can be written to at any position,
    blocks go there as they are computed. Otherwise a worker keeps a tile until it is whole.
    """

    path: Path | None = None
    """Where it goes, if that is local."""
    suffix: str
    has_metadata = True
    holds_tile = False
    _spec: OutputSpec | None = None

    def __init__(self, place: Any) -> None:
        self._place = place
        self._held = HeldTiles()
        self._images: dict[int, Image] = {}
        self._lock = threading.Lock()

    @abstractmethod
    def _image(self, tile: Tile) -> Image:
        """Return the file that a tile goes into."""

    def _encode(self, out: BinaryIO, tile: Tile, held: Values) -> None:
        """Write a tile's file from its beginning."""
        write_image(out, self._image(tile), held, tile.start)

    @property
    def spec(self) -> OutputSpec:
        """What ``open`` was told."""
        assert self._spec is not None  # open() came first
        return self._spec

    def layout(self, spec: OutputSpec) -> Layout:
        """Return how it wants D: columns one after another; refuses what a table cannot hold."""
        arrow_schema(spec)
        item = spec.dtype.itemsize
        pitch = max(1, spec.rows) * item
        return Layout("F", RUN_NBYTES, 0, item, pitch, holds_tile=self.holds_tile)

    def overwrites(self, path: str | None, array: Values | None) -> bool:
        """Whether that file is one of these, through any spelling or link."""
        del array
        return path is not None and bool(self._place.is_one_of(path))

    def attach(self) -> None:
        """Reach the unfinished output from this process."""
        self._place.attach()

    def write(self, block: Block) -> Piece | None:
        """Write a block's runs at their positions, or keep them."""
        if self.holds_tile:
            self._held.put(block, self.spec.rows)
            return None
        image = self._known_image(block.tile)
        with self._place.part(self._name(block.tile)) as file:
            for run, position in runs(block, image.groups, image.stored, self.spec.rows):
                file.write_run(run, position)
        return None

    def finish(self, tile: Tile) -> None:
        """Write what lies around the values of a tile, or the whole of it."""
        if self.holds_tile:
            held = self._held.take(tile)
            if held is not None:
                with self._place.stream(self._name(tile)) as out:
                    self._encode(out, tile, held)
        else:
            self._surround(tile)
        self._place.finish(self._name(tile))

    def _surround(self, tile: Tile) -> None:
        image = self._known_image(tile)
        with self._place.part(self._name(tile)) as file:
            for group in within(image.groups, tile.start, tile.stop):
                for position, known in image.head(group):
                    file.write(known, position)
            for position, known in self._ends(image):
                file.write(known, position)
        with self._lock:
            self._images.pop(tile.index, None)

    def _ends(self, image: Image) -> tuple[tuple[int, bytes], ...]:
        """Return (position, bytes) of the ends that workers write."""
        return image.ends()

    def detach(self, sync: bool) -> None:
        """Let go of the output in this process, with `sync` once all of it is durable."""
        self._held.clear()
        self._place.detach(sync)

    def receive(self, piece: Piece) -> None:
        """Never called: blocks are written where they are computed."""
        raise AssertionError(piece)

    def abort(self) -> None:
        """Remove what there is of the output."""
        self._held.clear()
        self._place.abort()

    def _known_image(self, tile: Tile) -> Image:
        with self._lock:
            if tile.index not in self._images:
                self._images[tile.index] = self._image(tile)
            return self._images[tile.index]

    def _name(self, tile: Tile) -> str:
        return part_name(tile) + self.suffix

    def __getstate__(self) -> dict[str, Any]:
        """Leave what belongs to this process behind."""
        return self.__dict__ | {"_images": {}, "_lock": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _lock=threading.Lock())
