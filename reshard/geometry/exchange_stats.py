"""The figures of an exchange of boxes among the same devices, computed without listing its messages.

f32[{x}3/10, {y}5] -> f32[10, 10] on <x=4, y=2> has two groups of dims that use different device coordinates
(`dim_groups`): dim 0 with the 4 coordinates along x, and dim 1 with the 2 along y. Counting goes over the 4 + 2
coordinates of the groups, not over the 4 x 2 devices, and the figures of the whole follow from the few distinct values
in each group. A single dim in contiguous pieces has a closed form (`contiguous_stats`).
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import lru_cache
from operator import mul
from typing import NamedTuple

from reshard.geometry.overlap import (
    contiguous_extent,
    fullest_piece,
    piece_sizes,
    shared_elements,
    shortest_shared,
    tally_meetings,
)
from reshard.types.dims import numbers_along
from reshard.types.layout import Dim, Layout
from reshard.types.mesh import Mesh, SubAxis, is_chain
from reshard.types.pieces import loaded_numpy

Pieces = tuple[int, ...]
"""The number of a piece of every dim of a group, then the device's coordinates along the partial sub-axes."""


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

    >>> mesh = Mesh(x=4)
    >>> fewest_received(Layout.parse("f32[{x}3/10]", mesh), Layout.parse("f32[10]", mesh))
    9
    """
    groups = dim_groups(source, target)
    for group in groups:
        # Whether some device's target tile is full and has no element in common with its source tile.
        most = math.prod(fullest_piece(dim) for dim in group.after)
        if (stats := _closed_stats(group)) is not None:
            misses_all = any(tile.needed == most and not tile.held for tile in stats.tiles)
        else:
            figures = _figures_of_devices(group)
            misses_all = (most, 0) in set(zip(figures.needed, figures.held, strict=True))
        if most and misses_all:
            return math.prod(fullest_piece(dim) for dim in target.dims)
    kinds = itertools.product(*(_group_stats(group).tiles for group in groups))
    return max(math.prod(k.needed for k in kind) - math.prod(k.held for k in kind) for kind in kinds)


@lru_cache(maxsize=1024)
def count_rounds(operand: Layout, result: Layout) -> int:
    """The largest number of messages that a device sends or receives.

    A device receives one message for each piece that it lacks; the requests for a piece are dealt evenly among its
    holders.

    >>> mesh = Mesh(x=4)
    >>> count_rounds(Layout.parse("f32[{x}3/10]", mesh), Layout.parse("f32[10]", mesh))
    3
    """
    stats = [_group_stats(group) for group in dim_groups(operand, result)]
    most = 0
    for tile in itertools.product(*(s.tiles for s in stats)):
        most = max(most, math.prod(k.pieces for k in tile) - math.prod(k.pieces_held for k in tile))
    for piece in itertools.product(*(s.pieces for s in stats)):
        requests = math.prod(k.requests for k in piece) - math.prod(k.own_requests for k in piece)
        most = max(most, -(-requests // math.prod(k.holders for k in piece)))
    return most


@lru_cache(maxsize=1024)
def largest_message(operand: Layout, result: Layout) -> int:
    """Elements of the largest message: the largest share in every group, in one of them with another device."""
    stats = [_group_stats(group) for group in dim_groups(operand, result)]
    largest = [s.largest for s in stats]
    others = (s.largest_sent * math.prod(largest[:at] + largest[at + 1 :]) for at, s in enumerate(stats))
    return max(others, default=0)


def shortest_run(operand: Layout, result: Layout) -> int:
    """The fewest elements that a message takes from one tile to the other as neighbours in both."""
    return shortest_shared(operand.dims[-1], result.dims[-1]) if operand.dims else 1


# Dims in independent groups.
#
# Two dims are independent if they use different device coordinates: then every combination of their pieces occurs, and
# a device's share of the array is the product of its shares of the dims. For example f32[{x}3/10, {y}5] -> f32[10, 10]
# on <x=4, y=2>: the two groups are dim 0 with the 4 coordinates along x, and dim 1 with the 2 along y.


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
        return [self.along([axis for _, axis in dim.digits if axis is not None], mesh) for dim in dims]

    def along(self, axes: Sequence[SubAxis], mesh: Mesh) -> list[int]:
        """The numbers along sub-axes of a mesh, major first, that each of the coordinates has."""
        factors: list[tuple[int, int]] = []
        for low, high in map(mesh.span, axes):
            # The coordinates of the group that change faster.
            below = low if self.factors is None else math.prod(size for at, size in self.factors if at < low)
            factors.append((below, high // low))
        return numbers_along(self.size, factors)


def dim_groups(operand: Layout, result: Layout) -> list[DimGroup]:
    """The independent groups of dims between two layouts; a single one where coordinates do not nest."""
    meshes = (operand.mesh, result.mesh)
    everything = DimGroup(operand.dims, result.dims, meshes, operand.partial, None)
    if operand.mesh != result.mesh or operand.mesh.device_ids is not None:
        return [everything]
    # The spans of positions that each dim uses, and the dims that use them: joined until no two groups overlap.
    dims, joined = list(zip(operand.dims, result.dims, strict=True)), list[tuple[list[tuple[int, int]], list[int]]]()
    for at, pair in enumerate(dims):
        digits = (digit for dim in pair for digit in dim.digits)
        joined.append(([operand.mesh.span(digit.axis) for digit in digits if digit.axis is not None], [at]))
    at = 0
    while at < len(joined):
        mine, members = joined[at]
        other = next((o for o in range(at + 1, len(joined)) if _spans_overlap(mine, joined[o][0])), None)
        if other is None:
            at += 1
        else:
            theirs, more = joined.pop(other)
            joined[at] = (mine + theirs, members + more)
    groups: list[DimGroup] = []
    for spans, members in joined:
        ends = sorted({end for span in spans for end in span})
        if not is_chain(ends):
            return [everything]
        between = [span for span in itertools.pairwise(ends) if _spans_overlap([span], spans)]
        before, after = zip(*(dims[at] for at in members), strict=True)
        groups.append(DimGroup(before, after, meshes, (), tuple((low, high // low) for low, high in between[::-1])))
    return groups


def _spans_overlap(a: list[tuple[int, int]], b: list[tuple[int, int]]) -> bool:
    return any(low < end and start < high for low, high in a for start, end in b)


# The figures of a group: in closed form, else counted over its devices.


@lru_cache(maxsize=1024)
def _group_stats(group: DimGroup) -> ExchangeStats:
    return _closed_stats(group) or _counted_stats(group)


@lru_cache(maxsize=1024)
def _closed_stats(group: DimGroup) -> ExchangeStats | None:
    return _one_sided_stats(group) or contiguous_stats(group) or _tabulated_stats(group)


class _DeviceFigures(NamedTuple):
    """Of each device of a group, in columns: its pieces before and after, the elements that it needs, those of them
    that it holds, the source pieces that it needs, whether it holds part of each dim, and its largest share.
    """

    home: Sequence[Pieces]
    wanted: Sequence[Pieces]
    needed: Sequence[int]
    held: Sequence[int]
    pieces: Sequence[int]
    owns: Sequence[bool]
    largest: Sequence[int]


@lru_cache(maxsize=16)
def _figures_of_devices(group: DimGroup) -> _DeviceFigures:
    """The figures of all devices, each a product over dims, dim by dim: a mesh may have thousands of devices."""
    columns = _columns_of_devices(group)
    home, wanted = (list(zip(*pieces_of, strict=True)) if pieces_of else [()] * group.size for pieces_of in columns)
    devices, dims = len(home), [dim_shares(s, t) for s, t in zip(group.before, group.after, strict=True)]
    needed, held, pieces, largest = [1] * devices, [1] * devices, [1] * devices, [1] * devices
    for of, before, after in zip(dims, *columns, strict=False):
        shares = [of[q] for q in after]
        here = [share.by_source.get(p, 0) for p, share in zip(before, shares, strict=True)]
        needed = list(map(mul, needed, [share.needed for share in shares]))
        held = list(map(mul, held, here))
        pieces = list(map(mul, pieces, [len(share.by_source) for share in shares]))
        largest = list(map(mul, largest, [share.largest for share in shares]))
    return _DeviceFigures(home, wanted, needed, held, pieces, [count > 0 for count in held], largest)


def _one_sided_stats(group: DimGroup) -> ExchangeStats | None:
    """The figures of a single dim that is whole on every device before or after; None for any other group.

    Each device has the other side's piece of its own number, so the sizes of the pieces say everything:

        {x}3/10 -> 10 on <x=4>      pieces of 3, 3, 3, 1    all need 10, hold 3 or 1; each piece has 4 requests
        10 -> {x}3/10 on <x=4>                              all hold what they need; the whole has 4 requests
    """
    if len(group.after) != 1 or group.factors is None:
        return None
    (before,), (after,) = group.before, group.after
    held_before, held_after = (any(digit.axis is not None for digit in dim.digits) for dim in (before, after))
    if held_before and held_after:
        return None
    devices, sizes = group.size, piece_sizes(after if held_after else before)
    filled, largest = devices - sizes.get(0, 0), max(sizes)
    if held_after:
        tiles = {TileKind(size, size, int(size > 0), int(size > 0)) for size in sizes}
        kind, sent = PieceKind(filled, filled, devices), 0
    else:
        tiles = {TileKind(after.size, size, filled, int(size > 0)) for size in sizes}
        kind, sent = PieceKind(devices, 1, 1), largest if devices > 1 else 0
    return ExchangeStats(frozenset(tiles), frozenset({kind} if filled else ()), largest, sent)


def _tabulated_stats(group: DimGroup) -> ExchangeStats | None:
    """The figures of a single dim in pieces of any size, device by device as `_counted_stats`, but in numpy's arrays;
    None for any other group, and without numpy.
    """
    pairs = tally_meetings(group.before[0], group.after[0]) if len(group.after) == 1 and not group.partial else None
    if pairs is None:
        return None
    np, (p, q, elements) = loaded_numpy(), pairs
    home, wanted = (np.array(column) for (column,) in _columns_of_devices(group))
    sources, targets = (
        math.prod(radix for radix, axis in dim.digits if axis) for (dim,) in (group.before, group.after)
    )
    # Each target piece: the elements, in how many source pieces, the most in one of them and which, the most elsewhere.
    ends = q.searchsorted(np.arange(1, targets + 1))
    count = np.bincount(q, minlength=targets)
    order = np.append(np.lexsort((elements, q)), 0)
    sizes, most, at, second = np.bincount(q, elements, targets), *np.zeros((3, targets), "q")
    some, several = count > 0, count > 1
    most[some], at[some] = elements[order[ends[some] - 1]], p[order[ends[some] - 1]]
    second[several] = elements[order[ends[several] - 2]]
    # Each device: what it holds of what it needs, and the most that it shares with the piece of another one.
    keys, own = q * sources + p, wanted * sources + home
    found = np.minimum(keys.searchsorted(own), len(keys) - 1)
    held = np.where(keys[found] == own, elements[found], 0)
    sent = np.where(at[wanted] == home, second[wanted], most[wanted])
    tiles = np.stack([sizes[wanted].astype("q"), held, count[wanted], held > 0])
    requests = np.bincount(p, np.bincount(wanted, minlength=targets)[q], sources)
    owners = (np.bincount(of, minlength=sources) for of in (home[held > 0], home))
    asked = np.stack([requests.astype("q"), *owners])[:, requests > 0]
    kinds = frozenset(map(TileKind, *tiles.tolist())), frozenset(map(PieceKind, *asked.tolist()))
    return ExchangeStats(*kinds, int(most.max()), int(sent.max()))


def _counted_stats(group: DimGroup) -> ExchangeStats:
    home, wanted, needed, held, pieces, owns, largest = _figures_of_devices(group)
    tiles = frozenset(map(TileKind, needed, held, pieces, map(int, owns)))
    holders, own = Counter(home), Counter(itertools.compress(home, owns))
    dims, sent = [dim_shares(s, t) for s, t in zip(group.before, group.after, strict=True)], 0
    # Those of the largest shares first, so that few are looked at: most devices have the largest one elsewhere.
    for share, before, after in sorted(set(zip(largest, home, wanted, strict=True)), reverse=True):
        if share <= sent:
            break
        sent = max(sent, largest_sent(before, tuple(of[q] for of, q in zip(dims, after, strict=False))))
    requests = _count_requests(group, Counter(wanted))
    asked = frozenset(PieceKind(count, own[source], holders[source]) for source, count in requests.items())
    return ExchangeStats(tiles, asked, max(largest, default=0), sent)


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
    """The shares of every piece of a target dim."""
    listed: list[DimShares] = []
    for by_source in shared_elements(source, target):
        if len(by_source) == 1:
            ((at, count),) = by_source.items()
            listed.append(DimShares(by_source, count, count, at, 0))
            continue
        other, largest = (0, 0, *sorted(by_source.values()))[-2:]
        at = max(by_source, key=by_source.__getitem__, default=-1)
        listed.append(DimShares(by_source, sum(by_source.values()), largest, at, other))
    return tuple(listed)


def largest_sent(home: Pieces, tile: tuple[DimShares, ...]) -> int:
    """The most elements that a target tile shares with a source tile other than `home`."""
    best = [dim.largest for dim in tile]
    if any(p != dim.at for p, dim in zip(home, tile, strict=False)):
        return math.prod(best)
    # The largest share is the device's own: the next one differs from it in one dim.
    return max((math.prod((*best[:n], dim.next, *best[n + 1 :])) for n, dim in enumerate(tile)), default=0)


def _count_requests(group: DimGroup, wants: Counter[Pieces]) -> Counter[Pieces]:
    """How many devices need part of each source tile, from how many want each target tile."""
    dims = [dim_shares(s, t) for s, t in zip(group.before, group.after, strict=True)]
    if len(dims) == 1 and not group.partial:
        # Pieces that equally many devices want are counted together.
        by_count: dict[int, list[Mapping[int, int]]] = {}
        for (q,), count in wants.items():
            by_count.setdefault(count, []).append(dims[0][q].by_source)
        requests: Counter[Pieces] = Counter()
        for count, by in by_count.items():
            for p, times in Counter(itertools.chain.from_iterable(by)).items():
                requests[p,] += times * count
        return requests
    # Target pieces are replaced by the source pieces that they overlap dim by dim. The dims of fewest overlaps come
    # first, since there many tiles become one.
    overlaps = [sum(len(dim.by_source) for dim in of) / max(1, len(of)) for of in dims]
    requests = wants
    for at in sorted(range(len(dims)), key=overlaps.__getitem__):
        before, requests = requests, Counter[Pieces]()
        for pieces, count in before.items():
            head, tail = pieces[:at], pieces[at + 1 :]
            for p in dims[at][pieces[at]].by_source:
                requests[(*head, p, *tail)] += count
    return requests


def _columns_of_devices(group: DimGroup) -> tuple[list[list[int]], list[list[int]]]:
    """The pieces that each device of a group holds before and after, by dim and partial sub-axis."""
    old, new = group.meshes
    summand = [group.along([axis], old) for axis in group.partial]
    home, wanted = group.pieces(group.before, old), group.pieces(group.after, new)
    if old.device_ids != new.device_ids or old.size != new.size:
        # Then all devices are one group, in the order of `old`.
        order = [new.position(device) for device in old.devices]
        wanted = [[numbers[at] for at in order] for numbers in wanted]
    return [*home, *summand], [*wanted, *summand]


# A dim in contiguous pieces before and after, in closed form.
#
#     {x}{y}4/n -> {y}{x}4/n     pieces of 4 indices on both sides; on <x=1000, y=1000>, a million of each
#
# Piece p of the source starts at p a, piece q of the target at q b. They overlap where -a < p a - q b < b, and how many
# pieces a full one overlaps repeats itself after a / gcd(a, b) pieces. A device's p and q are sums over its
# coordinates, so p a - q b is, too: the devices that hold part of what they need are found coordinate by coordinate,
# each of which bounds the next. The time grows with the number of these devices and with the period, not with the mesh.


_MOST = 1 << 21
"""Devices that hold part of what they need are listed up to this many."""


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

    def shared(self, p: int, q: int) -> int:
        """How many indices a piece shares with piece `q` of the other side, which it overlaps."""
        low, high = self.range(p)
        return min(high, (q + 1) * self.other) - max(low, q * self.other)

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
    (before,), (after,), (old, new) = group.before, group.after, group.meshes
    a, b = contiguous_extent(before), contiguous_extent(after)
    if a is None or b is None:
        return None
    # What each coordinate of the group adds to the numbers of a device's pieces: (size, in source, in target).
    weights = [(n, _piece_weight(before, old, low), _piece_weight(after, new, low)) for low, n in group.factors]
    owned = _list_owned(weights, a, b, after.size)
    if owned is None:
        return None
    source, target = _Blocks(after.size, a, b), _Blocks(after.size, b, a)
    sources, targets = before.padded // a, after.padded // b
    wants, holders = group.size // targets, group.size // sources
    tiles: set[TileKind] = set()
    for p, q in owned:
        low, high = target.range(q)
        tiles.add(TileKind(high - low, source.shared(p, q), target.overlapped(q), 1))
    by_target = Counter(q for _, q in owned)
    for q in target.samples(targets, {q for q, count in by_target.items() if count == wants}):
        low, high = target.range(q)
        tiles.add(TileKind(high - low, 0, target.overlapped(q), 0))
    own = Counter(p for p, _ in owned)
    asked = [PieceKind(wants * source.overlapped(p), count, holders) for p, count in own.items()]
    asked += [PieceKind(wants * source.overlapped(p), 0, holders) for p in source.samples(sources, own)]
    largest = min(a, b, after.size)
    # Devices that want one piece differ in what they hold: where there are several, each piece is sent to one of them.
    sent = largest if wants > 1 else _largest_shared(source, target, frozenset(owned))
    return ExchangeStats(frozenset(tiles), frozenset(kind for kind in asked if kind.requests), largest, sent)


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


def _list_owned(weights: Sequence[tuple[int, int, int]], a: int, b: int, size: int) -> list[tuple[int, int]] | None:
    """The source piece and the target piece, which overlap, of each device that holds part of what it needs; None if
    these devices are too many to list.

    Coordinates are chosen one after the other, those first that move the pieces farthest apart: the values of one that
    the others can still bring together are a range.
    """
    order = sorted(weights, key=lambda weight: -abs(weight[1] * a - weight[2] * b))
    apart = [wp * a - wq * b for _, wp, wq in order]
    low, high = 1 - a, b - 1
    for (radix, _, _), step in zip(order, apart, strict=True):
        low, high = low - max(step, 0) * (radix - 1), high - min(step, 0) * (radix - 1)
    pairs = [(0, 0)]
    for (radix, wp, wq), step in zip(order, apart, strict=True):
        low, high = low + max(step, 0) * (radix - 1), high + min(step, 0) * (radix - 1)
        chosen: list[tuple[int, int]] = []
        for p, q in pairs:
            # The values that leave p a - q b between `low` and `high`.
            start = p * a - q * b
            if not step:
                values = range(radix) if low <= start <= high else range(0)
            else:
                least, most = (start - low, high - start) if step > 0 else (high - start, start - low)
                values = range(max(0, -(least // abs(step))), min(radix, most // abs(step) + 1))
            chosen += [(p + value * wp, q + value * wq) for value in values]
            if len(chosen) > _MOST:
                return None
        pairs = [(p, q) for p, q in chosen if p * a < size and q * b < size]
    return pairs


def _largest_shared(source: _Blocks, target: _Blocks, owned: frozenset[tuple[int, int]]) -> int:
    """The most elements that two pieces share that are not of one device."""
    most, at = 0, 0
    best = min(source.length, target.length)
    while at < source.size and most < best:
        p, q = at // source.length, at // target.length
        if (p, q) not in owned:
            most = max(most, source.shared(p, q))
        at = min((p + 1) * source.length, (q + 1) * target.length)
    return most


class Overlaps(NamedTuple):
    """How many target pieces each source piece of a dim overlaps, the other way round, and the largest share of two."""

    of_source: Sequence[int]
    of_target: Sequence[int]
    largest: int


@lru_cache(maxsize=64)
def count_overlaps(source: Dim, target: Dim) -> Overlaps:
    """Which pieces of a dim share elements, counted."""
    a, b = contiguous_extent(source), contiguous_extent(target)
    if a is not None and b is not None and source.size:
        largest = _largest_shared(_Blocks(source.size, a, b), _Blocks(source.size, b, a), frozenset())
        return Overlaps(_count_overlapped(source, a, b), _count_overlapped(target, b, a), largest)
    shared = shared_elements(source, target)
    of_source = Counter(itertools.chain.from_iterable(shared))
    pieces = math.prod(radix for radix, axis in source.digits if axis is not None)
    most = max((count for by in shared for count in by.values()), default=0)
    return Overlaps([of_source[p] for p in range(pieces)], [len(by) for by in shared], most)


def _count_overlapped(dim: Dim, own: int, other: int) -> list[int]:
    """How many pieces of `other` indices each piece of a dim of `own` indices overlaps."""
    size = dim.size
    full = min(dim.padded // own, size // own)
    counts = [(start + own - 1) // other - start // other + 1 for start in range(0, full * own, own)]
    if full < dim.padded // own:
        rest = (size - 1) // other - full * own // other + 1 if size > full * own else 0
        counts += [rest, *[0] * (dim.padded // own - full - 1)]
    return counts
