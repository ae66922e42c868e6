import os
import threading

import pytest
import threadpoolctl

from raymm.kernels import blas
from raymm.kernels.threads import count_cores, count_threads, one_blas_thread


def blas_threads():
    return [
        pool["num_threads"]
        for pool in threadpoolctl.threadpool_info()
        if pool["user_api"] == "blas"
    ]


def test_cores_are_those_of_this_process():
    assert count_cores() == len(os.sched_getaffinity(0))


@pytest.mark.parametrize(
    ("wanted", "cores", "expected"),
    [(None, 4, 4), ("1", 4, 1), ("2,1", 4, 2), ("64", 4, 4), ("0", 4, 4), ("x", 4, 4), ("", 3, 3)],
)
def test_threads_respect_the_user(monkeypatch, wanted, cores, expected):
    if wanted is None:
        monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    else:
        monkeypatch.setenv("OMP_NUM_THREADS", wanted)
    assert count_threads(cores) == expected


def test_blas_is_limited_and_set_back():
    with threadpoolctl.threadpool_limits(2, user_api="blas"):
        before = blas_threads()
        with one_blas_thread():
            inside = blas_threads()
        assert blas_threads() == before
    assert set(inside) <= {1}


def test_blas_is_set_back_after_an_error():
    with threadpoolctl.threadpool_limits(2, user_api="blas"):
        before = blas_threads()
        with pytest.raises(RuntimeError, match="tile"), one_blas_thread():
            raise RuntimeError("tile")
        assert blas_threads() == before


def test_the_last_of_overlapping_users_restores_the_limit():
    before, entered, leave = blas_threads(), threading.Event(), threading.Event()

    def other():
        with one_blas_thread():
            entered.set()
            assert leave.wait(60)

    thread = threading.Thread(target=other)
    with one_blas_thread():
        thread.start()
        assert entered.wait(60)
    assert all(count == 1 for count in blas_threads())  # the other one is still at work
    leave.set()
    thread.join()
    assert blas_threads() == before


def test_numpy_is_limited_where_torch_multiplies(monkeypatch):
    # Complex products go through NumPy there too.
    import torch  # noqa: PLC0415  two seconds, for this test only

    monkeypatch.setattr(blas, "library", lambda: "torch")
    before = torch.get_num_threads()
    with one_blas_thread():
        assert all(count == 1 for count in blas_threads())
    assert torch.get_num_threads() == before
