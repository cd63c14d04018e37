"""Equal moves on one node into arrays of the caller: two copies of each tile, and one synchronization for all.

    rank 0     copies its tiles a, b, c to shared memory  |  all have: takes its results out of all ranks' copies
    rank 1     copies its tiles a, b, c to shared memory  |

The results are written to once no rank can fail any more.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from reshard.lower.to_mpi import seat_of
from reshard.runtime.on_mpi.direct import direct
from reshard.runtime.on_mpi.fused_copies import ByteCopy, tile_copies, wide
from reshard.runtime.on_mpi.indices import clear_padding
from reshard.runtime.on_mpi.strided_copy import Array, raw, words
from reshard.runtime.on_mpi.tree_schedule import SharedStack
from reshard.runtime.on_mpi.window_tiles import new_place
from reshard.runtime.on_mpi.wire.exchange import Call
from reshard.types import Layout


def take_shared(call: Call, stack: SharedStack, tiles: Mapping[str, Array], outs: Mapping[str, Array]) -> bool:
    """Moves the tiles of a stack to `outs`; False on all ranks if they cannot share the memory for their copies.

    All ranks of the node, which is the only one, call this inside a `collective`.
    """
    team, source, target = call.team, stack.one.source, stack.one.target
    gives, takes = (seat_of(end.mesh, team.rank, team.size) is not None for end in (source, target))
    itemsize = tiles[stack.names[0]].itemsize
    place = new_place(team, call.watch, stack.plan.source, stack.plan.source.tile_bytes)
    if not place:
        return False
    memory, start, part = team.arena.around(place)
    starts = [start + member * part for member in range(team.size)]
    size = math.prod(source.tile_shape)
    if gives:
        call.memory.take(call.device, len(stack.names) * size)
        shape = len(stack.names), *source.tile_shape
        into = np.ndarray(shape, words(itemsize), memory, starts[team.node_sync.me])
        np.stack([raw(tiles[name]) for name in stack.names], out=into)
    if takes:
        call.memory.take(call.device, len(stack.names) * math.prod(target.tile_shape))
    team.gather(call.watch)  # From here on, only copies are left.
    if takes:
        copies = tile_copies(source, target, team.rank, team.nodes, itemsize, starts)
        _fill([_cleared(call, target, outs[name]) for name in stack.names], copies, memory, size * itemsize)
        pulled = direct(source, target, team.rank, team.nodes, itemsize, 0).pulled
        call.memory.receive(call.device, len(stack.names) * pulled)
    if gives:
        team.arena.release(place)  # Used again once all ranks have posted that.
        call.memory.free(call.device, len(stack.names) * size)
    return True


def _cleared(call: Call, target: Layout, out: Array) -> Array:
    """An array for a result with its padding set to zero, as raw words."""
    seat = seat_of(target.mesh, call.team.rank, call.team.size)
    if not target.even and seat is not None:
        clear_padding(target, seat, out)
    return raw(out)


def _fill(outs: list[Array], copies: list[ByteCopy], memory: Array, step: int) -> None:
    """Fills the results of arrays whose tiles lie `step` bytes apart."""
    array: Any = np.ndarray
    for copy in copies:
        (start, into, extents, before, after), width = wide(copy, outs[0].itemsize)
        dtype = words(width)
        for number, out in enumerate(outs):
            shared = array(extents, dtype, memory, start + number * step, before)
            array(extents, dtype, out, into, after)[...] = shared
