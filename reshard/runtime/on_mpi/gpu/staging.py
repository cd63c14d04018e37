"""Moves of tiles on GPUs: chunk by chunk through pinned memory to the host, the host's move, and back.

    GPU tile -> pinned chunks -> shared window -> [move] -> window -> pinned chunks -> GPU result

The host copies lie in shared windows, where the ranks of a node read each other's, so that nothing else is staged.
While one chunk crosses the bus, another one is copied on the host. If MPI accepts pointers to GPU memory, messages go
from GPU to GPU instead (`device_messages`).
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import numpy as np

from reshard.errors import TileError
from reshard.geometry.blocks import split_box
from reshard.runtime.account import Account, begin_account
from reshard.runtime.on_mpi.collective import prepare_together
from reshard.runtime.on_mpi.copies.strided_copy import Array, copy_view, view_as_words
from reshard.runtime.on_mpi.direct import Direct
from reshard.runtime.on_mpi.gpu.cuda import LANES, Cuda, Strided, cuda, strided
from reshard.runtime.on_mpi.gpu.device_arrays import GpuArray, described, empty, of_host, of_its_memory, writable
from reshard.runtime.on_mpi.gpu.device_messages import GpuExchange, between_gpus
from reshard.runtime.on_mpi.prepare import Request, TilePlan
from reshard.runtime.on_mpi.team import Team, Watch
from reshard.runtime.on_mpi.transports import move_tile
from reshard.runtime.on_mpi.window_tiles import new_tile, post_tile
from reshard.runtime.on_mpi.wire.exchange import Call

CHUNK = 4 << 20
"""The most bytes of a pinned buffer, of which each lane has one; together they are no larger than the smaller tile."""


class DeviceTiles(NamedTuple):
    """One rank's tile on a GPU, the caller's `out` if there is one, the GPU, and the messages between GPUs; None if the
    move goes through the host.
    """

    tile: GpuArray
    out: GpuArray | None
    gpu: Cuda
    pointers: Direct | None


def device_tiles(
    tile: GpuArray, out: GpuArray | None, ready: TilePlan, request: Request, rank: int, aware: bool
) -> DeviceTiles:
    """One rank's part of a move on GPUs; `aware` says that MPI accepts pointers to GPU memory.

    Raises `TileError` if the tile must be overwritten and is not C-ordered.
    """
    if ready.transport == "overwrite" and not tile.c_contiguous:
        raise TileError("the budget is met only by overwriting the donated tile, which is not C-ordered on its GPU")
    by_pointers = aware and ready.transport != "overwrite"
    pointers = between_gpus(request, rank, tile.dtype.itemsize) if by_pointers else None
    return DeviceTiles(tile, out, cuda(tile.device), pointers)


def host_like(tile: GpuArray) -> Array:
    """A host array of the same shape and dtype, for checks; it takes no memory as long as it is not written to."""
    return np.empty(tile.shape, tile.dtype)


def move_on_gpu(
    team: Team,
    watch: Watch,
    ready: TilePlan,
    tiles: DeviceTiles,
    memory: Account | None,
) -> Any:
    """The target's tile on the GPU, inside a `collective`; if there is nothing to move, the caller's tile itself."""
    request = ready.request
    call = Call(team, watch, team.pool, begin_account(request.source.dtype, memory), ready.device)
    if ready.stays or tiles.pointers:
        return _between_gpus(call, request, tiles) if not ready.stays else _keep_on_gpu(tiles)
    stage = DeviceStage(call, tiles.gpu, _size_chunk(ready, request, tiles.tile))
    host = _move_on_host(stage, ready, request, tiles.tile)
    return _result_on_gpu(stage, tiles, host, ready.transport == "overwrite")


def _between_gpus(call: Call, request: Request, tiles: DeviceTiles) -> Any:
    """Moves by messages from GPU to GPU."""
    tile, shape = tiles.tile, request.target.tile_shape
    into = tiles.out or described(empty(tile.array, shape), "result")
    clear = tiles.out is None and not request.target.even
    for size in (math.prod(tile.shape), math.prod(shape)):
        call.memory.take(call.device, size)
    GpuExchange(call, tiles.gpu, cast(Direct, tiles.pointers), tile, into).run(clear)
    return into.array


def _move_on_host(stage: DeviceStage, ready: TilePlan, request: Request, tile: GpuArray) -> Array:
    """Copies the tile to the host and moves it there; returns the host's result, complete."""
    call = stage.call
    held = new_tile(call.team, call.watch, request.source, tile.dtype)
    call.memory.take(call.device, held.tile.size)
    stage.to_host(tile, held.tile)
    call.memory.free(call.device, held.tile.size)  # From here on, `move` counts it.
    prepare_together(call.team, call.watch, lambda: None, lambda _: str(request), lambda _: post_tile(held))
    result = move_tile(call.team, call.watch, ready, held, None, call.memory).tile
    call.team.settle(call.watch)
    if ready.transport != "overwrite":
        call.memory.free(call.device, held.tile.size)  # The host copy of the tile dies here.
    return result


def _size_chunk(ready: TilePlan, request: Request, tile: GpuArray) -> int:
    """Elements of a pinned buffer; 0 for a plan that overwrites the tile, whose budget has no room for buffers.

    While tiles are copied to or from the GPU, only one of the two tiles has its host copy, so all pinned buffers
    together may be as large as the smaller tile.
    """
    if ready.transport == "overwrite":
        return 0
    smaller = min(math.prod(request.source.tile_shape), math.prod(request.target.tile_shape))
    return min(CHUNK // tile.dtype.itemsize, smaller // LANES)


def _keep_on_gpu(tiles: DeviceTiles) -> Any:
    """The result if nothing moves: the tile itself, or a C-ordered copy of it on the GPU."""
    tile, out = tiles.tile, tiles.out
    if out is None and (tile.c_contiguous or not writable(tile.array)):
        return tile.array
    into = out or described(empty(tile.array, tile.shape), "result")
    with tiles.gpu.current():
        tiles.gpu.synchronise()
        tiles.gpu.copy(into.memory, tile.memory, tile.shape, tile.dtype.itemsize, 0)
        tiles.gpu.wait(0)
    return into.array


def _result_on_gpu(stage: DeviceStage, tiles: DeviceTiles, host: Array, overwritten: bool) -> Any:
    """The host's result on the GPU; if the budget demanded it, in the memory of the donated tile."""
    tile = tiles.tile.array
    if tiles.out is None and not writable(tile):
        result = of_host(tile, host)
        if overwritten and hasattr(tile, "delete"):
            tile.delete()
        return result
    into = tiles.out
    if into is None:
        new = of_its_memory(tile, host.shape) if overwritten else empty(tile, host.shape)
        into = described(new, "result")
    stage.to_gpu(into, host)
    return into.array


@dataclass(frozen=True)
class DeviceStage:
    """Copies between a GPU and the host through pinned buffers of `chunk` elements; directly if that is 0."""

    call: Call
    gpu: Cuda
    chunk: int

    def to_host(self, source: GpuArray, target: Array) -> None:
        """Copies a tile of any strides on the GPU into a host array."""
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
        """Copies a host array into a tile of any strides on the GPU."""
        with self.gpu.current():
            self.gpu.synchronise()
            if not self.chunk:
                self.gpu.copy(target.memory, strided(source), source.shape, source.itemsize, 0)
                self.gpu.wait(0)
                return
            for lane, buffer, part, place in self._parts(target, source):
                self.gpu.wait(lane)
                copy_view(view_as_words(buffer), view_as_words(part))
                self.gpu.copy(place, strided(buffer), buffer.shape, buffer.itemsize, lane)
            for lane in range(LANES):
                self.gpu.wait(lane)
            self._unpin()

    def _parts(self, memory: GpuArray, host: Array) -> Iterator[tuple[int, Array, Array, Strided]]:
        """For each part: its lane, its pinned buffer, the part of the host array, and its memory on the GPU.

        Parts come in the order of the GPU's memory.
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

    def _land(self, lane: int, buffer: Array, part: Array) -> None:
        self.gpu.wait(lane)
        copy_view(view_as_words(part), view_as_words(buffer))

    def _unpin(self) -> None:
        """Counts the pinned buffers as free; they are kept for the next call."""
        self.call.memory.free(self.call.device, LANES * self.chunk)
