"""Routes from partial arrays, and to them. From one: reduce first, so that every byte sent later is a finished one.

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
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise

from reshard.errors import LayoutError, MeshError
from reshard.geometry.refine import (
    Factor,
    PartialChange,
    RefinedDigit,
    Refinement,
    partial_change,
    prime_digits,
    refine,
    release_digits,
    same_devices,
)
from reshard.geometry.remesh import remesh
from reshard.plans.plan import StepSpec
from reshard.synth.network import Links
from reshard.synth.routes import boxes, normal, permute_first
from reshard.synth.routes.normal import Chains
from reshard.synth.routes.route import Pair, Route, hold_digits
from reshard.types.layout import Layout
from reshard.types.mesh import Mesh, SubAxis, places, prime_places

AFTERWARDS = (normal.routes, boxes.routes, permute_first.routes)
"""Routes on from a reduced layout, and to one whose sum is split."""

Start = tuple[Route, Layout]
"""Steps that finish the reduction, and the layout that they reach."""


def routes(pair: Pair, links: Links | None) -> Iterator[Route]:
    """Every start, each continued to the target in every way; where a sum starts, every way to split it.

    >>> from reshard.types import Mesh
    >>> mesh = Mesh(x=4, y=2)
    >>> pair = Pair(Layout.parse("f32[{y}8, 16] + sum{x}", mesh), Layout.parse("f32[16, {x}4]", mesh))
    >>> [step.kind for step in next(routes(pair, None))]
    ['reduce_scatter', 'all_gather']
    >>> pair = Pair(Layout.parse("f32[{x}4, 8]", mesh), Layout.parse("f32[16, 8] + sum{y}", mesh))
    >>> [step.kind for step in next(routes(pair, None))]
    ['slice', 'all_gather', 'split_sum']
    """
    if pair.starts:
        yield from _start_sum(pair, links)
    elif pair.reduces:
        yield from _finish_sum(pair, links)


def _finish_sum(pair: Pair, links: Links | None) -> Iterator[Route]:
    source, target = pair.source, pair.target
    if source.mesh == target.mesh:
        for steps, finished in dict.fromkeys(_list_starts(pair)):
            for continued in AFTERWARDS:
                yield from ((*steps, *route) for route in continued(Pair(finished, target), links))
        return
    # Two meshes without a common one: reduce on the source's, then move the finished tiles. f32[16] + sum{x} on <x=4>,
    # devices 0 1 2 3, to f32[{x}4] on devices 0 3 1 2: reduce-scatter to f32[{x}4] on the source's mesh, and permute.
    alike = Mesh(
        target.mesh.axes, device_ids=source.mesh.device_ids
    )  # Each tile at the same position as in the target.
    spelled = remesh(replace(target, mesh=alike), source.mesh)
    for near in dict.fromkeys((spelled, _make_partial(source, target, ()))):
        if near is not None:
            crossings: list[Route] = []
            for each in AFTERWARDS:
                with contextlib.suppress(MeshError):  # A layout on the way that neither mesh can spell.
                    crossings += each(Pair(near, target), links)
            crossings.append((StepSpec("exchange", target),))
            for route in routes(Pair(source, near), links):
                yield from ((*route, *last) for last in crossings)


def _list_starts(pair: Pair) -> Iterator[Start]:
    """Ways to finish the partial sub-axes that the target does not have."""
    source, target, refinement = pair.source, pair.target, pair.refinement
    bare = Layout(source.mesh, source.dims, source.dtype, target.reduction, target.partial)
    # The factors to reduce over; where the layouts refine, cut where the digits of the target need them.
    change = partial_change(source, target) if refinement is None else None
    reduced = list(change.reduced if change is not None else refinement.reduced if refinement is not None else ())
    held = [target.mesh.span(axis) for axis in target.held]
    # Which of them to scatter: all, those that the target holds, those along or beside one axis, or none. Scattered
    # along some axes only, the rest is an all-reduce of little data: best across slow links.
    choices = [reduced, [f for f in reduced if _lies_inside(f.stride, held)]]
    for axis in dict.fromkeys(target.mesh.axis_at(f.stride) for f in reduced):
        along = [f for f in reduced if target.mesh.axis_at(f.stride) == axis]
        choices += [along, [f for f in reduced if f not in along]]
    # A slice by a digit that pads makes tiles larger, for example f32[4] to f32[1{x}64/4]: also reduce without slices.
    padded = refinement is not None and not refinement.exact
    for scattered in [*(each for at, each in enumerate(choices) if each and each not in choices[:at]), []]:
        for slice_first in (True, False) if padded else (True,):
            # A choice falls away where sub-axes of the two cannot coexist in one layout; the last one never does.
            with contextlib.suppress(LayoutError):
                digits = _SourceDigits(source, refinement)
                for factor in digits.sliceable():
                    if slice_first and factor not in reduced:
                        digits.hold(factor)
                cut = hold_digits(source, digits.holders)
                done = [f for f in scattered if digits.hold(f)]
                left = tuple(s for f in reduced if f not in done for s in source.mesh.sub_axes(*f))
                whole = hold_digits(_make_partial(source, source, (*bare.partial, *left)), digits.holders)
                yield _finish_reduction(source, bare, cut, whole)
    with contextlib.suppress(LayoutError):
        yield from _along_chains(source, bare, target, reduced)


class _SourceDigits:
    """The source's digits, cut as the target needs them, while factors come to hold local ones."""

    def __init__(self, source: Layout, refinement: Refinement | None) -> None:
        self._whole = {at for at, dim in enumerate(source.dims) if dim.pieces is not None}
        if refinement is not None:
            self.digits = list(refinement.digits)
            return
        self.digits: list[RefinedDigit] = []
        for at, dim in enumerate(source.dims):
            for radix, axis in dim.digits:
                self.digits.append(RefinedDigit(at, radix, None if axis is None else source.mesh.stride(axis), None))

    @property
    def holders(self) -> list[tuple[int, int, int | None]]:
        """The digits as they are held now."""
        return [(dim, radix, src) for dim, radix, src, _ in self.digits]

    def sliceable(self) -> list[Factor]:
        """Factors that nothing holds by yet, and that hold a local digit in the target."""
        held = {src for _, _, src, _ in self.digits}
        local = (digit for digit in self.digits if digit.src is None)
        return [Factor(d.dst, d.radix) for d in local if d.dst is not None and d.dst not in held]

    def hold(self, factor: Factor) -> bool:
        """Lets a factor hold the local digit that it holds in the target, else the first that it divides; False if
        there is none."""
        local = [(at, d) for at, d in enumerate(self.digits) if d.src is None and d.dim not in self._whole]
        wanted = [at for at, digit in local if (digit.dst, digit.radix) == factor]
        fits = [at for at, d in local if d.dst is None and d.radix and d.radix % factor.size == 0]
        for at in [*wanted, *fits][:1]:
            dim, radix, _, dst = self.digits[at]
            rest = [RefinedDigit(dim, radix // factor.size, None, None)] if radix > factor.size else []
            self.digits[at : at + 1] = [RefinedDigit(dim, factor.size, factor.stride, dst), *rest]
            return True
        return False


def _along_chains(source: Layout, bare: Layout, target: Layout, reduced: list[Factor]) -> Iterator[Start]:
    """Scatters that prepare the move after them: to the array without its sum, partial sub-axes are free.

    Each goes to the digit that the normal form of that move would slice by it, or to the last place of a dim, so that
    a permute can set it right.
    """
    spans = [(f.stride, f.stride * f.size) for f in reduced]
    pair = Pair(bare, target)
    stages: list[tuple[Layout, Layout]] = []  # What is sliced, and what is scattered besides.
    if pair.refinement is None:
        cut = permute_first.slice_source(bare, target, spans)
        stages += [] if cut is None else [cut]
    else:
        chains = Chains(pair, pair.refinement, prime=True)
        full = chains.sliced()
        # The state after the slices, with partial strides at hand borrowed where other strides would slice.
        spare = [d for d in chains.digits if d.src is not None and _lies_inside(d.dst, spans) and d.dst not in full]
        borrowed: list[int | None] = []
        for digit, stride in zip(chains.digits, full, strict=True):
            by_slice = digit.src is None and stride is not None and not _lies_inside(stride, spans)
            lender = next((d for d in spare if by_slice and d.radix == digit.radix), None)
            if lender is not None:
                spare.remove(lender)
            borrowed.append(stride if lender is None else lender.dst)
        for state in dict.fromkeys((full, chains.sliced(chains.borrowings()), tuple(borrowed))):
            first = tuple(s if _lies_inside(d, spans) else d for s, d in zip(chains.start, state, strict=True))
            stages.append((chains.layout(first), chains.layout(state)))
    for part, whole in stages:
        # slice to `part` ; reduce_scatter to `whole` ; all_reduce over what no digit took
        used = {p for axis in whole.held for p in prime_places(source.mesh, axis)}
        left = [p for f in reduced for p in places(f.stride, f.size) if p not in used]
        partial = tuple(s for stride, size in left for s in source.mesh.sub_axes(stride, size))
        cut = _make_partial(part, source, source.partial)
        yield _finish_reduction(source, bare, cut, _make_partial(whole, source, (*bare.partial, *partial)))


def _finish_reduction(source: Layout, bare: Layout, cut: Layout, scattered: Layout) -> Start:
    """slice to `cut` ; reduce_scatter to `scattered` ; all_reduce of the rest, without those that change nothing."""
    path = [source, cut, scattered, _make_partial(scattered, bare, bare.partial)]
    kinds = ("slice", "reduce_scatter", "all_reduce")
    changes = zip(kinds, pairwise(path), strict=True)
    return tuple(StepSpec(kind, after) for kind, (before, after) in changes if before != after), path[-1]


def _make_partial(dims: Layout, like: Layout, partial: tuple[SubAxis, ...]) -> Layout:
    """The dims of one layout, partial over these sub-axes by the reduction of another."""
    return Layout(dims.mesh, dims.dims, like.dtype, like.reduction, partial)


def _lies_inside(stride: int | None, spans: Sequence[tuple[int, int]]) -> bool:
    return stride is not None and any(low <= stride < high for low, high in spans)


# To partial arrays: move what the summands need, then split the sum, which receives nothing.
#
# A partial target needs each element once among the devices along the sub-axes that become partial. So these hold
# digits until the last step, and the tiles that move are as much smaller as there will be summands.
#
# A worked example: f32[{x}4, 8] -> f32[16, 8] + sum{x:(2)2}{y} on <x=4, y=2>.
#
#     step         layout                         received
#                  f32[{x}4, 8]
#     slice        f32[{x}{y}2, 8]                     0 B   y will be partial: until then it holds any local digit
#     all_gather   f32[2{x:(2)2}{y}2, 8]             128 B   x:(1)2 alone has to be gathered
#     split_sum    f32[16, 8] + sum{x:(2)2}{y}         0 B   x:(2)2 and y release their digits
#
# A sub-axis that has a digit of the source keeps it. One that has none takes part of a digit that is local before and
# after, so that its slice is free; else of one that is gathered; else of the first that it can pad. If no digit is
# large enough, one summand has all the data.


def _start_sum(pair: Pair, links: Links | None) -> Iterator[Route]:
    """One step if it does it all; else every layout from which one starts the sum, reached in every way."""
    source, target, refinement = pair.source, pair.target, pair.refinement
    split = StepSpec("split_sum", target)
    if refinement is not None and refinement.started and not refinement.reduced:
        # At once, if the digits that change are local, or held by sub-axes that become partial.
        started = {factor.stride for factor in refinement.started}
        if started.issuperset(d.src for d in refinement.digits if d.src != d.dst and d.src is not None):
            yield (split,)
            return
    change = None
    if source.mesh == target.mesh:
        r = refinement
        change = partial_change(source, target) if r is None else PartialChange(r.kept, r.reduced, r.started)
    if change is None:  # A sum that cannot be kept is finished and started anew.
        ends = (tuple(Factor(end.mesh.stride(a), a.size) for a in end.partial) for end in (source, target))
        change = PartialChange((), *ends)
    for between in dict.fromkeys(_list_betweens(pair, change)):
        # On the source's mesh, if it has the same devices in the same order: then it may refine with the source.
        alike = remesh(between, source.mesh) if same_devices(between.mesh, source.mesh) else None
        rest = Pair(source, alike or between)
        ways = [_finish_sum] if rest.reduces else AFTERWARDS
        yield from ((*route, split) for before in ways for route in before(rest, links))
    if refinement is None and not change.reduced and source.mesh == target.mesh:
        # The sum split first, and nothing else done by that.
        with contextlib.suppress(LayoutError):
            first = replace(release_digits(source, change.started), partial=target.partial, reduction=target.reduction)
            if refine(source, first) is not None:
                after = (route for way in AFTERWARDS for route in way(Pair(first, target), links))
                yield from ((StepSpec("split_sum", first), *route) for route in after)


def _list_betweens(pair: Pair, change: PartialChange) -> Iterator[Layout]:
    """The layouts to split: the target's digits, some of them still held by the sub-axes that become partial."""
    mesh = pair.target.mesh
    kept = tuple(axis for factor in change.kept for axis in mesh.sub_axes(*factor))
    left = replace(pair.target, partial=kept)
    started = [Factor(*place) for factor in change.started for place in places(*factor)]
    strides = {factor.stride for factor in started}
    if pair.refinement is not None:
        digits = list(prime_digits(pair.refinement))
    else:  # The target's digits: none of them is known to be held before.
        digits = list[RefinedDigit]()
        for at, dim in enumerate(left.dims):
            for radix, axis in dim.digits:
                held = () if axis is None else prime_places(mesh, axis)
                digits += [RefinedDigit(at, size, stride, stride) for stride, size in held]
                digits += [RefinedDigit(at, radix, None, None)] if axis is None else []
    stay = [digit.src if digit.src in strides else digit.dst for digit in digits]
    leave = [digit.src if digit.src in strides and digit.dst is None else digit.dst for digit in digits]
    # A layout falls away where sub-axes of the two layouts cannot coexist; the last one never does.
    for holders in (stay, leave):
        slots = [(d.dim, d.radix, holder, d.src is not None) for d, holder in zip(digits, holders, strict=True)]
        whole = {at for at, dim in enumerate(left.dims) if dim.pieces is not None}
        with contextlib.suppress(LayoutError):
            for factor in started:
                if factor.stride not in holders:
                    _take_factor(slots, factor, whole)
            yield hold_digits(left, ((dim, radix, holder) for dim, radix, holder, _ in slots))
    yield left


def _take_factor(slots: list[tuple[int, int, int | None, bool]], factor: Factor, opaque: set[int]) -> None:
    """Lets a factor hold part of a local digit: one that it divides, or the first of a dim, whose rest is padded; of
    these one that does not move, if there is one. Slots are (dim, radix, holder, whether it is held in the source)."""
    slots_of = [(at, *slot) for at, slot in enumerate(slots) if slot[0] not in opaque]
    local = [(moves, at) for at, _, radix, holder, moves in slots_of if holder is None and radix]
    whole = [(moves, at) for moves, at in local if slots[at][1] % factor.size == 0]
    firsts = [(moves, at) for moves, at in local if at == 0 or slots[at - 1][0] != slots[at][0]]
    padded = [(moves, at) for moves, at in firsts if slots[at][1] > factor.size]
    if whole or padded:
        _, at = min(whole or padded)
        dim, radix, _, moves = slots[at]
        rest = (dim, -(-radix // factor.size), None, moves)
        slots[at : at + 1] = [(dim, factor.size, factor.stride, moves), rest]
