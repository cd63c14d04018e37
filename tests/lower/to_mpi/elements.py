"""Blocks element by element, the slow way: which elements of a flat tile they have, and what a message has of them."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np

from reshard.geometry.blocks import Block
from reshard.types import Layout
from tests.oracle import PADDING, tiles_of

Tiles = dict[int, np.ndarray]


def places(block: Block, end: str) -> list[int]:
    """Where a block's elements lie in the flat tile at one end, "src" or "dst", in order."""
    start, steps = getattr(block, end), [getattr(axis, end) for axis in block.axes]
    return [
        start + sum(n * step for n, step in zip(index, steps, strict=True))
        for index in itertools.product(*map(range, block.extents))
    ]


def padded(tile: np.ndarray, frame: Sequence[int] | None) -> np.ndarray:
    """A tile as the padded one around it, or what is left of it in a smaller one."""
    if frame is None:
        return tile.copy()
    whole, inside = np.full(frame, PADDING), tuple(map(slice, np.minimum(tile.shape, frame)))
    whole[inside] = tile[inside]
    return whole


def taken(tile: np.ndarray, blocks: Sequence[Block], frame: Sequence[int] | None = None) -> list[int]:
    """The message of these blocks out of a tile, padded to a frame."""
    flat = padded(tile, frame).reshape(-1)
    return [int(flat[at]) for block in blocks for at in places(block, "src")]


def put(tile: np.ndarray, blocks: Sequence[Block], message: list[int], frame: Sequence[int] | None = None) -> None:
    """Writes a message of these blocks into a tile, without padding."""
    whole = padded(tile, frame)
    within = [at for block in blocks for at in places(block, "dst")]
    for at, value in zip(within, message, strict=True):
        whole.reshape(-1)[at] = value
    inside = tuple(map(slice, np.minimum(tile.shape, whole.shape)))
    tile[inside] = whole[inside]


def assert_filled(layout: Layout, tiles: Tiles) -> None:
    """Every element of every tile is the global index that the layout's meaning demands."""
    for device, wanted in tiles_of(layout).items():
        real = wanted != PADDING
        assert np.array_equal(tiles[device][real], wanted[real]), f"device {device} of {layout}"
