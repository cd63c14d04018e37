"""Reading tiles of other processes through the kernel: straight into the result, or through a small buffer.

The kernel's time goes by the number of runs, above all those of the other process, whose pages it must look up. If the
runs are long there and short in the result, it fills a buffer that stays in the cache, and numpy copies from the buffer
into the result: for runs of 512 B, that takes 1.7 times a plain copy, and straight 2.8 times.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np

from reshard.geometry.blocks import split_box
from reshard.runtime.on_mpi.copies.strided_copy import Array, copy_view
from reshard.runtime.on_mpi.direct import Copies, Direct, Fill
from reshard.runtime.on_mpi.wire.chunks import Region
from reshard.runtime.on_mpi.wire.exchange import Call

STRAIGHT = 4 << 10
"""Bytes of a run from which the kernel writes it straight into the result."""

SCRATCH = 1 << 20
"""Bytes of the buffer for shorter runs: a smaller one costs more in calls than it saves in cache misses."""


class _RemoteRuns(NamedTuple):
    """Runs of another tile as (offset, bytes), and where they go: runs of the result (`here`), or, if that is None, a
    region of it through the buffer.
    """

    there: Array
    here: Array | None
    into: Region


def read_remote_tiles(addresses: Mapping[int, int], shape: Sequence[int], buffered: bool) -> Fill:
    """Reads the C-ordered source tiles of other ranks, all of this shape, at their addresses in their processes."""

    def fill(call: Call, move: Direct, tile: Array, target: Array) -> list[Copies]:
        key = target.strides, buffered
        if key not in move.parts:
            pairs = [(rank, pair) for rank, of_rank in move.pulls for pair in of_rank]
            listed = [(rank, part) for rank, pair in pairs for part in _list_parts(*pair, shape, target, buffered)]
            # What goes through the buffer is copied by numpy, and follows the target's memory: see `copy_order`.
            move.parts[key] = sorted(listed, key=lambda each: each[1].into.start) if buffered else listed
        parts: list[tuple[int, _RemoteRuns]] = move.parts[key]
        members = {rank: call.team.members.index(rank) for rank, _ in move.pulls}
        own: list[Copies] = [partial(copy_view, into.of(target), source.of(tile)) for source, into in move.own]
        return own + [partial(_read_part, call, part, members[rank], addresses[rank], target) for rank, part in parts]

    return fill


def _read_part(call: Call, part: _RemoteRuns, member: int, address: int, target: Array) -> None:
    there = _add_address(part.there, address)
    if part.here is not None:
        here = _add_address(part.here, target.__array_interface__["data"][0])
        call.team.remote_memory.read(member, there, here)
        return
    into = part.into.of(target)
    call.memory.take(call.device, into.size)
    buffer = call.pool.take(into.size * into.itemsize)
    call.team.remote_memory.read(member, there, np.array([[buffer.ctypes.data, buffer.size]], np.uint64))
    copy_view(into, buffer.view(into.dtype).reshape(into.shape))
    call.pool.give(buffer)
    call.memory.free(call.device, into.size)


def _list_parts(
    source: Region, into: Region, shape: Sequence[int], target: Array, buffered: bool
) -> Iterator[_RemoteRuns]:
    size = target.itemsize
    strides = [size * math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    both = _measure_run(source, strides, into, target.strides, size)
    if not buffered or both >= STRAIGHT:
        yield _RemoteRuns(_list_runs(source, strides, both, size), _list_runs(into, target.strides, both, size), into)
        return
    for spans in split_box(source.extents, max(1, SCRATCH // size)):
        part = source.part(spans)
        run = _measure_run(part, strides, part, strides, size)
        yield _RemoteRuns(_list_runs(part, strides, run, size), None, into.part(spans))


def _measure_run(one: Region, steps: Sequence[int], other: Region, strides: Sequence[int], size: int) -> int:
    """Bytes that are contiguous in both regions."""
    run = size
    for (d, a), (e, b), extent in reversed(list(zip(one.steps, other.steps, one.extents, strict=True))):
        if extent != 1 and not steps[d] * a == strides[e] * b == run:
            break
        run *= extent
    return run


def _list_runs(region: Region, strides: Sequence[int], run: int, size: int) -> Array:
    """A region as rows (offset, bytes), in runs of `run` bytes, in order."""
    offsets = np.array([sum(at * stride for at, stride in zip(region.start, strides, strict=True))], np.int64)
    count = math.prod(region.extents) * size // run
    for extent, (dim, step) in zip(region.extents, region.steps, strict=True):
        if offsets.size == count:
            break
        offsets = (offsets[:, None] + np.arange(extent) * (strides[dim] * step)).reshape(-1)
    return np.stack([offsets, np.full_like(offsets, run)], axis=1)


def _add_address(runs: Array, address: int) -> Array:
    """Runs (offset, bytes) of a tile at this address, as (address, bytes)."""
    absolute = runs.copy()
    absolute[:, 0] += address
    return absolute.astype(np.uint64)
