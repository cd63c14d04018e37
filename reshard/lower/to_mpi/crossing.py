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
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache

from reshard.lower.to_mpi.blocks import Block, of_runs
from reshard.lower.to_mpi.direct import Fetch
from reshard.types.deadline import check_deadline
from reshard.types.layout import Dim, Layout
from reshard.types.mesh import Mesh
from reshard.types.pair.crossing import pull_limit
from reshard.types.pair.dealing import Queue, dealt
from reshard.types.pair.holders import holders
from reshard.types.pair.message import Message, Runs, Tile, cut, elements, tile_of
from reshard.types.pair.overlap import shares_from, shares_of
from reshard.types.pair.tile_queues import Kinds, Sizes, TileQueues

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
    """What a device takes from each giver. The requests of others matter only if there are several givers."""
    dims = zip(source.dims, target.dims, tile_of(target, device), strict=True)
    queues = _Queues(source, target, nodes)
    for parts in itertools.product(*(shares_of(s, t, q).items() for s, t, q in dims)):
        check_deadline()
        tile, runs = tuple(p for p, _ in parts), tuple(each for _, each in parts)
        held_by = _devices(source, tile)
        close = (device,) if device in held_by else _close(held_by, device, nodes)
        if len(close) == 1:
            yield close[0], (runs,)
            continue
        queue = queues.of(tile, held_by, close)
        for share in queue.shares(target.mesh.position(device), len(close), pull_limit(source, target)):
            yield close[share.holder], cut(runs, share.low, share.high)


def _close(held_by: tuple[int, ...], device: int, nodes: Nodes | None) -> tuple[int, ...]:
    """The holders of a tile that share the requests of a device: those of its node, if there are any."""
    if nodes is None:
        return held_by
    return tuple([holder for holder in held_by if nodes[holder] == nodes[device]]) or held_by


class _Queues:
    """The requests for tiles of which several holders give shares: all of these, or those of one node."""

    def __init__(self, source: Layout, target: Layout, nodes: Nodes | None) -> None:
        dims = [*zip(source.dims, target.dims, strict=True)]
        self._queues = TileQueues(target, lambda dim, piece: _sizes(*dims[dim], piece))
        self._mesh, self._nodes = target.mesh, nodes
        self._of_nodes = lru_cache(maxsize=64)(self._queue_of_nodes)

    def of(self, tile: Tile, held_by: tuple[int, ...], close: tuple[int, ...]) -> Queue:
        """The requests for a tile to `close` of its holders, without those of holders."""
        nodes, kinds = self._nodes, self._queues.kinds(tile)
        near = frozenset(() if nodes is None else (nodes[holder] for holder in held_by))
        if nodes is None or len(near) == 1:
            queue = self._queues.listed(kinds)
        elif close != held_by:
            queue = self._of_nodes(kinds, frozenset([nodes[close[0]]]), inside=True)
        else:
            return self._of_nodes(kinds, near, inside=False)  # On the nodes of holders, devices ask these.
        members = _members(self._mesh)
        return queue.without([self._mesh.position(holder) for holder in held_by if holder in members])

    def _queue_of_nodes(self, kinds: Kinds, near: frozenset[int], *, inside: bool) -> Queue:
        """The requests of the devices on some nodes, or of all others."""
        queue, by_node = self._queues.listed(kinds), _by_node(self._mesh, tuple(self._nodes or ()))
        positions = [at for node in near for at in by_node.get(node, ())]
        return queue.only(positions) if inside else queue.without(positions)


@lru_cache(maxsize=64)
def _members(mesh: Mesh) -> frozenset[int]:
    return frozenset(mesh.devices)


@lru_cache(maxsize=64)
def _by_node(mesh: Mesh, nodes: tuple[int, ...]) -> Mapping[int, Sequence[int]]:
    """The positions of a mesh on each node."""
    listed: dict[int, list[int]] = {}
    for at, device in enumerate(mesh.devices):
        listed.setdefault(nodes[device], []).append(at)
    return listed


@lru_cache(maxsize=4096)
def _sizes(source: Dim, target: Dim, piece: int) -> Sizes:
    """The elements that a piece of a source dim shares with each piece of the target."""
    shared = shares_from(source, target, piece).items()
    return tuple((q, sum(run.elements for run in runs)) for q, runs in shared)


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


CACHES = (_members, _by_node, _sizes)
"""What is cached here."""
