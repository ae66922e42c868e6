"""Tables: a row for each column of D.

In canonical orientation a tile is a run of columns, so a table's values lie as in Fortran order:
``index`` is the number of the column, ``D`` its values.
"""

import json
import threading
from typing import Any

import numpy as np

from raymm.errors import DTypeError
from raymm.sinks.base import Block, OutputSpec, Values
from raymm.sinks.groups import split
from raymm.tiles import Tile


class HeldTiles:
    """Tiles kept in memory until they are whole, by workers that write each one at once."""

    def __init__(self) -> None:
        self._tiles: dict[int, Values] = {}
        self._lock = threading.Lock()

    def put(self, block: Block, rows: int) -> None:
        """Copy a block to its place."""
        tile, bounds = block.tile, block.bounds
        with self._lock:
            if tile.index not in self._tiles:
                self._tiles[tile.index] = np.empty((tile.width, rows), block.host.dtype)
            held = self._tiles[tile.index]
        columns = slice(bounds.column_start - tile.start, bounds.column_stop - tile.start)
        held[columns, bounds.row_start : bounds.row_stop] = block.host.T

    def take(self, tile: Tile) -> Values | None:
        """Return a tile, columns by rows, and forget it; None if it was taken before."""
        with self._lock:
            return self._tiles.pop(tile.index, None)

    def clear(self) -> None:
        """Forget all tiles."""
        with self._lock:
            self._tiles.clear()

    def __getstate__(self) -> dict[str, Any]:
        """Leave everything behind."""
        return {}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__()  # type: ignore[misc]


def metadata_of(spec: OutputSpec) -> dict[str, Any]:
    """Return what a table says of D beside its values."""
    return {
        "shape": list(spec.shape),
        "dtype": spec.dtype.name,
        "is_transposed": spec.is_transposed,
        **spec.provenance,
    }


def arrow_schema(spec: OutputSpec) -> Any:
    """Return the schema of a table, with its metadata."""
    import pyarrow as pa  # noqa: PLC0415  only loaded for tables

    check_table_dtype(spec.dtype)
    element = pa.field("element", pa.from_numpy_dtype(spec.dtype), nullable=False)
    vector = pa.list_(element, spec.rows)
    fields = [pa.field("index", pa.int64(), False), pa.field("D", vector, False)]
    return pa.schema(fields, {"raymm": json.dumps(metadata_of(spec))})


def check_table_dtype(dtype: np.dtype[Any]) -> None:
    """Raise `DTypeError` for what Arrow has no type for, or none of whole bytes."""
    if dtype.kind not in "iuf" or dtype.itemsize > 8:
        what = "its real and imaginary parts" if dtype.kind == "c" else "numbers of 8 to 64 bits"
        raise DTypeError(f"a table cannot hold {dtype}: give {what}, or write .npy")


def tiles_of(spec: OutputSpec) -> list[Tile]:
    """Return the tiles that have a part; an empty D has one part."""
    assert spec.grid is not None  # known once a run begins
    return list(spec.grid) or [Tile(0, 0, 0)]


def part_name(tile: Tile) -> str:
    """Return the name of a tile's part, without suffix."""
    return f"part-{tile.index:06d}"


def write_parquet(out: Any, held: Values, start: int, schema: Any, compression: str) -> None:
    """Write columns of D from `start` on, (columns, rows), with pyarrow's writer."""
    import pyarrow as pa  # noqa: PLC0415  only loaded for tables
    from pyarrow import parquet  # noqa: PLC0415

    with parquet.ParquetWriter(
        out, schema, compression=compression, use_dictionary=False, write_statistics=["index"]
    ) as writer:
        for columns in split(0, len(held), held.shape[1] * held.itemsize, 2**31 - 1):
            part = held[columns.start : columns.stop]
            numbers = pa.array(np.arange(start + columns.start, start + columns.stop))
            values = pa.array(part.reshape(-1))
            vectors = pa.FixedSizeListArray.from_arrays(values, type=schema.field("D").type)
            batch = pa.RecordBatch.from_arrays([numbers, vectors], schema=schema)
            writer.write_batch(batch, row_group_size=max(1, len(part)))
