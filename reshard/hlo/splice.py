"""Splices a fragment into a module: compiled instructions take the place of a chain of others.

    %g = f32[64,64] all-gather(%s)                                    %t = f32[64,8] all-to-all(%s)
    %f = f32[64,8] fusion(%g, %partition-id), calls=%slice_and_add    %f = f32[64,8] fusion(%t), calls=%add

The fragment has one parameter, which becomes `source`, and its root takes the place of each `Use`. A use inside a
fusion is replaced by a new parameter of the fusion, through which the tile enters. What nobody uses any more is
removed: instructions, and parameters of fusions. All else keeps its bytes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import lru_cache

from reshard.errors import SpliceError
from reshard.hlo.proto import ComputationProto, InstructionProto, ModuleProto, make_parameter, without_layout

_ENTERED = ("fusion", "call")


@dataclass(frozen=True)
class Use:
    """A value to be replaced: the instructions to enter, from the region inward, and the instruction that yields it.

    `output` is the number of the fragment's result that replaces it, 0 if it has only one.
    """

    path: tuple[str, ...]
    name: str
    output: int = 0


@dataclass(frozen=True)
class Splice:
    """What to put where: in the computation `region`, what `fragment` yields, given `source`, replaces all `uses`.

    `fragment` is a serialized module with one parameter, captured at the same stage of the same compiler. A fragment
    with several results yields a tuple of them.
    `metadata` is the OpMetadata that its instructions get.
    """

    region: str
    source: str
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
        self.compared = _same if is_laid_out else without_layout
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

    def splice(self, change: Splice) -> Linked:
        """Splices one fragment in; raises `SpliceError` where that cannot be done."""
        known, module = self._known, self._known.module
        region = module.computation_named(change.region)
        fragment = _decoded(change.fragment).copy()
        entry = fragment.entry
        if (module.schedule is None) != (fragment.schedule is None):
            raise SpliceError(f"{change.region}: the fragment was captured at another stage; only one has a schedule")
        source = region.named(change.source)
        uses = [_outermost(known, region, use) for use in change.uses]
        at = min(_index_of(region, _entered_at(region, use)) for use in uses)
        linked, results = Linked(fragment.is_laid_out), outputs(entry)
        made = _link(known, region, fragment, source, change.metadata, linked)
        values = [linked.instructions[one] for one in results]
        if any(use.output >= len(values) for use in uses):
            raise SpliceError(
                f"{change.region}: the fragment yields {len(values)} values, which are fewer than are used"
            )
        region.instructions[at:at] = made
        linked.stand_ins = {use.name: region.by_id(values[use.output]).name for use in uses if not use.path}
        consumers = [_replace(known, region, use, values[use.output], linked) for use in uses]
        if module.schedule is not None and fragment.schedule is not None:
            _insert_in_schedule(module.schedule, fragment.schedule, entry, region, linked, consumers)
        remove_unused(module, region, {one.id for use in uses for one in _scopes(known, region, use.path)[1:]})
        return linked

    def finish(self) -> None:
        """Removes the computations that nobody calls any more: once for all splices."""
        remove_uncalled(self._known.module)


def splice(module: ModuleProto, change: Splice) -> Linked:
    """Splices one fragment into a module, in place; see `Splicer`."""
    splicer = Splicer(module)
    linked = splicer.splice(change)
    splicer.finish()
    return linked


@lru_cache(maxsize=64)
def _decoded(fragment: bytes) -> ModuleProto:
    """A fragment, to be copied: many chains of a program, and many programs, ask for the same."""
    return ModuleProto.decode(fragment)


def outputs(entry: ComputationProto) -> list[int]:
    """The ids of the results of a fragment, in order."""
    return entry.root.operands if entry.root.opcode == "tuple" else [entry.root_id]


def replaced_values(known: SpliceContext, region: str, use: Use) -> list[int]:
    """The ids of the values that a splice replaces for a use: its own, and those of fusions that only yield it."""
    scopes = _scopes(known, known.module.computation_named(region), use.path)
    names = [*use.path, use.name]
    values = [scopes[-1].named(names[-1]).id]
    while len(scopes) > 1 and scopes[-1].root_id == values[-1]:  # ends: the scopes get fewer
        scopes.pop()
        names.pop()
        values.append(scopes[-1].named(names[-1]).id)
    return values


def _same(shape: bytes) -> bytes:
    return shape


def _outermost(known: SpliceContext, region: ComputationProto, use: Use) -> Use:
    """The use, outside of every fusion that only yields it."""
    scopes = _scopes(known, region, use.path)
    path, name = list(use.path), use.name
    while path and scopes[-1].root.name == name:  # ends: the path gets shorter
        scopes.pop()
        name = path.pop()
    return Use(tuple(path), name, use.output)


def _scopes(known: SpliceContext, region: ComputationProto, path: Sequence[str]) -> list[ComputationProto]:
    """The region, and the computation that each instruction of a path enters."""
    scopes = [region]
    for name in path:
        scopes.append(_entered(known, scopes[-1].named(name)))
    return scopes


def _entered(known: SpliceContext, caller: InstructionProto) -> ComputationProto:
    """The computation that an instruction runs, and no other does."""
    if caller.opcode not in _ENTERED or len(caller.called) != 1:
        raise SpliceError(f"{caller.name}: a value inside {caller.opcode} cannot be replaced")
    number = caller.called[0]
    if known.calls[number] != 1:
        raise SpliceError(f"{caller.name}: other instructions call the same computation")
    return known.module.computation(number)


def _entered_at(region: ComputationProto, use: Use) -> int:
    """The id of the first instruction of the region that needs the value of a use."""
    if use.path:
        return region.named(use.path[0]).id
    replaced = region.named(use.name)
    users = region.users(replaced.id)
    return users[0].id if users else replaced.id


def _index_of(computation: ComputationProto, number: int) -> int:
    return next(at for at, one in enumerate(computation.instructions) if one.id == number)


def _link(
    known: SpliceContext,
    region: ComputationProto,
    fragment: ModuleProto,
    source: InstructionProto,
    metadata: bytes,
    linked: Linked,
) -> list[InstructionProto]:
    """Adds the fragment's computations to the module, and returns the instructions of its entry for the region."""
    module, entry = known.module, fragment.entry
    if [linked.compared(one.shape) for one in entry.parameters] != [linked.compared(source.shape)]:
        raise SpliceError(f"{source.name}: the fragment takes another shape or layout")
    linked.instructions[entry.parameters[0].id] = source.id
    linked.channels = known.new_channels(fragment)
    added = [one for one in fragment.computations if one is not entry]
    linked.computations = dict(zip([one.id for one in added], module.new_ids(len(added)), strict=True))
    inserted = [one for one in entry.instructions if one.opcode != "parameter"]
    _renumber(region, inserted, linked)
    for computation in added:
        computation.id = linked.computations[computation.id]
        _renumber(ComputationProto(computation.message, []), computation.instructions, linked)
    for computation in added:
        _adopt(computation, linked, known, metadata)
    _rewire(inserted, linked, known, metadata)
    place = module.computations.index(region)
    module.computations[place:place] = added
    known.calls.update(
        number for one in (*added, ComputationProto(region.message, inserted)) for number in one.summary.called
    )
    return inserted


def _renumber(computation: ComputationProto, instructions: Sequence[InstructionProto], linked: Linked) -> None:
    """Chooses the ids of added instructions: after those that the computation has."""
    for number, instruction in zip(computation.new_ids(len(instructions)), instructions, strict=True):
        linked.instructions[instruction.id] = number


def _adopt(computation: ComputationProto, linked: Linked, names: SpliceContext, metadata: bytes) -> None:
    """Makes a computation of the fragment one of the module."""
    computation.root_id = linked.instructions[computation.root_id]
    computation.name = names.fresh(computation.name)
    _rewire(computation.instructions, linked, names, metadata)
    computation.describe_parameters()


def _rewire(instructions: Iterable[InstructionProto], linked: Linked, names: SpliceContext, metadata: bytes) -> None:
    """Gives instructions the ids, names and channels of the module that they are added to."""
    for instruction in instructions:
        instruction.id = linked.instructions[instruction.id]
        instruction.name = names.fresh(instruction.name)
        instruction.metadata = metadata
        if operands := instruction.operands:
            instruction.operands = [linked.instructions[one] for one in operands]
        if control := instruction.control:
            instruction.control = [linked.instructions[one] for one in control]
        if called := instruction.called:
            instruction.called = [linked.computations[one] for one in called]
        if instruction.channel:
            instruction.channel = linked.channels[instruction.channel]


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

    def new_channels(self, fragment: ModuleProto) -> dict[int, int]:
        """Channels that the module does not use, for those of the fragment."""
        used = sorted({one.channel for one in fragment.instructions() if one.channel})
        first = self.last_channel + 1
        self.last_channel += len(used)
        return {channel: first + at for at, channel in enumerate(used)}


def _replace(known: SpliceContext, region: ComputationProto, use: Use, value: int, linked: Linked) -> list[int]:
    """Replaces one use by a value of the region; returns the ids of the region's instructions that now take it."""
    if not use.path:
        return _replace_in(region, region.named(use.name), value, linked)
    scope, carried = region, value
    for name in use.path:
        caller = scope.named(name)
        inner = _entered(known, caller)
        shape = scope.by_id(carried).shape
        parameter = make_parameter(known.fresh(f"{name}.tile"), len(inner.parameters), shape)
        parameter.id = inner.new_ids(1)[0]
        inner.instructions.insert(0, parameter)
        inner.describe_parameters()
        caller.operands = [*caller.operands, carried]
        scope, carried = inner, parameter.id
    _replace_in(scope, scope.named(use.name), carried, linked)
    return [region.named(use.path[0]).id]


def _replace_in(computation: ComputationProto, old: InstructionProto, value: int, linked: Linked) -> list[int]:
    """Lets all users of an instruction take another value, which must have the same shape and layout."""
    if linked.compared(computation.by_id(value).shape) != linked.compared(old.shape):
        raise SpliceError(f"{old.name}: the fragment yields another shape or layout")
    users = computation.users(old.id)
    for user in users:
        user.operands = [value if one == old.id else one for one in user.operands]
    if computation.root_id == old.id:
        computation.root_id = value
    return [user.id for user in users]


def _insert_in_schedule(
    schedule: dict[int, list[int]],
    added: Mapping[int, Sequence[int]],
    entry: ComputationProto,
    region: ComputationProto,
    linked: Linked,
    consumers: Sequence[Sequence[int]],
) -> None:
    """Schedules the fragment just before the first instruction that takes its result, or at the end."""
    own = {linked.instructions.get(one.id, one.id) for one in entry.parameters}
    order = [number for one in added[entry.id] if (number := linked.instructions[one]) not in own]
    ids = schedule[region.id]
    first = {one for several in consumers for one in several}
    at = next((at for at, one in enumerate(ids) if one in first), len(ids))
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


def remove_unused(module: ModuleProto, computation: ComputationProto, entered: Set[int]) -> bool:
    """Removes what nobody uses from a computation and from the fusions that run an `entered` one; returns whether it
    removed anything.

    Instructions that may have an effect stay, used or not. Operands stand before their users, so one pass from the last
    instruction to the first removes everything.
    """
    users = Counter([computation.root_id])
    followed = {one for instruction in computation.instructions for one in instruction.control}
    for instruction in computation.instructions:
        users.update(instruction.operands)
    removed = False
    for instruction in reversed(list(computation.instructions)):
        if not users[instruction.id] and not _has_effect(instruction):
            users.subtract(instruction.operands)
            _remove(module, computation, instruction, instruction.id in followed)
            removed = True
        elif instruction.opcode == "fusion" and instruction.called[0] in entered:
            before = instruction.operands
            removed = _trim(module, instruction, entered) or removed
            users.subtract(before)
            users.update(instruction.operands)
    return removed


def _has_effect(instruction: InstructionProto) -> bool:
    return instruction.opcode in _KEPT or bool(instruction.side_effect)


def _remove(module: ModuleProto, computation: ComputationProto, gone: InstructionProto, is_followed: bool) -> None:
    """Removes an instruction; what had to follow it now follows what it had to follow."""
    computation.instructions.remove(gone)
    for other in computation.instructions if is_followed else ():
        if gone.id in (control := other.control):
            other.control = list(dict.fromkeys([*(one for one in control if one != gone.id), *gone.control]))
    if module.schedule is not None and computation.id in module.schedule:
        module.schedule[computation.id].remove(gone.id)


def _trim(module: ModuleProto, fusion: InstructionProto, entered: Set[int]) -> bool:
    """Whether a fusion had parameters or instructions that nobody used, which are removed."""
    inner = module.computation(fusion.called[0])
    changed = remove_unused(module, inner, entered)
    unused = [one for one in inner.parameters if inner.root_id != one.id and not inner.users(one.id)]
    if unused:
        numbers = {one.parameter for one in unused}
        fusion.operands = [one for at, one in enumerate(fusion.operands) if at not in numbers]
        for parameter in unused:
            inner.instructions.remove(parameter)
        for at, parameter in enumerate(inner.parameters):
            parameter.parameter = at
        inner.describe_parameters()
    return changed or bool(unused)


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
