"""What the footer of an Arrow IPC file tells that pyarrow does not: the length of each batch."""

import struct
from typing import Any

CONTINUATION = b"\xff\xff\xff\xff"
"""Before a message's length, since Arrow 0.15."""


def batch_rows(file: Any) -> tuple[list[int], bool]:
    """Return how many rows each record batch has, and whether any is compressed; decodes none.

    pyarrow tells only by reading a batch. The footer lists where batches lie, the message before
    each one how long it is; both are FlatBuffers.
    """
    size = file.size()
    file.seek(size - 10)
    (length,) = struct.unpack("<i", file.read(4))
    file.seek(size - 10 - length)
    footer = _FlatBuffer(file.read(length))
    blocks = footer.field(footer.root(), 3)
    rows, is_compressed = [], False
    for start, count in footer.blocks(blocks):
        file.seek(start)
        content = file.read(count)
        message = _FlatBuffer(content[8 if content[:4] == CONTINUATION else 4 :])
        header = message.field(message.root(), 2)
        batch = message.follow(header)
        position = message.field(batch, 0)
        rows.append(message.int64(position) if position else 0)
        is_compressed |= message.field(batch, 3) != 0
    return rows, is_compressed


class _FlatBuffer:
    """The few reads of a FlatBuffer that are needed; 0 stands for a field that is not there."""

    def __init__(self, content: bytes) -> None:
        self._content = content

    def root(self) -> int:
        return self.follow(0)

    def follow(self, position: int) -> int:
        """Return where an offset points to."""
        return position + int(struct.unpack_from("<I", self._content, position)[0])

    def int64(self, position: int) -> int:
        return int(struct.unpack_from("<q", self._content, position)[0])

    def field(self, table: int, index: int) -> int:
        """Return where a table's field lies."""
        fields = table - struct.unpack_from("<i", self._content, table)[0]
        (size,) = struct.unpack_from("<H", self._content, fields)
        place = 4 + 2 * index
        offset = struct.unpack_from("<H", self._content, fields + place)[0] if place < size else 0
        return table + offset if offset else 0

    def blocks(self, position: int) -> list[tuple[int, int]]:
        """Return (position, length of the message) of each block of the footer."""
        if not position:
            return []
        start = self.follow(position)
        (count,) = struct.unpack_from("<I", self._content, start)
        found = [
            struct.unpack_from("<qi4xq", self._content, start + 4 + 24 * place)
            for place in range(count)
        ]
        return [(block[0], block[1]) for block in found]
