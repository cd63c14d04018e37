"""Runs a plan's steps on this rank: messages, reductions, casts, and the buffers between steps.

step                     how it runs
view that keeps memory   not at all: the next step takes the tile in its new shape
view, take, put          copies between two flat tiles
cast                     numpy's cast, with a scale where one is given
a reduction              MPI's own collective, of packed blocks (`wire.reduction`)
all others               local copies, then messages (`wire.exchange`)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from reshard.errors import PlanError
from reshard.lower.program import CastTiles
from reshard.lower.to_mpi import (
    NewSummand,
    Overwrite,
    Reduce,
    StepMessages,
    device_of,
    rank_of_devices,
    schedule_device,
)
from reshard.plans.plan import Plan
from reshard.runtime.numpy_tiles import identities, numpy_dtype
from reshard.runtime.on_mpi.copies.strided_copy import Array, copy_view, view_as_words
from reshard.runtime.on_mpi.window_tiles import WindowTile
from reshard.runtime.on_mpi.wire.chunks import pairs_of_block
from reshard.runtime.on_mpi.wire.exchange import Call, MessageExchange
from reshard.runtime.on_mpi.wire.messages import Messages, RelayMessages, messages_of_step
from reshard.runtime.on_mpi.wire.reduction import reduce_step
from reshard.runtime.on_numpy import scale_tile
from reshard.types import dtypes

RunnableStep = Messages | RelayMessages | Reduce | NewSummand | Overwrite | CastTiles

Shape = tuple[int, ...]
Ready = Callable[[], None]


class RankStep(NamedTuple):
    """One step as a rank runs it: the shapes in which it sees its tile before and after, flat for views, the dtype
    afterwards, and whether it writes into a result that is there already.
    """

    run: RunnableStep
    before: Shape
    after: Shape
    dtype: str
    fills: bool = False


class RankPlan(NamedTuple):
    """A plan as one rank runs it: its steps without those that leave memory as it is, and the rank of each device.

    A rank outside the meshes of a step has a step without messages, or a reduction without a group.
    """

    steps: tuple[RankStep, ...]
    ranks: Mapping[int, int]
    dtype: str


@lru_cache(maxsize=256)
def rank_plan(plan: Plan, rank: int, size: int, itemsize: int) -> RankPlan:
    """What a rank runs of a plan on a communicator of `size`; its tile has elements of `itemsize` bytes."""
    meshes = plan.source.mesh, plan.target.mesh
    ranks = rank_of_devices(meshes, size)
    mine = schedule_device(plan, device_of(meshes, rank, size))
    shapes = (mine.tile_shape, *mine.tile_shapes)
    steps: list[RankStep] = []
    for at, (step, of) in enumerate(zip(mine.steps, plan.steps, strict=True)):
        before, after = shapes[at], shapes[at + 1]
        fills = False
        if isinstance(step, StepMessages):
            if step.aliases:
                continue
            fills = step.fills
            if step.flat:
                before, after = (math.prod(before),), (math.prod(after),)
            # Elements without a name in layouts have the size of the dtype that stands for them, so only a cast
            # changes the size.
            nbytes = itemsize if of.operand.dtype == plan.source.dtype else dtypes.nbytes(1, of.operand.dtype)
            step = messages_of_step(step, ranks, before, after, nbytes, of.received_bytes)
        steps.append(RankStep(step, before, after, of.result.dtype, fills))
    return RankPlan(tuple(steps), ranks, plan.source.dtype)


def run_plan(
    call: Call,
    plan: RankPlan,
    tile: Array,
    place: Callable[[], WindowTile],
    ready: Ready | None = None,
    scale: Any = None,
) -> WindowTile:
    """Runs the steps from a tile, which stays unchanged, to the result, whose memory `place` provides.

    `place` is called once, for the last step, so that the result is not live before, unless a step fills a part of it.
    `ready` is called before the result is written to, as late as the plan's buffers allow. A tile whose steps are flat
    is C-ordered, and so is the result.
    """
    make_groups(call, plan)
    # Where a step fills a part of the result, the rest of it stays: so it is live from the start.
    filled = any(step.fills for step in plan.steps)
    result = place() if filled or not plan.steps else None
    if result is not None:
        call.memory.take(call.device, result.tile.size, plan.steps[-1].dtype if filled else None)
    if result is not None and not plan.steps:
        copy_view(view_as_words(result.tile), view_as_words(tile).reshape(result.tile.shape))
        return result
    before = tile
    for step in plan.steps:
        last = step is plan.steps[-1]
        if last:
            result = result or place()
            after = result.tile
        else:
            dtype = tile.dtype if step.dtype == plan.dtype else numpy_dtype(step.dtype)
            after = call.pool.take(math.prod(step.after) * dtype.itemsize).view(dtype)
        was = call.memory.dtype
        ends = before.reshape(step.before), after if after.shape == step.after else after.reshape(step.after)
        run_step(call, plan, step, *ends, scale, ready if last else None)
        if before is not tile:
            call.pool.give(before)
            call.memory.free(call.device, before.size, was)
        before = after
    assert result is not None
    return result


def make_groups(call: Call, plan: RankPlan) -> None:
    """Makes the communicators of all reductions first: MPI waits for all ranks there, and a step may fail on one."""
    for step in plan.steps:
        if isinstance(step.run, Reduce) and step.run.group:
            call.team.group(tuple(plan.ranks[device] for device in step.run.group))


def run_step(
    call: Call, plan: RankPlan, step: RankStep, before: Array, after: Array, scale: Any, ready: Ready | None
) -> None:
    """Runs one step between tiles in the shapes that it sees; counts the memory of its result unless that was there."""
    if isinstance(step.run, CastTiles):
        narrows = dtypes.bits(step.dtype) < dtypes.bits(call.memory.dtype)
        call.memory.cast(step.dtype)
        call.memory.take(call.device, after.size)
        if ready is not None:
            ready()
        if before.size:
            after[...] = scale_tile(before, np.dtype(after.dtype), scale, narrows)
        return
    if not step.fills:
        call.memory.take(call.device, after.size)
    match step.run:
        case Reduce():
            reduce_step(call, step.run, plan.ranks, before, after, ready)
        case NewSummand(local=local, reduction=reduction):
            if ready is not None:
                ready()
            after[...] = identities(reduction, (), after.dtype)  # Over it, what this rank has of the sum.
            for source, target in (
                pair for block in local for pair in pairs_of_block(block, before.shape, after.shape)
            ):
                target.of(after)[...] = source.of(before)
        case Messages():
            MessageExchange(call, step.run, view_as_words(before), view_as_words(after)).run(ready)
        case RelayMessages(first=first, second=second):
            MessageExchange(call, first, view_as_words(before), view_as_words(after)).run(ready)
            MessageExchange(call, second, view_as_words(after), view_as_words(after)).run()
        case Overwrite():
            raise PlanError("an exchange in place writes its result over its operand; plan without donate=True")
