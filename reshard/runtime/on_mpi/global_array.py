"""Global arrays: which indices a seat's tile holds, and sums that no layout changes.

A seat is a rank, where every rank has a tile (`lower.to_mpi.seats`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy as np
from mpi4py import MPI
from numpy.typing import NDArray

from reshard.geometry.overlap import piece_runs
from reshard.lower.to_mpi import devices_by_id
from reshard.runtime.numpy_tiles import index_dim, without_padding
from reshard.runtime.on_mpi.copies.strided_copy import Array
from reshard.runtime.on_mpi.team import Team, Watch
from reshard.types import Dim, Layout, Pieces
from reshard.types.dims import number_piece
from reshard.types.view import View, Window


def index_ranges(layout: Layout, seat: int) -> tuple[tuple[range, ...], ...]:
    """For each dim, the ranges of global indices that the tile of a seat holds, in the tile's order, without padding.

    >>> from reshard.types import Mesh
    >>> index_ranges(Layout.parse("f32[2{x}2, {y}2]", Mesh(x=4, y=2)), 3)
    ((range(2, 4), range(10, 12)), (range(2, 4),))
    """
    position = layout.mesh.position(devices_by_id(layout.mesh)[seat])
    ranges: list[tuple[range, ...]] = []
    for dim in layout.dims:
        number = number_piece(dim, layout.mesh, position)
        # Tables of pieces may be long, and only one of them is wanted.
        runs = piece_runs(dim)[number] if dim.pieces is None else dim.pieces.runs_of(number)
        ranges.append(tuple([range(at, at + length) for at, _, length in runs]))
    return tuple(ranges)


def global_indices(layout: Layout, dim: int, seat: int) -> NDArray[np.int64]:
    """The global index of every local index of a dim, without padding.

    >>> from reshard.types import Mesh
    >>> global_indices(Layout.parse("f32[{x}3/8]", Mesh(x=3)), 0, 2)
    array([6, 7])
    """
    return index_dim(layout.dims[dim], layout.mesh, layout.mesh.position(devices_by_id(layout.mesh)[seat]))


def order_by_owner(layout: Layout) -> tuple[Layout, list[tuple[int, NDArray[np.intp]]]]:
    """The same tiles as intervals, one after another, of an array with its rows in another order; and for each dim in
    another order, which index of the array comes where.

    >>> from reshard.types import Mesh
    >>> intervals, orders = order_by_owner(Layout.parse("f32[{x}(2@1,3@0,1@1), 4]", Mesh(x=2)))
    >>> str(intervals), orders
    ('f32[{x}3, 4]', [(0, array([2, 3, 4, 0, 1, 5]))])
    """
    dims, orders = list(layout.dims), list[tuple[int, NDArray[np.intp]]]()
    for at, (digits, size, pieces) in enumerate(layout.dims):
        if pieces is not None and not pieces.is_intervals:
            # Numbers as small as can be are sorted by their digits.
            owners = np.asarray(pieces.numbers).astype(np.min_scalar_type(pieces.count))
            orders.append((at, np.argsort(np.repeat(owners, pieces.lengths), kind="stable")))
            dims[at] = Dim(digits, size, Pieces.from_sizes(pieces.sizes))
    return replace(layout, dims=tuple(dims)), orders


def clear_padding(layout: Layout, seat: int, tile: NDArray[Any]) -> None:
    """Writes zeros to the padding of a seat's tile."""
    for dim, extent in enumerate(layout.tile_shape_of(devices_by_id(layout.mesh)[seat])):
        tile[(slice(None),) * dim + (slice(extent, None),)] = np.zeros((), tile.dtype)


# Checksums of arrays that do not depend on their layout: what they were before a move is what they are after it.
#
# Every element that moves adds a number that mixes its bits with its place among those that move, modulo 2^64. Seen
# through a view, an element has the same place on both sides; what a view does not take, or does not fill, adds
# nothing. Of several ranks with the same tile, only the first counts. So swapped elements, tiles or names change the
# sum.


_MIX = np.uint64(0x9E3779B97F4A7C15)
_SHIFT = np.uint64(29)
_AT_ONCE = 1 << 18
"""Elements of a tile that are mixed at once, whose numbers take 8 bytes each."""


def sum_tile(layout: Layout, rank: int, tile: Array, view: View | None = None, *, after: bool = False) -> int:
    """This rank's part of an array's sum: 0 where another rank has the same tile.

    The array is the source of the `view`, or its target if it is what the view makes, `after` the move.

    >>> from reshard.types import Mesh
    >>> mesh = Mesh(x=2)
    >>> rows, whole = Layout.parse("s32[{x}2]", mesh), Layout.parse("s32[4]", mesh)
    >>> array = np.array([7, 1, 5, 5], np.int32)
    >>> parts = [sum_tile(rows, rank, array[2 * rank :][:2]) for rank in range(2)]
    >>> sum(parts) % 2**64 == sum_tile(whole, 0, array), sum_tile(whole, 1, array)
    (True, 0)
    """
    if _first_holders(layout)[rank] != rank:
        return 0
    view = View.identity(layout.shape) if view is None else view
    tile = without_padding(layout, devices_by_id(layout.mesh)[rank], tile)
    if not tile.size:
        return 0
    places, moving = _places_in_view(view, after, [global_indices(layout, dim, rank) for dim in range(tile.ndim)])
    if not tile.ndim:
        return _sum_elements(tile, [], [])
    rows = max(1, _AT_ONCE * len(tile) // tile.size)
    blocks = [slice(start, start + rows) for start in range(0, len(tile), rows)]
    return sum(_sum_elements(tile[at], [places[0][at], *places[1:]], [moving[0][at], *moving[1:]]) for at in blocks) % (
        1 << 64
    )


def _sum_elements(tile: Array, places: Sequence[Array], moving: Sequence[Array]) -> int:
    """The sum of a block's elements; each index of a dim has a place, and moves or does not."""
    position = np.zeros((), np.uint64)
    for place in places:
        position = position[..., np.newaxis] + place
    words = np.ascontiguousarray(tile).reshape(-1).view(np.uint8).reshape(*tile.shape, tile.itemsize)
    values = np.zeros(tile.shape, np.uint64)
    for byte in range(tile.itemsize):
        values = values * np.uint64(257) + words[..., byte]
    mixed = _mix_bits(values + _mix_bits(position + np.uint64(1)))
    for dim, moves in enumerate(moving):
        mixed[(slice(None),) * dim + (~moves,)] = 0
    return int(mixed.sum(dtype=np.uint64))


def _places_in_view(view: View, after: bool, indices: Sequence[Array]) -> tuple[list[Array], list[Array]]:
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


def _mix_bits(values: Array) -> Array:
    with np.errstate(over="ignore"):  # Modulo 2^64, also for scalars.
        values = values * _MIX
        return (values ^ (values >> _SHIFT)) * _MIX


@lru_cache(maxsize=64)
def _first_holders(layout: Layout) -> tuple[int, ...]:
    """For each rank, the first one that holds the same pieces of the array."""
    mesh, first = layout.mesh, dict[tuple[int, ...], int]()
    positions = map(mesh.position, devices_by_id(mesh))
    held = [tuple([number_piece(dim, mesh, position) for dim in layout.dims]) for position in positions]
    return tuple(first.setdefault(pieces, rank) for rank, pieces in enumerate(held))


def add_sums(team: Team, watch: Watch, sums: Sequence[int]) -> list[int]:
    """The sums of all ranks, added modulo 2^64."""
    if not sums:
        return []
    mine = np.array(sums, np.uint64)
    over_all = np.empty_like(mine)
    watch.until(team.comm.Iallreduce(mine, over_all, MPI.SUM).Test)
    return [int(each) for each in over_all]
