"""Runs a plan on this rank, step by step: its messages, its reductions, its buffers."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache

from reshard.errors import PlanError
from reshard.lower.to_mpi import Move, Overwrite, Reduce, ranks, schedule
from reshard.runtime.on_mpi.strided_copy import Array, copy, raw
from reshard.runtime.on_mpi.wire.exchange import Call, Exchange
from reshard.runtime.on_mpi.wire.messages import Messages, messages
from reshard.runtime.on_mpi.wire.reduction import reduce
from reshard.types.plan import Plan

Step = Messages | Reduce | Overwrite


@dataclass(frozen=True, eq=False)
class Compiled:
    """A plan as one rank runs it: its steps, moves spelled as messages, with the tile's shape after each."""

    steps: tuple[Step, ...]
    tile_shapes: tuple[tuple[int, ...], ...]
    ranks: Mapping[int, int]


@lru_cache(maxsize=256)
def compiled(plan: Plan, rank: int, itemsize: int) -> Compiled:
    """What a rank does in a plan, for elements of so many bytes."""
    devices = ranks(plan.source.mesh)
    numbers = {device: number for number, device in enumerate(devices)}
    found = schedule(plan, devices[rank])
    shapes = (found.tile_shape, *found.tile_shapes)
    steps = tuple(
        messages(step, numbers, shapes[at], shapes[at + 1], itemsize, of.received_bytes)
        if isinstance(step, Move)
        else step
        for at, (step, of) in enumerate(zip(found.steps, plan.steps, strict=True))
    )
    return Compiled(steps, found.tile_shapes, numbers)


Ready = Callable[[], None]


def run(call: Call, plan: Compiled, tile: Array, place: Callable[[], Array], ready: Ready | None = None) -> None:
    """Fills the array that `place` gives, asked once that is needed, and leaves the tile as it is.

    `ready` is called before the result is written to, once as much is behind as the plan's buffers allow.
    """
    memory, device = call.memory, call.device
    if not plan.steps:
        memory.take(device, tile.size)
        copy(raw(place()), raw(tile))
    now = tile
    for at, (step, shape) in enumerate(zip(plan.steps, plan.tile_shapes, strict=True)):
        before, last = now, at + 1 == len(plan.steps)
        now = place() if last else call.pool.take(math.prod(shape) * tile.itemsize).view(tile.dtype).reshape(shape)
        memory.take(device, now.size)
        _step(call, plan, step, before, now, ready if last else None)
        if before is not tile:
            call.pool.give(before)
            memory.free(device, before.size)


def _step(call: Call, plan: Compiled, step: Step, before: Array, now: Array, ready: Ready | None) -> None:
    match step:
        case Reduce():
            reduce(call, step, plan.ranks, before, now, ready)
        case Messages():
            Exchange(call, step, raw(before), raw(now)).run(ready)
        case Overwrite():
            raise PlanError("an exchange in place has no other place for its result; plan it without donate")
