"""Follows the elements of a chain's results back to where they were before the chain.

An element is a device and a place in that device's tile. Many points are followed at once, through the index map of
one instruction after another. Through sums over devices, they are followed to all that they add up.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from reshard.doctor.dataflow.flow import Flow, HloValue, Numbering
from reshard.doctor.dataflow.index_maps import (
    Conversion,
    IndexMaps,
    Points,
    Untraceable,
    array_of,
    attribute_ints,
    device_groups,
    find_conversion,
    group_tables,
    ravel_indices,
    unravel_places,
)
from reshard.doctor.dataflow.scalars import Numbers
from reshard.hlo import Array

_MOST = 1 << 21  # points, over all devices, that are worth following just to count them
NOWHERE = -1


class Origins(NamedTuple):
    """Where points came from: the number of a leaf (`NOWHERE` for padding), the device, and the place in its tile.

    The place of padding is the bits of its number; see `IndexMaps.fill_of`.
    """

    leaf: Numbers
    device: Numbers
    place: Numbers


class Tracer:
    """Follows points of a chain's values back to its leaves.

    `ends` are the leaves met so far by their numbers, and `tiles` their arrays.
    """

    def __init__(self, maps: IndexMaps, numbering: Numbering, leaves: frozenset[HloValue]) -> None:
        self.maps = maps
        self.numbering = numbering
        self.leaves = leaves
        self.devices = maps.scalars.devices
        self.tiles: dict[int, Array] = {}
        self.ends: dict[int, HloValue] = {}

    def __call__(self, value: HloValue, points: Points) -> Origins:
        """Where points of a value came from; raises `Untraceable` if that is not known.

        A value that several others take parts of, as in a halo, is looked at once, with the points of all of them: the
        last in the order of the text comes first.
        """
        origins = Origins(*(np.full(points.device.size, NOWHERE, np.int64) for _ in range(3)))
        pending = {value: [(np.arange(points.device.size), points)]}
        while pending:  # ends: each step goes back to operands
            value = max(pending, key=self.maps.flow.position)
            (rows, points), *others = pending.pop(value)
            if others:
                rows = np.concatenate([rows, *(more for more, _ in others)])
                device = np.concatenate([points.device, *(more.device for _, more in others)])
                points = Points(device, np.concatenate([points.indices, *(more.indices for _, more in others)], axis=1))
            if value not in self.leaves and self.maps.is_constant(value):
                origins.place[rows] = self.maps.fill_of(value)
                continue
            if value in self.leaves or self.maps.sources(value) is None:
                if len(array_of(value).dims) != len(points.indices):
                    raise Untraceable(f"{value.name} has other dims than what takes it")
                number = self.numbering.of(value)
                self.tiles[number], self.ends[number] = array_of(value), value
                origins.leaf[rows], origins.device[rows] = number, points.device
                origins.place[rows] = ravel_indices(points.indices, array_of(value).dims)
                continue
            for where, source, inner in self.maps.preimages(value, points):
                if isinstance(source, int):
                    origins.place[rows if where is None else rows[where]] = source
                elif inner.device.size:
                    pending.setdefault(source, []).append((rows if where is None else rows[where], inner))
        return origins

    def arriving(self, values: Iterable[HloValue]) -> int | None:
        """The most elements of the values that one device gets from others; None if there are too many to follow.

        An element that a device gets twice counts once. Raises `Untraceable`.
        """
        arrivals: list[tuple[Numbers, ...]] = []  # the device that gets each element, and where it was
        for value in values:
            if count_value_elements(value, 1) * self.devices > _MOST:
                return None
            points = points_at(value, self.devices)
            origins = self(value, points)
            other = (origins.leaf != NOWHERE) & (origins.device != points.device)
            arrivals.append((points.device[other], *(part[other] for part in origins)))
        device, *parts = (np.concatenate(part) for part in zip(*arrivals, strict=True))
        if not device.size:
            return 0
        # An element is one number: sorting those is many times faster than comparing rows.
        keys = device
        for part in parts:
            keys = keys * (1 + int(part.max())) + part
        return int(np.bincount(device[np.unique(keys, return_index=True)[1]]).max())


def points_at(value: HloValue, devices: int, places: Numbers | None = None) -> Points:
    """The elements of a value on every device, device by device: all of them, or those at some places of its tile."""
    dims = () if value.array is None else value.array.dims
    each = np.arange(count_value_elements(value, 1)) if places is None else places
    return Points(np.repeat(np.arange(devices), each.size), unravel_places(np.tile(each, devices), dims))


def count_value_elements(value: HloValue, unknown: int = 0) -> int:
    """The elements of a value; `unknown` if it is no array."""
    return unknown if value.array is None else value.array.elements


# Sums over devices: along which digits of the device they go, and which elements each element of a result adds up.
#
#     %s = f32[8,8] all-reduce(%p)            row i on each device:  row i of device 0 + ... + row i of device 3
#     %d = f32[2,8] dynamic-slice(%s, 2 id)   row i on device d:     row 2d + i of device 0 + ... + that of device 3
#     %t = f32[2,8] reduce-scatter(%p)        the same
#
# Sums of integers are the same in any order. Sums of floats are taken as the same if they are the same reductions, one
# after another, over the same devices in the same order: XLA adds them up alike on CPU, and makes the same replacement
# itself on TPU and GPU.


_EXACT = re.compile(r"[su]\d+")


class Summands(NamedTuple):
    """The elements that each point adds up, in order: their devices and their places in the leaf, a row per point.

    `rounds` has how many each of the reductions, one after another, adds up at once, and `after` is what becomes of the
    sum afterwards.
    """

    device: Numbers
    place: Numbers
    rounds: tuple[int, ...]
    after: frozenset[Conversion]


def is_sum(flow: Flow, value: HloValue) -> bool:
    """Whether a value is one array that a reduction between devices adds up."""
    if value.opcode not in ("all-reduce", "reduce-scatter") or value.path or value.array is None:
        return False
    called = flow.module.computations.get(value.instruction.attributes.get("to_apply", "").lstrip("%"))
    if called is None or called.root is None or len(value.instruction.operands) != 1:
        return False
    scalars = [one.name for one in called.instructions if one.opcode == "parameter"]
    adds = called.root.opcode == "add" and sorted(called.root.operands) == sorted(scalars) and len(scalars) == 2
    return adds and all([array.dtype for array in one.arrays] == [value.array.dtype] for one in called.instructions)


def summed_digits(maps: IndexMaps, value: HloValue) -> list[tuple[int, int]]:
    """The digits of the device, as strides and radices, that the groups of a reduction go through.

    Raises `Untraceable` if they are not digits.
    """
    groups = [sorted(group) for group in device_groups(maps, value)]
    offsets = [device - groups[0][0] for device in groups[0]]
    digits = strided_digits(offsets)
    for first, *rest in groups:
        if [device - first for device in (first, *rest)] != offsets:
            raise Untraceable(f"{value.name}: its groups have several forms")
        if any(first // stride % radix for stride, radix in digits):
            raise Untraceable(f"{value.name}: its groups do not go along digits of the device")
    return digits


def strided_digits(offsets: Sequence[int]) -> list[tuple[int, int]]:
    """The digits, as strides and radices, whose combinations are exactly these numbers, in order.

    Raises `Untraceable` if there are none.

    >>> strided_digits([0, 1, 4, 5])
    [(1, 2), (4, 2)]
    """
    digits: list[tuple[int, int]] = []
    reached = [0]
    while len(reached) < len(offsets):  # ends: more is reached in each round
        stride, many = offsets[len(reached)], len(reached)
        times = range(2, len(offsets) // many)
        radix = next((time for time in times if offsets[many * time] != stride * time), len(offsets) // many)
        if stride <= 0 or radix < 2:
            break
        digits.append((stride, radix))
        reached = [at + stride * time for time in range(radix) for at in reached]
    if reached != list(offsets):
        raise Untraceable("a group of devices does not go along digits of the device")
    return digits


def trace_summands(maps: IndexMaps, numbering: Numbering, value: HloValue, leaf: HloValue, points: Points) -> Summands:
    """What the points of a value add up of a leaf; raises `Untraceable` if that is not known, or not the same sum."""
    tracer = Tracer(maps, numbering, frozenset({leaf}))
    origins = tracer(value, points)
    parts: list[tuple[Numbers, Summands]] = []
    for number in np.unique(origins.leaf).tolist():
        if number == NOWHERE:
            raise Untraceable(f"{value.name}: some of its elements are padding")
        end, at = tracer.ends[number], np.flatnonzero(origins.leaf == number)
        device, place, rounds = origins.device[at], origins.place[at], ()
        after = find_conversion(maps, value, end)
        if number != numbering.of(leaf):
            if not is_sum(maps.flow, end):
                raise Untraceable(f"some of its elements come from {end.name}")
            # Each point of a sum is one of the operand on each member of the group, one after another.
            members, ranks = group_tables(maps, end)
            indices = unravel_places(place, array_of(end).dims)
            if end.opcode == "reduce-scatter":
                (dim,) = attribute_ints(end, "dimensions")
                indices[dim] += ranks[device] * array_of(end).dims[dim]
            inner = Points(members[device].reshape(-1), np.repeat(indices, members.shape[1], axis=1))
            (operand,) = maps.flow.operands(end)
            before = trace_summands(maps, numbering, operand, leaf, inner)
            if {dtype for one in before.after for dtype in one} != {array_of(end).dtype}:
                raise Untraceable(f"{end.name}: its summands are converted")
            device, place, rounds = before.device, before.place, (*before.rounds, members.shape[1])
        shape = (at.size, -1)
        parts.append((at, Summands(device.reshape(shape), place.reshape(shape), rounds, frozenset({after}))))
    shapes = {(part.device.shape[1], part.rounds) for _, part in parts}
    if len(shapes) != 1:
        raise Untraceable(f"{value.name}: its elements are different sums")
    ((many, rounds),) = shapes
    device, place = np.zeros((2, points.device.size, many), np.int64)
    for at, part in parts:
        device[at], place[at] = part.device, part.place
    return Summands(device, place, rounds, frozenset[Conversion]().union(*(part.after for _, part in parts)))


def is_exact(dtype: str) -> bool:
    """Whether sums of these numbers are the same in any order: those of integers are.

    >>> is_exact("s32"), is_exact("f32")
    (True, False)
    """
    return _EXACT.fullmatch(dtype) is not None


def same_sums(one: Summands, other: Summands, classes: Numbers, dtype: str, any_order: bool = False) -> bool:
    """Whether points add up the same elements, to the same bits, or in any order if that will do.

    `classes` are those of devices with equal tiles.
    """
    if one.device.shape != other.device.shape or one.after != other.after:
        return False
    span = max(1 + int(each.place.max()) for each in (one, other))
    first, second = (classes[each.device] * span + each.place for each in (one, other))
    if any_order or is_exact(dtype):
        first, second = np.sort(first, axis=1), np.sort(second, axis=1)
    elif one.rounds != other.rounds:
        return False
    return bool((first == second).all())
