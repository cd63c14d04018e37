"""Messages between nodes joined by node: who carries which, and where each rank's part of them lies.

    nodes {0, 1, 2, 3}, {4, 5, 6, 7}     rank 0 has something for each of 4, 5, 6 and 7, and so have 1, 2 and 3:
                                         16 messages, or 4 *stripes* of 4 messages each

    what 0 .. 3 have for 4    in the memory of rank 0    one message    in the memory of rank 4, who copies it
    what 0 .. 3 have for 5    in the memory of rank 1    one message    in the memory of rank 5
    ...

The ranks of a node share memory, so they write what goes to one other node side by side, and its *carrier* sends all
of it. Each member of a node carries an equal share of the stripes: with fewer other nodes than members, the ranks of a
node are divided into groups, each with a stripe of its own, as many as leave hardly a member without one.

A rank needs to know what the other members of its node send and receive, as a row of each, and nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from reshard.lower.to_mpi.peer_table import Column


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
    every, groups = ranks_of_nodes(nodes), number_of_groups(nodes)
    here = _node_of_rank(every, rank)
    return [_stripe_between(every, groups, here, *other) for other in _list_others(every, groups, here)]


def stripes_received(nodes: tuple[int, ...], rank: int) -> list[Stripe]:
    """The stripes that a rank's node receives, first those from the next node.

    >>> [stripe[:2] for stripe in stripes_received((0, 0, 1, 1, 2, 2, 3, 3), 3)]
    [(4, 2), (7, 3), (0, 2)]
    """
    every, groups = ranks_of_nodes(nodes), number_of_groups(nodes)
    here = _node_of_rank(every, rank)
    others = _list_others(every, groups, here)
    return [_stripe_between(every, groups, other, here, group)._replace(other=other) for other, group in others]


Ranks = tuple[tuple[int, ...], ...]
"""The ranks of every node."""


def _node_of_rank(every: Ranks, rank: int) -> int:
    return next(number for number, ranks in enumerate(every) if rank in ranks)


def _list_others(every: Ranks, groups: int, here: int) -> list[tuple[int, int]]:
    """The other nodes, from the next one on, each with every group."""
    return [((here + k) % len(every), group) for k in range(1, len(every)) for group in range(groups)]


def _stripe_between(every: Ranks, groups: int, node: int, other: int, group: int) -> Stripe:
    takers = every[other]
    low, high = (len(takers) * at // groups for at in (group, group + 1))

    def carrier(at: int, to: int) -> int:
        """The member of a node at its end of the stripe: its stripes go round its members, from the next node's on."""
        number = (to - at - 1) % len(every) * groups + group
        return every[at][number % len(every[at])]

    return Stripe(carrier(node, other), carrier(other, node), every[node], takers[low:high], other)


class NodePlaces(NamedTuple):
    """For each rank, elements in the memory of a member of the node: its number there, and the first element."""

    members: Column
    starts: Column

    @classmethod
    def for_ranks(cls, size: int) -> NodePlaces:
        """Places yet to be filled in."""
        return cls(np.zeros(size, np.int64), np.zeros(size, np.int64))


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
    puts: NodePlaces
    finds: NodePlaces
    sends: list[CarriedMessage] = field(default_factory=list[CarriedMessage])
    receives: list[CarriedMessage] = field(default_factory=list[CarriedMessage])
    largest: int = 0


def lay_stripes(
    nodes: tuple[int, ...], rank: int, given: Sequence[Column], taken: Sequence[Column], received: Column
) -> Stripes:
    """A rank's part, from what the members of its node give to each rank, and take from each node, a row each.

    `received` has the elements that this rank receives from each rank. What one member has for another stays in the
    giver's memory, from where the other copies it.

    >>> given, taken = np.array([[0, 1, 2, 3], [1, 0, 2, 3]]), np.array([[0, 5], [0, 5]])
    >>> mine = lay_stripes((0, 0, 1, 1), 0, given, taken, np.array([0, 1, 2, 3]))
    >>> [(places.members.tolist(), places.starts.tolist()) for places in (mine.puts, mine.finds)]
    [([0, 0, 0, 1], [0, 0, 1, 1]), ([0, 1, 0, 0], [0, 0, 5, 7])]
    >>> mine.sends
    [CarriedMessage(peer=2, start=1, elements=4)]
    """
    here = next(ranks for ranks in ranks_of_nodes(nodes) if rank in ranks)
    me, numbers, members = here.index(rank), {member: number for number, member in enumerate(here)}, np.array(here)
    inside = np.array([row[members] for row in given])
    mine = Stripes(inside.sum(axis=1).tolist(), NodePlaces.for_ranks(len(nodes)), NodePlaces.for_ranks(len(nodes)))
    local = np.cumsum(inside, axis=1) - inside
    mine.puts.members[members], mine.puts.starts[members] = me, local[me]
    mine.finds.members[members], mine.finds.starts[members] = np.arange(len(here)), local[:, me]

    def lay(carrier: int, elements: int) -> int:
        """Where a stripe begins in its carrier's memory."""
        start = mine.elements[carrier]
        mine.elements[carrier] += elements
        mine.largest = max(mine.largest, elements)
        return start

    # Row by row: a table of all members would be larger than all else.
    before, totals = np.zeros(len(nodes), np.int64), np.zeros(len(nodes), np.int64)
    for row in given[:me]:
        before += row
    totals += before
    for row in given[me:]:
        totals += row
    for stripe in stripes_sent(nodes, rank):
        carrier, takers = numbers[stripe.sender], np.array(stripe.takers)
        ends = totals[takers].cumsum()
        start = lay(carrier, int(ends[-1]))
        if stripe.sender == rank and ends[-1]:
            mine.sends.append(CarriedMessage(stripe.receiver, start, int(ends[-1])))
        mine.puts.members[takers], mine.puts.starts[takers] = carrier, start + ends - totals[takers] + before[takers]
    for stripe in stripes_received(nodes, rank):
        carrier, sizes = numbers[stripe.receiver], [int(taken[numbers[to]][stripe.other]) for to in stripe.takers]
        start = lay(carrier, sum(sizes))
        if stripe.receiver == rank and sum(sizes):
            mine.receives.append(CarriedMessage(stripe.sender, start, sum(sizes)))
        if rank in stripe.takers:
            start, givers = start + sum(sizes[: stripe.takers.index(rank)]), np.array(stripe.givers)
            mine.finds.members[givers] = carrier
            mine.finds.starts[givers] = start + received[givers].cumsum() - received[givers]
    return mine
