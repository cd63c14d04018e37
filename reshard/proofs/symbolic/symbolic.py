"""A whole program on symbols: every instruction against the two layouts of its step."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from reshard.lower.exchange_in_place import ExchangeInPlace
from reshard.lower.program import Exchange, InParts, Instruction, Permute, Program
from reshard.proofs.symbolic.boxes import exchange, permute
from reshard.proofs.symbolic.collectives import Frame, in_part, run
from reshard.proofs.symbolic.form import Form, Place, atoms_of, form_of, local_place
from reshard.proofs.symbolic.formulas import Written
from reshard.proofs.symbolic.formulas import exchange as written_exchange
from reshard.proofs.symbolic.lists import need
from reshard.proofs.symbolic.queries import Query
from reshard.proofs.symbolic.slots import exchange_in_place
from reshard.proofs.symbolic.verdicts import Tied
from reshard.types.layout import Layout
from reshard.types.plan import Plan


@dataclass(frozen=True)
class Outline:
    """A program of which some exchanges are `Written` by formulas instead of listed."""

    devices: tuple[int, ...]
    dtype: str
    tile_shape: tuple[int, ...]
    instructions: tuple[Instruction | Written, ...]
    tile_shapes: tuple[tuple[int, ...], ...]
    keep_source: bool


def right(plan: Plan, program: Program | Outline) -> tuple[Form, list[list[Query]]]:
    """The form of a plan, and per step the claims that remain after its lists were compared.

    Raises `UndecidedError` where an instruction is not shown to be right.
    """
    layouts = [plan.source, *(step.result for step in plan.steps)]
    _check_whole(plan, program)
    parts = [_part_places(i, a) for i, a in zip(program.instructions, layouts, strict=False)]
    tied = frozenset(place for places in parts for place in places[:1])
    while True:
        form = form_of(layouts, itertools.chain.from_iterable(parts), tied)
        try:
            return form, [_step(plan, program, number, form, parts[number]) for number in range(len(plan.steps))]
        except Tied as found:  # Fewer sizes vary each time, so that this ends.
            tied |= found.places


def _check_whole(plan: Plan, program: Program | Outline) -> None:
    """The program is one of this plan's devices, tiles and steps."""
    need(program.devices == plan.source.mesh.devices, "the program is one for other devices")
    need(program.dtype == plan.source.dtype, "the program is one for another dtype")
    need(program.keep_source != plan.donate, "the program gives up its source, or keeps it, and the plan does not")
    need(program.tile_shape == plan.source.tile_shape, "the program starts from other tiles")
    need(len(program.instructions) == len(program.tile_shapes) == len(plan.steps), "the program has other steps")
    for step, shape in zip(plan.steps, program.tile_shapes, strict=True):
        need(shape == step.result.tile_shape, f"{step.kind}: tiles of shape {shape} come out")
        need(set(step.result.mesh.devices) == set(program.devices), f"{step.kind}: other devices")


def _step(plan: Plan, program: Program | Outline, number: int, form: Form, parts: Sequence[Place]) -> list[Query]:
    step, instruction = plan.steps[number], program.instructions[number]
    atoms = atoms_of(step.operand, step.result, form)
    tiles = step.operand.tile_shape, step.result.tile_shape
    about = f"step {number + 1}, {step.kind}"
    frame = Frame(about, step.operand, step.result, atoms, tiles, frozenset(form.names))
    if 0 in step.operand.shape:
        return []
    if isinstance(instruction, Written):
        return written_exchange(step, frame, instruction)
    if isinstance(instruction, InParts):
        low, high = parts[0][1], parts[1][1]
        inside = frozenset(a.place for a in frame.nested if a.dim == parts[0][0] and low <= a.low < high)
        return list(_plain(instruction.each, in_part(frame, instruction.take, instruction.put, inside)))
    return list(_plain(instruction, frame))


def _plain(instruction: Instruction, frame: Frame) -> Iterator[Query]:
    if isinstance(instruction, Permute):
        permute(instruction, frame)
    elif isinstance(instruction, Exchange):
        exchange(instruction, frame)
    elif isinstance(instruction, ExchangeInPlace):
        exchange_in_place(instruction, frame)
    else:
        yield from run(instruction, frame)


def _part_places(instruction: Instruction | Written, operand: Layout) -> tuple[Place, ...]:
    """Where a dim is cut into parts: the digit between the two places numbers them."""
    if not isinstance(instruction, InParts):
        return ()
    take = instruction.take
    low = local_place(operand, take.axis, take.inner)
    need(low is not None, "parts that cut digits elsewhere than the layouts do")
    return (take.axis, low or 1), (take.axis, (low or 1) * take.parts)
