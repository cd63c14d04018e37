"""Exchanges that overwrite a donated tile: packed into slots of its own buffer, sent slot by slot, unpacked.

Packing and unpacking permute runs of the buffer along cycles, one run in hand: slow, and chosen only under a
budget that leaves no room for a second tile.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
from mpi4py import MPI

from reshard.lower.to_mpi import Block, Overwrite, Slot
from reshard.runtime.on_mpi.strided_copy import Array
from reshard.runtime.on_mpi.wire.exchange import Call

_TAG = 903


def overwrite(call: Call, step: Overwrite, ranks: Mapping[int, int], tile: Array, shape: Sequence[int]) -> Array:
    """The result's tile, in the memory of the operand's, which is C-ordered and no smaller."""
    buffer = tile.reshape(-1)
    _rearrange(buffer, _sources(step.pack, step.slot, tile.shape))
    for out, into in step.turns:
        _turn(call, step, ranks, buffer, out, into)
    slots = _sources(step.unpack, step.slot, shape)
    _rearrange(buffer, _Runs(slots.run, slots.source, slots.target))
    return buffer[: math.prod(shape)].reshape(tuple(shape))


def _turn(
    call: Call, step: Overwrite, ranks: Mapping[int, int], buffer: Array, out: Slot | None, into: Slot | None
) -> None:
    """What leaves is staged, since what arrives may take its slot in the same turn."""
    comm, memory = call.team.comm, call.memory
    requests: list[MPI.Request] = []
    staging = sum(slot.length for slot in (out, into) if slot is not None) if step.scratch else 0
    memory.take(call.device, staging)
    leaving = call.pool.take(out.length * buffer.itemsize if out else 0)
    if out is not None:
        start = out.slot * step.slot + out.start
        leaving.view(buffer.dtype)[...] = buffer[start : start + out.length]
        requests.append(comm.Isend([leaving, MPI.BYTE], ranks[out.peer], _TAG))
    if into is not None:
        start = into.slot * step.slot + into.start
        arriving = buffer[start : start + into.length].view(np.uint8)
        requests.append(comm.Irecv([arriving, MPI.BYTE], ranks[into.peer], _TAG))
        memory.receive(call.device, into.length)
    call.watch.until(lambda: MPI.Request.Testall(requests))
    call.pool.give(leaving)
    memory.free(call.device, staging)


class _Runs:
    """Runs of `run` elements: number `target[i]` of the buffer is to hold what number `source[i]` does."""

    def __init__(self, run: int, target: Array, source: Array) -> None:
        self.run, self.target, self.source = run, target, source


def _sources(places: Sequence[tuple[int, Block]], slot: int, shape: Sequence[int]) -> _Runs:
    """The runs of every slot, and where they lie in a tile of this shape."""
    strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    source = [_offsets(block, strides) for _, block in places]
    target = [np.arange(slot) + number * slot for number, _ in places]
    if not source:
        return _Runs(1, np.empty(0, np.int64), np.empty(0, np.int64))
    to, at = np.concatenate(target), np.concatenate(source)
    # The longest runs that keep together wherever they go: jumps, on either side, are at their multiples only.
    jumps = np.flatnonzero((np.diff(to) != 1) | (np.diff(at) != 1)) + 1
    starts = np.concatenate([[0], jumps])
    run = int(np.gcd.reduce(np.concatenate([starts, to[starts], at[starts], [to.size]])))
    return _Runs(run, to[::run] // run, at[::run] // run)


def _offsets(block: Block, strides: Sequence[int]) -> Array:
    found = np.array([sum(at * stride for at, stride in zip(block.src, strides, strict=True))])
    for axis in block.axes:
        found = (found[:, None] + np.arange(axis.extent) * (axis.src * strides[axis.dim])).reshape(-1)
    return found


def _rearrange(buffer: Array, runs: _Runs) -> None:
    """Moves all runs at once, along chains and cycles, one run in hand."""
    cells = buffer[: buffer.size // runs.run * runs.run].reshape(-1, runs.run)
    source: dict[int, int] = dict(zip(runs.target.tolist(), runs.source.tolist(), strict=True))
    readers = {at: to for to, at in source.items()}
    starts = [to for to in source if to not in readers] + list(source)
    done: set[int] = set()
    for start in starts:
        if start in done or source[start] == start:
            continue
        held, at = cells[start].copy(), start
        while at in source and at not in done:
            done.add(at)
            origin = source[at]
            cells[at] = held if origin == start else cells[origin]
            at = origin
