"""Straight from source to target: what each rank fetches, and from whom.

    source f32[{x}2, 4] -> target f32[4, {x}2] on x=2     rank 1 fetches rows 0:2 of its columns from rank 0,
                                                          and copies rows 2:4 from its own tile

A rank keeps what it already holds. Every other piece of its target tile comes from one of the ranks that hold it: a
rank of its own node if possible, and if several qualify, its own number selects one, which spreads the load. Any
rank can compute what others fetch from it, so senders know what to send without a message, and none computes more
than its own part of the move.

Ranks are seats here: the numbers of the devices by ascending id (`seats`). Between two sets of devices, see `crossing`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import NamedTuple

from reshard.lower.to_mpi.blocks import Block, of_parts, parts
from reshard.lower.to_mpi.seats import ranks, seats_by_position
from reshard.types.deadline import check_deadline
from reshard.types.layout import Layout
from reshard.types.mesh import Mesh
from reshard.types.pair.holders import holders, home
from reshard.types.pair.overlap import shares_from, shares_of

Near = Callable[[int, int], bool]
"""Whether two ranks are on one node."""


class Fetch(NamedTuple):
    """The blocks that come from the source tile of another rank, or that go to its target tile."""

    rank: int
    blocks: tuple[Block, ...]


def fetches(source: Layout, target: Layout, rank: int, near: Near, number: int | None = None) -> list[Fetch]:
    """What a rank copies from the ranks' source tiles to fill its target tile, its own source tile first.

    The rank fills tile `number` of the target's mesh, by default its own number. The meshes may differ in size, as
    when an array is loaded by more or fewer ranks than saved it. Nothing is summed: both layouts are partial along
    the same axes, or neither is partial.

    >>> from reshard.types.mesh import Mesh
    >>> mesh = Mesh(x=2)
    >>> rows, columns = Layout.parse("f32[{x}2, 4]", mesh), Layout.parse("f32[4, {x}2]", mesh)
    >>> [(fetch.rank, fetch.blocks[0].extents) for fetch in fetches(rows, columns, 1, lambda one, other: True)]
    [(1, (2, 2)), (0, (2, 2))]
    """
    wanted = home(target, target.mesh.position(ranks(target.mesh)[rank if number is None else number]))
    mesh = source.mesh
    summand = mesh.coordinates(mesh.position(ranks(mesh)[rank]), source.partial) if source.partial else ()
    dims = [
        [(p, parts(at, runs)) for p, runs in shares_of(s, t, q).items()]
        for at, (s, t, q) in enumerate(zip(source.dims, target.dims, wanted, strict=False))
    ]
    givers, seat = holders(source), _seat_of(mesh)
    blocks: dict[int, list[Block]] = {}
    for owners in itertools.product(*dims):
        check_deadline()
        candidates = seat(givers.of((*[p for p, _ in owners], *summand)))
        giver = candidates[0] if len(candidates) == 1 else _nearest(candidates, rank, near)
        blocks.setdefault(giver, []).extend(of_parts([part for _, part in owners]))
    # Each rank starts with itself and goes on with the next rank, so that ranks do not all read from rank 0 first.
    return [Fetch(peer, tuple(blocks[peer])) for peer in sorted(blocks, key=lambda peer: (peer < rank, peer))]


def served(source: Layout, target: Layout, rank: int, near: Near) -> list[Fetch]:
    """What the ranks fetch from one of them, itself first: the `fetches` of all, as far as they name this rank.

    Both layouts are on meshes of the same size.

    >>> from reshard.types.mesh import Mesh
    >>> mesh = Mesh(x=2)
    >>> rows, columns = Layout.parse("f32[{x}2, 4]", mesh), Layout.parse("f32[4, {x}2]", mesh)
    >>> [(fetch.rank, fetch.blocks[0].src) for fetch in served(rows, columns, 1, lambda one, other: True)]
    [(1, (0, 2)), (0, (0, 0))]
    """
    devices, seat = ranks(source.mesh), _seat_of(source.mesh)
    mine = home(source, source.mesh.position(devices[rank]))
    summand = mine[len(source.dims) :]
    candidates = seat(holders(source).of(mine))
    dims = [
        [(q, parts(at, runs)) for q, runs in shares_from(s, t, p).items()]
        for at, (s, t, p) in enumerate(zip(source.dims, target.dims, mine, strict=False))
    ]
    takers, seat_there = holders(target, any_summand=True), _seat_of(target.mesh)
    blocks: dict[int, tuple[Block, ...]] = {}
    for wishes in itertools.product(*dims):
        check_deadline()
        receivers = seat_there(takers.of([q for q, _ in wishes]))
        if summand:
            receivers = [to for to in receivers if _summand(source, devices[to]) == summand]
        if len(candidates) > 1:
            receivers = [to for to in receivers if _nearest(candidates, to, near) == rank]
        if receivers:
            blocks.update(dict.fromkeys(receivers, tuple(of_parts([part for _, part in wishes]))))
    return [Fetch(peer, blocks[peer]) for peer in sorted(blocks, key=lambda peer: (peer < rank, peer))]


def _seat_of(mesh: Mesh) -> Callable[[tuple[int, ...]], Sequence[int]]:
    """A function from positions to the seats of their devices, ascending."""
    if mesh.device_ids is None:
        return lambda positions: positions
    seats = seats_by_position(mesh)
    return lambda positions: sorted([seats[at] for at in positions])


def _nearest(candidates: Sequence[int], rank: int, near: Near) -> int:
    if rank in candidates:
        return rank
    close = tuple(peer for peer in candidates if near(peer, rank)) or candidates
    return close[rank % len(close)]


def unreplicated(layout: Layout) -> bool:
    """Whether each tile is on one rank only.

    >>> from reshard.types.mesh import Mesh
    >>> [unreplicated(Layout.parse(text, Mesh(x=2))) for text in ("f32[{x}2]", "f32[4]")]
    [True, False]
    """
    return holders(layout).copies == 1


def _summand(layout: Layout, device: int) -> tuple[int, ...]:
    return layout.mesh.coordinates(layout.mesh.position(device), layout.partial)
