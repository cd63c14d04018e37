"""Parts of one target: whether two of them meet, and what none of them fills, found without listing elements.

    f32[(group 6) 128, 4096]     q into 0:4 of the 6, k into 4:5, v into 5:6, for each of 8 groups

    part    along dim 0: places, starts and counts         along dim 1
    q       8 of 768 from 0, then 512 from 0               4096 of 1 from 0
    k       8 of 768 from 0, then 128 from 512             4096 of 1 from 0

A target has one shape, so that its parts, whatever the atoms of their views, are products of sets of indices, dim by
dim, and two parts meet where they meet along every dim. Such a set is a numeral of which each digit has a range: this
is a `Comb`. Parts that do not meet cover the target if they have as many elements, and what they leave out first is
found by counting, too.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from functools import lru_cache
from typing import NamedTuple

from reshard.errors import PlanError
from reshard.types.view import View

_MOST_PAIRS = 1 << 21
"""Pairs of parts whose bounds meet along every dim, each of which is compared; about three seconds."""

_MOST_LEAPS = 1 << 16
"""Indices at which two combs whose digits do not nest are compared."""


class Tooth(NamedTuple):
    """The digit values from `start` on, `values` of them, each worth `place`."""

    place: int
    start: int
    values: int


Comb = tuple[Tooth, ...]
"""The indices that are a sum of one value of each digit, major first; () is the index 0 alone."""

Index = tuple[int, ...]


@lru_cache(maxsize=1024)
def find_overlap(views: tuple[View, ...]) -> tuple[int, int, Index] | None:
    """The numbers of two views that fill the same element of one target, and its index; None if no two do.

    Raises `PlanError` for parts too many, or too finely interleaved, to compare.

    >>> from reshard.types.view import Atom, Window
    >>> views = [View((Atom("d", 2, into=Window(start, 6)),), ((0,),), ((0,),)) for start in (0, 4, 3)]
    >>> find_overlap(tuple(views)), find_overlap(tuple(views[:2]))
    ((1, 2, (4,)), None)
    """
    parts = [(number, combs) for number, view in enumerate(views) if (combs := list_combs(view)) is not None]
    if len(parts) < 2:
        return None
    rank = len(parts[0][1])
    # Parts are compared in the order of their first indices along the dim where the fewest bounds meet.
    pairs = math.comb(len(parts), 2)
    order, ends = list(range(len(parts))), [len(parts)] * len(parts)
    for dim in range(rank):
        of_dim = [
            (sum(place * start for place, start, _ in comb), sum(place * (at + n - 1) for place, at, n in comb))
            for comb in (combs[dim] for _, combs in parts)
        ]
        sequence = sorted(range(len(parts)), key=of_dim.__getitem__)
        firsts = [of_dim[at][0] for at in sequence]
        stops = [bisect_left(firsts, of_dim[at][1] + 1) for at in sequence]
        meeting = sum(stop - at - 1 for at, stop in enumerate(stops))
        if meeting < pairs:
            pairs, order, ends = meeting, sequence, stops
    if pairs > _MOST_PAIRS:
        raise PlanError(
            f"{len(parts)} parts of one target are interleaved in {pairs} pairs, more than the {_MOST_PAIRS} that can "
            f"be compared; give fewer parts, larger ones, or several moves"
        )
    for turn, (at, stop) in enumerate(zip(order, ends, strict=True), 1):
        one, here = parts[at]
        for other, there in (parts[number] for number in order[turn:stop]):
            common: list[int] = []
            for both in zip(here, there, strict=True):
                if (index := find_common(*both)) is None:
                    break
                common.append(index)
            else:
                return min(one, other), max(one, other), tuple(common)
    return None


@lru_cache(maxsize=1024)
def find_uncovered(views: tuple[View, ...]) -> Index | None:
    """The first index of the target that none of these views fills, of which no two overlap; None if they fill all.

    >>> from reshard.types.view import Atom, Window
    >>> views = [View((Atom("d", 2, into=Window(start, 6)),), ((0,),), ((0,),)) for start in (0, 4)]
    >>> find_uncovered(tuple(views))
    (2,)
    """
    shape = views[0].target_shape
    parts = [combs for view in views if (combs := list_combs(view)) is not None]
    if sum(math.prod(map(_count, combs)) for combs in parts) == math.prod(shape):
        return None
    index: list[int] = []
    for dim, size in enumerate(shape):
        # No two overlap, so that all is filled below an index of this dim if as many elements are as there are.
        rest = math.prod(shape[dim + 1 :])
        each = [(combs[dim], math.prod(map(_count, combs[dim + 1 :]))) for combs in parts]
        low, high = 0, size - 1
        while low < high:
            middle = (low + high + 1) // 2
            if sum(_count_below(comb, middle) * inner for comb, inner in each) == middle * rest:
                low = middle
            else:
                high = middle - 1
        index.append(low)
        parts = [combs for combs in parts if _next_member(combs[dim], low) == low]
    return tuple(index)


@lru_cache(maxsize=8192)
def list_combs(view: View) -> tuple[Comb, ...] | None:
    """The indices that a view fills along each dim of its target; None if it fills nothing."""
    if any(atom.size == 0 for atom in view.atoms):
        return None
    combs: list[Comb] = []
    for dim in view.target:
        teeth: list[tuple[Tooth, int]] = []  # Minor first, each with its radix.
        place = 1
        for at in reversed(dim):
            atom = view.atoms[at]
            tooth, radix = Tooth(place, atom.into.start if atom.into else 0, atom.size), atom.target_size
            place *= radix
            if teeth and (teeth[-1][0].values == teeth[-1][1] or tooth.values == 1):
                # A digit of which all values are filled, and one below a single value, are one with it.
                (low, start, count), of = teeth.pop()
                whole = count == of
                merged = Tooth(low, tooth.start * of + start, tooth.values * of if whole else count)
                teeth.append((merged, of * radix))
            elif radix > 1:
                teeth.append((tooth, radix))
        combs.append(tuple(tooth for tooth, _ in reversed(teeth)))
    return tuple(combs)


def _count(comb: Comb) -> int:
    return math.prod(count for _, _, count in comb)


@lru_cache(maxsize=1 << 15)
def find_common(one: Comb, other: Comb) -> int | None:
    """The least index of two combs; None if they have none in common.

    >>> find_common((Tooth(6, 0, 4), Tooth(1, 0, 4)), (Tooth(6, 0, 4), Tooth(1, 4, 2)))
    >>> find_common((Tooth(6, 1, 3), Tooth(1, 0, 4)), (Tooth(2, 5, 9), Tooth(1, 1, 1)))
    13
    """
    if not one or not other:
        least = 0 if not one and not other else _next_member(one or other, 0)
        return 0 if least == 0 else None
    if one[0].place < other[0].place:
        one, other = other, one
    (place, start, count), (low, low_start, low_count) = one[0], other[0]
    if place == low:
        first = max(start, low_start)
        rest = find_common(one[1:], other[1:]) if first < min(start + count, low_start + low_count) else None
        return None if rest is None else first * place + rest
    if place % low:
        return _leap_to_common(one, other)
    # Each value of the larger digit is worth `inside` values of the smaller one, whose range it cuts: at its start, at
    # its end, and all alike between.
    inside = place // low
    first = max(start, low_start // inside)
    stop = min(start + count, -(-(low_start + low_count) // inside))
    for value in sorted({first, first + 1, stop - 1}):
        if first <= value < stop:
            least, most = max(low_start, value * inside), min(low_start + low_count, (value + 1) * inside)
            rest = find_common(one[1:], (Tooth(low, least - value * inside, most - least), *other[1:]))
            if rest is not None:
                return value * place + rest
    return None


def _leap_to_common(one: Comb, other: Comb) -> int | None:
    """The least index of two combs whose digits do not nest: from each index of one to the next one of the other."""
    at: int | None = 0
    for _ in range(_MOST_LEAPS):
        if (at := _next_member(one, at)) is None:
            return None
        if (there := _next_member(other, at)) is None or there == at:
            return there
        at = there
    raise PlanError(
        f"two parts of one target are interleaved by digits that do not nest, such as {one[0].place} and "
        f"{other[0].place} indices, and are compared at no more than {_MOST_LEAPS} places; give views whose atoms "
        f"divide each other"
    )


def _next_member(comb: Comb, least: int) -> int | None:
    """The first index of a comb from `least` on."""
    if not comb:
        return 0 if least <= 0 else None
    (place, start, count), rest = comb[0], comb[1:]
    value = max(start, least // place)
    for each in (value, value + 1):
        if each < start + count:
            inner = _next_member(rest, max(0, least - each * place))
            if inner is not None:
                return each * place + inner
    return None


def _count_below(comb: Comb, end: int) -> int:
    """How many indices of a comb are less than `end`."""
    if not comb:
        return int(end > 0)
    (place, start, count), rest = comb[0], comb[1:]
    value = end // place
    whole = min(max(0, value - start), count) * _count(rest)
    return whole + (_count_below(rest, end - value * place) if start <= value < start + count else 0)
