"""Table files read group by group: row groups of Parquet, record batches of Arrow IPC."""

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

from raymm.errors import SourceError
from raymm.sources.columns import Column
from raymm.sources.ipc_footers import batch_rows

SUFFIXES = {
    ".parquet": "parquet",
    ".pq": "parquet",
    ".arrow": "arrow",
    ".feather": "arrow",
    ".ipc": "arrow",
}
FEATHER_V1, STREAM = b"FEA1", b"\xff\xff\xff\xff"
BATCH_COPIES = 12
"""Of a batch of Parquet, while it is decoded: 7 measured, and Arrow gives memory back late."""
READ_AHEAD_NBYTES = 2**22
"""Of a group that is too large to be read at once."""
ARROW_SCHEMA, UNKNOWN_KEY = b"ARROW:schema", b"arrow-schema"
"""The key under which Arrow keeps its own types in a Parquet file, and one of the same length."""


class TableFile(Protocol):
    """An open file of a table."""

    schema: Any
    nbytes: int
    group_rows: list[int]
    """Rows of each group."""

    def suspects(self, name: str, width: int) -> list[int]:
        """Return the groups known to hold nulls, or rows that are not `width` long."""
        ...

    def reading_nbytes(self, row_nbytes: int, group_nbytes: int, rows: int) -> int:
        """Return the most bytes that reading a group holds."""
        ...

    def batches(self, place: int, column: Column, rows: int, is_buffered: bool) -> Iterator[Any]:
        """Yield one column of a group, `rows` at a time where the format allows.

        Its bytes are read at once, or, if buffered, little by little.
        """
        ...

    def close(self) -> None:
        """Close the file."""
        ...


def kind_of(path: str) -> str | None:
    """Return the format that a path's suffix tells."""
    return next((SUFFIXES[suffix] for suffix in SUFFIXES if path.lower().endswith(suffix)), None)


def sniff(filesystem: Any, path: str) -> str | None:
    """Return the format that a file's first bytes tell."""
    with filesystem.open_input_file(path) as file:
        return _kind_of_head(file.read(8))


def sniff_file(path: Path) -> str | None:
    """Return the format that a local file's first bytes tell."""
    with path.open("rb") as file:
        return _kind_of_head(file.read(8))


def _kind_of_head(head: bytes) -> str | None:
    if head[:4] == b"PAR1":
        return "parquet"
    if head[:6] == b"ARROW1" or head[:4] in (FEATHER_V1, STREAM):
        return "arrow"
    return None


def open_table(filesystem: Any, path: str, where: str) -> TableFile:
    """Open a file of either format; its footer is read.

    Raises
    ------
    SourceError
        It is missing, cut short, or of another format.
    """
    try:
        kind = kind_of(path) or sniff(filesystem, path)
        if kind == "parquet":
            return ParquetTable(filesystem, path)
        if kind == "arrow":
            return ArrowTable(filesystem, path, where)
    except (OSError, ValueError, NotImplementedError, struct.error) as error:
        raise as_source_error(error, where) from error
    raise SourceError(f"{where} is neither a Parquet nor an Arrow file")


def as_source_error(error: Exception, where: str) -> SourceError:
    """Return an error of Arrow or of the system as one that names the file."""
    if isinstance(error, SourceError):
        return error
    if isinstance(error, FileNotFoundError):
        return SourceError(2, f"cannot read {where}: no such file or folder")
    hint = ""
    if "ACCESS_DENIED" in str(error) or "credentials" in str(error).lower():
        hint = " (are AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY set, also where the workers are?)"
    return SourceError(f"cannot read {where}: {error}{hint}")


class ParquetTable:
    """A Parquet file."""

    def __init__(self, filesystem: Any, path: str) -> None:
        from pyarrow import parquet  # noqa: PLC0415  only loaded for tables

        self._stream = filesystem.open_input_file(path)
        try:
            self._file = parquet.ParquetFile(self._stream, pre_buffer=False)
        except BaseException:
            self._stream.close()
            raise
        self.nbytes = int(self._stream.size())
        self._plain: Any = None
        self.metadata = self._file.metadata
        self.schema = self._file.schema_arrow
        groups = range(self.metadata.num_row_groups)
        self.group_rows = [self.metadata.row_group(place).num_rows for place in groups]

    def suspects(self, name: str, width: int) -> list[int]:
        """Return the groups whose footer tells of nulls, or of rows that are not `width` long."""
        leaves = self.metadata.schema
        paths = [leaves.column(index).path for index in range(len(leaves))]
        index = next(place for place, path in enumerate(paths) if f"{path}.".startswith(f"{name}."))
        places = []
        for place, rows in enumerate(self.group_rows):
            leaf = self.metadata.row_group(place).column(index)
            nulls = leaf.statistics.null_count if leaf.is_stats_set else 0
            if nulls or leaf.num_values != rows * max(width, 1):
                places.append(place)
        return places

    def reading_nbytes(self, row_nbytes: int, group_nbytes: int, rows: int) -> int:
        """Return the most bytes that reading a row group holds: as stored, and batches of it.

        A batch takes its size again for levels, and buffers grow by doubling.
        """
        largest = max(self.group_rows, default=0)
        stored = 2 * largest * row_nbytes  # the group before it is given back late, too
        stored = stored if stored <= 2 * group_nbytes else READ_AHEAD_NBYTES
        return stored + BATCH_COPIES * min(largest, rows) * row_nbytes

    def batches(self, place: int, column: Column, rows: int, is_buffered: bool) -> Iterator[Any]:
        """Yield one column of a row group, `rows` at a time."""
        from pyarrow import parquet  # noqa: PLC0415  only loaded for tables

        file = parquet.ParquetFile(
            self._stream,
            metadata=self._metadata_of_lists() if column.is_fixed else self.metadata,
            buffer_size=READ_AHEAD_NBYTES if is_buffered else 0,
            pre_buffer=False,
        )
        for batch in file.iter_batches(rows, [place], columns=[column.name], use_threads=False):
            yield batch.column(column.name)

    def close(self) -> None:
        """Close the file."""
        self._stream.close()

    def _metadata_of_lists(self) -> Any:
        """Return the file's metadata without Arrow's own schema.

        Fixed-size lists and tensors are then decoded as plain lists, which takes half the time.
        """
        import pyarrow as pa  # noqa: PLC0415  only loaded for tables
        from pyarrow import parquet  # noqa: PLC0415

        if self._plain is None:
            length = int.from_bytes(self._stream.read_at(4, self.nbytes - 8), "little")
            footer = self._stream.read_at(length, self.nbytes - 8 - length)
            footer = footer.replace(ARROW_SCHEMA, UNKNOWN_KEY)
            tail = length.to_bytes(4, "little") + b"PAR1"
            self._plain = parquet.read_metadata(pa.BufferReader(b"PAR1" + footer + tail))
        return self._plain


class ArrowTable:
    """An Arrow IPC file, also known as Feather; a local one is mapped, not read."""

    def __init__(self, filesystem: Any, path: str, where: str) -> None:
        import pyarrow as pa  # noqa: PLC0415  only loaded for tables

        is_local = filesystem.type_name == "local"
        _check_magic(filesystem, path, where)
        self._stream = pa.memory_map(path) if is_local else filesystem.open_input_file(path)
        try:
            self._file = pa.ipc.open_file(self._stream)
            self._column: str | None = None
            self.schema = self._file.schema
            self.nbytes = int(self._stream.size())
            self.group_rows, is_compressed = batch_rows(self._stream)
            self._is_mapped = is_local and not is_compressed
        except BaseException:
            self._stream.close()
            raise

    def suspects(self, name: str, width: int) -> list[int]:
        """Return no batches: their nulls are seen when they are read."""
        del name, width
        return []

    def reading_nbytes(self, row_nbytes: int, group_nbytes: int, rows: int) -> int:
        """Return the most bytes that reading a record batch holds: none where it is mapped."""
        del group_nbytes, rows
        copies = 0 if self._is_mapped else 3  # as stored, decoded, and the one before it
        return copies * max(self.group_rows, default=0) * row_nbytes

    def batches(self, place: int, column: Column, rows: int, is_buffered: bool) -> Iterator[Any]:
        """Yield one column of a record batch, at once: an uncompressed one is a view of the map."""
        import pyarrow as pa  # noqa: PLC0415  only loaded for tables

        del rows, is_buffered
        if self._column != column.name:
            wanted = [self.schema.get_field_index(column.name)]
            options = pa.ipc.IpcReadOptions(included_fields=wanted, use_threads=False)
            self._file = pa.ipc.open_file(self._stream, options=options)
            self._column = column.name
        yield self._file.get_batch(place).column(0)

    def close(self) -> None:
        """Close the file; arrays that lie in the map keep it."""
        self._stream.close()


def _check_magic(filesystem: Any, path: str, where: str) -> None:
    with filesystem.open_input_file(path) as file:
        head = file.read(8)
    if head[:4] == FEATHER_V1:
        raise SourceError(f"{where} is in Feather's first version: write it again with pyarrow")
    if head[:4] == STREAM:
        raise SourceError(
            f"{where} is an Arrow stream, in which nothing can be found without reading all of it: "
            "write it as a file (pyarrow.ipc.new_file)"
        )
    if head[:6] != b"ARROW1":
        raise SourceError(f"{where} is no Arrow file: it begins with {head!r}")
