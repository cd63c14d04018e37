"""Dims of an exchange in independent groups, and the figures that a group has.

Two dims are independent if they use different device coordinates: then every combination of their pieces occurs, and
a device's share of the array is the product of its shares of the dims. For example f32[{x}3/10, {y}5] -> f32[10, 10]
on <x=4, y=2>: the two groups are dim 0 with the 4 coordinates along x, and dim 1 with the 2 along y.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

from reshard.types.layout import Dim, Layout
from reshard.types.mesh import Mesh, SubAxis, is_chain
from reshard.types.positions import numbers_along

Span = tuple[int, int]
"""The positions from a stride to stride times size, which a sub-axis covers; see `Mesh.span`."""


class DimGroup(NamedTuple):
    """Dims of both layouts, with the device coordinates that they and no other dims use.

    `factors` are the (stride, size) factors of these coordinates, major first. None stands for the coordinates of
    all devices, where sub-axes do not nest or the two meshes differ.
    """

    before: tuple[Dim, ...]
    after: tuple[Dim, ...]
    meshes: tuple[Mesh, Mesh]
    partial: tuple[SubAxis, ...]
    factors: tuple[tuple[int, int], ...] | None

    @property
    def size(self) -> int:
        """How many different coordinates devices have."""
        return self.meshes[0].size if self.factors is None else math.prod(size for _, size in self.factors)

    def pieces(self, dims: Sequence[Dim], mesh: Mesh) -> list[list[int]]:
        """For each of these dims, the number of the piece that each of the coordinates has."""
        axes = [[digit.axis for digit in dim.digits if digit.axis is not None] for dim in dims]
        return [self.along(on, mesh) for on in axes]

    def along(self, axes: Sequence[SubAxis], mesh: Mesh) -> list[int]:
        """The numbers along sub-axes of a mesh, major first, that each of the coordinates has."""
        spans = [mesh.span(axis) for axis in axes]
        return numbers_along(self.size, [(self._below(low), high // low) for low, high in spans])

    def _below(self, stride: int) -> int:
        """The coordinates that change faster than those along a stride."""
        return stride if self.factors is None else math.prod(size for low, size in self.factors if low < stride)


class TileKind(NamedTuple):
    """What devices may need in a group: elements, those of them that are held, source pieces, those that are held."""

    needed: int
    held: int
    pieces: int
    pieces_held: int


class PieceKind(NamedTuple):
    """How source pieces may be requested in a group: by how many devices, by how many holders; the holders."""

    requests: int
    own_requests: int
    holders: int


class ExchangeStats(NamedTuple):
    """The distinct kinds of tiles and pieces in a group, and its largest share in elements: of any two tiles, and
    of two tiles on different devices.
    """

    tiles: frozenset[TileKind]
    pieces: frozenset[PieceKind]
    largest: int
    largest_sent: int


def dim_groups(operand: Layout, result: Layout) -> list[DimGroup]:
    """The independent groups of dims between two layouts; a single one where coordinates do not nest."""
    meshes = (operand.mesh, result.mesh)
    everything = DimGroup(operand.dims, result.dims, meshes, operand.partial, None)
    if operand.mesh != result.mesh or operand.mesh.device_ids is not None:
        return [everything]
    dims = list(zip(operand.dims, result.dims, strict=True))
    groups: list[DimGroup] = []
    for spans, members in _independent([_spans(operand.mesh, pair) for pair in dims]):
        ends = sorted({end for span in spans for end in span})
        if not is_chain(ends):
            return [everything]
        factors = tuple((low, high // low) for low, high in itertools.pairwise(ends) if _overlap([(low, high)], spans))
        before, after = zip(*(dims[at] for at in members), strict=True)
        groups.append(DimGroup(before, after, meshes, (), factors[::-1]))
    return groups


def _spans(mesh: Mesh, dims: Sequence[Dim]) -> list[Span]:
    """The spans of the sub-axes that hold digits of these dims."""
    return [mesh.span(digit.axis) for dim in dims for digit in dim.digits if digit.axis is not None]


def _independent(spans: list[list[Span]]) -> list[tuple[list[Span], list[int]]]:
    """Dims, each with its spans, joined into groups until no two groups overlap.

    Every join leaves one group less, so the loop ends.
    """
    groups = [(own, [at]) for at, own in enumerate(spans)]
    at = 0
    while at < len(groups):
        mine = groups[at][0]
        other = next((o for o in range(at + 1, len(groups)) if _overlap(mine, groups[o][0])), None)
        if other is None:
            at += 1
            continue
        theirs, members = groups.pop(other)
        groups[at] = (mine + theirs, groups[at][1] + members)
    return groups


def _overlap(a: list[Span], b: list[Span]) -> bool:
    return any(low < end and start < high for low, high in a for start, end in b)
