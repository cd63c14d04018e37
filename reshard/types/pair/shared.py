"""How many indices of a dim two pieces share, counted without the runs that they share.

    15{x}5{y}3/n against 16{y}7{x}2/n       blocks of 3 and of 2 indices

    index            0  1  2  3  4  5 | 6  7 ...
    source piece     0  0  0  1  1  1 | 2  2        one number a block, in a list
    target piece     0  0  1  1  2  2 | 3  3

Both lists are made by repeating shorter ones, and the pieces at each start of a block are looked up in them: a few
operations on whole lists, instead of a walk down both numerals. Where the numerals repeat themselves often, the walk
has fewer steps than there are blocks, and is taken (`overlap.shares`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache

from reshard.types.layout import Dim
from reshard.types.pair.overlap import Level, levels, shares

_FASTER = 8
"""Counting this many blocks takes about as long as one step of a walk."""


@lru_cache(maxsize=256)
def shared_elements(source: Dim, target: Dim) -> tuple[dict[int, int], ...]:
    """For each piece of the target, how many indices it shares with each source piece that it overlaps.

    >>> from reshard.types.layout import Layout
    >>> from reshard.types.mesh import Mesh
    >>> (before,), (after,) = (Layout.parse(text, Mesh(x=2, y=3)).dims for text in ("f32[{x}3]", "f32[{y}2]"))
    >>> shared_elements(before, after)
    ({0: 2}, {0: 1, 1: 1}, {1: 2})
    """
    one, other = levels(source), levels(target)
    period = _period(one, other, source.size)
    blocks = period // max(1, one[-1].radix) + period // max(1, other[-1].radix)
    if not source.size or _Steps(one, other).down(0, 0, source.size) * _FASTER < blocks:
        return tuple(
            {p: sum(run.elements for run in runs) for p, runs in by_source.items()}
            for by_source in shares(source, target)
        )
    counts: list[dict[int, int]] = [{} for _ in range(_pieces(other))]
    _count(one, other, period, source.size // period, counts)
    _count(one, other, source.size % period, 1, counts)
    return tuple(counts)


def _count(
    source: Sequence[Level], target: Sequence[Level], size: int, times: int, counts: list[dict[int, int]]
) -> None:
    """Adds the first `size` indices, which occur `times` times."""
    if not size:
        return
    a, b = source[-1].radix, target[-1].radix
    starts = sorted([*range(0, size, a), *range(b, size, b)])
    of_source, of_target = _numbers(source, -(-size // a)), _numbers(target, -(-size // b))
    sources, targets = [of_source[at // a] for at in starts], [of_target[at // b] for at in starts]
    for p, q, start, end in zip(sources, targets, starts, [*starts[1:], size], strict=True):
        if start < end:
            by_source = counts[q]
            by_source[p] = by_source.get(p, 0) + (end - start) * times


def _numbers(of: Sequence[Level], blocks: int) -> list[int]:
    """The piece that has each of the first blocks, which are as long as the last digit."""
    numbers = [0]
    for level in reversed(of[:-1]):
        values = min(level.radix, -(-blocks // len(numbers)))
        if level.held:
            numbers = [number + value * level.share for value in range(values) for number in numbers]
        else:
            numbers *= values
    return numbers[:blocks]


def _period(source: Sequence[Level], target: Sequence[Level], size: int) -> int:
    """After how many indices the pieces of both sides repeat themselves, at most `size`."""
    if source[0].held or target[0].held or len(source) == 1 or len(target) == 1:
        return max(size, 1)
    return min(math.lcm(source[0].block, target[0].block), max(size, 1))


class _Steps:
    """About how many steps `overlap.shares` takes, without taking them: as it goes down, but in one range a level."""

    def __init__(self, source: Sequence[Level], target: Sequence[Level]) -> None:
        self._source, self._target = source, target

    def down(self, s: int, t: int, size: int) -> int:
        a, b = self._source[s], self._target[t]
        if a.held or b.held:
            return self._split(s, t, size, a.held)
        if (s, t) == (len(self._source) - 1, len(self._target) - 1):
            return 1
        period, coarser = math.lcm(a.block, b.block), a.block > b.block
        if size < 2 * period:
            return self._split(s, t, size, coarser)
        rest = size % period
        return self._split(s, t, period, coarser) + (self._split(s, t, rest, coarser) if rest else 0)

    def _split(self, s: int, t: int, size: int, at_source: bool) -> int:
        block = (self._source[s] if at_source else self._target[t]).block
        return -(-size // block) * self.down(s + at_source, t + (not at_source), min(size, block))


def _pieces(of: Sequence[Level]) -> int:
    return math.prod(level.radix for level in of if level.held)
