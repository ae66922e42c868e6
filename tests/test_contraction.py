"""A huge inner axis: partial products in float64, tile by tile."""

import itertools

import numpy as np
import pytest

import raymm
from raymm.combining import CombineTree
from raymm.contraction import contract
from raymm.errors import DTypeError, MemoryLimitError, SinkExistsError
from raymm.operands import Operand
from raymm.order import huge_inner
from raymm.request import Request
from raymm.sources import open_source
from tests.planning import describe

LONG = 70_000


@pytest.fixture(autouse=True)
def _small_threshold(monkeypatch):
    monkeypatch.setattr("raymm.order.INNER_NBYTES", 1000)


def pair(dtype, rows=5, columns=6):
    rng = np.random.default_rng(0)
    if np.dtype(dtype).kind in "iu":
        low = 0 if np.dtype(dtype).kind == "u" else -50
        return (
            rng.integers(low, 50, size=shape).astype(dtype)
            for shape in ((rows, LONG), (LONG, columns))
        )
    return (rng.normal(size=shape).astype(dtype) for shape in ((rows, LONG), (LONG, columns)))


@pytest.mark.parametrize("dtype", ["<f4", ">f4", "<f2", "<f8", "<c8", "<c16"])
@pytest.mark.parametrize("tile_columns", [None, 9_999, 1_000_000])
def test_sums_are_those_of_float64(dtype, tile_columns):
    left, right = pair(dtype)
    wide = np.complex128 if np.dtype(dtype).kind == "c" else np.float64
    expected = left.astype(wide) @ right.astype(wide)
    product = raymm.chain([left, right]).compute(tile_columns=tile_columns, engine="local")
    assert product.dtype == np.dtype(dtype).newbyteorder("=")
    bound = np.abs(left).astype(float) @ np.abs(right).astype(float)
    step = {2: 2.0**-10, 4: 2.0**-23, 8: 2.0**-50}[
        np.dtype(dtype).itemsize // (2 if wide is np.complex128 else 1)
    ]
    assert (np.abs(product - expected) <= 64 * step * bound / 300 + step * np.abs(expected)).all()


@pytest.mark.parametrize("dtype", ["i1", "u2", "i4", "u8", "?"])
def test_integers_are_exact(dtype):
    left, right = pair("u1" if dtype == "?" else dtype)
    left, right = left.astype(dtype), right.astype(dtype)
    expected = (
        np.array(
            [
                [sum(map(int.__mul__, row, column)) for column in right.T.astype(object).tolist()]
                for row in left.astype(object).tolist()
            ],
            object,
        )
        if dtype != "?"
        else (left.astype(np.int64) @ right.astype(np.int64))
    )
    product = raymm.chain([left, right]).compute(engine="local")
    assert product.dtype == (np.uint64 if dtype[0] == "u" else np.int64)
    np.testing.assert_array_equal(product.astype(object), expected)


def test_integers_past_2_53_are_exact():
    left = np.full((1, LONG), 2**22 + 1, np.int64)
    product = raymm.chain([left, left.T]).compute(engine="local")
    assert int(product[0, 0]) == LONG * (2**22 + 1) ** 2


def test_integers_that_might_overflow_are_refused():
    left = np.full((1, LONG), 2**31, np.int64)
    with pytest.raises(DTypeError, match="64 bits"):
        raymm.chain([left, left.T]).compute(engine="local")


def test_longer_chains_and_files(tmp_path):
    left, right = pair("f8")
    rng = np.random.default_rng(1)
    outer, last = rng.normal(size=(4, 5)), rng.normal(size=(6, 900))
    np.save(tmp_path / "left.npy", left)
    np.save(tmp_path / "right.npy", right)
    expected = outer @ left @ right @ last
    operands = [outer, tmp_path / "left.npy", tmp_path / "right.npy", last]
    for chain, wanted in (
        (raymm.chain(operands), expected),
        (raymm.chain(operands).T, expected.T),
    ):
        written = chain.write(tmp_path / "D.npy", overwrite=True, engine="local", verify=True)
        np.testing.assert_allclose(written, wanted, rtol=1e-9)
    np.testing.assert_allclose(
        raymm.chain(operands[:3]) @ np.ones(6), outer @ left @ right @ np.ones(6)
    )
    both = raymm.chain([right.T @ right, last, last.T, last])
    np.testing.assert_allclose(both.compute(), right.T @ right @ last @ last.T @ last, rtol=1e-9)


def test_vectors_at_the_ends():
    left, right = pair("f8")
    np.testing.assert_allclose(raymm.chain([left[0], right]).compute(), left[0] @ right)
    np.testing.assert_allclose(raymm.chain([left, right[:, 0]]).compute(), left @ right[:, 0])
    assert raymm.chain([left[0], right[:, 0]]).compute() == pytest.approx(left[0] @ right[:, 0])


@pytest.mark.ray
def test_the_same_bits_on_ray(ray_engine):
    left, right = pair("f4")
    chain = raymm.chain([left, right])
    here = chain.compute(tile_columns=5000, engine="local")
    there = chain.compute(tile_columns=5000, engine=ray_engine)
    assert here.tobytes() == there.tobytes()


def test_outputs_are_checked_before_anything_is_summed(tmp_path, monkeypatch):
    (tmp_path / "D.npy").write_bytes(b"precious")
    left, right = pair("f8")
    monkeypatch.setattr("raymm.arrangement.contract", None)
    with pytest.raises(SinkExistsError):
        raymm.chain([left, right]).write(tmp_path / "D.npy")


def test_the_plan_says_so():
    left, right = pair("f4")
    assert "(5, 6) is formed first: sums over 70,000 places" in str(
        raymm.chain([left, right]).plan()
    )


def test_a_limit_below_the_partial_products():
    left, right = pair("f8", rows=100, columns=100)
    sources = open_source(left, "A"), open_source(right, "B")
    with pytest.raises(MemoryLimitError, match="partial products"):
        contract(*sources, Request(memory_limit=700_000), raymm.LocalEngine(), print)


def test_which_axis_is_the_huge_one():
    assert huge_inner(describe((5, 10_000), (10_000, 6))) == 0
    assert huge_inner(describe((4, 5), (5, 10_000), (10_000, 6))) == 1
    assert huge_inner(describe((5, 10_000), (10_000, 20_000))) is None
    assert huge_inner(describe((2, 3), (3, 2))) is None
    assert huge_inner(describe((5000, 5000), (5000, 5000))) is None
    assert huge_inner(describe((5000, 5000), (5000, 6))) is None
    assert huge_inner(describe((20, 2), (2, 300_000))) is None
    assert isinstance(describe((2, 3))[0], Operand)


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 8, 11])
def test_the_tree_is_the_same_in_any_order(count):
    def combine(first, second):
        return f"({first}{second})"

    found = set()
    orders = (
        itertools.permutations(range(count))
        if count <= 5
        else [np.random.default_rng(seed).permutation(count).tolist() for seed in range(50)]
    )
    for order in orders:
        tree = CombineTree(count, combine)
        for tile in order:
            tree.add(tile, chr(97 + tile))
        found.add(tree.root())
    (text,) = found
    assert text.replace("(", "").replace(")", "") == "abcdefghijk"[:count]


def test_the_tree_holds_few_states():
    tree = CombineTree(1000, lambda first, second: first + second)
    most = 0
    for tile in range(1000):
        tree.add(tile, 1)
        most = max(most, len(tree))
    assert tree.root() == 1000
    assert most <= 11
    lost = CombineTree(4, lambda first, second: first)
    lost.add(0, 1)
    lost.add(3, 1)
    with pytest.raises(ValueError, match="2 states"):
        lost.root()
