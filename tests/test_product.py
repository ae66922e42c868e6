"""The public verbs against products that are computed otherwise: float64, and Python's integers."""

import itertools
import warnings

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import raymm
from raymm.errors import DTypeError, PlanError, ResultOverflowError, ShapeError
from tests.contracts import names_in
from tests.tolerances import assert_product, chain_product, exact_integers, reference

FLOATS = [np.float16, np.float32, np.float64, np.complex64, np.complex128]
INTEGERS = ["?", "i1", "u1", "i2", "u2", "i4", "u4", "i8", "u8"]
IN_MEMORY = {
    "C": np.ascontiguousarray,
    "F": np.asfortranarray,
    "turned": lambda values: np.ascontiguousarray(values.T).T,
    "strided": lambda values: np.repeat(values, 2, axis=-1)[..., ::2],
    "negative": lambda values: np.flip(np.flip(values).copy()),
    "readonly": lambda values: np.lib.stride_tricks.as_strided(values, writeable=False),
    "swapped": lambda values: values.astype(values.dtype.newbyteorder(">")),
}
LAYOUTS = [*IN_MEMORY, "map", "file", "file.T"]


@pytest.fixture(scope="module")
def engine():
    with raymm.LocalEngine(threads=2) as engine:
        yield engine


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("operands")


def laid_out(values, layout, folder, place):
    """Return the same values with another layout, byte order or home."""
    if layout in IN_MEMORY:
        return IN_MEMORY[layout](values)
    path = folder / f"{place}.npy"
    np.save(path, values.T if layout == "file.T" else values)
    if layout == "map":
        return np.load(path, mmap_mode="r")
    return f"{path}.T" if layout == "file.T" else path


@st.composite
def chains(draw, dtypes, largest=12):
    """Return factors of one chain: 2 to 5 matrices, the ends perhaps vectors."""
    count = draw(st.integers(2, 5))
    sizes = draw(st.lists(st.integers(1, largest), min_size=count + 1, max_size=count + 1))
    if draw(st.booleans()):
        sizes[draw(st.sampled_from([0, -1]))] = draw(st.integers(20, 300))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    factors = []
    for place, shape in enumerate(itertools.pairwise(sizes)):
        dtype = np.dtype(draw(dtypes))
        if place == 0 and shape[0] == 1 and draw(st.booleans()):
            shape = shape[1:]
        elif place == count - 1 and shape[1] == 1 and draw(st.booleans()):
            shape = shape[:1]
        factors.append(values_of(rng, shape, dtype))
    return factors


def values_of(rng, shape, dtype):
    if dtype.kind == "b":
        return rng.integers(0, 2, shape).astype(bool)
    if dtype.kind in "iu":
        low = 0 if dtype.kind == "u" else -100
        return rng.integers(low, 101, shape).astype(dtype)
    values = rng.normal(size=shape)
    if dtype.kind == "c":
        values = values + 1j * rng.normal(size=shape)
    return values.astype(dtype)


@settings(max_examples=150)
@given(st.data())
def test_floats(engine, folder, data):
    dtype = data.draw(st.sampled_from(FLOATS))
    factors = data.draw(chains(st.just(dtype)))
    layouts = [data.draw(st.sampled_from(LAYOUTS)) for _ in factors]
    operands = [
        laid_out(factor, layout, folder, place)
        for place, (factor, layout) in enumerate(zip(factors, layouts, strict=True))
    ]
    tile_columns = data.draw(st.none() | st.integers(1, 310))
    product = raymm.multi_dot(operands, tile_columns=tile_columns, engine=engine)
    assert product.dtype == dtype
    assert product.dtype.isnative
    compute = np.float32 if dtype == np.float16 else None
    assert_product(product, factors, compute=compute)


@settings(max_examples=100)
@given(st.data())
def test_integers_and_booleans_are_exact(engine, folder, data):
    factors = data.draw(chains(st.sampled_from(INTEGERS), largest=6))
    layouts = [data.draw(st.sampled_from(LAYOUTS)) for _ in factors]
    operands = [
        laid_out(factor, layout, folder, place)
        for place, (factor, layout) in enumerate(zip(factors, layouts, strict=True))
    ]
    product = raymm.multi_dot(
        operands, tile_columns=data.draw(st.none() | st.integers(1, 310)), engine=engine
    )
    kinds = {factor.dtype.kind for factor in factors}
    assert product.dtype == (np.uint64 if kinds <= set("ub") and "u" in kinds else np.int64)
    np.testing.assert_array_equal(product.astype(object), exact_integers(factors))


@settings(max_examples=50)
@given(st.data())
def test_mixed_dtypes(engine, data):
    factors = data.draw(chains(st.sampled_from(["?", "i2", "f2", "f4", "f8", "c8"])))
    product = raymm.multi_dot(factors, engine=engine)
    expected = np.result_type(*factors)
    if expected.kind in "fc":
        assert product.dtype == expected
        assert_product(product, factors, compute=np.promote_types(expected, np.float32))
    else:
        np.testing.assert_array_equal(product.astype(object), exact_integers(factors))


@settings(max_examples=40)
@given(st.data())
def test_the_transpose(engine, data):
    factors = data.draw(chains(st.just(np.float64)))
    chain = raymm.chain(factors)
    turned = chain.T
    assert turned.shape == chain.shape[::-1]
    assert_product(turned.compute(engine=engine), [factor.T for factor in reversed(factors)])
    assert turned.T.shape == chain.shape


@settings(max_examples=60)
@given(st.data())
def test_files_in_either_order(engine, tmp_path_factory, data):
    dtype = data.draw(st.sampled_from(FLOATS))
    factors = data.draw(chains(st.just(dtype)))
    order = data.draw(st.sampled_from(["C", "F"]))
    path = tmp_path_factory.mktemp("out") / "D.npy"
    tile_columns = data.draw(st.none() | st.integers(1, 310))
    mapped = raymm.multi_dot(
        factors, out=raymm.Npy(path, order=order), tile_columns=tile_columns, engine=engine
    )
    assert isinstance(mapped, np.memmap)
    read = np.load(path)
    np.testing.assert_array_equal(mapped, read)
    assert read.dtype == dtype
    assert_product(read, factors, compute=np.float32 if dtype == np.float16 else None)


@settings(max_examples=60)
@given(st.data())
def test_out_of_any_strides(engine, data):
    factors = data.draw(chains(st.just(np.float64)))
    shape = chain_product(factors).shape
    steps = [data.draw(st.sampled_from([1, 2, -1, -3])) for _ in shape]
    whole = np.full([length * abs(step) for length, step in zip(shape, steps, strict=True)], 7.0)
    out = whole[(*(slice(None, None, step) for step in steps), ...)]
    out = out.T.copy().T if data.draw(st.booleans()) and shape else out
    result = raymm.multi_dot(factors, out=out, engine=engine)
    assert result is out
    assert_product(out, factors)


@pytest.mark.parametrize("wanted", [np.float16, np.float32, np.float64, np.complex64])
def test_dtype_of_the_result(engine, wanted):
    rng = np.random.default_rng(0)
    factors = [rng.normal(size=(4, 30)), rng.normal(size=(30, 50))]
    product = raymm.multi_dot(factors, dtype=wanted, engine=engine)
    assert product.dtype == wanted
    exact, _ = reference(factors)
    # Accumulated in float64, rounded once at the end.
    np.testing.assert_allclose(product, exact, rtol=2 * np.finfo(wanted).eps, atol=1e-7)


def test_a_wider_dtype_widens_the_arithmetic(engine):
    factors = [np.full((1, 3), 2**24, np.float32), np.array([[1], [2.0**-24], [1]], np.float32)]
    narrow = raymm.multi_dot(factors, engine=engine)
    wide = raymm.multi_dot(factors, dtype=np.float64, engine=engine)
    assert wide.dtype == np.float64
    assert wide[0, 0] == 2**25 + 1
    assert narrow.dtype == np.float32


@pytest.mark.parametrize("wanted", ["i1", "u1", "i2", "u4", "f4", "f8"])
def test_integers_are_narrowed_at_the_end(engine, wanted):
    factors = [np.array([[100, 100]], np.int8), np.array([[1, 0], [0, 1]], np.int8)]
    product = raymm.multi_dot(factors, dtype=wanted, engine=engine)
    assert product.dtype == np.dtype(wanted)
    assert product.tolist() == [[100, 100]]


@pytest.mark.parametrize(
    ("value", "wanted"), [(128, "i1"), (-1, "u8"), (2**31, "i4"), (256, "u1"), (70_000, "f2")]
)
def test_values_that_do_not_fit_are_an_error(engine, tmp_path, value, wanted):
    factors = [np.array([[1]]), np.array([[0, 0, value]])]
    for out in (None, tmp_path / "D.npy"):
        with pytest.raises(ResultOverflowError, match=np.dtype(wanted).name):
            raymm.multi_dot(factors, dtype=wanted, out=out, tile_columns=1, engine=engine)
    assert names_in(tmp_path) == []


def test_a_float_that_overflows_an_explicit_dtype_is_an_error(engine):
    factors = [np.array([[1e200]]), np.array([[1e200, 1.0]])]
    assert np.isinf(raymm.multi_dot(factors, engine=engine)[0, 0])  # IEEE, in the natural dtype
    with pytest.raises(ResultOverflowError):
        raymm.multi_dot([np.array([[1e30]]), np.array([[1e30]])], dtype="f4", engine=engine)


class TestPrecision:
    FACTORS = (
        np.array([[1 + 2.0**-12, 1.0]], np.float32),
        np.array([[1 + 2.0**-12], [4097.0]], np.float32),
    )

    def test_strict_keeps_float32(self, engine):
        ones = [np.eye(1, dtype=np.float32), np.array([[1024.5, 2049, 4097]], np.float32)]
        product = raymm.multi_dot(ones, engine=engine)
        assert product.tolist() == [[1024.5, 2049, 4097]]

    def test_bf16_rounds_the_operands_and_says_so_by_its_values(self, engine):
        ones = [np.eye(1, dtype=np.float32), np.array([[1024.5, 2049, 4097]], np.float32)]
        product = raymm.multi_dot(ones, precision="bf16", engine=engine)
        assert product.dtype == np.float32
        assert product.tolist() == [[1024, 2048, 4096]]

    @pytest.mark.parametrize("inner", [3, 50, 5000])
    def test_bf16_stays_within_its_bound(self, engine, inner):
        rng = np.random.default_rng(0)
        factors = [
            rng.normal(size=(5, inner)).astype(np.float32),
            rng.normal(size=(inner, 7)).astype(np.float32),
            rng.normal(size=(7, 40)).astype(np.float32),
        ]
        product = raymm.multi_dot(factors, precision="bf16", engine=engine)
        assert_product(product, factors, compute=np.float32, bfloat16_roundings=len(factors))

    def test_bf16_leaves_the_operands_alone(self, engine):
        factors = [factor.copy() for factor in self.FACTORS]
        raymm.multi_dot(factors, precision="bf16", engine=engine)
        for factor, before in zip(factors, self.FACTORS, strict=True):
            np.testing.assert_array_equal(factor, before)

    def test_float64_accumulates_in_float64(self, engine):
        factors = [
            np.array([[2.0**24, 1, -(2.0**24)]], np.float32),
            np.ones((3, 1), np.float32),
        ]
        product = raymm.multi_dot(factors, precision="float64", engine=engine)
        assert product.dtype == np.float32
        assert product.tolist() == [[1]]

    def test_tf32_is_float32_on_a_processor(self, engine):
        ones = [np.eye(1, dtype=np.float32), np.array([[1024.5, 2049, 4097]], np.float32)]
        assert raymm.multi_dot(ones, precision="tf32", engine=engine).tolist() == [
            [1024.5, 2049, 4097]
        ]

    @pytest.mark.parametrize("precision", ["strict", "tf32", "bf16", "float64"])
    def test_integers_stay_exact_whatever_the_precision(self, engine, precision):
        factors = [np.array([[4097, 2**40 + 1]]), np.array([[4097], [3]])]
        product = raymm.multi_dot(factors, precision=precision, engine=engine)
        assert product.tolist() == [[4097 * 4097 + 3 * (2**40 + 1)]]

    def test_torch_settings_of_the_caller_stay(self, engine):
        import torch  # noqa: PLC0415  two seconds, for this test only

        def settings():
            return (
                torch.get_num_threads(),
                torch.get_float32_matmul_precision(),
                torch.backends.cuda.matmul.allow_tf32,
                torch.get_default_dtype(),
            )

        before = settings()
        for precision in ("strict", "tf32", "bf16", "float64"):
            raymm.multi_dot(list(self.FACTORS), precision=precision, engine=engine)
        assert settings() == before


class TestNaN:
    @pytest.mark.parametrize("tile_columns", [None, 1, 3])
    @pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
    def test_stays_in_its_column(self, engine, value, tile_columns):
        right = np.ones((3, 10), np.float32)
        right[1, 4] = value
        left = np.ones((5, 3), np.float32)
        product = raymm.multi_dot([left, right], tile_columns=tile_columns, engine=engine)
        np.testing.assert_array_equal(product[:, 4], np.full(5, value + 2))
        assert (np.delete(product, 4, axis=1) == 3).all()

    def test_a_dense_zero_times_infinity_is_nan(self, engine):
        product = raymm.multi_dot([np.zeros((1, 2)), np.full((2, 3), np.inf)], engine=engine)
        assert np.isnan(product).all()


class TestChain:
    def test_describes_itself_without_reading(self, tmp_path):
        np.save(tmp_path / "C.npy", np.ones((2, 9), np.float32))
        chain = raymm.chain([np.ones((3, 2), np.float32), tmp_path / "C.npy"])
        (tmp_path / "C.npy").unlink()
        assert chain.shape == (3, 9)
        assert chain.dtype == np.float32
        for part in ("Chain", "(3, 2)", "(2, 9)", "(3, 9)", "float32"):
            assert part in repr(chain)

    def test_vectors_follow_numpy(self, engine):
        rng = np.random.default_rng(0)
        vector, matrix, other = rng.normal(size=3), rng.normal(size=(3, 4)), rng.normal(size=4)
        for operands in ([vector, matrix], [matrix, other], [vector, matrix, other]):
            chain = raymm.chain(operands)
            expected = chain_product(operands)
            assert chain.shape == expected.shape
            np.testing.assert_allclose(chain.compute(engine=engine), expected)
        square = raymm.multi_dot([vector, vector], engine=engine)
        np.testing.assert_allclose(square, vector @ vector)

    def test_transpose_of_any_operand(self, engine, tmp_path):
        import torch  # noqa: PLC0415  two seconds, for this test only

        values = np.arange(6.0).reshape(2, 3)
        np.save(tmp_path / "A.npy", values)
        operands = [
            values,
            tmp_path / "A.npy",
            np.load(tmp_path / "A.npy", mmap_mode="r"),
            torch.from_numpy(values),
        ]
        for operand in operands:
            turned = raymm.transpose(operand)
            product = raymm.multi_dot([turned, np.eye(2)], engine=engine)
            np.testing.assert_array_equal(product, values.T)

    def test_the_operand_may_change_between_chain_and_verb(self, engine):
        left = np.eye(2)
        chain = raymm.chain([left, np.ones((2, 3))])
        left[...] = 2 * np.eye(2)
        assert (chain.compute(engine=engine) == 2).all()

    def test_results_do_not_share_memory(self, engine):
        chain = raymm.chain([np.eye(2), np.ones((2, 3))])
        first, second = chain.compute(engine=engine), chain.compute(engine=engine)
        first[...] = 7
        assert (second == 1).all()
        assert second.flags.writeable

    def test_ten_factors_and_more_than_the_alphabet(self, engine):
        rng = np.random.default_rng(0)
        factors = [rng.integers(-1, 2, (2, 2)) for _ in range(30)]
        product = raymm.multi_dot(factors, engine=engine)
        np.testing.assert_array_equal(product.astype(object), exact_integers(factors))
        factors[28] = np.ones((3, 2))
        with pytest.raises(ShapeError, match="operand 28"):
            raymm.chain(factors)

    def test_plan_and_run_agree_on_the_grid(self, engine):
        seen = []
        chain = raymm.chain([np.ones((4, 3)), np.ones((3, 1000))])
        plan = chain.plan(tile_columns=300, engine=engine)
        chain.compute(
            tile_columns=300,
            engine=engine,
            progress=lambda event: seen.append(getattr(event, "tile", None)),
        )
        assert sorted(filter(None, seen), key=lambda tile: tile.start) == list(plan.grid)

    def test_no_option_is_passed_through(self):
        chain = raymm.chain([np.eye(2), np.eye(2)])
        for verb in (chain.compute, chain.plan, chain.write, chain.run):
            with pytest.raises(TypeError, match="workers"):
                verb(workers=3)
        with pytest.raises(TypeError, match="workers"):
            raymm.multi_dot([np.eye(2), np.eye(2)], workers=3)

    def test_no_warning_for_any_layout(self, engine, folder):
        values = np.arange(6.0).reshape(2, 3)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for place, layout in enumerate(LAYOUTS):
                operand = laid_out(values, layout, folder, f"warning{place}")
                raymm.multi_dot([operand, np.eye(3)], engine=engine)
                raymm.multi_dot([np.eye(2), operand], engine=engine)


def test_engines_by_name(tmp_path):
    np.testing.assert_array_equal(
        raymm.multi_dot([np.eye(2), np.ones((2, 3))], engine="local"), np.ones((2, 3))
    )
    with pytest.raises(PlanError, match="engine='spark'"):
        raymm.multi_dot([np.eye(2), np.ones((2, 3))], engine="spark")


def test_masked_and_object_arrays(engine):
    with pytest.raises(DTypeError, match="masked"):
        raymm.multi_dot([np.ma.masked_less(np.eye(2), 1), np.eye(2)], engine=engine)
    with pytest.raises(DTypeError, match="object"):
        raymm.multi_dot([np.eye(2), np.eye(2).astype(object)], engine=engine)
    with pytest.raises(DTypeError, match="A has dtype"):
        raymm.multi_dot([[["a", "b"]], np.eye(2)], engine=engine)
