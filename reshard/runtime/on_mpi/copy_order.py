"""The order of several strided copies: part by part along one tile, so that its gaps are filled while they are near.

A copy that takes every other kilobyte of a tile has the processor fetch the gaps too, and one that writes so has it
fetch what others overwrite later. Where the copies that lie in one another's gaps take turns, part by part of
a core's cache, each line is fetched once: 512^3 floats in pencils take 1.2 times a plain copy instead of 1.6, with
eight ranks 1.3 instead of 2.1; blocks of 64 x 64 doubles 1.2 instead of 1.6.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from types import EllipsisType

import numpy as np

from reshard.runtime.on_mpi.strided_copy import Array, blocked, copy, widened
from reshard.runtime.on_mpi.wire.chunks import Place
from reshard.types.pair import pieces

_PART = 512 << 10  # Bytes of a part: with the gaps beside it, about a core's cache; half of it takes 2% longer.
NEAR = 16 << 10  # Bytes of a run from which on its gaps cost little.

Index = tuple[slice | EllipsisType, ...]
Order = tuple[tuple[int, Index], ...]
"""Copies by number, and which part of each is next."""


def in_order(places: Sequence[Place], shape: Sequence[int], itemsize: int) -> Order:
    """Places of a C-ordered tile in the order of their memory, those of short runs in parts.

    >>> halves = [Place((0, at), ((0, 1), (1, 1)), (4096, 32)) for at in (0, 32)]
    >>> [number for number, _ in in_order(halves, (4096, 64), 8)]
    [0, 1, 0, 1]
    """
    found: list[tuple[int, int, Index]] = []
    for number, place in enumerate(places):
        whole = [(0, extent) for extent in place.extents]
        cut = len(places) > 1 and _run(place, shape) * itemsize < NEAR
        for spans in pieces.cut(place.extents, max(1, _PART // itemsize)) if cut else [whole]:
            found.append((_offset(place.part(spans).start, shape), number, _slices(spans, place.extents)))
    return tuple((number, part) for _, number, part in sorted(found, key=lambda each: each[:2]))


def _offset(start: Sequence[int], shape: Sequence[int]) -> int:
    found = 0
    for at, extent in zip(start, shape, strict=True):
        found = found * extent + at
    return found


def _slices(spans: Sequence[tuple[int, int]], extents: Sequence[int]) -> Index:
    """The spans as slices, without those at the end that are whole axes."""
    found = [slice(low, low + extent) for low, extent in spans]
    while found and found[-1] == slice(0, extents[len(found) - 1]):
        found.pop()
    return (*found, ...)


def _run(place: Place, shape: Sequence[int]) -> int:
    """Elements that follow one another."""
    steps = [step * int(np.prod(shape[dim + 1 :], dtype=np.int64)) for dim, step in place.steps]
    run = 1
    for extent, step in reversed(list(zip(place.extents, steps, strict=True))):
        if extent != 1 and step != run:
            break
        run *= extent
    return run


def in_steps(views: Sequence[tuple[Array, Array]], order: Order) -> list[Callable[[], None]]:
    """What copies raw views, (target, source), in this order; where some are transposed, one after another."""
    if any(blocked(*pair) for pair in views):
        return [partial(copy, *pair) for pair in views]
    wide = [widened(*pair) for pair in views]
    return [partial(np.copyto, wide[number][0][part], wide[number][1][part]) for number, part in order]
