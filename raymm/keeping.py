"""Blocks that stay in the memory of the process that made them, until somebody drops them."""

import threading
from dataclasses import dataclass
from typing import Any

from numpy.typing import NDArray

_KEPT: dict[str, dict[int, NDArray[Any]]] = {}
"""By matrix and tile."""
_LOCK = threading.Lock()


@dataclass(frozen=True, slots=True)
class Kept:
    """Where to find a block that a worker keeps."""

    actor: Any
    """The worker's handle."""
    key: str
    """Which matrix."""
    tile: int


def keep(key: str, tile: int, values: NDArray[Any]) -> None:
    """Keep a block in this process."""
    with _LOCK:
        _KEPT.setdefault(key, {})[tile] = values


def find(key: str, tile: int) -> NDArray[Any] | None:
    """Return a block that this process keeps; None if it does not."""
    with _LOCK:
        return _KEPT.get(key, {}).get(tile)


def drop(key: str) -> None:
    """Let go of a matrix's blocks; again is harmless."""
    with _LOCK:
        _KEPT.pop(key, None)
