"""Right results pass, wrong ones do not, whatever the dtype; expectations come from NumPy alone."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import raymm
from raymm import verification
from raymm.arrangement import as_canonical
from raymm.errors import DTypeError, ShapeError, SourceError, VerificationError
from raymm.sources import open_source
from raymm.verification import check_file, check_product, check_source
from tests.doubles import FlakySource

ROWS, INNER, COLUMNS = 24, 10, 3000
FLOATS = ["float16", "float32", "float64", "complex64", "complex128"]
INTEGERS = ["bool", "int8", "uint16", "int64", "uint64"]


def operands(dtype, *shapes, seed=0):
    """Return random matrices of a dtype."""
    generator, made = np.random.default_rng(seed), []
    for shape in shapes or ((ROWS, INNER), (INNER, INNER), (INNER, COLUMNS)):
        kind = np.dtype(dtype).kind
        if kind == "c":
            values = generator.standard_normal(shape) + 1j * generator.standard_normal(shape)
        elif kind == "f":
            values = generator.standard_normal(shape)
        else:
            values = generator.integers(-9 if kind == "i" else 0, 2 if kind == "b" else 10, shape)
        made.append(values.astype(dtype))
    return made


def canonical(chain):
    """Return a chain's operands with the huge one last."""
    return as_canonical(chain._sources, chain._chained.is_transposed)


def multiply(factors):
    """Return the product as a right run would have it, with NumPy alone."""
    result = np.result_type(*factors)
    wide = np.float32 if result == np.float16 else result if result.kind in "fc" else np.int64
    product = factors[0].astype(wide)
    for factor in factors[1:]:
        product = product @ factor.astype(wide)
    return product.astype(result if result.kind in "fc" else "u8" if result.kind == "u" else "i8")


def sources(factors):
    return tuple(open_source(each, name) for each, name in zip(factors, "ABCDE", strict=False))


def zero_tile(product):
    product[:, 800:900] = 0


def wrong_tile(product):
    product[:, 800:900] = product[:, 900:1000]


def swapped_tiles(product):
    product[:, :1600] = np.roll(product[:, :1600], 800, axis=1)


def shifted_row(product):
    product[7, 800:900] = product[8, 800:900]


def shifted_rows(product):
    product[:] = np.roll(product, 1, axis=0)


def swapped_entries(product):
    # Signs alone would miss half of these: the weights differ in size as well.
    rows = [0, int(np.argmax(np.abs(product[:, 1234] - product[0, 1234])))]
    product[rows, 1234] = product[rows[::-1], 1234]


DAMAGES = [zero_tile, wrong_tile, swapped_tiles, shifted_row, shifted_rows, swapped_entries]


def stored(product, order, storage, folder):
    """Return the product as an array or as a memory map of a file."""
    array = np.array(product, order=order)
    if storage == "array":
        return array
    np.save(folder / "D.npy", array)
    return np.load(folder / "D.npy", mmap_mode="r")


@pytest.mark.parametrize("storage", ["array", "map"])
@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("dtype", [*FLOATS, *INTEGERS])
def test_right_results_pass(dtype, order, storage, tmp_path):
    factors = operands(dtype)
    view = stored(multiply(factors), order, storage, tmp_path)
    residual = check_product(view, sources(factors), "strict")
    assert 0 < residual <= 1 if np.dtype(dtype).kind in "fc" else residual == 0


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("dtype", [*FLOATS, *INTEGERS])
def test_damage_is_found(dtype, order, damage):
    factors = operands(dtype)
    product = np.array(multiply(factors), order=order)
    right = product.copy()
    damage(product)
    assert (product != right).any()
    with pytest.raises(VerificationError, match=r"^D is not A \(24, 10\) @ B .*: D\[\d+, \d+\] is"):
        check_product(product, sources(factors), "strict")


@given(
    lengths=st.tuples(*map(st.integers, (0, 0, 0, 0), (6, 5, 5, 40))),
    dtype=st.sampled_from([*FLOATS, *INTEGERS]),
    order=st.sampled_from("CF"),
    seed=st.integers(0, 99),
)
def test_right_results_of_any_shape_pass(lengths, dtype, order, seed):
    factors = operands(dtype, *itertools.pairwise(lengths), seed=seed)
    view = np.array(multiply(factors), order=order)
    assert check_product(view, sources(factors), "strict") <= 1


def test_two_factors():
    factors = operands("float32", (ROWS, INNER), (INNER, COLUMNS))
    assert check_product(multiply(factors), sources(factors), "strict") <= 1


def test_several_panels_and_blocks_say_the_same(monkeypatch):
    factors = operands("float32")
    product = multiply(factors)
    whole = check_product(product, sources(factors), "strict")
    monkeypatch.setattr(verification, "RUN_NBYTES", 4 * 37)
    monkeypatch.setattr(verification, "BLOCK_NBYTES", 4 * 37 * 5)
    for order in "CF":
        found = check_product(np.array(product, order=order), sources(factors), "strict")
        assert found == pytest.approx(whole, rel=1e-6)
    product[3, 2999] += 1
    with pytest.raises(VerificationError, match="1 of 3,000 columns are off, from column 2999"):
        check_product(product, sources(factors), "strict")


def test_one_wrong_entry_of_an_integer_result_is_found():
    factors = [each * 10**5 for each in operands("int64")]
    product = multiply(factors)
    assert np.abs(product).max() > 2**53
    assert check_product(product, sources(factors), "strict") == 0
    product[5, 1717] += 1
    expected = product[5, 1717] - 1
    with pytest.raises(VerificationError) as raised:
        check_product(product, sources(factors), "strict")
    assert f"D[5, 1717] is {expected + 1}, expected {expected};" in str(raised.value)


@pytest.mark.parametrize("dtype", ["int16", "int32", "float32", "float64"])
def test_integers_converted_at_the_end(dtype):
    factors = operands("int8")
    product = multiply(factors).astype(dtype)
    assert check_product(product, sources(factors), "strict") <= 1
    product[5, 1717] += 1
    with pytest.raises(VerificationError, match=r"D\[5, 1717\]"):
        check_product(product, sources(factors), "strict")


def test_narrowed_floats():
    factors = operands("float64")
    product = multiply(factors).astype(np.float32)
    assert check_product(product, sources(factors), "strict") <= 1
    zero_tile(product)
    with pytest.raises(VerificationError):
        check_product(product, sources(factors), "strict")


def test_tall_results_are_described_as_the_user_sees_them():
    factors = operands("float32")
    product = multiply(factors)
    product[3, 1500] += 50
    with pytest.raises(VerificationError) as raised:
        check_product(product, sources(factors), "strict", is_transposed=True)
    assert "D is not C (3000, 10) @ B (10, 10) @ A (10, 24): D[1500, 3] is " in str(raised.value)
    assert "1 of 3,000 rows are off, from row 1500 to 1500" in str(raised.value)


def to_bfloat16(values):
    bits = values.view(np.uint32) + np.uint32(0x8000)
    return (bits & np.uint32(0xFFFF0000)).view(np.float32)


def test_bfloat16_arithmetic_is_allowed_its_errors_and_no_more():
    left, right = operands("float32", (ROWS, INNER), (INNER, COLUMNS))
    product = to_bfloat16(left) @ to_bfloat16(right)
    assert check_product(product, sources([left, right]), "bf16") <= 1
    with pytest.raises(VerificationError):
        check_product(product, sources([left, right]), "strict")
    zero_tile(product)
    with pytest.raises(VerificationError):
        check_product(product, sources([left, right]), "bf16")


def test_factors_kept_apart():
    factors = operands("float32", (200, 3), (3, 200), (200, COLUMNS))
    product = factors[0] @ (factors[1] @ factors[2])
    assert check_product(product, sources(factors), "strict") <= 1
    rounded = [to_bfloat16(factor) for factor in factors]
    product = rounded[0] @ (rounded[1] @ rounded[2])
    assert check_product(product, sources(factors), "bf16") <= 1
    zero_tile(product)
    with pytest.raises(VerificationError):
        check_product(product, sources(factors), "bf16")


def test_errors_that_go_all_one_way_are_no_reason():
    """The bound of the sums takes errors as independent; only the bound of entries holds always."""
    left, right = np.full((30, 4000), 0.1, np.float32), np.full((4000, 40), 0.1, np.float32)
    exact = left.astype("f8") @ right.astype("f8")
    largest = 4000 * 2.0**-24
    product = (exact * (1 + 0.9 * largest)).astype("f4")
    findings = check_source(open_source(product, "D"), sources([left, right]), "strict")
    assert 0.8 < findings.residual <= 1
    assert findings.sampled > verification.SAMPLES  # some were suspected, and cleared
    product = (exact * (1 + 1.2 * largest)).astype("f4")
    with pytest.raises(VerificationError):
        check_product(product, sources([left, right]), "strict")


def test_a_long_inner_dimension_is_held_to_the_precision_of_its_parts():
    inner = 2**20
    left, right = np.full((3, inner), 0.1, np.float32), np.full((inner, 4), 0.1, np.float32)
    exact = left.astype("f8") @ right.astype("f8")
    assert check_product(exact.astype("f4"), sources([left, right]), "strict") <= 1
    terms = np.full(inner, np.float32(0.1) * np.float32(0.1), np.float32)
    plain = np.add.accumulate(terms)[-1]  # a plain float32 sum
    assert abs(plain / exact[0, 0] - 1) > 1e-3
    with pytest.raises(VerificationError):
        check_product(np.full((3, 4), plain, "f4"), sources([left, right]), "strict")


def test_an_empty_sum_is_zero():
    factors = operands("float32", (4, 3), (3, 0), (0, 50))
    product = np.zeros((4, 50), np.float32)
    assert check_product(product, sources(factors), "strict") == 0
    product[1, 20] = 1e-30
    with pytest.raises(VerificationError, match=r"D\[1, 20\]"):
        check_product(product, sources(factors), "strict")


def test_small_numbers_may_underflow():
    factors = [each * np.float32(1e-20) for each in operands("float32")]
    factors[2] *= np.float32(1e20)
    product = multiply(factors)
    assert 0 < np.abs(product).max() < np.finfo(np.float32).tiny
    assert check_product(product, sources(factors), "strict") <= 1


def with_infinities():
    factors = operands("float32")
    factors[2][4, 100:200], factors[2][0, 400] = np.nan, np.inf
    with np.errstate(invalid="ignore"):
        return factors, multiply(factors)


def test_nan_and_infinities_must_be_where_they_belong():
    factors, product = with_infinities()
    findings = check_source(open_source(product, "D"), sources(factors), "strict")
    assert findings.unjudged == 101
    assert findings.sampled == verification.SAMPLES + verification.STRANGERS
    zero_tile(product)
    with pytest.raises(VerificationError, match="100 of 3,000 columns"):
        check_product(product, sources(factors), "strict")


@pytest.mark.parametrize("value", [np.nan, np.inf, 0.0])
def test_a_wrong_column_that_is_not_finite_is_found(value):
    factors, product = with_infinities()
    product[:, 1000 if value else 150] = value
    with pytest.raises(VerificationError):
        check_product(product, sources(factors), "strict")


def test_a_row_of_nan_hides_no_other():
    factors = operands("float32")
    factors[0][5, 5] = np.nan
    product = multiply(factors)
    assert check_product(product, sources(factors), "strict") <= 1
    product[6, 1234] += 10
    with pytest.raises(VerificationError, match=r"D\[6, 1234\]"):
        check_product(product, sources(factors), "strict")


def test_half_precision_may_overflow_where_the_product_does():
    factors = [each * np.float16(30) for each in operands("float16")]
    with np.errstate(over="ignore"):
        product = multiply(factors)
    assert np.isinf(product).any()
    assert np.isfinite(product).any()
    assert check_product(product, sources(factors), "strict") <= 1
    product[:] = np.inf
    with pytest.raises(VerificationError):
        check_product(product, sources(factors), "strict")


def test_a_file_that_is_cut_short_is_an_error(tmp_path):
    factors = operands("float32")
    view = stored(multiply(factors), "C", "map", tmp_path)
    with (tmp_path / "D.npy").open("r+b") as file:
        file.truncate(1000)
    with pytest.raises(SourceError, match="cut short"):
        check_product(view, sources(factors), "strict")


def test_what_a_source_raises_is_raised():
    *small, huge = operands("float32")
    given = (*sources(small), FlakySource(huge, "C", broken=0))
    with pytest.raises(OSError, match="unreadable"):
        check_product(multiply([*small, huge]), given, "strict")


def test_memory_stays_flat(run_python, tmp_path):
    np.save(tmp_path / "C.npy", np.random.default_rng(0).standard_normal((1, 60_000), "f4"))
    code = """
import numpy as np, resource
import raymm
from raymm.arrangement import as_canonical
from raymm.verification import check_product
left = np.ones((1000, 1), "f4")
D = raymm.multi_dot([left, "C.npy"], out="D.npy", engine="local", memory_limit="50MB")
chain = raymm.chain([left, "C.npy"])
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
check_product(D, as_canonical(chain._sources, chain._chained.is_transposed), "strict")
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""
    assert int(run_python(code)) < 64 * 1024  # kB, for a file of 240 MB


@pytest.mark.parametrize(
    "shapes",
    [
        ((ROWS, INNER), (INNER, 300)),
        ((300, INNER), (INNER, ROWS)),
        ((INNER,), (INNER, 300)),
        ((300, INNER), (INNER,)),
        ((INNER,), (INNER,)),
    ],
)
def test_files_of_every_orientation(shapes, tmp_path):
    factors = operands("float64", *shapes)
    product = np.asarray(factors[0] @ factors[1])
    chain, path = raymm.chain(factors), str(tmp_path / "D.npy")
    np.save(path, product)
    findings = check_file(path, chain._chained, canonical(chain), "strict")
    assert findings.residual <= 1
    assert findings.columns == max(product.shape, default=1)
    np.save(path, product + 1)
    with pytest.raises(VerificationError, match="check the names"):
        check_file(path, chain._chained, canonical(chain), "strict")


def test_files_of_another_shape_or_kind_are_refused(tmp_path):
    factors = operands("complex64")
    chain, path = raymm.chain(factors), str(tmp_path / "D.npy")
    product = multiply(factors)
    np.save(path, product.T)
    with pytest.raises(
        ShapeError, match=r"\(3000, 24\) is not of the product's shape \(24, 3000\)"
    ):
        check_file(path, chain._chained, canonical(chain), "strict")
    np.save(path, product.real)
    with pytest.raises(DTypeError):
        check_file(path, chain._chained, canonical(chain), "strict")


class ForgetfulNpy(raymm.Npy):
    """A file sink that loses one tile."""

    def write(self, block):
        return None if block.tile.index == 1 else super().write(block)


def test_a_run_that_fails_its_check_leaves_nothing(tmp_path):
    factors = operands("float32")
    sink = ForgetfulNpy(tmp_path / "D.npy")
    with pytest.raises(VerificationError, match=r"1,000 of 3,000 columns .* 1000 to 1999"):
        raymm.multi_dot(factors, out=sink, tile_columns=1000, engine="local", verify=True)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("order", ["C", "F"])
def test_a_run_that_passes_its_check_tells_the_residual(order, tmp_path):
    events = []
    raymm.multi_dot(
        operands("float32"),
        out=raymm.Npy(tmp_path / "D.npy", order=order),
        engine="local",
        verify=True,
        progress=events.append,
    )
    assert 0 < events[-1].residual <= 1
