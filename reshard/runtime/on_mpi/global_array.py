"""Whole arrays on one rank: dealt out to the tiles of a layout, and collected from them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from reshard.lower.to_mpi import Block, Fetch, fetches
from reshard.runtime.on_mpi.direct import STAGING
from reshard.runtime.on_mpi.strided_copy import Array, raw
from reshard.runtime.on_mpi.wire.exchange import Call, Exchange
from reshard.runtime.on_mpi.wire.messages import Messages, between
from reshard.types import Layout, Mesh


def whole(layout: Layout) -> Layout:
    """The layout of the same array on a single device."""
    return Layout.tiled(Mesh(), layout.shape, layout.dtype, [[] for _ in layout.shape])


def scatter(call: Call, layout: Layout, array: Array, root: int | None, tile: Array) -> None:
    """Fills every rank's tile from the root's array, the only one looked at, or with root None from its own."""
    found = _dealt(layout, call.team.rank, call.team.size, root, tile.itemsize)
    Exchange(call, found, raw(array), raw(tile)).run()


def gather(call: Call, layout: Layout, tile: Array, root: int, array: Array) -> None:
    """Fills the root's array from the tiles, each part from one rank that has it."""
    found = _collected(layout, call.team.rank, root, tile.itemsize)
    Exchange(call, found, raw(tile), raw(array)).run()


@lru_cache(maxsize=64)
def _dealt(layout: Layout, rank: int, size: int, root: int | None, itemsize: int) -> Messages:
    """The root's messages to the others, and theirs from it."""
    blocks = {
        to: _blocks(fetches(whole(layout), layout, 0, _apart, to)) for to in ((rank,) if root is None else range(size))
    }
    sent = [(to, given) for to, given in blocks.items() if rank == root != to and given]
    received = [(root, blocks[rank])] if root is not None and root != rank and blocks[rank] else []
    local = blocks[rank] if root in (rank, None) else ()
    staging = STAGING // itemsize
    return between(sent, received, local, layout.shape, layout.tile_shape, itemsize, staging)


@lru_cache(maxsize=64)
def _collected(layout: Layout, rank: int, root: int, itemsize: int) -> Messages:
    """The others' messages to the root, and its own from them."""
    blocks = {fetch.rank: fetch.blocks for fetch in fetches(layout, whole(layout), root, _apart, 0)}
    sent = [(root, blocks[rank])] if rank != root and blocks.get(rank) else []
    received = [(giver, given) for giver, given in blocks.items() if rank == root != giver and given]
    local = blocks.get(rank, ()) if rank == root else ()
    staging = STAGING // itemsize
    return between(sent, received, local, layout.tile_shape, layout.shape, itemsize, staging)


def _blocks(found: Sequence[Fetch]) -> tuple[Block, ...]:
    return tuple(block for fetch in found for block in fetch.blocks)


def _apart(rank: int, other: int) -> bool:
    return False
