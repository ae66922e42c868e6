"""A folder of parts under construction: reserved, locked, written in place, renamed."""

import contextlib
import errno
import fcntl
import os
import secrets
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from raymm.errors import SinkError, SinkExistsError
from raymm.paths import check_folder, free_nbytes, is_same_file
from raymm.sinks.partial import full_disk_error
from raymm.sinks.runs import RunFile, sync_folder, takes_direct

_TOKEN = ".raymm"
"""The file by which a run's workers know its folder; readers of tables skip hidden files."""


class PartialFolder:
    """``<path>.partial/`` until ``commit`` renames it.

    1. ``open`` (driver): checks the name, locks, reserves the space of every part.
    2. ``attach`` (each process that writes); then ``part(name)`` or ``stream(name)`` from any
       thread and ``finish(name)`` when a part is whole; then ``detach``.
    3. ``commit`` or ``abort`` (driver).

    It pickles without its open files: each process opens its own.
    """

    def __init__(self, path: Path) -> None:
        self.path, self.partial = path, path.with_name(path.name + ".partial")
        self._token = ""
        self._is_direct = self._overwrite = False
        self._lock: int | None = None
        self._files: dict[str, RunFile] = {}
        self._finished: set[str] = set()
        self._guard = threading.Lock()

    def __str__(self) -> str:
        return str(self.path)

    @property
    def finished(self) -> str:
        """Where the parts are in the end."""
        return str(self.path)

    @property
    def unfinished(self) -> str:
        """Where the parts are until then."""
        return str(self.partial)

    def is_one_of(self, path: str) -> bool:
        """Whether `path` names this folder or a file in it, finished or not, however spelled."""
        named = Path(path)
        return any(
            is_same_file(mine, each)
            for mine in (self.path, self.partial)
            for each in (named, named.parent, named.resolve().parent)
        )

    def open(
        self, parts: dict[str, int], overwrite: bool, is_direct: bool, unreserved: int = 0
    ) -> None:
        """Reserve the parts, given by name and size in bytes; an error leaves nothing behind.

        Others make files of `unreserved` bytes in all, for which there must be room.
        """
        self._overwrite = overwrite
        self._check_free_name()
        check_folder(self.path)
        self._lock = self._make_locked()
        self._token = secrets.token_hex(16)
        nbytes = sum(parts.values()) + unreserved
        try:
            _check_free(self.path, nbytes)
            (self.partial / _TOKEN).write_text(self._token)
            for name, size in parts.items():
                _reserve(self.partial / name, size)
            self._is_direct = bool(parts) and is_direct
            self._is_direct &= takes_direct(self.partial / next(iter(parts), ""))
        except OSError as error:
            self.abort()
            raise self._error(error, "created", nbytes) from error
        except BaseException:
            self.abort()
            raise

    def attach(self) -> None:
        """Check that the folder is the driver's: a path may mean another disk here."""
        try:
            found = (self.partial / _TOKEN).read_text()
        except OSError as error:
            raise self._error(error, "opened") from error
        if found != self._token:
            raise SinkError(
                errno.ESTALE,
                f"{self.partial} is another folder here than on the driver: write to a file "
                "system that all nodes share",
            )

    @contextlib.contextmanager
    def part(self, name: str) -> Iterator[RunFile]:
        """Give a part, open, to write runs into."""
        try:
            with self._guard:
                if name not in self._files:
                    self._files[name] = RunFile(self.partial / name, self._is_direct)
                file = self._files[name]
            yield file
        except OSError as error:
            raise self._error(error, "written") from error

    @contextlib.contextmanager
    def stream(self, name: str) -> Iterator[BinaryIO]:
        """Give a part to be written from its beginning; what was reserved beyond is given back."""
        try:
            with (self.partial / name).open("r+b") as file:
                yield file
                file.truncate()
        except OSError as error:
            raise self._error(error, "written") from error

    def finish(self, name: str) -> None:
        """Close a part; it may be opened again."""
        with self._guard:
            file = self._files.pop(name, None)
            self._finished.add(name)
        if file is not None:
            file.close()

    def detach(self, sync: bool) -> None:
        """Close all parts in this process, with `sync` once all of them are on the disk."""
        with self._guard:
            files, self._files = self._files, {}
            finished, self._finished = self._finished, set()
        for file in files.values():
            file.close()
        if not sync:
            return
        try:
            for name in sorted(finished):
                _sync(self.partial / name)
        except OSError as error:
            raise self._error(error, "synced") from error

    def commit(self, rows: dict[str, int], metadata: dict[str, Any]) -> None:
        """Sync, and rename; the folder is complete under its name, or still partial."""
        del rows, metadata  # the files say it all
        try:
            for part in sorted(self.partial.rglob("*")):
                _sync(part)
            self._check_free_name()
            (self.partial / _TOKEN).unlink()
            sync_folder(self.partial)
            self._rename()
            sync_folder(self.path.parent)
        except OSError as error:
            raise self._error(error, "committed") from error
        self._unlock()

    def abort(self) -> None:
        """Remove the unfinished folder."""
        with contextlib.suppress(SinkError):
            self.detach(sync=False)
        if self._lock is not None:
            shutil.rmtree(self.partial, ignore_errors=True)
            self._unlock()

    def __getstate__(self) -> dict[str, Any]:
        """Leave open files behind."""
        return self.__dict__ | {"_lock": None, "_files": {}, "_finished": set(), "_guard": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _guard=threading.Lock())

    def _rename(self) -> None:
        """Put the folder in place of what is there; that is deleted afterwards."""
        if not (self.path.exists() or self.path.is_symlink()):
            self.partial.rename(self.path)
            return
        old = self.path.with_name(f"{self.path.name}.{self._token}.old")
        self.path.rename(old)
        try:
            self.partial.rename(self.path)
        except BaseException:
            old.rename(self.path)
            raise
        if old.is_dir() and not old.is_symlink():
            shutil.rmtree(old, ignore_errors=True)
        else:
            old.unlink()

    def _check_free_name(self) -> None:
        if not self._overwrite and (self.path.exists() or self.path.is_symlink()):
            raise SinkExistsError(
                errno.EEXIST, f"{self.path} exists: choose another name or pass overwrite=True"
            )

    def _make_locked(self) -> int:
        """Make the unfinished folder and lock it; what a killed run has left there is removed."""
        while True:
            try:
                with contextlib.suppress(FileExistsError):
                    self.partial.mkdir()
                flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
                folder = os.open(self.partial, flags)
            except FileNotFoundError:
                continue  # another run has just renamed it
            except OSError as error:
                if error.errno in (errno.ENOTDIR, errno.ELOOP):
                    raise SinkError(
                        errno.EEXIST, f"{self.partial} is not a folder of its own: remove it"
                    ) from error
                raise self._error(error, "created") from error
            try:
                fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                if error.errno == errno.EWOULDBLOCK:
                    os.close(folder)
                    raise SinkError(
                        error.errno,
                        f"{self.partial} is being written by another run: let it finish",
                    ) from error
                # Some network file systems know no locks: do without.
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(folder), self.partial.lstat()):
                    self._empty(folder)
                    return folder
            os.close(folder)

    def _empty(self, folder: int) -> None:
        left = sorted(each.name for each in self.partial.iterdir())
        if left and _TOKEN not in left:
            os.close(folder)
            raise SinkError(
                errno.ENOTEMPTY,
                f"{self.partial} holds {left[0]}, which raymm has not left there: remove it",
            )
        for name in left:
            found = self.partial / name
            shutil.rmtree(found) if found.is_dir() else found.unlink()

    def _unlock(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _error(self, error: OSError, verb: str, needed: int = 0) -> SinkError:
        if isinstance(error, SinkError):
            return error
        if error.errno in (errno.ENOSPC, errno.EDQUOT) and verb == "created":
            return full_disk_error(self.path, needed, free_nbytes(self.path), _size(self.path))
        if error.errno == errno.ENOENT and verb != "created":
            return SinkError(errno.ENOENT, f"{self.partial} was removed while it was written")
        return SinkError(error.errno, f"{self.path} could not be {verb}: {error.strerror}")


def _check_free(path: Path, nbytes: int) -> None:
    if nbytes > free_nbytes(path):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _reserve(path: Path, nbytes: int) -> None:
    with path.open("xb") as file:
        if nbytes and hasattr(os, "posix_fallocate"):
            os.posix_fallocate(file.fileno(), 0, nbytes)


def _sync(path: Path) -> None:
    file = os.open(path, (os.O_RDONLY if path.is_dir() else os.O_RDWR) | os.O_CLOEXEC)
    try:
        os.fsync(file)
    finally:
        os.close(file)


def _size(path: Path) -> int:
    if path.is_dir():
        return sum(each.stat().st_size for each in path.rglob("*") if each.is_file())
    return path.stat().st_size if path.exists() else 0
