"""Follows the elements of a chain's results back to where they were before the chain.

An element is a device and a place in that device's tile. Many points are followed at once, through the index map of
one instruction after another.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from reshard.doctor.dataflow.flow import HloValue, Numbering
from reshard.doctor.dataflow.index_maps import IndexMaps, Points, Untraceable, ravel_indices, unravel_places
from reshard.doctor.dataflow.scalars import Numbers
from reshard.hlo import Array

_MOST = 1 << 21  # points, over all devices, that are worth following just to count them
NOWHERE = -1


class Origins(NamedTuple):
    """Where points came from: the number of a leaf (`NOWHERE` for padding), the device, and the place in its tile."""

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
        self.tiles: dict[int, Array] = {}
        self.ends: dict[int, HloValue] = {}

    @property
    def devices(self) -> int:
        """The number of devices."""
        return self.maps.scalars.devices

    def __call__(self, value: HloValue, points: Points) -> Origins:
        """Where points of a value came from; raises `Untraceable` if that is not known.

        A value that several others take parts of, as in a halo, is looked at once, with the points of all of them: the
        last in the order of the text comes first.
        """
        origins = Origins(*(np.full(points.device.size, NOWHERE, np.int64) for _ in range(3)))
        pending = {value: [(np.arange(points.device.size), points)]}
        while pending:  # ends: each step goes back to operands
            value = max(pending, key=self.maps.flow.position)
            rows, points = _join_points(pending.pop(value))
            if value in self.leaves or self.maps.sources(value) is None:
                for into, part in zip(origins, self._at_leaf(value, points), strict=True):
                    into[rows] = part
                continue
            for where, source, inner in self.maps.preimages(value, points):
                if inner.device.size:
                    pending.setdefault(source, []).append((rows if where is None else rows[where], inner))
        return origins

    def arriving(self, values: Iterable[HloValue]) -> int | None:
        """The most elements of the values that one device gets from others; None if there are too many to follow.

        An element that a device gets twice counts once. Raises `Untraceable`.
        """
        arrivals: list[Arrivals] = []
        for value in values:
            if _elements_in(value) * self.devices > _MOST:
                return None
            points = at_places(value, self.devices)
            origins = self(value, points)
            other = (origins.leaf != NOWHERE) & (origins.device != points.device)
            arrivals.append(Arrivals(points.device[other], *(part[other] for part in origins)))
        return _most_different(Arrivals(*(np.concatenate(parts) for parts in zip(*arrivals, strict=True))))

    def _at_leaf(self, value: HloValue, points: Points) -> Origins:
        if value.array is None:
            raise Untraceable(f"{value.name} is not an array")
        number = self.numbering.of(value)
        self.tiles[number] = value.array
        self.ends[number] = value
        leaf = np.full(points.device.size, number, np.int64)
        return Origins(leaf, points.device, ravel_indices(points.indices, value.array.dims))


class Arrivals(NamedTuple):
    """Elements that devices get from others: the device that gets each, and where it was."""

    device: Numbers
    leaf: Numbers
    source: Numbers
    place: Numbers


def _join_points(parts: Sequence[tuple[Numbers, Points]]) -> tuple[Numbers, Points]:
    """The points of a value that several others ask for, and their rows in the answer."""
    if len(parts) == 1:
        return parts[0]
    rows = np.concatenate([rows for rows, _ in parts])
    device = np.concatenate([points.device for _, points in parts])
    return rows, Points(device, np.concatenate([points.indices for _, points in parts], axis=1))


def at_places(value: HloValue, devices: int, places: Numbers | None = None) -> Points:
    """The elements of a value on every device, device by device: all of them, or those at some places of its tile."""
    dims = () if value.array is None else value.array.dims
    each = np.arange(_elements_in(value)) if places is None else places
    return Points(np.repeat(np.arange(devices), each.size), unravel_places(np.tile(each, devices), dims))


def _elements_in(value: HloValue) -> int:
    return 1 if value.array is None else value.array.elements


def _most_different(arrivals: Arrivals) -> int:
    """The most different elements that one device gets.

    An element is one number: sorting those is many times faster than comparing rows.
    """
    if not arrivals.device.size:
        return 0
    keys = arrivals.device
    for part in arrivals[1:]:
        keys = keys * (1 + int(part.max())) + part
    different = np.unique(keys, return_index=True)[1]
    return int(np.bincount(arrivals.device[different]).max())
