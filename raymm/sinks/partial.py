"""A file under construction: reserved, locked, written in place by many processes, renamed."""

import contextlib
import errno
import fcntl
import os
import secrets
import stat
from pathlib import Path
from typing import Any

from raymm.errors import SinkError, SinkExistsError
from raymm.memory import format_nbytes
from raymm.paths import check_folder, free_nbytes, is_same_file
from raymm.sinks.base import Values
from raymm.sinks.runs import Memory, RunFile, sync_folder, takes_direct, write_all


class PartialFile:
    """``<path>.partial`` until ``commit`` renames it.

    1. ``open`` (driver): checks the name, locks, reserves all space, writes the header.
    2. ``attach`` (each process that writes), then ``write_run`` from any thread, then ``detach``.
    3. ``commit`` or ``abort`` (driver).

    It pickles without its open files: each process opens its own, once.
    """

    def __init__(self, path: Path) -> None:
        self.path, self.partial = path, path.with_name(path.name + ".partial")
        self._is_direct = self._overwrite = False
        self._header, self._token = b"", b""
        self._lock: int | None = None
        self._file: RunFile | None = None
        """Open in this process."""

    def is_one_of(self, path: str) -> bool:
        """Whether `path` names this file, finished or not, through any spelling or link."""
        return any(is_same_file(mine, Path(path)) for mine in (self.path, self.partial))

    def open(
        self, header: bytes, nbytes: int, overwrite: bool, is_direct: bool, tail: bytes = b""
    ) -> None:
        """Reserve `nbytes`, write the header and the tail; an error leaves nothing behind."""
        self._overwrite = overwrite
        self._check_free_name()
        check_folder(self.path)
        self._lock = self._open_locked()
        self._header, self._token = header, secrets.token_hex(16).encode()
        try:
            self._reserve(nbytes)
            write_all(self._lock, memoryview(tail), nbytes - len(tail))
            write_all(self._lock, memoryview(self._marked_header()), 0)
            self._is_direct = is_direct and takes_direct(self.partial)
        except OSError as error:
            self.abort()
            raise self._error(error, "created", nbytes) from error
        except BaseException:
            self.abort()
            raise

    def attach(self) -> None:
        """Open the file in this process, if it is the driver's: a path may mean another disk."""
        try:
            self._file = RunFile(self.partial, self._is_direct)
            if self._file.read(len(self._header)) != self._marked_header():
                raise SinkError(
                    errno.ESTALE,
                    f"{self.partial} is another file here than on the driver: write to a file "
                    "system that all nodes share",
                )
        except OSError as error:
            self.detach(sync=False)
            raise self._error(error, "opened") from error

    def write_run(self, run: Values, position: int) -> None:
        """Write a contiguous run: whole pages past the cache, the ends through it."""
        assert self._file is not None  # attach() came first
        try:
            self._file.write_run(run, position)
        except OSError as error:
            raise self._error(error, "written") from error

    def write(self, memory: Memory, position: int) -> None:
        """Write some bytes through the cache."""
        assert self._file is not None  # attach() came first
        try:
            self._file.write(memory, position)
        except OSError as error:
            raise self._error(error, "written") from error

    def hasten(self, position: int, nbytes: int) -> None:
        """Begin to bring a part of a large file to the disk."""
        assert self._file is not None  # attach() came first
        self._file.hasten(position, nbytes)

    def detach(self, sync: bool) -> None:
        """Close the file in this process, with `sync` once all of it is on the disk."""
        file, self._file = self._file, None
        if file is None:
            return
        try:
            if sync:
                file.sync()
        except OSError as error:
            raise self._error(error, "synced") from error
        finally:
            file.close()

    def commit(self) -> None:
        """Sync, and rename; the file is complete under its name, or still partial."""
        assert self._lock is not None  # open() came first
        try:
            write_all(self._lock, memoryview(self._header), 0)
            os.fsync(self._lock)
            self._check_free_name()
            self.partial.replace(self.path)
            sync_folder(self.path.parent)
        except OSError as error:
            raise self._error(error, "committed") from error
        self._unlock()

    def abort(self) -> None:
        """Remove the unfinished file."""
        with contextlib.suppress(SinkError):
            self.detach(sync=False)
        if self._lock is not None:
            with contextlib.suppress(OSError):
                self.partial.unlink()
            self._unlock()

    def __getstate__(self) -> dict[str, Any]:
        """Leave open files behind."""
        return self.__dict__ | {"_lock": None, "_file": None}

    def _check_free_name(self) -> None:
        if self.path.is_dir():
            raise SinkError(errno.EISDIR, f"{self.path} is a folder: give the name of a file")
        if not self._overwrite and (self.path.exists() or self.path.is_symlink()):
            raise SinkExistsError(
                errno.EEXIST, f"{self.path} exists: choose another name or pass overwrite=True"
            )

    def _open_locked(self) -> int:
        """Open and lock the unfinished file; the one locked is the one under that name."""
        while True:
            try:
                # A link or a pipe of that name is somebody else's: never write through it.
                flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
                file = os.open(self.partial, flags, 0o666)
            except OSError as error:
                raise self._error(error, "created") from error
            status = os.fstat(file)
            if not stat.S_ISREG(status.st_mode) or status.st_nlink > 1:
                os.close(file)
                raise SinkError(
                    errno.EEXIST,
                    f"{self.partial} is not a file of its own (a link, a pipe ...): remove it",
                )
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                if error.errno == errno.EWOULDBLOCK:
                    os.close(file)
                    raise SinkError(
                        error.errno,
                        f"{self.partial} is being written by another run: let it finish",
                    ) from error
                # Some network file systems know no locks: do without.
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(file), self.partial.lstat()):
                    return file
            os.close(file)  # another run has renamed it in the meantime: it is an output now

    def _marked_header(self) -> bytes:
        """Return the header with this run's token in its padding, until ``commit``."""
        end = len(self._header) - 1
        return self._header[: end - len(self._token)] + self._token + self._header[end:]

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

    def _error(self, error: OSError, verb: str, needed: int = 0) -> SinkError:
        if isinstance(error, SinkError):
            return error
        if error.errno == errno.ENOENT and verb == "committed":
            return SinkError(errno.ENOENT, f"{self.partial} was removed while it was written")
        if error.errno == errno.ELOOP and verb == "created":
            return SinkError(errno.ELOOP, f"{self.partial} is a link: remove it")
        if error.errno in (errno.ENOSPC, errno.EDQUOT) and verb == "created":
            replaced = self.path.stat().st_size if self.path.exists() else 0
            return full_disk_error(self.path, needed, free_nbytes(self.path), replaced)
        return SinkError(error.errno, f"{self.path} could not be {verb}: {error.strerror}")


def full_disk_error(path: Path, needed: int, free: int, replaced: int) -> SinkError:
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
