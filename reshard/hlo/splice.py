"""Splices a fragment into a module: compiled instructions take the place of a chain of others.

    %g = f32[64,64] all-gather(%s)                                    %t = f32[64,8] all-to-all(%s)
    %f = f32[64,8] fusion(%g, %partition-id), calls=%slice_and_add    %f = f32[64,8] fusion(%t), calls=%add

The fragment has a parameter for each of the `sources`, and its results take the place of each `Use`. A use inside a
fusion is replaced by a new parameter of the fusion, through which the tile enters. What nobody uses any more is
removed: instructions, and parameters of fusions. All else keeps its bytes.

A source may exist only inside a fusion, which computes it and slices it. A fusion of its own yields it then:

    %f = f32[8,16] fusion(%p), calls=%square_and_slice                %m = f32[8,64] fusion(%p), calls=%square
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from reshard.errors import SpliceError
from reshard.hlo.combined import shrink_sums
from reshard.hlo.proto import (
    FUSION_KIND,
    ComputationProto,
    InstructionProto,
    ModuleProto,
    fusion_kind,
    make_parameter,
    without_layout,
)
from reshard.hlo.wire import ProtoMessage, refuse_damage

_ENTERED = ("fusion", "call")
_LOOP = "kLoop"


@dataclass(frozen=True)
class Use:
    """A value to be replaced: the instructions to enter, from the region inward, and the instruction that yields it.

    `output` is the number of the fragment's result that replaces it, 0 if it has only one.
    """

    path: tuple[str, ...]
    name: str
    output: int = 0


class Exposed(NamedTuple):
    """A value that exists only inside a fusion of a region, which a fusion of its own is to yield."""

    region: str
    fusion: str
    value: str

    @property
    def source(self) -> str:
        """How it is named as a source before it is an instruction of the region."""
        return f"{self.fusion}/{self.value}"

    @classmethod
    def read(cls, region: str, source: str) -> Exposed | None:
        """The value that a source names; None if it names an instruction of the region.

        >>> Exposed.read("main", "add_fusion/multiply.3")
        Exposed(region='main', fusion='add_fusion', value='multiply.3')
        """
        fusion, slash, value = source.partition("/")
        return cls(region, fusion, value) if slash else None


@dataclass(frozen=True)
class Splice:
    """What to put where: in the computation `region`, what `fragment` yields, given `sources`, replaces all `uses`.

    `fragment` is a serialized module with a parameter for each source, captured at the same stage of the same compiler.
    A fragment with several results yields a tuple of them.
    `metadata` is the OpMetadata that its instructions get.
    """

    region: str
    sources: tuple[str, ...]
    uses: tuple[Use, ...]
    fragment: bytes
    metadata: bytes = b""


class Linked:
    """The ids of what a splice added, by the ids in the fragment.

    `compared` is the part of a shape that must be the same where one value takes another's place: all of it, but for
    memory layouts if the compiler has yet to choose them. `stand_ins` has the names of the instructions of the region
    that took the place of others, by their names.
    """

    def __init__(self, is_laid_out: bool = True) -> None:
        self.compared: Callable[[bytes], bytes] = bytes if is_laid_out else without_layout
        self.stand_ins: dict[str, str] = {}
        self.instructions: dict[int, int] = {}
        self.computations: dict[int, int] = {}
        self.channels: dict[int, int] = {}


class Splicer:
    """Splices fragments into one module, in place, and removes what nobody uses any more.

    What is asked of the whole module is asked once for all of them. After an error the module may be half changed:
    decode it anew.
    """

    def __init__(self, module: ModuleProto) -> None:
        self._known = SpliceContext(module)
        self._regions: list[ComputationProto] = []

    @refuse_damage
    def expose_value(self, exposed: Exposed) -> str:
        """Adds a fusion that yields what exists only inside another one, and returns its name.

        It is a copy of what the other fusion makes the value of, just before it. Raises `SpliceError` where that cannot
        be done.
        """
        known, module = self._known, self._known.module
        region = module.computation_named(exposed.region)
        caller = region.named(exposed.fusion)
        if fusion_kind(caller) != _LOOP or caller.control:
            raise SpliceError(f"{caller.name}: a value inside it cannot be made by a fusion of its own")
        original = module.computation(caller.called[0])
        value = original.named(exposed.value)
        needed: set[int] = set()
        waiting = [value.id]
        while waiting:  # ends: each instruction is looked at once
            if (number := waiting.pop()) not in needed:
                needed.add(number)
                waiting += original.by_id(number).operands
        inner = original.copy()
        inner.instructions = [one for one in inner.instructions if one.id in needed]
        (inner.id,), inner.name = module.new_ids(1), known.fresh(original.name)
        ids = {one.id: inner.id << 32 | at for at, one in enumerate(inner.instructions, 1)}
        operands = [caller.operands[one.parameter] for one in inner.parameters]
        for at, parameter in enumerate(inner.parameters):
            parameter.parameter = at
        for one in inner.instructions:
            one.id, one.name = ids[one.id], known.fresh(one.name)
            if one.operands:
                one.operands = [ids[number] for number in one.operands]
        inner.root_id = ids[value.id]
        inner.describe_parameters()
        made = InstructionProto(ProtoMessage([]))  # not a copy of the other one, whose settings are for its own root
        made.name, made.opcode = known.fresh(value.name), "fusion"
        made.shape, made.metadata = value.shape, value.metadata
        made.message.set_data(FUSION_KIND, _LOOP.encode())
        (made.id,), made.operands, made.called = region.new_ids(1), operands, [inner.id]
        known.calls.update(number for one in (made, *inner.instructions) for number in one.called)
        region.instructions.insert(region.instructions.index(caller), made)
        module.computations.insert(module.computations.index(region), inner)
        if module.schedule is not None:
            order = module.schedule[region.id]
            order.insert(order.index(caller.id), made.id)
            if original.id in module.schedule:
                module.schedule[inner.id] = [ids[one] for one in module.schedule[original.id] if one in ids]
        return made.name

    @refuse_damage
    def splice(self, change: Splice) -> Linked:
        """Splices one fragment in; raises `SpliceError` where that cannot be done."""
        known, module = self._known, self._known.module
        region = module.computation_named(change.region)
        if region not in self._regions:
            self._regions.append(region)
        fragment = _decode_fragment(change.fragment).copy()
        entry = fragment.entry
        if (module.schedule is None) != (fragment.schedule is None):
            raise SpliceError(f"{change.region}: the fragment was captured at another stage; only one has a schedule")
        sources = [region.named(name) for name in change.sources]
        uses: list[Use] = []
        first: list[int] = []  # The instructions that need a value: the fusion that it is inside of, or its first user.
        for use in change.uses:
            scopes, path, name = _list_scopes(known, region, use.path), list(use.path), use.name
            while path and scopes[-1].root.name == name:  # A fusion that only yields the value stands for it.
                scopes.pop()
                name = path.pop()
            uses.append(Use(tuple(path), name, use.output))
            if path:
                first.append(region.named(path[0]).id)
            else:
                replaced = region.named(name)
                first += [one.id for one in region.users(replaced.id)][:1] or [replaced.id]
        at = next(at for at, one in enumerate(region.instructions) if one.id in first)
        linked, results = Linked(fragment.is_laid_out), result_ids(entry)
        made = _link_fragment(known, region, fragment, sources, change.metadata, linked)
        values = [linked.instructions[one] for one in results]
        if any(use.output >= len(values) for use in uses):
            raise SpliceError(
                f"{change.region}: the fragment yields {len(values)} values, which are fewer than are used"
            )
        region.instructions[at:at] = made
        if module.schedule is None:
            _sort_instructions(region)
        linked.stand_ins = {use.name: region.by_id(values[use.output]).name for use in uses if not use.path}
        consumers = {one for use in uses for one in _replace_use(known, region, use, values[use.output], linked)}
        if module.schedule is not None and fragment.schedule is not None:
            _insert_in_schedule(module.schedule, fragment.schedule, entry, region, linked, consumers)
        remove_unused(module, region, {one.id for use in uses for one in _list_scopes(known, region, use.path)[1:]})
        return linked

    def finish(self) -> None:
        """Removes the arrays of combined sums and the computations that nobody takes any more: once for all splices."""
        module = self._known.module
        for region in self._regions:
            schedule = None if module.schedule is None else module.schedule.get(region.id)
            # What a sum takes no more may be an array of an earlier one: ends, as each turn takes an array away.
            while shrink_sums(region, schedule):
                remove_unused(module, region, set())
        remove_uncalled(module)


@lru_cache(maxsize=64)  # Many chains of a program, and many programs, ask for the same fragment; each splice copies it.
def _decode_fragment(fragment: bytes) -> ModuleProto:
    return ModuleProto.decode(fragment)


def result_ids(entry: ComputationProto) -> list[int]:
    """The ids of the results of a fragment, in order."""
    return entry.root.operands if entry.root.opcode == "tuple" else [entry.root_id]


def replaced_values(known: SpliceContext, region: str, use: Use) -> list[int]:
    """The ids of the values that a splice replaces for a use: its own, and those of fusions that only yield it."""
    scopes = _list_scopes(known, known.module.computation_named(region), use.path)
    names = [*use.path, use.name]
    values = [scopes[-1].named(names[-1]).id]
    while len(scopes) > 1 and scopes[-1].root_id == values[-1]:  # ends: the scopes get fewer
        scopes.pop()
        names.pop()
        values.append(scopes[-1].named(names[-1]).id)
    return values


def _list_scopes(known: SpliceContext, region: ComputationProto, path: Sequence[str]) -> list[ComputationProto]:
    """The region, and the computation that each instruction of a path runs, and no other does."""
    scopes = [region]
    for name in path:
        caller = scopes[-1].named(name)
        if caller.opcode not in _ENTERED or len(caller.called) != 1:
            raise SpliceError(f"{caller.name}: a value inside {caller.opcode} cannot be replaced")
        if known.calls[caller.called[0]] != 1:
            raise SpliceError(f"{caller.name}: other instructions call the same computation")
        scopes.append(known.module.computation(caller.called[0]))
    return scopes


def _link_fragment(
    known: SpliceContext,
    region: ComputationProto,
    fragment: ModuleProto,
    sources: Sequence[InstructionProto],
    metadata: bytes,
    linked: Linked,
) -> list[InstructionProto]:
    """Adds the fragment's computations to the module, and returns the instructions of its entry for the region."""
    module, entry = known.module, fragment.entry
    parameters = entry.parameters
    if [linked.compared(one.shape) for one in parameters] != [linked.compared(one.shape) for one in sources]:
        names = ", ".join(one.name for one in sources)
        raise SpliceError(f"{names}: the fragment takes another shape or layout")
    linked.instructions.update({one.id: source.id for one, source in zip(parameters, sources, strict=True)})
    # Channels that the module does not use.
    channels = sorted({one.channel for one in fragment.instructions() if one.channel})
    linked.channels = {channel: known.last_channel + at for at, channel in enumerate(channels, 1)}
    known.last_channel += len(channels)
    added = [one for one in fragment.computations if one is not entry]
    linked.computations = dict(zip([one.id for one in added], module.new_ids(len(added)), strict=True))
    inserted = [one for one in entry.instructions if one.opcode != "parameter"]
    # All ids first, since operands, callers and control predecessors name each other.
    for computation in added:
        computation.id = linked.computations[computation.id]
    for instructions, numbers in (
        (inserted, region.new_ids(len(inserted))),
        *((one.instructions, range(one.id << 32 | 1, (one.id << 32) + 1 + len(one.instructions))) for one in added),
    ):
        linked.instructions.update(zip([one.id for one in instructions], numbers, strict=True))
    for computation in (*added, None):
        if computation is not None:
            computation.root_id = linked.instructions[computation.root_id]
            computation.name = known.fresh(computation.name)
        for instruction in inserted if computation is None else computation.instructions:
            instruction.id = linked.instructions[instruction.id]
            instruction.name = known.fresh(instruction.name)
            instruction.metadata = metadata
            if operands := instruction.operands:
                instruction.operands = [linked.instructions[one] for one in operands]
            if control := instruction.control:
                instruction.control = [linked.instructions[one] for one in control]
            if called := instruction.called:
                instruction.called = [linked.computations[one] for one in called]
                known.calls.update(instruction.called)
            if instruction.channel:
                instruction.channel = linked.channels[instruction.channel]
    for computation in added:
        computation.describe_parameters()
    place = module.computations.index(region)
    module.computations[place:place] = added  # before their caller
    return inserted


class SpliceContext:
    """What splices ask of the whole module: its names, its channels, and how many instructions call a computation."""

    def __init__(self, module: ModuleProto) -> None:
        self.module = module
        summaries = [one.summary for one in module.computations]
        self.calls = Counter(number for one in summaries for number in one.called)
        self.last_channel = max((channel for one in summaries for channel in one.channels), default=0)
        self._taken = {name for one in summaries for name in one.names} | {one.name for one in module.computations}

    def fresh(self, name: str) -> str:
        """The name, with a number after it if it is taken."""
        candidate, number = name, 0
        while candidate in self._taken:  # ends: the number grows
            number += 1
            candidate = f"{name}.s{number}"
        self._taken.add(candidate)
        return candidate


def _sort_instructions(region: ComputationProto) -> None:
    """Puts operands before their users, and leaves the rest of the order as it is.

    Two fusions may compute the same value, and a source that stands later may be what the earlier one used. Only for
    modules without a schedule, whose order says nothing else.
    """
    by_id = {one.id: one for one in region.instructions}
    ordered: dict[int, InstructionProto] = {}
    for first in region.instructions:
        waiting = [first.id]
        while waiting:  # ends: the instructions of a module that XLA has made depend on none that depends on them
            one = by_id[waiting[-1]]
            if missing := [each for each in (*one.operands, *one.control) if each not in ordered]:
                waiting += missing
            else:
                ordered[one.id] = one
                waiting.pop()
    region.instructions = list(ordered.values())


def _replace_use(known: SpliceContext, region: ComputationProto, use: Use, value: int, linked: Linked) -> list[int]:
    """Replaces one use by a value of the region; returns the ids of the region's instructions that now take it."""
    scope, carried = region, value
    scopes = _list_scopes(known, region, use.path)
    for name, inner in zip(use.path, scopes[1:], strict=True):  # A tile enters a fusion as one more parameter.
        caller, shape = scope.named(name), scope.by_id(carried).shape
        parameter = make_parameter(known.fresh(f"{name}.tile"), len(inner.parameters), shape)
        parameter.id = inner.new_ids(1)[0]
        inner.instructions.insert(0, parameter)
        inner.describe_parameters()
        caller.operands = [*caller.operands, carried]
        scope, carried = inner, parameter.id
    old = scope.named(use.name)
    if linked.compared(scope.by_id(carried).shape) != linked.compared(old.shape):
        raise SpliceError(f"{old.name}: the fragment yields another shape or layout")
    users = scope.users(old.id)
    for user in users:
        user.operands = [carried if one == old.id else one for one in user.operands]
    if scope.root_id == old.id:
        scope.root_id = carried
    return [region.named(use.path[0]).id] if use.path else [user.id for user in users]


def _insert_in_schedule(
    schedule: dict[int, list[int]],
    added: Mapping[int, Sequence[int]],
    entry: ComputationProto,
    region: ComputationProto,
    linked: Linked,
    consumers: Set[int],
) -> None:
    """Schedules the fragment just before the first instruction that takes its result, or at the end."""
    own = {one.id for one in entry.parameters}
    order = [linked.instructions[one] for one in added[entry.id] if one not in own]
    ids = schedule[region.id]
    at = next((at for at, one in enumerate(ids) if one in consumers), len(ids))
    ids[at:at] = order
    for number, sequence in added.items():
        if number != entry.id:
            schedule[linked.computations[number]] = [linked.instructions[one] for one in sequence]


# Removes from a module what nobody uses: instructions, parameters of fusions, and computations.


_KEPT = (
    "parameter", "while", "conditional", "call", "infeed", "outfeed", "send", "send-done", "recv",
    "recv-done", "rng", "rng-bit-generator", "rng-get-and-update-state", "after-all", "add-dependency", "async-start",
    "async-update", "async-done", "domain", "opt-barrier", "optimization-barrier",
)  # fmt: skip


def remove_unused(module: ModuleProto, computation: ComputationProto, entered: Set[int]) -> None:
    """Removes what nobody uses from a computation and from the fusions that run an `entered` one.

    Instructions that may have an effect stay, used or not. Operands stand before their users, so one pass from the last
    instruction to the first removes everything.
    """
    users = Counter([computation.root_id])
    followed = {one for instruction in computation.instructions for one in instruction.control}
    for instruction in computation.instructions:
        users.update(instruction.operands)
    for instruction in reversed(list(computation.instructions)):
        if not users[instruction.id] and not (instruction.opcode in _KEPT or instruction.side_effect):
            users.subtract(instruction.operands)
            computation.instructions.remove(instruction)
            # What had to follow it now follows what it had to follow.
            for other in computation.instructions if instruction.id in followed else ():
                if instruction.id in (control := other.control):
                    others = [one for one in control if one != instruction.id]
                    other.control = list(dict.fromkeys([*others, *instruction.control]))
            if module.schedule is not None and computation.id in module.schedule:
                module.schedule[computation.id].remove(instruction.id)
        elif instruction.opcode == "fusion" and instruction.called[0] in entered:
            # What nobody uses inside goes first, then the parameters that only that had used, and their operands.
            inner, before = module.computation(instruction.called[0]), instruction.operands
            remove_unused(module, inner, entered)
            unused = [one for one in inner.parameters if inner.root_id != one.id and not inner.users(one.id)]
            if unused:
                numbers = {one.parameter for one in unused}
                instruction.operands = [one for at, one in enumerate(before) if at not in numbers]
                for parameter in unused:
                    inner.instructions.remove(parameter)
                for at, parameter in enumerate(inner.parameters):
                    parameter.parameter = at
                inner.describe_parameters()
            users.subtract(before)
            users.update(instruction.operands)


def remove_uncalled(module: ModuleProto) -> None:
    """Removes the computations that no instruction calls."""
    calls = {one.id: one.summary.called for one in module.computations}
    while True:  # ends: each round removes a computation
        called = {number for one in module.computations for number in calls[one.id]} | {module.entry.id}
        kept = [one for one in module.computations if one.id in called]
        if len(kept) == len(module.computations):
            return
        if module.schedule is not None:
            module.schedule = {number: ids for number, ids in module.schedule.items() if number in called}
        module.computations = kept
