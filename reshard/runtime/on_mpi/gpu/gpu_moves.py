"""Moves of tiles on GPUs: through pinned memory, the host's move and back, or by messages from GPU to GPU.

    GPU tile -> pinned chunks -> shared window -> [move] -> window -> pinned chunks -> GPU result

The host copies lie in shared windows, where the ranks of a node read each other's, so that nothing else is staged.
While one chunk crosses the bus, another one is copied on the host. If MPI accepts pointers to GPU memory (CUDA-aware),
messages go from GPU to GPU instead:

    tile --copy on the GPU--> slot of the send buffer --MPI--> slot of the receive buffer --copy on the GPU--> result

Every rank then sends each other rank what it lacks. Messages are posted in the order of the turns, so ranks never
deadlock (see `wire.message_exchange`).
"""

from __future__ import annotations

import ctypes
import math
import os
from collections import deque
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
from mpi4py import MPI

from reshard.errors import AgreementError, TileError
from reshard.geometry.blocks import Block, split_box
from reshard.lower.to_mpi.tile_blocks import End
from reshard.runtime.account import Account, begin_account
from reshard.runtime.on_mpi.collective import prepare_together
from reshard.runtime.on_mpi.copies.strided_copy import Array, copy_view, locate_steps, view_as_words
from reshard.runtime.on_mpi.direct_moves import STAGING, Direct, plan_direct
from reshard.runtime.on_mpi.gpu.cuda_arrays import (
    LANES,
    Cuda,
    GpuArray,
    Strided,
    describe_array,
    find_gpu,
    is_writable,
    make_empty,
    make_from_host,
    memory_of_array,
    reuse_memory,
)
from reshard.runtime.on_mpi.prepare import Request, TilePlan
from reshard.runtime.on_mpi.team import DEVICE, Team, Watch
from reshard.runtime.on_mpi.transports import transport_tile
from reshard.runtime.on_mpi.window_tiles import new_tile, post_tile
from reshard.runtime.on_mpi.wire.chunks import Chunk, JointSide, Side
from reshard.runtime.on_mpi.wire.message_exchange import Call
from reshard.synth import find_plan

CHUNK = 4 << 20
"""The most bytes of a pinned buffer, of which each lane has one; together they are no larger than the smaller tile."""

CUDA_AWARE = "RESHARD_MPI_CUDA_AWARE"
"""Environment variable: 1 if MPI accepts pointers to GPU memory, 0 if not; if unset, MPI is queried."""


class DeviceTiles(NamedTuple):
    """One rank's tile on a GPU, the caller's `out` if there is one, the GPU, and the messages between GPUs; None if the
    move goes through the host.
    """

    tile: GpuArray
    out: GpuArray | None
    gpu: Cuda
    pointers: Direct | None


def prepare_device_tiles(
    tile: GpuArray, out: GpuArray | None, ready: TilePlan, request: Request, rank: int, aware: bool
) -> DeviceTiles:
    """One rank's part of a move on GPUs; `aware` says that MPI accepts pointers to GPU memory.

    Raises `TileError` if the tile must be overwritten and is not C-ordered.
    """
    if ready.transport == "overwrite" and not tile.c_contiguous:
        raise TileError("the budget is met only by overwriting the donated tile, which is not C-ordered on its GPU")
    by_pointers = aware and ready.transport != "overwrite"
    pointers = plan_between_gpus(request, rank, tile.dtype.itemsize) if by_pointers else None
    return DeviceTiles(tile, out, find_gpu(tile.device), pointers)


def plan_between_gpus(request: Request, rank: int, itemsize: int) -> Direct | None:
    """A rank's messages between GPUs; None if a sum is finished or started, or the budget leaves no room to pack."""
    source, target = request.source, request.target
    peak = find_plan(source, target, request.options._replace(donate=False)).peak_bytes
    staging = min(STAGING, (peak - source.tile_bytes - target.tile_bytes) // 2)
    if not source.partial_as(target) or staging < itemsize:
        return None
    return plan_direct(source, target, rank, tuple(range(source.mesh.size)), itemsize, staging)


def takes_pointers() -> bool:
    """Whether MPI accepts pointers to GPU memory, by the environment variable if it is set, else by MPI itself."""
    setting = os.environ.get(CUDA_AWARE)
    if setting not in (None, "", "0", "1"):
        raise AgreementError(f"{CUDA_AWARE}={setting!r}: give 1 if MPI takes pointers to a GPU's memory, 0 if not")
    return setting == "1" if setting else is_cuda_aware()


def is_cuda_aware() -> bool:
    """Whether MPI says that it takes pointers to GPU memory."""
    # Open MPI and MPICH have a function to ask; Cray's MPICH has a variable that enables GPU support.
    query = getattr(ctypes.CDLL(MPI.__file__), "MPIX_Query_cuda_support", None)
    return bool(query and query()) or os.environ.get("MPICH_GPU_SUPPORT_ENABLED") == "1"


def host_like(tile: GpuArray) -> Array:
    """A host array of the same shape and dtype, for checks; it takes no memory as long as it is not written to."""
    return np.empty(tile.shape, tile.dtype)


def move_on_gpu(team: Team, watch: Watch, ready: TilePlan, tiles: DeviceTiles, memory: Account | None) -> Any:
    """The target's tile on the GPU, inside a `collective`; if there is nothing to move, the caller's tile itself."""
    request, (tile, out, gpu, pointers) = ready.request, tiles
    call = Call(team, watch, team.pool, begin_account(request.source.dtype, memory), ready.device)
    if ready.stays:
        if out is None and (tile.c_contiguous or not is_writable(tile.array)):
            return tile.array
        into = out or describe_array(make_empty(tile.array, tile.shape), "result")
        with gpu.current():
            gpu.synchronise()
            gpu.copy(into.memory, tile.memory, tile.shape, tile.dtype.itemsize, 0)
            gpu.wait(0)
        return into.array
    if pointers is not None:
        shape = request.target.tile_shape
        into = out or describe_array(make_empty(tile.array, shape), "result")
        for size in (math.prod(tile.shape), math.prod(shape)):
            call.memory.take(call.device, size)
        GpuExchange(call, gpu, pointers, tile, into).run(clear=out is None and not request.target.even)
        return into.array
    # Through the host. While tiles are copied to or from the GPU, only one of the two tiles has its host copy, so all
    # pinned buffers together may be as large as the smaller tile; a budget that overwrites the tile has no room for
    # any.
    overwritten = ready.transport == "overwrite"
    smaller = min(math.prod(request.source.tile_shape), math.prod(request.target.tile_shape))
    stage = DeviceStage(call, gpu, 0 if overwritten else min(CHUNK // tile.dtype.itemsize, smaller // LANES))
    held = new_tile(team, watch, request.source, tile.dtype)
    call.memory.take(call.device, held.tile.size)
    stage.to_host(tile, held.tile)
    call.memory.free(call.device, held.tile.size)  # From here on, `transport_tile` counts it.
    prepare_together(team, watch, lambda: None, lambda _: str(request), lambda _: post_tile(held))
    host = transport_tile(team, watch, ready, held, None, call.memory).tile
    team.settle(watch)
    if not overwritten:
        call.memory.free(call.device, held.tile.size)  # The host copy of the tile dies here.
    if out is None and not is_writable(tile.array):
        result = make_from_host(tile.array, host)
        if overwritten and hasattr(tile.array, "delete"):
            tile.array.delete()
        return result
    if out is None:
        new = reuse_memory(tile.array, host.shape) if overwritten else make_empty(tile.array, host.shape)
        out = describe_array(new, "result")
    stage.to_gpu(out, host)
    return out.array


class DeviceStage(NamedTuple):
    """Copies between a GPU and the host through pinned buffers of `chunk` elements; directly if that is 0."""

    call: Call
    gpu: Cuda
    chunk: int

    def to_host(self, source: GpuArray, target: Array) -> None:
        """Copies a tile of any strides on the GPU into a host array."""
        with self.gpu.current():
            self.gpu.synchronise()
            if not self.chunk:
                self.gpu.copy(memory_of_array(target), source.memory, target.shape, target.itemsize, 0)
                self.gpu.wait(0)
                return
            landing: deque[tuple[int, Array, Array]] = deque()

            def land() -> None:
                lane, buffer, part = landing.popleft()
                self.gpu.wait(lane)
                copy_view(view_as_words(part), view_as_words(buffer))

            for lane, buffer, part, place in self._parts(source, target):
                if len(landing) == LANES:
                    land()
                self.gpu.copy(memory_of_array(buffer), place, buffer.shape, buffer.itemsize, lane)
                landing.append((lane, buffer, part))
            while landing:
                land()
            self.call.memory.free(self.call.device, LANES * self.chunk)

    def to_gpu(self, target: GpuArray, source: Array) -> None:
        """Copies a host array into a tile of any strides on the GPU."""
        with self.gpu.current():
            self.gpu.synchronise()
            if not self.chunk:
                self.gpu.copy(target.memory, memory_of_array(source), source.shape, source.itemsize, 0)
                self.gpu.wait(0)
                return
            for lane, buffer, part, place in self._parts(target, source):
                self.gpu.wait(lane)
                copy_view(view_as_words(buffer), view_as_words(part))
                self.gpu.copy(place, memory_of_array(buffer), buffer.shape, buffer.itemsize, lane)
            for lane in range(LANES):
                self.gpu.wait(lane)
            self.call.memory.free(self.call.device, LANES * self.chunk)

    def _parts(self, memory: GpuArray, host: Array) -> Iterator[tuple[int, Array, Array, Strided]]:
        """For each part: its lane, its pinned buffer, the part of the host array, and its memory on the GPU.

        Parts come in the order of the GPU's memory. The pinned buffers are kept for the next call, and counted in this.
        """
        order = sorted(range(host.ndim), key=lambda dim: -abs(memory.memory.strides[dim]))
        ordered, strides = host.transpose(order), tuple(memory.memory.strides[dim] for dim in order)
        buffers = self.gpu.pinned(self.chunk * host.itemsize)
        self.call.memory.take(self.call.device, LANES * self.chunk)
        for number, spans in enumerate(split_box(ordered.shape, self.chunk)):
            part = ordered[(*(slice(start, start + extent) for start, extent in spans), ...)]
            lane = number % LANES
            buffer = buffers[lane][: part.nbytes].view(part.dtype).reshape(part.shape)
            yield lane, buffer, part, Strided(memory.memory.address, strides).at([start for start, _ in spans])


_abandoned: list[object] = []
"""Moves that failed, kept alive because MPI may still write to their buffers."""


class _DeviceLane:
    """The waiting messages of one direction, and a buffer of slots, each of the size of the largest one."""

    def __init__(self, call: Call, source: GpuArray, side: Side | JointSide, staging: int) -> None:
        self.waiting = deque(chunk for chunk in side.chunks if isinstance(chunk, Chunk))
        slot = max((chunk.elements for chunk in self.waiting), default=1)
        slots = min(len(self.waiting), staging // slot)
        self.memory = describe_array(make_empty(source.array, (slots * slot,)), "buffer")
        self.elements = slots * slot
        call.memory.take(call.device, self.elements)
        itemsize = source.dtype.itemsize
        self.free = [self.memory.memory.address + number * slot * itemsize for number in range(slots)]


class GpuExchange:
    """The messages of one move between tiles on this rank's GPU."""

    def __init__(self, call: Call, gpu: Cuda, move: Direct, source: GpuArray, target: GpuArray) -> None:
        self._call, self._gpu, self._source, self._target = call, gpu, source, target
        self._own = move.own
        self._itemsize = source.dtype.itemsize
        staging = move.messages.staging
        self._sends = _DeviceLane(call, source, move.messages.sends, staging)
        self._receives = _DeviceLane(call, source, move.messages.receives, staging)
        self._requests: list[MPI.Request] = []
        self._flights: list[tuple[_DeviceLane, Chunk, int]] = []  # Each with the address of its slot.

    def run(self, clear: bool) -> None:
        """Sends and receives everything; with `clear`, the target is filled with zeros first, for its padding."""
        try:
            with self._gpu.current():
                self._gpu.synchronise()
                if clear:
                    self._gpu.clear(self._target.memory.address, math.prod(self._target.shape) * self._itemsize)
                for block in self._own:
                    self._copy(_place(self._target, block, "dst"), _place(self._source, block, "src"), block)
                self._post()
                while self._requests:
                    self._progress()
                self._gpu.wait(0)
        except BaseException:
            _abandoned.append(self)
            raise
        for lane in (self._sends, self._receives):
            self._call.memory.free(self._call.device, lane.elements)

    def _post(self) -> None:
        """Posts as many messages as there is room for, receives first."""
        comm = self._call.team.comm
        for lane, post in ((self._receives, comm.Irecv), (self._sends, comm.Isend)):
            while lane.waiting and lane.free:
                chunk, slot = lane.waiting.popleft(), lane.free.pop()
                if lane is self._sends:
                    for block in chunk.blocks:
                        self._copy(self._in_slot(slot, block), _place(self._source, block, "src"), block)
                    self._gpu.wait(0)
                spec = [memory_at(slot, chunk.elements * self._itemsize), MPI.BYTE]
                self._requests.append(post(spec, chunk.peer, DEVICE))
                self._flights.append((lane, chunk, slot))

    def _progress(self) -> None:
        """Unpacks messages that have arrived and posts others in their room."""
        done = MPI.Request.Testsome(self._requests)
        for at in sorted(done or (), reverse=True):
            self._requests.pop(at)
            lane, chunk, slot = self._flights.pop(at)
            if lane is self._receives:
                self._call.memory.receive(self._call.device, chunk.elements)
                for block in chunk.blocks:
                    self._copy(_place(self._target, block, "src"), self._in_slot(slot, block), block)
                self._gpu.wait(0)  # The slot is free only when the copies out of it are done.
            lane.free.append(slot)
        if done:
            self._post()
        else:
            self._call.watch.pause()

    def _in_slot(self, slot: int, block: Block) -> Strided:
        """A block of a message, in the memory of its slot."""
        return Strided(slot + block.dst * self._itemsize, tuple(axis.dst * self._itemsize for axis in block.axes))

    def _copy(self, to: Strided, by: Strided, block: Block) -> None:
        self._gpu.copy(to, by, block.extents, self._itemsize, 0)


def memory_at(address: int, nbytes: int) -> MPI.memory:
    """GPU memory in the form that mpi4py accepts; the host must not read it."""
    return MPI.memory.fromaddress(address, nbytes)


def _place(array: GpuArray, block: Block, end: End) -> Strided:
    """One end of a block as strided memory."""
    start, steps = (block.src, [axis.src for axis in block.axes])
    if end == "dst":
        start, steps = (block.dst, [axis.dst for axis in block.axes])
    offset, strides = locate_steps(array.shape, array.memory.strides, start, steps)
    return Strided(array.memory.address + offset, tuple(strides))
