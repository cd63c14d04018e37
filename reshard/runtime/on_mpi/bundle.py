"""Several arrays moved as one: each straight to its result, and what goes to one peer in one message.

    arrays a, b, c, from ranks 0-1 to ranks 2-3        rank 0 writes into the windows of ranks of its node: no message
                                                       and sends one message to each other rank, with parts of a, b, c

A *hop* takes one array from the tiles of one layout to those of another. Most arrays need one hop: whoever lacks
elements asks those who have them. Between nodes, a plan whose devices pass elements on has a hop for each step, and two
for a relay; then no rank sends more than the plan says. All arrays of a bundle have equally many hops, and take each of
them together.

Results lie in windows, where the ranks of a node write to them. A result in private memory (the node is full, or the
caller gave the array) is filled by messages, inside the node as well.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from reshard.lower.to_mpi import FIRST, SECOND, Form, seat_of
from reshard.plans.plan import Plan
from reshard.plans.rules.cost import PLAIN
from reshard.runtime.on_mpi.copies.strided_copy import Array, copy, raw
from reshard.runtime.on_mpi.direct import Direct, Pushes, direct, passes_on, pushes, pushing
from reshard.runtime.on_mpi.indices import clear_padding
from reshard.runtime.on_mpi.team import Facts, Team
from reshard.runtime.on_mpi.window_tiles import WindowTile, holders, new_tile
from reshard.runtime.on_mpi.wire.exchange import Call, MessageExchange
from reshard.runtime.on_mpi.wire.messages import JointMessages, joint
from reshard.types import Layout
from reshard.types.view import View

_STRAIGHT = ("slice", "all_gather", "all_to_all", "permute", "exchange")
"""The steps that move elements and change nothing else."""


@dataclass(frozen=True)
class Hop:
    """One array's move between the tiles of two layouts; `form` as in `direct`. It `fills` part of an array if so."""

    source: Layout
    target: Layout
    form: Form | None = None
    fills: bool = False


Hops = tuple[Hop, ...]


def hops_of(plan: Plan, several: bool) -> Hops | None:
    """The hops of a plan, on several nodes or one; None if its steps must be run: for sums, casts and tight budgets.

    >>> import reshard as rs
    >>> one, four = rs.Layout.parse("f32[12]", rs.Mesh(x=1)), rs.Layout.parse("f32[12]", rs.Mesh(d=5))
    >>> [[hop.form for hop in hops_of(rs.plan(one, four), several)] for several in (False, True)]
    [[None], [1, 2]]
    """
    source, target, view = plan.source, plan.target, _view(plan)
    summed = bool(source.partial or target.partial) if plan.crosses or view else not source.partial_as(target)
    if summed or source.dtype != target.dtype:
        return None
    if not (several and passes_on(plan)):
        return (Hop(source, target, view, view is not None and view.into),)
    hops: list[Hop] = []
    for step in plan.steps:
        if step.mode.relay and step.mode.chunk is None:
            hops += (Hop(step.operand, step.result, turn) for turn in (FIRST, SECOND))
        elif step.mode == PLAIN and step.kind in _STRAIGHT:
            hops.append(Hop(step.operand, step.result))
        else:
            return None
    return tuple(hops)


def _view(plan: Plan) -> View | None:
    return None if plan.view is None or plan.view.plain else plan.view


@dataclass(frozen=True, eq=False)
class Bundle:
    """Arrays of one dtype that move together: the hops of each, and the bytes that messages may stage each way."""

    routes: tuple[Hops, ...]
    itemsize: int
    staging: int
    _parts: dict[tuple[int, tuple[bool, ...], int], _Part] = field(default_factory=dict[Any, Any])

    def part(self, number: int, apart: tuple[bool, ...], rank: int, facts: Facts) -> _Part:
        """A rank's part of one hop of all arrays; `apart` are those that are filled by messages alone."""
        key = number, apart, rank
        if key not in self._parts:
            hops = [route[number] for route in self.routes]
            self._parts[key] = _part(hops, apart, rank, facts.nodes, self.itemsize, self.staging)
        return self._parts[key]


@dataclass(frozen=True, eq=False)
class _Part:
    """A rank's part of one hop of all arrays: its copies and messages, and what it writes into others' results."""

    moves: tuple[Direct, ...]
    pushes: tuple[Pushes | None, ...]
    messages: JointMessages


def _part(
    hops: Sequence[Hop], apart: Sequence[bool], rank: int, nodes: tuple[int, ...], itemsize: int, staging: int
) -> _Part:
    moves = tuple(
        direct(hop.source, hop.target, rank, nodes, itemsize, staging, apart=alone, form=hop.form)
        for hop, alone in zip(hops, apart, strict=True)
    )
    pushed = tuple(
        None if alone else pushes(hop.source, hop.target, rank, nodes, itemsize, hop.form)
        for hop, alone in zip(hops, apart, strict=True)
    )
    together = joint([move.messages for move in moves], staging // itemsize, itemsize, rank, len(nodes))
    return _Part(moves, pushed, together)


def move_bundle(
    call: Call, bundle: Bundle, tiles: Sequence[Array], outs: Sequence[WindowTile | None]
) -> list[WindowTile]:
    """Moves the tiles of a bundle; returns the results: those of `outs` that are given, else new ones.

    Tiles are C-ordered, empty on ranks that have none. All ranks call this inside a `collective`.
    """
    if any(out is not None for out in outs):
        call.team.settle(call.watch)  # What callers gave stays as it is if a rank has failed by now.
    held = [WindowTile(tile) for tile in tiles]
    for number in range(len(bundle.routes[0])):
        hops = [route[number] for route in bundle.routes]
        if number:
            call.team.gather(call.watch)  # All that the ranks of this node write into each other's tiles is there.
        last = number == len(bundle.routes[0]) - 1 or hops[0].form == FIRST
        results = [
            _placed(call, hop, tile, out if last else None) for hop, tile, out in zip(hops, held, outs, strict=True)
        ]
        _move(call, bundle, number, held, results)
        if number and hops[0].form != SECOND:
            for tile in held:
                call.memory.free(call.device, tile.tile.size)
        held = results
    return held


def _placed(call: Call, hop: Hop, tile: WindowTile, out: WindowTile | None) -> WindowTile:
    """Where a hop's elements go: the tile itself in the second turn of a relay."""
    if hop.form == SECOND:
        return tile
    result = new_tile(call.team, call.watch, hop.target, tile.tile.dtype) if out is None else out
    call.memory.take(call.device, result.tile.size)
    seat = seat_of(hop.target.mesh, call.team.rank, call.team.size)
    if seat is not None and not hop.target.even and not hop.fills:
        clear_padding(hop.target, seat, result.tile)
    return result


def _move(call: Call, bundle: Bundle, number: int, held: Sequence[WindowTile], results: Sequence[WindowTile]) -> None:
    """One hop of all arrays."""
    apart = tuple(result.place == 0 for result in results)
    part = bundle.part(number, apart, call.team.rank, call.team.facts)
    hops = [route[number] for route in bundle.routes]
    before = [_as_moved(hop, tile.tile) for hop, tile in zip(hops, held, strict=True)]
    after = [_as_moved(hop, tile.tile) for hop, tile in zip(hops, results, strict=True)]
    exchange = MessageExchange(call, part.messages, before, after)
    exchange.start()
    for at, hop in enumerate(hops):
        for step in _copies(call, hop, part, at, results[at], (before[at], after[at])):
            step()
            exchange.progress()
    exchange.finish()


def _as_moved(hop: Hop, tile: Array) -> Array:
    """A tile as the blocks of a hop see it."""
    return raw(tile).reshape(-1) if isinstance(hop.form, View) else raw(tile)


def _copies(
    call: Call, hop: Hop, part: _Part, at: int, result: WindowTile, ends: tuple[Array, Array]
) -> list[Callable[[], object]]:
    """What this rank copies of one array: into the results of its node's ranks, or into its own alone."""
    mine, pushed = part.moves[at], part.pushes[at]
    tile, target = ends
    if pushed is None:
        return [partial(copy, into.of(target), source.of(tile)) for source, into in mine.own]
    call.memory.receive(call.device, mine.pulled)
    peers = {rank: _as_moved(hop, of) for rank, of in _results(call.team, hop.target, result).items()}
    return pushing(pushed, peers)(call, mine, tile, target)


def _results(team: Team, layout: Layout, result: WindowTile) -> dict[int, Array]:
    """The results of the other ranks of this node that have one."""
    shape, dtype, of = layout.tile_shape, result.tile.dtype, team.arena.tile
    others = [n for n in holders(team, layout) if team.members[n] != team.rank]
    return {team.members[n]: of(n, result.place, shape, dtype) for n in others}
