"""Boxes cut into pieces of bounded size, such as the chunks of an exchange that must fit a budget.

A box is cut along its major axes first, so that each piece is one run of a row-major copy of the box. For example
4 x 6 in pieces of at most 13 elements: two pieces of 2 x 6; of at most 4: eight of 1 x 3.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence


def count(extents: Sequence[int], cap: int) -> int:
    """The number of pieces of at most `cap` elements that a box is cut into, without listing them.

    >>> count((4, 6), 12), count((4, 6), 4), count((4, 6), 100)
    (2, 8, 1)
    """
    if math.prod(extents) <= cap:
        return 1
    rows, row = _rows(extents, cap)
    return -(-extents[0] // rows) if rows else extents[0] * count(row, cap)


def largest(extents: Sequence[int], cap: int) -> int:
    """Elements of the largest piece.

    >>> largest((4, 6), 13), largest((4, 6), 4)
    (12, 3)
    """
    if math.prod(extents) <= cap:
        return math.prod(extents)
    rows, row = _rows(extents, cap)
    return _even(extents[0], rows) * math.prod(row) if rows else largest(row, cap)


def cut(extents: Sequence[int], cap: int) -> Iterator[tuple[tuple[int, int], ...]]:
    """Lists the pieces, each as (start, extent) per axis.

    >>> list(cut((3, 2), 4))
    [((0, 2), (0, 2)), ((2, 1), (0, 2))]
    """
    if math.prod(extents) <= cap:
        yield tuple((0, extent) for extent in extents)
        return
    rows, row = _rows(extents, cap)
    if rows:
        step = _even(extents[0], rows)
        for start in range(0, extents[0], step):
            yield ((start, min(step, extents[0] - start)), *((0, extent) for extent in row))
        return
    for start in range(extents[0]):
        yield from (((start, 1), *rest) for rest in cut(row, cap))


def _rows(extents: Sequence[int], cap: int) -> tuple[int, Sequence[int]]:
    """How many whole rows fit into one piece, and the extents of a row."""
    row = extents[1:]
    return cap // max(1, math.prod(row)), row


def _even(extent: int, rows: int) -> int:
    """Rows per piece once the pieces, no more of them than needed, are made as equal as possible."""
    return -(-extent // -(-extent // rows))
