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
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

from reshard.geometry.refine import Refinement, refine
from reshard.geometry.remesh import one_set
from reshard.types.layout import Digit, Dim, Layout
from reshard.types.whole import primes


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
    if not before or not after:
        return Regions(1, 1, take.parts, 1)  # Empty tiles: nothing lies anywhere.
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
    if r is None:
        return None
    if in_place:  # The tiles of one layout fit exactly where those of the other are.
        even = operand.even and result.even and operand.tile_bytes == result.tile_bytes
        if not even or not one_set(operand.mesh, result.mesh):
            return None
    parts: list[Part] = []
    for dim, radix, place in _list_local_digits(r, operand):
        if radix % count == 0:
            # The part takes the major factor of the digit, so that what is left of it stays together.
            before, after = (_divide_layout(end, dim, place * (radix // count), count) for end in (operand, result))
            if before is not None and after is not None:
                block = tuple(extent // (count if at == dim else 1) for at, extent in enumerate(r.box))
                parts.append(Part(before[0], after[0], before[1], after[1], block))

    def disturbance(part: Part) -> tuple[bool, bool, int, bool, bool]:
        """Sorts first the parts that are aligned, keep full lanes, need the fewest transpositions in place, are not
        along the two minor dims, and are contiguous in both tiles."""
        minor = max(part.take.axis, part.put.axis) >= len(part.operand.shape) - len(_ALIGNED)
        narrow = _is_narrowed(part.operand, part.take) or _is_narrowed(part.result, part.put)
        if in_place:
            slots = part_regions(operand.tile_shape, part.take, result.tile_shape, part.put)
            return not part.aligned, narrow, slots.transpositions, minor, False
        return not part.aligned, narrow, 0, minor, part.take.outer * part.put.outer > 1

    return min(parts, key=disturbance, default=None)


@lru_cache(maxsize=4096)
def possible_counts(operand: Layout, result: Layout) -> tuple[int, ...]:
    """The numbers of parts, 2 and more, into which a step between these layouts can be split."""
    r = refine(operand, result)
    if r is None:
        return ()
    counts: set[int] = set()
    for radix in {radix for _, radix, _ in _list_local_digits(r, operand)}:
        divisors = {1}
        for prime in primes(radix):
            divisors |= {prime * divisor for divisor in divisors}
        counts |= divisors
    return tuple(sorted(counts - {1}))


def _list_local_digits(r: Refinement, operand: Layout) -> Iterator[tuple[int, int, int]]:
    """The digits along which a step can be split, as (dim, radix, place value): local on both sides, in a dim without
    padding."""
    for at, digit in enumerate(r.digits):
        even = r.padded[digit.dim] == operand.shape[digit.dim] and digit.dim not in r.opaque
        if even and digit.radix > 1 and digit.src is None and digit.dst is None:
            yield digit.dim, digit.radix, math.prod(d.radix for d in r.digits[at + 1 :] if d.dim == digit.dim)


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
    able: list[tuple[tuple[Layout, Cut], ...]] = []
    for dim, size in enumerate(layouts[0].shape):
        for place in range(size // count, 0, -1):
            if size % (place * count) == 0:
                cuts = [_divide_layout(layout, dim, place, count) for layout in layouts]
                if None not in cuts:
                    able.append(tuple(cut for cut in cuts if cut is not None))

    def scattered(cuts: Sequence[tuple[Layout, Cut]]) -> tuple[bool, int]:
        """Sorts first the cuts into aligned parts, contiguous in as many tiles as can be."""
        unaligned = any(cut.inner % _ALIGNED.get(cut.axis - len(part.shape), 1) for part, cut in cuts)
        return unaligned, sum(cut.outer * math.prod(part.tile_shape[: cut.axis]) > 1 for part, cut in cuts)

    return min(able, key=scattered, default=None)


def _divide_layout(layout: Layout, dim: int, place: int, count: int) -> tuple[Layout, Cut] | None:
    """The layout of a part that has one value of the factor `count` at a place value of a dim, with the cut of its
    tile; None if the factor is not part of one local digit."""
    digits: list[Digit] = []
    low, inner, outer = 1, 1, 1
    divided = False
    for radix, axis in reversed(layout.dims[dim].digits):
        here = low <= place < low * radix
        if here and (axis is not None or place % low or low * radix % (place * count)):
            return None
        if here:
            divided, inner, outer = True, inner * (place // low), low * radix // (place * count)
        elif axis is None and divided:
            outer *= radix
        elif axis is None:
            inner *= radix
        digits.insert(0, Digit(radix // count if here else radix, axis))
        low *= radix
    if not divided:
        return None
    dims = list(layout.dims)
    dims[dim] = Dim(tuple(digits), layout.shape[dim] // count)
    part = Layout(layout.mesh, tuple(dims), layout.dtype, layout.reduction, layout.partial)
    return part, Cut(dim, outer, count, inner)


def _is_narrowed(part: Layout, cut: Cut) -> bool:
    """Whether parts of a tile lose its full lanes: a TPU has the last dim that is a multiple of 128 minor in memory."""
    tile = [size * (cut.parts if dim == cut.axis else 1) for dim, size in enumerate(part.tile_shape)]
    minor = next((dim for dim in reversed(range(len(tile))) if tile[dim] % _ALIGNED[-1] == 0), None)
    return cut.axis == minor and cut.inner % _ALIGNED[-1] != 0
