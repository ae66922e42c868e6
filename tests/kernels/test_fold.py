from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from raymm.kernels.fold import accumulate, fold, round_to_bfloat16
from raymm.memory import LONG_INNER
from tests.tolerances import assert_product


@pytest.fixture
def rng():
    return np.random.default_rng(0)


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.complex64, np.complex128])
@pytest.mark.parametrize("shape", [(3, 5, 7), (300, 20, 4), (1, 1, 4500), (257, 3, 4097)])
def test_fold_is_the_product(rng, dtype, shape):
    rows, inner, columns = shape
    left = rng.normal(size=(rows, inner)).astype(dtype)
    right = rng.normal(size=(inner, columns)).astype(dtype)
    folded = fold(left, right)
    assert folded.dtype == dtype
    assert_product(folded, [left, right])


def test_fold_of_integers_is_exact_modulo_2_to_64(rng):
    left = rng.integers(-(2**62), 2**62, (4, 5))
    right = rng.integers(-(2**62), 2**62, (5, 3))
    exact = (left.astype(object) @ right.astype(object)) % 2**64
    np.testing.assert_array_equal(fold(left, right).astype(object) % 2**64, exact)


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_threads_do_not_change_the_bits(rng, threads):
    left = rng.normal(size=(600, 70)).astype(np.float32)
    right = rng.normal(size=(70, 9000)).astype(np.float32)
    with ThreadPoolExecutor(threads) as pool:
        np.testing.assert_array_equal(fold(left, right, pool.map), fold(left, right))


def test_an_error_in_a_thread_is_raised():
    with ThreadPoolExecutor(1) as pool, pytest.raises(ValueError, match=r"mismatch|size"):
        fold(np.ones((2, 3)), np.ones((4, 2)), pool.map)


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.complex64])
def test_an_empty_inner_dimension_gives_zeros(dtype):
    out = np.full((2, 3), np.nan, dtype)
    accumulate(np.ones((2, 0), dtype), np.ones((0, 3), dtype), out)
    np.testing.assert_array_equal(out, np.zeros((2, 3)))


def test_a_long_sum_keeps_its_small_terms():
    # A float32 sum of ones stops growing at 2**24, and rounds 2049s long before.
    length = 2**21 + 5
    out = np.empty((1, 1), np.float32)
    accumulate(np.ones((1, length), np.float32), np.full((length, 1), 2049, np.float32), out)
    np.testing.assert_allclose(out, 2049 * length, rtol=2e-7)


@pytest.mark.parametrize("dtype", [np.float32, np.complex64])
@pytest.mark.parametrize("inner", [LONG_INNER - 1, LONG_INNER, LONG_INNER + 1, 3 * LONG_INNER + 7])
def test_sums_around_the_length_where_the_method_changes(rng, dtype, inner):
    left = rng.normal(size=(3, inner)).astype(dtype)
    right = rng.normal(size=(inner, 4)).astype(dtype)
    out = np.empty((3, 4), dtype)
    accumulate(left, right, out)
    assert_product(out, [left, right])


def test_integers_with_a_long_inner_dimension_stay_exact():
    left = np.full((1, LONG_INNER * 2), 2**40 + 1)
    out = np.empty((1, 1), np.int64)
    accumulate(left, np.full((LONG_INNER * 2, 1), 3), out)
    assert out[0, 0] == (2**40 + 1) * 3 * LONG_INNER * 2


def test_bfloat16_rounds_to_nearest_with_ties_to_even():
    step = 2.0**-7  # between neighbours from 1 to 2
    cases = {
        1.0: 1.0,
        1 + step: 1 + step,
        1 + step / 2: 1.0,
        1 + step / 2 + 2.0**-20: 1 + step,
        1 + 3 * step / 2: 1 + 2 * step,
        -(1 + step / 2 + 2.0**-20): -(1 + step),
        4097.0: 4096.0,
        0.0: 0.0,
    }
    values = np.array(list(cases), np.float32)
    np.testing.assert_array_equal(round_to_bfloat16(values), np.array(list(cases.values())))


def test_bfloat16_agrees_with_torch_and_keeps_what_is_no_number():
    import torch  # noqa: PLC0415  two seconds, for this test only

    bits = np.random.default_rng(0).integers(0, 2**32, 20_000, dtype=np.uint64).astype(np.uint32)
    special = np.array([0x7F800000, 0xFF800000, 0x7F800001, 0x7FFFFFFF, 0x7F7FFFFF, 1], np.uint32)
    values = np.concatenate([bits, special]).view(np.float32)
    expected = torch.from_numpy(values.copy()).to(torch.bfloat16).to(torch.float32).numpy()
    np.testing.assert_array_equal(round_to_bfloat16(values.copy()), expected)
