"""The worker as a Ray actor: what only a process of its own may do."""

import os
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from raymm import keeping
from raymm.engines.cluster import RAY
from raymm.errors import ExecutionError
from raymm.kernels.threads import limit_process
from raymm.sources.base import Source
from raymm.sources.ray_objects import LostBlockError
from raymm.tiles import Tile
from raymm.worker import Job, Worker

CONTROL = "control"
"""The group of calls that need not wait for a worker's tiles."""
KEPT = "kept"
"""The group of calls about blocks that a worker keeps; they do not wait for tiles either."""


class WorkerActor:
    """A `Worker` in a process of its own; all that is special to an actor is here."""

    def __init__(self, name: str, threads: int) -> None:
        limit_process()
        self._worker = Worker(name, threads)
        self._interrupted = ""

    @RAY.method(concurrency_group=CONTROL)  # type: ignore[untyped-decorator]
    def interrupt(self, job_id: str) -> None:
        """Skip what is queued of a job, and end its tile under way; overtakes other calls."""
        self._interrupted = job_id
        self._worker.interrupt(job_id)

    def load(self, job: Job, keys: tuple[str, ...], *factors: NDArray[Any]) -> tuple[str, int, int]:
        """Make factors resident; Ray has resolved their references into arrays."""
        self._worker.load(job, dict(zip(keys, factors, strict=True)))
        return self._worker.device, self._worker.threads, os.getpid()

    def run(self, job_id: str, tile: Tile, source: Source, travelling: int, staying: int) -> Any:
        """Multiply a tile; return its receipt, then its pieces, each an object of its own."""
        if job_id == self._interrupted:
            raise ExecutionError("the job was interrupted")
        receipt, handed_back = self._worker.run(job_id, tile, source)
        if len(handed_back) != travelling + staying:
            raise ExecutionError(
                f"a sink handed back {len(handed_back)} blocks of a tile, its layout "
                f"announced {travelling + staying}"
            )
        kept = [piece.values for piece in handed_back[travelling:]]  # as others take them
        return (receipt, *handed_back[:travelling], *kept) if handed_back else receipt

    @RAY.method(concurrency_group=KEPT)  # type: ignore[untyped-decorator]
    def kept(self, key: str, tile: int, wanted: Any) -> Any:
        """Return a part of a block that stays here."""
        return np.ascontiguousarray(self._find(key, tile)[wanted])

    @RAY.method(concurrency_group=KEPT)  # type: ignore[untyped-decorator]
    def map_kept(self, key: str, tile: int, function: Callable[[Any], Any], into: str) -> Any:
        """Return what a function makes of a block that stays here; with `into`, keep it."""
        value = function(self._find(key, tile))
        if into:
            keeping.keep(into, tile, value[1])
            return value[0], None
        return value

    def _find(self, key: str, tile: int) -> NDArray[Any]:
        values = keeping.find(key, tile)
        if values is None:
            raise LostBlockError(f"the block of tile {tile} is not on this worker")
        return values

    @RAY.method(concurrency_group=KEPT)  # type: ignore[untyped-decorator]
    def drop(self, keys: list[str]) -> None:
        """Let go of matrices' blocks."""
        for key in keys:
            keeping.drop(key)

    def unload(self, job_id: str, sync: bool) -> None:
        """Detach a job's sinks and drop its buffers."""
        self._worker.unload(job_id, sync)

    def retain(self, keys: tuple[str, ...]) -> None:
        """Drop all factors but these."""
        self._worker.retain(keys)
