"""What tiles share through a view, as boxes of its atoms.

    view "(three h) -> three h", three=3, h=4, on <x=2, y=2>: f32[{x}6] -> f32[3, {y}2]

    source piece 1 has indices 6 to 11   = three 1, h 2-3 and three 2, h 0-3
    target piece 0 wants h 0-1           it shares three 2, h 0-1 with that: a block of 1 x 2

A run of neighbouring indices is a few boxes of atoms:

    indices 95 to 204, digits 10 x 10 x 10    95-99 = (0, 9, 5-9), 100-199 = (1, 0-9, 0-9), 200-204 = (2, 0, 0-4)

A box has an offset in a flat tile, and there a stride for each atom: inside a run, neighbouring indices are neighbours
in the tile. Boxes that go on evenly along an atom are merged, so that the rounds of a block-cyclic dim are one box. The
boxes of both sides are cut with each other, atom by atom, so that the work depends on pieces and runs and not on
elements. Dims that share no atoms, on either side, are independent, and each group of dims is worked out alone.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from reshard.geometry.blocks import Axis, Block
from reshard.geometry.message import Factor, SharedDims
from reshard.geometry.overlap import list_runs, shares
from reshard.types.layout import Digit, Dim, Layout
from reshard.types.view import Groups, View


def view_dims(operand: Layout, result: Layout, view: View) -> list[SharedDims]:
    """What the tiles of two layouts share through a view, for each group of dims that share atoms.

    >>> from reshard.types import Mesh
    >>> both = Layout.parse("f32[{x}6]", Mesh(x=2, y=2)), Layout.parse("f32[3, {y}2]", Mesh(x=2, y=2))
    >>> from reshard.types.view import Atom
    >>> (shared,) = view_dims(*both, View((Atom("three", 3), Atom("h", 4)), ((0, 1),), ((0,), (1,))))
    >>> shared.source, shared.target, [block.extents for block in shared.wanted((0, 0))[1,]]
    ((0,), (0, 1), [(2,)])
    """
    # Dims of both sides, as (side, number), and the atoms that they and no other dims have.
    groups = [({(0, at)}, set(dim)) for at, dim in enumerate(view.source)]
    for at, dim in enumerate(view.target):
        dims, atoms = {(1, at)}, set(dim)
        for other in [group for group in groups if group[1] & atoms]:
            groups.remove(other)
            dims, atoms = dims | other[0], atoms | other[1]
        groups.append((dims, atoms))
    shared: list[SharedDims] = []
    for dims, atoms in groups:
        source, target = (tuple(sorted(at for which, at in dims if which == side)) for side in (0, 1))
        factor = _AtomFactor(operand, result, view, source, target, tuple(sorted(atoms)))
        shared.append(SharedDims(source, target, factor))
    return shared


class _AtomFactor:
    """What the pieces of some dims share, worked out once for each combination of pieces."""

    def __init__(
        self,
        operand: Layout,
        result: Layout,
        view: View,
        source: tuple[int, ...],
        target: tuple[int, ...],
        atoms: tuple[int, ...],
    ) -> None:
        taken = [(a.taken.start if a.taken else 0, a.source_size) for a in view.atoms]
        into = [(a.into.start if a.into else 0, a.target_size) for a in view.atoms]
        self._number = {atom: n for n, atom in enumerate(atoms)}
        self._sizes = [view.atoms[at].size for at in atoms]
        before = self._side(operand, view, view.source, source, taken)
        self._target = self._side(result, view, view.target, target, into)
        self._near = BoxIndex([(p, box) for p, boxes in before.items() for box in boxes], self._sizes)
        self._shared: dict[tuple[int, ...], Mapping[tuple[int, ...], Factor]] = {}

    def __call__(self, pieces: tuple[int, ...]) -> Mapping[tuple[int, ...], Factor]:
        """The source's pieces that overlap those of the target, with the blocks in common."""
        if pieces not in self._shared:
            overlaps: dict[tuple[int, ...], list[Block]] = {}
            for b in self._target[pieces]:
                for source, a in self._near.candidates(b):
                    common = common_block(a, b)
                    if common is not None:
                        overlaps.setdefault(source, []).append(common)
            self._shared[pieces] = {p: tuple(overlaps[p]) for p in sorted(overlaps)}
        return self._shared[pieces]

    def _side(
        self, layout: Layout, view: View, groups: Groups, dims: Sequence[int], parts: Sequence[tuple[int, int]]
    ) -> dict[tuple[int, ...], list[SideBox]]:
        """The boxes of every combination of pieces of a side's dims."""
        each: list[list[list[SideBox]]] = []
        for at in dims:
            tile_stride = math.prod(layout.tile_shape[at + 1 :])
            windows = [(parts[atom][0], view.atoms[atom].size, parts[atom][1]) for atom in groups[at]]
            own = [self._number[atom] for atom in groups[at]]
            each.append([[self._spread(b, own, tile_stride) for b in p] for p in dim_boxes(layout.dims[at], windows)])
        combined: dict[tuple[int, ...], list[SideBox]] = {}
        for pieces in itertools.product(*(range(len(dim)) for dim in each)):
            lists = (dim[p] for dim, p in zip(each, pieces, strict=True))
            combined[pieces] = [self._product(boxes) for boxes in itertools.product(*lists)]
        return combined

    def _spread(self, box: SideBox, own: Sequence[int], tile_stride: int) -> SideBox:
        """A dim's box over all atoms of the factor: the other dims' atoms are whole here."""
        low, high, strides = [0] * len(self._sizes), list(self._sizes), [0] * len(self._sizes)
        for n, at in enumerate(own):
            low[at], high[at], strides[at] = box.low[n], box.high[n], box.strides[n] * tile_stride
        return SideBox(tuple(low), tuple(high), box.place * tile_stride, tuple(strides))

    def _product(self, boxes: Sequence[SideBox]) -> SideBox:
        """The box in which every dim has one of these: each restricts the atoms of its own dim."""
        low = tuple(max((box.low[at] for box in boxes), default=0) for at in range(len(self._sizes)))
        high = tuple(min((box.high[at] for box in boxes), default=size) for at, size in enumerate(self._sizes))
        strides = tuple(sum(box.strides[at] for box in boxes) for at in range(len(self._sizes)))
        return SideBox(low, high, sum(box.place for box in boxes), strides)


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


def common_block(a: SideBox, b: SideBox) -> Block | None:
    """What a box of the source and one of the target have in common; None if nothing.

    >>> common_block(SideBox((0,), (4,), 0, (1,)), SideBox((2,), (6,), 10, (3,)))
    Block(src=2, dst=10, axes=(Axis(extent=2, src=1, dst=3),))
    """
    low = [max(pair) for pair in zip(a.low, b.low, strict=True)]
    extents = tuple(min(pair) - start for *pair, start in zip(a.high, b.high, low, strict=True))
    if any(extent <= 0 for extent in extents):
        return None
    src = a.place + sum((at - start) * s for at, start, s in zip(low, a.low, a.strides, strict=True))
    dst = b.place + sum((at - start) * s for at, start, s in zip(low, b.low, b.strides, strict=True))
    axes = zip(extents, a.strides, b.strides, strict=True)
    return Block(src, dst, tuple([Axis(*axis) for axis in axes if axis[0] != 1]))


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
        for run in list_runs(by_source.get(0, ())):
            for low, high in _digit_intervals(run.src, run.src + run.length, [size for _, _, size in windows]):
                box = _clip_to_windows(low, high, windows, run.dst - run.src)
                own += [] if box is None else [box]
        boxes.append(_merge_boxes(own, len(windows)))
    return boxes


def _digit_intervals(low: int, high: int, sizes: Sequence[int]) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """The numbers from `low` to `high` as boxes of digits, each by its lowest corner and the one after its highest.

    >>> list(_digit_intervals(95, 205, (10, 10, 10)))[1]
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
        for start, end in _digit_intervals(low - last * inner, high - last * inner, sizes[1:]):
            yield (last, *start), (last + 1, *end)
        return
    for start, end in _digit_intervals(low - (first - 1) * inner, inner, sizes[1:]) if low < first * inner else ():
        yield (first - 1, *start), (first, *end)
    if first < last:
        yield (first, *(0 for _ in sizes[1:])), (last, *sizes[1:])
    for start, end in _digit_intervals(0, high - last * inner, sizes[1:]):
        yield (last, *start), (last + 1, *end)


def _clip_to_windows(
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


def _merge_boxes(boxes: list[SideBox], rank: int) -> list[SideBox]:
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
