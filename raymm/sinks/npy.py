"""D in one memory-mappable `.npy` file, written in place by all workers at once."""

import contextlib
import errno
import fcntl
import io
import os
from pathlib import Path
from typing import Any

import numpy as np

from raymm.errors import SinkError, SinkExistsError
from raymm.paths import check_folder, free_nbytes, full_disk_error, is_same_file, local_path
from raymm.sinks.base import Block, OutputSpec, Piece, Values
from raymm.tiles import PAGE_NBYTES, Layout, Order

HEADER_NBYTES = PAGE_NBYTES
"""The header is padded to a page, so that the data can be written past the page cache."""
RUN_NBYTES = 2**18
DIRECT_NBYTES = 2**28
"""Files from this size on are written with direct output: smaller ones stay in the page cache."""
_SMALLEST_DIRECT_RUN = 2**16


class Npy:
    """A `.npy` file that appears under its name only when it is complete and synced.

    Parameters
    ----------
    path : path
        Exactly this name is used. Local: ``~`` and ``file://`` work.
    order : {"C", "F"}
        Order of D in the file.

    Notes
    -----
    Space is reserved before the first tile in ``<path>.partial``; workers write their blocks at
    fixed positions; ``commit`` syncs and renames. Large files are written with direct output
    (``O_DIRECT``) where the file system takes it: the processor is not spent on copying into the
    page cache, and the cache is left to others. Runs that are short or not aligned go through the
    cache; both kinds end in one ``fdatasync``.
    """

    def __init__(
        self, path: str | bytes | os.PathLike[str] | os.PathLike[bytes], order: Order = "C"
    ) -> None:
        if order not in ("C", "F"):
            raise ValueError(f'order={order!r}: choose "C" or "F"')
        self.path, self.order = local_path(path), order
        self._partial = self.path.with_name(self.path.name + ".partial")
        self._layout: Layout | None = None
        self._spec: OutputSpec | None = None
        self._is_direct = False
        self._overwrite = False
        self._lock: int | None = None
        self._files: tuple[int, int] | None = None
        """Open in this process: through the page cache, and past it (the same if it cannot)."""

    @property
    def name(self) -> str:
        """The path, and the order if it is not the usual one."""
        return str(self.path) + (' (order="F")' if self.order == "F" else "")

    def layout(self, spec: OutputSpec) -> Layout:
        """Return where each entry of D lies in the file."""
        item = spec.dtype.itemsize
        is_c = (self.order == "C") != spec.is_transposed
        if is_c:
            return Layout("C", RUN_NBYTES, HEADER_NBYTES, spec.columns * item, item)
        return Layout("F", RUN_NBYTES, HEADER_NBYTES, item, spec.rows * item)

    def overwrites(self, path: str | None, array: Values | None) -> bool:
        """Whether that file is this one, through any spelling or link."""
        del array
        return path is not None and any(
            is_same_file(mine, Path(path)) for mine in (self.path, self._partial)
        )

    def open(self, spec: OutputSpec, overwrite: bool) -> None:
        """Check the path and reserve all space; an error leaves nothing behind."""
        self._layout, self._overwrite = self.layout(spec), overwrite
        self._spec = spec
        self._check_free_name()
        check_folder(self.path)
        needed = HEADER_NBYTES + spec.nbytes
        self._lock = self._open_partial()
        try:
            self._reserve(needed)
            header = npy_header(spec.shape, spec.dtype, self.order == "F" and len(spec.shape) == 2)
            _write_all(self._lock, memoryview(header), 0)
        except OSError as error:
            self.abort()
            if isinstance(error, SinkError):
                raise
            raise self._error(error, "created", needed) from error
        self._is_direct = spec.nbytes >= DIRECT_NBYTES and _takes_direct(self._partial)

    def attach(self) -> None:
        """Open the incomplete file in this process."""
        try:
            cached = os.open(self._partial, os.O_WRONLY | os.O_CLOEXEC)
            direct = cached
            if self._is_direct:
                direct = os.open(self._partial, os.O_WRONLY | os.O_CLOEXEC | os.O_DIRECT)
        except OSError as error:
            raise self._error(error, "opened", 0) from error
        self._files = cached, direct

    def write(self, block: Block) -> Piece | None:
        """Write a block's runs at their positions."""
        layout = self._layout
        assert layout is not None  # noqa: S101  open() came first
        bounds = block.bounds
        position = layout.position(bounds.row_start, bounds.column_start)
        lines = block.host if layout.order == "C" else block.host.T
        pitch = layout.row_nbytes if layout.order == "C" else layout.column_nbytes
        try:
            if lines.shape[1] * lines.itemsize == pitch and lines.flags.c_contiguous:
                self._write_run(lines.reshape(-1), position)
            else:
                for place, line in enumerate(lines):
                    self._write_run(line, position + place * pitch)
        except OSError as error:
            raise self._error(error, "written", 0) from error
        return None

    def flush(self) -> None:
        """Make what this process wrote durable, and close its files."""
        files, self._files = self._files, None
        if files is None:
            return
        try:
            os.fdatasync(files[0])
        except OSError as error:
            raise self._error(error, "synced", 0) from error
        finally:
            for file in set(files):
                os.close(file)

    def receive(self, piece: Piece) -> None:
        """Never called: blocks are written where they are computed."""
        raise AssertionError(piece)

    def view(self) -> Values:
        """Map the incomplete file, in canonical orientation."""
        spec, layout = self._spec, self._layout
        assert spec is not None and layout is not None  # noqa: S101, PT018  open() came first
        shape = (spec.rows, spec.columns)
        if spec.nbytes == 0:
            return np.empty(shape, spec.dtype)
        return np.memmap(self._partial, spec.dtype, "r", HEADER_NBYTES, shape, layout.order)

    def commit(self) -> Values:
        """Sync, rename, and return the result as a read-only memory map."""
        self.flush()
        try:
            assert self._lock is not None  # noqa: S101  open() came first
            os.fsync(self._lock)
            self._check_free_name()
            os.replace(self._partial, self.path)
            _sync_folder(self.path.parent)
        except OSError as error:
            if isinstance(error, SinkError):
                raise
            raise self._error(error, "committed", 0) from error
        self._unlock()
        result: Values = np.load(self.path, mmap_mode="r")
        return result

    def abort(self) -> None:
        """Remove the incomplete file."""
        with contextlib.suppress(OSError, SinkError):
            self.flush()
        if self._lock is not None:
            with contextlib.suppress(OSError):
                self._partial.unlink()
            self._unlock()

    def __getstate__(self) -> dict[str, Any]:
        """Leave open files behind: each process opens its own, once."""
        return self.__dict__ | {"_lock": None, "_files": None}

    def _check_free_name(self) -> None:
        if self.path.is_dir():
            raise SinkError(errno.EISDIR, f"{self.path} is a folder: give the name of a file")
        if not self._overwrite and (self.path.exists() or self.path.is_symlink()):
            raise SinkExistsError(
                errno.EEXIST, f"{self.path} exists: choose another name or pass overwrite=True"
            )

    def _open_partial(self) -> int:
        try:
            file = os.open(self._partial, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        except OSError as error:
            raise self._error(error, "created", 0) from error
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(file)
            raise SinkError(
                error.errno, f"{self._partial} is being written by another run: let it finish"
            ) from error
        return file

    def _reserve(self, nbytes: int) -> None:
        assert self._lock is not None  # noqa: S101
        os.ftruncate(self._lock, 0)  # what an earlier run left there is given back first
        free = free_nbytes(self.path)
        if nbytes > free:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(self._lock, 0, nbytes)
        else:
            os.ftruncate(self._lock, nbytes)

    def _unlock(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _error(self, error: OSError, verb: str, needed: int) -> SinkError:
        if error.errno in (errno.ENOSPC, errno.EDQUOT) and verb == "created":
            replaced = self.path.stat().st_size if self.path.exists() else 0
            return full_disk_error(self.path, needed, free_nbytes(self.path), replaced)
        return SinkError(error.errno, f"{self.path} could not be {verb}: {error.strerror}")

    def _write_run(self, run: Values, position: int) -> None:
        """Write a contiguous run: whole pages past the cache, the ends through it."""
        assert self._files is not None  # noqa: S101  attach() came first
        cached, direct = self._files
        memory = memoryview(run.view(np.uint8))
        head = -position % PAGE_NBYTES
        pages = (len(memory) - head) // PAGE_NBYTES * PAGE_NBYTES
        address = run.__array_interface__["data"][0]
        if cached == direct or pages < _SMALLEST_DIRECT_RUN or (address - position) % PAGE_NBYTES:
            _write_all(cached, memory, position)
            return
        if head:
            _write_all(cached, memory[:head], position)
        _write_all(direct, memory[head : head + pages], position + head)
        if head + pages < len(memory):
            _write_all(cached, memory[head + pages :], position + head + pages)


def npy_header(shape: tuple[int, ...], dtype: np.dtype[Any], is_fortran: bool) -> bytes:
    """Return a `.npy` header, padded to `HEADER_NBYTES`; sizes are written as plain ints."""
    text = repr(
        {
            "descr": np.lib.format.dtype_to_descr(dtype),
            "fortran_order": is_fortran,
            "shape": tuple(int(length) for length in shape),
        }
    )
    stream = io.BytesIO()
    stream.write(np.lib.format.magic(1, 0))
    length = HEADER_NBYTES - stream.tell() - 2
    stream.write(length.to_bytes(2, "little"))
    stream.write(text.encode("latin1").ljust(length - 1) + b"\n")
    return stream.getvalue()


def _write_all(file: int, memory: memoryview, position: int) -> None:
    while memory:
        done = os.pwrite(file, memory, position)
        memory, position = memory[done:], position + done


def _takes_direct(path: Path) -> bool:
    """Whether the file system accepts direct output."""
    try:
        os.close(os.open(path, os.O_WRONLY | os.O_CLOEXEC | os.O_DIRECT))
    except (OSError, AttributeError):
        return False
    return True


def _sync_folder(folder: Path) -> None:
    file = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(file)
    finally:
        os.close(file)
