"""Messages between nodes joined by node (`lower.to_mpi.stripes`): few long ones in place of many short ones.

    1  put       each rank copies what goes to others into the memory of its node, that of each stripe side by side
    2  send      when all members have, the carriers of its stripes send them, and receive those of other nodes
    3  take      when all members have what they carry, each rank copies what is its own into its result

The result is written only in the last part, so a call that fails before then has not changed it. Fewer messages cost
more copies (`is_aggregated` weighs them):

    a slab on 1,024 ranks in 16 nodes, 240 KiB a rank        each rank by itself     joined by node
    messages that a rank sends                               960                     1
    time, at 2 us each and 2 us to handle one                3.8 ms                  0.2 ms: copies, and waits
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import NamedTuple

import numpy as np
from mpi4py import MPI

from reshard.lower.to_mpi import (
    NodePlaces,
    PeerTable,
    Stripes,
    fetches_by_rank,
    lay_stripes,
    most_stripes,
    number_of_groups,
    ranks_of_nodes,
    served_by_rank,
)
from reshard.lower.to_mpi.peer_table import Column
from reshard.lower.to_mpi.tile_blocks import Blocks, End
from reshard.runtime.on_mpi.copies.stream_copy import copy_views
from reshard.runtime.on_mpi.copies.strided_copy import Array, pair_views, view_block
from reshard.runtime.on_mpi.team import EXCHANGE
from reshard.runtime.on_mpi.wire.chunks import DIRECT
from reshard.runtime.on_mpi.wire.message_exchange import Call
from reshard.synth import Network
from reshard.types import Layout

_WORD = np.dtype(np.int64)
_BYTE = np.dtype(np.uint8)

FREE = 4 << 20
"""Bytes a rank, in the memory that its node keeps, that a call without a budget may use uncounted."""

_LATENCY, _BANDWIDTH = 2e-6, 2e9  # Seconds, and bytes/second of a rank, between nodes whose network is unknown.
_HANDLING = 2e-6  # Seconds that a message takes a rank's processor, measured: to post, test and complete both ends.
_COPY = 5e9  # Bytes/second that one core copies, where the network has no inner link.
_WAITS = 60e-6  # Seconds of the four waits for the other ranks of the node.


class NodeLoad(NamedTuple):
    """What a rank receives if every message is sent separately: from other nodes in messages, and from its own."""

    messages: int
    far_bytes: int
    near_bytes: int


def is_aggregated(load: NodeLoad, nodes: tuple[int, ...], room: int, network: Network | None) -> bool:
    """Whether messages joined by node are faster, and fit into `room` bytes a rank.

    >>> slab, nodes = NodeLoad(960, 240 << 10, 16 << 10), tuple(rank // 64 for rank in range(1024))
    >>> is_aggregated(slab, nodes, FREE, None), is_aggregated(slab, nodes, 64 << 10, None)
    (True, False)
    """
    # The bytes of a stripe, and those that a rank carries in one direction, if all ranks have the same load.
    every = ranks_of_nodes(nodes)
    each = -(-load.far_bytes * max(map(len, every)) // max(1, (len(every) - 1) * number_of_groups(nodes)))
    carried = each * most_stripes(nodes)
    fits = 2 * carried + load.near_bytes <= room and each <= DIRECT
    if not fits or load.messages <= most_stripes(nodes):
        return False
    link = None if network is None else network.crossing
    latency, bandwidth = (_LATENCY, _BANDWIDTH) if link is None else (link.latency, link.bandwidth)
    copy = _COPY if network is None or network.inner is None else network.inner.bandwidth
    alone = load.messages * (latency + _HANDLING) + load.far_bytes / bandwidth
    together = most_stripes(nodes) * (latency + _HANDLING) + carried / bandwidth
    copies = 2 * (load.far_bytes + load.near_bytes) / copy
    return together + copies + _WAITS + 2 * latency * math.log2(len(nodes)) < alone


@dataclass(frozen=True, eq=False)
class JoinedPart:
    """A rank's part of a move by stripes: what it keeps, and what it gives to every other rank and takes from it."""

    own: Blocks
    given: PeerTable
    taken: PeerTable
    nodes: tuple[int, ...]

    def list_elements(self) -> tuple[Column, Column]:
        """What it tells the members of its node: the elements for each rank, then those from each node; and those that
        it takes from each rank.
        """
        given, taken = (np.zeros(len(self.nodes), np.int64) for _ in range(2))
        for column, table in ((given, self.given), (taken, self.taken)):
            column[table.peers] = table.elements
        every = [taken[np.array(ranks)].sum() for ranks in ranks_of_nodes(self.nodes)]
        return np.concatenate([given, np.array(every)]), taken

    def lay_stripes(self, rank: int, told: Sequence[Column]) -> Stripes:
        """The rank's part of all stripes of its node, given what each member of it tells."""
        given, taken = ([row[at] for row in told] for at in (slice(len(self.nodes)), slice(len(self.nodes), None)))
        return lay_stripes(self.nodes, rank, given, taken, self.list_elements()[1])


@lru_cache(maxsize=16)
def plan_joined(source: Layout, target: Layout, rank: int, nodes: tuple[int, ...]) -> JoinedPart:
    """A rank's part of a move whose messages are joined by node."""
    taken, given = (of(source, target, rank, nodes) for of in (fetches_by_rank, served_by_rank))
    own = taken.get(rank, ())
    given, taken = (table.select_rows(table.peers != rank) for table in (given, taken))
    return JoinedPart(own, given, taken, nodes)


class Allotment(NamedTuple):
    """A rank's stripes, and the place in the arena of its node where each member has `elements` for them.

    `counted` says whether the call's account counts that memory.
    """

    stripes: Stripes
    place: int
    elements: int
    counted: bool


def table_bytes(nodes: tuple[int, ...]) -> int:
    """The bytes in which a rank tells the members of its node what it gives and takes."""
    return (len(nodes) + len(ranks_of_nodes(nodes))) * _WORD.itemsize


def allot_stripes(call: Call, part: JoinedPart, itemsize: int, room: int, free: int) -> Allotment | None:
    """Memory for a move by stripes; None if it is more than `room` bytes, and than `free` ones, on some rank, or than
    its node has, or if some message is too long.

    All ranks call this together. Memory within `room` is counted, the tables included.
    """
    team, gather = call.team, partial(call.team.gather, call.watch)
    allotted: Allotment | None = None
    place = team.arena.take(table_bytes(part.nodes), gather)
    if place:
        # What the members of the node tell each other: what each gives to every rank, and takes from every node.
        shape = (table_bytes(part.nodes) // _WORD.itemsize,)
        told = [team.arena.tile(member, place, shape, _WORD) for member in range(len(team.members))]
        told[team.members.index(team.rank)][:] = part.list_elements()[0]
        team.gather(call.watch)
        mine = part.lay_stripes(team.rank, told)
        team.arena.release(place)
        elements = max(mine.elements)
        needs = elements * itemsize + table_bytes(part.nodes)
        if needs <= max(room, free) and mine.largest * itemsize <= DIRECT:
            place = team.arena.take(max(1, elements * itemsize), gather)
            allotted = Allotment(mine, place, elements, needs <= room) if place else None
    lacking, _ = team.some(call.watch, allotted is None, False)
    if allotted is not None and lacking:
        team.arena.release(allotted.place)
    return None if lacking else allotted


def exchange_aggregated(
    call: Call,
    part: JoinedPart,
    allotment: Allotment,
    source: Array,
    target: Array,
    ready: Callable[[], None] | None = None,
) -> None:
    """Moves what the rank gives and takes, and what it keeps, from raw tile to raw tile.

    `ready` is called before the target is written to.
    """
    mine, team, watch = allotment.stripes, call.team, call.watch
    here = range(len(team.members))
    memory = [team.arena.tile(member, allotment.place, (allotment.elements,), source.dtype) for member in here]
    carried = memory[team.members.index(team.rank)].view(_BYTE)
    taken = -(-table_bytes(team.facts.nodes) // source.itemsize) + allotment.elements if allotment.counted else 0
    call.memory.take(call.device, taken)

    def placed(table: PeerTable, places: NodePlaces, tile: Array, end: End) -> Iterator[tuple[Array, Array]]:
        """The parts of the tile, each with its place in the memory of the node."""
        columns = places.members[table.peers], places.starts[table.peers]
        for member, block in table.place_packed(end, *columns, joins=tile.flags.c_contiguous):
            yield view_block(tile, block, "src"), view_block(memory[member], block, "dst")

    def message(start: int, elements: int) -> list[object]:
        return [carried[start * source.itemsize : (start + elements) * source.itemsize], MPI.BYTE]

    copy_views([(packed, of) for of, packed in placed(part.given, mine.puts, source, "src")])
    requests = [team.comm.Irecv(message(start, n), peer, EXCHANGE) for peer, start, n in mine.receives]
    team.gather(watch)  # All members have put what they have for others.
    requests += [team.comm.Isend(message(start, n), peer, EXCHANGE) for peer, start, n in mine.sends]
    if ready is None:
        copy_views(pair_views(part.own, target, source))
    watch.until(lambda: MPI.Request.Testall(requests))
    team.gather(watch)  # All members have what they carry.
    if ready is not None:
        ready()
        copy_views(pair_views(part.own, target, source))
    copy_views([*placed(part.taken, mine.finds, target, "dst")])
    call.memory.receive(call.device, int(part.taken.elements.sum()))
    call.memory.free(call.device, taken)
    team.arena.release(allotment.place)  # Peers may still be reading it: it is used again once all have released it.
