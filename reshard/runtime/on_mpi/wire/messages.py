"""The messages of a move: how its blocks are cut into messages, the same at the sender and at the receiver.

The cut depends on the plan alone, never on the memory order of one rank's tile, so both ends agree without negotiation.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from reshard.lower.to_mpi import Axis, Block, SendReceive, StepMessages
from reshard.runtime.on_mpi.copies.strided_copy import Array
from reshard.runtime.on_mpi.wire.chunks import Region, pack_chunks, pairs_of_block
from reshard.runtime.on_mpi.wire.datatypes import Side

DIRECT = 64 << 20
"""The most bytes of a message that is not staged: far below the 2^31 that Open MPI can count."""

STAGED = 4 << 20
"""The most bytes of a staged message, so that several can be packed, under way and unpacked at once."""

SMALL = 64 << 10
"""Bytes below which messages are not cut further just to have several under way."""


@dataclass(frozen=True)
class Messages:
    """One rank's messages in the order of the turns, its local copies, and how many elements each direction may stage.

    `held`: on every rank, all that it receives fits into buffers beside those, so that the result can stay untouched
    until everything has arrived.
    """

    sends: Side
    receives: Side
    local: tuple[tuple[Region, Region], ...]
    staging: int
    held: bool = False


@dataclass(frozen=True)
class RelayMessages:
    """One rank's messages of both turns of a relay; the second is between result tiles."""

    first: Messages
    second: Messages


BlocksByRank = Sequence[tuple[int, Sequence[Block]]]
"""The blocks that go to, or come from, each peer, in the order of the turns."""


def messages_of_step(
    step: StepMessages,
    ranks: Mapping[int, int],
    before: Sequence[int],
    after: Sequence[int],
    itemsize: int,
    received: int,
) -> Messages | RelayMessages:
    """The messages of one step between tiles of shapes `before` and `after`.

    `ranks` has the rank of each device, `received` is the most bytes that any of them receives in the step.
    """
    staging = step.scratch // itemsize // 2
    held = received <= staging * itemsize
    first = messages_between(*_sides_of_rounds(step.turns, ranks), step.local, before, after, itemsize, staging, held)
    if not step.passed:
        return first
    return RelayMessages(
        first, messages_between(*_sides_of_rounds(step.passed, ranks), (), after, after, itemsize, staging)
    )


def _sides_of_rounds(turns: Sequence[SendReceive], ranks: Mapping[int, int]) -> tuple[BlocksByRank, BlocksByRank]:
    """What goes to each peer, and what comes from each."""
    sent = [(ranks[turn.send.peer], turn.send.blocks) for turn in turns if turn.send]
    return sent, [(ranks[turn.receive.peer], turn.receive.blocks) for turn in turns if turn.receive]


def messages_between(
    sent: BlocksByRank,
    received: BlocksByRank,
    local: Sequence[Block],
    before: Sequence[int],
    after: Sequence[int],
    itemsize: int,
    staging: int,
    held: bool = False,
) -> Messages:
    """Messages and local copies between tiles of shapes `before` and `after`; each direction may stage `staging`
    elements.
    """
    cap = message_cap(staging, itemsize)

    def side(by_rank: BlocksByRank, end: str, shape: Sequence[int]) -> Side:
        by_peer = [tuple(pack_chunks(peer, blocks, cap, end, shape)) for peer, blocks in by_rank]
        turns = itertools.zip_longest(*by_peer)
        return Side(tuple(chunk for turn in turns for chunk in turn if chunk is not None))

    pairs = tuple(pair for block in local for pair in pairs_of_block(block, before, after))
    return Messages(side(sent, "src", before), side(received, "dst", after), pairs, staging, held)


def message_cap(staging: int, itemsize: int) -> int:
    """The most elements of a message, if `staging` elements can be staged: a quarter, for four messages under way, but
    not less than `SMALL` bytes if there is room.
    """
    if not staging:
        return max(1, DIRECT // itemsize)
    return max(1, min(staging, STAGED // itemsize, max(staging // 4, SMALL // itemsize)))


def mean_run(blocks: Sequence[Block], before: Sequence[int] | None, after: Sequence[int] | None) -> float:
    """The average number of elements per contiguous run in both tiles; in one tile, if the other's shape is None.

    >>> from reshard.lower.to_mpi import Axis
    >>> block = Block((0, 0), (0, 0), (Axis(0, 4, 1, 1), Axis(1, 8, 1, 1)))
    >>> [mean_run([block], *tiles) for tiles in (((4, 16), (4, 8)), ((4, 16), None), (None, (4, 8)))]
    [8.0, 8.0, 32.0]
    """
    alike = Counter(block.axes for block in blocks)
    sizes = [(count, math.prod(axis.extent for axis in axes), axes) for axes, count in alike.items()]
    elements = sum(count * size for count, size, _ in sizes)
    return elements / max(1, sum(count * (size // _run_of_axes(axes, before, after)) for count, size, axes in sizes))


def _run_of_axes(axes: Sequence[Axis], before: Sequence[int] | None, after: Sequence[int] | None) -> int:
    """The elements per contiguous run of blocks of these axes in C-ordered tiles."""
    run = 1
    for axis in reversed(axes):
        if before is not None and axis.src * math.prod(before[axis.dim + 1 :]) != run:
            break
        if after is not None and axis.dst * math.prod(after[axis.dim + 1 :]) != run:
            break
        run *= axis.extent
    return max(1, run)


# The messages of several arrays as one: what goes to the same peer travels together.
#
#     array a, to rank 1: 8 elements      array b, to rank 1: 2 elements      one message of 10 elements
#
# Both ends join the same messages in the same order, so they agree without negotiation. Messages are joined up to the
# size at which those of one array are cut.


class JointChunk(NamedTuple):
    """One message: the rank at its other end, and its parts, each an array and the number of its message there."""

    peer: int
    elements: int
    parts: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class JointSide:
    """One direction of several moves: the messages that a rank sends, or receives, and each array's own."""

    chunks: tuple[JointChunk, ...]
    sides: tuple[Side, ...]

    def unstaged(self, number: int, tiles: Sequence[Array], staging: int) -> list[Any] | None:
        """As `Side.unstaged`: only a message of one array is sent from, or received into, its tile."""
        parts = self.chunks[number].parts
        if len(parts) != 1:
            return None
        array, its = parts[0]
        return self.sides[array].unstaged(its, tiles[array], staging)

    def is_short(self, number: int, tiles: Sequence[Array]) -> bool:
        """As `Side.is_short`, of the message's first part."""
        array, its = self.chunks[number].parts[0]
        return self.sides[array].is_short(its, tiles[array])

    def packing(self, number: int, tiles: Sequence[Array], buffer: Array) -> Iterator[tuple[Array, Array]]:
        """The copies of message `number` out of the tiles into its buffer, see `Chunk`."""
        for array, its, part in self._parts(number, buffer):
            yield from self.sides[array].packing(its, tiles[array], part)

    def unpacking(self, number: int, tiles: Sequence[Array], buffer: Array) -> Iterator[tuple[Array, Array]]:
        """The copies of message `number` out of its buffer into the tiles."""
        for array, its, part in self._parts(number, buffer):
            yield from self.sides[array].unpacking(its, tiles[array], part)

    def _parts(self, number: int, buffer: Array) -> Iterator[tuple[int, int, Array]]:
        start = 0
        for array, its in self.chunks[number].parts:
            end = start + self.sides[array].chunks[its].elements
            yield array, its, buffer[start:end]
            start = end


@dataclass(frozen=True)
class JointMessages:
    """One rank's messages of several arrays of one dtype; `staging` and `held` as in `Messages`."""

    sends: JointSide
    receives: JointSide
    staging: int
    local: tuple[tuple[Region, Region], ...] = ()
    held: bool = False


def join_messages(each: Sequence[Messages], staging: int, itemsize: int, rank: int, size: int) -> JointMessages:
    """The messages of several arrays as those of one; each direction may stage `staging` elements in all.

    Peers come in the order in which `direct` lists them: the next rank first for what is sent, the previous one for
    what is received.
    """
    cap = message_cap(staging, itemsize) if staging else 0  # What is joined is staged.
    sends = [(rank + k) % size for k in range(1, size)]
    receives = [(rank - k) % size for k in range(1, size)]
    return JointMessages(
        _join_sides([messages.sends for messages in each], sends, cap),
        _join_sides([messages.receives for messages in each], receives, cap),
        staging,
    )


def _join_sides(sides: Sequence[Side], peers: Iterable[int], cap: int) -> JointSide:
    by_peer: dict[int, list[tuple[int, int, int]]] = {}
    for array, side in enumerate(sides):
        for number, chunk in enumerate(side.chunks):
            by_peer.setdefault(chunk.peer, []).append((array, number, chunk.elements))
    chunks = [chunk for peer in peers for chunk in _join_chunks(peer, by_peer.get(peer, ()), cap)]
    return JointSide(tuple(chunks), tuple(sides))


def _join_chunks(peer: int, messages: Iterable[tuple[int, int, int]], cap: int) -> Iterator[JointChunk]:
    """The messages of one peer joined as long as they have at most `cap` elements together."""
    parts: list[tuple[int, int]] = []
    total = 0
    for array, number, elements in messages:
        if parts and total + elements > cap:
            yield JointChunk(peer, total, tuple(parts))
            parts, total = [], 0
        parts.append((array, number))
        total += elements
    if parts:
        yield JointChunk(peer, total, tuple(parts))
