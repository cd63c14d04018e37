"""Routes from partial arrays: reduce first, since every later byte is then a finished one.

A reduce-scatter over f devices shrinks the tile f times, so it comes before any other move, each
partial sub-axis onto the digit that it holds in the target if that is local, else onto one that a
later gather or move sets right. Devices along axes that neither layout uses reduce by themselves.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import NamedTuple

from reshard.errors import LayoutError
from reshard.synth.routes import permute_first
from reshard.synth.routes.normal import Atoms, Route, State
from reshard.types.layout import Digit, Dim, Layout, fitted
from reshard.types.mesh import Mesh, SubAxis, places, prime_places
from reshard.types.pair.refine import Factor, Refinement, refine
from reshard.types.plan import StepSpec


def starts(source: Layout, target: Layout) -> Iterator[tuple[Route, Layout]]:
    """Ways to be rid of the partial sub-axes: moves, and the finished layout that they reach."""
    bare = Layout(source.mesh, source.dims, source.dtype, target.reduction, target.partial)
    refinement = refine(source, target)
    reduced = list(refinement.reduced) if refinement is not None else _factors(source, target)
    for scattered in _choices(target, reduced):
        # Sub-axes of the two layouts that cannot co-exist in one rule a choice out, never the last.
        with contextlib.suppress(LayoutError):
            yield _start(source, bare, refinement, scattered, reduced)
    with contextlib.suppress(LayoutError):
        yield from _along_chains(source, bare, target, reduced)


def _along_chains(
    source: Layout, bare: Layout, target: Layout, reduced: list[Factor]
) -> Iterator[tuple[Route, Layout]]:
    """Partial sub-axes are free for the array that they reduce to: each goes where its chain, or its
    dim's last place, would have it sliced, so that a permute can set it right.
    """
    spans = [(f.stride, f.stride * f.size) for f in reduced]
    refinement = refine(bare, target)
    if refinement is None:
        cut = permute_first.sliced(bare, target, spans)
        if cut is not None:
            yield _scattered(source, bare, *cut, reduced)
        return
    atoms = Atoms(bare, target, refinement, prime=True)
    for full in dict.fromkeys((atoms.sliced(), atoms.sliced(atoms.loans()), _borrowed(atoms, spans))):
        first = tuple(s if _inside(d, spans) else d for s, d in zip(atoms.start, full, strict=True))
        yield _scattered(source, bare, atoms.layout(first), atoms.layout(full), reduced)


def _borrowed(atoms: Atoms, spans: list[tuple[int, int]]) -> State:
    """Local digits that other sub-axes are to slice, scattered by partial ones that are at hand."""
    full = atoms.sliced()
    spare = [a for a in atoms.atoms if a.src is not None and _inside(a.dst, spans) and a.dst not in full]
    found: list[int | None] = []
    for atom, stride in zip(atoms.atoms, full, strict=True):
        mine = atom.src is None and stride is not None and not _inside(stride, spans)
        match = next((a for a in spare if mine and a.radix == atom.radix), None)
        if match is not None:
            spare.remove(match)
        found.append(stride if match is None else match.dst)
    return tuple(found)


def _scattered(
    source: Layout, bare: Layout, part: Layout, whole: Layout, reduced: list[Factor]
) -> tuple[Route, Layout]:
    """slice to `part` ; reduce_scatter to `whole` ; all_reduce over what no digit took."""
    used = {p for axis in whole.held for p in prime_places(source.mesh, axis)}
    left = [p for f in reduced for p in places(f.stride, f.size) if p not in used]
    partial = tuple(s for stride, size in left for s in source.mesh.sub_axes(stride, size))
    moves: list[StepSpec] = []
    now = _move(moves, "slice", source, _partial(part, source, source.partial))
    now = _move(moves, "reduce_scatter", now, _partial(whole, source, (*bare.partial, *partial)))
    now = _move(moves, "all_reduce", now, _partial(whole, bare, bare.partial))
    return tuple(moves), now


def _partial(dims: Layout, like: Layout, partial: tuple[SubAxis, ...]) -> Layout:
    return Layout(dims.mesh, dims.dims, like.dtype, like.reduction, partial)


def _inside(stride: int | None, spans: list[tuple[int, int]]) -> bool:
    return stride is not None and any(low <= stride < high for low, high in spans)


def _choices(target: Layout, reduced: list[Factor]) -> Iterator[list[Factor]]:
    """Which partial factors to scatter: all, those that the target holds, or none."""
    held = [(target.mesh.stride(s), target.mesh.stride(s) * s.size) for s in target.held]
    wanted = [f for f in reduced if any(low <= f.stride < high for low, high in held)]
    choices = [reduced, wanted]
    for axis in {target.mesh.axis_at(f.stride) for f in reduced}:
        # Scattered along some axes only, the rest is an all-reduce of little: best across slow links.
        choices.append([f for f in reduced if target.mesh.axis_at(f.stride) == axis])
        choices.append([f for f in reduced if target.mesh.axis_at(f.stride) != axis])
    yield from (c for at, c in enumerate(choices) if c and c not in choices[:at])
    yield []


def _start(
    source: Layout,
    bare: Layout,
    refinement: Refinement | None,
    scattered: list[Factor],
    reduced: list[Factor],
) -> tuple[Route, Layout]:
    """slice ; reduce_scatter ; all_reduce, leaving out what does not apply or does not fit."""
    digits = _Digits(source, refinement)
    moves: list[StepSpec] = []
    for factor in digits.sliceable():
        if factor not in reduced:
            digits.hold(factor)
    now = _move(moves, "slice", source, digits.layout(source))
    done = [f for f in scattered if digits.hold(f)]
    left = tuple(s for f in reduced if f not in done for s in source.mesh.sub_axes(*f))
    partial = (*bare.partial, *left)
    after = digits.layout(Layout(source.mesh, source.dims, source.dtype, source.reduction, partial))
    now = _move(moves, "reduce_scatter", now, after)
    finished = Layout(now.mesh, now.dims, now.dtype, bare.reduction, bare.partial)
    now = _move(moves, "all_reduce", now, finished)
    return tuple(moves), now


def _move(moves: list[StepSpec], kind: str, before: Layout, after: Layout) -> Layout:
    if before != after:
        moves.append(StepSpec(kind, after))
    return after


class _Slot(NamedTuple):
    """A digit of the source: who holds it, and which stride is to hold it in the target."""

    radix: int
    holder: int | None
    wanted: int | None


class _Digits:
    """The source's digits, cut as the target needs them, while factors come to hold local ones."""

    def __init__(self, source: Layout, refinement: Refinement | None) -> None:
        self.mesh = source.mesh
        self.dims: list[list[_Slot]] = [[] for _ in source.dims]
        if refinement is not None:
            for atom in refinement.digits:
                self.dims[atom.dim].append(_Slot(atom.radix, atom.src, atom.dst))
            return
        for slots, dim in zip(self.dims, source.dims, strict=True):
            slots += [_Slot(r, None if s is None else source.mesh.stride(s), None) for r, s in dim.digits]

    def sliceable(self) -> list[Factor]:
        """Factors that the target wants on local digits and nothing holds yet."""
        slots = [slot for dim in self.dims for slot in dim]
        held = {slot.holder for slot in slots}
        return [
            Factor(slot.wanted, slot.radix)
            for slot in slots
            if slot.holder is None and slot.wanted is not None and slot.wanted not in held
        ]

    def hold(self, factor: Factor) -> bool:
        """Lets a factor hold the local digit that the target wants it on, or else any that it divides."""
        place = self._wanted_place(factor) or self._any_place(factor)
        if place is None:
            return False
        dim, at = place
        slot = self.dims[dim][at]
        rest = [_Slot(slot.radix // factor.size, None, None)] if slot.radix > factor.size else []
        self.dims[dim][at : at + 1] = [_Slot(factor.size, factor.stride, slot.wanted), *rest]
        return True

    def _places(self) -> Iterator[tuple[int, int, _Slot]]:
        """The local digits, each with its dim and its place there."""
        for dim, slots in enumerate(self.dims):
            yield from ((dim, at, slot) for at, slot in enumerate(slots) if slot.holder is None)

    def _wanted_place(self, factor: Factor) -> tuple[int, int] | None:
        fits = ((dim, at) for dim, at, slot in self._places() if (slot.wanted, slot.radix) == factor)
        return next(fits, None)

    def _any_place(self, factor: Factor) -> tuple[int, int] | None:
        fits = (
            (dim, at)
            for dim, at, slot in self._places()
            if slot.wanted is None and slot.radix and slot.radix % factor.size == 0
        )
        return next(fits, None)

    def layout(self, like: Layout) -> Layout:
        """The layout of these digits, partial as another one is."""
        dims = tuple(self._dim(slots, dim.size) for slots, dim in zip(self.dims, like.dims, strict=True))
        return Layout(self.mesh, dims, like.dtype, like.reduction, like.partial)

    def _dim(self, slots: list[_Slot], size: int) -> Dim:
        found: list[Digit] = []
        for radix, stride, _ in slots:
            if stride is None:
                found.append(Digit(radix, None))
            else:
                found += [Digit(s.size, s) for s in self.mesh.sub_axes(stride, radix)]
        return fitted(found, size)


def _factors(source: Layout, target: Layout) -> list[Factor]:
    return [_factor(source.mesh, s) for s in source.partial if s not in target.partial]


def _factor(mesh: Mesh, sub: SubAxis) -> Factor:
    return Factor(mesh.stride(sub), sub.size)
