"""Messages dealt into rounds in which each device sends at most one and receives at most one: an edge colouring.

Messages are the edges of a bipartite graph of senders and receivers, rounds its colours. As many colours as the
largest degree suffice (König).

    degree 4    0->a 0->a 0->b 0->b 1->a 1->a 1->b 1->b
    halves      0->a 0->b 1->a 1->b     0->a 0->b 1->a 1->b         degree 2 each
    quarters    0->a 1->b   0->b 1->a   0->a 1->b   0->b 1->a       degree 1: four rounds

Halving costs a walk over the edges, so all rounds take edges times log(degree). Halves of an odd degree have one
colour too many between them: the edges of the smallest one are then fitted into the others, one by one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

Edge = tuple[int, int]
"""(sender, receiver)."""

Colours = list[list[int]]
"""The edges of each colour, by number."""


def colouring(edges: Sequence[Edge]) -> Colours:
    """The edges, by number, of each round, in as many rounds as the busiest device has messages.

    >>> edges = [(0, 1), (0, 2), (1, 2)]
    >>> [[edges[at] for at in turn] for turn in colouring(edges)]
    [[(0, 1), (1, 2)], [(0, 2)]]
    """
    return _colours(edges, list(range(len(edges))), _degree(edges, range(len(edges))))


def _degree(edges: Sequence[Edge], some: Sequence[int]) -> int:
    """The most of some edges that one device sends or receives."""
    senders, receivers = Counter(edges[at][0] for at in some), Counter(edges[at][1] for at in some)
    return max((*senders.values(), *receivers.values()), default=0)


def _colours(edges: Sequence[Edge], some: list[int], degree: int) -> Colours:
    """Colours some edges of this degree by halving them. Each half's degree is about half, so the depth is small."""
    if degree <= 1:
        return [some] if some else []
    colours: Colours = []
    for half in _halves(edges, some):
        colours += _colours(edges, half, _degree(edges, half))
    if len(colours) > degree:
        smallest = min(range(len(colours)), key=lambda number: len(colours[number]))
        left = colours.pop(smallest)
        return _fitted(edges, colours, left)
    return colours


def _halves(edges: Sequence[Edge], some: list[int]) -> tuple[list[int], list[int]]:
    """Splits edges so that each device has half of its own in either half, give or take one.

    The edges of a device are paired. The pairs of senders and of receivers link the edges to paths and cycles, and
    neighbours on these go to different halves. Cycles are even, since the two kinds of pairs take turns.
    """
    at_sender, at_receiver = _pairs(edges, some, 0), _pairs(edges, some, 1)
    first: dict[int, bool] = {}
    for start in some:
        if start in first:
            continue
        first[start] = True
        for links, others in ((at_sender, at_receiver), (at_receiver, at_sender)):
            at, half = start, True
            while (after := links.get(at)) is not None and after not in first:
                half = not half
                first[after] = half
                at, links, others = after, others, links
    return [at for at in some if first[at]], [at for at in some if not first[at]]


def _pairs(edges: Sequence[Edge], some: list[int], end: int) -> dict[int, int]:
    """Pairs of edges that have the same device at one end; of an odd number one edge is left alone."""
    pairs: dict[int, int] = {}
    open_at: dict[int, int] = {}
    for at in some:
        device = edges[at][end]
        other = open_at.pop(device, None)
        if other is None:
            open_at[device] = at
        else:
            pairs[at], pairs[other] = other, at
    return pairs


class _Taken:
    """The colours of one device's edges: which edge has each, and all of them as the bits of an int."""

    __slots__ = ("colours", "edges")

    def __init__(self) -> None:
        self.edges: dict[int, int] = {}
        self.colours = 0

    def take(self, colour: int, edge: int) -> None:
        self.edges[colour] = edge
        self.colours |= 1 << colour

    def drop(self, colour: int) -> None:
        del self.edges[colour]
        self.colours ^= 1 << colour


def _fitted(edges: Sequence[Edge], colours: Colours, left: Sequence[int]) -> Colours:
    """Fits edges into the colours of others, one of which is free at each device.

    An edge takes the lowest colour that is free at both ends. If there is none, it takes the lowest that is free at
    its sender, and the path from its receiver that alternates between the two ends' free colours swaps these first.
    The graph is bipartite, so the path never comes back to the sender.
    """
    ends = [edges[at] for some in (*colours, left) for at in some]
    senders = {sender: _Taken() for sender, _ in ends}
    receivers = {receiver: _Taken() for _, receiver in ends}
    for number, some in enumerate(colours):
        for at in some:
            senders[edges[at][0]].take(number, at)
            receivers[edges[at][1]].take(number, at)
    for at in left:
        sends, receives = senders[edges[at][0]], receivers[edges[at][1]]
        number = _lowest_free(sends.colours | receives.colours)
        if number >= len(colours):
            number = _lowest_free(sends.colours)
            _flip(edges, senders, receivers, edges[at][1], number, _lowest_free(receives.colours))
        sends.take(number, at)
        receives.take(number, at)
    fitted: Colours = [[] for _ in colours]
    for taken in senders.values():
        for number, at in taken.edges.items():
            fitted[number].append(at)
    return fitted


def _lowest_free(taken: int) -> int:
    """The lowest bit that is not set."""
    return (~taken & (taken + 1)).bit_length() - 1


def _flip(
    edges: Sequence[Edge],
    senders: Mapping[int, _Taken],
    receivers: Mapping[int, _Taken],
    start: int,
    mine: int,
    theirs: int,
) -> None:
    """Swaps two colours along the path that leaves receiver `start` by colour `mine`."""
    path: list[int] = []
    at_receiver, node, number = True, start, mine
    while (at := (receivers if at_receiver else senders)[node].edges.get(number)) is not None:
        path.append(at)
        at_receiver, node = not at_receiver, edges[at][0 if at_receiver else 1]
        number = theirs if number == mine else mine
    old = [(at, mine if step % 2 == 0 else theirs) for step, at in enumerate(path)]
    for at, number in old:
        senders[edges[at][0]].drop(number)
        receivers[edges[at][1]].drop(number)
    for at, number in old:
        new = theirs if number == mine else mine
        senders[edges[at][0]].take(new, at)
        receivers[edges[at][1]].take(new, at)
