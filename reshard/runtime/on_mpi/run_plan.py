"""Runs a plan's steps on this rank: messages, reductions, and the buffers between steps."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from reshard.errors import PlanError
from reshard.lower import lower_plan
from reshard.lower.to_mpi import (
    NewSummand,
    Overwrite,
    Reduce,
    StepMessages,
    device_of,
    rank_of_devices,
    schedule,
    seat_of,
)
from reshard.lower.views import CastTiles, aliases, fills
from reshard.plans.plan import Plan
from reshard.runtime.account import Account, InBytes
from reshard.runtime.numpy_dtypes import identities, numpy_dtype
from reshard.runtime.on_mpi.bundle import move_bundle
from reshard.runtime.on_mpi.copies.strided_copy import Array, copy, raw, words
from reshard.runtime.on_mpi.direct import direct
from reshard.runtime.on_mpi.fused_copies import ByteCopy, tile_copies, wide
from reshard.runtime.on_mpi.indices import clear_padding
from reshard.runtime.on_mpi.team import Team, Watch
from reshard.runtime.on_mpi.tree_schedule import BundledStacks, Part, SharedStack, Stack
from reshard.runtime.on_mpi.window_tiles import WindowTile, absent, new_place, new_tile
from reshard.runtime.on_mpi.wire.chunks import copies
from reshard.runtime.on_mpi.wire.exchange import Call, MessageExchange
from reshard.runtime.on_mpi.wire.messages import Messages, RelayMessages, messages
from reshard.runtime.on_mpi.wire.reduction import reduce
from reshard.runtime.on_numpy import scaled
from reshard.types import Layout, dtypes

RunnableStep = Messages | RelayMessages | Reduce | NewSummand | Overwrite


@dataclass(frozen=True, eq=False)
class RankPlan:
    """A plan as one rank runs it: its steps, the tile's shape after each, and the rank of each device.

    A rank outside the meshes of a step has a step without messages, or a reduction without a group.
    """

    steps: tuple[RunnableStep, ...]
    tile_shapes: tuple[tuple[int, ...], ...]
    ranks: Mapping[int, int]


@lru_cache(maxsize=256)
def rank_plan(plan: Plan, device: int, size: int, itemsize: int) -> RankPlan:
    """A device's steps of a plan on a communicator of `size`, for elements of `itemsize` bytes."""
    numbers = rank_of_devices((plan.source.mesh, plan.target.mesh), size)
    mine = schedule(plan, device)
    shapes = (mine.tile_shape, *mine.tile_shapes)
    steps = tuple(
        messages(step, numbers, shapes[at], shapes[at + 1], itemsize, of.received_bytes)
        if isinstance(step, StepMessages)
        else step
        for at, (step, of) in enumerate(zip(mine.steps, plan.steps, strict=True))
    )
    return RankPlan(steps, mine.tile_shapes, numbers)


Ready = Callable[[], None]


def run_plan(
    call: Call, plan: RankPlan, tile: Array, place: Callable[[], WindowTile], ready: Ready | None = None
) -> WindowTile:
    """Runs the steps from a tile, which stays unchanged, to the result, whose memory `place` provides.

    `place` is called once, for the last step, so that the result is not live before. `ready` is called before the
    result is written to, as late as the plan's buffers allow.
    """
    make_groups(call, plan)
    if not plan.steps:
        call.memory.take(call.device, tile.size)
        result = place()
        copy(raw(result.tile), raw(tile))
        return result
    before = tile
    for step, shape in zip(plan.steps[:-1], plan.tile_shapes[:-1], strict=True):
        after = call.pool.take(math.prod(shape) * tile.itemsize).view(tile.dtype).reshape(shape)
        run_step(call, plan, step, before, after)
        _give_back(call, before, tile)
        before = after
    result = place()
    run_step(call, plan, plan.steps[-1], before, result.tile, ready)
    _give_back(call, before, tile)
    return result


def make_groups(call: Call, plan: RankPlan) -> None:
    """Makes the communicators of all reductions first: MPI waits for all ranks there, and a step may fail on one."""
    for step in plan.steps:
        if isinstance(step, Reduce) and step.group:
            call.team.group(tuple(plan.ranks[device] for device in step.group))


def run_step(
    call: Call,
    plan: RankPlan,
    step: RunnableStep,
    before: Array,
    after: Array,
    ready: Ready | None = None,
    *,
    counted: bool = True,
) -> None:
    """Runs one step; `counted` says whether the result's memory is new."""
    if counted:
        call.memory.take(call.device, after.size)
    match step:
        case Reduce():
            reduce(call, step, plan.ranks, before, after, ready)
        case NewSummand():
            _fill(step, before, after, ready)
        case Messages():
            MessageExchange(call, step, raw(before), raw(after)).run(ready)
        case RelayMessages(first=first, second=second):
            MessageExchange(call, first, raw(before), raw(after)).run(ready)
            MessageExchange(call, second, raw(after), raw(after)).run()
        case Overwrite():
            raise PlanError("an exchange in place writes its result over its operand; plan without donate=True")


def _fill(step: NewSummand, before: Array, after: Array, ready: Ready | None) -> None:
    """Writes the result's summand: the identity of the operation, and over it what this rank has."""
    if ready is not None:
        ready()
    after[...] = identities(step.reduction, (), after.dtype)
    for block in step.local:
        for source, target in copies(block, before.shape, after.shape):
            copy(target.of(raw(after)), source.of(raw(before)))


def _give_back(call: Call, buffer: Array, tile: Array) -> None:
    """Returns the buffer between two steps to the pool; the caller's tile is not one."""
    if buffer is not tile:
        call.pool.give(buffer)
        call.memory.free(call.device, buffer.size)


# Runs a plan with views on this rank: its steps message by message, views of flat tiles between them.
#
# step                     how it runs
# view that keeps memory   not at all: the next step takes the tile in its new shape
# view, take, put          copies between two flat tiles
# view_exchange            copies, then messages, between two flat tiles
# cast                     numpy's cast, with a scale where one is given
# all others               as in every plan (`run_plan`)


@dataclass(frozen=True, eq=False)
class ViewStep:
    """One step as a rank runs it: `step` is None for a cast; the tile's shapes before and after as it sees them."""

    step: Any
    before: tuple[int, ...]
    after: tuple[int, ...]
    dtype: str
    fills: bool


@dataclass(frozen=True, eq=False)
class ViewPlan:
    """A rank's steps, without those that do nothing, and the plan that makes its communicators."""

    steps: tuple[ViewStep, ...]
    plan: RankPlan


@lru_cache(maxsize=256)
def view_plan(plan: Plan, rank: int, size: int) -> ViewPlan:
    """The steps of a plan that a rank runs in a communicator of `size`; outside their meshes they do nothing."""
    meshes = plan.source.mesh, plan.target.mesh
    numbers = rank_of_devices(meshes, size)
    device = device_of(meshes, rank, size)
    program, mine = lower_plan(plan, device), schedule(plan, device)
    shapes = (mine.tile_shape, *mine.tile_shapes)
    steps: list[ViewStep] = []
    for at, (instruction, step, of) in enumerate(zip(program.instructions, mine.steps, plan.steps, strict=True)):
        if aliases(instruction):
            continue
        before, after = shapes[at], shapes[at + 1]
        if isinstance(step, StepMessages) and not isinstance(instruction, CastTiles):
            if step.flat:
                before, after = (math.prod(before),), (math.prod(after),)
            itemsize = dtypes.nbytes(1, of.operand.dtype)
            step = messages(step, numbers, before, after, itemsize, of.received_bytes)
        ready = None if isinstance(instruction, CastTiles) else step
        steps.append(ViewStep(ready, before, after, of.result.dtype, fills(instruction)))
    return ViewPlan(tuple(steps), RankPlan(tuple(s.step for s in steps if s.step is not None), (), numbers))


def run_view_plan(
    call: Call, plan: ViewPlan, tile: Array, result: Array, scale: Any, ready: Callable[[], None] | None
) -> None:
    """Runs the steps from a C-ordered tile, which stays unchanged, to the result, a C-ordered array; either is empty on
    a rank that has none.

    Where the plan fills part of the result, the rest of it stays. `ready` is called before the result is written to.
    """
    make_groups(call, plan.plan)
    before = tile
    if not plan.steps:
        result[...] = tile.reshape(result.shape)
    filled = next((at for at, step in enumerate(plan.steps) if step.fills), None)
    if filled is not None:  # The target is there from the start.
        call.memory.take(call.device, result.size, plan.steps[-1].dtype)
    for number, step in enumerate(plan.steps):
        last = number == len(plan.steps) - 1
        dtype = numpy_dtype(step.dtype)
        size = math.prod(step.after)
        after = result if last else call.pool.take(size * dtype.itemsize).view(dtype)
        shaped = after.reshape(step.after), before.reshape(step.before)
        was = call.memory.dtype
        _run(call, plan, step, shaped[1], shaped[0], scale, ready if last else None)
        if before is not tile:
            call.pool.give(before)
            call.memory.free(call.device, before.size, was)
        before = after


def _run(
    call: Call,
    plan: ViewPlan,
    step: ViewStep,
    before: Array,
    after: Array,
    scale: Any,
    ready: Callable[[], None] | None,
) -> None:
    if step.step is not None:
        run_step(call, plan.plan, step.step, before, after, ready, counted=not step.fills)
        return
    narrows = dtypes.bits(step.dtype) < dtypes.bits(call.memory.dtype)
    call.memory.cast(step.dtype)
    call.memory.take(call.device, after.size)
    if ready is not None:
        ready()
    if before.size:
        after[...] = scaled(before, np.dtype(after.dtype), scale, narrows)


# Equal moves on one node into arrays of the caller: two copies of each tile, and one synchronization for all.
#
#     rank 0     copies its tiles a, b, c to shared memory  |  all have: takes its results out of all ranks' copies
#     rank 1     copies its tiles a, b, c to shared memory  |
#
# The results are written to once no rank can fail any more.


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
        _fill_results([_cleared(call, target, outs[name]) for name in stack.names], copies, memory, size * itemsize)
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


def _fill_results(outs: list[Array], copies: list[ByteCopy], memory: Array, step: int) -> None:
    """Fills the results of arrays whose tiles lie `step` bytes apart."""
    array: Any = np.ndarray
    for each in copies:
        (start, into, extents, before, after), width = wide(each, outs[0].itemsize)
        dtype = words(width)
        for number, out in enumerate(outs):
            shared = array(extents, dtype, memory, start + number * step, before)
            array(extents, dtype, out, into, after)[...] = shared


# Runs a tree of arrays on this rank, part after part of its schedule.
#
# All sources are live from the start, and all targets at the end. Each part takes what it makes into the tree's
# account; tiles of stacks are copied to buffers of the team's pool, and their results are parts of one block of memory.


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
                _return_buffers(call, stack, tile)
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


def _return_buffers(call: Call, stack: Stack, held: Array) -> None:
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
    _return_buffers(call, stack, held)
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
