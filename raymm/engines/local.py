"""The engine in this process: threads over the blocks of a tile. The reference for all engines."""

import contextlib
import os
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import Any

import psutil
from numpy.typing import NDArray

from raymm.engines.base import Call, Engine, Handle, Outcome, WorkerId
from raymm.kernels.threads import count_cores, count_threads, one_blas_thread
from raymm.request import Resources, check_count
from raymm.tiles import Tile
from raymm.worker import Job, Receipt, Worker


class LocalEngine(Engine):
    """Multiply in this process.

    Parameters
    ----------
    threads : int, optional
        Blocks multiplied at a time, one BLAS thread each. Default: the cores this process may
        use, at most ``OMP_NUM_THREADS``.

    Notes
    -----
    While it runs, NumPy's BLAS is limited to one thread in the whole process: the engine's own
    threads take its place. The setting is restored afterwards.
    """

    name = "local"

    def __init__(self, threads: int | None = None) -> None:
        super().__init__()
        if threads is not None:
            check_count("threads", threads)
        self.threads = threads or count_threads(count_cores())
        self._worker: Worker | None = None
        self._caller: ThreadPoolExecutor | None = None

    def resources(self) -> Resources:
        """Return this process as one worker."""
        return Resources("local", 1, self.threads, psutil.virtual_memory().available)

    def open(self, in_flight_nbytes: int = 0) -> None:
        """Make the worker."""
        del in_flight_nbytes
        if self._worker is None:
            self._worker = Worker("local", self.threads)
            self._caller = ThreadPoolExecutor(1, thread_name_prefix="raymm-local")

    def close(self) -> None:
        """End the threads."""
        with self._lock:
            if self._worker is not None and self._caller is not None:
                self._caller.shutdown(cancel_futures=True)
                self._worker.close()
                self._worker = self._caller = None

    def _unload(self, job_id: str, sync: bool) -> None:
        """Detach the job's sinks."""
        if self._worker is not None:
            self._worker.unload(job_id, sync)
            self._worker.retain(())  # they are the caller's again: loading costs nothing here

    def _limits(self) -> contextlib.AbstractContextManager[None]:
        return one_blas_thread()

    def _workers(self) -> list[WorkerId]:
        return ["local"]

    def _load(self, worker: WorkerId, job: Job, factors: dict[str, NDArray[Any]]) -> Handle:
        del worker  # there is one
        return self._call(self._load_now, job, factors)

    def _load_now(self, job: Job, factors: dict[str, NDArray[Any]]) -> tuple[str, int, int]:
        assert self._worker is not None
        self._worker.load(job, factors)
        return self._worker.device, self._worker.threads, os.getpid()

    def _submit(self, worker: WorkerId, job: Job, call: Call) -> Handle:
        del worker
        assert self._worker is not None
        return self._call(self._worker.run, job.id, *call)

    def _call(self, function: Callable[..., Any], *arguments: Any) -> Handle:
        assert self._caller is not None
        return self._caller.submit(function, *arguments)

    def _wait(self, handles: list[Handle], timeout: float) -> list[Handle]:
        return list(wait(_futures(handles), timeout, FIRST_COMPLETED).done)

    def _result(self, handle: Handle) -> Any:
        (future,) = _futures([handle])
        result = future.result()
        if isinstance(result[0], Receipt):
            return Outcome(*result)
        return result

    def _replace(self, worker: WorkerId) -> WorkerId:
        raise AssertionError(worker)  # a thread is never lost

    def _finish(self, tile: Tile) -> None:
        pass

    def _drain(self, handles: list[Handle]) -> None:
        futures = _futures(handles)
        for future in futures:
            future.cancel()
        if self._worker is not None and futures:
            self._worker.interrupt()
        interrupt: KeyboardInterrupt | None = None
        while True:
            try:
                wait(futures)  # a thread that still writes must not outlive its files
                break
            except KeyboardInterrupt as error:
                interrupt = error
        if interrupt is not None:
            raise interrupt


def _futures(handles: list[Handle]) -> list[Future[Any]]:
    return [handle for handle in handles if isinstance(handle, Future)]
