"""How many threads there are, and one BLAS thread for each of them."""

import contextlib
import os
from collections.abc import Iterator

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


@contextlib.contextmanager
def one_blas_thread() -> Iterator[None]:
    """Limit BLAS to one thread per calling thread, and restore what was set before.

    BLAS threads on top of our own would compete for the cores, and OpenBLAS called from several
    threads at once is safe only with one thread each.
    """
    if blas.library() == "torch":
        import torch  # noqa: PLC0415  loaded by then

        # Threads of ours set their own; torch hands the last setting on to new threads.
        before = torch.get_num_threads()
        try:
            yield
        finally:
            torch.set_num_threads(before)
    else:
        with threadpoolctl.threadpool_limits(1, user_api="blas"):
            yield


def limit_process() -> None:
    """Limit BLAS to one thread per calling thread for good; for a worker's own process."""
    if blas.library() == "numpy":
        threadpoolctl.threadpool_limits(1, user_api="blas")
