"""A message of an exchange: the elements that one device sends to another, as runs in both of their tiles."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple, TypeVar

from reshard.geometry.overlap import Progression, Run, between, piece, piece_extents
from reshard.types.dims import numbers_along
from reshard.types.layout import Dim, Layout
from reshard.types.mesh import SubAxis

Box = tuple[Run, ...]
"""One run of each dim."""

Runs = tuple[tuple[Progression, ...], ...]
"""For each dim, the runs that two tiles have in common."""

Shape = tuple[tuple[tuple[int, ...], int], ...]
"""The boxes that make up one message: their extents, and how many have these."""

Tile = tuple[int, ...]
"""A tile of the source: the number of its piece in each dim, then the coordinates along the partial sub-axes."""

_Common = TypeVar("_Common")


class Message(NamedTuple):
    """What one device sends to another: products of the runs of each dim; a sender that is the receiver copies."""

    sender: int
    receiver: int
    products: tuple[Runs, ...]

    @property
    def elements(self) -> int:
        """True elements in the message, without padding."""
        return sum(map(elements, self.products))

    @property
    def boxes(self) -> Iterator[Box]:
        """The boxes that make up the message: one run of each dim."""
        for runs in self.products:
            yield from itertools.product(*([run for each in dim for run in each.runs] for dim in runs))

    @property
    def shape(self) -> Shape:
        """The boxes by their extents, counted without listing them."""
        shapes: Counter[tuple[int, ...]] = Counter()
        for box in itertools.chain.from_iterable(itertools.product(*runs) for runs in self.products):
            shapes[tuple(each.length for each in box)] += math.prod(each.times for each in box)
        return tuple(sorted(shapes.items()))


def elements(runs: Runs) -> int:
    """The elements of a product of runs.

    >>> elements(((Progression(0, 0, 3),), (Progression(0, 0, 2), Progression(5, 2, 1))))
    9
    """
    return math.prod(sum(run.elements for run in dim) for dim in runs)


def cut(runs: Runs, low: int, high: int) -> tuple[Runs, ...]:
    """The elements number `low` to `high` of a product of runs, in row-major order, as products.

    Elements 3 to 8 of 3 x 4 are the last of row 0 and the whole of row 1:

    >>> runs = (Progression(0, 0, 3),), (Progression(0, 0, 4),)
    >>> [[[run[:3] for run in dim] for dim in part] for part in cut(runs, 3, 8)]
    [[[(0, 0, 1)], [(3, 3, 1)]], [[(1, 1, 1)], [(0, 0, 4)]]]
    """
    return tuple(_cut(runs, low, high))


def _cut(runs: Runs, low: int, high: int) -> Iterator[Runs]:
    if low >= high:
        return
    if (low, high) == (0, elements(runs)):
        yield runs
        return
    rest = runs[1:]
    row = elements(rest)
    first, last = -(-low // row), high // row
    if first > last:  # Both cut the same row.
        yield from _in_row(runs, last, low - last * row, high - last * row)
        return
    yield from _in_row(runs, first - 1, low - (first - 1) * row, row)
    if first < last:
        yield (between(runs[0], first, last), *rest)
    yield from _in_row(runs, last, 0, high - last * row)


def _in_row(runs: Runs, row: int, low: int, high: int) -> Iterator[Runs]:
    if low < high:
        index = between(runs[0], row, row + 1)
        yield from ((index, *part) for part in _cut(runs[1:], low, high))


def tile_of(layout: Layout, device: int) -> Tile:
    """The tile that a device holds.

    >>> from reshard.types.mesh import Mesh
    >>> tile_of(Layout.parse("f32[{x}, {y}]", Mesh(x=4, y=2)), 5)
    (2, 1)
    """
    position = layout.mesh.position(device)
    pieces = (piece(dim, layout.mesh, position) for dim in layout.dims)
    return (*pieces, *layout.mesh.coordinates(position, layout.partial))


def tiles(layout: Layout) -> dict[int, Tile]:
    """The tile that each device holds, in the order of the mesh.

    >>> from reshard.types.mesh import Mesh
    >>> tiles(Layout.parse("f32[{x}3/5, {y}2]", Mesh(x=2, y=2)))
    {0: (0, 0), 1: (0, 1), 2: (1, 0), 3: (1, 1)}
    """
    rows = zip(*piece_columns(layout), *_summands(layout), strict=True)
    mesh = layout.mesh
    alone = not layout.dims and not layout.partial
    return dict(zip(mesh.devices, itertools.repeat((), mesh.size) if alone else rows, strict=True))


def piece_columns(layout: Layout) -> list[list[int]]:
    """For each dim, the number of the piece at each position of the mesh.

    >>> from reshard.types.mesh import Mesh
    >>> piece_columns(Layout.parse("f32[{x}3/5, {y}2]", Mesh(x=2, y=2)))
    [[0, 0, 1, 1], [0, 1, 0, 1]]
    """
    held = ([digit.axis for digit in dim.digits if digit.axis is not None] for dim in layout.dims)
    return [_along(layout, axes) for axes in held]


def _summands(layout: Layout) -> list[list[int]]:
    return [_along(layout, [axis]) for axis in layout.partial]


def _along(layout: Layout, axes: Sequence[SubAxis]) -> list[int]:
    mesh = layout.mesh
    return numbers_along(mesh.size, [(mesh.stride(axis), axis.size) for axis in axes])


def tile_sizes(layout: Layout) -> Callable[[Tile], int]:
    """A function that says how many elements a tile has, without padding.

    >>> from reshard.types.mesh import Mesh
    >>> size_of = tile_sizes(Layout.parse("f32[{x}3/5, {y}2]", Mesh(x=2, y=2)))
    >>> size_of((0, 1)), size_of((1, 1))
    (6, 4)
    """
    extents = [piece_extents(dim) for dim in layout.dims]
    return lambda tile: math.prod([of[number] for of, number in zip(extents, tile, strict=False)])


def requests(
    operand: Layout,
    result: Layout,
    receivers: Sequence[int],
    summand: Callable[[int], Tile],
    common: Callable[[Dim, Dim], Sequence[Mapping[int, _Common]]],
) -> dict[Tile, list[tuple[int, tuple[_Common, ...]]]]:
    """For each source tile, the receivers that need part of it, with what `common` says of each dim.

    `summand` are a receiver's coordinates along the partial sub-axes, of which it needs no other summand.
    """
    listed: dict[Tile, list[tuple[int, tuple[_Common, ...]]]] = {}
    dims = [common(s, t) for s, t in zip(operand.dims, result.dims, strict=True)]
    whole = tiles(result) if len(receivers) == result.mesh.size else {d: tile_of(result, d) for d in receivers}
    owners: dict[Tile, list[tuple[Tile, tuple[_Common, ...]]]] = {}
    for device in receivers:
        tile = whole[device]
        if tile not in owners:
            wanted = [by[number].items() for by, number in zip(dims, tile, strict=False)]
            every = itertools.product(*wanted)
            owners[tile] = [(tuple(p for p, _ in one), tuple(part for _, part in one)) for one in every]
        of = summand(device)
        for source, parts in owners[tile]:
            listed.setdefault(source + of, []).append((device, parts))
    return listed
