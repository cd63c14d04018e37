"""Index maps: the instructions that only move data, and where each element of their result was before.

For points of a result, given as devices and indices, a map names the operand that has the same elements, and on which
device and at which index:

    %t = f32[4,6] transpose(%p), dimensions={1,0}        (device d, index [i, j])  ->  %p, (d, [j, i])
    %g = f32[8,8] all-gather(%p), dimensions={0}         (d, [i, j])               ->  %p, (i // 2, [i % 2, j])
    %m = f32[2,8] collective-permute(%p), {{0,1}}        (1, [i, j])               ->  %p, (0, [i, j])

Points that no operand has (padding, or a device to which a permute sends nothing) have no preimage.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType
from typing import ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray

from reshard.doctor.dataflow.flow import Flow, HloValue, Scope
from reshard.doctor.dataflow.scalars import Numbers, Scalars
from reshard.errors import NotationError
from reshard.hlo import Array, parse_groups
from reshard.hlo.executed_collectives import permute_pairs

COLLECTIVES = ("all-gather", "all-to-all", "collective-permute", "collective-broadcast")
_ALL_OPERANDS = (
    *COLLECTIVES, "concatenate", "copy", "convert", "transpose", "reshape", "bitcast", "slice", "reverse",
)  # fmt: skip
_SLICE = re.compile(r"\[(\d+):(\d+)(?::(\d+))?\]")
_NUMBER = re.compile(r"-?\d+")

Mask = NDArray[np.bool_]


class Points(NamedTuple):
    """Elements of an array that every device has: the device of each, and its indices, one row per dim."""

    device: Numbers
    indices: Numbers

    def at(self, mask: Mask) -> Points:
        """The points for which the mask is true."""
        return Points(self.device[mask], self.indices[:, mask])


class Preimage(NamedTuple):
    """Points of an operand, and `where` in the given points they belong: a mask, None for all of them."""

    where: Mask | None
    value: HloValue
    points: Points


class Untraceable(Exception):
    """The text does not say where elements were: it leaves an offset out, or has an unknown form of a move."""


@dataclass(frozen=True, eq=False)
class IndexMaps:
    """The index maps of a module's instructions; `moves` has the opcodes of those that may have any."""

    moves: ClassVar[frozenset[str]] = frozenset((*_ALL_OPERANDS, "pad", "broadcast", "dynamic-slice", "select"))

    flow: Flow
    scalars: Scalars

    def sources(self, value: HloValue) -> list[HloValue] | None:
        """The operands whose elements a value has, in other places; None if it is computed or comes from outside."""
        opcode = value.opcode
        operands = self.flow.operands(value)
        match opcode:
            case _ if opcode in _ALL_OPERANDS:
                return operands
            case "pad":
                return operands[:1]
            case "broadcast":
                return operands if _count_or_none(operands[0]) == _count_or_none(value) else None
            case "dynamic-slice":
                known = all(self.scalars.at(offset) is not None for offset in operands[1:])
                return operands[:1] if known else None
            case "select":
                return self._choices(operands)
            case _:
                return None

    def _choices(self, operands: list[HloValue]) -> list[HloValue] | None:
        """The operands of a select that moves data: its predicate depends on the device and the index alone."""
        predicate, *choices = operands
        constant = [self.is_constant(value) for value in choices]
        if all(constant) or (self.scalars.at(predicate) is None and not self._is_positional(predicate)):
            return None
        return [value for value, is_constant in zip(choices, constant, strict=True) if not is_constant]

    def is_constant(self, value: HloValue) -> bool:
        """Whether a value is the same number everywhere, as padding is."""
        while value.opcode in ("broadcast", "convert", "reshape", "bitcast", "copy"):
            value = self.flow.operands(value)[0]
        return value.opcode == "constant"

    def _is_positional(self, value: HloValue) -> bool:
        """Whether a value depends on nothing but the device and the index."""
        seen: set[HloValue] = set()
        queue = [value]
        while queue:  # ends: each value is looked at once
            value = queue.pop()
            if value in seen or self.scalars.at(value) is not None:
                continue
            seen.add(value)
            if value.opcode in ("iota", "constant"):
                continue
            operands = self.flow.operands(value)
            if not operands or value.opcode not in _ARITHMETIC:
                return False
            queue += operands
        return True

    def preimages(self, value: HloValue, points: Points) -> list[Preimage]:
        """Where points of a value were before its instruction; raises `Untraceable` if that is not known."""
        index_map = _INDEX_MAPS.get(value.opcode)
        if index_map is None:
            raise Untraceable(value.opcode)
        try:
            return list(index_map(self, value, points))
        except (KeyError, ValueError, IndexError, NotationError) as error:
            raise Untraceable(f"{value.name}: {error}") from None


_ARITHMETIC = (
    "add", "subtract", "multiply", "divide", "remainder", "minimum", "maximum", "and", "or", "not", "compare",
    "convert", "broadcast", "reshape", "bitcast", "copy", "clamp", "select", "slice", "dynamic-slice", "transpose",
)  # fmt: skip


def _count_or_none(value: HloValue) -> int:
    return -1 if value.array is None else value.array.elements


def array_of(value: HloValue) -> Array:
    """The array that a value is; raises `Untraceable` for a tuple."""
    array = value.array
    if array is None:
        raise Untraceable(f"{value.name} is not an array")
    return array


def _integers_in(text: str) -> list[int]:
    return [int(number) for number in _NUMBER.findall(text)]


def attribute_ints(value: HloValue, name: str) -> list[int]:
    """The integers of an attribute of the value's instruction, none without it."""
    return _integers_in(value.instruction.attributes.get(name, ""))


def _map_same(maps: IndexMaps, value: HloValue, points: Points) -> Iterator[Preimage]:
    yield Preimage(None, maps.flow.operands(value)[0], points)


def _map_reshape(maps: IndexMaps, value: HloValue, points: Points) -> Iterator[Preimage]:
    operand = maps.flow.operands(value)[0]
    before, after = array_of(operand), array_of(value)
    yield Preimage(
        None, operand, points._replace(indices=unravel_places(ravel_indices(points.indices, after.dims), before.dims))
    )


def _map_bitcast(maps: IndexMaps, value: HloValue, points: Points) -> Iterator[Preimage]:
    """The same bytes under another shape: the elements keep their order in memory (tiling aside)."""
    operand = maps.flow.operands(value)[0]
    before, after = array_of(operand), array_of(value)
    if before.elements != after.elements:
        raise Untraceable(f"{value.name} changes the size of the elements")
    out, inside = _dims_in_memory(after), _dims_in_memory(before)
    place = ravel_indices(points.indices[out], [after.dims[at] for at in out])
    index = np.empty((len(before.dims), place.size), np.int64)
    index[inside] = unravel_places(place, [before.dims[at] for at in inside])
    yield Preimage(None, operand, points._replace(indices=index))


def _map_transpose(maps: IndexMaps, value: HloValue, points: Points) -> Iterator[Preimage]:
    index = np.empty_like(points.indices)
    index[attribute_ints(value, "dimensions")] = points.indices
    yield Preimage(None, maps.flow.operands(value)[0], points._replace(indices=index))


def _map_broadcast(maps: IndexMaps, value: HloValue, points: Points) -> Iterator[Preimage]:
    operand = maps.flow.operands(value)[0]
    yield Preimage(None, operand, points._replace(indices=points.indices[attribute_ints(value, "dimensions")]))


def _map_slice(maps: IndexMaps, value: HloValue, points: Points) -> Iterator[Preimage]:
    ranges = _SLICE.findall(value.instruction.attributes["slice"])
    start = np.array([int(first) for first, _, _ in ranges], np.int64).reshape(-1, 1)
    step = np.array([int(stride or 1) for _, _, stride in ranges], np.int64).reshape(-1, 1)
    yield Preimage(None, maps.flow.operands(value)[0], points._replace(indices=start + step * points.indices))


def _map_reverse(maps: IndexMaps, value: HloValue, points: Points) -> Iterator[Preimage]:
    index = points.indices.copy()
    for dim in attribute_ints(value, "dimensions"):
        index[dim] = array_of(value).dims[dim] - 1 - index[dim]
    yield Preimage(None, maps.flow.operands(value)[0], points._replace(indices=index))


def _map_dynamic_slice(maps: IndexMaps, value: HloValue, points: Points) -> Iterator[Preimage]:
    operand, *offsets = maps.flow.operands(value)
    before, after = array_of(operand), array_of(value)
    index = points.indices.copy()
    for dim, offset in enumerate(offsets):
        known = maps.scalars.at(offset)
        if not isinstance(known, np.ndarray):
            raise Untraceable(f"{value.name}: the offsets are not in the text")
        starts = np.clip(known.reshape(-1), 0, before.dims[dim] - after.dims[dim])
        index[dim] += starts[points.device]
    yield Preimage(None, operand, points._replace(indices=index))


def _map_pad(maps: IndexMaps, value: HloValue, points: Points) -> Iterator[Preimage]:
    operand = maps.flow.operands(value)[0]
    edges = [_integers_in(dim.replace("_", " ")) for dim in value.instruction.attributes["padding"].split("x")]
    low = np.array([edge[0] for edge in edges], np.int64).reshape(-1, 1)
    step = np.array([1 + (edge[2] if len(edge) > 2 else 0) for edge in edges], np.int64).reshape(-1, 1)
    sizes = np.array(array_of(operand).dims, np.int64).reshape(-1, 1)
    index, rest = np.divmod(points.indices - low, step)
    inside = ((rest == 0) & (index >= 0) & (index < sizes)).all(axis=0)
    yield Preimage(inside, operand, Points(points.device, index).at(inside))


def _map_concatenate(maps: IndexMaps, value: HloValue, points: Points) -> Iterator[Preimage]:
    (dim,) = attribute_ints(value, "dimensions")
    start = 0
    for operand in maps.flow.operands(value):
        stop = start + array_of(operand).dims[dim]
        inside = (points.indices[dim] >= start) & (points.indices[dim] < stop)
        index = points.indices.copy()
        index[dim] -= start
        yield Preimage(inside, operand, Points(points.device, index).at(inside))
        start = stop


def _map_select(maps: IndexMaps, value: HloValue, points: Points) -> Iterator[Preimage]:
    predicate, *choices = maps.flow.operands(value)
    known = maps.scalars.at(predicate)
    if not isinstance(known, np.ndarray):  # it depends on the index: one choice is padding, take all from the other
        (source,) = maps.sources(value) or []
        yield Preimage(None, source, points)
        return
    picked = known.reshape(maps.scalars.devices, -1)
    at = ravel_indices(points.indices, array_of(value).dims) if picked.shape[1] > 1 else np.zeros_like(points.device)
    first = picked[points.device, at] != 0
    for where, operand in zip((first, ~first), choices, strict=True):
        if not maps.is_constant(operand):
            yield Preimage(where, operand, points.at(where))


def _map_all_gather(maps: IndexMaps, value: HloValue, points: Points) -> Iterator[Preimage]:
    operand = maps.flow.operands(value)[value.path[0] if value.path else 0]
    (dim,) = attribute_ints(value, "dimensions")
    index = points.indices.copy()
    member, index[dim] = _divide_fast(points.indices[dim], array_of(operand).dims[dim])
    yield Preimage(None, operand, Points(_members_by_device(maps, value)[points.device, member], index))


def _map_all_to_all(maps: IndexMaps, value: HloValue, points: Points) -> Iterator[Preimage]:
    operands, members, ranks = maps.flow.operands(value), _members_by_device(maps, value), _ranks_in_groups(maps, value)
    mine = ranks[points.device]
    if value.path:  # one operand per member of the group
        device = members[points.device, value.path[0]]
        for rank in np.unique(mine):
            where = mine == rank
            yield Preimage(where, operands[rank], Points(device, points.indices).at(where))
        return
    (dim,) = attribute_ints(value, "dimensions")
    block = array_of(value).dims[dim] // members.shape[1]
    index = points.indices.copy()
    member, rest = _divide_fast(points.indices[dim], block)
    index[dim] = mine * block + rest
    yield Preimage(None, operands[0], Points(members[points.device, member], index))


def _map_permute(maps: IndexMaps, value: HloValue, points: Points) -> Iterator[Preimage]:
    sources = np.full(maps.scalars.devices, -1, np.int64)
    for source, target in permute_pairs(value.instruction):
        sources[target] = source
    return _map_sent(maps, value, points, sources)


def _map_collective_broadcast(maps: IndexMaps, value: HloValue, points: Points) -> Iterator[Preimage]:
    """The first device of a group sends its tile to all of it; devices in no group get zeros."""
    sources = np.full(maps.scalars.devices, -1, np.int64)
    for group in _group_lists(maps, value):
        sources[list(group)] = group[0]
    return _map_sent(maps, value, points, sources)


def _map_sent(maps: IndexMaps, value: HloValue, points: Points, sources: Numbers) -> Iterator[Preimage]:
    """The whole tile of the source of each device; -1 stands for none."""
    operand = maps.flow.operands(value)[value.path[0] if value.path else 0]
    inside = sources[points.device] >= 0
    yield Preimage(inside, operand, Points(sources[points.device], points.indices).at(inside))


def _members_by_device(maps: IndexMaps, value: HloValue) -> Numbers:
    """The group of each device, a row per device, in the order of the group."""
    lists = device_groups(maps, value)
    members = np.zeros((maps.scalars.devices, len(lists[0])), np.int64)
    for group in lists:
        members[list(group)] = group
    return members


def _ranks_in_groups(maps: IndexMaps, value: HloValue) -> Numbers:
    """The position of each device in its group."""
    ranks = np.zeros(maps.scalars.devices, np.int64)
    for group in device_groups(maps, value):
        ranks[list(group)] = np.arange(len(group))
    return ranks


def device_groups(maps: IndexMaps, value: HloValue) -> tuple[tuple[int, ...], ...]:
    """The replica groups; raises `Untraceable` unless they cover all devices in equal parts."""
    lists = _group_lists(maps, value)
    sizes = {len(group) for group in lists}
    if len(sizes) != 1 or sorted(device for group in lists for device in group) != list(range(maps.scalars.devices)):
        raise Untraceable(f"{value.name}: its groups do not cover all devices in equal parts")
    return lists


def _group_lists(maps: IndexMaps, value: HloValue) -> tuple[tuple[int, ...], ...]:
    attributes = value.instruction.attributes
    order = attributes.get("device_ids", "")
    text = attributes["replica_groups"] + (f", device_ids={order}" if order else "")
    return _list_groups(text, maps.scalars.devices)


@lru_cache(maxsize=256)
def _list_groups(text: str, devices: int) -> tuple[tuple[int, ...], ...]:
    return parse_groups(text, devices).lists


def _dims_in_memory(array: Array) -> list[int]:
    """The dims of an array in the order of its memory layout."""
    order = _integers_in(array.layout.partition(":")[0])
    return order[::-1] if len(order) == len(array.dims) else list(range(len(array.dims)))


def ravel_indices(index: Numbers, dims: Sequence[int]) -> Numbers:
    """The row-major place of each index; `index` has one row per dim."""
    place = np.zeros(index.shape[1], np.int64)
    for row, size in zip(index, dims, strict=True):
        place = place * size + row
    return place


def unravel_places(place: Numbers, dims: Sequence[int]) -> Numbers:
    """The index of each row-major place, one row per dim."""
    index = np.zeros((len(dims), place.size), np.int64)
    for dim in reversed(range(len(dims))):
        if dims[dim] > 1:
            place, index[dim] = _divide_fast(place, dims[dim])
    return index


def _divide_fast(numbers: Numbers, size: int) -> tuple[Numbers, Numbers]:
    """Quotients, rounded down, and remainders; several times faster than `np.divmod`."""
    if size < 1 or size & (size - 1):
        quotients = numbers // size
        return quotients, numbers - quotients * size
    return numbers >> (size.bit_length() - 1), numbers & (size - 1)


_IndexMap = Callable[[IndexMaps, HloValue, Points], Iterator[Preimage]]
_INDEX_MAPS: Mapping[str, _IndexMap] = MappingProxyType(
    {
        "copy": _map_same,
        "convert": _map_same,
        "reshape": _map_reshape,
        "bitcast": _map_bitcast,
        "transpose": _map_transpose,
        "broadcast": _map_broadcast,
        "slice": _map_slice,
        "reverse": _map_reverse,
        "dynamic-slice": _map_dynamic_slice,
        "pad": _map_pad,
        "concatenate": _map_concatenate,
        "select": _map_select,
        "all-gather": _map_all_gather,
        "all-to-all": _map_all_to_all,
        "collective-permute": _map_permute,
        "collective-broadcast": _map_collective_broadcast,
    }
)


# Conversions on the way of data that is only moved: which dtypes each element has had.
#
#     %w = f32[2,8] convert(%b)          CPU has no collectives of bf16, so it sends f32
#     %g = f32[8,8] all-gather(%w)
#     %n = bf16[8,8] convert(%g)         bf16, f32, bf16: nothing was lost, and bf16 is enough
#
# Converting is elementwise, so it may as well happen before or after a move. If there are two dtypes and one has all
# values of the other, an element is rounded to the narrow one at most once, and all orders give the same bits.


_WIDER = frozenset(
    {("bf16", "f32"), ("f16", "f32"), ("bf16", "f64"), ("f16", "f64"), ("f32", "f64")}
    | {(f"s{few}", f"s{many}") for few in (8, 16, 32) for many in (16, 32, 64) if few < many}
    | {(f"u{few}", f"u{many}") for few in (8, 16, 32) for many in (16, 32, 64) if few < many}
)
_Dtypes = frozenset[str]


class Conversion(NamedTuple):
    """What becomes of elements: their dtype before, the narrowest that they have on the way, and the one after."""

    before: str
    narrowest: str
    after: str


class Unconvertible(Exception):
    """Why conversions on the way cannot be done elsewhere."""


def find_conversion(maps: IndexMaps, value: HloValue, leaf: HloValue) -> Conversion:
    """What becomes of the elements that `value` has from `leaf`; raises `Unconvertible` if that is not one conversion.

    >>> from reshard.doctor.checks.equivalence import Traced
    >>> from reshard.hlo import parse
    >>> traced = Traced(parse('''HloModule m
    ...
    ... ENTRY %main {
    ...   %p = bf16[8]{0} parameter(0)
    ...   %w = f32[8]{0} convert(%p)
    ...   %c = f32[8]{0} copy(%w)
    ...   ROOT %n = bf16[8]{0} convert(%c)
    ... }'''), 1)
    >>> find_conversion(traced.maps, *(HloValue(traced.region("main"), name) for name in ("c", "p")))
    Conversion(before='bf16', narrowest='bf16', after='f32')
    """
    before, after = _dtype_of_value(leaf), _dtype_of_value(value)
    ways = _Ways(maps, leaf).of(value)
    if len(ways) > 1:
        raise Unconvertible(f"it converts some of the elements of {value.name} on the way, and others not")
    dtypes = next(iter(ways), frozenset({before, after}))
    narrowest = [one for one in sorted(dtypes) if all(one == other or (one, other) in _WIDER for other in dtypes)]
    if len(dtypes) > 2 or not narrowest:
        raise Unconvertible(f"it converts {before} to {after} by way of {', '.join(sorted(dtypes))}")
    return Conversion(before, narrowest[0], after)


class _Ways:
    """The sets of dtypes that elements have between a leaf and values made of it, a set for each way that they take."""

    def __init__(self, maps: IndexMaps, leaf: HloValue) -> None:
        self.maps = maps
        self.leaf = leaf
        self._known: dict[HloValue, frozenset[_Dtypes]] = {}

    def of(self, value: HloValue) -> frozenset[_Dtypes]:
        """The ways to a value; none if it has nothing of the leaf."""
        if value not in self._known:
            own = frozenset({_dtype_of_value(value)})
            sources = [] if value == self.leaf else self.maps.sources(value) or []
            before = frozenset({own}) if value == self.leaf else frozenset[_Dtypes]()
            self._known[value] = before.union(*({way | own for way in self.of(source)} for source in sources))
        return self._known[value]


def _dtype_of_value(value: HloValue) -> str:
    if value.array is None:
        raise Unconvertible(f"{value.name} is not an array")
    return value.array.dtype


# Index maps of compiled plans, which also move data by instructions that make new data in a user's program.
#
# dynamic-update-slice    a received box is written to its place
# conditional             devices that receive nothing skip the writing
# reduce                  over dims of size 1: TPU's spelling of a reshape


class FragmentMaps(IndexMaps):
    """The index maps of a module into which fragments were spliced."""

    moves: ClassVar[frozenset[str]] = IndexMaps.moves | {"dynamic-update-slice", "reduce", "conditional", "parameter"}

    def sources(self, value: HloValue) -> list[HloValue] | None:
        """The values whose elements a value has; see `IndexMaps.sources`."""
        operands = self.flow.operands(value)
        match value.opcode:
            case "dynamic-update-slice":
                known = all(self.scalars.at(offset) is not None for offset in operands[2:])
                return operands[:2] if known else None
            case "reduce":
                return operands[:1] if array_of(operands[0]).elements == array_of(value).elements else None
            case "conditional":
                return self._results(value)
            case "parameter":
                argument = self._argument(value)
                return None if argument is None else [argument]
            case _:
                return super().sources(value)

    def preimages(self, value: HloValue, points: Points) -> list[Preimage]:
        """Where points of a value were before its instruction; see `IndexMaps.preimages`."""
        match value.opcode:
            case "dynamic-update-slice":
                return list(self._of_update(value, points))
            case "reduce":
                return [self._of_reduction(value, points)]
            case "conditional":
                return list(self._of_conditional(value, points))
            case "parameter":
                return [Preimage(None, argument, points) for argument in self.sources(value) or []]
            case _:
                return super().preimages(value, points)

    def _results(self, value: HloValue) -> list[HloValue] | None:
        """What each branch of a conditional yields, if its predicate depends on the device alone."""
        if not isinstance(self.scalars.at(self.flow.operands(value)[0]), np.ndarray):
            return None
        branches = [self._branch(value, name) for name in value.instruction.called]
        roots = [None if branch is None else branch.computation.root for branch in branches]
        return [
            self.flow.origin(HloValue(branch, root.name, value.path))
            for branch, root in zip(branches, roots, strict=True)
            if branch is not None and root is not None
        ]

    def _branch(self, value: HloValue, name: str) -> Scope | None:
        """The region that a conditional runs."""
        named = (region for region in self.flow.regions if region.computation.name == name)
        return next((region for region in named if region.caller == value.site), None)

    def _argument(self, value: HloValue) -> HloValue | None:
        """The operand of a conditional that a parameter of one of its branches is."""
        caller = value.scope.caller
        if caller is None or caller.instruction.opcode != "conditional":
            return None
        branch = caller.instruction.called.index(value.scope.computation.name)
        return self.flow.origin(HloValue(caller.scope, caller.instruction.operands[branch + 1], value.path))

    def _of_update(self, value: HloValue, points: Points) -> Iterator[Preimage]:
        base, update, *offsets = self.flow.operands(value)
        before, part = array_of(base), array_of(update)
        index = points.indices.copy()
        for dim, offset in enumerate(offsets):
            starts = np.clip(self._known(value, offset).reshape(-1), 0, before.dims[dim] - part.dims[dim])
            index[dim] -= starts[points.device]
        sizes = np.array(part.dims, np.int64).reshape(-1, 1)
        inside = np.logical_and.reduce((index >= 0) & (index < sizes), axis=0)
        yield Preimage(inside, update, Points(points.device, index).at(inside))
        if not self.is_constant(base):
            yield Preimage(~inside, base, points.at(~inside))

    def _of_reduction(self, value: HloValue, points: Points) -> Preimage:
        operand = self.flow.operands(value)[0]
        rank, reduced = len(array_of(operand).dims), attribute_ints(value, "dimensions")
        index = np.zeros((rank, points.device.size), np.int64)
        index[[dim for dim in range(rank) if dim not in reduced]] = points.indices
        return Preimage(None, operand, points._replace(indices=index))

    def _of_conditional(self, value: HloValue, points: Points) -> Iterator[Preimage]:
        predicate, results = self.flow.operands(value)[0], self.sources(value) or []
        picked = self._known(value, predicate).reshape(-1)[points.device]
        if array_of(predicate).dtype == "pred":
            picked = 1 - picked  # The first branch is that of true.
        picked = np.where((picked < 0) | (picked >= len(results)), len(results) - 1, picked)
        for number, result in enumerate(results):
            where = picked == number
            yield Preimage(where, result, points.at(where))

    def _known(self, value: HloValue, scalar: HloValue) -> Numbers:
        numbers = self.scalars.at(scalar)
        if not isinstance(numbers, np.ndarray):
            raise Untraceable(f"{value.name}: {scalar.name} is not in the text")
        return numbers
