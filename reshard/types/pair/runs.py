"""Runs of neighbouring elements that two tiles share, and progressions: equal runs at even distances.

    4{x}3 against 2{x}6, on <x=2>     pieces 0 share 0-2 and 12-14: two runs of 3

    source tile   0 1 2 6 7 8 12 13 14 18 19 20       local indices 0-2 and 6-8
    target tile   0 1 2 3 4 5 12 13 14 15 16 17       local indices 0-2 and 6-8
    progression   Progression(src=0, dst=0, length=3, repeats=(Repeat(times=2, src=6, dst=6),))

Numerals repeat themselves, so a million runs are a few progressions, and what is computed from these takes no longer
for a long array than for a short one.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator
from typing import NamedTuple


class Run(NamedTuple):
    """`length` neighbouring elements, at local index `src` of one tile and `dst` of the other."""

    src: int
    dst: int
    length: int


class Repeat(NamedTuple):
    """`times` equal things, `src` local indices apart in one tile and `dst` in the other."""

    times: int
    src: int
    dst: int


class Progression(NamedTuple):
    """The run of `length` elements at `src` and `dst`, repeated by each of `repeats`, outermost first.

    >>> both = Progression(0, 0, 2, (Repeat(2, 100, 10), Repeat(3, 5, 2)))
    >>> both.elements, [(run.src, run.dst) for run in both.runs]
    (12, [(0, 0), (5, 2), (10, 4), (100, 10), (105, 12), (110, 14)])
    """

    src: int
    dst: int
    length: int
    repeats: tuple[Repeat, ...] = ()

    @property
    def times(self) -> int:
        """The number of its runs."""
        return math.prod(repeat.times for repeat in self.repeats)

    @property
    def elements(self) -> int:
        """The elements of all its runs."""
        return self.length * self.times if self.repeats else self.length

    @property
    def runs(self) -> Iterator[Run]:
        """Its runs one by one, ascending in both tiles."""
        for at in itertools.product(*(range(repeat.times) for repeat in self.repeats)):
            src = sum(n * repeat.src for n, repeat in zip(at, self.repeats, strict=True))
            dst = sum(n * repeat.dst for n, repeat in zip(at, self.repeats, strict=True))
            yield Run(self.src + src, self.dst + dst, self.length)


def append(runs: list[Progression], more: Progression) -> None:
    """Adds a progression that lies behind all others; its first run is merged with their last if it continues that.

    >>> runs = [Progression(0, 0, 2, (Repeat(3, 5, 5),))]
    >>> append(runs, Progression(12, 12, 1))
    >>> [(each.src, each.length, each.times) for each in runs]
    [(0, 2, 2), (10, 3, 1)]
    """
    if not runs:
        runs.append(more)
        return
    last = _last(runs[-1])
    if (last.src + last.length, last.dst + last.length) != (more.src, more.dst):
        runs.append(more)
        return
    earlier = _without_last(runs.pop())
    runs += [*earlier, Progression(last.src, last.dst, last.length + more.length), *_without_first(more)]


def repeated(runs: list[Progression], repeat: Repeat) -> list[Progression]:
    """The progressions of one period, repeated over many; the first run comes first in them, and the last run last.

    Where the last run of a period continues in the next, the two are merged:

    >>> repeated([Progression(0, 0, 1), Progression(3, 3, 2)], Repeat(4, 5, 5))
    [Progression(src=0, dst=0, length=1, repeats=()), \
Progression(src=3, dst=3, length=3, repeats=(Repeat(times=3, src=5, dst=5),)), \
Progression(src=18, dst=18, length=2, repeats=())]
    """
    first, last = runs[0], _last(runs[-1])
    if (last.src + last.length, last.dst + last.length) != (first.src + repeat.src, first.dst + repeat.dst):
        return [_times(each, repeat) for each in runs]
    if len(runs) == 1 and not first.repeats:
        return [Progression(first.src, first.dst, first.length * repeat.times)]
    inner = [*_without_first(first), *runs[1:]]
    inner[-1:] = _without_last(inner[-1])
    joint = Progression(last.src, last.dst, last.length + first.length)
    periods = repeat.times - 1
    end = Progression(last.src + periods * repeat.src, last.dst + periods * repeat.dst, last.length)
    start = Progression(first.src, first.dst, first.length)
    return [start, *(_times(each, repeat) for each in inner), _times(joint, repeat._replace(times=periods)), end]


def ascending(runs: Iterable[Progression]) -> list[Run]:
    """The runs of some progressions one by one, in the order of both tiles."""
    return sorted(run for each in runs for run in each.runs)


def between(runs: Iterable[Progression], low: int, high: int) -> tuple[Progression, ...]:
    """The elements number `low` to `high` of some progressions, counted in their order.

    >>> between([Progression(0, 0, 4), Progression(10, 4, 2, (Repeat(3, 5, 2),))], 3, 7)
    (Progression(src=3, dst=3, length=1, repeats=()), Progression(src=10, dst=4, length=2, repeats=()), \
Progression(src=15, dst=6, length=1, repeats=()))
    """
    parts: list[Progression] = []
    start = 0
    for each in runs:
        end = start + each.elements
        if low < end and start < high:
            parts += _between(each, max(low - start, 0), min(high - start, each.elements))
        start = end
    return tuple(parts)


def _between(each: Progression, low: int, high: int) -> Iterator[Progression]:
    """Whole repeats stay one progression; the repeats that `low` and `high` cut are split further."""
    if low >= high:
        return
    if (low, high) == (0, each.elements):
        yield each
    elif not each.repeats:
        yield Progression(each.src + low, each.dst + low, high - low)
    else:
        repeat, inner = each.repeats[0], each._replace(repeats=each.repeats[1:])
        size = inner.elements
        first, last = -(-low // size), high // size
        if first > last:  # Both cut the same repeat.
            yield from _between(_moved(inner, repeat, last), low - last * size, high - last * size)
            return
        yield from _between(_moved(inner, repeat, first - 1), low - (first - 1) * size, size)
        if first < last:
            yield _times(_moved(inner, repeat, first), repeat._replace(times=last - first))
        yield from _between(_moved(inner, repeat, last), 0, high - last * size)


def _moved(each: Progression, repeat: Repeat, number: int) -> Progression:
    return each._replace(src=each.src + number * repeat.src, dst=each.dst + number * repeat.dst)


def _times(each: Progression, repeat: Repeat) -> Progression:
    """A progression repeated; two repeats that are one are merged."""
    if repeat.times == 1:
        return each
    if each.repeats:
        times, src, dst = each.repeats[0]
        if (times * src, times * dst) == (repeat.src, repeat.dst):
            merged = Repeat(times * repeat.times, src, dst)
            return Progression(each.src, each.dst, each.length, (merged, *each.repeats[1:]))
    return Progression(each.src, each.dst, each.length, (repeat, *each.repeats))


def _last(each: Progression) -> Run:
    src, dst, length, repeats = each
    for repeat in repeats:
        src, dst = src + (repeat.times - 1) * repeat.src, dst + (repeat.times - 1) * repeat.dst
    return Run(src, dst, length)


def _without_first(each: Progression) -> list[Progression]:
    """All runs of a progression but the first one, in an order that `append` accepts."""
    rest: list[Progression] = []
    for at, (times, src, dst) in enumerate(each.repeats):
        later = Progression(each.src + src, each.dst + dst, each.length, each.repeats[at + 1 :])
        rest.insert(0, _times(later, Repeat(times - 1, src, dst)))
    return rest


def _without_last(each: Progression) -> list[Progression]:
    """All runs of a progression but the last one, in an order that `append` accepts."""
    rest: list[Progression] = []
    first_src, first_dst = each.src, each.dst
    for at, (times, src, dst) in enumerate(each.repeats):
        earlier = Progression(first_src, first_dst, each.length, each.repeats[at + 1 :])
        rest.append(_times(earlier, Repeat(times - 1, src, dst)))
        first_src, first_dst = first_src + (times - 1) * src, first_dst + (times - 1) * dst
    return rest
