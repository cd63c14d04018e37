"""Which values of a step lie in memory, and until when: as the program is written, or as a compiler has it.

XLA fuses cheap operations into those that read them. A cheap value that one fusion alone reads is in no memory, and
what it is made of is needed until that fusion runs. One that several read is stored, unless it is as cheap as a
broadcast, which each repeats. Reshapes and transposes are another reading of what they are made of.

    a = x * y      stored: the products below read it            (x * y) * 2, (x * y) + 1
    b = a * 2      in no memory: one fusion, that of c, reads it
    c = exp(b)
    d = a + 1

That is a guess before anything is compiled. A compiled program says what was done with it, at least in these layouts:
in which order operations run, which were fused or are done twice, and what is held twice.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from reshard.doctor.dataflow.flow import Flow, Scope
from reshard.doctor.live_bytes import LiveRanges
from reshard.hlo import Array, Computation, Instruction, Module
from reshard.jax.layout_choice.step_flow import CASE, IF, RETURN, WHILE, StepFlow, name_operations
from reshard.jax.layout_choice.step_layouts import StepLayouts

_REPEATED = name_operations("bitcast_convert broadcast_in_dim compare convert dynamic_slice iota slice")
_FUSED = _REPEATED | name_operations(
    "abs add and atan2 cbrt ceil clamp complex cosine divide exponential exponential_minus_one floor imag is_finite "
    "log log_plus_one logistic maximum minimum multiply negate not or popcnt power real reduce_precision remainder "
    "reverse round_nearest_afz round_nearest_even rsqrt select shift_left shift_right_arithmetic shift_right_logical "
    "sign sine sqrt subtract tan tanh xor"
)
_RELAID = name_operations("reshape transpose")
_FUSING = _FUSED | _RELAID | name_operations("reduce pad concatenate")
_TILE = re.compile(r"T\((\d+(?:,\d+)*)\)")
_NUMBER = re.compile(r'op_name="[^"]*?#(\d+)')
_RENAMING = ("bitcast", "copy", "transpose", "reshape", "convert", "get-tuple-element")
_RUNNING = ("while", "conditional")
_COMPUTING = ("dot", "convolution", "custom-call", "reduce", "fft", "gather", "scatter", "sort")


@dataclass(frozen=True)
class RunOrder:
    """When the operations of a step run, by positions up to `length`, and which values lie in memory.

    `starts` is where an operation begins and `ends` where it is over, a loop with all that is in it; it needs each
    operand (operation, number) until `needs`, where it is fused into what runs later. `copies` are values that lie in
    memory once more, from one position to another, and how often.
    """

    stored: frozenset[int]
    starts: Mapping[int, int]
    needs: Mapping[tuple[int, int], int]
    ends: Mapping[int, int]
    length: int
    copies: tuple[tuple[int, int, int, int], ...] = ()


def order_as_written(flow: StepFlow) -> RunOrder:
    """The operations in the order of the program, and what a compiler would fuse."""
    stored, numbers = find_stored(flow), {at: at for at in flow.ops}
    ends = {at: op.last for at, op in flow.ops.items()}
    needs = _list_needs(flow, stored, {at: [at] for at in flow.ops})
    return RunOrder(stored, numbers, needs, ends, 1 + max(ends.values()))


def find_stored(flow: StepFlow) -> frozenset[int]:
    """The values that lie in memory of their own."""
    stored = set[int]()
    # For a value that is not stored, the stored ones that it is fused into; -1 is an operation that fuses nothing.
    ends: dict[int, frozenset[int]] = {}
    # From the last on: what a value is fused into is known before it.
    for value in sorted(range(len(flow.values)), key=lambda each: flow.values[each].maker, reverse=True):
        maker = flow.values[value].maker
        name = flow.ops[maker].name if maker >= 0 else ""
        fused = set[int]()
        for reader, _ in flow.readers[value]:
            for made in flow.ops[reader].results if flow.ops[reader].name in _FUSING else ():
                fused |= {made} if made in stored else ends[made]
            if flow.ops[reader].name not in _FUSING:
                fused.add(-1)
        ends[value] = frozenset(fused)
        if name in _RELAID:  # What it is made of is stored for those who read it, but for what leaves a region.
            leaves = any(flow.ops[reader].name in RETURN for reader, _ in flow.readers[value])
        else:
            leaves = -1 in fused or name not in _FUSED or (len(fused) > 1 and name not in _REPEATED)
        if leaves:
            stored.add(value)
    return frozenset(stored)


def _list_needs(
    flow: StepFlow, stored: frozenset[int], runs: Mapping[int, Sequence[int]]
) -> dict[tuple[int, int], int]:
    """Until which position each operation, which runs at these, needs each of its operands."""
    needs: dict[tuple[int, int], int] = {}
    # From the last on, as what is fused runs where its readers do.
    for at, op in sorted(flow.ops.items(), reverse=True):
        late = [needs[read] for value in op.results if value not in stored for read in flow.readers[value]]
        for place, operand in enumerate(op.operands):
            # Where an operand is made again beside what reads it, it is not read from memory.
            anew = runs.get(flow.values[operand].maker, ())
            needs[at, place] = max([0, *(run for run in runs[at] if run not in anew), *late])
    return needs


def order_as_compiled(flow: StepFlow, module: Module, layouts: StepLayouts) -> RunOrder:
    """The operations in the order of a compiled program of the step, emitted in these layouts, whose instructions have
    their numbers, and what lies in memory there. What it does not show is as the program is written."""
    written = order_as_written(flow)
    reading = Flow(module)
    regions = {region.computation.name: region for region in reading.regions}
    numbers = _number_instructions(flow, module)
    runs: dict[int, list[int]] = {}  # an operation may be fused into several others
    spans: dict[int, tuple[int, int]] = {}
    made: dict[int, list[tuple[int, int, int]]] = {}  # from where to where, and as how many
    length = 0
    # What loops and branches yield lies where they are over, as it is written.
    tiles = {
        value: layout
        for at, each in layouts.operations.items()
        if flow.ops[at].name not in (WHILE, CASE, IF)
        for value, layout in zip(flow.ops[at].results, each.results, strict=True)
    } | dict(zip(flow.arguments, layouts.arguments, strict=True))

    def find_numbers(inside: Computation, instruction: Instruction) -> set[int]:
        """The operations that an instruction does: its own, and all that are fused into it."""
        found = {number} if (number := numbers.get((inside.name, instruction.name))) is not None else set[int]()
        for name in () if instruction.opcode in _RUNNING else instruction.called:
            fused = module.computation(name)
            for inner in fused.instructions:
                found |= find_numbers(fused, inner)
        return found

    def visit(region: Scope) -> None:
        nonlocal length
        places: list[int] = []
        for instruction in region.computation.instructions:
            places.append(start := length)
            length += 1
            for number in find_numbers(region.computation, instruction):
                runs.setdefault(number, []).append(start)
            if instruction.opcode in _RUNNING:
                for name in instruction.called:
                    if name in regions:
                        visit(regions[name])
                if (number := numbers.get((region.computation.name, instruction.name))) is not None:
                    spans[number] = start, length - 1
        ranges = LiveRanges(reading, region)
        for buffer, one in ranges.live.items():
            inside, maker = buffer.scope.computation, buffer.instruction
            # In another order of its dims it is the same value.
            while (inside.name, maker.name) not in numbers and maker.opcode in _RENAMING:
                if maker.operands[0] not in inside.by_name:
                    break
                maker = inside.by_name[maker.operands[0]]
            number = numbers.get((inside.name, maker.name))
            values = flow.ops[number].results if number is not None else ()
            if maker.opcode == "parameter" and maker is not buffer.instruction and region.caller is None:
                values = (flow.arguments[int(maker.literal)],)
            array = buffer.array
            outer = [each for each in ranges.instructions[one.made].arrays if array and each.dims == array.dims]
            count = max((round(_pad_tiles(each)) for each in outer), default=1)
            for value in values:
                # Parts of it, and what it was made of in between, are no copies of the value.
                if value in tiles and tiles[value].tile_bytes / 2 < one.nbytes:
                    span = places[one.made], places[min(one.used, len(places) - 1)]
                    made.setdefault(value, []).append((*span, count))
                    break

    visit(reading.regions[0])
    starts: dict[int, int] = {}
    ends: dict[int, int] = {}
    stored = set[int]()
    copies = [(value, *each) for value in flow.arguments for each in made.get(value, ())]
    for at, op in sorted(flow.ops.items()):
        inside = [each for other in range(at, op.last + 1) for each in runs.get(other, ())]
        # What the compiler left no trace of comes for nothing as soon as its operands are there.
        ready = max((starts[maker] for v in op.operands if (maker := flow.values[v].maker) in starts), default=0)
        starts[at], ends[at] = spans.get(at, (min(inside, default=ready), max(inside, default=ready)))
        for value in op.results:
            held = sorted(made.get(value, ()))
            if held:
                starts[at] = held[0][0]
            copies += [(value, first, until, count - (each == 0)) for each, (first, until, count) in enumerate(held)]
            if any(count for *_, count in held) or (value in written.stored and (at not in runs or value not in tiles)):
                stored.add(value)
    last = max(flow.ops)
    starts[last] = ends[last] = length
    needs = _list_needs(flow, frozenset(stored), {at: runs.get(at, [starts[at]]) for at in flow.ops} | {last: [length]})
    for at, each in layouts.operations.items():
        for place, layout in enumerate(each.operands):
            operand = flow.ops[at].operands[place]
            # What is read as it was made is held until then, whatever has become of its readers.
            if operand in made and layout == tiles[operand]:
                needs[at, place] = min(needs[at, place], max(used for _, used, _ in made[operand]))
    return RunOrder(frozenset(stored), starts, needs, ends, length + 1, tuple(each for each in copies if each[-1] > 0))


def _number_instructions(flow: StepFlow, module: Module) -> dict[tuple[str, str], int]:
    """The operation that each instruction (computation, name) is of, where the compiler says so.

    Products that are spelled anew lose their names, and only the bitcast after them has it: that is no work of its own,
    but says what it reads.
    """
    numbers: dict[tuple[str, str], int] = {}
    callers: dict[str, tuple[Computation, Instruction]] = {}
    renamed: list[tuple[int, Computation, Instruction]] = []
    for inside in module.computations.values():
        for instruction in inside.instructions:
            if instruction.opcode == "fusion":
                callers[instruction.called[0]] = inside, instruction
            found = _NUMBER.search(instruction.metadata or "")
            number = -1 if found is None else int(found[1])
            if number in flow.ops and instruction.opcode in _RENAMING and flow.ops[number].name not in _RELAID:
                renamed.append((number, inside, instruction))
            elif number in flow.ops:
                numbers[inside.name, instruction.name] = number
    for number, inside, instruction in renamed:
        at: Instruction | None = instruction
        while at is not None and (inside.name, at.name) not in numbers:
            if at.opcode in _RENAMING:
                at = inside.by_name.get(at.operands[0])
            elif at.opcode == "parameter" and inside.name in callers:
                place = int(at.literal)
                inside, caller = callers[inside.name]
                at = inside.by_name.get(caller.operands[place])
            elif at.opcode == "fusion":
                inside = module.computation(at.called[0])
                at = inside.root
            else:
                if at.opcode in _COMPUTING:
                    numbers[inside.name, at.name] = number
                break
    return numbers


def _pad_tiles(array: Array) -> float:
    """How many times its size an array takes of the main memory of a device, whose tiles may be larger than its dims;
    nothing if it lies elsewhere.

    >>> _pad_tiles(Array("f32", (8, 2), "1,0:T(8,128)")), _pad_tiles(Array("f32", (8,), "0:T(8)S(1)"))
    (64.0, 0.0)
    """
    order, _, tiling = array.layout.partition(":")
    tile = _TILE.match(tiling)
    if "S(" in tiling or tile is None or not order:
        return float("S(" not in tiling)
    sizes = [array.dims[int(dim)] for dim in order.split(",")]  # the minor ones first, which are the last of a tile
    pairs = zip(sizes, map(int, reversed(tile[1].split(","))), strict=False)
    return math.prod(-(-size // step) * step / max(1, size) for size, step in pairs)
