"""How many threads there are, and one BLAS thread for each of them."""

import contextlib
import os
import threading
from collections.abc import Iterator
from typing import Any

import threadpoolctl

from raymm.kernels import blas


def count_cores() -> int:
    """Return the cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def count_threads(cores: int) -> int:
    """Return the threads to use on `cores` cores: at most ``OMP_NUM_THREADS``, if that is set."""
    wanted = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0]
    return max(1, min(cores, int(wanted)) if wanted.isdigit() and int(wanted) else cores)


class _Limit:
    """The process-wide limit of BLAS threads, for as long as anybody needs it."""

    def __init__(self) -> None:
        self._lock, self._users = threading.Lock(), 0
        self._libraries: list[tuple[Any, int]] = []
        self._torch = 0

    def acquire(self) -> None:
        with self._lock:
            self._users += 1
            if self._users == 1:
                found = threadpoolctl.ThreadpoolController().select(user_api="blas")
                self._libraries = [(each, each.num_threads) for each in found.lib_controllers]
                for library, _ in self._libraries:
                    _set_num_threads(library, 1)
                if blas.library() == "torch":
                    import torch  # noqa: PLC0415  loaded by then

                    self._torch = torch.get_num_threads()

    def release(self) -> None:
        with self._lock:
            self._users -= 1
            if self._users == 0:
                for library, before in self._libraries:
                    _set_num_threads(library, before)
                if self._torch:
                    import torch  # noqa: PLC0415

                    # Our threads set their own, and torch hands the last one on to new threads.
                    torch.set_num_threads(self._torch)


def _set_num_threads(library: Any, count: int) -> None:
    """Set a BLAS library's threads, whichever thread asks.

    `threadpoolctl` ignores OpenBLAS limits set by another thread than the first that ever set one
    (it says so in `set_num_threads`); that thread may be the caller's, and ours must be heard.
    """
    getattr(library, "_real_set_num_threads", library.set_num_threads)(count)


_LIMIT = _Limit()


@contextlib.contextmanager
def one_blas_thread() -> Iterator[None]:
    """Limit BLAS to one thread per calling thread; the last to leave restores what was set.

    BLAS threads on top of our own would compete for the cores, and OpenBLAS called from several
    threads at once is safe only with one thread each.
    """
    _LIMIT.acquire()
    try:
        yield
    finally:
        _LIMIT.release()


def limit_process() -> None:
    """Limit BLAS to one thread per calling thread for good; for a worker's own process."""
    _LIMIT.acquire()
