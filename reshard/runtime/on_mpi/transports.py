"""The transports: how elements get from the source's tiles to the target's.

    transport         tiles of this node                      inside a node                               copies
    node-aggregated   anything; joins messages between nodes  what leaves is packed into a window         2
    pull              in windows: shared memory               each rank reads what it needs               1
    push              results in windows                      each rank writes what it has                1
    read              private, long runs                      as pull, through the kernel (CMA)           1
    pack              private, target not replicated          what leaves is packed into a window         2
    stage             private                                 whole tiles are copied into a window        2
    messages          private, one of several nodes, full     messages, as between nodes                  2
    plan              anything: reductions, tight budgets     the plan's steps, message by message        1 to 3 a step
    overwrite         donated, the tightest budgets           the plan's one step, inside the tile        in place

Many small messages between nodes are aggregated if `prepare` finds that faster and all nodes have memory for it.
Otherwise `prepare` selects pull, read, stage, plan or overwrite from the request alone, the same on all ranks. When
the call runs, `choose_transport` refines that by what the ranks of the node have posted: tiles that lie in windows, as
results of earlier calls do, are pulled, whatever was selected; results that will lie in windows are pushed to if the
tiles are private, or if that runs along longer stretches of memory; and staging packs if it can. If the node has no
room for windows, results are private, and staging gives way to messages: the plan's, or those of direct moves where
other nodes are involved. All ranks of a node see the same posts and the same room, and so agree. Between nodes, all
but the last two send each piece in one message.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import cast

import numpy as np

from reshard.lower.to_mpi import Overwrite, is_unreplicated, seat_of
from reshard.runtime.account import Account, begin_account
from reshard.runtime.on_mpi.copies.strided_copy import Array, copy_view, view_as_words
from reshard.runtime.on_mpi.direct_moves import (
    Direct,
    Fill,
    list_pushes,
    move_directly,
    node_packing,
    pack_for_node,
    plan_direct,
    pull_from,
    push_into,
    read_remote_tiles,
    unpack_from,
)
from reshard.runtime.on_mpi.global_array import clear_padding
from reshard.runtime.on_mpi.node.node_sync import WORDS
from reshard.runtime.on_mpi.prepare import Request, TilePlan, Transport, prepare_tile
from reshard.runtime.on_mpi.run_plan import overwrite_tile, run_plan
from reshard.runtime.on_mpi.team import Team, Watch
from reshard.runtime.on_mpi.window_tiles import (
    ABSENT,
    NOWHERE,
    Posted,
    WindowTile,
    members_with_tile,
    new_place,
    new_tile,
)
from reshard.runtime.on_mpi.wire.by_node import Allotment, JoinedPart, allot_stripes, exchange_aggregated
from reshard.runtime.on_mpi.wire.message_exchange import Call
from reshard.types import Layout


@dataclass
class TileTransfer:
    """One rank's part of a move that all ranks have agreed on: its tile, `out` if the caller gave one, and what its
    node's ranks posted.
    """

    call: Call
    ready: TilePlan
    request: Request
    held: WindowTile
    out: WindowTile | None
    posted: Mapping[int, Posted]
    staging: int = 0
    allotment: Allotment | None = None

    def place(self) -> WindowTile:
        """The result's memory: `out`, or a new tile, which all ranks of the node allocate together."""
        if self.out is None:
            self.out = new_tile(self.call.team, self.call.watch, self.request.target, self.held.tile.dtype)
        return self.out

    def placed(self) -> WindowTile:
        """The same, counted in the account."""
        result = self.place()
        self.call.memory.take(self.call.device, result.tile.size)
        return result

    def tiles_at(self, layout: Layout, place: Callable[[int], int]) -> dict[int, Array]:
        """By rank, the tiles of a layout that ranks of the node have at these places; those in private memory are left
        out.
        """
        team, dtype, shape = self.call.team, self.held.tile.dtype, layout.tile_shape
        ranks = [(number, team.members[number]) for number in members_with_tile(team, layout)]
        return {rank: team.arena.tile(number, at, shape, dtype) for number, rank in ranks if (at := place(rank))}

    def settle(self) -> None:
        """Waits until no rank can fail any more before the result is written to."""
        self.call.team.settle(self.call.watch)

    def filled(self, result: WindowTile, fill: Fill, mine: Direct | None = None) -> WindowTile:
        """Fills the result by `fill` inside the node and by messages between nodes, or as another direct move says."""
        # On a single node only copies are left by now, so there is no failure to wait for.
        ready = self.settle if self.request.careful and not self.call.team.one_node else None
        mine = mine or cast(Direct, self.ready.direct)
        move_directly(self.call, mine, fill, self.held.tile, result.tile, ready)
        return result


def choose_transport(transfer: TileTransfer) -> Transport:
    """The transport to take, given what the ranks of the node posted and whether it has room; the same on all of them.

    Allocates what it needs to share. Messages between nodes are the same for all transports inside a node.
    """
    team, ready, request = transfer.call.team, transfer.ready, transfer.request
    selected = ready.transport if team.plain or ready.transport != "read" else ready.otherwise
    if ready.by_node is not None and ready.joined is not None:
        transfer.allotment = allot_stripes(transfer.call, ready.by_node, ready.itemsize, *ready.joined)
        if transfer.allotment is not None:
            return "node-aggregated"
    if selected == "overwrite" or ready.moves is None or (selected == "plan" and not team.one_node):
        return selected
    shared = all(posted.place for posted in transfer.posted.values())
    # Where more ranks take than give, more of them copy at once when they read.
    pulls = shared or (selected == "read" and ready.crowded < 0)
    if not ready.push and pulls:
        push = False
    elif request.into:
        push = all(posted.out_place for posted in transfer.posted.values())
    else:
        push = transfer.place().place != 0  # The node has room for the results of all its ranks.
    if selected == "plan" and not (shared or push):
        return "plan"
    if len(team.members) == 1:
        return "pull"
    if push or shared:
        return "push" if push else "pull"
    if selected == "read":
        return "read"
    nbytes = math.prod(request.source.tile_shape) * transfer.held.tile.itemsize
    transfer.staging = new_place(team, transfer.call.watch, request.source, nbytes) if nbytes else 0
    if not transfer.staging:  # Another node may have room, so its ranks send and receive as they would with it.
        return "plan" if team.one_node else "messages"
    # The starts of what is packed are posted as words, one for each rank of the node; and what goes to several ranks
    # would be packed for each.
    fits = len(team.members) <= WORDS and is_unreplicated(request.target)
    return "pack" if fits else "stage"


def run_transport(transfer: TileTransfer, transport: Transport) -> WindowTile:
    """Moves the elements; returns the result."""
    call, ready, request, held = transfer.call, transfer.ready, transfer.request, transfer.held
    team, itemsize = call.team, held.tile.itemsize
    settle = transfer.settle if request.careful else None
    match transport:
        case "node-aggregated":
            result, allotment = transfer.placed(), cast(Allotment, transfer.allotment)
            ends = view_as_words(held.tile), view_as_words(result.tile)
            exchange_aggregated(call, cast(JoinedPart, ready.by_node), allotment, *ends, settle)
            return result
        case "pull":
            result, posted = transfer.placed(), transfer.posted
            return transfer.filled(
                result, pull_from(transfer.tiles_at(request.source, lambda rank: posted[rank].place))
            )
        case "push":
            result, posted = transfer.placed(), transfer.posted
            # New results have one place on all ranks of the node; what callers gave lies anywhere.
            place = result.place
            targets = transfer.tiles_at(request.target, lambda rank: posted[rank].out_place if request.into else place)
            pushes = list_pushes(request.source, request.target, team.rank, team.facts.nodes, itemsize)
            return transfer.filled(result, push_into(pushes, targets))
        case "read":
            addresses = {rank: posted.address for rank, posted in transfer.posted.items()}
            return transfer.filled(transfer.placed(), read_remote_tiles(addresses, ready.buffered))
        case "stage" | "pack":
            return _move_by_staging(transfer, transport == "pack")
        case "messages":
            # What other nodes send and receive stays the same, so its messages are cut as theirs are.
            mine = cast(Direct, ready.direct).messages
            ends, staging = (request.source, request.target), mine.staging * itemsize
            alone = plan_direct(*ends, team.rank, team.facts.nodes, itemsize, staging, mine.held, apart=True)
            return transfer.filled(transfer.placed(), pull_from({}), alone)
        case "plan":
            return run_plan(call, ready.steps, held.tile, transfer.place, settle)
        case "overwrite":
            step = cast(Overwrite, ready.steps.steps[0].run)
            tile = overwrite_tile(call, step, ready.steps.ranks, held.tile, request.target.tile_shape)
            return WindowTile(tile, held.place)


def _move_by_staging(transfer: TileTransfer, packs: bool) -> WindowTile:
    """Copies every tile of the node into its arena, from which each rank pulls; or packs what leaves it there, receiver
    by receiver, from which each rank unpacks its part.

    It packs where the target is not replicated: no element is packed twice, and memory of the tile's size is enough.
    """
    result, call, request, tile = transfer.placed(), transfer.call, transfer.request, view_as_words(transfer.held.tile)
    team, source = call.team, request.source
    size = math.prod(source.tile_shape) if tile.size else 0
    call.memory.take(call.device, size)
    staged = transfer.tiles_at(source, lambda _: transfer.staging)
    mine = view_as_words(staged[team.rank]) if team.rank in staged else None
    if packs:
        packing = node_packing(source, request.target, team.rank, team.facts.nodes, tile.itemsize)
        if mine is not None:
            pack_for_node(packing, tile, mine.reshape(-1))
        starts = team.gather(call.watch, [packing.starts.get(rank, 0) for rank in team.members])
        begins = {rank: starts[number][team.node_sync.me] for number, rank in enumerate(team.members)}
        packed = {rank: each.reshape(-1)[begins[rank] :] for rank, each in staged.items()}
        fill = unpack_from(packed)
    else:
        if mine is not None:
            copy_view(mine, tile)
        team.gather(call.watch)
        fill = pull_from(staged)
    transfer.filled(result, fill)
    if mine is not None:
        team.arena.release(transfer.staging)  # Peers may still be reading it: used again once all have posted that.
    call.memory.free(call.device, size)
    return result


def transport_tile(
    team: Team, watch: Watch, ready: TilePlan, held: WindowTile, out: WindowTile | None, memory: Account | None
) -> WindowTile:
    """The target's tile: `out` if given, else a new tile, or the memory of a donated one.

    If there is nothing to move, it is the source's tile itself. All ranks call this inside a `collective`: results
    are complete when that has ended.
    """
    outside = out is not None and out.place == ABSENT
    if outside and not team.into:
        out = None
    request = ready.request
    # Some node had no room, or this rank, which has no result, did not know of the others' `out`.
    shared, into = request.shared and team.shared, team.into if outside else request.into
    if (shared, into) != (request.shared, request.into):
        request = request._replace(shared=shared, into=into)
        ready = prepare_tile(team, request, held.tile)
    call = Call(team, watch, team.pool, begin_account(request.source.dtype, memory), ready.device)
    call.memory.take(call.device, held.tile.size)
    team.pool.limit(ready.spare)
    if ready.stays:
        # The tile itself if it is C-ordered, else a copy of its own: the ranks do nothing together, since only some of
        # their tiles may need one.
        if out is None and held.tile.flags.c_contiguous:
            return held
        result = WindowTile(np.empty(held.tile.shape, held.tile.dtype)) if out is None else out
        call.memory.take(call.device, result.tile.size)
        copy_view(view_as_words(result.tile), view_as_words(held.tile))
        return result
    # What each rank of this node posted at the last agreement, this rank included.
    posted = {at: Posted(*words[: len(NOWHERE)]) for at, words in zip(team.members, team.posted(), strict=True)}
    transfer = TileTransfer(call, ready, request, held, out, posted)
    transport = choose_transport(transfer)
    result = run_transport(transfer, transport)
    if out is None and transport != "overwrite" and not request.target.even:
        seat = seat_of(request.target.mesh, team.rank, team.size)
        if seat is not None:
            clear_padding(request.target, seat, result.tile)
    return result
