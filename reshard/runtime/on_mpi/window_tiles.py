"""Tiles in shared windows: where a rank's tile lies, and how it tells the other ranks of its node.

A tile in a window can be read and written by every rank of the node; a tile in private memory only by its own rank,
or through the kernel at its address (`node.cma`). Every rank therefore posts a `Posted` when a call is agreed.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from reshard.runtime.on_mpi.node.windows import Window
from reshard.runtime.on_mpi.strided_copy import Array
from reshard.runtime.on_mpi.team import Team
from reshard.types import Layout


class WindowTile(NamedTuple):
    """A tile, and the window at whose start it lies; None for a tile in private memory."""

    tile: Array
    window: Window | None = None


class Posted(NamedTuple):
    """Where one rank's tile and its `out` lie, as three words that the ranks of its node can read.

    Window slots count from 1; 0 stands for private memory. `address` is 0 unless the tile is C-ordered.
    """

    slot: int
    address: int
    out_slot: int


NOWHERE = Posted(0, 0, 0)
"""What a rank posts that has no tile, or cannot go on."""


def where(held: WindowTile, out: WindowTile | None = None) -> Posted:
    """The words that tell the other ranks of the node where a tile and `out` lie."""
    address = held.tile.__array_interface__["data"][0] if held.tile.flags.c_contiguous else 0
    slots = [0 if at is None or at.window is None else at.window.slot + 1 for at in (held, out)]
    return Posted(slots[0], address, slots[1])


def posted_by_rank(team: Team) -> dict[int, Posted]:
    """What each rank of this node posted at the last agreement, this rank included."""
    return {rank: Posted(*words[: len(NOWHERE)]) for rank, words in zip(team.members, team.posted(), strict=True)}


def released_windows(team: Team) -> list[list[int]]:
    """The words that say which windows each member of the node no longer uses, see `Windows.words`."""
    return [words[len(NOWHERE) :] for words in team.posted()]


def new_tile(team: Team, layout: Layout, dtype: np.dtype[Any]) -> WindowTile:
    """An uninitialized tile for this rank, in a shared window if there is room for one.

    Collective among the ranks of a node, and once per agreement.
    """
    nbytes = int(np.prod(layout.tile_shape)) * dtype.itemsize
    if nbytes > team.facts.room:
        return WindowTile(np.empty(layout.tile_shape, dtype))
    window = team.windows.take(nbytes, released_windows(team))
    return WindowTile(team.windows.hold(window, layout.tile_shape, dtype), window)
