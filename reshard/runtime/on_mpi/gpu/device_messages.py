"""Messages from GPU to GPU, for an MPI that accepts pointers to device memory (CUDA-aware).

    tile --copy on the GPU--> slot of the send buffer --MPI--> slot of the receive buffer --copy on the GPU--> result

Every rank sends each other rank what it lacks. Messages are posted in the order of the turns, so ranks never deadlock
(see `wire.exchange`).
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
from reshard.runtime.on_mpi.direct import STAGING, Direct, plan_direct
from reshard.runtime.on_mpi.gpu.cuda import Cuda, Strided
from reshard.runtime.on_mpi.gpu.device_arrays import GpuArray, c_strides, described, empty
from reshard.runtime.on_mpi.prepare import Request
from reshard.runtime.on_mpi.tags import DEVICE
from reshard.runtime.on_mpi.wire.chunks import Chunk, MessagePiece, Region
from reshard.runtime.on_mpi.wire.exchange import Call
from reshard.synth import find_plan

CUDA_AWARE = "RESHARD_MPI_CUDA_AWARE"
"""Environment variable: 1 if MPI accepts pointers to GPU memory, 0 if not; if unset, MPI is queried."""


def takes_pointers() -> bool:
    """Whether MPI accepts pointers to GPU memory, by the environment variable if it is set, else by MPI itself."""
    setting = os.environ.get(CUDA_AWARE)
    if setting not in (None, "", "0", "1"):
        raise AgreementError(f"{CUDA_AWARE}={setting!r}: give 1 if MPI takes pointers to a GPU's memory, 0 if not")
    return setting == "1" if setting else _is_cuda_aware()


def _is_cuda_aware() -> bool:
    # Open MPI and MPICH have a function to ask; Cray's MPICH has a variable that enables GPU support.
    query = getattr(ctypes.CDLL(MPI.__file__), "MPIX_Query_cuda_support", None)
    return bool(query and query()) or os.environ.get("MPICH_GPU_SUPPORT_ENABLED") == "1"


def between_gpus(request: Request, rank: int, itemsize: int) -> Direct | None:
    """A rank's messages between GPUs; None if a sum is finished or started, or the budget leaves no room to pack."""
    source, target = request.source, request.target
    spare = (
        find_plan(source, target, request.options._replace(donate=False)).peak_bytes
        - source.tile_bytes
        - target.tile_bytes
    )
    staging = min(STAGING, spare // 2)
    if not source.partial_as(target) or staging < itemsize:
        return None
    return plan_direct(source, target, rank, tuple(range(source.mesh.size)), itemsize, staging)


_abandoned: list[object] = []
"""Moves that failed, kept alive because MPI may still write to their buffers."""


class _DeviceMessage(NamedTuple):
    """A message under way: its chunk, its slot in the buffer of its direction, and that direction."""

    chunk: Chunk
    slot: int
    sent: bool


@dataclass
class _DeviceLane:
    """The waiting messages of one direction, and a buffer of slots of `slot` elements, the size of the largest one."""

    waiting: deque[Chunk]
    slot: int
    memory: GpuArray
    free: list[int] = field(default_factory=list[int])

    def at(self, slot: int) -> int:
        """The address of a slot."""
        return self.memory.memory.address + slot * self.slot * self.memory.dtype.itemsize


class GpuExchange:
    """The messages of one move between tiles on this rank's GPU."""

    def __init__(self, call: Call, gpu: Cuda, move: Direct, source: GpuArray, target: GpuArray) -> None:
        self._call, self._gpu, self._source, self._target = call, gpu, source, target
        self._own = move.own
        staging = move.messages.staging
        self._sends = self._side(move.messages.sends.chunks, staging)
        self._receives = self._side(move.messages.receives.chunks, staging)
        self._requests: list[MPI.Request] = []
        self._flights: list[_DeviceMessage] = []

    def _side(self, messages: Sequence[Chunk], staging: int) -> _DeviceLane:
        slot = max((chunk.elements for chunk in messages), default=1)
        slots = min(len(messages), staging // slot)
        memory = described(empty(self._source.array, (slots * slot,)), "buffer")
        self._call.memory.take(self._call.device, slots * slot)
        return _DeviceLane(deque(messages), slot, memory, list(range(slots)))

    def run(self, clear: bool) -> None:
        """Sends and receives everything; with `clear`, the target is filled with zeros first, for its padding."""
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
                self._copy(_strided(self._target, target), _strided(self._source, source), source.extents)
            self._post()
            while self._requests:
                self._progress()
            self._gpu.wait(0)

    def _post(self) -> None:
        """Posts as many messages as there is room for, receives first."""
        comm = self._call.team.comm
        while self._receives.waiting and self._receives.free:
            flight = _DeviceMessage(self._receives.waiting.popleft(), self._receives.free.pop(), False)
            self._add(flight, comm.Irecv(self._spec(self._receives, flight), flight.chunk.peer, DEVICE))
        while self._sends.waiting and self._sends.free:
            flight = _DeviceMessage(self._sends.waiting.popleft(), self._sends.free.pop(), True)
            for piece in flight.chunk.pieces:
                for buffer, region in self._parts(self._sends, flight.slot, piece):
                    self._copy(buffer, _strided(self._source, region), region.extents)
            self._gpu.wait(0)
            self._add(flight, comm.Isend(self._spec(self._sends, flight), flight.chunk.peer, DEVICE))

    def _progress(self) -> None:
        """Unpacks messages that have arrived and posts others in their room."""
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

    def _unpack(self, flight: _DeviceMessage) -> None:
        self._call.memory.receive(self._call.device, flight.chunk.elements)
        for piece in flight.chunk.pieces:
            for buffer, region in self._parts(self._receives, flight.slot, piece):
                self._copy(_strided(self._target, region), buffer, region.extents)
        self._gpu.wait(0)  # The slot is free only when the copies out of it are done.

    def _parts(self, side: _DeviceLane, slot: int, piece: MessagePiece) -> list[tuple[Strided, Region]]:
        """The parts of a piece: the memory of each in a slot, and its region of the tile."""
        itemsize = side.memory.dtype.itemsize
        whole = Strided(side.at(slot) + piece.at * itemsize, c_strides(piece.extents, itemsize))
        return [
            (whole.at([cut.start for cut in index if isinstance(cut, slice)]), region) for index, region in piece.parts
        ]

    def _copy(self, to: Strided, by: Strided, extents: Sequence[int]) -> None:
        self._gpu.copy(to, by, extents, self._source.dtype.itemsize, 0)

    def _spec(self, side: _DeviceLane, flight: _DeviceMessage) -> list[Any]:
        return [_memory(side.at(flight.slot), flight.chunk.elements * side.memory.dtype.itemsize), MPI.BYTE]

    def _add(self, flight: _DeviceMessage, request: MPI.Request) -> None:
        self._requests.append(request)
        self._flights.append(flight)


def _memory(address: int, nbytes: int) -> MPI.memory:
    """GPU memory in the form that mpi4py accepts; the host must not read it."""
    return MPI.memory.fromaddress(address, nbytes)


def _strided(array: GpuArray, region: Region) -> Strided:
    """A region of a tile as strided memory."""
    start = array.memory.at(region.start).address
    return Strided(start, tuple(array.memory.strides[dim] * step for dim, step in region.steps))
