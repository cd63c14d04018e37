"""New tiles in the memory of a node, once all ranks agree on what they are.

An array that holds one value, or none yet, takes one synchronization, since no rank waits for another after that. All
ranks keep what they have agreed on, so the next such array takes no more than that and a few lines of code:

    call 1    general: `collective`      the request is written out and hashed
    call 2    `agree_again`              the digest of call 1; general again if some rank defers

A rank may lack memory for its tile. That cannot happen where the node has a place for it at hand; otherwise the ranks
also meet at the end of the call, so that all raise in it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from reshard.lower.to_mpi import seat_of
from reshard.mpi.tiles import check_layout
from reshard.runtime.account import Account
from reshard.runtime.on_mpi.collective import collective
from reshard.runtime.on_mpi.indices import clear_padding
from reshard.runtime.on_mpi.prepare import check_seats
from reshard.runtime.on_mpi.repeated import agree_again, agreed_before, keep_agreed
from reshard.runtime.on_mpi.team import Comm, Team, Watch
from reshard.runtime.on_mpi.window_tiles import WindowTile, has_place, new_tile
from reshard.runtime.on_mpi.wire.exchange import Call
from reshard.types import Layout

Array = NDArray[Any]
Element = Callable[[], np.dtype[Any]]
"""Checks the arguments; returns the dtype of the elements."""


def new_held(
    layout: Layout,
    comm: Comm,
    limit: float,
    what: Callable[[], str],
    dtype_of: Element,
    fill: Callable[[Call, Array], None],
    *,
    clear: bool = False,
    alone: bool = False,
) -> WindowTile:
    """A new tile, once all ranks agree on `what`, which is asked for when arguments are checked; `fill` writes it.

    All ranks call `fill`: those without a tile with one that has no elements. With `clear`, padding is set to zero.
    `alone` says that `fill` waits for no rank and cannot fail; if there is memory for the tile, the call ends without a
    wait.
    """

    def prepare(team: Team) -> np.dtype[Any]:
        check_seats(check_layout(layout, "layout"), layout, team.size)
        return dtype_of()

    def request(_: np.dtype[Any]) -> str:
        return _request(what(), layout)

    def has_memory(team: Team, dtype: np.dtype[Any]) -> bool:
        return has_place(team, layout, math.prod(layout.tile_shape) * dtype.itemsize)

    ends_alone = has_memory if alone else None
    with collective(comm, limit, prepare, request, alone=ends_alone) as (team, watch, dtype):
        held = new_tile(team, watch, layout, dtype)
        fill(Call(team, watch, team.pool, Account(layout.dtype), 0), held.tile)
        seat = seat_of(layout.mesh, team.rank, team.size)
        if clear and seat is not None:
            clear_padding(layout, seat, held.tile)
        if alone:
            keep_agreed(team, (what(), layout), _request(what(), layout), dtype)
    return held


def new_filled(
    layout: Layout, comm: Comm, limit: float, what: str, dtype_of: Element, fill: Callable[[Array], None]
) -> WindowTile:
    """A new tile that each rank fills by itself, which cannot fail."""

    def general() -> WindowTile:
        return new_held(layout, comm, limit, lambda: what, dtype_of, lambda _, tile: fill(tile), alone=True)

    agreed = agreed_before(comm, (what, layout)) if type(layout) is Layout else None
    if agreed is None:
        return general()

    def made(team: Team, watch: Watch) -> WindowTile:
        held = new_tile(team, watch, layout, agreed.value)
        fill(held.tile)
        if not held.place:  # In private memory, of which another rank may not have enough.
            team.settle(watch)
        return held

    return agree_again(agreed, dtype_of, limit, made, general)


def _request(what: str, layout: Layout) -> str:
    return f"{what} {layout} on {layout.mesh!r}"
