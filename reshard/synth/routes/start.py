"""Routes to partial arrays: move what the summands need, then split the sum, which receives nothing.

A partial target needs each element once among the devices along the sub-axes that become partial. So these hold digits
until the last step, and the tiles that move are as much smaller as there will be summands.

A worked example: f32[{x}4, 8] -> f32[16, 8] + sum{x:(2)2}{y} on <x=4, y=2>.

    step         layout                         received
                 f32[{x}4, 8]
    slice        f32[{x}{y}2, 8]                     0 B   y will be partial: until then it holds any local digit
    all_gather   f32[2{x:(2)2}{y}2, 8]             128 B   x:(1)2 alone has to be gathered
    split_sum    f32[16, 8] + sum{x:(2)2}{y}         0 B   x:(2)2 and y release their digits

A sub-axis that has a digit of the source keeps it. One that has none takes part of a digit that is local before and
after, so that its slice is free; else of one that is gathered; else of the first that it can pad. If no digit is large
enough, one summand has all the data.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from reshard.errors import LayoutError
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
from reshard.synth.routes import boxes, normal, permute_first, reduction
from reshard.synth.routes.route import Pair, Route
from reshard.types.layout import Digit, Dim, Layout, fit_digits
from reshard.types.mesh import places, prime_places

BEFORE = (normal.routes, boxes.routes, permute_first.routes, reduction.routes)
"""Routes to the layout whose sum is split."""


def routes(pair: Pair, links: Links | None) -> Iterator[Route]:
    """One step if it does it all; else every layout from which one starts the sum, reached in every way.

    >>> from reshard.types import Mesh
    >>> mesh = Mesh(x=4, y=2)
    >>> pair = Pair(Layout.parse("f32[{x}4, 8]", mesh), Layout.parse("f32[16, 8] + sum{y}", mesh))
    >>> [step.kind for step in next(routes(pair, None))]
    ['slice', 'all_gather', 'split_sum']
    """
    if not pair.starts:
        return
    split = StepSpec("split_sum", pair.target)
    change = _find_change(pair)
    if pair.refinement is not None and _splits_at_once(pair.refinement):
        yield (split,)
        return
    for between in dict.fromkeys(_list_betweens(pair, change)):
        # On the source's mesh, if it has the same devices in the same order: then it may refine with the source.
        alike = remesh(between, pair.source.mesh) if same_devices(between.mesh, pair.source.mesh) else None
        rest = Pair(pair.source, alike or between)
        yield from ((*route, split) for before in BEFORE for route in before(rest, links))
    if pair.refinement is None and (first := _split_first(pair, change)) is not None:
        rest = Pair(first, pair.target)
        yield from ((StepSpec("split_sum", first), *route) for after in BEFORE[:-1] for route in after(rest, links))


def _splits_at_once(refinement: Refinement) -> bool:
    """Whether the digits that change are local, or held by sub-axes that become partial."""
    started = {factor.stride for factor in refinement.started}
    moved = (digit.src for digit in refinement.digits if digit.src != digit.dst and digit.src is not None)
    return bool(started) and not refinement.reduced and started.issuperset(moved)


def _find_change(pair: Pair) -> PartialChange:
    """What becomes of partial sub-axes; all are finished and started where a sum cannot be kept."""
    source, target, r = pair.source, pair.target, pair.refinement
    if source.mesh == target.mesh:
        change = partial_change(source, target) if r is None else PartialChange(r.kept, r.reduced, r.started)
        if change is not None:
            return change
    reduced, started = (tuple(Factor(lay.mesh.stride(a), a.size) for a in lay.partial) for lay in (source, target))
    return PartialChange((), reduced, started)


def _list_betweens(pair: Pair, change: PartialChange) -> Iterator[Layout]:
    """The layouts to split: the target's digits, some of them still held by the sub-axes that become partial."""
    mesh = pair.target.mesh
    kept = tuple(axis for factor in change.kept for axis in mesh.sub_axes(*factor))
    left = replace(pair.target, partial=kept)
    started = [Factor(*place) for factor in change.started for place in places(*factor)]
    strides = {factor.stride for factor in started}
    digits = _target_digits(left) if pair.refinement is None else prime_digits(pair.refinement)
    stay = [digit.src if digit.src in strides else digit.dst for digit in digits]
    leave = [digit.src if digit.src in strides and digit.dst is None else digit.dst for digit in digits]
    # A layout falls away where sub-axes of the two layouts cannot coexist; the last one never does.
    for holders in (stay, leave):
        with contextlib.suppress(LayoutError):
            yield _hold_digits(left, digits, holders, [f for f in started if f.stride not in holders])
    yield left


def _target_digits(target: Layout) -> tuple[RefinedDigit, ...]:
    """The target's digits where it does not refine with the source: none of them is known to be held before."""
    digits: list[RefinedDigit] = []
    for at, dim in enumerate(target.dims):
        for radix, axis in dim.digits:
            if axis is None:
                digits.append(RefinedDigit(at, radix, None, None))
            else:
                digits += [RefinedDigit(at, size, stride, stride) for stride, size in prime_places(target.mesh, axis)]
    return tuple(digits)


@dataclass(frozen=True)
class _StartedDigit:
    """A digit of the layout to split: its radix, the stride that holds it, and whether it is held in the source."""

    radix: int
    holder: int | None
    moves: bool


def _hold_digits(
    left: Layout, digits: Sequence[RefinedDigit], holders: Sequence[int | None], free: list[Factor]
) -> Layout:
    """The layout whose digits have these holders, with local ones taken by the free factors where these fit."""
    dims: list[list[_StartedDigit]] = [[] for _ in left.dims]
    for digit, holder in zip(digits, holders, strict=True):
        dims[digit.dim].append(_StartedDigit(digit.radix, holder, digit.src is not None))
    for factor in free:
        _take_factor(dims, factor)
    return replace(left, dims=tuple(_make_dim(left, slots, at) for at, slots in enumerate(dims)))


def _take_factor(dims: list[list[_StartedDigit]], factor: Factor) -> None:
    """Lets a factor hold part of a local digit."""
    local = [(dim, at, slot) for dim, slots in enumerate(dims) for at, slot in enumerate(slots) if slot.holder is None]
    whole = [(slot.moves, dim, at) for dim, at, slot in local if slot.radix and slot.radix % factor.size == 0]
    padded = [(slot.moves, dim, at) for dim, at, slot in local if at == 0 and slot.radix > factor.size]
    if whole or padded:
        _, dim, at = min(whole or padded)
        slot = dims[dim][at]
        rest = _StartedDigit(-(-slot.radix // factor.size), None, slot.moves)
        dims[dim][at : at + 1] = [_StartedDigit(factor.size, factor.stride, slot.moves), rest]


def _make_dim(left: Layout, slots: list[_StartedDigit], at: int) -> Dim:
    digits: list[Digit] = []
    for slot in slots:
        if slot.holder is None:
            digits.append(Digit(slot.radix, None))
        else:
            digits += [Digit(axis.size, axis) for axis in left.mesh.sub_axes(slot.holder, slot.radix)]
    return fit_digits(digits, left.shape[at])


def _split_first(pair: Pair, change: PartialChange) -> Layout | None:
    """The source with its sum split and nothing else done; None if another sum has to be finished before."""
    source, target = pair.source, pair.target
    if change.reduced or source.mesh != target.mesh:
        return None
    with contextlib.suppress(LayoutError):
        first = replace(release_digits(source, change.started), partial=target.partial, reduction=target.reduction)
        return first if refine(source, first) is not None else None
    return None
