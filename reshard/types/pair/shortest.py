"""The shortest run of neighbouring indices that two pieces of a dim share, from the ends of blocks.

    15{x}5{y}3/n against 16{y}7{x}2/n       blocks of 3 and of 2 indices

    index       0  1  2  3  4  5  6  7 ...
    ends        |     |  |  |     |         runs of 2, 1, 1 and 2 in each period of 6

A run ends where a block of either side ends: at the least, the greatest common divisor of the blocks apart.
"""

from __future__ import annotations

import math
from functools import lru_cache

from reshard.types.layout import Dim
from reshard.types.pair.overlap import contiguous, levels, shares


@lru_cache(maxsize=1024)
def shortest_shared(source: Dim, target: Dim) -> int:
    """The fewest indices that are neighbours in both of two pieces which share them, 1 if there are none.

    >>> from reshard.types.layout import Layout
    >>> from reshard.types.mesh import Mesh
    >>> (before,), (after,) = (Layout.parse(text, Mesh(x=2, y=3)).dims for text in ("f32[{x}9]", "f32[{y}6]"))
    >>> shortest_shared(before, after)
    3
    """
    if not source.size:
        return 1
    small, big = sorted((levels(source)[-1].radix, levels(target)[-1].radix))
    last = max((source.size - 1) // small * small, (source.size - 1) // big * big)
    tail, inner = source.size - last, _least_gap(small, big, last)
    if contiguous(source) is not None or contiguous(target) is not None:
        return min(tail, inner)
    # Pieces that have several blocks may continue behind the end of a block, where a block of both sides ends. The
    # first run does not, nor does one between ends of one side only; where blocks differ, one of these is as short.
    together = math.lcm(small, big)
    if last < together or (small < big and (inner <= tail or last % together)):
        return min(tail, inner)
    return min(run.length for by_source in shares(source, target) for runs in by_source.values() for run in runs)


def _least_gap(small: int, big: int, last: int) -> int:
    """The least distance of two different numbers up to `last` that are multiples of either number."""
    if last >= math.lcm(small, big):
        return math.gcd(small, big)
    if last < small:
        return small
    apart = [(number % small, number) for number in range(big, last + 1, big)]
    below = min((rest for rest, _ in apart if rest), default=small)
    return min(below, small - max((rest for rest, number in apart if number - rest + small <= last), default=0))
