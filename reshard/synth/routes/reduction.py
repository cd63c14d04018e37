"""Routes from partial arrays: reduce first, so that every byte sent later is a finished one.

A reduce-scatter over f devices makes the tile f times smaller, so it comes before all other moves but slices, which
are free. Where does a partial sub-axis go? Onto the digit that it holds in the target if that is local, else onto any
local digit, from which a gather or a move sets it right; or nowhere, and an all-reduce finishes it.

A worked example: f32[16, 16] + sum{x}{z} -> f32[{y}8, {x}4] on <x=4, y=2, z=2>.

    step             layout                         received
                     f32[16, 16] + sum{x}{z}
    slice            f32[{y}8, 16] + sum{x}{z}           0 B   y holds a digit of the target: half as much to reduce
    reduce_scatter   f32[{y}{z}4, {x}4]                448 B   x onto the digit that it holds in the target, z onto any
    all_gather       f32[{y}8, {x}4]                    64 B   z holds nothing in the target

The rival leaves z to an all-reduce. It receives as much in as many launches, but its tiles stay large for longer: it
needs 2176 B of memory where the plan needs 2112 B:

    slice            f32[{y}8, 16] + sum{x}{z}           0 B
    reduce_scatter   f32[{y}8, {x}4] + sum{z}          384 B
    all_reduce       f32[{y}8, {x}4]                   128 B

Devices along axes that neither layout uses reduce by themselves.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from typing import NamedTuple

from reshard.errors import LayoutError, MeshError
from reshard.geometry.refine import Factor, Refinement, partial_change
from reshard.geometry.remesh import remesh
from reshard.plans.plan import StepSpec
from reshard.synth.network import Links
from reshard.synth.routes import boxes, normal, permute_first
from reshard.synth.routes.chains import Chains, State
from reshard.synth.routes.route import Pair, Route
from reshard.types.layout import Digit, Dim, Layout, fit_digits
from reshard.types.mesh import Mesh, SubAxis, places, prime_places

AFTERWARDS = (normal.routes, boxes.routes, permute_first.routes)
"""Routes on from a reduced layout."""

Start = tuple[Route, Layout]
"""Steps that finish the reduction, and the layout that they reach."""

_Spans = list[tuple[int, int]]
"""(stride, stride * size) of the partial sub-axes to finish."""


def routes(pair: Pair, links: Links | None) -> Iterator[Route]:
    """Every start, each continued to the target in every way.

    >>> from reshard.types import Mesh
    >>> mesh = Mesh(x=4, y=2)
    >>> pair = Pair(Layout.parse("f32[{y}8, 16] + sum{x}", mesh), Layout.parse("f32[16, {x}4]", mesh))
    >>> [step.kind for step in next(routes(pair, None))]
    ['reduce_scatter', 'all_gather']
    """
    if not pair.reduces or pair.starts:
        return
    if pair.source.mesh != pair.target.mesh:
        yield from _on_other_devices(pair, links)
        return
    for steps, finished in _list_starts(pair):
        rest = Pair(finished, pair.target)
        for continued in AFTERWARDS:
            yield from ((*steps, *route) for route in continued(rest, links))


def _on_other_devices(pair: Pair, links: Links | None) -> Iterator[Route]:
    """Routes for two meshes without a common one: reduce on the source's, then move the finished tiles.

    f32[16] + sum{x} on <x=4>, devices 0 1 2 3, to f32[{x}4] on devices 0 3 1 2: reduce-scatter to f32[{x}4] on the
    source's mesh, and permute.
    """
    source, target = pair.source, pair.target
    alike = Mesh(
        target.mesh.axes, device_ids=source.mesh.device_ids
    )  # Each tile at the same position as in the target.
    spelled = remesh(replace(target, mesh=alike), source.mesh)
    for near in dict.fromkeys((spelled, _make_partial(source, target, ()))):
        if near is not None:
            crossings = [*_list_crossings(Pair(near, target), links)]
            yield from ((*route, *last) for route in routes(Pair(source, near), links) for last in crossings)


def _list_crossings(pair: Pair, links: Links | None) -> Iterator[Route]:
    """Routes from one mesh to another: the structured ones that pass no layout which neither mesh can spell, and one
    exchange, which is always there.
    """
    for each in AFTERWARDS:
        with contextlib.suppress(MeshError):
            yield from each(pair, links)
    yield (StepSpec("exchange", pair.target),)


def _list_starts(pair: Pair) -> Iterator[Start]:
    """Ways to finish the partial sub-axes that the target does not have."""
    source, target = pair.source, pair.target
    bare = Layout(source.mesh, source.dims, source.dtype, target.reduction, target.partial)
    reduced = _reduced_factors(pair)
    # A slice by a digit that pads makes tiles larger, for example f32[4] to f32[1{x}64/4]: also reduce without slices.
    padded = pair.refinement is not None and not pair.refinement.exact
    for scattered in _choose_scattered(target, reduced):
        for first in (True, False) if padded else (True,):
            # A choice falls away where sub-axes of the two cannot coexist in one layout; the last one never does.
            with contextlib.suppress(LayoutError):
                yield _start_reduction(source, bare, pair.refinement, scattered, reduced, slice_first=first)
    with contextlib.suppress(LayoutError):
        yield from _along_chains(source, bare, target, reduced)


def _reduced_factors(pair: Pair) -> list[Factor]:
    """The factors to reduce over; where the layouts refine, cut where the digits of the target need them."""
    if pair.refinement is not None:
        return list(pair.refinement.reduced)
    change = partial_change(pair.source, pair.target)
    return [] if change is None else list(change.reduced)


# ---- partial sub-axes onto the digits of the target ------------------------------------------------


def _choose_scattered(target: Layout, reduced: list[Factor]) -> Iterator[list[Factor]]:
    """Which partial factors to scatter: all, those that the target holds, those along or beside one axis, or none."""
    held = [(target.mesh.stride(s), target.mesh.stride(s) * s.size) for s in target.held]
    choices = [reduced, [f for f in reduced if _lies_inside(f.stride, held)]]
    for axis in dict.fromkeys(target.mesh.axis_at(f.stride) for f in reduced):
        # Scattered along some axes only, the rest is an all-reduce of little data: best across slow links.
        along = [f for f in reduced if target.mesh.axis_at(f.stride) == axis]
        choices += [along, [f for f in reduced if f not in along]]
    yield from (c for at, c in enumerate(choices) if c and c not in choices[:at])
    yield []


def _start_reduction(
    source: Layout,
    bare: Layout,
    refinement: Refinement | None,
    scattered: list[Factor],
    reduced: list[Factor],
    slice_first: bool,
) -> Start:
    """slice ; reduce_scatter ; all_reduce, without those that do not apply or do not fit."""
    digits = _SourceDigits(source, refinement)
    for factor in digits.sliceable():
        if slice_first and factor not in reduced:
            digits.hold(factor)
    cut = digits.layout(source)
    done = [f for f in scattered if digits.hold(f)]
    left = tuple(s for f in reduced if f not in done for s in source.mesh.sub_axes(*f))
    scattered_to = digits.layout(_make_partial(source, source, (*bare.partial, *left)))
    return _finish_reduction(source, bare, cut, scattered_to)


# ---- partial sub-axes into the chains of the move that follows -------------------------------------


def _along_chains(source: Layout, bare: Layout, target: Layout, reduced: list[Factor]) -> Iterator[Start]:
    """Scatters that prepare the move after them: to the array without its sum, partial sub-axes are free.

    Each goes to the digit that the normal form of that move would slice by it, or to the last place of a dim, so that
    a permute can set it right.
    """
    spans = [(f.stride, f.stride * f.size) for f in reduced]
    pair = Pair(bare, target)
    if pair.refinement is None:
        cut = permute_first.slice_source(bare, target, spans)
        if cut is not None:
            yield _scatter_digits(source, bare, *cut, reduced)
        return
    chains = Chains(pair, pair.refinement, prime=True)
    for full in dict.fromkeys((chains.sliced(), chains.sliced(chains.borrowings()), _borrow_strides(chains, spans))):
        first = tuple(s if _lies_inside(d, spans) else d for s, d in zip(chains.start, full, strict=True))
        yield _scatter_digits(source, bare, chains.layout(first), chains.layout(full), reduced)


def _borrow_strides(chains: Chains, spans: _Spans) -> State:
    """The state after the slices, with partial strides at hand borrowed where other strides would slice."""
    full = chains.sliced()
    spare = [d for d in chains.digits if d.src is not None and _lies_inside(d.dst, spans) and d.dst not in full]
    state: list[int | None] = []
    for digit, stride in zip(chains.digits, full, strict=True):
        by_slice = digit.src is None and stride is not None and not _lies_inside(stride, spans)
        lender = next((d for d in spare if by_slice and d.radix == digit.radix), None)
        if lender is not None:
            spare.remove(lender)
        state.append(stride if lender is None else lender.dst)
    return tuple(state)


def _scatter_digits(source: Layout, bare: Layout, part: Layout, whole: Layout, reduced: list[Factor]) -> Start:
    """slice to `part` ; reduce_scatter to `whole` ; all_reduce over what no digit took."""
    used = {p for axis in whole.held for p in prime_places(source.mesh, axis)}
    left = [p for f in reduced for p in places(f.stride, f.size) if p not in used]
    partial = tuple(s for stride, size in left for s in source.mesh.sub_axes(stride, size))
    cut = _make_partial(part, source, source.partial)
    return _finish_reduction(source, bare, cut, _make_partial(whole, source, (*bare.partial, *partial)))


# ---- shared ----------------------------------------------------------------------------------------


def _finish_reduction(source: Layout, bare: Layout, cut: Layout, scattered: Layout) -> Start:
    """slice to `cut` ; reduce_scatter to `scattered` ; all_reduce of the rest, without those that change nothing."""
    path = [source, cut, scattered, _make_partial(scattered, bare, bare.partial)]
    kinds = ("slice", "reduce_scatter", "all_reduce")
    changes = zip(kinds, pairwise(path), strict=True)
    return tuple(StepSpec(kind, after) for kind, (before, after) in changes if before != after), path[-1]


def _make_partial(dims: Layout, like: Layout, partial: tuple[SubAxis, ...]) -> Layout:
    """The dims of one layout, partial over these sub-axes by the reduction of another."""
    return Layout(dims.mesh, dims.dims, like.dtype, like.reduction, partial)


def _lies_inside(stride: int | None, spans: _Spans) -> bool:
    return stride is not None and any(low <= stride < high for low, high in spans)


class _Slot(NamedTuple):
    """A digit of the source: the stride that holds it, and the stride that holds it in the target."""

    radix: int
    holder: int | None
    wanted: int | None


class _SourceDigits:
    """The source's digits, cut as the target needs them, while factors come to hold local ones."""

    def __init__(self, source: Layout, refinement: Refinement | None) -> None:
        self.mesh = source.mesh
        self.dims: list[list[_Slot]] = [[] for _ in source.dims]
        if refinement is not None:
            for digit in refinement.digits:
                self.dims[digit.dim].append(_Slot(digit.radix, digit.src, digit.dst))
            return
        for slots, dim in zip(self.dims, source.dims, strict=True):
            slots += [_Slot(r, None if s is None else source.mesh.stride(s), None) for r, s in dim.digits]

    def sliceable(self) -> list[Factor]:
        """Factors that nothing holds by yet, and that hold a local digit in the target."""
        slots = [slot for dim in self.dims for slot in dim]
        held = {slot.holder for slot in slots}
        return [
            Factor(slot.wanted, slot.radix)
            for slot in slots
            if slot.holder is None and slot.wanted is not None and slot.wanted not in held
        ]

    def hold(self, factor: Factor) -> bool:
        """Lets a factor hold the local digit that it holds in the target, else any that it divides; False if none."""
        place = self._wanted_place(factor) or self._any_place(factor)
        if place is None:
            return False
        dim, at = place
        slot = self.dims[dim][at]
        rest = [_Slot(slot.radix // factor.size, None, None)] if slot.radix > factor.size else []
        self.dims[dim][at : at + 1] = [_Slot(factor.size, factor.stride, slot.wanted), *rest]
        return True

    def _local(self) -> Iterator[tuple[int, int, _Slot]]:
        """The local digits, each with its dim and its place there."""
        for dim, slots in enumerate(self.dims):
            yield from ((dim, at, slot) for at, slot in enumerate(slots) if slot.holder is None)

    def _wanted_place(self, factor: Factor) -> tuple[int, int] | None:
        fits = ((dim, at) for dim, at, slot in self._local() if (slot.wanted, slot.radix) == factor)
        return next(fits, None)

    def _any_place(self, factor: Factor) -> tuple[int, int] | None:
        fits = (
            (dim, at)
            for dim, at, slot in self._local()
            if slot.wanted is None and slot.radix and slot.radix % factor.size == 0
        )
        return next(fits, None)

    def layout(self, like: Layout) -> Layout:
        """The layout of these digits, with the dtype and the partial sub-axes of another."""
        dims = tuple(self._dim(slots, dim.size) for slots, dim in zip(self.dims, like.dims, strict=True))
        return Layout(self.mesh, dims, like.dtype, like.reduction, like.partial)

    def _dim(self, slots: list[_Slot], size: int) -> Dim:
        digits: list[Digit] = []
        for radix, stride, _ in slots:
            if stride is None:
                digits.append(Digit(radix, None))
            else:
                digits += [Digit(s.size, s) for s in self.mesh.sub_axes(stride, radix)]
        return fit_digits(digits, size)
