"""Which elements of a dim two tiles share: sorted runs, with their place in both tiles.

Every element of a dim lies in one piece p of the source and one piece q of the target. One sweep
over the runs of both numerals lists all shares (p, q), in time linear in the runs.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

from reshard.types.layout import Dim
from reshard.types.mesh import Mesh


class Run(NamedTuple):
    """`length` neighbouring elements, from local index `src` of one tile to `dst` of another."""

    src: int
    dst: int
    length: int


Shares = dict[int, tuple[Run, ...]]


def piece(dim: Dim, mesh: Mesh, position: int) -> int:
    """The number of the piece of a dim that the device at a position holds."""
    found = 0
    for radix, axis in dim.digits:
        if axis is not None:
            found = found * radix + mesh.coordinate(position, axis)
    return found


@lru_cache(maxsize=256)
def shares(source: Dim, target: Dim) -> tuple[Shares, ...]:
    """For each piece of the target, the source pieces that it overlaps, and the runs in common."""
    found: list[dict[int, list[Run]]] = [{} for _ in range(_pieces(target))]
    before, after = _runs(source), _runs(target)
    s, t = next(before, None), next(after, None)
    while s is not None and t is not None:
        (start, p, src, length), (begin, q, dst, extent) = s, t
        low, high = max(start, begin), min(start + length, begin + extent)
        if low < high:
            _append(found[q].setdefault(p, []), Run(src + low - start, dst + low - begin, high - low))
        if start + length <= begin + extent:
            s = next(before, None)
        if begin + extent <= start + length:
            t = next(after, None)
    return tuple({p: tuple(runs) for p, runs in by.items()} for by in found)


def fullest(dim: Dim) -> int:
    """The most elements of a dim that one piece has: those of the piece at coordinates zero.

    Any other coordinate puts the same local indices at larger global ones, where padding is.
    """
    return sum(run.length for run in shares(dim, dim)[0].get(0, ()))


def _append(runs: list[Run], run: Run) -> None:
    """Adds a run, joined to the last one if it goes on from there in both tiles."""
    if runs and runs[-1].src + runs[-1].length == run.src and runs[-1].dst + runs[-1].length == run.dst:
        last = runs.pop()
        run = Run(last.src, last.dst, last.length + run.length)
    runs.append(run)


def _pieces(dim: Dim) -> int:
    count = 1
    for radix, axis in dim.digits:
        count *= radix if axis is not None else 1
    return count


def _runs(dim: Dim) -> Iterator[tuple[int, int, int, int]]:
    """(global start, piece, local start, length) of every run that holds elements, by global start."""
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
