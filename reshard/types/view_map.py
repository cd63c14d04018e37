"""Index maps of views: pairs of row-major indices, as counts and strides, and one view after another.

    "(a b) -> b a" with a=2, b=3    source 0 1 2 3 4 5    digits (2, 3, 1) and (3, 1, 2): counts, strides in the source
                                    target 0 2 4 1 3 5    and in the target

That the views of a plan's steps, one after another, make the view that was asked for is checked on these: a plan whose
steps relabel elements in any other way cannot be built.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

MapDigit = tuple[int, int, int]
"""How many values, and what one is worth in the source's row-major index and in the target's."""


class ViewMap(NamedTuple):
    """All pairs (start + sum of v * source stride, end + sum of v * target stride) for digit values v."""

    digits: tuple[MapDigit, ...]
    start: int
    end: int


def canonical_map(digits: Iterable[MapDigit], start: int = 0, end: int = 0) -> ViewMap:
    """The map with as few digits as possible, by falling strides in the target: equal maps are equal objects.

    >>> canonical_map([(2, 3, 3), (3, 1, 1)])
    ViewMap(digits=((6, 1, 1),), start=0, end=0)
    """
    counted = [digit for digit in digits if digit[0] != 1]
    if any(count == 0 for count, _, _ in counted):
        return ViewMap(((0, 0, 0),), 0, 0)
    merged: list[MapDigit] = []
    for count, source, target in sorted(counted, key=lambda digit: -digit[2]):
        if merged and merged[-1][1:] == (count * source, count * target):
            merged[-1] = (merged[-1][0] * count, source, target)
        else:
            merged.append((count, source, target))
    return ViewMap(tuple(merged), start, end)


def after(first: ViewMap, second: ViewMap) -> ViewMap | None:
    """The map of `first` and then `second`, if the digits of one nest in those of the other; else None.

    One of the two has all indices of the array in the middle, so that they are numerals of its digits.

    >>> split, swap = canonical_map([(6, 1, 1)]), canonical_map([(2, 3, 1), (3, 1, 2)])
    >>> after(split, swap) == swap, after(swap, canonical_map([(2, 3, 3), (3, 1, 1)])) == swap
    (True, True)
    """
    if ((0, 0, 0),) in (first.digits, second.digits):
        return canonical_map([(0, 0, 0)])
    forward = _after_all(first, second)
    if forward is not None:
        return forward
    backward = _after_all(_inverse(second), _inverse(first))
    return None if backward is None else _inverse(backward)


def _inverse(view: ViewMap) -> ViewMap:
    return canonical_map(((count, target, source) for count, source, target in view.digits), view.end, view.start)


def _after_all(first: ViewMap, second: ViewMap) -> ViewMap | None:
    """The map of both, where `first` has all indices in the middle that `second` starts from."""
    indices = math.prod(count for count, _, _ in first.digits)
    if first.end or indices < _extent(first) or indices < _extent(_inverse(second)):
        return None
    digits: list[MapDigit] = []
    for count, middle, target in second.digits:
        parts = _through(first.digits, count, middle, target, second.start)
        if parts is None:
            return None
        digits += parts
    start = first.start + sum(second.start // at % count * source for count, source, at in first.digits)
    return canonical_map(digits, start, second.end)


def _extent(view: ViewMap) -> int:
    """The target's indices up to the largest that the map reaches."""
    return view.end + 1 + sum((count - 1) * target for count, _, target in view.digits)


def _through(first: Sequence[MapDigit], count: int, middle: int, target: int, start: int) -> list[MapDigit] | None:
    """A digit of the second map as digits of the source; None if its values carry from one digit to the next."""
    parts: list[MapDigit] = []
    for radix, source, place in reversed(first):
        if count == 1:
            break
        if place * radix <= middle or middle % place:
            continue
        step, room = middle // place, radix // (middle // place)
        value = start // place % radix
        if value + (count - 1) * step < radix:
            return [*parts, (count, source * step, target)]
        if radix % step or value >= step or count % room:
            return None
        parts.append((room, source * step, target))
        count, middle, target = count // room, place * radix, target * room
    return parts if count == 1 else None
