"""From source to target in one stride: what each rank fetches, and from whom.

A rank keeps what it holds, and fetches every other piece of its target tile from one of the ranks
that hold it: one of its own node if there is one, and among several the one that its own number picks.
Each rank can compute the fetches of any other, so senders know what is asked of them.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple

from reshard.lower.to_mpi.blocks import Block, of_runs
from reshard.types.layout import Layout
from reshard.types.mesh import Mesh
from reshard.types.pair.overlap import piece, shares

Near = Callable[[int, int], bool]
"""Whether two ranks can read each other's memory."""


class Fetch(NamedTuple):
    """What comes from one rank's source tile."""

    rank: int
    blocks: tuple[Block, ...]


def ranks(mesh: Mesh) -> tuple[int, ...]:
    """The device of every rank: rank r is the r-th smallest device id, so rank and id agree on 0, 1, 2, ...

    >>> ranks(Mesh({"x": 3}, device_ids=[7, 2, 5]))
    (2, 5, 7)
    """
    return tuple(sorted(mesh.devices))


def fetches(source: Layout, target: Layout, rank: int, near: Near, seat: int | None = None) -> list[Fetch]:
    """What a rank takes from the tiles of the source's ranks to fill its tile of the target, its own first.

    The meshes may differ in size, as when a saved array is read by more or fewer ranks than wrote it; the
    rank's tile is that of number `seat` of the target's mesh, `rank` itself if left out. Nothing is summed:
    both layouts are partial alike, or not at all.
    """
    at = target.mesh.position(ranks(target.mesh)[rank if seat is None else seat])
    wanted = [shares(s, t)[piece(t, target.mesh, at)] for s, t in zip(source.dims, target.dims, strict=True)]
    holders = _holders(source)
    plane = _plane(source, source.mesh.position(ranks(source.mesh)[rank])) if source.partial else ()
    found: dict[int, list[Block]] = {}
    for owners in itertools.product(*(by.items() for by in wanted)):
        held = holders[(*(number for number, _ in owners), *plane)]
        blocks = of_runs([runs for _, runs in owners])
        found.setdefault(_nearest(held, rank, near), []).extend(blocks)
    return [Fetch(peer, tuple(found[peer])) for peer in sorted(found, key=lambda peer: (peer - rank) % _MANY)]


_MANY = 2**32


def _nearest(held: tuple[int, ...], rank: int, near: Near) -> int:
    if rank in held:
        return rank
    close = tuple(peer for peer in held if near(peer, rank)) or held
    return close[rank % len(close)]


@lru_cache(maxsize=256)
def _holders(layout: Layout) -> dict[tuple[int, ...], tuple[int, ...]]:
    """The ranks that hold each tile, by the numbers of its pieces and its summand."""
    found: dict[tuple[int, ...], list[int]] = {}
    for rank, device in enumerate(ranks(layout.mesh)):
        position = layout.mesh.position(device)
        pieces = tuple(piece(dim, layout.mesh, position) for dim in layout.dims)
        found.setdefault((*pieces, *_plane(layout, position)), []).append(rank)
    return {tile: tuple(held) for tile, held in found.items()}


def sole(layout: Layout) -> bool:
    """Whether no tile is held twice."""
    return all(len(held) == 1 for held in _holders(layout).values())


def _plane(layout: Layout, position: int) -> tuple[int, ...]:
    return layout.mesh.coordinates(position, layout.partial)
