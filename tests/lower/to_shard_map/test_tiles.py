"""Tiles and their blocks in JAX, against index arithmetic."""

from __future__ import annotations

import itertools

import jax.numpy as jnp
import numpy as np
import pytest

from reshard.lower.to_shard_map.tiles import blocks_of, closed, opened, resized, written
from reshard.plans.rules.tile_view import TileView

VIEWS = [
    TileView((6, 5), (6, 5), (2, 3, 5), (0, 0, 1), (0,)),  # blocks lie one after another
    TileView((6, 5), (6, 5), (2, 3, 5), (0, 0, 1), (1,)),
    TileView((6, 10), (6, 10), (2, 3, 5, 2), (0, 0, 1, 1), (3, 0)),  # numbered minor dim first
    TileView((5, 7), (6, 8), (2, 3, 8), (0, 0, 1), (0,)),  # padded
]


def tile_of(view: TileView) -> np.ndarray:
    return np.arange(1, np.prod(view.tile) + 1).reshape(view.tile)


def numbered_blocks(view: TileView) -> np.ndarray:
    """Element by element: the block's number from its digits, and its place from the others."""
    padded = np.zeros(view.padded, int)
    padded[tuple(slice(extent) for extent in view.tile)] = tile_of(view)
    digits = padded.reshape(view.digits)
    blocks = np.zeros((view.count, *view.block_shape), int)
    rest = [axis for axis in range(digits.ndim) if axis not in view.blocks]
    for index in itertools.product(*map(range, view.digits)):
        number = 0
        for axis in view.blocks:
            number = number * view.digits[axis] + index[axis]
        blocks[(number, *(index[axis] for axis in rest))] = digits[index]
    return blocks


@pytest.mark.parametrize("view", VIEWS)
def test_blocks(view: TileView):
    assert np.array_equal(blocks_of(view, jnp.asarray(tile_of(view))), numbered_blocks(view))


@pytest.mark.parametrize("view", VIEWS)
def test_blocks_make_up_the_tile(view: TileView):
    assert np.array_equal(closed(view, jnp.asarray(numbered_blocks(view))), tile_of(view))


@pytest.mark.parametrize("view", VIEWS)
def test_a_tile_opens_to_its_digits(view: TileView):
    assert opened(view, jnp.asarray(tile_of(view))).shape == view.digits


def test_resizing_pads_with_zeros_and_cuts_the_high_end():
    tile = jnp.asarray([[1, 2, 3], [4, 5, 6]])
    assert resized(tile, (3, 2)).tolist() == [[1, 2], [4, 5], [0, 0]]
    assert resized(tile, (2, 3)) is tile


def test_content_is_written_on_devices_that_get_it():
    filled, content = jnp.zeros((3, 4), int), jnp.ones((2, 2), int)
    starts = [jnp.asarray(1), jnp.asarray(2)]
    there = np.zeros((3, 4), int)
    there[1:, 2:] = 1
    assert np.array_equal(written(filled, content, starts, None), there)
    assert np.array_equal(written(filled, content, starts, jnp.asarray(True)), there)
    assert not written(filled, content, starts, jnp.asarray(False)).any()
    assert np.array_equal(written(filled, jnp.ones((3, 4), int), [jnp.asarray(0)] * 2, None), np.ones((3, 4)))
