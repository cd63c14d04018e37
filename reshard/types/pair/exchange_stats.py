"""The figures of an exchange of boxes, computed without listing its messages.

Two dims are independent if they use different device coordinates: then every combination of their pieces occurs, and
a device's share of the array is the product of its shares of the dims. For example f32[{x}3/10, {y}5] -> f32[10, 10]
on <x=4, y=2>: the two groups are dim 0 with the 4 coordinates along x, and dim 1 with the 2 along y. Counting goes
over the 4 + 2 coordinates of the groups, not over the 4 x 2 devices, and the figures of the whole follow from the few
distinct values in each group.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple

from reshard.types.layout import Dim, Layout
from reshard.types.mesh import Mesh, SubAxis, is_chain
from reshard.types.pair.overlap import fullest, piece_sizes, shared_elements, shares
from reshard.types.positions import numbers_along

Span = tuple[int, int]
"""The positions from a stride to stride times size, which a sub-axis covers; see `Mesh.span`."""

Pieces = tuple[int, ...]
"""The number of a piece of every dim of a group, then the device's coordinates along the partial sub-axes."""


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


@lru_cache(maxsize=1024)
def fewest_received(source: Layout, target: Layout) -> int:
    """The true elements that the busiest device must receive: the maximum over devices of |T_d minus S_d|.

    >>> from reshard.types import Mesh
    >>> mesh = Mesh(x=4)
    >>> fewest_received(Layout.parse("f32[{x}3/10]", mesh), Layout.parse("f32[10]", mesh))
    9
    """
    groups = dim_groups(source, target)
    if any(_misses_all(group) for group in groups):
        return math.prod(fullest(dim) for dim in target.dims)
    kinds = itertools.product(*(_stats(group).tiles for group in groups))
    return max(math.prod(k.needed for k in kind) - math.prod(k.held for k in kind) for kind in kinds)


@lru_cache(maxsize=1024)
def rounds(operand: Layout, result: Layout) -> int:
    """The largest number of messages that a device sends or receives.

    A device receives one message for each piece that it lacks; the requests for a piece are dealt evenly among its
    holders.

    >>> from reshard.types import Mesh
    >>> mesh = Mesh(x=4)
    >>> rounds(Layout.parse("f32[{x}3/10]", mesh), Layout.parse("f32[10]", mesh))
    3
    """
    stats = [_stats(group) for group in dim_groups(operand, result)]
    received = (
        math.prod(k.pieces for k in kind) - math.prod(k.pieces_held for k in kind)
        for kind in itertools.product(*(s.tiles for s in stats))
    )
    sent = (_sent_by_holder(kind) for kind in itertools.product(*(s.pieces for s in stats)))
    return max(*received, *sent, 0)


def _sent_by_holder(kind: Sequence[PieceKind]) -> int:
    """The most messages that one holder of such a piece sends."""
    requests = math.prod(k.requests for k in kind) - math.prod(k.own_requests for k in kind)
    return -(-requests // math.prod(k.holders for k in kind))


@lru_cache(maxsize=1024)
def largest_message(operand: Layout, result: Layout) -> int:
    """Elements of the largest message: the largest share in every group, in one of them with another device."""
    stats = [_stats(group) for group in dim_groups(operand, result)]
    largest = [s.largest for s in stats]
    return max(
        (s.largest_sent * math.prod(largest[:at] + largest[at + 1 :]) for at, s in enumerate(stats)),
        default=0,
    )


def shortest_run(operand: Layout, result: Layout) -> int:
    """The fewest elements that a message takes from one tile to the other as neighbours in both."""
    if not operand.dims:
        return 1
    last = shares(operand.dims[-1], result.dims[-1])
    return min((run.length for by in last for runs in by.values() for run in runs), default=1)


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


def _misses_all(group: DimGroup) -> bool:
    """Whether some device's target tile is full and has no element in common with its source tile.

    Devices are visited in steps of about 0.618 of their number. If many are like this, one is met early.
    """
    most = math.prod(fullest(dim) for dim in group.after)
    if (stats := _one_sided(group)) is not None:
        return any(most and tile.needed == most and not tile.held for tile in stats.tiles)
    step = next(s for s in itertools.count(int(group.size * 0.618) | 1) if math.gcd(s, group.size) == 1)
    devices = _pieces(group)
    return any(_shares_nothing(group, *devices[at * step % group.size], most) for at in range(group.size))


def _shares_nothing(group: DimGroup, home: Pieces, wanted: Pieces, most: int) -> bool:
    """Whether a device needs `most` elements and holds none of them."""
    tile = _tile(group, wanted)
    if not most or math.prod(dim.needed for dim in tile) < most:
        return False
    return any(p not in dim.by_source for p, dim in zip(home, tile, strict=False))


@lru_cache(maxsize=1024)
def _stats(group: DimGroup) -> ExchangeStats:
    """The figures of a group, in closed form where there is one, else counted over its devices."""
    return _one_sided(group) or _counted(group)


def _one_sided(group: DimGroup) -> ExchangeStats | None:
    """The figures of a single dim that is whole on every device before or after; None for any other group.

    Each device has the other side's piece of its own number, so the sizes of the pieces say everything:

        {x}3/10 -> 10 on <x=4>      pieces of 3, 3, 3, 1    all need 10, hold 3 or 1; each piece has 4 requests
        10 -> {x}3/10 on <x=4>                              all hold what they need; the whole has 4 requests
    """
    if len(group.after) != 1 or group.factors is None:
        return None
    (before,), (after,) = group.before, group.after
    gathered, devices = not _held(after), group.size
    if not gathered and _held(before):
        return None
    sizes = piece_sizes(before if gathered else after)
    filled = devices - sizes.get(0, 0)
    if not gathered:
        tiles = {TileKind(size, size, int(size > 0), int(size > 0)) for size in sizes}
        kind = PieceKind(filled, filled, devices)
        return ExchangeStats(frozenset(tiles), frozenset({kind} if filled else ()), max(sizes), 0)
    tiles = {TileKind(after.size, size, filled, int(size > 0)) for size in sizes}
    largest = max(sizes)
    kinds = frozenset({PieceKind(devices, 1, 1)} if filled else ())
    return ExchangeStats(frozenset(tiles), kinds, largest, largest if devices > 1 else 0)


def _held(dim: Dim) -> bool:
    return any(digit.axis is not None for digit in dim.digits)


def _counted(group: DimGroup) -> ExchangeStats:
    devices = Counter(_pieces(group))
    tiles = {wanted: _tile(group, wanted) for wanted in {wanted for _, wanted in devices}}
    largest = {wanted: math.prod(dim.largest for dim in tile) for wanted, tile in tiles.items()}
    sent = 0
    for home, wanted in devices:
        if largest[wanted] > sent:
            sent = max(sent, _largest_sent(home, tiles[wanted]))
    kinds = frozenset(_tile_kind(home, tiles[wanted]) for home, wanted in devices)
    return ExchangeStats(kinds, _piece_kinds(group, devices, tiles), max(largest.values(), default=0), sent)


class DimShares(NamedTuple):
    """What one piece of a target dim shares with each source piece: elements, their sum, the largest and at which
    piece, and the largest elsewhere.
    """

    by_source: Mapping[int, int]
    needed: int
    largest: int
    at: int
    next: int


@lru_cache(maxsize=256)
def _dim_shares(source: Dim, target: Dim) -> tuple[DimShares, ...]:
    return tuple(_of_one(by_source) for by_source in shared_elements(source, target))


def _of_one(by_source: Mapping[int, int]) -> DimShares:
    largest, at = max(((size, p) for p, size in by_source.items()), default=(0, -1))
    other = max((size for p, size in by_source.items() if p != at), default=0)
    return DimShares(by_source, sum(by_source.values()), largest, at, other)


def _tile(group: DimGroup, wanted: Pieces) -> tuple[DimShares, ...]:
    """The shares of every dim of a target tile; what the tile shares with a source tile is their product."""
    return tuple(_dim_shares(s, t)[q] for s, t, q in zip(group.before, group.after, wanted, strict=False))


def _tile_kind(home: Pieces, tile: tuple[DimShares, ...]) -> TileKind:
    held = [dim.by_source.get(p, 0) for p, dim in zip(home, tile, strict=False)]
    needed, pieces = math.prod(dim.needed for dim in tile), math.prod(len(dim.by_source) for dim in tile)
    return TileKind(needed, math.prod(held), pieces, int(all(held)))


def _largest_sent(home: Pieces, tile: tuple[DimShares, ...]) -> int:
    """The most elements that a target tile shares with a source tile other than `home`."""
    best = [dim.largest for dim in tile]
    if any(p != dim.at for p, dim in zip(home, tile, strict=False)):
        return math.prod(best)
    # The largest share is the device's own: the next one differs from it in one dim.
    return max((math.prod((*best[:n], dim.next, *best[n + 1 :])) for n, dim in enumerate(tile)), default=0)


def _piece_kinds(
    group: DimGroup, devices: Mapping[tuple[Pieces, Pieces], int], tiles: Mapping[Pieces, tuple[DimShares, ...]]
) -> frozenset[PieceKind]:
    holders: Counter[Pieces] = Counter()
    wants: Counter[Pieces] = Counter()
    own: Counter[Pieces] = Counter()
    for (home, wanted), count in devices.items():
        holders[home] += count
        wants[wanted] += count
        if all(p in dim.by_source for p, dim in zip(home, tiles[wanted], strict=False)):
            own[home] += count
    requests = _requests(group, wants)
    return frozenset(PieceKind(count, own[source], holders[source]) for source, count in requests.items())


def _requests(group: DimGroup, wants: Counter[Pieces]) -> Counter[Pieces]:
    """How many devices need part of each source tile, from how many want each target tile.

    Target pieces are replaced by the source pieces that they overlap dim by dim. The dims of fewest overlaps come
    first, since there many tiles become one.
    """
    dims = [_dim_shares(s, t) for s, t in zip(group.before, group.after, strict=True)]
    overlaps = [sum(len(dim.by_source) for dim in of) / max(1, len(of)) for of in dims]
    requests = wants
    for at in sorted(range(len(dims)), key=overlaps.__getitem__):
        before, requests = requests, Counter[Pieces]()
        for pieces, count in before.items():
            head, tail = pieces[:at], pieces[at + 1 :]
            for p in dims[at][pieces[at]].by_source:
                requests[(*head, p, *tail)] += count
    return requests


def _pieces(group: DimGroup) -> list[tuple[Pieces, Pieces]]:
    """The pieces that each device of a group holds before, and after."""
    old, new = group.meshes
    summand = [group.along([axis], old) for axis in group.partial]
    home, wanted = group.pieces(group.before, old), group.pieces(group.after, new)
    if (
        old.device_ids != new.device_ids or old.size != new.size
    ):  # Then all devices are one group, in the order of `old`.
        order = [new.position(device) for device in old.devices]
        wanted = [[numbers[at] for at in order] for numbers in wanted]
    return list(zip(_rows(group, [*home, *summand]), _rows(group, [*wanted, *summand]), strict=True))


def _rows(group: DimGroup, columns: Sequence[Sequence[int]]) -> list[Pieces]:
    return list(zip(*columns, strict=True)) if columns else [()] * group.size
