"""Tiles opened to digits, numbered by blocks and closed again, by hand."""

from __future__ import annotations

import numpy as np

from reshard.plans.rules.tile_view import TileView
from reshard.runtime.on_numpy import merge_tile_blocks, number_tile_blocks

COLUMNS = TileView(tile=(2, 4), padded=(2, 4), digits=(2, 2, 2), dims=(0, 1, 1), blocks=(1,))
PADDED = TileView(tile=(3,), padded=(4,), digits=(2, 2), dims=(0, 0), blocks=(0,))


def test_blocks_of_columns_are_numbered_along_a_new_axis():
    blocks = number_tile_blocks(COLUMNS, np.arange(8).reshape(2, 4))
    assert blocks.tolist() == [[[0, 1], [4, 5]], [[2, 3], [6, 7]]]
    assert merge_tile_blocks(COLUMNS, blocks).tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_a_tile_is_padded_when_it_is_opened_and_cut_when_it_is_closed():
    blocks = number_tile_blocks(PADDED, np.array([1, 2, 3]))
    assert blocks.tolist() == [[1, 2], [3, 0]]
    assert merge_tile_blocks(PADDED, blocks).tolist() == [1, 2, 3]
