"""The common refinement of two layouts: one numeral whose digits both are made of.

    operand   {x}8        =  x1 x2 | 2 4          mesh <x=4, ...>: x1 = x:(1)2, x2 = x:(2)2
    result    {y}4{x}     =  y 2 | 2 | x1 x2      each column one atom: (holder before, holder after)

An atom is local (None) or held by a device stride on either side. Every typing rule, bound and
schedule of an even move is a statement about these atoms. Two numerals that do not nest (2 then 3
against 3 then 2, uneven pieces, sub-axes that overlap) have no common refinement: `refine`
returns None and the move is an exchange of boxes (`messages`).
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import NamedTuple

from reshard.types.layout import Dim, Layout
from reshard.types.mesh import Mesh, places


class RefinedDigit(NamedTuple):
    """A digit of the common refinement, with the device strides that hold it before and after."""

    dim: int
    radix: int
    src: int | None
    dst: int | None


class Factor(NamedTuple):
    """A (stride, size) factor of the device positions."""

    stride: int
    size: int


class _Segment(NamedTuple):
    """A digit of one numeral, at a place value of its dim."""

    place: int
    radix: int
    stride: int | None


@dataclass(frozen=True)
class Refinement:
    """Atoms dim by dim, major to minor, over the padded shape that both layouts fit."""

    digits: tuple[RefinedDigit, ...]
    padded: tuple[int, ...]
    exact: bool
    kept: tuple[Factor, ...]
    reduced: tuple[Factor, ...]

    @cached_property
    def sliced(self) -> tuple[RefinedDigit, ...]:
        """Local before, held after."""
        return tuple(a for a in self.digits if a.src is None and a.dst is not None)

    @cached_property
    def gathered(self) -> tuple[RefinedDigit, ...]:
        """Held before, local after."""
        return tuple(a for a in self.digits if a.src is not None and a.dst is None)

    @cached_property
    def swapped(self) -> tuple[RefinedDigit, ...]:
        """Held before and after, by different devices."""
        return tuple(a for a in self.digits if a.src != a.dst and a.src is not None and a.dst is not None)

    @cached_property
    def common(self) -> int:
        """Elements that are local on both sides: the size of one message of an exchange."""
        return math.prod(a.radix for a in self.digits if a.src is None and a.dst is None)

    @cached_property
    def pieces(self) -> int:
        """How many source tiles one target tile has a share in."""
        return math.prod(a.radix for a in self.gathered)

    @cached_property
    def used_before(self) -> frozenset[int]:
        """The strides that hold atoms before."""
        return frozenset(a.src for a in self.digits if a.src is not None)

    @cached_property
    def used_after(self) -> frozenset[int]:
        """The strides that hold atoms after."""
        return frozenset(a.dst for a in self.digits if a.dst is not None)


def prime_digits(refinement: Refinement) -> tuple[RefinedDigit, ...]:
    """The atoms cut to prime radices, major first, the same way wherever a stride holds one."""
    found: list[RefinedDigit] = []
    for dim, radix, src, dst in refinement.digits:
        if src is None and dst is None:
            found.append(RefinedDigit(dim, radix, src, dst))
            continue
        found += [RefinedDigit(dim, prime, src and src * at, dst and dst * at) for at, prime in places(1, radix)]
    return tuple(found)


def same_devices(a: Mesh, b: Mesh) -> bool:
    """Whether equal positions are equal devices, whatever the axes are called."""
    return a is b or (a.size == b.size and a.device_ids == b.device_ids)


@lru_cache(maxsize=4096)
def refine(operand: Layout, result: Layout) -> Refinement | None:
    """The common refinement of two layouts of one array, or None where they have none."""
    if not same_devices(operand.mesh, result.mesh):
        return None
    padded = tuple(_common_padded(a, b) for a, b in zip(operand.dims, result.dims, strict=True))
    if None in padded:
        return None
    sizes = tuple(p for p in padded if p is not None)
    before = [_segments(d, operand.mesh, p) for d, p in zip(operand.dims, sizes, strict=True)]
    after = [_segments(d, result.mesh, p) for d, p in zip(result.dims, sizes, strict=True)]
    partial = [[Factor(lay.mesh.stride(s), s.size) for s in lay.partial] for lay in (operand, result)]
    cuts = _cuts(before, after, partial[0] + partial[1])
    if cuts is None:
        return None
    dims, devices = cuts
    atoms: list[RefinedDigit] = []
    for at, cut in enumerate(dims):
        atoms += _atoms(at, cut, before[at], after[at]) if sizes[at] else [RefinedDigit(at, 0, None, None)]
    were, are = (_split(factors, devices) for factors in partial)
    return Refinement(
        tuple(atoms),
        sizes,
        sizes == operand.shape,
        tuple(f for f in were if f in are),
        tuple(f for f in were if f not in are) if set(are) <= set(were) else (),
    )


def _common_padded(a: Dim, b: Dim) -> int | None:
    """The padded size that both numerals reach when rounds that hold nothing are added in front."""
    p, q = a.padded, b.padded
    if p == q:
        return p
    if 0 in (p, q):
        return None
    step = math.lcm(_round(a), _round(b))
    return -(-max(p, q) // step) * step


def _round(dim: Dim) -> int:
    """Elements in one value of the leading local digit; a numeral that has none is one round."""
    if not dim.digits or dim.digits[0].axis is not None:
        return dim.padded
    return dim.padded // dim.digits[0].radix


def _segments(dim: Dim, mesh: Mesh, padded: int) -> list[_Segment]:
    """The digits with their place values, minor first, the leading local one stretched to `padded`."""
    if padded == 0:
        return []
    found: list[_Segment] = []
    place = 1
    for radix, axis in reversed(dim.digits):
        found.append(_Segment(place, radix, None if axis is None else mesh.stride(axis)))
        place *= radix
    if place == padded:
        return found
    if found and found[-1].stride is None:
        last = found.pop()
        return [*found, _Segment(last.place, padded // last.place, None)]
    return [*found, _Segment(place, padded // place, None)]


def _cuts(
    before: list[list[_Segment]], after: list[list[_Segment]], partial: list[Factor]
) -> tuple[list[list[int]], list[int]] | None:
    """The places at which dims and device positions must be cut, closed under held digits.

    A cut inside a held digit of a dim cuts its stride in the same proportion, and back. Cuts only
    ever join a finite set of divisors, so the loop ends.
    """
    dims = [{s.place for s in b} | {s.place * s.radix for s in b} for b in before]
    for cut, segments in zip(dims, after, strict=True):
        cut.update(s.place for s in segments)
        cut.update(s.place * s.radix for s in segments)
    held = [(at, s) for side in (before, after) for at, segs in enumerate(side) for s in segs if s.stride is not None]
    devices = {f.stride for f in partial} | {f.stride * f.size for f in partial}
    for _, s in held:
        devices.update((s.stride or 0, (s.stride or 0) * s.radix))
    changed = True
    while changed:
        changed = False
        for at, (place, radix, stride) in held:
            stride = stride or 0
            inner = _inside(dims[at], place, radix)
            outer = _inside(devices, stride, radix)
            if inner is None or outer is None:
                return None
            if inner != outer:
                dims[at].update(place * c for c in outer)
                devices.update(stride * c for c in inner)
                changed = True
    chains = [sorted(places) for places in dims]
    if not all(_is_chain(places) for places in (*chains, sorted(devices))):
        return None
    return chains, sorted(devices)


def _inside(cuts: set[int], low: int, radix: int) -> set[int] | None:
    """The cuts strictly inside a digit, as ratios to its low end; None if one does not divide."""
    found: set[int] = set()
    for cut in cuts:
        if low < cut < low * radix:
            if cut % low:
                return None
            found.add(cut // low)
    return found


def _is_chain(places: list[int]) -> bool:
    return all(low > 0 and high % low == 0 for low, high in itertools.pairwise(places))


def _atoms(at: int, places: list[int], before: list[_Segment], after: list[_Segment]) -> list[RefinedDigit]:
    """The atoms of one dim, major first, read off both numerals at every cut."""
    found: list[RefinedDigit] = []
    b = a = 0
    for low, high in itertools.pairwise(places):
        while before[b].place * before[b].radix <= low:
            b += 1
        while after[a].place * after[a].radix <= low:
            a += 1
        src, dst = _held_at(before[b], low), _held_at(after[a], low)
        found.append(RefinedDigit(at, high // low, src, dst))
    return found[::-1]


def _held_at(segment: _Segment, place: int) -> int | None:
    return None if segment.stride is None else segment.stride * (place // segment.place)


def _split(factors: list[Factor], devices: list[int]) -> list[Factor]:
    """Factors cut at every device cut."""
    found: list[Factor] = []
    for stride, size in factors:
        ends = [c for c in devices if stride <= c <= stride * size]
        found += [Factor(low, high // low) for low, high in itertools.pairwise(ends)]
    return found
