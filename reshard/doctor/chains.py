"""Chains: collectives and the local moves between them, from where data is made to where it is used.

Data that is only moved is followed from collective to collective, up to a value that is used: by arithmetic, by a
loop, or as a result. Such a value has to be there, so a chain ends with it, and what moves it on is another chain.
Every collective is in exactly one chain; a reduction is a chain of its own, since it makes new data.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from reshard.doctor.flow import Flow, Scope, Site, Value
from reshard.doctor.index_maps import Movement
from reshard.hlo import Collective

REDUCTIONS = ("all_reduce", "reduce_scatter")
_LOCAL = ("copy", "convert", "bitcast", "reshape", "transpose", "slice", "reverse", "broadcast", "pad", "select")
_Waiting = dict[tuple[str, str], list[Collective]]


@dataclass(frozen=True, eq=False)
class Chain:
    """Collectives that move the same data, in the order of the text.

    `values` hold that data, from the first collective on, in order; `results` are those of them that it was moved
    for, each with what is used of it, and `leaves` what the data was before.
    """

    region: Scope
    collectives: tuple[Collective, ...]
    values: tuple[Value, ...] = field(default=(), repr=False)
    results: Mapping[Value, tuple[Value, ...]] = field(default_factory=dict[Value, tuple[Value, ...]], repr=False)
    leaves: frozenset[Value] = field(default=frozenset(), repr=False)

    @property
    def reduces(self) -> bool:
        """Whether it is a reduction."""
        return any(collective.kind in REDUCTIONS for collective in self.collectives)


def chains(flow: Flow, movement: Movement, collectives: Sequence[Collective]) -> Iterator[Chain]:
    """The chains of a module; each of its collectives is in exactly one."""
    waiting: _Waiting = {}
    for collective in collectives:
        waiting.setdefault((collective.computation, collective.name), []).append(collective)
    for region in flow.regions:
        yield from _Region(flow, movement, region, waiting).chains()
    for left in waiting.values():  # in computations that no region opens
        yield from (Chain(flow.regions[0], (collective,)) for collective in left)


class _Region:
    """The chains of one region; its collectives are taken from those that wait."""

    def __init__(self, flow: Flow, movement: Movement, region: Scope, waiting: _Waiting) -> None:
        self.flow = flow
        self.movement = movement
        self.region = region
        self.sites = [site for site in flow.sites(region) if not flow.is_view(site)]
        self.collectives = {_whole(site): taken for site in self.sites if (taken := _taken(site, waiting))}
        self.carried: dict[Value, bool] = {}
        self.used: set[Value] = set()
        self.needed: set[Value] = set()
        self.joined = {start: start for start in self.collectives}
        self.known: dict[Value, Value | None] = {}

    def chains(self) -> Iterator[Chain]:
        if not self.collectives:
            return
        values = [value for site in self.sites for value in self._made(site) if self.is_carried(value)]
        self.used = self._used(values)
        self.needed = self._needed(values)
        through = {value: start for value in values if (start := self.through(value)) is not None}
        inside = _grouped((self._root(start), value) for value, start in through.items())
        ends = _grouped((self._result(value), value) for value in values if value in self.used)
        for root, starts in _grouped((self._root(start), start) for start in self.collectives).items():
            found = tuple(inside.get(root, ()))
            results = {value: tuple(ends.get(value, ())) for value in found if value in self.needed}
            collectives = tuple(self.collectives[start] for start in starts)
            yield Chain(self.region, collectives, found, results, self._leaves(found))

    def is_carried(self, value: Value) -> bool:
        """Whether it is data that a collective has moved, and nothing has changed since."""
        if value not in self.carried:
            self.carried[value] = False
            start = self.collectives.get(_plain(value))
            sources = () if start is not None else self.movement.sources(value) or ()
            self.carried[value] = (start is not None and start.kind not in REDUCTIONS) or any(
                self.is_carried(source) for source in sources
            )
        return self.carried[value]

    def through(self, value: Value) -> Value | None:
        """A collective that its elements came through since they were needed last, all such being joined."""
        if value not in self.known:
            self.known[value] = None
            self.known[value] = self._found(value) if self.is_carried(value) else None
        return self.known[value]

    def _found(self, value: Value) -> Value | None:
        starts = [_plain(value)] if _plain(value) in self.collectives else []
        for source in self.movement.sources(value) or ():
            if source not in self.needed and (start := self.through(source)) is not None:
                starts.append(start)
        for start in starts:
            self.joined[self._root(start)] = self._root(starts[0])
        return starts[0] if starts else None

    def _root(self, start: Value) -> Value:
        while self.joined[start] != start:  # ends: whatever is joined to another is no root any more
            start = self.joined[start]
        return start

    def _made(self, site: Site) -> Iterator[Value]:
        """The arrays that an instruction makes itself."""
        for part in self.flow.parts(_whole(site)):
            if part.name == site.instruction.name and part.scope is site.scope:
                yield part

    def _used(self, values: Sequence[Value]) -> set[Value]:
        """The values that something other than a move takes, or that the region yields."""
        moved = set(values)
        root = self.region.computation.root
        taken = [] if root is None else [Value(self.region, root.name)]
        for site in self.sites:
            if moved.isdisjoint(self._made(site)):
                taken += [Value(site.scope, name) for name in site.instruction.operands]
        return {part for value in taken for part in self.flow.parts(value)} & moved

    def _needed(self, values: Sequence[Value]) -> set[Value]:
        """What is used, and what that is only another form of."""
        found = set(self.used)
        for value in reversed(values):  # a value comes before those made of it
            if value in found and (source := self._formed(value)) is not None:
                found.add(source)
        return found

    def _formed(self, value: Value) -> Value | None:
        """The moved value that this is only another form of, on the same device."""
        if value.opcode not in _LOCAL:
            return None
        return next((source for source in self.movement.sources(value) or () if self.is_carried(source)), None)

    def _result(self, value: Value) -> Value:
        while (source := self._formed(value)) is not None:  # ends: no value is formed of itself
            value = source
        return value

    def _leaves(self, inside: tuple[Value, ...]) -> frozenset[Value]:
        """What the values of a chain are made of, where the data was made or needed before."""
        found: set[Value] = set()
        seen: set[Value] = set(inside)
        queue = [source for value in inside for source in self.movement.sources(value) or ()]
        while queue:  # ends: each value is looked at once
            value = queue.pop()
            if value in seen:
                continue
            seen.add(value)
            sources = None if value in self.needed else self.movement.sources(value)
            if sources is None:
                found.add(value)
            queue += sources or ()
        return frozenset(found)


def _grouped(pairs: Iterable[tuple[Value, Value]]) -> dict[Value, list[Value]]:
    found: dict[Value, list[Value]] = {}
    for key, value in pairs:
        found.setdefault(key, []).append(value)
    return found


def _plain(value: Value) -> Value:
    return Value(value.scope, value.name)


def _whole(site: Site) -> Value:
    return Value(site.scope, site.instruction.name)


def _taken(site: Site, waiting: _Waiting) -> Collective | None:
    """The collective that stands at a site, if it still waits."""
    left = waiting.get((site.scope.computation.name, site.instruction.name))
    return left.pop(0) if left else None
