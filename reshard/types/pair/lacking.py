"""What each device lacks of its target tile: the elements that it must receive, device by device.

    mesh <x=2, y=2>, f32[{x}{y}2] -> f32[{y}{x}2]

    device    x=0 y=0    x=0 y=1    x=1 y=0    x=1 y=1
    holds     0-1        2-3        4-5        6-7
    needs     0-1        4-5        2-3        6-7
    lacks     nothing    2          2          nothing

One array's worst device is known in closed form (`rules.bounds`). The devices that are worst for one array may be the
best for another, so the bound of several arrays needs the figures of all devices.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import lru_cache
from typing import NamedTuple

from reshard.types.layout import Layout
from reshard.types.mesh import Mesh
from reshard.types.pair.overlap import fullest, piece
from reshard.types.pair.refine import Refinement, refine
from reshard.types.pair.shared import shared_elements

MOST_DEVICES = 1 << 14
"""Devices are listed on meshes of at most this many."""


class ByDevice(NamedTuple):
    """A figure of each device: `each` on all devices of a mesh, unless `listed` has one for every device id."""

    each: int
    listed: Mapping[int, int] | None = None

    @property
    def most(self) -> int:
        """The figure of the device that has the most.

        >>> ByDevice(3).most, ByDevice(3, {0: 2, 1: 1}).most
        (3, 2)
        """
        return self.each if self.listed is None else max(self.listed.values(), default=0)

    def scaled(self, nbytes: Layout) -> ByDevice:
        """Elements as bytes of a layout's dtype."""
        if self.listed is None:
            return ByDevice(nbytes.nbytes(self.each))
        return ByDevice(0, {device: nbytes.nbytes(count) for device, count in self.listed.items()})


@lru_cache(maxsize=4096)
def lacking(source: Layout, target: Layout) -> ByDevice:
    """The elements of its target tile that each device of the target does not hold in its source tile.

    On meshes too large to list, the device that lacks the most stands for all of them. Neither layout is to be reduced.

    >>> mesh = Mesh(x=2, y=2)
    >>> lacking(Layout.parse("f32[{x}{y}2]", mesh), Layout.parse("f32[{y}{x}2]", mesh)).listed
    {0: 0, 1: 2, 2: 2, 3: 0}
    >>> lacking(Layout.parse("f32[{x}4]", mesh), Layout.parse("f32[8]", mesh))
    ByDevice(each=4, listed=None)
    """
    r = refine(source, target)
    if r is None or not r.exact:
        return _uneven(source, target)
    tile = math.prod(target.tile_shape)
    if not r.swapped:
        return ByDevice(tile - r.common)
    if target.mesh.size > MOST_DEVICES:
        return ByDevice(tile)
    kept = {device: 0 if moves(target.mesh, r, at) else r.common for at, device in enumerate(target.mesh.devices)}
    return ByDevice(0, {device: tile - held for device, held in kept.items()})


def moves(mesh: Mesh, r: Refinement, position: int) -> bool:
    """Whether the device at a position needs another value of some digit that changes holders than it has.

    >>> mesh = Mesh(x=2, y=2)
    >>> r = refine(Layout.parse("f32[{x}{y}2]", mesh), Layout.parse("f32[{y}{x}2]", mesh))
    >>> [moves(mesh, r, position) for position in range(4)] if r else []
    [False, True, True, False]
    """
    return any(position // (d.src or 1) % d.radix != position // (d.dst or 1) % d.radix for d in r.swapped)


def _uneven(source: Layout, target: Layout) -> ByDevice:
    if target.mesh.size > MOST_DEVICES:
        return ByDevice(math.prod(fullest(dim) for dim in target.dims))
    shared = [shared_elements(s, t) for s, t in zip(source.dims, target.dims, strict=True)]
    held_by = set(source.mesh.devices)
    listed: dict[int, int] = {}
    for at, device in enumerate(target.mesh.devices):
        mine = [dim[piece(t, target.mesh, at)] for dim, t in zip(shared, target.dims, strict=True)]
        needed = math.prod(sum(by.values()) for by in mine)
        listed[device] = needed - (_held(source, device, mine) if device in held_by else 0)
    return ByDevice(0, listed)


def _held(source: Layout, device: int, mine: list[dict[int, int]]) -> int:
    """Elements of a target tile, given by what it shares with each source piece of each dim, that the device holds."""
    at = source.mesh.position(device)
    return math.prod(by.get(piece(s, source.mesh, at), 0) for by, s in zip(mine, source.dims, strict=True))
