"""Checks a module after splices: XLA's own verification passes many wrong ones, and libtpu dies of some.

What must hold, whatever made the new module:

    kept         every instruction of the old module that is still there has its old fields, literals included, its
                 old operands (a replaced value apart), and its old control predecessors
    added        every other instruction is one of a fragment's, its fields as they were captured
    order        operands stand before their users, called computations before their callers, ids are unique
    schedule     scheduled as before or not at all; each scheduled computation lists each instruction once, in order
    channels     collectives of a fragment have new channels, and share one only where they did in the fragment
    fusions      as many operands as parameters, of the same shapes and layouts; no instruction without a user
    the rest     entry, layouts, aliases, tables: byte for byte as before
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from reshard.errors import SpliceError
from reshard.hlo.proto import ComputationProto, InstructionProto, ModuleProto
from reshard.hlo.splice import Linked, Splice, SpliceContext, outputs, replaced_values

_OWN_FIELDS = frozenset((1, 7, 9, 26, 35, 36, 37, 38))  # name, metadata, parameter number, channel, ids
_EDITED_OF_OLD = frozenset((9, 36, 37))  # parameter number, operands, control predecessors
_MODULE_EDITED = frozenset((3, 7))  # computations, schedule


class Change(NamedTuple):
    """A splice and the ids that it gave to what it added."""

    splice: Splice
    linked: Linked


def check(old: ModuleProto, new: ModuleProto, changes: Sequence[Change]) -> None:
    """Raises `SpliceError`, naming the instruction, unless `new` is `old` with these splices and nothing else.

    Both must be as they were decoded, `new` from the bytes that the compiler will get and `like` the old one: of
    computations with the same bytes as before only names and ids are looked at.
    """
    changed = _changed(old, new)
    _check_rest(old, new)
    _check_order(new, changed)
    _check_schedule(old, new)
    fragments = {one.splice.fragment: ModuleProto.decode(one.splice.fragment) for one in changes}
    added = _check_added(new, changed, changes, fragments)
    fresh = _what_is_fresh(old, new, changed, added, changes, fragments)
    _check_kept(changed, fresh)
    _check_channels(old, changes)
    for computation in changed:
        shapes = {one.id: one.shape for one in computation.instructions}
        originals = fresh.originals(computation.id)
        for instruction in computation.instructions:
            if instruction.opcode == "fusion" and not _is_unchanged(old, new, instruction, originals):
                _check_fusion(new, instruction, [shapes[one] for one in instruction.operands])


def _changed(old: ModuleProto, new: ModuleProto) -> list[ComputationProto]:
    """The computations of the new module that are not, byte for byte, in the old one."""
    kept = {one.data for one in old.computations}
    return [one for one in new.computations if one.data not in kept]


def _check_rest(old: ModuleProto, new: ModuleProto) -> None:
    kept = [
        [(field.number, field.value) for field in module.message.fields if field.number not in _MODULE_EDITED]
        for module in (old, new)
    ]
    if kept[0] != kept[1]:
        raise SpliceError("the module's header, layouts, aliases or tables have changed")


def _check_order(new: ModuleProto, changed: Sequence[ComputationProto]) -> None:
    ids = Counter(number for computation in new.computations for number in computation.summary.ids)
    names = Counter(name for computation in new.computations for name in computation.summary.names)
    names.update(computation.name for computation in new.computations)
    computations = Counter(computation.id for computation in new.computations)
    twice = [str(key) for counter in (ids, names, computations) for key, count in counter.items() if count > 1]
    if twice:
        raise SpliceError(f"{twice[0]}: an id or a name is given twice")
    defined: set[int] = set()
    for computation in new.computations:
        if not defined.issuperset(computation.summary.called):
            raise SpliceError(f"{computation.name}: a computation that it calls does not stand before its own")
        defined.add(computation.id)
    for computation in changed:
        _check_computation(computation)


def _check_computation(computation: ComputationProto) -> None:
    seen: set[int] = set()
    for instruction in computation.instructions:
        if not seen.issuperset(instruction.operands):
            raise SpliceError(f"{instruction.name}: an operand does not stand before it")
        seen.add(instruction.id)
    everything = {one for instruction in computation.instructions for one in instruction.control}
    if computation.root_id not in seen or not seen.issuperset(everything):
        raise SpliceError(f"{computation.name}: its root or a control predecessor is missing")


def _check_schedule(old: ModuleProto, new: ModuleProto) -> None:
    if (old.schedule is None) != (new.schedule is None):
        raise SpliceError("the module has lost or won a schedule")
    if old.schedule is None or new.schedule is None:
        return
    known = {one.id for one in new.computations}
    if not known.issuperset(new.schedule):
        raise SpliceError("the schedule has a computation that is not in the module")
    runs = _started(new)
    for computation in new.computations:
        ids = new.schedule.get(computation.id)
        if ids is not None:
            if ids != old.schedule.get(computation.id) or computation not in old:
                _check_sequence(computation, ids)
        elif computation.id in old.schedule or computation.id in runs:
            raise SpliceError(f"{computation.name}: it has no schedule")


def _started(module: ModuleProto) -> set[int]:
    """The ids of the computations that loops and branches run, which must be scheduled."""
    return {number for one in module.computations for number in one.summary.started}


def _check_sequence(computation: ComputationProto, ids: Sequence[int]) -> None:
    if sorted(ids) != sorted(one.id for one in computation.instructions):
        raise SpliceError(f"{computation.name}: its schedule does not list each instruction once")
    position = {number: at for at, number in enumerate(ids)}
    for instruction in computation.instructions:
        before = [*instruction.operands, *instruction.control]
        if any(position[one] > position[instruction.id] for one in before):
            raise SpliceError(f"{instruction.name}: it is scheduled before what it needs")


def _check_added(
    new: ModuleProto,
    changed: Sequence[ComputationProto],
    changes: Sequence[Change],
    fragments: Mapping[bytes, ModuleProto],
) -> dict[int, InstructionProto]:
    """Checks the added instructions against the fragments; returns them by id."""
    everything = {one.id: one for computation in changed for one in computation.instructions}
    added: dict[int, InstructionProto] = {}
    for change in changes:
        fragment = fragments[change.splice.fragment]
        source = new.computation_named(change.splice.region).named(change.splice.source)
        linked = {**change.linked.instructions}
        linked.update({one.id: source.id for one in fragment.entry.parameters})
        for original in fragment.instructions():
            if original.opcode == "parameter" and original in fragment.entry.instructions:
                continue
            copy = everything.get(linked[original.id])
            if copy is None:
                continue  # Nobody used it; what is needed but missing is seen as a missing operand.
            _check_copy(original, copy, linked, change.linked)
            added[copy.id] = copy
    return added


def _check_copy(original: InstructionProto, copy: InstructionProto, ids: Mapping[int, int], linked: Linked) -> None:
    if _fields(original, _OWN_FIELDS) != _fields(copy, _OWN_FIELDS) or original.parameter != copy.parameter:
        raise SpliceError(f"{copy.name}: it differs from the instruction {original.name} that was compiled")
    if [ids[one] for one in original.operands] != copy.operands:
        raise SpliceError(f"{copy.name}: it has other operands than {original.name}, which was compiled")
    if not {ids[one] for one in original.control}.issubset(copy.control):
        raise SpliceError(f"{copy.name}: a control predecessor of {original.name} is missing")
    if [linked.computations[one] for one in original.called] != copy.called:
        raise SpliceError(f"{copy.name}: it calls another computation than {original.name}")
    if copy.channel != linked.channels.get(original.channel, 0):
        raise SpliceError(f"{copy.name}: it has another channel than the one chosen for {original.name}")


def _fields(instruction: InstructionProto, without: frozenset[int]) -> list[tuple[int, int | bytes]]:
    return [(field.number, field.value) for field in instruction.message.fields if field.number not in without]


class _Fresh(NamedTuple):
    """What is new: by id, the fragment's root that an added value or a parameter of a fusion stands for, if any.

    `replaced` has, for the id of each replaced value, the root that took its place, and `computations` the old module's
    by id.
    """

    old: ModuleProto
    new: ModuleProto
    added: Mapping[int, InstructionProto]
    roots: Mapping[int, int]
    replaced: Mapping[int, int]
    computations: Mapping[int, ComputationProto]

    def originals(self, number: int) -> dict[int, InstructionProto]:
        """The instructions of a computation of the old module, by id; none if it is new."""
        computation = self.computations.get(number)
        return {} if computation is None else {one.id: one for one in computation.instructions}

    def may_follow(self, was: int, now: int) -> bool:
        """Whether a new operand may stand where an old one stood."""
        return was == now or (was in self.replaced and self.roots.get(now) == self.replaced[was])


def _check_kept(changed: Sequence[ComputationProto], fresh: _Fresh) -> None:
    for computation in changed:
        before = fresh.computations.get(computation.id)
        if before is not None:
            _check_kept_computation(before, computation, fresh)
        elif not all(one.id in fresh.added for one in computation.instructions):
            raise SpliceError(f"{computation.name}: it has instructions that no fragment has")


def _check_kept_computation(before: ComputationProto, computation: ComputationProto, fresh: _Fresh) -> None:
    if computation.name != before.name:
        raise SpliceError(f"{computation.name}: it was {before.name}")
    if not fresh.may_follow(before.root_id, computation.root_id):
        raise SpliceError(f"{computation.name}: it has another root")
    originals = {one.id: one for one in before.instructions}
    gone = set(originals) - {one.id for one in computation.instructions}
    for instruction in computation.instructions:
        if instruction.id in fresh.added or instruction.id in fresh.roots:
            continue
        if instruction.id not in originals:
            raise SpliceError(f"{instruction.name}: it is in neither the old module nor a fragment")
        original = originals[instruction.id]
        if original.message == instruction.message and all(
            fresh.new.computation(one) in fresh.old for one in instruction.called
        ):
            continue
        if _fields(original, _EDITED_OF_OLD) != _fields(instruction, _EDITED_OF_OLD):
            raise SpliceError(f"{instruction.name}: it has changed")
        if not _has_its_operands(original, instruction, fresh):
            raise SpliceError(f"{instruction.name}: it has other operands than before")
        if not _control_through(original, originals, gone).issubset(instruction.control):
            raise SpliceError(f"{instruction.name}: a control predecessor is missing")


def _what_is_fresh(
    old: ModuleProto,
    new: ModuleProto,
    changed: Sequence[ComputationProto],
    added: Mapping[int, InstructionProto],
    changes: Sequence[Change],
    fragments: Mapping[bytes, ModuleProto],
) -> _Fresh:
    before = SpliceContext(old)
    replaced: dict[int, int] = {}
    roots: dict[int, int] = {}
    for change in changes:
        entry = fragments[change.splice.fragment].entry
        results = [change.linked.instructions[one] for one in outputs(entry)]
        roots.update({root: root for root in results})
        for use in change.splice.uses:
            values = replaced_values(before, change.splice.region, use)
            replaced.update(dict.fromkeys(values, results[use.output]))
    known = _with_parameters(new, changed, roots)
    return _Fresh(old, new, added, known, replaced, {one.id: one for one in old.computations})


def _with_parameters(new: ModuleProto, changed: Sequence[ComputationProto], roots: Mapping[int, int]) -> dict[int, int]:
    """The roots of fragments, and the parameters through which they enter fusions."""
    known = dict(roots)
    inside = {one.id for one in changed}
    calls = [one for computation in changed for one in computation.instructions if one.opcode in ("fusion", "call")]
    pairs = [
        (operand, parameter.id)
        for caller in calls
        if caller.called[0] in inside
        for operand, parameter in zip(caller.operands, new.computation(caller.called[0]).parameters, strict=False)
    ]
    while True:  # ends: each round adds a parameter
        fresh = {parameter: known[operand] for operand, parameter in pairs if operand in known}
        if known.keys() >= fresh.keys():
            return known
        known = {**fresh, **known}


def _has_its_operands(original: InstructionProto, instruction: InstructionProto, fresh: _Fresh) -> bool:
    """The old operands, replaced values replaced; fusions and calls may have lost some, or won tiles.

    Those are compared by the parameters that they are for.
    """
    before, after = original.operands, instruction.operands
    if instruction.opcode in ("fusion", "call"):
        was, now = _arguments(fresh.old, original), _arguments(fresh.new, instruction)
        return all(
            fresh.may_follow(was[parameter], operand) if parameter in was else parameter in fresh.roots
            for parameter, operand in now.items()
        )
    return len(before) == len(after) and all(map(fresh.may_follow, before, after))


def _arguments(module: ModuleProto, caller: InstructionProto) -> dict[int, int]:
    """The operand of each parameter of the computation that an instruction calls."""
    parameters = module.computation(caller.called[0]).parameters
    return {parameter.id: operand for parameter, operand in zip(parameters, caller.operands, strict=False)}


def _control_through(
    instruction: InstructionProto, originals: Mapping[int, InstructionProto], gone: set[int]
) -> set[int]:
    """The control predecessors, those of removed predecessors in their place."""
    result: set[int] = set()
    queue, seen = list(instruction.control), set[int]()
    while queue:  # ends: each predecessor is looked at once
        one = queue.pop()
        if one in seen:
            continue
        seen.add(one)
        if one in gone:
            queue += originals[one].control
        else:
            result.add(one)
    return result


def _check_channels(old: ModuleProto, changes: Sequence[Change]) -> None:
    """Collectives share a channel only where they did when the fragment was compiled."""
    taken = {channel for one in old.computations for channel in one.summary.channels} | {0}
    for change in changes:
        for channel in change.linked.channels.values():
            if channel in taken:
                raise SpliceError(f"{change.splice.region}: channel {channel} is none, or another's")
            taken.add(channel)


def _is_unchanged(
    old: ModuleProto, new: ModuleProto, fusion: InstructionProto, originals: Mapping[int, InstructionProto]
) -> bool:
    """Whether a fusion and the computation that it runs are those of the old module."""
    number = fusion.called[0]
    if new.computation(number) not in old:
        return False
    original = originals.get(fusion.id)
    return original is not None and original.message == fusion.message


def _check_fusion(module: ModuleProto, fusion: InstructionProto, operands: Sequence[bytes]) -> None:
    inner = module.computation(fusion.called[0])
    parameters = inner.parameters
    if [one.parameter for one in parameters] != list(range(len(fusion.operands))):
        raise SpliceError(f"{fusion.name}: its operands are not the parameters of {inner.name}")
    if [one.shape for one in parameters] != operands:
        raise SpliceError(f"{fusion.name}: an operand has another shape or layout than the parameter of {inner.name}")
    if inner.root.shape != fusion.shape:
        raise SpliceError(f"{fusion.name}: {inner.name} yields another shape or layout")
    used = {operand for one in inner.instructions for operand in one.operands} | {inner.root_id}
    dead = [one.name for one in inner.instructions if one.id not in used]
    if dead:
        raise SpliceError(f"{dead[0]}: nothing in {inner.name} uses it")
