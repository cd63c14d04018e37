"""Index maps: the instructions that only move data, and where each element of their result was before.

For points of a result, given as devices and indices, a map names the operand that has the same elements, and on which
device and at which index:

    %t = f32[4,6] transpose(%p), dimensions={1,0}        (device d, index [i, j])  ->  %p, (d, [j, i])
    %g = f32[8,8] all-gather(%p), dimensions={0}         (d, [i, j])               ->  %p, (i // 2, [i % 2, j])
    %m = f32[2,8] collective-permute(%p), {{0,1}}        (1, [i, j])               ->  %p, (0, [i, j])

Points that no operand has (padding, or a device to which a permute sends nothing) have a number instead.

Compiled plans, which the pass splices in, also move data by instructions that make new data in a user's program:

    dynamic-update-slice    a received box is written to its place
    conditional             devices that receive nothing skip the writing
    reduce                  over dims of size 1: TPU's spelling of a reshape
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from reshard.doctor.dataflow.flow import Flow, HloValue
from reshard.doctor.dataflow.scalars import Numbers, Scalars, evaluate_elementwise
from reshard.errors import NotationError
from reshard.hlo import Array, parse_groups
from reshard.hlo.executed_collectives import read_permute_pairs

COLLECTIVES = ("all-gather", "all-to-all", "collective-permute", "collective-broadcast")
_REORDERED = ("copy", "convert", "transpose", "reshape", "bitcast", "slice", "reverse")
_ALL_OPERANDS = (*COLLECTIVES, *_REORDERED, "concatenate")
_MOVES = frozenset((*_ALL_OPERANDS, "pad", "broadcast", "dynamic-slice", "select"))
FRAGMENT_MOVES = _MOVES | {"dynamic-update-slice", "reduce", "conditional", "parameter"}
_ARITHMETIC = (
    "add", "subtract", "multiply", "divide", "remainder", "minimum", "maximum", "and", "or", "not", "compare",
    "convert", "broadcast", "reshape", "bitcast", "copy", "clamp", "select", "slice", "dynamic-slice", "transpose",
)  # fmt: skip
_SLICE = re.compile(r"\[(\d+):(\d+)(?::(\d+))?\]")
_NUMBER = re.compile(r"-?\d+")

_FILLS = (0.0, math.inf, -math.inf)
_WITH_INFINITY = ("f16", "bf16", "f32", "f64")
UNKNOWN_FILL = -1
"""Stands for padding with another number than 0, -0 and the infinities, which conversions may change."""

Mask = NDArray[np.bool_]


class Points(NamedTuple):
    """Elements of an array that every device has: the device of each, and its indices, one row per dim."""

    device: Numbers
    indices: Numbers

    def at(self, mask: Mask) -> Points:
        """The points for which the mask is true."""
        return Points(self.device[mask], self.indices[:, mask])


class Preimage(NamedTuple):
    """Points of an operand, and `where` in the given points they belong: a mask, None for all of them.

    Instead of an operand, padding has the bits of its number; see `IndexMaps.fill_of`.
    """

    where: Mask | None
    value: HloValue | int
    points: Points


class Untraceable(Exception):
    """The text does not say where elements were: it leaves an offset out, or has an unknown form of a move."""


@dataclass(frozen=True, eq=False)
class IndexMaps:
    """The index maps of a module's instructions; those of compiled plans too if fragments were `spliced` into it."""

    flow: Flow
    scalars: Scalars
    spliced: bool = False

    @property
    def moves(self) -> frozenset[str]:
        """The opcodes of instructions that may have an index map."""
        return FRAGMENT_MOVES if self.spliced else _MOVES

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
                same = _count_elements_or_none(operands[0]) == _count_elements_or_none(value)
                return operands if same or self.spliced else None  # a fragment repeats a number to fill a row
            case "dynamic-slice":
                known = all(self.scalars.at(offset) is not None for offset in operands[1:])
                return operands[:1] if known else None
            case "select":  # it moves data if its predicate depends on the device and the index alone
                predicate, *choices = operands
                moved = [choice for choice in choices if not self.is_constant(choice)]
                known = bool(moved) and (self.scalars.at(predicate) is not None or self._is_positional(predicate))
                return moved if known else None
            case _:
                return self._sources_in_fragment(value, operands) if self.spliced else None

    def _sources_in_fragment(self, value: HloValue, operands: list[HloValue]) -> list[HloValue] | None:
        match value.opcode:
            case "dynamic-update-slice":
                known = all(self.scalars.at(offset) is not None for offset in operands[2:])
                return operands[:2] if known else None
            case "reduce":
                return operands[:1] if array_of(operands[0]).elements == array_of(value).elements else None
            case "conditional":
                if not isinstance(self.scalars.at(operands[0]), np.ndarray):
                    return None
                roots = [self.flow.root_of(value.site, name) for name in value.instruction.called]
                # Branches are told apart by their number, so that none may be missing.
                known = [self.flow.origin(root._replace(path=value.path)) for root in roots if root is not None]
                return known if len(known) == len(roots) else None
            case "parameter":
                argument = self.flow.branch_operand(value)
                return None if argument is None else [self.flow.origin(argument)]
            case _:
                return None

    def is_constant(self, value: HloValue) -> bool:
        """Whether a value is the same number everywhere, as padding is."""
        number = self._find_number(value)
        return number.opcode == "constant" and number.array is not None and number.array.elements == 1

    def _find_number(self, value: HloValue) -> HloValue:
        """The value whose number a value has everywhere, if it is such a one."""
        while value.opcode in ("broadcast", "convert", "reshape", "bitcast", "copy"):
            value = self.flow.operands(value)[0]
        return value

    def fill_of(self, value: HloValue) -> int:
        """The bits of a constant's number as a double, by which paddings of two modules are compared.

        `UNKNOWN_FILL` if it is no constant, or a number that is not the same in every dtype.
        """
        number = self._find_number(value)
        if not self.is_constant(value) or number.array is None:
            return UNKNOWN_FILL
        text = number.instruction.literal.strip("{ }").replace("false", "0")
        try:
            read = float(text)
        except ValueError:
            return UNKNOWN_FILL
        if read not in _FILLS or (read and not {number.array.dtype, array_of(value).dtype} <= set(_WITH_INFINITY)):
            return UNKNOWN_FILL
        return int(np.float64(read).view(np.int64))

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
        opcode = value.opcode
        if opcode not in self.moves:
            raise Untraceable(opcode)
        try:
            if opcode in COLLECTIVES:
                return list(_preimages_of_collective(self, value, points))
            if opcode in (*_REORDERED, "broadcast", "dynamic-slice", "reduce"):
                operand = self.flow.operands(value)[0]
                return [Preimage(None, operand, points._replace(indices=_index_before(self, value, operand, points)))]
            return list(_preimages_of_choice(self, value, points))
        except (KeyError, ValueError, IndexError, NotationError) as error:
            raise Untraceable(f"{value.name}: {error}") from None

    def numbers(self, value: HloValue, scalar: HloValue) -> Numbers:
        """The numbers of an offset or a predicate of a value, on every device; raises `Untraceable` without them."""
        numbers = self.scalars.at(scalar)
        if not isinstance(numbers, np.ndarray):
            raise Untraceable(f"{value.name}: {scalar.name} is not in the text")
        return numbers

    def numbers_at(self, value: HloValue, points: Points) -> Numbers:
        """The numbers of points of a value that depends on nothing but the device and the index.

        Masks are as large as tiles, and need not be evaluated whole. Raises `Untraceable` for other values.
        """
        known = self.scalars.at(value)
        if isinstance(known, np.ndarray):
            at = ravel_indices(points.indices, array_of(value).dims)
            return known.reshape(self.scalars.devices, -1)[points.device, at]
        operands, attributes = self.flow.operands(value), value.instruction.attributes
        match value.opcode:
            case "iota":
                return points.indices[int(attributes.get("iota_dimension", "0"))]
            case opcode if opcode in (*_REORDERED, "broadcast", "dynamic-slice"):
                index = _index_before(self, value, operands[0], points)
                return self.numbers_at(operands[0], points._replace(indices=index))
            case opcode if operands:
                numbers = [self.numbers_at(one, points) for one in operands]
                result = evaluate_elementwise(value.instruction, numbers)
                unsigned = array_of(value).dtype
                if result is not None and unsigned.startswith("u"):  # Unsigned numbers wrap around.
                    return result % (1 << int(unsigned[1:]))
                if result is not None:
                    return result
            case _:
                pass
        raise Untraceable(f"{value.name} is not in the text")


def _index_before(maps: IndexMaps, value: HloValue, operand: HloValue, points: Points) -> Numbers:
    """The index in an operand of points of its result, on the same device."""
    before, after = array_of(operand), array_of(value)
    index = points.indices
    match value.opcode:
        case "reshape":
            return unravel_places(ravel_indices(index, after.dims), before.dims)
        case "bitcast":  # the same bytes under another shape: elements keep their order in memory (tiling aside)
            if before.elements != after.elements:
                raise Untraceable(f"{value.name} changes the size of the elements")
            out, inside = _dims_in_memory(after), _dims_in_memory(before)
            place = ravel_indices(index[out], [after.dims[at] for at in out])
            index = np.empty((len(before.dims), place.size), np.int64)
            index[inside] = unravel_places(place, [before.dims[at] for at in inside])
        case "transpose":
            index = np.empty_like(index)
            index[attribute_ints(value, "dimensions")] = points.indices
        case "broadcast":
            return index[attribute_ints(value, "dimensions")]
        case "reduce":
            reduced = attribute_ints(value, "dimensions")
            index = np.zeros((len(before.dims), points.device.size), np.int64)
            index[[dim for dim in range(len(before.dims)) if dim not in reduced]] = points.indices
        case "slice":
            ranges = _SLICE.findall(value.instruction.attributes["slice"])
            start, step = (_as_column([int(one[at] or 1) for one in ranges]) for at in (0, 2))
            return start + step * index
        case "reverse":
            index = index.copy()
            for dim in attribute_ints(value, "dimensions"):
                index[dim] = after.dims[dim] - 1 - index[dim]
        case "dynamic-slice":
            index = index.copy()
            for dim, offset in enumerate(maps.flow.operands(value)[1:]):
                # HLO moves a slice that would reach beyond the array back into it.
                starts = np.clip(maps.numbers(value, offset).reshape(-1), 0, before.dims[dim] - after.dims[dim])
                index[dim] += starts[points.device]
        case _:  # copy, convert
            pass
    return index


def _preimages_of_choice(maps: IndexMaps, value: HloValue, points: Points) -> Iterator[Preimage]:
    """Where points come from that have no preimage in some operands: each operand has a part, and padding none."""
    operands = maps.flow.operands(value)
    index = points.indices.copy()
    match value.opcode:
        case "pad":
            edges = [_integers_in(dim.replace("_", " ")) for dim in value.instruction.attributes["padding"].split("x")]
            low, step = _as_column([edge[0] for edge in edges]), _as_column([1 + sum(edge[2:]) for edge in edges])
            index, rest = np.divmod(index - low, step)
            inside = ((rest == 0) & (index >= 0) & (index < _as_column(array_of(operands[0]).dims))).all(axis=0)
            yield Preimage(inside, operands[0], Points(points.device, index).at(inside))
            yield Preimage(~inside, maps.fill_of(operands[1]), points.at(~inside))
        case "concatenate":
            (dim,) = attribute_ints(value, "dimensions")
            for operand in operands:
                size = array_of(operand).dims[dim]
                inside = (index[dim] >= 0) & (index[dim] < size)
                yield Preimage(inside, operand, Points(points.device, index).at(inside))
                index[dim] -= size
        case "select":
            is_one = array_of(operands[0]).elements == 1
            at = points._replace(indices=index[:0]) if is_one and not array_of(operands[0]).dims else points
            first = maps.numbers_at(operands[0], at) != 0
            for where, operand in zip((first, ~first), operands[1:], strict=True):
                fill = maps.fill_of(operand) if maps.is_constant(operand) else operand
                yield Preimage(where, fill, points.at(where))
        case "dynamic-update-slice":
            base, update, *offsets = operands
            before, part = array_of(base), array_of(update)
            for dim, offset in enumerate(offsets):
                starts = np.clip(maps.numbers(value, offset).reshape(-1), 0, before.dims[dim] - part.dims[dim])
                index[dim] -= starts[points.device]
            inside = np.logical_and.reduce((index >= 0) & (index < _as_column(part.dims)), axis=0)
            yield Preimage(inside, update, Points(points.device, index).at(inside))
            yield Preimage(~inside, maps.fill_of(base) if maps.is_constant(base) else base, points.at(~inside))
        case "conditional":
            results = maps.sources(value) or []
            picked = maps.numbers(value, operands[0]).reshape(-1)[points.device]
            if array_of(operands[0]).dtype == "pred":
                picked = 1 - picked  # the first branch is that of true
            picked = np.where((picked < 0) | (picked >= len(results)), len(results) - 1, picked)
            for number, result in enumerate(results):
                yield Preimage(picked == number, result, points.at(picked == number))
        case _:  # the parameter of a branch
            yield from (Preimage(None, argument, points) for argument in maps.sources(value) or [])


def _preimages_of_collective(maps: IndexMaps, value: HloValue, points: Points) -> Iterator[Preimage]:
    """Where points come from that a collective has moved, from one device to another."""
    operands, index = maps.flow.operands(value), points.indices.copy()
    operand = operands[value.path[0] if value.path else 0]
    if value.opcode in ("collective-permute", "collective-broadcast"):  # the whole tile of one device, or of none
        sources = senders_of(maps, value)[points.device]
        yield Preimage(sources >= 0, operand, Points(sources, index).at(sources >= 0))
        yield Preimage(sources < 0, 0, points.at(sources < 0))  # who receives nothing has zeros
        return
    members, ranks = group_tables(maps, value)
    if value.opcode == "all-gather":
        (dim,) = attribute_ints(value, "dimensions")
        member, index[dim] = _divide_fast(index[dim], array_of(operand).dims[dim])
        yield Preimage(None, operand, Points(members[points.device, member], index))
        return
    mine = ranks[points.device]
    if value.path:  # an all-to-all of one operand per member of the group
        device = members[points.device, value.path[0]]
        for rank in np.unique(mine):
            where = mine == rank
            yield Preimage(where, operands[rank], Points(device, index).at(where))
        return
    (dim,) = attribute_ints(value, "dimensions")
    block = array_of(value).dims[dim] // members.shape[1]
    member, rest = _divide_fast(index[dim], block)
    index[dim] = mine * block + rest
    yield Preimage(None, operand, Points(members[points.device, member], index))


def senders_of(maps: IndexMaps, value: HloValue) -> Numbers:
    """The device whose tile each device gets from a permute or a broadcast; -1 for none, which gets zeros."""
    sources = np.full(maps.scalars.devices, -1, np.int64)
    if value.opcode == "collective-permute":
        for source, target in read_permute_pairs(value.instruction):
            sources[target] = source
    else:  # the first device of a group sends to all of it
        for group in _group_lists(maps, value):
            sources[list(group)] = group[0]
    if sources.max(initial=-1) >= maps.scalars.devices:
        raise Untraceable(f"{value.name} takes from device {sources.max()}, which the module has not")
    return sources


def group_tables(maps: IndexMaps, value: HloValue) -> tuple[Numbers, Numbers]:
    """The members of each device's group, a row per device in the order of the group, and the device's place there."""
    groups = np.array(device_groups(maps, value), np.int64)
    members = np.empty((maps.scalars.devices, groups.shape[1]), np.int64)
    ranks = np.empty(maps.scalars.devices, np.int64)
    members[groups] = groups[:, np.newaxis]
    ranks[groups] = np.arange(groups.shape[1])
    return members, ranks


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
    return _parse_group_lists(text, maps.scalars.devices)


@lru_cache(maxsize=256)
def _parse_group_lists(text: str, devices: int) -> tuple[tuple[int, ...], ...]:
    return parse_groups(text, devices).lists


def _count_elements_or_none(value: HloValue) -> int:
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


def _as_column(numbers: Sequence[int]) -> Numbers:
    return np.array(numbers, np.int64).reshape(-1, 1)


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


class Conversion(NamedTuple):
    """What becomes of elements: their dtype before, the narrowest that they have on the way, and the one after."""

    before: str
    narrowest: str
    after: str


class Unconvertible(Exception):
    """Why conversions on the way cannot be done elsewhere."""


def find_conversion(maps: IndexMaps, value: HloValue, leaf: HloValue) -> Conversion:
    """What becomes of the elements that `value` has from `leaf`; raises `Unconvertible` if that is not one conversion.

    >>> from reshard.doctor.equivalence import Traced
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
    # The sets of dtypes that elements have between the leaf and a value, a set for each way that they take. The values
    # wait on a stack: a chain may be longer than Python's functions nest.
    ways = {leaf: frozenset({frozenset({before})})}
    made: dict[HloValue, tuple[str, list[HloValue]]] = {}
    stack = [value]
    while stack:  # ends: no value is made of itself
        one = stack[-1]
        if one not in ways and one not in made:
            made[one] = _dtype_of_value(one), maps.sources(one) or []
            stack += [each for each in made[one][1] if each not in ways]
            continue
        if one not in ways:
            own, sources = made[one]
            ways[one] = frozenset(way | {own} for each in sources for way in ways[each])
        stack.pop()
    if len(ways[value]) > 1:
        raise Unconvertible(f"it converts some of the elements of {value.name} on the way, and others not")
    dtypes = next(iter(ways[value]), frozenset({before, after}))
    narrowest = [one for one in sorted(dtypes) if all(one == other or (one, other) in _WIDER for other in dtypes)]
    if len(dtypes) > 2 or not narrowest:
        raise Unconvertible(f"it converts {before} to {after} by way of {', '.join(sorted(dtypes))}")
    return Conversion(before, narrowest[0], after)


def _dtype_of_value(value: HloValue) -> str:
    if value.array is None:
        raise Unconvertible(f"{value.name} is not an array")
    return value.array.dtype
