"""Global arrays on one rank: scattered to the tiles of a layout, and gathered from them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from reshard.lower.to_mpi import Block, Fetch, fetches, seat_of, seats
from reshard.runtime.on_mpi.direct import STAGING
from reshard.runtime.on_mpi.strided_copy import Array, raw
from reshard.runtime.on_mpi.wire.exchange import Call, MessageExchange
from reshard.runtime.on_mpi.wire.messages import Messages, between
from reshard.types import Layout, Mesh


def on_one_device(layout: Layout) -> Layout:
    """The layout of the same array on a single device.

    >>> str(on_one_device(Layout.parse("f32[{x}2, 4]", Mesh(x=2))))
    'f32[4, 4]'
    """
    return Layout.tiled(Mesh(), layout.shape, layout.dtype, [[] for _ in layout.shape])


def scatter(call: Call, layout: Layout, array: Array, root: int | None, tile: Array) -> None:
    """Fills every rank's tile from the array of `root`; with root None, from the rank's own array.

    The array of any other rank is ignored, so it may be empty.
    """
    mine = _scattered(layout, call.team.rank, call.team.size, root, tile.itemsize)
    MessageExchange(call, mine, raw(array), raw(tile)).run()


def gather(call: Call, layout: Layout, tile: Array, root: int, array: Array) -> None:
    """Fills the array of `root` from the tiles, each part from one of the ranks that hold it."""
    mine = _gathered(layout, call.team.rank, call.team.size, root, tile.itemsize)
    MessageExchange(call, mine, raw(tile), raw(array)).run()


@lru_cache(maxsize=64)
def _scattered(layout: Layout, rank: int, size: int, root: int | None, itemsize: int) -> Messages:
    """A rank's messages of a scatter: from the root to each other rank."""
    seated = {to: seat for seat, to in enumerate(seats(layout.mesh, size)) if root is not None or to == rank}
    one = on_one_device(layout)
    blocks = {to: _blocks(fetches(one, layout, 0, _apart, seat)) for to, seat in seated.items()}
    sent = [(to, given) for to, given in blocks.items() if rank == root != to and given]
    received = [(root, blocks[rank])] if root is not None and root != rank and blocks.get(rank) else []
    local = blocks.get(rank, ()) if root in (rank, None) else ()
    staging = STAGING // itemsize
    return between(sent, received, local, layout.shape, layout.tile_shape, itemsize, staging)


@lru_cache(maxsize=64)
def _gathered(layout: Layout, rank: int, size: int, root: int, itemsize: int) -> Messages:
    """A rank's messages of a gather: from each rank that the root fetches from."""
    at = seats(layout.mesh, size)
    seat = seat_of(layout.mesh, root, size)
    fetched = fetches(layout, on_one_device(layout), root % len(at) if seat is None else seat, _apart, 0)
    blocks = {at[fetch.rank]: fetch.blocks for fetch in fetched}
    sent = [(root, blocks[rank])] if rank != root and blocks.get(rank) else []
    received = [(giver, given) for giver, given in blocks.items() if rank == root != giver and given]
    local = blocks.get(rank, ()) if rank == root else ()
    staging = STAGING // itemsize
    return between(sent, received, local, layout.tile_shape, layout.shape, itemsize, staging)


def _blocks(fetched: Sequence[Fetch]) -> tuple[Block, ...]:
    return tuple(block for fetch in fetched for block in fetch.blocks)


def _apart(rank: int, other: int) -> bool:
    """Every rank on a node of its own: a root sends everything by messages."""
    return False
