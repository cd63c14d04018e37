"""Routes between layouts that have a common refinement: slice, move, gather.

A worked example: f32[{y}{x}2, 4] -> f32[{z}4, {y}2] on <x=2, y=2, z=2>. A digit and its holders, by row:

    digit     before   after
    dim 0, 2  y        z          the digit that y holds passes to z
    dim 0, 2  x        -          x is spent: nothing holds by it after
    dim 0, 2  -        -
    dim 1, 2  -        y          the chain  - -> y -> z  starts here; z is free: nothing holds by it before
    dim 1, 2  -        -

    step         holders, digit by digit   layout                received
                 y  x  -  -  -             f32[{y}{x}2, 4]
    slice        y  x  -  z  -             f32[{y}{x}2, {z}2]        0 B   the free z, until it is needed elsewhere
    permute      z  x  -  y  -             f32[{z}{x}2, {y}2]       16 B   y and z change digits: a permute cycle
    all_gather   z  -  -  y  -             f32[{z}4, {y}2]          16 B   the spent x

**Normal form** (Rink et al., arXiv 2112.01075, with any digits in between). Slice by the strides that only the target
uses, each at the local digit that starts its chain. Move all digits that change holders in one step. Gather the
strides that only the source uses, each from the digit that ends its chain. This meets the lower bound: slicing first
and gathering last make the tiles that move as small as they can be, and every message of the move is needed where it
goes. The move is an all-to-all if it consists of swaps, a permute if of permute cycles, an exchange if it mixes them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

from reshard.plans.plan import StepSpec
from reshard.synth.network import Links
from reshard.synth.routes.chains import Chains, State, kind_between, visit_states
from reshard.synth.routes.route import Pair, Route


def routes(pair: Pair, links: Links | None) -> Iterator[Route]:
    """The routes of fewest bytes; with a network those worth pricing on it.

    >>> from reshard.types import Layout, Mesh
    >>> mesh = Mesh(x=2, y=2, z=2)
    >>> pair = Pair(Layout.parse("f32[{y}{x}2, 4]", mesh), Layout.parse("f32[{z}4, {y}2]", mesh))
    >>> [step.kind for step in next(routes(pair, None))]
    ['slice', 'permute', 'all_gather']
    """
    if pair.reduces or pair.refinement is None:
        return
    if pair.source == pair.target:
        yield ()
        return
    chains = Chains(pair, pair.refinement)
    if links is not None:
        yield from list_staged(chains, links)
        return
    yield from fewest_bytes(chains)
    if not pair.refinement.exact:
        yield from gathers_before_exchanges(Chains(pair, pair.refinement, prime=True))


def fewest_bytes(chains: Chains) -> Iterator[Route]:
    """The normal form and the exchange, both at the lower bound, and routes that may save launches or memory."""
    first, last = chains.sliced(), chains.ungathered()
    yield visit_states(chains, [first, last])
    refinement = chains.refinement
    if refinement.swapped or refinement.gathered:
        yield (StepSpec("exchange", chains.target),)
    if refinement.swapped:
        # Two swaps of halves may receive what one exchange of two rounds does, in collectives of their own.
        yield visit_states(chains, [first, *chains.one_by_one(first, last), last])
        if borrowings := chains.borrowings():
            yield visit_states(chains, [chains.sliced(borrowings), chains.ungathered(borrowings)])


def gathers_before_exchanges(chains: Chains) -> Iterator[Route]:
    """Routes for padded layouts between the normal form, which gathers the padding, and the exchange, which leaves it.

    f32[{x}{y}8/1021] -> f32[1021] on <x=12, y=12>: 122 of the 144 pieces of 8 have elements

        normal form     1 launch      1144 elements received
        exchange        143 launches  1021
        both            12 launches   1029: x is gathered with 88 elements, of which some are padding, then y exchanged

    The major strides are gathered, so that every device has a share of the elements before the exchange.
    """
    first, last = chains.sliced(), chains.ungathered()
    spent = sorted({s for s, end in zip(last, chains.end, strict=True) if end is None and s is not None}, reverse=True)
    for count in range(1, len(spent)):
        opened = tuple(
            None if end is None and s in spent[:count] else s for s, end in zip(last, chains.end, strict=True)
        )
        path = pairwise([chains.start, first, last, opened])
        steps = (StepSpec(kind_between(*ends), chains.layout(ends[1])) for ends in path if ends[0] != ends[1])
        yield (*steps, StepSpec("exchange", chains.target))


# Routes for a network: each way between two layouts with its gathers and all-to-alls fused or staged by axis.
#
# The fewest bytes do not mean the least time:
#
# - a gather over a slow and a fast axis at once sends every peer's tile over the slow one; staged, slow axis first, one
#   tile crosses it and is passed on inside;
# - an all-to-all over many peers sends many small messages, a chain of all-to-alls fewer and larger ones;
# - a permute may cross a slow axis that a chain of all-to-alls avoids;
# - a small array is fastest gathered whole.


MOST_AXES = 4
"""Axes up to which every grouping is tried: eight of them for four axes. On more, all fused and all staged."""


def list_staged(chains: Chains, links: Links) -> Iterator[Route]:
    """Every way between the layouts, in every grouping of the axes, slowest first; each route once."""
    slow_first = sorted(links, key=lambda axis: (links[axis].bandwidth, -links[axis].latency))
    seen: set[tuple[State, ...]] = set()
    for states in _list_paths(chains):
        path = [chains.start, *states, chains.end]
        for groups in _group_axes(slow_first):
            stages = tuple(s for before, after in pairwise(path) for s in _stage_by_axis(chains, before, after, groups))
            if stages not in seen:
                seen.add(stages)
                yield visit_states(chains, stages)
    if chains.start != chains.end:
        yield (StepSpec("exchange", chains.target),)


def _list_paths(chains: Chains) -> Iterator[list[State]]:
    """The states to visit: the normal form, and ways that open more, move less at once, or cross less."""
    first, last, end = chains.sliced(), chains.ungathered(), chains.end
    yield [first, last]
    if borrowings := chains.borrowings():
        yield [chains.sliced(borrowings), chains.ungathered(borrowings)]
    yield chains.detour()
    yield [first, chains.swaps_alone(first, last), last]
    yield [first, chains.swaps_alone(last, first), last]
    yield [first, *chains.one_by_one(first, last), last]
    # Slice only what the target holds at the same digit; gather first what is spent; or open all that changes.
    plain = tuple(
        d if s is None and d not in chains.start else s for s, d in zip(chains.start, chains.end, strict=True)
    )
    yield [plain, *chains.one_by_one(plain, last), last]
    opened = tuple(None if s is not None and s not in end else s for s in plain)
    yield [plain, opened, *chains.one_by_one(opened, end)]
    yield [plain, tuple(s if s == d else None for s, d in zip(plain, end, strict=True))]


def _group_axes(axes: Sequence[str]) -> Iterator[list[list[str]]]:
    """The ways to cut the axes, in this order, into groups that are done at once.

    >>> list(_group_axes(["dcn", "x"]))
    [[['dcn', 'x']], [['dcn'], ['x']]]
    """
    if len(axes) > MOST_AXES:
        yield from ([list(axes)], [[a] for a in axes])
        return
    for mask in range(1 << max(0, len(axes) - 1)):
        groups = [[axes[0]]] if axes else []
        for at, axis in enumerate(axes[1:]):
            if mask >> at & 1:
                groups.append([axis])
            else:
                groups[-1].append(axis)
        yield groups


def _stage_by_axis(chains: Chains, before: State, after: State, groups: list[list[str]]) -> Iterator[State]:
    """The states of a gather or an all-to-all that is done group by group; any other step is done at once."""
    if before == after:
        return
    if kind_between(before, after) in ("all_gather", "all_to_all"):
        axis_of = {s: chains.source.mesh.axis_at(s) for s in (*before, *after) if s is not None}
        now = before
        for group in groups:
            along = {s for s, axis in axis_of.items() if axis in group}
            later = tuple(a if a != b and along & {a, b} else n for b, a, n in zip(before, after, now, strict=True))
            if later not in (now, after):
                yield later
            now = later
    yield after
