"""Removes from a module what nobody uses: instructions, parameters of fusions, and computations."""

from __future__ import annotations

from collections import Counter
from collections.abc import Set

from reshard.hlo.instruction_proto import InstructionProto
from reshard.hlo.proto import ComputationProto, ModuleProto

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
    return instruction.opcode in _KEPT or instruction.has_side_effect


def _remove(module: ModuleProto, computation: ComputationProto, gone: InstructionProto, is_followed: bool) -> None:
    """Removes an instruction; what had to follow it now follows what it had to follow."""
    computation.instructions.remove(gone)
    for other in computation.instructions if is_followed else ():
        if gone.id in (control := other.control):
            other.control = dict.fromkeys([*(one for one in control if one != gone.id), *gone.control])
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
