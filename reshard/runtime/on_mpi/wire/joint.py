"""The messages of several arrays as one: what goes to the same peer travels together.

    array a, to rank 1: 8 elements      array b, to rank 1: 2 elements      one message of 10 elements

Both ends join the same messages in the same order, so they agree without negotiation. Messages are joined up to the
size at which those of one array are cut.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from reshard.runtime.on_mpi.strided_copy import Array
from reshard.runtime.on_mpi.wire.chunks import Region
from reshard.runtime.on_mpi.wire.datatypes import Side
from reshard.runtime.on_mpi.wire.messages import Messages, message_cap


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


def joint(each: Sequence[Messages], staging: int, itemsize: int, rank: int, size: int) -> JointMessages:
    """The messages of several arrays as those of one; each direction may stage `staging` elements in all.

    Peers come in the order in which `direct` lists them: the next rank first for what is sent, the previous one for
    what is received.
    """
    cap = message_cap(staging, itemsize) if staging else 0  # What is joined is staged.
    sends = [(rank + k) % size for k in range(1, size)]
    receives = [(rank - k) % size for k in range(1, size)]
    return JointMessages(
        _joined([messages.sends for messages in each], sends, cap),
        _joined([messages.receives for messages in each], receives, cap),
        staging,
    )


def _joined(sides: Sequence[Side], peers: Iterable[int], cap: int) -> JointSide:
    by_peer: dict[int, list[tuple[int, int, int]]] = {}
    for array, side in enumerate(sides):
        for number, chunk in enumerate(side.chunks):
            by_peer.setdefault(chunk.peer, []).append((array, number, chunk.elements))
    chunks = [chunk for peer in peers for chunk in _of_peer(peer, by_peer.get(peer, ()), cap)]
    return JointSide(tuple(chunks), tuple(sides))


def _of_peer(peer: int, messages: Iterable[tuple[int, int, int]], cap: int) -> Iterator[JointChunk]:
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
