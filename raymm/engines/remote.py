"""The worker as a Ray actor: what only a process of its own may do."""

import os
from typing import Any

from numpy.typing import NDArray

from raymm.engines.cluster import RAY
from raymm.errors import ExecutionError
from raymm.kernels.threads import limit_process
from raymm.sources.base import Source
from raymm.tiles import Tile
from raymm.worker import Job, Worker

CONTROL = "control"
"""The group of calls that need not wait for a worker's tiles."""


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

    def run(self, job_id: str, tile: Tile, source: Source, pieces: int) -> Any:
        """Multiply a tile; return its receipt, then its pieces, each an object of its own."""
        if job_id == self._interrupted:
            raise ExecutionError("the job was interrupted")
        receipt, handed_back = self._worker.run(job_id, tile, source)
        if len(handed_back) != pieces:
            raise ExecutionError(
                f"a sink handed back {len(handed_back)} blocks of a tile, its layout "
                f"announced {pieces}"
            )
        return (receipt, *handed_back) if pieces else receipt

    def unload(self, job_id: str, sync: bool) -> None:
        """Detach a job's sinks and drop its buffers."""
        self._worker.unload(job_id, sync)

    def retain(self, keys: tuple[str, ...]) -> None:
        """Drop all factors but these."""
        self._worker.retain(keys)
