"""Runs a plan's steps on this rank: messages, reductions, casts, and the buffers between steps.

step                     how it runs
view that keeps memory   not at all: the next step takes the tile in its new shape
view, take, put          copies between two tiles
cast                     numpy's cast, with a scale where one is given
a reduction              MPI's own collective, of packed blocks
an exchange in place     slot by slot inside the donated tile (`overwrite_tile`), alone in its plan
all others               local copies, then messages (`wire.message_exchange`)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import cache, lru_cache
from typing import Any, NamedTuple

import numpy as np
from mpi4py import MPI

from reshard.errors import PlanError
from reshard.geometry.blocks import Block, cut_block
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
from reshard.runtime.numpy_tiles import identities, numpy_dtype, ufunc
from reshard.runtime.on_mpi.copies.stream_copy import copy_views
from reshard.runtime.on_mpi.copies.strided_copy import Array, copy_view, pair_views, view_as_words
from reshard.runtime.on_mpi.team import OVERWRITE
from reshard.runtime.on_mpi.window_tiles import WindowTile
from reshard.runtime.on_mpi.wire.chunks import DIRECT, Messages, messages_of_step, pack_chunks
from reshard.runtime.on_mpi.wire.message_exchange import Call, MessageExchange, TileCast
from reshard.runtime.on_numpy import rearrange_cells, scale_tile
from reshard.types import dtypes
from reshard.types.reductions import UFUNCS, all_reduce_elements

RunnableStep = Messages | Reduce | NewSummand | Overwrite | CastTiles

Shape = tuple[int, ...]
Ready = Callable[[], None]


class RankStep(NamedTuple):
    """One step as a rank runs it: the shapes in which it sees its tile before and after, the dtype afterwards, and
    whether it writes into a result that is there already.
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
        fills = isinstance(step, StepMessages) and step.fills
        if isinstance(step, StepMessages):
            if step.aliases:
                continue
            # Elements without a name in layouts have the size of the dtype that stands for them, so only a cast
            # changes the size.
            wire, casts = of.wire.dtype, of.operand.dtype != of.result.dtype
            nbytes = itemsize if wire == plan.source.dtype else dtypes.nbytes(1, wire)
            step = messages_of_step(step, ranks, (before, after), nbytes, of.received_bytes, casts=casts)
        steps.append(RankStep(step, before, after, of.result.dtype, fills))
    return RankPlan(tuple(steps), ranks, plan.source.dtype)


def list_wide_shapes(plan: RankPlan) -> list[Shape]:
    """For each cast of a plan, the shape of the tile of the wider dtype, which the cast's scale fits."""
    shapes: list[Shape] = []
    dtype = plan.dtype
    for step in plan.steps:
        if step.dtype != dtype:
            shapes.append(step.before if dtypes.bits(step.dtype) < dtypes.bits(dtype) else step.after)
        dtype = step.dtype
    return shapes


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
    `ready` is called before the result is written to, as late as the plan's buffers allow. A tile of a plan with a view
    is C-ordered, and so is every result.
    """
    # The communicators of all reductions are made first: MPI waits for all ranks there, and a step may fail on one.
    for step in plan.steps:
        if isinstance(step.run, Reduce) and step.run.group:
            call.team.group(tuple(plan.ranks[device] for device in step.run.group))
    # Where a step fills a part of the result, the rest of it stays: so it is live from the start.
    filled = any(step.fills for step in plan.steps)
    result = place() if filled or not plan.steps else None
    if result is not None and not result.counted:
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
        call.memory.take(call.device, after.size, step.dtype if isinstance(step.run, Messages) else None)
    match step.run:
        case Reduce():
            reduce_step(call, step.run, plan.ranks, before, after, ready)
        case NewSummand(local=local, reduction=reduction):
            if ready is not None:
                ready()
            after[...] = identities(reduction, (), after.dtype)  # Over it, what this rank has of the sum.
            for target, source in pair_views(local, after, before):
                target[...] = source
        case Messages() if step.dtype != call.memory.dtype:
            narrows = dtypes.bits(step.dtype) < dtypes.bits(call.memory.dtype)
            wide = before if narrows else after
            if scale is not None and wide.size:
                scale = view_as_words(np.broadcast_to(np.asarray(scale, wide.dtype), wide.shape).copy())
            cast = TileCast(before.dtype, np.dtype(after.dtype), narrows, scale if wide.size else None)
            call.memory.cast(step.dtype if narrows else call.memory.dtype)  # Of the messages.
            MessageExchange(call, step.run, view_as_words(before), view_as_words(after), cast).run(ready)
            call.memory.cast(step.dtype)
        case Messages(passed=passed):
            MessageExchange(call, step.run, view_as_words(before), view_as_words(after)).run(ready)
            if passed is not None:
                MessageExchange(call, passed, view_as_words(after), view_as_words(after)).run()
        case Overwrite():
            raise PlanError("an exchange in place writes its result over its operand; plan without donate=True")


# Reductions: a step's summands are packed if necessary, and MPI's reduce-scatter or all-reduce combines them.
#
# A reduce-scatter of the tile [a b | c d] over two ranks, where rank 0 keeps the first column and rank 1 the second:
#
#     rank    tile          packed, one share per rank    received share    placed in the result
#     0       1 2 / 3 4     [1 3 | 2 4]                   1+10, 3+30        11 / 33
#     1       10 20 / 30 40 [10 30 | 20 40]               2+20, 4+40        22 / 44
#
# If the shares are consecutive in the tile and the result is contiguous, nothing is packed. MPI knows most dtypes; for
# the others (float16, bfloat16, float8) it moves bytes and calls numpy to combine them.

_OPS = {"sum": MPI.SUM, "mean": MPI.SUM, "max": MPI.MAX, "min": MPI.MIN, "product": MPI.PROD}
_LOGICAL = {"max": MPI.LOR, "min": MPI.LAND, "product": MPI.LAND}
_KNOWN = "?bhilqBHILQfdFD"
"""The type codes of the numpy dtypes that MPI can combine."""


def reduce_step(
    call: Call, step: Reduce, ranks: Mapping[int, int], source: Array, target: Array, ready: Ready | None = None
) -> None:
    """Runs one reduction between tiles of the true dtype (not raw words).

    `ready` is called twice: after the first summands are packed, and after they are combined. Before the second call
    the target changes only if the plan has no buffer to combine them in.
    """
    calls = [ready] * 2 if ready else []  # Ranks without a part wait for both calls, too.

    def reached() -> None:
        if calls:
            calls.pop()()

    if step.group:
        comm = call.team.group(tuple(ranks[device] for device in step.group))
        cap = max(1, DIRECT // source.itemsize // (len(step.group) if step.scatter else 1))
        if is_straight(step, cap, source, target):
            reached()
            if source.flags.c_contiguous and source.size:
                _run_reduction(call, comm, step, source.reshape(-1), target.reshape(-1))
            elif source.size:  # MPI takes contiguous memory, which the target is.
                copy_view(view_as_words(target), view_as_words(source))
                _run_reduction(call, comm, step, None, target.reshape(-1))
        else:
            for blocks in step.each:
                for parts in zip(*(cut_block(block, cap) for block in blocks), strict=True):
                    # Shares are packed one after another, combined, and this rank's result is copied into place.
                    elements = sum(part.elements for part in parts)
                    call.memory.take(call.device, elements)
                    packed = call.pool.take(elements * source.itemsize).view(source.dtype)
                    (out,) = pack_chunks(-1, parts, elements, "src", (step.frames[0], source.shape))
                    copy_views(out.packing(source, packed))
                    reached()
                    _run_reduction(call, comm, step, None, packed)
                    reached()
                    mine = parts[comm.rank if step.scatter else 0]
                    (into,) = pack_chunks(-1, [mine], mine.elements, "dst", (step.frames[1], target.shape))
                    copy_views(into.unpacking(target, packed))
                    call.pool.give(packed)
                    call.memory.free(call.device, elements)
    reached()
    reached()


def is_straight(step: Reduce, cap: int, source: Array, target: Array) -> bool:
    """Whether MPI can combine from tile to tile: shares consecutive in both, none above `cap` elements."""
    if step.packed or step.placed or not target.flags.c_contiguous:
        return False
    if not (source.flags.aligned and target.flags.aligned):  # MPI's loops may be compiled for numbers in their places.
        return False
    if step.scatter and not source.flags.c_contiguous:
        return False
    return all(block.elements <= cap for blocks in step.each for block in blocks)


ORDERED = 256 << 10
"""Bytes of all summands of a result up to which each rank combines them, in the order of ranks: the bits of small sums
then depend neither on MPI's algorithm nor on whether a call is the first of its kind (see `repeated`)."""


def _run_reduction(call: Call, comm: MPI.Intracomm, step: Reduce, send: Array | None, receive: Array) -> None:
    """Runs MPI's collective; without `send`, in place in `receive`. A mean is a sum, divided at the end."""
    count = (receive.size if send is None else send.size) // (comm.size if step.scatter else 1)
    crossed = (comm.size - 1) * count if step.scatter else all_reduce_elements(count, comm.size)
    if comm.size * count * receive.itemsize <= ORDERED:
        parts, combine = np.empty((comm.size, count), receive.dtype), ufunc(step.reduction)
        given, taken = (view_as_words(each).view(np.uint8) for each in (receive if send is None else send, parts))
        exchange = comm.Ialltoall if step.scatter else comm.Iallgather
        call.watch.until(exchange([given, MPI.BYTE], [taken, MPI.BYTE]).Test)
        with np.errstate(all="ignore"):
            receive[:count] = parts[0]
            for part in parts[1:]:
                combine(receive[:count], part, out=receive[:count])
    else:
        datatype, op = _operation_for(receive.dtype, step.reduction)
        reduce = comm.Ireduce_scatter_block if step.scatter else comm.Iallreduce
        operand: Any = MPI.IN_PLACE if send is None else [send, count, datatype]
        call.watch.until(reduce(operand, [receive, count, datatype], op).Test)
        if _raised:
            raise _raised.pop()
    call.memory.receive(call.device, crossed)
    if step.reduction == "mean":
        receive[:count] /= receive.dtype.type(comm.size)


_raised: list[BaseException] = []
"""What numpy raised inside MPI, which would end the process if it were raised there."""


@cache
def can_combine(dtype: np.dtype[Any], reduction: str) -> bool:
    """Whether numpy can combine two elements of a dtype without a name in layouts; structures and dates have no sum.

    >>> [can_combine(np.dtype(dtype), by) for dtype, by in (("m8[s]", "sum"), ([("a", "i4")], "sum"), ("M8[s]", "max"))]
    [True, False, True]
    """
    one = np.zeros(1, dtype)
    try:
        return reduction != "mean" and getattr(np, UFUNCS[reduction])(one, one).dtype == dtype
    except TypeError:
        return False


@cache
def _operation_for(dtype: np.dtype[Any], reduction: str) -> tuple[MPI.Datatype, MPI.Op]:
    """The datatype and the operation for a dtype: MPI's own, or bytes that numpy combines, whose extrema keep a NaN."""
    if dtype.char in _KNOWN and not (dtype.kind == "f" and reduction in ("max", "min")):
        op = _LOGICAL[reduction] if dtype.char == "?" else _OPS[reduction]
        return MPI.Datatype.fromcode(dtype.char), op
    return _bytes_of(dtype), _numpy_operation(UFUNCS[reduction])


_dtypes: dict[int, np.dtype[Any]] = {}
"""The numpy dtypes behind MPI datatypes of bytes, by the handle of these."""


@cache
def _bytes_of(dtype: np.dtype[Any]) -> MPI.Datatype:
    made = MPI.BYTE.Create_contiguous(dtype.itemsize).Commit()
    _dtypes[made.handle] = dtype
    return made


@cache
def _numpy_operation(name: str) -> MPI.Op:
    """A ufunc as an operation, one for all dtypes: mpi4py has room for 32 in all."""
    ufunc: np.ufunc = getattr(np, name)

    def combine(one: Any, other: Any, datatype: MPI.Datatype) -> None:
        try:
            dtype = _dtypes[datatype.handle]
            into = np.frombuffer(other, dtype)
            with np.errstate(all="ignore"):
                ufunc(np.frombuffer(one, dtype), into, out=into)
        except BaseException as error:  # An interrupt, for example.
            _raised.append(error)

    return MPI.Op.Create(combine, commute=True)


# An exchange inside a donated tile: packed into slots of its own memory, sent slot by slot, and unpacked.
#
# Packing and unpacking permute runs of the buffer along cycles, with room for one run besides. That is slow, and used
# only if the budget leaves no room for a second tile. Worked example, a permutation of four runs with one cycle of
# three:
#
#     cells            [a, b, c, d]      cell 0 <- cell 2, 2 <- 1, 1 <- 0
#     held = cell 0    [a, b, c, d]      held a
#     0 <- 2           [c, b, c, d]
#     2 <- 1           [c, b, b, d]
#     1 <- held        [c, a, b, d]      the cycle is closed


def overwrite_tile(call: Call, step: Overwrite, ranks: Mapping[int, int], tile: Array, shape: Sequence[int]) -> Array:
    """Runs the exchange; the result is a view of the operand's memory, which is C-ordered and at least as large."""
    comm, memory, buffer = call.team.comm, call.memory, tile.reshape(-1)
    permute_runs(buffer, permutation_of_slots(step.pack, step.slot))
    for out, into in step.turns:
        # What is sent is staged, because what arrives may use the same slot in this turn.
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
        call.watch.until(lambda: MPI.Request.Testall(requests))  # noqa: B023
        call.pool.give(leaving)
        memory.free(call.device, staging)
    slots = permutation_of_slots(step.unpack, step.slot)
    permute_runs(buffer, slots._replace(target=slots.source, source=slots.target))
    return buffer[: math.prod(shape)].reshape(tuple(shape))


class RunPermutation(NamedTuple):
    """A permutation of runs of `run` elements: run number `target[i]` of the buffer receives run number `source[i]`."""

    run: int
    target: Array
    source: Array


def permutation_of_slots(places: Sequence[tuple[int, Block]], slot: int) -> RunPermutation:
    """The permutation that fills slots from a tile, at the `src` end of the blocks, with the longest runs possible."""
    if not places:
        return RunPermutation(1, np.empty(0, np.int64), np.empty(0, np.int64))
    source: list[Array] = []
    for _, block in places:
        offsets: Array = np.array([block.src])
        for axis in block.axes:
            offsets = (offsets[:, None] + np.arange(axis.extent) * axis.src).reshape(-1)
        source.append(offsets)
    to, at = np.concatenate([np.arange(slot) + number * slot for number, _ in places]), np.concatenate(source)
    # A run length is possible if all jumps, in the slots and in the tile, occur at its multiples only.
    jumps = np.flatnonzero((np.diff(to) != 1) | (np.diff(at) != 1)) + 1
    starts = np.concatenate([[0], jumps])
    run = int(np.gcd.reduce(np.concatenate([starts, to[starts], at[starts], [to.size]])))
    return RunPermutation(run, to[::run] // run, at[::run] // run)


def permute_runs(buffer: Array, runs: RunPermutation) -> None:
    """Permutes runs in place, along chains and cycles, with one run of extra memory.

    >>> cells = np.array(list("abcd"))
    >>> permute_runs(cells, RunPermutation(1, np.array([0, 1, 2]), np.array([2, 0, 1])))
    >>> "".join(cells)
    'cabd'
    """
    cells = buffer[: buffer.size // runs.run * runs.run].reshape(-1, runs.run)
    rearrange_cells(cells, dict(zip(runs.target.tolist(), runs.source.tolist(), strict=True)))
