"""From what a user gives as `out` to a sink."""

import os
from pathlib import Path
from typing import Any

import numpy as np

from raymm.errors import PlanError
from raymm.filesystems import is_remote
from raymm.sinks.array import Array
from raymm.sinks.arrow import Arrow
from raymm.sinks.base import Sink
from raymm.sinks.npy import Npy
from raymm.sinks.parquet import Parquet
from raymm.sinks.zarr import Zarr


def as_sink(out: Any) -> Sink:
    """Return the sink for an `out`: None and ndarrays are memory, a path's suffix names the kind.

    A folder, or an address of one such as ``s3://bucket/D``, is a Parquet dataset.
    """
    if out is None:
        return Array()
    if isinstance(out, np.ndarray):
        return Array(out)
    if isinstance(out, (str, bytes, os.PathLike)):
        return _for_path(os.fsdecode(out))
    if isinstance(out, Sink) and not isinstance(out, type):
        return out
    raise PlanError(
        f"out is a {type(out).__qualname__}: give a path, an array to fill, or a sink such as "
        "raymm.Npy(path)"
    )


def _for_path(text: str) -> Sink:
    plain = text.partition("?")[0] if is_remote(text) else text
    suffix = os.path.splitext(plain.rstrip("/"))[1].lower()  # noqa: PTH122  a URI is no Path
    if suffix == ".npy":
        return Npy(text)
    if suffix in (".arrow", ".feather"):
        return Arrow(text)
    if suffix == ".zarr":
        return Zarr(text)
    is_folder = text.endswith("/") or Path(text).is_dir()
    if suffix == ".parquet" or is_folder or (is_remote(text) and not suffix):
        return Parquet(text)
    raise PlanError(
        f"out={text!r}: the suffix chooses the kind of file: .npy, .parquet (a folder), "
        ".arrow, .feather or .zarr; raymm.Npy(path) and the like write that format under any name"
    )
