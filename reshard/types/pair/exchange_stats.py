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
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple

from reshard.types.layout import Dim, Layout
from reshard.types.pair.contiguous_stats import contiguous_stats
from reshard.types.pair.dim_groups import DimGroup, ExchangeStats, PieceKind, TileKind, dim_groups
from reshard.types.pair.overlap import fullest, piece_sizes
from reshard.types.pair.shared import shared_elements
from reshard.types.pair.shortest import shortest_shared

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
    return shortest_shared(operand.dims[-1], result.dims[-1]) if operand.dims else 1


def _misses_all(group: DimGroup) -> bool:
    """Whether some device's target tile is full and has no element in common with its source tile.

    Devices are visited in steps of about 0.618 of their number. If many are like this, one is met early.
    """
    most = math.prod(fullest(dim) for dim in group.after)
    if (stats := _closed(group)) is not None:
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
    return _closed(group) or _counted(group)


@lru_cache(maxsize=1024)
def _closed(group: DimGroup) -> ExchangeStats | None:
    return _one_sided(group) or contiguous_stats(group)


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
    return tuple(_of_one(by_source) for by_source in shared_elements(source, target))


def _of_one(by_source: Mapping[int, int]) -> DimShares:
    if not by_source:
        return DimShares(by_source, 0, 0, -1, 0)
    other, largest = (0, *sorted(by_source.values()))[-2:]
    return DimShares(by_source, sum(by_source.values()), largest, max(by_source, key=by_source.__getitem__), other)


def _tile(group: DimGroup, wanted: Pieces) -> tuple[DimShares, ...]:
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
    requests = _requests(group, wants)
    return frozenset(PieceKind(count, own[source], holders[source]) for source, count in requests.items())


def _requests(group: DimGroup, wants: Counter[Pieces]) -> Counter[Pieces]:
    """How many devices need part of each source tile, from how many want each target tile.

    Target pieces are replaced by the source pieces that they overlap dim by dim. The dims of fewest overlaps come
    first, since there many tiles become one.
    """
    dims = [dim_shares(s, t) for s, t in zip(group.before, group.after, strict=True)]
    if len(dims) == 1 and not group.partial:
        return _requests_of_one(dims[0], wants)
    overlaps = [sum(len(dim.by_source) for dim in of) / max(1, len(of)) for of in dims]
    requests = wants
    for at in sorted(range(len(dims)), key=overlaps.__getitem__):
        before, requests = requests, Counter[Pieces]()
        for pieces, count in before.items():
            head, tail = pieces[:at], pieces[at + 1 :]
            for p in dims[at][pieces[at]].by_source:
                requests[(*head, p, *tail)] += count
    return requests


def _requests_of_one(dim: Sequence[DimShares], wants: Mapping[Pieces, int]) -> Counter[Pieces]:
    """The same for a single dim, whose target pieces are grouped by the number of devices that want them."""
    by_count: dict[int, list[Mapping[int, int]]] = {}
    for (q,), count in wants.items():
        by_count.setdefault(count, []).append(dim[q].by_source)
    requests: Counter[Pieces] = Counter()
    for count, by in by_count.items():
        for p, times in Counter(itertools.chain.from_iterable(by)).items():
            requests[p,] += times * count
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
