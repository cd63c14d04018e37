"""Which values of a step lie in memory, and until when: as the program is written, or as a compiler has it.

XLA fuses cheap operations into those that read them. A cheap value that kernels make for themselves is in no memory,
and what it is made of is needed until the last of them runs: `loop_fusion` says so of CPUs. Compilers for TPUs fuse
into products, too, and into several kernels whatever is made of one large value alone; what is made of several, and
needed at several moments, is stored, as far on as one value leads to the next.

    h = x @ w      stored                                        the only large value that the next two are made of
    g = gelu(h)    in no memory: both products below make it     g @ v, and later d * gelu'(h)

That is a guess before anything is compiled. A compiled program says what was done with it, at least in these layouts:
in which order operations run, which were fused or are done twice, and what is held twice.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from reshard.doctor.dataflow.flow import Flow, HloValue, Scope
from reshard.doctor.live_bytes import LiveRanges
from reshard.hlo import Array, Computation, Instruction, Module
from reshard.jax.layout_choice.loop_fusion import FUSED, fuse_loops, sort_breadth_first, space_number, spell_copies
from reshard.jax.layout_choice.step_flow import BRANCHES, RETURN, WHILE, StepFlow, StepLayouts, name_operations
from reshard.jax.layout_choice.trace_step import PRODUCTS

RELAID = name_operations("reshape transpose")
_FUSING = FUSED | RELAID | name_operations("reduce pad concatenate")
_NARROWED = name_operations("convert reshape slice")
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
    memory once more, from one position to another, and how often. `relaid` says the same of operands of products that
    are copied, in another order of their dims or as wider floats.
    """

    stored: frozenset[int]
    starts: Mapping[int, int]
    needs: Mapping[tuple[int, int], int]
    ends: Mapping[int, int]
    length: int
    copies: tuple[tuple[int, int, int, int], ...] = ()
    relaid: Mapping[tuple[int, int], tuple[int, int, int]] = field(
        default_factory=dict[tuple[int, int], tuple[int, int, int]]
    )


def order_as_written(flow: StepFlow, devices: int = 1) -> RunOrder:
    """The operations in the order of the program, but for updates of states, and what a compiler would fuse for so many
    devices. CPUs have an order of their own, and copies for products."""
    if flow.platform == "tpu":
        stored = _find_stored_on_tpu(flow)
        return _place_operations(flow, stored, {}, _sort_operations(flow, stored))
    copying = spell_copies(flow, devices)
    stored, again = fuse_loops(copying, devices)
    order = _place_operations(copying, stored, again, sort_breadth_first(copying, stored, again))
    starts: dict[int, int] = {}
    ends: dict[int, int] = {}
    needs: dict[tuple[int, int], int] = {}
    relaid: dict[tuple[int, int], tuple[int, int, int]] = {}
    # From the last on, as a transpose that products take in is read where they are.
    for at, op in sorted(flow.ops.items(), reverse=True):
        number = space_number(at)
        if number not in copying.ops:
            reads = [read for value in op.results for read in flow.readers[value]]
            starts[at] = ends[at] = min(starts[reader] for reader, _ in reads)
            needs[at, 0] = max(needs[read] for read in reads)
            continue
        starts[at], ends[at] = order.starts[number], order.ends[number]
        for place, operand in enumerate(copying.ops[number].operands):
            maker = copying.values[operand].maker
            # Who reads a copy needs what it is made of until it is made.
            copied = operand >= len(flow.values)
            needs[at, place] = order.needs[(maker, 0) if copied else (number, place)]
            # What is made before a loop is there until it is over.
            inside = copying.ops[number].inside
            while inside > copying.values[operand].inside:
                needs[at, place] = max(needs[at, place], order.ends[inside])
                inside = copying.ops[inside].inside
            if copied and operand in stored and maker == number - 1 - place:
                until = max(order.needs[read] for read in copying.readers[operand])
                wider = copying.values[operand].nbytes // max(1, flow.values[op.operands[place]].nbytes)
                relaid[at, place] = order.starts[maker], until, max(1, wider)
    made = {-1, *copying.ops}
    own = frozenset(value for value in stored if value < len(flow.values) and copying.values[value].maker in made)
    return RunOrder(own, starts, needs, ends, order.length, relaid=relaid)


def _place_operations(
    flow: StepFlow, stored: frozenset[int], again: Mapping[int, Sequence[int]], ordered: Sequence[int]
) -> RunOrder:
    starts = {at: 2 * n + 1 for n, at in enumerate(ordered)}
    ends = {at: max(starts.get(each, 0) for each in range(at, op.last + 1)) for at, op in flow.ops.items()}
    runs: dict[int, Sequence[int]] = {}
    for at, op in sorted(flow.ops.items(), reverse=True):
        # A value that is made again is made where its readers run, too.
        made = {n for value in op.results for reader in again.get(value, ()) for n in runs[reader]}
        runs[at] = sorted(made if made and stored.isdisjoint(op.results) else made | {starts[at]})
    needs = _place_needs(flow, stored, runs)
    return RunOrder(stored, starts, needs, ends, 2 * len(starts))


def _sort_operations(flow: StepFlow, stored: frozenset[int]) -> list[int]:
    """The operations in the order of the program, but what updates a state as soon as it can, if that frees memory.

    A program has all gradients first, and then all updates. Compilers take each gradient up as soon as it is there.
    """
    # For each update, elementwise as it is, the operation after which it can run.
    ready: dict[int, int] = {}
    for at, op in sorted(flow.ops.items(), reverse=True):
        readers = {reader for value in op.results for reader, _ in flow.readers[value]}
        last = all(each in ready or flow.ops[each].name in RETURN for each in readers)
        # Numbers that updates need, as how many steps there were, can be there at any time.
        scalar = not any(flow.values[result].shape for result in op.results)
        if (last or scalar) and op.inside < 0 and op.operands and op.name in FUSED | RELAID:
            ready[at] = -1
    for at in sorted(ready):
        makers = {flow.values[operand].maker for operand in flow.ops[at].operands}
        ready[at] = max(ready.get(each, each if each >= 0 and flow.ops[each].operands else -1) for each in makers)
        # A state is written over when nobody else reads it any more.
        states = flow.donated.intersection(flow.ops[at].operands) if ready[at] >= 0 else ()
        others = [reader for value in states for reader, _ in flow.readers[value] if reader not in ready]
        ready[at] = max([ready[at], *others])
    updates: dict[int, list[int]] = {}
    for at in sorted(ready, reverse=True):
        # What an update makes of a state alone, as a part of a moment, is fused into what takes it up.
        if ready[at] < 0 and stored.isdisjoint(flow.ops[at].results):
            readers = {reader for value in flow.ops[at].results for reader, _ in flow.readers[value]}
            ready[at] = min((ready.get(each, -1) for each in readers), default=-1)
        updates.setdefault(ready[at], []).append(at)
    for after, group in list(updates.items()):
        group.reverse()
        taken = {value for at in group for value in flow.ops[at].operands if value in stored}
        freed = sum(
            flow.values[value].nbytes
            for value in taken
            if (flow.values[value].maker >= 0 or value in flow.donated)
            and all(ready.get(reader, reader) <= after for reader, _ in flow.readers[value])
        )
        made = {value for at in group for value in flow.ops[at].results if value in stored}
        if freed < sum(flow.values[value].nbytes for value in made):
            del updates[after]
    order: dict[int, None] = {}

    def run(at: int) -> None:
        op = flow.ops[at]
        makers = [flow.values[operand].maker for operand in op.operands]
        # First the constants that are written where they are needed first, and what it needs of other updates; then it
        # with all that is inside; then the updates that waited for it.
        for each in (*makers, None, *range(at + 1, op.last + 1), *updates.get(at, ())):
            if each is None:
                order[at] = None
            elif each in flow.ops and each not in order:
                run(each)

    for at in sorted(flow.ops):
        if at not in order:
            run(at)
    return list(order)


def find_stored(flow: StepFlow, devices: int = 1) -> frozenset[int]:
    """The values that lie in memory, be it as a copy for a product."""
    return _find_stored_on_tpu(flow) if flow.platform == "tpu" else fuse_loops(flow, devices)[0]


def _find_stored_on_tpu(flow: StepFlow) -> frozenset[int]:
    stored = set[int]()
    elementwise = _list_elementwise(flow)
    fusing = elementwise | {at for at, op in flow.ops.items() if op.name in _FUSING.union(PRODUCTS)}
    joined = set[int]()  # what kernels of products make
    sources, moments = _find_sources(flow, elementwise)
    # For a value that is not stored, the stored ones that it is fused into; -1 is an operation that fuses nothing.
    ends: dict[int, frozenset[int]] = {}
    # From the last on: what a value is fused into is known before it.
    for value in sorted(range(len(flow.values)), key=lambda each: flow.values[each].maker, reverse=True):
        maker = flow.values[value].maker
        name = flow.ops[maker].name if maker >= 0 else ""
        fused = set[int]()
        for reader, _ in flow.readers[value]:
            for made in flow.ops[reader].results if reader in fusing else ():
                fused |= {made} if made in stored else ends[made]
            if reader not in fusing:
                fused.add(-1)
        ends[value] = frozenset(fused)
        # Each product is a kernel of its own; what else can run at the same moment is one.
        makers = [flow.values[end].maker for end in fused if end >= 0]
        several = len({(moments[at], at >= 0 and flow.ops[at].name in PRODUCTS and at) for at in makers}) > 1
        if name in RELAID:  # What it is made of is stored for those who read it, but for what leaves a region.
            leaves = any(flow.ops[reader].name in RETURN for reader, _ in flow.readers[value])
        elif -1 in fused or maker not in elementwise:
            leaves = True
        else:
            leaves = several and len(sources[value]) > 1
        if leaves and makers and -1 not in fused and (several or name in PRODUCTS):
            # What can be made of a product at once is made by its kernel, of which no other product is a part.
            apart = (
                name not in PRODUCTS or several or flow.ops[makers[0]].name in PRODUCTS or not joined.isdisjoint(fused)
            )
            larger = any(flow.values[end].nbytes > flow.values[value].nbytes for end in fused)
            if not apart and not larger and moments[makers[0]] == moments[maker] + 1:
                joined |= fused
                continue
            last = _find_last_alone(flow, value, stored, moments, elementwise)
            if last != value:
                stored.add(last)
                ends[value] = frozenset([last])
                leaves = name in PRODUCTS and last in joined
                joined |= {last} if name in PRODUCTS else set()
        if leaves:
            stored.add(value)
    return frozenset(stored)


def list_kernels(
    flow: StepFlow, stored: frozenset[int], clusters: Iterable[Sequence[int]]
) -> dict[int, frozenset[int]]:
    """The kernels that each operation of some clusters is part of, by what they store; on a TPU one has all of a
    cluster that can run at the same moment. What is fused into another cluster's operations is in none: it is read
    there.
    """
    elementwise = _list_elementwise(flow)
    moments = _find_sources(flow, elementwise)[1]
    kernels: dict[int, frozenset[int]] = {}
    for ops in clusters:
        for at in sorted(ops, reverse=True):
            found = set[int]()
            for result in flow.ops[at].results:
                if result in stored or at not in elementwise:
                    found.add(moments[at] if flow.platform == "tpu" else result)
                else:
                    found.update(*(kernels[reader] for reader, _ in flow.readers[result] if reader in ops))
            kernels[at] = frozenset(found)
    return kernels


def find_padded(flow: StepFlow) -> frozenset[int]:
    """The values whose last dim takes whole lanes: TPUs gather and scatter rows that lie one after the other. Of other
    values XLA chooses the order of the dims, so that little is padded."""
    found: set[int] = set()
    for op in flow.ops.values() if flow.platform == "tpu" else ():
        many = len(op.results)
        rows = op.operands[:1] if op.name == "stablehlo.gather" else ()
        if op.name == "stablehlo.scatter":
            rows = (*op.operands[:many], *op.operands[many + 1 :], *op.results)
        for value in rows:
            # A slice of a table is a part of its memory.
            while value not in found and flow.values[value].shape:
                found.add(value)
                maker = flow.ops.get(flow.values[value].maker)
                if maker is None or maker.name not in _NARROWED:
                    break
                if flow.values[maker.operands[0]].shape[-1:] != flow.values[value].shape[-1:]:
                    break
                (value,) = maker.operands
    return frozenset(found)


def _list_elementwise(flow: StepFlow) -> frozenset[int]:
    """The operations that XLA fuses into others, or others into them. For TPUs a scatter of one element a row, as of a
    cross entropy's gradient, is one: it compares each place with the row's index."""
    found = {at for at, op in flow.ops.items() if op.name in FUSED | RELAID}
    for at, op in flow.ops.items():
        if flow.platform == "tpu" and op.name == "stablehlo.pad":
            found.add(at)
        if flow.platform == "tpu" and op.name == "stablehlo.scatter" and len(op.operands) == 3:
            into, _, updates = (flow.values[operand] for operand in op.operands)
            pairs = list(zip(into.shape, updates.shape, strict=False))
            if len(into.shape) == len(updates.shape) and [b for a, b in pairs if a != b] == [1]:
                found.add(at)
    return frozenset(found)


def _find_sources(flow: StepFlow, elementwise: frozenset[int]) -> tuple[dict[int, frozenset[int]], dict[int, int]]:
    """From which large values each is made elementwise, and after how many others, one after the other, each operation
    can run at the earliest that is not elementwise."""
    sources: dict[int, frozenset[int]] = {}
    made_of: dict[int, frozenset[int]] = {}
    moments, made_at = {-1: 0}, dict[int, int]()
    for at, op in sorted(flow.ops.items()):
        moments[at] = max((made_at.get(operand, 0) for operand in op.operands), default=0)
        for result in op.results:
            large = [each for each in op.operands if 8 * flow.values[each].nbytes >= flow.values[result].nbytes]
            found = {x for each in large if at in elementwise for x in made_of.get(each, (each,))}
            sources[result] = frozenset(found)
            alone = at in elementwise and (len(found) < 2 or len(flow.readers[result]) < 2)
            made_of[result] = sources[result] if alone else frozenset([result])
            made_at[result] = moments[at] + (at not in elementwise)
    return sources, moments


def _find_last_alone(
    flow: StepFlow, value: int, stored: set[int], moments: Mapping[int, int], elementwise: frozenset[int]
) -> int:
    """The last of the elementwise operations that follow a value in one kernel, each the only reader of the one before,
    and not larger; the value, if they end in one that is stored. Sums beside them, as a bias's gradient, are results of
    that kernel, too."""
    last, maker = value, flow.values[value].maker
    moment = moments[maker] + (maker not in elementwise)
    while True:
        readers = [each for each, _ in flow.readers[last] if flow.ops[each].name != "stablehlo.reduce"]
        if len(readers) != 1 or moments[readers[0]] > moment or readers[0] not in elementwise:
            return last
        (made,) = flow.ops[readers[0]].results
        if made in stored:
            return value
        if flow.values[made].nbytes > flow.values[last].nbytes:
            return last
        last = made


def _place_needs(
    flow: StepFlow, stored: frozenset[int], runs: Mapping[int, Sequence[int]]
) -> dict[tuple[int, int], int]:
    """Until which position each operation, which runs at these, needs each of its operands."""
    needs: dict[tuple[int, int], int] = {}
    on_tpu, fusing = flow.platform == "tpu", _FUSING.union(PRODUCTS)

    def sizes(values: Sequence[int]) -> int:
        return sum(flow.values[value].nbytes for value in values)

    # From the last on, as what is fused runs where its readers do.
    for at, op in sorted(flow.ops.items(), reverse=True):
        wider = on_tpu and op.name == "stablehlo.convert" and sizes(op.results) > sizes(op.operands)
        late = [
            needs[read]
            for value in op.results
            for read in flow.readers[value]
            if value not in stored or (wider and flow.ops[read[0]].name in fusing)
        ]
        for place, operand in enumerate(op.operands):
            # Where an operand is made again beside what reads it, it is not read from memory.
            anew = runs.get(flow.values[operand].maker, ())
            needs[at, place] = max([0, *(run for run in runs[at] if run not in anew), *late])
    return needs


def order_as_compiled(flow: StepFlow, module: Module, layouts: StepLayouts) -> RunOrder:
    """The operations in the order of a compiled program of the step, emitted in these layouts, whose instructions have
    their numbers, and what lies in memory there. What it does not show is as the program is written."""
    # What loops and branches yield lies where they are over, as it is written.
    tiles = {
        value: layout
        for at, each in layouts.operations.items()
        if flow.ops[at].name not in (WHILE, *BRANCHES)
        for value, layout in zip(flow.ops[at].results, each.results, strict=True)
    } | dict(zip(flow.arguments, layouts.arguments, strict=True))
    compiled = _CompiledProgram(flow, module, {value: layout.tile_bytes for value, layout in tiles.items()})
    devices = max((layout.mesh.size for layout in tiles.values()), default=1)
    written, runs = find_stored(flow, devices), dict(compiled.runs)
    starts: dict[int, int] = {}
    ends: dict[int, int] = {}
    held: dict[int, int] = {}  # until where, for what is stored there first
    copies = [(value, *each) for value in flow.arguments for each in compiled.buffers.get(value, ())]
    for at, op in sorted(flow.ops.items()):
        # What the compiler left no trace of comes for nothing as soon as its operands are there.
        ready = max((starts[maker] for v in op.operands if (maker := flow.values[v].maker) in starts), default=0)
        inside = [each for other in range(at, op.last + 1) for each in compiled.runs.get(other, ())] or [ready]
        starts[at], ends[at] = compiled.spans.get(at, (min(inside), max(inside)))
        for value in op.results:
            for n, (made, used, count) in enumerate(sorted(compiled.buffers.get(value, ()))):
                if n == 0:
                    starts[at], held[value] = made, used
                # Of two buffers one is the value as long as both are there; one that is made later is another.
                until = held[value]
                copies.append((value, made, min(used, until) if made <= until else used, count - (n == 0)))
                held[value] = max(used, until) if made <= until else until
        runs.setdefault(at, [starts[at]])
    # Of what has no trace it is as it is written, and so of what loops carry.
    stored = frozenset(held) | {v for v in written if v not in tiles or flow.values[v].maker not in compiled.runs}
    last = max(flow.ops)
    starts[last] = ends[last] = compiled.length
    needs = _place_needs(flow, stored, runs | {last: [compiled.length]})
    for at, each in layouts.operations.items():
        for place, (operand, layout) in enumerate(zip(flow.ops[at].operands, each.operands, strict=True)):
            # What is read as it was made is held until then, whatever has become of its readers.
            if operand in held and layout == tiles[operand]:
                needs[at, place] = min(needs[at, place], held[operand])
    copied = tuple(each for each in copies if each[-1] > 0)
    return RunOrder(stored, starts, needs, ends, compiled.length + 1, copied)


class _CompiledProgram:
    """Where a compiled program runs the operations of a step, and in which buffers it holds their values.

    Positions number its instructions, those of loops in the place of the loop. `runs` has all positions of an operation
    that is fused into several others, `spans` the first and the last one of loops. `buffers` are those of each value:
    where they are made and used last, and how often they count.
    """

    def __init__(self, flow: StepFlow, module: Module, nbytes: Mapping[int, int]) -> None:
        self.flow, self.module, self.nbytes = flow, module, nbytes
        self.reading = Flow(module)
        self.regions = {region.computation.name: region for region in self.reading.regions}
        self.numbers = _number_instructions(flow, module)
        self.runs: dict[int, list[int]] = {}
        self.spans: dict[int, tuple[int, int]] = {}
        self.buffers: dict[int, list[tuple[int, int, int]]] = {}
        self.length = 0
        self._visit(self.reading.regions[0])

    def _visit(self, region: Scope) -> None:
        places: list[int] = []
        for instruction in region.computation.instructions:
            places.append(start := self.length)
            self.length += 1
            for number in self._find_done(region.computation, instruction):
                self.runs.setdefault(number, []).append(start)
            if instruction.opcode in _RUNNING:
                for name in instruction.called:
                    if name in self.regions:
                        self._visit(self.regions[name])
                if (number := self.numbers.get((region.computation.name, instruction.name))) is not None:
                    self.spans[number] = start, self.length - 1
        ranges = LiveRanges(self.reading, region)
        for buffer, one in ranges.live.items():
            # Parts of a value, and what it was made of in between, are no copies of it.
            for value in self._find_values(buffer):
                if self.nbytes.get(value, one.nbytes + one.nbytes) < 2 * one.nbytes:
                    same = [
                        x for x in ranges.instructions[one.made].arrays if buffer.array and x.dims == buffer.array.dims
                    ]
                    count = max((round(_measure_tile_padding(each)) for each in same), default=1)
                    span = places[one.made], places[min(one.used, len(places) - 1)]
                    if count:
                        self.buffers.setdefault(value, []).append((*span, count))
                    break

    def _find_done(self, inside: Computation, instruction: Instruction) -> set[int]:
        """The operations that an instruction does: its own, and all that are fused into it."""
        number = self.numbers.get((inside.name, instruction.name))
        found = set[int]() if number is None else {number}
        for name in () if instruction.opcode in _RUNNING else instruction.called:
            fused = self.module.computation(name)
            for inner in fused.instructions:
                found |= self._find_done(fused, inner)
        return found

    def _find_values(self, buffer: HloValue) -> tuple[int, ...]:
        """The values of the step that a buffer may hold: in another order of its dims it is the same value."""
        inside, maker = buffer.scope.computation, buffer.instruction
        while (inside.name, maker.name) not in self.numbers and maker.opcode in _RENAMING:
            if maker.operands[0] not in inside.by_name:
                return ()
            maker = inside.by_name[maker.operands[0]]
        number = self.numbers.get((inside.name, maker.name))
        if number is not None:
            return self.flow.ops[number].results
        # Only the copy is a buffer of the program: the argument's own memory is the caller's.
        copied = maker.opcode == "parameter" and maker is not buffer.instruction and buffer.scope.caller is None
        return (self.flow.arguments[int(maker.literal)],) if copied else ()


def _number_instructions(flow: StepFlow, module: Module) -> dict[tuple[str, str], int]:
    """The operation that each instruction (computation, name) is of, where the compiler says so.

    Where XLA rewrites a product, the new one has no name; only the bitcast after it keeps the old name. A bitcast does
    no work, so its name is given to what it reads.
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
            if number in flow.ops and instruction.opcode in _RENAMING and flow.ops[number].name not in RELAID:
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


def _measure_tile_padding(array: Array) -> float:
    """How many times its size an array takes of the main memory of a device, whose tiles may be larger than its dims;
    nothing if it lies elsewhere.

    >>> arrays = Array("f32", (8, 2), "1,0:T(8,128)"), Array("f32", (8,), "0:T(8)S(1)")
    >>> tuple(map(_measure_tile_padding, arrays))
    (64.0, 0.0)
    """
    order, _, tiling = array.layout.partition(":")
    tile = _TILE.match(tiling)
    if "S(" in tiling or tile is None or not order:
        return float("S(" not in tiling)
    sizes = [array.dims[int(dim)] for dim in order.split(",")]  # the minor ones first, which are the last of a tile
    pairs = zip(sizes, map(int, reversed(tile[1].split(","))), strict=False)
    return math.prod(-(-size // step) * step / max(1, size) for size, step in pairs)
