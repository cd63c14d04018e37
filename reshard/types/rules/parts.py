"""Parts: a step done part by part, each part a step of the same kind on a smaller array.

    operand f32[{x}4, 16] -> result f32[16, {x}4]     x=4; 16 = {x} 4 in dim 0, and 4 is local on both sides
    two parts: f32[{x}2, 16] -> f32[8, {x}4], twice

A part keeps every digit that the step moves, and takes one value of a factor of the local elements
that it leaves alone. Its layouts are layouts like any other, so its rule, its lowering and its cost
are those of the step itself; only the buffers are smaller.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import NamedTuple

from reshard.types.layout import Digit, Dim, Layout
from reshard.types.pair.refine import RefinedDigit, Refinement, refine


class Cut(NamedTuple):
    """A tile's axis as (outer, parts, inner): part number c is index c of the middle one."""

    axis: int
    outer: int
    parts: int
    inner: int


class Part(NamedTuple):
    """The layouts of one part before and after, and how both tiles are cut into parts."""

    operand: Layout
    result: Layout
    take: Cut
    put: Cut

    @property
    def aligned(self) -> bool:
        """Whether parts begin and end where an accelerator's memory does: at 8 rows of 128 of the two minor dims."""
        rank = len(self.operand.shape)
        return all(cut.inner % _ALIGNED.get(cut.axis - rank, 1) == 0 for cut in (self.take, self.put))


_ALIGNED = {-1: 128, -2: 8}


@lru_cache(maxsize=4096)
def split_step(operand: Layout, result: Layout, count: int) -> Part | None:
    """The step's parts if it can be done in so many, along the dim that disturbs memory least.

    >>> from reshard.types import Mesh
    >>> mesh = Mesh(x=4)
    >>> found = split_step(Layout.parse("f32[{x}4, 16]", mesh), Layout.parse("f32[16, {x}4]", mesh), 2)
    >>> str(found.operand), str(found.result), found.take, found.put
    ('f32[{x}2, 16]', 'f32[8, {x}4]', Cut(axis=0, outer=1, parts=2, inner=2), Cut(axis=0, outer=4, parts=2, inner=2))
    """
    r = refine(operand, result)
    if r is None:
        return None
    able = [at for at, atom in enumerate(r.digits) if _splits(atom, r, operand) and atom.radix % count == 0]
    found = [_part(operand, result, r, at, count) for at in able]
    return min(found, key=_disturbance, default=None)


@lru_cache(maxsize=4096)
def counts(operand: Layout, result: Layout) -> tuple[int, ...]:
    """The numbers of parts, from 2 up, in which a step between these layouts can be done."""
    r = refine(operand, result)
    if r is None:
        return ()
    found: set[int] = set()
    for atom in r.digits:
        if _splits(atom, r, operand):
            found.update(k for k in range(2, atom.radix + 1) if atom.radix % k == 0)
    return tuple(sorted(found))


def _disturbance(found: Part) -> tuple[bool, bool, bool]:
    """Best are parts of a dim that is none of the two minor ones, each in one piece."""
    minor = max(found.take.axis, found.put.axis) >= len(found.operand.shape) - len(_ALIGNED)
    return not found.aligned, minor, found.take.outer * found.put.outer > 1


def _part(operand: Layout, result: Layout, r: Refinement, at: int, count: int) -> Part:
    """The parts along one atom."""
    dim = r.digits[at].dim
    place = math.prod(a.radix for a in r.digits[at + 1 :] if a.dim == dim)
    before = [a.src is None for a in r.digits]
    after = [a.dst is None for a in r.digits]
    return Part(
        _smaller(operand, dim, place, count),
        _smaller(result, dim, place, count),
        _cut(r, at, before, count),
        _cut(r, at, after, count),
    )


def _splits(atom: RefinedDigit, r: Refinement, operand: Layout) -> bool:
    """Whether an atom is local on both sides, in a dim that is not padded."""
    even = r.padded[atom.dim] == operand.shape[atom.dim]
    return even and atom.radix > 1 and atom.src is None and atom.dst is None


def _smaller(layout: Layout, dim: int, place: int, count: int) -> Layout:
    """The layout with the local digit that covers a place value of a dim divided by `count`."""
    digits: list[Digit] = []
    low = 1
    for radix, axis in reversed(layout.dims[dim].digits):
        covers = low <= place < low * radix
        digits.insert(0, Digit(radix // count if covers else radix, axis))
        low *= radix
    dims = list(layout.dims)
    dims[dim] = Dim(tuple(digits), layout.shape[dim] // count)
    return Layout(layout.mesh, tuple(dims), layout.dtype, layout.reduction, layout.partial)


def _cut(r: Refinement, at: int, local: list[bool], count: int) -> Cut:
    dim = r.digits[at].dim
    same = [(n, a.radix) for n, a in enumerate(r.digits) if a.dim == dim and local[n]]
    outer = math.prod(radix for n, radix in same if n < at)
    inner = math.prod(radix for n, radix in same if n > at)
    return Cut(dim, outer, count, r.digits[at].radix // count * inner)
