"""Source to target in one stride: copies between the tiles of one's own node, messages between nodes.

Every rank takes what it needs straight from where it lies, or gives what it has straight to where it goes, so a
move inside a node costs one copy. Nothing is reduced here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from reshard.lower.to_mpi import Block, Fetch, fetches
from reshard.runtime.on_mpi.copy_order import NEAR, Order, in_order, in_steps
from reshard.runtime.on_mpi.strided_copy import Array, raw
from reshard.runtime.on_mpi.wire.chunks import Place, copies
from reshard.runtime.on_mpi.wire.exchange import Call, Exchange
from reshard.runtime.on_mpi.wire.messages import Messages, between, mean_run
from reshard.types.layout import Layout

STAGING = 16 << 20
"""Bytes that messages between nodes may be staged in, in each direction, if no budget says less."""

Pairs = tuple[tuple[Place, Place], ...]
"""Places in another tile, and in the target's."""


@dataclass(frozen=True, eq=False)
class Direct:
    """What a rank copies from its own tile, from those of its node, and its messages to other nodes.

    What comes from other ranks lies in runs of `reach` bytes in their tiles, on average, of `landing` bytes in the
    result, and of `run` bytes in both. `parts` is for `reading`.
    """

    own: Pairs
    pulls: tuple[tuple[int, Pairs], ...]
    order: Order
    messages: Messages
    reach: float
    landing: float
    run: float
    parts: dict[Hashable, Any] = field(default_factory=dict[Hashable, Any])

    @property
    def gives(self) -> bool:
        """Whether each rank had better write what it has to others' tiles than read what it needs from them.

        Whoever copies goes along its own tile, whose runs may then be short for nothing; measured for runs of 1 KiB
        there and of 256 KiB in the other: 1.5 times a plain copy instead of 1.6 to 1.8.
        """
        return self.reach < min(self.landing, NEAR)

    @property
    def pulled(self) -> int:
        """Elements that come from other ranks of the node."""
        return sum(math.prod(source.extents) for _, pairs in self.pulls for source, _ in pairs)


@dataclass(frozen=True, eq=False)
class Gives:
    """What a rank packs for the others of its node: per rank the places of its tile, and where the rank's part of
    the packed elements starts.
    """

    places: tuple[Place, ...]
    starts: dict[int, int]
    order: Order


@lru_cache(maxsize=256)
def gives(source: Layout, target: Layout, rank: int, nodes: tuple[int, ...], itemsize: int) -> Gives:
    """What a rank's node takes from it, in the order of ranks; each takes it in the order of its own `Direct`."""
    found: list[Place] = []
    starts: dict[int, int] = {}
    at = 0
    for to in range(len(nodes)):
        if to != rank and nodes[to] == nodes[rank]:
            starts[to] = at
            places = [place for place, _ in _pairs(source, target, to, nodes).get(rank, ())]
            at += sum(math.prod(place.extents) for place in places)
            found += places
    return Gives(tuple(found), starts, in_order(found, source.tile_shape, itemsize))


@dataclass(frozen=True, eq=False)
class Pushes:
    """Copies from a rank's tile to those of its node, its own too, by receiver, in the order of the rank's memory."""

    pairs: tuple[tuple[int, Pairs], ...]
    order: Order


@lru_cache(maxsize=256)
def pushes(source: Layout, target: Layout, rank: int, nodes: tuple[int, ...], itemsize: int) -> Pushes:
    """What a rank's node takes from it, as each receiver's `Direct` has it."""
    near = [to for to in range(len(nodes)) if nodes[to] == nodes[rank]]
    found = tuple((to, _pairs(source, target, to, nodes).get(rank, ())) for to in near)
    places = [place for _, pairs in found for place, _ in pairs]
    return Pushes(found, in_order(places, source.tile_shape, itemsize))


def _fetched(source: Layout, target: Layout, by: int, nodes: tuple[int, ...]) -> dict[int, Fetch]:
    """What a rank fetches, by giver, those of its own node if they have it."""
    found = fetches(source, target, by, lambda one, other: nodes[one] == nodes[other])
    return {fetch.rank: fetch for fetch in found}


def _pairs(source: Layout, target: Layout, by: int, nodes: tuple[int, ...]) -> dict[int, Pairs]:
    """What a rank fetches from those of its node, as copies from tile to tile."""
    before, after = source.tile_shape, target.tile_shape
    return {
        giver: tuple(pair for block in fetch.blocks for pair in copies(block, before, after))
        for giver, fetch in _fetched(source, target, by, nodes).items()
        if nodes[giver] == nodes[by]
    }


@lru_cache(maxsize=256)
def direct(
    source: Layout,
    target: Layout,
    rank: int,
    nodes: tuple[int, ...],
    itemsize: int,
    staging: int,
    held: bool = False,
) -> Direct:
    """What a rank does, with the node of every rank, for elements of so many bytes; `held` as in `Messages`."""

    def near(one: int, other: int) -> bool:
        return nodes[one] == nodes[other]

    def wanted(by: int) -> dict[int, Fetch]:
        return _fetched(source, target, by, nodes)

    before, after = source.tile_shape, target.tile_shape
    mine = wanted(rank)
    pulls = _pairs(source, target, rank, nodes)
    sent: list[tuple[int, tuple[Block, ...]]] = []
    received: list[tuple[int, tuple[Block, ...]]] = []
    for k in range(1, len(nodes)):
        to, giver = (rank + k) % len(nodes), (rank - k) % len(nodes)
        asked = None if near(to, rank) else wanted(to).get(rank)
        given = None if near(giver, rank) else mine.get(giver)
        sent += [(to, asked.blocks)] if asked else []
        received += [(giver, given.blocks)] if given else []
    found = between(sent, received, (), before, after, itemsize, staging // itemsize, held)
    others = [block for fetch in mine.values() if fetch.rank != rank for block in fetch.blocks]
    own = pulls.pop(rank, ())
    seen = ((before, None), (None, after), (before, after))
    reach, landing, run = (mean_run(others, *shapes) * itemsize for shapes in seen)
    every = [where for pairs in (own, *pulls.values()) for _, where in pairs]
    return Direct(own, tuple(pulls.items()), in_order(every, after, itemsize), found, reach, landing, run)


Copies = Callable[[], None]
Fill = Callable[[Call, Direct, Array, Array], list[Copies]]
"""Gets ready to fill a target with what its node has, given this rank's tile; returns what does, in steps."""


def move_directly(
    call: Call, move: Direct, fill: Fill, tile: Array, target: Array, ready: Copies | None = None
) -> None:
    """Fills the target by `fill` from what its node has, and by messages from other nodes.

    With `ready`, that is called before the target is written to, once as much is behind as there is room for.
    """
    exchange = Exchange(call, move.messages, raw(tile), raw(target))
    steps = fill(call, move, raw(tile), raw(target))
    if ready is not None:
        exchange.ahead(ready)
    exchange.start()
    for step in steps:
        step()
        exchange.progress()
    call.memory.receive(call.device, move.pulled)
    exchange.finish()


def pulling(tiles: Mapping[int, Array]) -> Fill:
    """Reads tiles that this process can see, by rank."""

    def fill(call: Call, move: Direct, tile: Array, target: Array) -> list[Copies]:
        views = [(where.of(target), source.of(tile)) for source, where in move.own]
        for rank, pairs in move.pulls:
            given = raw(tiles[rank])
            views += [(where.of(target), source.of(given)) for source, where in pairs]
        return in_steps(views, move.order)

    return fill


def pushing(give: Pushes, targets: Mapping[int, Array]) -> Fill:
    """Writes to tiles that this process can see, by rank."""

    def fill(call: Call, move: Direct, tile: Array, target: Array) -> list[Copies]:
        views: list[tuple[Array, Array]] = []
        for rank, pairs in give.pairs:
            into = raw(targets[rank]) if rank in targets else target
            views += [(where.of(into), source.of(tile)) for source, where in pairs]
        return in_steps(views, give.order)

    return fill


def unpacking(packed: Mapping[int, Array]) -> Fill:
    """Takes what other ranks packed for this one, see `Gives`, by rank."""

    def fill(call: Call, move: Direct, tile: Array, target: Array) -> list[Copies]:
        views = [(where.of(target), source.of(tile)) for source, where in move.own]
        for rank, pairs in move.pulls:
            views += zip([where.of(target) for _, where in pairs], _dealt(pairs, raw(packed[rank])), strict=True)
        return in_steps(views, move.order)

    return fill


def pack(give: Gives, tile: Array, packed: Array) -> None:
    """Copies what others of the node need from a raw tile, one part after another."""
    into = _dealt([(place, place) for place in give.places], packed)
    views = zip(into, [place.of(tile) for place in give.places], strict=True)
    for step in in_steps(list(views), give.order):
        step()


def _dealt(pairs: Sequence[tuple[Place, Place]], packed: Array) -> list[Array]:
    """The places of the other tile, as they lie packed one after another."""
    found: list[Array] = []
    at = 0
    for place, _ in pairs:
        elements = math.prod(place.extents)
        found.append(packed[at : at + elements].reshape(place.extents))
        at += elements
    return found
