"""Shifts: results that consist of boxes of other devices' tiles, as in a halo or a roll, which no layouts describe.

    device        0     1     2     3
    tile before   ab    cd    ef    gh
    result        bc    de    fg    ha      f32[2], cut at 1: [0:1] is one's own [1:2], [1:2] is the next one's [0:1]

A result is cut into a grid of cells, alike on all devices. Each cell is a box of one tile on every device, or padding;
which tile, and where in it, may differ from device to device, as at uneven ends. `infer_shift` finds the cells.

Results that are shifts of the same tile are made together. `plan_exchange` finds what each device needs of others, no
element twice, in as few permutes as there are neighbours. What comes from a diagonal neighbour is passed on by one that
has received it before:

    .....     device e needs a border of all its neighbours:     1. the row of b, from b     2. the row of h, from h
    .abc.                                                        3. the column of d, with the corners of a and g,
    .def.                                                           which d has received in 1 and 2
    .ghi.                                                        4. the column of f, with those of c and i
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise, product
from typing import NamedTuple

import numpy as np

from reshard.doctor.dataflow.flow import HloValue
from reshard.doctor.dataflow.index_maps import UNKNOWN_FILL, Points, Untraceable, unravel_places
from reshard.doctor.dataflow.scalars import Numbers
from reshard.doctor.dataflow.trace import NOWHERE, Tracer
from reshard.hlo import Array

_MOST_CELLS = 64
_MOST_LAUNCHES = 64
NOBODY = -1

Sizes = tuple[int, ...]
Box = tuple[tuple[int, int], ...]
"""The first index along each dim, and the one after the last."""


@dataclass(frozen=True)
class ShiftCell:
    """A box of a result: for each device, the device that has it, and where it begins in that device's tile.

    A device that has it from `NOBODY` has padding instead: the number whose bits, as a double, are `fill`.
    """

    sizes: Sizes
    homes: tuple[int, ...]
    starts: tuple[Sizes, ...]
    fill: int = 0

    def box(self, device: int) -> Box:
        """The box of the tile that a device needs."""
        return box_at(self.starts[device], self.sizes)


@dataclass(frozen=True)
class Shift:
    """What a result consists of: `cuts` has the bounds of the cells along each dim; cells are in row-major order."""

    cuts: tuple[Sizes, ...]
    cells: tuple[ShiftCell, ...]

    @property
    def devices(self) -> int:
        """The number of devices."""
        return len(self.cells[0].homes)

    def refine(self, cuts: Sequence[Iterable[int]]) -> Shift:
        """The same with more cuts."""
        finer = tuple(tuple(sorted({*own, *more})) for own, more in zip(self.cuts, cuts, strict=True))
        coarse = {tuple(first for first, _ in box): cell for box, cell in zip(self.boxes(), self.cells, strict=True)}
        cells: list[ShiftCell] = []
        for box in product(*map(pairwise, finer)):
            corner = tuple(
                max(cut for cut in own if cut <= first) for own, (first, _) in zip(self.cuts, box, strict=True)
            )
            cell = coarse[corner]
            inner = tuple(first - at for (first, _), at in zip(box, corner, strict=True))
            starts = tuple(
                start if home < 0 else tuple(map(sum, zip(start, inner, strict=True)))
                for home, start in zip(cell.homes, cell.starts, strict=True)
            )
            cells.append(ShiftCell(tuple(after - first for first, after in box), cell.homes, starts, cell.fill))
        return Shift(finer, tuple(cells))

    def boxes(self) -> Iterator[Box]:
        """The box of each cell in the result."""
        return product(*map(pairwise, self.cuts))


def box_at(start: Sizes, sizes: Sizes) -> Box:
    """The box of these sizes that begins at an index."""
    return tuple((first, first + size) for first, size in zip(start, sizes, strict=True))


def is_inside(inner: Box, outer: Box) -> bool:
    """Whether a box has no index that another has not."""
    return all(low <= first and after <= high for (first, after), (low, high) in zip(inner, outer, strict=True))


# Finding the cells of a result: lines along each dim show where they meet, and their corners where they come from.
# Elements between them are not looked at here: what is made of it is compared with the program, element by element.


def infer_shift(tracer: Tracer, result: HloValue) -> Shift | None:
    """The shift that makes a result from the tracer's only leaf; None if it is not a shift."""
    if result.array is None or not result.array.elements:
        return None
    try:
        cuts = _find_cuts(tracer, result, result.array.dims)
        if math.prod(len(one) - 1 for one in cuts) > _MOST_CELLS:
            return None
        boxes = list(product(*map(pairwise, cuts)))
        corners = [np.array(list(product(*((first, after - 1) for first, after in box))), np.int64).T for box in boxes]
        followed = _follow_points(tracer, result, np.concatenate(corners, axis=1))
    except Untraceable:
        return None
    ends = np.cumsum([one.shape[1] for one in corners])[:-1]
    parts = zip(boxes, corners, *(np.split(part, ends, axis=-1) for part in followed), strict=True)
    cells = [_read_cell(*part) for part in parts]
    known = [cell for cell in cells if cell is not None]
    return Shift(tuple(cuts), tuple(known)) if len(known) == len(cells) else None


def _find_cuts(tracer: Tracer, result: HloValue, dims: Sequence[int]) -> list[Sizes]:
    """The bounds of cells along each dim: where, on any device, an element and the next are not neighbours in one tile.

    All lines are followed at once.
    """
    lines = list(list_edge_lines(dims))
    followed = _follow_points(tracer, result, np.concatenate([line for _, line in lines], axis=1))
    ends = np.cumsum([dims[dim] for dim, _ in lines])[:-1]
    cuts: list[set[int]] = [{0, size} for size in dims]
    homes, indices, fills = (np.split(part, ends, axis=-1) for part in followed)
    for (dim, _), home, index, fill in zip(lines, homes, indices, fills, strict=True):
        steps = np.diff(index, axis=2)
        steps[dim] -= 1
        apart = (steps != 0).any(axis=(0, 1))
        apart |= ((np.diff(home, axis=1) != 0) | (np.diff(fill, axis=1) != 0)).any(axis=0)
        positions: list[int] = np.flatnonzero(apart).tolist()
        cuts[dim].update(at + 1 for at in positions)
        if len(cuts[dim]) > _MOST_CELLS + 1:
            raise Untraceable("it is cut into too many cells")
    return [tuple(sorted(one)) for one in cuts]


def list_edge_lines(dims: Sequence[int]) -> Iterator[tuple[int, Numbers]]:
    """The indices of lines, with the dim that each goes along: those at the first and the last index of the others.

    >>> [(dim, line.tolist()) for dim, line in list_edge_lines((1, 2))]
    [(0, [[0], [0]]), (0, [[0], [1]]), (1, [[0, 0], [0, 1]])]
    """
    for dim, size in enumerate(dims):
        for corner in sorted(set(product(*((0, n - 1) if at != dim else (0,) for at, n in enumerate(dims))))):
            line = np.repeat(np.array(corner, np.int64)[:, np.newaxis], size, axis=1)
            line[dim] = np.arange(size)
            yield dim, line


def points_on_all(indices: Numbers, devices: int) -> Points:
    """Points at the same indices on every device, device by device."""
    return Points(np.repeat(np.arange(devices), indices.shape[1]), np.tile(indices, (1, devices)))


def _read_cell(box: Box, corners: Numbers, home: Numbers, index: Numbers, fill: Numbers) -> ShiftCell | None:
    """The cell whose corners come from these devices and indices; None if it is not one box on every device."""
    offsets = index - (corners - corners[:, :1])[:, np.newaxis]
    if (home != home[:, :1]).any() or (offsets != offsets[:, :, :1]).any() or (fill != fill[:, :1]).any():
        return None
    homes = tuple(home[:, 0].tolist())
    fills = set(fill[home[:, 0] < 0, 0].tolist())
    if len(fills) > 1:
        return None
    nowhere = (0,) * len(box)
    starts = tuple(
        nowhere if at < 0 else tuple(start) for at, start in zip(homes, offsets[:, :, 0].T.tolist(), strict=True)
    )
    return ShiftCell(tuple(after - first for first, after in box), homes, starts, next(iter(fills), 0))


def _follow_points(tracer: Tracer, result: HloValue, indices: Numbers) -> tuple[Numbers, Numbers, Numbers]:
    """Where points come from: the device, the index in each dim, and the number that padding has.

    Each has a row for every device.
    """
    count, points = indices.shape[1], points_on_all(indices, tracer.devices)
    origins = tracer(result, points)
    padding = origins.leaf == NOWHERE
    tiles = list(tracer.tiles.values())
    if len(tiles) != 1 or (~padding & (origins.leaf != next(iter(tracer.tiles)))).any():
        raise Untraceable("it is not all of one tile")
    if (padding & (origins.place == UNKNOWN_FILL)).any():
        raise Untraceable("some of it is padding")
    if len(tiles[0].dims) != indices.shape[0]:
        raise Untraceable("its tile has other dims")
    # Padding has no place: it goes on as the result does.
    index = np.where(padding, points.indices, unravel_places(np.where(padding, 0, origins.place), tiles[0].dims))
    fill, home = np.where(padding, origins.place, 0), np.where(padding, NOBODY, origins.device)
    return home.reshape(-1, count), index.reshape(indices.shape[0], -1, count), fill.reshape(-1, count)


# What devices exchange for several shifts of one tile.


class Parcel(NamedTuple):
    """A box that a launch brings to some devices: whose tile has it, and where it begins there, for each device.

    The sender cuts it from its own tile, or, if it is `passed_on`, from a parcel that it has received: the numbers of
    the launch and of the parcel.
    """

    sizes: Sizes
    homes: tuple[int, ...]
    starts: tuple[Sizes, ...]
    passed_on: tuple[int, int] | None = None

    def has(self, device: int, home: int, box: Box) -> bool:
        """Whether it brings a device this box of another one's tile."""
        return self.homes[device] == home and is_inside(box, box_at(self.starts[device], self.sizes))


class Launch(NamedTuple):
    """A permute: for each device the one that sends to it, or `NOBODY`; and what it brings."""

    senders: tuple[int, ...]
    parcels: tuple[Parcel, ...]


class HaloExchange(NamedTuple):
    """The launches that bring all devices what they need, in order, and the shifts, cut where parcels meet."""

    launches: tuple[Launch, ...]
    shifts: tuple[Shift, ...]

    @property
    def received_elements(self) -> int:
        """The elements that a device receives."""
        return sum(math.prod(parcel.sizes) for launch in self.launches for parcel in launch.parcels)

    def received_bytes(self, dtype: str) -> int:
        """The bytes that a device receives."""
        return Array(dtype, (self.received_elements,)).nbytes

    def find(self, device: int, home: int, box: Box) -> tuple[int, int] | None:
        """The numbers of the launch and the parcel that bring a device a box of another's tile."""
        for at, launch in enumerate(self.launches):
            for number, parcel in enumerate(launch.parcels):
                if parcel.has(device, home, box):
                    return at, number
        return None


@dataclass
class _Direction:
    """Boxes that all devices of `homes` have to send to the same neighbours."""

    homes: list[int]
    boxes: list[Box]

    def fit(self, homes: Sequence[int]) -> int:
        """On how many devices others have the same neighbour; -1 if they cannot share a permute."""
        united = [own if own >= 0 else other for own, other in zip(self.homes, homes, strict=True)]
        known = [one for one in united if one >= 0]
        pairs = [(own, other) for own, other in zip(self.homes, homes, strict=True) if min(own, other) >= 0]
        if len(set(known)) < len(known) or any(own != other for own, other in pairs):
            return -1
        return len(pairs)


@lru_cache(maxsize=256)
def plan_exchange(shifts: tuple[Shift, ...], dims: Sizes) -> HaloExchange | None:
    """What brings all cells of shifts of a tile of these dims; None if that takes too many permutes."""

    def rank(need: tuple[tuple[int, ...], Box]) -> tuple[int, int]:
        homes, box = need
        return sum(home >= 0 for home in homes), math.prod(after - first for first, after in box)

    directions: list[_Direction] = []
    for homes, box in sorted(_list_uniform_needs(shifts), key=rank, reverse=True):
        fits = [(one.fit(homes), -at, one) for at, one in enumerate(directions)]
        best = max(fits, key=lambda fit: fit[:2], default=None)
        if best is None or best[0] <= 0:
            if len(directions) == _MOST_LAUNCHES:
                return None
            directions.append(_Direction(list(homes), [box]))
            continue
        best[2].homes = [own if own >= 0 else other for own, other in zip(best[2].homes, homes, strict=True)]
        best[2].boxes.append(box)
    launches = [_pack_direction(one) for one in directions]
    launches = _join_uneven_launches(launches, dims)
    launches.sort(key=lambda one: -sum(math.prod(parcel.sizes) for parcel in one.parcels))
    launches = _pass_on_parcels(launches)
    return _cut_where_parcels_meet(HaloExchange(tuple(launches), shifts))


def _list_uniform_needs(shifts: Sequence[Shift]) -> Iterator[tuple[tuple[int, ...], Box]]:
    """The boxes that devices need of others: those of a cell that begin at the same place, no sender named twice."""
    seen: set[tuple[tuple[int, ...], Box]] = set()
    for cell in (cell for shift in shifts for cell in shift.cells):
        groups: list[tuple[Box, dict[int, int]]] = []
        for target, home in enumerate(cell.homes):
            if home in (NOBODY, target):
                continue
            box = cell.box(target)
            fitting = (into for at, into in groups if at == box and home not in into.values())
            into = next(fitting, None)
            if into is None:
                groups.append((box, into := {}))
            into[target] = home
        for box, into in groups:
            need = tuple(into.get(device, NOBODY) for device in range(shifts[0].devices)), box
            if need not in seen:
                seen.add(need)
                yield need


def _pack_direction(direction: _Direction) -> Launch:
    """The launch of a direction: boxes of which no two overlap."""
    homes = tuple(direction.homes)
    parcels = [
        Parcel(tuple(after - first for first, after in box), homes, (tuple(first for first, _ in box),) * len(homes))
        for box in unite_boxes(direction.boxes)
    ]
    return Launch(homes, tuple(parcels))


def unite_boxes(boxes: Sequence[Box]) -> list[Box]:
    """Few boxes that have the same indices as others, each once.

    >>> unite_boxes([((0, 1), (0, 4)), ((0, 2), (0, 4)), ((0, 1), (4, 5))])
    [((0, 2), (0, 4)), ((0, 1), (4, 5))]
    """
    largest = sorted(set(boxes), key=lambda box: -math.prod(after - first for first, after in box))
    kept: list[Box] = []
    for box in largest:
        if not any(is_inside(box, other) for other in kept):
            kept.append(box)
    cuts = [sorted({at for box in kept for at in box[dim]}) for dim in range(len(kept[0]))]
    grid = np.zeros([len(one) - 1 for one in cuts], bool)
    spans = [
        tuple(slice(cut.index(first), cut.index(after)) for cut, (first, after) in zip(cuts, box, strict=True))
        for box in kept
    ]
    for span in spans:
        grid[span] = True
    united: list[Box] = []
    # The boxes that are asked for come first, as far as they are still missing; they grow while all of it is missing.
    for span in spans:
        while grid[span].any():  # ends: a cell of the grid is taken each time
            first = [int(at) + part.start for at, part in zip(np.argwhere(grid[span])[0], span, strict=True)]
            ends = [at + 1 for at in first]
            for dim in sorted(range(len(first)), key=lambda dim: span[dim].stop - span[dim].start, reverse=True):
                while ends[dim] < grid.shape[dim]:  # ends: the box grows
                    ends[dim] += 1
                    if not grid[tuple(map(slice, first, ends))].all():
                        ends[dim] -= 1
                        break
            grid[tuple(map(slice, first, ends))] = False
            united.append(tuple((cut[low], cut[high]) for cut, low, high in zip(cuts, first, ends, strict=True)))
    return united


def _join_uneven_launches(launches: list[Launch], dims: Sizes) -> list[Launch]:
    """Fewer launches: two are one if no device sends or receives in both, and the larger boxes are no more in all.

    At an uneven end, a device has the row that the next one needs at another place of its tile.
    """
    joined: list[Launch] = []
    for launch in sorted(launches, key=lambda one: -sum(home >= 0 for home in one.senders)):
        for at, other in enumerate(joined):
            one = _join_two_launches(other, launch, dims)
            if one is not None:
                joined[at] = one
                break
        else:
            joined.append(launch)
    return joined


def _join_two_launches(one: Launch, other: Launch, dims: Sizes) -> Launch | None:
    both = list(zip(one.senders, other.senders, strict=True))
    if any(min(pair) >= 0 for pair in both) or {*one.senders} & {*other.senders} - {NOBODY}:
        return None
    ordered = [sorted(each.parcels, key=lambda parcel: -math.prod(parcel.sizes)) for each in (one, other)]
    parcels: list[Parcel] = []
    for at in range(max(map(len, ordered))):
        pair = [each[at] for each in ordered if at < len(each)]
        sizes = tuple(map(max, *(parcel.sizes for parcel in pair))) if len(pair) > 1 else pair[0].sizes
        homes, starts = [NOBODY] * len(one.senders), [(0,) * len(dims)] * len(one.senders)
        for parcel in pair:
            for device, home in enumerate(parcel.homes):
                if home >= 0:
                    homes[device] = home
                    # The box begins earlier where it would reach beyond the tile.
                    bounds = zip(parcel.starts[device], dims, sizes, strict=True)
                    starts[device] = tuple(min(first, most - size) for first, most, size in bounds)
        parcels.append(Parcel(sizes, tuple(homes), tuple(starts)))
    before = sum(math.prod(parcel.sizes) for each in ordered for parcel in each)
    if sum(math.prod(parcel.sizes) for parcel in parcels) > before:
        return None
    return Launch(tuple(map(max, both)), tuple(parcels))


def _pass_on_parcels(launches: list[Launch]) -> list[Launch]:
    """Fewer launches: one whose parcels others may bring is left out, the largest first.

    A later launch brings a parcel if its sender has received it in an earlier one. Large ones are tried first because
    small ones may then be passed on once more: a face, then the edge beside it, then the corner.
    """
    order = list(range(len(launches)))
    for at in range(len(launches)):
        others = [one for one in order if one != at]
        routes = [_find_route(launches, parcel, others) for parcel in launches[at].parcels]
        found = [route for route in routes if route is not None]
        ways = (parcel.passed_on for each in launches for parcel in each.parcels)
        if len(found) < len(routes) or any(way is not None and way[0] == at for way in ways):
            continue
        for parcel, (by, through) in zip(launches[at].parcels, found, strict=True):
            one = launches[by]
            launches[by] = one._replace(parcels=(*one.parcels, parcel._replace(passed_on=through)))
        order.remove(at)
    numbers = {at: number for number, at in enumerate(order)}
    return [
        launches[at]._replace(
            parcels=tuple(
                one if one.passed_on is None else one._replace(passed_on=(numbers[one.passed_on[0]], one.passed_on[1]))
                for one in launches[at].parcels
            )
        )
        for at in order
    ]


def _find_route(
    launches: Sequence[Launch], parcel: Parcel, numbers: Sequence[int]
) -> tuple[int, tuple[int, int]] | None:
    """The launch that may bring a parcel, and the earlier launch and its parcel that bring it to the senders."""
    needs = [
        (device, home, box_at(start, parcel.sizes))
        for device, (home, start) in enumerate(zip(parcel.homes, parcel.starts, strict=True))
        if home >= 0
    ]
    for by in numbers:
        senders = launches[by].senders
        if any(senders[device] < 0 for device, _, _ in needs):
            continue
        for first in (at for at in numbers if at < by):
            for number, other in enumerate(launches[first].parcels):
                if all(other.has(senders[device], home, box) for device, home, box in needs):
                    return by, (first, number)
    return None


def _cut_where_parcels_meet(exchange: HaloExchange) -> HaloExchange:
    """The same with shifts of which each cell is inside one parcel on every device."""
    shifts: list[Shift] = []
    for shift in exchange.shifts:
        cuts: list[set[int]] = [set() for _ in shift.cuts]
        for at, cell in zip(shift.boxes(), shift.cells, strict=True):
            for device, home in enumerate(cell.homes):
                if home in (NOBODY, device) or exchange.find(device, home, cell.box(device)):
                    continue
                parcels = [one for launch in exchange.launches for one in launch.parcels if one.homes[device] == home]
                for parcel in parcels:
                    theirs = box_at(parcel.starts[device], parcel.sizes)
                    for dim, ((first, _), (low, high), edges) in enumerate(
                        zip(at, cell.box(device), theirs, strict=True)
                    ):
                        cuts[dim].update(first + edge - low for edge in edges if low < edge < high)
        shifts.append(shift.refine(cuts) if any(cuts) else shift)
    return exchange._replace(shifts=tuple(shifts))
