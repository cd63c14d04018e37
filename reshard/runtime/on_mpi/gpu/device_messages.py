"""A move of tiles on GPUs by messages whose memory is the GPUs': for an MPI that takes such pointers.

Every rank sends each other one what it lacks. Messages are packed and unpacked by copies on the GPU, in slots of
two buffers there, and posted in the order of the move's turns, so that no rank waits for ever (see `exchange`).
"""

from __future__ import annotations

import ctypes
import math
import os
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from mpi4py import MPI

from reshard.errors import AgreementError
from reshard.runtime.on_mpi.direct import STAGING, Direct, direct
from reshard.runtime.on_mpi.gpu.cuda import Cuda, Strided
from reshard.runtime.on_mpi.gpu.device_arrays import GpuArray, c_strides, described, empty
from reshard.runtime.on_mpi.move import Request
from reshard.runtime.on_mpi.wire.chunks import Chunk, Piece, Place
from reshard.runtime.on_mpi.wire.exchange import Call
from reshard.synth import plan

CUDA_AWARE = "RESHARD_MPI_CUDA_AWARE"
"""Environment variable: 1 if MPI takes pointers to a GPU's memory, 0 if not; without it, MPI is asked."""

_TAG = 903


def takes_pointers() -> bool:
    """Whether MPI takes pointers to GPUs: as the environment says, else as MPI does."""
    said = os.environ.get(CUDA_AWARE)
    if said not in (None, "", "0", "1"):
        raise AgreementError(f"{CUDA_AWARE}={said!r}: give 1 if MPI takes pointers to a GPU's memory, 0 if not")
    return said == "1" if said else _says_so()


def _says_so() -> bool:
    """Open MPI and MPICH answer a function; Cray's MPICH has its transport layer for GPUs switched on by a variable."""
    ask = getattr(ctypes.CDLL(MPI.__file__), "MPIX_Query_cuda_support", None)
    return bool(ask and ask()) or os.environ.get("MPICH_GPU_SUPPORT_ENABLED") == "1"


def between_gpus(request: Request, rank: int, itemsize: int) -> Direct | None:
    """What a rank sends and receives, if no sum is to be finished and the plan's memory has room to pack."""
    source, target = request.source, request.target
    found = plan(source, target, request.budget, request.network)
    spare = found.peak_bytes - source.tile_bytes - target.tile_bytes
    staging = min(STAGING, spare // 2)
    if source.partial != target.partial or staging < itemsize:
        return None
    return direct(source, target, rank, tuple(range(source.mesh.size)), itemsize, staging)


_abandoned: list[object] = []
"""Moves that failed: MPI may still write to their buffers, so those are kept."""


class _Flight(NamedTuple):
    chunk: Chunk
    slot: int
    sent: bool


@dataclass
class _Side:
    """The messages of one direction that wait, and the slots of its buffer, each as large as the largest of them."""

    waiting: deque[Chunk]
    slot: int
    memory: GpuArray
    free: list[int] = field(default_factory=list[int])

    def at(self, slot: int) -> int:
        """A slot's address."""
        return self.memory.memory.address + slot * self.slot * self.memory.dtype.itemsize


class GpuExchange:
    """One move from a tile to another, both on this rank's GPU."""

    def __init__(self, call: Call, gpu: Cuda, move: Direct, source: GpuArray, target: GpuArray) -> None:
        self._call, self._gpu, self._source, self._target = call, gpu, source, target
        self._own = move.own
        staging = move.messages.staging
        self._sends = self._side(move.messages.sends.chunks, staging)
        self._receives = self._side(move.messages.receives.chunks, staging)
        self._requests: list[MPI.Request] = []
        self._flights: list[_Flight] = []

    def _side(self, messages: Sequence[Chunk], staging: int) -> _Side:
        slot = max((chunk.elements for chunk in messages), default=1)
        slots = min(len(messages), staging // slot)
        memory = described(empty(self._source.array, (slots * slot,)), "buffer")
        self._call.memory.take(self._call.device, slots * slot)
        return _Side(deque(messages), slot, memory, list(range(slots)))

    def run(self, clear: bool) -> None:
        """Moves everything; the target is written to as messages arrive. `clear` writes zeros to all of it first, for
        padding.
        """
        try:
            self._run(clear)
        except BaseException:
            _abandoned.append(self)
            raise
        for side in (self._sends, self._receives):
            self._call.memory.free(self._call.device, math.prod(side.memory.shape))

    def _run(self, clear: bool) -> None:
        with self._gpu.current():
            self._gpu.synchronise()
            if clear:
                nbytes = math.prod(self._target.shape) * self._target.dtype.itemsize
                self._gpu.clear(self._target.memory.address, nbytes)
            for source, target in self._own:
                self._copy(_place(self._target, target), _place(self._source, source), source.extents)
            self._post()
            while self._requests:
                self._progress()
            self._gpu.wait(0)

    def _post(self) -> None:
        """Posts what there is room for, receives first."""
        comm = self._call.team.comm
        while self._receives.waiting and self._receives.free:
            flight = _Flight(self._receives.waiting.popleft(), self._receives.free.pop(), False)
            self._add(flight, comm.Irecv(self._spec(self._receives, flight), flight.chunk.peer, _TAG))
        while self._sends.waiting and self._sends.free:
            flight = _Flight(self._sends.waiting.popleft(), self._sends.free.pop(), True)
            for piece in flight.chunk.pieces:
                for buffer, place in self._parts(self._sends, flight.slot, piece):
                    self._copy(buffer, _place(self._source, place), place.extents)
            self._gpu.wait(0)
            self._add(flight, comm.Isend(self._spec(self._sends, flight), flight.chunk.peer, _TAG))

    def _progress(self) -> None:
        """Unpacks what has arrived, and posts what that made room for."""
        done = MPI.Request.Testsome(self._requests)
        for at in sorted(done or (), reverse=True):
            self._requests.pop(at)
            flight = self._flights.pop(at)
            if not flight.sent:
                self._unpack(flight)
            (self._sends if flight.sent else self._receives).free.append(flight.slot)
        if done:
            self._post()
        else:
            self._call.watch.pause()

    def _unpack(self, flight: _Flight) -> None:
        self._call.memory.receive(self._call.device, flight.chunk.elements)
        for piece in flight.chunk.pieces:
            for buffer, place in self._parts(self._receives, flight.slot, piece):
                self._copy(_place(self._target, place), buffer, place.extents)
        self._gpu.wait(0)  # Before MPI writes to the slot again.

    def _parts(self, side: _Side, slot: int, piece: Piece) -> list[tuple[Strided, Place]]:
        """A piece's parts in a slot, and where they are in a tile."""
        itemsize = side.memory.dtype.itemsize
        whole = Strided(side.at(slot) + piece.at * itemsize, c_strides(piece.extents, itemsize))
        return [
            (whole.at([cut.start for cut in where if isinstance(cut, slice)]), place) for where, place in piece.parts
        ]

    def _copy(self, to: Strided, by: Strided, extents: Sequence[int]) -> None:
        self._gpu.copy(to, by, extents, self._source.dtype.itemsize, 0)

    def _spec(self, side: _Side, flight: _Flight) -> list[Any]:
        return [_memory(side.at(flight.slot), flight.chunk.elements * side.memory.dtype.itemsize), MPI.BYTE]

    def _add(self, flight: _Flight, request: MPI.Request) -> None:
        self._requests.append(request)
        self._flights.append(flight)


def _memory(address: int, nbytes: int) -> MPI.memory:
    """A GPU's memory as MPI is given it; nobody on the host may look into it."""
    return MPI.memory.fromaddress(address, nbytes)


def _place(array: GpuArray, place: Place) -> Strided:
    """A place of a tile, with the strides of its axes."""
    start = array.memory.at(place.start).address
    return Strided(start, tuple(array.memory.strides[dim] * step for dim, step in place.steps))
