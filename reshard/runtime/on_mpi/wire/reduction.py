"""Reductions: a step's summands are packed, and MPI's own reduce-scatter or all-reduce combines them.

MPI knows most dtypes. For the others (float16, bfloat16, float8) it moves bytes and calls numpy to combine.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import numpy as np
from mpi4py import MPI

from reshard.lower.to_mpi import Block, Reduce
from reshard.lower.to_mpi.blocks import cut
from reshard.runtime.on_mpi.strided_copy import Array, copy, raw
from reshard.runtime.on_mpi.wire.chunks import chunks
from reshard.runtime.on_mpi.wire.exchange import Call
from reshard.runtime.on_mpi.wire.messages import DIRECT
from reshard.types.reductions import all_reduce_elements

_UFUNC: dict[str, Callable[..., Array]] = {
    "sum": np.add,
    "mean": np.add,
    "max": np.maximum,
    "min": np.minimum,
    "product": np.multiply,
}
_OPS = {"sum": MPI.SUM, "mean": MPI.SUM, "max": MPI.MAX, "min": MPI.MIN, "product": MPI.PROD}
_LOGICAL = {"max": MPI.LOR, "min": MPI.LAND, "product": MPI.LAND}
_KNOWN = "?bhilqBHILQfdFD"
"""The codes of numpy's dtypes that MPI can combine."""


def reduce(
    call: Call,
    step: Reduce,
    ranks: Mapping[int, int],
    source: Array,
    target: Array,
    ready: Callable[[], None] | None = None,
) -> None:
    """One reduction from a tile to another, both of the true dtype.

    `ready` is called once the first summands are packed, and again once they are combined. Before the second call the
    target changes only where the plan has no buffer to combine them in.
    """
    comm = call.team.group(tuple(ranks[device] for device in step.group))
    cap = max(1, DIRECT // source.itemsize // (len(step.group) if step.scatter else 1))
    lies = not step.packed and not step.placed and target.flags.c_contiguous
    whole = all(block.elements <= cap for blocks in step.each for block in blocks)
    if whole and lies and (source.flags.c_contiguous or not step.scatter):
        if ready is not None:
            ready()
        if source.size:
            _straight(call, comm, step, source, target)
        if ready is not None:
            ready()
        return
    for blocks in step.each:
        for pieces in zip(*(cut(block, cap) for block in blocks), strict=True):
            _packed(call, comm, step, pieces, source, target, ready)
            ready = None
    if ready is not None:
        ready()
        ready()


def _straight(call: Call, comm: MPI.Intracomm, step: Reduce, source: Array, target: Array) -> None:
    """Tile to tile; a tile in another order is first put in order, where the result will be."""
    if source.flags.c_contiguous:
        _combine(call, comm, step, source.reshape(-1), target.reshape(-1))
        return
    copy(raw(target), raw(source))
    _combine(call, comm, step, None, target.reshape(-1))


def _packed(
    call: Call,
    comm: MPI.Intracomm,
    step: Reduce,
    blocks: Sequence[Block],
    source: Array,
    target: Array,
    ready: Callable[[], None] | None,
) -> None:
    """Reduces shares that are packed one after another, and puts the result in its place."""
    elements = sum(block.elements for block in blocks)
    call.memory.take(call.device, elements)
    buffer = call.pool.take(elements * source.itemsize)
    packed = buffer.view(source.dtype)
    (out,) = chunks(-1, blocks, elements, "src", source.shape)
    out.pack(source, packed)
    if ready is not None:
        ready()
    _combine(call, comm, step, None, packed)
    if ready is not None:
        ready()
    mine = blocks[comm.rank if step.scatter else 0]
    (into,) = chunks(-1, [mine], mine.elements, "dst", target.shape)
    into.unpack(target, packed)
    call.pool.give(buffer)
    call.memory.free(call.device, elements)


def _combine(call: Call, comm: MPI.Intracomm, step: Reduce, send: Array | None, receive: Array) -> None:
    """MPI's collective; without `send`, from the head of `receive` into it. A mean is divided at the end."""
    datatype, op = _operation(receive.dtype, step.reduction)
    count = receive.size if send is None else send.size
    if step.scatter:
        count //= comm.size
    given: Any = MPI.IN_PLACE if send is None else [send, count, datatype]
    if step.scatter:
        request = comm.Ireduce_scatter_block(given, [receive, count, datatype], op)
        crossed = (comm.size - 1) * count
    else:
        request = comm.Iallreduce(given, [receive, count, datatype], op)
        crossed = all_reduce_elements(count, comm.size)
    call.watch.until(request.Test)
    call.memory.receive(call.device, crossed)
    if step.reduction == "mean":
        receive[:count] /= receive.dtype.type(comm.size)


@cache
def _operation(dtype: np.dtype[Any], reduction: str) -> tuple[MPI.Datatype, MPI.Op]:
    if dtype.char in _KNOWN:
        op = _LOGICAL[reduction] if dtype.char == "?" else _OPS[reduction]
        return MPI.Datatype.fromcode(dtype.char), op
    ufunc = _UFUNC[reduction]

    def combine(one: Any, other: Any, _: MPI.Datatype) -> None:
        into = np.frombuffer(other, dtype)
        ufunc(np.frombuffer(one, dtype), into, out=into)

    return MPI.BYTE.Create_contiguous(dtype.itemsize).Commit(), MPI.Op.Create(combine, commute=True)
