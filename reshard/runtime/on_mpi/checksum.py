"""Checksums of arrays that do not depend on their layout: what they were before a move is what they are after it.

Every element adds a number that mixes its bits with its global index, modulo 2^64; of several ranks with the same tile,
only the first counts. So swapped elements, tiles or names change the sum.
"""

from __future__ import annotations

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

_MIX = np.uint64(0x9E3779B97F4A7C15)
_SHIFT = np.uint64(29)


def checksum(layout: Layout, rank: int, tile: Array) -> int:
    """This rank's part of an array's sum: 0 where another rank has the same tile.

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
    position = np.zeros((), np.uint64)
    for dim, size in enumerate(layout.shape):
        index = indices(layout, dim, rank).astype(np.uint64)
        position = position[..., np.newaxis] * np.uint64(size) + index
    words = np.ascontiguousarray(tile).reshape(-1).view(np.uint8).reshape(*tile.shape, tile.itemsize)
    values = np.zeros(tile.shape, np.uint64)
    for byte in range(tile.itemsize):
        values = values * np.uint64(257) + words[..., byte]
    mixed = _mixed(values + _mixed(position + np.uint64(1)))
    for dim, unused in enumerate(padding(layout, rank)):
        mixed[(slice(None),) * dim + (unused,)] = 0
    return int(mixed.sum(dtype=np.uint64))


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
