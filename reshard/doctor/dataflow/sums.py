"""Sums over devices: along which digits of the device they go, and which elements each element of a result adds up.

    %s = f32[8,8] all-reduce(%p)            row i on each device:  row i of device 0 + ... + row i of device 3
    %d = f32[2,8] dynamic-slice(%s, 2 id)   row i on device d:     row 2d + i of device 0 + ... + that of device 3
    %t = f32[2,8] reduce-scatter(%p)        the same

Sums of integers are the same in any order. Sums of floats are taken as the same if they are one reduction over the same
devices in the same order: XLA adds them up alike on CPU, and makes the same replacement by itself on TPU and GPU.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
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
    unravel_places,
)
from reshard.doctor.dataflow.scalars import Numbers
from reshard.doctor.dataflow.trace import NOWHERE, Tracer

_REDUCTIONS = ("all-reduce", "reduce-scatter")
_EXACT = re.compile(r"[su]\d+")


class Summands(NamedTuple):
    """The elements that each point adds up, in order: their devices and their places in the leaf, a row per point.

    `rounds` is the number of reductions, one after another, and `after` is what becomes of the sum afterwards.
    """

    device: Numbers
    place: Numbers
    rounds: int
    after: frozenset[Conversion]


def is_sum(flow: Flow, value: HloValue) -> bool:
    """Whether a value is one array that a reduction between devices adds up."""
    if value.opcode not in _REDUCTIONS or value.path or value.array is None or len(value.instruction.operands) != 1:
        return False
    called = flow.module.computations.get(value.instruction.attributes.get("to_apply", "").lstrip("%"))
    if called is None:
        return False
    root = called.root
    scalars = [one.name for one in called.instructions if one.opcode == "parameter"]
    return (
        root is not None
        and root.opcode == "add"
        and sorted(root.operands) == sorted(scalars)
        and len(scalars) == 2
        and all(one.arrays[0].dtype == value.array.dtype for one in called.instructions)
    )


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


def list_summands(maps: IndexMaps, numbering: Numbering, value: HloValue, leaf: HloValue, points: Points) -> Summands:
    """What the points of a value add up of a leaf; raises `Untraceable` if that is not known, or not the same sum."""
    tracer = Tracer(maps, numbering, frozenset({leaf}))
    origins = tracer(value, points)
    parts: list[tuple[Numbers, Summands]] = []
    for number in np.unique(origins.leaf).tolist():
        if number == NOWHERE:
            raise Untraceable(f"{value.name}: some of its elements are padding")
        at = np.flatnonzero(origins.leaf == number)
        end = tracer.ends[number]
        device, place = origins.device[at], origins.place[at]
        if number == numbering.of(leaf):
            after = find_conversion(maps, value, end)
            parts.append((at, Summands(device[:, np.newaxis], place[:, np.newaxis], 0, frozenset({after}))))
            continue
        reached = Points(device, unravel_places(place, array_of(end).dims))
        parts.append((at, _sum_through(maps, numbering, end, leaf, reached, find_conversion(maps, value, end))))
    return _join_summands(value, points.device.size, parts)


def _sum_through(
    maps: IndexMaps, numbering: Numbering, end: HloValue, leaf: HloValue, points: Points, after: Conversion
) -> Summands:
    """What points of a reduction's result add up."""
    if not is_sum(maps.flow, end):
        raise Untraceable(f"some of its elements come from {end.name}")
    inner = _operands_of(maps, end, points)
    (operand,) = maps.flow.operands(end)
    before = list_summands(maps, numbering, operand, leaf, inner)
    if {dtype for one in before.after for dtype in one} != {array_of(end).dtype}:
        raise Untraceable(f"{end.name}: its summands are converted")
    rows = points.device.size
    return Summands(
        before.device.reshape(rows, -1), before.place.reshape(rows, -1), before.rounds + 1, frozenset({after})
    )


def _operands_of(maps: IndexMaps, end: HloValue, points: Points) -> Points:
    """The points of the operand that points of a reduction add up, those of each point one after another."""
    lists = device_groups(maps, end)
    members = np.zeros((maps.scalars.devices, len(lists[0])), np.int64)
    ranks = np.zeros(maps.scalars.devices, np.int64)
    for group in lists:
        members[list(group)] = group
        ranks[list(group)] = np.arange(len(group))
    indices = points.indices.copy()
    if end.opcode == "reduce-scatter":
        (dim,) = attribute_ints(end, "dimensions")
        indices[dim] += ranks[points.device] * array_of(end).dims[dim]
    return Points(members[points.device].reshape(-1), np.repeat(indices, members.shape[1], axis=1))


def _join_summands(value: HloValue, count: int, parts: Sequence[tuple[Numbers, Summands]]) -> Summands:
    """The summands of all points; each must have as many, in as many rounds."""
    shapes = {(part.device.shape[1], part.rounds) for _, part in parts}
    if len(shapes) != 1:
        raise Untraceable(f"{value.name}: its elements are different sums")
    ((many, rounds),) = shapes
    device, place = np.zeros((count, many), np.int64), np.zeros((count, many), np.int64)
    for at, part in parts:
        device[at], place[at] = part.device, part.place
    return Summands(device, place, rounds, frozenset[Conversion]().union(*(part.after for _, part in parts)))


def is_exact(dtype: str) -> bool:
    """Whether sums of these numbers are the same in any order: those of integers are.

    >>> is_exact("s32"), is_exact("f32")
    (True, False)
    """
    return _EXACT.fullmatch(dtype) is not None


def same_sums(one: Summands, other: Summands, classes: Numbers, dtype: str) -> bool:
    """Whether points add up the same elements, to the same bits. `classes` are those of devices with equal tiles."""
    if one.device.shape != other.device.shape or one.after != other.after:
        return False
    keys = [(1 + int(each.place.max())) for each in (one, other)]
    first, second = (classes[each.device] * max(keys) + each.place for each in (one, other))
    if is_exact(dtype):
        first, second = np.sort(first, axis=1), np.sort(second, axis=1)
    elif one.rounds != other.rounds or one.rounds > 1:
        return False
    return bool((first == second).all())
