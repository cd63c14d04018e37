"""Checksums of arrays that do not depend on their layout: what they were before a move is what they are after it.

Every element that moves adds a number that mixes its bits with its place among those that move, modulo 2^64. Seen
through a view, an element has the same place on both sides; what a view does not take, or does not fill, adds nothing.
Of several ranks with the same tile, only the first counts. So swapped elements, tiles or names change the sum.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache

import numpy as np
from mpi4py import MPI

from reshard.lower.to_mpi import ranks
from reshard.runtime.on_mpi.indices import indices, padding
from reshard.runtime.on_mpi.strided_copy import Array
from reshard.runtime.on_mpi.team import Team, Watch
from reshard.types import Layout
from reshard.types.pair.overlap import piece
from reshard.types.view import View, Window

_MIX = np.uint64(0x9E3779B97F4A7C15)
_SHIFT = np.uint64(29)
_AT_ONCE = 1 << 18
"""Elements of a tile that are mixed at once, whose numbers take 8 bytes each."""


def checksum(layout: Layout, rank: int, tile: Array, view: View | None = None, *, after: bool = False) -> int:
    """This rank's part of an array's sum: 0 where another rank has the same tile.

    The array is the source of the `view`, or its target if it is what the view makes, `after` the move.

    >>> from reshard.types import Mesh
    >>> mesh = Mesh(x=2)
    >>> rows, whole = Layout.parse("s32[{x}2]", mesh), Layout.parse("s32[4]", mesh)
    >>> array = np.array([7, 1, 5, 5], np.int32)
    >>> parts = [checksum(rows, rank, array[2 * rank :][:2]) for rank in range(2)]
    >>> sum(parts) % 2**64 == checksum(whole, 0, array), checksum(whole, 1, array)
    (True, 0)
    """
    if _first_holder(layout, ranks(layout.mesh)[rank]) != rank or not tile.size:
        return 0
    view = View.identity(layout.shape) if view is None else view
    places, moving = _places(view, after, [indices(layout, dim, rank) for dim in range(tile.ndim)])
    for dim, unused in enumerate(padding(layout, rank)):
        moving[dim][unused] = False
    if not tile.ndim:
        return _summed(tile, [], [])
    rows = max(1, _AT_ONCE * len(tile) // tile.size)
    blocks = [slice(start, start + rows) for start in range(0, len(tile), rows)]
    return sum(_summed(tile[at], [places[0][at], *places[1:]], [moving[0][at], *moving[1:]]) for at in blocks) % (
        1 << 64
    )


def _summed(tile: Array, places: Sequence[Array], moving: Sequence[Array]) -> int:
    """The sum of a block's elements; each index of a dim has a place, and moves or does not."""
    position = np.zeros((), np.uint64)
    for place in places:
        position = position[..., np.newaxis] + place
    words = np.ascontiguousarray(tile).reshape(-1).view(np.uint8).reshape(*tile.shape, tile.itemsize)
    values = np.zeros(tile.shape, np.uint64)
    for byte in range(tile.itemsize):
        values = values * np.uint64(257) + words[..., byte]
    mixed = _mixed(values + _mixed(position + np.uint64(1)))
    for dim, moves in enumerate(moving):
        mixed[(slice(None),) * dim + (~moves,)] = 0
    return int(mixed.sum(dtype=np.uint64))


def _places(view: View, after: bool, indices: Sequence[Array]) -> tuple[list[Array], list[Array]]:
    """For each dim, what its indices add to the places of their elements in the view's order of atoms, and which of
    them are part of the move."""
    sizes = [atom.size for atom in view.atoms]
    places: list[Array] = []
    moving: list[Array] = []
    for group, index in zip(view.target if after else view.source, indices, strict=True):
        place, moves, stride = np.zeros(index.shape, np.uint64), np.ones(index.shape, bool), 1
        for at in reversed(group):
            atom = view.atoms[at]
            window = (atom.into if after else atom.taken) or Window(0, atom.size)
            digit = index // stride % window.size - window.start
            moves &= (digit >= 0) & (digit < atom.size)
            place += digit.astype(np.uint64) * np.uint64(math.prod(sizes[at + 1 :]))
            stride *= window.size
        places.append(place)
        moving.append(moves)
    return places, moving


def _mixed(values: Array) -> Array:
    with np.errstate(over="ignore"):  # Modulo 2^64, also for scalars.
        values = values * _MIX
        return (values ^ (values >> _SHIFT)) * _MIX


@lru_cache(maxsize=1024)
def _first_holder(layout: Layout, device: int) -> int:
    """The first rank that holds the tile of a device."""
    wanted = _pieces(layout, device)
    return next(rank for rank, other in enumerate(ranks(layout.mesh)) if _pieces(layout, other) == wanted)


def _pieces(layout: Layout, device: int) -> tuple[int, ...]:
    position = layout.mesh.position(device)
    return tuple(piece(dim, layout.mesh, position) for dim in layout.dims)


def total(team: Team, watch: Watch, sums: Sequence[int]) -> list[int]:
    """The sums of all ranks, added modulo 2^64."""
    if not sums:
        return []
    mine = np.array(sums, np.uint64)
    over_all = np.empty_like(mine)
    watch.until(team.comm.Iallreduce(mine, over_all, MPI.SUM).Test)
    return [int(each) for each in over_all]
