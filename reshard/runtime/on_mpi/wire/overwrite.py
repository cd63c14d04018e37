"""An exchange inside a donated tile: packed into slots of its own memory, sent slot by slot, and unpacked.

Packing and unpacking permute runs of the buffer along cycles, with room for one run besides. That is slow, and used
only if the budget leaves no room for a second tile. Worked example, a permutation of four runs with one cycle of three:

    cells            [a, b, c, d]      cell 0 <- cell 2, 2 <- 1, 1 <- 0
    held = cell 0    [a, b, c, d]      held a
    0 <- 2           [c, b, c, d]
    2 <- 1           [c, b, b, d]
    1 <- held        [c, a, b, d]      the cycle is closed
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
from mpi4py import MPI

from reshard.lower.to_mpi import Block, Overwrite, SlotMessage
from reshard.runtime.on_mpi.copies.strided_copy import Array
from reshard.runtime.on_mpi.tags import OVERWRITE
from reshard.runtime.on_mpi.wire.exchange import Call


def overwrite_tile(call: Call, step: Overwrite, ranks: Mapping[int, int], tile: Array, shape: Sequence[int]) -> Array:
    """Runs the exchange; the result is a view of the operand's memory, which is C-ordered and at least as large."""
    buffer = tile.reshape(-1)
    _permute_runs(buffer, _permutation_of_slots(step.pack, step.slot, tile.shape))
    for out, into in step.turns:
        _run_round(call, step, ranks, buffer, out, into)
    slots = _permutation_of_slots(step.unpack, step.slot, shape)
    _permute_runs(buffer, _RunPermutation(slots.run, slots.source, slots.target))
    return buffer[: math.prod(shape)].reshape(tuple(shape))


def _run_round(
    call: Call,
    step: Overwrite,
    ranks: Mapping[int, int],
    buffer: Array,
    out: SlotMessage | None,
    into: SlotMessage | None,
) -> None:
    """One turn; what is sent is staged, because what arrives may use the same slot in this turn."""
    comm, memory = call.team.comm, call.memory
    requests: list[MPI.Request] = []
    staging = sum(slot.length for slot in (out, into) if slot is not None) if step.scratch else 0
    memory.take(call.device, staging)
    leaving = call.pool.take(out.length * buffer.itemsize if out else 0)
    if out is not None:
        start = out.slot * step.slot + out.start
        leaving.view(buffer.dtype)[...] = buffer[start : start + out.length]
        requests.append(comm.Isend([leaving, MPI.BYTE], ranks[out.peer], OVERWRITE))
    if into is not None:
        start = into.slot * step.slot + into.start
        arriving = buffer[start : start + into.length].view(np.uint8)
        requests.append(comm.Irecv([arriving, MPI.BYTE], ranks[into.peer], OVERWRITE))
        memory.receive(call.device, into.length)
    call.watch.until(lambda: MPI.Request.Testall(requests))
    call.pool.give(leaving)
    memory.free(call.device, staging)


class _RunPermutation:
    """A permutation of runs of `run` elements: run number `target[i]` of the buffer receives run number `source[i]`."""

    def __init__(self, run: int, target: Array, source: Array) -> None:
        self.run, self.target, self.source = run, target, source


def _permutation_of_slots(places: Sequence[tuple[int, Block]], slot: int, shape: Sequence[int]) -> _RunPermutation:
    """The permutation that fills slots from a tile of this shape, with the longest runs possible."""
    strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    source = [_offsets_of_block(block, strides) for _, block in places]
    target = [np.arange(slot) + number * slot for number, _ in places]
    if not source:
        return _RunPermutation(1, np.empty(0, np.int64), np.empty(0, np.int64))
    to, at = np.concatenate(target), np.concatenate(source)
    # A run length is possible if all jumps, in the slots and in the tile, occur at its multiples only.
    jumps = np.flatnonzero((np.diff(to) != 1) | (np.diff(at) != 1)) + 1
    starts = np.concatenate([[0], jumps])
    run = int(np.gcd.reduce(np.concatenate([starts, to[starts], at[starts], [to.size]])))
    return _RunPermutation(run, to[::run] // run, at[::run] // run)


def _offsets_of_block(block: Block, strides: Sequence[int]) -> Array:
    """The flat offsets of a block's elements in the tile at its `src` end, in order."""
    offsets = np.array([sum(at * stride for at, stride in zip(block.src, strides, strict=True))])
    for axis in block.axes:
        offsets = (offsets[:, None] + np.arange(axis.extent) * (axis.src * strides[axis.dim])).reshape(-1)
    return offsets


def _permute_runs(buffer: Array, runs: _RunPermutation) -> None:
    """Permutes runs in place, along chains and cycles, with one run of extra memory.

    >>> cells = np.array(list("abcd"))
    >>> _permute_runs(cells, _RunPermutation(1, np.array([0, 1, 2]), np.array([2, 0, 1])))
    >>> "".join(cells)
    'cabd'
    """
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
