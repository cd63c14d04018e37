"""Infers the two layouts that a traced move is between.

Each coordinate of the result, its device or an index, is a numeral. If every digit of it stands for one digit of where
the element came from, of the source device or of the place in the source tile, then the move is between two layouts.
For example, four devices hold tiles f32[2,8] of an array f32[8,8], gather it, and slice their own two columns. The
result f32[8,2] traces back as follows:

    coordinate   digit          adds to source     so this digit of the global array is
                 weight radix   device   place     before              after
    device       1      4       0        2         local, stride 2     held, stride 1
    row          1      2       0        8         local, stride 8     local
                 2      4       1        0         held, stride 1      local
    column       1      2       0        1         local, stride 1     local

The digit of the device lies just above that of the column in the source tile (2 = 1 * 2), so both are digits of the
same dim: columns are 4 x 2, rows are 4 x 2, and the move is f32[{d0}2, 8] -> f32[8, {d0}2].

The digits are read from points along the coordinates, one coordinate at a time, and then checked on other points.

A source may be a part of its tile, as one half of a fused array. Where no two layouts describe a move, it may be that
of a part of one device's tile (`infer_pick`), or a shift (`doctor/shifts.py`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise, product
from typing import NamedTuple

import numpy as np

from reshard.doctor.dataflow.flow import HloValue
from reshard.doctor.dataflow.index_maps import Points, Untraceable, unravel_places
from reshard.doctor.dataflow.scalars import Numbers
from reshard.doctor.dataflow.trace import NOWHERE, Origins, Tracer, points_at, strided_digits
from reshard.doctor.shifts import Box, Sizes, list_edge_lines, points_on_all
from reshard.errors import MeshError, ReshardError
from reshard.geometry.blocks import list_strides
from reshard.hlo import Array
from reshard.types import Layout, Mesh
from reshard.types.layout import Digit, Dim

_CHECKED = 1 << 12
_MOST_CELLS = 16


class CoordinateDigit(NamedTuple):
    """A digit of a result's coordinate, and what one step of it adds to the source's device and place."""

    weight: int
    radix: int
    device: int
    place: int


class GlobalDigit(NamedTuple):
    """A digit of the global array: the stride of its holders before and after, None where it is local.

    `place` is its stride in the source's tile, None if it was held there.
    """

    radix: int
    before: int | None
    after: int | None
    place: int | None


class InferredMove(NamedTuple):
    """The layouts before and after a move, and how the source's tile lies in memory.

    `firsts` is the first device, for each, that has a copy of its tile. `places` has, for each local digit of the
    source in the order of its dims, the digit's radix and its stride in the row-major tile that was traced. The source
    may be a part of that tile, which begins at `start`: see `find_part_cuts`. With a `pick`, all devices of a group use
    what one of them has after the move: that at these indices, one for each digit that the group goes through.
    """

    source: Layout
    target: Layout
    firsts: Numbers
    places: tuple[tuple[int, int], ...]
    start: int = 0
    pick: tuple[int, ...] = ()


class PartCut(NamedTuple):
    """A cut of the last dim of an array: every `step`-th of some indices, which then are the two dims `sizes`."""

    first: int
    after: int
    step: int
    sizes: tuple[int, int]


def find_part_cuts(places: Iterable[tuple[int, int]], start: int, elements: int) -> list[PartCut]:
    """The cuts that leave, of a flat tile, a dim for each digit of a part of it, those of largest strides first.

    Digits are given as radices and strides. After the cuts the last dim has size 1. Raises `Untraceable` if two indices
    have the same element, or the part reaches beyond the tile.

    >>> find_part_cuts([(8, 32), (16, 1)], 16, 256)  # the second half of each of 8 rows
    [PartCut(first=0, after=256, step=1, sizes=(8, 32)), PartCut(first=16, after=32, step=1, sizes=(16, 1))]
    """
    cuts: list[PartCut] = []
    left = sorted(places, key=lambda place: -place[1]) or [(1, 1)]
    for at, (radix, stride) in enumerate(left):
        whole, most = start // stride * stride, elements - radix * stride
        if at == len(left) - 1 and stride > 1 and start + (radix - 1) * stride < elements:
            cuts.append(PartCut(start, start + (radix - 1) * stride + 1, stride, (radix, 1)))
            return cuts
        # A part that lies inside the rows is a cut of each row; one that takes whole rows needs no such cut.
        inside = start - whole + sum((times - 1) * step for times, step in left[at + 1 :]) < stride
        first = whole if inside and elements % stride == 0 and whole <= most else min(start, most)
        if first < 0:
            raise Untraceable("two indices have the same element, or it reaches beyond the tile")
        cuts.append(PartCut(first, first + radix * stride, 1, (radix, stride)))
        start, elements = start - first, stride
    if start:
        raise Untraceable("the part begins inside its smallest digit")
    return cuts


def infer_pick(tracer: Tracer, result: HloValue, dtype: str) -> InferredMove | None:
    """The move that gathers one part of each tile, where all devices use the same sender's; None for any other move.

    An example is a program that gathers a whole array and uses its first element.
    """
    if result.array is None or not 0 < result.array.elements <= _CHECKED:
        return None
    try:
        origins = tracer(result, points_at(result, tracer.devices))
        places, senders = (part.reshape(tracer.devices, -1) for part in (origins.place, origins.device))
        if (origins.leaf != origins.leaf[0]).any() or origins.leaf[0] == NOWHERE:
            return None
        if (places != places[0]).any() or (senders != senders[:, :1]).any():
            return None
        # The places are a box of the tile if they are those between the first and the last index, in order.
        indices = unravel_places(places[0], tracer.tiles[int(origins.leaf[0])].dims)
        starts = indices.min(axis=1, keepdims=True)
        sizes = (indices.max(axis=1) - starts[:, 0] + 1).tolist()
        if math.prod(sizes) != places.shape[1]:
            return None
        if (unravel_places(np.arange(places.shape[1]), sizes) + starts != indices).any():
            return None
        # A group goes along the digits of the device that its sender does not depend on.
        sender, devices = senders[:, 0], np.arange(tracer.devices)
        group = strided_digits(np.flatnonzero(sender == sender[0]).tolist())
        others = devices - sum(devices // stride % radix * stride for stride, radix in group)
        if not group or (sender != others + sender[0]).any():
            return None
        at = tuple(int(sender[0]) // stride % radix for stride, radix in group)
        dims = [[GlobalDigit(radix, stride, None, None)] for stride, radix in group]
        tile = tracer.tiles[int(origins.leaf[0])].dims
        local = tuple((size, stride) for size, stride in zip(sizes, list_strides(tile), strict=True) if size > 1)
        dims += [[GlobalDigit(size, None, None, stride)] for size, stride in local]
        pair = build_layouts(fit_mesh_to_digits(None, tracer.devices, dims), dims, dtype)
        return InferredMove(*pair, devices, local, int(places[0, 0]), at)
    except (Untraceable, ReshardError):
        return None


Cuts = tuple[Sizes, ...]
"""The bounds of the cells of a grid along each dim of an array."""


class Joined(NamedTuple):
    """What a value is put together of: cells between `cuts`, in row-major order, with the number of each one's leaf."""

    cuts: Cuts
    leaves: tuple[int, ...]

    @property
    def boxes(self) -> tuple[Box, ...]:
        """The box of each cell."""
        return tuple(product(*map(pairwise, self.cuts)))


def find_joined(tracer: Tracer, result: HloValue) -> Joined | None:
    """The cells of a value that come from one leaf each, the same on all devices; None if there are none, or too many.

    They are found along the lines of `list_edge_lines`.
    """
    dims = () if result.array is None else result.array.dims
    if 0 in dims:
        return None
    cuts = [{0, size} for size in dims]
    try:
        for dim, line in list_edge_lines(dims):
            cuts[dim].update((1 + np.flatnonzero(np.diff(_leaves_at(tracer, result, line)))).tolist())
        grid = tuple(tuple(sorted(one)) for one in cuts)
        if math.prod(len(one) - 1 for one in grid) > _MOST_CELLS:
            return None
        first = np.array(list(product(*(one[:-1] for one in grid))), np.int64).T
        return Joined(grid, tuple(_leaves_at(tracer, result, first).tolist()))
    except Untraceable:
        return None


def _leaves_at(tracer: Tracer, result: HloValue, indices: Numbers) -> Numbers:
    """The numbers of the leaves that elements come from, on every device alike."""
    leaves = tracer(result, points_on_all(indices, tracer.devices)).leaf.reshape(tracer.devices, -1)
    if (leaves != leaves[0]).any() or (leaves == NOWHERE).any():
        raise Untraceable("devices have elements of several arrays at the same place, or padding")
    return leaves[0]


def infer_layouts(
    tracer: Tracer,
    result: HloValue,
    mesh: Mesh | None,
    dtype: str,
    summed: Sequence[tuple[int, int]] = (),
    box: Box | None = None,
) -> InferredMove | None:
    """The layouts before and after, on `mesh` or on one made for them; None if no two layouts describe the move.

    The dims are those of the result without dims of size 1. Axes along which nothing moves are left out, and a digit
    that goes from one device to another becomes a dim of its own. If the traced tile is the sum over the digits
    `summed` of the device, given by stride and radix, then the source is partial along them. With a `box`, it is the
    move of that part of the result.
    """
    try:
        traced = trace_digits(tracer, result, summed, box)
        if traced is None or result.array is None:
            return None
        dims, firsts = traced.dims(), traced.firsts()
        places = tuple((digit.radix, digit.place) for dim in dims for digit in dim if digit.place is not None)
        mesh = fit_mesh_to_digits(mesh, tracer.devices, dims, summed)
        return InferredMove(*build_layouts(mesh, dims, dtype, summed), firsts, places, traced.start)
    except (Untraceable, ReshardError):
        return None


@dataclass(frozen=True)
class TracedDigits:
    """The digits of a result's device and of each dim, least significant first, and the tile that they came from.

    `start` is the first place of that tile.
    """

    devices: int
    device: list[CoordinateDigit]
    index: list[list[CoordinateDigit]]
    tile: Array
    start: int = 0

    def dims(self) -> list[list[GlobalDigit]]:
        """The digits of each dim of the global array, most significant first.

        Raises `Untraceable` if they do not form one.
        """
        # The digits of an index are local after the move. One that adds to both device and place was local before, too:
        # the source has copies on those devices.
        if any(not digit.device and not digit.place for digits in self.index for digit in digits):
            raise Untraceable("two indices have the same element")
        dims = [
            [GlobalDigit(one.radix, None if one.place else one.device, None, one.place or None) for one in digits[::-1]]
            for digits in self.index
        ]
        # Those along which the tile was sliced are local before, held after; without a neighbour, a dim of their own.
        sliced = [GlobalDigit(one.radix, None, one.weight, one.place) for one in self.device if one.place]
        while sliced:  # ends: each round inserts one of them
            inserted = next((digit for digit in sliced if self._insert_beside_neighbour(digit, dims)), None)
            if inserted is None:
                inserted = sliced[0]
                dims.insert(0, [inserted])
            sliced.remove(inserted)
        digits = [digit for dim in dims for digit in dim]
        find_part_cuts([(digit.radix, digit.place) for digit in digits if digit.place], self.start, self.tile.elements)
        return [dim for dim in [*([digit] for digit in self._permuted(digits)), *dims] if dim]

    def firsts(self) -> Numbers:
        """For each device, the first that has a copy of its tile.

        There are copies along a digit of the source's device that other places of the tile come with.
        """
        firsts = np.arange(self.devices)
        copied = {(one.device, one.radix) for digits in self.index for one in digits if one.device and one.place}
        copied |= {(one.device, one.radix) for one in self.device if one.place and one.device == one.weight}
        for stride, radix in copied:
            firsts -= firsts // stride % radix * stride
        return firsts

    def _insert_beside_neighbour(self, digit: GlobalDigit, dims: list[list[GlobalDigit]]) -> bool:
        """Inserts a sliced digit next to its neighbour in the same dim of the tile, if that is among `dims`.

        A stride that is where a dim of the tile begins has no neighbour across it: rows are not joined with columns.
        """
        starts = list_strides(self.tile.dims)
        low, high = digit.place or 0, (digit.place or 0) * digit.radix
        for dim in dims:
            for at, other in enumerate(dim):
                if other.place is None:
                    continue
                is_below = low not in starts and other.place * other.radix == low
                if is_below or (high not in starts and high == other.place):
                    dim.insert(at if is_below else at + 1, digit)
                    return True
        return False

    def _permuted(self, others: Sequence[GlobalDigit]) -> list[GlobalDigit]:
        """The digits that are held before and after, by different digits of the device.

        Where the source is replicated, the tracer follows the copy on the nearest device. One digit of the device may
        then stand for two things at once: for its own copy, and for the digit that it holds. Both readings are tried.
        """
        permuted = [one for one in self.device if not one.place and one.device not in (0, one.weight)]
        kept = [(one.weight, one.radix) for one in self.device if one.device == one.weight and not one.place]
        held = [*kept, *((digit.before, digit.radix) for digit in others if digit.before)]
        for copies in product((0, 1), repeat=len(permuted)):
            digits = [
                GlobalDigit(one.radix, one.device - one.weight * copy, one.weight, None)
                for one, copy in zip(permuted, copies, strict=True)
            ]
            if are_disjoint([*held, *((digit.before or 0, digit.radix) for digit in digits)], self.devices):
                return digits
        raise Untraceable("a digit of the device does not stand for one of the source's device")


def are_disjoint(digits: Iterable[tuple[int, int]], total: int) -> bool:
    """Whether (stride, radix) digits are different digits of the numbers below `total`; some may be missing."""
    reached = 1
    for stride, radix in sorted(digits):
        if not stride or stride % reached:
            return False
        reached = stride * radix
    return total % reached == 0


_MOST_COORDINATES = 1 << 27  # One GiB of them.


def trace_digits(
    tracer: Tracer, result: HloValue, summed: Sequence[tuple[int, int]], box: Box | None = None
) -> TracedDigits | None:
    """The digits of a result, or of a `box` of it, read from points along each coordinate.

    None if the coordinates are not numerals.
    """
    box = tuple((0, size) for size in (() if result.array is None else result.array.dims)) if box is None else box
    sizes = (tracer.devices, *(end - first for first, end in box))
    if 0 in sizes or sum(sizes) * len(sizes) > _MOST_COORDINATES:
        return None
    origins = _trace_origins(tracer, result, list_axis_points(sizes), summed, box)
    leaf, first = int(origins.leaf[0]), int(origins.place[0])
    if leaf == NOWHERE or (origins.leaf != leaf).any() or origins.device[0]:
        return None
    coordinates = _read_coordinates(origins, sizes)
    if coordinates is None:
        return None
    # Between two neighbouring cuts lies a digit of the device number that moves as one: some element has to come from a
    # device where it is not 0. Otherwise only a part of the array is moved.
    cuts = sorted({1, tracer.devices, *(cut for one in coordinates[0] for cut in (one.weight, one.weight * one.radix))})
    reached = [one.device * times for digits in coordinates for one in digits for times in range(1, one.radix)]
    reached += [stride * times for stride, radix in summed for times in range(1, radix)]
    if not all(any(device % high // low for device in reached) for low, high in pairwise(cuts)):
        return None
    if not _predict_origins(tracer, result, (leaf, first), coordinates, summed, box):
        return None
    device, *index = coordinates
    return TracedDigits(tracer.devices, device, index, tracer.tiles[leaf], first)


def _trace_origins(
    tracer: Tracer, result: HloValue, points: Points, summed: Sequence[tuple[int, int]], box: Box
) -> Origins:
    """Where points of a box came from; a sum, which all devices of a group have, comes from the first of them."""
    corner = np.array([first for first, _ in box], np.int64).reshape(-1, 1)
    origins = tracer(result, points._replace(indices=points.indices + corner))
    device = origins.device
    for stride, radix in summed:
        device = device - device // stride % radix * stride
    return origins._replace(device=device)


def list_axis_points(sizes: Sequence[int]) -> Points:
    """The points along each coordinate, all others being 0."""
    total, start = sum(sizes), 0
    coordinates = np.zeros((len(sizes), total), np.int64)
    for row, size in zip(coordinates, sizes, strict=True):
        row[start : start + size] = np.arange(size)
        start += size
    return Points(coordinates[0], coordinates[1:])


def _read_coordinates(origins: Origins, sizes: Sequence[int]) -> list[list[CoordinateDigit]] | None:
    """The digits of each coordinate, least significant first, from the origins of the points of `list_axis_points`.

    None if one is not a numeral.
    """
    first = int(origins.place[0])
    coordinates: list[list[CoordinateDigit]] = []
    for end, size in zip(np.cumsum(sizes), sizes, strict=True):
        device, place = origins.device[end - size : end], origins.place[end - size : end] - first
        digits: list[CoordinateDigit] = []
        weight = 1
        while weight < size:  # ends: the weight grows with each digit
            # The first step of a digit says what each step adds, and the digit ends where a step adds something else.
            step = int(device[weight]), int(place[weight])
            times = np.arange(size // weight)
            fits = device[::weight][: times.size] == times * step[0]
            fits &= place[::weight][: times.size] == times * step[1]
            radix = int(fits.argmin()) or times.size  # 0: all of them fit
            if radix < 2 or size % (weight * radix) or min(step) < 0:
                return None
            digits.append(CoordinateDigit(weight, radix, *step))
            weight *= radix
        coordinates.append(digits)
    return coordinates


def _predict_origins(
    tracer: Tracer,
    result: HloValue,
    start: tuple[int, int],
    coordinates: Sequence[Sequence[CoordinateDigit]],
    summed: Sequence[tuple[int, int]],
    box: Box,
) -> bool:
    """Whether the digits predict where points came from: all points if they are few, else a random sample."""
    sizes = [math.prod(one.radix for one in digits) for digits in coordinates]
    total = math.prod(sizes)
    random = np.random.default_rng(0)  # the same points in every process, so that all decide alike
    places = np.arange(total) if total <= _CHECKED else random.integers(0, total, _CHECKED)
    points = unravel_places(places, sizes)
    origins = _trace_origins(tracer, result, Points(points[0], points[1:]), summed, box)
    device, place = np.zeros(places.size, np.int64), np.full(places.size, start[1], np.int64)
    for row, digits in zip(points, coordinates, strict=True):
        for one in digits:
            digit = row // one.weight % one.radix
            device += digit * one.device
            place += digit * one.place
    return bool(((origins.leaf == start[0]) & (origins.device == device) & (origins.place == place)).all())


def build_layouts(
    mesh: Mesh, dims: list[list[GlobalDigit]], dtype: str, summed: Sequence[tuple[int, int]] = ()
) -> tuple[Layout, Layout]:
    """The layouts before and after, whose held digits are digits of the mesh's axes."""

    def dim(digits: Iterable[tuple[int, int | None]]) -> Dim:
        split: list[Digit] = []
        for radix, stride in digits:
            axes = () if stride is None else mesh.sub_axes(stride, radix)
            split += [Digit(axis.size, axis) for axis in axes] if stride is not None else [Digit(radix, None)]
        return Dim(tuple(split), math.prod(digit.radix for digit in split))

    before = tuple(dim((digit.radix, digit.before) for digit in each) for each in dims)
    after = tuple(dim((digit.radix, digit.after) for digit in each) for each in dims)
    partial = tuple(axis for stride, radix in summed for axis in mesh.sub_axes(stride, radix))
    return Layout(mesh, before, dtype, "sum" if partial else None, partial), Layout(mesh, after, dtype)


def fit_mesh_to_digits(
    mesh: Mesh | None, devices: int, dims: list[list[GlobalDigit]], summed: Sequence[tuple[int, int]] = ()
) -> Mesh:
    """A mesh of so many devices, if all digits are of its axes, else one with an axis for each part of the device
    number that they tell apart.
    """
    held = [(stride, digit.radix) for dim in dims for digit in dim for stride in (digit.before, digit.after) if stride]
    held += summed
    if mesh is not None and mesh.size == devices:
        with suppress(MeshError):
            for digit in held:
                mesh.sub_axes(*digit)
            return mesh
    # An axis for each part of the device number between two cuts; strides that do not divide each other have no mesh.
    cuts = sorted({1, devices, *(cut for stride, radix in held for cut in (stride, stride * radix))})
    if any(high % low for low, high in pairwise(cuts)):
        raise MeshError(f"no mesh of {devices} devices has axes with the strides {cuts}")
    sizes = [high // low for low, high in pairwise(cuts)]
    return Mesh([(f"d{at}", size) for at, size in enumerate(reversed(sizes))])
