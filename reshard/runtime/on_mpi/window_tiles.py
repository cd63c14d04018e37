"""Tiles that ranks of a node share: where a rank's tile lies, and how it tells the other ranks of its node.

A tile in the node's arena can be read and written by every rank of the node; a tile in private memory only by its own
rank, or through the kernel at its address (`node.cma`). Every rank therefore posts a `Posted` when a call is agreed.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from reshard.lower.to_mpi import seat_of
from reshard.runtime.on_mpi.copies.strided_copy import Array
from reshard.runtime.on_mpi.team import Team, Watch
from reshard.types import Layout


class WindowTile(NamedTuple):
    """A tile, and its place in the arena of its rank's node; 0 for a tile in private memory. It is `counted` if the
    call's account has it already."""

    tile: Array
    place: int = 0
    counted: bool = False


class Posted(NamedTuple):
    """Where one rank's tile and its `out` lie, as words that the ranks of its node can read.

    Places are those of `WindowTile`, `ABSENT` for what the rank does not have in its layout. `address` is 0 unless the
    tile is C-ordered. `given` says whether the caller gave an `out`, or is `ABSENT`.
    """

    place: int
    address: int
    out_place: int
    given: int = 0

    @property
    def into(self) -> bool | None:
        """Whether the caller gave an `out`; None if this rank has no result."""
        return None if self.given == ABSENT else bool(self.given)


ABSENT = -1
"""The place of a tile that a rank does not have: a device outside the layout's mesh."""

NOWHERE = Posted(0, 0, 0, ABSENT)
"""What a rank posts that moves nothing, or cannot go on."""


def locate_tile(team: Team, tile: Array) -> WindowTile:
    """A tile with its place in the team's arena, if it lies there: that of an earlier team of the communicator, or a
    view that is not C-ordered, is private memory.
    """
    return WindowTile(tile, team.arena.place_of(tile))


def absent_tile(layout: Layout, dtype: np.dtype[Any]) -> WindowTile:
    """What stands for the tile of a rank outside a layout's mesh: an array without elements."""
    return WindowTile(np.empty((0,) * max(1, len(layout.shape)), dtype), ABSENT)


def post_tile(held: WindowTile, out: WindowTile | None = None) -> Posted:
    """The words that tell the other ranks of the node where a tile and `out` lie; both may be `absent_tile`."""
    address = held.tile.__array_interface__["data"][0] if held.tile.flags.c_contiguous else 0
    if held.place == ABSENT:
        address = ABSENT
    if out is None:
        return Posted(held.place, address, 0)
    return Posted(held.place, address, out.place, ABSENT if out.place == ABSENT else 1)


def new_place(team: Team, watch: Watch, layout: Layout, nbytes: int) -> int:
    """The place of `nbytes` bytes on every rank of the node that has a tile of this layout; 0 if it has no room.

    Collective among the ranks of the node. `ABSENT` if none of them has a tile.
    """
    members = members_with_tile(team, layout)
    return team.arena.take(nbytes, partial(team.gather, watch), members) if members else ABSENT


def members_with_tile(team: Team, layout: Layout) -> tuple[int, ...]:
    """The ranks of this node that have a tile of a layout, by their numbers in the node."""
    if layout.mesh.size == team.size:
        return tuple(range(len(team.members)))
    return tuple(n for n, rank in enumerate(team.members) if seat_of(layout.mesh, rank, team.size) is not None)


def new_tile(team: Team, watch: Watch, layout: Layout, dtype: np.dtype[Any]) -> WindowTile:
    """An uninitialized tile for this rank, in the arena if there is room on the node, else in private memory, or an
    `absent_tile`.

    Collective among the ranks of a node.
    """
    place = new_place(team, watch, layout, math.prod(layout.tile_shape) * dtype.itemsize)
    if seat_of(layout.mesh, team.rank, team.size) is None:
        return absent_tile(layout, dtype)._replace(place=place)
    if not place:
        return WindowTile(np.empty(layout.tile_shape, dtype))
    return WindowTile(team.arena.hold(place, layout.tile_shape, dtype), place)
