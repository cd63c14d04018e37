"""Cutting a box into pieces of bounded size: the chunks of an exchange under a budget.

A box is cut along its major axes first, so that a piece is whole in its minor ones; `cut` lists
the pieces, `count` counts them without listing, `largest` is the biggest of them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence


def count(extents: Sequence[int], cap: int) -> int:
    """How many pieces of at most `cap` elements a box of these extents is cut into.

    >>> count((4, 6), 12), count((4, 6), 4), count((4, 6), 100)
    (2, 8, 1)
    """
    if math.prod(extents) <= cap:
        return 1
    rows, row = _rows(extents, cap)
    return -(-extents[0] // rows) if rows else extents[0] * count(row, cap)


def largest(extents: Sequence[int], cap: int) -> int:
    """Elements of the biggest piece.

    >>> largest((4, 6), 13), largest((4, 6), 4)
    (12, 3)
    """
    if math.prod(extents) <= cap:
        return math.prod(extents)
    rows, row = _rows(extents, cap)
    return _even(extents[0], rows) * math.prod(row) if rows else largest(row, cap)


def cut(extents: Sequence[int], cap: int) -> Iterator[tuple[tuple[int, int], ...]]:
    """The pieces, each as (start, extent) per axis.

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
    """How many whole rows fit into a piece, and the extents of one row."""
    row = extents[1:]
    return cap // max(1, math.prod(row)), row


def _even(extent: int, rows: int) -> int:
    """Rows per piece when the same number of pieces is made as equal as can be."""
    return -(-extent // -(-extent // rows))
