import numpy as np
import pytest

from raymm.kernels import blas
from raymm.kernels.threads import one_blas_thread
from tests.tolerances import assert_product


@pytest.fixture(params=["numpy", "torch"])
def library(request, monkeypatch):
    monkeypatch.setattr(blas, "library", lambda: request.param)
    return request.param


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.complex64, np.int64])
@pytest.mark.parametrize("turned", [False, True], ids=["plain", "turned"])
def test_products_into_rows_that_lie_apart(library, dtype, turned):
    rng = np.random.default_rng(0)
    left = rng.integers(-9, 9, (5, 3)).astype(dtype)
    right = rng.integers(-9, 9, (3, 7)).astype(dtype)
    if turned:
        left, right = np.asfortranarray(left), np.asfortranarray(right)
    whole = np.zeros((5, 20), dtype)
    blas.multiply(left, right, whole[:, 4:11])
    np.testing.assert_array_equal(whole[:, 4:11], left @ right)
    assert not whole[:, :4].any()
    assert not whole[:, 11:].any()


@pytest.mark.parametrize("shape", [(0, 3, 4), (4, 3, 0), (1, 1, 1), (2, 5, 1), (1, 5, 2)])
def test_thin_and_empty_products(library, shape):
    rows, inner, columns = shape
    left, right = np.ones((rows, inner)), np.ones((inner, columns))
    out = np.empty((rows, columns))
    blas.multiply(left, right, out)
    np.testing.assert_array_equal(out, np.full((rows, columns), inner))


def test_slices_of_a_wide_operand(library):
    rng = np.random.default_rng(0)
    left = rng.normal(size=(30, 40)).astype(np.float32)
    right = rng.normal(size=(40, 100)).astype(np.float32)
    out = np.empty((30, 10), np.float32)
    blas.multiply(left, right[:, 33:43], out)
    assert_product(out, [left, right[:, 33:43]])


def test_the_library_is_decided_once_by_the_processor():
    assert blas.library() in ("numpy", "torch")
    assert blas.library() is blas.library()


def test_torch_is_set_back(library):
    import torch  # noqa: PLC0415  two seconds, for this test only

    before = torch.get_num_threads()
    with one_blas_thread():
        pass
    assert torch.get_num_threads() == before
