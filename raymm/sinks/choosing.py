"""From what a user gives as `out` to a sink."""

import os
from typing import Any

import numpy as np

from raymm.errors import PlanError
from raymm.sinks.array import Array
from raymm.sinks.base import Sink
from raymm.sinks.npy import Npy


def as_sink(out: Any) -> Sink:
    """Return the sink for an `out`: None and ndarrays are memory, ``.npy`` paths a file."""
    if out is None:
        return Array()
    if isinstance(out, np.ndarray):
        return Array(out)
    if isinstance(out, (str, bytes, os.PathLike)):
        text = os.fsdecode(out)
        if text.endswith(".npy"):
            return Npy(out)
        raise PlanError(
            f"out={text!r}: the suffix chooses the kind of file, and .npy is the one supported; "
            "raymm.Npy(path) writes that format under any name"
        )
    if isinstance(out, Sink) and not isinstance(out, type):
        return out
    raise PlanError(
        f"out is a {type(out).__qualname__}: give a path, an array to fill, or a sink such as "
        "raymm.Npy(path)"
    )
