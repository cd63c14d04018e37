"""The peak memory of a whole program: the buffers that a device holds at the peak, by the order of the module's text.

    position  instruction              live
    0         %p = parameter(0)        p                     an argument is live from the start to the end
    1         %g = all-gather(%p)      p, g
    2         %d = dynamic-slice(%g)   p, g, d               the peak: g ends here, d is made
    3         ROOT %r = add(%d, %d)    p, d, r

An instruction that only renames data, or updates it in place, has the buffer of its operand. A loop runs inside its
instruction: there the buffers that it carries are those of its body, and what it passes on unchanged stays outside.
The compiler lets buffers share memory afterwards, so its own figure, which the report shows too, may be lower.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, NamedTuple

from reshard.doctor.chains import Chain
from reshard.doctor.dataflow.flow import Flow, HloValue, Numbering, Scope, Site
from reshard.doctor.places import array_text, source_data
from reshard.hlo import Array, Computation, Instruction, Module, Source
from reshard.hlo.origin import CallSite, source_of

_NO_BUFFER = ("constant", "partition-id", "replica-id", "after-all", "tuple", "get-tuple-element", "bitcast", "domain")
_RUNS = ("while", "conditional")
_NOT_OVERWRITTEN = ("parameter", "bitcast", "get-tuple-element", "constant")
ARGUMENT, CARRIED = "argument", "carried"


@dataclass(frozen=True)
class Buffer:
    """An array that a device holds.

    `does` is what makes it: the collectives of a move, HLO's opcode, or nothing in the program if it is an `argument`
    or `carried` by a loop. `moved` is whether a move between devices makes it.
    """

    array: Array
    where: Source
    does: str
    computation: str
    moved: bool

    def to_dict(self) -> dict[str, Any]:
        """Plain data, ready for JSON."""
        return {
            "bytes": self.array.nbytes,
            "array": array_text(self.array),
            "where": source_data(self.where),
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


class Edits(NamedTuple):
    """What is changed in a region before its memory is added up.

    `dead` are instructions that are not run, `operands` what others still take. `extra` has bytes that are live in
    addition from one position to another, and `before` those just before the instruction at a position runs.
    """

    dead: frozenset[str] = frozenset()
    operands: Mapping[str, tuple[str, ...]] = {}
    extra: tuple[tuple[int, int, int], ...] = ()
    before: tuple[tuple[int, int], ...] = ()


def program_memory(
    flow: Flow, moved: Mapping[HloValue, str], edits: Mapping[Scope, Edits] | None = None
) -> ProgramMemory:
    """The memory of a module; `moved` has the values that moves between devices make, and what makes each."""
    return _Memory(flow, moved, edits or {}).of_entry()


class _Peak(NamedTuple):
    """The most bytes live at once in a region, and the buffers that they are."""

    live_bytes: int
    buffers: tuple[Buffer, ...]


class _Memory:
    """The memory of the regions of one module."""

    def __init__(self, flow: Flow, moved: Mapping[HloValue, str], edits: Mapping[Scope, Edits]) -> None:
        self.flow = flow
        self.module: Module = flow.module
        self.moved = moved
        self.edits = edits
        self.regions = {region.computation.name: region for region in flow.regions}
        self._peaks: dict[str, _Peak] = {}
        self._lives: dict[str, list[int]] = {}

    def of_entry(self) -> ProgramMemory:
        """The memory of the program."""
        region = self.flow.regions[0]
        name = region.computation.name
        peak = self.peak(name)
        live = self._lives[name]
        moving = {value.name for value in self.moved if value.scope is region}
        names = [instruction.name for instruction in region.computation.instructions]
        timeline = tuple(InstructionMemory(name, size, name in moving) for name, size in zip(names, live, strict=True))
        largest_first = sorted(peak.buffers, key=lambda buffer: -buffer.array.nbytes)
        return ProgramMemory(peak.live_bytes, tuple(largest_first), timeline)

    def peak(self, name: str) -> _Peak:
        """The peak of a computation: the entry, or one that a loop or a conditional runs."""
        if name not in self._peaks:
            self._peaks[name] = _Peak(0, ())  # ends the recursion; the walk refuses such a computation
            region = self.regions.get(name)
            if region is not None:
                ranges = _Ranges(self, region)
                self._lives[name] = live = self._live(ranges)
                self._peaks[name] = self._at(ranges, live) if live else _Peak(0, ())
        return self._peaks[name]

    def _live(self, ranges: _Ranges) -> list[int]:
        """The bytes live while each instruction of a region runs."""
        changes = [0] * (len(ranges.instructions) + 2)
        for one in ranges.live.values():
            changes[one.made] += one.array.nbytes
            changes[one.used + 1] -= one.array.nbytes
        for first, last, size in ranges.edits.extra:
            changes[first] += size
            changes[last + 1] -= size
        live = list(accumulate(changes))[: len(ranges.instructions)]
        made = dict.fromkeys((at for at, _ in ranges.edits.before), 0)
        for one in ranges.live.values():
            if one.made in made and one.used > one.made:
                made[one.made] += one.array.nbytes
        for at, instruction in enumerate(ranges.instructions):
            if instruction.opcode in _RUNS:
                own = {value: ranges.live[value].array.nbytes for value in ranges.handed_over(instruction, at)}
                live[at] += self._inside(instruction).live_bytes - sum(own.values())
        for at, size in ranges.edits.before:
            live[at] = max(live[at], live[at] - made[at] + size)
        return live

    def _inside(self, instruction: Instruction) -> _Peak:
        """The highest peak of the computations that a loop or a conditional runs."""
        peaks = [self.peak(name) for name in instruction.called] if instruction.opcode in _RUNS else []
        return max(peaks, key=lambda peak: peak.live_bytes, default=_Peak(0, ()))

    def _at(self, ranges: _Ranges, sizes: list[int]) -> _Peak:
        """The buffers live while the instruction at the peak runs."""
        at = sizes.index(max(sizes))
        instruction = ranges.instructions[at]
        own = set(ranges.handed_over(instruction, at)) if instruction.opcode in _RUNS else set[HloValue]()
        live = [value for value, one in ranges.live.items() if one.made <= at <= one.used and value not in own]
        buffers = (*(ranges.buffer(value) for value in live), *self._inside(instruction).buffers)
        return _Peak(sizes[at], buffers)


class _Ranges:
    """The buffers of one region, each from the instruction that makes it to its last user."""

    def __init__(self, memory: _Memory, region: Scope) -> None:
        self.memory, self.flow, self.region = memory, memory.flow, region
        self.instructions = region.computation.instructions
        self.edits = memory.edits.get(region, Edits())
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
            self._make(at, instruction, last)

    def owner(self, value: HloValue) -> HloValue:
        """The value whose buffer this one has."""
        if value not in self._owners:
            self._owners[value] = value
            before = self._same_buffer(value)
            self._owners[value] = value if before is None else self.owner(before)
        return self._owners[value]

    def handed_over(self, instruction: Instruction, at: int) -> Iterator[HloValue]:
        """The buffers that a loop owns while it runs: those that it takes over, and those of its results."""
        results = {value: self.owner(value) for value in self._origins(instruction.name)}
        given = set(map(self.owner, self._operands(instruction) if instruction.opcode == "while" else ()))
        yield from (value for value, owner in results.items() if owner == value and value in self.live)
        for owner in given.difference(results.values()):
            if owner in self.live and self.live[owner].used == at:
                yield owner

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
        if instruction.opcode in _NO_BUFFER or instruction.name in self.edits.dead:
            return
        if instruction.opcode == "parameter" and self._is_branch():
            return
        entry = self.region.caller is None
        for value in self._origins(instruction.name):
            array, argument = value.array, instruction.opcode == "parameter"
            if array is None or not array.nbytes or value in self.live or self.owner(value) != value:
                continue
            made = 0 if argument else at
            used = len(self.instructions) if argument and entry else max(made, last.get(value, made))
            if not (argument and self._is_invariant(value)):
                self.live[value] = LiveRange(array, made, used)

    def buffer(self, value: HloValue) -> Buffer:
        """The buffer of a value, with its line."""
        computation, one = self.region.computation, self.live[value]
        instruction = self.instructions[one.made] if value.opcode != "parameter" else value.instruction
        where = source_of(self.memory.module, (CallSite(computation, instruction),))
        own = ARGUMENT if self.region.caller is None else CARRIED
        made_by = own if instruction.opcode == "parameter" else instruction.opcode.removesuffix("-start")
        moved = self.memory.moved.get(value)
        return Buffer(one.array, where, moved or made_by, computation.name, moved is not None)

    def _same_buffer(self, value: HloValue) -> HloValue | None:
        """The value whose buffer this one reuses, by renaming, updating or passing it on; None for a new buffer."""
        operands = value.instruction.operands
        if value.opcode == "dynamic-update-slice":
            origin = self.flow.origin(HloValue(value.scope, operands[0]))
            return origin if origin.scope is self.region else None
        if value.scope is not self.region:
            return None
        if value.opcode == "all-reduce":
            return self._summed_in_place(value)
        if value.opcode == "bitcast":
            return self.flow.origin(HloValue(value.scope, operands[0]))
        if value.opcode == "while" and (body := self._body(value.instruction)) is not None:
            return self._passed(value, body)
        return None

    def _summed_in_place(self, value: HloValue) -> HloValue | None:
        """The operand of an all-reduce, if nothing else uses it: the sum reuses its buffer."""
        operand = value.instruction.operands[value.path[0] if value.path else 0]
        made = self.region.computation.by_name.get(operand)
        users = self.region.computation.users.get(operand, ())
        if made is None or made.opcode in _NOT_OVERWRITTEN or len(users) != 1:
            return None
        return self.flow.origin(HloValue(self.region, operand))

    def _passed(self, value: HloValue, body: Scope) -> HloValue | None:
        """The value that a loop is given, for one that it passes on unchanged."""
        (parameter,) = (one for one in body.computation.instructions if one.opcode == "parameter")
        carried = HloValue(body, parameter.name, value.path)
        if not _passes(self.flow, body, carried):
            return None
        return self.flow.origin(HloValue(self.region, value.instruction.operands[0], value.path))

    def _body(self, instruction: Instruction) -> Scope | None:
        return self.memory.regions.get(instruction.attributes.get("body", "").lstrip("%"))

    def _is_branch(self) -> bool:
        """Whether the region is run by a conditional, which owns the buffers that it is given."""
        return self.region.caller is not None and self.region.caller.instruction.opcode == "conditional"

    def _is_invariant(self, value: HloValue) -> bool:
        """Whether a parameter of a loop is owned outside: what the body passes on, and all that a condition has."""
        caller = self.region.caller
        if caller is None:
            return False
        is_body = caller.instruction.attributes.get("body", "").lstrip("%") == self.region.computation.name
        return not is_body or _passes(self.flow, self.region, value)


def _passes(flow: Flow, body: Scope, carried: HloValue) -> bool:
    """Whether a loop's body yields an element of its parameter as it is."""
    root = body.computation.root
    return root is not None and flow.origin(HloValue(body, root.name, carried.path)) == carried


# Liveness: the memory that a device holds while a chain runs, from the order of the module's text.


_VIEWS = ("tuple", "get-tuple-element", "bitcast", "opt-barrier", "optimization-barrier", "parameter")


class LiveRange(NamedTuple):
    """An array, and the positions in the text of the instructions that make it and that use it last."""

    array: Array
    made: int
    used: int


class MemoryUse(NamedTuple):
    """The memory of a device while a chain runs.

    `peak_bytes` is the most that is live at once, source and result included; `temp_bytes` leaves these two out.
    `largest` is the largest array made between them.
    """

    peak_bytes: int
    temp_bytes: int
    largest: Array | None


class _Stored(NamedTuple):
    """A region's instructions by their positions, and its stored values by the instructions that yield them."""

    positions: dict[str, int]
    values: dict[HloValue, str]


class Liveness:
    """The memory that the chains of a module hold. The source of a chain counts until the chain ends."""

    def __init__(self, flow: Flow, numbering: Numbering) -> None:
        self.flow = flow
        self.numbering = numbering
        self._regions: dict[Scope, _Stored] = {}

    def of(self, chain: Chain) -> MemoryUse:
        """The memory that a device holds while a chain runs."""
        made = self._made(chain)
        results = {self.numbering.of(value): value for value in chain.results}
        between = [one for value, one in made.items() if self.numbering.of(value) not in results]
        ranges = [*between, *(self._result(value, made, chain) for value in results.values())]
        before = _bytes({self.numbering.of(leaf): leaf for leaf in chain.leaves}.values())
        after = _bytes(results.values())
        live = [sum(r.array.nbytes for r in ranges if r.made <= one.made <= r.used) for one in ranges]
        peak = before + max(live, default=0)
        largest = max((one.array for one in between), key=lambda array: array.nbytes, default=None)
        return MemoryUse(peak, max(0, peak - before - after), largest)

    def stored(self, chain: Chain) -> list[HloValue]:
        """The values of a chain that are in memory, and not only inside a fusion."""
        return list(self._made(chain))

    def _made(self, chain: Chain) -> dict[HloValue, LiveRange]:
        """The values of a chain that are stored, and how long."""
        stored = self._stored(chain.region)
        ranges: dict[HloValue, LiveRange] = {}
        for value in chain.values:
            if value in stored.values and value.array is not None:
                name = stored.values[value]
                last = _last_use(chain.region.computation, stored.positions, name)
                ranges[value] = LiveRange(value.array, stored.positions[name], last)
        return ranges

    def _stored(self, region: Scope) -> _Stored:
        if region not in self._regions:
            instructions = region.computation.instructions
            values: dict[HloValue, str] = {}
            for instruction in instructions:
                if instruction.opcode not in _VIEWS:
                    for value in self.flow.array_origins(HloValue(region, instruction.name)):
                        values.setdefault(value, instruction.name)
            positions = {instruction.name: at for at, instruction in enumerate(instructions)}
            self._regions[region] = _Stored(positions, values)
        return self._regions[region]

    def _result(self, value: HloValue, made: dict[HloValue, LiveRange], chain: Chain) -> LiveRange:
        """The live range of a result; one that is made and used inside a fusion counts at the fusion."""
        positions = self._stored(chain.region).positions
        if value in made:
            return made[value]._replace(used=len(positions))
        at = positions[_outermost(value.site, chain.region)]
        return LiveRange(value.array or Array("pred", ()), at, len(positions))


def _last_use(computation: Computation, positions: dict[str, int], name: str) -> int:
    """The position of the last instruction that uses `name`, also through views."""
    last, queue, seen = positions[name], [name], {name}
    while queue:  # ends: each instruction is looked at once
        for user in computation.users.get(queue.pop(), ()):
            last = max(last, positions[user.name])
            if user.opcode in _VIEWS and user.name not in seen:
                seen.add(user.name)
                queue.append(user.name)
    return last


def _outermost(site: Site, region: Scope) -> str:
    """The region's own instruction that contains a site."""
    while site.scope is not region and site.scope.caller is not None:  # ends: scopes are nested in their callers
        site = site.scope.caller
    return site.instruction.name


def _bytes(values: Iterable[HloValue]) -> int:
    return sum(value.array.nbytes for value in values if value.array is not None)
