"""Shifts: results that consist of parts of neighbours' tiles, as in a halo or a roll, which no layouts describe.

    device        0     1     2     3
    tile before   ab    cd    ef    gh
    result        bc    de    fg    ha      f32[2], cut at 1: [0:1] is one's own [1:2], [1:2] is the next one's [0:1]

The tile is cut into a grid of cells, alike on all devices. Each cell is a box of one tile, at the same place of it on
every device that is a `ShiftSource` of its own; so a cell costs one permute, or none if it is the device's own.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise, product

import numpy as np

from reshard.doctor.dataflow.flow import HloValue
from reshard.doctor.dataflow.index_maps import Points, Untraceable, unravel_places
from reshard.doctor.dataflow.scalars import Numbers
from reshard.doctor.dataflow.trace import Origins, Tracer
from reshard.hlo import Array

_MOST_CELLS = 16
_MOST_SOURCES = 4
_NOBODY = -1


@dataclass(frozen=True)
class ShiftSource:
    """Where some devices get a cell from: the box at `start` of the tile of a device; -1 for the other devices.

    No device is named twice, unless each is its own source.
    """

    start: tuple[int, ...]
    devices: tuple[int, ...]

    @property
    def is_local(self) -> bool:
        """Whether each device has the box itself."""
        return all(source in (_NOBODY, device) for device, source in enumerate(self.devices))


@dataclass(frozen=True)
class Shift:
    """What a result consists of: `cuts` has the bounds of the cells along each dim, `cells` the sources of each cell.

    Cells are in row-major order.
    """

    cuts: tuple[tuple[int, ...], ...]
    cells: tuple[tuple[ShiftSource, ...], ...]

    @property
    def devices(self) -> int:
        """The number of devices."""
        return len(self.cells[0][0].devices)

    @property
    def launches(self) -> int:
        """The number of permutes."""
        return sum(not source.is_local for cell in self.cells for source in cell)

    def sizes(self, cell: int) -> tuple[int, ...]:
        """The sizes of a cell."""
        return tuple(after - first for first, after in self._box(cell))

    def received_bytes(self, dtype: str) -> int:
        """The bytes that a device receives."""
        elements = (
            math.prod(self.sizes(at)) * sum(not source.is_local for source in cell)
            for at, cell in enumerate(self.cells)
        )
        return Array(dtype, (sum(elements),)).nbytes

    def _box(self, cell: int) -> tuple[tuple[int, int], ...]:
        return tuple(product(*map(pairwise, self.cuts)))[cell]


def infer_shift(tracer: Tracer, result: HloValue) -> Shift | None:
    """The shift that makes a result from the tracer's only leaf; None if it is not a shift.

    Lines along each dim show where cells meet, and the corners of each cell where it comes from. Elements between them
    are not checked here.
    """
    if result.array is None or not result.array.elements:
        return None
    try:
        cuts = _find_cuts(tracer, result, result.array.dims)
        if math.prod(len(one) - 1 for one in cuts) > _MOST_CELLS:
            return None
        cells = _find_cells(tracer, result, list(product(*map(pairwise, cuts))))
    except Untraceable:
        return None
    known = [cell for cell in cells if cell is not None]
    return Shift(tuple(cuts), tuple(known)) if len(known) == len(cells) else None


def _find_cuts(tracer: Tracer, result: HloValue, dims: Sequence[int]) -> list[tuple[int, ...]]:
    """The bounds of cells along each dim: where, on any device, an element and the next are not neighbours in one tile.

    All lines are followed at once: along each dim, those at the first and the last index of the others.
    """
    lines = [
        (dim, corner)
        for dim in range(len(dims))
        for corner in sorted(set(product(*((0, size - 1) if at != dim else (0,) for at, size in enumerate(dims)))))
    ]
    devices, indices = _follow_points(
        tracer, result, np.concatenate([_points_of_line(dims, *line) for line in lines], axis=1)
    )
    ends = np.cumsum([dims[dim] for dim, _ in lines])[:-1]
    cuts = [{0, size} for size in dims]
    parts = zip(lines, np.split(devices, ends, axis=1), np.split(indices, ends, axis=2), strict=True)
    for (dim, _), device, index in parts:
        steps = np.diff(index, axis=2)
        steps[dim] -= 1
        apart = (steps != 0).any(axis=(0, 1)) | (np.diff(device, axis=1) != 0).any(axis=0)
        cuts[dim].update((1 + np.flatnonzero(apart)).tolist())
        if len(cuts[dim]) > _MOST_CELLS + 1:
            raise Untraceable("it is cut into too many cells")
    return [tuple(sorted(one)) for one in cuts]


def _points_of_line(dims: Sequence[int], dim: int, corner: Sequence[int]) -> Numbers:
    """The indices of the elements along a dim, through a corner."""
    indices = np.repeat(np.array(corner, np.int64)[:, np.newaxis], dims[dim], axis=1)
    indices[dim] = np.arange(dims[dim])
    return indices


def _find_cells(
    tracer: Tracer, result: HloValue, boxes: Sequence[Sequence[tuple[int, int]]]
) -> list[tuple[ShiftSource, ...] | None]:
    """Where the devices get each cell from; None if its corners do not agree, or there are too many sources."""
    corners = [np.array(list(product(*((first, after - 1) for first, after in box))), np.int64).T for box in boxes]
    devices, indices = _follow_points(tracer, result, np.concatenate(corners, axis=1))
    ends = np.cumsum([one.shape[1] for one in corners])[:-1]
    parts = zip(corners, np.split(devices, ends, axis=1), np.split(indices, ends, axis=2), strict=True)
    return [_sources_of_cell(*part) for part in parts]


def _sources_of_cell(corners: Numbers, device: Numbers, index: Numbers) -> tuple[ShiftSource, ...] | None:
    """Where the devices get one cell from, whose corners come from these devices and indices."""
    offsets = index - (corners - corners[:, :1])[:, np.newaxis]
    if (device != device[:, :1]).any() or (offsets != offsets[:, :, :1]).any():
        return None
    taken = [(tuple(offsets[:, at, 0].tolist()), int(device[at, 0])) for at in range(device.shape[0])]
    groups: list[tuple[tuple[int, ...], bool, dict[int, int]]] = []
    for target, (start, source) in enumerate(taken):
        local = source == target
        fitting = (into for at, own, into in groups if at == start and own == local and source not in into.values())
        into = next(fitting, None)
        if into is None:
            groups.append((start, local, into := {}))
        into[target] = source
    if len(groups) > _MOST_SOURCES:
        return None
    everyone = range(len(taken))
    return tuple(ShiftSource(start, tuple(into.get(one, _NOBODY) for one in everyone)) for start, _, into in groups)


def _follow_points(tracer: Tracer, result: HloValue, indices: Numbers) -> tuple[Numbers, Numbers]:
    """The device (of each device and point) and the index (of each dim, device and point) that points come from."""
    count = indices.shape[1]
    points = Points(np.repeat(np.arange(tracer.devices), count), np.tile(indices, (1, tracer.devices)))
    origins: Origins = tracer(result, points)
    tiles = list(tracer.tiles.values())
    if len(tiles) != 1 or (origins.leaf != next(iter(tracer.tiles))).any():
        raise Untraceable("it is not all of one tile")
    if len(tiles[0].dims) != indices.shape[0]:
        raise Untraceable("its tile has other dims")
    index = unravel_places(origins.place, tiles[0].dims)
    return origins.device.reshape(-1, count), index.reshape(indices.shape[0], -1, count)
