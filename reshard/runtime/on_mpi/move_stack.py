"""Many arrays in one call: the equal moves of a batch as one stack, one stack after another.

    200 arrays f64[{x}2048] -> f64[8192]        1 stack f64[200, {x}2048] -> f64[200, 8192]

A stack is an array like any other, with one more dim in front, so it goes the ways of a single array; its result is one
block of memory, of which each array's tile is a part. Stacking copies the tiles once, so large ones move one by one.
The call has one agreement for all stacks, and one synchronization at its end.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from reshard.runtime.account import Account, InBytes
from reshard.runtime.on_mpi.indices import clear_padding
from reshard.runtime.on_mpi.prepare import MoveRequest, Prepared, prepared
from reshard.runtime.on_mpi.strided_copy import Array
from reshard.runtime.on_mpi.team import Team, Watch
from reshard.runtime.on_mpi.ways import WAYS, TileTransfer, chosen_way
from reshard.runtime.on_mpi.window_tiles import NOWHERE, WindowTile
from reshard.runtime.on_mpi.wire.exchange import Call
from reshard.synth import plan
from reshard.types import Digit, Dim, Layout
from reshard.types.batch import Batch
from reshard.types.plan import Plan
from reshard.types.plan_tree import TreePlan

STACKED = 256 << 10
"""The most bytes of a tile that is copied to a stack; a larger one takes longer to copy than to move alone."""


@dataclass(frozen=True, eq=False)
class Stack:
    """Equal moves that go together, by the names of their arrays, and this rank's part of them."""

    names: tuple[str, ...]
    request: MoveRequest
    ready: Prepared


def stacks_of(team: Team, tree: TreePlan, tiles: Mapping[str, Array], bounded: bool) -> list[Stack]:
    """The stacks in which a tree moves, each within what the tree's plan promises for its batch."""
    stacks: list[Stack] = []
    for batch in tree.batches:
        for names, one in _alike(batch, tiles):
            room = len(names) * one.target.tile_bytes + max(batch.scratch_bytes, default=0)
            if len(names) > 1 and _stacked_peak(one, len(names)) <= room:
                stacks.append(_prepared(team, names, one, tiles, room if bounded else None))
            else:
                stacks += (_prepared(team, (name,), one, tiles, one.peak_bytes if bounded else None) for name in names)
    return stacks


def _alike(batch: Batch, tiles: Mapping[str, Array]) -> Iterator[tuple[tuple[str, ...], Plan]]:
    """The names of a batch's equal moves; those of large tiles one by one."""
    groups: dict[object, list[str]] = {}
    plans = dict(zip(batch.names, batch.plans, strict=True))
    for name, one in plans.items():
        large = max(one.source.tile_bytes, one.target.tile_bytes) > STACKED
        groups.setdefault(name if large else (one, tiles[name].dtype), []).append(name)
    for names in groups.values():
        yield tuple(names), plans[names[0]]


@lru_cache(maxsize=1024)
def _stacked_peak(one: Plan, count: int) -> int:
    return plan(lifted(one.source, count), lifted(one.target, count)).peak_bytes


def _prepared(team: Team, names: tuple[str, ...], one: Plan, tiles: Mapping[str, Array], budget: int | None) -> Stack:
    count = len(names)
    source, target = (end if count == 1 else lifted(end, count) for end in (one.source, one.target))
    request = MoveRequest(source, target, budget)
    return Stack(names, request, prepared(team, request, tiles[names[0]]))


def lifted(layout: Layout, count: int) -> Layout:
    """The layout of so many arrays along a new dim in front, which stays whole on each device.

    >>> from reshard.types import Mesh
    >>> str(lifted(Layout.parse("f32[{x}4, 8]", Mesh(x=2)), 3))
    'f32[3, {x}4, 8]'
    """
    return replace(layout, dims=(Dim((Digit(count, None),), count), *layout.dims))


def move_stack(team: Team, watch: Watch, stack: Stack, tiles: Sequence[Array], memory: Account) -> list[Array]:
    """Moves the tiles of a stack; returns those of the targets, which share one block of memory.

    All ranks call this inside a `collective`, with the same stacks in the same order.
    """
    request, ready = stack.request, stack.ready
    call = Call(team, watch, team.pool, InBytes(request.source.dtype, memory), team.rank)
    if not ready.steps.steps:
        return list(tiles)
    team.pool.limit(ready.spare + (request.source.tile_bytes if len(tiles) > 1 else 0))
    held = tiles[0] if len(tiles) == 1 else _stacked(call, tiles)
    nobody = dict.fromkeys(team.members, NOWHERE)
    transfer = TileTransfer(call, ready, request, WindowTile(held), None, nobody)
    result = WAYS[chosen_way(transfer)](transfer)
    if not request.target.even:
        clear_padding(request.target, team.rank, result.tile)
    if len(tiles) == 1:
        return [result.tile]
    call.memory.free(call.device, held.size)
    team.pool.give(held)
    return [result.tile[number, ...] for number in range(len(tiles))]


def _stacked(call: Call, tiles: Sequence[Array]) -> Array:
    first = tiles[0]
    size = len(tiles) * first.size
    call.memory.take(call.device, size)
    stack = call.pool.take(size * first.itemsize).view(first.dtype).reshape(len(tiles), *first.shape)
    return np.stack(tiles, out=stack)
