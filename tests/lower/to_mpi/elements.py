"""Blocks element by element, the slow way: which local indices they have, and what a message of them holds."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np

from reshard.lower.to_mpi import Block
from reshard.types import Layout
from tests.oracle import PADDING, tiles_of

Tiles = dict[int, np.ndarray]


def places(block: Block, end: str) -> list[tuple[int, ...]]:
    """The local indices of a block's elements at one end, "src" or "dst", in order."""
    start = block.src if end == "src" else block.dst
    indices = []
    for index in itertools.product(*(range(axis.extent) for axis in block.axes)):
        at = list(start)
        for axis, i in zip(block.axes, index, strict=True):
            at[axis.dim] += i * (axis.src if end == "src" else axis.dst)
        indices.append(tuple(at))
    return indices


def taken(tile: np.ndarray, blocks: Sequence[Block]) -> list[int]:
    """The message of these blocks out of a tile; indices beyond the tile are padding."""
    within = [at for block in blocks for at in places(block, "src")]
    return [int(tile[at]) if all(map(int.__lt__, at, tile.shape)) else PADDING for at in within]


def put(tile: np.ndarray, blocks: Sequence[Block], message: list[int]) -> None:
    """Writes a message of these blocks into a tile, without padding."""
    within = [at for block in blocks for at in places(block, "dst")]
    for at, value in zip(within, message, strict=True):
        if all(map(int.__lt__, at, tile.shape)):
            tile[at] = value


def assert_filled(layout: Layout, tiles: Tiles) -> None:
    """Every element of every tile is the global index that the layout's meaning demands."""
    for device, wanted in tiles_of(layout).items():
        real = wanted != PADDING
        assert np.array_equal(tiles[device][real], wanted[real]), f"device {device} of {layout}"
