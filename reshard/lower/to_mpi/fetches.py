"""Straight from source to target: what each rank fetches, and from whom.

    source f32[{x}2, 4] -> target f32[4, {x}2] on x=2     rank 1 fetches rows 0:2 of its columns from rank 0,
                                                          and copies rows 2:4 from its own tile

A rank keeps what it already holds. Every other piece of its target tile comes from one of the ranks that hold it: a
rank of its own node if possible, and if several qualify, its own number selects one, which spreads the load. Any
rank can compute what others fetch from it, so senders know what to send without a message, and none computes more
than its own part of the move. On one set of devices, ranks are seats here (`seats`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from reshard.geometry.blocks import Block, cut_range
from reshard.geometry.dealing import Kinds, Queue, Sizes, TileQueues, assign_requests
from reshard.geometry.holders import Tile, holders, home_tile, pull_limit, tile_of
from reshard.geometry.messages import exchange_messages
from reshard.geometry.overlap import list_alike, list_repeated
from reshard.geometry.relay import relay_messages
from reshard.geometry.remesh import one_set
from reshard.lower.to_mpi.peer_table import Column, PeerTable, SharedTiles, list_positions, share_tiles
from reshard.lower.to_mpi.seats import (
    device_of,
    devices_by_id,
    rank_of_devices,
    ranks_of_seats,
    seat_of,
    seats_by_position,
)
from reshard.lower.to_mpi.tile_blocks import Blocks, multiply_factors
from reshard.types.layout import Dim, Layout
from reshard.types.mesh import Mesh
from reshard.types.view import View
from reshard.types.whole import check_deadline

Nodes = Sequence[int]
"""The node of every rank, or device."""

Fetches = PeerTable
"""What comes from the source tile of each other rank, or goes to its target tile; first from or to the rank itself."""

FIRST, SECOND = 1, 2


class MoveForm(NamedTuple):
    """How elements go where that is listed for all devices: through a `view`, and in which `turn` of a relay, if it is
    one, to the devices that pass elements on (`FIRST`), or from these to the others (`SECOND`), between two tiles of
    the target; and whether groups of devices gather in it.
    """

    turn: int = 0
    view: View | None = None
    gathers: bool = False


def fetches_by_rank(
    source: Layout, target: Layout, rank: int, nodes: tuple[int, ...], form: MoveForm | None = None
) -> Fetches:
    """What a rank copies from the tile of each rank, its own included, given the node of every rank.

    It comes from a giver of its own node if there is one and the form leaves the choice.
    """
    return _list_by_rank(source, target, rank, nodes, form, given=False)


def served_by_rank(
    source: Layout, target: Layout, rank: int, nodes: tuple[int, ...], form: MoveForm | None = None
) -> Fetches:
    """What each rank copies from the tile of one: the fetches of all, as far as they name it."""
    return _list_by_rank(source, target, rank, nodes, form, given=True)


def _list_by_rank(
    source: Layout, target: Layout, rank: int, nodes: tuple[int, ...], form: MoveForm | None, *, given: bool
) -> Fetches:
    """By rank, what is listed by seat among one set of devices, by device between two, and by device in a form."""
    meshes, size = (source.mesh, target.mesh), len(nodes)
    if form is not None:
        at = rank_of_devices(meshes, size)
        here = next((mesh for mesh in meshes if seat_of(mesh, rank, size) is not None), None)
        if here is None:
            return PeerTable.of_blocks(())
        listed = list_in_form(source, target, form, device_of((here,), rank, size), given=given)
        return PeerTable.of_blocks((at[peer], blocks) for peer, blocks in listed.items()).begin_after(rank)
    if not one_set(*meshes):
        return list_across(source, target, rank, nodes, given=given)
    seat, ranks = seat_of(source.mesh, rank, size), ranks_of_seats(source.mesh, size)
    if seat is None:
        return PeerTable.of_blocks(())
    listing, near = list_served if given else list_fetches, nodes
    if ranks != range(size):
        near = [nodes[at] for at in ranks]
    return listing(source, target, seat, near).rename_peers(ranks)


def list_fetches(source: Layout, target: Layout, rank: int, nodes: Nodes | None = None) -> Fetches:
    """What a rank copies from the ranks' source tiles to fill its target tile, its own source tile first.

    Nothing is summed: both layouts are partial along the same axes, or neither is partial. Without `nodes`, each rank
    is on one of its own.

    >>> from reshard.types.mesh import Mesh
    >>> mesh = Mesh(x=2)
    >>> rows, columns = Layout.parse("f32[{x}2, 4]", mesh), Layout.parse("f32[4, {x}2]", mesh)
    >>> [(rank, blocks[0].extents) for rank, blocks in list_fetches(rows, columns, 1).items()]
    [(1, (2, 2)), (0, (2, 2))]
    """
    wanted = home_tile(target, target.mesh.position(devices_by_id(target.mesh)[rank]))
    mesh = source.mesh
    summand = mesh.coordinates(mesh.position(devices_by_id(mesh)[rank]), source.partial) if source.partial else ()
    shared = share_tiles(source, target, wanted, given=False)
    seats = seats_at(mesh, list_positions(holders(source), shared.numbers, summand))
    givers = choose_givers(seats, rank, nodes)
    return shared.tabulate(givers).begin_after(rank)


def choose_givers(held_by: Column, rank: int, nodes: Nodes | None) -> Column:
    """Of the holders of each tile, a row each with -1 behind fewer: the rank itself, else one of its node, or of all,
    which its own number selects.

    >>> choose_givers(np.array([[0, 1, -1], [2, 3, 4]]), 5, [0, 0, 1, 1, 2, 1]).tolist()
    [1, 3]
    """
    if held_by.shape[1] == 1:
        return held_by[:, 0]
    near = np.zeros(held_by.shape, bool) if nodes is None else np.asarray(nodes)[held_by] == nodes[rank]
    near &= held_by >= 0
    near = np.where(near.any(axis=1, keepdims=True), near, held_by >= 0)
    chosen = near & (near.cumsum(axis=1) == (rank % near.sum(axis=1) + 1)[:, None])
    return np.where((held_by == rank).any(axis=1), rank, held_by[np.arange(len(held_by)), chosen.argmax(axis=1)])


def list_served(source: Layout, target: Layout, rank: int, nodes: Nodes | None = None) -> Fetches:
    """What the ranks fetch from one of them, itself first: the `list_fetches` of all, as far as they name this rank.

    Both layouts are on meshes of the same size.

    >>> from reshard.types.mesh import Mesh
    >>> mesh = Mesh(x=2)
    >>> rows, columns = Layout.parse("f32[{x}2, 4]", mesh), Layout.parse("f32[4, {x}2]", mesh)
    >>> [(rank, blocks[0].src) for rank, blocks in list_served(rows, columns, 1).items()]
    [(1, 2), (0, 0)]
    """
    devices, mesh, partial = devices_by_id(source.mesh), source.mesh, source.partial
    mine = home_tile(source, mesh.position(devices[rank]))
    shared = share_tiles(source, target, mine, given=True)
    seats = seats_at(target.mesh, list_positions(holders(target, any_summand=True), shared.numbers))
    rows, columns = np.nonzero(seats >= 0)
    takers = seats[rows, columns]
    kept = np.ones(len(takers), bool)
    if partial:
        # A summand goes to the devices that have the same one: nothing is added up on the way.
        alike = [mesh.coordinates(mesh.position(device), partial) == mine[len(source.dims) :] for device in devices]
        kept &= np.array(alike)[takers]
    given = np.array(sorted(seats_at(mesh, np.array([holders(source).of(mine)]))[0]))
    if len(given) > 1:
        # As they choose in `list_fetches`.
        chosen = given[takers % len(given)]
        if nodes is not None:
            of, order = np.asarray(nodes), np.argsort(np.asarray(nodes)[given], kind="stable")
            first, last = (np.searchsorted(of[given][order], of[takers], side) for side in ("left", "right"))
            near = first + takers % np.maximum(last - first, 1)
            chosen = np.where(first < last, given[order][np.minimum(near, len(given) - 1)], chosen)
        kept &= np.where(np.isin(takers, given), takers, chosen) == rank
    return shared.tabulate(takers[kept], rows[kept]).begin_after(rank)


def seats_at(mesh: Mesh, positions: Column) -> Column:
    """The seats of the devices at some positions, ascending in each row."""
    if mesh.device_ids is None:
        return positions
    return np.sort(np.where(positions < 0, positions, np.array(seats_by_position(mesh))[positions]), axis=1)


def is_unreplicated(layout: Layout) -> bool:
    """Whether each tile is on one rank only.

    >>> from reshard.types.mesh import Mesh
    >>> [is_unreplicated(Layout.parse(text, Mesh(x=2))) for text in ("f32[{x}2]", "f32[4]")]
    [True, False]
    """
    return holders(layout).copies == 1


def list_in_form(source: Layout, target: Layout, form: MoveForm, device: int, *, given: bool) -> Mapping[int, Blocks]:
    """What a device copies from the tiles of others, by device, and of its own; or what they copy from it, its `given`.

    >>> from reshard.types.mesh import Mesh
    >>> source, target = Layout.parse("f32[12]", Mesh(x=1)), Layout.parse("f32[12]", Mesh(d=3))
    >>> [list(list_in_form(source, target, MoveForm(turn), 1, given=False)) for turn in (FIRST, SECOND)]
    [[0], [2]]
    """
    viewed = form.view is not None
    ends = source, target, form.view
    fetches: dict[int, Blocks] = {}
    turns = relay_messages(*ends, gathers=form.gathers) if form.turn else (exchange_messages(*ends),)
    for message in turns[max(0, form.turn - FIRST)]:
        check_deadline()
        sender, receiver, _ = message
        here, peer = (sender, receiver) if given else (receiver, sender)
        if here == device:  # Blocks are made for these messages alone.
            folded = (block for product in message.products for block in multiply_factors(product))
            fetches[peer] = tuple(message.blocks if viewed else folded)
    return {peer: blocks for peer, blocks in fetches.items() if blocks}


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
# `geometry.messages` assigns it: holders on the asking device's node, if there are any, else all of them. Any device
# can work out its own part, without that of the others.


def list_across(source: Layout, target: Layout, device: int, nodes: Nodes | None, *, given: bool) -> Fetches:
    """What a device copies from source tiles to fill its target tile, by device, from itself first; or what devices
    copy from its own source tile, what is `given`.

    >>> from reshard.types.mesh import Mesh
    >>> one, other = Mesh(x=2), Mesh({"d": 3}, device_ids=[2, 3, 4])
    >>> source, target = Layout.parse("f32[6]", one), Layout.parse("f32[6]", other)
    >>> fetched, served = (list_across(source, target, d, [0] * 5, given=d == 0) for d in (3, 0))
    >>> [[(peer, blocks[0].extents) for peer, blocks in each.items()] for each in (fetched, served)]
    [[(0, (3,)), (1, (3,))], [(2, (6,)), (3, (3,))]]
    """
    here, there = (source, target) if given else (target, source)
    if device not in here.mesh.devices:
        return PeerTable.of_blocks(())
    shared = share_tiles(source, target, tile_of(here, device), given=given)
    positions = list_positions(holders(there), shared.numbers)
    peers = np.where(positions < 0, -1, np.array(there.mesh.devices)[positions])
    if holders(source).copies == 1:
        # No holder shares what is asked of it with another.
        rows, columns = np.nonzero(positions >= 0)
        return shared.tabulate(peers[rows, columns], rows).begin_after(device)
    if given:
        shares = _share_given(source, target, device, nodes, shared, positions)
    else:
        shares = _share_taken(source, target, device, nodes, shared, peers)
    parts = (
        (peer, cut_blocks(shared.tabulate(np.array([peer]), np.array([row])).blocks_of_row(0), low, high))
        for peer, row, low, high in shares.parts
    )
    whole, cut = shared.tabulate(shares.peers, shares.rows), PeerTable.of_blocks(parts)
    peers, src = np.concatenate([whole.peers, cut.peers]), np.concatenate([whole.src, cut.src])
    dst, kinds = np.concatenate([whole.dst, cut.dst]), np.concatenate([whole.kinds, cut.kinds + len(whole.shapes)])
    return PeerTable(peers, src, dst, kinds, (*whole.shapes, *cut.shapes)).begin_after(device)


class _TileShares(NamedTuple):
    """What a device takes or gives where several hold a tile: whole rows of the tiles that it shares, each with the
    peer, and parts of rows: peer, row, and the numbers of the first element and of that after the last.
    """

    peers: Column
    rows: Column
    parts: list[tuple[int, int, int, int]]


def _share_taken(
    source: Layout, target: Layout, device: int, nodes: Nodes | None, shared: SharedTiles, held_by: Column
) -> _TileShares:
    """What a device takes of each source tile, a row each, from one of its holders or from several."""
    queues, limit, mine = _Queues(source, target, nodes), pull_limit(source, target), target.mesh.position(device)
    tiles: list[tuple[int, ...]] = [*zip(*[column.tolist() for column in shared.numbers], strict=True)] or [()]
    givers = np.where((held_by == device).any(axis=1), device, -1)
    alone = (held_by >= 0).all(axis=1)  # Whether the requests of all devices are one queue.
    if nodes is not None:
        of, here = np.array(nodes), nodes[device]
        near = (of[held_by] == here) & (held_by >= 0)
        first = held_by[np.arange(len(held_by)), near.argmax(axis=1)]
        givers = np.where((givers < 0) & (near.sum(axis=1) == 1), first, givers)
        alone &= (of[held_by] == of[held_by[:, :1]]).all(axis=1)
    # The requests of others matter only if there are several givers. Tiles that are asked for alike have one queue.
    alike: dict[Kinds, list[int]] = {}
    for row in np.flatnonzero(alone & (givers < 0)).tolist():
        alike.setdefault(queues.tiles.kinds(tiles[row]), []).append(row)
    where = np.full(1 + max(*source.mesh.devices, *target.mesh.devices), -1)
    where[np.array(target.mesh.devices)] = np.arange(target.mesh.size)
    for kinds, rows in alike.items():
        chosen = _choose_holders(queues.tiles.listed(kinds), mine, where[held_by[rows]], limit)
        givers[rows] = np.where(chosen < 0, -1, held_by[rows, chosen])
    parts: list[tuple[int, int, int, int]] = []
    for row in np.flatnonzero(givers < 0).tolist():
        check_deadline()
        every = tuple([holder for holder in held_by[row].tolist() if holder >= 0])
        # Those that share the requests of this device: holders of its node, if there are any.
        some = tuple([each for each in every if nodes is not None and nodes[each] == nodes[device]]) or every
        for share in queues.of(tiles[row], every, some).shares(mine, len(some), limit):
            parts.append((some[share.holder], row, share.low, share.high))
    whole = np.flatnonzero(givers >= 0)
    return _TileShares(givers[whole], whole, parts)


def _choose_holders(queue: Queue, mine: int, held_by: Column, limit: int) -> Column:
    """`Queue.shares` of the queue without the requests of holders, for many tiles at once: the number of the holder
    that gives all that is asked; -1 where several share it, or requests are not all of one size.

    The holders of each tile are given by their positions among those that ask, or -1.
    """
    if not isinstance(queue.ends, range) or queue.gone:
        return np.full(len(held_by), -1)
    asking, count = np.array(queue.positions), held_by.shape[1]
    found = np.minimum(np.searchsorted(asking, held_by), len(asking) - 1)
    gone, number = asking[found] == held_by, int(np.searchsorted(asking, mine))
    requests = len(asking) - gone.sum(axis=1)
    at = number - (gone & (found < number)).sum(axis=1)
    return np.where(-(-requests // count) * queue.ends.step <= limit, at * count // requests, -1)


def _share_given(
    source: Layout, target: Layout, device: int, nodes: Nodes | None, shared: SharedTiles, positions: Column
) -> _TileShares:
    """What a device gives of its tile, where the target's devices at some positions take the rows."""
    rows, columns = np.nonzero(positions >= 0)
    order = np.argsort(positions[rows, columns])
    rows, takers = rows[order], np.array(target.mesh.devices)[positions[rows, columns][order]]
    sizes, held_by = (
        shared.tabulate(takers, rows).elements,
        tuple([source.mesh.devices[at] for at in holders(source).of(tile_of(source, device))]),
    )
    kept, parts = takers == device, list[tuple[int, int, int, int]]()
    asks = ~np.isin(takers, held_by)
    of = None if nodes is None else np.array(nodes)[takers]
    groups: dict[tuple[int, ...], NDArray[np.bool_]] = {held_by: asks}
    if of is not None and nodes is not None:
        # Takers on the nodes of holders ask these.
        near = sorted({nodes[holder] for holder in held_by})
        groups = {tuple([holder for holder in held_by if nodes[holder] == node]): asks & (of == node) for node in near}
        far = asks & ~np.isin(of, near)
        groups[held_by] = groups[held_by] | far if held_by in groups else far
    for close, asking in groups.items():
        each = np.flatnonzero(asking)
        count, total = len(close), sizes[each].tolist()
        limit = pull_limit(source, target) if count > 1 else sum(total)
        if len(set(total)) == 1 and -(-len(total) // count) * total[0] <= limit:
            holder = np.array(close)[np.arange(len(total)) * count // len(total)]
            kept[each[holder == device]] = True
            continue
        for share in assign_requests(total, count, limit) if total else ():
            if close[share.holder] == device:
                at = each[share.request]
                parts.append((int(takers[at]), int(rows[at]), share.low, share.high))
    return _TileShares(takers[kept], rows[kept], parts)


def cut_blocks(blocks: Blocks, low: int, high: int) -> list[Block]:
    """The elements number `low` to `high` of some blocks, one after another."""
    parts: list[Block] = []
    for block in blocks:
        size = block.elements
        parts += cut_range(block, max(0, low), min(size, high)) if low < size and high > 0 else ()
        low, high = low - size, high - size
    return parts


class _Queues:
    """The requests for tiles of which several holders give shares: all of these, or those of one node."""

    def __init__(self, source: Layout, target: Layout, nodes: Nodes | None) -> None:
        dims = [*zip(source.dims, target.dims, strict=True)]
        self.tiles = TileQueues(target, lambda dim, piece: _sizes_of_shares(*dims[dim], piece))
        self._mesh, self._nodes = target.mesh, nodes
        self._of_nodes = lru_cache(maxsize=64)(self._queue_of_nodes)

    def of(self, tile: Tile, held_by: tuple[int, ...], close: tuple[int, ...]) -> Queue:
        """The requests for a tile to `close` of its holders, without those of holders."""
        nodes, kinds = self._nodes, self.tiles.kinds(tile)
        near = frozenset(() if nodes is None else (nodes[holder] for holder in held_by))
        if nodes is None or len(near) == 1:
            queue = self.tiles.listed(kinds)
        elif close != held_by:
            queue = self._of_nodes(kinds, frozenset([nodes[close[0]]]), inside=True)
        else:
            return self._of_nodes(kinds, near, inside=False)  # On the nodes of holders, devices ask these.
        members = _devices_of_mesh(self._mesh)
        return queue.without([self._mesh.position(holder) for holder in held_by if holder in members])

    def _queue_of_nodes(self, kinds: Kinds, near: frozenset[int], *, inside: bool) -> Queue:
        """The requests of the devices on some nodes, or of all others."""
        queue, by_node = self.tiles.listed(kinds), _positions_by_node(self._mesh, tuple(self._nodes or ()))
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
    sizes: list[tuple[int, int]] = []
    for alike in list_alike(source, target, piece, given=True):
        elements = sum([run.elements for run in alike.blocks])
        sizes += [(q, elements) for q, _, _ in list_repeated(alike)]
    return tuple(sizes)


CACHES = (list_alike, _devices_of_mesh, _positions_by_node, _sizes_of_shares)
"""What is cached here."""
