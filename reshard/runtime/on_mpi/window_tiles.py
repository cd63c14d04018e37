"""Tiles that ranks of a node share: where a rank's tile lies, and how it tells the other ranks of its node.

A tile in the node's arena can be read and written by every rank of the node; a tile in private memory only by its own
rank, or through the kernel at its address (`node.cma`). Every rank therefore posts a `Posted` when a call is agreed.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from reshard.runtime.on_mpi.strided_copy import Array
from reshard.runtime.on_mpi.team import Team, Watch
from reshard.types import Layout


class WindowTile(NamedTuple):
    """A tile, and its place in the arena of its rank's node; 0 for a tile in private memory."""

    tile: Array
    place: int = 0


class Posted(NamedTuple):
    """Where one rank's tile and its `out` lie, as three words that the ranks of its node can read.

    Places are those of `WindowTile`. `address` is 0 unless the tile is C-ordered.
    """

    place: int
    address: int
    out_place: int


NOWHERE = Posted(0, 0, 0)
"""What a rank posts that has no tile, or cannot go on."""


def located(team: Team, tile: Array) -> WindowTile:
    """A tile with its place in the team's arena, if it lies there: that of an earlier team of the communicator, or a
    view that is not C-ordered, is private memory.
    """
    return WindowTile(tile, team.arena.place_of(tile))


def where(held: WindowTile, out: WindowTile | None = None) -> Posted:
    """The words that tell the other ranks of the node where a tile and `out` lie."""
    address = held.tile.__array_interface__["data"][0] if held.tile.flags.c_contiguous else 0
    return Posted(held.place, address, 0 if out is None else out.place)


def posted_by_rank(team: Team) -> dict[int, Posted]:
    """What each rank of this node posted at the last agreement, this rank included."""
    return {rank: Posted(*words[: len(NOWHERE)]) for rank, words in zip(team.members, team.posted(), strict=True)}


def new_place(team: Team, watch: Watch, nbytes: int) -> int:
    """The place of so many bytes on every rank of the node; 0 if it has no room. Collective among these ranks."""
    return team.arena.take(nbytes, partial(team.gather, watch))


def new_tile(team: Team, watch: Watch, layout: Layout, dtype: np.dtype[Any]) -> WindowTile:
    """An uninitialized tile for this rank, in the arena if there is room on the node, else in private memory.

    Collective among the ranks of a node.
    """
    place = new_place(team, watch, math.prod(layout.tile_shape) * dtype.itemsize)
    if not place:
        return WindowTile(np.empty(layout.tile_shape, dtype))
    return WindowTile(team.arena.hold(place, layout.tile_shape, dtype), place)
