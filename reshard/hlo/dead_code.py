"""Removes from a module what nobody uses: instructions, parameters of fusions, and computations."""

from __future__ import annotations

from reshard.hlo.instruction_proto import InstructionProto
from reshard.hlo.proto import ComputationProto, ModuleProto

_KEPT = (
    "parameter", "while", "conditional", "call", "infeed", "outfeed", "send", "send-done", "recv",
    "recv-done", "rng", "rng-bit-generator", "rng-get-and-update-state", "after-all", "add-dependency", "async-start",
    "async-update", "async-done", "domain", "opt-barrier", "optimization-barrier",
)  # fmt: skip


def remove_dead(module: ModuleProto, region: ComputationProto) -> None:
    """Removes what nobody uses from a computation and from the fusions in it, then the computations nobody calls.

    Instructions that may have an effect stay, used or not.
    """
    while _remove_once(module, region):  # ends: each round removes something
        pass
    _remove_uncalled(module)


def _remove_once(module: ModuleProto, computation: ComputationProto) -> bool:
    """Whether a pass from the last instruction to the first has removed anything."""
    users: dict[int, int] = {computation.root_id: 1}
    followed = {one for instruction in computation.instructions for one in instruction.control}
    for instruction in computation.instructions:
        for operand in instruction.operands:
            users[operand] = users.get(operand, 0) + 1
    removed = False
    for instruction in reversed(list(computation.instructions)):
        if not users.get(instruction.id) and not _has_effect(instruction):
            for operand in instruction.operands:
                users[operand] -= 1
            _remove(module, computation, instruction, instruction.id in followed)
            removed = True
        elif instruction.opcode == "fusion" and _was_opened(module, instruction) and _trim(module, instruction):
            return True
    return removed


def _was_opened(module: ModuleProto, fusion: InstructionProto) -> bool:
    """Whether something may be unused in a fusion now; compilers leave nothing unused there."""
    return module.computation(fusion.called[0]).is_opened


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


def _trim(module: ModuleProto, fusion: InstructionProto) -> bool:
    """Whether a fusion had parameters or instructions that nobody used, which are removed."""
    inner = module.computation(fusion.called[0])
    changed = False
    while _remove_once(module, inner):  # ends: each round removes something
        changed = True
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


def _remove_uncalled(module: ModuleProto) -> None:
    """Removes the computations that no instruction calls."""
    while True:  # ends: each round removes a computation
        called = {number for one in module.computations for number in one.summary.called} | {module.entry.id}
        kept = [one for one in module.computations if one.id in called]
        if len(kept) == len(module.computations):
            return
        if module.schedule is not None:
            module.schedule = {number: ids for number, ids in module.schedule.items() if number in called}
        module.computations = kept
