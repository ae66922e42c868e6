"""Operands in a file: `.npy` paths and memory maps, shipped to workers as a description."""

import mmap
import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from raymm.errors import SourceError
from raymm.kernels.buffers import Buffer
from raymm.operands import Operand, check_dtype
from raymm.sources.base import Array


@dataclass(frozen=True)
class FileSource:
    """Values at an offset of a file, with strides. Tiles are read with `pread`, not mapped.

    Reading into a reused buffer keeps the process's memory flat (pages of a map count as its own)
    and turns a file that was cut short into an error instead of a bus error.
    """

    path: str
    name: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    strides: tuple[int, ...]
    offset: int
    """Position of the entry with all indices 0, in bytes."""
    is_read_once: bool = False
    """Whether to drop what was read from the page cache: a scan of a file that is larger than
    memory then runs at the disk's pace (2.5 GB/s measured, 0.9 while pages are reclaimed)."""

    @property
    def operand(self) -> Operand:
        """Its description."""
        return Operand(self.name, self.shape, self.dtype, self.strides, self.path, is_held=False)

    @property
    def T(self) -> "FileSource":
        """The transpose: another description of the same bytes."""
        return replace(self, shape=self.shape[::-1], strides=self.strides[::-1])

    def as_row(self) -> "FileSource":
        """Return a vector as a matrix of one row."""
        shape = self.shape or (1,)
        strides = self.strides or (self.dtype.itemsize,)
        return replace(self, shape=(1, *shape), strides=(strides[0] * shape[0], *strides))

    def as_column(self) -> "FileSource":
        """Return a vector as a matrix of one column."""
        return replace(self, shape=(*self.shape, 1), strides=(*self.strides, self.dtype.itemsize))

    def cut(self, start: int, stop: int) -> "FileSource":
        """Return itself: a description is small however much it describes."""
        del start, stop
        return self

    def load(self) -> Array:
        """Return all of it, in memory of its own."""
        matrix = self if len(self.shape) == 2 else self.as_row()
        values = matrix.read(0, matrix.shape[1], Buffer())
        return values.reshape(self.shape)

    def read(self, start: int, stop: int, buffer: Buffer) -> Array:
        """Return columns ``start:stop`` in the memory of `buffer`, in the file's byte order."""
        rows, columns = self.shape[0], stop - start
        position = self.offset + start * self.strides[1]
        if rows == 0 or columns == 0:
            return np.empty((rows, columns), self.dtype)
        if self._is_dense(self.strides[0], self.strides[1], columns):
            return self._read_runs(position, rows, columns, self.strides[0], buffer)
        if self._is_dense(self.strides[1], self.strides[0], rows):
            return self._read_runs(position, columns, rows, self.strides[1], buffer).T
        return self._read_strided(position, rows, columns, buffer)

    def _is_dense(self, outer: int, inner: int, length: int) -> bool:
        return inner == self.dtype.itemsize and (outer >= length * inner or outer < 0)

    def _read_runs(
        self, position: int, runs: int, length: int, distance: int, buffer: Buffer
    ) -> Array:
        values = buffer.array((runs, length), self.dtype)
        with _Reader(self) as reader:
            if distance == length * self.dtype.itemsize:
                reader.fill(values.reshape(-1), position)
            else:
                for place in range(runs):
                    reader.fill(values[place], position + place * distance)
        return values

    def _read_strided(self, position: int, rows: int, columns: int, buffer: Buffer) -> Array:
        """Read views such as ``[:, ::2]`` through a map that lives only as long as the copy."""
        ends = [
            (length - 1) * stride
            for length, stride in zip((rows, columns), self.strides, strict=True)
        ]
        first = position + sum(end for end in ends if end < 0)
        last = position + sum(end for end in ends if end > 0) + self.dtype.itemsize
        with _Reader(self) as reader:
            reader.check_size(last)
        span = np.memmap(self.path, np.uint8, "r", first, (last - first,))
        view = np.ndarray((rows, columns), self.dtype, span.data, position - first, self.strides)
        values = buffer.array((rows, columns), self.dtype)
        np.copyto(values, view)
        return values


class _Reader:
    """An open file whose every short read is a `SourceError`."""

    def __init__(self, source: FileSource) -> None:
        self._source = source

    def __enter__(self) -> "_Reader":
        try:
            self._file = os.open(self._source.path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise _unreadable(self._source.path, error) from error
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._file)

    def fill(self, values: Array, position: int) -> None:
        """Read the whole of a contiguous array."""
        memory = values.view(np.uint8).data
        done = 0
        while done < len(memory):
            try:
                got = os.preadv(self._file, [memory[done:]], position + done)
            except OSError as error:
                raise _unreadable(self._source.path, error) from error
            if got == 0:
                self.check_size(position + len(memory))
            done += got
        if self._source.is_read_once and hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self._file, position, len(memory), os.POSIX_FADV_DONTNEED)

    def check_size(self, needed: int) -> None:
        """Raise `SourceError` if the file ends before byte `needed`."""
        size = os.fstat(self._file).st_size
        if size < needed:
            raise SourceError(
                f"{self._source.path} was cut short: {needed:,} bytes are needed, it has {size:,}"
            )


def _unreadable(path: str, error: OSError) -> SourceError:
    return SourceError(error.errno, f"cannot read {path}: {error.strerror}")


def from_npy(path: Path, name: str, begin: int = 0, end: int | None = None) -> FileSource:
    """Return the description of a `.npy` file; its header is read, its values are not.

    Parameters
    ----------
    begin, end : int
        The bytes of a larger file that it takes up.
    """
    try:
        if path.exists() and not path.is_file():
            raise SourceError(f"{path} is not a regular file: give the path of a .npy file")
        with path.open("rb") as file:
            file.seek(begin)
            shape, is_fortran, dtype = _read_header(file, path)
            offset = file.tell()
            size = os.fstat(file.fileno()).st_size if end is None else end
    except OSError as error:
        if isinstance(error, SourceError):
            raise
        raise _unreadable(str(path), error) from error
    if min(shape, default=0) < 0:
        raise SourceError(f"{path} is not a .npy file: its header announces the shape {shape}")
    check_dtype(dtype, f"{name} ({path})" if name != str(path) else name)
    operand = Operand(name, shape, dtype, ())
    if size < offset + operand.nbytes:
        needed = offset + operand.nbytes - begin
        raise SourceError(
            f"{path} was cut short: its header announces {needed:,} bytes, it has {size - begin:,}"
        )
    strides, step = [], dtype.itemsize
    for length in shape if is_fortran else shape[::-1]:
        strides.append(step)
        step *= length
    ordered = tuple(strides if is_fortran else strides[::-1])
    return FileSource(str(path.absolute()), name, shape, dtype, ordered, offset)


def _read_header(file: Any, path: Path) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    try:
        version = np.lib.format.read_magic(file)
        read = {(1, 0): np.lib.format.read_array_header_1_0}.get(
            version, np.lib.format.read_array_header_2_0
        )
        return read(file)
    except ValueError as error:
        raise SourceError(f"{path} is not a .npy file: {error}") from error


def from_memmap(array: Array, name: str) -> FileSource | None:
    """Return an array that is a view of a memory map as a description; None if it is not one.

    A copy-on-write map may hold values that its file does not, a file that was deleted or replaced
    cannot be opened again: those stay arrays.
    """
    root: Any = array
    while not isinstance(root, np.memmap) and isinstance(getattr(root, "base", None), np.ndarray):
        root = root.base
    region = getattr(root, "_mmap", None)
    if not isinstance(root, np.memmap) or region is None or root.mode == "c":
        return None
    if root.filename is None or not Path(root.filename).exists():
        return None
    begin = np.frombuffer(region, np.uint8).__array_interface__["data"][0]
    address = array.__array_interface__["data"][0]
    if not begin <= address <= begin + len(region) or not _is_mapped(Path(root.filename), begin):
        return None
    base = root.offset - root.offset % mmap.ALLOCATIONGRANULARITY
    path = str(Path(root.filename).absolute())
    return FileSource(path, name, array.shape, array.dtype, array.strides, base + address - begin)


def _is_mapped(path: Path, address: int) -> bool:
    """Whether the map at that address is of the file that has this name now."""
    maps = Path("/proc/self/maps")
    if not maps.exists():  # only Linux can tell
        return True
    with maps.open() as lines:
        for line in lines:
            span, _, _, _, inode = line.split(maxsplit=5)[:5]
            first, _, last = span.partition("-")
            if int(first, 16) <= address < int(last, 16):
                return int(inode) == path.stat().st_ino
    return False
