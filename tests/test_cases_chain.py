"""Cases from public reports about the product itself, each named after its id."""

import numpy as np
import pytest

import raymm
from raymm.errors import (
    DTypeError,
    MemoryLimitError,
    PlanError,
    ResultOverflowError,
    ShapeError,
)
from raymm.plan import Plan
from raymm.run import prepare
from raymm.sources import open_source
from tests.contracts import names_in
from tests.doubles import CountingCallback, RaisingEngine
from tests.tolerances import assert_product, exact_integers


def as_tensors(operands):
    import torch  # noqa: PLC0415  two seconds, for this test only

    return [torch.from_numpy(np.ascontiguousarray(operand)) for operand in operands]


KINDS = {"numpy": list, "torch": as_tensors}


@pytest.fixture(params=KINDS)
def kind(request):
    return KINDS[request.param]


@pytest.mark.parametrize("tile_columns", [None, 1])
def test_u01_int32_product_wraps_silently(engine, tile_columns):
    left = np.array([[0, 0, 175702, 173294]], np.int32)
    operands = [left, np.eye(4, dtype=np.int32), left.T]
    product = raymm.multi_dot(operands, engine=engine, tile_columns=tile_columns)
    assert product.tolist() == [[60902003240]]
    assert product.dtype == np.int64


@pytest.mark.parametrize("dtype", ["i1", "i2", "i4", "u1", "u2", "u4"])
def test_u01_of_every_narrow_dtype(engine, dtype):
    top = np.iinfo(dtype).max
    inner = 1 if dtype.endswith("4") else 3  # 64 bits hold no second square of 32
    operands = [np.full((1, inner), top, dtype), np.full((inner, 2), top, dtype)]
    product = raymm.multi_dot(operands, engine=engine)
    assert product.dtype == (np.uint64 if dtype.startswith("u") else np.int64)
    assert product.tolist() == [[inner * top * top] * 2]


def test_u03_int8_product_returned_in_int8(engine, kind):
    operands = [
        np.array([[-44, -20], [-126, 6]], np.int8),
        np.array([[24, -75], [127, -101]], np.int8),
        np.eye(2, dtype=np.int8),
    ]
    product = raymm.multi_dot(kind(operands), engine=engine)
    assert product.tolist() == [[-3596, 5320], [-2262, 8844]]
    assert product.dtype == np.int64


def test_u04_requested_dtype_applied_after_the_overflow(engine, tmp_path):
    chain = raymm.chain(
        [
            np.array([[30, 0], [0, 4]], np.int8),
            np.array([[5, 0], [0, 4]], np.int8),
            np.eye(2, dtype=np.int8),
        ]
    )
    memory = chain.compute(dtype=np.int16, engine=engine)
    file = chain.write(tmp_path / "D.npy", dtype=np.int16, engine=engine)
    for product in (memory, file, np.load(tmp_path / "D.npy")):
        assert product.tolist() == [[150, 0], [0, 16]]
        assert product.dtype == np.int16
    with pytest.raises(ResultOverflowError, match="150") as caught:
        chain.compute(dtype=np.int8, engine=engine)
    assert isinstance(caught.value, OverflowError)
    with pytest.raises(ResultOverflowError):
        chain.write(tmp_path / "E.npy", dtype=np.int8, engine=engine)
    assert names_in(tmp_path) == ["D.npy"]


def test_u05_uint64_routed_through_float(engine, tmp_path):
    def column(value, dtype):
        return np.array([[value]], dtype)

    one = column(1, np.uint64)
    overflowing = raymm.chain([column(2**64 - 1, np.uint64), column(2**63 + 5, np.uint64), one])
    with pytest.raises(DTypeError, match="64 bits"):
        overflowing.compute(engine=RaisingEngine())
    with pytest.raises(DTypeError):
        overflowing.write(tmp_path / "D.npy", engine=RaisingEngine())
    assert names_in(tmp_path) == []
    kept = raymm.multi_dot([column(2**63 + 5, np.uint64), one, one], engine=engine)
    assert kept.tolist() == [[9223372036854775813]]
    assert kept.dtype == np.uint64
    operands = [column(value, np.int32) for value in (2**24 + 1, 1, 1)]
    small = raymm.multi_dot(operands, engine=engine)
    assert small.tolist() == [[16777217]]
    assert small.dtype == np.int64


@pytest.mark.parametrize(
    ("left", "right", "expected"),
    [
        (np.uint64(2**63 + 5), np.int64(1), None),  # does not fit into int64
        (np.uint64(2**62), np.int64(-1), -(2**62)),
        (np.uint64(5), np.int64(-(2**61)), None),
        (np.uint64(2**53 + 1), np.int64(3), 3 * (2**53 + 1)),
    ],
)
def test_u05_uint64_with_int64_is_exact_or_an_error(engine, left, right, expected):
    operands = [np.array([[left]]), np.array([[right]])]
    if expected is None:
        with pytest.raises(DTypeError):
            raymm.multi_dot(operands, engine=engine)
    else:
        product = raymm.multi_dot(operands, engine=engine)
        assert product.tolist() == [[expected]]
        assert product.dtype == np.int64


def test_u07_narrow_integer_intermediate_in_a_chain(engine, kind):
    operands = [np.array(each, np.int8) for each in ([[100]], [[2]], [[0, 1]])]
    product = raymm.multi_dot(kind(operands), engine=engine)
    assert product.tolist() == [[0, 200]]
    assert product.dtype == np.int64


@pytest.mark.parametrize(("length", "expected"), [(2050, 2050), (4096, 4096), (2049, 2048)])
def test_u08_float16_accumulation_stalls_at_2048(local_engine, length, expected):
    operands = [
        np.ones((10, length), np.float16),
        np.eye(length, dtype=np.float16),
        np.ones((length, 1), np.float16),
    ]
    product = raymm.multi_dot(operands, engine=local_engine)
    assert product.dtype == np.float16
    np.testing.assert_array_equal(product, np.full((10, 1), expected))
    if length == 2049:
        wide = raymm.multi_dot(operands, dtype=np.float32, engine=local_engine)
        assert wide.dtype == np.float32
        np.testing.assert_array_equal(wide, np.full((10, 1), 2049))


def test_u09_half_precision_intermediate_overflows_though_the_product_fits(engine, kind):
    operands = kind([np.array([[value]], np.float16) for value in (300, 300, 0.001)])
    product = raymm.multi_dot(operands, engine=engine)
    assert product.dtype == np.float16
    assert product[0, 0] == 90.0625
    wide = raymm.multi_dot(operands, dtype=np.float32, engine=engine)
    np.testing.assert_allclose(wide, 90.03639221, rtol=1e-6)


def test_u14_very_long_inner_dimension_in_float32(local_engine):
    length = 2588317
    right = np.zeros((length, 2), np.float32)
    right[:, 1] = 2320
    operands = [np.ones((1, length), np.float32), right, np.eye(2, dtype=np.float32)]
    product = raymm.multi_dot(operands, engine=local_engine)
    assert product.dtype == np.float32
    np.testing.assert_allclose(product, [[0, 6004895440]], rtol=1e-6)


def test_u14_when_the_long_dimension_is_that_of_the_tiles(local_engine):
    length = 1_000_003
    right = np.full((length, 2), 2049, np.float32)
    product = raymm.multi_dot(
        [np.ones((1, length), np.float32), right], tile_columns=1, engine=local_engine
    )
    np.testing.assert_allclose(product, [[2049 * length] * 2], rtol=1e-6)


class TestU16LastBitsDependOnTileSizeOrWorkerCount:
    TILES = (1, 2, 50, 1999, 2000, 5000)

    @pytest.fixture
    def operands(self):
        rng = np.random.default_rng(0)
        shapes = ((100, 30), (30, 8), (8, 2000))
        return [rng.normal(size=shape).astype(np.float32) for shape in shapes]

    @pytest.mark.parametrize("tile_columns", TILES)
    def test_u16_error_and_bits_in_this_process(self, operands, tile_columns):
        found = []
        for threads in (1, 2, 3):
            with raymm.LocalEngine(threads=threads) as engine:
                for _ in range(2):
                    product = raymm.multi_dot(operands, tile_columns=tile_columns, engine=engine)
                    found.append(product)
        left, middle, right = (operand.astype(np.float64) for operand in operands)
        size = np.abs(left) @ np.abs(middle) @ np.abs(right)
        assert (np.abs(found[0] - left @ middle @ right) <= 1e-5 * size).all()
        assert_product(found[0], operands)
        for other in found[1:]:
            np.testing.assert_array_equal(found[0], other)

    @pytest.mark.ray
    @pytest.mark.parametrize("tile_columns", [50, 1999])
    def test_u16_bits_on_workers(self, operands, tile_columns, ray_room):
        found = [raymm.multi_dot(operands, tile_columns=tile_columns, engine="local")]
        for workers in (1, 2):
            with raymm.RayEngine(num_workers=workers) as engine:
                for _ in range(2):
                    product = raymm.multi_dot(operands, tile_columns=tile_columns, engine=engine)
                    found.append(product)
        for other in found[1:]:
            np.testing.assert_array_equal(found[0], other)

    @pytest.mark.parametrize("rows", [3, 300])
    @pytest.mark.parametrize("library", ["numpy", "torch"])
    def test_u16_bits_where_blas_would_split_its_sums(self, rows, library, monkeypatch):
        # K = 5000 and few rows: library threads would split the inner dimension.
        monkeypatch.setattr("raymm.kernels.blas.library", lambda: library)
        rng = np.random.default_rng(1)
        operands = [
            rng.normal(size=(rows, 5000)).astype(np.float32),
            rng.normal(size=(5000, 700)).astype(np.float32),
        ]
        found = []
        for threads in (1, 2):
            with raymm.LocalEngine(threads=threads) as engine:
                found.append(raymm.multi_dot(operands, tile_columns=300, engine=engine))
        np.testing.assert_array_equal(*found)


def test_u19_boolean_product_differs_by_back_end(engine, kind):
    left = np.array([[1, 0, 1], [0, 0, 1]], bool)
    product = raymm.multi_dot(kind([left, np.eye(3, dtype=bool), left.T]), engine=engine)
    assert product.tolist() == [[2, 1], [1, 1]]
    assert product.dtype == np.int64
    square = np.array([[1, 0, 1], [0, 1, 0], [1, 1, 0]], bool)
    other = np.array([[1, 0], [1, 1], [0, 1]], bool)
    product = raymm.multi_dot(kind([square, other]), engine=engine)
    assert product.tolist() == [[1, 1], [1, 1], [2, 1]]
    assert product.dtype == np.int64


@pytest.mark.parametrize("dtype", [np.float64, np.float16, np.int8, bool])
@pytest.mark.parametrize(
    ("shapes", "shape"),
    [(((4, 0), (0, 0), (0, 4)), (4, 4)), (((4, 0), (0, 5), (5, 7)), (4, 7))],
    ids=["three empty", "one empty"],
)
def test_u31_zero_length_inner_dimension(engine, tmp_path, shapes, shape, dtype):
    operands = [np.ones(each, dtype) for each in shapes]
    memory = raymm.multi_dot(operands, engine=engine)
    out = np.full(shape, 7, memory.dtype)
    raymm.multi_dot(operands, out=out, engine=engine)
    file = raymm.multi_dot(operands, out=tmp_path / "D.npy", engine=engine)
    fortran = raymm.multi_dot(
        operands, out=raymm.Npy(tmp_path / "F.npy", order="F"), tile_columns=2, engine=engine
    )
    for product in (memory, out, file, np.load(tmp_path / "D.npy"), fortran):
        assert product.shape == shape
        assert not product.any()


@pytest.mark.parametrize(
    ("shapes", "shape"),
    [(((0, 3), (3, 3), (3, 5)), (0, 5)), (((3, 3), (3, 3), (3, 0)), (3, 0))],
    ids=["no rows", "no columns"],
)
@pytest.mark.parametrize("order", ["C", "F"])
def test_u32_zero_rows_zero_columns(engine, tmp_path, shapes, shape, order):
    operands = [np.ones(each) for each in shapes]
    assert raymm.multi_dot(operands, engine=engine).shape == shape
    file = raymm.multi_dot(operands, out=raymm.Npy(tmp_path / "D.npy", order=order), engine=engine)
    assert file.shape == shape
    assert file.dtype == np.float64
    read = np.load(tmp_path / "D.npy")
    assert read.shape == shape
    assert np.load(tmp_path / "D.npy", mmap_mode="r").shape == shape


class TestU71WholeResultAskedForInMemory:
    @pytest.fixture
    def operands(self):
        shapes = ((3000, 100), (100, 100), (100, 3_600_000))
        return [np.broadcast_to(np.float32(1), shape) for shape in shapes]

    def check(self, caught):
        error = caught.value
        assert isinstance(error, MemoryError)
        assert isinstance(error, ValueError)
        assert error.projected_nbytes >= 43_200_000_000
        assert error.memory_limit == 8_000_000_000
        for part in ("43,200,000,000 bytes", "43.2 GB", "8,000,000,000", "out="):
            assert part in str(error)

    @pytest.mark.parametrize("name", ["local", "auto"])
    def test_u71_is_refused_before_anything_is_computed(self, operands, name, monkeypatch):
        def touched(*_):
            raise AssertionError("an operand was read")

        monkeypatch.setattr("raymm.sources.memory.ArraySource.load", touched)
        monkeypatch.setattr("raymm.sources.memory.ArraySource.read", touched)
        with pytest.raises(MemoryLimitError) as caught:
            raymm.chain(operands).compute(memory_limit=8_000_000_000, engine=name)
        self.check(caught)
        with pytest.raises(MemoryLimitError) as caught:
            raymm.multi_dot(operands, memory_limit="8GB", engine=name)
        self.check(caught)

    def test_u71_the_way_out_is_open(self, operands, tmp_path):
        plan = raymm.chain(operands).plan(
            tmp_path / "D.npy", memory_limit=8_000_000_000, engine="local"
        )
        assert isinstance(plan, Plan)
        plan.check_memory()


class TestU77IntegerProductsWithoutBlas:
    def test_u77_small_values_use_the_fast_arithmetic(self, local_engine):
        rng = np.random.default_rng(0)
        operands = [
            rng.integers(-999, 1000, shape).astype(np.int32)
            for shape in ((500, 500), (500, 500), (500, 2000))
        ]
        chain = raymm.chain(operands)
        plan = chain.plan(engine=local_engine)
        prepared = prepare(plan, tuple(open_source(each, "A") for each in operands))
        assert prepared.arithmetic.compute_dtype == np.float64
        product = chain.compute(engine=local_engine)
        assert product.dtype == np.int64
        rows, columns = slice(0, 500, 49), slice(0, 2000, 97)
        left, middle, right = (operand.astype(object) for operand in operands)
        expected = left[rows] @ (middle @ right[:, columns])
        np.testing.assert_array_equal(product[rows, columns].astype(object), expected)
        wide = [operand.astype(np.int64) for operand in operands]
        # All entries, by Freivalds' check with integers: a wrong one would show in some column.
        weights = rng.integers(-(2**10), 2**10, (2000, 3))
        np.testing.assert_array_equal(product @ weights, wide[0] @ (wide[1] @ (wide[2] @ weights)))

    def test_u77_sums_beyond_2_to_53_are_exact(self, engine):
        rng = np.random.default_rng(1)
        operands = [
            rng.integers(-(2**20), 2**20, (9, 7)),
            rng.integers(-(2**20), 2**20, (7, 5)),
            rng.integers(-(2**15), 2**15, (5, 40)),
        ]
        product = raymm.multi_dot(operands, tile_columns=11, engine=engine)
        exact = exact_integers(operands)
        assert max(abs(value) for value in exact.flat) > 2**53
        np.testing.assert_array_equal(product.astype(object), exact)


class TestU91ShapeErrorsEarlyAndReadable:
    @pytest.mark.parametrize(
        ("shapes", "message"),
        [
            (((2, 3), (4, 5), (5, 6)), "A (2, 3) @ B (4, 5): 3 != 4"),
            (((2, 3), (3, 4), (5, 6)), "B (3, 4) @ C (5, 6): 4 != 5"),
            (((2, 1), (3, 3)), "A (2, 1) @ B (3, 3): 1 != 3"),
        ],
        ids=["a", "b", "c"],
    )
    def test_u91_in_the_driver(self, shapes, message, tmp_path):
        operands = [np.ones(shape) for shape in shapes]
        callback = CountingCallback()
        for verb in (
            lambda: raymm.chain(operands),
            lambda: raymm.multi_dot(operands, engine=RaisingEngine(), progress=callback),
            lambda: raymm.multi_dot(operands, out=tmp_path / "D.npy", engine=RaisingEngine()),
        ):
            with pytest.raises(ShapeError) as caught:
                verb()
            assert isinstance(caught.value, ValueError)
            assert isinstance(caught.value, PlanError)
            assert message in str(caught.value)
            for name, shape in zip("ABC", shapes, strict=False):
                assert f"{name} {shape}" in str(caught.value)
        assert callback.events == []
        assert names_in(tmp_path) == []

    def test_u91_names_files_by_their_paths(self, tmp_path):
        np.save(tmp_path / "c.npy", np.ones((5, 6)))
        with pytest.raises(ShapeError, match=r"c\.npy \(6, 5\): 4 != 6"):
            raymm.chain([np.ones((3, 4)), f"{tmp_path}/c.npy.T"])
