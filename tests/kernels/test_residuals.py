"""Sums and products are those of NumPy, whatever the order, dtype and cutting."""

import numpy as np
import pytest

from raymm.kernels import residuals
from raymm.kernels.residuals import Sums, Weights, measure, product, weigh
from raymm.kernels.sparse import from_entries

DTYPES = ["float16", "float32", "float64", ">f4", "complex64", "int8", "uint64", "bool"]


def matrix(dtype, shape, seed=0):
    generator = np.random.default_rng(seed)
    if np.dtype(dtype).kind in "fc":
        return generator.standard_normal(shape).astype(dtype)
    return generator.integers(0, 2, shape).astype(dtype)


def wide_of(dtype):
    return np.dtype({"f": "f8", "c": "c16"}.get(np.dtype(dtype).kind, "u8"))


@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_sums_from_blocks(dtype, order, monkeypatch):
    monkeypatch.setattr(residuals, "_CHUNK", 60)
    monkeypatch.setattr(residuals, "_LINE", 7)
    values, wide = np.array(matrix(dtype, (23, 31)), order=order), wide_of(dtype)
    plain = np.arange(1, 24).astype(wide)
    sizes, squares = np.linspace(0, 1, 23), np.linspace(1, 2, 23)
    is_float = wide.kind != "u"
    weights = Weights(plain, sizes, squares) if is_float else Weights(plain)
    sums = Sums(31, wide, weights)
    for row in (0, 10):
        for column in (0, 20):
            part = values[row : row + 10 if row == 0 else 23, column : column + 20]
            sums.add(row, column, part)
    np.testing.assert_allclose(sums.plain, plain @ values.astype(wide), rtol=1e-12)
    if is_float:
        absolute = np.abs(values.astype(wide))
        np.testing.assert_allclose(sums.sizes, sizes @ absolute, rtol=1e-12)
        np.testing.assert_allclose(sums.squares, squares @ absolute**2, rtol=1e-12)


def test_dropped_rows_count_as_zero():
    values = matrix("float32", (4, 5))
    values[2] = np.nan
    weights = Weights(np.ones(4), dropped=np.array([False, False, True, False]))
    sums = Sums(5, np.dtype("f8"), weights)
    sums.add(0, 0, values)
    np.testing.assert_allclose(sums.plain, values[[0, 1, 3]].astype("f8").sum(axis=0))


def test_integers_are_summed_modulo_two_to_the_64():
    sums = Sums(2, np.dtype("u8"), Weights(np.array([2**63, 3], np.uint64)))
    sums.add(0, 0, np.array([[2, 1], [-1, 5]]))
    assert sums.plain.tolist() == [(2 * 2**63 - 3) % 2**64, (2**63 + 15) % 2**64]


@pytest.mark.parametrize("dtype", DTYPES)
def test_product_in_parts(dtype, monkeypatch):
    monkeypatch.setattr(residuals, "_PRODUCT", 40)
    left, right, wide = matrix(dtype, (6, 11)), matrix(dtype, (11, 4), 1), wide_of(dtype)
    expected = left.astype(wide) @ right.astype(wide)
    np.testing.assert_allclose(product(left, right, wide), expected, rtol=1e-12, atol=1e-12)
    sizes = product(left, right, np.dtype("f8"), sizes=True)
    wanted = np.abs(left.astype("c16")) @ np.abs(right.astype("c16"))
    np.testing.assert_allclose(sizes, wanted, rtol=1e-12)


def test_product_over_nothing_is_zero():
    assert not product(np.ones((2, 0)), np.ones((0, 3)), np.dtype("f8")).any()


def test_weigh_and_measure(monkeypatch):
    monkeypatch.setattr(residuals, "_PRODUCT", 50)
    factors = [
        matrix("float32", (9, 5)),
        matrix("float32", (5, 7), 1),
        matrix("float32", (7, 3), 2),
    ]
    first, second, third = (factor.astype("f8") for factor in factors)
    weights = np.linspace(-1, 1, 9)
    np.testing.assert_allclose(weigh(weights, factors), weights @ first @ second @ third)
    sizes = np.abs(first) @ np.abs(second) @ np.abs(third)
    found = measure(factors)
    np.testing.assert_allclose(found.norms, np.linalg.norm(sizes, axis=0))
    np.testing.assert_allclose(found.sums, sizes.sum(axis=0))
    assert found.largest == pytest.approx(max(sizes.max(), (np.abs(first) @ np.abs(second)).max()))
    assert measure(factors[:1]).largest == 0


@pytest.mark.parametrize("dtype", ["float32", "complex64", "uint64"])
def test_sums_from_stored_entries(dtype):
    dense = matrix(dtype, (23, 31), 3)
    dense[:, 4] = 0
    dense[np.random.default_rng(4).random(dense.shape) < 0.7] = 0
    wide = wide_of(dtype)
    plain = np.arange(1, 24).astype(wide)
    vectors = (np.linspace(0, 1, 23), np.linspace(1, 2, 23)) if wide.kind != "u" else ()
    sums = [Sums(31, wide, Weights(plain, *vectors)) for _ in range(2)]
    sums[0].add(0, 0, dense)
    places = np.nonzero(dense)
    sums[1].add_entries(0, from_entries(dense.shape, *places, dense[places]))
    for name in ("plain", "sizes", "squares"):
        np.testing.assert_allclose(*(getattr(each, name) for each in sums), rtol=1e-12, atol=1e-12)


def test_a_structural_zero_adds_nothing_to_a_sum():
    weights = Weights(np.array([np.nan, 1.0]))
    sums = Sums(3, np.dtype(np.float64), weights)
    sums.add_entries(0, from_entries((2, 3), np.array([1, 0]), np.array([1, 2]), np.ones(2)))
    np.testing.assert_array_equal(sums.plain, [0, 1, np.nan])
