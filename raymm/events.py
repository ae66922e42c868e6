"""What happens during a run, as frozen records for callbacks on the driver."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from raymm.tiles import Tile


@dataclass(frozen=True, slots=True)
class RunStarted:
    """The plan is accepted and the outputs are open."""

    tiles: int
    """Number of tiles."""
    nbytes: int
    """Bytes of D that will be produced."""
    engine: str


@dataclass(frozen=True, slots=True)
class WorkerReady:
    """A worker has loaded the resident factors."""

    worker: str
    device: str
    threads: int
    """Threads over a tile."""
    pid: int
    """Of its process; the driver's own where workers are threads."""


@dataclass(frozen=True, slots=True)
class WorkerLost:
    """A worker died and is being replaced; its tiles will be computed again."""

    worker: str
    reason: str


@dataclass(frozen=True, slots=True)
class TileFinished:
    """A tile's receipt has arrived."""

    tile: Tile
    worker: str
    done: int
    """Tiles finished so far, this one included."""
    nbytes: int
    """Bytes of D in this tile."""
    seconds: float
    """Time the worker spent on it, wall clock."""
    read_seconds: float
    multiply_seconds: float
    """Summed over the worker's threads."""
    write_seconds: float
    """Summed over the worker's threads."""


@dataclass(frozen=True, slots=True)
class TileRetried:
    """A tile was lost and will be computed again."""

    tile: Tile
    attempt: int
    reason: str


@dataclass(frozen=True, slots=True)
class VerificationStarted:
    """All tiles are there; ``verify=`` reads the outputs back."""

    nbytes: int


@dataclass(frozen=True, slots=True)
class RunFinished:
    """All outputs are committed."""

    shape: tuple[int, ...]
    nbytes: int
    seconds: float
    engine: str
    workers: int
    threads: int
    """Threads over a tile, per worker."""
    retries: int
    limit: str
    """What the run waited for most: ``"read"``, ``"multiply"`` or ``"write"``."""
    verify_seconds: float
    """Part of `seconds` that ``verify=`` took."""
    residual: float | None
    """Largest error found by ``verify=``, relative to the bound (1 is the bound); or None."""

    @property
    def bytes_per_second(self) -> float:
        """Bytes of D per second, verification left out."""
        return self.nbytes / max(self.seconds - self.verify_seconds, 1e-9)


Event: TypeAlias = (
    RunStarted
    | WorkerReady
    | WorkerLost
    | TileFinished
    | TileRetried
    | VerificationStarted
    | RunFinished
)
Callback: TypeAlias = Callable[[Event], None]
