"""The elements of a dim that two tiles share, as progressions of runs with their places in both tiles.

    {x}3/10 against {y}5, on <x=4, y=2>

    source piece            0: 0-2   1: 3-5        2: 6-8   3: 9
    target piece            0: 0-4            1: 5-9
    shares of target 0      piece 0: 0-2, piece 1: 3-4
    shares of target 1      piece 1: 5, piece 2: 6-8, piece 3: 9

Every element lies in one piece of the source and one of the target. Both numerals are walked down together, digit by
digit: a held digit splits a range of global indices into ranges of different pieces. Two local digits repeat what is
below them, so together they repeat themselves after the least common multiple of what one value of each covers:

    4000{x}5 against 5000{y}4, on <x=2, y=2>     periods of 10 and of 8 elements: after 40, all is as it was

One period is walked, and its runs are repeated. The time grows with the runs in a period, not with the array.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple

from reshard.types.layout import Dim
from reshard.types.mesh import Mesh
from reshard.types.pair.runs import Progression, Repeat, append, repeated

Shares = dict[int, tuple[Progression, ...]]
"""What one target piece shares with each source piece that it overlaps."""


def piece(dim: Dim, mesh: Mesh, position: int) -> int:
    """The number of the piece of a dim that the device at a position holds.

    >>> from reshard.types.layout import Layout
    >>> layout = Layout.parse("f32[{x}3/10]", Mesh(x=4, y=2))
    >>> [piece(layout.dims[0], layout.mesh, position) for position in range(8)]
    [0, 0, 1, 1, 2, 2, 3, 3]
    """
    number = 0
    for radix, axis in dim.digits:
        if axis is not None:
            number = number * radix + mesh.coordinate(position, axis)
    return number


@lru_cache(maxsize=256)
def shares(source: Dim, target: Dim) -> tuple[Shares, ...]:
    """For each piece of the target, the source pieces that it overlaps, with the runs in common.

    >>> from reshard.types.layout import Layout
    >>> (before,), (after,) = (Layout.parse(text, Mesh(x=2, y=3)).dims for text in ("f32[{x}3]", "f32[{y}2]"))
    >>> {p: [(run.src, run.dst, run.length) for run in runs] for p, runs in shares(before, after)[1].items()}
    {0: [(2, 0, 1)], 1: [(0, 1, 1)]}
    """
    by_target: tuple[Shares, ...] = tuple({} for _ in range(_pieces(target)))
    for (p, q), runs in _common(source, target, None, None).items():
        by_target[q][p] = tuple(runs)
    return by_target


@lru_cache(maxsize=64)
def shares_of(source: Dim, target: Dim, number: int) -> Shares:
    """`shares(source, target)[number]`: what one piece of the target shares, without working out the others.

    >>> from reshard.types.layout import Layout
    >>> (before,), (after,) = (Layout.parse(text, Mesh(x=2, y=3)).dims for text in ("f32[{x}3]", "f32[{y}2]"))
    >>> shares_of(before, after, 1) == shares(before, after)[1]
    True
    """
    return {p: tuple(runs) for (p, _), runs in _common(source, target, None, number).items()}


@lru_cache(maxsize=64)
def shares_from(source: Dim, target: Dim, number: int) -> Shares:
    """What one piece of the source shares with each piece of the target, without working out the others.

    >>> from reshard.types.layout import Layout
    >>> (before,), (after,) = (Layout.parse(text, Mesh(x=2, y=3)).dims for text in ("f32[{x}3]", "f32[{y}2]"))
    >>> {q: [(run.src, run.dst, run.length) for run in runs] for q, runs in shares_from(before, after, 1).items()}
    {1: [(0, 1, 1)], 2: [(1, 0, 2)]}
    """
    return {q: tuple(runs) for (_, q), runs in _common(source, target, number, None).items()}


def _common(source: Dim, target: Dim, p: int | None, q: int | None) -> _Common:
    """What the pieces of source and target share; only those of source piece `p`, or of target piece `q`, if given."""
    common: _Common = {}
    _NumeralWalk(levels(source), levels(target), p, q).down(_TOP, _TOP, 0, source.size, common)
    return common


def contiguous(dim: Dim) -> int | None:
    """How many indices a piece of a dim covers if all of its pieces are contiguous, else None.

    >>> from reshard.types.layout import Layout
    >>> [contiguous(dim) for dim in Layout.parse("f32[{x}3, 2{y}3]", Mesh(x=2, y=3)).dims]
    [3, None]
    """
    above = levels(dim)[:-1]
    return None if any(not level.held for level in above) else levels(dim)[-1].radix


def fullest(dim: Dim) -> int:
    """The most elements that a piece of a dim has.

    >>> from reshard.types.layout import Layout
    >>> fullest(Layout.parse("f32[2{x}3/10]", Mesh(x=2)).dims[0])
    6
    """
    return max(piece_sizes(dim))


@lru_cache(maxsize=256)
def piece_sizes(dim: Dim) -> Mapping[int, int]:
    """How many pieces of a dim have how many elements, from the digits: a million pieces take no longer than two.

    >>> from reshard.types.layout import Layout
    >>> dict(piece_sizes(Layout.parse("f32[{x}3/2999990]", Mesh(x=1_000_000)).dims[0]))
    {3: 999996, 2: 1, 0: 3}
    """
    return _sizes(levels(dim), dim.size)


def _sizes(levels: Sequence[Level], left: int) -> Counter[int]:
    """How many pieces of the numeral of these levels have how many of its first `left` indices.

    At most one value of a digit is cut: those before it are full, those after it are empty.
    """
    pieces = math.prod(level.radix for level in levels if level.held)
    if not levels or left == 0:
        return Counter({min(left, 1): pieces})
    level, below = levels[0], levels[1:]
    full = min(level.radix, left // level.block)
    rest = left - full * level.block if full < level.radix else 0
    if not level.held:
        return Counter({full * level.share + size: count for size, count in _sizes(below, rest).items()})
    tile = math.prod(each.radix for each in below if not each.held)
    each = pieces // level.radix
    sizes = Counter({tile: full * each})
    if full < level.radix:
        sizes += _sizes(below, rest)
        sizes[0] += (level.radix - full - 1) * each
    return +sizes


@lru_cache(maxsize=256)
def piece_extents(dim: Dim) -> Sequence[int]:
    """How many elements each piece of a dim has, by its number.

    >>> from reshard.types.layout import Layout
    >>> piece_extents(Layout.parse("f32[2{x}3/8]", Mesh(x=2)).dims[0])
    [5, 3]
    """
    return _extents(levels(dim), dim.size)


def _extents(levels: Sequence[Level], left: int) -> list[int]:
    """How many of its first `left` indices each piece of the numeral of these levels has; see `_sizes`."""
    if not levels or left == 0:
        return [min(left, 1)] * math.prod(level.radix for level in levels if level.held)
    level, below = levels[0], levels[1:]
    full = min(level.radix, left // level.block)
    rest = _extents(below, left - full * level.block if full < level.radix else 0)
    if not level.held:
        return [full * level.share + extent for extent in rest]
    tile = math.prod(each.radix for each in below if not each.held)
    after = level.radix - full - 1
    return [tile] * (full * len(rest)) + (rest + [0] * (after * len(rest)) if full < level.radix else [])


class Level(NamedTuple):
    """A digit, or neighbouring held digits as one. A value of it covers `block` global indices.

    `share` is what the value is worth in the number of the piece if the digit is held, else in local indices.
    """

    radix: int
    held: bool
    block: int
    share: int


class _Node(NamedTuple):
    """Where a walk stands: values are chosen above `level`; the rest starts at global index `start`, in tile `piece`
    at index `local`.
    """

    level: int
    start: int
    piece: int
    local: int


_TOP = _Node(0, 0, 0, 0)

_Common = dict[tuple[int, int], list[Progression]]
"""What a source and a target piece share, ascending."""


def levels(dim: Dim) -> tuple[Level, ...]:
    """The digits of a dim, major first; the last level is local and its values are single elements."""
    levels = [Level(1, False, 1, 1)]
    block, pieces, local = 1, 1, 1
    for radix, axis in reversed(dim.digits):
        if axis is None:
            level = Level(radix, False, block, local)
            local *= radix
        else:
            level = Level(radix, True, block, pieces)
            pieces *= radix
        block *= radix
        if radix == 1:
            continue
        if level.held == levels[-1].held:
            below = levels.pop()
            level = Level(below.radix * radix, below.held, below.block, below.share)
        levels.append(level)
    return tuple(reversed(levels))


class _NumeralWalk:
    """Both numerals, walked down together; only to source piece `p`, or to target piece `q`, if given."""

    def __init__(self, source: Sequence[Level], target: Sequence[Level], p: int | None, q: int | None) -> None:
        self._source, self._target, self._p, self._q = source, target, p, q
        self._leaves = len(source) - 1, len(target) - 1

    def down(self, s: _Node, t: _Node, low: int, high: int, common: _Common) -> None:
        """Adds what the rests of two numerals share of the global indices from `low` to `high`."""
        a, b = self._source[s.level], self._target[t.level]
        if a.held and not (b.held and self._q is not None):  # A given piece of the target narrows the range first.
            self._split_source(s, t, low, high, common)
        elif b.held:
            self._split_target(s, t, low, high, common)
        elif (s.level, t.level) == self._leaves:
            if low < high:
                run = Progression(s.local + low - s.start, t.local + low - t.start, high - low)
                append(common.setdefault((s.piece, t.piece), []), run)
        else:
            period = math.lcm(a.block, b.block)
            count = (high - low) // period
            if count > 1:
                self._repeat(s, t, low, Repeat(count, period // a.block * a.share, period // b.block * b.share), common)
                low += count * period
            self._split(s, t, low, high, common)

    def _repeat(self, s: _Node, t: _Node, low: int, repeat: Repeat, common: _Common) -> None:
        """Walks one period of two local digits, and adds it as often as it occurs."""
        one: _Common = {}
        period = math.lcm(self._source[s.level].block, self._target[t.level].block)
        self._split(s, t, low, low + period, one)
        for pieces, runs in one.items():
            into = common.setdefault(pieces, [])
            for run in repeated(runs, repeat):
                append(into, run)

    def _split(self, s: _Node, t: _Node, low: int, high: int, common: _Common) -> None:
        """Goes down the coarser digit, so that the finer one can repeat itself below it."""
        if self._source[s.level].block > self._target[t.level].block:
            self._split_source(s, t, low, high, common)
        else:
            self._split_target(s, t, low, high, common)

    def _split_source(self, s: _Node, t: _Node, low: int, high: int, common: _Common) -> None:
        for child, start, end in _children(self._source[s.level], s, low, high, self._p):
            self.down(child, t, start, end, common)

    def _split_target(self, s: _Node, t: _Node, low: int, high: int, common: _Common) -> None:
        for child, start, end in _children(self._target[t.level], t, low, high, self._q):
            self.down(s, child, start, end, common)


def _children(level: Level, node: _Node, low: int, high: int, wanted: int | None) -> Iterator[tuple[_Node, int, int]]:
    """The values of a digit that occur from `low` to `high`, each with the part of that range that it covers; of a held
    digit only that of the piece `wanted`, if one is.
    """
    radix, held, block, share = level
    depth, origin, number, local = node
    if held and wanted is not None:
        at = origin + wanted // share % radix * block
        low, high = max(low, at), min(high, at + block)
    value = (low - origin) // block
    while low < high:
        start = origin + value * block
        end = min(start + block, high)
        if held:
            yield _Node(depth + 1, start, number + value * share, local), low, end
        else:
            yield _Node(depth + 1, start, number, local + value * share), low, end
        low, value = end, value + 1


def _pieces(dim: Dim) -> int:
    return math.prod(radix for radix, axis in dim.digits if axis is not None)
