"""Routes for a network: each way between two layouts with its gathers and all-to-alls fused or staged by axis.

The fewest bytes do not mean the least time:

- a gather over a slow and a fast axis at once sends every peer's tile over the slow one; staged, slow axis first, one
  tile crosses it and is passed on inside;
- an all-to-all over many peers sends many small messages, a chain of all-to-alls fewer and larger ones;
- a permute may cross a slow axis that a chain of all-to-alls avoids;
- a small array is fastest gathered whole.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

from reshard.synth.network import Links
from reshard.synth.routes.chains import Chains, State, direct, kind, through
from reshard.synth.routes.route import Route

MOST_AXES = 4
"""Axes up to which every grouping is tried: eight of them for four axes. On more, all fused and all staged."""


def staged(chains: Chains, links: Links) -> Iterator[Route]:
    """Every way between the layouts, in every grouping of the axes, slowest first; each route once."""
    slow_first = sorted(links, key=lambda axis: (links[axis].bandwidth, -links[axis].latency))
    seen: set[tuple[State, ...]] = set()
    for states in _ways(chains):
        path = [chains.start, *states, chains.end]
        for groups in _groupings(slow_first):
            stages = tuple(s for before, after in pairwise(path) for s in _stages(chains, before, after, groups))
            if stages not in seen:
                seen.add(stages)
                yield through(chains, stages)
    yield direct(chains)


def _ways(chains: Chains) -> Iterator[list[State]]:
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


def _groupings(axes: Sequence[str]) -> Iterator[list[list[str]]]:
    """The ways to cut the axes, in this order, into groups that are done at once.

    >>> list(_groupings(["dcn", "x"]))
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


def _stages(chains: Chains, before: State, after: State, groups: list[list[str]]) -> Iterator[State]:
    """The states of a gather or an all-to-all that is done group by group; any other step is done at once."""
    if before == after:
        return
    if kind(before, after) in ("all_gather", "all_to_all"):
        axis_of = {s: chains.source.mesh.axis_at(s) for s in (*before, *after) if s is not None}
        now = before
        for group in groups:
            along = {s for s, axis in axis_of.items() if axis in group}
            later = tuple(a if a != b and along & {a, b} else n for b, a, n in zip(before, after, now, strict=True))
            if later not in (now, after):
                yield later
            now = later
    yield after
