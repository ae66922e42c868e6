"""From what a user gives to a `Source`."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from raymm.errors import PlanError
from raymm.filesystems import is_remote, redacted
from raymm.sources.archives import from_npz
from raymm.sources.base import Source
from raymm.sources.columns import Null
from raymm.sources.files import from_memmap, from_npy
from raymm.sources.formats import kind_of, sniff_file
from raymm.sources.memory import from_array, from_dlpack, from_tensor
from raymm.sources.parts import has_wildcards
from raymm.sources.ray_opening import from_ray, is_ray
from raymm.sources.sparse import from_scipy, from_sparse_tensor
from raymm.sources.tables import from_arrow, from_path
from raymm.sources.zarr_arrays import from_zarr, is_zarr


def open_source(value: Any, name: str, column: str | None = None, null: Null = None) -> Source:
    """Return an operand as a `Source`; nothing but a file's header is read.

    Parameters
    ----------
    value : array, path, torch tensor, Arrow table, sequence of numbers or Source
        A path may end in ``::name``, a member of an archive or a column of a table, and in ``.T``,
        which is the transpose of the file.
    name : str
        What to call it in messages: its letter, unless it is a path.
    column : str, optional
        The column of a table, where several could be meant.
    null : {None, "nan"}
        Whether nulls of a table are refused, or become NaN.

    Raises
    ------
    PlanError, DTypeError
        It is nothing that can be multiplied.
    SourceError
        The file is missing, unreadable, cut short or not of its kind.
    """
    if isinstance(value, (str, bytes, os.PathLike)):
        return _open_path(os.fsdecode(value), column, null)
    if isinstance(value, np.ndarray):
        described = None if isinstance(value, np.ma.MaskedArray) else from_memmap(value, name)
        return described or from_array(value, name)
    library = type(value).__module__.partition(".")[0]
    if library in ("torch", "scipy"):
        return _open_foreign(value, name)
    if isinstance(value, Source):  # asks for every attribute: a sparse tensor's .T raises
        return value
    if hasattr(value, "__raymm_source__"):
        opened: Source = value.__raymm_source__()
        return opened
    if is_ray(value):
        return from_ray(value, name, column, null)
    if library == "pyarrow":
        return from_arrow(value, name, column, null)
    return _open_foreign(value, name)


def _open_foreign(value: Any, name: str) -> Source:
    """Return what another library or the language made as a `Source`."""
    kind = type(value)
    library = kind.__module__.partition(".")[0]
    if library == "torch" and hasattr(value, "detach"):
        is_strided = str(value.layout) == "torch.strided"
        return from_tensor(value, name) if is_strided else from_sparse_tensor(value, name)
    if library == "scipy" and hasattr(value, "tocsc"):
        return from_scipy(value, name)
    if isinstance(value, Iterator):
        raise PlanError(
            f"{name} is an iterator: its length is unknown and it cannot be read twice; "
            "put its rows into a file or a ray.data.Dataset"
        )
    exchanged = from_dlpack(value, name) if hasattr(value, "__dlpack__") else None
    if exchanged is not None:
        return exchanged
    if not hasattr(value, "__array__") and not isinstance(value, (list, tuple)):
        raise PlanError(
            f"{name} is a {kind.__module__}.{kind.__qualname__}: give an array, a torch tensor, a "
            "memory map or the path of a .npy file"
        )
    try:
        array = np.asarray(value)
    except ValueError as error:
        raise PlanError(f"{name} is no matrix: {error}") from error
    return from_array(array, name)


def _open_path(text: str, column: str | None, null: Null) -> Source:
    if text.endswith(".T") and not Path(text).exists():
        return _open_path(text[:-2], column, null).T
    if not text.partition("::")[0]:  # else it would stand for the working directory
        raise PlanError(f"the path {text!r} names no file: give the path of a .npy file or a table")
    if "\0" in text:
        raise PlanError(f"{text!r} is no path: it holds a NUL character")
    address, member = _split_member(text)
    if not is_remote(address):
        return _open_local(address, member, text, column, null)
    if Path(address.partition("?")[0]).suffix in (".npy", ".npz"):
        raise PlanError(
            f"{redacted(text)}: a .npy file is read from a local path only: copy it, or keep the "
            "matrix as a Parquet or Arrow table"
        )
    return from_path(address, text, member or column, null)


def _open_local(
    address: str, member: str | None, text: str, column: str | None, null: Null
) -> Source:
    path = Path(address.removeprefix("file://")).expanduser()
    if path.suffix == ".npz":
        return from_npz(path, member, text)
    if path.suffix == ".npy" and not path.is_dir() and member is None:
        return from_npy(path, text)
    if path.is_dir() and is_zarr(path):
        return from_zarr(path, text)
    if path.is_file() and kind_of(address) is None and sniff_file(path) is None:
        raise PlanError(
            f"{text} does not end in .npy or .npz and is no Parquet or Arrow table: save it with "
            "numpy.save"
        )
    is_named = path.exists() or has_wildcards(address) or kind_of(address) is not None
    return from_path(address, text, member or column, null) if is_named else from_npy(path, text)


def _split_member(text: str) -> tuple[str, str | None]:
    """Return a path and the member or column that follows it: ``c.npz::C``."""
    address, mark, member = text.rpartition("::")
    if not mark or "/" in member or Path(text).exists():
        return text, None
    return address, member
