import numpy as np
import pytest

from raymm.errors import ResultOverflowError
from raymm.kernels import cpu
from raymm.kernels.cpu import Arithmetic, CpuKernel, Lane, narrow
from raymm.kernels.fold import serially
from raymm.tiles import PAGE_NBYTES, Bounds, Layout
from tests.tolerances import assert_product

ORDERS = ["C", "F"]


def arithmetic(compute, output=None, **flags):
    return Arithmetic(np.dtype(compute), np.dtype(output or compute), **flags)


def layout_of(order, rows, columns, dtype):
    item = np.dtype(dtype).itemsize
    if order == "C":
        return Layout("C", 1, PAGE_NBYTES, columns * item, item)
    return Layout("F", 1, PAGE_NBYTES, item, rows * item)


def block(kernel, tile, bounds, start=0):
    operand = kernel.stage_in(tile, serially)
    lane = Lane()
    return kernel.stage_out(kernel.multiply(operand, bounds, start, lane), bounds, lane)


TILES = {
    "plain": lambda tile: tile,
    "turned": np.asfortranarray,
    "negative": lambda tile: tile[::-1, ::-1].copy()[::-1, ::-1],
    "strided": lambda tile: np.repeat(np.repeat(tile, 2, 0), 3, 1)[::2, ::3],
    "broadcast": lambda tile: np.broadcast_to(tile[:1], tile.shape),
    "swapped": lambda tile: tile.astype(tile.dtype.newbyteorder(">")),
    "unaligned": lambda tile: unaligned(tile),
    "readonly": lambda tile: readonly(tile),
    "wider": lambda tile: tile.astype(np.float64),
}


def unaligned(tile):
    memory = np.empty(tile.nbytes + 1, np.uint8)
    view = np.frombuffer(memory.data, tile.dtype, offset=1, count=tile.size).reshape(tile.shape)
    np.copyto(view, tile)
    assert not view.flags.aligned
    return view


def readonly(tile):
    tile = tile.copy()
    tile.flags.writeable = False
    return tile


@pytest.mark.parametrize("kind", TILES)
@pytest.mark.parametrize("order", ORDERS)
def test_tiles_of_every_layout(kind, order):
    rng = np.random.default_rng(0)
    factor = rng.normal(size=(6, 5)).astype(np.float32)
    tile = TILES[kind](rng.normal(size=(5, 8)).astype(np.float32))
    kernel = CpuKernel((factor,), arithmetic(np.float32), layout_of(order, 6, 100, np.float32))
    computed = block(kernel, tile, Bounds(1, 5, 42, 47), start=40)
    assert computed.dtype == np.float32
    assert_product(computed, [factor[1:5], tile[:, 2:7].astype(np.float32)])


@pytest.mark.parametrize("order", ORDERS)
def test_factors_kept_apart(order):
    rng = np.random.default_rng(0)
    factors = (rng.normal(size=(20, 2)), rng.normal(size=(2, 9)), rng.normal(size=(9, 4)))
    tile = rng.normal(size=(4, 7))
    kernel = CpuKernel(factors, arithmetic(np.float64), layout_of(order, 20, 7, np.float64))
    assert_product(block(kernel, tile, Bounds(0, 20, 0, 7)), [*factors, tile])


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("output", [np.float32, np.float16])
def test_blocks_are_congruent_with_the_output_along_its_runs(order, output, monkeypatch):
    monkeypatch.setattr(cpu, "SMALLEST_CONGRUENT_RUN", 0)
    layout = layout_of(order, 10, 3000, output)
    kernel = CpuKernel((np.ones((10, 2)),), arithmetic(np.float32, output), layout)
    bounds = Bounds(3, 7, 1000, 2500)
    computed = block(kernel, np.ones((2, 3000), np.float32), bounds)
    lines = computed if order == "C" else computed.T
    assert lines.strides[1] == lines.itemsize
    pitch = layout.row_nbytes if order == "C" else layout.column_nbytes
    for place, line in enumerate(lines):
        position = layout.position(bounds.row_start, bounds.column_start) + place * pitch
        assert (line.__array_interface__["data"][0] - position) % PAGE_NBYTES == 0


def test_caller_s_factors_stay_as_they_are():
    factor = np.full((3, 2), 1 + 2.0**-10, np.float32)
    factor.flags.writeable = False
    kernel = CpuKernel(
        (factor,),
        arithmetic(np.float32, rounds_to_bfloat16=True),
        layout_of("C", 3, 4, np.float32),
    )
    computed = block(kernel, np.ones((2, 4), np.float32), Bounds(0, 3, 0, 4))
    np.testing.assert_array_equal(computed, np.full((3, 4), 2.0))
    assert (factor == 1 + 2.0**-10).all()


def test_caller_s_tile_stays_as_it_is_when_it_is_rounded():
    tile = np.full((2, 4), 1 + 2.0**-10, np.float32)
    kernel = CpuKernel(
        (np.ones((3, 2), np.float32),),
        arithmetic(np.float32, rounds_to_bfloat16=True),
        layout_of("C", 3, 4, np.float32),
    )
    np.testing.assert_array_equal(block(kernel, tile, Bounds(0, 3, 0, 4)), np.full((3, 4), 2.0))
    assert (tile == 1 + 2.0**-10).all()


def test_float16_is_rounded_once_at_the_end():
    # In float16 the sum of 2049 ones stays at 2048; 2049 + 2 = 2051 rounds to 2052.
    kernel = CpuKernel(
        (np.ones((1, 2051)),),
        arithmetic(np.float32, np.float16),
        layout_of("C", 1, 1, np.float16),
    )
    computed = block(kernel, np.ones((2051, 1), np.float16), Bounds(0, 1, 0, 1))
    assert computed.dtype == np.float16
    assert computed[0, 0] == 2052


@pytest.mark.parametrize(
    ("value", "dtype"),
    [
        (128.0, np.int8),
        (-129.0, np.int8),
        (-1.0, np.uint64),
        (256.0, np.uint8),
        (70_000.0, np.float16),
        (1e39, np.float32),
        (1e39 + 1j, np.complex64),
    ],
)
def test_narrowing_that_loses_a_value(value, dtype):
    product = np.array([[0, value]])
    with pytest.raises(ResultOverflowError, match=np.dtype(dtype).name):
        narrow(product, np.empty((1, 2), dtype), True)


def test_narrowing_of_integers_beyond_2_to_53_is_exact():
    product = np.array([[2**53 + 1, -(2**31)]])
    with pytest.raises(ResultOverflowError):
        narrow(product, np.empty((1, 2), np.int32), True)
    block = np.empty((1, 2), np.int32)
    narrow(np.array([[2**31 - 1, -(2**31)]]), block, True)
    assert block.tolist() == [[2**31 - 1, -(2**31)]]


def test_int64_edges_are_not_rounded_away():
    narrowed = np.empty((1, 2), np.uint64)
    narrow(np.array([[2**63 - 1, 0]]), narrowed, True)
    assert narrowed.tolist() == [[2**63 - 1, 0]]


def test_infinities_that_were_there_before_are_no_overflow():
    narrowed = np.empty((1, 3), np.float16)
    narrow(np.array([[np.inf, -np.inf, np.nan]]), narrowed, True)
    np.testing.assert_array_equal(narrowed, [[np.inf, -np.inf, np.nan]])


def test_without_a_check_half_precision_becomes_infinite():
    narrowed = np.empty((1, 2), np.float16)
    narrow(np.array([[70_000.0, -70_000.0]], np.float32), narrowed, False)
    np.testing.assert_array_equal(narrowed, [[np.inf, -np.inf]])


@pytest.mark.parametrize("order", ORDERS)
def test_short_rows_are_packed(order):
    # Padding 800-byte runs to a page each would take five times the memory that the plan counts.
    layout = layout_of(order, 3000, 3000, np.float64)
    kernel = CpuKernel((np.ones((3000, 2)),), arithmetic(np.float64), layout)
    computed = block(kernel, np.ones((2, 3000)), Bounds(0, 100, 0, 100))
    lines = computed if order == "C" else computed.T
    assert lines.flags.c_contiguous
