"""Chains: collectives and the local moves between them, from where data is made to where it is used.

What they are:

    %a = all-gather(%p) ; %c = copy(%a) ; %b = all-gather(%c) ; add(%b, %b)      one chain: p is moved, then used
    %a = all-gather(%p) ; %c = add(%a, %a) ; %b = all-gather(%c)                 two: the add needs %a and makes %c

Data that is only moved is followed from collective to collective, up to a value that is used: by arithmetic, by a
loop, or as a result of the region. A used value must exist, so the chain ends with it; whatever moves it on is another
chain. Every collective is in exactly one chain. A reduction is a chain of its own, since it makes new data; unless it
is asked to begin the chain of what is done with the sum:

    %s = all-reduce(%p) ; %d = dynamic-slice(%s) ; add(%d, %d)                   one chain, which a reduce-scatter does

A `ChainReader` says what a chain moves, and what a fragment would have to make in its place:

    %s = f32[8,64] fusion(...)                     source: the operand of the first collective
    %g = f32[64,64] all-gather(%s)
    %f = f32[64,8] fusion(%g, %id), calls=%body    use: %d inside of %f, the slice that each device takes
      %d = f32[64,8] dynamic-slice(%p0, ...)

The move is f32[{d0}8, 64] -> f32[64, {d0}8]; a plan for it, given %s, yields %d. What is found here is a proposal: the
rewritten module is traced again, and must take every element from where it came before.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple

import numpy as np

from reshard.doctor.dataflow.flow import Flow, HloValue, Numbering, Scope, Site
from reshard.doctor.dataflow.index_maps import COLLECTIVES, IndexMaps, Unconvertible, Untraceable, find_conversion
from reshard.doctor.dataflow.scalars import Numbers
from reshard.doctor.dataflow.trace import Tracer, count_value_elements, is_sum, summed_digits
from reshard.doctor.infer_layouts import Cuts, InferredMove, are_disjoint, find_joined, infer_layouts, infer_pick
from reshard.doctor.places import REDUCTION, RESHARD, ArrayMove, Known, PassOutcome, Place
from reshard.doctor.shifts import Shift, infer_shift
from reshard.errors import ReshardError
from reshard.geometry.refine import prime_digits, refine
from reshard.hlo import Array, Collective, Instruction, Source
from reshard.hlo.splice import Exposed, Use
from reshard.plans.plan import Plan
from reshard.plans.rules.bounds import lower_bound
from reshard.types.layout import Layout
from reshard.types.mesh import Mesh

REDUCTIONS = ("all_reduce", "reduce_scatter")
_LOCAL = ("copy", "convert", "bitcast", "reshape", "transpose", "slice", "reverse", "broadcast", "pad", "select")
_RENAMED = ("copy", "bitcast", "reshape", "transpose")

Dims = tuple[int, ...]
Pair = tuple[Layout, Layout]
Planner = Callable[[Pair], Plan | None]
"""Plans a move between two layouts; None if there is no plan."""
ShiftForm = Literal["used", "stored", "arriving"]
"""What shifts make: the values that are used, the arrays in memory that these are made of, or what arrives for them."""
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


def place_chain(chain: Chain, outcome: PassOutcome | None = None) -> Place:
    """The place of a chain, before anything but its outcome is known; it is at the first line of the user's own."""
    sources = [collective.source for collective in chain.collectives]
    where = next((source for source in sources if source.exact and source.file), sources[0])
    kind = REDUCTION if chain.reduces else RESHARD
    return Place(kind, where, chain.region.computation.name, chain.collectives, outcome=outcome)


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


def join_chains(chains: Sequence[Chain], collectives: Sequence[Collective]) -> Chain:
    """Several chains of one region as one; `collectives` are those of the module, in order."""
    own = {one for chain in chains for one in chain.collectives}
    results: dict[HloValue, tuple[HloValue, ...]] = {}
    for chain in chains:
        results.update(chain.results)
    return Chain(
        chains[0].region, tuple(one for one in collectives if one in own),
        tuple(dict.fromkeys(value for chain in chains for value in chain.values)), results,
        frozenset[HloValue]().union(*(chain.leaves for chain in chains)),
    )  # fmt: skip


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
        self.needed: set[HloValue] = set()
        self._moved: dict[HloValue, bool] = {}
        self._joined = {start: start for start in self.collectives}
        self._through: dict[HloValue, HloValue | None] = {}

    def chains(self) -> Iterator[Chain]:
        if not self.collectives:
            return
        # Most instructions are seen to make data of their own.
        made = {
            site: list(self._made(site))
            if site.instruction.opcode in self.maps.moves or _result_of(site) in self.collectives
            else []
            for site in self.sites
        }
        values = [value for site in self.sites for value in made[site] if self.is_moved(value)]
        # Used is what an instruction takes that is not a move, and what the region yields.
        moved, root = set(values), self.region.computation.root
        taken = {} if root is None else {HloValue(self.region, root.name): None}
        for site in self.sites:
            if moved.isdisjoint(made[site]) or self._reduces(_result_of(site)):
                taken.update((HloValue(site.scope, name), None) for name in site.instruction.operands)
        used = {origin for value in taken for origin in self.flow.array_origins(value)} & moved
        self.needed = set(used)
        for value in reversed(values):  # A value comes before the values made of it: its forms are needed if it is.
            if value in self.needed and (source := self._earlier_form(value)) is not None:
                self.needed.add(source)
        forms: dict[HloValue, list[HloValue]] = {}
        for value in values:
            if value in used:
                first = value
                while (source := self._earlier_form(first)) is not None:  # ends: no value is a form of itself
                    first = source
                forms.setdefault(first, []).append(value)
        starts = [(start, value) for value in values if (start := self.through(value)) is not None]
        members: dict[HloValue, list[HloValue]] = {}
        inside: dict[HloValue, list[HloValue]] = {}
        for start in self.collectives:
            members.setdefault(self._root(start), []).append(start)
        for start, value in starts:
            inside.setdefault(self._root(start), []).append(value)
        for root, own in members.items():
            held = tuple(inside.get(root, ()))
            results = {value: tuple(forms.get(value, ())) for value in held if value in self.needed}
            yield Chain(self.region, tuple(self.collectives[start] for start in own), held, results, self._leaves(held))

    def _made(self, site: Site) -> Iterator[HloValue]:
        """The arrays that an instruction makes itself."""
        for value in self.flow.array_origins(_result_of(site)):
            if value.name == site.instruction.name and value.scope is site.scope:
                yield value

    def is_moved(self, value: HloValue) -> bool:
        """Whether a collective has moved this data, and nothing has changed it since."""
        if value not in self._moved:
            self._moved[value] = False
            start = self.collectives.get(value._replace(path=()))
            sources = () if start is not None else self.maps.sources(value) or ()
            moves = start is not None and start.kind not in self.makes
            self._moved[value] = moves or any(self.is_moved(source) for source in sources)
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
        own = value._replace(path=())
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

    def _reduces(self, value: HloValue) -> bool:
        start = self.collectives.get(value._replace(path=()))
        return start is not None and start.kind in REDUCTIONS

    def _earlier_form(self, value: HloValue) -> HloValue | None:
        """The moved value that this one is a form of: the same elements on the same device, renamed or reordered."""
        if value.opcode not in _LOCAL:
            return None
        # What is put together of several is a form of none of them.
        moved = [source for source in self.maps.sources(value) or () if self.is_moved(source)]
        return moved[0] if len(moved) == 1 else None

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
            if sources is None and not self.maps.is_constant(value):  # padding comes from nowhere
                leaves.add(value)
            queue += sources or ()
        return frozenset(leaves)


def _result_of(site: Site) -> HloValue:
    return HloValue(site.scope, site.instruction.name)


class Unfit(Exception):
    """Why a chain cannot be replaced."""


class NoLayouts(Unfit):
    """That no layouts describe what a chain does."""


@dataclass(frozen=True)
class Replacement:
    """A value to make from `sources`, instructions of the chain's region, and the `uses` that it replaces.

    `leaves` are what the sources yield, or the sum of that over devices if the chain begins with a reduction; `sums`
    are then its reductions, each the sum of the one before. `befores` and `after` are the arrays of one device, with
    their memory layouts. Either the `move` is known, or the `shift` that yields the value, whose data is moved as
    `dtype`, or the value is put together of `parts`, one for each cell between the `cuts` along its dims: those in
    row-major order, without uses of their own.
    """

    sources: tuple[str, ...]
    uses: tuple[Use, ...]
    values: tuple[HloValue, ...]
    leaves: tuple[HloValue, ...]
    befores: tuple[Array, ...]
    after: Array
    move: InferredMove | None
    shift: Shift | None = None
    dtype: str = ""
    sums: tuple[HloValue, ...] = ()
    parts: tuple[Replacement, ...] = ()
    cuts: Cuts = ()

    @property
    def pieces(self) -> tuple[Replacement, ...]:
        """What is moved by itself: its parts, or all of it."""
        return self.parts or (self,)

    @property
    def is_summed(self) -> bool:
        """Whether the move adds up tiles."""
        return self.move is not None and bool(self.move.source.partial)


class LeafOrigin(NamedTuple):
    """What is known of an array before a chain: `firsts` is the first device, for each, that has a copy of its tile.

    `move` is what the chain does with it, and `where` the line. If it is `named`, the program says so; else all of it
    was inferred.
    """

    firsts: Numbers
    move: ArrayMove
    where: Source
    named: bool


class ChainMoves(NamedTuple):
    """The moves of a chain, and its origin: the user's own line, if one of the moves is a known one.

    `leaves` says what is known of the arrays before the chain, by their numbers. `counted_bytes` are the bytes that
    arrive and are used in all moves together, None if that was not counted.
    """

    moves: tuple[ArrayMove, ...]
    where: Source
    leaves: Mapping[int, LeafOrigin]
    counted_bytes: int | None = None


class ChainReader:
    """Reads what the chains of a module do; `mesh` is the program's, if it is known.

    The pass and the report ask the same reader: `replacements` says what a fragment has to yield, and `moves` what the
    arrays are that the chain moves. The elements of a value are followed once for both.
    """

    def __init__(self, flow: Flow, maps: IndexMaps, numbering: Numbering, mesh: Mesh | None) -> None:
        self.flow = flow
        self.maps = maps
        self.numbering = numbering
        self.mesh = mesh
        self._regions: dict[Scope, dict[HloValue, str]] = {}
        self._known: dict[tuple[object, ...], tuple[Tracer, InferredMove | None]] = {}

    def _infer_move(
        self, leaves: frozenset[HloValue], value: HloValue, dtype: str, summed: Sequence[tuple[int, int]] = ()
    ) -> tuple[Tracer, InferredMove | None]:
        """The move from leaves to a value, in that dtype, None if no two layouts describe it; and the tracer used.

        It is that of a sum over the digits `summed` of the device, if there are any.
        """
        key = leaves, value, dtype, tuple(summed)
        if key not in self._known:
            tracer = Tracer(self.maps, self.numbering, leaves)
            self._known[key] = tracer, infer_layouts(tracer, value, self.mesh, dtype, summed)
        return self._known[key]

    def replacements(self, chain: Chain) -> tuple[Replacement, ...]:
        """What has to be made for the chain's results; raises `Unfit` with the reason if that is not known."""
        sums = [one for one in chain.collectives if one.kind in REDUCTIONS]
        if not _are_traceable(one for one in chain.collectives if one not in sums):
            raise Unfit("it has a collective whose index map is not known")
        for at, one in enumerate(sums):
            each = HloValue(chain.region, one.name)
            if one.computation != chain.region.computation.name:
                raise Unfit(f"{each.name} runs inside another instruction")
            if each.opcode != "all-reduce" or not is_sum(self.flow, each):
                raise Unfit(f"{each.name} is not the sum of one array")
            if at and one.instruction.operands[0] != sums[at - 1].name:
                raise Unfit(f"{each.name} does not add up the sums before it")
        if sums:
            leaf, source = HloValue(chain.region, sums[-1].name), sums[0].instruction.operands[0]
        else:
            source, leaf = self._find_source(chain) or ("", None)
        if leaf is not None and leaf.array is None:
            raise Unfit(f"{source} is not an array")
        wanted = self._group_equal(self._list_wanted(chain))
        try:
            return tuple(self._make_any(chain, source, leaf, values) for values in wanted)
        except (Untraceable, Unconvertible) as error:
            raise Unfit(str(error)) from None

    def _list_wanted(self, chain: Chain) -> Iterator[HloValue]:
        """The values that are to be made instead of a chain."""
        for value, used in chain.results.items():
            if value.array is None:
                raise Unfit(f"{value.name} is not an array")
            # Where only parts of a result are used, these parts are made.
            is_whole = not used or any(one.array and one.array.elements >= value.array.elements for one in used)
            for form in (value,) if is_whole else used:
                # Where it is put together of what the chain moves and of other arrays, what the chain moves is made.
                made_of = self.maps.sources(form) or () if form.opcode in ("concatenate", "select") else ()
                moved = [one for one in made_of if one in chain.values]
                parts = moved if 0 < len(moved) < len(made_of) else [form]
                yield from map(self._before_widening, dict.fromkeys(parts))

    def _list_parts(self, chain: Chain, form: ShiftForm) -> Iterator[HloValue]:
        """The values that a chain's results are made of: those stored nearest to them, or those that arrive last."""
        made = {HloValue(chain.region, one.name) for one in chain.collectives}
        moved, stored = set(chain.values), self._stored(chain.region)
        seen: set[HloValue] = set()
        queue = [form for value, used in chain.results.items() for form in (value, *used)]
        while queue:  # ends: each value is looked at once
            value = queue.pop()
            if value in seen:
                continue
            seen.add(value)
            if value._replace(path=()) in made or (form == "stored" and value in moved and value in stored):
                yield value
            elif value not in chain.leaves:
                queue += self.maps.sources(value) or ()

    def _group_equal(self, values: Iterable[HloValue]) -> list[list[HloValue]]:
        groups: dict[int, list[HloValue]] = {}
        for one in values:
            groups.setdefault(self.numbering.of(one), []).append(one)
        if not groups:
            raise Unfit("nothing uses its results")
        return list(groups.values())

    def shifts(self, chain: Chain, form: ShiftForm) -> tuple[Replacement, ...]:
        """What has to be made of the chain's only leaf if all of it is shifts; raises `Unfit` if that is not known."""
        if not _are_traceable(chain.collectives):
            raise Unfit("it has a collective whose index map is not known")
        if len({self.numbering.of(one) for one in chain.leaves}) != 1:
            raise Unfit(f"it joins {len(chain.leaves)} arrays")
        source, leaf = self.source_name(chain.region, chain.leaves)
        if leaf.array is None:
            raise Unfit(f"{source} is not an array")
        replacements: list[Replacement] = []
        values = self._list_wanted(chain) if form == "used" else self._list_parts(chain, form)
        for alike in self._group_equal(dict.fromkeys(values)):
            value, after = alike[0], alike[0].array
            if after is None or value.path or any(one.array != after for one in alike):
                raise Unfit(f"{value.name} is part of a tuple, or used in several memory layouts")
            try:
                dtype = find_conversion(self.maps, value, leaf).narrowest
            except Unconvertible as error:
                raise Unfit(str(error)) from None
            shift = infer_shift(Tracer(self.maps, self.numbering, frozenset({leaf})), value)
            if shift is None:
                raise NoLayouts(f"no shift describes how {value.name} comes from {source}")
            uses = tuple(use_of(chain.region, one) for one in alike)
            replacements.append(
                Replacement(
                    (source,), uses, tuple(alike), (leaf,), (leaf.array,), after, None, shift=shift, dtype=dtype
                )
            )
        return tuple(replacements)

    def _make_any(self, chain: Chain, source: str, leaf: HloValue | None, values: Sequence[HloValue]) -> Replacement:
        """The replacement of equal values: of what one array is moved to, or what several are joined in."""
        try:
            if leaf is not None:
                return self._make_replacement(chain, source, leaf, values)
        except NoLayouts:
            if chain.reduces or len(chain.leaves) == 1:
                raise
        # Several arrays are joined, each of which is moved by itself.
        value, after = values[0], values[0].array
        tracer = Tracer(self.maps, self.numbering, chain.leaves)
        joined = find_joined(tracer, value)
        if after is None or joined is None:
            raise Unfit(f"it joins {len(chain.leaves)} arrays, and not in the same way on all devices")
        names: dict[int, str] = {}
        sources: dict[str, HloValue] = {}
        for number in dict.fromkeys(joined.leaves):
            name, leaf = self.source_name(chain.region, (tracer.ends[number],))
            if leaf in self._stored(chain.region):
                name, leaf = self._narrow_source(chain.region, name)
            names[number], sources[name] = name, leaf
        if len(sources) == 1:
            ((name, leaf),) = sources.items()
            return self._make_replacement(chain, name, leaf, values)
        parts: list[Replacement] = []
        for box, number in zip(joined.boxes, joined.leaves, strict=True):
            name = names[number]
            leaf, dtype = sources[name], find_conversion(self.maps, value, sources[name]).narrowest
            move = infer_layouts(Tracer(self.maps, self.numbering, frozenset({leaf})), value, self.mesh, dtype, (), box)
            if move is None or leaf.array is None:
                raise NoLayouts(f"no two layouts describe how a part of {value.name} comes from {name}")
            cell = Array(after.dtype, tuple(end - first for first, end in box), after.layout)
            parts.append(Replacement((name,), (), (), (leaf,), (leaf.array,), cell, move, None, dtype))
        uses = tuple(use_of(chain.region, one) for one in values)
        leaves = tuple(sources.values())
        befores = tuple(leaf.array for leaf in leaves if leaf.array is not None)
        return Replacement(
            tuple(sources), uses, tuple(values), leaves, befores, after, None, parts=tuple(parts), cuts=joined.cuts
        )

    def _make_replacement(self, chain: Chain, source: str, leaf: HloValue, values: Sequence[HloValue]) -> Replacement:
        """The replacement of equal values."""
        value, after = values[0], values[0].array
        if leaf.array is None or after is None or value.path:
            raise Unfit(f"{value.name} is part of a tuple")
        if any(one.array != after for one in values):
            raise Unfit(f"{value.name} is used in several memory layouts")
        sums = tuple(HloValue(chain.region, one.name) for one in chain.collectives if one.kind in REDUCTIONS)
        summed = [digit for each in sums for digit in summed_digits(self.maps, each)]
        if not are_disjoint(summed, self.maps.scalars.devices):
            raise Unfit(f"{leaf.name} adds up what was added up along the same devices before")
        converted = find_conversion(self.maps, value, leaf)
        # Data is moved in the narrowest dtype that it has on the way, and a sum in its own.
        if summed and converted.narrowest not in (converted.before, converted.after):
            raise Unfit(f"it rounds the sum to {converted.narrowest} on the way")
        dtype = converted.before if summed else converted.narrowest
        (tracer, move), shift = self._infer_move(frozenset({leaf}), value, dtype, summed), None
        if move is None and not summed:
            move = infer_pick(tracer, value, dtype)
            shift = infer_shift(tracer, value) if move is None else None
        if move is None and shift is None:
            raise NoLayouts(f"no two layouts describe how {value.name} comes from {source}")
        uses = tuple(use_of(chain.region, one) for one in values)
        return Replacement((source,), uses, tuple(values), (leaf,), (leaf.array,), after, move, shift, dtype, sums)

    def _before_widening(self, value: HloValue) -> HloValue:
        """The same elements in a narrower dtype, if the value is that converted."""
        while value.opcode == "convert":  # ends: each step goes back to an operand
            (before,) = self.flow.operands(value)
            if before.array is None or value.array is None or before.array.nbytes >= value.array.nbytes:
                break
            if self.maps.sources(before) is None or before.opcode in COLLECTIVES:
                break
            value = before
        return value

    def _find_source(self, chain: Chain) -> tuple[str, HloValue] | None:
        """The instruction of the region that has the data before the first collectives, and that data.

        None if the chain joins several arrays.
        """
        region, moved = chain.region, set(chain.values)
        first: dict[int, str] = {}
        for collective in chain.collectives:
            if collective.computation != region.computation.name:
                raise Unfit(f"{collective.name} runs inside another instruction")
            for name in region.computation.by_name[collective.name].operands:
                origin = self.flow.origin(HloValue(region, name))
                if origin not in moved:
                    first.setdefault(self.numbering.of(origin), name)
        if len(first) != 1:
            is_one = len({self.numbering.of(leaf) for leaf in chain.leaves}) == 1
            return self.source_name(region, chain.leaves) if is_one else None
        return self._narrow_source(region, *first.values())

    def _narrow_source(self, region: Scope, name: str) -> tuple[str, HloValue]:
        """The instruction that has the same elements in a narrower dtype, before a conversion: fewer bytes to move."""
        value = self.flow.origin(HloValue(region, name))
        while value.array is not None and value.opcode in ("convert", *_RENAMED):  # ends: goes back to an operand
            (before,) = self.flow.operands(value)
            if before.array is not None and before.array.nbytes < value.array.nbytes and before.opcode != "constant":
                name = self._stored(region).get(before, name)
                break
            value = before
        return name, self.flow.origin(HloValue(region, name))

    def source_name(self, region: Scope, leaves: Collection[HloValue]) -> tuple[str, HloValue]:
        """The instruction of a region that yields one of equal values, or the fusion that could; and that value."""
        for value, name in self._stored(region).items():
            if value in leaves:
                return name, value
        # A loop over elements, which calls nothing and has no effect, can yield what it computes on the way.
        for value in sorted(leaves, key=self.flow.position):
            caller = value.scope.caller
            if caller is None or value.path or not value.scope.opened or caller.scope is not region:
                continue
            is_free = not any(one.called or one.opcode.startswith(("rng", "custom-call")) for one in list_makers(value))
            if is_free and caller.instruction.attributes.get("kind") == "kLoop":
                return Exposed(region.computation.name, caller.instruction.name, value.name).source, value
        raise Unfit("its source is made inside a fusion")

    def _stored(self, region: Scope) -> dict[HloValue, str]:
        """The arrays that the instructions of a region yield."""
        if region not in self._regions:
            known: dict[HloValue, str] = {}
            for instruction in region.computation.instructions:
                value = HloValue(region, instruction.name)
                if value.array is not None:
                    known.setdefault(self.flow.origin(value), instruction.name)
            self._regions[region] = known
        return self._regions[region]

    def moves(self, chain: Chain, where: Source, matcher: Matcher, planner: Planner | None) -> ChainMoves:
        """The moves of a chain, equal ones once; `matcher` has those that the program is known to need.

        Each has its plan, if a `planner` is given.
        """
        results: dict[int, HloValue] = {}
        for value in chain.results:
            results.setdefault(self.numbering.of(value), value)
        moves: Counter[ArrayMove] = Counter()
        leaves: dict[int, LeafOrigin] = {}
        for value in results.values():
            origin, met = self._read_move(chain, value, where, matcher, planner)
            where = origin.where
            moves[origin.move] += 1
            for leaf in met:
                # Of two moves of an array the first that the program names says most, else it has the copies of both.
                known = leaves.get(leaf)
                if known is None or (origin.named and not known.named):
                    leaves[leaf] = origin
                elif not known.named:
                    leaves[leaf] = known._replace(firsts=origin.firsts[known.firsts])
        alike = tuple(replace(move, arrays=count) for move, count in moves.items())
        counted = None
        if len(results) > 1 and _are_traceable(chain.collectives):
            used = [form for value in results.values() for form in chain.results[value] or (value,)]
            counted = _count_arriving(Tracer(self.maps, self.numbering, chain.leaves), _sent_dtype(chain), used)
        return ChainMoves(alike, where, leaves, counted)

    def _read_move(
        self, chain: Chain, value: HloValue, where: Source, matcher: Matcher, planner: Planner | None
    ) -> tuple[LeafOrigin, Sequence[int]]:
        """The move whose result is `value` with what is known of its origin, and the numbers of the leaves met."""
        dtype, used = _sent_dtype(chain), chain.results[value] or (value,)
        # The form with the fewest dims in which all of a result is used is most likely the user's own shape.
        whole = [form for form in used if count_value_elements(form) == count_value_elements(value)]
        form = min([value, *whole], key=lambda one: 0 if one.array is None else len(one.array.dims))
        tracer, pair, needed, firsts = self._needed(chain, value, form, dtype)
        met = list(tracer.tiles or map(self.numbering.of, chain.leaves))
        received = sum(collective.received_bytes for collective in chain.collectives)
        tiles = [leaf.array for leaf in chain.leaves if leaf.array is not None]
        # XLA may split the tile into several operands, of which only the size is that of the tile.
        operands = [one.operands for one in chain.collectives if one.operands]
        dims = {one.dims for one in tiles} | {
            each[0].dims if len(each) == 1 else (sum(array.elements for array in each),) for each in operands
        }
        forms = {one.array.dims for one in (value, *used) if one.array is not None}
        known = matcher.match(TracedMove(where, dtype, dims, forms, received, needed, pair))
        if known is not None:
            pair = (known.source, known.target)
            file, _, number = known.where.rpartition(":")
            if file and number.isdigit():
                function = where.function if (file, int(number)) == (where.file, where.line) else None
                where = replace(where, file=file, line=int(number), function=function, exact=True)
        # The tile before the move, None if several arrays are moved together.
        tiles = list(tracer.tiles.values()) or tiles
        before = replace(tiles[0], dtype=dtype, layout="") if len(tiles) == 1 else None
        after = replace(form.array or Array(dtype, ()), dtype=dtype, layout="")
        if pair is None:
            most = min(received, after.nbytes)
            move = ArrayMove(before, after, most if needed is None else needed, False)
            return LeafOrigin(firsts, move, where, False), met
        is_whole = known is not None or holds_whole_array(pair[0])
        plan = None if planner is None else planner(pair)
        move = ArrayMove(before, after, lower_bound(*pair), True, *pair, is_whole, plan)
        if known is not None and known.source.mesh.size == tracer.devices and known.source.mesh.device_ids is None:
            firsts = first_copies(known.source)
        return LeafOrigin(firsts, move, where, known is not None), met

    def _needed(
        self, chain: Chain, value: HloValue, form: HloValue, dtype: str
    ) -> tuple[Tracer, Pair | None, int | None, Numbers]:
        """What a result is a move between, the bytes that some device must receive, and the first copies of tiles.

        If only part of a result is used, only that part is needed, and comparing whole layouts overestimates it.
        """
        if not _are_traceable(chain.collectives):
            tracer = Tracer(self.maps, self.numbering, chain.leaves)
            return tracer, None, None, np.arange(tracer.devices)
        used = chain.results[value] or (value,)
        tracer, move = self._infer_move(chain.leaves, form, dtype)
        pair, firsts = (None, np.arange(tracer.devices)) if move is None else (move[:2], move.firsts)
        bound = None if pair is None else lower_bound(*pair)
        if pair is not None and any(count_value_elements(one) >= count_value_elements(value) for one in used):
            return tracer, pair, bound, firsts
        counted = _count_arriving(tracer, dtype, [value], used)
        if counted is not None and counted == bound:
            return tracer, pair, bound, firsts
        known = [count for count in (counted, bound) if count is not None]
        return tracer, None, min(known, default=None), firsts


def list_makers(value: HloValue) -> list[Instruction]:
    """The instructions of its scope that a value is made of, itself among them; parameters last."""
    made: dict[str, Instruction] = {}
    waiting = [value.instruction]
    while waiting:  # ends: each instruction is looked at once
        one = waiting.pop()
        if one.name not in made:
            made[one.name] = one
            waiting += [value.scope.computation.by_name[name] for name in one.operands]
    return list(made.values())


def first_copies(layout: Layout) -> Numbers:
    """For each device, the first that has a copy of its tile.

    >>> from reshard.types import Mesh
    >>> first_copies(Layout.parse("f32[{x}2]", Mesh(x=2, y=2))).tolist()
    [0, 0, 2, 2]
    """
    position = np.arange(layout.mesh.size)
    tile = np.zeros_like(position)
    for axis in (*layout.held, *layout.partial):
        tile = tile * axis.size + position // layout.mesh.stride(axis) % axis.size
    _, first, at = np.unique(tile, return_index=True, return_inverse=True)
    return first[at]


def use_of(region: Scope, value: HloValue) -> Use:
    """The value as seen from the region: the instructions to enter, then its own."""
    path: list[str] = []
    scope = value.scope
    while scope is not region:  # ends: scopes are nested in their callers
        if scope.caller is None or not scope.opened:
            raise Unfit(f"{value.name} is used outside of its region")
        path.append(scope.caller.instruction.name)
        scope = scope.caller.scope
    return Use(tuple(reversed(path)), finishing_name(value))


def finishing_name(value: HloValue) -> str:
    """The instruction that yields the value: for the start of an asynchronous pair, its end."""
    if not value.instruction.opcode.endswith("-start"):
        return value.name
    users = value.scope.computation.users.get(value.name, ())
    ends = [user.name for user in users if user.opcode.endswith("-done")]
    if len(ends) != 1:
        raise Unfit(f"{value.name} has {len(ends)} ends")
    return ends[0]


def holds_whole_array(layout: Layout) -> bool:
    """Whether every mesh axis holds a digit: else, devices along the others may hold other parts of a larger array."""
    return math.prod(axis.size for axis in layout.held) == layout.mesh.size


def _count_arriving(tracer: Tracer, dtype: str, *alternatives: Iterable[HloValue]) -> int | None:
    """The fewest bytes that arrive in lists of values, an element that is in several counted once.

    None if they cannot be followed, or are too many.
    """
    try:
        counts = [tracer.arriving(values) for values in alternatives]
    except Untraceable:
        return None
    known = [count for count in counts if count is not None]
    return Array(dtype, (min(known),)).nbytes if known else None


def _sent_dtype(chain: Chain) -> str:
    """The dtype that is sent, the widest of several."""
    arrays = [array for collective in chain.collectives for array in collective.results]
    return max(arrays, key=lambda array: array.nbytes / max(1, array.elements)).dtype


def _are_traceable(collectives: Iterable[Collective]) -> bool:
    """Whether the text says where every element goes, which it does not for receives between slices."""
    return all(collective.opcode.removesuffix("-start") in COLLECTIVES for collective in collectives)


# Matches a traced move with one of the moves that the program is known to need.
#
# XLA may reshape, convert or transpose the data, and gives it the line of a neighbouring instruction. So a known move
# fits if its tiles, its lower bound and the digits that change holders agree; lines and shapes decide between several.


class TracedMove(NamedTuple):
    """A move as the HLO has it: its origin, the dtype it sends, the dims of its tiles, and its layouts if known.

    The tiles have several forms each: padded, reshaped, and as used. `needed_bytes` is None if the move could not be
    traced.
    """

    where: Source
    dtype: str
    before: Collection[Dims]
    after: Collection[Dims]
    received_bytes: int
    needed_bytes: int | None
    layouts: Pair | None


class Matcher:
    """The known moves, and how often each has been matched."""

    def __init__(self, known: Sequence[Known]) -> None:
        self.known = [move for move in known if move.source != move.target]
        self.matched: Counter[int] = Counter()

    def match(self, traced: TracedMove) -> Known | None:
        """The known move that fits a traced one, with its layouts in the dtype that is sent; None if there is none.

        Moves of the same line come first, then those next to it. Otherwise the match must be unambiguous: every move
        that fits is of one line.
        """
        fits = [at for at, move in enumerate(self.known) if _fits_move(move, traced)]
        line = f"{traced.where.file}:{traced.where.line}"
        nearest = [at for at in fits if self.known[at].where == line]
        nearest = nearest or [at for at in fits if line in self.known[at].near]
        if not nearest and len({self.known[at].where for at in fits}) == 1:
            nearest = fits
        if not nearest:
            return None
        at = min(nearest, key=lambda at: (-_rate_likeness(self.known[at], traced), self.matched[at], at))
        self.matched[at] += 1
        return _as_sent(self.known[at], traced.dtype)


def _fits_move(move: Known, traced: TracedMove) -> bool:
    before, after = (math.prod(layout.tile_shape) for layout in (move.source, move.target))
    if before not in map(math.prod, traced.before) or after not in map(math.prod, traced.after):
        return False
    try:
        bound = lower_bound(*_as_sent(move, traced.dtype)[1:3])
    except ReshardError:
        return False
    if bound > traced.received_bytes or traced.needed_bytes not in (None, bound) or not _rate_likeness(move, traced):
        return False
    # The same digits change holders, in any order: XLA may transpose arrays on the way.
    moved, expected = _moved_digits(traced.layouts), _moved_digits((move.source, move.target))
    return moved is None or expected is None or sorted(moved) == sorted(expected)


def _rate_likeness(move: Known, traced: TracedMove) -> int:
    """How well the tiles' dims and the order of the digits fit a move, rather than its reverse."""
    before, after = (_drop_ones(layout.tile_shape) for layout in (move.source, move.target))
    tiles = (before in map(_drop_ones, traced.before)) + (after in map(_drop_ones, traced.after))
    moved = _moved_digits(traced.layouts)
    return 2 * tiles + (moved is not None and moved == _moved_digits((move.source, move.target)))


def _moved_digits(pair: Pair | None) -> list[tuple[int, int, int]] | None:
    """The digits that change holders, major to minor: radix, and strides of the holders (0 for none)."""
    refinement = None if pair is None else refine(*pair)
    if refinement is None:
        return None
    return [
        (digit.radix, digit.src or 0, digit.dst or 0) for digit in prime_digits(refinement) if digit.src != digit.dst
    ]


def _drop_ones(dims: Dims) -> Dims:
    return tuple(size for size in dims if size != 1)


def _as_sent(move: Known, dtype: str) -> Known:
    """The move in another dtype: XLA may convert before it sends."""
    return move._replace(source=replace(move.source, dtype=dtype), target=replace(move.target, dtype=dtype))


# Chains that surely receive no more than is needed, seen without inferring layouts.
#
# Most collectives of a large program are such, as the gathers of weights in FSDP: one collective, whose result is used
# as it is. Inferring the layouts of each would take most of the time of the pass.


def is_needed(chain: Chain, flow: Flow) -> bool:
    """Whether one collective makes the whole of what is used, from data of the same dtype.

    Where the data has another dtype before or after, a plan could move that, so layouts have to say.
    """
    if len(chain.collectives) != 1 or chain.collectives[0].kind not in ("all_gather", "all_to_all"):
        return False
    made = next((one for one in chain.values if one.name == chain.collectives[0].name), None)
    if made is None or made.array is None or not chain.results or len(chain.leaves) != 1:
        return False
    operands = flow.operands(made)
    while len(operands) == 1 and operands[0].opcode in _RENAMED:  # ends: each step goes back to an operand
        operands = flow.operands(operands[0])
    if len(operands) != 1 or operands[0].opcode == "convert":
        return False
    if any(value.array is None or value.array.dtype != made.array.dtype for value in chain.values):
        return False
    used = [form for value, forms in chain.results.items() for form in forms or (value,)]
    return all(form.array is not None and form.array.elements >= made.array.elements for form in used)
