import numpy as np
import pytest

from raymm.errors import PlanError
from raymm.memory import LONG_INNER, format_nbytes, parse_nbytes, tile_cost
from raymm.tiles import PAGE_NBYTES, Grid


@pytest.mark.parametrize(
    ("value", "nbytes"),
    [
        (1, 1),
        (43_200_000_000, 43_200_000_000),
        (np.int64(5), 5),
        ("100", 100),
        ("8GiB", 8 * 2**30),
        ("8 gib", 8 * 2**30),
        ("500MB", 500_000_000),
        ("500 M", 500_000_000),
        (" 1.5k ", 1500),
        (".5KiB", 512),
        ("2TB", 2 * 10**12),
    ],
)
def test_sizes(value, nbytes):
    assert parse_nbytes(value) == nbytes


@pytest.mark.parametrize("value", ["", "GiB", "1 XB", "1e9", "-1", "1,000", 0, -5, "0.0"])
def test_what_is_no_size(value):
    with pytest.raises(PlanError, match="memory_limit="):
        parse_nbytes(value)


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1 kB"),
        (32_000, "32 kB"),
        (999_499, "999 kB"),
        (999_999, "1 MB"),
        (43_200_000_000, "43.2 GB"),
        (5 * 10**15, "5e+03 TB"),
    ],
)
def test_format(nbytes, text):
    assert format_nbytes(nbytes) == text


def test_cost_of_the_main_job():
    # The figure of the documentation: 3000 x 100 folded, 131,072 columns, 188 rows of float32.
    grid = Grid(3000, 3_600_000, 131_072, 131_072, 188)
    cost = tile_cost(grid, ((3000, 100),), (4, 4, 4), False)
    assert cost.resident_nbytes == 3000 * 100 * 4
    assert cost.staged_nbytes == 100 * 131_072 * 4
    assert cost.inner_nbytes == 0
    # Rows may be padded to a page of the file each, and the first begins within one.
    assert cost.block_nbytes == 188 * 131_072 * 4 + 189 * PAGE_NBYTES
    assert cost.worker_nbytes(1) == (3000 * 100 + 131_072 * (100 + 188)) * 4 + 189 * PAGE_NBYTES
    assert cost.worker_nbytes(3) - cost.worker_nbytes(2) == cost.block_nbytes


def test_cost_counts_what_other_dtypes_need():
    grid = Grid(30, 1000, 100, 50, 10)
    cost = tile_cost(grid, ((30, 5), (5, 20)), (2, 4, 2), True)
    assert cost.resident_nbytes == (30 * 5 + 5 * 20) * 4
    assert cost.staged_nbytes == 20 * 100 * 2 + 20 * 100 * 4  # as read, and for the arithmetic
    assert cost.inner_nbytes == 5 * 100 * 4
    assert cost.block_nbytes == 10 * 50 * 2 + 10 * 50 * 4 + 11 * PAGE_NBYTES


def test_cost_of_a_long_inner_dimension():
    grid = Grid(3, 100, 10, 10, 3)
    short = tile_cost(grid, ((3, LONG_INNER),), (4, 4, 4), False)
    long = tile_cost(grid, ((3, LONG_INNER + 1),), (4, 4, 4), False)
    assert long.block_nbytes == short.block_nbytes + 3 * 10 * 16


def test_cost_of_a_tile_wider_than_the_whole():
    wide = tile_cost(Grid(3, 7, 1000, 1000, 100), ((3, 2),), (8, 8, 8), False)
    assert wide == tile_cost(Grid(3, 7, 7, 7, 3), ((3, 2),), (8, 8, 8), False)


def test_cost_counts_halo_columns_and_conversion():
    plain, haloed = Grid(30, 1000, 100, 50, 10), Grid(30, 1000, 100, 50, 10, halo_columns=8)
    cost = tile_cost(haloed, ((30, 20),), (4, 4, 4), False)
    assert cost.staged_nbytes == 20 * 108 * 4
    more = 10 * 8 * 4
    assert cost.block_nbytes == tile_cost(plain, ((30, 20),), (4, 4, 4), False).block_nbytes + more
    # Big-endian or rounded operands are as wide as the arithmetic, and still held twice.
    twice = tile_cost(plain, ((30, 20),), (4, 4, 4), True)
    assert twice.staged_nbytes == 2 * 20 * 100 * 4


def test_cost_counts_the_copy_that_turns_a_block_for_the_other_order():
    grid = Grid(30, 1000, 100, 50, 10)
    alone = tile_cost(grid, ((30, 20),), (4, 4, 4), False)
    mixed = tile_cost(grid, ((30, 20),), (4, 4, 4), False, is_mixed=True)
    assert mixed.block_nbytes == alone.block_nbytes + 10 * 50 * 4
