"""Reductions: a step's summands are packed if necessary, and MPI's reduce-scatter or all-reduce combines them.

A reduce-scatter of the tile [a b | c d] over two ranks, where rank 0 keeps the first column and rank 1 the second:

    rank    tile          packed, one share per rank    received share    placed in the result
    0       1 2 / 3 4     [1 3 | 2 4]                   1+10, 3+30        11 / 33
    1       10 20 / 30 40 [10 30 | 20 40]               2+20, 4+40        22 / 44

If the shares are consecutive in the tile and the result is contiguous, nothing is packed. MPI knows most dtypes; for
the others (float16, bfloat16, float8) it moves bytes and calls numpy to combine them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import numpy as np
from mpi4py import MPI

from reshard.lower.to_mpi import Block, Reduce
from reshard.lower.to_mpi.blocks import cut_tile_block
from reshard.runtime.on_mpi.copies.strided_copy import Array, copy_view, view_as_words
from reshard.runtime.on_mpi.wire.chunks import pack_chunks
from reshard.runtime.on_mpi.wire.exchange import Call
from reshard.runtime.on_mpi.wire.messages import DIRECT
from reshard.types.reductions import UFUNCS, all_reduce_elements

_OPS = {"sum": MPI.SUM, "mean": MPI.SUM, "max": MPI.MAX, "min": MPI.MIN, "product": MPI.PROD}
_LOGICAL = {"max": MPI.LOR, "min": MPI.LAND, "product": MPI.LAND}
_KNOWN = "?bhilqBHILQfdFD"
"""The type codes of the numpy dtypes that MPI can combine."""


def reduce_step(
    call: Call,
    step: Reduce,
    ranks: Mapping[int, int],
    source: Array,
    target: Array,
    ready: Callable[[], None] | None = None,
) -> None:
    """Runs one reduction between tiles of the true dtype (not raw words).

    `ready` is called twice: after the first summands are packed, and after they are combined. Before the second call
    the target changes only if the plan has no buffer to combine them in.
    """
    if not step.group:  # Other ranks reduce, and wait for both calls.
        for _ in range(2 if ready else 0):
            (ready or _do_nothing)()
        return
    comm = call.team.group(tuple(ranks[device] for device in step.group))
    cap = max(1, DIRECT // source.itemsize // (len(step.group) if step.scatter else 1))
    if is_straight(step, cap, source, target):
        if ready is not None:
            ready()
        if source.flags.c_contiguous and source.size:
            _run_reduction(call, comm, step, source.reshape(-1), target.reshape(-1))
        elif source.size:  # MPI takes contiguous memory, which the target is.
            copy_view(view_as_words(target), view_as_words(source))
            _run_reduction(call, comm, step, None, target.reshape(-1))
        if ready is not None:
            ready()
        return
    for blocks in step.each:
        for pieces in zip(*(cut_tile_block(block, cap) for block in blocks), strict=True):
            _reduce_packed(call, comm, step, pieces, source, target, ready or _do_nothing)
            ready = None
    if ready is not None:  # Nothing is to be reduced here, but other ranks wait for both calls.
        ready()
        ready()


def _do_nothing() -> None:
    pass


def is_straight(step: Reduce, cap: int, source: Array, target: Array) -> bool:
    """Whether MPI can combine from tile to tile: shares consecutive in both, none above `cap` elements."""
    if step.packed or step.placed or not target.flags.c_contiguous:
        return False
    if step.scatter and not source.flags.c_contiguous:
        return False
    return all(block.elements <= cap for blocks in step.each for block in blocks)


def _reduce_packed(
    call: Call,
    comm: MPI.Intracomm,
    step: Reduce,
    blocks: Sequence[Block],
    source: Array,
    target: Array,
    ready: Callable[[], None],
) -> None:
    """Packs shares one after another, combines them, and copies this rank's result into place."""
    elements = sum(block.elements for block in blocks)
    call.memory.take(call.device, elements)
    buffer = call.pool.take(elements * source.itemsize)
    packed = buffer.view(source.dtype)
    (out,) = pack_chunks(-1, blocks, elements, "src", source.shape)
    out.pack(source, packed)
    ready()
    _run_reduction(call, comm, step, None, packed)
    ready()
    mine = blocks[comm.rank if step.scatter else 0]
    (into,) = pack_chunks(-1, [mine], mine.elements, "dst", target.shape)
    into.unpack(target, packed)
    call.pool.give(buffer)
    call.memory.free(call.device, elements)


def _run_reduction(call: Call, comm: MPI.Intracomm, step: Reduce, send: Array | None, receive: Array) -> None:
    """Runs MPI's collective; without `send`, in place in `receive`. A mean is a sum, divided at the end."""
    datatype, op = _operation_for(receive.dtype, step.reduction)
    count = receive.size if send is None else send.size
    if step.scatter:
        count //= comm.size
    operand: Any = MPI.IN_PLACE if send is None else [send, count, datatype]
    if step.scatter:
        request = comm.Ireduce_scatter_block(operand, [receive, count, datatype], op)
        crossed = (comm.size - 1) * count
    else:
        request = comm.Iallreduce(operand, [receive, count, datatype], op)
        crossed = all_reduce_elements(count, comm.size)
    call.watch.until(request.Test)
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
    """The datatype and the operation for a dtype: MPI's own, or bytes that numpy combines."""
    if dtype.char in _KNOWN:
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
