"""Local paths: suffixes, aliases, free space."""

import os
from pathlib import Path

from raymm.errors import PlanError, SinkError


def local_path(value: str | bytes | os.PathLike[str] | os.PathLike[bytes]) -> Path:
    """Return the absolute path that a user named; ``~`` and ``file://`` work.

    Raises
    ------
    PlanError
        It is an address of another kind.
    """
    text = os.fsdecode(value)
    if "://" in text and not text.startswith("file://"):
        scheme = text.partition("://")[0]
        raise PlanError(
            f"{text}: a .npy output needs a local path, {scheme}:// is none: it is written in "
            "place by all workers at once. Parquet works remotely; or write here and copy"
        )
    return Path(os.path.abspath(Path(text.removeprefix("file://")).expanduser()))  # noqa: PTH100


def is_same_file(first: Path, second: Path) -> bool:
    """Whether two paths name one file, through any spelling or link."""
    try:
        return first.samefile(second)
    except OSError:
        return first.resolve() == second.resolve()


def check_folder(path: Path) -> None:
    """Raise `SinkError` unless the output's folder exists and can be written to."""
    folder = path.parent
    if not folder.is_dir():
        raise SinkError(2, f"{path}: its folder {folder} does not exist: make it first")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise SinkError(13, f"{path}: no permission to write into {folder}")


def free_nbytes(path: Path) -> int:
    """Return the bytes that are free to this user where `path` would be, 0 if it cannot be."""
    folder = path.parent
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    try:
        status = os.statvfs(folder)
    except OSError:
        return 0
    return status.f_bavail * status.f_frsize
