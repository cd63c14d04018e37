"""Whether an operation that runs on other rows than before still yields every element of its results.

Every element of a result is followed back to the operation, in the old module and in the new one: it must be the same
element of a row. Then the elements of these rows are followed back to the source, and must be the same ones. Both
operations must be equal in all but the number of rows.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from reshard.doctor.batch_ops import BatchOp, same_op
from reshard.doctor.checks.equivalence import Spliced, Traced, fresh_values, points_of
from reshard.doctor.dataflow.flow import HloValue
from reshard.doctor.dataflow.index_maps import Points, Untraceable, array_of, ravel, unravel
from reshard.doctor.dataflow.replicas import Replicas
from reshard.doctor.dataflow.scalars import Numbers
from reshard.doctor.dataflow.trace import NOWHERE, Tracer
from reshard.doctor.op_layouts import OpReplacement, is_index
from reshard.errors import SpliceError

_MOST = 1 << 18  # elements of rows that are followed


class _Rows(NamedTuple):
    """The operation that elements come from, which row on which device, and where in it, as one number each."""

    result: HloValue
    op: BatchOp
    device: Numbers
    row: Numbers
    place: Numbers


def check_same_rows(spliced: Spliced, replacement: OpReplacement, replicas: Replicas) -> None:
    """Raises `SpliceError` unless all users of an operation's results get the same elements as before."""
    old, new = spliced.old, spliced.new
    leaf = spliced.source(replacement.source)
    for output in replacement.outputs:
        for value in output.values:
            for fresh in fresh_values(spliced, value):
                key = spliced.key((value, fresh), (replacement.leaf, leaf))
                if spliced.proofs.hold(key, replacement.leaf, replicas):
                    continue
                points = points_of(old.devices, output.after.dims)
                before = _rows(old, value, points, replacement.op)
                after = _rows(new, fresh, points, replacement.op)
                _check_op(old, new, before, after, replacement)
                pairs = _check_operands(old, new, (before, after), leaf, replacement, replicas)
                spliced.proofs.add(key, *pairs, old.devices)


def _rows(traced: Traced, value: HloValue, points: Points, like: BatchOp) -> _Rows:
    """The rows of the operation that points of a value come from, which has rows in the same dims as another one."""
    tracer = Tracer(traced.maps, traced.numbering, frozenset())
    try:
        origins = tracer(value, points)
    except Untraceable as error:
        raise SpliceError(f"{value.name}: its elements cannot be followed ({error})") from None
    if (origins.leaf != origins.leaf[0]).any() or origins.leaf[0] == NOWHERE:
        raise SpliceError(f"{value.name}: its elements come from several operations")
    end = traced.flow.origin(tracer.ends[int(origins.leaf[0])])
    operands = tuple(array_of(operand) for operand in traced.flow.operands(end))
    op = like._replace(operands=operands, results=end.instruction.arrays)
    if max(op.batch, default=-1) >= len(array_of(end).dims):
        raise SpliceError(f"{value.name}: its elements come from {end.name}, which is another operation")
    index = unravel(origins.place, array_of(end).dims)
    inner = list(op.inner(array_of(end)))
    sizes = array_of(end).dims
    row = ravel(index[list(op.batch)], [sizes[dim] for dim in op.batch])
    return _Rows(end, op, origins.device, row, ravel(index[inner], [sizes[dim] for dim in inner]))


def _check_op(old: Traced, new: Traced, before: _Rows, after: _Rows, replacement: OpReplacement) -> None:
    name = before.result.name
    if name != replacement.instruction or before.result.path != after.result.path:
        raise SpliceError(f"{name}: its result would be another one of {after.result.name}")
    if not same_op(old.flow.module, before.result.instruction, new.flow.module, after.result.instruction):
        raise SpliceError(f"{name}: the compiler makes another operation for a device's rows, {after.result.name}")
    if not _have_same_rows(before.op, after.op):
        raise SpliceError(f"{name}: {after.result.name} has other rows")
    if (before.place != after.place).any():
        raise SpliceError(f"{name}: elements would come from another place of their rows")


def _have_same_rows(one: BatchOp, other: BatchOp) -> bool:
    if len(one.operands) != len(other.operands) or len(one.results) != len(other.results):
        return False
    pairs = [*zip(one.operands, other.operands, strict=True), *zip(one.results, other.results, strict=True)]
    return all(
        a.dtype == b.dtype and [a.dims[dim] for dim in one.inner(a)] == [b.dims[dim] for dim in other.inner(b)]
        for a, b in pairs
    )


def _check_operands(
    old: Traced,
    new: Traced,
    rows: tuple[_Rows, _Rows],
    leaf: HloValue,
    replacement: OpReplacement,
    replicas: Replicas,
) -> tuple[Numbers, Numbers]:
    """Checks that the rows of both operations have the same elements of the source; returns the devices of each."""
    before, after = rows
    pairs = _different(np.stack([before.device, before.row, after.device, after.row]))
    here: list[Numbers] = []
    there: list[Numbers] = []
    operands = [traced.flow.operands(one.result) for traced, one in ((old, before), (new, after))]
    for number, (was, is_now) in enumerate(zip(*operands, strict=True)):
        dim = replacement.inputs[number].index_dim
        if dim is not None:
            if not (is_index(old.maps, old.numbering, was, dim) and is_index(new.maps, new.numbering, is_now, dim)):
                raise SpliceError(f"{was.name}: it would not be the index along dim {dim} any more")
            continue
        points = _points_in(before.op, was, after.op, is_now, pairs)
        one, other = old.origins(was, replacement.leaf, points[0]), new.origins(is_now, leaf, points[1])
        if (one.leaf != old.numbering.of(replacement.leaf)).any() or (other.leaf != new.numbering.of(leaf)).any():
            raise SpliceError(f"{was.name}: some of its elements would not come from {replacement.source}")
        if old.conversion(was, replacement.leaf) != new.conversion(is_now, leaf):
            raise SpliceError(f"{was.name}: it would be converted on the way")
        if (one.place != other.place).any() or replicas.differ(replacement.leaf, one.device, other.device).any():
            raise SpliceError(f"{was.name}: its rows would have other elements of {replacement.source}")
        here.append(one.device)
        there.append(other.device)
    return np.concatenate(here), np.concatenate(there)


def _different(columns: Numbers) -> Numbers:
    """The columns that differ; most are those before them, and numbers are sorted faster than columns."""
    changes = (columns[:, 1:] != columns[:, :-1]).any(axis=0)
    columns = columns[:, np.concatenate([[True], changes])]
    sizes = [1 + int(row.max()) for row in columns]
    if math.prod(sizes) > np.iinfo(np.int64).max:
        return np.unique(columns, axis=1)
    return columns[:, np.unique(ravel(columns, sizes), return_index=True)[1]]


def _points_in(
    op: BatchOp, operand: HloValue, other_op: BatchOp, other: HloValue, pairs: Numbers
) -> tuple[Points, Points]:
    """Elements of pairs of rows of two operands: all if they are few, else some of each row, at the same places."""
    inner = [array_of(operand).dims[dim] for dim in op.inner(array_of(operand))]
    length, count = math.prod(inner), pairs.shape[1]
    each = length if count * length <= _MOST else max(1, _MOST // count)
    chosen, places = unravel(np.arange(count * each, dtype=np.int64), (count, each))
    if each < length:
        places = np.random.default_rng(0).integers(0, length, (count * each,))
    index = unravel(places, inner)
    return (
        _points(op, operand, pairs[0][chosen], pairs[1][chosen], index),
        _points(other_op, other, pairs[2][chosen], pairs[3][chosen], index),
    )


def _points(op: BatchOp, operand: HloValue, device: Numbers, row: Numbers, inside: Numbers) -> Points:
    array = array_of(operand)
    indices = np.zeros((len(array.dims), device.size), np.int64)
    indices[list(op.batch)] = unravel(row, [array.dims[dim] for dim in op.batch])
    indices[list(op.inner(array))] = inside
    return Points(device, indices)
