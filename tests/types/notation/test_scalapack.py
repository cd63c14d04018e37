"""Layouts from ScaLAPACK's descriptors, against its own formula of who holds which element, and where."""

from __future__ import annotations

import random

import numpy as np
import pytest

from reshard.errors import LayoutError
from reshard.types import Layout
from tests.oracle import PADDING, tiles_of
from tests.sampling import for_each


def owner(index: int, block: int, source: int, processes: int) -> tuple[int, int]:
    """INDXG2P and INDXG2L: the process of a global index, and the local index there."""
    number, within = divmod(index, block)
    return (source + number) % processes, number // processes * block + within


@for_each(range(30))
def test_every_element_is_where_scalapack_has_it(seed: int):
    choose = random.Random(seed)
    grid = choose.choice([(1, 1), (2, 2), (2, 3), (4, 1), (1, 3), (3, 2)])
    rows, columns = choose.choice([0, 1, 7, 16, 25]), choose.choice([1, 8, 13, 30])
    blocks = choose.choice([1, 2, 3, 5]), choose.choice([1, 4, 7, 40])
    sources = choose.randrange(grid[0]), choose.randrange(grid[1])
    order = choose.choice("RC")
    layout = Layout.from_scalapack([1, 0, rows, columns, *blocks, *sources, 99], grid, "float64", order=order)
    tiles = tiles_of(layout)
    assert layout.shape == (rows, columns)
    assert sum(int((tile != PADDING).sum()) for tile in tiles.values()) == rows * columns
    for i, j in np.ndindex(rows, columns):
        (r, row), (c, column) = (owner(*at) for at in zip((i, j), blocks, sources, grid, strict=True))
        device = r * grid[1] + c if order == "R" else c * grid[0] + r
        assert tiles[device][row, column] == i * columns + j


@pytest.mark.parametrize(
    ("desc", "grid", "order", "message"),
    [
        ([1, 0, 8, 8, 2, 2, 0, 0], (2, 2), "R", "9 numbers"),
        ([501, 0, 8, 8, 2, 2, 0, 0, 8], (2, 2), "R", "9 numbers"),
        ([1, 0, 8, 8, 0, 2, 0, 0, 8], (2, 2), "R", "blocks are at least 1"),
        ([1, 0, 8, 8, 2, 2, 2, 0, 8], (2, 2), "R", "within the grid"),
        ([1, 0, 8, 8, 2, 2, 0, 0, 8], (2, 0), "R", "process rows"),
        ([1, 0, 8, 8, 2, 2, 0, 0, 8], (2, 2), "X", "grid order"),
        ([1, 0, -1, 8, 2, 2, 0, 0, 8], (2, 2), "R", "size"),
    ],
)
def test_refusals(desc: list[int], grid: tuple[int, int], order: str, message: str):
    with pytest.raises(LayoutError, match=message):
        Layout.from_scalapack(desc, grid, "float64", order=order)
