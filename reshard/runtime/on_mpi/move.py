"""One move of one array: the part of a call that follows the agreement. See the map in `reshard.runtime.on_mpi`."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from reshard.lower.to_mpi import seat_of
from reshard.runtime.account import Account, begin_account
from reshard.runtime.on_mpi.indices import clear_padding
from reshard.runtime.on_mpi.prepare import MoveRequest, Prepared, prepared
from reshard.runtime.on_mpi.strided_copy import copy, raw
from reshard.runtime.on_mpi.team import Team, Watch
from reshard.runtime.on_mpi.ways import WAYS, TileTransfer, chosen_way
from reshard.runtime.on_mpi.window_tiles import ABSENT, WindowTile, posted_by_rank
from reshard.runtime.on_mpi.wire.exchange import Call


def move(
    team: Team,
    watch: Watch,
    ready: Prepared,
    request: MoveRequest,
    held: WindowTile,
    out: WindowTile | None,
    memory: Account | None,
) -> WindowTile:
    """The target's tile: `out` if given, else a new tile, or the memory of a donated one.

    If there is nothing to move, it is the source's tile itself. All ranks call this inside a `collective`: results
    are complete when that has ended.
    """
    outside = out is not None and out.place == ABSENT
    if outside and not team.into:
        out = None
    # Some node had no room, or this rank, which has no result, did not know of the others' `out`.
    agreed = replace(request, shared=request.shared and team.shared, into=team.into if outside else request.into)
    if agreed != request:
        request, ready = agreed, prepared(team, agreed, held.tile)
    call = Call(team, watch, team.pool, begin_account(request.source.dtype, memory), ready.device)
    call.memory.take(call.device, held.tile.size)
    team.pool.limit(ready.spare)
    if ready.stays:
        return _unmoved(call, held, out)
    transfer = TileTransfer(call, ready, request, held, out, posted_by_rank(team))
    way = chosen_way(transfer)
    result = WAYS[way](transfer)
    if out is None and way != "overwrite" and not request.target.even:
        seat = seat_of(request.target.mesh, team.rank, team.size)
        if seat is not None:
            clear_padding(request.target, seat, result.tile)
    return result


def _unmoved(call: Call, held: WindowTile, out: WindowTile | None) -> WindowTile:
    """The tile itself if it is C-ordered, else a copy of its own: the ranks do nothing together, since only some of
    their tiles may need one.
    """
    if out is None and held.tile.flags.c_contiguous:
        return held
    result = WindowTile(np.empty(held.tile.shape, held.tile.dtype)) if out is None else out
    call.memory.take(call.device, result.tile.size)
    copy(raw(result.tile), raw(held.tile))
    return result
