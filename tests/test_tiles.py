import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from raymm.tiles import Bounds, Grid, Layout, ceil_div, round_up

GRIDS = st.builds(
    Grid,
    rows=st.integers(0, 30),
    columns=st.integers(0, 60),
    tile_columns=st.integers(1, 70),
    panel_columns=st.integers(1, 20),
    block_rows=st.integers(1, 40),
)


@given(GRIDS)
def test_tiles_follow_each_other_and_cover_all_columns(grid):
    tiles = list(grid)
    assert len(tiles) == len(grid)
    assert [tile.index for tile in tiles] == list(range(len(grid)))
    edges = [tile.start for tile in tiles] + [grid.columns]
    assert edges[0] == 0
    assert [tile.stop for tile in tiles] == edges[1:]
    assert all(tile.width == grid.tile_columns for tile in tiles[:-1])
    assert all(0 < tile.width <= grid.tile_columns for tile in tiles)


@given(GRIDS)
def test_blocks_cover_every_entry_once(grid):
    covered = np.zeros((grid.rows, grid.columns), int)
    for tile in grid:
        for bounds in grid.blocks(tile):
            assert tile.start <= bounds.column_start < bounds.column_stop <= tile.stop
            rows, columns = bounds.shape
            assert 0 < rows <= grid.block_rows
            assert 0 < columns <= grid.panel_columns
            covered[
                bounds.row_start : bounds.row_stop, bounds.column_start : bounds.column_stop
            ] += 1
    assert (covered == 1).all()


def test_indices_beyond_the_grid():
    grid = Grid(1, 10, 4, 4, 1)
    for index in (-1, 3):
        with pytest.raises(IndexError):
            grid[index]


def test_a_grid_of_billions_of_columns_is_integers_only():
    grid = Grid(1, 2**31 + 10, 65536, 65536, 1)
    assert len(grid) == 32769
    assert grid[32768].stop == 2147483658
    assert grid[32768].width == 10


@pytest.mark.parametrize(
    ("columns", "limit", "stop"), [(0, 100, 20), (7, 100, 27), (7, 22, 22), (7, 20, 20)]
)
def test_widened_bounds(columns, limit, stop):
    assert Bounds(1, 3, 10, 20).widened(columns, limit) == Bounds(1, 3, 10, stop)


def test_position_of_an_entry_in_either_order():
    values = np.arange(12.0).reshape(3, 4)
    for order, strides in (("C", (32, 8)), ("F", (8, 24))):
        layout = Layout(order, 1, 128, *strides)
        stored = values.tobytes(order)
        for row in range(3):
            for column in range(4):
                place = layout.position(row, column) - 128
                assert np.frombuffer(stored[place : place + 8]) == values[row, column]


@given(st.integers(0, 10**20), st.integers(1, 10**10))
def test_rounding_up(value, multiple):
    rounded = ceil_div(value, multiple)
    assert (rounded - 1) * multiple < value <= rounded * multiple
    assert round_up(value, multiple) == ceil_div(value, multiple) * multiple
