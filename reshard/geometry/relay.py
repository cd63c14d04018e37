"""An exchange in two turns: to devices that pass elements on, then from them to the others.

    f32[12] on device 0 -> f32[12] on devices 0 to 4

    at once     device 0 sends all 12 elements to each of the four others: 48
    relayed     turn 1: device 0 sends 3 elements to each of the four: 12
                turn 2: each of these sends its 3 to the three others: 9

Elements of one source tile that the same devices lack make up one class, and each of these devices gets a share of it
in the first turn, which it passes on in the second, out of its own tile of the result. What is left of a class is sent
by its holders to all. The shares are such that the busiest device sends little (`balance_shares`): a holder of much
passes on little. Every device receives exactly what it lacks, once.

An all-gather after the crossing does the same in fewer messages. But it sends to devices that hold elements already
where the two sets overlap, and needs pieces that the target's axes divide. Where each source tile has one holder, the
second turn may be a gather for any pieces: what a device sends to a group of devices that need the same goes to the
one that has the sender's own place in the group, whatever its share, and the group gathers what its devices were sent.

    f32[{x}4] on <x=3>, devices 1, 2 and 6 -> f32[{tp}6] on <rep=4, tp=2>, devices 0 to 7

    device    0    1    2    3    4    5    6    7
    holds          0-3  4-7                 8-11
    turn 1    0-3       4-5  6-7            -    8-11     in rows of tp: 1 to 0, 2 to 3, 6 to 7
    turn 2    0, 2, 4 and 6 gather 0-5; 1, 3, 5 and 7 gather 6-11

So arrays whose holders differ send along the same pairs of devices, of which each has few, and gather in the same
groups: their messages travel together (`plans.rules.lane`).
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple

from reshard.geometry.blocks import Axis, Block, Product, count_product
from reshard.geometry.dealing import assign_by_quota, assign_whole
from reshard.geometry.holders import (
    Tile,
    TileFactors,
    fewest_through,
    holders_of,
    list_holders,
    piece_columns,
    tile_factors,
    tile_of,
    tiles,
)
from reshard.geometry.messages import Message, cut_products, fewest_beside, list_needed, tally_messages
from reshard.geometry.overlap import shared_elements
from reshard.types.index_set import Holding
from reshard.types.layout import Layout
from reshard.types.mesh import Mesh
from reshard.types.view import View
from reshard.types.whole import check_deadline


class Relay(NamedTuple):
    """The messages of both turns; local copies are in the first. Those of the second are read from result tiles."""

    first: tuple[Message, ...]
    second: tuple[Message, ...]


class RelayTurn(NamedTuple):
    """The busiest device's figures in one turn, in elements: received, sent, and the rounds of messages."""

    received: int
    sent: int
    rounds: int


class RelayFigures(NamedTuple):
    """Both turns; elements of the busiest sender over both, and of the largest message."""

    turns: tuple[RelayTurn, RelayTurn]
    sent: int
    message: int


_MANY = 32
"""With as many elements for each device that lacks them, it does not matter how many of them each passes on."""

_WORTH = 0.02
"""The share of the busiest device's elements that is worth more messages."""


class _Class(NamedTuple):
    """Elements of a source tile that the same devices lack."""

    tile: Tile
    runs: tuple[Product, ...]
    lacking: tuple[int, ...]

    @property
    def size(self) -> int:
        """How many elements these are."""
        return sum(map(count_product, self.runs))


class _Given(NamedTuple):
    """What one device is sent of a class in the first turn: elements number `low` to `high`, which it passes on, and
    those from `direct` to the end, which all that lack them are sent.
    """

    device: int
    of: _Class
    low: int
    high: int
    direct: int

    @property
    def elements(self) -> int:
        """How many elements these are."""
        return self.high - self.low + self.of.size - self.direct

    def products(self, low: int, high: int) -> tuple[Product, ...]:
        """The elements number `low` to `high` of these."""
        middle = self.high - self.low
        passed = self.low + min(low, middle), self.low + min(high, middle)
        direct = self.direct + max(low - middle, 0), self.direct + max(high - middle, 0)
        return cut_products(self.of.runs, *passed) + cut_products(self.of.runs, *direct)


@lru_cache(maxsize=16)
def relay_messages(
    operand: Layout, result: Layout, view: View | None = None, holding: Holding | None = None, *, gathers: bool = False
) -> Relay:
    """The messages of both turns; beside a `holding`, without what devices hold already. If it `gathers`, groups of
    devices pass all that they are sent on to each other.

    >>> from reshard.types import Mesh
    >>> turns = relay_messages(Layout.parse("f32[12]", Mesh(x=1)), Layout.parse("f32[12]", Mesh(d=5)))
    >>> [[(m.sender, m.receiver, m.elements) for m in turn if m.sender != m.receiver][:4] for turn in turns]
    [[(0, 1, 3), (0, 2, 3), (0, 3, 3), (0, 4, 3)], [(1, 2, 3), (1, 3, 3), (1, 4, 3), (2, 1, 3)]]
    """
    holders = holders_of(operand)
    if gathers:
        return _list_gathered(operand, result, view)
    bound = fewest_through(operand, result, view)
    if holding is not None:
        bound = fewest_beside(operand, result, view, holding)
    homes = {} if holding is None else tiles(holding.layout)
    classes: list[_Class] = []
    local: list[Message] = []
    for tile, wanted in list_needed(operand, result, view, holding).items():
        own = set(holders[tile])
        # Devices that want one tile and hold one: each has an element at the same place, and passes it on from there.
        lacking: dict[tuple[Tile, Tile | None], tuple[tuple[Product, ...], list[int]]] = {}
        for device, runs in wanted:
            if device in own:
                local.append(Message(device, device, runs))
            else:
                lacking.setdefault((tile_of(result, device), homes.get(device)), (runs, []))[1].append(device)
        classes += [_Class(tile, runs, tuple(devices)) for runs, devices in lacking.values()]
    deal = _deal_classes(classes, holders, bound)
    # More devices pass on each of the few elements of a class, where that loads the busiest one clearly less.
    senders = set(itertools.chain(*(holders[each.tile] for each in classes), *(each.lacking for each in classes)))
    copies = sum(each.size * len(each.lacking) for each in classes)
    least = max(bound, -(-copies // max(1, len(senders))))
    for more, groups in itertools.product((0, 1), (2, 3, 4, 8)):
        split = [*_split_classes(classes, more, groups)]
        if deal.limit <= (1 + _WORTH) * least or len(split) == len(classes):
            break
        finer = _deal_classes(split, holders, bound)
        deal = finer if (1 + _WORTH) * finer.limit < deal.limit else deal
    first: dict[tuple[int, int], list[Product]] = {}
    for tile, queue in deal.given.items():
        givers, sizes = holders[tile], [each.elements for each in queue]
        shares = assign_whole(sizes, len(givers))
        loads = [deal.passed[device] for device in givers]
        for share in shares:
            loads[share.holder] += share.high
        if max(loads) > deal.limit:
            shares = assign_by_quota(sizes, deal.quotas[tile])
        for share in shares:
            each = queue[share.request]
            first.setdefault((givers[share.holder], each.device), []).extend(each.products(share.low, share.high))
    messages = (Message(*ends, tuple(products)) for ends, products in first.items())
    return Relay((*local, *messages), tuple(_second_turn(itertools.chain(*deal.given.values()))))


class _Deal(NamedTuple):
    """What devices are given of each source tile, what each passes on, what each holder of a tile sends first, and the
    elements of the busiest device."""

    given: Mapping[Tile, Sequence[_Given]]
    passed: Counter[int]
    quotas: Mapping[Tile, Sequence[int]]
    limit: int


def _deal_classes(classes: Sequence[_Class], holders: Mapping[Tile, Sequence[int]], bound: int) -> _Deal:
    """Who is given what, so that the busiest device sends little."""
    demands = [Demand(each.size, holders[each.tile], each.lacking) for each in classes]
    counts = balance_shares(demands, bound)
    passed: Counter[int] = Counter()
    for demand, some in zip(demands, counts, strict=True):
        for device, count in zip(demand.lacking, some, strict=True):
            passed[device] += count * demand.further
    given: dict[Tile, list[_Given]] = {}
    for each, some in zip(classes, counts, strict=True):
        ends = list(itertools.accumulate(some, initial=0))
        for device, (low, high) in zip(each.lacking, itertools.pairwise(ends), strict=True):
            part = _Given(device, each, low, high, ends[-1])
            if part.elements:
                given.setdefault(each.tile, []).append(part)

    # What is sent of each tile first is dealt among its holders; those that pass on more send less.
    quotas, sent = dict[Tile, list[int]](), passed.copy()
    for tile, queue in given.items():
        quotas[tile] = level_sums([passed[device] for device in holders[tile]], sum(each.elements for each in queue))
    for tile, some in quotas.items():
        sent.update(dict(zip(holders[tile], some, strict=True)))
    return _Deal(given, passed, quotas, max([bound, *sent.values()]))


def _split_classes(classes: Iterable[_Class], more: int, groups: int) -> Iterator[_Class]:
    """Classes of which each device may pass on as many elements as all others do; and the rest, with `more` for each,
    in groups of devices.

    An element that one device passes on to 46 others loads it with 46, and few devices have more of them than others.
    If in each of 8 groups a device passes it on to 5, it is spread, and its holder sends it 8 times.
    """
    for each in classes:
        devices, size = len(each.lacking), each.size
        rest = min(size, size % devices + more * devices) if devices > 2 and size < _MANY * devices else 0
        if rest < size:
            yield each._replace(runs=cut_products(each.runs, 0, size - rest))
        count = min(groups, devices) if rest else 0
        for at in range(count):
            lacking = each.lacking[at * devices // count : (at + 1) * devices // count]
            yield _Class(each.tile, cut_products(each.runs, size - rest, size), lacking)


def _second_turn(given: Iterable[_Given]) -> Iterator[Message]:
    """Each device passes its shares on, all that another one lacks of them in one message."""
    passed: dict[tuple[int, int], list[Product]] = {}
    for each in given:
        products = [read_from_result(product) for product in cut_products(each.of.runs, each.low, each.high)]
        for other in each.of.lacking if products else ():
            if other != each.device:
                passed.setdefault((each.device, other), []).extend(products)
    for (sender, receiver), products in passed.items():
        yield Message(sender, receiver, tuple(products))


def read_from_result(product: Product) -> Product:
    """The same elements, read from a tile of the result: replicas have an element at the same place."""
    return tuple(
        tuple([Block(dst, dst, tuple([Axis(each.extent, each.dst, each.dst) for each in axes])) for _, dst, axes in of])
        for of in product
    )


@lru_cache(maxsize=4096)
def relay_figures(
    operand: Layout, result: Layout, view: View | None = None, holding: Holding | None = None, *, gathers: bool = False
) -> RelayFigures:
    """The figures of both turns."""
    if gathers:
        return _count_gathered(operand, result, view)
    turns = relay_messages(operand, result, view, holding)
    tallies = [tally_messages(turn) for turn in turns]
    sent = sum((tally.sent for tally in tallies), Counter[int]())
    first, second = (
        RelayTurn(max(t.received.values(), default=0), max(t.sent.values(), default=0), t.rounds) for t in tallies
    )
    return RelayFigures((first, second), max(sent.values(), default=0), max(tally.largest for tally in tallies))


# Relays whose second turn is a gather.
#
#     f32[{x}4] on <x=3>, devices 1, 2 and 6 -> f32[{tp}6] on <rep=4, tp=2>
#
#     group      0: devices 0 2 4 6     1: devices 1 3 5 7     places 0 to 3 in both
#     device 1   gives 4 to group 0                            it is at place 0 of group 1, so device 0 gets them
#     device 2   gives 2 to group 0, 2 to group 1              it is at place 1 of group 0, and device 3 at that of 1
#
# A thousand arrays have a thousand sets of senders, so senders that give alike are counted together, and the groups to
# which a device gives are the bits of one number: for the figures no message is listed.


class ReplicaGroups:
    """The devices that need the same tile of a layout, group by group, in the order of their first devices.

    A device of the layout has the same place in all groups as in its own, any other one that of its number.

    >>> from reshard.types import Mesh
    >>> groups = find_replica_groups(Layout.parse("f32[{tp}6]", Mesh(rep=4, tp=2)))
    >>> groups.members, groups.find_place(2), groups.find_place(9)
    ([[0, 2, 4, 6], [1, 3, 5, 7]], 1, 1)
    """

    def __init__(self, mesh: Mesh, factors: TileFactors) -> None:
        held = list_holders(mesh, factors)
        self.members = [*held.values()]
        self.numbers = {tile: number for number, tile in enumerate(held)}
        self.homes = {device: number for number, group in enumerate(self.members) for device in group}
        self._places = {device: at for group in self.members for at, device in enumerate(group)}
        self.copies = max(map(len, self.members))

    def find_place(self, device: int) -> int:
        """The place of a device in all groups: to the device at it of another group it sends."""
        return self._places.get(device, device % self.copies)


def find_replica_groups(result: Layout) -> ReplicaGroups:
    """The groups of a layout; layouts of many shapes have the same."""
    return _KNOWN_GROUPS(result.mesh, tile_factors(result))


_KNOWN_GROUPS = lru_cache(maxsize=64)(ReplicaGroups)


class Given(NamedTuple):
    """Devices that give as many elements to each of some groups: the numbers of the groups, and the elements."""

    senders: Sequence[int]
    parts: tuple[tuple[int, int], ...]


@lru_cache(maxsize=2048)
def list_given(operand: Layout, result: Layout, view: View | None = None) -> tuple[Given, ...]:
    """What devices give to the groups of a layout of what each of them alone holds.

    >>> from reshard.types import Mesh
    >>> source = Layout.parse("f32[{x}4]", Mesh({"x": 3}, device_ids=[1, 2, 6]))
    >>> for senders, parts in list_given(source, Layout.parse("f32[{tp}6]", Mesh(rep=4, tp=2))):
    ...     print(senders, parts)
    [1] ((0, 4),)
    [2] ((0, 2), (1, 2))
    [6] ((1, 4),)
    """
    numbers = find_replica_groups(result).numbers
    if view is not None:
        whole, every = tiles(result), list[Given]()
        for tile, wanted in list_needed(operand, result, view, None).items():
            by_group = {numbers[whole[device]]: products for device, products in wanted}
            parts = ((group, sum(map(count_product, products))) for group, products in by_group.items())
            every.append(Given(holders_of(operand)[tile], tuple(parts)))
        return tuple(every)
    # Pieces of a dim that share as much with the same pieces of the result are alike.
    patterns: list[list[tuple[tuple[int, int], ...]]] = []
    columns: list[list[int]] = []
    for source, target, column in zip(operand.dims, result.dims, piece_columns(operand), strict=True):
        by_piece: dict[int, list[tuple[int, int]]] = {}
        for q, shared in enumerate(shared_elements(source, target)):
            for p, count in shared.items():
                if count:
                    by_piece.setdefault(p, []).append((q, count))
        kinds: dict[tuple[tuple[int, int], ...], int] = {}
        kind_of = {p: kinds.setdefault(tuple(pattern), len(kinds)) for p, pattern in by_piece.items()}
        empty = kinds.setdefault((), len(kinds))  # Padded dims may have pieces without elements.
        patterns.append([*kinds])
        columns.append([kind_of.get(p, empty) for p in column])
    alike: dict[tuple[int, ...], list[int]] = {}
    for device, kind in zip(operand.mesh.devices, zip(*columns, strict=True) if columns else ((),), strict=True):
        alike.setdefault(kind, []).append(device)
    given: list[Given] = []
    for kind, senders in alike.items():
        each = itertools.product(*(patterns[dim][at] for dim, at in enumerate(kind)))
        parts = tuple([(numbers[tuple([q for q, _ in e])], math.prod([count for _, count in e])) for e in each])
        given += [Given(senders, parts)] if parts else []
    return tuple(given)


def count_gathered_rounds(moves: Iterable[tuple[Layout, Layout, View | None]]) -> int:
    """The rounds in which devices give to groups, in moves to the same groups, all of them together."""
    gives, groups = dict[int, int](), None
    for operand, result, view in moves:
        check_deadline()
        groups = groups or find_replica_groups(result)
        for senders, parts in list_given(operand, result, view):
            bits = 0
            for group, _ in parts:
                bits |= 1 << group
            for sender in senders:
                gives[sender] = gives.get(sender, 0) | bits
    if groups is None:
        return 0
    # What devices at one place give goes to the one at that place of each group.
    by_place: list[list[int]] = [[] for _ in range(groups.copies)]
    for sender, bits in gives.items():
        home = groups.homes.get(sender)  # What it gives to its own group it has already.
        by_place[groups.find_place(sender)].append(bits if home is None else bits & ~(1 << home))
    sent = max((bits.bit_count() for each in by_place for bits in each), default=0)
    return max([sent, *map(count_overlap, by_place)])


def count_overlap(numbers: Iterable[int]) -> int:
    """The most of these numbers that have one bit in common.

    >>> count_overlap([0b1100, 0b0110, 0b0101])
    3
    """
    # How many numbers have each bit, in binary: the bits of one place are one number.
    counts: list[int] = []
    for carry in numbers:
        for at, count in enumerate(counts):
            counts[at], carry = count ^ carry, count & carry
        if carry:
            counts.append(carry)
    among, most = -1, 0
    for at in range(len(counts) - 1, -1, -1):
        if counts[at] & among:
            among, most = counts[at] & among, most | 1 << at
    return most


class GatheringFigures(NamedTuple):
    """The figures of a relay that gathers, in elements: what the busiest device receives in both turns, the rounds of
    the first, its largest message, and what the fullest group gathers, 0 if none does.
    """

    received: int
    rounds: int
    message: int
    gathered: int


@lru_cache(maxsize=4096)
def gathering_figures(operand: Layout, result: Layout, view: View | None = None) -> GatheringFigures:
    """The figures of a relay that gathers.

    >>> from reshard.types import Mesh
    >>> source = Layout.parse("f32[{x}4]", Mesh({"x": 3}, device_ids=[1, 2, 6]))
    >>> gathering_figures(source, Layout.parse("f32[{tp}6]", Mesh(rep=4, tp=2)))
    GatheringFigures(received=6, rounds=1, message=4, gathered=6)
    """
    groups, given = find_replica_groups(result), list_given(operand, result, view)
    totals, kept = [0] * len(groups.members), dict[int, list[int]]()
    message = 0
    for senders, parts in given:
        sizes = dict(parts)
        for group, elements in parts:
            totals[group] += elements * len(senders)
        away = max(sizes.values())
        for sender in senders:
            home = groups.homes.get(sender, -1)
            own = sizes.get(home, 0)
            if own:
                kept.setdefault(home, []).append(own)
            if message < away and (away > own or len(sizes) > 1):
                others = [count for group, count in parts if group != home]
                message = max(message, *others)
    gathered = max(totals) if groups.copies > 1 else 0
    # All of a group receive less than what it is given only where each of them has some of it.
    for group, own in kept.items():
        if len(own) == len(groups.members[group]):
            totals[group] -= min(own)
    return GatheringFigures(max(totals), count_gathered_rounds([(operand, result, view)]), message, gathered)


_MOST_COUNTED = 1 << 11
"""Parts that devices give to groups: of an array with more, the largest stands for what any device receives."""


def count_gathering_buffers(moves: Iterable[tuple[Layout, Layout, View | None]]) -> int:
    """The elements that messages have at most on a device in any launch of relays that gather in the same groups.

    In the first turn it is what the device sends, and what it receives, of each array; in the second what it passes on
    and what it gathers, together all that its group is given.
    """
    staged, totals, everywhere = defaultdict[int, int](int), defaultdict[int, int](int), 0
    for move in moves:
        groups, given = find_replica_groups(move[1]), list_given(*move)
        listed = sum(len(senders) * len(parts) for senders, parts in given) <= _MOST_COUNTED
        arriving = dict[int, int]()
        for senders, parts in given:
            for group, elements in parts if groups.copies > 1 else ():
                totals[group] += elements * len(senders)
            largest, most = max(parts, key=lambda part: part[1])
            others = max((elements for group, elements in parts if group != largest), default=0)
            for sender in senders:
                home = groups.homes.get(sender, -1)
                staged[sender] += others if home == largest else most
                place = groups.find_place(sender)
                for group, elements in parts if listed else ():
                    lands = groups.members[group][place]
                    if group != home and elements > arriving.get(lands, 0):
                        arriving[lands] = elements
        for device, elements in arriving.items():
            staged[device] += elements
        everywhere += 0 if listed else gathering_figures(*move).message
    return max(max(staged.values(), default=0) + everywhere, *totals.values(), 0)


def _list_gathered(operand: Layout, result: Layout, view: View | None) -> Relay:
    groups, whole = find_replica_groups(result), tiles(result)
    first: list[Message] = []
    passed: dict[int, list[Product]] = {}
    for tile, wanted in list_needed(operand, result, view, None).items():
        (sender,) = holders_of(operand)[tile]
        for group, products in {groups.numbers[whole[device]]: products for device, products in wanted}.items():
            lands = groups.members[group][groups.find_place(sender)]
            first.append(Message(sender, lands, products))
            passed.setdefault(lands, []).extend(map(read_from_result, products))
    second: list[Message] = []
    for members in groups.members:
        # In each round, devices pass their parts on to the next one of their group, then to the one after it.
        for turn in range(1, len(members)):
            for at, device in enumerate(members):
                if device in passed:
                    second.append(Message(device, members[(at + turn) % len(members)], tuple(passed[device])))
    return Relay(tuple(first), tuple(second))


def _count_gathered(operand: Layout, result: Layout, view: View | None) -> RelayFigures:
    """The figures of both turns, of which the second is one round: what a device sends in it counts as what it receives
    does, or as what it passes on, if that is more."""
    groups = find_replica_groups(result)
    sent, received, has = Counter[int](), Counter[int](), Counter[int]()
    totals = [0] * len(groups.members)
    for senders, parts in list_given(operand, result, view):
        sizes, whole = dict(parts), sum(elements for _, elements in parts)
        at_place = Counter(map(groups.find_place, senders))
        for sender in senders:
            own = sizes.get(groups.homes.get(sender, -1), 0)
            sent[sender] += whole - own
            received[sender] -= own
        for group, elements in parts:
            totals[group] += elements * len(senders)
            for place, count in at_place.items():
                has[groups.members[group][place]] += elements * count
    received.update(has)
    listed = Counter(map(groups.homes.__getitem__, has))

    def count_passed(device: int) -> int:
        whole = totals[groups.homes[device]] if groups.copies > 1 and device in groups.homes else 0
        return max(whole - has[device], has[device]) if whole else 0

    # A device that is given nothing gathers all that its group is given.
    most = [totals[group] for group, members in enumerate(groups.members) if listed[group] < len(members)]
    most = max([*map(count_passed, has), *most]) if groups.copies > 1 else 0
    figures = gathering_figures(operand, result, view)
    first = RelayTurn(max(received.values(), default=0), max(sent.values(), default=0), figures.rounds)
    busiest = max([most, *(count + count_passed(device) for device, count in sent.items())])
    return RelayFigures((first, RelayTurn(most, most, int(figures.gathered > 0))), busiest, figures.message)


# Who passes on how much in a relay, so that the busiest device sends as little as it can.
#
#     f32[{x}12] on <x=2>, devices 0 and 1 -> f32[24] on <d=6>, devices 0 to 5
#
#     elements   held by   lacked by         sent by the holder   passed on
#     0-11       0         1 2 3 4 5         12                   48, by those that lack them or by the holder
#     12-23      1         0 2 3 4 5         12                   48
#
#     even       each device passes on a fifth of 12: 0 and 1 send 12 + 9.6 elements, the others 9.6 + 9.6
#     balanced   0 and 1 pass on 2 elements, the others 5 of both tiles together: all six send 20
#
# Elements that the same devices hold and lack are one class. Their holders send each element at least once, and all
# other copies are sent by the holders or by those that have been sent the element. Each class in turn is poured into
# the devices that may send it, as water into vessels that the other classes have filled to different heights; after
# some sweeps over all classes, no choice of senders makes the highest level lower. Then the shares are made whole
# elements, in the same way.


_SWEEPS = 32
"""How often all classes are poured anew, at most."""

_ROUNDINGS = 4
"""How often the shares of all classes are rounded anew, at most."""


class Demand(NamedTuple):
    """How many elements a class has, the devices that hold them, and those that lack them."""

    size: int
    holders: Sequence[int]
    lacking: Sequence[int]

    @property
    def further(self) -> int:
        """The copies of each element that remain to be sent when one device has been sent it."""
        return len(self.lacking) - 1


def balance_shares(demands: Sequence[Demand], enough: int) -> list[tuple[int, ...]]:
    """For each class, how many elements each device that lacks them is sent first and passes on to all others.

    Holders send the rest to all. `enough` elements sent by every device are good enough to stop. Only the four
    operations of floating point are used, so all processes get the same numbers.

    >>> balance_shares([Demand(12, [0], [1, 2, 3, 4, 5]), Demand(12, [1], [0, 2, 3, 4, 5])], enough=20)
    [(2, 3, 3, 2, 2), (2, 2, 2, 3, 3)]
    """
    loads = dict.fromkeys(itertools.chain.from_iterable((*d.holders, *d.lacking) for d in demands), 0.0)
    poured = [[0.0] * (len(demand.holders) + len(demand.lacking)) for demand in demands]
    for _ in range(_SWEEPS):
        check_deadline()
        for at, demand in enumerate(demands):
            _add_loads(loads, demand, poured[at], -1)
            poured[at] = _pour_class(demand, loads)
            _add_loads(loads, demand, poured[at])
        if max(loads.values(), default=0.0) <= enough:
            break
    best, least = list[tuple[int, ...]](), math.inf
    for _ in range(_ROUNDINGS):
        check_deadline()
        counts: list[tuple[int, ...]] = []
        for at, demand in enumerate(demands):
            _add_loads(loads, demand, poured[at], -1)
            counts.append(_round_class(demand, _pour_class(demand, loads), loads))
            # What lacking devices pass on is whole now; the holders of the class send the rest.
            passed_on = [float(count * demand.further) for count in counts[-1]]
            rest = demand.size * len(demand.lacking) - sum(counts[-1]) * demand.further
            poured[at] = _pour_water([loads[device] for device in demand.holders], rest) + passed_on
            _add_loads(loads, demand, poured[at])
        most = max(loads.values(), default=0.0)
        if most < least:
            best, least = counts, most
        if least <= enough:
            break
    return best


def level_sums(bases: Sequence[int], amount: int) -> list[int]:
    """How much is added to each of these to make the largest sum as small as it can be, in whole numbers.

    >>> level_sums([0, 3, 9], 7), level_sums([5, 5], 3)
    ([5, 2, 0], [2, 1])
    """
    level = min(-(-(amount + below) // count) for count, below in enumerate(itertools.accumulate(sorted(bases)), 1))
    added = [max(0, level - base) for base in bases]
    over = sum(added) - amount
    for at in [at for at, more in enumerate(added) if more][::-1][:over]:
        added[at] -= 1
    return added


def _add_loads(loads: dict[int, float], demand: Demand, amounts: Sequence[float], sign: int = 1) -> None:
    """Adds what the holders of a class, and then those that lack it, send of it."""
    for device, amount in zip((*demand.holders, *demand.lacking), amounts, strict=True):
        loads[device] += sign * amount


def _water_level(bases: Sequence[float], amount: float) -> float:
    """How high an amount of water rises in vessels that are filled to these heights."""
    return min((amount + below) / count for count, below in enumerate(itertools.accumulate(sorted(bases)), 1))


def _pour_water(bases: Sequence[float], amount: float) -> list[float]:
    level = _water_level(bases, amount)
    return [max(0.0, level - base) for base in bases]


def _pour_class(demand: Demand, loads: dict[int, float]) -> list[float]:
    """What the holders of a class, and then those that lack it, best send of it beside what they send of others."""
    held = [loads[device] for device in demand.holders]
    lacking = [loads[device] for device in demand.lacking]
    together = _pour_water([*held, *lacking], demand.size * len(demand.lacking))
    if sum(together[: len(held)]) >= demand.size:
        return together
    return _pour_water(held, demand.size) + _pour_water(lacking, demand.size * demand.further)


def _round_class(demand: Demand, amounts: Sequence[float], loads: dict[int, float]) -> tuple[int, ...]:
    """The shares as whole elements: first rounded down, then one more for who would then send the least."""
    further = demand.further
    if not further:
        return (0,) * len(demand.lacking)
    holders = len(demand.holders)
    counts = [int(amount / further) for amount in amounts[holders:]]
    by_holders = max(0, int((sum(amounts[:holders]) - demand.size) / further))
    held = [loads[device] for device in demand.holders]
    after = [(loads[d] + (n + 1) * further, at) for at, (d, n) in enumerate(zip(demand.lacking, counts, strict=True))]
    heapq.heapify(after)
    for _ in range(demand.size - sum(counts) - by_holders):
        load, at = after[0]
        if _water_level(held, demand.size + (by_holders + 1) * further) < load:
            by_holders += 1
        else:
            counts[at] += 1
            heapq.heapreplace(after, (load + further, at))
    return tuple(counts)
