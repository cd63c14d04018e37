"""Straight from source to target on another set of devices: what each device fetches, and from whom.

    f32[6] on <x=2>, devices 0 and 1   ->   f32[6] on <d=3>, devices 2, 3 and 4

    device   fetches
    2        0:6 from 0
    3        0:3 from 0, 3:6 from 1
    4        0:6 from 1

A device keeps what it holds. It asks for the rest, and the holders of a source tile share what is asked of them as
`pair.crossing` deals it: holders on the asking device's node, if there are any, else all of them. Any device can work
out its own part, without that of the others.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from functools import lru_cache

from reshard.lower.to_mpi.blocks import Block, of_runs
from reshard.lower.to_mpi.direct import Fetch
from reshard.types.deadline import check_deadline
from reshard.types.layout import Dim, Layout
from reshard.types.pair.crossing import Share, dealt, pull_limit
from reshard.types.pair.holders import holders
from reshard.types.pair.message import Message, Runs, Tile, cut, elements, tile_of
from reshard.types.pair.overlap import shares_from, shares_of

Nodes = Sequence[int]
"""The node of every device."""

Demand = list[tuple[int, Runs]]
"""Devices that need part of a source tile, each with what it needs."""


def fetched_across(source: Layout, target: Layout, device: int, nodes: Nodes) -> list[Fetch]:
    """What a device copies from source tiles to fill its target tile, from itself first; `Fetch.rank` is a device.

    >>> from reshard.types.mesh import Mesh
    >>> one, other = Mesh(x=2), Mesh({"d": 3}, device_ids=[2, 3, 4])
    >>> source, target = Layout.parse("f32[6]", one), Layout.parse("f32[6]", other)
    >>> [(fetch.rank, fetch.blocks[0].extents) for fetch in fetched_across(source, target, 3, [0] * 5)]
    [(0, (3,)), (1, (3,))]
    """
    if device not in target.mesh.devices:
        return []
    blocks: dict[int, list[Block]] = {}
    for giver, products in _taken(source, target, device, nodes):
        blocks.setdefault(giver, []).extend(_blocks(products))
    return _in_turn(blocks, device)


def served_across(source: Layout, target: Layout, device: int, nodes: Nodes) -> list[Fetch]:
    """What devices copy from one device's source tile, itself first: the fetches of all, as far as they name it.

    >>> from reshard.types.mesh import Mesh
    >>> one, other = Mesh(x=2), Mesh({"d": 3}, device_ids=[2, 3, 4])
    >>> source, target = Layout.parse("f32[6]", one), Layout.parse("f32[6]", other)
    >>> [(fetch.rank, fetch.blocks[0].extents) for fetch in served_across(source, target, 0, [0] * 5)]
    [(2, (6,)), (3, (3,))]
    """
    if device not in source.mesh.devices:
        return []
    blocks = {taker: list(_blocks(products)) for taker, products in _given(source, target, device, nodes)}
    return _in_turn(blocks, device)


def messages_across(source: Layout, target: Layout, device: int) -> Iterator[Message]:
    """What a device copies, sends and receives, each element from any holder: `pair.crossing.messages` as far as they
    name it.

    >>> from reshard.types.mesh import Mesh
    >>> one, other = Mesh(x=2), Mesh({"d": 3}, device_ids=[1, 2, 3])
    >>> source, target = Layout.parse("f32[{x}3]", one), Layout.parse("f32[{d}2]", other)
    >>> [(each.sender, each.receiver, each.elements) for each in messages_across(source, target, 1)]
    [(0, 1, 2), (1, 2, 1), (1, 3, 2)]
    """
    if device in target.mesh.devices:
        for giver, products in _taken(source, target, device, None):
            yield Message(giver, device, products)
    if device in source.mesh.devices:
        for taker, products in _given(source, target, device, None):
            if taker != device:
                yield Message(device, taker, products)


def _taken(source: Layout, target: Layout, device: int, nodes: Nodes | None) -> Iterator[tuple[int, tuple[Runs, ...]]]:
    """What a device takes from each giver. Only where a giver is one of several, the requests of others matter."""
    dims = zip(source.dims, target.dims, tile_of(target, device), strict=True)
    for parts in itertools.product(*(shares_of(s, t, q).items() for s, t, q in dims)):
        check_deadline()
        tile, runs = tuple(p for p, _ in parts), tuple(each for _, each in parts)
        held_by = _devices(source, tile)
        close = (device,) if device in held_by else _close(held_by, device, nodes)
        if len(close) == 1:
            yield close[0], (runs,)
            continue
        sizes = tuple(_sizes(s, t, p) for s, t, p in zip(source.dims, target.dims, tile, strict=True))
        asking = _asking(target, held_by, close, nodes)
        for share in _dealt(target, sizes, *asking, len(close), pull_limit(source, target))[device]:
            yield close[share.holder], cut(runs, share.low, share.high)


def _close(held_by: tuple[int, ...], device: int, nodes: Nodes | None) -> tuple[int, ...]:
    """The holders of a tile that share the requests of a device: those of its node, if there are any."""
    if nodes is None:
        return held_by
    return tuple([holder for holder in held_by if nodes[holder] == nodes[device]]) or held_by


Some = frozenset[int]
"""Some devices."""


def _asking(target: Layout, held_by: tuple[int, ...], close: tuple[int, ...], nodes: Nodes | None) -> tuple[Some, Some]:
    """Who asks some holders of a tile: the devices of the first set, of all if it is empty, but those of the second."""
    own = frozenset(held_by)
    if nodes is None or len(of_nodes := {nodes[holder] for holder in held_by}) == 1:
        return frozenset(), own & _members(target, None, None)
    if close != held_by:
        return _members(target, tuple(nodes), nodes[close[0]]) - own, frozenset()
    return frozenset(), Some().union(*(_members(target, tuple(nodes), node) for node in of_nodes))


@lru_cache(maxsize=1024)
def _members(target: Layout, nodes: tuple[int, ...] | None, node: int | None) -> Some:
    """The devices of a layout on a node, or all of them."""
    devices = target.mesh.devices
    return frozenset(devices if nodes is None else [device for device in devices if nodes[device] == node])


@lru_cache(maxsize=4096)
def _sizes(source: Dim, target: Dim, piece: int) -> tuple[tuple[int, int], ...]:
    """The elements that a piece of a source dim shares with each piece of the target."""
    shared = shares_from(source, target, piece).items()
    return tuple((q, sum(run.elements for run in runs)) for q, runs in shared)


@lru_cache(maxsize=8)
def _dealt(
    target: Layout, sizes: tuple[tuple[tuple[int, int], ...], ...], only: Some, without: Some, holders: int, limit: int
) -> dict[int, list[Share]]:
    """What each device gets of a source tile from which holder, given what target tiles need of it, dim by dim.

    Tiles that are asked for alike share this, however many they are.
    """
    queue: list[tuple[int, int]] = []
    for parts in itertools.product(*sizes):
        size = math.prod(size for _, size in parts)
        queue += [(device, size) for device in _devices(target, tuple(q for q, _ in parts)) if size]
    queue = [each for each in queue if each[0] not in without and (not only or each[0] in only)]
    queue.sort(key=lambda each: target.mesh.position(each[0]))
    shares: dict[int, list[Share]] = {device: [] for device, _ in queue}
    for share in dealt([size for _, size in queue], holders, limit):
        shares[queue[share.request][0]].append(share)
    return shares


def _in_turn(blocks: dict[int, list[Block]], device: int) -> list[Fetch]:
    """Each device starts with itself and goes on with the next one, so that not all read from the same one first."""
    return [Fetch(peer, tuple(blocks[peer])) for peer in sorted(blocks, key=lambda peer: (peer < device, peer))]


def _blocks(products: Sequence[Runs]) -> Iterator[Block]:
    for runs in products:
        yield from of_runs(runs)


def _given(source: Layout, target: Layout, device: int, nodes: Nodes | None) -> Iterator[tuple[int, tuple[Runs, ...]]]:
    """What a device gives of its tile to each taker, itself included."""
    tile = tile_of(source, device)
    held_by = _devices(source, tile)
    asking: dict[tuple[int, ...], Demand] = {}
    for taker, runs in _demand(source, target, tile):
        if taker == device:
            yield device, (runs,)
        if taker not in held_by:
            asking.setdefault(_close(held_by, taker, nodes), []).append((taker, runs))
    for close, queue in asking.items():
        sizes = [elements(runs) for _, runs in queue]
        limit = pull_limit(source, target) if len(close) > 1 else sum(sizes)
        for share in dealt(sizes, len(close), limit):
            taker, runs = queue[share.request]
            if close[share.holder] == device:
                yield taker, cut(runs, share.low, share.high)


def _demand(source: Layout, target: Layout, tile: Tile) -> Demand:
    """The devices that need part of a source tile, in the order of their mesh."""
    wanted = [shares_from(s, t, p) for s, t, p in zip(source.dims, target.dims, tile, strict=True)]
    demand: Demand = []
    for parts in itertools.product(*(by.items() for by in wanted)):
        runs = tuple(part for _, part in parts)
        if math.prod(len(part) for part in runs):
            demand += [(device, runs) for device in _devices(target, tuple(number for number, _ in parts))]
    return sorted(demand, key=lambda each: target.mesh.position(each[0]))


def _devices(layout: Layout, tile: Tile) -> tuple[int, ...]:
    """The devices that hold a tile, in the order of their mesh."""
    devices = layout.mesh.devices
    return tuple([devices[at] for at in holders(layout).of(tile)])


CACHES = (_members, _sizes, _dealt)
"""What is cached here."""
