"""Messages between nodes joined by node: who carries which, and where each rank's part of them lies.

    nodes {0, 1, 2, 3}, {4, 5, 6, 7}     rank 0 has something for each of 4, 5, 6 and 7, and so have 1, 2 and 3:
                                         16 messages, or 4 *stripes* of 4 messages each

    what 0 .. 3 have for 4    in the memory of rank 0    one message    in the memory of rank 4, who copies it
    what 0 .. 3 have for 5    in the memory of rank 1    one message    in the memory of rank 5
    ...

The ranks of a node share memory, so they write what goes to one other node side by side, and its *carrier* sends all
of it. Each member of a node carries an equal share of the stripes: with fewer other nodes than members, the ranks of a
node are divided into groups, each with a stripe of its own, as many as leave hardly a member without one.

A rank needs to know what the other members of its node send and receive, as two small tables, and nothing else.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Table = NDArray[np.int64]
"""Elements, a row for each member of a node."""


class Stripe(NamedTuple):
    """What goes from one node to a group of another one's ranks: the ranks at both ends of the message, the ranks that
    give and those that receive, and the number of the other node.
    """

    sender: int
    receiver: int
    givers: tuple[int, ...]
    takers: tuple[int, ...]
    other: int


@lru_cache(maxsize=16)
def ranks_of_nodes(nodes: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    """The ranks of every node, given the node of every rank.

    >>> ranks_of_nodes((0, 0, 7, 0, 7))
    ((0, 1, 3), (2, 4))
    """
    ranks: dict[int, list[int]] = {}
    for rank, node in enumerate(nodes):
        ranks.setdefault(node, []).append(rank)
    return tuple(map(tuple, ranks.values()))


def number_of_groups(nodes: tuple[int, ...]) -> int:
    """The groups into which each node's ranks are divided: as many as give no member more than one stripe, or one.

    >>> number_of_groups((0, 0, 0, 0, 1, 1, 1, 1)), number_of_groups((0, 0, 1, 1, 2, 2, 3, 3))
    (4, 1)
    """
    every = ranks_of_nodes(nodes)
    return max(1, min(map(len, every)) // max(1, len(every) - 1))


def most_stripes(nodes: tuple[int, ...]) -> int:
    """The most messages that a rank sends, or receives.

    >>> most_stripes((0,) * 64 + (1,) * 64), most_stripes((0, 0, 1, 1, 2, 2, 3, 3))
    (1, 2)
    """
    return -(-(len(ranks_of_nodes(nodes)) - 1) * number_of_groups(nodes) // min(map(len, ranks_of_nodes(nodes))))


def stripes_sent(nodes: tuple[int, ...], rank: int) -> list[Stripe]:
    """The stripes that a rank's node sends, first those to the next node.

    >>> [stripe[:2] for stripe in stripes_sent((0, 0, 1, 1, 2, 2, 3, 3), 0)]
    [(0, 2), (1, 5), (0, 6)]
    """
    here = _node_of_rank(nodes, rank)
    return [_stripe_between(nodes, here, other, group) for other, group in _list_others(nodes, here)]


def stripes_received(nodes: tuple[int, ...], rank: int) -> list[Stripe]:
    """The stripes that a rank's node receives, first those from the next node.

    >>> [stripe[:2] for stripe in stripes_received((0, 0, 1, 1, 2, 2, 3, 3), 3)]
    [(4, 2), (7, 3), (0, 2)]
    """
    here = _node_of_rank(nodes, rank)
    others = _list_others(nodes, here)
    return [_stripe_between(nodes, other, here, group)._replace(other=other) for other, group in others]


def _node_of_rank(nodes: tuple[int, ...], rank: int) -> int:
    return next(number for number, ranks in enumerate(ranks_of_nodes(nodes)) if rank in ranks)


def _list_others(nodes: tuple[int, ...], here: int) -> list[tuple[int, int]]:
    """The other nodes, from the next one on, each with every group."""
    count = len(ranks_of_nodes(nodes))
    return [((here + k) % count, group) for k in range(1, count) for group in range(number_of_groups(nodes))]


def _stripe_between(nodes: tuple[int, ...], node: int, other: int, group: int) -> Stripe:
    every, groups = ranks_of_nodes(nodes), number_of_groups(nodes)
    takers = every[other]
    low, high = (len(takers) * at // groups for at in (group, group + 1))

    def carrier(at: int, to: int) -> int:
        """The member of a node at its end of the stripe: its stripes go round its members, from the next node's on."""
        number = (to - at - 1) % len(every) * groups + group
        return every[at][number % len(every[at])]

    return Stripe(carrier(node, other), carrier(other, node), every[node], takers[low:high], other)


class NodePlace(NamedTuple):
    """Elements in the memory of a member of the node: its number there, and the first element."""

    member: int
    start: int


class CarriedMessage(NamedTuple):
    """A stripe as its carrier sends or receives it, in its own memory."""

    peer: int
    start: int
    elements: int


@dataclass
class Stripes:
    """A rank's part of a move by stripes: where it puts what goes to each rank, where it finds what comes from each,
    and the messages that it carries. `elements` has what each member's memory needs, `largest` the longest message.
    """

    elements: list[int]
    puts: dict[int, NodePlace] = field(default_factory=dict[int, NodePlace])
    finds: dict[int, NodePlace] = field(default_factory=dict[int, NodePlace])
    sends: list[CarriedMessage] = field(default_factory=list[CarriedMessage])
    receives: list[CarriedMessage] = field(default_factory=list[CarriedMessage])
    largest: int = 0


def lay_stripes(nodes: tuple[int, ...], rank: int, given: Table, taken: Table, received: Mapping[int, int]) -> Stripes:
    """A rank's part, from what the members of its node give to each rank, and take from each node.

    `received` has the elements that this rank receives from each rank. What one member has for another stays in the
    giver's memory, from where the other copies it.

    >>> given, taken = np.array([[0, 1, 2, 3], [1, 0, 2, 3]]), np.array([[0, 5], [0, 5]])
    >>> mine = lay_stripes((0, 0, 1, 1), 0, given, taken, {1: 1, 2: 2, 3: 3})
    >>> mine.puts[3], mine.finds[1], mine.finds[3]
    (NodePlace(member=1, start=1), NodePlace(member=1, start=0), NodePlace(member=0, start=7))
    >>> mine.sends
    [CarriedMessage(peer=2, start=1, elements=4)]
    """
    here = next(ranks for ranks in ranks_of_nodes(nodes) if rank in ranks)
    me, numbers = here.index(rank), {member: number for number, member in enumerate(here)}
    mine = Stripes(given[:, here].sum(axis=1).tolist())
    local = np.cumsum(given[:, here], axis=1) - given[:, here]
    for number, other in enumerate(here):
        mine.puts[other] = NodePlace(me, int(local[me, number]))
        mine.finds[other] = NodePlace(number, int(local[number, me]))

    def lay(carrier: int, elements: int) -> int:
        """Where a stripe begins in its carrier's memory."""
        start = mine.elements[carrier]
        mine.elements[carrier] += elements
        mine.largest = max(mine.largest, elements)
        return start

    totals, before = given.sum(axis=0).tolist(), given[:me].sum(axis=0).tolist()
    for stripe in stripes_sent(nodes, rank):
        carrier, elements = numbers[stripe.sender], sum(totals[taker] for taker in stripe.takers)
        start = lay(carrier, elements)
        if stripe.sender == rank and elements:
            mine.sends.append(CarriedMessage(stripe.receiver, start, elements))
        for taker in stripe.takers:
            mine.puts[taker] = NodePlace(carrier, start + before[taker])
            start += totals[taker]
    for stripe in stripes_received(nodes, rank):
        carrier, sizes = numbers[stripe.receiver], [int(taken[numbers[to], stripe.other]) for to in stripe.takers]
        start = lay(carrier, sum(sizes))
        if stripe.receiver == rank and sum(sizes):
            mine.receives.append(CarriedMessage(stripe.sender, start, sum(sizes)))
        if rank in stripe.takers:
            start += sum(sizes[: stripe.takers.index(rank)])
            for giver in stripe.givers:
                mine.finds[giver] = NodePlace(carrier, start)
                start += received.get(giver, 0)
    return mine
