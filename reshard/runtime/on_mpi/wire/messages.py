"""The messages of a move: where each begins and ends, the same for its sender and its receiver.

That follows from the plan alone, never from how one rank's tile happens to lie in memory, so that both ends
agree without a word.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from reshard.lower.to_mpi import Block, Move
from reshard.runtime.on_mpi.wire.chunks import Chunk, Place, chunks, copies
from reshard.runtime.on_mpi.wire.datatypes import Side

DIRECT = 64 << 20
"""Bytes of a message that goes from tile to tile, unstaged: far below the 2^31 that Open MPI can count."""

STAGED = 4 << 20
"""Bytes of a staged message where there is room: several are then packed, under way and unpacked at once."""

SMALL = 64 << 10
"""Bytes below which messages are not cut further just to have more of them under way."""


@dataclass(frozen=True)
class Messages:
    """A move's messages in the order of its turns, its local copies, and the elements a side may stage at once.

    `held` says that beside those, on every rank, all that it receives has room.
    """

    sends: Side
    receives: Side
    local: tuple[tuple[Place, Place], ...]
    staging: int
    held: bool = False


Given = Sequence[tuple[int, Sequence[Block]]]
"""What goes to, or comes from, each of some ranks, in the order of the turns."""


def messages(
    move: Move,
    ranks: Mapping[int, int],
    before: Sequence[int],
    after: Sequence[int],
    itemsize: int,
    received: int,
) -> Messages:
    """A move's messages between tiles of these shapes; `ranks` says which rank each device is, and `received` how
    many bytes one of them receives at most.
    """
    staging = move.scratch // itemsize // 2
    held = received <= staging * itemsize
    sent = [(ranks[turn.send.peer], turn.send.blocks) for turn in move.turns if turn.send]
    taken = [(ranks[turn.receive.peer], turn.receive.blocks) for turn in move.turns if turn.receive]
    return between(sent, taken, move.local, before, after, itemsize, staging, held)


def between(
    sent: Given,
    received: Given,
    local: Sequence[Block],
    before: Sequence[int],
    after: Sequence[int],
    itemsize: int,
    staging: int,
    held: bool = False,
) -> Messages:
    """Messages and local copies between tiles of these shapes, with `staging` elements of buffers a side."""
    cap = _cap(staging, itemsize)

    def side(given: Given, end: str, shape: Sequence[int]) -> Side:
        found: list[Chunk] = []
        for peer, blocks in given:
            found += chunks(peer, blocks, cap, end, shape)
        return Side(tuple(found))

    pairs = tuple(pair for block in local for pair in copies(block, before, after))
    return Messages(side(sent, "src", before), side(received, "dst", after), pairs, staging, held)


def _cap(staging: int, itemsize: int) -> int:
    """Elements of the largest message, where a side may stage so many: four under way, but no small ones."""
    if not staging:
        return max(1, DIRECT // itemsize)
    return max(1, min(staging, STAGED // itemsize, max(staging // 4, SMALL // itemsize)))


def mean_run(blocks: Sequence[Block], before: Sequence[int] | None, after: Sequence[int] | None) -> float:
    """How many elements of the blocks lie in one run in both tiles, on average, or in the one that is given.

    >>> from reshard.lower.to_mpi import Axis
    >>> block = Block((0, 0), (0, 0), (Axis(0, 4, 1, 1), Axis(1, 8, 1, 1)))
    >>> [mean_run([block], *tiles) for tiles in (((4, 16), (4, 8)), ((4, 16), None), (None, (4, 8)))]
    [8.0, 8.0, 32.0]
    """
    elements = sum(block.elements for block in blocks)
    return elements / max(1, sum(block.elements // _run(block, before, after) for block in blocks))


def _run(block: Block, before: Sequence[int] | None, after: Sequence[int] | None) -> int:
    """The same for one block, if the tiles are C-ordered."""
    run = 1
    for axis in reversed(block.axes):
        if before is not None and axis.src * math.prod(before[axis.dim + 1 :]) != run:
            break
        if after is not None and axis.dst * math.prod(after[axis.dim + 1 :]) != run:
            break
        run *= axis.extent
    return max(1, run)
