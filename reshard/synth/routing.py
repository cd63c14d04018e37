"""Routing: what messages load wires with whose senders follow from the coordinates of their receivers, digit by digit.

In a permute or an exchange the sender's coordinate along a stride is the receiver's along another one, or any. On a
torus what a device sends goes axis by axis, and on each axis its digits become what they are at the receiver. What an
axis carries is found on one row of its devices, whatever the number of other rows:

    torus <x=4, y=4>, f32[{x}{y}] -> f32[{y}{x}], tiles of t bytes: the receiver's x is the sender's y

    x, then y             all tiles of a row y go to its one device x = y, and from there along y           3.0 t/W
    half x, y; half y, x  tiles come together over half of the wires, and part over the other half          1.5 t/W
    any y, x, y           nothing comes together: three all-to-alls of single axes, two of them along y     2.0 t/W
    half that; half       ... and two of them along x for the other half
      any x, y, x                                                                                           1.5 t/W

On a ring, messages of which as many come back as go take max over arcs (tiles that leave the arc) t/W: flows that fit
all cuts of a cycle exist (Okamura and Seymour, 1981). On a line this holds for all messages, with half the wires.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from itertools import accumulate, permutations, product
from typing import NamedTuple

_MOST_DEVICES = 32
"""Devices of a physical axis up to which all its arcs are tried; longer ones are charged run by run."""

_MOST_AXES = 4
"""Physical axes up to which all orders are tried."""

_MOST_SHARES = 6
"""Equal shares of a tile, which go in orders of their own."""

_MOST_MESSAGES, _MOST_TURNS, _MOST_HALVINGS = 64, 4, 6
"""Messages of a ring that are split between its two ways round, how often splits are chosen, and how finely."""

ANY, MEETS, PARTS = -1, -2, -3
"""What a digit of a row becomes: any coordinate; the one that all messages of the row go to, or if they all have one,
any."""

Change = tuple[int, int, int]
"""A digit of a row that changes: its hop and size, and the hop of the digit whose coordinate it takes, or as above."""


class Row(NamedTuple):
    """Devices in a row, each joined to the next; `wraps` joins the last to the first."""

    size: int
    wraps: bool


class WiredDigit(NamedTuple):
    """A prime digit of the positions of devices: on physical axis `on`, with neighbours `hop` devices apart."""

    on: int
    hop: int
    size: int


Origins = tuple[tuple[WiredDigit, WiredDigit | None], ...]
"""For digits that change, the one along which the receiver has the sender's coordinate; None if that is any."""


@lru_cache(maxsize=4096)
def route_messages(rows: tuple[Row, ...], speeds: tuple[float, ...], passed: Origins) -> float:
    """Seconds for each byte that a device sends, over the best of these ways.

    >>> digits = [WiredDigit(on, hop, 2) for on in (0, 1) for hop in (2, 1)]
    >>> route_messages((Row(4, True),) * 2, (1.0, 1.0), tuple(zip(digits, digits[2:] + digits[:2])))
    1.5
    """
    origins = dict(passed)
    takes = {origin: digit for digit, origin in origins.items() if origin is not None}
    digits = sorted({*origins, *takes})
    axes = sorted({digit.on for digit in digits})
    orders = [*permutations(axes)] if len(axes) <= _MOST_AXES else [tuple(axes), tuple(axes[::-1])]
    swaps = all(origins.get(digit) == taken for digit, taken in takes.items()) and None not in origins.values()
    ways: dict[tuple[float, ...], None] = {}
    for number, order in enumerate(orders):
        after = {axis: at for at, axis in enumerate(order)}
        # A coordinate that another axis takes before it is changed here goes to any device first. Then no message of a
        # row says where the others go.
        spread = {taken for digit, taken in takes.items() if after[digit.on] < after[taken.on]}
        loads: list[float] = []
        for axis in axes:
            here = [digit for digit in digits if digit.on == axis]
            first = tuple((digit.hop, digit.size, ANY) for digit in here if digit in spread)
            then: list[Change] = []
            for digit in here:
                taken = takes.get(digit)
                if taken != digit:
                    along = None if taken is None or taken.on != axis or taken in spread else taken.hop
                    then.append((digit.hop, digit.size, ANY if along is None else along))
            loads.append((load_row(rows[axis], first) + load_row(rows[axis], tuple(then))) / speeds[axis])
        ways[tuple(loads)] = None
        if swaps and 2 * number < len(orders):  # The other orders are these from the end.
            # While one of two axes has the coordinate of both, all messages are in a few rows of an axis between. Then
            # one of the two goes to any device first, or not.
            apart = {digit for digit in digits if abs(after[digit.on] - after[takes[digit].on]) > 1}
            for over in [set[WiredDigit](), apart] if apart else [apart]:
                loads = []
                for axis in axes:
                    both: list[Change] = []
                    sides: tuple[list[Change], list[Change]] = [], []
                    for digit in digits:
                        taken = takes[digit]
                        later = after[taken.on] < after[axis]
                        if digit.on == axis and digit in over:
                            both.append((digit.hop, digit.size, ANY))
                            sides[later].append(both[-1])
                        elif digit.on == axis and taken != digit:
                            met = PARTS if later else MEETS
                            both.append((digit.hop, digit.size, taken.hop if taken.on == axis else met))
                    crowd = math.prod(d.size for d in apart - over if after[d.on] < after[axis] < after[takes[d].on])
                    spread_load = sum(load_row(rows[axis], tuple(side)) for side in sides) / 2
                    loads.append((spread_load + crowd * load_row(rows[axis], tuple(both))) / speeds[axis])
                ways[tuple(loads)] = None
    # All over one way, or in equal shares: the first over the one of least load, each other over the one that adds the
    # least to the busiest axis, and leaves the axes as equal as it can.
    total = min(ways, key=sum)
    least = min(map(max, ways))
    for shares in range(2, _MOST_SHARES + 1):
        sums = [tuple(a + b for a, b in zip(total, way, strict=True)) for way in ways]
        total = min(sums, key=lambda each: (max(each), sum(load * load for load in each)))
        least = min(least, max(total) / shares)
    return least


@lru_cache(maxsize=4096)
def load_row(row: Row, changes: tuple[Change, ...]) -> float:
    """Seconds times W, for each byte that a device of the row has, until its digits have changed.

    Where messages meet or part, half of them make the same way back. Infinite where this is not known.

    >>> load_row(Row(8, True), ((1, 8, ANY),)), load_row(Row(8, False), ((1, 8, ANY),))
    (2.0, 4.0)
    """
    if not changes:
        return 0.0
    runs = join_runs((hop, size) for hop, size, _ in changes)
    spread = sum(load_run(row, hop, size) for hop, size in runs)
    fixed = [change for change in changes if change[2] in (MEETS, PARTS)]
    if len(runs) == 1 and all(taken == ANY for _, _, taken in changes):
        return spread
    ways = math.prod(size for _, size, _ in fixed)
    # On a whole row, messages from all devices to one, or from one to all, are alike whichever it is; next to an end
    # of a line they are the most.
    alike = ways == row.size and len({taken for _, _, taken in changes}) == 1
    if row.size > _MOST_DEVICES:
        # Once over devices at random, if each ends at one only.
        return math.inf if fixed else spread * (1 if all(taken == ANY for _, _, taken in changes) else 2)
    numbers = [(0,) * len(fixed)] if alike else product(*(range(size) for _, size, _ in fixed))
    return max(_load_arcs(row, _list_sent(row, changes, dict(zip(fixed, at, strict=True)))) for at in numbers)


def join_runs(runs: Iterable[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """The runs (hop, size), minor first, those that follow each other as one; a part that occurs twice only once."""
    joined: list[tuple[int, int]] = []
    for hop, size in sorted(runs):
        if joined and hop <= joined[-1][0] * joined[-1][1]:
            first, so_far = joined.pop()
            joined.append((first, max(so_far, hop * size // first)))
        else:
            joined.append((hop, size))
    return tuple(joined)


def load_run(row: Row, hop: int, size: int) -> float:
    """An all-to-all of `size` devices, `hop` apart: on a ring (size^2 - size % 2) / (4 size) tiles cross each wire, on
    a line twice as many; what is between passes the same wires."""
    return hop * ((size * size - size % 2) / (4 * size)) * (1 if row.wraps and hop * size == row.size else 2)


def _list_sent(row: Row, changes: Sequence[Change], at: Mapping[Change, int]) -> list[list[float]]:
    """What each device of a row sends to each, in tiles; messages that meet or part do so `at` these coordinates."""
    sent = [[0.0] * row.size for _ in range(row.size)]
    free = [[hop * n for n in range(size)] for hop, size, taken in changes if taken in (ANY, PARTS)]
    offsets = [sum(each) for each in product(*free)]
    parts = [(change[0], change[1], at[change]) for change in changes if change[2] == PARTS]
    share = math.prod(size for _, size, _ in parts) / len(offsets)
    sizes = {hop: size for hop, size, _ in changes}
    for sender in range(row.size):
        if any(sender // hop % size != number for hop, size, number in parts):
            continue
        receiver = sender
        for change in changes:
            hop, size, taken = change
            new = at[change] if taken == MEETS else sender // taken % sizes[taken] if taken >= 0 else 0
            receiver += (new - sender // hop % size) * hop
        for offset in offsets:
            sent[sender][receiver + offset] += share
    if not at:
        return sent
    return [[(sent[a][b] + sent[b][a]) / 2 for b in range(row.size)] for a in range(row.size)]


def _load_arcs(row: Row, sent: Sequence[Sequence[float]]) -> float:
    """The busiest wire, in tiles for a wire of bandwidth W / 2, halved."""
    size, around = row.size, math.inf
    if row.wraps and any(sent[a][b] != sent[b][a] for a in range(size) for b in range(a)):
        around = _load_both_ways(sent)
        # As many tiles as go come back.
        sent = [[max(sent[a][b], sent[b][a]) for b in range(size)] for a in range(size)]
    rows = [0.0, *accumulate(map(sum, sent))]
    below = [[0.0] * (size + 1)]
    for line in sent:
        below.append([a + b for a, b in zip(below[-1], [0.0, *accumulate(line)], strict=True)])
    most = 0.0
    for end in range(1, size):
        for start in range(end if row.wraps else 1):
            inside = below[end][end] - below[start][end] - below[end][start] + below[start][start]
            leave = rows[end] - rows[start] - inside
            come = below[size][end] - below[size][start] - inside
            most = max(most, leave, come)
    return min(most, around) if row.wraps else 2 * most


def _load_both_ways(sent: Sequence[Sequence[float]]) -> float:
    """The busiest wire of a ring, halved, if each message is split between its two ways round by what they carry.

    Splits are chosen in turn, again and again, for the least sum of fifth powers, which is close to the least maximum.
    """
    size = len(sent)
    messages = [(a, (b - a) % size, sent[a][b]) for a in range(size) for b in range(size) if a != b and sent[a][b]]
    if len(messages) > _MOST_MESSAGES:
        return math.inf
    ways = [
        ([(a + n) % size for n in range(far)], [(a - n) % size for n in range(size - far)]) for a, far, _ in messages
    ]
    up, down = [0.0] * size, [0.0] * size
    shares = [0.0] * len(messages)
    least = math.inf
    for turn in range(_MOST_TURNS):
        for at, ((_, _, tiles), (rising, falling)) in enumerate(zip(messages, ways, strict=True)):
            if turn:
                for wire in rising:
                    up[wire] -= shares[at]
                for wire in falling:
                    down[wire] -= tiles - shares[at]
            low, high = 0.0, tiles
            for _ in range(_MOST_HALVINGS):
                share = (low + high) / 2
                rest = tiles - share
                more = sum([(up[w] + share) ** 4 for w in rising]) > sum([(down[w] + rest) ** 4 for w in falling])
                low, high = (low, share) if more else (share, high)
            shares[at] = (low + high) / 2
            for wire in rising:
                up[wire] += shares[at]
            for wire in falling:
                down[wire] += tiles - shares[at]
        least = min(least, 2 * max(*up, *down))
    return least
