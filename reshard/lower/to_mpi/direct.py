"""Straight from source to target: what each rank fetches, and from whom.

    source f32[{x}2, 4] -> target f32[4, {x}2] on x=2     rank 1 fetches rows 0:2 of its columns from rank 0,
                                                          and copies rows 2:4 from its own tile

A rank keeps what it already holds. Every other piece of its target tile comes from one of the ranks that hold it: a
rank of its own node if possible, and if several qualify, its own number selects one, which spreads the load. Any
rank can compute what others fetch from it, so senders know what to send without a message, and none computes more
than its own part of the move.

Ranks are seats here: the numbers of the devices by ascending id (`ranks_of_seats`).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple

from reshard.geometry.blocks import scale_blocks
from reshard.geometry.dealing import Kinds, Queue, Sizes, TileQueues, assign_requests
from reshard.geometry.holders import Tile, holders, home_tile, pull_limit, tile_of
from reshard.geometry.messages import Message, Product, count_elements, cut_product
from reshard.geometry.overlap import shares_from, shares_of
from reshard.geometry.remesh import one_set
from reshard.lower.to_mpi.blocks import Block, blocks_of_dim, blocks_of_runs, multiply_dims
from reshard.types.layout import Dim, Layout
from reshard.types.mesh import Mesh
from reshard.types.whole import check_deadline

Near = Callable[[int, int], bool]
"""Whether two ranks are on one node."""


class Fetch(NamedTuple):
    """The blocks that come from the source tile of another rank, or that go to its target tile."""

    rank: int
    blocks: tuple[Block, ...]


def list_fetches(source: Layout, target: Layout, rank: int, near: Near, number: int | None = None) -> list[Fetch]:
    """What a rank copies from the ranks' source tiles to fill its target tile, its own source tile first.

    The rank fills tile `number` of the target's mesh, by default its own number. The meshes may differ in size, as
    when an array is loaded by more or fewer ranks than saved it. Nothing is summed: both layouts are partial along
    the same axes, or neither is partial.

    >>> from reshard.types.mesh import Mesh
    >>> mesh = Mesh(x=2)
    >>> rows, columns = Layout.parse("f32[{x}2, 4]", mesh), Layout.parse("f32[4, {x}2]", mesh)
    >>> [(fetch.rank, fetch.blocks[0].extents) for fetch in list_fetches(rows, columns, 1, lambda one, other: True)]
    [(1, (2, 2)), (0, (2, 2))]
    """
    wanted = home_tile(target, target.mesh.position(devices_by_id(target.mesh)[rank if number is None else number]))
    mesh = source.mesh
    summand = mesh.coordinates(mesh.position(devices_by_id(mesh)[rank]), source.partial) if source.partial else ()
    dims = [
        [(p, blocks_of_dim(at, runs)) for p, runs in shares_of(s, t, q).items()]
        for at, (s, t, q) in enumerate(zip(source.dims, target.dims, wanted, strict=False))
    ]
    givers, seat = holders(source), _seats_of_positions(mesh)
    blocks: dict[int, list[Block]] = {}
    for owners in itertools.product(*dims):
        check_deadline()
        candidates = seat(givers.of((*[p for p, _ in owners], *summand)))
        giver = candidates[0] if len(candidates) == 1 else _nearest_holder(candidates, rank, near)
        blocks.setdefault(giver, []).extend(multiply_dims([part for _, part in owners]))
    # Each rank starts with itself and goes on with the next rank, so that ranks do not all read from rank 0 first.
    return [Fetch(peer, tuple(blocks[peer])) for peer in sorted(blocks, key=lambda peer: (peer < rank, peer))]


def list_served(source: Layout, target: Layout, rank: int, near: Near) -> list[Fetch]:
    """What the ranks fetch from one of them, itself first: the `list_fetches` of all, as far as they name this rank.

    Both layouts are on meshes of the same size.

    >>> from reshard.types.mesh import Mesh
    >>> mesh = Mesh(x=2)
    >>> rows, columns = Layout.parse("f32[{x}2, 4]", mesh), Layout.parse("f32[4, {x}2]", mesh)
    >>> [(fetch.rank, fetch.blocks[0].src) for fetch in list_served(rows, columns, 1, lambda one, other: True)]
    [(1, (0, 2)), (0, (0, 0))]
    """
    devices, seat = devices_by_id(source.mesh), _seats_of_positions(source.mesh)
    mine = home_tile(source, source.mesh.position(devices[rank]))
    summand = mine[len(source.dims) :]
    candidates = seat(holders(source).of(mine))
    dims = [
        [(q, blocks_of_dim(at, runs)) for q, runs in shares_from(s, t, p).items()]
        for at, (s, t, p) in enumerate(zip(source.dims, target.dims, mine, strict=False))
    ]
    takers, seat_there = holders(target, any_summand=True), _seats_of_positions(target.mesh)
    blocks: dict[int, tuple[Block, ...]] = {}
    for wishes in itertools.product(*dims):
        check_deadline()
        receivers = seat_there(takers.of([q for q, _ in wishes]))
        if summand:
            # A summand goes to the devices that have the same one: nothing is added up on the way.
            mesh, partial = source.mesh, source.partial
            receivers = [to for to in receivers if mesh.coordinates(mesh.position(devices[to]), partial) == summand]
        if len(candidates) > 1:
            receivers = [to for to in receivers if _nearest_holder(candidates, to, near) == rank]
        if receivers:
            blocks.update(dict.fromkeys(receivers, tuple(multiply_dims([part for _, part in wishes]))))
    return [Fetch(peer, blocks[peer]) for peer in sorted(blocks, key=lambda peer: (peer < rank, peer))]


def _seats_of_positions(mesh: Mesh) -> Callable[[tuple[int, ...]], Sequence[int]]:
    """A function from positions to the seats of their devices, ascending."""
    if mesh.device_ids is None:
        return lambda positions: positions
    seats = seats_by_position(mesh)
    return lambda positions: sorted([seats[at] for at in positions])


def _nearest_holder(candidates: Sequence[int], rank: int, near: Near) -> int:
    if rank in candidates:
        return rank
    close = tuple(peer for peer in candidates if near(peer, rank)) or candidates
    return close[rank % len(close)]


def is_unreplicated(layout: Layout) -> bool:
    """Whether each tile is on one rank only.

    >>> from reshard.types.mesh import Mesh
    >>> [is_unreplicated(Layout.parse(text, Mesh(x=2))) for text in ("f32[{x}2]", "f32[4]")]
    [True, False]
    """
    return holders(layout).copies == 1


# Straight from source to target on another set of devices: what each device fetches, and from whom.
#
#     f32[6] on <x=2>, devices 0 and 1   ->   f32[6] on <d=3>, devices 2, 3 and 4
#
#     device   fetches
#     2        0:6 from 0
#     3        0:3 from 0, 3:6 from 1
#     4        0:6 from 1
#
# A device keeps what it holds. It asks for the rest, and the holders of a source tile share what is asked of them as
# `pair.crossing` deals it: holders on the asking device's node, if there are any, else all of them. Any device can work
# out its own part, without that of the others.


Nodes = Sequence[int]
"""The node of every device."""

Demand = list[tuple[int, Product]]
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
    for giver, products in _list_taken(source, target, device, nodes):
        blocks.setdefault(giver, []).extend(_blocks_taken(products))
    return _order_fetches(blocks, device)


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
    blocks = {taker: list(_blocks_taken(products)) for taker, products in _list_given(source, target, device, nodes)}
    return _order_fetches(blocks, device)


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
        for giver, products in _list_taken(source, target, device, None):
            yield Message(giver, device, _flatten_products(source, target, products))
    if device in source.mesh.devices:
        for taker, products in _list_given(source, target, device, None):
            if taker != device:
                yield Message(device, taker, _flatten_products(source, target, products))


def _flatten_products(source: Layout, target: Layout, products: Sequence[Product]) -> tuple[Product, ...]:
    """Products of local indices of each dim as products of flat tiles."""
    steps = [
        (math.prod(source.tile_shape[at + 1 :]), math.prod(target.tile_shape[at + 1 :]))
        for at in range(len(source.tile_shape))
    ]
    return tuple(
        tuple(scale_blocks(factor, *step) for factor, step in zip(each, steps, strict=True)) for each in products
    )


def _list_taken(
    source: Layout, target: Layout, device: int, nodes: Nodes | None
) -> Iterator[tuple[int, tuple[Product, ...]]]:
    """What a device takes from each giver. The requests of others matter only if there are several givers."""
    dims = zip(source.dims, target.dims, tile_of(target, device), strict=True)
    queues = _Queues(source, target, nodes)
    for shares in itertools.product(*(shares_of(s, t, q).items() for s, t, q in dims)):
        check_deadline()
        tile, runs = tuple(p for p, _ in shares), tuple(each for _, each in shares)
        held_by = _holders_of_tile(source, tile)
        close = (device,) if device in held_by else _close_holders(held_by, device, nodes)
        if len(close) == 1:
            yield close[0], (runs,)
            continue
        queue = queues.of(tile, held_by, close)
        for share in queue.shares(target.mesh.position(device), len(close), pull_limit(source, target)):
            yield close[share.holder], cut_product(runs, share.low, share.high)


def _close_holders(held_by: tuple[int, ...], device: int, nodes: Nodes | None) -> tuple[int, ...]:
    """The holders of a tile that share the requests of a device: those of its node, if there are any."""
    if nodes is None:
        return held_by
    return tuple([holder for holder in held_by if nodes[holder] == nodes[device]]) or held_by


class _Queues:
    """The requests for tiles of which several holders give shares: all of these, or those of one node."""

    def __init__(self, source: Layout, target: Layout, nodes: Nodes | None) -> None:
        dims = [*zip(source.dims, target.dims, strict=True)]
        self._queues = TileQueues(target, lambda dim, piece: _sizes_of_shares(*dims[dim], piece))
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
        members = _devices_of_mesh(self._mesh)
        return queue.without([self._mesh.position(holder) for holder in held_by if holder in members])

    def _queue_of_nodes(self, kinds: Kinds, near: frozenset[int], *, inside: bool) -> Queue:
        """The requests of the devices on some nodes, or of all others."""
        queue, by_node = self._queues.listed(kinds), _positions_by_node(self._mesh, tuple(self._nodes or ()))
        positions = [at for node in near for at in by_node.get(node, ())]
        return queue.only(positions) if inside else queue.without(positions)


@lru_cache(maxsize=64)
def _devices_of_mesh(mesh: Mesh) -> frozenset[int]:
    return frozenset(mesh.devices)


@lru_cache(maxsize=64)
def _positions_by_node(mesh: Mesh, nodes: tuple[int, ...]) -> Mapping[int, Sequence[int]]:
    """The positions of a mesh on each node."""
    listed: dict[int, list[int]] = {}
    for at, device in enumerate(mesh.devices):
        listed.setdefault(nodes[device], []).append(at)
    return listed


@lru_cache(maxsize=4096)
def _sizes_of_shares(source: Dim, target: Dim, piece: int) -> Sizes:
    """The elements that a piece of a source dim shares with each piece of the target."""
    shared = shares_from(source, target, piece).items()
    return tuple((q, sum(run.elements for run in runs)) for q, runs in shared)


def _order_fetches(blocks: dict[int, list[Block]], device: int) -> list[Fetch]:
    """Each device starts with itself and goes on with the next one, so that not all read from the same one first."""
    return [Fetch(peer, tuple(blocks[peer])) for peer in sorted(blocks, key=lambda peer: (peer < device, peer))]


def _blocks_taken(products: Sequence[Product]) -> Iterator[Block]:
    for runs in products:
        yield from blocks_of_runs(runs)


def _list_given(
    source: Layout, target: Layout, device: int, nodes: Nodes | None
) -> Iterator[tuple[int, tuple[Product, ...]]]:
    """What a device gives of its tile to each taker, itself included."""
    tile = tile_of(source, device)
    held_by = _holders_of_tile(source, tile)
    asking: dict[tuple[int, ...], Demand] = {}
    for taker, runs in _list_demand(source, target, tile):
        if taker == device:
            yield device, (runs,)
        if taker not in held_by:
            asking.setdefault(_close_holders(held_by, taker, nodes), []).append((taker, runs))
    for close, queue in asking.items():
        sizes = [count_elements(runs) for _, runs in queue]
        limit = pull_limit(source, target) if len(close) > 1 else sum(sizes)
        for share in assign_requests(sizes, len(close), limit):
            taker, runs = queue[share.request]
            if close[share.holder] == device:
                yield taker, cut_product(runs, share.low, share.high)


def _list_demand(source: Layout, target: Layout, tile: Tile) -> Demand:
    """The devices that need part of a source tile, in the order of their mesh."""
    wanted = [shares_from(s, t, p) for s, t, p in zip(source.dims, target.dims, tile, strict=True)]
    demand: Demand = []
    for shares in itertools.product(*(by.items() for by in wanted)):
        runs = tuple(part for _, part in shares)
        if math.prod(len(part) for part in runs):
            demand += [(device, runs) for device in _holders_of_tile(target, tuple(number for number, _ in shares))]
    return sorted(demand, key=lambda each: target.mesh.position(each[0]))


def _holders_of_tile(layout: Layout, tile: Tile) -> tuple[int, ...]:
    """The devices that hold a tile, in the order of their mesh."""
    devices = layout.mesh.devices
    return tuple([devices[at] for at in holders(layout).of(tile)])


CACHES = (_devices_of_mesh, _positions_by_node, _sizes_of_shares)
"""What is cached here."""


# Which rank has which device's tile.
#
#     communicator of 4    mesh                    devices of ranks 0, 1, 2, 3
#                          <x=4>                   0    1    2    3
#                          <x=4>, ids 5 9 7 2      2    5    7    9       every rank has a tile: by ascending id
#                          <x=2>                   0    1    -    -       ids are ranks, others have no tile
#                          <x=2>, ids 3 1          -    1    -    3
#
# A seat is a tile's number by ascending device id: what the functions here that take a number count.


@lru_cache(maxsize=256)
def devices_by_id(mesh: Mesh) -> tuple[int, ...]:
    """The device of each seat: seat s is the s-th smallest device id. On a mesh without `device_ids`, device s.

    >>> devices_by_id(Mesh({"x": 3}, device_ids=[7, 2, 5]))
    (2, 5, 7)
    """
    return mesh.devices if mesh.device_ids is None else tuple(sorted(mesh.devices))


@lru_cache(maxsize=64)
def seats_by_position(mesh: Mesh) -> tuple[int, ...]:
    """The seat of the device at each position.

    >>> seats_by_position(Mesh({"x": 3}, device_ids=[7, 2, 5]))
    (2, 0, 1)
    """
    seats = _seats_of_devices(mesh)
    return tuple(seats[device] for device in mesh.devices)


@lru_cache(maxsize=256)
def ranks_of_seats(mesh: Mesh, size: int) -> tuple[int, ...]:
    """The rank of each seat in a communicator of `size`.

    >>> ranks_of_seats(Mesh({"x": 2}, device_ids=[7, 2]), 2), ranks_of_seats(Mesh({"x": 2}, device_ids=[7, 2]), 8)
    ((0, 1), (2, 7))
    """
    return tuple(range(size)) if mesh.size == size else devices_by_id(mesh)


def seat_of(mesh: Mesh, rank: int, size: int) -> int | None:
    """The seat of a rank of a communicator of `size`; None if the rank has no tile.

    >>> mesh = Mesh({"x": 2}, device_ids=[7, 2])
    >>> seat_of(mesh, 7, 8), seat_of(mesh, 3, 8), seat_of(mesh, 1, 2)
    (1, None, 1)
    """
    return rank if mesh.size == size else _seats_of_devices(mesh).get(rank)


def device_of(meshes: tuple[Mesh, ...], rank: int, size: int) -> int:
    """The device of a rank of a communicator of `size` in the first of these meshes that has one; else its number.

    >>> device_of((Mesh(x=2), Mesh({"x": 2}, device_ids=[7, 2])), 7, 8)
    7
    """
    seats_there = ((mesh, seat_of(mesh, rank, size)) for mesh in meshes)
    return next((devices_by_id(mesh)[seat] for mesh, seat in seats_there if seat is not None), rank)


@lru_cache(maxsize=256)
def _seats_of_devices(mesh: Mesh) -> dict[int, int]:
    return {device: seat for seat, device in enumerate(devices_by_id(mesh))}


def rank_of_devices(meshes: tuple[Mesh, ...], size: int) -> dict[int, int]:
    """The rank of every device of these meshes in a communicator of `size`.

    >>> rank_of_devices((Mesh({"x": 2}, device_ids=[7, 2]),), 2)
    {2: 0, 7: 1}
    """
    return {
        device: rank
        for mesh in meshes
        for device, rank in zip(devices_by_id(mesh), ranks_of_seats(mesh, size), strict=True)
    }


def is_seated(one: Mesh, other: Mesh, size: int) -> bool:
    """Whether every device of two meshes has a rank in a communicator of `size`: ids are ranks, or all ranks have tiles
    of both.

    >>> far = Mesh({"x": 2}, device_ids=[7, 2])
    >>> is_seated(far, far, 8), is_seated(far, far, 2), is_seated(far, Mesh(x=2), 2), is_seated(far, far, 4)
    (True, True, False, False)
    """
    if one.size == size and one_set(one, other):
        return True
    return all(mesh.size <= size and max(mesh.devices) < size for mesh in (one, other))
