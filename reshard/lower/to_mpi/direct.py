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
from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple

from reshard.lower.to_mpi.blocks import Block, of_runs
from reshard.lower.to_mpi.seats import ranks
from reshard.types.deadline import check_deadline
from reshard.types.dims import Dim
from reshard.types.layout import Layout
from reshard.types.pair.overlap import piece, shares
from reshard.types.pair.runs import Progression

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
    at = target.mesh.position(ranks(target.mesh)[rank if number is None else number])
    wanted = [shares(s, t)[piece(t, target.mesh, at)] for s, t in zip(source.dims, target.dims, strict=True)]
    holders = _holders(source)
    summand = _summand(source, source.mesh.position(ranks(source.mesh)[rank])) if source.partial else ()
    blocks: dict[int, list[Block]] = {}
    for owners in itertools.product(*(by.items() for by in wanted)):
        check_deadline()
        candidates = holders[(*(number for number, _ in owners), *summand)]
        giver = _nearest(candidates, rank, near)
        blocks.setdefault(giver, []).extend(of_runs([runs for _, runs in owners]))
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
    devices = ranks(source.mesh)
    position = source.mesh.position(devices[rank])
    home = [piece(dim, source.mesh, position) for dim in source.dims]
    summand = _summand(source, position)
    candidates = _holders(source)[(*home, *summand)]
    takers = _takers(target)
    blocks: dict[int, tuple[Block, ...]] = {}
    wanted = [by_source(s, t).get(p, {}) for s, t, p in zip(source.dims, target.dims, home, strict=True)]
    for wishes in itertools.product(*(by.items() for by in wanted)):
        receivers = takers.get(tuple(number for number, _ in wishes), ())
        if summand:
            receivers = [to for to in receivers if _summand(source, source.mesh.position(devices[to])) == summand]
        mine = [to for to in receivers if _nearest(candidates, to, near) == rank]
        if mine:
            blocks.update(dict.fromkeys(mine, tuple(of_runs([runs for _, runs in wishes]))))
    return [Fetch(peer, blocks[peer]) for peer in sorted(blocks, key=lambda peer: (peer < rank, peer))]


@lru_cache(maxsize=256)
def by_source(source: Dim, target: Dim) -> dict[int, dict[int, tuple[Progression, ...]]]:
    """For each piece of the source, what the pieces of the target share with it."""
    by_source: dict[int, dict[int, tuple[Progression, ...]]] = {}
    for q, by in enumerate(shares(source, target)):
        for p, runs in by.items():
            by_source.setdefault(p, {})[q] = runs
    return by_source


@lru_cache(maxsize=256)
def _takers(layout: Layout) -> dict[tuple[int, ...], tuple[int, ...]]:
    """The ranks by the numbers of the pieces that they hold, whatever their summand is."""
    takers: dict[tuple[int, ...], list[int]] = {}
    for tile, held in _holders(layout).items():
        takers.setdefault(tile[: len(layout.dims)], []).extend(held)
    return {pieces: tuple(sorted(held)) for pieces, held in takers.items()}


def _nearest(candidates: tuple[int, ...], rank: int, near: Near) -> int:
    if rank in candidates:
        return rank
    close = tuple(peer for peer in candidates if near(peer, rank)) or candidates
    return close[rank % len(close)]


@lru_cache(maxsize=256)
def _holders(layout: Layout) -> dict[tuple[int, ...], tuple[int, ...]]:
    """The ranks that hold each tile; a tile's key is the numbers of its pieces, then those of its summand."""
    holders: dict[tuple[int, ...], list[int]] = {}
    for rank, device in enumerate(ranks(layout.mesh)):
        position = layout.mesh.position(device)
        pieces = tuple(piece(dim, layout.mesh, position) for dim in layout.dims)
        holders.setdefault((*pieces, *_summand(layout, position)), []).append(rank)
    return {tile: tuple(held) for tile, held in holders.items()}


def unreplicated(layout: Layout) -> bool:
    """Whether each tile is on one rank only.

    >>> from reshard.types.mesh import Mesh
    >>> [unreplicated(Layout.parse(text, Mesh(x=2))) for text in ("f32[{x}2]", "f32[4]")]
    [True, False]
    """
    return all(len(held) == 1 for held in _holders(layout).values())


def _summand(layout: Layout, position: int) -> tuple[int, ...]:
    return layout.mesh.coordinates(position, layout.partial)
