"""Moves between tiles that lie in the memory of processes: devices of one process share what they hold.

    f32[{x}2, 4] -> f32[4, 4] on <x=2, y=2>, devices 0 and 1 in process 0, 2 and 3 in process 1

    process 0 has read rows 0-1, once for both    its two devices get one tile of 4 x 4: rows 0-1 copied, 2-3 received
    process 1 has read rows 2-3

Blocks are those of `exchange_messages`; whether sender and receiver are in one process says if they are copied or sent.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from reshard.geometry.blocks import Block, fuse_axes, list_strides
from reshard.geometry.holders import tile_of
from reshard.geometry.messages import exchange_messages
from reshard.runtime.on_mpi.copies.strided_copy import copy_view, view_as_words, view_block
from reshard.types.layout import Layout
from reshard.types.view import View

Array = NDArray[Any]


class TileCopy(NamedTuple):
    """Blocks of one device's tile that go into another's; each stands for all devices of its process with that tile."""

    sender: int
    receiver: int
    blocks: tuple[Block, ...]
    elements: int


@lru_cache(maxsize=4096)
def list_process_copies(
    source: Layout, target: Layout, view: View | None, processes: tuple[tuple[int, int], ...]
) -> tuple[TileCopy, ...]:
    """What fills each tile of a target once in each process, from the process's own tiles where it has them.

    `processes` are the devices' processes. Of the devices of a process that hold the same tile the first one is named.

    >>> from reshard.types import Mesh
    >>> ends = [Layout.parse(text, Mesh(x=2, y=2)) for text in ("f32[{x}2]", "f32[4]")]
    >>> copies = list_process_copies(*ends, None, ((0, 0), (1, 0), (2, 1), (3, 1)))
    >>> sorted((copy.sender, copy.receiver, copy.elements) for copy in copies)
    [(0, 0, 2), (0, 2, 2), (2, 0, 2), (2, 2, 2)]
    """
    process_of = dict(processes)
    near, far = (
        {(process_of[device], tile_of(end, device)): device for device in reversed(end.mesh.devices)}
        for end in (source, target)
    )
    copies: list[TileCopy] = []
    for message in exchange_messages(source, target, view):
        # Other devices of the process have the same tile from this one.
        process = process_of[message.receiver]
        if far[process, tile_of(target, message.receiver)] != message.receiver:
            continue
        # Requests are dealt among all who hold a tile; one that is in this memory need not come from elsewhere.
        tile = tile_of(source, message.sender)
        own = near.get((process, tile))
        sender = near[process_of[message.sender], tile] if own is None else own
        blocks = tuple(map(fuse_axes, message.blocks))
        copies.append(TileCopy(sender, message.receiver, blocks, sum(block.elements for block in blocks)))
    return tuple(copies)


def view_whole_tile(copy: TileCopy, shape: Sequence[int], target: Array) -> Array | None:
    """Where a copy of one block puts a tile of this shape, as a view of that shape: who reads the tile may write there.

    None if it takes only part of the tile, or if no view has its elements in their order.

    >>> from reshard.geometry.blocks import Axis
    >>> copy = TileCopy(0, 1, (Block(0, 2, (Axis(2, 2, 4), Axis(2, 1, 1))),), 4)
    >>> view_whole_tile(copy, (4,), np.arange(8)), view_whole_tile(copy, (2, 2), np.arange(8)).tolist()
    (None, [[2, 3], [6, 7]])
    """
    (block,) = copy.blocks
    if copy.elements != math.prod(shape) or [axis.src for axis in block.axes] != [*list_strides(block.extents)]:
        return None
    try:
        return np.reshape(view_block(target, block, "dst"), shape, copy=False)
    except ValueError:
        return None


def copy_tile(copy: TileCopy, source: Array, target: Array) -> None:
    """Copies between the tiles of both ends, with a cast where their dtypes differ."""
    words = source.dtype == target.dtype
    if words:
        source, target = view_as_words(source), view_as_words(target)
    for block in copy.blocks:
        copy_block(view_block(target, block, "dst"), view_block(source, block, "src"))


def pack_tile(copy: TileCopy, source: Array, message: Array) -> None:
    """Writes what a copy takes of a tile into a message of as many elements, cast to its dtype."""
    if source.dtype == message.dtype:
        source, message = view_as_words(source), view_as_words(message)
    at = 0
    for block in copy.blocks:
        copy_block(message[at : at + block.elements].reshape(block.extents), view_block(source, block, "src"))
        at += block.elements


def unpack_tile(copy: TileCopy, message: Array, target: Array) -> None:
    """Writes a message of `pack_tile` where it belongs in a tile, cast to the tile's dtype."""
    if message.dtype == target.dtype:
        message, target = view_as_words(message), view_as_words(target)
    at = 0
    for block in copy.blocks:
        copy_block(view_block(target, block, "dst"), message[at : at + block.elements].reshape(block.extents))
        at += block.elements


def copy_block(target: Array, source: Array) -> None:
    """Copies one view into another of the same shape, and casts where dtypes differ."""
    if target.dtype == source.dtype:
        copy_view(target, source)
        return
    with np.errstate(invalid="ignore", over="ignore"):  # As devices cast: what does not fit becomes what it becomes.
        target[...] = source
