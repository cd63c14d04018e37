"""The figures of an exchange of boxes, computed without listing its messages.

f32[{x}3/10, {y}5] -> f32[10, 10] on <x=4, y=2> has two groups of dims that use different device coordinates
(`dim_groups`): dim 0 with the 4 coordinates along x, and dim 1 with the 2 along y. Counting goes over the 4 + 2
coordinates of the groups, not over the 4 x 2 devices, and the figures of the whole follow from the few distinct values
in each group. A single dim in contiguous pieces has a closed form (`contiguous_stats`).
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache, reduce
from operator import mul
from typing import NamedTuple

from reshard.geometry.message import piece_columns
from reshard.geometry.overlap import (
    contiguous_extent,
    fullest_piece,
    piece_extents,
    piece_sizes,
    shared_elements,
    shortest_shared,
)
from reshard.geometry.refine import Refinement, refine
from reshard.geometry.remesh import disjoint
from reshard.types.dims import numbers_along
from reshard.types.layout import Dim, Layout
from reshard.types.mesh import Mesh, SubAxis, is_chain

Pieces = tuple[int, ...]
"""The number of a piece of every dim of a group, then the device's coordinates along the partial sub-axes."""


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
        return math.prod(fullest_piece(dim) for dim in target.dims)
    kinds = itertools.product(*(_group_stats(group).tiles for group in groups))
    return max(math.prod(k.needed for k in kind) - math.prod(k.held for k in kind) for kind in kinds)


@lru_cache(maxsize=1024)
def count_rounds(operand: Layout, result: Layout) -> int:
    """The largest number of messages that a device sends or receives.

    A device receives one message for each piece that it lacks; the requests for a piece are dealt evenly among its
    holders.

    >>> from reshard.types import Mesh
    >>> mesh = Mesh(x=4)
    >>> count_rounds(Layout.parse("f32[{x}3/10]", mesh), Layout.parse("f32[10]", mesh))
    3
    """
    stats = [_group_stats(group) for group in dim_groups(operand, result)]
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
    stats = [_group_stats(group) for group in dim_groups(operand, result)]
    largest = [s.largest for s in stats]
    return max(
        (s.largest_sent * math.prod(largest[:at] + largest[at + 1 :]) for at, s in enumerate(stats)),
        default=0,
    )


def shortest_run(operand: Layout, result: Layout) -> int:
    """The fewest elements that a message takes from one tile to the other as neighbours in both."""
    return shortest_shared(operand.dims[-1], result.dims[-1]) if operand.dims else 1


def _misses_all(group: DimGroup) -> bool:
    """Whether some device's target tile is full and has no element in common with its source tile.

    Devices are visited in steps of about 0.618 of their number. If many are like this, one is met early.
    """
    most = math.prod(fullest_piece(dim) for dim in group.after)
    if (stats := _closed_stats(group)) is not None:
        return any(most and tile.needed == most and not tile.held for tile in stats.tiles)
    step = next(s for s in itertools.count(int(group.size * 0.618) | 1) if math.gcd(s, group.size) == 1)
    devices = _pieces_of_devices(group)
    return any(_shares_nothing(group, *devices[at * step % group.size], most) for at in range(group.size))


def _shares_nothing(group: DimGroup, home: Pieces, wanted: Pieces, most: int) -> bool:
    """Whether a device needs `most` elements and holds none of them."""
    tile = _tile_shares(group, wanted)
    if not most or math.prod(dim.needed for dim in tile) < most:
        return False
    return any(p not in dim.by_source for p, dim in zip(home, tile, strict=False))


@lru_cache(maxsize=1024)
def _group_stats(group: DimGroup) -> ExchangeStats:
    """The figures of a group, in closed form where there is one, else counted over its devices."""
    return _closed_stats(group) or _counted_stats(group)


@lru_cache(maxsize=1024)
def _closed_stats(group: DimGroup) -> ExchangeStats | None:
    return _one_sided_stats(group) or contiguous_stats(group)


def _one_sided_stats(group: DimGroup) -> ExchangeStats | None:
    """The figures of a single dim that is whole on every device before or after; None for any other group.

    Each device has the other side's piece of its own number, so the sizes of the pieces say everything:

        {x}3/10 -> 10 on <x=4>      pieces of 3, 3, 3, 1    all need 10, hold 3 or 1; each piece has 4 requests
        10 -> {x}3/10 on <x=4>                              all hold what they need; the whole has 4 requests
    """
    if len(group.after) != 1 or group.factors is None:
        return None
    (before,), (after,) = group.before, group.after
    gathered, devices = not _is_held(after), group.size
    if not gathered and _is_held(before):
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


def _is_held(dim: Dim) -> bool:
    return any(digit.axis is not None for digit in dim.digits)


def _counted_stats(group: DimGroup) -> ExchangeStats:
    devices = Counter(_pieces_of_devices(group))
    tiles = {wanted: _tile_shares(group, wanted) for wanted in {wanted for _, wanted in devices}}
    largest = {wanted: math.prod(dim.largest for dim in tile) for wanted, tile in tiles.items()}
    sent = 0
    for home, wanted in devices:
        if largest[wanted] > sent:
            sent = max(sent, largest_sent(home, tiles[wanted]))
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
def dim_shares(source: Dim, target: Dim) -> tuple[DimShares, ...]:
    return tuple(_summarize_shares(by_source) for by_source in shared_elements(source, target))


def _summarize_shares(by_source: Mapping[int, int]) -> DimShares:
    if not by_source:
        return DimShares(by_source, 0, 0, -1, 0)
    other, largest = (0, *sorted(by_source.values()))[-2:]
    return DimShares(by_source, sum(by_source.values()), largest, max(by_source, key=by_source.__getitem__), other)


def _tile_shares(group: DimGroup, wanted: Pieces) -> tuple[DimShares, ...]:
    """The shares of every dim of a target tile; what the tile shares with a source tile is their product."""
    return tuple(dim_shares(s, t)[q] for s, t, q in zip(group.before, group.after, wanted, strict=False))


def _tile_kind(home: Pieces, tile: tuple[DimShares, ...]) -> TileKind:
    held = [dim.by_source.get(p, 0) for p, dim in zip(home, tile, strict=False)]
    needed, pieces = math.prod(dim.needed for dim in tile), math.prod(len(dim.by_source) for dim in tile)
    return TileKind(needed, math.prod(held), pieces, int(all(held)))


def largest_sent(home: Pieces, tile: tuple[DimShares, ...]) -> int:
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
    requests = _count_requests(group, wants)
    return frozenset(PieceKind(count, own[source], holders[source]) for source, count in requests.items())


def _count_requests(group: DimGroup, wants: Counter[Pieces]) -> Counter[Pieces]:
    """How many devices need part of each source tile, from how many want each target tile.

    Target pieces are replaced by the source pieces that they overlap dim by dim. The dims of fewest overlaps come
    first, since there many tiles become one.
    """
    dims = [dim_shares(s, t) for s, t in zip(group.before, group.after, strict=True)]
    if len(dims) == 1 and not group.partial:
        return _count_requests_of_dim(dims[0], wants)
    overlaps = [sum(len(dim.by_source) for dim in of) / max(1, len(of)) for of in dims]
    requests = wants
    for at in sorted(range(len(dims)), key=overlaps.__getitem__):
        before, requests = requests, Counter[Pieces]()
        for pieces, count in before.items():
            head, tail = pieces[:at], pieces[at + 1 :]
            for p in dims[at][pieces[at]].by_source:
                requests[(*head, p, *tail)] += count
    return requests


def _count_requests_of_dim(dim: Sequence[DimShares], wants: Mapping[Pieces, int]) -> Counter[Pieces]:
    """The same for a single dim, whose target pieces are grouped by the number of devices that want them."""
    by_count: dict[int, list[Mapping[int, int]]] = {}
    for (q,), count in wants.items():
        by_count.setdefault(count, []).append(dim[q].by_source)
    requests: Counter[Pieces] = Counter()
    for count, by in by_count.items():
        for p, times in Counter(itertools.chain.from_iterable(by)).items():
            requests[p,] += times * count
    return requests


def _pieces_of_devices(group: DimGroup) -> list[tuple[Pieces, Pieces]]:
    """The pieces that each device of a group holds before, and after."""
    old, new = group.meshes
    summand = [group.along([axis], old) for axis in group.partial]
    home, wanted = group.pieces(group.before, old), group.pieces(group.after, new)
    if (
        old.device_ids != new.device_ids or old.size != new.size
    ):  # Then all devices are one group, in the order of `old`.
        order = [new.position(device) for device in old.devices]
        wanted = [[numbers[at] for at in order] for numbers in wanted]
    return list(zip(_zip_columns(group, [*home, *summand]), _zip_columns(group, [*wanted, *summand]), strict=True))


def _zip_columns(group: DimGroup, columns: Sequence[Sequence[int]]) -> list[Pieces]:
    return list(zip(*columns, strict=True)) if columns else [()] * group.size


# The figures of a dim in contiguous pieces before and after, in closed form.
#
#     {x}{y}4/n -> {y}{x}4/n     pieces of 4 indices on both sides; on <x=1000, y=1000>, a million of each
#
# Piece p of the source starts at p a, piece q of the target at q b. They overlap where -a < p a - q b < b, and how many
# pieces a full one overlaps repeats itself after a / gcd(a, b) pieces. A device's p and q are sums over its
# coordinates, so p a - q b is, too: the devices that hold part of what they need are found coordinate by coordinate,
# each of which bounds the next. The time grows with the number of these devices and with the period, not with the mesh.


_MOST = 1 << 21
"""Devices that hold part of what they need are listed up to this many."""

_Owned = list[tuple[int, int]]
"""The source piece and the target piece, which overlap, of each device that holds part of what it needs."""


class _Blocks(NamedTuple):
    """Contiguous pieces of `length` indices that cover the first `size` indices, and those of `other` on the other
    side.
    """

    size: int
    length: int
    other: int

    def range(self, number: int) -> tuple[int, int]:
        """The global indices of a piece, from the first to behind the last."""
        return min(number * self.length, self.size), min((number + 1) * self.length, self.size)

    def overlapped(self, number: int) -> int:
        """How many pieces of the other side a piece overlaps."""
        low, high = self.range(number)
        return (high - 1) // self.other - low // self.other + 1 if low < high else 0

    def samples(self, pieces: int, excluded: Collection[int]) -> Iterator[int]:
        """Some pieces that are not excluded: at least one of every length and number of overlapped pieces."""
        full, period = self.size // self.length, self.other // math.gcd(self.length, self.other)
        for first in range(min(full, period)):
            number = next((n for n in range(first, full, period) if n not in excluded), None)
            if number is not None:
                yield number
        if full < pieces and full not in excluded:  # The piece that the end cuts, or the first empty one.
            yield full
        if full + 1 < pieces:
            yield pieces - 1


def contiguous_stats(group: DimGroup) -> ExchangeStats | None:
    """The figures of a group of one dim in contiguous pieces on both sides; None for any other group."""
    if len(group.after) != 1 or group.factors is None or not group.after[0].size:
        return None
    (before,), (after,) = group.before, group.after
    a, b = contiguous_extent(before), contiguous_extent(after)
    if a is None or b is None:
        return None
    # What each coordinate of the group adds to the numbers of a device's pieces: (size, in source, in target).
    old, new = group.meshes
    factors = group.factors or ()
    owned = _list_owned(
        [(size, _piece_weight(before, old, low), _piece_weight(after, new, low)) for low, size in factors],
        a,
        b,
        after.size,
    )
    if owned is None:
        return None
    source, target = _Blocks(after.size, a, b), _Blocks(after.size, b, a)
    sources, targets = before.padded // a, after.padded // b
    wants, holders = group.size // targets, group.size // sources
    pieces = _contiguous_kinds(source, sources, Counter(p for p, _ in owned), wants, holders)
    largest = min(a, b, after.size)
    # Devices that want one piece differ in what they hold: where there are several, each piece is sent to one of them.
    sent = largest if wants > 1 else _largest_shared(source, target, frozenset(owned))
    return ExchangeStats(_tile_kinds(source, target, targets, owned, wants), pieces, largest, sent)


def _piece_weight(dim: Dim, mesh: Mesh, at: int) -> int:
    """What one step of the position along a stride adds to the number of the piece of a dim."""
    place = 1
    for radix, axis in reversed(dim.digits):
        if axis is not None:
            low, high = mesh.span(axis)
            if low <= at < high:
                return place * (at // low)
            place *= radix
    return 0


def _list_owned(weights: Sequence[tuple[int, int, int]], a: int, b: int, size: int) -> _Owned | None:
    """The devices that hold part of what they need; None if there are too many to list.

    Coordinates are chosen one after the other, those first that move the pieces farthest apart: the values of one that
    the others can still bring together are a range.
    """
    order = sorted(weights, key=lambda weight: -abs(weight[1] * a - weight[2] * b))
    apart = [wp * a - wq * b for _, wp, wq in order]
    low, high = 1 - a, b - 1
    for (radix, _, _), step in zip(order, apart, strict=True):
        low, high = low - max(step, 0) * (radix - 1), high - min(step, 0) * (radix - 1)
    pairs: _Owned = [(0, 0)]
    for (radix, wp, wq), step in zip(order, apart, strict=True):
        low, high = low + max(step, 0) * (radix - 1), high + min(step, 0) * (radix - 1)
        chosen: _Owned = []
        for p, q in pairs:
            for value in _values_in_reach(p * a - q * b, step, radix, low, high):
                chosen.append((p + value * wp, q + value * wq))
            if len(chosen) > _MOST:
                return None
        pairs = [(p, q) for p, q in chosen if p * a < size and q * b < size]
    return pairs


def _values_in_reach(start: int, step: int, radix: int, low: int, high: int) -> range:
    """The values of a coordinate, below `radix`, for which `start` plus `step` times the value is in a range."""
    if not step:
        return range(radix) if low <= start <= high else range(0)
    if step < 0:
        start, step, low, high = -start, -step, -high, -low
    return range(max(0, -((start - low) // step)), min(radix, (high - start) // step + 1))


def _tile_kinds(source: _Blocks, target: _Blocks, pieces: int, owned: _Owned, wants: int) -> frozenset[TileKind]:
    kinds: set[TileKind] = set()
    for p, q in owned:
        low, high = target.range(q)
        kinds.add(TileKind(high - low, _count_shared(source, target, p, q), target.overlapped(q), 1))
    by_target = Counter(q for _, q in owned)
    for q in target.samples(pieces, {q for q, count in by_target.items() if count == wants}):
        low, high = target.range(q)
        kinds.add(TileKind(high - low, 0, target.overlapped(q), 0))
    return frozenset(kinds)


def _contiguous_kinds(
    source: _Blocks, pieces: int, own: Counter[int], wants: int, holders: int
) -> frozenset[PieceKind]:
    kinds = {PieceKind(wants * source.overlapped(p), count, holders) for p, count in own.items()}
    kinds |= {PieceKind(wants * source.overlapped(p), 0, holders) for p in source.samples(pieces, own)}
    return frozenset(kind for kind in kinds if kind.requests)


def _count_shared(source: _Blocks, target: _Blocks, p: int, q: int) -> int:
    (low, high), (start, end) = source.range(p), target.range(q)
    return min(high, end) - max(low, start)


def _largest_shared(source: _Blocks, target: _Blocks, owned: frozenset[tuple[int, int]]) -> int:
    """The most elements that two pieces share that are not of one device."""
    most, at = 0, 0
    best = min(source.length, target.length)
    while at < source.size and most < best:
        p, q = at // source.length, at // target.length
        if (p, q) not in owned:
            most = max(most, _count_shared(source, target, p, q))
        at = min((p + 1) * source.length, (q + 1) * target.length)
    return most


# Dims of an exchange in independent groups, and the figures that a group has.
#
# Two dims are independent if they use different device coordinates: then every combination of their pieces occurs, and
# a device's share of the array is the product of its shares of the dims. For example f32[{x}3/10, {y}5] -> f32[10, 10]
# on <x=4, y=2>: the two groups are dim 0 with the 4 coordinates along x, and dim 1 with the 2 along y.


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
    for spans, members in _join_overlapping([_spans_of_dims(operand.mesh, pair) for pair in dims]):
        ends = sorted({end for span in spans for end in span})
        if not is_chain(ends):
            return [everything]
        factors = tuple(
            (low, high // low) for low, high in itertools.pairwise(ends) if _spans_overlap([(low, high)], spans)
        )
        before, after = zip(*(dims[at] for at in members), strict=True)
        groups.append(DimGroup(before, after, meshes, (), factors[::-1]))
    return groups


def _spans_of_dims(mesh: Mesh, dims: Sequence[Dim]) -> list[Span]:
    """The spans of the sub-axes that hold digits of these dims."""
    return [mesh.span(digit.axis) for dim in dims for digit in dim.digits if digit.axis is not None]


def _join_overlapping(spans: list[list[Span]]) -> list[tuple[list[Span], list[int]]]:
    """Dims, each with its spans, joined into groups until no two groups overlap.

    Every join leaves one group less, so the loop ends.
    """
    groups = [(own, [at]) for at, own in enumerate(spans)]
    at = 0
    while at < len(groups):
        mine = groups[at][0]
        other = next((o for o in range(at + 1, len(groups)) if _spans_overlap(mine, groups[o][0])), None)
        if other is None:
            at += 1
            continue
        theirs, members = groups.pop(other)
        groups[at] = (mine + theirs, groups[at][1] + members)
    return groups


def _spans_overlap(a: list[Span], b: list[Span]) -> bool:
    return any(low < end and start < high for low, high in a for start, end in b)


# What devices of two sets keep, and how much there is of every tile: lists over positions, one number a device.
#
#     f32[{x}2] on <x=2>, devices 0 and 1   ->   f32[{d}1] on <d=4>, devices 0 to 3
#
#     device                      0    1    2    3
#     elements of target tile     1    1    1    1
#     of these in source tile     1    0    -    -     device 1 holds 2-3 and needs 1
#
# A list is made dim by dim for all devices at once, so that a million of them take seconds.


@lru_cache(maxsize=64)
def tile_elements(layout: Layout) -> Sequence[int]:
    """The elements of the tile at each position, without padding.

    >>> from reshard.types.mesh import Mesh
    >>> tile_elements(Layout.parse("f32[{x}3/5, {y}2]", Mesh(x=2, y=2)))
    [6, 6, 4, 4]
    """
    extents = ((piece_extents(dim), column) for dim, column in zip(layout.dims, piece_columns(layout), strict=True))
    return _multiply_columns(([of[number] for number in column] for of, column in extents), layout.mesh.size)


@lru_cache(maxsize=64)
def count_kept(source: Layout, target: Layout) -> Mapping[int, int]:
    """The elements of its target tile that each device holds already; only devices that hold some are listed.

    >>> from reshard.types.mesh import Mesh
    >>> dict(count_kept(Layout.parse("f32[{x}2]", Mesh(x=2)), Layout.parse("f32[{d}1]", Mesh(d=4))))
    {0: 1}
    """
    if disjoint(source.mesh, target.mesh):
        return {}
    devices = _devices_of_both(source, target)
    columns = zip(
        source.dims,
        target.dims,
        _columns_of_devices(source, devices),
        _columns_of_devices(target, devices),
        strict=True,
    )
    counts = _multiply_columns((_shared_elements(*each) for each in columns), len(devices))
    return {device: count for device, count in zip(devices, counts, strict=True) if count}


def count_lacked(source: Layout, target: Layout) -> dict[int, int]:
    """The elements of its target tile that each device does not hold already.

    >>> from reshard.types.mesh import Mesh
    >>> count_lacked(Layout.parse("f32[{x}8]", Mesh(x=2)), Layout.parse("f32[16]", Mesh(x=3)))
    {0: 8, 1: 8, 2: 16}
    """
    own = count_kept(source, target)
    each = zip(target.mesh.devices, tile_elements(target), strict=True)
    return {device: size - own.get(device, 0) for device, size in each}


class Overlaps(NamedTuple):
    """How many target pieces each source piece of a dim overlaps, the other way round, and the largest share of two."""

    of_source: Sequence[int]
    of_target: Sequence[int]
    largest: int


@lru_cache(maxsize=64)
def count_overlaps(source: Dim, target: Dim) -> Overlaps:
    """Which pieces of a dim share elements, counted.

    >>> from reshard.types.mesh import Mesh
    >>> (one,), (other,) = (Layout.parse(text, Mesh(x=2, y=3)).dims for text in ("f32[{x}3/5]", "f32[{y}2/5]"))
    >>> count_overlaps(one, other)
    Overlaps(of_source=[2, 2], of_target=[1, 2, 1], largest=2)
    """
    a, b = contiguous_extent(source), contiguous_extent(target)
    if a is not None and b is not None and source.size:
        largest = _largest_shared(_Blocks(source.size, a, b), _Blocks(source.size, b, a), frozenset())
        return Overlaps(_count_overlapped(source, a, b), _count_overlapped(target, b, a), largest)
    shared = shared_elements(source, target)
    back = shared_elements(target, source)
    most = max((count for by in shared for count in by.values()), default=0)
    return Overlaps([len(by) for by in back], [len(by) for by in shared], most)


def _count_overlapped(dim: Dim, own: int, other: int) -> list[int]:
    """How many pieces of `other` indices each piece of a dim of `own` indices overlaps."""
    size = dim.size
    full = min(dim.padded // own, size // own)
    counts = [(start + own - 1) // other - start // other + 1 for start in range(0, full * own, own)]
    if full < dim.padded // own:
        rest = (size - 1) // other - full * own // other + 1 if size > full * own else 0
        counts += [rest, *[0] * (dim.padded // own - full - 1)]
    return counts


def _devices_of_both(source: Layout, target: Layout) -> Sequence[int]:
    """The devices of both layouts."""
    one, other = source.mesh, target.mesh
    if one.device_ids is None and other.device_ids is None:
        return range(min(one.size, other.size))
    here = frozenset(one.devices)
    return [device for device in other.devices if device in here]


def _columns_of_devices(layout: Layout, devices: Sequence[int]) -> Iterator[Sequence[int]]:
    """For each dim, the piece of each of these devices."""
    if layout.mesh.device_ids is None and isinstance(devices, range):
        return (column[: len(devices)] for column in piece_columns(layout))
    places = [layout.mesh.position(device) for device in devices]
    return ([column[at] for at in places] for column in piece_columns(layout))


def _shared_elements(source: Dim, target: Dim, held: Iterable[int], wanted: Iterable[int]) -> list[int]:
    """The elements that each of these pieces of the source shares with the piece of the target beside it."""
    a, b, size = contiguous_extent(source), contiguous_extent(target), source.size
    pairs = zip(held, wanted, strict=True)
    if a is not None and b is not None:
        return [max(0, min(p * a + a, q * b + b, size) - max(p * a, q * b)) for p, q in pairs]
    shared = shared_elements(source, target)
    return [shared[q].get(p, 0) for p, q in pairs]


def _multiply_columns(columns: Iterable[list[int]], length: int) -> list[int]:
    """The products of numbers that stand beside each other."""
    return reduce(lambda one, other: [*map(mul, one, other)], columns, [1] * length)


# What each device lacks of its target tile: the elements that it must receive, device by device.
#
#     mesh <x=2, y=2>, f32[{x}{y}2] -> f32[{y}{x}2]
#
#     device    x=0 y=0    x=0 y=1    x=1 y=0    x=1 y=1
#     holds     0-1        2-3        4-5        6-7
#     needs     0-1        4-5        2-3        6-7
#     lacks     nothing    2          2          nothing
#
# One array's worst device is known in closed form (`rules.bounds`). The devices that are worst for one array may be the
# best for another, so the bound of several arrays needs the figures of all devices.


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
def lacked_by_device(source: Layout, target: Layout) -> ByDevice:
    """The elements of its target tile that each device of the target does not hold in its source tile.

    On meshes too large to list, the device that lacks the most stands for all of them. Neither layout is to be reduced.

    >>> mesh = Mesh(x=2, y=2)
    >>> lacked_by_device(Layout.parse("f32[{x}{y}2]", mesh), Layout.parse("f32[{y}{x}2]", mesh)).listed
    {0: 0, 1: 2, 2: 2, 3: 0}
    >>> lacked_by_device(Layout.parse("f32[{x}4]", mesh), Layout.parse("f32[8]", mesh))
    ByDevice(each=4, listed=None)
    """
    r = refine(source, target)
    if r is None or not r.exact:
        if target.mesh.size > MOST_DEVICES:
            return ByDevice(math.prod(fullest_piece(dim) for dim in target.dims))
        return ByDevice(0, count_lacked(source, target))
    tile = math.prod(target.tile_shape)
    if not r.swapped:
        return ByDevice(tile - r.common)
    if target.mesh.size > MOST_DEVICES:
        return ByDevice(tile)
    kept = {
        device: 0 if needs_other_digit(target.mesh, r, at) else r.common
        for at, device in enumerate(target.mesh.devices)
    }
    return ByDevice(0, {device: tile - held for device, held in kept.items()})


def needs_other_digit(mesh: Mesh, r: Refinement, position: int) -> bool:
    """Whether the device at a position needs another value of some digit that changes holders than it has.

    >>> mesh = Mesh(x=2, y=2)
    >>> r = refine(Layout.parse("f32[{x}{y}2]", mesh), Layout.parse("f32[{y}{x}2]", mesh))
    >>> [needs_other_digit(mesh, r, position) for position in range(4)] if r else []
    [False, True, True, False]
    """
    return any(position // (d.src or 1) % d.radix != position // (d.dst or 1) % d.radix for d in r.swapped)
