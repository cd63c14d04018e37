"""An exchange between two sets of devices: who sends what to whom, and its figures.

    f32[6] on <x=4>, four holders of one tile, -> f32[6] on <d=3>, three other devices

    requests   6       6       6        18 elements are wanted of 4 holders, at best 5 of the busiest
    whole      0: 6    1: 6    2: 6     taken, since each receiver has to receive 6 anyway

    f32[{x}6] on <x=2, y=4> -> f32[{e}4] on <d=3, e=3>, where nobody has to receive more than 4

    requests   4       2              4       2              4              2        18 of the tile x = 0, shares of 5
    shares     0: 4    0: 1, 1: 1     1: 4    2: 2           2: 3, 3: 1     3: 2

Each device asks for what it lacks of every source tile, and the holders of a tile share the elements that are asked of
them evenly: no other choice of senders loads the busiest device less. Where whole requests, dealt evenly, load nobody
more than somebody must be loaded anyway, they stay whole: fewer messages. Otherwise each holder gets one contiguous
share of the queue of requests. A device holds one tile, so two devices exchange at most one message.

Even layouts that nest have closed forms, if no device is in both sets or no tile has two holders.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple

from reshard.types.deadline import check_deadline
from reshard.types.layout import Digit, Dim, Layout
from reshard.types.mesh import Mesh, SubAxis
from reshard.types.pair.device_sets import disjoint
from reshard.types.pair.message import Message, Tile, cut, elements, requests, tile_of, tile_sizes, tiles
from reshard.types.pair.overlap import shares
from reshard.types.pair.refine import Refinement, refine
from reshard.types.pair.shared import shared_elements
from reshard.types.whole import MOST


class Crossing(NamedTuple):
    """The figures of an exchange between two sets of devices, in elements, for the busiest device.

    `message` is the largest message; `cut` says whether requests are divided among holders.
    """

    received: int
    sent: int
    rounds: int
    message: int
    cut: bool


class Share(NamedTuple):
    """What one holder sends of one request: elements number `low` to `high` of it."""

    holder: int
    request: int
    low: int
    high: int


@lru_cache(maxsize=1024)
def crossing(operand: Layout, result: Layout) -> Crossing:
    """The figures of the exchange.

    >>> source = Layout.parse("f32[{x}8]", Mesh(x=2))
    >>> crossing(source, Layout.parse("f32[16]", Mesh({"d": 3}, device_ids=[5, 6, 7])))
    Crossing(received=16, sent=24, rounds=3, message=8, cut=False)
    """
    refinement = _refinement(operand, result)
    if refinement is not None and refinement.exact:
        if disjoint(operand.mesh, result.mesh):
            return _even(operand, result, refinement)
        if operand.mesh.size == _pieces(operand):
            return _held_once(operand, result, refinement)
    return _counted(operand, result)


@lru_cache(maxsize=1024)
def fewest_received(source: Layout, target: Layout) -> int:
    """The elements that the busiest device of the target lacks.

    >>> fewest_received(Layout.parse("f32[{x}8]", Mesh(x=2)), Layout.parse("f32[16]", Mesh(x=3)))
    16
    """
    own = _kept(source, target)
    return max((count - own[device] for device, count in _wanted(target).items()), default=0)


@lru_cache(maxsize=1024)
def fewest_through(source: Layout, target: Layout) -> int:
    """Elements that the busiest device sends or receives in every move: what a tile's holders must send at least once.

    An element of a tile must leave its holders if some device lacks it. The holders share this at best evenly.

    >>> fewest_through(Layout.parse("f32[{x}12]", Mesh(x=1)), Layout.parse("f32[{d}4]", Mesh(d=3)))
    8
    """
    sent = (-(-elements // len(holders)) for holders, elements in leaving(source, target))
    return max(fewest_received(source, target), *sent)


def leaving(source: Layout, target: Layout) -> Iterator[tuple[Sequence[int], int]]:
    """For each tile of the source, its holders, and the elements of it that some device of the target lacks.

    >>> list(leaving(Layout.parse("f32[{x}2]", Mesh(x=2)), Layout.parse("f32[4]", Mesh(d=1))))
    [([0], 0), ([1], 2)]
    """
    holders = holders_of(source)
    kept: Counter[Tile] = Counter()
    for devices in holders_of(target).values():
        homes = {_home(source, device) for device in devices}
        tile = homes.pop()
        if tile is not None and not homes:  # All devices that need this target tile hold the same source tile.
            kept[tile] += _common(source, target, tile, tile_of(target, devices[0]))
    size_of = tile_sizes(source)
    for tile, devices in holders.items():
        yield devices, size_of(tile) - kept[tile]


def sent_by_device(operand: Layout, result: Layout) -> Mapping[int, int]:
    """The elements that each device sends.

    >>> source, target = Layout.parse("f32[{x}8]", Mesh(x=2)), Layout.parse("f32[16]", Mesh(x=3))
    >>> sorted(sent_by_device(source, target).items())
    [(0, 16), (1, 16)]
    """
    refinement = _refinement(operand, result)
    if refinement is not None and refinement.exact and operand.mesh.size == _pieces(operand):
        demand, own = _requests_a_tile(result, refinement), _kept(operand, result)
        return {device: (demand - (own[device] > 0)) * refinement.common for device in operand.mesh.devices}
    return _listed(operand, result).sent


def received_by_device(operand: Layout, result: Layout) -> Mapping[int, int]:
    """The elements that each device receives: what it lacks.

    >>> source, target = Layout.parse("f32[{x}8]", Mesh(x=2)), Layout.parse("f32[16]", Mesh(x=3))
    >>> received_by_device(source, target)
    {0: 8, 1: 8, 2: 16}
    """
    own = _kept(operand, result)
    return {device: count - own[device] for device, count in _wanted(result).items()}


def messages(operand: Layout, result: Layout) -> Iterator[Message]:
    """Every message of the exchange, local copies included."""
    holders = holders_of(operand)
    limit = pull_limit(operand, result)
    for tile, demand in requests(operand, result, result.mesh.devices, _no_summand, shares).items():
        check_deadline()
        own = set(holders[tile])
        yield from (Message(device, device, (runs,)) for device, runs in demand if device in own)
        queue = [(device, runs) for device, runs in demand if device not in own]
        for share in dealt([elements(runs) for _, runs in queue], len(holders[tile]), limit):
            device, runs = queue[share.request]
            yield Message(holders[tile][share.holder], device, cut(runs, share.low, share.high))


def dealt(sizes: Sequence[int], holders: int, limit: int) -> Sequence[Share]:
    """Requests of these sizes, dealt evenly among the holders of a tile: whole if none then sends more than `limit`.

    >>> [tuple(share) for share in dealt([6, 6, 6], 4, limit=5)]
    [(0, 0, 0, 5), (1, 0, 5, 6), (1, 1, 0, 4), (2, 1, 4, 6), (2, 2, 0, 3), (3, 2, 3, 6)]
    >>> [tuple(share) for share in dealt([6, 6, 6], 4, limit=6)]
    [(0, 0, 0, 6), (1, 1, 0, 6), (2, 2, 0, 6)]
    """
    whole = dealt_whole(sizes, holders)
    loads = [0] * holders
    for share in whole:
        loads[share.holder] += share.high
    if max(loads) <= limit:
        return whole
    return dealt_by(sizes, [-(-sum(sizes) // holders)] * holders)


def dealt_whole(sizes: Sequence[int], holders: int) -> list[Share]:
    """Requests of these sizes, dealt evenly among holders by their number.

    >>> [tuple(share) for share in dealt_whole([6, 5, 6], 2)]
    [(0, 0, 0, 6), (0, 1, 0, 5), (1, 2, 0, 6)]
    """
    return [Share(at * holders // len(sizes), at, 0, size) for at, size in enumerate(sizes)]


def dealt_by(sizes: Sequence[int], quotas: Sequence[int]) -> list[Share]:
    """The queue of requests cut into one contiguous share a holder, of the elements of its quota or, in the end, fewer.

    >>> [tuple(share) for share in dealt_by([6, 6], [4, 0, 8])]
    [(0, 0, 0, 4), (2, 0, 4, 6), (2, 1, 0, 6)]
    """
    shares: list[Share] = []
    holder, room = 0, quotas[0]
    for at, size in enumerate(sizes):
        low = 0
        while low < size:
            while not room:
                holder += 1
                room = quotas[holder]
            high = min(size, low + room)
            shares.append(Share(holder, at, low, high))
            low, room = high, room - (high - low)
    return shares


# ---- figures ---------------------------------------------------------------------------------------


def _refinement(operand: Layout, result: Layout) -> Refinement | None:
    """The common refinement of the numerals, on a mesh of all pairs of devices; holders of the two never coincide."""
    size = operand.mesh.size * result.mesh.size
    if size > MOST:
        return None
    axes = {f"{name}{at}": n for name, mesh in _ends(operand, result) for at, n in enumerate(mesh.axes.values())}
    pairs = Mesh(axes)
    return refine(_renamed(operand, pairs, "s"), _renamed(result, pairs, "t"))


def _ends(operand: Layout, result: Layout) -> tuple[tuple[str, Mesh], tuple[str, Mesh]]:
    return ("s", operand.mesh), ("t", result.mesh)


def _renamed(layout: Layout, mesh: Mesh, name: str) -> Layout:
    names = {axis: f"{name}{at}" for at, axis in enumerate(layout.mesh.axes)}

    def renamed(digit: Digit) -> Digit:
        axis = digit.axis
        return digit if axis is None else Digit(digit.radix, SubAxis(names[axis.axis], axis.pre, axis.size))

    return Layout(mesh, tuple(Dim(tuple(map(renamed, dim.digits)), dim.size) for dim in layout.dims), layout.dtype)


def _even(operand: Layout, result: Layout, r: Refinement) -> Crossing:
    """Every tile has as many holders and as many requests, all of one size."""
    demand = _requests_a_tile(result, r)
    holders = operand.mesh.size // _pieces(operand)
    received = r.pieces * r.common
    limit = max(received, -(-demand * r.common // holders))
    sends, parts, sent, message, divided = Counter[int](), Counter[int](), Counter[int](), 0, False
    for share in dealt([r.common] * demand, holders, limit):
        sends[share.holder] += 1
        sent[share.holder] += share.high - share.low
        parts[share.request] += 1
        message = max(message, share.high - share.low)
        divided = divided or share.high - share.low < r.common
    rounds = max(max(sends.values(), default=0), r.pieces * max(parts.values(), default=0)) if r.common else 0
    return Crossing(received, max(sent.values(), default=0), rounds, message, divided)


def _held_once(operand: Layout, result: Layout, r: Refinement) -> Crossing:
    """Each tile has one holder, who sends all that is wanted but what it needs itself."""
    demand, own = _requests_a_tile(result, r), _kept(operand, result)
    receives = max(r.pieces - (own[device] > 0) for device in result.mesh.devices)
    sends = max(demand - (own[device] > 0) for device in operand.mesh.devices)
    rounds = max(receives, sends) if r.common else 0
    return Crossing(receives * r.common, sends * r.common, rounds, r.common if rounds else 0, False)


def _requests_a_tile(result: Layout, r: Refinement) -> int:
    """How many devices ask for a part of each source tile, where all tiles are alike."""
    return math.prod(digit.radix for digit in r.sliced) * (result.mesh.size // _pieces(result))


def _counted(operand: Layout, result: Layout) -> Crossing:
    """The figures, message by message."""
    listed = _listed(operand, result)
    rounds = max([*listed.sends.values(), *listed.receives.values()], default=0)
    received, sent = max(listed.received.values(), default=0), max(listed.sent.values(), default=0)
    return Crossing(received, sent, rounds, listed.message, listed.cut)


class _Listed(NamedTuple):
    """By device, the messages and the elements that it sends and receives; the largest message; whether any is cut."""

    sends: Counter[int]
    receives: Counter[int]
    sent: Counter[int]
    received: Counter[int]
    message: int
    cut: bool


@lru_cache(maxsize=64)
def _listed(operand: Layout, result: Layout) -> _Listed:
    sends, receives, sent, received = Counter[int](), Counter[int](), Counter[int](), Counter[int]()
    largest, divided = 0, False
    holders = holders_of(operand)
    limit = pull_limit(operand, result)
    for tile, queue in _queues(operand, result, holders):
        check_deadline()
        for share in dealt([size for _, size in queue], len(holders[tile]), limit):
            holder, (receiver, demand), size = holders[tile][share.holder], queue[share.request], share.high - share.low
            sends[holder] += 1
            sent[holder] += size
            receives[receiver] += 1
            received[receiver] += size
            largest, divided = max(largest, size), divided or size < demand
    return _Listed(sends, receives, sent, received, largest, divided)


def _queues(
    operand: Layout, result: Layout, holders: Mapping[Tile, list[int]]
) -> Iterator[tuple[Tile, list[tuple[int, int]]]]:
    """For each source tile, the devices that lack part of it, with how many elements each lacks."""
    for tile, demand in requests(operand, result, result.mesh.devices, _no_summand, shared_elements).items():
        own = set(holders[tile])
        yield tile, [(device, math.prod(sizes)) for device, sizes in demand if device not in own]


@lru_cache(maxsize=256)
def pull_limit(operand: Layout, result: Layout) -> int:
    """Elements that the busiest device sends or receives at least if every device asks holders for all that it lacks.

    >>> pull_limit(Layout.parse("f32[{x}8]", Mesh(x=2)), Layout.parse("f32[16]", Mesh({"d": 3}, device_ids=[5, 6, 7])))
    24
    """
    demand: Counter[Tile] = Counter()
    replicas = result.mesh.size // _pieces(result)
    holders = holders_of(operand)
    own = _kept(operand, result)
    size_of = tile_sizes(operand)
    for tile, devices in holders.items():
        demand[tile] = replicas * size_of(tile) - sum(own[device] for device in devices)
    sent = (-(-count // len(holders[tile])) for tile, count in demand.items())
    return max(fewest_received(operand, result), *sent)


def _kept(source: Layout, target: Layout) -> Counter[int]:
    """The elements of its target tile that each device holds already; only devices that hold some are listed."""
    kept: Counter[int] = Counter()
    if not disjoint(source.mesh, target.mesh):
        mine = tiles(source)
        for device, wanted in tiles(target).items():
            if device in mine:
                kept[device] = _common(source, target, mine[device], wanted)
    return kept


def _common(source: Layout, target: Layout, held: Tile, wanted: Tile) -> int:
    """The elements that a source tile and a target tile have in common."""
    dims = zip(source.dims, target.dims, held, wanted, strict=True)
    return math.prod(shared_elements(s, t)[q].get(p, 0) for s, t, p, q in dims)


@lru_cache(maxsize=64)
def _wanted(target: Layout) -> Mapping[int, int]:
    """The elements of each device's tile, without padding."""
    size_of = tile_sizes(target)
    return {device: size_of(tile) for device, tile in tiles(target).items()}


@lru_cache(maxsize=64)
def holders_of(layout: Layout) -> Mapping[Tile, list[int]]:
    """The devices that hold each tile."""
    holders: dict[Tile, list[int]] = {}
    for device, tile in tiles(layout).items():
        holders.setdefault(tile, []).append(device)
    return holders


def _home(layout: Layout, device: int) -> Tile | None:
    return tile_of(layout, device) if device in _members(layout.mesh) else None


@lru_cache(maxsize=64)
def _members(mesh: Mesh) -> frozenset[int]:
    return frozenset(mesh.devices)


def _pieces(layout: Layout) -> int:
    """How many different tiles the layout has."""
    return math.prod(axis.size for axis in layout.held)


def _no_summand(_: int) -> Tile:
    return ()
