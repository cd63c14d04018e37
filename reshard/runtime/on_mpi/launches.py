"""The launches of a call for several arrays: which move together and how, in order, and how each runs on this rank.

    200 arrays f64[{x}2048] -> f64[8192]        1 stack f64[200, {x}2048] -> f64[200, 8192]
    sources and targets of three dtypes         3 bundles, each with one message for each peer

A *stack* is a few equal moves as one: an array like any other, with one more dim in front. Its result is one block of
memory, of which each array's tile is a part, or is copied to the caller's array. Stacking copies the tiles once, so
large ones move one by one.

A *bundle* moves stacks of one dtype together, each in *hops* from the tiles of one layout to those of another. Most
need one hop: whoever is missing elements asks those who have them. Between nodes, a plan whose devices pass elements on
has a hop for each step, and two for a relay; then no rank sends more than the plan says. A bundle takes in batch after
batch as long as what the plan promises leaves room to pack all their messages; so its batches need no order.

Stacks that must run the steps of their plan (sums, casts, tight budgets) go one after another, in the plan's order.

    TilePlan       a single tile, by the best transport (`transports`)
    Stack          the steps of a plan (`run_plan`)
    Bundle         copies into the results of the node's ranks, messages beyond: one for each peer, of all arrays

All sources are live from the start, and all targets at the end. A launch counts what it makes in the call's account;
tiles of stacks are copied to buffers of the team's pool, and their results are parts of one block of memory. Results of
bundles lie in windows, where the ranks of a node write to them. A result in private memory (the node is full, or the
caller gave the array) is filled by messages, inside the node as well.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache, partial
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from reshard.errors import BudgetError
from reshard.lower.to_mpi import FIRST, SECOND, MoveForm, seat_of
from reshard.plans.manifest import Manifest, Update
from reshard.plans.plan import Batch, Plan, TreePlan, chain, device_kinds
from reshard.plans.rules.step_mode import PLAIN, StepMode
from reshard.plans.step import Bytes, DeviceKinds
from reshard.runtime.account import Account, InBytes
from reshard.runtime.numpy_tiles import numpy_dtype
from reshard.runtime.on_mpi.collective import MANIFEST_END
from reshard.runtime.on_mpi.copies.strided_copy import Array, copy_view, pair_views, view_as_words
from reshard.runtime.on_mpi.direct_moves import Direct, list_pushes, passes_on, plan_direct, pull_from, push_into
from reshard.runtime.on_mpi.global_array import clear_padding
from reshard.runtime.on_mpi.prepare import Request, TilePlan
from reshard.runtime.on_mpi.run_plan import rank_plan, run_plan
from reshard.runtime.on_mpi.team import Facts, Team, Watch
from reshard.runtime.on_mpi.transports import transport_tile
from reshard.runtime.on_mpi.window_tiles import WindowTile, absent_tile, members_with_tile, new_tile
from reshard.runtime.on_mpi.wire.chunks import Messages, merge_messages
from reshard.runtime.on_mpi.wire.message_exchange import Call, MessageExchange
from reshard.runtime.platform_network import plan_within_fewest, spell_network
from reshard.synth import find_tree_plan, plan
from reshard.types import Digit, Dim, Layout
from reshard.types.move import Move

STACKED = 256 << 10
"""The most bytes of a tile that is copied to a stack; a larger one takes longer to copy than to move alone."""

ROOM = 32 << 20
"""Bytes for messages that suffice for any move."""

EMPTY: Mapping[str, Any] = MappingProxyType({})

_STRAIGHT = ("slice", "all_gather", "all_to_all", "permute", "exchange")
"""The steps that move elements and change nothing else."""


class Hop(NamedTuple):
    """One array's move between tiles of two layouts; `form` as in `plan_direct`. It `fills` part of an array if so."""

    source: Layout
    target: Layout
    form: MoveForm | None = None
    fills: bool = False

    @property
    def turn(self) -> int:
        """Which round of a relay it is, 0 where it is none."""
        return 0 if self.form is None else self.form.turn


Hops = tuple[Hop, ...]


def list_hops(plan: Plan, several: bool) -> Hops | None:
    """The hops of a plan, on several nodes or one; None if its steps must be run: for sums, casts, tight budgets, and
    beside what ranks hold already.

    >>> import reshard as rs
    >>> one, four = rs.Layout.parse("f32[12]", rs.Mesh(x=1)), rs.Layout.parse("f32[12]", rs.Mesh(d=5))
    >>> [[hop.turn for hop in list_hops(rs.plan(one, four), several)] for several in (False, True)]
    [[0], [1, 2]]
    """
    source, target = plan.source, plan.target
    view = None if plan.view is None or plan.view.plain else plan.view
    summed = bool(source.partial or target.partial) if plan.crosses or view else not source.partial_as(target)
    if summed or source.dtype != target.dtype or plan.holding is not None:
        return None
    if not (several and passes_on(plan)):
        return (Hop(source, target, None if view is None else MoveForm(0, view), view is not None and view.into),)
    hops: list[Hop] = []
    for step in plan.steps:
        ends, through = (step.operand, step.result), step.mode.view
        fills = step.mode.fills
        if step.mode._replace(gathers=False) == StepMode(relay=True, view=through):
            hops += (Hop(*ends, MoveForm(half, through, step.mode.gathers), fills) for half in (FIRST, SECOND))
        elif step.mode == PLAIN and step.kind in _STRAIGHT:
            hops.append(Hop(*ends))
        elif step.mode == StepMode(view=through) and step.kind == "exchange":
            hops.append(Hop(*ends, MoveForm(0, through), fills))
        else:
            return None
    return tuple(hops)


@dataclass(frozen=True, eq=False)
class Stack:
    """Equal moves that go together, by the names of their arrays, and the plan of all: with one dim more if several.

    As a launch, it runs the steps of that plan.
    """

    names: tuple[str, ...]
    plan: Plan


class BundledHop(NamedTuple):
    """A rank's part of one hop of all arrays: its copies and messages."""

    hops: Hops
    moves: tuple[Direct, ...]
    messages: Messages


@dataclass(frozen=True, eq=False)
class Bundle:
    """Stacks of one dtype that move together, the hops of each, equally many, and the bytes that messages may stage in
    each direction.
    """

    stacks: tuple[Stack, ...]
    routes: tuple[Hops, ...]
    itemsize: int
    staging: int
    _parts: dict[tuple[int, tuple[bool, ...], int], BundledHop] = field(default_factory=dict[Any, Any])

    def part(self, number: int, apart: tuple[bool, ...], rank: int, facts: Facts) -> BundledHop:
        """A rank's part of one hop of all arrays; `apart` are those that are filled by messages alone."""
        key = number, apart, rank
        if key not in self._parts:
            hops, nodes, size = tuple(route[number] for route in self.routes), facts.nodes, self.itemsize
            # Without messages, bundles that have room for more of them or fewer share what is worked out here.
            staging = self.staging if any(apart) or len(set(nodes)) > 1 else 0
            moves = tuple(
                plan_direct(hop.source, hop.target, rank, nodes, size, staging, apart=alone, form=hop.form)
                for hop, alone in zip(hops, apart, strict=True)
            )
            messages = merge_messages([move.messages for move in moves], self.staging // size, size, rank, len(nodes))
            self._parts[key] = BundledHop(hops, moves, messages)
        return self._parts[key]


Launch = Stack | Bundle
"""What a call does in one go, of one array or many."""


def list_launches(tree: TreePlan, facts: Facts, apart: bool = False) -> list[Launch]:
    """The launches of a call, one after another, the same on all ranks; `apart` if results have memory of their own."""
    return [*_Scheduler(tree, facts, apart).launches()]


@dataclass(frozen=True, eq=False)
class _Pending:
    """Stacks that wait to be bundled.

    `tiles` are the bytes of all tiles that a hop makes or empties, hop by hop and by kind of device, `targets` those
    that stay, `parts` those of the targets that are filled in part, by name, which others may fill, too; `copied` are
    those of the copies in stacks, and `ends` those that messages have at most.
    """

    stacks: tuple[Stack, ...]
    routes: tuple[Hops, ...]
    tiles: tuple[Bytes, ...]
    targets: Bytes
    parts: Mapping[str, Bytes]
    copied: int
    ends: int

    def joined(self, other: _Pending) -> _Pending:
        """Both together."""
        return _Pending(
            (*self.stacks, *other.stacks),
            (*self.routes, *other.routes),
            tuple(_add_bytes(*both) for both in zip(self.tiles, other.tiles, strict=True)),
            _add_bytes(self.targets, other.targets),
            {**self.parts, **other.parts},
            self.copied + other.copied,
            self.ends + other.ends,
        )


def _add_bytes(*each: Bytes) -> Bytes:
    return tuple(map(sum, zip(*each, strict=True)))


_Key = tuple[str, tuple[int, ...]]
"""What stacks of a bundle have in common: their dtype, and for each hop which round of a relay it is, or 0."""


class _Scheduler:
    """Goes through the batches of a tree, and keeps what is live by now on a device of each kind."""

    def __init__(self, tree: TreePlan, facts: Facts, apart: bool) -> None:
        self._tree, self._apart = tree, apart
        self._several = len(set(facts.nodes)) > 1
        self._kinds: DeviceKinds = device_kinds(tree.plans.values())
        self._live = tree.arrays.live_bytes(self._kinds)
        self._there = set(tree.filled)
        self._pending: dict[_Key, _Pending] = {}

    def launches(self) -> Iterator[Launch]:
        """All launches in order."""
        for batch in self._tree.batches:
            for stack in _list_stacks(batch, self._apart) if batch.steps else ():
                yield from self._admit(stack)
        for key in list(self._pending):
            yield self._flush(key)

    def _admit(self, stack: Stack) -> Iterator[Launch]:
        """Takes in a stack, after the bundles that would have too little room from then on."""
        kinds, one = self._kinds, stack.plan
        target, route = kinds.tile(one.target), list_hops(one, self._several)
        parts: dict[str, Bytes] = {}
        if one.fills:  # It counts once, whichever of its parts moves first.
            parts, target = {self._tree.target_of[stack.names[0]]: target}, (0,) * kinds.count
        own: _Key | None = None
        more: _Pending | None = None
        if route is not None:
            own = one.source.dtype, tuple(hop.turn for hop in route)
            # A hop empties the tiles of the one before, except a relay's second, which goes on in these.
            emptied = [at and hop.turn != SECOND for at, hop in enumerate(route)]
            made = [target if hop.fills else kinds.tile(hop.target) for hop in route]
            tiles = [
                _add_bytes(of, kinds.tile(h.source)) if e else of for of, h, e in zip(made, route, emptied, strict=True)
            ]
            copied = _count_copied(one, self._apart) if len(stack.names) > 1 else 0
            most = one.source.tile_bytes + one.target.tile_bytes
            more = _Pending((stack,), (route,), tuple(tiles), target, parts, copied, most)
        # A bundle that waits holds nothing yet, but its targets will be there while later ones move: it goes as soon as
        # waiting longer would leave it less room for messages than its stacks have one by one.
        for key, pending in list(self._pending.items()):
            joined = pending if key != own or more is None else pending.joined(more)
            others = [other for at, other in self._pending.items() if at != key]
            beside = [*(other.targets for other in others), *([] if key == own else [target])]
            filled = {**parts, **{name: nbytes for other in others for name, nbytes in other.parts.items()}}
            # With this room, a bundle sends no more messages than its stacks would one by one.
            wanted = min(ROOM, joined.ends // len(joined.stacks)) if self._several else 0
            if self._room(joined, beside, filled) < wanted:
                yield self._flush(key)
        if own is None or more is None:
            yield stack
            self._live = _add_bytes(self._live, target, *self._new_parts(parts))
            self._there.update(parts)
        else:
            self._pending[own] = self._pending[own].joined(more) if own in self._pending else more

    def _new_parts(self, parts: Mapping[str, Bytes]) -> list[Bytes]:
        """The bytes of partly filled targets that are not allocated yet."""
        return [nbytes for name, nbytes in parts.items() if name not in self._there]

    def _room(self, pending: _Pending, beside: Sequence[Bytes] = (), filled: Mapping[str, Bytes] = EMPTY) -> int:
        """The bytes that are left for messages if these move when the targets `beside` them are there, and those that
        are `filled` in part."""
        live = _add_bytes(self._live, *beside, *self._new_parts({**filled, **pending.parts}))
        most = max(max(_add_bytes(live, tiles)) for tiles in pending.tiles)
        return self._tree.peak_bytes - most - pending.copied

    def _flush(self, key: _Key) -> Launch:
        pending = self._pending.pop(key)
        itemsize = numpy_dtype(key[0]).itemsize
        room = max(0, self._room(pending))
        self._live = _add_bytes(self._live, pending.targets, *self._new_parts(pending.parts))
        self._there.update(pending.parts)
        if self._several and room < 4 * itemsize and len(pending.stacks) == 1:
            return pending.stacks[0]
        return Bundle(pending.stacks, pending.routes, itemsize, room // 2)


def _count_copied(together: Plan, apart: bool) -> int:
    """The bytes of the copies of a stack: of its tiles, or, once these have gone, of its results, where they are copied
    to arrays `apart`."""
    source, target = together.source.tile_bytes, together.target.tile_bytes
    return max(source, target) if apart else source


def _list_stacks(batch: Batch, apart: bool) -> Iterator[Stack]:
    """The stacks of a batch, with copies within what the tree's plan has for its buffers."""
    plans = dict(zip(batch.names, batch.plans, strict=True))
    # Equal moves go together; those of large tiles, and of sums whose dtype may have no name, one by one.
    groups: dict[object, list[str]] = {}
    for name, one in plans.items():
        large = max(one.source.tile_bytes, one.target.tile_bytes) > STACKED
        words = one.source.partial and one.source.dtype.startswith(("u", "complex"))
        alone = large or words or one.view is not None or one.holding is not None
        groups.setdefault(name if alone else one, []).append(name)
    room = max(batch.scratch_bytes, default=0)
    for names in groups.values():
        together = _plan_stack(plans[names[0]], len(names), room) if len(names) > 1 else None
        copied = 0 if together is None else _count_copied(together, apart)
        if together is None or copied > room:
            yield from (Stack((name,), plans[name]) for name in names)
        else:
            room -= copied
            yield Stack(tuple(names), together)


@lru_cache(maxsize=1024)
def _plan_stack(one: Plan, count: int, room: int) -> Plan | None:
    """The plan of `count` equal moves as one array; None unless it needs no more room than there is beside them.

    An array that goes straight needs none but for the copy of the tiles, and for a few of its messages.
    """
    source, target = lift_layout(one.source, count), lift_layout(one.target, count)
    gathering = [step.spec for step in one.steps if step.mode.gathers]
    if gathering and len(one.steps) == 1:
        # The stack moves as one of it does: to look for other ways takes longer than to move.
        made = chain(source, target, [gathering[0]._replace(result=target)], one.donate)
        return made if made.peak_bytes <= target.tile_bytes + room else None
    route = list_hops(one, True)
    if route is not None and len(route) == 1:
        least = max(64, min(source.tile_bytes, target.tile_bytes) // 4)
        return plan(source, target) if source.tile_bytes + least <= room else None
    try:
        made = plan(source, target, target.tile_bytes + room)
    except BudgetError:
        return None
    return made


def lift_layout(layout: Layout, count: int) -> Layout:
    """The layout of `count` arrays along a new dim in front, which stays whole on each device.

    >>> from reshard.types import Mesh
    >>> str(lift_layout(Layout.parse("f32[{x}4, 8]", Mesh(x=2)), 3))
    'f32[3, {x}4, 8]'
    """
    return replace(layout, dims=(Dim((Digit(count, None),), count), *layout.dims))


@dataclass(frozen=True, eq=False)
class PreparedTree:
    """What all ranks work out alike from a request for many arrays: its text, its plan, and its launches, those of a
    call that gives no `out` for all results.
    """

    text: str
    plan: TreePlan
    launches: Sequence[Launch]
    facts: Facts
    tied: Mapping[str, str] = EMPTY
    """Targets that are another one under a second name, by name."""

    @cached_property
    def apart(self) -> Sequence[Launch]:
        """The launches of a call that gives arrays for all results."""
        return list_launches(self.plan, self.facts, apart=True)


@lru_cache(maxsize=64)
def prepare_tree(request: Request, rank: int, facts: Facts) -> PreparedTree:
    """Plans a request for many arrays.

    Raises the errors of `reshard.plan_tree`, and those of what this rank cannot run.
    """
    moves, options = dict(request.moves), request.options
    given = request.version
    version = dict(given) if isinstance(given, tuple) and not isinstance(given, Update) else given
    sources, targets = map(dict, request.arrays)
    manifest = Manifest.of(moves, version, sources=sources, targets=targets).to_json()
    first, tied = dict[object, str](), dict[str, str]()
    movers = Counter(targets.get(name, name) for name in moves)
    for name, leaf in list(moves.items()) if sources else ():
        # What is read from one array by equal moves, each to all of a target, moves once.
        target = targets.get(name, name)
        alone = movers[target] == 1 and not (isinstance(leaf, Move) and leaf.fills)
        twin = first.setdefault((sources.get(name, name), leaf), target) if alone else target
        if twin != target:
            tied[target] = twin
            for each in (moves, sources, targets):
                each.pop(name, None)
    tree = plan_within_fewest(
        options, lambda used: find_tree_plan(moves, used, sources, targets), lambda tree: tree.peak_bytes
    )
    launches = list_launches(tree, facts)
    for launch in launches:
        if isinstance(launch, Stack):  # What cannot be run is refused before anything moves.
            rank_plan(launch.plan, rank, len(facts.nodes), numpy_dtype(launch.plan.source.dtype).itemsize)
    chosen = {"budget": options.budget, "network": spell_network(options.network), "verify": request.verify}
    given = {name: value for name, value in chosen.items() if value}
    return PreparedTree(f"{manifest}{MANIFEST_END}{given or ''}", tree, launches, facts, tied)


class GivenTiles(NamedTuple):
    """What a rank brings: its tiles, empty where it has none, the arrays for results, and scales of casts, by the names
    of moves; and for those that fill parts of a target that they cover, the name of that."""

    tiles: Mapping[str, WindowTile]
    outs: Mapping[str, WindowTile]
    scales: Mapping[str, Any] = EMPTY
    parts: Mapping[str, str] = EMPTY


def run_launches(
    team: Team,
    watch: Watch,
    launches: Iterable[Launch | TilePlan],
    given: GivenTiles,
    memory: Account | None,
    private: bool = False,
) -> dict[str, WindowTile]:
    """The results of all arrays that move, by name; empty where this rank has none.

    All ranks call this inside a `collective`, with the same launches. A single tile has the name "". The arrays for
    results are `private` if it does not matter what is in them once a rank has failed.
    """
    moved: dict[str, WindowTile] = {}
    made: dict[str, WindowTile] = {}
    for launch in launches:
        if isinstance(launch, TilePlan):
            moved[""] = transport_tile(team, watch, launch, given.tiles[""], given.outs.get(""), memory)
            continue
        dtype = (launch.stacks[0] if isinstance(launch, Bundle) else launch).plan.source.dtype
        call = Call(team, watch, team.pool, InBytes(dtype, memory or Account("uint8")), team.rank)
        stacks = launch.stacks if isinstance(launch, Bundle) else (launch,)
        held = [_hold_tiles(call, stack, given) for stack in stacks]
        # The caller's array for the result of a stack of one; on a rank without a result, what stands for it.
        outs = [given.outs.get(stack.names[0]) if len(stack.names) == 1 else None for stack in stacks]
        for at, (stack, tile) in enumerate(zip(stacks, held, strict=True)):
            if (target := given.parts.get(stack.names[0])) is not None:
                if target not in made:
                    made[target] = _make_target(call, stack.plan, tile.tile, outs[at])
                outs[at] = made[target]
        if isinstance(launch, Bundle):
            results = _run_bundle(call, launch, held, outs, private)
        else:
            results = [_run_steps(call, launch.plan, held[0].tile, outs[0], given.scales.get(launch.names[0]))]
        for stack, tile in zip(stacks, held, strict=True):
            if len(stack.names) > 1 and tile.tile.size:
                call.memory.free(call.device, tile.tile.size, stack.plan.source.dtype)
                call.pool.give(tile.tile)
        copied = [stack for stack in stacks if len(stack.names) > 1 and stack.names[0] in given.outs]
        if copied:
            # What the node's ranks write into results is there, and callers' arrays stay as they are after a failure.
            team.gather(watch) if private else team.settle(watch)
        for stack, result in zip(stacks, results, strict=True):
            if len(stack.names) == 1:
                moved[stack.names[0]] = result
                continue
            if stack in copied:
                moved.update(_copy_results(call, stack, result.tile, given.outs))
                continue
            for number, name in enumerate(stack.names):
                moved[name] = result
                if result.tile.size:  # Elements without a name in layouts moved as plain words of their size.
                    part, own = result.tile[number, ...], given.tiles[name].tile.dtype
                    moved[name] = WindowTile(part if own == part.dtype else part.view(own))
    return moved


def _copy_results(
    call: Call, stack: Stack, result: Array, outs: Mapping[str, WindowTile]
) -> Iterator[tuple[str, WindowTile]]:
    """Copies the result of a stack to the arrays that the caller gave for its parts."""
    into = [outs[name] for name in stack.names]
    call.memory.take(call.device, sum([out.tile.size for out in into if not out.counted]), stack.plan.target.dtype)
    for out, part in zip(into, view_as_words(result), strict=True) if result.size else ():
        view_as_words(out.tile)[...] = part
    call.memory.free(call.device, result.size, stack.plan.target.dtype)
    return zip(stack.names, into, strict=True)


def _hold_tiles(call: Call, stack: Stack, given: GivenTiles) -> WindowTile:
    """The tile of a stack: that of its one array, or a copy of those of all."""
    tiles = [given.tiles[name].tile for name in stack.names]
    if len(tiles) == 1:
        return given.tiles[stack.names[0]]
    dtype = numpy_dtype(stack.plan.source.dtype)
    if seat_of(stack.plan.source.mesh, call.team.rank, call.team.size) is None:
        return WindowTile(absent_tile(stack.plan.source, dtype).tile)
    size = sum(tile.size for tile in tiles)
    call.memory.take(call.device, size)
    made = call.pool.take(size * dtype.itemsize).view(dtype).reshape(len(tiles), *tiles[0].shape)
    np.stack([view_as_words(tile) for tile in tiles], out=view_as_words(made))
    return WindowTile(made)


def _make_target(call: Call, plan: Plan, held: Array, out: WindowTile | None) -> WindowTile:
    """The target of which a plan fills the first part: the caller's array, or a new one."""
    if out is None:
        dtype = held.dtype if plan.source.dtype == plan.target.dtype else numpy_dtype(plan.target.dtype)
        out = new_tile(call.team, call.watch, plan.target, dtype)
        clear_new(call.team, plan.target, out.tile)
    call.memory.take(call.device, out.tile.size, plan.target.dtype)
    return out._replace(counted=True)


def clear_new(team: Team, layout: Layout, tile: Array) -> None:
    """Sets the padding of this rank's tile to zero, if it has one there."""
    seat = seat_of(layout.mesh, team.rank, team.size)
    if seat is not None and not layout.even:
        clear_padding(layout, seat, tile)


def _run_steps(call: Call, plan: Plan, held: Array, out: WindowTile | None, scale: Any) -> WindowTile:
    """Runs the steps of a stack's plan, message by message."""
    team = call.team
    dtype = held.dtype if plan.source.dtype == plan.target.dtype else numpy_dtype(plan.target.dtype)

    def place() -> WindowTile:
        return new_tile(team, call.watch, plan.target, dtype) if out is None else out

    # What callers gave stays as it is if a rank has failed by then.
    ready = None if out is None else lambda: team.settle(call.watch)
    result = run_plan(call, rank_plan(plan, team.rank, team.size, held.dtype.itemsize), held, place, ready, scale)
    if out is None:
        clear_new(team, plan.target, result.tile)
    return result


def _run_bundle(
    call: Call, bundle: Bundle, tiles: Sequence[WindowTile], outs: Sequence[WindowTile | None], private: bool
) -> list[WindowTile]:
    """Moves the tiles of a bundle, hop by hop; returns the results: those of `outs` that are given, else new ones.

    Tiles are C-ordered, empty on ranks that have none. Ranks of a node write into results that lie in windows, and read
    from tiles that do if results are private; that is the same on all of them.
    """
    team = call.team
    if any(out is not None for out in outs) and not private:
        team.settle(call.watch)  # What callers gave stays as it is if a rank has failed by now.
    held = list(tiles)
    count = len(bundle.routes[0])
    for number in range(count):
        hops = [route[number] for route in bundle.routes]
        if number:
            team.gather(call.watch)  # All that the ranks of this node write into each other's tiles is there.
        # A relay's second hop goes on in the tile of its first, which is therefore the caller's.
        last = number == count - 1 or hops[0].turn == FIRST
        results: list[WindowTile] = []
        for hop, tile, out in zip(hops, held, outs, strict=True):
            result = tile  # The second round of a relay goes on in it.
            if hop.turn != SECOND:
                kept = out if last else None
                result = new_tile(team, call.watch, hop.target, tile.tile.dtype) if kept is None else kept
                if not result.counted:
                    call.memory.take(call.device, result.tile.size)
                if not hop.fills:
                    clear_new(team, hop.target, result.tile)
            results.append(result)
        read = [result.place == 0 != tile.place for tile, result in zip(held, results, strict=True)]
        apart = tuple(result.place == 0 and not reads for result, reads in zip(results, read, strict=True))
        part = bundle.part(number, apart, team.rank, team.facts)
        before, after = ([view_as_words(each.tile) for each in side] for side in (held, results))
        exchange = MessageExchange(call, part.messages, before, after)
        exchange.start()
        for at in range(len(hops)):
            move, hop = part.moves[at], hops[at]
            if apart[at]:
                copies: list[Callable[[], object]] = [
                    partial(copy_view, *pair) for pair in pair_views(move.own, after[at], before[at])
                ]
            else:
                call.memory.receive(call.device, move.pulled)
                # The tiles, or the results, of the node's other ranks that have one: in windows, all at one place.
                of, layout = (held[at], hop.source) if read[at] else (results[at], hop.target)
                others = {
                    team.members[n]: team.arena.tile(n, of.place, layout.tile_shape, of.tile.dtype)
                    for n in members_with_tile(team, layout)
                    if team.members[n] != team.rank
                }
                ends = hop.source, hop.target, team.rank, team.facts.nodes, bundle.itemsize, hop.form
                fill = pull_from(others) if read[at] else push_into(list_pushes(*ends), others)
                copies = fill(call, move, before[at], after[at])
            for step in copies:
                step()
                exchange.progress()
        exchange.finish()
        if number and hops[0].turn != SECOND:
            for tile in held:
                call.memory.free(call.device, tile.tile.size)
        held = results
    return held
