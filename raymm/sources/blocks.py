"""Reading a run of columns block by block, along the axis on which neighbours lie together."""

from collections.abc import Iterator
from dataclasses import replace

from raymm.kernels.buffers import Buffer
from raymm.sources.base import Array, Source
from raymm.sources.files import FileSource
from raymm.sources.memory import ArraySource


def read_blocks(
    source: Source, start: int, stop: int, block_nbytes: int, buffer: Buffer
) -> Iterator[tuple[int, int, Array]]:
    """Yield (first row, first column, values) of columns ``start:stop``, in disjoint blocks.

    Each is `block_nbytes` large or less, and may lie in `buffer`: the next one overwrites it. A
    source of an unknown kind comes in one block, a sparse one in dense blocks.
    """
    if source.operand.nonzeros is not None:
        yield from _dense_blocks(source, start, stop, block_nbytes, buffer)
        return
    if not isinstance(source, (FileSource, ArraySource)):
        yield 0, start, source.read(start, stop, buffer)
        return
    rows, width = source.operand.shape[0], stop - start
    most = max(1, block_nbytes // source.operand.dtype.itemsize)
    if abs(source.operand.strides[0]) < abs(source.operand.strides[1]):
        height = max(1, min(rows, most))
        width = max(1, min(width, most // height))
    else:
        width = max(1, min(width, most))
        height = max(1, min(rows, most // width))
    for column in range(start, stop, width):
        for row in range(0, rows, height):
            end = min(row + height, rows), min(column + width, stop)
            part = _part(source, slice(row, end[0]), slice(column, end[1]))
            yield row, column, part.read(0, end[1] - column, buffer)


def _dense_blocks(
    source: Source, start: int, stop: int, block_nbytes: int, buffer: Buffer
) -> Iterator[tuple[int, int, Array]]:
    rows, dtype = source.operand.shape[0], source.operand.dtype.newbyteorder("=")
    width = max(1, block_nbytes // max(1, rows * dtype.itemsize))
    for column in range(start, stop, width):
        end = min(column + width, stop)
        matrix = source.read(column, end, buffer)
        yield 0, column, matrix.dense(dtype, buffer.array((end - column, rows), dtype))


def _part(source: FileSource | ArraySource, rows: slice, columns: slice) -> Source:
    """Return some rows and columns as a source of their own; nothing is read."""
    if isinstance(source, ArraySource):
        return replace(source, array=source.array[rows, columns], start=0)
    offset = source.offset + rows.start * source.strides[0] + columns.start * source.strides[1]
    shape = rows.stop - rows.start, columns.stop - columns.start
    return replace(source, shape=shape, offset=offset)
