"""Routes between layouts that have no common refinement, or whose pieces are uneven.

    source   f32[{x}3/10, 16]                          pieces of 3, padded, along x=4
    target   f32[{y}5, {x}4]                           pieces of 5 along y=2

The move is one exchange of boxes (each message is the intersection of two tiles), or one permute if the tiles are
the same. Dims that do refine, like dim 1 here, are sliced before it and gathered after it: fewer boxes, fewer rounds.
Padded pieces are permuted and gathered towards those of the target first, so that few of them meet.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from itertools import pairwise

from reshard.errors import LayoutError
from reshard.plans.plan import StepSpec
from reshard.synth.network import Links
from reshard.synth.routes import normal, permute_first
from reshard.synth.routes.normal import Chains
from reshard.synth.routes.route import Pair, Route
from reshard.types.layout import Digit, Dim, Layout


def routes(pair: Pair, links: Links | None) -> Iterator[Route]:
    """A permute if one does it, the exchange with and without slices and gathers around it, and exchanges to layouts
    from which structured steps lead on in fewer rounds.

    >>> from reshard.types import Mesh
    >>> mesh = Mesh(x=4, y=2)
    >>> pair = Pair(Layout.parse("f32[{x}3/10, 16]", mesh), Layout.parse("f32[{y}5, {x}4]", mesh))
    >>> [[step.kind for step in route] for route in routes(pair, None)]
    [['exchange']]
    """
    if pair.reduces or pair.refinement is not None:
        return
    source, target = pair.source, pair.target
    if source.ragged or target.ragged:
        # Where pieces of any size change, an exchange alone is at the bound.
        yield (StepSpec("exchange", target),)
        return
    if permute_first.is_permute(source, target):
        yield (StepSpec("permute", target),)
    if source.mesh == target.mesh:
        # Where sub-axes of the two cannot coexist in one layout, nothing can be sliced or gathered.
        with contextlib.suppress(LayoutError):
            yield from _sliced_and_gathered(source, target)
    yield (StepSpec("exchange", target),)
    # One exchange, of fewer rounds, to a layout from which one gather leads to the target.
    for between in permute_first.list_before_gathers(source, target):
        kind = "permute" if permute_first.is_permute(source, between) else "exchange"
        yield (StepSpec(kind, between), StepSpec("all_gather", target))
    # permute ; gather ; exchange: fewer rounds for a little more bytes.
    for permuted, gathered in permute_first.gather_in_part(source, target):
        if permuted == source or permute_first.is_permute(source, permuted):
            path = pairwise([source, permuted, gathered, target])
            kinds = ("permute", "all_gather", "exchange")
            yield tuple(StepSpec(kind, to) for kind, (at, to) in zip(kinds, path, strict=True) if at != to)
    # An exchange of few rounds that deals one end out anew, so that it nests with the other.
    first, last = _deal_out(source, target), _deal_out(target, source)
    if first is not None:
        yield from ((StepSpec("exchange", first), *rest) for rest in normal.routes(Pair(first, target), links))
    if last is not None:
        yield from ((*rest, StepSpec("exchange", target)) for rest in normal.routes(Pair(source, last), links))


def _sliced_and_gathered(source: Layout, target: Layout) -> Iterator[Route]:
    """slice ; exchange ; gather, with the slices and gathers of the dims that refine."""
    # (stride, stride * size) of the sub-axes that each layout uses, and whether a digit's holder overlaps none of them.
    spans = [[end.mesh.span(axis) for axis in (*end.held, *end.partial)] for end in (source, target)]

    def unused(stride: int | None, radix: int, used: list[tuple[int, int]]) -> bool:
        return stride is not None and not any(low < stride * radix and stride < high for low, high in used)

    before, after = list(source.dims), list(target.dims)
    for at in range(len(before)):
        pair = Pair(_only_dim(source, at), _only_dim(target, at))
        if pair.refinement is not None:
            chains = Chains(pair, pair.refinement)
            digits, ends = chains.refinement.digits, list(zip(chains.start, chains.end, strict=True))
            # The source's dim, sliced by the target's strides that no dim of the source uses; and the target's, still
            # held by the source's strides that no dim of the target uses.
            free = {d.dst for d in digits if unused(d.dst, d.radix, spans[0])}
            spent = {d.src for d in digits if unused(d.src, d.radix, spans[1])}
            sliced = tuple(d if s is None and d in free else s for s, d in ends)
            ungathered = tuple(s if d is None and s in spent else d for s, d in ends)
            before[at], after[at] = chains.layout(sliced).dims[0], chains.layout(ungathered).dims[0]
    first, last = _with_dims(source, before), _with_dims(target, after)
    if first != source or last != target:
        path = [source, first, last, target]
        kinds = ("slice", "exchange", "all_gather")
        yield tuple(StepSpec(k, to) for k, (at, to) in zip(kinds, pairwise(path), strict=True) if at != to)


def _deal_out(layout: Layout, other: Layout) -> Layout | None:
    """The layout with dims that do not nest in the other's dealt out one element a round; None if one is uneven.

    layout  f32[{x}3]     x = 2, y = 3: the other, f32[{y}2], counts y first
    dealt   f32[3{x}]     x comes last, so y can stand before it
    """
    if layout.mesh != other.mesh or not (layout.even and other.even):
        return None
    nest = [Pair(_only_dim(layout, at), _only_dim(other, at)).refinement is not None for at in range(len(layout.dims))]
    dims: list[Dim] = []
    for dim, fits in zip(layout.dims, nest, strict=True):
        held = (digit for digit in dim.digits if digit.axis is not None)
        dims.append(dim if fits else Dim((Digit(dim.tile, None), *held), dim.size))
    return _with_dims(layout, dims)


def _only_dim(layout: Layout, at: int) -> Layout:
    """One dim of a layout, as an array of its own."""
    return Layout(layout.mesh, (layout.dims[at],), layout.dtype)


def _with_dims(layout: Layout, dims: list[Dim]) -> Layout:
    return Layout(layout.mesh, tuple(dims), layout.dtype, layout.reduction, layout.partial)
