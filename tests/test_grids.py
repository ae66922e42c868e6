import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from raymm.errors import MemoryLimitError
from raymm.request import Resources
from raymm.sinks import Array, Npy
from tests.planning import MAIN_JOB, plan_of

SINKS = {
    "C": lambda: Npy("D.npy"),
    "F": lambda: Npy("D.npy", order="F"),
    "memory": Array,
}
SHAPES = st.tuples(st.integers(1, 10_000), st.integers(1, 500), st.integers(1, 10**8)).map(
    lambda sizes: ((sizes[0], sizes[1]), (sizes[1], max(sizes[2], sizes[0])))
)


@given(
    SHAPES,
    st.sampled_from(list(SINKS)),
    st.sampled_from([np.float16, np.float32, np.float64, np.complex128]),
)
def test_every_grid_is_sound(shapes, sink, dtype):
    grid = plan_of(shapes, SINKS[sink](), dtype=dtype).grid
    rows, columns = shapes[0][0], shapes[-1][1]
    assert (grid.rows, grid.columns) == (rows, columns)
    assert 1 <= grid.panel_columns <= grid.tile_columns <= columns
    assert 1 <= grid.block_rows <= rows
    assert all(type(length) is int for length in (grid.tile_columns, grid.panel_columns))


@given(SHAPES, st.integers(1, 10**6), st.sampled_from(list(SINKS)))
def test_tile_columns_is_taken_at_its_word(shapes, tile_columns, sink):
    grid = plan_of(shapes, SINKS[sink](), tile_columns=tile_columns).grid
    assert grid.tile_columns == min(tile_columns, shapes[-1][1])


@given(SHAPES, st.sampled_from(list(SINKS)), st.integers(10**6, 10**9))
def test_a_grid_keeps_within_the_limit_or_is_refused(shapes, sink, limit):
    try:
        plan = plan_of(shapes, SINKS[sink](), memory_limit=limit)
    except MemoryLimitError as error:
        needed, given = error.projected_nbytes, error.memory_limit
    else:
        assert plan.worker_nbytes <= limit
        return
    assert given == limit < needed
    # Not even a single column would have fitted, with the page of columns beside it that rows
    # which do not begin on a page are cut at.
    (rows, inner), columns = shapes[0], 1 + 1024
    assert rows * inner * 4 + columns * (inner + 1) * 4 > limit


@pytest.mark.parametrize("sink", list(SINKS))
def test_the_grid_does_not_follow_from_the_machine(sink):
    machines = [
        Resources("local", 1, 1, 2**30),
        Resources("local", 1, 64, 2**40),
        Resources("ray", 2, 1, 2**30, 2**28, 1, 0, False),
        Resources("ray", 100, 8, 2**38, 2**36, 10, 0, False),
    ]
    for request in ({}, {"tile_columns": 1000}, {"memory_limit": 500_000_000}):
        grids = {
            plan_of(MAIN_JOB, SINKS[sink](), resources=each, **request).grid for each in machines
        }
        assert len(grids) == 1


def test_a_limit_changes_the_grid_only_where_it_must():
    free = plan_of(MAIN_JOB).grid
    assert plan_of(MAIN_JOB, memory_limit=2**40).grid == free
    small = plan_of(MAIN_JOB, memory_limit=50_000_000)
    assert small.grid != free
    assert small.worker_nbytes <= 50_000_000


def test_a_c_order_file_is_written_in_long_runs():
    grid = plan_of(MAIN_JOB).grid
    assert grid.panel_columns * 4 >= 128 * 1024


def test_a_fortran_order_file_is_written_in_whole_columns():
    grid = plan_of(MAIN_JOB, Npy("D.npy", order="F")).grid
    assert grid.block_rows == 3000


@pytest.mark.parametrize("sink", ["C", "F"])
def test_a_tile_of_the_main_job_is_worth_a_call_and_no_more(sink):
    plan = plan_of(MAIN_JOB, SINKS[sink]())
    seconds = plan.tile_nbytes / 1.25e9
    assert 0.05 <= seconds <= 2
    assert plan.tiles >= 20


def test_a_tile_through_the_object_store_is_small():
    assert plan_of(((3000, 100), (100, 400_000)), Array()).tile_nbytes <= 128 * 2**20


def test_many_workers_share_even_a_moderate_result():
    # 400,000 columns of 3000 rows are 4.8 GB: several tiles for each of two workers.
    for sink in ("C", "F"):
        assert plan_of(((3000, 100), (100, 400_000)), SINKS[sink]()).tiles >= 4


def test_a_small_result_is_one_tile():
    for sink in SINKS.values():
        assert plan_of(((3, 3), (3, 500)), sink()).tiles == 1


@pytest.mark.parametrize("shapes", [((3, 2), (2, 0)), ((0, 2), (2, 5)), ((0, 0), (0, 0))], ids=str)
def test_empty_axes(shapes):
    for sink in SINKS.values():
        grid = plan_of(shapes, sink()).grid
        assert sum(tile.width for tile in grid) == grid.columns
        assert [bounds for tile in grid for bounds in grid.blocks(tile)] == []
        assert grid.panel_columns >= 1
        assert grid.block_rows >= 1


def test_the_last_tile_of_a_huge_axis():
    plan = plan_of(((1, 2), (2, 2**31 + 10)), dtype=np.uint8)
    assert plan.grid[plan.tiles - 1].stop == 2147483658


def test_figures_of_a_refusal():
    shapes = ((1000, 1000), (1000, 50_000))
    with pytest.raises(MemoryLimitError, match="resident factors") as caught:
        plan_of(shapes, memory_limit=3_000_000)
    assert caught.value.memory_limit == 3_000_000
    assert caught.value.projected_nbytes >= 1000 * 1000 * 4
    assert "3,000,000 bytes" in str(caught.value)


def test_a_refusal_because_of_tile_columns_says_so():
    with pytest.raises(MemoryLimitError, match="or lower tile_columns") as caught:
        plan_of(((10, 1000), (1000, 50_000)), memory_limit=1_000_000, tile_columns=10_000)
    assert caught.value.projected_nbytes >= 1000 * 10_000 * 4
