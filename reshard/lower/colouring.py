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

import math
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from reshard.geometry.refine import RefinedDigit, Refinement
from reshard.lower.groups import coordinate

Edge = tuple[int, int]
"""(sender, receiver)."""

Colours = list[list[int]]
"""The edges of each colour, by number."""


def colour_edges(edges: Sequence[Edge]) -> Colours:
    """The edges, by number, of each round, in as many rounds as the busiest device has messages.

    >>> edges = [(0, 1), (0, 2), (1, 2)]
    >>> [[edges[at] for at in turn] for turn in colour_edges(edges)]
    [[(0, 1), (1, 2)], [(0, 2)]]
    """
    return _colour_some(edges, list(range(len(edges))), _largest_degree(edges, range(len(edges))))


def _largest_degree(edges: Sequence[Edge], some: Sequence[int]) -> int:
    """The most of some edges that one device sends or receives."""
    senders, receivers = Counter(edges[at][0] for at in some), Counter(edges[at][1] for at in some)
    return max((*senders.values(), *receivers.values()), default=0)


def _colour_some(edges: Sequence[Edge], some: list[int], degree: int) -> Colours:
    """Colours some edges of this degree by halving them. Each half's degree is about half, so the depth is small."""
    if degree <= 1:
        return [some] if some else []
    colours: Colours = []
    for half in _halve_edges(edges, some):
        colours += _colour_some(edges, half, _largest_degree(edges, half))
    if len(colours) > degree:
        smallest = min(range(len(colours)), key=lambda number: len(colours[number]))
        left = colours.pop(smallest)
        return _fit_edges(edges, colours, left)
    return colours


def _halve_edges(edges: Sequence[Edge], some: list[int]) -> tuple[list[int], list[int]]:
    """Splits edges so that each device has half of its own in either half, give or take one.

    The edges of a device are paired. The pairs of senders and of receivers link the edges to paths and cycles, and
    neighbours on these go to different halves. Cycles are even, since the two kinds of pairs take turns.
    """
    at_sender, at_receiver = _pair_edges(edges, some, 0), _pair_edges(edges, some, 1)
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


def _pair_edges(edges: Sequence[Edge], some: list[int], end: int) -> dict[int, int]:
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


def _fit_edges(edges: Sequence[Edge], colours: Colours, left: Sequence[int]) -> Colours:
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
            number, other = _lowest_free(sends.colours), _lowest_free(receives.colours)
            path: list[int] = []
            side, node, colour = receivers, edges[at][1], number
            while (following := side[node].edges.get(colour)) is not None:
                path.append(following)
                side, node = (senders, edges[following][0]) if side is receivers else (receivers, edges[following][1])
                colour = other if colour == number else number
            # All of the path lose their colours before any takes another: at a node, two of its edges trade theirs.
            for step, one in enumerate(path):
                for taken in (senders[edges[one][0]], receivers[edges[one][1]]):
                    taken.drop(other if step % 2 else number)
            for step, one in enumerate(path):
                for taken in (senders[edges[one][0]], receivers[edges[one][1]]):
                    taken.take(number if step % 2 else other, one)
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


# Who sends to whom in each round of an even exchange, in closed form.
#
#     f32[{x}2, 6] -> f32[6, {x}2] on <x=3>      a share is what one tile of the source has for one of the target
#
#     round  device 0 gets  device 1 gets  device 2 gets
#         0    share 0, 0     share 1, 1     share 2, 2      from itself: it crosses no wire
#         1    share 1, 0     share 2, 1     share 0, 2      share a, b: device a's, for device b
#         2    share 2, 0     share 0, 1     share 1, 2
#
# The formulas take any position that supports `//`, `%`, `*` and `+`: the prover runs them on a symbolic one.
#
# Where digits change holders as well, few devices keep a share, and rounds are numbered so that they do so in different
# ones:
#
#     f32[{x}{y}2, 6] -> f32[{y}6, {x}2] on <x=3, y=3>     from (x, y) to those at (any, x); device (i, i) keeps a share
#
#     round j, receiver (a, b)      gets the share of (b, a + j)         round 0: all three keep theirs, 1 and 2: none
#     ... with the shift by -b      gets the share of (b, a + j - b)     round j: device (j, j) keeps its own
#
# That is for libtpu's sake: where each of up to 256 devices sends to another one, it spells their addresses as a tree
# of selects, which takes ten times as long to compile as the table that it reads if one device does not.


SPREAD = 256
"""The most devices among which the rounds of an exchange are numbered in that way."""


class RoundShift(NamedTuple):
    """What a device adds to the number of a round: a multiple of its coordinate along a factor of the positions."""

    times: int
    stride: int
    size: int


class EvenRounds:
    """The rounds of an exchange between layouts with a common refinement.

    A *turn* numbers a round: one digit for each refined digit that becomes local (held before, local after). The
    receiver's position and the turn fix the sender's coordinate along every stride:

    - The stride held a digit that another stride holds after: the receiver's coordinate along the new holder.
    - It held a digit that becomes local: the number of the share, counted from the receiver's own coordinate at the
      head of the chain, so that every round is a bijection of the devices.
    - It held nothing: the coordinate that is left over at the head of the chain.

    The *chain* of a stride leads from the stride to the one that held, before, the digit that the stride holds after,
    and so on; its head is the last. With `spread`, the number of the share is counted on by a shift, so that devices
    that keep a share do so in as many different rounds as possible.
    """

    def __init__(self, r: Refinement, *, spread: bool = False) -> None:
        self._after = {digit.dst: digit for digit in r.digits if digit.dst is not None}
        self.shares = [(digit, self._head(digit.src or 0)) for digit in r.gathered]
        self._sources = [(d.src, d.dst, d.radix) for d in r.digits if d.src is not None and d.dst is not None]
        unused = [(stride, digit) for stride, digit in self._after.items() if stride not in r.used_before]
        self._sources += [(stride, self._head(stride), digit.radix) for stride, digit in unused]
        self._shifts = _share_shifts(self.shares) if spread else {}

    def _head(self, stride: int) -> int:
        """The end of the chain that starts at a stride."""
        while (digit := self._after.get(stride)) is not None and digit.src is not None:
            stride = digit.src
        return stride

    def share(self, position: int, turn: Sequence[int]) -> list[int]:
        """Which share of each digit that becomes local the device at a position gets in a turn."""
        numbers: list[int] = []
        for (digit, head), turned in zip(self.shares, turn, strict=True):
            number = coordinate(position, head, digit.radix) + turned
            for times, stride, size in self._shifts.get(digit.src, ()):
                number = number + coordinate(position, stride, size) * times
            numbers.append(number % digit.radix)
        return numbers

    def sender(self, position: int, turn: Sequence[int]) -> int:
        """The position of the device that sends to the one at `position` in a turn."""
        sender = position  # May be an array, which stays as it is.
        for stride, origin, radix in self._sources:
            sender = sender + (coordinate(position, origin, radix) - coordinate(position, stride, radix)) * stride
        for (digit, _), value in zip(self.shares, self.share(position, turn), strict=True):
            stride = digit.src or 0
            sender = sender + (value - coordinate(position, stride, digit.radix)) * stride
        return sender

    def receiver(self, position: int, turn: Sequence[int]) -> int:
        """The position of the device that the one at `position` sends to in a turn: the inverse of `sender`."""
        receiver = position
        for stride, origin, radix in self._sources:
            receiver += (coordinate(position, stride, radix) - coordinate(position, origin, radix)) * origin
        # A shift depends on coordinates that digits left on their way, and on one that is its own head.
        shares = zip(self.shares, turn, strict=True)
        for (digit, head), turned in sorted(shares, key=lambda each: each[0][1] != each[0][0].src):
            back = turned + sum(t * coordinate(receiver, *factor) for t, *factor in self._shifts.get(digit.src, ()))
            value = (coordinate(position, digit.src or 0, digit.radix) - back) % digit.radix
            receiver += (value - coordinate(position, head, digit.radix)) * head
        return receiver


def _share_shifts(shares: Sequence[tuple[RefinedDigit, int]]) -> dict[int | None, list[RoundShift]]:
    """The shifts of shares, by the stride that held their digit: none unless some digit is not its own head.

    A device keeps a share where its coordinates are equal along a chain, to c: shifted by -c, in round c. Of a digit
    that is its own head it keeps one whatever its coordinate x, in round 0. So the two numbers trade places as far as
    they have common factors: with n of them, c = c' + (p / n) c'' and x = x' + n x'', the chain's digit of radix p is
    shifted by -(c' + (p / n) x'), the other by -c''.
    """
    own = {digit.src or 0: digit.radix for digit, head in shares if head == digit.src}
    chained = {digit.src or 0: digit.radix for digit, head in shares if head != digit.src}
    shifts: dict[int | None, list[RoundShift]] = {}
    traded = dict.fromkeys(own, 1)
    for stride, radix in chained.items():
        left = radix
        for other, size in own.items():
            place = traded[other]
            n = math.gcd(left, size // place)
            if n > 1:
                left //= n
                shifts.setdefault(stride, []).append(RoundShift(radix - left, other * place, n))
                shifts.setdefault(other, []).append(RoundShift(size - place, stride * left, n))
                traded[other] *= n
        if left > 1:
            shifts.setdefault(stride, []).append(RoundShift(radix - 1, stride, left))
    return shifts
