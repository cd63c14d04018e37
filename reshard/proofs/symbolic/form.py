"""The form of a plan: its layouts as strings of digits, some of which may have any size.

    f32[{x}4, 16] -> f32[16, {x}4]   on <x=4>

    dim 0   before {x} 4     after 4 4       digits, major first: 4 held by x, then n0 (here 4)
    dim 1   before 16        after {x} 4     digits, major first: 4 that x comes to hold, then n1 (here 4)

    spelled [{x}n0, 4 n1] -> [4 n0, {x}n1]

The numerals of all layouts of a plan are cut at the same places. A cut inside a held digit also cuts the device
positions, and through them the digits that the same devices hold elsewhere. What lies between two neighbouring cuts is
a **digit** of the form. If no layout holds it by a device, nothing ties its radix to the mesh: the digit is **free**
and gets a name. A claim that never looks at the radices of named digits holds for all sizes of the form. A dim
keeps its size if some layout pads it or if its numerals do not nest.

Every tile, block and message contains each free digit whole, so every size in a program is an integer times the product
of the names.

**Why this module does not use `geometry.refine`.** Both compute a common refinement, but every typing rule, bound and
lowering rests on `refine`. If the prover used it too, a fault there would be proved right. This module
therefore reads the layouts by itself: it knows `types.layout` and `types.mesh` only, and it refines a whole chain of
layouts where `refine` takes a pair.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from reshard.types.layout import Dim, Layout
from reshard.types.mesh import Mesh

Place = tuple[int, int]
"""A dim and a place value in it."""

Cuts = dict[int, set[int]]
"""Per dim, the place values at which its numerals are cut."""


class Tied(Exception):
    """Raised when an instruction cuts free digits, given as (dim, place); the proof restarts with their sizes fixed."""

    def __init__(self, places: frozenset[Place]) -> None:
        super().__init__(f"digits {sorted(places)} are cut")
        self.places = places


class PlacedDigit(NamedTuple):
    """A digit of one layout at a place value of its dim, local or held along a device stride."""

    dim: int
    low: int
    radix: int
    stride: int | None

    def holder(self, low: int) -> int | None:
        """The stride that holds the part of this digit which starts at place `low`."""
        return None if self.stride is None else self.stride * (low // self.low)


class FormDigit(NamedTuple):
    """A digit of the form in one step: the strides that hold it before and after, and its name if its size varies."""

    dim: int
    low: int
    radix: int
    src: int | None
    dst: int | None
    name: str | None

    @property
    def place(self) -> Place:
        """The dim and the place value, which identify the digit."""
        return self.dim, self.low


@dataclass(frozen=True)
class Form:
    """The names of the free digits, their sizes here, the cuts of every dim, and why other dims are fixed."""

    names: dict[Place, str]
    sizes: dict[str, int]
    cuts: dict[int, tuple[int, ...]]
    fixed: dict[int, str]

    @property
    def unit(self) -> int:
        """The product of the sizes that vary, at their values here."""
        return math.prod(self.sizes.values())

    def spell(self, layout: Layout) -> str:
        """A layout's dims, with names for the sizes that vary."""
        return f"[{', '.join(self._dim(at, dim, layout.mesh) for at, dim in enumerate(layout.dims))}]"

    def _dim(self, at: int, dim: Dim, mesh: Mesh) -> str:
        words: list[str] = []
        low = dim.padded
        for radix, axis in dim.digits:
            low = low // radix if radix else 0
            words.append(" ".join(self._local(at, low, radix)) if axis is None else f"{{{mesh.spell(axis)}}}")
        return "".join(words) + ("" if dim.padded == dim.size else f"/{dim.size}")

    def _local(self, at: int, low: int, radix: int) -> list[str]:
        """A local digit cut into digits of the form: names for free ones, numbers for the others."""
        if at not in self.cuts:
            return [str(radix)]
        ends = [c for c in self.cuts[at] if low <= c <= low * radix]
        words = [self.names.get((at, lo), str(hi // lo)) for lo, hi in itertools.pairwise(ends)]
        return words[::-1] or ["1"]


def form_of(layouts: Sequence[Layout], extra: Iterable[Place], tied: Collection[Place]) -> Form:
    """The form of a chain of layouts, also cut at the `extra` places; digits at `tied` places get no name."""
    rank = len(layouts[0].dims)
    fixed = {at: why for at in range(rank) if (why := _why_fixed(layouts, at))}
    extra = list(extra)
    while True:
        sizes = {at: layouts[0].dims[at].padded for at in range(rank) if at not in fixed}
        digits = [digit for layout in layouts for digit in _placed(layout, sizes)]
        cuts = _ends_by_dim(digits, sizes)
        for at, low in extra:
            cuts.get(at, set()).add(low)
        crossing = close(cuts, digits, _partial_ends(layouts))
        if not crossing:
            return _named(cuts, digits, fixed, tied)
        fixed |= dict.fromkeys(crossing, "its numerals do not nest")


def step_digits(
    operand: Layout, result: Layout, form: Form, extra: Sequence[Place] = ()
) -> tuple[FormDigit, ...] | None:
    """The digits of one step, dim by dim and major first; None if the two numerals do not nest.

    They are also cut at the `extra` places, which the form knows only in dims whose size may vary.
    """
    if operand.mesh.size != result.mesh.size or operand.mesh.device_ids != result.mesh.device_ids:
        return None
    sizes = {at: _common(a, b) for at, (a, b) in enumerate(zip(operand.dims, result.dims, strict=True))}
    if not all(sizes.values()):
        return None
    before, after = _placed(operand, sizes), _placed(result, sizes)
    cuts = _ends_by_dim([*before, *after], sizes)
    for at in sizes:
        cuts[at] |= set(form.cuts.get(at, ())) | {low for dim, low in extra if dim == at}
    if close(cuts, [*before, *after], _partial_ends([operand, result])):
        return None
    return tuple(_form_digits(cuts, before, after, form))


def _form_digits(
    cuts: Cuts, before: Sequence[PlacedDigit], after: Sequence[PlacedDigit], form: Form
) -> Iterator[FormDigit]:
    """What lies between neighbouring cuts, with its holders on both sides."""
    for at, places in cuts.items():
        for low, high in reversed(list(itertools.pairwise(sorted(places)))):
            src, dst = _holder(before, at, low), _holder(after, at, low)
            name = form.names.get((at, low)) if src is None and dst is None else None
            yield FormDigit(at, low, high // low, src, dst, name)


def close(cuts: Cuts, digits: Sequence[PlacedDigit], devices: set[int]) -> set[int]:
    """Extends `cuts` until held digits and device positions are cut alike; returns the dims where that is impossible.

    A cut at a ratio inside a held digit belongs at the same ratio inside the stride that holds it, and the reverse.
    Cuts are only added and always divide a size, so the loop ends.
    """
    held = [(digit, digit.stride) for digit in digits if digit.stride is not None]
    devices = devices | _ends((stride, digit.radix) for digit, stride in held)
    changed = True
    while changed:
        changed = False
        for digit, stride in held:
            inside, outside = _ratios(cuts[digit.dim], digit.low, digit.radix), _ratios(devices, stride, digit.radix)
            if inside is None or outside is None:
                return {digit.dim}
            changed |= inside != outside
            cuts[digit.dim] |= {digit.low * ratio for ratio in outside}
            devices |= {stride * ratio for ratio in inside}
    crossing = {at for at, places in cuts.items() if not _nest(places)}
    return crossing or (set() if _nest(devices) else {digit.dim for digit, _ in held})


def local_place(layout: Layout, at: int, count: int) -> int | None:
    """The place value in a dim of the local index `count`; None if that index is inside a smaller factor."""
    low = local = 1
    for radix, axis in reversed(layout.dims[at].digits):
        if axis is None:
            if local <= count < local * radix:
                return low * (count // local) if count % local == 0 else None
            local *= radix
        low *= radix
    return low if count == local else None


def _why_fixed(layouts: Sequence[Layout], at: int) -> str | None:
    """Why a dim keeps its size, whatever its numerals; None if its size may vary."""
    if any(layout.dims[at].padded != layout.dims[at].size for layout in layouts):
        return "it is padded"
    if layouts[0].dims[at].size == 0:
        return "it is empty"
    orders = {(layout.mesh.size, layout.mesh.device_ids) for layout in layouts}
    return None if len(orders) == 1 else "its devices are counted in several orders"


def _named(cuts: Cuts, digits: Sequence[PlacedDigit], fixed: dict[int, str], tied: Collection[Place]) -> Form:
    """The form of closed cuts: names for the digits that no layout holds, except those at `tied` places."""
    ends = {at: tuple(sorted(places)) for at, places in cuts.items()}
    held = [digit for digit in digits if digit.stride is not None]
    radices: dict[Place, int] = {}
    for at, places in ends.items():
        for low, high in itertools.pairwise(places):
            if _at(held, at, low) is None and (at, low) not in tied:
                radices[at, low] = high // low
    names = {place: _name(place, radices) for place in radices}
    return Form(names, {names[place]: radix for place, radix in radices.items()}, ends, fixed)


def _name(place: Place, free: Collection[Place]) -> str:
    """n0 for the only free digit of dim 0; n0a, n0b, ... for several, major first."""
    at, low = place
    mine = sorted((lo for dim, lo in free if dim == at), reverse=True)
    return f"n{at}" if len(mine) == 1 else f"n{at}{chr(ord('a') + mine.index(low))}"


def _placed(layout: Layout, sizes: dict[int, int]) -> list[PlacedDigit]:
    """The digits of some dims of a layout, minor first, stretched to the given padded sizes."""
    return [digit for at, size in sizes.items() for digit in _placed_in(layout, at, size)]


def _placed_in(layout: Layout, at: int, padded: int) -> Iterator[PlacedDigit]:
    """The digits of one dim; rounds without elements are added in front until it reaches its padded size."""
    low = 1
    digits = list(layout.dims[at].digits)
    if layout.dims[at].padded != padded and digits and digits[0].axis is None:
        digits.pop(0)
    for radix, axis in reversed(digits):
        yield PlacedDigit(at, low, radix, None if axis is None else layout.mesh.stride(axis))
        low *= radix
    if low != padded:
        yield PlacedDigit(at, low, padded // low, None)


def _common(a: Dim, b: Dim) -> int:
    """The padded size that both dims reach by whole rounds in front; 0 for empty dims."""
    if a.padded == b.padded or 0 in (a.padded, b.padded):
        return min(a.padded, b.padded)
    step = math.lcm(_round(a), _round(b))
    return -(-max(a.padded, b.padded) // step) * step


def _round(dim: Dim) -> int:
    """Elements of one round: one value of the leading digit if it is local, else the whole dim."""
    leads = bool(dim.digits) and dim.digits[0].axis is None
    return dim.padded // dim.digits[0].radix if leads else dim.padded


def _ends_by_dim(digits: Iterable[PlacedDigit], sizes: dict[int, int]) -> Cuts:
    cuts: Cuts = {at: {1, size} for at, size in sizes.items()}
    for digit in digits:
        cuts[digit.dim] |= {digit.low, digit.low * digit.radix}
    return cuts


def _partial_ends(layouts: Sequence[Layout]) -> set[int]:
    return _ends((layout.mesh.stride(axis), axis.size) for layout in layouts for axis in layout.partial)


def _ends(factors: Iterable[tuple[int, int]]) -> set[int]:
    return {end for stride, size in factors for end in (stride, stride * size)}


def _ratios(cuts: set[int], low: int, radix: int) -> set[int] | None:
    """The cuts strictly inside a digit, divided by its low end; None if one is not a multiple of it."""
    inner = [c for c in cuts if low < c < low * radix]
    return None if any(c % low for c in inner) else {c // low for c in inner}


def _nest(places: set[int]) -> bool:
    """Whether each place divides the next one."""
    return all(low > 0 and high % low == 0 for low, high in itertools.pairwise(sorted(places)))


def _at(digits: Sequence[PlacedDigit], at: int, low: int) -> PlacedDigit | None:
    """The digit that covers a place."""
    return next((d for d in digits if d.dim == at and d.low <= low < d.low * d.radix), None)


def _holder(digits: Sequence[PlacedDigit], at: int, low: int) -> int | None:
    digit = _at(digits, at, low)
    return None if digit is None else digit.holder(low)
