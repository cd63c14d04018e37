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
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
from mpi4py import MPI

from reshard.lower.to_mpi import (
    NodePlace,
    Stripes,
    lay_stripes,
    most_stripes,
    number_of_groups,
    ranks_of_nodes,
)
from reshard.lower.to_mpi.tile_blocks import Blocks
from reshard.runtime.on_mpi.copies.stream_copy import copy_views
from reshard.runtime.on_mpi.copies.strided_copy import Array, pair_views
from reshard.runtime.on_mpi.team import EXCHANGE
from reshard.runtime.on_mpi.wire.chunks import DIRECT, Chunk, JointChunk, Messages
from reshard.runtime.on_mpi.wire.message_exchange import Call
from reshard.synth import Network

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


def allot_stripes(call: Call, messages: Messages, itemsize: int, room: int, free: int) -> Allotment | None:
    """Memory for a move by stripes; None if it is more than `room` bytes, and than `free` ones, on some rank, or than
    its node has, or if some message is too long.

    All ranks call this together. Memory within `room` is counted, the tables included.
    """
    team, nodes, gather = call.team, call.team.facts.nodes, partial(call.team.gather, call.watch)
    allotted: Allotment | None = None
    place = team.arena.take(table_bytes(nodes), gather)
    if place:
        # What the members of the node tell each other: what each gives to every rank, and takes from every node.
        ends, every = len(nodes), ranks_of_nodes(nodes)
        rows = [team.arena.tile(n, place, (ends + len(every),), _WORD) for n in range(len(team.members))]
        given, received = (_elements_by_rank(side.chunks) for side in (messages.sends, messages.receives))
        own = rows[team.members.index(team.rank)]
        own[:ends] = [given.get(rank, 0) for rank in range(ends)]
        own[ends:] = [sum(received.get(rank, 0) for rank in ranks) for ranks in every]
        team.gather(call.watch)
        table = np.stack(rows)
        team.arena.release(place)
        mine = lay_stripes(nodes, team.rank, table[:, :ends], table[:, ends:], received)
        elements = max(mine.elements)
        needs = elements * itemsize + table_bytes(nodes)
        if needs <= max(room, free) and mine.largest * itemsize <= DIRECT:
            place = team.arena.take(max(1, elements * itemsize), gather)
            allotted = Allotment(mine, place, elements, needs <= room) if place else None
    lacking, _ = team.some(call.watch, allotted is None, False)
    if allotted is not None and lacking:
        team.arena.release(allotted.place)
    return None if lacking else allotted


def _elements_by_rank(chunks: Sequence[Chunk | JointChunk]) -> dict[int, int]:
    """The elements that go to, or come from, each rank."""
    total: dict[int, int] = {}
    for chunk in chunks:
        total[chunk.peer] = total.get(chunk.peer, 0) + chunk.elements
    return total


def exchange_aggregated(
    call: Call,
    messages: Messages,
    own: Blocks,
    allotment: Allotment,
    source: Array,
    target: Array,
    ready: Callable[[], None] | None = None,
) -> None:
    """Moves what the messages have, and what the rank keeps, its `own`, from raw tile to raw tile.

    `ready` is called before the target is written to.
    """
    mine, team, watch = allotment.stripes, call.team, call.watch
    here = range(len(team.members))
    memory = [team.arena.tile(member, allotment.place, (allotment.elements,), source.dtype) for member in here]
    carried = memory[team.members.index(team.rank)].view(_BYTE)
    taken = -(-table_bytes(team.facts.nodes) // source.itemsize) + allotment.elements if allotment.counted else 0
    call.memory.take(call.device, taken)

    def placed(chunks: Sequence[Chunk | JointChunk], places: Mapping[int, NodePlace]) -> list[Array]:
        """The memory of each message: those of one rank lie one after another from its place on."""
        done: dict[int, int] = {}
        parts: list[Array] = []
        for chunk in chunks:
            member, start = places[chunk.peer]
            at = done[chunk.peer] = done.get(chunk.peer, start)
            parts.append(memory[member][at : at + chunk.elements])
            done[chunk.peer] += chunk.elements
        return parts

    def part(start: int, elements: int) -> list[object]:
        return [carried[start * source.itemsize : (start + elements) * source.itemsize], MPI.BYTE]

    puts = enumerate(placed(messages.sends.chunks, mine.puts))
    copy_views([pair for number, buffer in puts for pair in messages.sends.packing(number, source, buffer)])
    requests = [team.comm.Irecv(part(start, n), peer, EXCHANGE) for peer, start, n in mine.receives]
    team.gather(watch)  # All members have put what they have for others.
    requests += [team.comm.Isend(part(start, n), peer, EXCHANGE) for peer, start, n in mine.sends]
    if ready is None:
        copy_views(pair_views(own, target, source))
    watch.until(lambda: MPI.Request.Testall(requests))
    team.gather(watch)  # All members have what they carry.
    if ready is not None:
        ready()
        copy_views(pair_views(own, target, source))
    finds = enumerate(placed(messages.receives.chunks, mine.finds))
    copy_views([pair for number, buffer in finds for pair in messages.receives.unpacking(number, target, buffer)])
    call.memory.receive(call.device, sum(chunk.elements for chunk in messages.receives.chunks))
    call.memory.free(call.device, taken)
    team.arena.release(allotment.place)  # Peers may still be reading it: it is used again once all have released it.
