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
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise, product
from typing import NamedTuple

from reshard.errors import LayoutError, MeshError
from reshard.geometry.refine import (
    Factor,
    PartialChange,
    RefinedDigit,
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
from reshard.synth.routes.normal import Chains, State
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
    opaque = frozenset(at for at, dim in enumerate(source.dims) if dim.pieces is not None)
    if refinement is not None:
        reduced, digits = refinement.reduced, refinement.digits
    else:
        change = partial_change(source, target)
        reduced, digits = () if change is None else change.reduced, _list_digits(source)
    mesh, spans = source.mesh, [target.mesh.span(axis) for axis in target.held]
    # A slice by a digit that pads makes tiles larger, for example f32[4] to f32[1{x}64/4]: also reduce without slices.
    padded = refinement is not None and not refinement.exact
    for cut in list_sum_starts(mesh, digits, reduced, spans, padded, opaque):
        # A choice falls away where sub-axes of the two cannot coexist in one layout; the last one never does.
        with contextlib.suppress(LayoutError):
            states = cut.find_cut(reduced), cut.held
            part, whole = (hold_digits(bare, normal.list_held_digits(cut.digits, state)) for state in states)
            yield _finish_reduction(source, bare, part, whole, cut.list_left(reduced))
    along = Pair(bare, target)
    with contextlib.suppress(LayoutError):
        if along.refinement is None:
            stage = permute_first.slice_source(bare, target, [(f.stride, f.stride * f.size) for f in reduced])
            if stage is not None:
                held = {place for axis in stage[1].held for place in prime_places(mesh, axis)}
                yield _finish_reduction(source, bare, *stage, _list_left(reduced, held))
            return
        for cut in list_chain_starts(Chains(along, along.refinement, prime=True), reduced):
            chains = Chains(along, replace(along.refinement, digits=cut.digits))
            stage = chains.layout(cut.find_cut(reduced)), chains.layout(cut.held)
            yield _finish_reduction(source, bare, *stage, cut.list_left(reduced))


def _list_digits(layout: Layout) -> tuple[RefinedDigit, ...]:
    """The digits of a layout, as if none was held after."""
    held = ((at, radix, axis) for at, dim in enumerate(layout.dims) for radix, axis in dim.digits)
    return tuple(RefinedDigit(at, n, None if axis is None else layout.mesh.stride(axis), None) for at, n, axis in held)


class SumStart(NamedTuple):
    """Digits, and what holds each of them once others are sliced and a sum is scattered."""

    digits: tuple[RefinedDigit, ...]
    held: State

    def find_cut(self, reduced: Sequence[Factor]) -> State:
        """What holds each digit before sums over these factors are scattered."""
        spans = [(factor.stride, factor.stride * factor.size) for factor in reduced]
        return tuple(None if _lies_inside(stride, spans) else stride for stride in self.held)

    def list_left(self, reduced: Sequence[Factor]) -> list[Factor]:
        """The factors of sums over these that no digit took."""
        held = ((d.radix, stride) for d, stride in zip(self.digits, self.held, strict=True) if stride is not None)
        return _list_left(reduced, {(stride * at, prime) for radix, stride in held for at, prime in places(1, radix)})


def _list_left(reduced: Sequence[Factor], held: Collection[tuple[int, int]]) -> list[Factor]:
    return [Factor(*prime) for factor in reduced for prime in places(*factor) if prime not in held]


def list_sum_starts(
    mesh: Mesh,
    digits: Sequence[RefinedDigit],
    reduced: Sequence[Factor],
    spans: Sequence[tuple[int, int]],
    padded: bool = False,
    opaque: Collection[int] = (),
) -> Iterator[SumStart]:
    """Ways to scatter sums over these factors along local digits, whose target is held along `spans` of the positions;
    if some dims are `padded`, also without slices before. Digits of `opaque` dims stay whole."""
    # Which of them to scatter: all, those that the target holds, those along or beside one axis, or none. Scattered
    # along some axes only, the rest is an all-reduce of little data: best across slow links.
    choices = [list(reduced), [f for f in reduced if _lies_inside(f.stride, spans)]]
    for axis in dict.fromkeys(mesh.axis_at(f.stride) for f in reduced):
        along = [f for f in reduced if mesh.axis_at(f.stride) == axis]
        choices += [along, [f for f in reduced if f not in along]]
    # Factors that nothing holds by yet, and that hold a local digit in the target.
    used = {digit.src for digit in digits}
    free = [Factor(d.dst, d.radix) for d in digits if d.src is None and d.dst is not None and d.dst not in used]
    slices = [factor for factor in free if factor not in reduced]
    seen = set[SumStart]()
    for scattered in [*(each for at, each in enumerate(choices) if each and each not in choices[:at]), []]:
        for sliced in (slices, []) if padded else (slices,):
            cut, held = list(digits), [digit.src for digit in digits]
            for stride, size in (*sliced, *scattered):
                # It holds the local digit that it holds in the target, else the first that it divides.
                local = [(at, d) for at, d in enumerate(cut) if held[at] is None and d.dim not in opaque]
                wanted = (at for at, digit in local if (digit.dst, digit.radix) == (stride, size))
                fits = (at for at, d in local if d.dst is None and d.radix and d.radix % size == 0)
                at = next(wanted, None)
                at = next(fits, None) if at is None else at
                if at is not None:
                    digit, held[at] = cut[at], stride
                    if digit.radix > size:
                        cut[at : at + 1] = [digit._replace(radix=size), digit._replace(radix=digit.radix // size)]
                        held.insert(at + 1, None)
            start = SumStart(tuple(cut), tuple(held))
            if start not in seen:
                seen.add(start)
                yield start


def list_chain_starts(chains: Chains, reduced: Sequence[Factor]) -> Iterator[SumStart]:
    """Scatters that prepare the move after them: to the array without its sum, partial sub-axes are free.

    Each goes to the digit that the normal form of that move would slice by it, or to the last place of a dim, so that
    a permute can set it right.
    """
    spans = [(f.stride, f.stride * f.size) for f in reduced]
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
        yield SumStart(chains.digits, state)


def _finish_reduction(source: Layout, bare: Layout, part: Layout, whole: Layout, left: Sequence[Factor]) -> Start:
    """slice to `part` ; reduce_scatter to `whole` ; all_reduce of what is left; without those that change nothing."""
    partial = tuple(axis for factor in left for axis in source.mesh.sub_axes(*factor))
    scattered = _make_partial(whole, source, (*bare.partial, *partial))
    path = [source, _make_partial(part, source, source.partial), scattered, _make_partial(whole, bare, bare.partial)]
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
    if pair.refinement is not None:
        digits = prime_digits(pair.refinement)
    else:  # The target's digits: none of them is known to be held before.
        every = (
            (dim, stride, part)
            for dim, radix, stride, _ in _list_digits(left)
            for part in (places(1, radix) if stride else [(1, radix)])
        )
        digits = tuple(
            RefinedDigit(dim, n, stride and stride * at, stride and stride * at) for dim, stride, (at, n) in every
        )
    opaque = {at for at, dim in enumerate(left.dims) if dim.pieces is not None}
    # A layout falls away where sub-axes of the two layouts cannot coexist; the last one never does.
    for cut in list_split_sums(digits, change.started, opaque):
        with contextlib.suppress(LayoutError):
            yield hold_digits(left, normal.list_held_digits(*cut))
    yield left


def list_split_sums(
    digits: Sequence[RefinedDigit], started: Sequence[Factor], opaque: Collection[int] = ()
) -> Iterator[SumStart]:
    """Who holds the target's digits before sums over these factors are split: those that hold none of them before take
    part of a local one, one that does not move if there is one, or one that does."""
    factors = [Factor(*place) for factor in started for place in places(*factor)]
    strides = {factor.stride for factor in factors}
    stay = [digit.src if digit.src in strides else digit.dst for digit in digits]
    leave = [digit.src if digit.src in strides and digit.dst is None else digit.dst for digit in digits]
    starts: dict[SumStart, None] = {}
    for moving, holders in product((False, True), (stay, leave)):
        cut, held = list(digits), list(holders)
        for stride, size in factors:
            if stride in holders:
                continue
            slots = [(at, d) for at, d in enumerate(cut) if d.dim not in opaque and held[at] is None and d.radix]
            # One that it divides, or the first of a dim, whose rest is padded.
            whole = [at for at, digit in slots if digit.radix % size == 0]
            firsts = [at for at, d in slots if d.radix > size and (at == 0 or cut[at - 1].dim != d.dim)]
            if whole or firsts:
                at = min(whole or firsts, key=lambda at: ((cut[at].src is not None) != moving, at))
                digit, held[at] = cut[at], stride
                if digit.radix > size:
                    rest = digit._replace(radix=-(-digit.radix // size))
                    cut[at : at + 1] = [digit._replace(radix=size), rest]
                    held.insert(at + 1, None)
        starts[SumStart(tuple(cut), tuple(held))] = None
    yield from starts
