"""Whether a rewritten module takes every element from where the old one took it.

Each replaced value is followed back to the source, in the old module through XLA's chain and in the new one through
the fragment. All devices are followed: along every coordinate, at random points, and at all points of small arrays.
Both must come from the same place of the same device's tile, or of a device that surely has an equal tile. And both
must be rounded alike where dtypes change on the way.

The new value is followed from its users, fusions entered, so a tile that is passed to the wrong one is seen as well.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import NamedTuple

import numpy as np

from reshard.doctor.batch_ops import BatchOp, same_op
from reshard.doctor.chain_reader import Replacement, finishing_name
from reshard.doctor.checks.proofs import Key, Proofs, Signatures
from reshard.doctor.dataflow.flow import Flow, HloValue, Numbering, Scope, parameter_number
from reshard.doctor.dataflow.index_maps import (
    Conversion,
    IndexMaps,
    Points,
    Unconvertible,
    Untraceable,
    array_of,
    find_conversion,
    ravel_indices,
    unravel_places,
)
from reshard.doctor.dataflow.replicas import Replicas
from reshard.doctor.dataflow.scalars import Numbers, Scalars
from reshard.doctor.dataflow.trace import NOWHERE, Origins, Summands, Tracer, list_summands, same_sums
from reshard.doctor.infer_layouts import list_axis_points
from reshard.doctor.op_layouts import OpReplacement, is_index
from reshard.errors import SpliceError
from reshard.hlo import Module

_ALL = 1 << 16  # points of a value, over all devices, that are followed one by one
_RANDOM = 1 << 14  # points that are followed of larger ones


class Traced:
    """A module whose values can be followed, through spliced fragments too if it is `spliced`."""

    def __init__(self, module: Module, devices: int, spliced: bool = False) -> None:
        self.flow = Flow(module)
        scalars = Scalars(self.flow, devices)
        self.maps = IndexMaps(self.flow, scalars, spliced)
        self.numbering = Numbering(self.flow)
        self.devices = devices
        self._signatures: dict[HloValue, Signatures] = {}

    def region(self, name: str) -> Scope:
        """The region of that name."""
        return next(region for region in self.flow.regions if region.computation.name == name)

    def signature(self, value: HloValue, leaf: HloValue) -> bytes | None:
        """The digest of how a value is made of a leaf; see `Signatures`."""
        if leaf not in self._signatures:
            self._signatures[leaf] = Signatures(self.maps, self.numbering, leaf)
        return self._signatures[leaf].of(value)

    def origins(self, value: HloValue, leaf: HloValue, points: Points) -> Origins:
        """Where points of a value were in the leaf; raises `SpliceError` if they cannot be followed."""
        try:
            return Tracer(self.maps, self.numbering, frozenset({leaf}))(value, points)
        except Untraceable as error:
            raise SpliceError(f"{value.name}: its elements cannot be followed ({error})") from None

    def summands(self, value: HloValue, leaf: HloValue, points: Points) -> Summands:
        """The elements of the leaf that points of a value sum; raises `SpliceError` if they cannot be followed."""
        try:
            return list_summands(self.maps, self.numbering, value, leaf, points)
        except (Untraceable, Unconvertible) as error:
            raise SpliceError(f"{value.name}: its summands cannot be followed ({error})") from None

    def conversion(self, value: HloValue, leaf: HloValue) -> Conversion:
        """The conversions between the leaf and a value; raises `SpliceError` if they differ between its elements."""
        try:
            return find_conversion(self.maps, value, leaf)
        except Unconvertible as error:
            raise SpliceError(f"{value.name}: {error}") from None


class Spliced(NamedTuple):
    """Both modules, the region of a splice, and the instructions there that took the place of others, by name.

    `proofs` are those known so far.
    """

    old: Traced
    new: Traced
    region: str
    stand_ins: Mapping[str, str]
    proofs: Proofs

    def source(self, name: str) -> HloValue:
        """What an instruction of the region yields in the new module, or what took its place."""
        return self.new.flow.origin(HloValue(self.new.region(self.region), self.stand_ins.get(name, name)))

    def key(self, pair: tuple[HloValue, HloValue], leaves: tuple[HloValue, HloValue]) -> Key | None:
        """The key of a proof that an old and a new value have the same elements; None if it cannot be kept."""
        before, after = self.old.signature(pair[0], leaves[0]), self.new.signature(pair[1], leaves[1])
        return None if before is None or after is None else (before, after, self.old.devices)


def check_equivalent(spliced: Spliced, replacement: Replacement, replicas: Replicas) -> None:
    """Raises `SpliceError` unless all users of a replaced value get the same elements as before."""
    old = spliced.old
    leaf = spliced.source(replacement.source)
    before = old.flow.operands(replacement.leaf)[0] if replacement.is_summed else replacement.leaf
    for value in replacement.values:
        for fresh in fresh_values(spliced, value):
            key = spliced.key((value, fresh), (before, leaf))
            if spliced.proofs.hold(key, before, replicas):
                continue
            check = _check_summed if replacement.is_summed else _check_moved
            check(spliced, (value, fresh), (before, leaf), replacement, replicas, key)


def _check_moved(
    spliced: Spliced,
    values: tuple[HloValue, HloValue],
    leaves: tuple[HloValue, HloValue],
    replacement: Replacement,
    replicas: Replicas,
    key: Key | None,
) -> None:
    """Checks that two values, the old and the fresh one, have the same elements, rounded alike."""
    old, new, (value, fresh), leaf = spliced.old, spliced.new, values, leaves[1]
    points = points_of(old.devices, replacement.after.dims)
    before, after = old.origins(value, replacement.leaf, points), new.origins(fresh, leaf, points)
    if (before.leaf == NOWHERE).any():
        raise SpliceError(f"{value.name}: some of its elements are padding")
    was, is_now = old.conversion(value, replacement.leaf), new.conversion(fresh, leaf)
    if was != is_now:
        raise SpliceError(f"{value.name}: {_spell_conversion(was)} would become {_spell_conversion(is_now)}")
    if (after.leaf != new.numbering.of(leaf)).any():
        raise SpliceError(f"{value.name}: some of its elements would not come from {replacement.source}")
    wrong = (after.place != before.place) | replicas.differ(replacement.leaf, after.device, before.device)
    if wrong.any():
        at = int(wrong.argmax())
        raise SpliceError(
            f"{value.name}: device {points.device[at]}, index {tuple(map(int, points.indices[:, at]))} would "
            f"come from place {after.place[at]} of device {after.device[at]}, not from place "
            f"{before.place[at]} of device {before.device[at]}"
        )
    spliced.proofs.add(key, after.device, before.device, old.devices)


def _check_summed(
    spliced: Spliced,
    values: tuple[HloValue, HloValue],
    leaves: tuple[HloValue, HloValue],
    replacement: Replacement,
    replicas: Replicas,
    key: Key | None,
) -> None:
    """Checks that two values, the old and the fresh one, are the same sums."""
    old, new, (value, fresh), (source, leaf) = spliced.old, spliced.new, values, leaves
    points = points_of(old.devices, replacement.after.dims)
    before, after = old.summands(value, source, points), new.summands(fresh, leaf, points)
    dtype, each = replacement.before.dtype, np.arange(old.devices)
    if same_sums(before, after, each, dtype):
        spliced.proofs.add(key, each, each, old.devices)
    elif not same_sums(before, after, replicas.of(source), dtype):
        raise SpliceError(f"{value.name}: its elements would be other sums, or added up in another order")


def fresh_values(spliced: Spliced, value: HloValue) -> list[HloValue]:
    """What users of an old value take in the new module, splices too, and what the region yields in its place.

    Raises `SpliceError` if nothing does.
    """
    taken = list(_fresh_values(spliced, value))
    if not taken:
        raise SpliceError(f"{value.name}: nothing takes what replaces it")
    return taken


def _fresh_values(spliced: Spliced, value: HloValue) -> Iterator[HloValue]:
    old, new, region = spliced.old, spliced.new, spliced.region
    outer = HloValue(value.scope, finishing_name(value))
    while outer.scope.opened and outer.scope.computation.root is outer.instruction and outer.scope.caller is not None:
        outer = HloValue(outer.scope.caller.scope, outer.scope.caller.instruction.name)
    scope = _same_scope(old, new, outer.scope, region)
    if outer.name in spliced.stand_ins and not outer.scope.opened:
        yield spliced.source(outer.name)
    users = outer.scope.computation.users.get(outer.name, ())
    for user in users:
        twin = scope.computation.by_name.get(user.name)
        if twin is None:
            continue  # It is gone with the chain.
        yield from _operands_taken(old, new, HloValue(outer.scope, user.name), HloValue(scope, twin.name), outer)
    root, fresh = outer.scope.computation.root, scope.computation.root
    if root is not None and root.name == outer.name and fresh is not None:
        yield new.flow.origin(HloValue(scope, fresh.name))


def _operands_taken(old: Traced, new: Traced, user: HloValue, twin: HloValue, value: HloValue) -> Iterator[HloValue]:
    """The operands of a user's twin that stand where the user has the value."""
    before, after = user.instruction, twin.instruction
    if before.opcode not in ("fusion", "call"):
        for name, fresh in zip(before.operands, after.operands, strict=True):
            if name == value.name:
                yield new.flow.origin(HloValue(twin.scope, fresh))
        return
    inside, entered = old.flow.inner(user.scope, before), new.flow.inner(twin.scope, after)
    if inside is None or entered is None:
        raise SpliceError(f"{user.name}: what it calls is not known")
    for at, name in enumerate(before.operands):
        if name == value.name:
            yield from _taken_inside(old, new, inside, entered, at)


def _taken_inside(old: Traced, new: Traced, inside: Scope, entered: Scope, number: int) -> Iterator[HloValue]:
    """The operands, inside a fusion, that stand where the old ones had one of its parameters."""
    parameter = next(
        one for one in inside.computation.instructions
        if one.opcode == "parameter" and parameter_number(one) == number
    )  # fmt: skip
    value = HloValue(inside, parameter.name)
    for user in inside.computation.users.get(parameter.name, ()):
        if user.name in entered.computation.by_name:
            yield from _operands_taken(old, new, HloValue(inside, user.name), HloValue(entered, user.name), value)


def _same_scope(old: Traced, new: Traced, scope: Scope, region: str) -> Scope:
    """The scope of the new module that is entered in the same way."""
    if not scope.opened or scope.caller is None:
        return new.region(region)
    outer = _same_scope(old, new, scope.caller.scope, region)
    instruction = outer.computation.by_name.get(scope.caller.instruction.name)
    inner = None if instruction is None else new.flow.inner(outer, instruction)
    if inner is None:
        raise SpliceError(f"{scope.caller.instruction.name}: it is gone")
    return inner


def _spell_conversion(one: Conversion) -> str:
    return " to ".join(dtype for dtype, _ in groupby(one))


def points_of(devices: int, dims: Sequence[int]) -> Points:
    """Points of an array on every device: all if they are few, else those along each coordinate and random ones."""
    sizes = (devices, *dims)
    total = math.prod(sizes)
    if total <= _ALL:
        every = unravel_places(np.arange(total), sizes)
        return Points(every[0], every[1:])
    lines = list_axis_points(sizes)
    rows = np.random.default_rng(0).integers(0, np.array(sizes).reshape(-1, 1), (len(sizes), _RANDOM))
    coordinates = np.concatenate([np.vstack([lines.device, lines.indices]), rows], axis=1)
    return Points(coordinates[0], coordinates[1:])


# Whether an operation that runs on other rows than before still yields every element of its results.
#
# Every element of a result is followed back to the operation, in the old module and in the new one: it must be the same
# element of a row. Then the elements of these rows are followed back to the source, and must be the same ones. Both
# operations must be equal in all but the number of rows.


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
                before = _find_rows(old, value, points, replacement.op)
                after = _find_rows(new, fresh, points, replacement.op)
                _check_op(old, new, before, after, replacement)
                pairs = _check_operands(old, new, (before, after), leaf, replacement, replicas)
                spliced.proofs.add(key, *pairs, old.devices)


def _find_rows(traced: Traced, value: HloValue, points: Points, like: BatchOp) -> _Rows:
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
    index = unravel_places(origins.place, array_of(end).dims)
    inner = list(op.inner(array_of(end)))
    sizes = array_of(end).dims
    row = ravel_indices(index[list(op.batch)], [sizes[dim] for dim in op.batch])
    return _Rows(end, op, origins.device, row, ravel_indices(index[inner], [sizes[dim] for dim in inner]))


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
    pairs = _different_columns(np.stack([before.device, before.row, after.device, after.row]))
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


def _different_columns(columns: Numbers) -> Numbers:
    """The columns that differ; most are those before them, and numbers are sorted faster than columns."""
    changes = (columns[:, 1:] != columns[:, :-1]).any(axis=0)
    columns = columns[:, np.concatenate([[True], changes])]
    sizes = [1 + int(row.max()) for row in columns]
    if math.prod(sizes) > np.iinfo(np.int64).max:
        return np.unique(columns, axis=1)
    return columns[:, np.unique(ravel_indices(columns, sizes), return_index=True)[1]]


def _points_in(
    op: BatchOp, operand: HloValue, other_op: BatchOp, other: HloValue, pairs: Numbers
) -> tuple[Points, Points]:
    """Elements of pairs of rows of two operands: all if they are few, else some of each row, at the same places."""
    inner = [array_of(operand).dims[dim] for dim in op.inner(array_of(operand))]
    length, count = math.prod(inner), pairs.shape[1]
    each = length if count * length <= _MOST else max(1, _MOST // count)
    chosen, places = unravel_places(np.arange(count * each, dtype=np.int64), (count, each))
    if each < length:
        places = np.random.default_rng(0).integers(0, length, (count * each,))
    index = unravel_places(places, inner)
    return (
        _points_in_rows(op, operand, pairs[0][chosen], pairs[1][chosen], index),
        _points_in_rows(other_op, other, pairs[2][chosen], pairs[3][chosen], index),
    )


def _points_in_rows(op: BatchOp, operand: HloValue, device: Numbers, row: Numbers, inside: Numbers) -> Points:
    array = array_of(operand)
    indices = np.zeros((len(array.dims), device.size), np.int64)
    indices[list(op.batch)] = unravel_places(row, [array.dims[dim] for dim in op.batch])
    indices[list(op.inner(array))] = inside
    return Points(device, indices)
