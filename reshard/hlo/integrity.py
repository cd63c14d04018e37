"""Checks a module after splices: XLA's own verification passes many wrong ones, and libtpu dies of some.

What must hold, whatever made the new module:

    kept         every instruction of the old module that is still there has its old fields, literals included, its
                 old operands (a replaced value apart), and its old control predecessors
                 as before; a combined sum may have lost the arrays whose elements nothing takes any more
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
from types import MappingProxyType
from typing import NamedTuple

from reshard.errors import SpliceError
from reshard.hlo.combined import expect_shrunk
from reshard.hlo.proto import FUSION_KIND, ComputationProto, InstructionProto, ModuleProto, fusion_kind
from reshard.hlo.splice import Exposed, Linked, Splice, SpliceContext, replaced_values, result_ids
from reshard.hlo.wire import refuse_damage

_OWN_FIELDS = frozenset((1, 7, 9, 26, 35, 36, 37, 38))  # name, metadata, parameter number, channel, ids
_EDITED_OF_OLD = frozenset((9, 36, 37))  # parameter number, operands, control predecessors
_FIELDS_OF_FUSION = frozenset((1, 2, 3, 7, 35, 36, 38, FUSION_KIND))
_ENTERED = ("fusion", "call")
_MODULE_EDITED = frozenset((3, 7))  # computations, schedule


class DoneSplice(NamedTuple):
    """A splice and the ids that it gave to what it added."""

    splice: Splice
    linked: Linked


@refuse_damage
def check_splices(
    old: ModuleProto,
    new: ModuleProto,
    changes: Sequence[DoneSplice],
    exposed: Mapping[Exposed, str] = MappingProxyType({}),
) -> None:
    """Raises `SpliceError`, naming the instruction, unless `new` is `old` with these splices and nothing else.

    `exposed` has the values that fusions of their own yield now, and the names of those.

    Both must be as they were decoded, `new` from the bytes that the compiler will get and `like` the old one: of
    computations with the same bytes as before only names and ids are looked at.
    """
    rest = [
        [(one.number, one.value) for one in module.message.fields if one.number not in _MODULE_EDITED]
        for module in (old, new)
    ]
    if rest[0] != rest[1]:
        raise SpliceError("the module's header, layouts, aliases or tables have changed")
    bytes_before = {one.data for one in old.computations}
    changed = [one for one in new.computations if one.data not in bytes_before]
    _check_order(new, changed)
    _check_schedule(old, new)
    rewritten = _Rewritten(old, new, changed, changes, exposed)
    for value, name in exposed.items():
        _check_exposed(value, new.computation_named(value.region).named(name), rewritten)
    before = {one.id: one for one in old.computations}
    for computation in changed:
        was = before.get(computation.id)
        if was is not None:
            _check_kept(was, computation, rewritten)
        elif not all(one.id in rewritten.added for one in computation.instructions):
            raise SpliceError(f"{computation.name}: it has instructions that no fragment has")
    # Collectives share a channel only where they did when the fragment was compiled: on a TPU a channel that is none,
    # or another's, ends the process.
    taken = {channel for one in old.computations for channel in one.summary.channels} | {0}
    for change in changes:
        for channel in change.linked.channels.values():
            if channel in taken:
                raise SpliceError(f"{change.splice.region}: channel {channel} is none, or another's")
            taken.add(channel)
    for computation in changed:
        _check_fusions(before.get(computation.id), computation, rewritten)


def _check_order(new: ModuleProto, changed: Sequence[ComputationProto]) -> None:
    """Operands before their users, called computations before their callers, no id and no name twice."""
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
        seen: set[int] = set()
        for instruction in computation.instructions:
            if not seen.issuperset(instruction.operands):
                raise SpliceError(f"{instruction.name}: an operand does not stand before it")
            seen.add(instruction.id)
        # Control predecessors may stand after their followers: only the schedule puts them in order.
        needed = {number for instruction in computation.instructions for number in instruction.control}
        if not seen.issuperset(needed | {computation.root_id}):
            raise SpliceError(f"{computation.name}: its root or a control predecessor is missing")


def _check_schedule(old: ModuleProto, new: ModuleProto) -> None:
    """Scheduled as before or not at all: libtpu dies of a module without its schedule."""
    if (old.schedule is None) != (new.schedule is None):
        raise SpliceError("the module has lost or won a schedule")
    if old.schedule is None or new.schedule is None:
        return
    if not {one.id for one in new.computations}.issuperset(new.schedule):
        raise SpliceError("the schedule has a computation that is not in the module")
    runs = {number for one in new.computations for number in one.summary.started}
    for computation in new.computations:
        ids = new.schedule.get(computation.id)
        if ids is None:
            if computation.id in old.schedule or computation.id in runs:
                raise SpliceError(f"{computation.name}: it has no schedule")
            continue
        if ids == old.schedule.get(computation.id) and computation in old:
            continue
        if sorted(ids) != sorted(one.id for one in computation.instructions):
            raise SpliceError(f"{computation.name}: its schedule does not list each instruction once")
        position = {number: at for at, number in enumerate(ids)}
        for instruction in computation.instructions:
            before = [*instruction.operands, *instruction.control]
            if any(position[one] > position[instruction.id] for one in before):
                raise SpliceError(f"{instruction.name}: it is scheduled before what it needs")


class _Rewritten:
    """What the splices added, and which added value a parameter or a root stands for.

    `added` has the added instructions by id, compared with the fragments as they were captured. `roots` has, for each
    result of a fragment and each parameter through which it enters a fusion, that result; `replaced` has, for the id of
    each replaced value, the result that took its place.
    """

    def __init__(
        self, old: ModuleProto, new: ModuleProto, changed: Sequence[ComputationProto], changes: Sequence[DoneSplice],
        exposed: Mapping[Exposed, str],
    ) -> None:  # fmt: skip
        self.old, self.new = old, new
        self.added: dict[int, InstructionProto] = {}
        self.roots: dict[int, int] = {}
        self.replaced: dict[int, int] = {}
        before = SpliceContext(old)
        everything = {one.id: one for computation in changed for one in computation.instructions}
        for splice, linked in changes:
            fragment = ModuleProto.decode(splice.fragment)
            region, parameters = new.computation_named(splice.region), fragment.entry.parameters
            sources = [region.named(name).id for name in splice.sources]
            ids = linked.instructions | {one.id: at for one, at in zip(parameters, sources, strict=True)}
            for original in fragment.instructions():
                if original.opcode == "parameter" and original in fragment.entry.instructions:
                    continue
                copy = everything.get(ids[original.id])
                if copy is not None:  # Else nobody used it; what is needed but missing is seen as a missing operand.
                    _check_copy(original, copy, ids, linked)
                    self.added[copy.id] = copy
            results = [linked.instructions[one] for one in result_ids(fragment.entry)]
            self.roots.update({root: root for root in results})
            for use in splice.uses:
                self.replaced.update(dict.fromkeys(replaced_values(before, splice.region, use), results[use.output]))
        for value, name in exposed.items():
            made = new.computation_named(value.region).named(name)
            self.added |= {one.id: one for one in (made, *new.computation(made.called[0]).instructions)}
        # A root enters a fusion as a new parameter, and a fusion inside that one as another.
        inside = {one.id for one in changed}
        entered = [
            (operand, parameter.id)
            for computation in changed
            for caller in computation.instructions
            if caller.opcode in _ENTERED and caller.called[0] in inside
            for operand, parameter in zip(caller.operands, new.computation(caller.called[0]).parameters, strict=False)
        ]
        while True:  # ends: each round adds a parameter
            more = {parameter: self.roots[operand] for operand, parameter in entered if operand in self.roots}
            if self.roots.keys() >= more.keys():
                break
            self.roots = {**more, **self.roots}

    def may_follow(self, was: int, now: int) -> bool:
        """Whether a new operand may stand where an old one stood."""
        return was == now or (was in self.replaced and self.roots.get(now) == self.replaced[was])


def _check_exposed(value: Exposed, made: InstructionProto, rewritten: _Rewritten) -> None:
    """Checks that a new fusion makes what the old module has inside another one, of the same operands."""
    caller = rewritten.old.computation_named(value.region).named(value.fusion)
    inside, entered = rewritten.old.computation(caller.called[0]), rewritten.new.computation(made.called[0])
    fields = {one.number for one in made.message.fields}
    if fusion_kind(made) != fusion_kind(caller) or made.opcode != "fusion" or not fields <= _FIELDS_OF_FUSION:
        raise SpliceError(f"{made.name}: it is not a fusion like {caller.name}")
    before, after = ({one.id: one for one in each.instructions} for each in (inside, entered))
    pairs, seen = [(inside.named(value.value).id, entered.root_id)], set[tuple[int, int]]()
    while pairs:  # ends: each pair is looked at once
        if (pair := pairs.pop()) in seen:
            continue
        seen.add(pair)
        was, now = before[pair[0]], after[pair[1]]
        if was.opcode == now.opcode == "parameter":
            is_same = rewritten.may_follow(caller.operands[was.parameter], made.operands[now.parameter])
        elif now.opcode == "parameter":  # what takes the place of a value inside enters as a tile
            is_same = rewritten.may_follow(was.id, now.id)
        else:
            is_same = _list_fields(was, _OWN_FIELDS) == _list_fields(now, _OWN_FIELDS) and was.called == now.called
            is_same = is_same and len(was.operands) == len(now.operands) and not (was.control or now.control)
            pairs += zip(was.operands, now.operands, strict=False)
        if not is_same:
            raise SpliceError(f"{now.name}: it is not the instruction {was.name} of {caller.name}")


def _check_copy(original: InstructionProto, copy: InstructionProto, ids: Mapping[int, int], linked: Linked) -> None:
    """Checks an added instruction against the one of the fragment, as it was captured."""
    same = _list_fields(original, _OWN_FIELDS) == _list_fields(copy, _OWN_FIELDS)
    if not same or original.parameter != copy.parameter:
        raise SpliceError(f"{copy.name}: it differs from the instruction {original.name} that was compiled")
    if [ids[one] for one in original.operands] != copy.operands:
        raise SpliceError(f"{copy.name}: it has other operands than {original.name}, which was compiled")
    if not {ids[one] for one in original.control}.issubset(copy.control):
        raise SpliceError(f"{copy.name}: a control predecessor of {original.name} is missing")
    if [linked.computations[one] for one in original.called] != copy.called:
        raise SpliceError(f"{copy.name}: it calls another computation than {original.name}")
    if copy.channel != linked.channels.get(original.channel, 0):
        raise SpliceError(f"{copy.name}: it has another channel than the one chosen for {original.name}")


def _list_fields(instruction: InstructionProto, without: frozenset[int]) -> list[tuple[int, int | bytes]]:
    """The fields of an instruction but those of some numbers, in order."""
    return [(one.number, one.value) for one in instruction.message.fields if one.number not in without]


def _check_kept(before: ComputationProto, computation: ComputationProto, rewritten: _Rewritten) -> None:
    """Checks that what is left of an old computation has its old fields, operands and control predecessors."""
    if computation.name != before.name:
        raise SpliceError(f"{computation.name}: it was {before.name}")
    if not rewritten.may_follow(before.root_id, computation.root_id):
        raise SpliceError(f"{computation.name}: it has another root")
    originals = {one.id: one for one in before.instructions} | dict(expect_shrunk(before, computation))
    gone = set(originals) - {one.id for one in computation.instructions}
    for instruction in computation.instructions:
        if instruction.id in rewritten.added or instruction.id in rewritten.roots:
            continue
        if instruction.id not in originals:
            raise SpliceError(f"{instruction.name}: it is in neither the old module nor a fragment")
        original = originals[instruction.id]
        called = [rewritten.new.computation(one) for one in instruction.called]
        if original.message == instruction.message and all(one in rewritten.old for one in called):
            continue
        if _list_fields(original, _EDITED_OF_OLD) != _list_fields(instruction, _EDITED_OF_OLD):
            raise SpliceError(f"{instruction.name}: it has changed")
        if not _has_its_operands(original, instruction, rewritten):
            raise SpliceError(f"{instruction.name}: it has other operands than before")
        # What had to run after an instruction that is gone still runs after what that one had to run after.
        required, queue, seen = set[int](), list(original.control), set[int]()
        while queue:  # ends: each predecessor is looked at once
            if (one := queue.pop()) not in seen:
                seen.add(one)
                if one in gone:
                    queue += originals[one].control
                else:
                    required.add(one)
        if not required.issubset(instruction.control):
            raise SpliceError(f"{instruction.name}: a control predecessor is missing")


def _has_its_operands(original: InstructionProto, instruction: InstructionProto, rewritten: _Rewritten) -> bool:
    """The old operands, replaced values replaced; fusions and calls may have lost some, or won tiles.

    Those are compared by the parameters that they are for.
    """
    before, after = original.operands, instruction.operands
    if instruction.opcode not in _ENTERED:
        return len(before) == len(after) and all(map(rewritten.may_follow, before, after))
    was, now = (
        {parameter.id: operand for parameter, operand in zip(inside.parameters, operands, strict=False)}
        for inside, operands in (
            (rewritten.old.computation(original.called[0]), before),
            (rewritten.new.computation(instruction.called[0]), after),
        )
    )
    return all(
        rewritten.may_follow(was[parameter], operand) if parameter in was else parameter in rewritten.roots
        for parameter, operand in now.items()
    )


def _check_fusions(before: ComputationProto | None, computation: ComputationProto, rewritten: _Rewritten) -> None:
    """Checks that the fusions of a computation have operands like their parameters, and nothing that is not used."""
    shapes = {one.id: one.shape for one in computation.instructions}
    originals = {} if before is None else {one.id: one for one in before.instructions}
    for fusion in computation.instructions:
        if fusion.opcode != "fusion":
            continue
        inner, original = rewritten.new.computation(fusion.called[0]), originals.get(fusion.id)
        if inner in rewritten.old and original is not None and original.message == fusion.message:
            continue
        parameters = inner.parameters
        if [one.parameter for one in parameters] != list(range(len(fusion.operands))):
            raise SpliceError(f"{fusion.name}: its operands are not the parameters of {inner.name}")
        if [one.shape for one in parameters] != [shapes[one] for one in fusion.operands]:
            raise SpliceError(
                f"{fusion.name}: an operand has another shape or layout than the parameter of {inner.name}"
            )
        if inner.root.shape != fusion.shape:
            raise SpliceError(f"{fusion.name}: {inner.name} yields another shape or layout")
        used = {operand for one in inner.instructions for operand in one.operands} | {inner.root_id}
        dead = [one.name for one in inner.instructions if one.id not in used]
        if dead:
            raise SpliceError(f"{dead[0]}: nothing in {inner.name} uses it")
