"""Runs the launches of a call on this rank, one after another, each of one array or many.

All sources are live from the start, and all targets at the end. A launch counts what it makes in the call's account;
tiles of stacks are copied to buffers of the team's pool, and their results are parts of one block of memory.

    TilePlan       a single tile, by the best transport (`transports`)
    Stack          the steps of a plan (`run_plan`)
    Bundle         copies into the results of the node's ranks, messages beyond: one for each peer, of all arrays
    SharedStack    copies of all tiles in memory that the node shares, from which each rank takes its results

Results of bundles lie in windows, where the ranks of a node write to them. A result in private memory (the node is
full, or the caller gave the array) is filled by messages, inside the node as well.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from reshard.lower.to_mpi import FIRST, SECOND, seat_of
from reshard.runtime.account import Account, InBytes
from reshard.runtime.numpy_tiles import numpy_dtype
from reshard.runtime.on_mpi.copies.copy_order import list_tile_copies, widen_block
from reshard.runtime.on_mpi.copies.strided_copy import Array, copy_view, find_word_dtype, pair_views, view_as_words
from reshard.runtime.on_mpi.direct_moves import plan_direct, push_into
from reshard.runtime.on_mpi.indices import clear_padding
from reshard.runtime.on_mpi.launches import Bundle, Hop, Launch, SharedStack, Stack
from reshard.runtime.on_mpi.prepare import TilePlan
from reshard.runtime.on_mpi.run_plan import rank_plan, run_plan
from reshard.runtime.on_mpi.team import Team, Watch
from reshard.runtime.on_mpi.transports import move_tile
from reshard.runtime.on_mpi.window_tiles import WindowTile, absent_tile, members_with_tile, new_place, new_tile
from reshard.runtime.on_mpi.wire.message_exchange import Call, MessageExchange
from reshard.types import Layout


class GivenTiles(NamedTuple):
    """What a rank brings: its tiles, empty where it has none, the arrays for results, and scales of casts, by name."""

    tiles: Mapping[str, WindowTile]
    outs: Mapping[str, WindowTile]
    scales: Mapping[str, Any] = MappingProxyType({})


def run_launches(
    team: Team, watch: Watch, launches: Iterable[Launch | TilePlan], given: GivenTiles, memory: Account | None
) -> dict[str, WindowTile]:
    """The results of all arrays that move, by name; empty where this rank has none.

    All ranks call this inside a `collective`, with the same launches. A single tile has the name "".
    """
    moved: dict[str, WindowTile] = {}
    for launch in launches:
        if isinstance(launch, TilePlan):
            moved[""] = move_tile(team, watch, launch, given.tiles[""], given.outs.get(""), memory)
            continue
        first = launch.stacks[0] if isinstance(launch, Bundle) else launch
        call = Call(team, watch, team.pool, InBytes(first.plan.source.dtype, memory or Account("uint8")), team.rank)
        match launch:
            case SharedStack():
                if take_shared(call, launch, given):
                    moved.update((name, given.outs[name]) for name in launch.names)
                else:
                    moved.update(run_launches(team, watch, launch.alone(), given, memory))
            case Bundle(stacks=stacks):
                held = [_hold_tiles(call, stack, given) for stack in stacks]
                results = _run_bundle(call, launch, held, [_out_of(stack, given) for stack in stacks])
                for stack, tile, result in zip(stacks, held, results, strict=True):
                    _return_buffer(call, stack, tile)
                    moved.update(_split_stack(stack, result, given))
            case Stack():
                moved.update(_split_stack(launch, _run_steps(call, launch, given), given))
    return moved


def _out_of(stack: Stack, given: GivenTiles) -> WindowTile | None:
    """The caller's array for the result of a stack of one; on a rank without a result, what stands for it."""
    return given.outs.get(stack.names[0])


def _hold_tiles(call: Call, stack: Stack, given: GivenTiles) -> Array:
    """The tile of a stack: that of its one array, or a copy of those of all."""
    tiles = [given.tiles[name].tile for name in stack.names]
    if len(tiles) == 1:
        return tiles[0]
    dtype = numpy_dtype(stack.plan.source.dtype)
    if seat_of(stack.plan.source.mesh, call.team.rank, call.team.size) is None:
        return absent_tile(stack.plan.source, dtype).tile
    size = sum(tile.size for tile in tiles)
    call.memory.take(call.device, size)
    made = call.pool.take(size * dtype.itemsize).view(dtype).reshape(len(tiles), *tiles[0].shape)
    np.stack([view_as_words(tile) for tile in tiles], out=view_as_words(made))
    return made


def _return_buffer(call: Call, stack: Stack, held: Array) -> None:
    if len(stack.names) > 1 and held.size:
        call.memory.free(call.device, held.size)
        call.pool.give(held)


def _split_stack(stack: Stack, held: WindowTile, given: GivenTiles) -> dict[str, WindowTile]:
    """The results of a stack's arrays; elements without a name in layouts moved as plain words of their size."""
    result = held.tile
    if len(stack.names) == 1 or not result.size:
        return dict.fromkeys(stack.names, held)
    own = (given.tiles[name].tile.dtype for name in stack.names)
    return {
        name: WindowTile(result[number, ...].view(dtype) if dtype != result.dtype else result[number, ...])
        for number, (name, dtype) in enumerate(zip(stack.names, own, strict=True))
    }


def clear_new(team: Team, layout: Layout, tile: Array) -> None:
    """Sets the padding of this rank's tile to zero, if it has one there."""
    seat = seat_of(layout.mesh, team.rank, team.size)
    if seat is not None and not layout.even:
        clear_padding(layout, seat, tile)


def _run_steps(call: Call, stack: Stack, given: GivenTiles) -> WindowTile:
    """Runs the steps of a stack's plan, message by message."""
    plan, team, held, out = stack.plan, call.team, _hold_tiles(call, stack, given), _out_of(stack, given)
    dtype = held.dtype if plan.source.dtype == plan.target.dtype else numpy_dtype(plan.target.dtype)

    def place() -> WindowTile:
        return new_tile(team, call.watch, plan.target, dtype) if out is None else out

    # What callers gave stays as it is if a rank has failed by then.
    ready = None if out is None else lambda: team.settle(call.watch)
    steps = rank_plan(plan, team.rank, team.size, held.dtype.itemsize)
    result = run_plan(call, steps, held, place, ready, given.scales.get(stack.names[0]))
    if out is None:
        clear_new(team, plan.target, result.tile)
    _return_buffer(call, stack, held)
    return result


def _run_bundle(
    call: Call, bundle: Bundle, tiles: Sequence[Array], outs: Sequence[WindowTile | None]
) -> list[WindowTile]:
    """Moves the tiles of a bundle, hop by hop; returns the results: those of `outs` that are given, else new ones.

    Tiles are C-ordered, empty on ranks that have none.
    """
    team = call.team
    if any(out is not None for out in outs):
        team.settle(call.watch)  # What callers gave stays as it is if a rank has failed by now.
    held = [WindowTile(tile) for tile in tiles]
    count = len(bundle.routes[0])
    for number in range(count):
        hops = [route[number] for route in bundle.routes]
        if number:
            team.gather(call.watch)  # All that the ranks of this node write into each other's tiles is there.
        # A relay's second hop goes on in the tile of its first, which is therefore the caller's.
        last = number == count - 1 or hops[0].form == FIRST
        results = [
            _place_hop(call, hop, tile, out if last else None) for hop, tile, out in zip(hops, held, outs, strict=True)
        ]
        part = bundle.part(number, tuple(result.place == 0 for result in results), team.rank, team.facts)
        before, after = ([view_as_words(each.tile) for each in side] for side in (held, results))
        exchange = MessageExchange(call, part.messages, before, after)
        exchange.start()
        for at in range(len(hops)):
            pushed, move = part.pushes[at], part.moves[at]
            if pushed is None:
                copies: list[Callable[[], object]] = [
                    partial(copy_view, *pair) for pair in pair_views(move.own, after[at], before[at])
                ]
            else:
                call.memory.receive(call.device, move.pulled)
                targets = _node_results(team, hops[at], results[at])
                copies = push_into(pushed, targets)(call, move, before[at], after[at])
            for step in copies:
                step()
                exchange.progress()
        exchange.finish()
        if number and hops[0].form != SECOND:
            for tile in held:
                call.memory.free(call.device, tile.tile.size)
        held = results
    return held


def _place_hop(call: Call, hop: Hop, tile: WindowTile, out: WindowTile | None) -> WindowTile:
    """Where a hop's elements go: the tile itself in the second round of a relay."""
    if hop.form == SECOND:
        return tile
    result = new_tile(call.team, call.watch, hop.target, tile.tile.dtype) if out is None else out
    call.memory.take(call.device, result.tile.size)
    if not hop.fills:
        clear_new(call.team, hop.target, result.tile)
    return result


def _node_results(team: Team, hop: Hop, result: WindowTile) -> dict[int, Array]:
    """The results of the other ranks of this node that have one."""
    shape, dtype, tile = hop.target.tile_shape, result.tile.dtype, team.arena.tile
    others = [n for n in members_with_tile(team, hop.target) if team.members[n] != team.rank]
    return {team.members[n]: tile(n, result.place, shape, dtype) for n in others}


# Equal moves on one node into arrays of the caller: two copies of each tile, and one synchronization for all.
#
#     rank 0     copies its tiles a, b, c to shared memory  |  all have: takes its results out of all ranks' copies
#     rank 1     copies its tiles a, b, c to shared memory  |
#
# The results are written to once no rank can fail any more.


def take_shared(call: Call, stack: SharedStack, given: GivenTiles) -> bool:
    """Moves the tiles of a stack to the caller's arrays; False on all ranks if they cannot share the memory for their
    copies.

    All ranks of the node, which is the only one, call this inside a `collective`.
    """
    team, source, target, names = call.team, stack.one.source, stack.one.target, stack.names
    gives, takes = (seat_of(end.mesh, team.rank, team.size) is not None for end in (source, target))
    itemsize = given.tiles[names[0]].tile.itemsize
    place = new_place(team, call.watch, stack.plan.source, stack.plan.source.tile_bytes)
    if not place:
        return False
    memory, start, part = team.arena.around(place)
    starts = [start + member * part for member in range(team.size)]
    size = math.prod(source.tile_shape)
    if gives:
        call.memory.take(call.device, len(names) * size)
        shape = len(names), *source.tile_shape
        into = np.ndarray(shape, find_word_dtype(itemsize), memory, starts[team.node_sync.me])
        np.stack([view_as_words(given.tiles[name].tile) for name in names], out=into)
    if takes:
        call.memory.take(call.device, len(names) * math.prod(target.tile_shape))
    team.gather(call.watch)  # From here on, only copies are left.
    if takes:
        outs = [given.outs[name].tile for name in names]
        for out in outs:
            clear_new(team, target, out)
        array: Any = np.ndarray  # Looked up once: there are as many small copies as arrays.
        move = plan_direct(source, target, team.rank, team.nodes, itemsize, 0)
        for each in list_tile_copies(((team.rank, move.own), *move.pulls), itemsize, starts):
            (at, to, axes), width = widen_block(each, itemsize)
            dtype, extents = find_word_dtype(width), [axis.extent for axis in axes]
            before, after = [axis.src for axis in axes], [axis.dst for axis in axes]
            for number, out in enumerate(outs):  # Their tiles lie one after another.
                shared = array(extents, dtype, memory, at + number * size * itemsize, before)
                array(extents, dtype, view_as_words(out), to, after)[...] = shared
        call.memory.receive(call.device, len(names) * move.pulled)
    if gives:
        team.arena.release(place)  # Used again once all ranks have posted that.
        call.memory.free(call.device, len(names) * size)
    return True
