"""The form of a plan: its layouts as strings of atoms, some of whose sizes may be any.

    f32[{x}4, 16] -> f32[16, {x}4]   on <x=4>        dim 0 = x n0, dim 1 = 4 n1, with n0 = n1 = 4 here

Cut the numerals of all layouts of a plan at the same places, closed under held digits. A digit
between two cuts is an **atom**. One that no layout holds by a device is a **free** atom: nothing ties
its radix to the mesh, and it gets a name. Whatever is shown of the named digits without a look at
their radices holds for all sizes of the form. A dim that is padded anywhere, or whose numerals do
not nest, keeps its size.

Every tile, block and message has every free atom whole, so every size of a program is a whole
number times the product of the names.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from reshard.types.layout import Dim, Layout
from reshard.types.mesh import Mesh

Place = tuple[int, int]
"""A dim, and a place value in it, minor digits first."""


class Segment(NamedTuple):
    """A digit at a place value of its dim, local or held by a device stride."""

    low: int
    radix: int
    stride: int | None


class Atom(NamedTuple):
    """A digit of two numerals at once: its holder before and after, and its name if its size varies."""

    dim: int
    low: int
    radix: int
    src: int | None
    dst: int | None
    name: str | None

    @property
    def place(self) -> Place:
        """What tells the atom from the others."""
        return self.dim, self.low


@dataclass(frozen=True)
class Form:
    """The names of the free atoms, with their sizes here, and the dims that keep theirs, with the reason."""

    names: dict[Place, str]
    sizes: dict[str, int]
    cuts: dict[int, tuple[int, ...]]
    fixed: dict[int, str]

    @property
    def unit(self) -> int:
        """The product of the sizes that vary, as they are here."""
        return math.prod(self.sizes.values())

    def spell(self, layout: Layout) -> str:
        """A layout's dims with names for the sizes that vary."""
        return f"[{', '.join(self._dim(at, dim, layout.mesh) for at, dim in enumerate(layout.dims))}]"

    def _dim(self, at: int, dim: Dim, mesh: Mesh) -> str:
        found: list[str] = []
        low = dim.padded
        for radix, axis in dim.digits:
            low = low // radix if radix else 0
            if axis is None:
                found.append(" ".join(self._local(at, low, radix)))
            else:
                found.append(f"{{{mesh.spell(axis)}}}")
        return "".join(found) + ("" if dim.padded == dim.size else f"/{dim.size}")

    def _local(self, at: int, low: int, radix: int) -> list[str]:
        """A local digit as its atoms: names, and numbers for what is tied."""
        if at not in self.cuts:
            return [str(radix)]
        ends = [c for c in self.cuts[at] if low <= c <= low * radix]
        parts = [self.names.get((at, lo), str(hi // lo)) for lo, hi in itertools.pairwise(ends)]
        return parts[::-1] or ["1"]


def form_of(layouts: Sequence[Layout], extra: Iterable[Place], tied: Collection[Place]) -> Form:
    """The form of a chain of layouts, cut at `extra` places too; `tied` places get no name."""
    fixed = {at: why for at in range(len(layouts[0].dims)) if (why := _keeps(layouts, at))}
    extra = list(extra)
    while True:
        dims = {at: set[int]() for at in range(len(layouts[0].dims)) if at not in fixed}
        held: list[tuple[int, Segment]] = []
        for layout in layouts:
            _mark(layout, {at: layout.dims[at].padded for at in dims}, dims, held)
        for at, low in extra:
            if at in dims:
                dims[at].add(low)
        devices = _ends((layout.mesh.stride(a), a.size) for layout in layouts for a in layout.partial)
        bad = close(dims, held, devices)
        if not bad:
            break
        fixed |= dict.fromkeys(bad, "its numerals do not nest")
    cuts = {at: tuple(sorted(places)) for at, places in dims.items()}
    free = [(at, lo, hi) for at, ends in cuts.items() for lo, hi in itertools.pairwise(ends) if _free(held, at, lo)]
    free = [(at, lo, hi) for at, lo, hi in free if (at, lo) not in tied]
    names = {(at, lo): _name(at, lo, free) for at, lo, _ in free}
    return Form(names, {names[at, lo]: hi // lo for at, lo, hi in free}, cuts, fixed)


def atoms_of(operand: Layout, result: Layout, form: Form) -> tuple[Atom, ...] | None:
    """The atoms of one step, dim by dim, major first; None where the two numerals do not nest."""
    if operand.mesh.size != result.mesh.size or operand.mesh.device_ids != result.mesh.device_ids:
        return None
    padded = {at: p for at, (a, b) in enumerate(zip(operand.dims, result.dims, strict=True)) if (p := _common(a, b))}
    if len(padded) < len(operand.dims):
        return None
    dims = {at: set(form.cuts.get(at, ())) for at in padded}
    sides: list[list[tuple[int, Segment]]] = [[], []]
    segments: list[dict[int, list[Segment]]] = []
    for layout, held in zip((operand, result), sides, strict=True):
        segments.append(_mark(layout, padded, dims, held))
    partial = ((lay.mesh.stride(a), a.size) for lay in (operand, result) for a in lay.partial)
    if close(dims, [*sides[0], *sides[1]], _ends(partial)):
        return None
    found: list[Atom] = []
    for at, places in dims.items():
        for low, high in reversed(list(itertools.pairwise(sorted(places)))):
            src, dst = (_holder(side[at], low) for side in segments)
            name = form.names.get((at, low)) if src is None and dst is None else None
            found.append(Atom(at, low, high // low, src, dst, name))
    return tuple(found)


def close(dims: dict[int, set[int]], held: Sequence[tuple[int, Segment]], devices: set[int]) -> set[int]:
    """Cuts held digits and device strides in the same proportions; the dims where that cannot be.

    Cuts only join a finite set of divisors, so the loop ends.
    """
    for _, (_, radix, stride) in held:
        devices.update((stride or 0, (stride or 0) * radix))
    changed = True
    while changed:
        changed = False
        for at, (low, radix, stride) in held:
            base = stride or 0
            inner, outer = _inside(dims[at], low, radix), _inside(devices, base, radix)
            if inner is None or outer is None:
                return {at}
            if inner != outer:
                dims[at].update(low * c for c in outer)
                devices.update(base * c for c in inner)
                changed = True
    bad = {at for at, places in dims.items() if not _nests(places)}
    return bad if bad or _nests(devices) else {at for at, _ in held}


def local_place(layout: Layout, at: int, count: int) -> int | None:
    """The place value, in a dim, of the local index `count`; None if it is inside a smaller factor."""
    low = local = 1
    for radix, axis in reversed(layout.dims[at].digits):
        if axis is None:
            if local <= count < local * radix:
                return low * (count // local) if count % local == 0 else None
            local *= radix
        low *= radix
    return low if count == local else None


def _keeps(layouts: Sequence[Layout], at: int) -> str | None:
    """Why a dim's size does not vary, if so."""
    if any(layout.dims[at].padded != layout.dims[at].size for layout in layouts):
        return "it is padded"
    if layouts[0].dims[at].size == 0:
        return "it is empty"
    meshes = {(layout.mesh.size, layout.mesh.device_ids) for layout in layouts}
    return None if len(meshes) == 1 else "its devices are counted in several orders"


def _mark(
    layout: Layout, padded: dict[int, int], dims: dict[int, set[int]], held: list[tuple[int, Segment]]
) -> dict[int, list[Segment]]:
    """Adds a layout's cuts and held digits, and returns its digits."""
    found = {at: _segments(layout.dims[at], layout.mesh, size) for at, size in padded.items()}
    for at, segments in found.items():
        dims[at] |= {1, padded[at]} | {s.low for s in segments} | {s.low * s.radix for s in segments}
        held += [(at, s) for s in segments if s.stride is not None]
    return found


def _segments(dim: Dim, mesh: Mesh, padded: int) -> list[Segment]:
    """The digits by place value, minor first; rounds that hold nothing are added in front, up to `padded`."""
    found: list[Segment] = []
    low = 1
    for radix, axis in reversed(dim.digits):
        found.append(Segment(low, radix, None if axis is None else mesh.stride(axis)))
        low *= radix
    if low != padded:
        if found and found[-1].stride is None:
            low = found.pop().low
        found.append(Segment(low, padded // low, None))
    return found


def _common(a: Dim, b: Dim) -> int | None:
    """The padded size that both reach by whole rounds in front; None for empty dims."""
    if a.padded == b.padded or 0 in (a.padded, b.padded):
        return a.padded if a.padded == b.padded else None
    step = math.lcm(_round(a), _round(b))
    return -(-max(a.padded, b.padded) // step) * step


def _round(dim: Dim) -> int:
    leads = bool(dim.digits) and dim.digits[0].axis is None
    return dim.padded // dim.digits[0].radix if leads else dim.padded


def _ends(factors: Iterable[tuple[int, int]]) -> set[int]:
    return {end for stride, size in factors for end in (stride, stride * size)}


def _inside(cuts: set[int], low: int, radix: int) -> set[int] | None:
    inner = [c for c in cuts if low < c < low * radix]
    return None if any(c % low for c in inner) else {c // low for c in inner}


def _nests(places: set[int]) -> bool:
    return all(low > 0 and high % low == 0 for low, high in itertools.pairwise(sorted(places)))


def _free(held: Sequence[tuple[int, Segment]], at: int, low: int) -> bool:
    return not any(dim == at and s.low <= low < s.low * s.radix for dim, s in held)


def _holder(segments: Sequence[Segment], low: int) -> int | None:
    for s in segments:
        if s.low <= low < s.low * s.radix:
            return None if s.stride is None else s.stride * (low // s.low)
    return None


def _name(at: int, low: int, free: Sequence[tuple[int, int, int]]) -> str:
    """n0 for the one free atom of dim 0; n0a, n0b, ... for several, major first."""
    mine = sorted((lo for dim, lo, _ in free if dim == at), reverse=True)
    return f"n{at}" if len(mine) == 1 else f"n{at}{chr(ord('a') + mine.index(low))}"
