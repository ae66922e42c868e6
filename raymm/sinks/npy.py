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
from raymm.memory import format_nbytes
from raymm.paths import check_folder, free_nbytes, is_same_file, local_path
from raymm.sinks.base import Block, OutputSpec, Piece, Values
from raymm.tiles import PAGE_NBYTES, Layout, Order, ceil_div

HEADER_NBYTES = PAGE_NBYTES
"""The header is padded to a page, so that the data can be written past the page cache."""
RUN_NBYTES = 2**19
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
            pitch = spec.columns * item
            needs_halo = spec.nbytes >= DIRECT_NBYTES and pitch % PAGE_NBYTES
            halo = ceil_div(PAGE_NBYTES, item) if needs_halo else 0
            return Layout("C", RUN_NBYTES, HEADER_NBYTES, pitch, item, halo)
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
        assert layout is not None
        try:
            if layout.order == "C":
                self._write_rows(block, layout)
            else:
                self._write_columns(block, layout)
        except OSError as error:
            raise self._error(error, "written", 0) from error
        return None

    def _write_rows(self, block: Block, layout: Layout) -> None:
        """Write runs of rows, each from one page boundary to another if there is a halo."""
        bounds, rows = block.bounds, _with_runs(block.widened)
        item, pitch = rows.itemsize, layout.row_nbytes
        if bounds.shape[1] * item == pitch and rows.flags.c_contiguous:
            self._write_run(rows.reshape(-1), layout.position(bounds.row_start, 0))
            return
        for place, row in enumerate(rows):
            begin = layout.position(bounds.row_start + place, bounds.column_start)
            length = bounds.shape[1] * item
            skipped = 0
            if layout.halo_columns:
                end = begin + length
                skipped = -begin % PAGE_NBYTES if bounds.column_start else 0
                length += min(-end % PAGE_NBYTES, row.nbytes - length)
            run = row.view(np.uint8)[skipped:length]
            self._write_run(run, begin + skipped)

    def _write_columns(self, block: Block, layout: Layout) -> None:
        """Write runs of columns, all of them as one if the block has all rows."""
        bounds, columns = block.bounds, _with_runs(block.host.T)
        position = layout.position(bounds.row_start, bounds.column_start)
        if (
            columns.flags.c_contiguous
            and bounds.shape[0] * columns.itemsize == layout.column_nbytes
        ):
            self._write_run(columns.reshape(-1), position)
            return
        for place, column in enumerate(columns):
            self._write_run(column, position + place * layout.column_nbytes)

    def detach(self, sync: bool) -> None:
        """Close the file in this process, with `sync` once all of it is on the disk."""
        files, self._files = self._files, None
        if files is None:
            return
        try:
            if sync:
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
        assert spec is not None  # open() came first
        assert layout is not None
        shape = (spec.rows, spec.columns)
        if spec.nbytes == 0:
            return np.empty(shape, spec.dtype)
        return np.memmap(self._partial, spec.dtype, "r", HEADER_NBYTES, shape, layout.order)

    def commit(self) -> Values:
        """Sync, rename, and return the result as a read-only memory map."""
        try:
            assert self._lock is not None
            os.fsync(self._lock)
            self._check_free_name()
            self._partial.replace(self.path)
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
        self.detach(sync=False)
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
            if error.errno == errno.EWOULDBLOCK:
                os.close(file)
                raise SinkError(
                    error.errno, f"{self._partial} is being written by another run: let it finish"
                ) from error
            # Some network file systems know no locks: do without.
        return file

    def _reserve(self, nbytes: int) -> None:
        assert self._lock is not None
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
            return _full_disk_error(self.path, needed, free_nbytes(self.path), replaced)
        return SinkError(error.errno, f"{self.path} could not be {verb}: {error.strerror}")

    def _write_run(self, run: Values, position: int) -> None:
        """Write a contiguous run: whole pages past the cache, the ends through it."""
        assert self._files is not None
        cached, direct = self._files
        memory = run.view(np.uint8).data
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


def _with_runs(lines: Values) -> Values:
    """Return lines whose values are contiguous: a copy if the pass was planned for another order."""
    return lines if lines.strides[1] == lines.itemsize else np.ascontiguousarray(lines)


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


def _full_disk_error(path: Path, needed: int, free: int, replaced: int) -> SinkError:
    """Return the error for an output that the disk cannot hold."""
    hint = "use another disk or free some space"
    if replaced and needed <= free + replaced:
        hint = (
            f"the old file ({format_nbytes(replaced)}) is kept until the new one is complete: "
            "delete it first"
        )
    return SinkError(
        28,
        f"{path} needs {needed:,} bytes ({format_nbytes(needed)}), {free:,} are free "
        f"({format_nbytes(free)}): {hint}",
    )
