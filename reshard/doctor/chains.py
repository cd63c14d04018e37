"""Chains: collectives and the local moves between them, from where data is made to where it is used.

    %a = all-gather(%p) ; %c = copy(%a) ; %b = all-gather(%c) ; add(%b, %b)      one chain: p is moved, then used
    %a = all-gather(%p) ; %c = add(%a, %a) ; %b = all-gather(%c)                 two: the add needs %a and makes %c

Data that is only moved is followed from collective to collective, up to a value that is used: by arithmetic, by a
loop, or as a result of the region. A used value must exist, so the chain ends with it; whatever moves it on is another
chain. Every collective is in exactly one chain. A reduction is a chain of its own, since it makes new data; unless it
is asked to begin the chain of what is done with the sum:

    %s = all-reduce(%p) ; %d = dynamic-slice(%s) ; add(%d, %d)                   one chain, which a reduce-scatter does
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from reshard.doctor.dataflow.flow import Flow, HloValue, Scope, Site
from reshard.doctor.dataflow.index_maps import IndexMaps
from reshard.hlo import Collective

REDUCTIONS = ("all_reduce", "reduce_scatter")
_LOCAL = ("copy", "convert", "bitcast", "reshape", "transpose", "slice", "reverse", "broadcast", "pad", "select")
_Pending = dict[tuple[str, str], list[Collective]]


@dataclass(frozen=True, eq=False)
class Chain:
    """Collectives that move the same data, in the order of the text.

    `values` hold this data, in order, from the first collective on. `results` are the values that it was moved for,
    each with the forms of it that are used; `leaves` are the values that the data came from.
    """

    region: Scope
    collectives: tuple[Collective, ...]
    values: tuple[HloValue, ...] = field(default=(), repr=False)
    results: Mapping[HloValue, tuple[HloValue, ...]] = field(
        default_factory=dict[HloValue, tuple[HloValue, ...]], repr=False
    )
    leaves: frozenset[HloValue] = field(default=frozenset(), repr=False)

    @property
    def reduces(self) -> bool:
        """Whether the chain is a reduction."""
        return any(collective.kind in REDUCTIONS for collective in self.collectives)

    def is_part_of(self, other: Chain) -> bool:
        """Whether the other chain has all its collectives."""
        names = {(each.computation, each.name) for each in other.collectives}
        return all((each.computation, each.name) in names for each in self.collectives)


def list_chains(
    flow: Flow, maps: IndexMaps, collectives: Sequence[Collective], *, from_sums: bool = False
) -> Iterator[Chain]:
    """The chains of a module; each of its collectives is in exactly one. They begin with all-reduces if `from_sums`."""
    pending: _Pending = {}
    for collective in collectives:
        pending.setdefault((collective.computation, collective.name), []).append(collective)
    for region in flow.regions:
        yield from _Region(flow, maps, region, pending, from_sums).chains()
    for rest in pending.values():  # in computations that no region opens
        yield from (Chain(flow.regions[0], (collective,)) for collective in rest)


class _Region:
    """The chains of one region; it takes its collectives from `pending`."""

    def __init__(self, flow: Flow, maps: IndexMaps, region: Scope, pending: _Pending, from_sums: bool) -> None:
        self.flow = flow
        self.maps = maps
        self.region = region
        self.makes = tuple(kind for kind in REDUCTIONS if not (from_sums and kind == "all_reduce"))
        self.sites = flow.makers(region)
        self.collectives: dict[HloValue, Collective] = {}
        for site in self.sites:  # A computation that is called twice has its collectives once for each call.
            if rest := pending.get((site.scope.computation.name, site.instruction.name)):
                self.collectives[_result_of(site)] = rest.pop(0)
        self.used: set[HloValue] = set()
        self.needed: set[HloValue] = set()
        self._moved: dict[HloValue, bool] = {}
        self._joined = {start: start for start in self.collectives}
        self._through: dict[HloValue, HloValue | None] = {}

    def chains(self) -> Iterator[Chain]:
        if not self.collectives:
            return
        moves = [site for site in self.sites if self._may_move(site)]
        values = [value for site in moves for value in self._made(site) if self.is_moved(value)]
        self.used = self._used(values)
        self.needed = set(self.used)
        for value in reversed(values):  # A value comes before the values made of it: its forms are needed if it is.
            if value in self.needed and (source := self._earlier_form(value)) is not None:
                self.needed.add(source)
        starts = [(start, value) for value in values if (start := self.through(value)) is not None]
        by_chain = _group_values((self._root(start), value) for start, value in starts)
        used_forms: dict[HloValue, list[HloValue]] = {}
        for value in values:
            if value in self.used:
                first = value
                while (source := self._earlier_form(first)) is not None:  # ends: no value is a form of itself
                    first = source
                used_forms.setdefault(first, []).append(value)
        for root, members in _group_values((self._root(start), start) for start in self.collectives).items():
            inside = tuple(by_chain.get(root, ()))
            results = {value: tuple(used_forms.get(value, ())) for value in inside if value in self.needed}
            collectives = tuple(self.collectives[start] for start in members)
            yield Chain(self.region, collectives, inside, results, self._leaves(inside))

    def _may_move(self, site: Site) -> bool:
        """Whether an instruction may yield data that was only moved; most are seen to make their own."""
        return site.instruction.opcode in self.maps.moves or _result_of(site) in self.collectives

    def is_moved(self, value: HloValue) -> bool:
        """Whether a collective has moved this data, and nothing has changed it since."""
        if value not in self._moved:
            self._moved[value] = False
            start = self.collectives.get(_without_path(value))
            sources = () if start is not None else self.maps.sources(value) or ()
            self._moved[value] = (start is not None and start.kind not in self.makes) or any(
                self.is_moved(source) for source in sources
            )
        return self._moved[value]

    def through(self, value: HloValue) -> HloValue | None:
        """A collective that the value's elements came through since they were last needed.

        Joins all such collectives into one chain.
        """
        if value in self._through:
            return self._through[value]
        self._through[value] = None
        if not self.is_moved(value):
            return None
        own = _without_path(value)
        starts = [own] if own in self.collectives else []
        for source in self.maps.sources(value) or ():
            if source not in self.needed and (start := self.through(source)) is not None:
                starts.append(start)
        for start in starts:
            self._joined[self._root(start)] = self._root(starts[0])
        self._through[value] = starts[0] if starts else None
        return self._through[value]

    def _root(self, start: HloValue) -> HloValue:
        """The collective that stands for the chain of this one."""
        while self._joined[start] != start:  # ends: a collective that is joined to another is never a root again
            start = self._joined[start]
        return start

    def _made(self, site: Site) -> Iterator[HloValue]:
        """The arrays that an instruction makes itself."""
        for value in self.flow.array_origins(_result_of(site)):
            if value.name == site.instruction.name and value.scope is site.scope:
                yield value

    def _used(self, values: Sequence[HloValue]) -> set[HloValue]:
        """The values used by an instruction that is not a move, and those that the region yields."""
        moved = set(values)
        root = self.region.computation.root
        taken = {} if root is None else {HloValue(self.region, root.name): None}
        for site in self.sites:
            if not self._may_move(site) or moved.isdisjoint(self._made(site)) or self._reduces(_result_of(site)):
                taken.update((HloValue(site.scope, name), None) for name in site.instruction.operands)
        return {origin for value in taken for origin in self.flow.array_origins(value)} & moved

    def _reduces(self, value: HloValue) -> bool:
        start = self.collectives.get(_without_path(value))
        return start is not None and start.kind in REDUCTIONS

    def _earlier_form(self, value: HloValue) -> HloValue | None:
        """The moved value that this one is a form of: the same elements on the same device, renamed or reordered."""
        if value.opcode not in _LOCAL:
            return None
        return next((source for source in self.maps.sources(value) or () if self.is_moved(source)), None)

    def _leaves(self, inside: tuple[HloValue, ...]) -> frozenset[HloValue]:
        """The values that a chain's values come from: made by arithmetic, or needed before."""
        leaves: set[HloValue] = set()
        seen: set[HloValue] = set(inside)
        queue = [source for value in inside for source in self.maps.sources(value) or ()]
        queue += [source for value in inside if self._reduces(value) for source in self.flow.operands(value)]
        while queue:  # ends: each value is looked at once
            value = queue.pop()
            if value in seen:
                continue
            seen.add(value)
            sources = None if value in self.needed else self.maps.sources(value)
            if sources is None:
                leaves.add(value)
            queue += sources or ()
        return frozenset(leaves)


def _group_values(pairs: Iterable[tuple[HloValue, HloValue]]) -> dict[HloValue, list[HloValue]]:
    groups: dict[HloValue, list[HloValue]] = {}
    for key, value in pairs:
        groups.setdefault(key, []).append(value)
    return groups


def _without_path(value: HloValue) -> HloValue:
    return HloValue(value.scope, value.name)


def _result_of(site: Site) -> HloValue:
    return HloValue(site.scope, site.instruction.name)
