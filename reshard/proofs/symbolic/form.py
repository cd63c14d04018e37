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
from collections.abc import Collection, Iterable, Mapping, Sequence
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
        if dim.pieces is not None:
            return "".join(f"{{{mesh.spell(axis)}}}" for _, axis in dim.digits if axis is not None) + f"{dim.pieces}"
        low = dim.padded
        for radix, axis in dim.digits:
            low = low // radix if radix else 0
            if axis is not None:
                words.append(f"{{{mesh.spell(axis)}}}")
            elif at not in self.cuts:
                words.append(str(radix))
            else:  # Cut into digits of the form: names for free ones, numbers for the others.
                ends = [c for c in self.cuts[at] if low <= c <= low * radix]
                cut = [self.names.get((at, lo), str(hi // lo)) for lo, hi in itertools.pairwise(ends)]
                words.append(" ".join(cut[::-1]) or "1")
        return "".join(words) + ("" if dim.padded == dim.size else f"/{dim.size}")


def form_of(layouts: Sequence[Layout], extra: Iterable[Place], tied: Collection[Place]) -> Form:
    """The form of a chain of layouts, also cut at the `extra` places; digits at `tied` places get no name."""
    orders = {(layout.mesh.size, layout.mesh.device_ids) for layout in layouts}
    fixed: dict[int, str] = {}  # why a dim keeps its size, whatever its numerals
    for at, dim in enumerate(layouts[0].dims):
        if any(layout.dims[at].pieces is not None for layout in layouts):
            fixed[at] = "the sizes of its pieces are data"
        elif any(layout.dims[at].padded != layout.dims[at].size for layout in layouts):
            fixed[at] = "it is padded"
        elif dim.size == 0:
            fixed[at] = "it is empty"
        elif len(orders) > 1:
            fixed[at] = "its devices are counted in several orders"
    extra = list(extra)
    while True:  # ends: each round fixes a dim
        sizes = {at: dim.padded for at, dim in enumerate(layouts[0].dims) if at not in fixed}
        digits = [digit for layout in layouts for digit in _placed(layout, sizes)]
        cuts = _cuts_of(digits, sizes)
        for at, low in extra:
            cuts.get(at, set()).add(low)
        crossing = close_cuts(cuts, digits, _partial_ends(layouts))
        if not crossing:
            break
        fixed |= dict.fromkeys(crossing, "its numerals do not nest")
    ends = {at: tuple(sorted(places)) for at, places in cuts.items()}
    held = [digit for digit in digits if digit.stride is not None]
    names: dict[Place, str] = {}
    radices: dict[str, int] = {}
    for at, places in ends.items():
        pairs = [(low, high) for low, high in itertools.pairwise(places) if (at, low) not in tied]
        free = [(low, high) for low, high in pairs if _digit_at(held, at, low) is None]
        for number, (low, _) in enumerate(reversed(free)):  # n0, or n0a, n0b, ... for several, major first
            names[at, low] = f"n{at}" if len(free) == 1 else f"n{at}{chr(ord('a') + number)}"
        radices |= {names[at, low]: high // low for low, high in free}
    return Form({place: names[place] for place in sorted(names)}, radices, ends, fixed)


def step_digits(
    operand: Layout, result: Layout, form: Form, extra: Sequence[Place] = ()
) -> tuple[FormDigit, ...] | None:
    """The digits of one step, dim by dim and major first; None if the two numerals do not nest.

    They are also cut at the `extra` places, which the form knows only in dims whose size may vary.
    """
    if operand.mesh.size != result.mesh.size or operand.mesh.device_ids != result.mesh.device_ids:
        return None
    sizes: dict[int, int] = {}
    for at, (a, b) in enumerate(zip(operand.dims, result.dims, strict=True)):
        if a.pieces is not None or b.pieces is not None:
            # As they are on both sides they are digits like others: which index is where does not matter.
            ends = (a, operand.mesh), (b, result.mesh)
            held = [[axis and mesh.stride(axis) for _, axis in dim.digits] for dim, mesh in ends]
            if a.pieces != b.pieces or held[0] != held[1]:
                return None
        if 0 in (a.padded, b.padded):
            return None
        # The padded size that both dims reach by whole rounds in front, each one value of the leading digit.
        rounds = [d.padded // d.digits[0].radix if d.digits and d.digits[0].axis is None else d.padded for d in (a, b)]
        step = math.lcm(*rounds)
        sizes[at] = a.padded if a.padded == b.padded else -(-max(a.padded, b.padded) // step) * step
    before, after = _placed(operand, sizes), _placed(result, sizes)
    cuts = _cuts_of([*before, *after], sizes)
    for at in sizes:
        cuts[at] |= set(form.cuts.get(at, ())) | {low for dim, low in extra if dim == at}
    if close_cuts(cuts, [*before, *after], _partial_ends([operand, result])):
        return None
    digits: list[FormDigit] = []
    for at, places in cuts.items():
        for low, high in reversed(list(itertools.pairwise(sorted(places)))):
            src, dst = (
                None if own is None or own.stride is None else own.stride * (low // own.low)
                for own in (_digit_at(before, at, low), _digit_at(after, at, low))
            )
            name = form.names.get((at, low)) if src is None and dst is None else None
            digits.append(FormDigit(at, low, high // low, src, dst, name))
    return tuple(digits)


def close_cuts(cuts: Cuts, digits: Sequence[PlacedDigit], devices: set[int]) -> set[int]:
    """Extends `cuts` until held digits and device positions are cut alike; returns the dims where that is impossible.

    A cut at a ratio inside a held digit belongs at the same ratio inside the stride that holds it, and the reverse.
    Cuts are only added and always divide a size, so the loop ends.
    """
    held = [(digit, digit.stride) for digit in digits if digit.stride is not None]
    devices = devices.union(*((stride, stride * digit.radix) for digit, stride in held))
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


def _placed(layout: Layout, sizes: Mapping[int, int]) -> list[PlacedDigit]:
    """The digits of some dims of a layout, minor first; rounds without elements are added in front until a dim reaches
    its given padded size.
    """
    placed: list[PlacedDigit] = []
    for at, padded in sizes.items():
        low, digits = 1, list(layout.dims[at].digits)
        if layout.dims[at].padded != padded and digits and digits[0].axis is None:
            digits.pop(0)
        for radix, axis in reversed(digits):
            placed.append(PlacedDigit(at, low, radix, None if axis is None else layout.mesh.stride(axis)))
            low *= radix
        if low != padded:
            placed.append(PlacedDigit(at, low, padded // low, None))
    return placed


def _cuts_of(digits: Iterable[PlacedDigit], sizes: Mapping[int, int]) -> Cuts:
    cuts: Cuts = {at: {1, size} for at, size in sizes.items()}
    for digit in digits:
        cuts[digit.dim] |= {digit.low, digit.low * digit.radix}
    return cuts


def _partial_ends(layouts: Sequence[Layout]) -> set[int]:
    """Where the device factors of summands begin and end."""
    spans = [(layout.mesh.stride(axis), axis.size) for layout in layouts for axis in layout.partial]
    return {end for stride, size in spans for end in (stride, stride * size)}


def _ratios(cuts: set[int], low: int, radix: int) -> set[int] | None:
    """The cuts strictly inside a digit, divided by its low end; None if one is not a multiple of it."""
    inner = [c for c in cuts if low < c < low * radix]
    return None if any(c % low for c in inner) else {c // low for c in inner}


def _nest(places: set[int]) -> bool:
    """Whether each place divides the next one."""
    return all(low > 0 and high % low == 0 for low, high in itertools.pairwise(sorted(places)))


def _digit_at(digits: Sequence[PlacedDigit], at: int, low: int) -> PlacedDigit | None:
    """The digit that covers a place."""
    return next((d for d in digits if d.dim == at and d.low <= low < d.low * d.radix), None)
