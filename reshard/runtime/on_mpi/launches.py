"""The launches of a call for several arrays: which move together and how, in order, the same on all ranks.

    200 arrays f64[{x}2048] -> f64[8192]        1 stack f64[200, {x}2048] -> f64[200, 8192]
    sources and targets of three dtypes         3 bundles, each with one message for each peer

A *stack* is a few equal moves as one: an array like any other, with one more dim in front. Its result is one block of
memory, of which each array's tile is a part. Stacking copies the tiles once, so large ones move one by one.

A *bundle* moves stacks of one dtype together, each in *hops* from the tiles of one layout to those of another. Most
need one hop: whoever is missing elements asks those who have them. Between nodes, a plan whose devices pass elements on
has a hop for each step, and two for a relay; then no rank sends more than the plan says. A bundle takes in batch after
batch as long as what the plan promises leaves room to pack all their messages; so its batches need no order.

Stacks that must run the steps of their plan (sums, casts, tight budgets) go one after another, in the plan's order.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, NamedTuple

from reshard.errors import BudgetError
from reshard.lower.to_mpi import FIRST, SECOND, Form
from reshard.plans.plan import Batch, Plan, TreePlan, device_kinds
from reshard.plans.rules.step_mode import PLAIN
from reshard.plans.step import Bytes, DeviceKinds
from reshard.runtime.numpy_tiles import numpy_dtype
from reshard.runtime.on_mpi.direct_moves import Direct, Pushes, list_pushes, passes_on, plan_direct
from reshard.runtime.on_mpi.team import Facts
from reshard.runtime.on_mpi.wire.chunks import Messages, join_messages
from reshard.synth import plan
from reshard.types import Digit, Dim, Layout

STACKED = 256 << 10
"""The most bytes of a tile that is copied to a stack; a larger one takes longer to copy than to move alone."""

ROOM = 32 << 20
"""Bytes for messages that suffice for any move."""

_STRAIGHT = ("slice", "all_gather", "all_to_all", "permute", "exchange")
"""The steps that move elements and change nothing else."""


class Hop(NamedTuple):
    """One array's move between tiles of two layouts; `form` as in `plan_direct`. It `fills` part of an array if so."""

    source: Layout
    target: Layout
    form: Form | None = None
    fills: bool = False


Hops = tuple[Hop, ...]


def list_hops(plan: Plan, several: bool) -> Hops | None:
    """The hops of a plan, on several nodes or one; None if its steps must be run: for sums, casts and tight budgets.

    >>> import reshard as rs
    >>> one, four = rs.Layout.parse("f32[12]", rs.Mesh(x=1)), rs.Layout.parse("f32[12]", rs.Mesh(d=5))
    >>> [[hop.form for hop in list_hops(rs.plan(one, four), several)] for several in (False, True)]
    [[None], [1, 2]]
    """
    source, target = plan.source, plan.target
    view = None if plan.view is None or plan.view.plain else plan.view
    summed = bool(source.partial or target.partial) if plan.crosses or view else not source.partial_as(target)
    if summed or source.dtype != target.dtype:
        return None
    if not (several and passes_on(plan)):
        return (Hop(source, target, view, view is not None and view.into),)
    hops: list[Hop] = []
    for step in plan.steps:
        if step.mode.relay and step.mode.chunk is None:
            hops += (Hop(step.operand, step.result, half) for half in (FIRST, SECOND))
        elif step.mode == PLAIN and step.kind in _STRAIGHT:
            hops.append(Hop(step.operand, step.result))
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
    """A rank's part of one hop of all arrays: its copies and messages, and what it writes into others' results."""

    hops: Hops
    moves: tuple[Direct, ...]
    pushes: tuple[Pushes | None, ...]
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
            each = [(hop.source, hop.target, rank, nodes, size) for hop in hops]
            moves = tuple(
                plan_direct(*ends, self.staging, apart=alone, form=hop.form)
                for ends, hop, alone in zip(each, hops, apart, strict=True)
            )
            pushed = tuple(
                None if alone else list_pushes(*ends, hop.form)
                for ends, hop, alone in zip(each, hops, apart, strict=True)
            )
            messages = join_messages([move.messages for move in moves], self.staging // size, size, rank, len(nodes))
            self._parts[key] = BundledHop(hops, moves, pushed, messages)
        return self._parts[key]


@dataclass(frozen=True, eq=False)
class SharedStack:
    """Equal moves on one node whose results have memory of their own: a copy of the tiles is shared, and each rank
    takes its results out of those copies. `plan` is that of the stack, `one` that of a single array.
    """

    names: tuple[str, ...]
    plan: Plan
    one: Plan

    def alone(self) -> Iterator[Bundle]:
        """The same moves one by one, if the ranks cannot share so much memory."""
        itemsize = numpy_dtype(self.one.source.dtype).itemsize
        hops = (list_hops(self.one, False) or (),)
        return (
            Bundle((Stack((name,), self.one),), hops, itemsize, self.plan.source.tile_bytes // 2) for name in self.names
        )


Launch = Stack | Bundle | SharedStack
"""What a call does in one go, of one array or many."""


def list_launches(tree: TreePlan, facts: Facts, apart: bool = False) -> list[Launch]:
    """The launches of a call, one after another, the same on all ranks; `apart` if results have memory of their own."""
    return [*_Scheduler(tree, facts).launches(apart)]


@dataclass(frozen=True, eq=False)
class _Pending:
    """Stacks that wait to be bundled.

    `tiles` are the bytes of all tiles that a hop makes or empties, hop by hop and by kind of device, `targets` those
    that stay, `copied` those of the copies in stacks, and `ends` those that messages have at most.
    """

    stacks: tuple[Stack, ...]
    routes: tuple[Hops, ...]
    tiles: tuple[Bytes, ...]
    targets: Bytes
    copied: int
    ends: int

    def joined(self, other: _Pending) -> _Pending:
        """Both together."""
        return _Pending(
            (*self.stacks, *other.stacks),
            (*self.routes, *other.routes),
            tuple(_add_bytes(*both) for both in zip(self.tiles, other.tiles, strict=True)),
            _add_bytes(self.targets, other.targets),
            self.copied + other.copied,
            self.ends + other.ends,
        )


def _add_bytes(*each: Bytes) -> Bytes:
    return tuple(map(sum, zip(*each, strict=True)))


_Key = tuple[str, tuple[int, ...]]
"""What stacks of a bundle have in common: their dtype, and for each hop which round of a relay it is, or 0."""


class _Scheduler:
    """Goes through the batches of a tree, and keeps what is live by now on a device of each kind."""

    def __init__(self, tree: TreePlan, facts: Facts) -> None:
        self._tree = tree
        self._several = len(set(facts.nodes)) > 1
        self._kinds: DeviceKinds = device_kinds(tree.plans.values())
        self._live = self._kinds.total(self._kinds.tile(plan.source) for plan in tree.plans.values())
        self._pending: dict[_Key, _Pending] = {}

    def launches(self, apart: bool) -> Iterator[Launch]:
        """All launches in order."""
        for batch in self._tree.batches:
            for stack in _list_stacks(batch, apart, self._several) if batch.steps else ():
                if apart and len(stack.names) > 1:
                    yield SharedStack(stack.names, stack.plan, self._tree.plans[stack.names[0]])
                    self._live = _add_bytes(self._live, self._kinds.tile(stack.plan.target))
                else:
                    yield from self._admitted(stack, list_hops(stack.plan, self._several))
        for key in list(self._pending):
            yield self._flushed(key)

    def _admitted(self, stack: Stack, route: Hops | None) -> Iterator[Launch]:
        """Takes in a stack, after the bundles that would have too little room from then on."""
        more, target = None, self._kinds.tile(stack.plan.target)
        own: _Key | None = None
        if route is not None:
            own = stack.plan.source.dtype, tuple(hop.form if isinstance(hop.form, int) else 0 for hop in route)
        if route is not None:
            more = self._waiting(stack, route)
        # A bundle that waits holds nothing yet, but its targets will be there while later ones move: it goes as soon as
        # waiting longer would leave it less room for messages than its stacks have one by one.
        for key, pending in list(self._pending.items()):
            joined = pending if key != own or more is None else pending.joined(more)
            beside = [other.targets for at, other in self._pending.items() if at != key]
            beside += [] if key == own else [target]
            if self._room(joined, beside) < self._wanted(joined):
                yield self._flushed(key)
        if own is None or more is None:
            yield stack
            self._live = _add_bytes(self._live, target)
        else:
            self._pending[own] = self._pending[own].joined(more) if own in self._pending else more

    def _waiting(self, stack: Stack, route: Hops) -> _Pending:
        kinds, one = self._kinds, stack.plan
        tiles = tuple(
            _add_bytes(kinds.tile(hop.target), kinds.tile(hop.source))
            if at and hop.form != SECOND
            else kinds.tile(hop.target)
            for at, hop in enumerate(route)
        )
        copied = one.source.tile_bytes if len(stack.names) > 1 else 0
        most = one.source.tile_bytes + one.target.tile_bytes
        return _Pending((stack,), (route,), tiles, kinds.tile(one.target), copied, most)

    def _room(self, pending: _Pending, beside: Sequence[Bytes] = ()) -> int:
        """The bytes that are left for messages if these move when the targets `beside` them are there."""
        live = _add_bytes(self._live, *beside)
        most = max(max(_add_bytes(live, tiles)) for tiles in pending.tiles)
        return self._tree.peak_bytes - most - pending.copied

    def _wanted(self, pending: _Pending) -> int:
        """The room with which a bundle sends no more messages than its stacks would one by one."""
        return min(ROOM, pending.ends // len(pending.stacks)) if self._several else 0

    def _flushed(self, key: _Key) -> Launch:
        pending = self._pending.pop(key)
        itemsize = numpy_dtype(key[0]).itemsize
        room = max(0, self._room(pending))
        self._live = _add_bytes(self._live, pending.targets)
        if self._several and room < 4 * itemsize and len(pending.stacks) == 1:
            return pending.stacks[0]
        return Bundle(pending.stacks, pending.routes, itemsize, room // 2)


def _list_stacks(batch: Batch, apart: bool, several: bool) -> Iterator[Stack]:
    """The stacks of a batch, with copies within what the tree's plan has for its buffers.

    If results are `apart`, only moves straight to them are stacked, and only on one node.
    """
    plans = dict(zip(batch.names, batch.plans, strict=True))
    room = max(batch.scratch_bytes, default=0)
    for names in _group_alike(plans):
        one = plans[names[0]]
        stacked = len(names) > 1 and not (apart and (several or list_hops(one, False) is None))
        together = _plan_stack(one, len(names), room) if stacked else None
        if together is None:
            yield from (Stack((name,), plans[name]) for name in names)
        else:
            room -= together.source.tile_bytes
            yield Stack(names, together)


def _group_alike(plans: Mapping[str, Plan]) -> Iterator[tuple[str, ...]]:
    """The names of equal moves; those of large tiles, and of sums whose dtype may have no name, one by one."""
    groups: dict[object, list[str]] = {}
    for name, one in plans.items():
        large = max(one.source.tile_bytes, one.target.tile_bytes) > STACKED
        words = one.source.partial and one.source.dtype.startswith(("u", "complex"))
        groups.setdefault(name if large or words or one.view is not None else one, []).append(name)
    yield from map(tuple, groups.values())


@lru_cache(maxsize=1024)
def _plan_stack(one: Plan, count: int, room: int) -> Plan | None:
    """The plan of `count` equal moves as one array; None unless it needs no more room than there is beside them.

    An array that goes straight needs none but for the copy of the tiles, and for a few of its messages.
    """
    source, target = lift_layout(one.source, count), lift_layout(one.target, count)
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
