"""Where the elements of a chain's results were before it.

An element is a device and a place in its tile; points are followed back through the moves, many at once.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from reshard.doctor.flow import Value
from reshard.doctor.index_maps import Movement, Points, Untraceable, ravel, unravel
from reshard.doctor.numbering import Numbering
from reshard.doctor.scalars import Numbers
from reshard.hlo import Array

_MOST = 1 << 21  # Points, over all devices, that are worth following to count them.
NOWHERE = -1


class Before(NamedTuple):
    """What points were: the number of a leaf (`NOWHERE`: padding), the device, and the place in its tile."""

    leaf: Numbers
    device: Numbers
    place: Numbers


class Tracer:
    """Follows points of a chain's values back to its leaves; `tiles` are those met so far, by number."""

    def __init__(self, movement: Movement, numbering: Numbering, leaves: frozenset[Value]) -> None:
        self.movement = movement
        self.numbering = numbering
        self.leaves = leaves
        self.tiles: dict[int, Array] = {}

    @property
    def devices(self) -> int:
        """How many devices there are."""
        return self.movement.scalars.devices

    def __call__(self, value: Value, points: Points) -> Before:
        """Where the points were; raises `Untraceable` where that is not known."""
        if value in self.leaves or self.movement.sources(value) is None:
            return self._leaf(value, points)
        found = Before(*(np.full(points.device.size, NOWHERE, np.int64) for _ in range(3)))
        for where, source, inner in self.movement.parts(value, points):
            if inner.device.size:
                for into, part in zip(found, self(source, inner), strict=True):
                    into[slice(None) if where is None else where] = part
        return found

    def arriving(self, values: Iterable[Value]) -> int | None:
        """How many elements of the values, at most, a device gets from others; None if they are too many to follow.

        An element that a device has twice counts once. Raises `Untraceable`.
        """
        found: list[Numbers] = []
        for value in values:
            points = self._all(value)
            if points is None:
                return None
            before = self(value, points)
            other = (before.leaf != NOWHERE) & (before.device != points.device)
            found.append(np.stack([points.device, before.leaf, before.device, before.place])[:, other])
        different = np.unique(np.concatenate(found, axis=1), axis=1)
        return int(np.bincount(different[0], minlength=1).max())

    def _leaf(self, value: Value, points: Points) -> Before:
        if value.array is None:
            raise Untraceable(f"{value.name} is no array")
        number = self.numbering.of(value)
        self.tiles[number] = value.array
        leaf = np.full(points.device.size, number, np.int64)
        return Before(leaf, points.device, ravel(points.indices, value.array.dims))

    def _all(self, value: Value) -> Points | None:
        dims = () if value.array is None else value.array.dims
        count = math.prod(dims)
        if count * self.devices > _MOST:
            return None
        places = np.tile(np.arange(count), self.devices)
        return Points(np.repeat(np.arange(self.devices), count), unravel(places, dims))
