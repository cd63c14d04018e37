"""What a tree of arrays does in one call: which arrays move together, and which by the steps of their plan.

    200 arrays f64[{x}2048] -> f64[8192]        1 stack f64[200, {x}2048] -> f64[200, 8192]
    sources and targets of three dtypes         3 bundles, each with one message for each peer

A *stack* is a few equal moves as one: an array like any other, with one more dim in front. Its result is one block of
memory, of which each array's tile is a part. Stacking copies the tiles once, so large ones move one by one.

A *bundle* (`bundle`) moves stacks of one dtype together. It takes in batch after batch as long as what the tree's plan
promises leaves room to pack all their messages; so its batches need no order. Stacks that must run the steps of their
plan go one after another, in the order of the tree.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from reshard.errors import BudgetError
from reshard.lower.to_mpi import SECOND
from reshard.plans.plan import Batch, Plan
from reshard.plans.plan_tree import TreePlan, device_kinds
from reshard.plans.tree_memory import Bytes, DeviceKinds
from reshard.runtime.numpy_dtypes import numpy_dtype
from reshard.runtime.on_mpi.bundle import Bundle, Hops, hops_of
from reshard.runtime.on_mpi.team import Facts
from reshard.synth import plan
from reshard.types import Digit, Dim, Layout

STACKED = 256 << 10
"""The most bytes of a tile that is copied to a stack; a larger one takes longer to copy than to move alone."""

ROOM = 32 << 20
"""Bytes for messages that suffice for any move."""


@dataclass(frozen=True, eq=False)
class Stack:
    """Equal moves that go together, by the names of their arrays, and the plan of all: with one dim more if several."""

    names: tuple[str, ...]
    plan: Plan


@dataclass(frozen=True, eq=False)
class BundledStacks:
    """Stacks that move together."""

    stacks: tuple[Stack, ...]
    bundle: Bundle


@dataclass(frozen=True, eq=False)
class SharedStack:
    """Equal moves on one node whose results have memory of their own: a copy of the tiles is shared, and each rank
    takes its results out of those copies. `plan` is that of the stack, `one` that of a single array.
    """

    names: tuple[str, ...]
    plan: Plan
    one: Plan

    def alone(self) -> Iterator[BundledStacks]:
        """The same moves one by one, if the ranks cannot share so much memory."""
        itemsize = numpy_dtype(self.one.source.dtype).itemsize
        bundle = Bundle((hops_of(self.one, False) or (),), itemsize, self.plan.source.tile_bytes // 2)
        return (BundledStacks((Stack((name,), self.one),), bundle) for name in self.names)


Part = Stack | BundledStacks | SharedStack
"""A part of a tree's call. A stack by itself runs the steps of its plan."""


def schedule_of(tree: TreePlan, facts: Facts, apart: bool = False) -> list[Part]:
    """The parts of a tree's call, one after another, the same on all ranks; `apart` if results have memory of their
    own.
    """
    return [*_Scheduler(tree, facts).parts(apart)]


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
            tuple(_sum(*both) for both in zip(self.tiles, other.tiles, strict=True)),
            _sum(self.targets, other.targets),
            self.copied + other.copied,
            self.ends + other.ends,
        )


def _sum(*each: Bytes) -> Bytes:
    return tuple(map(sum, zip(*each, strict=True)))


_Key = tuple[str, tuple[int, ...]]
"""What stacks of a bundle have in common: their dtype, and for each hop which turn of a relay it is, or 0."""


class _Scheduler:
    """Goes through the batches of a tree, and keeps what is live by now on a device of each kind."""

    def __init__(self, tree: TreePlan, facts: Facts) -> None:
        self._tree = tree
        self._several = len(set(facts.nodes)) > 1
        self._kinds: DeviceKinds = device_kinds(tree.plans.values())
        self._live = self._kinds.total(self._kinds.tile(plan.source) for plan in tree.plans.values())
        self._pending: dict[_Key, _Pending] = {}

    def parts(self, apart: bool) -> Iterator[Part]:
        """All parts in order."""
        for batch in self._tree.batches:
            for stack in _stacks(batch, apart, self._several) if batch.steps else ():
                if apart and len(stack.names) > 1:
                    yield SharedStack(stack.names, stack.plan, self._tree.plans[stack.names[0]])
                    self._live = _sum(self._live, self._kinds.tile(stack.plan.target))
                else:
                    yield from self._admitted(stack, hops_of(stack.plan, self._several))
        for key in list(self._pending):
            yield self._flushed(key)

    def _admitted(self, stack: Stack, route: Hops | None) -> Iterator[Part]:
        """Takes in a stack, after the bundles that would have too little room from then on."""
        more, target = None, self._kinds.tile(stack.plan.target)
        own = None if route is None else _key(stack, route)
        if route is not None:
            more = self._waiting(stack, route)
        for key, pending in list(self._pending.items()):
            joined = pending if key != own or more is None else pending.joined(more)
            beside = [other.targets for at, other in self._pending.items() if at != key]
            beside += [] if key == own else [target]
            if self._room(joined, beside) < self._wanted(joined):
                yield self._flushed(key)
        if own is None or more is None:
            yield stack
            self._live = _sum(self._live, target)
        else:
            self._pending[own] = self._pending[own].joined(more) if own in self._pending else more

    def _waiting(self, stack: Stack, route: Hops) -> _Pending:
        kinds, one = self._kinds, stack.plan
        tiles = tuple(
            _sum(kinds.tile(hop.target), kinds.tile(hop.source))
            if at and hop.form != SECOND
            else kinds.tile(hop.target)
            for at, hop in enumerate(route)
        )
        copied = one.source.tile_bytes if len(stack.names) > 1 else 0
        most = one.source.tile_bytes + one.target.tile_bytes
        return _Pending((stack,), (route,), tiles, kinds.tile(one.target), copied, most)

    def _room(self, pending: _Pending, beside: Sequence[Bytes] = ()) -> int:
        """The bytes that are left for messages if these move when the targets `beside` them are there."""
        live = _sum(self._live, *beside)
        most = max(max(_sum(live, tiles)) for tiles in pending.tiles)
        return self._tree.peak_bytes - most - pending.copied

    def _wanted(self, pending: _Pending) -> int:
        """The room with which a bundle sends no more messages than its stacks would one by one."""
        return min(ROOM, pending.ends // len(pending.stacks)) if self._several else 0

    def _flushed(self, key: _Key) -> Part:
        pending = self._pending.pop(key)
        itemsize = numpy_dtype(key[0]).itemsize
        room = max(0, self._room(pending))
        self._live = _sum(self._live, pending.targets)
        if self._several and room < 4 * itemsize and len(pending.stacks) == 1:
            return pending.stacks[0]
        return BundledStacks(pending.stacks, Bundle(pending.routes, itemsize, room // 2))


def _key(stack: Stack, route: Hops) -> _Key:
    return stack.plan.source.dtype, tuple(hop.form if isinstance(hop.form, int) else 0 for hop in route)


def _stacks(batch: Batch, apart: bool, several: bool) -> Iterator[Stack]:
    """The stacks of a batch, with copies within what the tree's plan has for its buffers.

    If results are `apart`, only moves straight to them are stacked, and only on one node.
    """
    plans = dict(zip(batch.names, batch.plans, strict=True))
    room = max(batch.scratch_bytes, default=0)
    for names in _alike(plans):
        one = plans[names[0]]
        stacked = len(names) > 1 and not (apart and (several or hops_of(one, False) is None))
        together = _stacked(one, len(names), room) if stacked else None
        if together is None:
            yield from (Stack((name,), plans[name]) for name in names)
        else:
            room -= together.source.tile_bytes
            yield Stack(names, together)


def _alike(plans: Mapping[str, Plan]) -> Iterator[tuple[str, ...]]:
    """The names of equal moves; those of large tiles, and of sums whose dtype may have no name, one by one."""
    groups: dict[object, list[str]] = {}
    for name, one in plans.items():
        large = max(one.source.tile_bytes, one.target.tile_bytes) > STACKED
        words = one.source.partial and one.source.dtype.startswith(("u", "complex"))
        groups.setdefault(name if large or words or one.view is not None else one, []).append(name)
    yield from map(tuple, groups.values())


@lru_cache(maxsize=1024)
def _stacked(one: Plan, count: int, room: int) -> Plan | None:
    """The plan of `count` equal moves as one array; None unless it needs no more room than there is beside them.

    An array that goes straight needs none but for the copy of the tiles, and for a few of its messages.
    """
    source, target = lifted(one.source, count), lifted(one.target, count)
    route = hops_of(one, True)
    if route is not None and len(route) == 1:
        least = max(64, min(source.tile_bytes, target.tile_bytes) // 4)
        return plan(source, target) if source.tile_bytes + least <= room else None
    try:
        made = plan(source, target, target.tile_bytes + room)
    except BudgetError:
        return None
    return made


def lifted(layout: Layout, count: int) -> Layout:
    """The layout of `count` arrays along a new dim in front, which stays whole on each device.

    >>> from reshard.types import Mesh
    >>> str(lifted(Layout.parse("f32[{x}4, 8]", Mesh(x=2)), 3))
    'f32[3, {x}4, 8]'
    """
    return replace(layout, dims=(Dim((Digit(count, None),), count), *layout.dims))
