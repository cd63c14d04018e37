"""The common refinement of two layouts: one numeral whose digits both of them are made of.

    mesh <x=4, y=2>, f32[{x}{y}2] -> f32[{y}{x}2]

    refined digit   1        2        3        4
    radix           2        2        2        2
    before          x:(1)2   x:(2)2   y        local
    after           y        x:(1)2   x:(2)2   local

Every rule, bound and schedule of an even step is a statement about these digits: which are local before and held
after, which the reverse, which change holders. A holder is written as its stride, the number of positions between
two neighbours along it, so that meshes with other axis names can be compared.

Numerals that do not nest have no common refinement: 2 then 3 against 3 then 2, pieces of uneven sizes, overlapping
sub-axes, pieces of any size that change. Then `refine` returns None, and only an exchange of boxes (`messages`) leads
from one to the other. A dim in pieces that stays as it is takes part as one opaque numeral, whose local digit has room
for the largest piece and is never cut.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import pairwise
from typing import NamedTuple

from reshard.types.layout import Digit, Dim, Layout, fit_digits
from reshard.types.mesh import Mesh, is_chain, places


class RefinedDigit(NamedTuple):
    """A digit of the common refinement: its dim, its radix, and the strides that hold it (None: local)."""

    dim: int
    radix: int
    src: int | None
    dst: int | None


class Factor(NamedTuple):
    """A factor of the device positions: `size` positions that are `stride` apart."""

    stride: int
    size: int


class PartialChange(NamedTuple):
    """The factors of the partial sub-axes that stay partial, those that are reduced, and those that become partial."""

    kept: tuple[Factor, ...]
    reduced: tuple[Factor, ...]
    started: tuple[Factor, ...]


class _Segment(NamedTuple):
    """A digit of one numeral: it covers the places from `place` to `place * radix`; None is no holder's stride."""

    place: int
    radix: int
    stride: int | None


@dataclass(frozen=True)
class Refinement:
    """The refined digits dim by dim, major to minor, over the padded shape that both layouts fit.

    `exact` says that nothing is padded, nor in pieces of any size: those are the `opaque` dims. `kept`, `reduced` and
    `started` are the factors of the partial sub-axes that stay partial, that are reduced, and that become partial.
    """

    digits: tuple[RefinedDigit, ...]
    padded: tuple[int, ...]
    exact: bool
    kept: tuple[Factor, ...]
    reduced: tuple[Factor, ...]
    started: tuple[Factor, ...] = ()
    opaque: frozenset[int] = frozenset()

    @cached_property
    def sliced(self) -> tuple[RefinedDigit, ...]:
        """Local before, held after."""
        return tuple(d for d in self.digits if d.src is None and d.dst is not None)

    @cached_property
    def gathered(self) -> tuple[RefinedDigit, ...]:
        """Held before, local after."""
        return tuple(d for d in self.digits if d.src is not None and d.dst is None)

    @cached_property
    def swapped(self) -> tuple[RefinedDigit, ...]:
        """Held before and after, by different devices."""
        return tuple(d for d in self.digits if d.src != d.dst and d.src is not None and d.dst is not None)

    @cached_property
    def box(self) -> tuple[int, ...]:
        """By dim, the extents of what is local on both sides: of one message of an exchange."""
        both = [d for d in self.digits if d.src is None and d.dst is None]
        return tuple(math.prod(d.radix for d in both if d.dim == dim) for dim in range(len(self.padded)))

    @cached_property
    def common(self) -> int:
        """The elements of one message of an exchange."""
        return math.prod(self.box)

    @cached_property
    def pieces(self) -> int:
        """How many source tiles contribute to one target tile."""
        return math.prod(d.radix for d in self.gathered)

    @cached_property
    def used_before(self) -> frozenset[int]:
        """The strides that hold digits before."""
        return frozenset(d.src for d in self.digits if d.src is not None)

    @cached_property
    def used_after(self) -> frozenset[int]:
        """The strides that hold digits after."""
        return frozenset(d.dst for d in self.digits if d.dst is not None)


def prime_digits(refinement: Refinement) -> tuple[RefinedDigit, ...]:
    """The refined digits with every held one cut to prime radices, major first.

    >>> mesh = Mesh(x=6)
    >>> refinement = refine(Layout.parse("f32[{x}, 6]", mesh), Layout.parse("f32[6, {x}]", mesh))
    >>> [(digit.dim, digit.radix, digit.src, digit.dst) for digit in prime_digits(refinement)]
    [(0, 2, 3, None), (0, 3, 1, None), (1, 2, None, 3), (1, 3, None, 1)]
    """
    digits: list[RefinedDigit] = []
    for dim, radix, src, dst in refinement.digits:
        if src is None and dst is None:
            digits.append(RefinedDigit(dim, radix, src, dst))
        else:
            digits += [RefinedDigit(dim, prime, src and src * at, dst and dst * at) for at, prime in places(1, radix)]
    return tuple(digits)


def same_devices(a: Mesh, b: Mesh) -> bool:
    """Whether equal positions are equal devices, whatever the axes are called."""
    return a is b or (a.size == b.size and a.device_ids == b.device_ids)


@lru_cache(maxsize=4096)
def refine(operand: Layout, result: Layout) -> Refinement | None:
    """The common refinement of two layouts of one array, or None if they have none.

    For example f32[{x}{y}2] -> f32[{y}{x}2] on <x=4, y=2>. A digit of radix r at place p covers the places from p to
    p * r; a sub-axis of stride s and size r covers the positions from s to s * r.

        step                                            dim is cut at    positions are cut at
        operand: {x} 4-16, {y} 2-4, 2 1-2               1 2 4 16
        result: {y} 8-16, {x} 2-8, 2 1-2                1 2 4 8 16
        holders: x 2-8, y 1-2                           1 2 4 8 16       1 2 8
        the operand's {x} is cut at 8, in the middle,
          so x itself is cut in the middle              1 2 4 8 16       1 2 4 8
        the result's {x} is cut at 4, so is x already   1 2 4 8 16       1 2 4 8

        refined digit   places   radix   src           dst
        1               8-16     2       4 (x:(1)2)    1 (y)
        2               4-8      2       2 (x:(2)2)    4 (x:(1)2)
        3               2-4      2       1 (y)         2 (x:(2)2)
        4               1-2      2       None          None

    >>> mesh = Mesh(x=4, y=2)
    >>> refinement = refine(Layout.parse("f32[{x}{y}2]", mesh), Layout.parse("f32[{y}{x}2]", mesh))
    >>> [(digit.radix, digit.src, digit.dst) for digit in refinement.digits]
    [(2, 4, 1), (2, 2, 4), (2, 1, 2), (2, None, None)]
    """
    if not same_devices(operand.mesh, result.mesh):
        return None
    padded: list[int] = []
    opaque: set[int] = set()
    for at, (one, other) in enumerate(zip(operand.dims, result.dims, strict=True)):
        size, most = sorted((one.padded, other.padded))
        if one.pieces is not None or other.pieces is not None:
            held = [_list_segments(dim, end.mesh, most) for dim, end in ((one, operand), (other, result))]
            if one.pieces != other.pieces or held[0] != held[1]:
                return None
            opaque.add(at)
        if size != most:
            if not size:
                return None
            # Rounds without elements go in front of the numerals until both cover as much.
            step = math.lcm(_round_elements(one), _round_elements(other))
            size = -(-most // step) * step
        padded.append(size)
    before, after = (
        [_list_segments(dim, layout.mesh, size) for dim, size in zip(layout.dims, padded, strict=True)]
        for layout in (operand, result)
    )
    cuts = _cut_numerals(before, after, [*_summand_factors(operand), *_summand_factors(result)])
    if cuts is None:
        return None
    dims, positions = cuts
    digits: list[RefinedDigit] = []
    for dim, (b, a) in enumerate(zip(before, after, strict=True)):
        own = [] if padded[dim] else [RefinedDigit(dim, 0, None, None)]
        at = beside = 0
        # Minor first: between two cuts, each numeral has one holder.
        for low, high in pairwise(dims[dim]):
            while b[at].place * b[at].radix <= low:
                at += 1
            while a[beside].place * a[beside].radix <= low:
                beside += 1
            own.append(RefinedDigit(dim, high // low, _segment_holder(b[at], low), _segment_holder(a[beside], low)))
        digits += own[::-1]
    exact = operand.shape == tuple(padded) and not opaque
    change = PartialChange((), (), ())
    if operand.partial or result.partial:
        change = _partial_change(operand, result, positions)
    return Refinement(tuple(digits), tuple(padded), exact, *change, frozenset(opaque))


def _round_elements(dim: Dim) -> int:
    """Elements in one value of the leading local digit; a numeral that starts with a held digit is one round."""
    if not dim.digits or dim.digits[0].axis is not None:
        return dim.padded
    return dim.padded // dim.digits[0].radix


@lru_cache(maxsize=4096)
def _list_segments(dim: Dim, mesh: Mesh, padded: int) -> tuple[_Segment, ...]:
    """The digits with their place values, minor first, the leading local one stretched to `padded`."""
    if padded == 0:
        return ()
    segments: list[_Segment] = []
    place = 1
    for radix, axis in reversed(dim.digits):
        segments.append(_Segment(place, radix, None if axis is None else mesh.stride(axis)))
        place *= radix
    if place == padded:
        return tuple(segments)
    if segments and segments[-1].stride is None:
        place = segments.pop().place
    return (*segments, _Segment(place, padded // place, None))


def _segment_holder(segment: _Segment, place: int) -> int | None:
    """The stride that holds the part of a segment that starts at a place."""
    return None if segment.stride is None else segment.stride * (place // segment.place)


def _cut_numerals(
    before: Sequence[Sequence[_Segment]], after: Sequence[Sequence[_Segment]], partial: list[Factor]
) -> tuple[list[list[int]], list[int]] | None:
    """Where each dim and the device positions must be cut; None if the cuts do not divide each other."""
    dims: list[set[int]] = []
    held: list[tuple[set[int], int, int, int]] = []
    for b, a in zip(before, after, strict=True):
        cuts = {end for low, radix, _ in (*b, *a) for end in (low, low * radix)}
        dims.append(cuts)
        held += [(cuts, place, radix, stride) for place, radix, stride in (*b, *a) if stride is not None]
    positions = {end for _, _, radix, stride in held for end in (stride, stride * radix)}
    positions.update(end for stride, size in partial for end in (stride, stride * size))
    # A cut inside a held digit cuts its sub-axis in the same proportion, and a cut inside the sub-axis cuts the digit.
    # All cuts divide the padded sizes or the number of devices, so only finitely many can be added and the loop ends.
    changed = True
    while changed:
        changed = False
        for cuts, place, radix, stride in held:
            in_digit, in_axis = _cuts_inside(cuts, place, radix), _cuts_inside(positions, stride, radix)
            if in_digit is None or in_axis is None:
                return None
            if in_digit != in_axis:
                cuts.update(place * cut for cut in in_axis)
                positions.update(stride * cut for cut in in_digit)
                changed = True
    chains, chain = [sorted(cuts) for cuts in dims], sorted(positions)
    return (chains, chain) if all(map(is_chain, (*chains, chain))) else None


def _cuts_inside(cuts: set[int], low: int, radix: int) -> set[int] | None:
    """The cuts strictly inside a digit, as ratios to its low end; None if one does not divide."""
    inside: set[int] = set()
    for cut in cuts:
        if low < cut < low * radix:
            if cut % low:
                return None
            inside.add(cut // low)
    return inside


def partial_change(operand: Layout, result: Layout, also: Iterable[int] = ()) -> PartialChange | None:
    """What becomes of the partial sub-axes of two layouts on one mesh, cut at other positions `also`; None if the two
    cut an axis in ways that do not nest.

    >>> mesh = Mesh(x=6)
    >>> partial_change(Layout.parse("f32[5] + sum{x}", mesh), Layout.parse("f32[5] + sum{x:(1)2}", mesh))
    PartialChange(kept=(Factor(stride=3, size=2),), reduced=(Factor(stride=1, size=3),), started=())
    """
    factors = [*_summand_factors(operand), *_summand_factors(result)]
    cuts = sorted({*also, *(end for stride, size in factors for end in (stride, stride * size))})
    return _partial_change(operand, result, cuts) if is_chain(cuts) else None


def _partial_change(operand: Layout, result: Layout, cuts: list[int]) -> PartialChange:
    """The change of factors that are cut at these positions; nothing is kept where another operation follows."""
    sides: list[list[Factor]] = []
    for layout in (operand, result):
        sides.append([])
        for stride, size in _summand_factors(layout):
            ends = [cut for cut in cuts if stride <= cut <= stride * size]
            sides[-1] += [Factor(low, high // low) for low, high in pairwise(ends)]
    were, are = sides
    kept = [f for f in were if f in are] if operand.reduction == result.reduction else []
    return PartialChange(tuple(kept), tuple(f for f in were if f not in kept), tuple(f for f in are if f not in kept))


def _summand_factors(layout: Layout) -> list[Factor]:
    return [Factor(layout.mesh.stride(axis), axis.size) for axis in layout.partial]


# A layout with some sub-axes released: the digits that they held become local.
#
#     f32[{x}{y}2] on <x=4, y=2>     without x: f32[4{y}2], without x:(1)2: f32[2{x:(2)2}{y}2]
#
# Devices that differ only along these sub-axes have such a tile among them: what a sum that is split along them may be
# made of, with no data received.


def release_digits(layout: Layout, factors: Iterable[Factor]) -> Layout:
    """The layout in which no digit is held along these factors of the device positions; its partial sub-axes stay.

    >>> print(release_digits(Layout.parse("f32[{x}3/10, {y}2]", Mesh(x=4, y=2)), [Factor(2, 4)]))
    f32[10, {y}2]
    >>> print(release_digits(Layout.parse("f32[{x}{y}(3,1,4,2)]", Mesh(x=2, y=2)), [Factor(2, 2)]))
    f32[{y}(3@0,1@1,4@0,2@1)]
    """
    mesh, spans = layout.mesh, [(factor.stride, factor.stride * factor.size) for factor in factors]
    dims: list[Dim] = []
    for dim in layout.dims:
        digits: list[Digit] = []
        numbers = [0]  # For each piece, the number of the one that it becomes part of.
        for digit in dim.digits:
            if digit.axis is None:
                digits.append(digit)
                continue
            low, high = mesh.span(digit.axis)
            inside = [(max(low, start), min(high, end)) for start, end in spans if start < high and low < end]
            if not all(is_chain(sorted({low, high, *span})) for span in spans):
                inside = [(low, high)]  # A factor that does not nest with the holder takes all of it.
            cuts = sorted({low, high, *(end for part in inside for end in part)})
            for lower, upper in [*pairwise(cuts)][::-1]:
                radix, released = upper // lower, any(start <= lower < end for start, end in inside)
                if released:
                    digits.append(Digit(radix, None))
                else:
                    digits += [Digit(axis.size, axis) for axis in mesh.sub_axes(lower, radix)]
                if dim.pieces is not None:
                    radix, copies = (1, radix) if released else (radix, 1)
                    numbers = [n * radix + value for n in numbers for value in range(radix) for _ in range(copies)]
        if dim.pieces is None:
            dims.append(fit_digits(digits, dim.size))
            continue
        held = [digit for digit in digits if digit.axis is not None]
        pieces = dim.pieces.renumbered(numbers, math.prod(digit.radix for digit in held))
        dims.append(Dim((*held, Digit(pieces.largest, None)), dim.size, pieces))
    return Layout(mesh, tuple(dims), layout.dtype, layout.reduction, layout.partial)
