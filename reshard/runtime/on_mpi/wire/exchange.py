"""The messages of one step: packed, sent, received and unpacked concurrently, within a bounded set of buffers.

It cannot deadlock: messages are posted in the order of the turns, in each of which a rank sends at most one message
and receives at most one. The first unfinished message is therefore posted at both of its ends, however few buffers
there are.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from mpi4py import MPI

from reshard.runtime.account import Account
from reshard.runtime.on_mpi.pool import Pool
from reshard.runtime.on_mpi.strided_copy import Array, copy
from reshard.runtime.on_mpi.tags import EXCHANGE
from reshard.runtime.on_mpi.team import YIELDS, Team, Watch
from reshard.runtime.on_mpi.wire.chunks import Chunk
from reshard.runtime.on_mpi.wire.datatypes import Side, memory_of
from reshard.runtime.on_mpi.wire.messages import Messages

_TRIES = 1000 if YIELDS else 1
_BYTE = np.dtype(np.uint8)
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
    """A message under way: its chunk, the buffer specification for MPI, and the buffer that stages it, if any."""

    chunk: Chunk
    spec: list[Any]
    buffer: Array | None


class _Lane:
    """The messages of one direction: those not posted yet, in order, and how much staging the posted ones use.

    With `held`, received messages stay in buffers, all of them, until the target may be written to.
    """

    def __init__(self, call: Call, side: Side, tile: Array, staging: int) -> None:
        self.waiting = deque(enumerate(side.chunks))
        self.tile = tile
        self.staging = staging
        self.held = False
        self.staged = 0
        self.under_way = 0
        self._side = side
        self._call = call

    def next(self) -> _PostedMessage | None:
        """The next message, or None if there is none or no room; if nothing else is staged, there is always room."""
        if not self.waiting or self.under_way == _WINDOW:
            return None
        number, chunk = self.waiting[0]
        spec = self._unstaged(number, chunk)
        if spec is None and not self.held and self.staged and self.staged + chunk.elements > self.staging:
            return None
        self.waiting.popleft()
        self.under_way += 1
        if spec is not None:
            return _PostedMessage(chunk, spec, None)
        buffer = self._stage(chunk)
        return _PostedMessage(chunk, [buffer.view(_BYTE), MPI.BYTE], buffer)

    def unstaged(self) -> int:
        """Elements of the waiting messages that must be staged."""
        return sum(chunk.elements for number, chunk in self.waiting if self._unstaged(number, chunk) is None)

    def _unstaged(self, number: int, chunk: Chunk) -> list[Any] | None:
        """The specification with which MPI sends from, or receives into, the tile itself; None if it must be staged."""
        if self.held:
            return None
        memory = chunk.direct(self.tile)
        if memory is not None:
            return [memory.view(_BYTE), MPI.BYTE]
        # Plans assume C-ordered tiles and may leave no room to stage messages of other tiles: MPI packs those.
        roomless = chunk.elements > self.staging and not chunk.padded
        if roomless or self._side.types.long(number, chunk, self.tile):
            return [memory_of(self.tile), 1, self._side.types.of(number, chunk, self.tile)]
        return None

    def done(self, flight: _PostedMessage) -> None:
        """Releases what a finished message used."""
        if flight.buffer is not None:
            self.staged -= flight.chunk.elements
            self._call.memory.free(self._call.device, flight.chunk.elements)
            self._call.pool.give(flight.buffer)

    def _stage(self, chunk: Chunk) -> Array:
        self.staged += chunk.elements
        self._call.memory.take(self._call.device, chunk.elements)
        return self._call.pool.take(chunk.elements * self.tile.itemsize).view(self.tile.dtype)


class MessageExchange:
    """The messages of one step, from one tile to another, both raw (`strided_copy.raw`)."""

    def __init__(self, call: Call, messages: Messages, source: Array, target: Array) -> None:
        self._call = call
        self._messages = messages
        self._sends = _Lane(call, messages.sends, source, messages.staging)
        self._receives = _Lane(call, messages.receives, target, messages.staging)
        self._packed: deque[_PostedMessage] = deque()
        self._arrived: deque[_PostedMessage] = deque()
        self._requests: list[MPI.Request] = []
        self._flights: list[tuple[_Lane, _PostedMessage]] = []

    def run(self, ready: Callable[[], None] | None = None) -> None:
        """Sends and receives everything; `ready` is as in `ahead`."""
        if ready is not None:
            self.ahead(ready)
        self.start()
        for source, target in self._messages.local:
            copy(target.of(self._receives.tile), source.of(self._sends.tile))
            self.progress()
        self.finish()

    def ahead(self, ready: Callable[[], None]) -> None:
        """Does as much as there is room for without writing to the target, then calls `ready()`.

        If all that arrives fits into buffers (`Messages.held`, the same on all ranks), only copies are left afterwards.
        Otherwise messages are packed, if all of them fit, or nothing is done.
        """
        if not self._messages.held:
            self._pack_ahead()
            ready()
            return
        self._receives.held = True
        self.start()
        self._wait()
        ready()

    def start(self) -> None:
        """Posts as many messages as there is room for, receives first."""
        comm = self._call.team.comm
        while (flight := self._receives.next()) is not None:
            request = comm.Irecv(flight.spec, flight.chunk.peer, EXCHANGE)
            self._add(self._receives, flight, request)
        while self._packed:
            self._send(self._packed.popleft())
        while (flight := self._sends.next()) is not None:
            self._pack(flight)
            self._send(flight)

    def finish(self) -> None:
        """Waits until all messages have been sent and received, and unpacks those that were held."""
        self._wait()
        while self._arrived:
            self._unpack(self._arrived.popleft())

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
            self._call.memory.receive(self._call.device, flight.chunk.elements)
            if lane.held:
                self._arrived.append(flight)
            else:
                self._unpack(flight)
        if done:
            self.start()
        return bool(done)

    def _wait(self) -> None:
        while self._requests:
            if not any(self.progress() for _ in range(_TRIES)):
                self._call.watch.pause()

    def _unpack(self, flight: _PostedMessage) -> None:
        if flight.buffer is not None:
            flight.chunk.unpack(self._receives.tile, flight.buffer)
        self._receives.done(flight)

    def _pack_ahead(self) -> None:
        """Packs all messages, if the staging has room for them and for the largest message that arrives."""
        largest = max((chunk.elements for _, chunk in self._receives.waiting), default=0)
        staged = self._sends.unstaged()
        if not staged or staged + largest > 2 * self._messages.staging:
            return
        self._sends.staging = staged
        self._receives.staging = 2 * self._messages.staging - staged
        while (flight := self._sends.next()) is not None:
            self._pack(flight)
            self._packed.append(flight)

    def _pack(self, flight: _PostedMessage) -> None:
        if flight.buffer is not None:
            flight.chunk.pack(self._sends.tile, flight.buffer)

    def _send(self, flight: _PostedMessage) -> None:
        request = self._call.team.comm.Isend(flight.spec, flight.chunk.peer, EXCHANGE)
        self._add(self._sends, flight, request)

    def _add(self, lane: _Lane, flight: _PostedMessage, request: MPI.Request) -> None:
        self._requests.append(request)
        self._flights.append((lane, flight))
