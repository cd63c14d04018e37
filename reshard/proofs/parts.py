"""Parts of one target, compared by marks: whether two of them meet, and how many elements they fill together.

    f32[6]      q into 0:4      1 1 1 1 0 0
                k into 3:5      0 0 0 1 1 0      they meet at 3

A part is the product of what it has along each dim, which is marked, index by index; two parts meet only where they do
along every dim. `geometry.cover` finds the same without listing indices, and plans rest on that; a proof does not.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from reshard.errors import UndecidedError
from reshard.types.view import View

MOST_MARKS = 1 << 26
"""Marks of parts along the dims of their targets, four bytes each, and pairs of parts that are compared."""


@lru_cache(maxsize=256)
def compare_parts(views: tuple[View, ...]) -> tuple[tuple[int, int] | None, int]:
    """The numbers of two views that fill an element both, None if no two do; and how many elements all fill then.

    Raises `UndecidedError` for parts too many to mark.

    >>> from reshard.types.view import Atom, Window
    >>> views = [View((Atom("d", 2, into=Window(start, 6)),), ((0,),), ((0,),)) for start in (0, 4, 3)]
    >>> compare_parts(tuple(views))[0], compare_parts(tuple(views[:2]))
    ((1, 2), (None, 4))
    """
    shape, count = views[0].target_shape, len(views)
    if max(count * sum(shape), count * count) > MOST_MARKS:
        raise UndecidedError(f"{count} parts of one array of {shape} are too many to mark; prove fewer at a time")
    meet, sizes = np.ones((count, count), bool), np.ones(count, object)
    for dim, size in enumerate(shape):
        marks = np.zeros((count, size), np.float32)
        for number, view in enumerate(views):
            index = np.zeros(1, np.int64)
            for atom in (view.atoms[at] for at in view.target[dim]):
                values = np.arange(atom.size) + (atom.into.start if atom.into else 0)
                index = (index[:, None] * atom.target_size + values).reshape(-1)
            marks[number, index] = 1
        sizes *= marks.sum(axis=1, dtype=np.int64)
        meet &= marks @ marks.T > 0
    pairs = np.argwhere(np.triu(meet, 1))
    overlap = (int(pairs[0][0]), int(pairs[0][1])) if len(pairs) else None
    return overlap, int(sizes.sum())
