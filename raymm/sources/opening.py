"""From what a user gives to a `Source`."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from raymm.errors import PlanError
from raymm.sources.base import Source
from raymm.sources.files import from_memmap, from_npy
from raymm.sources.memory import from_array, from_tensor


def open_source(value: Any, name: str) -> Source:
    """Return an operand as a `Source`; nothing but a file's header is read.

    Parameters
    ----------
    value : array, path, torch tensor, sequence of numbers or Source
        A path may end in ``.T``, which is the transpose of the file.
    name : str
        What to call it in messages: its letter, unless it is a path.

    Raises
    ------
    PlanError, DTypeError
        It is nothing that can be multiplied.
    SourceError
        The file is missing, unreadable, cut short or not of its kind.
    """
    if isinstance(value, (str, bytes, os.PathLike)):
        return _open_path(os.fsdecode(value))
    if isinstance(value, np.ndarray):
        described = None if isinstance(value, np.ma.MaskedArray) else from_memmap(value, name)
        return described or from_array(value, name)
    if isinstance(value, Source):
        return value
    return _open_foreign(value, name)


def _open_foreign(value: Any, name: str) -> Source:
    """Return what another library or the language made as a `Source`."""
    kind = type(value)
    library = kind.__module__.partition(".")[0]
    if library == "torch" and hasattr(value, "detach"):
        return from_tensor(value, name)
    if library == "scipy":
        raise PlanError(f"{name} is a SciPy sparse matrix, which is not supported: use .toarray()")
    if isinstance(value, Iterator):
        raise PlanError(
            f"{name} is an iterator: its length is unknown and it cannot be read twice; "
            "put its rows into a file or a ray.data.Dataset"
        )
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


def _open_path(text: str) -> Source:
    if text.endswith(".T") and not Path(text).exists():
        return _open_path(text[:-2]).T
    if "\0" in text:
        raise PlanError(f"{text!r} is no path: it holds a NUL character")
    path = Path(text.removeprefix("file://")).expanduser()
    if "://" in text and not text.startswith("file://"):
        raise PlanError(f"{text}: operands at remote addresses are not supported: copy the file")
    if path.is_dir():
        raise PlanError(f"{text} is a folder: give the path of a .npy file")
    if path.suffix != ".npy" and path.exists():
        raise PlanError(f"{text} does not end in .npy: save it with numpy.save")
    return from_npy(path, text)
