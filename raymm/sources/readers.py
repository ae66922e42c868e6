"""Decoding groups of table files in a process: one file open, the last pieces kept."""

import threading
from collections import OrderedDict, deque
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from raymm.errors import SourceError
from raymm.filesystems import resolve
from raymm.sources.base import Array
from raymm.sources.columns import Reading
from raymm.sources.formats import TableFile, as_source_error, open_table

ARRIVED_READERS = 2
"""Readers a worker keeps for descriptions that were sent to it: one for each huge operand."""
OVERLAP_ROWS = 2048
"""How much before the end of what was read last the next tile may begin: the halo of a file in
rows, see `Layout`."""
KEPT_PIECES = 16


@dataclass(frozen=True)
class Group:
    """One group of a file: a row group of Parquet, a record batch of Arrow."""

    path: str
    place: int
    """Within the file."""
    rows: int
    first_row: int
    """Of the file, that it begins with."""
    file_nbytes: int
    where: str
    """The file, for messages."""
    reading: Reading
    batch_rows: int
    """Rows decoded at a time."""
    is_buffered: bool
    """Whether its bytes are read little by little."""


class Reader:
    """Keeps one file open, and the last pieces decoded, for tiles that follow one another.

    It travels as a token: descriptions of one table that come to a process share a reader there.
    """

    def __init__(self, token: str, uri: str) -> None:
        self.token, self.uri = token, uri
        self._lock = threading.Lock()
        self._filesystem: Any = None
        self._path: str | None = None
        self._file: TableFile | None = None
        self._group: Group | None = None
        self._batches: Iterator[Any] = iter(())
        self._next = 0
        self._pieces: deque[tuple[str, int, int, Array]] = deque(maxlen=KEPT_PIECES)

    def __reduce__(self) -> tuple[Any, ...]:
        return _arrived, (self.token, self.uri)

    def piece(self, group: Group, row: int) -> tuple[int, Array]:
        """Return a decoded piece of a group that holds a row of it, and the row it begins with.

        Raises
        ------
        SourceError
            The file cannot be read, has changed, holds nulls or rows that are not equally long.
        """
        with self._lock:
            for path, place, begin, values in self._pieces:
                is_of_group = (path, place) == (group.path, group.place)
                if is_of_group and begin <= row < begin + len(values):
                    return begin, values
            try:
                if not self._is_at(group) or row < self._next:
                    self._start(group)
                while row >= self._next:
                    self._advance(group)
            except (OSError, ValueError, NotImplementedError) as error:
                self._group = None
                raise as_source_error(error, group.where) from error
            _, _, begin, values = self._pieces[-1]
            return begin, values

    def _is_at(self, group: Group) -> bool:
        at = self._group
        return at is not None and (at.path, at.place) == (group.path, group.place)

    def _start(self, group: Group) -> None:
        """Go to the beginning of a group."""
        self._group, self._batches = None, iter(())
        file = self._opened(group)
        if file.group_rows[group.place : group.place + 1] != [group.rows]:
            raise _changed(group.where)
        self._batches = file.batches(
            group.place, group.reading.column, group.batch_rows, group.is_buffered
        )
        self._next, self._group = 0, group

    def _advance(self, group: Group) -> None:
        """Decode the next piece of the group."""
        while len(self._pieces) > 1 and self._overlap() >= OVERLAP_ROWS:
            self._pieces.popleft()  # room for the next one
        column = next(self._batches, None)
        if column is None:
            raise _changed(group.where)
        where = f"{group.where}, column {group.reading.column.name!r}"
        values = replace(group.reading, where=where).rows(column, group.first_row + self._next)
        self._pieces.append((group.path, group.place, self._next, values))
        self._next += len(values)

    def _overlap(self) -> int:
        """Return how many rows would be kept without the oldest piece."""
        return sum(len(values) for *_, values in self._pieces) - len(self._pieces[0][-1])

    def _opened(self, group: Group) -> TableFile:
        if self._path == group.path and self._file is not None:
            return self._file
        if self._file is not None:
            self._file.close()
        self._path, self._file = None, None
        if self._filesystem is None:
            self._filesystem = resolve(self.uri)[0]
        file = open_table(self._filesystem, group.path, group.where)
        if file.nbytes != group.file_nbytes:
            file.close()
            raise _changed(group.where)
        self._path, self._file = group.path, file
        return file


_ARRIVED: "OrderedDict[str, Reader]" = OrderedDict()
_ARRIVED_LOCK = threading.Lock()


def _arrived(token: str, uri: str) -> Reader:
    """Return the reader of a description that came to this process."""
    with _ARRIVED_LOCK:
        reader = _ARRIVED.pop(token, None) or Reader(token, uri)
        _ARRIVED[token] = reader
        while len(_ARRIVED) > ARRIVED_READERS:
            _ARRIVED.popitem(last=False)
        return reader


def _changed(where: str) -> SourceError:
    return SourceError(f"{where} has changed since it was opened: open it again")
