"""The elements of a dim that two tiles share, as runs with their places in both tiles.

    {x}3/10 against {y}5, on <x=4, y=2>

    source piece            0: 0-2   1: 3-5        2: 6-8   3: 9
    target piece            0: 0-4            1: 5-9
    shares of target 0      piece 0: 0-2, piece 1: 3-4
    shares of target 1      piece 1: 5, piece 2: 6-8, piece 3: 9

Every element lies in one piece of the source and one of the target. One sweep over the runs of both numerals finds
all shares, in time linear in the number of runs.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

from reshard.types.layout import Dim
from reshard.types.mesh import Mesh


class Run(NamedTuple):
    """`length` neighbouring elements, at local index `src` of one tile and `dst` of the other."""

    src: int
    dst: int
    length: int


Shares = dict[int, tuple[Run, ...]]
"""What one target piece shares with each source piece that it overlaps."""


def piece(dim: Dim, mesh: Mesh, position: int) -> int:
    """The number of the piece of a dim that the device at a position holds.

    >>> from reshard.types.layout import Layout
    >>> layout = Layout.parse("f32[{x}3/10]", Mesh(x=4, y=2))
    >>> [piece(layout.dims[0], layout.mesh, position) for position in range(8)]
    [0, 0, 1, 1, 2, 2, 3, 3]
    """
    number = 0
    for radix, axis in dim.digits:
        if axis is not None:
            number = number * radix + mesh.coordinate(position, axis)
    return number


@lru_cache(maxsize=256)
def shares(source: Dim, target: Dim) -> tuple[Shares, ...]:
    """For each piece of the target, the source pieces that it overlaps, with the runs in common.

    >>> from reshard.types.layout import Layout
    >>> (before,), (after,) = (Layout.parse(text, Mesh(x=2, y=3)).dims for text in ("f32[{x}3]", "f32[{y}2]"))
    >>> shares(before, after)[1]
    {0: (Run(src=2, dst=0, length=1),), 1: (Run(src=0, dst=1, length=1),)}
    """
    by_target: list[dict[int, list[Run]]] = [{} for _ in range(_pieces(target))]
    before, after = _runs(source), _runs(target)
    s, t = next(before, None), next(after, None)
    while s is not None and t is not None:
        (start, p, src, length), (begin, q, dst, extent) = s, t
        low, high = max(start, begin), min(start + length, begin + extent)
        if low < high:
            _append(by_target[q].setdefault(p, []), Run(src + low - start, dst + low - begin, high - low))
        if start + length <= begin + extent:
            s = next(before, None)
        if begin + extent <= start + length:
            t = next(after, None)
    return tuple({p: tuple(runs) for p, runs in by.items()} for by in by_target)


def fullest(dim: Dim) -> int:
    """The most elements that a piece of a dim has: those of the piece at coordinates 0.

    At other coordinates, the same local indices are larger global indices, and more of them may be padding.
    """
    return sum(run.length for run in shares(dim, dim)[0].get(0, ()))


def _append(runs: list[Run], run: Run) -> None:
    """Adds a run, merged with the last one if it continues that one in both tiles."""
    if runs and runs[-1].src + runs[-1].length == run.src and runs[-1].dst + runs[-1].length == run.dst:
        last = runs.pop()
        run = Run(last.src, last.dst, last.length + run.length)
    runs.append(run)


def _pieces(dim: Dim) -> int:
    return math.prod(radix for radix, axis in dim.digits if axis is not None)


def _runs(dim: Dim) -> Iterator[tuple[int, int, int, int]]:
    """(global start, piece, local start, length) of every run with true elements, by global start."""
    digits = list(dim.digits)
    length = digits.pop().radix if digits and digits[-1].axis is None else 1

    def walk(at: int, start: int, owner: int, offset: int) -> Iterator[tuple[int, int, int, int]]:
        if at == len(digits):
            first = start * length
            if first < dim.size:
                yield first, owner, offset * length, min(length, dim.size - first)
            return
        radix, axis = digits[at]
        for value in range(radix):
            if axis is None:
                yield from walk(at + 1, start * radix + value, owner, offset * radix + value)
            else:
                yield from walk(at + 1, start * radix + value, owner * radix + value, offset)

    return walk(0, 0, 0, 0)
