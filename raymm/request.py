"""What was asked, and what there is to do it with."""

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from raymm.errors import PlanError

Precision = Literal["strict", "tf32", "bf16", "float64"]
PRECISIONS: tuple[Precision, ...] = ("strict", "tf32", "bf16", "float64")


@dataclass(frozen=True, slots=True)
class Request:
    """The keywords common to all verbs, checked."""

    dtype: np.dtype[Any] | None = None
    precision: Precision = "strict"
    memory_limit: int | None = None
    """Private bytes that one process may add."""
    tile_columns: int | None = None
    max_in_flight: int = 2
    """Tiles handed to one worker at a time."""
    overwrite: bool = False
    verify: bool = False

    def __post_init__(self) -> None:
        if self.precision not in PRECISIONS:
            raise PlanError(f"precision={self.precision!r}: choose one of {', '.join(PRECISIONS)}")
        if self.tile_columns is not None:
            check_count("tile_columns", self.tile_columns)
        check_count("max_in_flight", self.max_in_flight)


@dataclass(frozen=True, slots=True)
class Resources:
    """What an engine has; the engine finds out, the plan only reads."""

    engine: str
    workers: int
    threads: int
    """Threads over a tile, per worker."""
    memory_nbytes: int
    """Memory that is free on the poorest node, in bytes."""
    store_nbytes: int = 0
    """Object store on the poorest node; 0 where tiles stay in one process."""
    nodes: int = 1
    gpus: int = 0
    shares_memory: bool = True
    """Whether workers see the driver's arrays."""
    used_store_nbytes: int = 0
    """Of the object stores of all nodes, what is taken already."""


def check_count(name: str, value: object) -> None:
    """Raise `PlanError` unless `value` is a whole number, at least 1."""
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < 1:
        raise PlanError(f"{name}={value!r} must be a whole number, at least 1")
