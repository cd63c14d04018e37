"""Straight from source to target: copies between the tiles of a node, messages between nodes.

A rank either pulls (reads what it needs out of its peers' tiles) or pushes (writes what it has into its peers'
results), so a move inside a node costs one copy. Nothing is reduced here.

    pull_from           out of tiles in windows
    push_into           into results in windows
    unpack_from         out of what each peer has packed for this rank (`pack_for_node`)
    read_remote_tiles   out of private tiles of other processes, through the kernel
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache, partial
from typing import Any, NamedTuple

import numpy as np

from reshard.geometry.blocks import Axis, Block, block_part, split_box
from reshard.lower.to_mpi import MoveForm, fetches_by_rank, ranks_of_seats, served_by_rank
from reshard.lower.to_mpi.tile_blocks import Blocks, pack_block
from reshard.plans.plan import Plan
from reshard.runtime.on_mpi.copies.copy_order import Order, list_copy_steps, order_copies
from reshard.runtime.on_mpi.copies.strided_copy import (
    NEAR,
    Array,
    TileCopies,
    copy_view,
    locate_block,
    pair_views,
    view_as_words,
    view_block,
)
from reshard.runtime.on_mpi.wire.by_node import NodeLoad
from reshard.runtime.on_mpi.wire.chunks import Messages, mean_run, messages_between
from reshard.runtime.on_mpi.wire.message_exchange import Call, MessageExchange
from reshard.types.layout import Layout
from reshard.types.whole import check_deadline

STAGING = 16 << 20
"""Bytes that messages between nodes may stage in each direction, unless a budget allows less."""


Tables = dict[Hashable, Any]


@dataclass(frozen=True, eq=False)
class Direct:
    """A rank's copies from its own tile (`own`) and from its node's (`pulls`, by rank), and messages to other nodes.

    `reading`, `pulling` and `unpacking` cache what these ways to copy work out.
    """

    own: Blocks
    pulls: tuple[tuple[int, Blocks], ...]
    order: Order
    messages: Messages
    reading: dict[Hashable, Sequence[_RemoteRuns]] = field(default_factory=dict[Hashable, "Sequence[_RemoteRuns]"])
    pulling: Tables = field(default_factory=dict[Hashable, Any])
    unpacking: Tables = field(default_factory=dict[Hashable, Any])

    @cached_property
    def unpacked(self) -> tuple[tuple[int, Blocks], ...]:
        """What is copied out of what each other rank has packed, by rank."""
        listed: list[tuple[int, Blocks]] = []
        for rank, blocks in self.pulls:
            starts = itertools.accumulate((block.elements for block in blocks), initial=0)
            packs = [pack_block(block, "dst", at).reversed for block, at in zip(blocks, starts, strict=False)]
            listed.append((rank, tuple(packs)))
        return tuple(listed)

    @property
    def quiet(self) -> bool:
        """Whether there are no messages, at which the rank would look between copies."""
        return not self.messages.sends.chunks and not self.messages.receives.chunks

    @cached_property
    def pulled(self) -> int:
        """Elements that this rank receives from other ranks of its node."""
        return sum(block.elements for _, blocks in self.pulls for block in blocks)


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
    form: MoveForm | None = None,
) -> Direct:
    """A rank's part of a direct move; `nodes` has the node of every rank, `held` is as in `Messages`.

    `form` is the turn of a relay, and the view; without it, each element comes from a rank that has it.

    With `apart`, it receives from its own node by messages, too; what other nodes send and receive stays the same.
    """
    mine, at = fetches_by_rank(source, target, rank, nodes, form), np.array(nodes)
    # On one node nobody is sent anything, unless all is.
    alone = not apart and len(set(nodes)) == 1
    theirs = mine if alone else served_by_rank(source, target, rank, nodes, form)
    # Rows begin with this rank and the next one: a rank sends to the next first, and receives from the previous.
    sent, received = (
        table.select_rows((table.peers != rank) & (apart | (at[table.peers] != at[rank]))) for table in (theirs, mine)
    )
    received = received.select_rows(slice(None, None, -1))
    messages = messages_between(sent, received, (), itemsize, staging // itemsize, held)
    own = mine.get(rank, ())
    close = mine.select_rows((mine.peers != rank) & (not apart) & (at[mine.peers] == at[rank]))
    near = [*close.items()]
    check_deadline()
    filled = [*own, *(block for _, blocks in near for block in blocks)]
    order = order_copies(filled, math.prod(target.tile_shape), itemsize)
    return Direct(own, tuple(near), order, messages)


def passes_on(plan: Plan) -> bool:
    """Whether devices pass on what they receive, so that no holder sends as much as all devices lack."""
    if any(step.mode.relay for step in plan.steps):
        return True
    gathers = plan.crosses or any(step.kind == "exchange" and step.mode.view is not None for step in plan.steps)
    return gathers and len(plan.steps) > 1


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
    fetched = fetches_by_rank(source, target, rank, (0,) * size)
    # Thousands of peers have blocks of a few shapes.
    counts = np.bincount(fetched.kinds[fetched.peers != rank], minlength=len(fetched.shapes)).tolist()
    alike: Counter[tuple[Axis, ...]] = Counter()
    for shape, count in zip(fetched.shapes, counts, strict=True):
        alike.update({axes: count * times for axes, times in Counter(block.axes for block in shape).items()})
    reach, landing, run = mean_run(alike, ["src"]), mean_run(alike, ["dst"]), mean_run(alike, ["src", "dst"])
    return RunBytes(reach * itemsize, landing * itemsize, run * itemsize)


@lru_cache(maxsize=64)
def node_load(source: Layout, target: Layout, nodes: tuple[int, ...], itemsize: int) -> NodeLoad:
    """What the first rank of the target receives; all ranks must judge alike, so each looks at the same."""
    rank = ranks_of_seats(target.mesh, len(nodes))[0]
    fetched = fetches_by_rank(source, target, rank, nodes)
    of, nbytes = np.array(nodes)[fetched.peers], fetched.elements * itemsize
    far, near = nbytes[of != nodes[rank]], nbytes[(of == nodes[rank]) & (fetched.peers != rank)]
    return NodeLoad(len(far), int(far.sum()), int(near.sum()))


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

    def fill(_: Call, move: Direct, tile: Array, target: Array) -> list[Copies]:
        pulls = [TileCopies(blocks, target, view_as_words(tiles[rank])) for rank, blocks in move.pulls]
        return list_copy_steps([TileCopies(move.own, target, tile), *pulls], move.order, move.pulling, whole=move.quiet)

    return fill


@dataclass(frozen=True, eq=False)
class Pushes:
    """Copies from a rank's tile into the results of its node's ranks, its own included, in the order of its memory."""

    blocks: tuple[tuple[int, Blocks], ...]
    order: Order
    pushing: Tables = field(default_factory=dict[Hashable, Any])


@lru_cache(maxsize=256)
def list_pushes(
    source: Layout, target: Layout, rank: int, nodes: tuple[int, ...], itemsize: int, form: MoveForm | None = None
) -> Pushes:
    """What a rank writes into the results of its node: the pulls of all its peers, seen from the giver."""
    served = served_by_rank(source, target, rank, nodes, form)
    given = tuple((to, served.get(to, ())) for to, node in enumerate(nodes) if node == nodes[rank])
    every = [block for _, blocks in given for block in blocks]
    return Pushes(given, order_copies(every, math.prod(source.tile_shape), itemsize, reads=True))


def push_into(mine: Pushes, targets: Mapping[int, Array]) -> Fill:
    """Copies into the results of other ranks, which lie in windows."""

    def fill(_: Call, move: Direct, tile: Array, target: Array) -> list[Copies]:
        copies = [
            TileCopies(blocks, view_as_words(targets[rank]) if rank in targets else target, tile)
            for rank, blocks in mine.blocks
        ]
        return list_copy_steps(copies, mine.order, mine.pushing, tile, move.quiet)

    return fill


@dataclass(frozen=True, eq=False)
class NodePacking:
    """What a rank packs for the others of its node: blocks from its tile to what is packed, receiver by receiver, and
    the element at which each receiver's part starts.
    """

    blocks: Blocks
    starts: dict[int, int]
    order: Order
    packing: Tables = field(default_factory=dict[Hashable, Any])


@lru_cache(maxsize=256)
def node_packing(source: Layout, target: Layout, rank: int, nodes: tuple[int, ...], itemsize: int) -> NodePacking:
    """What a rank packs for the others of its node, by rank. Each receiver unpacks in the order of its `Direct`."""
    packed: list[Block] = []
    starts: dict[int, int] = {}
    at = 0
    served = served_by_rank(source, target, rank, nodes)
    for to, node in enumerate(nodes):
        if to != rank and node == nodes[rank]:
            starts[to] = at
            for block in served.get(to, ()):
                packed.append(pack_block(block, "src", at))
                at += block.elements
    order = order_copies(packed, math.prod(source.tile_shape), itemsize, reads=True)
    return NodePacking(tuple(packed), starts, order)


def pack_for_node(packing: NodePacking, tile: Array, packed: Array) -> None:
    """Copies what the others of the node need out of a raw tile, one block after another."""
    copies = [TileCopies(packing.blocks, packed, tile)]
    for step in list_copy_steps(copies, packing.order, packing.packing, tile, whole=True):
        step()


def unpack_from(packed: Mapping[int, Array]) -> Fill:
    """Copies out of what each other rank packed for this one, see `NodePacking`."""

    def fill(_: Call, move: Direct, tile: Array, target: Array) -> list[Copies]:
        copies = [TileCopies(move.own, target, tile)]
        copies += [TileCopies(blocks, target, view_as_words(packed[rank])) for rank, blocks in move.unpacked]
        return list_copy_steps(copies, move.order, move.unpacking, whole=move.quiet)

    return fill


# Reading tiles of other processes through the kernel: straight into the result, or through a small buffer.
#
# The kernel's time goes by the number of runs, above all those of the other process, whose pages it must look up. If
# the runs are long there and short in the result, it fills a buffer that stays in the cache, and numpy copies from the
# buffer into the result: for runs of 512 B, that takes 1.7 times a plain copy, and straight 2.8 times.

STRAIGHT = 4 << 10
"""Bytes of a run from which the kernel writes it straight into the result."""

SCRATCH = 1 << 20
"""Bytes of the buffer for shorter runs: a smaller one costs more in calls than it saves in cache misses."""


class _RemoteRuns(NamedTuple):
    """Runs of another rank's tile as rows (offset, bytes), and where they go: runs of the result (`here`), or, if that
    is None, the block's end there, through the buffer.
    """

    rank: int
    there: Array
    here: Array | None
    block: Block


def read_remote_tiles(addresses: Mapping[int, int], buffered: bool) -> Fill:
    """Reads the C-ordered source tiles of other ranks at their addresses in their processes."""

    def fill(call: Call, move: Direct, tile: Array, target: Array) -> list[Copies]:
        key = target.strides, buffered
        if key not in move.reading:
            parts = [
                part for rank, blocks in move.pulls for b in blocks for part in _list_runs(rank, b, target, buffered)
            ]
            # What goes through the buffer is copied by numpy, and follows the target's memory: see `copy_order`.
            move.reading[key] = sorted(parts, key=lambda part: part.block.dst) if buffered else parts
        own: list[Copies] = [partial(copy_view, *pair) for pair in pair_views(move.own, target, tile)]
        parts = move.reading[key]
        return own + [partial(_read_runs, call, part, addresses[part.rank], target) for part in parts]

    return fill


def _list_runs(rank: int, block: Block, target: Array, buffered: bool) -> Iterable[_RemoteRuns]:
    """A block as runs of the other tile, straight into the result or in parts that fit into the buffer."""
    size = target.itemsize
    start, strides = locate_block(target, block, "dst")

    def runs_of(block: Block, run: int, offset: int, strides: Sequence[int]) -> Array:
        offsets, count = np.array([offset], np.int64), block.elements * size // run
        for extent, stride in zip(block.extents, strides, strict=True):
            if offsets.size == count:
                break
            offsets = (offsets[:, None] + np.arange(extent) * stride).reshape(-1)
        return np.stack([offsets, np.full_like(offsets, run)], axis=1)

    def run_of(block: Block, others: Sequence[int]) -> int:
        """Bytes that are contiguous in the other tile, and at the other strides."""
        run = size
        for axis, other in reversed(list(zip(block.axes, others, strict=True))):
            if axis.extent != 1 and not axis.src * size == other == run:
                break
            run *= axis.extent
        return run

    both = run_of(block, strides)
    if not buffered or both >= STRAIGHT:
        there = runs_of(block, both, block.src * size, [axis.src * size for axis in block.axes])
        yield _RemoteRuns(rank, there, runs_of(block, both, start, strides), block)
        return
    for spans in split_box(block.extents, max(1, SCRATCH // size)):
        part = block_part(block, spans)
        steps = [axis.src * size for axis in part.axes]
        yield _RemoteRuns(rank, runs_of(part, run_of(part, steps), part.src * size, steps), None, part)


def _read_runs(call: Call, part: _RemoteRuns, address: int, target: Array) -> None:
    member = call.team.members.index(part.rank)
    there = (part.there + np.array([address, 0])).astype(np.uint64)
    if part.here is not None:
        here = (part.here + np.array([target.__array_interface__["data"][0], 0])).astype(np.uint64)
        call.team.remote_memory.read(member, there, here)
        return
    into = view_block(target, part.block, "dst")
    call.memory.take(call.device, into.size)
    buffer = call.pool.take(into.size * into.itemsize)
    call.team.remote_memory.read(member, there, np.array([[buffer.ctypes.data, buffer.size]], np.uint64))
    copy_view(into, buffer.view(into.dtype).reshape(into.shape))
    call.pool.give(buffer)
    call.memory.free(call.device, into.size)
