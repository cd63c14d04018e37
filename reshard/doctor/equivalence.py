"""Whether a rewritten module takes every element from where the old one took it: only then is it let through.

Each replaced value is followed back to its sources, in the old module through XLA's chain and in the new one through
the fragment. All devices are followed: along every coordinate, at random points, and at all points of small arrays.
Both must come from the same place of the same device's tile, or of a device that surely has an equal tile. And both
must be rounded alike where dtypes change on the way.

The new value is followed from its users, fusions entered, so a tile that is passed to the wrong one is seen as well.

What was proved of a pair of values is kept, by digests of how they are made of the source:

    %c = f32[8,4] copy(%leaf)
    %g = f32[32,4] all-gather(%c), dimensions={0}       a digest of opcode, shape, attributes and the operand's digest

A program often has the same chain many times, and many programs have it. Two values of the same digest take the same
elements of their leaves, on every device, by the same instructions. So what is proved of a pair of them holds for every
pair of the same digests, in this program and in others: it need not be traced again.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import NamedTuple

import numpy as np

from reshard.doctor.batch_ops import BatchOp, OpReplacement, batch_op, is_index, same_op
from reshard.doctor.chain_reader import Replacement, finishing_name
from reshard.doctor.dataflow.flow import (
    Flow,
    HloValue,
    Numbering,
    Scope,
    describe_instruction,
    digest_bytes,
    parameter_number,
)
from reshard.doctor.dataflow.index_maps import (
    FRAGMENT_MOVES,
    UNKNOWN_FILL,
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
from reshard.doctor.dataflow.trace import NOWHERE, Origins, Summands, Tracer, same_sums, trace_summands
from reshard.doctor.infer_layouts import list_axis_points
from reshard.errors import SpliceError
from reshard.hlo import Module

Leaves = tuple[HloValue, ...]

_ALL = 1 << 16  # points of a value, over all devices, that are followed one by one
_RANDOM = 1 << 14  # points that are followed of larger ones
_MOST = 1 << 18  # elements of rows that are followed


class Traced:
    """A module whose values can be followed, through spliced fragments too if it is `spliced`.

    Loops with the bodies `unrolled` are followed iteration by iteration.
    """

    def __init__(self, module: Module, devices: int, spliced: bool = False, unrolled: Collection[str] = ()) -> None:
        self.flow = Flow(module, unrolled)
        scalars = Scalars(self.flow, devices)
        self.maps = IndexMaps(self.flow, scalars, spliced)
        self.numbering = Numbering(self.flow)
        self.devices = devices
        self._signatures: dict[Leaves, Signatures] = {}

    def region(self, name: str) -> Scope:
        """The region of that name."""
        for region in self.flow.regions:
            if region.computation.name == name:
                return region
        raise SpliceError(f"{name}: the module does not run it any more")

    def signature(self, value: HloValue, leaves: Leaves) -> bytes | None:
        """The digest of how a value is made of leaves; see `Signatures`."""
        if leaves not in self._signatures:
            self._signatures[leaves] = Signatures(self.maps, self.numbering, leaves)
        return self._signatures[leaves].of(value)

    def origins(self, value: HloValue, leaves: Leaves, points: Points) -> Origins:
        """Where points of a value were in the leaves; raises `SpliceError` if they cannot be followed."""
        try:
            return Tracer(self.maps, self.numbering, frozenset(leaves))(value, points)
        except Untraceable as error:
            raise SpliceError(f"{value.name}: its elements cannot be followed ({error})") from None

    def summands(self, value: HloValue, leaf: HloValue, points: Points) -> Summands:
        """The elements of the leaf that points of a value sum; raises `SpliceError` if they cannot be followed."""
        try:
            return trace_summands(self.maps, self.numbering, value, leaf, points)
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

    `proofs` are those known so far. Sums of floats may be added up in `any_order`, or in the old one only.
    """

    old: Traced
    new: Traced
    region: str
    stand_ins: Mapping[str, str]
    proofs: Proofs
    any_order: bool = False

    def source(self, name: str) -> HloValue:
        """What an instruction of the region yields in the new module, or what took its place."""
        return self.new.flow.origin(HloValue(self.new.region(self.region), self.stand_ins.get(name, name)))

    def key(self, pair: tuple[HloValue, HloValue], leaves: tuple[Leaves, Leaves]) -> Key | None:
        """The key of a proof that an old and a new value have the same elements; None if it cannot be kept."""
        before, after = self.old.signature(pair[0], leaves[0]), self.new.signature(pair[1], leaves[1])
        return None if before is None or after is None else (before, after, self.old.devices, self.any_order)


def check_equivalent(spliced: Spliced, replacement: Replacement, replicas: Replicas) -> None:
    """Raises `SpliceError` unless all users of a replaced value get the same elements as before."""
    old, new = spliced.old, spliced.new
    leaves = tuple(map(spliced.source, replacement.sources))
    sources = replacement.leaves
    if replacement.is_summed:
        sources = tuple(old.flow.operands(replacement.sums[0]))
    for value in replacement.values:
        for fresh in fresh_values(spliced, value):
            key = spliced.key((value, fresh), (sources, leaves))
            if spliced.proofs.hold(key, sources, replicas):
                continue
            points = points_of(old.devices, replacement.after.dims)
            if not replacement.is_summed:
                devices = _check_moved(spliced, (value, fresh), (sources, leaves), points, replacement, replicas)
                spliced.proofs.add(key, devices, old.devices)
                continue
            (source,), (leaf,) = sources, leaves
            before, after = old.summands(value, source, points), new.summands(fresh, leaf, points)
            dtype, each = replacement.befores[0].dtype, np.arange(old.devices)
            if same_sums(before, after, each, dtype, spliced.any_order):
                spliced.proofs.add(key, ((each, each),), old.devices)
            elif not same_sums(before, after, replicas.of(source), dtype, spliced.any_order):
                raise SpliceError(f"{value.name}: its elements would be other sums, or added up in another order")


def _check_moved(
    spliced: Spliced,
    values: tuple[HloValue, HloValue],
    leaves: tuple[Leaves, Leaves],
    points: Points,
    replacement: Replacement,
    replicas: Replicas,
) -> tuple[tuple[Numbers, Numbers], ...]:
    """Checks that two values, the old and the fresh one, have the same elements, rounded alike.

    Returns, for each of the leaves, the devices that these come from afterwards, and those before.
    """
    old, new, (value, fresh) = spliced.old, spliced.new, values
    before, after = old.origins(value, leaves[0], points), new.origins(fresh, leaves[1], points)
    followed = before.leaf == NOWHERE
    if (before.place[followed] == UNKNOWN_FILL).any():
        raise SpliceError(f"{value.name}: some of its elements are padding")
    if (followed != (after.leaf == NOWHERE)).any() or (before.place != after.place)[followed].any():
        raise SpliceError(f"{value.name}: its padding would be elsewhere, or of another number")
    devices: list[tuple[Numbers, Numbers]] = []
    for source, leaf, name in zip(*leaves, replacement.sources, strict=True):
        was, is_now = old.conversion(value, source), new.conversion(fresh, leaf)
        if was != is_now:
            spelled = [" to ".join(dtype for dtype, _ in groupby(one)) for one in (was, is_now)]
            raise SpliceError(f"{value.name}: {spelled[0]} would become {spelled[1]}")
        own = before.leaf == old.numbering.of(source)
        followed |= own
        if (after.leaf[own] != new.numbering.of(leaf)).any():
            raise SpliceError(f"{value.name}: some of its elements would not come from {name}")
        devices.append((after.device[own], before.device[own]))
        wrong = (after.place[own] != before.place[own]) | replicas.differ(source, *devices[-1])
        if wrong.any():
            at = int(np.flatnonzero(own)[wrong.argmax()])
            raise SpliceError(
                f"{value.name}: device {points.device[at]}, index {tuple(map(int, points.indices[:, at]))} would "
                f"come from place {after.place[at]} of device {after.device[at]}, not from place "
                f"{before.place[at]} of device {before.device[at]}"
            )
    if not followed.all():
        raise SpliceError(f"{value.name}: some of its elements come from none of {', '.join(replacement.sources)}")
    return tuple(devices)


def fresh_values(spliced: Spliced, value: HloValue) -> list[HloValue]:
    """What users of an old value take in the new module, splices too, and what the region yields in its place.

    Raises `SpliceError` if nothing does.
    """
    old, new, region = spliced.old, spliced.new, spliced.region
    outer = HloValue(value.scope, finishing_name(value))
    while outer.scope.opened and outer.scope.computation.root is outer.instruction and outer.scope.caller is not None:
        outer = HloValue(outer.scope.caller.scope, outer.scope.caller.instruction.name)
    scope = _same_scope(old, new, outer.scope, region)
    taken: list[HloValue] = []
    if outer.name in spliced.stand_ins and not outer.scope.opened:
        taken.append(spliced.source(outer.name))
    for user in outer.scope.computation.users.get(outer.name, ()):
        if user.name in scope.computation.by_name:  # else it is gone with the chain
            taken += _operands_taken(old, new, HloValue(outer.scope, user.name), HloValue(scope, user.name), outer)
    root, fresh = outer.scope.computation.root, scope.computation.root
    if root is not None and root.name == outer.name and fresh is not None:
        taken.append(new.flow.origin(HloValue(scope, fresh.name)))
    if not taken:
        raise SpliceError(f"{value.name}: nothing takes what replaces it")
    return taken


def _operands_taken(old: Traced, new: Traced, user: HloValue, twin: HloValue, value: HloValue) -> Iterator[HloValue]:
    """The operands of a user's twin that stand where the user has the value; fusions are entered."""
    before, after = user.instruction, twin.instruction
    numbers = [at for at, name in enumerate(before.operands) if name == value.name]
    if before.opcode not in ("fusion", "call"):
        if len(before.operands) != len(after.operands):
            raise SpliceError(f"{user.name}: it takes {len(after.operands)} operands instead of {len(before.operands)}")
        yield from (new.flow.origin(HloValue(twin.scope, after.operands[at])) for at in numbers)
        return
    inside, entered = old.flow.inner(user.scope, before), new.flow.inner(twin.scope, after)
    if inside is None or entered is None:
        raise SpliceError(f"{user.name}: what it calls is not known")
    parameters = [one for one in inside.computation.instructions if one.opcode == "parameter"]
    for parameter in [one for at in numbers for one in parameters if parameter_number(one) == at]:
        for taker in inside.computation.users.get(parameter.name, ()):
            if taker.name in entered.computation.by_name:
                pair = HloValue(inside, taker.name), HloValue(entered, taker.name)
                yield from _operands_taken(old, new, *pair, HloValue(inside, parameter.name))


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
    leaves = tuple(map(spliced.source, replacement.sources))
    for output in replacement.outputs:
        for value in output.values:
            for fresh in fresh_values(spliced, value):
                key = spliced.key((value, fresh), (replacement.leaves, leaves))
                if spliced.proofs.hold(key, replacement.leaves, replicas):
                    continue
                points = points_of(old.devices, output.after.dims)
                before = _find_rows(old, value, points, replacement.op)
                after = _find_rows(new, fresh, points, replacement.op)
                _check_op(old, new, before, after, replacement)
                pairs = _check_operands(spliced, (before, after), leaves[0], replacement, replicas)
                spliced.proofs.add(key, (pairs,), old.devices)


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
    """Checks that elements of two results come from the same places of rows, by the same operation."""
    name = before.result.name
    if name != replacement.instruction or before.result.path != after.result.path:
        raise SpliceError(f"{name}: its result would be another one of {after.result.name}")
    if not same_op(old.flow.module, before.result.instruction, new.flow.module, after.result.instruction):
        raise SpliceError(f"{name}: the compiler makes another operation for a device's rows, {after.result.name}")
    one, other = ([op.operands, op.results] for op in (before.op, after.op))
    rows = [
        [[(array.dtype, [array.dims[dim] for dim in op.inner(array)]) for array in arrays] for arrays in each]
        for op, each in ((before.op, one), (after.op, other))
    ]
    if rows[0] != rows[1]:
        raise SpliceError(f"{name}: {after.result.name} has other rows")
    if (before.place != after.place).any():
        raise SpliceError(f"{name}: elements would come from another place of their rows")


def _check_operands(
    spliced: Spliced, rows: tuple[_Rows, _Rows], leaf: HloValue, replacement: OpReplacement, replicas: Replicas
) -> tuple[Numbers, Numbers]:
    """Checks that the rows of both operations have the same elements of the source; returns the devices of each."""
    old, new, (before, after), (source,) = spliced.old, spliced.new, rows, replacement.leaves
    # The columns that differ: most are those before them, and numbers are sorted faster than columns.
    columns = np.stack([before.device, before.row, after.device, after.row])
    changes = (columns[:, 1:] != columns[:, :-1]).any(axis=0)
    columns = columns[:, np.concatenate([[True], changes])]
    sizes = [1 + int(row.max()) for row in columns]
    if math.prod(sizes) > np.iinfo(np.int64).max:
        columns = np.unique(columns, axis=1)
    else:
        columns = columns[:, np.unique(ravel_indices(columns, sizes), return_index=True)[1]]
    here: list[Numbers] = []
    there: list[Numbers] = []
    operands = [traced.flow.operands(one.result) for traced, one in ((old, before), (new, after))]
    for number, (was, is_now) in enumerate(zip(*operands, strict=True)):
        dim = replacement.indices[number]
        if dim is not None:
            if not (is_index(old.maps, old.numbering, was, dim) and is_index(new.maps, new.numbering, is_now, dim)):
                raise SpliceError(f"{was.name}: it would not be the index along dim {dim} any more")
            continue
        points = _points_in_rows(((before.op, was), (after.op, is_now)), columns)
        one, other = old.origins(was, (source,), points[0]), new.origins(is_now, (leaf,), points[1])
        if (one.leaf != old.numbering.of(source)).any() or (other.leaf != new.numbering.of(leaf)).any():
            raise SpliceError(f"{was.name}: some of its elements would not come from {replacement.sources[0]}")
        if old.conversion(was, source) != new.conversion(is_now, leaf):
            raise SpliceError(f"{was.name}: it would be converted on the way")
        if (one.place != other.place).any() or replicas.differ(source, one.device, other.device).any():
            raise SpliceError(f"{was.name}: its rows would have other elements of {replacement.sources[0]}")
        here.append(one.device)
        there.append(other.device)
    return np.concatenate(here), np.concatenate(there)


def _points_in_rows(operands: Sequence[tuple[BatchOp, HloValue]], rows: Numbers) -> list[Points]:
    """Elements of pairs of rows of two operands: all if they are few, else some of each row, at the same places.

    `rows` has the device and the row of the first operand, then those of the second.
    """
    op, array = operands[0][0], array_of(operands[0][1])
    inner = [array.dims[dim] for dim in op.inner(array)]
    length, count = math.prod(inner), rows.shape[1]
    each = length if count * length <= _MOST else max(1, _MOST // count)
    chosen, places = unravel_places(np.arange(count * each, dtype=np.int64), (count, each))
    if each < length:
        places = np.random.default_rng(0).integers(0, length, (count * each,))
    points: list[Points] = []
    for at, (op, operand) in enumerate(operands):
        array = array_of(operand)
        device, row = rows[2 * at][chosen], rows[2 * at + 1][chosen]
        indices = np.zeros((len(array.dims), device.size), np.int64)
        indices[list(op.batch)] = unravel_places(row, [array.dims[dim] for dim in op.batch])
        indices[list(op.inner(array))] = unravel_places(places, inner)
        points.append(Points(device, indices))
    return points


# What was proved once, by digests of how values are made.


_REDUCTIONS = ("all-reduce", "reduce-scatter")
_FOLLOWED = FRAGMENT_MOVES.difference(("parameter", "conditional")).union(("constant", "iota", *_REDUCTIONS))
_OPS = ("fft", "sort", "custom-call")
_FIRST_SCALAR = {"dynamic-slice": (1, None), "dynamic-update-slice": (2, None), "select": (0, 1), "conditional": (0, 1)}

Key = tuple[bytes, bytes, int, bool]
"""The digests of the old and the new value, the number of devices, and whether sums may take any order."""
_Made = tuple[tuple[object, ...], tuple[HloValue, ...]]
"""How a value is made: a description of the instruction, and the values that it is made of."""


class Signatures:
    """Digests of how the values of a module are made of its leaves, which are told apart by their order."""

    def __init__(self, maps: IndexMaps, numbering: Numbering, leaves: Leaves) -> None:
        self.maps = maps
        self.numbering = numbering
        self.leaves = leaves
        self._numbers = [numbering.of(leaf) for leaf in leaves]
        self._known: dict[HloValue, bytes | None] = {}

    def of(self, value: HloValue) -> bytes | None:
        """The digest of a value; None if anything but the leaves goes into it, or an instruction is unknown."""
        value = self.maps.flow.origin(value)
        waiting: dict[HloValue, _Made | None] = {}
        stack = [value]
        while stack:  # ends: each value is put aside once, and known afterwards
            one = stack[-1]
            if one in self._known:
                stack.pop()
            elif one not in waiting:
                made = waiting[one] = self._made(one)
                stack += () if made is None else (each for each in made[1] if each not in self._known)
            else:
                description, inputs = waiting[one] or ((), ())
                parts = [self._known.get(each) for each in inputs]
                is_known = waiting[one] is not None and None not in parts
                self._known[one] = digest_bytes(repr((description, parts)).encode()) if is_known else None
        return self._known[value]

    def _made(self, value: HloValue) -> _Made | None:
        """How a value is made; None if that is not known."""
        sources, opcode, instruction = self.maps.sources(value), value.opcode, value.instruction
        number = self.numbering.of(value) if sources is None and value not in self.leaves else None
        if value in self.leaves or number in self._numbers:
            at = self.leaves.index(value) if number is None else self._numbers.index(number)
            return ("leaf", at, repr(self.leaves[at].array), self.maps.is_constant(self.leaves[at])), ()
        if opcode == "parameter":
            return None if sources is None else (("argument",), tuple(sources))
        if opcode not in (*_FOLLOWED, *_OPS, "conditional"):
            return None
        if opcode in _OPS and batch_op(self.maps.flow.module, value.scope, instruction) is None:
            return None
        # Offsets and predicates are numbers, which the digest has itself.
        operands = self.maps.flow.operands(value)
        first, last = _FIRST_SCALAR.get(opcode, (0, 0))
        numbers: list[object] = []
        for operand in operands[first:last]:
            known = self.maps.scalars.at(operand)
            if not isinstance(known, np.ndarray):
                return None
            numbers.append((known.shape, digest_bytes(known.tobytes()), repr(operand.array)))
        does = describe_instruction(self.maps.flow.module, instruction)
        description = (does, value.path, instruction.shape, numbers)
        if opcode == "conditional":
            return None if sources is None else (description, tuple(sources))
        return description, (*operands[:first], *(() if last is None else operands[last:]))


class Proofs:
    """What was proved of pairs of values, by their digests: which devices must have equal tiles of each leaf."""

    def __init__(self) -> None:
        self._pairs: dict[Key, tuple[Numbers, ...]] = {}

    def hold(self, key: Key | None, leaves: Leaves, replicas: Replicas) -> bool:
        """Whether it was proved that two values have the same elements, and what it took of the leaves holds here."""
        known = None if key is None else self._pairs.get(key)
        return known is not None and not any(
            replicas.differ(leaf, *np.divmod(pairs, replicas.devices)).any()
            for leaf, pairs in zip(leaves, known, strict=True)
        )

    def add(self, key: Key | None, devices: Iterable[tuple[Numbers, Numbers]], count: int) -> None:
        """Records that two values have the same elements if, of each leaf, some of the `count` devices have the same
        tiles as others.
        """
        if key is not None:
            pairs = [(one * count + other)[one != other] for one, other in devices]
            self._pairs[key] = tuple(np.flatnonzero(np.bincount(each, minlength=1)) for each in pairs)
