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
from reshard.lower.to_mpi.direct import Fetch, Near
from reshard.types.deadline import check_deadline
from reshard.types.layout import Layout
from reshard.types.pair.crossing import dealt, pull_limit
from reshard.types.pair.holders import holders
from reshard.types.pair.message import Message, Runs, Tile, cut, elements, tile_of
from reshard.types.pair.overlap import shares_from, shares_of

Demand = list[tuple[int, Runs]]
"""Devices that need part of a source tile, each with what it needs."""


def fetched_across(source: Layout, target: Layout, device: int, near: Near) -> list[Fetch]:
    """What a device copies from source tiles to fill its target tile, from itself first; `Fetch.rank` is a device.

    >>> from reshard.types.mesh import Mesh
    >>> one, other = Mesh(x=2), Mesh({"d": 3}, device_ids=[2, 3, 4])
    >>> source, target = Layout.parse("f32[6]", one), Layout.parse("f32[6]", other)
    >>> [(fetch.rank, fetch.blocks[0].extents) for fetch in fetched_across(source, target, 3, lambda a, b: True)]
    [(0, (3,)), (1, (3,))]
    """
    if device not in target.mesh.devices:
        return []
    blocks: dict[int, list[Block]] = {}
    for giver, products in _taken(source, target, device, near):
        blocks.setdefault(giver, []).extend(_blocks(products))
    return _in_turn(blocks, device)


def served_across(source: Layout, target: Layout, device: int, near: Near) -> list[Fetch]:
    """What devices copy from one device's source tile, itself first: the fetches of all, as far as they name it.

    >>> from reshard.types.mesh import Mesh
    >>> one, other = Mesh(x=2), Mesh({"d": 3}, device_ids=[2, 3, 4])
    >>> source, target = Layout.parse("f32[6]", one), Layout.parse("f32[6]", other)
    >>> [(fetch.rank, fetch.blocks[0].extents) for fetch in served_across(source, target, 0, lambda a, b: True)]
    [(2, (6,)), (3, (3,))]
    """
    if device not in source.mesh.devices:
        return []
    given = _dealt(source, target, tile_of(source, device), near, None, device)
    blocks = {taker: list(_blocks(products)) for giver, taker, products in given if giver == device}
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
        for giver, products in _taken(source, target, device, _anywhere):
            yield Message(giver, device, products)
    if device in source.mesh.devices:
        for giver, taker, products in _dealt(source, target, tile_of(source, device), _anywhere, None, device):
            if giver == device != taker:
                yield Message(giver, taker, products)


def _anywhere(_: int, __: int) -> bool:
    return True


def _taken(source: Layout, target: Layout, device: int, near: Near) -> Iterator[tuple[int, tuple[Runs, ...]]]:
    """What a device takes from each giver. Only where a giver is one of several, the requests of others matter."""
    dims = zip(source.dims, target.dims, tile_of(target, device), strict=True)
    for parts in itertools.product(*(shares_of(s, t, q).items() for s, t, q in dims)):
        check_deadline()
        tile = tuple(p for p, _ in parts)
        held_by = _devices(source, tile)
        close = (device,) if device in held_by else _close(held_by, device, near)
        if len(close) == 1:
            yield close[0], (tuple(runs for _, runs in parts),)
            continue
        for giver, taker, products in _dealt(source, target, tile, near, device, None):
            if taker == device:
                yield giver, products


def _close(held_by: tuple[int, ...], device: int, near: Near) -> tuple[int, ...]:
    """The holders of a tile that share the requests of a device."""
    return tuple(holder for holder in held_by if near(holder, device)) or held_by


def _in_turn(blocks: dict[int, list[Block]], device: int) -> list[Fetch]:
    """Each device starts with itself and goes on with the next one, so that not all read from the same one first."""
    return [Fetch(peer, tuple(blocks[peer])) for peer in sorted(blocks, key=lambda peer: (peer < device, peer))]


def _blocks(products: Sequence[Runs]) -> Iterator[Block]:
    for runs in products:
        yield from of_runs(runs)


def _dealt(
    source: Layout, target: Layout, tile: Tile, near: Near, taker: int | None, giver: int | None
) -> Iterator[tuple[int, int, tuple[Runs, ...]]]:
    """Who gives what of one source tile to whom, as (giver, taker, products): all that one taker or one giver has a
    part in.
    """
    held_by = _devices(source, tile)
    asking: dict[tuple[int, ...], Demand] = {}
    for device, runs in _demand(source, target, tile):
        if device in held_by:
            if device in (taker, giver):
                yield device, device, (runs,)
            continue
        asking.setdefault(_close(held_by, device, near), []).append((device, runs))
    for close, queue in asking.items():
        sizes = [elements(runs) for _, runs in queue]
        limit = pull_limit(source, target) if len(close) > 1 else sum(sizes)
        for share in dealt(sizes, len(close), limit):
            device, runs = queue[share.request]
            if device == taker or close[share.holder] == giver:
                yield close[share.holder], device, cut(runs, share.low, share.high)


@lru_cache(maxsize=4096)
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
