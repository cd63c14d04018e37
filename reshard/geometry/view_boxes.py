"""Boxes of atoms: runs of neighbouring indices as boxes of digits, and what two boxes have in common.

    indices 95 to 204, digits 10 x 10 x 10    95-99 = (0, 9, 5-9), 100-199 = (1, 0-9, 0-9), 200-204 = (2, 0, 0-4)

A box has a place in a flat tile, and there a stride for each atom: inside a run, neighbouring indices are neighbours in
the tile. Boxes that go on evenly along an atom are merged, so that the rounds of a block-cyclic dim are one box.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from reshard.geometry import pieces
from reshard.geometry.overlap import shares
from reshard.types.layout import Digit, Dim


class StridedBox(NamedTuple):
    """Elements by atoms: their first place in both flat tiles, and the extents and strides of the atoms there."""

    src: int
    dst: int
    extents: tuple[int, ...]
    src_strides: tuple[int, ...]
    dst_strides: tuple[int, ...]

    @property
    def elements(self) -> int:
        """Elements in the box."""
        return math.prod(self.extents)

    def cut(self, cap: int) -> Iterator[StridedBox]:
        """The box in boxes of at most `cap` elements.

        >>> [box.src for box in StridedBox(0, 0, (2, 3), (3, 1), (1, 2)).cut(3)]
        [0, 3]
        """
        for spans in pieces.cut(self.extents, cap):
            src = self.src + sum(start * s for (start, _), s in zip(spans, self.src_strides, strict=True))
            dst = self.dst + sum(start * s for (start, _), s in zip(spans, self.dst_strides, strict=True))
            extents = tuple(extent for _, extent in spans)
            yield StridedBox(src, dst, extents, self.src_strides, self.dst_strides)

    @property
    def one_run(self) -> bool:
        """Whether its elements are neighbours in both tiles, in one order."""
        return all(_row_major(self.extents, strides) for strides in (self.src_strides, self.dst_strides))


class SideBox(NamedTuple):
    """A box of atoms on one side: from `low` to `high` in each, at `place` of the flat tile, with strides there."""

    low: tuple[int, ...]
    high: tuple[int, ...]
    place: int
    strides: tuple[int, ...]


class BoxIndex:
    """Boxes sorted along the atom where they are smallest, so that few are compared with another one.

    >>> boxes = [((n,), SideBox((4 * n,), (4 * n + 4,), 0, (1,))) for n in range(100)]
    >>> [pieces for pieces, _ in BoxIndex(boxes, [400]).candidates(SideBox((6,), (9,), 0, (1,)))]
    [(1,), (2,)]
    """

    def __init__(self, boxes: Sequence[tuple[tuple[int, ...], SideBox]], sizes: Sequence[int]) -> None:
        def share(atom: int) -> float:
            return sum((box.high[atom] - box.low[atom]) / max(1, sizes[atom]) for _, box in boxes)

        self._atom = atom = min(range(len(sizes)), key=share, default=None)
        self._boxes = list(boxes) if atom is None else sorted(boxes, key=lambda each: each[1].low[atom])
        self._lows = [] if atom is None else [box.low[atom] for _, box in self._boxes]
        # Sorted by their low ends, boxes end at most this much further on.
        self._widest = 0 if atom is None else max((box.high[atom] - box.low[atom] for _, box in boxes), default=0)

    def candidates(self, box: SideBox) -> Sequence[tuple[tuple[int, ...], SideBox]]:
        """The boxes that overlap this one along the atom, and perhaps a few that do not."""
        if self._atom is None:
            return self._boxes
        first = bisect_right(self._lows, box.low[self._atom] - self._widest)
        return self._boxes[first : bisect_left(self._lows, box.high[self._atom])]


def common_box(a: SideBox, b: SideBox) -> StridedBox | None:
    """What a box of the source and one of the target have in common; None if nothing.

    >>> common_box(SideBox((0,), (4,), 0, (1,)), SideBox((2,), (6,), 10, (3,)))
    StridedBox(src=2, dst=10, extents=(2,), src_strides=(1,), dst_strides=(3,))
    """
    low = [max(pair) for pair in zip(a.low, b.low, strict=True)]
    extents = tuple(min(pair) - start for *pair, start in zip(a.high, b.high, low, strict=True))
    if any(extent <= 0 for extent in extents):
        return None
    src = a.place + sum((at - start) * s for at, start, s in zip(low, a.low, a.strides, strict=True))
    dst = b.place + sum((at - start) * s for at, start, s in zip(low, b.low, b.strides, strict=True))
    return StridedBox(src, dst, extents, a.strides, b.strides)


def dim_boxes(dim: Dim, windows: Sequence[tuple[int, int, int]]) -> list[list[SideBox]]:
    """For each piece of a dim, its boxes of atoms, which are (start, values, size) windows, major first.

    >>> from reshard.types.mesh import SubAxis
    >>> halves = Dim((Digit(2, SubAxis("x", 1, 2)), Digit(3, None)), 6)
    >>> [[(box.low, box.high) for box in boxes] for boxes in dim_boxes(halves, [(0, 3, 3), (0, 2, 2)])]
    [[((0, 0), (1, 2)), ((1, 0), (2, 1))], [((1, 1), (2, 2)), ((2, 0), (3, 2))]]
    """
    boxes: list[list[SideBox]] = []
    for by_source in shares(Dim((Digit(dim.size, None),), dim.size), dim):
        own: list[SideBox] = []
        for run in (run for progression in by_source.get(0, ()) for run in progression.runs):
            for low, high in _intervals(run.src, run.src + run.length, [size for _, _, size in windows]):
                box = _clipped(low, high, windows, run.dst - run.src)
                own += [] if box is None else [box]
        boxes.append(_merged(own, len(windows)))
    return boxes


def _intervals(low: int, high: int, sizes: Sequence[int]) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """The numbers from `low` to `high` as boxes of digits, each by its lowest corner and the one after its highest.

    >>> list(_intervals(95, 205, (10, 10, 10)))[1]
    ((1, 0, 0), (2, 10, 10))
    """
    if low >= high:
        return
    if not sizes:
        yield (), ()
        return
    inner = math.prod(sizes[1:])
    first, last = -(-low // inner), high // inner
    if first > last:
        for start, end in _intervals(low - last * inner, high - last * inner, sizes[1:]):
            yield (last, *start), (last + 1, *end)
        return
    for start, end in _intervals(low - (first - 1) * inner, inner, sizes[1:]) if low < first * inner else ():
        yield (first - 1, *start), (first, *end)
    if first < last:
        yield (first, *(0 for _ in sizes[1:])), (last, *sizes[1:])
    for start, end in _intervals(0, high - last * inner, sizes[1:]):
        yield (last, *start), (last + 1, *end)


def _clipped(
    low: Sequence[int], high: Sequence[int], windows: Sequence[tuple[int, int, int]], shift: int
) -> SideBox | None:
    """The part of a box inside the windows, its digits counted from their starts; `shift` leads to local indices."""
    starts = tuple(max(at, start) for at, (start, _, _) in zip(low, windows, strict=True))
    ends = tuple(min(at, start + count) for at, (start, count, _) in zip(high, windows, strict=True))
    if any(start >= end for start, end in zip(starts, ends, strict=True)):
        return None
    strides = tuple(math.prod(size for _, _, size in windows[n + 1 :]) for n in range(len(windows)))
    place = shift + sum(at * stride for at, stride in zip(starts, strides, strict=True))
    first = [start for start, _, _ in windows]
    return SideBox(
        tuple(at - start for at, start in zip(starts, first, strict=True)),
        tuple(at - start for at, start in zip(ends, first, strict=True)),
        place,
        strides,
    )


def _merged(boxes: list[SideBox], rank: int) -> list[SideBox]:
    """The boxes, neighbours along one atom made one where their places go on evenly."""
    for atom in reversed(range(rank)):
        merged: list[SideBox] = []
        for box in boxes:
            joined = _joined_along(merged[-1], box, atom) if merged else None
            if joined is None:
                merged.append(box)
            else:
                merged[-1] = joined
        boxes = merged
    return boxes


def _joined_along(a: SideBox, b: SideBox, atom: int) -> SideBox | None:
    """One box for two that follow each other along an atom, if all else is alike."""
    others = [at for at in range(len(a.low)) if at != atom]
    if a.high[atom] != b.low[atom] or any(
        (a.low[at], a.high[at]) != (b.low[at], b.high[at])
        or (a.strides[at] != b.strides[at] and a.high[at] - a.low[at] > 1)
        for at in others
    ):
        return None
    steps = b.low[atom] - a.low[atom]
    stride, rest = divmod(b.place - a.place, steps)
    fits = all(box.high[atom] - box.low[atom] == 1 or box.strides[atom] == stride for box in (a, b))
    if rest or not fits:
        return None
    high, strides = list(a.high), list(a.strides)
    high[atom], strides[atom] = b.high[atom], stride
    return SideBox(a.low, tuple(high), a.place, tuple(strides))


def _row_major(extents: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether the elements are neighbours, counted in the order of the atoms."""
    place = 1
    for extent, stride in reversed([*zip(extents, strides, strict=True)]):
        if extent != 1 and stride != place:
            return False
        place *= extent
    return True
