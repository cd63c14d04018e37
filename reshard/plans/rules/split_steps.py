"""Parts: a step split into several of the same kind on a smaller array, to run with smaller buffers.

    mesh <x=4>, f32[{x}4, 16] -> f32[16, {x}4]    in two parts: f32[{x}2, 16] -> f32[8, {x}4], twice

    dim   radix   before   after
     0      4     x        local
     0      4     local    local    local on both sides: each part takes two of the four values
     1      4     local    x
     1      4     local    local

A part keeps every digit that the step moves, and takes one value of a factor of a digit that is local on both sides.
Its layouts are ordinary layouts, so the rule, the lowering and the cost of a part are those of any step.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from reshard.geometry.refine import RefinedDigit, Refinement, refine
from reshard.geometry.remesh import one_set
from reshard.types.layout import Digit, Dim, Layout
from reshard.types.mesh import SubAxis


class Cut(NamedTuple):
    """A tile's axis reshaped to (outer, parts, inner): part number c is index c along the middle axis."""

    axis: int
    outer: int
    parts: int
    inner: int


class Part(NamedTuple):
    """The layouts of one part before and after, with the cuts of both tiles into parts.

    `block` has the extents, by dim, of what travels from one device to another at once.
    """

    operand: Layout
    result: Layout
    take: Cut
    put: Cut
    block: tuple[int, ...]

    @property
    def aligned(self) -> bool:
        """Whether parts are whole 8 x 128 tiles of the two minor dims, the unit of an accelerator's memory."""
        rank = len(self.operand.shape)
        return all(cut.inner % _ALIGNED.get(cut.axis - rank, 1) == 0 for cut in (self.take, self.put))


_ALIGNED = {-1: 128, -2: 8}


class Regions(NamedTuple):
    """Where the parts of two equally large tiles lie in memory, in row-major order, if one overwrites the other.

    operand    (outer, before, parts, rest)
    between    (outer, parts, all of a part)     in which part number c of the result takes the place of the operand's
    result     (outer, parts, after, rest)  ->  (outer, after, parts, rest)
    """

    outer: int
    before: int
    parts: int
    after: int

    @property
    def transpositions(self) -> int:
        """How often the slots that parts consist of are rearranged: before the first part, and after the last."""
        return (self.before > 1) + (self.after > 1)


def part_regions(operand: Sequence[int], take: Cut, result: Sequence[int], put: Cut) -> Regions:
    """The regions of tiles of these shapes.

    >>> part_regions((4, 16), Cut(0, 1, 2, 2), (16, 4), Cut(0, 4, 2, 2))
    Regions(outer=1, before=1, parts=2, after=4)
    """
    before, after = math.prod(operand[: take.axis]) * take.outer, math.prod(result[: put.axis]) * put.outer
    outer = math.gcd(before, after)
    return Regions(outer, before // outer, take.parts, after // outer)


@lru_cache(maxsize=4096)
def split_step(operand: Layout, result: Layout, count: int, *, in_place: bool = False) -> Part | None:
    """A step in `count` parts along the dim where that costs the copies least, or None if no dim allows it.

    With `in_place` each part of the result takes the place of one of the operand's tile, which must be as large.

    >>> from reshard.types import Mesh
    >>> mesh = Mesh(x=4)
    >>> part = split_step(Layout.parse("f32[{x}4, 16]", mesh), Layout.parse("f32[16, {x}4]", mesh), 2)
    >>> str(part.operand), str(part.result), part.take, part.put
    ('f32[{x}2, 16]', 'f32[8, {x}4]', Cut(axis=0, outer=1, parts=2, inner=2), Cut(axis=0, outer=4, parts=2, inner=2))
    >>> part.block
    (2, 4)
    """
    r = refine(operand, result)
    if r is None or (in_place and not _equally_large(operand, result)):
        return None
    able = [at for at, digit in enumerate(r.digits) if _split_digits(digit, r, operand) and digit.radix % count == 0]
    parts = [_part_of_step(operand, result, r, at, count) for at in able]
    if in_place:
        return min(parts, key=lambda part: _is_rearranged(part, operand, result), default=None)
    return min(parts, key=_count_disturbance, default=None)


def _equally_large(operand: Layout, result: Layout) -> bool:
    """Whether the tiles of one layout fit exactly where those of the other are."""
    same = operand.even and result.even and operand.tile_bytes == result.tile_bytes
    return same and one_set(operand.mesh, result.mesh)


@lru_cache(maxsize=4096)
def possible_counts(operand: Layout, result: Layout) -> tuple[int, ...]:
    """The numbers of parts, 2 and more, into which a step between these layouts can be split.

    >>> from reshard.types import Mesh
    >>> mesh = Mesh(x=4)
    >>> possible_counts(Layout.parse("f32[{x}4, 16]", mesh), Layout.parse("f32[16, {x}4]", mesh))
    (2, 4)
    """
    r = refine(operand, result)
    if r is None:
        return ()
    numbers: set[int] = set()
    for digit in r.digits:
        if _split_digits(digit, r, operand):
            numbers.update(k for k in range(2, digit.radix + 1) if digit.radix % k == 0)
    return tuple(sorted(numbers))


def split_layouts(layouts: Sequence[Layout], count: int) -> tuple[tuple[Layout, Cut], ...] | None:
    """Layouts of one array, on any devices, cut alike: those of a part, each with the cut of its tile into parts.

    Part number c has the same elements in each of them. None if no digit that is local in all of them divides so.

    >>> from reshard.types import Mesh
    >>> rows, columns = Layout.parse("f32[{x}8, 64]", Mesh(x=2)), Layout.parse("f32[16, {y}16]", Mesh(y=4))
    >>> split = split_layouts([rows, columns], 4)
    >>> [str(part) for part, _ in split], split[1][1]
    (['f32[{x}2, 64]', 'f32[4, {y}16]'], Cut(axis=0, outer=2, parts=4, inner=2))
    """
    if not all(layout.even for layout in layouts):
        return None
    able = [
        tuple((_smaller_layout(layout, dim, place, count), _tile_cut(layout, dim, place, count)) for layout in layouts)
        for dim, size in enumerate(layouts[0].shape)
        for place in range(size // count, 0, -1)
        if size % (place * count) == 0 and all(_is_local(layout, dim, place, count) for layout in layouts)
    ]
    return min(able, key=_count_scattered, default=None)


def _count_scattered(cuts: Sequence[tuple[Layout, Cut]]) -> tuple[bool, int]:
    """Sorts first the cuts into aligned parts, contiguous in as many tiles as can be."""
    unaligned = any(cut.inner % _ALIGNED.get(cut.axis - len(part.shape), 1) for part, cut in cuts)
    return unaligned, sum(cut.outer * math.prod(part.tile_shape[: cut.axis]) > 1 for part, cut in cuts)


def _is_local(layout: Layout, dim: int, place: int, count: int) -> bool:
    """Whether a factor `count` at a place value of a dim is part of one local digit."""
    return any(
        axis is None and place % low == 0 and low * radix % (place * count) == 0
        for low, radix, axis in _cut_places(layout.dims[dim])
    )


def _tile_cut(layout: Layout, dim: int, place: int, count: int) -> Cut:
    """The cut of a tile along the factor `count` at a place value of a dim, which is local."""
    local = [(low, radix) for low, radix, axis in _cut_places(layout.dims[dim]) if axis is None]
    inner = math.prod(radix for low, radix in local if low * radix <= place)
    inner *= next(place // low for low, radix in local if low <= place < low * radix)
    return Cut(dim, layout.tile_shape[dim] // (inner * count), count, inner)


def _cut_places(dim: Dim) -> list[tuple[int, int, SubAxis | None]]:
    """The digits of a dim with the place value of each, the last one first."""
    placed: list[tuple[int, int, SubAxis | None]] = []
    low = 1
    for radix, axis in reversed(dim.digits):
        placed.append((low, radix, axis))
        low *= radix
    return placed


def _count_disturbance(part: Part) -> tuple[bool, bool, bool, bool]:
    """Sorts first the parts that are aligned, keep full lanes, are not along the two minor dims, and are contiguous in
    both tiles."""
    minor = max(part.take.axis, part.put.axis) >= len(part.operand.shape) - len(_ALIGNED)
    narrow = _is_narrowed(part.operand, part.take) or _is_narrowed(part.result, part.put)
    return not part.aligned, narrow, minor, part.take.outer * part.put.outer > 1


def _is_rearranged(part: Part, operand: Layout, result: Layout) -> tuple[bool, bool, int, bool]:
    """Sorts first the parts that are aligned, keep full lanes, and need the fewest transpositions."""
    unaligned, narrow, minor, _ = _count_disturbance(part)
    slots = part_regions(operand.tile_shape, part.take, result.tile_shape, part.put)
    return unaligned, narrow, slots.transpositions, minor


def _is_narrowed(part: Layout, cut: Cut) -> bool:
    """Whether parts of a tile lose its full lanes: a TPU has the last dim that is a multiple of 128 minor in memory."""
    tile = [size * (cut.parts if dim == cut.axis else 1) for dim, size in enumerate(part.tile_shape)]
    minor = next((dim for dim in reversed(range(len(tile))) if tile[dim] % _ALIGNED[-1] == 0), None)
    return cut.axis == minor and cut.inner % _ALIGNED[-1] != 0


def _part_of_step(operand: Layout, result: Layout, r: Refinement, at: int, count: int) -> Part:
    """The parts along one refined digit."""
    dim = r.digits[at].dim
    place = math.prod(d.radix for d in r.digits[at + 1 :] if d.dim == dim)
    before = [d.src is None for d in r.digits]
    after = [d.dst is None for d in r.digits]
    block = [extent // (count if of == dim else 1) for of, extent in enumerate(r.box)]
    return Part(
        _smaller_layout(operand, dim, place, count),
        _smaller_layout(result, dim, place, count),
        _cut_of_digit(r, at, before, count),
        _cut_of_digit(r, at, after, count),
        tuple(block),
    )


def _split_digits(digit: RefinedDigit, r: Refinement, operand: Layout) -> bool:
    """Whether a step can be split along a digit: one local on both sides, in a dim without padding."""
    even = r.padded[digit.dim] == operand.shape[digit.dim]
    return even and digit.radix > 1 and digit.src is None and digit.dst is None


def _smaller_layout(layout: Layout, dim: int, place: int, count: int) -> Layout:
    """The layout of one part: the local digit at a place value of a dim is divided by `count`."""
    digits: list[Digit] = []
    low = 1
    for radix, axis in reversed(layout.dims[dim].digits):
        covers = low <= place < low * radix
        digits.insert(0, Digit(radix // count if covers else radix, axis))
        low *= radix
    dims = list(layout.dims)
    dims[dim] = Dim(tuple(digits), layout.shape[dim] // count)
    return Layout(layout.mesh, tuple(dims), layout.dtype, layout.reduction, layout.partial)


def _cut_of_digit(r: Refinement, at: int, local: list[bool], count: int) -> Cut:
    dim = r.digits[at].dim
    same = [(n, d.radix) for n, d in enumerate(r.digits) if d.dim == dim and local[n]]
    outer = math.prod(radix for n, radix in same if n < at)
    inner = math.prod(radix for n, radix in same if n > at)
    return Cut(dim, outer, count, r.digits[at].radix // count * inner)
