"""Very many short runs from one tile to another, such as the rows of a table of owners: taken and put by index.

    runs of 8 elements, from 0, 24, 32 to 0, 8, 16      units of 8 elements: target[[0, 1, 2]] = source[[0, 3, 4]]

A Python step for each of a thousand runs takes longer than their bytes: 5,000 rows of 64 bytes take numpy 30
microseconds by index, and 20 milliseconds as copies of their own.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from reshard.geometry.blocks import Axis, Block
from reshard.runtime.on_mpi.copies.strided_copy import NEAR, Array

MANY_BLOCKS = 64
"""Blocks from which a step for each of them is too many."""

_FEW_RUNS = 4  # Runs of a block, on average, up to which their places take less memory than the blocks themselves.
_PART = 256 << 10  # Bytes that are copied at once, and that a copy may hold beside the tiles.
_MOST_UNITS = 1 << 15  # The same for the indices of units.


def are_short_runs(blocks: Sequence[Block], itemsize: int, least: int = MANY_BLOCKS) -> bool:
    """Whether blocks are so many, so short, and of so few runs each that they are copied by index."""
    if len(blocks) < least or itemsize * sum([block.elements for block in blocks]) >= NEAR * len(blocks):
        return False
    # Thousands of blocks have the axes of a few.
    runs = 0
    for axes, times in Counter([block.axes for block in blocks]).items():
        outer, _ = split_run(axes)
        runs += times * math.prod([axis.extent for axis in outer])
    return runs <= _FEW_RUNS * len(blocks)


def split_run(axes: tuple[Axis, ...]) -> tuple[tuple[Axis, ...], int]:
    """The axes of a block without those that are one run at both ends, and the elements of this run.

    >>> split_run((Axis(3, 40, 20), Axis(2, 4, 4), Axis(4, 1, 1)))
    ((Axis(extent=3, src=40, dst=20),), 8)
    """
    run = 1
    while axes and axes[-1].src == axes[-1].dst == run:
        run *= axes[-1].extent
        axes = axes[:-1]
    return axes, run


class RunTable:
    """The runs of some blocks, as multiples of the largest unit that divides all of them, in the order of one tile."""

    def __init__(self, blocks: Sequence[Block], itemsize: int, by_source: bool) -> None:
        alike: dict[tuple[Axis, ...], list[Block]] = {}
        for block in blocks:
            alike.setdefault(block.axes, []).append(block)
        parts: list[Array] = []
        for axes, each in alike.items():
            outer, run = split_run(axes)
            starts = np.array([[block.src, block.dst] for block in each], np.int64)
            for extent, src, dst in outer:
                steps = np.arange(extent)[:, None] * np.array([src, dst])
                starts = (starts[:, None] + steps).reshape(-1, 2)
            parts.append(np.column_stack([starts, np.full(len(starts), run)]))
        runs = np.concatenate(parts or [np.empty((0, 3), np.int64)])
        runs = runs[np.argsort(runs[:, 0 if by_source else 1], kind="stable")]
        unit = max(1, int(np.gcd.reduce(runs, axis=None))) if len(runs) else 1
        self.source, self.target, self.lengths = (runs // unit).T.copy()
        self.unit = np.dtype((np.void, unit * itemsize))
        self.elements = unit
        # Parts of about so many units, in whole runs.
        ends = np.cumsum(self.lengths)
        most = max(1, min(_MOST_UNITS, _PART // self.unit.itemsize))
        cuts = np.searchsorted(ends, np.arange(most, ends[-1] if len(ends) else 0, most)).tolist()
        self.cuts: list[int] = sorted({0, *cuts, len(ends)})
        self._where: dict[int, tuple[Any, Any]] = {}

    def list_steps(self, target: Array, source: Array) -> list[Callable[[], object]]:
        """The copies between two C-ordered tiles as functions."""
        ends = [self._in_units(end) for end in (target, source)]
        return [partial(self._copy_part, *ends, slice(*pair)) for pair in itertools.pairwise(self.cuts)]

    def copy(self, target: Array, source: Array) -> None:
        """Makes them."""
        to, by = self._in_units(target), self._in_units(source)
        for pair in itertools.pairwise(self.cuts):
            self._copy_part(to, by, slice(*pair))

    def _in_units(self, tile: Array) -> Array:
        flat, odd = tile.reshape(-1), tile.size % self.elements
        return (flat[:-odd] if odd else flat).view(self.unit)

    def _copy_part(self, target: Array, source: Array, part: slice) -> None:
        where = self._where.get(part.start) or self._list_units(part)
        if len(self.cuts) == 2:  # Of few units, which a handle copies again and again.
            self._where[part.start] = where
        to, by = where
        if isinstance(to, slice) and not isinstance(by, slice):
            np.take(source, by, out=target[to], mode="clip")  # Without a copy in between, as another mode makes one.
        else:
            target[to] = source[by]

    def _list_units(self, part: slice) -> tuple[Any, Any]:
        """Where the units of some runs go, and where they are: as slices where they are neighbours."""
        lengths = self.lengths[part]
        total = int(lengths.sum())
        # For each run its units: those before it in this part are counted off from where it starts.
        single = total == len(lengths)
        before = 0 if single else np.cumsum(lengths) - lengths
        where: list[Any] = []
        for starts in (self.target[part], self.source[part]):
            first, last = int(starts[0]), int(starts[-1] + lengths[-1])
            if last - first == total and bool(np.all(starts[1:] == starts[:-1] + lengths[:-1])):
                where.append(slice(first, last))
            else:
                where.append(starts if single else np.repeat(starts - before, lengths) + np.arange(total))
        return where[0], where[1]
