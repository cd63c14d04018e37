"""The two layouts that a traced move is between.

A coordinate of the result, its device or an index, is a numeral. Where each digit of it stands for one digit of where
the element was, of the device or of the place in the tile, the move is from a layout to a layout: a digit of the
place was local, one of the device was held. What is read from points along the coordinates is checked on others.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise, product
from typing import NamedTuple

import numpy as np

from reshard.doctor.flow import Value
from reshard.doctor.index_maps import Points, Untraceable, unravel
from reshard.doctor.scalars import Numbers
from reshard.doctor.trace import NOWHERE, Tracer
from reshard.errors import MeshError, ReshardError
from reshard.hlo import Array
from reshard.types import Layout, Mesh
from reshard.types.layout import Digit, Dim

_CHECKED = 1 << 12


class Step(NamedTuple):
    """A digit of a coordinate, and what one of it adds to the device and to the place where the element was."""

    weight: int
    radix: int
    device: int
    place: int


class Entry(NamedTuple):
    """A digit of the global array: the stride of its holders before and after, None where it is local.

    `place` is its stride in the source's tile, None where it was held.
    """

    radix: int
    before: int | None
    after: int | None
    place: int | None


def layouts(tracer: Tracer, result: Value, mesh: Mesh | None, dtype: str) -> tuple[Layout, Layout] | None:
    """The layouts before and after, on `mesh` or one made for them; None if the move is between no two layouts.

    Dims are those of the result, without those of size 1. Axes along which nothing moves are left out, and a digit
    that goes from device to device is a dim of its own.
    """
    try:
        read = _read(tracer, result)
        if read is None or result.array is None:
            return None
        dims = read.dims()
        if mesh is not None and mesh.size == tracer.devices:
            try:
                return _layouts(mesh, dims, dtype)
            except MeshError:
                pass
        return _layouts(_mesh(tracer.devices, dims), dims, dtype)
    except (Untraceable, ReshardError):
        return None


@dataclass(frozen=True)
class _Read:
    """The digits of a result's device and of its dims, minor first, and the tile that it was made of."""

    devices: int
    device: list[Step]
    index: list[list[Step]]
    tile: Array

    def dims(self) -> list[list[Entry]]:
        """The global array: for each dim its digits, major first. Raises `Untraceable` if it is none."""
        dims = [[_local(step) for step in reversed(steps)] for steps in self.index]
        left = [Entry(step.radix, None, step.weight, step.place) for step in self.device if step.place]
        while left:  # each round puts one of them
            entry = next((entry for entry in left if self._put(entry, dims)), left[0])
            left.remove(entry)
            if not any(entry in dim for dim in dims):
                dims.insert(0, [entry])
        entries = [entry for dim in dims for entry in dim]
        if not _apart([(entry.place, entry.radix) for entry in entries if entry.place], self.tile.elements):
            raise Untraceable("an element is there twice")
        return [dim for dim in [*([entry] for entry in self._passed(entries)), *dims] if dim]

    def _passed(self, entries: Sequence[Entry]) -> list[Entry]:
        """The digits that go from devices to devices.

        Where the source has copies along an axis, the nearest one is taken: a device's number then stands for its
        own copy, beside the digit that it stands for.
        """
        steps = [step for step in self.device if not step.place and step.device not in (0, step.weight)]
        own = [(step.weight, step.radix) for step in self.device if step.device == step.weight and not step.place]
        held = [*own, *((entry.before, entry.radix) for entry in entries if entry.before)]
        for copies in product((0, 1), repeat=len(steps)):
            found = [
                Entry(step.radix, step.device - step.weight * copy, step.weight, None)
                for step, copy in zip(steps, copies, strict=True)
            ]
            if _apart([*held, *((entry.before or 0, entry.radix) for entry in found)], self.devices):
                return found
        raise Untraceable("a device's number stands for no digit of another's")

    def _put(self, entry: Entry, dims: list[list[Entry]]) -> bool:
        """Puts a digit that is cut away beside its neighbour in the same dim of the tile, if that has its place."""
        starts = [math.prod(self.tile.dims[at + 1 :]) for at in range(len(self.tile.dims))]
        place = entry.place or 0
        for dim in dims:
            for at, other in enumerate(dim):
                if other.place is None:
                    continue
                if place not in starts and other.place * other.radix == place:
                    dim.insert(at, entry)
                    return True
                if place * entry.radix not in starts and place * entry.radix == other.place:
                    dim.insert(at + 1, entry)
                    return True
        return False


def _local(step: Step) -> Entry:
    """A digit of an index. If it says both which device and which place, the source has copies on those devices."""
    if not step.device and not step.place:
        raise Untraceable("an element is there twice")
    return Entry(step.radix, None if step.place else step.device, None, step.place or None)


def _apart(spans: Iterable[tuple[int, int]], total: int) -> bool:
    """Whether (stride, radix) digits are different digits of the numbers below `total`; some may be missing."""
    reached = 1
    for stride, radix in sorted(spans):
        if not stride or stride % reached:
            return False
        reached = stride * radix
    return total % reached == 0


def _read(tracer: Tracer, result: Value) -> _Read | None:
    """The digits of a result, read from the points along each coordinate; None if it has none."""
    dims = () if result.array is None else result.array.dims
    sizes = (tracer.devices, *dims)
    if 0 in sizes:
        return None
    before = tracer(result, _along(sizes))
    leaf = int(before.leaf[0])
    first = int(before.place[0])
    if leaf == NOWHERE or (before.leaf != leaf).any() or before.device[0]:
        return None
    ends = np.cumsum(sizes)
    lines = [slice(end - size, end) for end, size in zip(ends, sizes, strict=True)]
    found = [_steps(before.device[line], before.place[line] - first) for line in lines]
    if any(steps is None for steps in found):
        return None
    device, *index = [steps or [] for steps in found]
    if not _all_devices([device, *index], tracer.devices):
        return None
    if not _holds(tracer, result, (leaf, first), [device, *index]):
        return None
    return _Read(tracer.devices, device, index, tracer.tiles[leaf])


def _all_devices(coordinates: Sequence[Sequence[Step]], devices: int) -> bool:
    """Whether the elements come from devices of every coordinate: else only a part of the array is moved."""
    cuts = sorted({1, devices, *(cut for step in coordinates[0] for cut in (step.weight, step.weight * step.radix))})
    reads = [step.device * times for steps in coordinates for step in steps for times in range(1, step.radix)]
    return all(any(read % high // low for read in reads) for low, high in pairwise(cuts))


def _along(sizes: Sequence[int]) -> Points:
    """The points along each coordinate, the others being 0."""
    total, start = sum(sizes), 0
    coordinates = np.zeros((len(sizes), total), np.int64)
    for row, size in zip(coordinates, sizes, strict=True):
        row[start : start + size] = np.arange(size)
        start += size
    return Points(coordinates[0], coordinates[1:])


def _steps(device: Numbers, place: Numbers) -> list[Step] | None:
    """The digits of one coordinate, minor first; None if it is no numeral."""
    found: list[Step] = []
    weight, size = 1, device.size
    while weight < size:  # the weight grows with each digit
        step = int(device[weight]), int(place[weight])
        times = np.arange(size // weight)
        fits = (device[::weight][: times.size] == times * step[0]) & (place[::weight][: times.size] == times * step[1])
        radix = int(fits.argmin()) or times.size
        if radix < 2 or size % (weight * radix) or min(step) < 0:
            return None
        found.append(Step(weight, radix, *step))
        weight *= radix
    return found


def _holds(tracer: Tracer, result: Value, start: tuple[int, int], coordinates: Sequence[Sequence[Step]]) -> bool:
    """Whether the digits say where any point was, tried on all points or on very many."""
    sizes = [math.prod(step.radix for step in steps) for steps in coordinates]
    total = math.prod(sizes)
    random = np.random.default_rng(0)
    places = np.arange(total) if total <= _CHECKED else random.integers(0, total, _CHECKED)
    points = unravel(places, sizes)
    before = tracer(result, Points(points[0], points[1:]))
    device, place = np.zeros(places.size, np.int64), np.full(places.size, start[1], np.int64)
    for row, steps in zip(points, coordinates, strict=True):
        for step in steps:
            digit = row // step.weight % step.radix
            device += digit * step.device
            place += digit * step.place
    return bool(((before.leaf == start[0]) & (before.device == device) & (before.place == place)).all())


def _layouts(mesh: Mesh, dims: list[list[Entry]], dtype: str) -> tuple[Layout, Layout]:
    return (
        Layout(mesh, tuple(_dim(mesh, [(e.radix, e.before) for e in dim]) for dim in dims), dtype),
        Layout(mesh, tuple(_dim(mesh, [(e.radix, e.after) for e in dim]) for dim in dims), dtype),
    )


def _dim(mesh: Mesh, digits: Iterable[tuple[int, int | None]]) -> Dim:
    found = tuple(digit for radix, holder in digits for digit in _held(mesh, radix, holder))
    return Dim(found, math.prod(digit.radix for digit in found))


def _held(mesh: Mesh, radix: int, holder: int | None) -> Iterator[Digit]:
    if holder is None:
        yield Digit(radix, None)
        return
    for axis in mesh.sub_axes(holder, radix):
        yield Digit(axis.size, axis)


def _mesh(devices: int, dims: list[list[Entry]]) -> Mesh:
    """A mesh with an axis for each part of the devices' numbers that the digits tell apart."""
    held = [(stride, entry.radix) for dim in dims for entry in dim for stride in (entry.before, entry.after) if stride]
    cuts = sorted({1, devices, *(cut for stride, radix in held for cut in (stride, stride * radix))})
    if any(high % low for low, high in pairwise(cuts)):
        raise MeshError(f"the strides {cuts} of {devices} devices are those of no mesh")
    sizes = [high // low for low, high in pairwise(cuts)]
    return Mesh([(f"d{at}", size) for at, size in enumerate(reversed(sizes))])
