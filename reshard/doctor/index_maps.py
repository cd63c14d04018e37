"""Instructions that only move data: where each element of their result was before.

For points of a result, given as devices and indices, a move says which operand has the same elements, on which
device and at which index. Points that no operand has (padding, or a device that a permute sends nothing to) are in
no part.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from reshard.doctor.flow import Flow, Value
from reshard.doctor.scalars import Numbers, Scalars
from reshard.errors import NotationError
from reshard.hlo import Array, parse_groups
from reshard.hlo.forms import permute_pairs

COLLECTIVES = ("all-gather", "all-to-all", "collective-permute", "collective-broadcast")
_ALL_OPERANDS = (
    *COLLECTIVES, "concatenate", "copy", "convert", "transpose", "reshape", "bitcast", "slice", "reverse",
)  # fmt: skip
_SLICE = re.compile(r"\[(\d+):(\d+)(?::(\d+))?\]")
_NUMBER = re.compile(r"-?\d+")

Mask = NDArray[np.bool_]


class Points(NamedTuple):
    """Elements of an array that every device has: the device of each, and its indices, a row for each dim."""

    device: Numbers
    indices: Numbers

    def at(self, mask: Mask) -> Points:
        """Those of the points that the mask is true for."""
        return Points(self.device[mask], self.indices[:, mask])


class Part(NamedTuple):
    """Those of the points that `where` is true for, as elements of another value; all of them if it is None."""

    where: Mask | None
    value: Value
    points: Points


class Untraceable(Exception):
    """A move that does not say where the elements were: an offset that the text leaves out, a form not known."""


@dataclass(frozen=True, eq=False)
class Movement:
    """The moves of a module."""

    flow: Flow
    scalars: Scalars

    def sources(self, value: Value) -> list[Value] | None:
        """The values whose elements it has, in other places; None if it is computed, or made outside."""
        opcode = value.opcode
        operands = self.flow.operands(value)
        match opcode:
            case _ if opcode in _ALL_OPERANDS:
                return operands
            case "pad":
                return operands[:1]
            case "broadcast":
                return operands if _elements(operands[0]) == _elements(value) else None
            case "dynamic-slice":
                known = all(self.scalars.at(offset) is not None for offset in operands[1:])
                return operands[:1] if known else None
            case "select":
                return self._selected(operands)
            case _:
                return None

    def _selected(self, operands: list[Value]) -> list[Value] | None:
        """A choice by device; by place, of padding."""
        predicate, *chosen = operands
        filled = [self.is_constant(value) for value in chosen]
        if all(filled) or (self.scalars.at(predicate) is None and not self._by_place(predicate)):
            return None
        return [value for value, constant in zip(chosen, filled, strict=True) if not constant]

    def is_constant(self, value: Value) -> bool:
        """Whether it is one number everywhere, as padding is."""
        while value.opcode in ("broadcast", "convert", "reshape", "bitcast", "copy"):
            value = self.flow.operands(value)[0]
        return value.opcode == "constant"

    def _by_place(self, value: Value) -> bool:
        """Whether it depends on nothing but the device and the place in the tile."""
        seen: set[Value] = set()
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

    def parts(self, value: Value, points: Points) -> list[Part]:
        """Where the points of a value were; raises `Untraceable` if that is not known."""
        found = _PARTS.get(value.opcode)
        if found is None:
            raise Untraceable(value.opcode)
        try:
            return list(found(self, value, points))
        except (KeyError, ValueError, IndexError, NotationError) as error:
            raise Untraceable(f"{value.name}: {error}") from None


_ARITHMETIC = (
    "add", "subtract", "multiply", "divide", "remainder", "minimum", "maximum", "and", "or", "not", "compare",
    "convert", "broadcast", "reshape", "bitcast", "copy", "clamp", "select", "slice", "dynamic-slice", "transpose",
)  # fmt: skip


def _elements(value: Value) -> int:
    return -1 if value.array is None else value.array.elements


def _array(value: Value) -> Array:
    array = value.array
    if array is None:
        raise Untraceable(f"{value.name} is no array")
    return array


def _ints(text: str) -> list[int]:
    return [int(number) for number in _NUMBER.findall(text)]


def _attribute(value: Value, name: str) -> list[int]:
    return _ints(value.instruction.attributes.get(name, ""))


def _same(moves: Movement, value: Value, points: Points) -> Iterator[Part]:
    yield Part(None, moves.flow.operands(value)[0], points)


def _reshape(moves: Movement, value: Value, points: Points) -> Iterator[Part]:
    operand = moves.flow.operands(value)[0]
    before, after = _array(operand), _array(value)
    yield Part(None, operand, points._replace(indices=unravel(ravel(points.indices, after.dims), before.dims)))


def _bitcast(moves: Movement, value: Value, points: Points) -> Iterator[Part]:
    """The same bytes: the order of the elements in memory, tiles aside, is that of the operand."""
    operand = moves.flow.operands(value)[0]
    before, after = _array(operand), _array(value)
    if before.elements != after.elements:
        raise Untraceable(f"{value.name} changes the size of the elements")
    out, inside = _major_to_minor(after), _major_to_minor(before)
    place = ravel(points.indices[out], [after.dims[at] for at in out])
    index = np.empty((len(before.dims), place.size), np.int64)
    index[inside] = unravel(place, [before.dims[at] for at in inside])
    yield Part(None, operand, points._replace(indices=index))


def _transpose(moves: Movement, value: Value, points: Points) -> Iterator[Part]:
    index = np.empty_like(points.indices)
    index[_attribute(value, "dimensions")] = points.indices
    yield Part(None, moves.flow.operands(value)[0], points._replace(indices=index))


def _broadcast(moves: Movement, value: Value, points: Points) -> Iterator[Part]:
    operand = moves.flow.operands(value)[0]
    yield Part(None, operand, points._replace(indices=points.indices[_attribute(value, "dimensions")]))


def _slice(moves: Movement, value: Value, points: Points) -> Iterator[Part]:
    found = _SLICE.findall(value.instruction.attributes["slice"])
    start = np.array([int(first) for first, _, _ in found], np.int64).reshape(-1, 1)
    step = np.array([int(stride or 1) for _, _, stride in found], np.int64).reshape(-1, 1)
    yield Part(None, moves.flow.operands(value)[0], points._replace(indices=start + step * points.indices))


def _reverse(moves: Movement, value: Value, points: Points) -> Iterator[Part]:
    index = points.indices.copy()
    for dim in _attribute(value, "dimensions"):
        index[dim] = _array(value).dims[dim] - 1 - index[dim]
    yield Part(None, moves.flow.operands(value)[0], points._replace(indices=index))


def _dynamic_slice(moves: Movement, value: Value, points: Points) -> Iterator[Part]:
    operand, *offsets = moves.flow.operands(value)
    before, after = _array(operand), _array(value)
    index = points.indices.copy()
    for dim, offset in enumerate(offsets):
        known = moves.scalars.at(offset)
        if not isinstance(known, np.ndarray):
            raise Untraceable(f"{value.name}: the offsets are not in the text")
        starts = np.clip(known.reshape(-1), 0, before.dims[dim] - after.dims[dim])
        index[dim] += starts[points.device]
    yield Part(None, operand, points._replace(indices=index))


def _pad(moves: Movement, value: Value, points: Points) -> Iterator[Part]:
    operand = moves.flow.operands(value)[0]
    edges = [_ints(dim.replace("_", " ")) for dim in value.instruction.attributes["padding"].split("x")]
    low = np.array([edge[0] for edge in edges], np.int64).reshape(-1, 1)
    step = np.array([1 + (edge[2] if len(edge) > 2 else 0) for edge in edges], np.int64).reshape(-1, 1)
    sizes = np.array(_array(operand).dims, np.int64).reshape(-1, 1)
    index, rest = np.divmod(points.indices - low, step)
    inside = ((rest == 0) & (index >= 0) & (index < sizes)).all(axis=0)
    yield Part(inside, operand, Points(points.device, index).at(inside))


def _concatenate(moves: Movement, value: Value, points: Points) -> Iterator[Part]:
    (dim,) = _attribute(value, "dimensions")
    start = 0
    for operand in moves.flow.operands(value):
        stop = start + _array(operand).dims[dim]
        inside = (points.indices[dim] >= start) & (points.indices[dim] < stop)
        index = points.indices.copy()
        index[dim] -= start
        yield Part(inside, operand, Points(points.device, index).at(inside))
        start = stop


def _select(moves: Movement, value: Value, points: Points) -> Iterator[Part]:
    predicate, *chosen = moves.flow.operands(value)
    known = moves.scalars.at(predicate)
    if not isinstance(known, np.ndarray):  # it depends on the place: what is not padding is counted as data
        (source,) = moves.sources(value) or []
        yield Part(None, source, points)
        return
    picked = known.reshape(moves.scalars.devices, -1)
    at = ravel(points.indices, _array(value).dims) if picked.shape[1] > 1 else np.zeros_like(points.device)
    first = picked[points.device, at] != 0
    for where, operand in zip((first, ~first), chosen, strict=True):
        if not moves.is_constant(operand):
            yield Part(where, operand, points.at(where))


def _all_gather(moves: Movement, value: Value, points: Points) -> Iterator[Part]:
    operand = moves.flow.operands(value)[value.path[0] if value.path else 0]
    (dim,) = _attribute(value, "dimensions")
    index = points.indices.copy()
    member, index[dim] = np.divmod(points.indices[dim], _array(operand).dims[dim])
    yield Part(None, operand, Points(_members(moves, value)[points.device, member], index))


def _all_to_all(moves: Movement, value: Value, points: Points) -> Iterator[Part]:
    operands, members, ranks = moves.flow.operands(value), _members(moves, value), _ranks(moves, value)
    mine = ranks[points.device]
    if value.path:  # one operand for each member of the group
        device = members[points.device, value.path[0]]
        for rank in np.unique(mine):
            where = mine == rank
            yield Part(where, operands[rank], Points(device, points.indices).at(where))
        return
    (dim,) = _attribute(value, "dimensions")
    block = _array(value).dims[dim] // members.shape[1]
    index = points.indices.copy()
    member, rest = np.divmod(points.indices[dim], block)
    index[dim] = mine * block + rest
    yield Part(None, operands[0], Points(members[points.device, member], index))


def _permute(moves: Movement, value: Value, points: Points) -> Iterator[Part]:
    operand = moves.flow.operands(value)[value.path[0] if value.path else 0]
    sources = np.full(moves.scalars.devices, -1, np.int64)
    for source, target in permute_pairs(value.instruction):
        sources[target] = source
    inside = sources[points.device] >= 0
    yield Part(inside, operand, Points(sources[points.device], points.indices).at(inside))


def _members(moves: Movement, value: Value) -> Numbers:
    """For each device, those of its group, in the order of the group."""
    lists = _groups(moves, value)
    found = np.zeros((moves.scalars.devices, len(lists[0])), np.int64)
    for group in lists:
        found[list(group)] = group
    return found


def _ranks(moves: Movement, value: Value) -> Numbers:
    found = np.zeros(moves.scalars.devices, np.int64)
    for group in _groups(moves, value):
        found[list(group)] = np.arange(len(group))
    return found


def _groups(moves: Movement, value: Value) -> tuple[tuple[int, ...], ...]:
    attributes = value.instruction.attributes
    order = attributes.get("device_ids", "")
    text = attributes["replica_groups"] + (f", device_ids={order}" if order else "")
    lists = _listed(text, moves.scalars.devices)
    sizes = {len(group) for group in lists}
    if len(sizes) != 1 or sorted(device for group in lists for device in group) != list(range(moves.scalars.devices)):
        raise Untraceable(f"{value.name}: groups that are not all devices, in equal parts")
    return lists


@lru_cache(maxsize=256)
def _listed(text: str, devices: int) -> tuple[tuple[int, ...], ...]:
    return parse_groups(text, devices).lists


def _major_to_minor(array: Array) -> list[int]:
    order = _ints(array.layout.partition(":")[0])
    return order[::-1] if len(order) == len(array.dims) else list(range(len(array.dims)))


def ravel(index: Numbers, dims: Sequence[int]) -> Numbers:
    """The place of each index in row-major order."""
    place = np.zeros(index.shape[1], np.int64)
    for row, size in zip(index, dims, strict=True):
        place = place * size + row
    return place


def unravel(place: Numbers, dims: Sequence[int]) -> Numbers:
    """The index of each place in row-major order."""
    index = np.zeros((len(dims), place.size), np.int64)
    for dim in reversed(range(len(dims))):
        place, index[dim] = np.divmod(place, max(dims[dim], 1))
    return index


_Find = Callable[[Movement, Value, Points], Iterator[Part]]
_PARTS: Mapping[str, _Find] = MappingProxyType(
    {
        "copy": _same,
        "convert": _same,
        "reshape": _reshape,
        "bitcast": _bitcast,
        "transpose": _transpose,
        "broadcast": _broadcast,
        "slice": _slice,
        "reverse": _reverse,
        "dynamic-slice": _dynamic_slice,
        "pad": _pad,
        "concatenate": _concatenate,
        "select": _select,
        "all-gather": _all_gather,
        "all-to-all": _all_to_all,
        "collective-permute": _permute,
    }
)
