"""Straight from source to target: copies between the tiles of a node, messages between nodes.

A rank either pulls (reads what it needs out of its peers' tiles) or pushes (writes what it has into its peers'
results), so a move inside a node costs one copy. Nothing is reduced here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, NamedTuple, TypeVar

from reshard.geometry.remesh import one_set
from reshard.lower.to_mpi import (
    Block,
    Fetch,
    Form,
    Near,
    devices_by_id,
    fetched_across,
    fetched_as,
    list_fetches,
    list_served,
    rank_of_devices,
    ranks_of_seats,
    seat_of,
    served_across,
    served_as,
    tile_shapes,
)
from reshard.plans.plan import Plan
from reshard.runtime.on_mpi.copies.copy_order import NEAR, Order, list_copy_steps, order_copies
from reshard.runtime.on_mpi.copies.strided_copy import Array, view_as_words
from reshard.runtime.on_mpi.node_price import NodeLoad
from reshard.runtime.on_mpi.wire.chunks import Region, pairs_of_block
from reshard.runtime.on_mpi.wire.exchange import Call, MessageExchange
from reshard.runtime.on_mpi.wire.messages import Messages, mean_run, messages_between
from reshard.types.layout import Layout

STAGING = 16 << 20
"""Bytes that messages between nodes may stage in each direction, unless a budget allows less."""

_Nodes = TypeVar("_Nodes")

Listing = Callable[[Layout, Layout, int, _Nodes], list[Fetch]]
"""What one rank, by seat or device, has to do with each other one, given which are on one node."""

Pairs = tuple[tuple[Region, Region], ...]
"""Regions of a source tile, each with the region of a target tile that it is copied to."""


@dataclass(frozen=True, eq=False)
class Direct:
    """A rank's copies from its own tile (`own`) and from its node's (`pulls`, by rank), and messages to other nodes.

    `parts` caches what `cma_read` works out.
    """

    own: Pairs
    pulls: tuple[tuple[int, Pairs], ...]
    order: Order
    messages: Messages
    parts: dict[Hashable, Any] = field(default_factory=dict[Hashable, Any])

    @property
    def pulled(self) -> int:
        """Elements that this rank receives from other ranks of its node."""
        return sum(math.prod(source.extents) for _, pairs in self.pulls for source, _ in pairs)


class RunBytes(NamedTuple):
    """The average run of the elements that a rank receives from others: of `reach` bytes in the source tiles, of
    `landing` bytes in the result, and of `run` bytes in both at once.
    """

    reach: float
    landing: float
    run: float

    @property
    def prefers_push(self) -> bool:
        """Whether pushing (writing into peers' results) is faster than pulling (reading from peers' tiles).

        The copying rank walks along its own tile, so short runs cost less there than in the peer's: with runs of
        1 KiB in the source and of 256 KiB in the result, pushing takes 1.5 times a plain copy, pulling 1.6 to 1.8.
        """
        return self.reach < min(self.landing, NEAR)


@lru_cache(maxsize=64)
def run_bytes(source: Layout, target: Layout, rank: int, size: int, itemsize: int) -> RunBytes:
    """The runs of what one of `size` ranks receives if all are on one node."""
    peers = _fetches_by_rank(source, target, rank, (0,) * size)
    others = [block for peer, fetch in peers.items() if peer != rank for block in fetch.blocks]
    ends = ((source.tile_shape, None), (None, target.tile_shape), (source.tile_shape, target.tile_shape))
    return RunBytes(*(mean_run(others, *shapes) * itemsize for shapes in ends))


@lru_cache(maxsize=64)
def node_load(source: Layout, target: Layout, nodes: tuple[int, ...], itemsize: int) -> NodeLoad:
    """What the first rank of the target receives; all ranks must judge alike, so each looks at the same."""
    rank = ranks_of_seats(target.mesh, len(nodes))[0]
    mine = _fetches_by_rank(source, target, rank, nodes)
    sizes = {peer: sum(block.elements for block in fetch.blocks) * itemsize for peer, fetch in mine.items()}
    far = [size for peer, size in sizes.items() if nodes[peer] != nodes[rank]]
    return NodeLoad(len(far), sum(far), sum(sizes.values()) - sum(far) - sizes.get(rank, 0))


def list_peers(source: Layout, target: Layout, rank: int, nodes: tuple[int, ...]) -> tuple[set[int], set[int]]:
    """The ranks to which a rank gives something, and those from which it takes something, itself left out."""
    to, by = (set(of(source, target, rank, nodes)) - {rank} for of in (_served_by_rank, _fetches_by_rank))
    return to, by


@dataclass(frozen=True, eq=False)
class NodePacking:
    """What a rank packs for the others of its node: regions of its tile, receiver by receiver, and the element at
    which each receiver's part starts.
    """

    regions: tuple[Region, ...]
    starts: dict[int, int]
    order: Order


@lru_cache(maxsize=256)
def node_packing(source: Layout, target: Layout, rank: int, nodes: tuple[int, ...], itemsize: int) -> NodePacking:
    """What a rank packs for the others of its node, by rank; each receiver unpacks in the order of its `Direct`."""
    packed: list[Region] = []
    starts: dict[int, int] = {}
    at = 0
    given = _pairs_given(source, target, rank, nodes)
    for to in _ranks_of_node(rank, nodes):
        if to != rank:
            starts[to] = at
            regions = [region for region, _ in given.get(to, ())]
            at += sum(math.prod(region.extents) for region in regions)
            packed += regions
    return NodePacking(tuple(packed), starts, order_copies(packed, source.tile_shape, itemsize, True))


@dataclass(frozen=True, eq=False)
class Pushes:
    """Copies from a rank's tile into the results of its node's ranks, its own included, in the order of its memory."""

    pairs: tuple[tuple[int, Pairs], ...]
    order: Order


@lru_cache(maxsize=256)
def list_pushes(
    source: Layout, target: Layout, rank: int, nodes: tuple[int, ...], itemsize: int, form: Form | None = None
) -> Pushes:
    """What a rank writes into the results of its node: the pulls of all its peers, seen from the giver."""
    given = _pairs_given(source, target, rank, nodes, form)
    pairs = tuple((to, given.get(to, ())) for to in _ranks_of_node(rank, nodes))
    regions = [region for _, each in pairs for region, _ in each]
    return Pushes(pairs, order_copies(regions, tile_shapes(source, target, form)[0], itemsize, True))


def _ranks_of_node(rank: int, nodes: tuple[int, ...]) -> list[int]:
    """The ranks of a rank's node, itself included."""
    return [other for other, node in enumerate(nodes) if node == nodes[rank]]


def _fetches_by_rank(
    source: Layout, target: Layout, by: int, nodes: tuple[int, ...], form: Form | None = None
) -> dict[int, Fetch]:
    """What a rank fetches, by giver; a giver of its own node if there is one and the form leaves the choice."""
    if form is not None:
        return _as_listed(fetched_as, source, target, by, len(nodes), form)
    return _by_rank(list_fetches, fetched_across, source, target, by, nodes)


def _served_by_rank(
    source: Layout, target: Layout, rank: int, nodes: tuple[int, ...], form: Form | None = None
) -> dict[int, Fetch]:
    """What others fetch from a rank, by receiver."""
    if form is not None:
        return _as_listed(served_as, source, target, rank, len(nodes), form)
    return _by_rank(list_served, served_across, source, target, rank, nodes)


def _as_listed(
    listing: Callable[[Layout, Layout, Form, int], list[Fetch]],
    source: Layout,
    target: Layout,
    rank: int,
    size: int,
    form: Form,
) -> dict[int, Fetch]:
    """A rank's fetches by the other rank, of a move whose messages are listed by device."""
    at = rank_of_devices((source.mesh, target.mesh), size)
    for mesh in (source.mesh, target.mesh):
        seat = seat_of(mesh, rank, size)
        if seat is not None:
            return {at[fetch.rank]: fetch for fetch in listing(source, target, form, devices_by_id(mesh)[seat])}
    return {}


def _by_rank(
    among: Listing[Near],
    across: Listing[Sequence[int]],
    source: Layout,
    target: Layout,
    rank: int,
    nodes: tuple[int, ...],
) -> dict[int, Fetch]:
    """A rank's fetches by the other rank: `among` one set of devices by seats, `across` two sets by devices, which are
    ranks.
    """
    if not one_set(source.mesh, target.mesh):
        return {fetch.rank: fetch for fetch in across(source, target, rank, nodes)}
    seat, at = seat_of(source.mesh, rank, len(nodes)), ranks_of_seats(source.mesh, len(nodes))
    if seat is None:
        return {}
    listed = among(source, target, seat, lambda a, b: nodes[at[a]] == nodes[at[b]])
    return {at[fetch.rank]: fetch for fetch in listed}


def _pairs_given(
    source: Layout, target: Layout, rank: int, nodes: tuple[int, ...], form: Form | None = None
) -> dict[int, Pairs]:
    """What the ranks of its node fetch from a rank, as copies from tile to tile."""
    return _pairs_in_node(
        _served_by_rank(source, target, rank, nodes, form), tile_shapes(source, target, form), rank, nodes
    )


def _pairs_in_node(
    peers: Mapping[int, Fetch], shapes: tuple[Sequence[int], Sequence[int]], rank: int, nodes: tuple[int, ...]
) -> dict[int, Pairs]:
    """The fetches between a rank and those of its node as copies between tiles of these shapes."""
    before, after = shapes
    return {
        peer: tuple(pair for block in fetch.blocks for pair in pairs_of_block(block, before, after))
        for peer, fetch in peers.items()
        if nodes[peer] == nodes[rank]
    }


@lru_cache(maxsize=256)
def plan_direct(
    source: Layout,
    target: Layout,
    rank: int,
    nodes: tuple[int, ...],
    itemsize: int,
    staging: int,
    held: bool = False,
    apart: bool = False,
    form: Form | None = None,
) -> Direct:
    """A rank's part of a direct move; `nodes` has the node of every rank, `held` is as in `Messages`.

    `form` says which turn of a relay, or through which view; without it, each element comes from a rank that has it.

    With `apart`, it receives from its own node by messages, too; what other nodes send and receive stays the same.
    """

    def far(peers: Mapping[int, Fetch], peer: int) -> Fetch | None:
        return None if nodes[peer] == nodes[rank] and not apart else peers.get(peer)

    before, after = tile_shapes(source, target, form)
    mine, theirs = (
        _fetches_by_rank(source, target, rank, nodes, form),
        _served_by_rank(source, target, rank, nodes, form),
    )
    pulls = _pairs_in_node(mine, (before, after), rank, nodes)
    if apart:
        pulls = {rank: pulls.get(rank, ())}
    sent: list[tuple[int, tuple[Block, ...]]] = []
    received: list[tuple[int, tuple[Block, ...]]] = []
    for k in range(1, len(nodes)):
        to, giver = (rank + k) % len(nodes), (rank - k) % len(nodes)
        outgoing, incoming = far(theirs, to), far(mine, giver)
        sent += [(to, outgoing.blocks)] if outgoing else []
        received += [(giver, incoming.blocks)] if incoming else []
    messages = messages_between(sent, received, (), before, after, itemsize, staging // itemsize, held)
    own = pulls.pop(rank, ())
    filled = [region for pairs in (own, *pulls.values()) for _, region in pairs]
    return Direct(own, tuple(pulls.items()), order_copies(filled, after, itemsize), messages)


def passes_on(plan: Plan) -> bool:
    """Whether devices pass on what they receive, so that no holder sends as much as all devices lack."""
    return plan.crosses and (len(plan.steps) > 1 or any(step.mode.relay for step in plan.steps))


Copies = Callable[[], object]
Fill = Callable[[Call, Direct, Array, Array], list[Copies]]
"""Given a call, a rank's part of it, its tile and the target, returns the copies inside the node, in order.

They run one by one, with a look at the messages in between."""


def move_directly(
    call: Call, move: Direct, fill: Fill, tile: Array, target: Array, ready: Copies | None = None
) -> None:
    """Fills the target: by the copies of `fill` inside the node, by messages from other nodes.

    `ready` is called before the target is written to, after as many messages have been received as there is room for.
    """
    exchange = MessageExchange(call, move.messages, view_as_words(tile), view_as_words(target))
    steps = fill(call, move, view_as_words(tile), view_as_words(target))
    if ready is not None:
        exchange.ahead(ready)
    exchange.start()
    for step in steps:
        step()
        exchange.progress()
    call.memory.receive(call.device, move.pulled)
    exchange.finish()


def pull_from(tiles: Mapping[int, Array]) -> Fill:
    """Copies out of the source tiles of other ranks, which lie in windows."""

    def fill(call: Call, move: Direct, tile: Array, target: Array) -> list[Copies]:
        views = [(into.of(target), source.of(tile)) for source, into in move.own]
        for rank, pairs in move.pulls:
            peer = view_as_words(tiles[rank])
            views += [(into.of(target), source.of(peer)) for source, into in pairs]
        return list_copy_steps(views, move.order)

    return fill


def push_into(mine: Pushes, targets: Mapping[int, Array]) -> Fill:
    """Copies into the results of other ranks, which lie in windows."""

    def fill(call: Call, move: Direct, tile: Array, target: Array) -> list[Copies]:
        views: list[tuple[Array, Array]] = []
        for rank, pairs in mine.pairs:
            result = view_as_words(targets[rank]) if rank in targets else target
            views += [(into.of(result), source.of(tile)) for source, into in pairs]
        return list_copy_steps(views, mine.order, tile)

    return fill


def unpack_from(packed: Mapping[int, Array]) -> Fill:
    """Copies out of what each other rank packed for this one, see `NodePacking`."""

    def fill(call: Call, move: Direct, tile: Array, target: Array) -> list[Copies]:
        views = [(into.of(target), source.of(tile)) for source, into in move.own]
        for rank, pairs in move.pulls:
            parts = _view_packed([source for source, _ in pairs], view_as_words(packed[rank]))
            views += zip([into.of(target) for _, into in pairs], parts, strict=True)
        return list_copy_steps(views, move.order)

    return fill


def pack_for_node(packing: NodePacking, tile: Array, packed: Array) -> None:
    """Copies the regions of a raw tile that the others of the node need, one after another."""
    into = _view_packed(packing.regions, packed)
    views = zip(into, [region.of(tile) for region in packing.regions], strict=True)
    for step in list_copy_steps(list(views), packing.order, tile):
        step()


def _view_packed(regions: Sequence[Region], packed: Array) -> list[Array]:
    """Regions that are packed one after another, as views of that memory."""
    views: list[Array] = []
    at = 0
    for region in regions:
        elements = math.prod(region.extents)
        views.append(packed[at : at + elements].reshape(region.extents))
        at += elements
    return views
