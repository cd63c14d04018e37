"""Messages between nodes joined by node (`lower.to_mpi.stripes`): few long ones in place of many short ones.

    1  put       each rank copies what goes to others into the memory of its node, that of each stripe side by side
    2  send      when all members have, the carriers of its stripes send them, and receive those of other nodes
    3  take      when all members have what they carry, each rank copies what is its own into its result

The result is written only in the last part, so a call that fails before then has not changed it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
from mpi4py import MPI

from reshard.lower.to_mpi import NodePlace, Stripes, lay_stripes, ranks_of_nodes
from reshard.runtime.on_mpi.copies.stream_copy import copy_views
from reshard.runtime.on_mpi.copies.strided_copy import Array
from reshard.runtime.on_mpi.tags import EXCHANGE
from reshard.runtime.on_mpi.wire.chunks import Chunk, Region
from reshard.runtime.on_mpi.wire.exchange import Call
from reshard.runtime.on_mpi.wire.messages import DIRECT, Messages

_WORD = np.dtype(np.int64)
_BYTE = np.dtype(np.uint8)


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
    mine = _agree_on_stripes(call, messages)
    allotted = None if mine is None else _place_stripes(call, mine, itemsize, room, free)
    lacking, _ = call.team.some(call.watch, allotted is None, False)
    if allotted is not None and lacking:
        call.team.arena.release(allotted.place)
    return None if lacking else allotted


def _agree_on_stripes(call: Call, messages: Messages) -> Stripes | None:
    """What the members of this node tell each other; None if it has no memory for that."""
    team, nodes = call.team, call.team.facts.nodes
    ends = len(nodes)
    place = team.arena.take(table_bytes(nodes), partial(team.gather, call.watch))
    if not place:
        return None
    row = (ends + len(ranks_of_nodes(nodes)),)
    rows = [team.arena.tile(member, place, row, _WORD) for member in range(len(team.members))]
    received = _elements_by_rank(messages.receives.chunks)
    own = rows[team.members.index(team.rank)]
    own[:] = 0
    for peer, elements in _elements_by_rank(messages.sends.chunks).items():
        own[peer] = elements
    for number, ranks in enumerate(ranks_of_nodes(nodes)):
        own[ends + number] = sum(received.get(rank, 0) for rank in ranks)
    team.gather(call.watch)
    table = np.stack(rows)
    team.arena.release(place)
    return lay_stripes(nodes, team.rank, table[:, :ends], table[:, ends:], received)


def _elements_by_rank(chunks: Sequence[Chunk]) -> dict[int, int]:
    """The elements that go to, or come from, each rank."""
    total: dict[int, int] = {}
    for chunk in chunks:
        total[chunk.peer] = total.get(chunk.peer, 0) + chunk.elements
    return total


def _place_stripes(call: Call, mine: Stripes, itemsize: int, room: int, free: int) -> Allotment | None:
    """The memory for stripes; the same outcome on all members of a node."""
    team, elements = call.team, max(mine.elements)
    nbytes = elements * itemsize
    needs = nbytes + table_bytes(team.facts.nodes)
    if needs > max(room, free) or mine.largest * itemsize > DIRECT:
        return None
    place = team.arena.take(max(1, nbytes), partial(team.gather, call.watch))
    return Allotment(mine, place, elements, needs <= room) if place else None


Pairs = Sequence[tuple[Region, Region]]
"""Regions of the source tile, each with the region of the target tile that it is copied to."""


def exchange_aggregated(
    call: Call,
    messages: Messages,
    own: Pairs,
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
    puts = _place_chunks(messages.sends.chunks, mine.puts)
    copy_views([pair for chunk, place in puts for pair in chunk.packing(source, _part_of_node(memory, place, chunk))])

    def part(start: int, elements: int) -> list[object]:
        return [carried[start * source.itemsize : (start + elements) * source.itemsize], MPI.BYTE]

    requests = [team.comm.Irecv(part(start, n), peer, EXCHANGE) for peer, start, n in mine.receives]
    team.gather(watch)  # All members have put what they have for others.
    requests += [team.comm.Isend(part(start, n), peer, EXCHANGE) for peer, start, n in mine.sends]
    if ready is None:
        _copy_own(own, source, target)
    watch.until(lambda: MPI.Request.Testall(requests))
    team.gather(watch)  # All members have what they carry.
    if ready is not None:
        ready()
        _copy_own(own, source, target)
    finds = list(_place_chunks(messages.receives.chunks, mine.finds))
    copy_views(
        [pair for chunk, place in finds for pair in chunk.unpacking(target, _part_of_node(memory, place, chunk))]
    )
    call.memory.receive(call.device, sum(chunk.elements for chunk, _ in finds))
    call.memory.free(call.device, taken)
    team.arena.release(allotment.place)  # Peers may still be reading it: it is used again once all have released it.


def _copy_own(own: Pairs, source: Array, target: Array) -> None:
    copy_views([(into.of(target), region.of(source)) for region, into in own])


def _part_of_node(memory: Sequence[Array], place: NodePlace, chunk: Chunk) -> Array:
    return memory[place.member][place.start : place.start + chunk.elements]


def _place_chunks(chunks: Sequence[Chunk], places: Mapping[int, NodePlace]) -> Iterator[tuple[Chunk, NodePlace]]:
    """The messages of each rank, each with its place: those of one rank lie one after another."""
    done: dict[int, int] = {}
    for chunk in chunks:
        member, start = places[chunk.peer]
        at = done.get(chunk.peer, 0)
        done[chunk.peer] = at + chunk.elements
        yield chunk, NodePlace(member, start + at)
