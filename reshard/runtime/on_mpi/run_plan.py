"""Runs a plan's steps on this rank: messages, reductions, and the buffers between steps."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache

from reshard.errors import PlanError
from reshard.lower.to_mpi import NewSummand, Overwrite, Reduce, StepMessages, rank_of_devices, schedule
from reshard.runtime.numpy_dtypes import identities
from reshard.runtime.on_mpi.strided_copy import Array, copy, raw
from reshard.runtime.on_mpi.window_tiles import WindowTile
from reshard.runtime.on_mpi.wire.chunks import copies
from reshard.runtime.on_mpi.wire.exchange import Call, MessageExchange
from reshard.runtime.on_mpi.wire.messages import Messages, RelayMessages, messages
from reshard.runtime.on_mpi.wire.reduction import reduce
from reshard.types.plan import Plan

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
