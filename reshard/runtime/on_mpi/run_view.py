"""Runs a plan with views on this rank: its steps message by message, views of flat tiles between them.

step                     how it runs
view that keeps memory   not at all: the next step takes the tile in its new shape
view, take, put          copies between two flat tiles
view_exchange            copies, then messages, between two flat tiles
cast                     numpy's cast, with a scale where one is given
all others               as in every plan (`run_plan`)
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from reshard.lower import lower_plan
from reshard.lower.to_mpi import StepMessages, device_of, rank_of_devices, schedule
from reshard.lower.views import CastTiles, aliases, fills
from reshard.runtime.numpy_dtypes import numpy_dtype
from reshard.runtime.numpy_views import scaled
from reshard.runtime.on_mpi.run_plan import RankPlan, make_groups, run_step
from reshard.runtime.on_mpi.strided_copy import Array
from reshard.runtime.on_mpi.wire.exchange import Call
from reshard.runtime.on_mpi.wire.messages import messages
from reshard.types import dtypes
from reshard.types.plan import Plan


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
