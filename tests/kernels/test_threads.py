import os

import pytest
import threadpoolctl

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
