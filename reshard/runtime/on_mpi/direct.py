"""Source to target in one stride: copies out of the tiles of one's own node, messages between nodes.

Every rank takes what it needs straight from where it lies, and writes it straight to where it goes, so a
move inside a node costs one copy. Nothing is reduced here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from reshard.lower.to_mpi import Block, Fetch, fetches
from reshard.runtime.on_mpi.chunks import Place, copies
from reshard.runtime.on_mpi.exchange import Call, Exchange
from reshard.runtime.on_mpi.messages import Messages, between, mean_run
from reshard.runtime.on_mpi.packing import Array, copy, raw
from reshard.types.layout import Layout

STAGING = 16 << 20
"""Bytes that messages between nodes may be staged in, in each direction, if no budget says less."""

Pairs = tuple[tuple[Place, Place], ...]
"""Places in another tile, and in the target's."""


@dataclass(frozen=True, eq=False)
class Direct:
    """What a rank copies from its own tile, from those of its node, and its messages to other nodes.

    What comes from other ranks lies in runs of `reach` bytes in their tiles, on average, and of `run` bytes in
    both those and the result. `parts` is for `reading`.
    """

    own: Pairs
    pulls: tuple[tuple[int, Pairs], ...]
    messages: Messages
    reach: float
    run: float
    parts: dict[Hashable, Any] = field(default_factory=dict[Hashable, Any])


@lru_cache(maxsize=256)
def direct(source: Layout, target: Layout, rank: int, nodes: tuple[int, ...], itemsize: int, staging: int) -> Direct:
    """What a rank does, with the node of every rank, for elements of so many bytes."""

    def near(one: int, other: int) -> bool:
        return nodes[one] == nodes[other]

    def wanted(by: int) -> dict[int, Fetch]:
        return {fetch.rank: fetch for fetch in fetches(source, target, by, near)}

    before, after = source.tile_shape, target.tile_shape
    mine = wanted(rank)
    pulls = {
        fetch.rank: tuple(pair for block in fetch.blocks for pair in copies(block, before, after))
        for fetch in mine.values()
        if near(fetch.rank, rank)
    }
    sent: list[tuple[int, tuple[Block, ...]]] = []
    received: list[tuple[int, tuple[Block, ...]]] = []
    for k in range(1, len(nodes)):
        to, giver = (rank + k) % len(nodes), (rank - k) % len(nodes)
        asked = None if near(to, rank) else wanted(to).get(rank)
        given = None if near(giver, rank) else mine.get(giver)
        sent += [(to, asked.blocks)] if asked else []
        received += [(giver, given.blocks)] if given else []
    found = between(sent, received, (), before, after, itemsize, staging // itemsize)
    others = [block for fetch in mine.values() if fetch.rank != rank for block in fetch.blocks]
    own = pulls.pop(rank, ())
    reach, run = (mean_run(others, before, shape) * itemsize for shape in (None, after))
    return Direct(own, tuple(pulls.items()), found, reach, run)


Read = Callable[[Call, Direct, int, Pairs, Array], None]
"""Copies what one rank gives into the target."""


def move_directly(call: Call, move: Direct, read: Read, tile: Array, target: Array) -> None:
    """Fills the target from this rank's own tile, by `read` from those of its node, and by messages."""
    exchange = Exchange(call, move.messages, raw(tile), raw(target))
    exchange.start()
    for source, where in move.own:
        copy(where.of(raw(target)), source.of(raw(tile)))
    for rank, pairs in move.pulls:
        read(call, move, rank, pairs, target)
        call.memory.receive(call.device, sum(math.prod(source.extents) for source, _ in pairs))
        exchange.progress()
    exchange.finish()


def pulling(tiles: Mapping[int, Array]) -> Read:
    """Reads tiles that this process can see, by rank."""

    def read(call: Call, move: Direct, rank: int, pairs: Pairs, target: Array) -> None:
        into, given = raw(target), raw(tiles[rank])
        for source, where in pairs:
            copy(where.of(into), source.of(given))

    return read
