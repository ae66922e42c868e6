"""Parts of a product, products with it, its tiles, functions of it: nothing else is computed."""

import gc
import threading

import numpy as np
import pytest
import torch

import raymm
from raymm.errors import PlanError, ShapeError
from raymm.sources.files import FileSource


@pytest.fixture(scope="module")
def factors():
    rng = np.random.default_rng(0)
    return [rng.normal(size=shape) for shape in ((7, 3), (3, 3), (3, 50))]


KEYS = [
    5,
    -1,
    (5, 3),
    (-7, -50),
    slice(1, 6, 2),
    slice(None, None, -1),
    (slice(None), slice(10, 20)),
    (slice(5, 1, -2), slice(40, 3, -7)),
    ([0, 6],),
    [0, 6, 0],
    (slice(None), [49, 0, 7, 7]),
    ([1, 2, 3], [4, 4, 49]),
    ([[0, 1], [2, 3]], 5),
    (2, [[0, 1], [2, 3]]),
    ([[0], [6]], [1, 2, 3]),
    np.array([True, False] * 3 + [True]),
    (slice(None), np.arange(50) % 3 == 0),
    (..., 3),
    (2, ...),
    ...,
    (),
    [],
    (slice(3, 3), slice(None)),
    (np.int64(2), np.array(3)),
]


@pytest.mark.parametrize("key", KEYS, ids=repr)
@pytest.mark.parametrize("kind", ["array", "file"])
def test_a_part_is_that_part(factors, key, kind, tmp_path):
    wide = np.linalg.multi_dot(factors)
    operands = factors
    if kind == "file":
        np.save(tmp_path / "C.npy", factors[-1])
        np.save(tmp_path / "A.npy", np.asfortranarray(factors[0]))
        operands = [str(tmp_path / "A.npy"), factors[1], str(tmp_path / "C.npy")]
    part, expected = raymm.chain(operands)[key], wide[key]
    assert np.shape(part) == np.shape(expected)
    np.testing.assert_allclose(part, expected, rtol=1e-12)
    swapped = tuple(reversed(key)) if isinstance(key, tuple) and len(key) == 2 else None
    if swapped is not None and Ellipsis not in [each for each in key if each is ...]:
        np.testing.assert_allclose(raymm.chain(operands).T[swapped], wide.T[swapped], rtol=1e-12)


def test_a_part_of_vector_products(factors):
    row = raymm.chain([factors[0][0], *factors[1:]])
    expected = factors[0][0] @ factors[1] @ factors[2]
    np.testing.assert_allclose(row[3:9], expected[3:9])
    np.testing.assert_allclose(row[[4, 4, -1]], expected[[4, 4, -1]])
    assert row[7] == pytest.approx(expected[7])
    column = raymm.chain([*factors, np.ones(50)])
    np.testing.assert_allclose(column[::-1], (np.linalg.multi_dot(factors) @ np.ones(50))[::-1])
    assert raymm.chain([np.ones(3), factors[2], np.ones(50)])[()] == pytest.approx(factors[2].sum())


@pytest.mark.parametrize(
    ("key", "text"),
    [
        (7, "index 7 is out of bounds for axis 0 of 7"),
        ((0, -51), "index -51 is out of bounds for axis 1 of 50"),
        ((0, 0, 0), r"3 indices for a product of shape \(7, 50\)"),
        (None, "no new axes"),
        (1.5, "float64"),
        ("a", "integers, slices or a mask"),
        (np.ones(6, bool), r"mask of shape \(6,\) for axis 0 of 7"),
        (([0, 1], [0, 1, 2]), "do not fit together"),
        ((..., ...), "one ellipsis"),
    ],
)
def test_wrong_keys_are_index_errors(factors, key, text):
    with pytest.raises(IndexError, match=text):
        raymm.chain(factors)[key]


def test_many_pairs(factors):
    rng = np.random.default_rng(1)
    rows, columns = rng.integers(-7, 7, 1000), rng.integers(-50, 50, 1000)
    wide = np.linalg.multi_dot(factors)
    np.testing.assert_allclose(raymm.chain(factors)[rows, columns], wide[rows, columns])


def test_only_the_columns_asked_for_are_read(tmp_path, monkeypatch):
    np.save(tmp_path / "C.npy", np.asfortranarray(np.random.default_rng(0).normal(size=(4, 9999))))
    read = []
    whole = FileSource.read

    def counting(self, start, stop, buffer):
        read.append((stop - start) * self.shape[0])
        return whole(self, start, stop, buffer)

    monkeypatch.setattr(FileSource, "read", counting)
    chain = raymm.chain([np.ones((2, 4)), str(tmp_path / "C.npy")])
    chain[:, 5000:5010]
    assert sum(read) == 40
    read.clear()
    chain[:, [3, 4, 9000]]
    assert sum(read) == 12


def test_products_with_it_never_form_it(factors):
    rng = np.random.default_rng(2)
    chain, wide = raymm.chain(factors), np.linalg.multi_dot(factors)
    x, y, z = rng.normal(size=50), rng.normal(size=(50, 2)), rng.normal(size=7)
    np.testing.assert_allclose(chain @ x, wide @ x)
    np.testing.assert_allclose(chain @ y, wide @ y)
    np.testing.assert_allclose(z @ chain, z @ wide)
    np.testing.assert_allclose(y.T @ chain.T, y.T @ wide.T)
    np.testing.assert_allclose(chain @ chain.T, wide @ wide.T)
    np.testing.assert_allclose(chain @ torch.from_numpy(x), wide @ x)
    with pytest.raises(ShapeError, match="50 != 7"):
        chain @ z


def test_a_huge_product_with_a_vector():
    tall = np.broadcast_to(np.float32(1), (400_000, 300))
    wide = np.broadcast_to(np.float32(1), (300, 400_000))
    chain = raymm.chain([tall, wide])  # D would take 640 GB
    np.testing.assert_array_equal(chain @ np.ones(400_000, np.float32), np.full(400_000, 1.2e8))
    assert chain[399_999, 399_999] == 300


@pytest.mark.parametrize("engine", ["local", pytest.param("ray", marks=pytest.mark.ray)])
def test_tiles_come_in_order(factors, engine, request):
    if engine == "ray":
        engine = request.getfixturevalue("ray_engine")
    wide = np.linalg.multi_dot(factors)
    for chain, expected in ((raymm.chain(factors), wide), (raymm.chain(factors).T, wide.T)):
        axis, reached = expected.shape.index(50), 0
        for tile, block in chain.tiles(tile_columns=8, engine=engine):
            assert tile.start == reached
            part = expected[:, tile.start : tile.stop] if axis else expected[tile.start : tile.stop]
            np.testing.assert_allclose(block, part)
            reached = tile.stop
        assert reached == 50


def test_tiles_of_vectors(factors):
    row = raymm.chain([factors[0][0], *factors[1:]])
    parts = [block for _, block in row.tiles(tile_columns=7)]
    np.testing.assert_allclose(np.concatenate(parts), factors[0][0] @ factors[1] @ factors[2])


def test_the_stream_is_bounded_and_stops_when_dropped(monkeypatch):
    made = []
    whole = raymm.worker.Worker.run

    def counting(self, job_id, tile, source):
        made.append(tile.index)
        return whole(self, job_id, tile, source)

    monkeypatch.setattr("raymm.worker.Worker.run", counting)
    chain = raymm.chain([np.ones((2, 2)), np.ones((2, 1000))])
    tiles = chain.tiles(tile_columns=1, engine="local")
    assert made == []
    for _ in range(3):
        next(tiles)
    assert len(made) <= 3 + 2 * 2
    before = threading.active_count()
    del tiles
    gc.collect()
    assert len(made) <= 3 + 2 * 2
    assert threading.active_count() < before


def test_functions_are_applied_before_every_output(factors, tmp_path):
    wide = np.linalg.multi_dot(factors)
    mapped = raymm.chain(factors).map(torch.relu)
    expected = np.maximum(wide, 0)
    out = np.empty_like(wide)
    file, array = mapped.run(tmp_path / "D.npy", out, tile_columns=9, engine="local")
    np.testing.assert_allclose(file, expected, rtol=1e-12)
    np.testing.assert_allclose(array, expected, rtol=1e-12)
    np.testing.assert_allclose(mapped.T[3:9, 1], expected.T[3:9, 1])
    np.testing.assert_allclose(mapped.map(torch.neg).compute(), -expected)
    twice = np.concatenate([block for _, block in mapped.tiles(tile_columns=9)], axis=1)
    np.testing.assert_allclose(twice, expected)


def test_functions_decide_the_dtype():
    ones = [np.full((3, 2), -2, np.int8), np.ones((2, 5), np.int8)]
    is_negative = raymm.chain(ones).map(lambda block: block < 0)
    assert is_negative.dtype == np.bool_
    assert is_negative.compute().all()
    whole = raymm.chain(ones).map(lambda block: block * 2**40)  # int64, whatever multiplied it
    assert whole.dtype == np.int64
    assert (whole.compute() == -4 * 2**40).all()
    half = raymm.chain([each.astype(np.float16) for each in ones]).map(torch.relu)
    assert half.dtype == half.compute().dtype == np.float16
    single = raymm.chain(ones).map(lambda block: block.to(torch.float32) / 3)
    np.testing.assert_allclose(single.compute(dtype=np.float64), -4 / np.float32(3))


@pytest.mark.parametrize(
    ("function", "text"),
    [
        (lambda block: block.sum(), "same shape"),
        (lambda block: block.numpy(), "same shape"),
        (lambda block: 1 / 0, "division"),
        (3, "needs a function"),
    ],
    ids=["another shape", "no tensor", "an error", "no function"],
)
def test_functions_that_cannot_work(factors, function, text):
    with pytest.raises(PlanError, match=text):
        raymm.chain(factors).map(function)


def test_a_mapped_product_is_no_product(factors, tmp_path):
    mapped = raymm.chain(factors).map(torch.relu)
    for act in (
        lambda: mapped @ np.ones(50),
        lambda: np.ones(7) @ mapped,
        lambda: mapped.write(tmp_path / "D.npy", verify=True),
        lambda: mapped.verify(tmp_path / "D.npy"),
    ):
        with pytest.raises(PlanError, match=r"map\(\)"):
            act()
    assert list(tmp_path.iterdir()) == []


def test_opening_a_result_again(factors, tmp_path):
    raymm.chain(factors).write(tmp_path / "D.npy")
    opened = raymm.open(tmp_path / "D.npy")
    assert (opened.shape, opened.dtype) == ((7, 50), np.float64)
    np.testing.assert_allclose(opened[2:4, ::7], np.linalg.multi_dot(factors)[2:4, ::7])


def test_asarray_is_the_product(factors):
    np.testing.assert_allclose(np.asarray(raymm.chain(factors)), np.linalg.multi_dot(factors))
