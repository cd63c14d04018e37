"""A move of tiles on GPUs: chunk by chunk to the host through pinned memory, the host's move, and back.

    GPU tile -> pinned chunks -> shared window -> [move] -> window -> pinned chunks -> GPU result

The ranks of a node read each other's tiles in the window, so that nothing more is staged than for a `DistArray`.
While one chunk is on its way to or from the GPU, another is copied on the host. Where MPI takes pointers to a GPU's
memory, messages go from GPU to GPU instead (`gpu_messages`).
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import numpy as np

from reshard.errors import TileError
from reshard.runtime.account import Account, begin_account
from reshard.runtime.on_mpi.direct import Direct
from reshard.runtime.on_mpi.gpu.cuda import LANES, Cuda, Strided, cuda, strided
from reshard.runtime.on_mpi.gpu.device_arrays import GpuArray, described, empty, of_host, of_its_memory, writable
from reshard.runtime.on_mpi.gpu.device_messages import GpuExchange, between_gpus
from reshard.runtime.on_mpi.move import Prepared, Request, begin, move, new_tile, where
from reshard.runtime.on_mpi.strided_copy import Array, copy, raw
from reshard.runtime.on_mpi.team import Team, Watch, moving
from reshard.runtime.on_mpi.wire.exchange import Call
from reshard.types.pair import pieces

CHUNK = 4 << 20
"""Bytes of a pinned buffer at most, of which each lane has one; the smaller tile holds all of them."""


class Given(NamedTuple):
    """A tile on a GPU, where its result goes if that is given, the GPU, and what goes from GPU to GPU, if that can."""

    tile: GpuArray
    out: GpuArray | None
    gpu: Cuda
    pointers: Direct | None


def given(tile: GpuArray, out: GpuArray | None, ready: Prepared, request: Request, rank: int, aware: bool) -> Given:
    """What a rank gives to a move, checked as far as a GPU's memory makes a difference; `aware`: MPI takes pointers."""
    if ready.way == "overwrite" and not tile.c_contiguous:
        raise TileError("the budget is met only by overwriting the donated tile, which is not C-ordered on its GPU")
    by_pointers = aware and ready.way != "overwrite"
    pointers = between_gpus(request, rank, tile.dtype.itemsize) if by_pointers else None
    return Given(tile, out, cuda(tile.device), pointers)


def host_like(tile: GpuArray) -> Array:
    """An array of the host of the same shape and dtype; as long as nobody writes to it, it takes no memory."""
    return np.empty(tile.shape, tile.dtype)


def move_on_gpu(
    team: Team, watch: Watch, ready: Prepared, request: Request, given: Given, limit: float, memory: Account | None
) -> Any:
    """The target's tile on the GPU, after agreement; where there is nothing to do, it is the caller's tile itself."""
    call = Call(team, watch, team.pool, begin_account(request.source.dtype, memory), ready.device)
    if not ready.steps.steps or given.pointers:
        with moving(team):
            found = _between(call, request, given) if ready.steps.steps else _as_it_is(given)
            team.settle(watch)
        return found
    stage = Stage(call, given.gpu, _chunk(ready, request, given.tile))
    host = _moved_by_host(stage, ready, request, given.tile, limit)
    with moving(team):
        found = _result(stage, given, host, ready.way == "overwrite")
        team.settle(Watch(team, limit))
    return found


def _between(call: Call, request: Request, given: Given) -> Any:
    tile, shape = given.tile, request.target.tile_shape
    into = given.out or described(empty(tile.array, shape), "result")
    clear = given.out is None and not request.target.even
    for size in (math.prod(tile.shape), math.prod(shape)):
        call.memory.take(call.device, size)
    GpuExchange(call, given.gpu, cast(Direct, given.pointers), tile, into).run(clear)
    return into.array


def _moved_by_host(stage: Stage, ready: Prepared, request: Request, tile: GpuArray, limit: float) -> Array:
    """The result on the host; the tile's copy there has been let go of."""
    call = stage.call
    with moving(call.team):
        held = new_tile(call.team, request.source, tile.dtype)
        call.memory.take(call.device, held.tile.size)
        stage.to_host(tile, held.tile)
        call.memory.free(call.device, held.tile.size)  # `move` counts it from here on.
    watch, _ = begin(call.team, limit, str(request), lambda: None, lambda _: where(held))
    found = move(call.team, watch, ready, request, held, None, call.memory).tile
    if ready.way != "overwrite":
        call.memory.free(call.device, held.tile.size)
    return found


def _chunk(ready: Prepared, request: Request, tile: GpuArray) -> int:
    """Elements of a pinned buffer: all of them fit where the other tile's host copy is not, or is no longer."""
    if ready.way == "overwrite":
        return 0
    smaller = min(math.prod(request.source.tile_shape), math.prod(request.target.tile_shape))
    return min(CHUNK // tile.dtype.itemsize, smaller // LANES)


def _as_it_is(given: Given) -> Any:
    """The same elements: the tile itself, or a copy of it from GPU memory to GPU memory."""
    tile, out = given.tile, given.out
    if out is None and (tile.c_contiguous or not writable(tile.array)):
        return tile.array
    into = out or described(empty(tile.array, tile.shape), "result")
    with given.gpu.current():
        given.gpu.synchronise()
        given.gpu.copy(into.memory, tile.memory, tile.shape, tile.dtype.itemsize, 0)
        given.gpu.wait(0)
    return into.array


def _result(stage: Stage, given: Given, host: Array, overwritten: bool) -> Any:
    tile = given.tile.array
    if given.out is None and not writable(tile):
        found = of_host(tile, host)
        if overwritten and hasattr(tile, "delete"):
            tile.delete()
        return found
    into = given.out
    if into is None:
        new = of_its_memory(tile, host.shape) if overwritten else empty(tile, host.shape)
        into = described(new, "result")
    stage.to_gpu(into, host)
    return into.array


@dataclass(frozen=True)
class Stage:
    """Copies between a GPU and the host, through pinned chunks of so many elements, or straight if that is 0."""

    call: Call
    gpu: Cuda
    chunk: int

    def to_host(self, source: GpuArray, target: Array) -> None:
        """Copies a tile on the GPU, of any strides, into an array of the host."""
        with self.gpu.current():
            self.gpu.synchronise()
            if not self.chunk:
                self.gpu.copy(strided(target), source.memory, target.shape, target.itemsize, 0)
                self.gpu.wait(0)
                return
            landing: deque[tuple[int, Array, Array]] = deque()
            for lane, buffer, part, place in self._parts(source, target):
                if len(landing) == LANES:
                    self._land(*landing.popleft())
                self.gpu.copy(strided(buffer), place, buffer.shape, buffer.itemsize, lane)
                landing.append((lane, buffer, part))
            while landing:
                self._land(*landing.popleft())
            self._unpin()

    def to_gpu(self, target: GpuArray, source: Array) -> None:
        """Copies an array of the host into one on the GPU, of any strides."""
        with self.gpu.current():
            self.gpu.synchronise()
            if not self.chunk:
                self.gpu.copy(target.memory, strided(source), source.shape, source.itemsize, 0)
                self.gpu.wait(0)
                return
            for lane, buffer, part, place in self._parts(target, source):
                self.gpu.wait(lane)
                copy(raw(buffer), raw(part))
                self.gpu.copy(place, strided(buffer), buffer.shape, buffer.itemsize, lane)
            for lane in range(LANES):
                self.gpu.wait(lane)
            self._unpin()

    def _parts(self, memory: GpuArray, host: Array) -> Iterator[tuple[int, Array, Array, Strided]]:
        """Lane, pinned buffer, part of the host's array and where that is on the GPU, in the order of its memory."""
        order = sorted(range(host.ndim), key=lambda dim: -abs(memory.memory.strides[dim]))
        ordered, strides = host.transpose(order), tuple(memory.memory.strides[dim] for dim in order)
        buffers = self.gpu.pinned(self.chunk * host.itemsize)
        self.call.memory.take(self.call.device, LANES * self.chunk)
        for number, spans in enumerate(pieces.cut(ordered.shape, self.chunk)):
            part = ordered[(*(slice(start, start + extent) for start, extent in spans), ...)]
            lane = number % LANES
            buffer = buffers[lane][: part.nbytes].view(part.dtype).reshape(part.shape)
            yield lane, buffer, part, Strided(memory.memory.address, strides).at([start for start, _ in spans])

    def _land(self, lane: int, buffer: Array, part: Array) -> None:
        self.gpu.wait(lane)
        copy(raw(part), raw(buffer))

    def _unpin(self) -> None:
        """The pinned buffers hold nothing any more; they are kept for the next call."""
        self.call.memory.free(self.call.device, LANES * self.chunk)
