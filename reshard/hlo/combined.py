"""Sums that a compiler has combined: one all-reduce of several arrays, opened so that each of them is a sum of its own.

    %s = (f32[64,8], f32[]) all-reduce(%a, %b), replica_groups=...     %g = f32[64,8] all-reduce(%a), replica_groups=...
    %g = f32[64,8] get-tuple-element(%s), index=0                      %l = f32[] all-reduce(%b), replica_groups=...
    %l = f32[] get-tuple-element(%s), index=1

What follows data reads the opened form, in which each sum has the name of the element that it stands for. The module
itself keeps the combined form: once plans have taken the place of some elements, it is shrunk to the others.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from types import MappingProxyType

from reshard.hlo.instruction import Array, Instruction, SumPart
from reshard.hlo.module import Computation, Module
from reshard.hlo.proto import ComputationProto, InstructionProto, pick_shapes


def open_sums(module: Module) -> Module:
    """The module with every combined sum opened, in the place of the sum; itself if it has none.

    >>> from reshard.hlo import parse
    >>> opened = open_sums(parse('''HloModule m
    ...
    ... ENTRY %main {
    ...   %a = f32[4]{0} parameter(0)
    ...   %b = f32[]{} parameter(1)
    ...   %s = (f32[4]{0}, f32[]) all-reduce(%a, %b), channel_id=1, replica_groups=[1,4]<=[4]
    ...   %g = f32[4]{0} get-tuple-element(%s), index=0
    ...   %l = f32[] get-tuple-element(%s), index=1
    ...   ROOT %r = (f32[4]{0}, f32[]) tuple(%g, %l)
    ... }'''))
    >>> [(one.name, one.opcode, one.operands) for one in opened.entry.instructions[2:4]]
    [('g', 'all-reduce', ('a',)), ('l', 'all-reduce', ('b',))]
    """
    opened: dict[str, Computation] = {}
    for computation in module.computations.values():
        sums = [one for one in computation.instructions if one.opcode == "all-reduce" and not one.is_array]
        parts = {one.name: found for one in sums if (found := _find_elements(computation, one))}
        if parts:
            opened[computation.name] = _open_computation(computation, parts)
    if not opened:
        return module
    computations = MappingProxyType({name: opened.get(name, one) for name, one in module.computations.items()})
    return replace(module, computations=computations, entry=computations[module.entry.name])


def _find_elements(computation: Computation, combined: Instruction) -> list[Instruction]:
    """The elements that a combined sum is taken apart into, in order; empty unless each of them is taken once."""
    users = computation.users.get(combined.name, ())
    arrays = combined.shape if isinstance(combined.shape, tuple) else ()
    if combined.root or any(user.opcode != "get-tuple-element" or not user.is_array for user in users):
        return []
    by_index = {user.attributes.get("index"): user for user in users}
    elements = [by_index[str(at)] for at in range(len(users)) if str(at) in by_index]
    return elements if len(elements) == len(users) == len(arrays) == len(combined.operands) else []


def _open_computation(computation: Computation, parts: Mapping[str, list[Instruction]]) -> Computation:
    gone = {element.name for elements in parts.values() for element in elements}

    def instructions() -> Iterator[Instruction]:
        for one in computation.instructions:
            before = 0
            said = "".join(f", {key}={text}" for key, text in one.attributes.items() if key != "metadata")
            # So that what all receive adds up to the byte, each knows the bytes of the arrays before it.
            for at, element in enumerate(parts.get(one.name, ())):
                own = "" if element.metadata is None else f", metadata={element.metadata}"
                rest, part = f"%{one.operands[at]}){said}{own}", SumPart(at, before)
                yield Instruction(element.name, one.opcode, element.root, element.shape_text, rest, part)
                before += element.shape.nbytes if isinstance(element.shape, Array) else 0
            if one.name not in parts and one.name not in gone:
                yield one

    return Computation(computation.name, tuple(instructions()))


def shrink_sums(computation: ComputationProto, schedule: list[int] | None) -> bool:
    """Takes out of the combined sums of a computation the arrays whose elements are gone; whether there were any.

    Of a single one that is left, the element becomes the sum, as it is read: so its users stay as they are.
    """
    has_shrunk = False
    for one in [each for each in computation.instructions if each.opcode == "all-reduce" and len(each.operands) > 1]:
        elements = computation.users(one.id)
        if one.id == computation.root_id or any(each.opcode != "get-tuple-element" for each in elements):
            continue
        kept = sorted({each.index for each in elements})
        if not kept or len(kept) == len(one.operands):
            continue
        operands, has_shrunk = [one.operands[at] for at in kept], True
        if len(elements) > 1:
            one.shape, one.operands = pick_shapes(one.shape, kept), operands
            for each in elements:
                each.index = kept.index(each.index)
            continue
        (element,) = elements
        alone = one.copy()
        alone.name, alone.id, alone.metadata = element.name, element.id, element.metadata
        alone.shape, alone.operands = element.shape, operands
        alone.control = list(dict.fromkeys([*one.control, *(each for each in element.control if each != one.id)]))
        computation.instructions[computation.instructions.index(one)] = alone
        computation.instructions.remove(element)
        for other in computation.instructions:
            if one.id in other.control:
                other.control = [element.id if each == one.id else each for each in other.control]
        if schedule is not None:
            schedule.remove(element.id)
            schedule[schedule.index(one.id)] = element.id
    return has_shrunk


def expect_shrunk(before: ComputationProto, now: ComputationProto) -> Mapping[int, InstructionProto]:
    """What a computation's combined sums and their elements must be, by their ids, if only some elements are left.

    It is worked out of the old computation and of which instructions are left, for a check of what `shrink_sums` made.
    """
    left = {one.id for one in now.instructions}
    expected: dict[int, InstructionProto] = {}
    for combined in before.instructions:
        if combined.opcode != "all-reduce" or len(combined.operands) < 2:
            continue
        elements = [one for one in before.users(combined.id) if one.id in left]
        order = sorted({one.index for one in elements})
        if not order or len(order) == len(combined.operands):
            continue
        if combined.id in left:
            whole = expected[combined.id] = combined.copy()
            whole.shape = pick_shapes(combined.shape, order)
            whole.operands = [combined.operands[at] for at in order]
            for one in elements:
                expected[one.id] = one.copy()
                expected[one.id].index = order.index(one.index)
        elif len(elements) == 1:
            own, alone = elements[0], combined.copy()
            alone.id, alone.name, alone.metadata, alone.shape = own.id, own.name, own.metadata, own.shape
            alone.operands = [combined.operands[own.index]]
            alone.control = [*combined.control, *(each for each in own.control if each != combined.id)]
            expected[own.id] = alone
    return expected
