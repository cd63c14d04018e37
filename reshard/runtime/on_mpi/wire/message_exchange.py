"""The messages of one step: packed, sent, received and unpacked concurrently, within a bounded set of buffers.

It cannot deadlock: messages are posted in the order of the turns, in each of which a rank sends at most one message
and receives at most one. The first unfinished message is therefore posted at both of its ends, however few buffers
there are.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from mpi4py import MPI

from reshard.runtime.account import Account
from reshard.runtime.on_mpi.copies.stream_copy import copy_views
from reshard.runtime.on_mpi.copies.strided_copy import Array, copy_view, pair_views, view_block
from reshard.runtime.on_mpi.node.arena import Pool
from reshard.runtime.on_mpi.team import EXCHANGE, YIELDS, Team, Watch
from reshard.runtime.on_mpi.wire.chunks import Chunk, JointChunk, JointSide, Messages, Side

_TRIES = 16 if YIELDS else 1  # Each may take 50 us where ranks share cores: so often, failures are looked for in time.
_WINDOW = 64  # The most messages under way in one direction.


@dataclass(frozen=True)
class Call:
    """What all steps of one call share: the team, the waits, the buffers, and the account of this device."""

    team: Team
    watch: Watch
    pool: Pool
    memory: Account
    device: int


class _PostedMessage(NamedTuple):
    """A message under way: its number, its peer, its elements, the buffer specification for MPI, and the buffer that
    stages it, if any.
    """

    number: int
    peer: int
    elements: int
    spec: list[Any]
    buffer: Array | None


class TileCast(NamedTuple):
    """A cast of raw elements from one dtype to another on their way, to what is `narrow`, or wide. The scale has the
    shape of the wide tile: its elements are divided by it before, or multiplied after."""

    before: np.dtype[Any]
    after: np.dtype[Any]
    narrows: bool
    scale: Array | None = None

    def copy(self, pair: tuple[Array, Array], by: Array | None) -> None:
        """Casts the source of a pair of raw views into its target, with their part of the scale."""
        target, values = pair[0].view(self.after), pair[1].view(self.before)
        if by is not None and self.narrows:
            values = values / by.view(self.before)
        elif by is not None:
            values = values.astype(self.after) * by.view(self.after)
        np.copyto(target, values, casting="unsafe")


class _Lane:
    """The messages of one direction: those not posted yet, in order, and how much staging the posted ones use.

    With `held`, received messages stay in buffers, all of them, until the target may be written to. `tile` is that of
    the side, or a tuple of tiles of a joint one.
    """

    def __init__(
        self,
        call: Call,
        side: Side | JointSide,
        tile: Any,
        dtype: np.dtype[Any],
        staging: int,
        cast: TileCast | None = None,
    ) -> None:
        self._cast = cast
        # Where the plan has no buffer, a cast has a page of its own.
        self._counted = cast is None or staging > 0
        self.posted = 0
        """How many messages have been posted: the others wait, in their order."""
        self.tile = tile
        self._dtype = dtype
        self.staging = staging
        self.held = False
        self.staged = 0
        self.under_way = 0
        self._side = side
        self._call = call

    def next(self) -> _PostedMessage | None:
        """The next message, or None if there is none or no room; if nothing else is staged, there is always room."""
        number = self.posted
        if number == len(self._side.chunks) or self.under_way == _WINDOW:
            return None
        chunk = self._side.chunks[number]
        peer, elements = chunk.peer, chunk.elements
        spec = self._unstaged(number)
        if spec is None and not self.held and self.staged and self.staged + elements > self.staging:
            return None
        self.posted += 1
        self.under_way += 1
        if spec is not None:
            return _PostedMessage(number, peer, elements, spec, None)
        self.staged += elements
        if self._counted:
            self._call.memory.take(self._call.device, elements)
        buffer = self._call.pool.take(elements * self._dtype.itemsize)
        return _PostedMessage(number, peer, elements, [buffer, MPI.BYTE], buffer.view(self._dtype))

    def waiting(self) -> Iterator[tuple[int, Chunk | JointChunk]]:
        """The messages that have not been posted, each with its number."""
        return ((number, self._side.chunks[number]) for number in range(self.posted, len(self._side.chunks)))

    def unstaged(self) -> int:
        """Elements of the waiting messages that must be staged."""
        return sum(chunk.elements for number, chunk in self.waiting() if self._unstaged(number) is None)

    def _unstaged(self, number: int) -> list[Any] | None:
        """The specification with which MPI sends from, or receives into, the tile itself; None if it must be staged."""
        direct = not self.held and self._cast is None
        return self._side.unstaged(number, self.tile, self.staging) if direct else None

    def pack(self) -> list[_PostedMessage]:
        """The next messages for which there is room, those that have buffers copied out of the tile into these."""
        more = self.posted < len(self._side.chunks)
        if more and self.staged and self._side.is_short(self.posted, self.tile):
            # Packed together, messages of short runs read the tile in order (see `stream_copy`): so the next one to
            # each peer waits until there is room for all of these.
            turn: dict[int, int] = {}
            for _, chunk in self.waiting():
                if chunk.peer in turn:
                    break
                turn[chunk.peer] = chunk.elements
            if self.staging - self.staged < sum(turn.values()) <= self.staging:
                return []
        flights = list(iter(self.next, None))
        self._copy_staged(flights, packs=True)
        return flights

    def unpack(self, flights: Collection[_PostedMessage]) -> None:
        """Copies messages out of their buffers, where they have one, into the tile, and releases what they used."""
        self._copy_staged(flights, packs=False)
        for flight in flights:
            self.done(flight)

    def _copy_staged(self, flights: Iterable[_PostedMessage], packs: bool) -> None:
        """Makes the copies between the tile and the buffers of messages, as casts where that is due."""
        list_copies = self._side.packing if packs else self._side.unpacking
        staged: list[tuple[int, Array]] = []
        for number, buffer in ((each.number, each.buffer) for each in flights if each.buffer is not None):
            indexed = None if self._cast else self._side.list_indexed(number, self.tile, buffer, packs)
            if indexed is None:
                staged.append((number, buffer))
            for step in indexed or ():
                step()
        pairs = [pair for number, buffer in staged for pair in list_copies(number, self.tile, buffer)]
        if self._cast is None:
            copy_views(pairs)
            return
        scale = self._cast.scale
        scales: list[Array | None] = [None] * len(pairs)
        if scale is not None:
            like = [pair for number, buffer in staged for pair in list_copies(number, scale, buffer)]
            scales = [pair[self._cast.narrows] for pair in like]
        for pair, by in zip(pairs, scales, strict=True):
            self._cast.copy(pair, by)

    def done(self, flight: _PostedMessage) -> None:
        """Releases what a finished message used."""
        if flight.buffer is not None:
            self.staged -= flight.elements
            if self._counted:
                self._call.memory.free(self._call.device, flight.elements)
            self._call.pool.give(flight.buffer)


class MessageExchange:
    """The messages of one step, from one tile to another, both raw (`view_as_words`); or from several tiles to as
    many others, all of one dtype; or with a `cast`, which is made at the end whose elements are wider.
    """

    def __init__(self, call: Call, messages: Messages, source: Any, target: Any, cast: TileCast | None = None) -> None:
        self._call = call
        self._messages = messages
        self._cast = cast
        narrows = cast is not None and cast.narrows
        wire = target if narrows else source
        dtype: np.dtype[Any] = wire[0].dtype if isinstance(messages.sends, JointSide) else wire.dtype
        self._sends = _Lane(call, messages.sends, source, dtype, messages.staging, cast if narrows else None)
        self._receives = _Lane(call, messages.receives, target, dtype, messages.staging, None if narrows else cast)
        self._packed: list[_PostedMessage] = []
        self._arrived: list[_PostedMessage] = []
        self._requests: list[MPI.Request] = []
        self._flights: list[tuple[_Lane, _PostedMessage]] = []

    def run(self, ready: Callable[[], object] | None = None) -> None:
        """Sends and receives everything; `ready` is as in `ahead`."""
        if ready is not None:
            self.ahead(ready)
        self.start()
        ends, cast = (self._receives.tile, self._sends.tile), self._cast
        scale = None if cast is None else cast.scale
        for block in self._messages.local:
            ((target, source),) = pair_views([block], *ends)
            if cast is None:
                copy_view(target, source)
            else:
                by = None if scale is None else view_block(scale, block, "src" if cast.narrows else "dst")
                cast.copy((target, source), by)
            self.progress()
        self.finish()

    def ahead(self, ready: Callable[[], object]) -> None:
        """Does as much as there is room for without writing to the target, then calls `ready()`.

        If all that arrives fits into buffers (`Messages.held`, the same on all ranks), only copies are left afterwards.
        Otherwise messages are packed, if all of them fit, or nothing is done.
        """
        staging = self._messages.staging
        if self._messages.held:
            self._receives.held = True
            self.start()
            self._wait()
            ready()
            return
        # All messages are packed if the staging of both directions has room for them and for the largest that arrives.
        largest = max((chunk.elements for _, chunk in self._receives.waiting()), default=0)
        staged = self._sends.unstaged()
        if staged and staged + largest <= 2 * staging:
            self._sends.staging, self._receives.staging = staged, 2 * staging - staged
            self._packed += self._sends.pack()
        ready()

    def start(self) -> None:
        """Posts as many messages as there is room for, receives first."""
        comm = self._call.team.comm
        while (flight := self._receives.next()) is not None:
            self._requests.append(comm.Irecv(flight.spec, flight.peer, EXCHANGE))
            self._flights.append((self._receives, flight))
        while flights := self._packed or self._sends.pack():
            self._packed = []
            for flight in flights:
                self._requests.append(comm.Isend(flight.spec, flight.peer, EXCHANGE))
                self._flights.append((self._sends, flight))

    def finish(self) -> None:
        """Waits until all messages have been sent and received, and unpacks those that were held."""
        self._wait()
        self._receives.unpack(self._arrived)
        self._arrived.clear()

    def progress(self) -> bool:
        """Unpacks messages that have arrived and posts others in their room; returns whether any were finished."""
        done = MPI.Request.Testsome(self._requests) if self._requests else None
        for at in sorted(done or (), reverse=True):
            self._requests.pop(at)
            lane, flight = self._flights.pop(at)
            lane.under_way -= 1
            if lane is self._sends:
                lane.done(flight)
                continue
            self._call.memory.receive(self._call.device, flight.elements)
            if lane.held:
                self._arrived.append(flight)
            else:
                lane.unpack([flight])
        if done:
            self.start()
        return bool(done)

    def _wait(self) -> None:
        while self._requests:
            if not any(self.progress() for _ in range(_TRIES)):
                self._call.watch.pause()
