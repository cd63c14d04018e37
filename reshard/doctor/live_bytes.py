"""What a device holds while a program runs: the buffers that are live at once, by the order of the module's text.

    position  instruction              live
    0         %p = parameter(0)        p                     an argument is live from the start to the end
    1         %g = all-gather(%p)      p, g
    2         %d = dynamic-slice(%g)   p, g, d               the peak: g ends here, d is made
    3         ROOT %r = add(%d, %d)    p, d, r

There is one account, `LiveRanges`: where each array of a region is made, and where it is used last. It is added up in
three ways: for the whole program (`add_up_program`), for that with plans in the place of chains (`PlannedChain`), and
for the values of one chain (`Liveness`).

An instruction that only renames data, or updates it in place, has the buffer of its operand. A loop runs inside its
instruction: there the buffers that it carries are those of its body, and what it passes on unchanged stays outside.
The compiler lets buffers share memory afterwards, so its own figure, which the report shows too, may be lower.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, NamedTuple

from reshard.doctor.chain_reader import Chain, list_makers
from reshard.doctor.dataflow.flow import Flow, HloValue, Numbering, Scope, Site, loop_body, parameter_number
from reshard.doctor.places import Cause, describe_source, format_array
from reshard.hlo import Array, Instruction, Source
from reshard.hlo.module import CallSite, source_of
from reshard.hlo.splice import Exposed

_NO_BUFFER = ("constant", "partition-id", "replica-id", "after-all", "tuple", "get-tuple-element", "bitcast", "domain")
_RUNS = ("while", "conditional")
_NOT_OVERWRITTEN = ("parameter", "bitcast", "get-tuple-element", "constant")
ARGUMENT, CARRIED = "argument", "carried"


class LiveRange(NamedTuple):
    """The bytes of an array, and the positions in the text of the instructions that make it and that use it last."""

    nbytes: int
    made: int
    used: int


def count_live(ranges: Iterable[LiveRange], length: int) -> list[int]:
    """The bytes live at each of `length` positions.

    >>> count_live([LiveRange(64, 0, 2), LiveRange(256, 1, 1)], 4)
    [64, 320, 64, 0]
    """
    changes = [0] * (length + 1)
    for one in ranges:
        changes[min(one.made, length)] += one.nbytes
        changes[min(one.used + 1, length)] -= one.nbytes
    return list(accumulate(changes))[:length]


class LiveRanges:
    """The buffers of one region, each from the instruction that makes it to its last user.

    If not `in_place`, every array has a buffer of its own, but for those that only rename another one. `edits` are what
    plans change in the region.
    """

    def __init__(self, flow: Flow, region: Scope, edits: _Edits | None = None, *, in_place: bool = True) -> None:
        self.flow, self.region, self.in_place = flow, region, in_place
        self.instructions = region.computation.instructions
        self.edits = edits or _Edits()
        self._bodies = {each.computation.name: each for each in flow.regions} if in_place else {}
        self._owners: dict[HloValue, HloValue] = {}
        self.live: dict[HloValue, LiveRange] = {}
        last: dict[HloValue, int] = {}
        for at, instruction in enumerate(self.instructions):
            for value in self._operands(instruction):
                last[self.owner(value)] = at
        if region.computation.root is not None:
            for value in self._origins(region.computation.root.name):
                last[self.owner(value)] = len(self.instructions)
        for at, instruction in enumerate(self.instructions):
            if instruction.opcode not in _NO_BUFFER and instruction.name not in self.edits.dead:
                self._make(at, instruction, last)

    def owner(self, value: HloValue) -> HloValue:
        """The value whose buffer this one has."""
        if value not in self._owners:
            self._owners[value] = value  # for a value that reuses its own buffer, as in a loop of tuples
            before = self._reused(value)
            self._owners[value] = value if before is None else self.owner(before)
        return self._owners[value]

    def handed_over(self, instruction: Instruction, at: int) -> set[HloValue]:
        """The buffers that a loop or a branch owns while it runs: those that it takes over, and those of its results.

        The account inside has them under other names, so they would count twice.
        """
        results = {value: self.owner(value) for value in self._origins(instruction.name)}
        given = set(map(self.owner, self._operands(instruction) if instruction.opcode == "while" else ()))
        made = {value for value, owner in results.items() if owner == value and value in self.live}
        taken = (owner for owner in given.difference(results.values()) if owner in self.live)
        return made | {owner for owner in taken if self.live[owner].used == at}

    def count_at_each(self) -> list[int]:
        """The bytes live while each instruction runs, without what happens inside loops and branches."""
        length = len(self.instructions)
        live = count_live((*self.live.values(), *self.edits.extra), length)
        for at, size in self.edits.before:
            # The plan runs before the instruction at `at` makes its own result, in the place of what is made there and
            # lives on: only the larger of the two moments counts.
            made = sum(one.nbytes for one in self.live.values() if one.made == at < one.used)
            live[at] = max(live[at], live[at] - made + size)
        return live

    def _operands(self, instruction: Instruction) -> Iterator[HloValue]:
        if instruction.name in self.edits.dead:
            return
        for name in self.edits.operands.get(instruction.name, instruction.operands):
            if name in self.region.computation.by_name:
                yield from self._origins(name)

    def _origins(self, name: str) -> Iterator[HloValue]:
        """The arrays of an instruction's result, where they were made."""
        return self.flow.array_origins(HloValue(self.region, name))

    def _make(self, at: int, instruction: Instruction, last: Mapping[HloValue, int]) -> None:
        """Adds the buffers that an instruction makes."""
        caller, is_parameter = self.region.caller, instruction.opcode == "parameter"
        if is_parameter and caller is not None and caller.instruction.opcode == "conditional":
            return  # a branch only borrows what it is given
        # What a loop's body passes on is owned outside, and all that its condition has.
        is_body = caller is not None and loop_body(caller.instruction) == self.region.computation.name
        for value in self._origins(instruction.name):
            array = value.array
            if array is None or not array.nbytes or value in self.live or self.owner(value) != value:
                continue
            if is_parameter and caller and (not is_body or _passes_on(self.flow, self.region, value)):
                continue
            made = 0 if is_parameter else at
            until_end = is_parameter and caller is None  # the caller of the program keeps its arguments
            used = len(self.instructions) if until_end else max(made, last.get(value, made))
            self.live[value] = LiveRange(array.nbytes, made, used)

    def _reused(self, value: HloValue) -> HloValue | None:
        """The value whose buffer this one reuses, by renaming, updating or passing it on; None for a new buffer."""
        operands, is_here = value.instruction.operands, value.scope is self.region
        match value.opcode:
            case "bitcast" if is_here:
                return self.flow.origin(HloValue(value.scope, operands[0]))
            case "dynamic-update-slice" if self.in_place:  # in a fusion, too: XLA gives it the buffer of its operand
                origin = self.flow.origin(HloValue(value.scope, operands[0]))
                return origin if origin.scope is self.region else None
            # The sum overwrites what nothing else uses.
            case "all-reduce" if is_here and self.in_place and self.flow.module.sums_in_place:
                operand = operands[value.path[0] if value.path else 0]
                made = self.region.computation.by_name.get(operand)
                users = self.region.computation.users.get(operand, ())
                if made is None or made.opcode in _NOT_OVERWRITTEN or len(users) != 1:
                    return None
                return self.flow.origin(HloValue(self.region, operand))
            case "while" if is_here and self.in_place:
                body = self._bodies.get(loop_body(value.instruction))
                if body is None:
                    return None
                (parameter,) = (one for one in body.computation.instructions if one.opcode == "parameter")
                if not _passes_on(self.flow, body, HloValue(body, parameter.name, value.path)):
                    return None
                return self.flow.origin(HloValue(self.region, operands[0], value.path))
            case _:
                return None


def _passes_on(flow: Flow, body: Scope, carried: HloValue) -> bool:
    """Whether a loop's body yields an element of its parameter as it is."""
    root = body.computation.root
    return root is not None and flow.origin(HloValue(body, root.name, carried.path)) == carried


# The whole program.


@dataclass(frozen=True)
class Buffer:
    """An array that a device holds.

    `does` is what makes it: the collectives of a move, HLO's opcode, or nothing in the program if it is an `argument`
    or `carried` by a loop. `moved` is whether a move between devices makes it. `causes` are those of a `Place`.
    """

    array: Array
    where: Source
    does: str
    computation: str
    moved: bool
    causes: tuple[Cause, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Plain data, ready for JSON."""
        return {
            "bytes": self.array.nbytes,
            "array": format_array(self.array),
            "where": describe_source(self.where),
            "causes": [cause._asdict() for cause in self.causes],
            "does": self.does,
            "moved": self.moved,
            "computation": self.computation,
        }


class InstructionMemory(NamedTuple):
    """The bytes that a device holds while one instruction of the entry runs, and whether data moves there."""

    name: str
    live_bytes: int
    moves: bool


@dataclass(frozen=True)
class ProgramMemory:
    """The buffers live at the peak of a program, the largest first, and the bytes live at each of its instructions.

    `planned_bytes` is the peak where the pass has replaced what it can, None if that was not worked out.
    """

    peak_bytes: int
    buffers: tuple[Buffer, ...]
    timeline: tuple[InstructionMemory, ...] = field(default=(), repr=False)
    planned_bytes: int | None = None

    @property
    def saved_bytes(self) -> int:
        """The bytes by which the pass lowers the peak."""
        return 0 if self.planned_bytes is None else max(0, self.peak_bytes - self.planned_bytes)

    @property
    def moved_bytes(self) -> int:
        """The bytes at the peak in buffers that moves between devices made."""
        return sum(buffer.array.nbytes for buffer in self.buffers if buffer.moved)

    def to_dict(self) -> dict[str, Any]:
        """Plain data, ready for JSON."""
        return {
            "peak_bytes": self.peak_bytes,
            "moved_bytes": self.moved_bytes,
            "planned_peak_bytes": self.planned_bytes,
            "saved_bytes": self.saved_bytes,
            "buffers": [buffer.to_dict() for buffer in self.buffers],
        }


def add_up_program(
    flow: Flow, moved: Mapping[HloValue, str] | None = None, planned: Iterable[PlannedChain] = ()
) -> ProgramMemory:
    """The memory of a module, with the `planned` chains replaced by their plans.

    `moved` has the values that moves between devices make, and what makes each.
    """
    by_region: dict[Scope, list[PlannedChain]] = {}
    for one in planned:
        by_region.setdefault(one.region, []).append(one)
    edits = {region: _edit_region(flow, region, chains) for region, chains in by_region.items()}
    memory = _Memory(flow, moved or {}, edits)
    entry = flow.regions[0]
    peak, buffers = memory.peak(entry.computation.name)
    moving = {value.name for value in memory.moved if value.scope is entry}
    timeline = tuple(
        InstructionMemory(instruction.name, size, instruction.name in moving)
        for instruction, size in zip(entry.computation.instructions, memory.live_in_entry, strict=True)
    )
    return ProgramMemory(peak, tuple(sorted(buffers, key=lambda one: -one.array.nbytes)), timeline)


_Peak = tuple[int, tuple[Buffer, ...]]
"""The most bytes live at once in a region, and the buffers that they are."""


class _Memory:
    """The memory of the regions of one module."""

    def __init__(self, flow: Flow, moved: Mapping[HloValue, str], edits: Mapping[Scope, _Edits]) -> None:
        self.flow = flow
        self.moved = moved
        self.edits = edits
        self.live_in_entry: list[int] = []
        self._regions = {region.computation.name: region for region in flow.regions}
        self._peaks: dict[str, _Peak] = {}

    def peak(self, name: str) -> _Peak:
        """The peak of a computation: the entry, or one that a loop or a conditional runs."""
        if name in self._peaks or name not in self._regions:
            return self._peaks.get(name, (0, ()))
        self._peaks[name] = 0, ()  # ends the recursion; the walk refuses a computation that runs itself
        region = self._regions[name]
        ranges = LiveRanges(self.flow, region, self.edits.get(region))
        live = ranges.count_at_each()
        inside: dict[int, _Peak] = {}
        owned: dict[int, set[HloValue]] = {}
        for at, instruction in enumerate(ranges.instructions):
            if instruction.opcode in _RUNS:
                inside[at] = max(map(self.peak, instruction.called), key=lambda peak: peak[0], default=(0, ()))
                owned[at] = ranges.handed_over(instruction, at)
                live[at] += inside[at][0] - sum(ranges.live[value].nbytes for value in owned[at])
        if region.caller is None:
            self.live_in_entry = live
        if not live:
            return self._peaks[name]
        top = live.index(max(live))
        buffers: list[Buffer] = []
        for value, one in ranges.live.items():
            if not one.made <= top <= one.used or value in owned.get(top, ()):
                continue
            # What a fusion makes has the line of the fusion, which is the instruction of the region.
            instruction = value.instruction if value.opcode == "parameter" else ranges.instructions[one.made]
            where = source_of(self.flow.module, (CallSite(region.computation, instruction),))
            own = ARGUMENT if region.caller is None else CARRIED
            made_by = own if instruction.opcode == "parameter" else instruction.opcode.removesuffix("-start")
            moved, array = self.moved.get(value), value.array or Array("pred", (0,))
            buffers.append(Buffer(array, where, moved or made_by, region.computation.name, moved is not None))
        self._peaks[name] = live[top], (*buffers, *inside.get(top, (0, ()))[1])
        return self._peaks[name]


# The program with plans in the place of chains, and without the instructions that became dead:
#
#     %g = f32[64,64] all-gather(%s)                                    %s: live until the plan has run
#     %f = f32[64,8] fusion(%g, %id), calls=%slice_and_add     at %f:   the plan's result and temporary memory
#                                                                       %g is dead: nothing else takes it


class PlannedChain(NamedTuple):
    """A chain that plans take the place of: the values that they yield, and what they are made from.

    `sources` has the instructions that yield the data, and their bytes. `temp_bytes` is the most that the plans need
    beside sources and results.
    """

    region: Scope
    values: tuple[HloValue, ...]
    sources: Mapping[str, int]
    temp_bytes: int


class _Edits(NamedTuple):
    """What plans change in a region.

    `dead` are instructions that are not run, `operands` what others still take. `extra` has bytes that are live in
    addition, and `before` those just before the instruction at a position runs.
    """

    dead: frozenset[str] = frozenset()
    operands: Mapping[str, tuple[str, ...]] = {}
    extra: tuple[LiveRange, ...] = ()
    before: tuple[tuple[int, int], ...] = ()


def _edit_region(flow: Flow, region: Scope, planned: Sequence[PlannedChain]) -> _Edits:
    computation = region.computation
    replaced = {(value.scope, value.name): tuple(one.sources) for one in planned for value in one.values}
    before, after = _list_needed_operands(flow, region, {}), _list_needed_operands(flow, region, replaced)
    positions = {one.name: at for at, one in enumerate(computation.instructions)}
    extra: list[LiveRange] = []
    runs: list[tuple[int, int]] = []
    for one in planned:
        used = {value: positions[_find_outermost(value.site, region)] for value in one.values}
        at = min(used.values())
        # A result that a fusion made inside, and used there, is stored now.
        inside = [value for value in one.values if value.scope is not region]
        if sizes := {value.array.nbytes for value in inside if value.array is not None}:
            places = [used[value] for value in inside]
            extra.append(LiveRange(sum(sizes), min(places), max(places)))
        # The memory of a source is free while the plans' results are made, if nothing later takes it.
        freed = 0
        for source, size in one.sources.items():
            made_by = computation.by_name.get(source)
            if made_by is None:  # a fusion of its own makes it, and only this plan takes it
                extra.append(LiveRange(size, at, at))
                freed += size
                continue
            last_use = max((positions[name] for name, taken in after.items() if source in taken), default=at)
            is_last = made_by.opcode not in ("parameter", "bitcast", "get-tuple-element") and last_use <= at
            freed += size if is_last and computation.root is not made_by else 0
        extra.append(LiveRange(-freed, at, at))
        runs.append((at, max(freed, one.temp_bytes)))
    operands = {name: tuple(taken) for name, taken in after.items()}
    return _Edits(frozenset(before.keys() - after.keys()), operands, tuple(extra), tuple(runs))


def _list_needed_operands(
    flow: Flow, region: Scope, replaced: Mapping[tuple[Scope, str], tuple[str, ...]]
) -> dict[str, dict[str, None]]:
    """The instructions that a region's result depends on, with the operands that each takes, in order.

    Fusions are looked into: they take only what the instructions inside need. Those that are `replaced` take their
    sources instead.
    """
    taken: dict[str, dict[str, None]] = {}
    seen: set[tuple[Scope, str]] = set()
    root = region.computation.root
    queue = [] if root is None else [(region, root.name)]
    while queue:  # ends: each instruction is looked at once
        scope, name = queue.pop()
        if (scope, name) in seen:
            continue
        seen.add((scope, name))
        if scope is region:
            taken.setdefault(name, {})
        instruction = scope.computation.by_name[name]
        inner = flow.inner(scope, instruction)
        if (sources := replaced.get((scope, name))) is not None:
            outermost = _find_outermost(Site(scope, instruction), region)
            takers = [(region, outermost, name) for source in sources for name in _list_stored(flow, region, source)]
        elif inner is not None and inner.computation.root is not None:
            queue.append((inner, inner.computation.root.name))
            continue
        elif instruction.opcode == "parameter" and scope.opened and scope.caller is not None:
            caller, number = scope.caller, parameter_number(instruction)
            operands = caller.instruction.operands[number : number + 1] or caller.instruction.operands
            takers = [(caller.scope, caller.instruction.name, operand) for operand in operands]
        else:
            takers = [(scope, name, operand) for operand in instruction.operands]
        for taker_scope, taker, operand in takers:
            if taker_scope is region:
                taken.setdefault(taker, {})[operand] = None
            queue.append((taker_scope, operand))
    return taken


def _list_stored(flow: Flow, region: Scope, source: str) -> list[str]:
    """The instructions of a region that a source is made of: itself, if it is one of them."""
    exposed = Exposed.read(region.computation.name, source)
    if exposed is None:
        return [source]
    caller = region.computation.by_name[exposed.fusion]
    inner = flow.inner(region, caller)
    made = () if inner is None else list_makers(HloValue(inner, exposed.value))
    numbers = [parameter_number(one) for one in made if one.opcode == "parameter"]
    return [caller.operands[number] for number in numbers]


# One chain.


class MemoryUse(NamedTuple):
    """The memory of a device while a chain runs.

    `peak_bytes` is the most that is live at once, source and result included; `temp_bytes` leaves these two out.
    `largest` is the largest array made between them.
    """

    peak_bytes: int
    temp_bytes: int
    largest: Array | None


class Liveness:
    """The memory that the chains of a module hold. The source of a chain counts until the chain ends.

    A sum in place counts as a buffer of its own, since a plan would make one.
    """

    def __init__(self, flow: Flow, numbering: Numbering) -> None:
        self.flow = flow
        self.numbering = numbering
        self._regions: dict[Scope, Mapping[HloValue, LiveRange]] = {}

    def of(self, chain: Chain) -> MemoryUse:
        """The memory that a device holds while a chain runs."""
        live = self._live_in(chain.region)
        made = {value: live[value] for value in chain.values if value in live}
        results = {self.numbering.of(value): value for value in chain.results}
        between = {value: one for value, one in made.items() if self.numbering.of(value) not in results}
        instructions = chain.region.computation.instructions
        positions = {instruction.name: at for at, instruction in enumerate(instructions)}
        # A result lives until the chain ends. One that a fusion makes and uses inside counts at the fusion.
        ranges = list(between.values())
        for value in results.values():
            start = made[value].made if value in made else positions[_find_outermost(value.site, chain.region)]
            ranges.append(LiveRange(_sum_bytes([value]), start, len(instructions)))
        before = _sum_bytes({self.numbering.of(leaf): leaf for leaf in chain.leaves}.values())
        peak = before + max(count_live(ranges, len(instructions)), default=0)
        arrays = (value.array for value in between if value.array is not None)
        largest = max(arrays, key=lambda array: array.nbytes, default=None)
        return MemoryUse(peak, max(0, peak - before - _sum_bytes(results.values())), largest)

    def stored(self, chain: Chain) -> list[HloValue]:
        """The values of a chain that are in memory, and not only inside a fusion."""
        live = self._live_in(chain.region)
        return [value for value in chain.values if value in live]

    def _live_in(self, region: Scope) -> Mapping[HloValue, LiveRange]:
        if region not in self._regions:
            self._regions[region] = LiveRanges(self.flow, region, in_place=False).live
        return self._regions[region]


def _find_outermost(site: Site, region: Scope) -> str:
    """The region's own instruction that contains a site."""
    while site.scope is not region and site.scope.caller is not None:  # ends: scopes are nested in their callers
        site = site.scope.caller
    return site.instruction.name


def _sum_bytes(values: Iterable[HloValue]) -> int:
    return sum(value.array.nbytes for value in values if value.array is not None)
