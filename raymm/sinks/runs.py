"""A file into which several threads write runs of bytes at known positions."""

import os
from pathlib import Path
from typing import TypeAlias

from raymm.sinks.base import Values
from raymm.tiles import PAGE_NBYTES

Memory: TypeAlias = bytes | memoryview

DIRECT_NBYTES = 2**28
"""Outputs from this size on are written with direct output: smaller ones stay in the page cache."""
SMALLEST_DIRECT_RUN = 2**16
"""Shorter runs go through the page cache: a direct write takes as long as one of this length."""


class RunFile:
    """An existing file, open twice where its file system takes direct output.

    Whole pages of long runs go past the page cache (``O_DIRECT``), all else through it; one `sync`
    makes both durable. Raises `OSError` as the system does.
    """

    def __init__(self, path: Path, is_direct: bool) -> None:
        self._cached = self._direct = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        if is_direct:
            try:
                self._direct = os.open(path, os.O_WRONLY | os.O_CLOEXEC | os.O_DIRECT)
            except BaseException:
                self.close()
                raise

    def read(self, nbytes: int) -> bytes:
        """Return the first bytes of the file."""
        return os.pread(self._cached, nbytes, 0)

    def write(self, memory: Memory, position: int) -> None:
        """Write bytes through the page cache."""
        write_all(self._cached, memoryview(memory), position)

    def write_run(self, run: Values, position: int) -> None:
        """Write a contiguous run: whole pages past the cache, the ends through it."""
        memory = run.view("u1").data
        head = -position % PAGE_NBYTES
        pages = (len(memory) - head) // PAGE_NBYTES * PAGE_NBYTES
        address = run.__array_interface__["data"][0]
        is_cached = self._direct == self._cached or pages < SMALLEST_DIRECT_RUN
        if is_cached or (address - position) % PAGE_NBYTES:
            self.write(memory, position)
            return
        if head:
            self.write(memory[:head], position)
        write_all(self._direct, memory[head : head + pages], position + head)
        if head + pages < len(memory):
            self.write(memory[head + pages :], position + head + pages)

    def hasten(self, position: int, nbytes: int) -> None:
        """Begin to bring a part of a large file from the page cache to the disk."""
        if self._direct != self._cached and hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self._cached, position, nbytes, os.POSIX_FADV_DONTNEED)

    def sync(self) -> None:
        """Return once all that was written is on the disk."""
        os.fdatasync(self._cached)

    def close(self) -> None:
        """Close the file; again is harmless."""
        for file in {self._cached, self._direct} - {-1}:
            os.close(file)
        self._cached = self._direct = -1


def write_all(file: int, memory: memoryview, position: int) -> None:
    """Write all of some bytes at a position."""
    while memory:
        done = os.pwrite(file, memory, position)
        memory, position = memory[done:], position + done


def takes_direct(path: Path) -> bool:
    """Whether the file system accepts direct output."""
    try:
        os.close(os.open(path, os.O_WRONLY | os.O_CLOEXEC | os.O_DIRECT))
    except (OSError, AttributeError):
        return False
    return True


def sync_folder(folder: Path) -> None:
    """Make names in a folder durable."""
    file = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(file)
    finally:
        os.close(file)
