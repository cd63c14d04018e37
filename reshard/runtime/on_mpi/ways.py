"""The ways in which elements get from the source's tiles to the target's, one function each.

    way         tiles of this node                      inside a node                               copies
    pull        in shared windows                       each rank reads what it needs               1
    push        results in windows                      each rank writes what it has                1
    read        private, long runs                      as pull, through the kernel (CMA)           1
    pack        private, target not replicated          what leaves is packed into a window         2
    stage       private                                 whole tiles are copied into a window        2
    plan        anything: reductions, tight budgets     the plan's steps, message by message        1 to 3 a step
    overwrite   donated, the tightest budgets           the plan's one step, inside the tile        permuted in place

`prepare` selects pull, read, stage, plan or overwrite from the request alone, the same on all ranks. When the call
runs, `chosen_way` refines that by what the ranks of the node have posted: tiles that turn out to lie in windows, as
results of earlier calls do, are pulled, whatever was selected; results that will lie in windows are pushed to if the
tiles are private, or if that runs along longer stretches of memory; and staging packs if it can. All ranks of a
node see the same posts and so agree. Between nodes, all ways but the last two send each piece in one message.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import NamedTuple, cast

from reshard.lower.to_mpi import Overwrite, unreplicated
from reshard.runtime.on_mpi.direct import (
    Direct,
    Fill,
    move_directly,
    node_packing,
    pack,
    pulling,
    pushes,
    pushing,
    unpacking,
)
from reshard.runtime.on_mpi.node.cma_read import cma_read
from reshard.runtime.on_mpi.node.node_sync import WORDS
from reshard.runtime.on_mpi.node.windows import Window
from reshard.runtime.on_mpi.prepare import MoveRequest, Prepared, Way
from reshard.runtime.on_mpi.run_plan import run_plan
from reshard.runtime.on_mpi.strided_copy import Array, copy, raw
from reshard.runtime.on_mpi.window_tiles import Posted, WindowTile, new_tile, released_windows
from reshard.runtime.on_mpi.wire.exchange import Call
from reshard.runtime.on_mpi.wire.overwrite import overwrite


class TileTransfer(NamedTuple):
    """One rank's move, agreed by all: its tile, `out` if the caller gave one, and what its node's ranks posted."""

    call: Call
    ready: Prepared
    request: MoveRequest
    held: WindowTile
    out: WindowTile | None
    posted: Mapping[int, Posted]

    @property
    def others(self) -> list[int]:
        """The other ranks of this node."""
        return [rank for rank in self.call.team.members if rank != self.call.team.rank]

    def place(self) -> WindowTile:
        """The result's memory: `out`, or a new tile, which all ranks of the node allocate together."""
        if self.out is not None:
            return self.out
        return new_tile(self.call.team, self.request.target, self.held.tile.dtype)

    def placed(self) -> WindowTile:
        """The same, counted in the account."""
        result = self.place()
        self.call.memory.take(self.call.device, result.tile.size)
        return result

    def settle(self) -> None:
        """Waits until no rank can fail any more before the result is written to."""
        self.call.team.settle(self.call.watch)

    def filled(self, result: WindowTile, fill: Fill) -> WindowTile:
        """Fills the result by `fill` inside the node and by messages between nodes."""
        # On a single node only copies are left by now, so there is no failure to wait for.
        ready = self.settle if self.request.careful and not self.call.team.one_node else None
        move_directly(self.call, cast(Direct, self.ready.direct), fill, self.held.tile, result.tile, ready)
        return result


def chosen_way(transfer: TileTransfer) -> Way:
    """The way to go, given what the ranks of the node posted; the same on all of them."""
    team, ready = transfer.call.team, transfer.ready
    selected = ready.way if team.plain or ready.way != "read" else ready.otherwise
    if selected == "overwrite" or ready.direct is None:
        return selected
    shared = all(posted.slot for posted in transfer.posted.values())
    push = (ready.push or not shared) and _results_in_windows(transfer)
    if selected == "plan" and not ((shared or push) and team.one_node):
        return "plan"
    if len(team.members) == 1:
        return "pull"
    if push:
        return "push"
    return "pull" if shared else _way_of_private_tiles(transfer, selected)


def _way_of_private_tiles(transfer: TileTransfer, selected: Way) -> Way:
    """Read if that was selected, else pack if the packed elements and their starts fit, else stage whole tiles."""
    if selected == "read":
        return "read"
    fits = len(transfer.call.team.members) <= WORDS and unreplicated(transfer.request.target)
    return "pack" if fits else "stage"


def _results_in_windows(transfer: TileTransfer) -> bool:
    """Whether the results of all ranks of the node lie in shared windows, or will."""
    if transfer.request.into:
        return all(posted.out_slot for posted in transfer.posted.values())
    nbytes = math.prod(transfer.request.target.tile_shape) * transfer.held.tile.itemsize
    return nbytes <= transfer.call.team.facts.room


def _pull(transfer: TileTransfer) -> WindowTile:
    """Copies what this rank needs out of the tiles of its node, all of them in windows."""
    result = transfer.placed()
    slots = {rank: transfer.posted[rank].slot - 1 for rank in transfer.others}
    return transfer.filled(result, pulling(_tiles(transfer, slots, transfer.held.tile)))


def _push(transfer: TileTransfer) -> WindowTile:
    """Writes what this rank has into the results of its node, all of them in windows."""
    result, request, team = transfer.placed(), transfer.request, transfer.call.team
    if transfer.out is None:
        slots = dict.fromkeys(transfer.others, cast(Window, result.window).slot)
    else:
        slots = {rank: transfer.posted[rank].out_slot - 1 for rank in transfer.others}
    mine = pushes(request.source, request.target, team.rank, team.facts.nodes, result.tile.itemsize)
    return transfer.filled(result, pushing(mine, _tiles(transfer, slots, result.tile)))


def _read(transfer: TileTransfer) -> WindowTile:
    """Reads what this rank needs from the private memory of its node's ranks, through the kernel."""
    result = transfer.placed()
    addresses = {rank: transfer.posted[rank].address for rank in transfer.others}
    return transfer.filled(result, cma_read(addresses, transfer.held.tile.shape, transfer.ready.buffered))


def _stage(transfer: TileTransfer) -> WindowTile:
    """Copies every tile of the node into one window, from which each rank pulls."""
    result, call, tile = transfer.placed(), transfer.call, transfer.held.tile
    window = _staging_window(transfer)
    copy(raw(window.tile(call.team.node_sync.me, tile.shape, tile.dtype)), raw(tile))
    call.team.gather(call.watch)
    slots = dict.fromkeys(call.team.members, window.slot)
    transfer.filled(result, pulling(_tiles(transfer, slots, tile)))
    _release(transfer, window)
    return result


def _pack(transfer: TileTransfer) -> WindowTile:
    """Packs what leaves this tile into one window, receiver by receiver, from which each rank unpacks its part.

    The target is not replicated, so no element is packed twice, and a window of the tile's size is large enough.
    """
    result, call, request, tile = transfer.placed(), transfer.call, transfer.request, raw(transfer.held.tile)
    team, me = call.team, call.team.node_sync.me
    packing = node_packing(request.source, request.target, team.rank, team.facts.nodes, tile.itemsize)
    window = _staging_window(transfer)
    pack(packing, tile, window.tile(me, (tile.size,), tile.dtype))
    starts = team.gather(call.watch, [packing.starts.get(rank, 0) for rank in team.members])
    member = {rank: number for number, rank in enumerate(team.members)}
    packed = {
        rank: window.tile(member[rank], (tile.size,), tile.dtype)[starts[member[rank]][me] :]
        for rank, _ in cast(Direct, transfer.ready.direct).pulls
    }
    transfer.filled(result, unpacking(packed))
    _release(transfer, window)
    return result


def _run_plan(transfer: TileTransfer) -> WindowTile:
    """Runs the plan's steps; the result is allocated for the last of them."""
    ready = transfer.settle if transfer.request.careful else None
    return run_plan(transfer.call, transfer.ready.steps, transfer.held.tile, transfer.place, ready)


def _overwrite(transfer: TileTransfer) -> WindowTile:
    """Runs the plan's one exchange inside the donated tile."""
    steps, shape = transfer.ready.steps, transfer.request.target.tile_shape
    step = cast(Overwrite, steps.steps[0])
    result = overwrite(transfer.call, step, steps.ranks, transfer.held.tile, shape)
    return WindowTile(result, transfer.held.window)


WAYS: dict[Way, Callable[[TileTransfer], WindowTile]] = {
    "pull": _pull,
    "push": _push,
    "read": _read,
    "stage": _stage,
    "pack": _pack,
    "plan": _run_plan,
    "overwrite": _overwrite,
}


def _tiles(transfer: TileTransfer, slots: Mapping[int, int], like: Array) -> dict[int, Array]:
    """The tiles of other ranks in these window slots, of this array's shape and dtype."""
    team = transfer.call.team
    member = {rank: number for number, rank in enumerate(team.members)}
    return {rank: team.windows[slot].tile(member[rank], like.shape, like.dtype) for rank, slot in slots.items()}


def _staging_window(transfer: TileTransfer) -> Window:
    """A window with room for the tile of every rank of the node."""
    team, tile = transfer.call.team, transfer.held.tile
    window = team.windows.take(tile.nbytes, released_windows(team))
    transfer.call.memory.take(transfer.call.device, tile.size)
    return window


def _release(transfer: TileTransfer, window: Window) -> None:
    """Gives up a staging window. Peers may still be reading it: it is used again once all have posted its release."""
    transfer.call.team.windows.release(window)
    transfer.call.memory.free(transfer.call.device, transfer.held.tile.size)
