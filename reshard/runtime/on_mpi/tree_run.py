"""Runs a tree of arrays on this rank, part after part of its schedule.

All sources are live from the start, and all targets at the end. Each part takes what it makes into the tree's account;
tiles of stacks are copied to buffers of the team's pool, and their results are parts of one block of memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from reshard.lower.to_mpi import device_of, seat_of
from reshard.runtime.account import Account, InBytes
from reshard.runtime.numpy_dtypes import numpy_dtype
from reshard.runtime.on_mpi.bundle import move_bundle
from reshard.runtime.on_mpi.indices import clear_padding
from reshard.runtime.on_mpi.run_plan import RankPlan, rank_plan, run_plan
from reshard.runtime.on_mpi.run_view import ViewPlan, run_view_plan, view_plan
from reshard.runtime.on_mpi.shared_stack import take_shared
from reshard.runtime.on_mpi.strided_copy import Array, raw
from reshard.runtime.on_mpi.team import Team, Watch
from reshard.runtime.on_mpi.tree_schedule import BundledStacks, Part, SharedStack, Stack
from reshard.runtime.on_mpi.window_tiles import WindowTile, absent, new_tile
from reshard.runtime.on_mpi.wire.exchange import Call
from reshard.types import Layout
from reshard.types.plan import Plan


@dataclass(frozen=True, eq=False)
class TreeTiles:
    """What a rank brings: its tiles, empty where it has none, the arrays for results, and scales of casts, by name."""

    tiles: Mapping[str, Array]
    outs: Mapping[str, Array]
    scales: Mapping[str, Any]


def steps_of(plan: Plan, rank: int, size: int) -> RankPlan | ViewPlan:
    """The steps of a plan as a rank runs them."""
    if plan.view is not None or plan.source.dtype != plan.target.dtype:
        return view_plan(plan, rank, size)
    device = device_of((plan.source.mesh, plan.target.mesh), rank, size)
    return rank_plan(plan, device, size, numpy_dtype(plan.source.dtype).itemsize)


def run_tree(team: Team, watch: Watch, parts: Iterable[Part], given: TreeTiles, memory: Account) -> dict[str, Array]:
    """The results of all arrays that move, by name; empty where this rank has none.

    All ranks call this inside a `collective`, with the same parts.
    """
    moved: dict[str, Array] = {}
    for part in parts:
        if isinstance(part, SharedStack):
            call = Call(team, watch, team.pool, InBytes(part.plan.source.dtype, memory), team.rank)
            if take_shared(call, part, given.tiles, given.outs):
                moved.update((name, given.outs[name]) for name in part.names)
            else:
                moved.update(run_tree(team, watch, part.alone(), given, memory))
            continue
        stacks = part.stacks if isinstance(part, BundledStacks) else (part,)
        call = Call(team, watch, team.pool, InBytes(stacks[0].plan.source.dtype, memory), team.rank)
        outs = [_out(call, stack, given) for stack in stacks]
        if isinstance(part, BundledStacks):
            held = [_held(call, stack, given) for stack in stacks]
            results = move_bundle(call, part.bundle, held, outs)
            for stack, tile in zip(stacks, held, strict=True):
                _give_back(call, stack, tile)
        else:
            results = [_run_steps(call, part, given, outs[0])]
        for stack, result in zip(stacks, results, strict=True):
            moved.update(_parts(stack, result.tile, given))
    return moved


def _out(call: Call, stack: Stack, given: TreeTiles) -> WindowTile | None:
    """The caller's array for the result of a stack of one; on a rank without a result, what stands for it."""
    out = given.outs.get(stack.names[0])
    return None if out is None else WindowTile(out)


def _held(call: Call, stack: Stack, given: TreeTiles) -> Array:
    """The tile of a stack: that of its one array, or a copy of those of all."""
    tiles = [given.tiles[name] for name in stack.names]
    if len(tiles) == 1:
        return tiles[0]
    dtype = numpy_dtype(stack.plan.source.dtype)
    if seat_of(stack.plan.source.mesh, call.team.rank, call.team.size) is None:
        return absent(stack.plan.source, dtype).tile
    size = sum(tile.size for tile in tiles)
    call.memory.take(call.device, size)
    made = call.pool.take(size * dtype.itemsize).view(dtype).reshape(len(tiles), *tiles[0].shape)
    np.stack([raw(tile) for tile in tiles], out=raw(made))
    return made


def _give_back(call: Call, stack: Stack, held: Array) -> None:
    if len(stack.names) > 1 and held.size:
        call.memory.free(call.device, held.size)
        call.pool.give(held)


def _run_steps(call: Call, stack: Stack, given: TreeTiles, out: WindowTile | None) -> WindowTile:
    """Runs the steps of a stack's plan, message by message."""
    plan, team = stack.plan, call.team
    steps, held = steps_of(plan, team.rank, team.size), _held(call, stack, given)
    ready = None if out is None else lambda: team.settle(call.watch)
    if isinstance(steps, ViewPlan):
        result = _viewed(call, plan, out)
        scale = given.scales.get(stack.names[0])
        run_view_plan(call, steps, held, result.tile, scale, ready)
    else:
        result = run_plan(call, steps, held, lambda: _placed(call, plan.target, held, out), ready)
    if out is None:
        _clear(team, plan.target, result.tile)
    _give_back(call, stack, held)
    return result


def _viewed(call: Call, plan: Plan, out: WindowTile | None) -> WindowTile:
    if out is not None:
        return out
    if seat_of(plan.target.mesh, call.team.rank, call.team.size) is None:
        return absent(plan.target, numpy_dtype(plan.target.dtype))
    return WindowTile(np.empty(plan.target.tile_shape, numpy_dtype(plan.target.dtype)))


def _placed(call: Call, target: Layout, held: Array, out: WindowTile | None) -> WindowTile:
    return new_tile(call.team, call.watch, target, held.dtype) if out is None else out


def _clear(team: Team, layout: Layout, tile: Array) -> None:
    seat = seat_of(layout.mesh, team.rank, team.size)
    if seat is not None and not layout.even:
        clear_padding(layout, seat, tile)


def _parts(stack: Stack, result: Array, given: TreeTiles) -> dict[str, Array]:
    """The results of a stack's arrays; elements without a name in layouts moved as plain words of their size."""
    if len(stack.names) == 1:
        return {stack.names[0]: result}
    if not result.size:
        return dict.fromkeys(stack.names, result)
    own = (given.tiles[name].dtype for name in stack.names)
    return {
        name: result[number, ...].view(dtype) if dtype != result.dtype else result[number, ...]
        for number, (name, dtype) in enumerate(zip(stack.names, own, strict=True))
    }


def check_parts(parts: Sequence[Part], rank: int, size: int) -> None:
    """Works out what this rank will run, so that what cannot be run is refused before anything moves."""
    for part in parts:
        if isinstance(part, Stack):
            steps_of(part.plan, rank, size)
