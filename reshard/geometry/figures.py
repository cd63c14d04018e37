"""The figures of an exchange, between any two layouts, sets of devices, and through any view.

    mesh <x=4, y=2>, f32[{x}3/10] -> f32[{y}5]        the busiest device receives 5 elements in 3 messages

Where there is a closed form it is taken, and no message is listed:

    even layouts on the same devices     equal messages (`refine`)
    uneven ones                          from the pieces of each group of dims (`exchange_stats`)
    two sets of devices                  from queues of requests (`dealing`), or in two rounds of messages (`relay`)
    through a view                       likewise, from what groups of dims that share atoms have in common
    beside what receivers hold, or of
    sums through a view                  from the messages, which are listed
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple

from reshard.geometry import exchange_stats
from reshard.geometry.blocks import Factor, measure_pieces
from reshard.geometry.dealing import Queue, tile_queues
from reshard.geometry.exchange_stats import count_overlaps, dim_shares, largest_sent
from reshard.geometry.holders import (
    ByDevice,
    Tile,
    count_copies,
    count_kept,
    count_lacked,
    fullest_tile,
    holders,
    holders_of,
    home_tile,
    multiply_by_piece,
    piece_columns,
    pull_limit,
    tile_elements,
    tile_of,
    tiles,
)
from reshard.geometry.messages import (
    Message,
    Shape,
    count_sent,
    exchange_messages,
    spans_apart,
    tally_messages,
    typical_messages,
)
from reshard.geometry.overlap import list_owners, piece_extents, shares
from reshard.geometry.refine import Refinement, refine
from reshard.geometry.relay import gathering_figures, relay_figures, relay_messages
from reshard.geometry.remesh import disjoint, one_set
from reshard.geometry.view_layouts import count_shared, pick_numbers, settle_windows, view_dims
from reshard.types.index_set import Holding
from reshard.types.layout import Digit, Dim, Layout
from reshard.types.mesh import Mesh, SubAxis
from reshard.types.view import View
from reshard.types.whole import MOST, check_deadline

Load = tuple[tuple[int, Shape], ...]
"""The messages that one device sends, or receives: how many of each shape."""


class ExchangeFigures(NamedTuple):
    """The rounds of an exchange, the elements of its largest message, and those of its shortest run in memory.

    `loads` lists the messages of each device by their shapes, once for each time that all devices wait for each other;
    only cutting messages into chunks needs it.
    """

    rounds: int
    message: int
    run: int
    loads: Callable[[], Sequence[Collection[Load]]]

    def cut(self, cap: int) -> tuple[int, int]:
        """The rounds with messages cut to at most `cap` elements, and the elements of the largest chunk.

        >>> both = [Layout.parse(text, Mesh(x=4)) for text in ("f32[{x}4, 16]", "f32[16, {x}4]")]
        >>> exchange_figures(*both).cut(100), exchange_figures(*both).cut(5)
        ((3, 16), (12, 4))
        """
        if cap >= self.message:
            return self.rounds, self.message
        rounds, largest = 0, 0
        for each in self.loads():
            most = 0
            for load in each:
                here = 0
                for number, shape in load:
                    for extents, times in shape:
                        pieces, elements = measure_pieces(extents, cap)
                        here += number * times * pieces
                        largest = max(largest, elements)
                most = max(most, here)
            rounds += most
        return rounds, largest


def exchange_figures(
    operand: Layout,
    result: Layout,
    view: View | None = None,
    *,
    relayed: bool = False,
    holding: Holding | None = None,
    gathers: bool = False,
) -> ExchangeFigures:
    """The figures of the exchange; `relayed`, of one in which receivers pass elements on, or gather them; beside a
    `holding`, without what receivers hold.

    >>> mesh = Mesh(x=4)
    >>> exchange_figures(Layout.parse("f32[{x}3/10]", mesh), Layout.parse("f32[10]", mesh))[:3]
    (3, 3, 1)
    """
    if relayed:
        # Both turns follow each other, and what is passed on lies in pieces of a tile.
        move = operand, result, view, holding
        if gathers:  # It is not cut into chunks.
            gathering = gathering_figures(operand, result, view)
            return ExchangeFigures(gathering.rounds + (gathering.gathered > 0), gathering.message, 1, lambda: ())
        figures, turns = relay_figures(*move), relay_messages(*move)
        rounds = sum(turn.rounds for turn in figures.turns)
        return ExchangeFigures(rounds, figures.message, 1, lambda: [*map(loads_of, turns)])
    if view is not None or holding is not None:
        return _list_figures(operand, result, view, holding)[0]
    if not one_set(operand.mesh, result.mesh):
        across = crossing_figures(operand, result)
        run = 1 if across.cut else exchange_stats.shortest_run(operand, result)
        return ExchangeFigures(across.rounds, across.message, run, lambda: [list_loads(operand, result)])
    r = refine(operand, result)
    if r is None or not r.exact:
        rounds, message = exchange_stats.count_rounds(operand, result), exchange_stats.largest_message(operand, result)
        run = exchange_stats.shortest_run(operand, result)
        return ExchangeFigures(rounds, message, run, lambda: [list_loads(operand, result)])
    run = 1  # The minor digits that are local on both sides are neighbours in both tiles.
    for digit in reversed(r.digits):
        if digit.src is None and digit.dst is None:
            run *= digit.radix
        elif digit.src is None or digit.dst is None:
            break
    extents = tuple(digit.radix for digit in r.digits if digit.src is None and digit.dst is None)
    rounds = even_rounds(r)
    return ExchangeFigures(rounds, r.common, run, lambda: ((((rounds, ((extents, 1),)),),),))


def _list_figures(
    operand: Layout, result: Layout, view: View | None, holding: Holding | None
) -> tuple[ExchangeFigures, ByDevice, ByDevice]:
    """The figures through a view or beside a holding, once for all views whose windows do not matter."""
    if view is not None and holding is None:
        view = settle_windows(operand, result, view)
    return _figures_listed(operand, result, view, holding)


@lru_cache(maxsize=256)
def _figures_listed(
    operand: Layout, result: Layout, view: View | None, holding: Holding | None
) -> tuple[ExchangeFigures, ByDevice, ByDevice]:
    """The figures through a view or beside a holding, and what each device receives and sends."""

    def list_sent() -> list[Message]:
        return [m for m in exchange_messages(operand, result, view, holding) if m.sender != m.receiver]

    if view is not None and holding is None and not operand.partial:  # Each summand has tiles of its own.
        # From what pieces share.
        shared = _share_out(operand, result, view)
        rounds = max(*itertools.chain(*shared.sends.values()), *_count_receives(operand, result, shared, view))
        run = shared.message if not shared.extra and _sends_runs(operand, result, view) else 1
        received, sent = count_lacked(operand, result, view), ByDevice(0, shared.sent)
        return ExchangeFigures(rounds, shared.message, run, lambda: [loads_of(list_sent())]), received, sent
    sent = list_sent()
    tally = tally_messages(sent)
    run = tally.largest if all(m.is_run for m in sent) else 1
    received = ByDevice(0, {device: tally.received[device] for device in result.mesh.devices})
    given = ByDevice(0, {device: tally.sent[device] for device in operand.mesh.devices})
    return ExchangeFigures(tally.rounds, tally.largest, run, lambda: [loads_of(sent)]), received, given


def _sends_runs(operand: Layout, result: Layout, view: View) -> bool:
    """Whether each message through a view lies in one run of both tiles."""
    shared = view_dims(operand, result, view)
    # What pieces share is of few kinds, and every combination of them occurs.
    kinds: list[dict[Factor, None]] = []
    for each in shared:
        pieces = itertools.product(*(range(len(piece_extents(result.dims[at]))) for at in each.target))
        factors = (factor for taken in pieces for factor in each.wanted(taken).values())
        kinds.append(dict.fromkeys(tuple([block._replace(src=0, dst=0) for block in factor]) for factor in factors))
    if all(Message(0, 1, (product,)).is_run for product in itertools.product(*kinds)):
        return True
    # Devices may have the elements that no run sends. Most often the first of these is sent.
    for tile, devices in holders_of(result).items():
        for owner, product in list_owners(shared, tile):
            if not Message(0, 1, (product,)).is_run and not set(devices).issubset(holders_of(operand)[owner]):
                return False
    return True


def even_rounds(r: Refinement) -> int:
    """Rounds between even layouts, one for each source tile that a device fetches from.

    If no digit moves from one holder to another, one of these tiles is the device's own.
    """
    if not r.common:
        return 0
    return r.pieces if r.swapped else r.pieces - 1


# What each device sends and receives.
#
#     mesh <x=2, y=2>, f32[{x}{y}2] -> f32[{y}{x}2]
#
#     device    x=0 y=0    x=0 y=1    x=1 y=0    x=1 y=1
#     holds     0-1        2-3        4-5        6-7
#     needs     0-1        4-5        2-3        6-7
#     lacks     nothing    2          2          nothing
#
# One array's worst device is known in closed form (`rules.bounds`). The devices that are worst for one array may be the
# best for another, so the bound of several arrays needs the figures of all devices.


MOST_DEVICES = 1 << 14
"""Devices are listed on meshes of at most this many."""

MOST_LISTED = 1 << 10
"""The messages of an uneven exchange are listed on meshes of at most this many devices."""


def most_sent(
    operand: Layout,
    result: Layout,
    view: View | None = None,
    *,
    relayed: bool = False,
    holding: Holding | None = None,
    gathers: bool = False,
) -> int:
    """Elements that the busiest device sends."""
    if relayed:
        return relay_figures(operand, result, view, holding, gathers=gathers).sent
    if view is not None or holding is not None:
        return sent_by_device(operand, result, view, holding).most
    if not one_set(operand.mesh, result.mesh):
        return crossing_figures(operand, result).sent
    r = refine(operand, result)
    return r.common * even_rounds(r) if r is not None and r.exact else _most_sent_among(operand, result)


@lru_cache(maxsize=256)
def _most_sent_among(operand: Layout, result: Layout) -> int:
    if _has_single_holders(operand, result):
        return max(_count_sent_among(operand, result).values())
    return max(count_sent(operand, result, every=False).values(), default=0)


def _count_sent_among(operand: Layout, result: Layout) -> Mapping[int, int]:
    """The elements that each device sends in an uneven exchange among the same devices."""
    if _has_single_holders(operand, result):
        return _count_given(operand, result, _count_near(operand, result, result))
    sent = count_sent(operand, result, every=True)
    return {device: sent[device] for device in operand.mesh.devices}


def _count_given(operand: Layout, result: Layout, copies: int) -> dict[int, int]:
    """What the only holder of each tile sends: all of it as often as there are copies, but what it needs itself."""
    own = count_kept(operand, result)
    each = zip(operand.mesh.devices, tile_elements(operand), strict=True)
    return {device: copies * size - own.get(device, 0) for device, size in each}


def received_by_device(
    operand: Layout, result: Layout, view: View | None = None, holding: Holding | None = None
) -> ByDevice:
    """The elements that each device receives: those of its target tile that it does not hold.

    >>> both = [Layout.parse(text, Mesh(x=2)) for text in ("f32[{x}3/5]", "f32[5]")]
    >>> received_by_device(*both).listed
    {0: 2, 1: 3}
    """
    if view is not None or holding is not None:
        return _list_figures(operand, result, view, holding)[1]
    if not one_set(operand.mesh, result.mesh):
        return count_lacked(operand, result)
    return lacked_by_device(operand, result)


def sent_by_device(
    operand: Layout, result: Layout, view: View | None = None, holding: Holding | None = None
) -> ByDevice:
    """The elements that each device sends.

    In an even exchange every round is a bijection of the devices, so each sends what it receives; so it is taken for
    uneven ones on more devices than are listed.

    >>> both = [Layout.parse(text, Mesh(x=2)) for text in ("f32[{x}3/5]", "f32[5]")]
    >>> sent_by_device(*both).listed
    {0: 3, 1: 2}
    """
    if view is not None or holding is not None:
        return _list_figures(operand, result, view, holding)[2]
    if not one_set(operand.mesh, result.mesh):
        return ByDevice(0, count_sent_across(operand, result))
    r = refine(operand, result)
    if (r is not None and r.exact) or operand.mesh.size > MOST_LISTED:
        return lacked_by_device(operand, result)
    return ByDevice(0, _count_sent_among(operand, result))


@lru_cache(maxsize=4096)
def lacked_by_device(source: Layout, target: Layout) -> ByDevice:
    """The elements of its target tile that each device of the target does not hold in its source tile.

    On meshes too large to list, the device that lacks the most stands for all of them. Neither layout is to be reduced.

    >>> mesh = Mesh(x=2, y=2)
    >>> lacked_by_device(Layout.parse("f32[{x}{y}2]", mesh), Layout.parse("f32[{y}{x}2]", mesh)).listed
    {0: 0, 1: 2, 2: 2, 3: 0}
    >>> lacked_by_device(Layout.parse("f32[{x}4]", mesh), Layout.parse("f32[8]", mesh))
    ByDevice(each=4, listed=None)
    """
    r = refine(source, target)
    if r is None or not r.exact:
        if target.mesh.size > MOST_DEVICES:
            return ByDevice(fullest_tile(target))
        return count_lacked(source, target)
    tile = math.prod(target.tile_shape)
    if not r.swapped:
        return ByDevice(tile - r.common)
    if target.mesh.size > MOST_DEVICES:
        return ByDevice(tile)
    kept = (0 if needs_other_digit(r, at) else r.common for at in range(target.mesh.size))
    return ByDevice(0, {device: tile - held for device, held in zip(target.mesh.devices, kept, strict=True)})


def needs_other_digit(r: Refinement, position: int) -> bool:
    """Whether the device at a position needs another value of some digit that changes holders than it has."""
    return any(position // (d.src or 1) % d.radix != position // (d.dst or 1) % d.radix for d in r.swapped)


# Between two sets of devices.
#
#     f32[6] on <x=4>, four holders of one tile, -> f32[6] on <d=3>, three other devices
#
#     requests   6       6       6        18 elements are wanted of 4 holders, at best 5 of the busiest
#     whole      0: 6    1: 6    2: 6     taken, since each receiver has to receive 6 anyway
#
#     f32[{x}6] on <x=2, y=4> -> f32[{e}4] on <d=3, e=3>, where nobody has to receive more than 4
#
#     requests   4       2              4       2              4              2        18 of the tile x = 0, shares of 5
#     shares     0: 4    0: 1, 1: 1     1: 4    2: 2           2: 3, 3: 1     3: 2
#
# Each device asks for what it lacks of every source tile, and the holders of a tile share what is asked of them evenly.
# A device holds one tile, so two devices exchange at most one message. Even layouts that nest have closed forms, if no
# device is in both sets; others do if no tile has two holders.


class Crossing(NamedTuple):
    """The figures of an exchange between two sets of devices: the elements that the busiest device sends, the rounds,
    the largest message, and whether requests are divided among holders.
    """

    sent: int
    rounds: int
    message: int
    cut: bool


@lru_cache(maxsize=1024)
def crossing_figures(operand: Layout, result: Layout) -> Crossing:
    """The figures of the exchange.

    >>> source = Layout.parse("f32[{x}8]", Mesh(x=2))
    >>> crossing_figures(source, Layout.parse("f32[16]", Mesh({"d": 3}, device_ids=[5, 6, 7])))
    Crossing(sent=24, rounds=3, message=8, cut=False)
    """
    if 0 in operand.shape:
        return Crossing(0, 0, 0, False)
    givers, copies, apart = count_copies(operand), count_copies(result), disjoint(operand.mesh, result.mesh)
    r = _refine_pairs(operand, result) if apart else None
    if r is not None and r.exact:
        # Every tile has as many holders and as many requests, all of one size.
        demand, received = math.prod(digit.radix for digit in r.sliced) * copies, r.pieces * r.common
        queue = Queue(range(demand), range(0, (demand + 1) * r.common, r.common))
        shared = queue.figures(givers, max(received, -(-demand * r.common // givers)))
        rounds = max(*shared.sends, r.pieces * (1 + max(shared.extra.values(), default=0)))
        return Crossing(max(shared.sent), rounds, shared.message, bool(shared.extra))
    dims = [count_overlaps(s, t) for s, t in zip(operand.dims, result.dims, strict=True)]
    own = count_kept(operand, result)
    if givers == 1:
        # Each tile has one holder, who sends all that is wanted but what it needs itself.
        largest = math.prod(dim.largest for dim in dims)
        if apart:
            sends = copies * math.prod(max(dim.of_source) for dim in dims)
            rounds = max(sends, math.prod(max(dim.of_target) for dim in dims))
            return Crossing(copies * fullest_tile(operand), rounds, largest, False)
        sends = [copies * count for count in multiply_by_piece(operand, [dim.of_source for dim in dims])]
        receives = multiply_by_piece(result, [dim.of_target for dim in dims])
        for counts, mesh in (sends, operand.mesh), (receives, result.mesh):
            for device in own:
                counts[mesh.position(device)] -= 1
        message = largest if copies > 1 else _largest_across(operand, result)
        sent = max(_count_given(operand, result, copies).values())
        return Crossing(sent, max(*sends, *receives), message, False)
    shared = _share_out(operand, result)
    rounds = max(*itertools.chain(*shared.sends.values()), *_count_receives(operand, result, shared))
    return Crossing(max(shared.sent.values()), rounds, shared.message, bool(shared.extra))


def count_sent_across(operand: Layout, result: Layout) -> Mapping[int, int]:
    """The elements that each device sends to another set of devices."""
    if count_copies(operand) > 1:
        return _share_out(operand, result).sent
    return _count_given(operand, result, count_copies(result))


def _refine_pairs(operand: Layout, result: Layout) -> Refinement | None:
    """The common refinement of the numerals, on a mesh of all pairs of devices; holders of the two never coincide."""
    if operand.mesh.size * result.mesh.size > MOST or operand.ragged or result.ragged:
        return None
    sides = ("s", operand), ("t", result)
    sizes = {f"{name}{at}": n for name, each in sides for at, n in enumerate(each.mesh.axes.values())}
    pairs = Mesh(sizes)
    both: list[Layout] = []
    for name, layout in sides:
        names = {axis: f"{name}{at}" for at, axis in enumerate(layout.mesh.axes)}
        dims: list[Dim] = []
        for dim in layout.dims:
            axes = [None if d.axis is None else SubAxis(names[d.axis.axis], *d.axis[1:]) for d in dim.digits]
            digits = [Digit(digit.radix, axis) for digit, axis in zip(dim.digits, axes, strict=True)]
            dims.append(Dim(tuple(digits), dim.size))
        both.append(Layout(pairs, tuple(dims), layout.dtype))
    return refine(*both)


def _largest_across(operand: Layout, result: Layout) -> int:
    """The most elements that a target tile, wanted by one device, shares with a source tile that this does not hold."""
    dims = [dim_shares(s, t) for s, t in zip(operand.dims, result.dims, strict=True)]
    here, most = frozenset(operand.mesh.devices), 0
    for device, tile in tiles(result).items():
        wanted = tuple(dim[q] for dim, q in zip(dims, tile, strict=True))
        largest = math.prod(dim.largest for dim in wanted)
        if largest > most:
            most = max(most, largest_sent(tile_of(operand, device), wanted) if device in here else largest)
    return most


class _SharedOut(NamedTuple):
    """The elements that each device sends, how many messages the holders of each tile send, the largest message, and by
    position, the messages that devices receive because their requests are cut.
    """

    sent: Mapping[int, int]
    sends: Mapping[Tile, Collection[int]]
    message: int
    extra: Counter[int]


@lru_cache(maxsize=64)
def _share_out(operand: Layout, result: Layout, view: View | None = None) -> _SharedOut:
    """What the holders of all tiles send, queue by queue."""
    queues, groups = tile_queues(operand, result, view), () if view is None else count_shared(operand, result, view)
    limit = pull_limit(operand, result, view)
    own, place = count_kept(operand, result, view), result.mesh.position
    sent, extra, sends, message = dict[int, int](), Counter[int](), dict[Tile, Collection[int]](), 0
    for tile, devices in holders_of(operand).items():
        check_deadline()
        pieces = tile if view is None else [pick_numbers(tile, each.source) for each in groups]
        queue = queues.of(pieces).without(place(device) for device in devices if device in own)
        figures = queue.figures(len(devices), limit)
        sent.update(zip(devices, figures.sent, strict=True))
        extra.update(figures.extra)
        sends[tile], message = frozenset(figures.sends), max(message, figures.message)
    return _SharedOut(sent, sends, message, extra)


def _count_receives(operand: Layout, result: Layout, shared: _SharedOut, view: View | None = None) -> list[int]:
    """The messages that the device at each position receives: one of each tile that it needs, and those of cuts."""
    own = count_kept(operand, result, view)
    if view is None:
        dims = zip(operand.dims, result.dims, strict=True)
        receives = multiply_by_piece(result, [count_overlaps(s, t).of_target for s, t in dims])
    else:
        groups = count_shared(operand, result, view)
        receives = [math.prod([each.total(tile)[1] for each in groups]) for tile in tiles(result).values()]
    for at, device in enumerate(result.mesh.devices):
        receives[at] += shared.extra[at] - (device in own)
    return receives


# The messages of devices by their shapes: what cutting them into chunks needs.
#
#     mesh <x=4>, f32[{x}3/10] -> f32[10]     devices 0 to 2 receive boxes of 3, 3 and 1, device 3 three boxes of 3
#
# Where each tile has one holder, the messages that a target tile takes are the product of those of its pieces, dim by
# dim, and so are those that a source tile gives. Pieces are of few kinds, so the loads of thousands of devices are
# found without a list of their messages. Where holders share requests, all messages are listed.


Lengths = tuple[tuple[tuple[int, ...], int], ...]
"""The blocks that two pieces share: how many there are of each extents."""

Parts = tuple[tuple[Lengths, int], ...]
"""What one piece shares with all pieces of the other side: how many share such runs."""

Own = tuple[Lengths, ...]
"""What the two tiles of a device share, dim by dim."""


@lru_cache(maxsize=256)
def list_loads(operand: Layout, result: Layout) -> frozenset[Load]:
    """The distinct loads of devices, from one device for every coordinate that the exchange involves.

    >>> mesh = Mesh(x=2)
    >>> sorted(list_loads(Layout.parse("f32[{x}3/5]", mesh), Layout.parse("f32[5]", mesh)))
    [((1, (((2,), 1),)),), ((1, (((3,), 1),)),)]
    """
    if _has_single_holders(operand, result):
        return frozenset(_loads_of_whole(operand, result))
    if not one_set(operand.mesh, result.mesh):
        # Where the requests for each tile are alike and stay whole, how many a holder sends is all that differs.
        dims = (_common_lengths(*pair) for pair in zip(operand.dims, result.dims, strict=True))
        alike = all(len({p for p, _ in of}) == len({(p, each) for (p, _), each in of.items()}) for of in dims)
        shared = _share_out(operand, result)
        if alike and not shared.extra:
            return frozenset(_loads_of_whole(operand, result, shared.sends))
    return loads_of(typical_messages(operand, result))


def loads_of(listed: Iterable[Message]) -> frozenset[Load]:
    """The distinct loads of devices in some messages, local copies left out."""
    sent: dict[int, Counter[Shape]] = {}
    received: dict[int, Counter[Shape]] = {}
    for message in listed:
        if message.sender != message.receiver:
            shape = message.shape
            sent.setdefault(message.sender, Counter())[shape] += 1
            received.setdefault(message.receiver, Counter())[shape] += 1
    return frozenset(map(_sort_load, (*sent.values(), *received.values())))


def _sort_load(shapes: Mapping[Shape, int]) -> Load:
    return tuple(sorted((number, shape) for shape, number in shapes.items() if number))


def _has_single_holders(operand: Layout, result: Layout) -> bool:
    """Whether each tile has one holder, among the devices that exchange with each other."""
    return not operand.partial and _count_near(operand, result, operand) == 1


def _count_near(operand: Layout, result: Layout, layout: Layout) -> int:
    """How many devices have the same tile of one of the layouts, among those that exchange with each other."""
    apart = [(low, high // low) for low, high in spans_apart(operand, result)]
    positions = holders(layout).of(home_tile(layout, 0))
    return sum(all(at // low % size == 0 for low, size in apart) for at in positions)


def _loads_of_whole(
    operand: Layout, result: Layout, sends: Mapping[Tile, Collection[int]] | None = None
) -> Iterator[Load]:
    """The loads where requests stay whole, of tiles with one holder each, or with several that send so many messages
    of one shape."""
    taken: list[Sequence[Parts]] = []
    given: list[Sequence[Parts]] = []
    common: list[Mapping[tuple[int, int], Lengths]] = []
    for source, target in zip(operand.dims, result.dims, strict=True):
        common.append(_common_lengths(source, target))
        gives: list[Counter[Lengths]] = [Counter() for _ in range(math.prod(d.radix for d in source.digits if d.axis))]
        takes: list[Counter[Lengths]] = [Counter() for _ in range(math.prod(d.radix for d in target.digits if d.axis))]
        for (p, q), lengths in common[-1].items():
            gives[p][lengths] += 1
            takes[q][lengths] += 1
        given.append([tuple(sorted(each.items())) for each in gives])
        taken.append([tuple(sorted(each.items())) for each in takes])
    # What the two tiles of a device share stays on it; only devices that have some are listed.
    held, owns = tiles(operand), dict[int, Own]()
    for device, wanted in tiles(result).items():
        if device in held:
            pairs = zip(common, held[device], wanted, strict=True)
            own = [lengths for of, p, q in pairs if (lengths := of.get((p, q))) is not None]
            if len(own) == len(common):
                owns[device] = tuple(own)
    sides = [(result, taken, 1)]
    if sends is None:
        sides.append((operand, given, _count_near(operand, result, result)))
    for tile, numbers in (sends or {}).items():
        each = [parts[piece] for parts, piece in zip(given, tile, strict=True)]
        if all(each):
            shape = _multiply_lengths([lengths for ((lengths, _),) in each])
            yield from (_sort_load({shape: number}) for number in numbers if number)
    for layout, parts_of, times in sides:
        # Tiles are of few kinds: distinct parts, with what the device has of them.
        columns = [[of[piece] for piece in column] for of, column in zip(parts_of, piece_columns(layout), strict=True)]
        devices = layout.mesh.devices
        rows = zip(*columns, strict=True) if columns else itertools.repeat((), len(devices))
        kinds: set[tuple[tuple[Parts, ...], Own | None]] = set()
        kinds.update((row, owns.get(device)) for row, device in zip(rows, devices, strict=True))
        for parts, own in kinds:
            check_deadline()
            shapes: Counter[Shape] = Counter()
            for each in itertools.product(*parts):
                number = times * math.prod([count for _, count in each])
                shapes[_multiply_lengths([lengths for lengths, _ in each])] += number
            if own is not None:
                shapes[_multiply_lengths(own)] -= 1
            if load := _sort_load(shapes):
                yield load


def _common_lengths(source: Dim, target: Dim) -> Mapping[tuple[int, int], Lengths]:
    """What each piece of the source shares with each of the target."""
    return {
        (p, q): tuple(sorted(Counter([block.extents for block in runs]).items()))
        for q, by in enumerate(shares(source, target))
        for p, runs in by.items()
    }


def _multiply_lengths(lengths: Sequence[Lengths]) -> Shape:
    """The boxes of a message: the product of the runs of all dims."""
    shapes: Counter[tuple[int, ...]] = Counter()
    for each in itertools.product(*lengths):
        shapes[tuple([extent for extents, _ in each for extent in extents])] += math.prod([times for _, times in each])
    return tuple(sorted(shapes.items()))
