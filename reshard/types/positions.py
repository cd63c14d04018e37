"""The coordinates of all positions of a mesh at once."""

from __future__ import annotations

import itertools
from collections.abc import Sequence


def numbers_along(positions: int, factors: Sequence[tuple[int, int]]) -> list[int]:
    """For each position below `positions`, its coordinates along (stride, size) factors as one number, major to minor.

    Lists are repeated instead of taking each position apart: a mesh may have millions.

    >>> numbers_along(6, [(1, 3), (3, 2)])
    [0, 2, 4, 1, 3, 5]
    """
    numbers = [0] * positions
    for at, (stride, size) in enumerate(factors):
        each = range(size)
        once = each if stride == 1 else itertools.chain.from_iterable(itertools.repeat(value, stride) for value in each)
        along = [*once] * (positions // (stride * size))
        numbers = [number * size + value for number, value in zip(numbers, along, strict=True)] if at else along
    return numbers
