"""Tiles opened to digits, numbered by blocks and closed again, by hand."""

from __future__ import annotations

import numpy as np

from reshard.plans.rules.tile_view import TileView
from reshard.runtime.on_numpy import closed, numbered, opened

COLUMNS = TileView(tile=(2, 4), padded=(2, 4), digits=(2, 2, 2), dims=(0, 1, 1), blocks=(1,))
PADDED = TileView(tile=(3,), padded=(4,), digits=(2, 2), dims=(0, 0), blocks=(0,))


def test_blocks_of_columns_are_numbered_along_a_new_axis():
    blocks = numbered(COLUMNS, opened(COLUMNS, np.arange(8).reshape(2, 4)))
    assert blocks.tolist() == [[[0, 1], [4, 5]], [[2, 3], [6, 7]]]
    assert closed(COLUMNS, blocks).tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_a_tile_is_padded_when_it_is_opened_and_cut_when_it_is_closed():
    digits = opened(PADDED, np.array([1, 2, 3]))
    assert digits.tolist() == [[1, 2], [3, 0]]
    assert closed(PADDED, numbered(PADDED, digits)).tolist() == [1, 2, 3]
