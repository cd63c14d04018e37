"""The figures of a dim in contiguous pieces before and after, in closed form.

    {x}{y}4/n -> {y}{x}4/n     pieces of 4 indices on both sides; on <x=1000, y=1000>, a million of each

Piece p of the source starts at p a, piece q of the target at q b. They overlap where -a < p a - q b < b, and how many
pieces a full one overlaps repeats itself after a / gcd(a, b) pieces. A device's p and q are sums over its coordinates,
so p a - q b is, too: the devices that hold part of what they need are found coordinate by coordinate, each of which
bounds the next. The time grows with the number of these devices and with the period, not with the mesh.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple

from reshard.types.layout import Dim
from reshard.types.mesh import Mesh
from reshard.types.pair.dim_groups import DimGroup, ExchangeStats, PieceKind, TileKind
from reshard.types.pair.overlap import contiguous

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
    a, b = contiguous(before), contiguous(after)
    if a is None or b is None:
        return None
    owned = _owned(_weights(group, before, after), a, b, after.size)
    if owned is None:
        return None
    source, target = _Blocks(after.size, a, b), _Blocks(after.size, b, a)
    sources, targets = before.padded // a, after.padded // b
    wants, holders = group.size // targets, group.size // sources
    pieces = _piece_kinds(source, sources, Counter(p for p, _ in owned), wants, holders)
    largest = min(a, b, after.size)
    # Devices that want one piece differ in what they hold: where there are several, each piece is sent to one of them.
    sent = largest if wants > 1 else _largest_sent(source, target, frozenset(owned))
    return ExchangeStats(_tile_kinds(source, target, targets, owned, wants), pieces, largest, sent)


def _weights(group: DimGroup, before: Dim, after: Dim) -> list[tuple[int, int, int]]:
    """What each coordinate of the group adds to the numbers of a device's pieces: (size, in source, in target)."""
    old, new = group.meshes
    factors = group.factors or ()
    return [(size, _weight(before, old, low), _weight(after, new, low)) for low, size in factors]


def _weight(dim: Dim, mesh: Mesh, at: int) -> int:
    """What one step of the position along a stride adds to the number of the piece of a dim."""
    place = 1
    for radix, axis in reversed(dim.digits):
        if axis is not None:
            low, high = mesh.span(axis)
            if low <= at < high:
                return place * (at // low)
            place *= radix
    return 0


def _owned(weights: Sequence[tuple[int, int, int]], a: int, b: int, size: int) -> _Owned | None:
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
            for value in _values(p * a - q * b, step, radix, low, high):
                chosen.append((p + value * wp, q + value * wq))
            if len(chosen) > _MOST:
                return None
        pairs = [(p, q) for p, q in chosen if p * a < size and q * b < size]
    return pairs


def _values(start: int, step: int, radix: int, low: int, high: int) -> range:
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
        kinds.add(TileKind(high - low, _shared(source, target, p, q), target.overlapped(q), 1))
    by_target = Counter(q for _, q in owned)
    for q in target.samples(pieces, {q for q, count in by_target.items() if count == wants}):
        low, high = target.range(q)
        kinds.add(TileKind(high - low, 0, target.overlapped(q), 0))
    return frozenset(kinds)


def _piece_kinds(source: _Blocks, pieces: int, own: Counter[int], wants: int, holders: int) -> frozenset[PieceKind]:
    kinds = {PieceKind(wants * source.overlapped(p), count, holders) for p, count in own.items()}
    kinds |= {PieceKind(wants * source.overlapped(p), 0, holders) for p in source.samples(pieces, own)}
    return frozenset(kind for kind in kinds if kind.requests)


def _shared(source: _Blocks, target: _Blocks, p: int, q: int) -> int:
    (low, high), (start, end) = source.range(p), target.range(q)
    return min(high, end) - max(low, start)


def _largest_sent(source: _Blocks, target: _Blocks, owned: frozenset[tuple[int, int]]) -> int:
    """The most elements that two pieces share that are not of one device."""
    most, at = 0, 0
    best = min(source.length, target.length)
    while at < source.size and most < best:
        p, q = at // source.length, at // target.length
        if (p, q) not in owned:
            most = max(most, _shared(source, target, p, q))
        at = min((p + 1) * source.length, (q + 1) * target.length)
    return most
