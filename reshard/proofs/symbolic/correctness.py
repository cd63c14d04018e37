"""A whole program on symbols: every instruction against the two layouts of its step."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from reshard.lower.exchange_rounds import ExchangeInPlace
from reshard.lower.program import Exchange, InParts, Instruction, Permute, Program
from reshard.plans.plan import Plan
from reshard.proofs.symbolic.claims import Query
from reshard.proofs.symbolic.contract import StepContract
from reshard.proofs.symbolic.element_sources import run
from reshard.proofs.symbolic.form import Form, Place, Tied, form_of, local_place, step_digits
from reshard.proofs.symbolic.formulas import ByFormula, formula_claims
from reshard.proofs.symbolic.lists import require
from reshard.proofs.symbolic.slots import check_exchange_in_place
from reshard.proofs.symbolic.transfers import check_exchange, check_permute
from reshard.types.layout import Layout


@dataclass(frozen=True)
class Outline:
    """A program in which formulas stand for the lists of some exchanges and permutes."""

    devices: tuple[int, ...]
    dtype: str
    tile_shape: tuple[int, ...]
    instructions: tuple[Instruction | ByFormula, ...]
    tile_shapes: tuple[tuple[int, ...], ...]
    keep_source: bool


def derive(plan: Plan, program: Program | Outline) -> tuple[Form, list[list[Query]]]:
    """The form of a plan, and per step the claims that remain once its lists have been compared.

    Raises `UndecidedError` for an instruction that is not shown to be right.
    """
    layouts = [plan.source, *(step.result for step in plan.steps)]
    _check_outside(plan, program)
    parts = [_part_places(i, a) for i, a in zip(program.instructions, layouts, strict=False)]
    tied = frozenset(place for places in parts for place in places[:1])
    while True:
        form = form_of(layouts, itertools.chain.from_iterable(parts), tied)
        try:
            return form, [_step_claims(plan, program, number, form, parts[number]) for number in range(len(plan.steps))]
        except Tied as more:  # Every restart ties more sizes, so the loop ends.
            tied |= more.places


def _check_outside(plan: Plan, program: Program | Outline) -> None:
    """Checks that the program has this plan's devices, tiles and steps."""
    require(program.devices == plan.source.mesh.devices, "the program is for other devices")
    require(program.dtype == plan.source.dtype, "the program is for another dtype")
    require(program.keep_source != plan.donate, "program and plan disagree on whether the source is kept")
    require(program.tile_shape == plan.source.tile_shape, "the program starts from other tiles")
    require(len(program.instructions) == len(program.tile_shapes) == len(plan.steps), "the program has other steps")
    for step, instruction, shape in zip(plan.steps, program.instructions, program.tile_shapes, strict=True):
        require(shape == step.result.tile_shape, f"{step.kind}: the result has tiles of shape {shape}")
        if isinstance(instruction, Exchange | Permute) or step.operand.mesh != step.result.mesh:
            devices = devices_after(instruction, frozenset(step.operand.mesh.devices))
            require(frozenset(step.result.mesh.devices) == devices, f"{step.kind}: other devices")


def devices_after(instruction: Instruction | ByFormula, devices: frozenset[int]) -> frozenset[int]:
    """The devices that have a tile after an instruction, given those that have one before it."""
    if isinstance(instruction, Exchange):
        return frozenset(instruction.receivers)
    if isinstance(instruction, Permute):
        return frozenset(receiver for _, receiver in instruction.pairs)
    return devices


def _step_claims(
    plan: Plan, program: Program | Outline, number: int, form: Form, parts: Sequence[Place]
) -> list[Query]:
    step, instruction = plan.steps[number], program.instructions[number]
    digits = step_digits(step.operand, step.result, form, parts)
    tiles = step.operand.tile_shape, step.result.tile_shape
    about = f"step {number + 1}, {step.kind}"
    contract = StepContract(about, step.operand, step.result, digits, tiles, frozenset(form.names))
    if 0 in step.operand.shape:
        return []
    if isinstance(instruction, ByFormula):
        return formula_claims(step, contract, instruction)
    if isinstance(instruction, InParts):
        same = math.prod(tiles[0]) == math.prod(tiles[1])
        require(same or not instruction.in_place, f"{about}: parts of other sizes cannot take each other's place")
        low, high = parts[0][1], parts[1][1]
        inside = frozenset(a.place for a in contract.nested if a.dim == parts[0][0] and low <= a.low < high)
        return list(_claims(instruction.each, contract.of_part(instruction.take, instruction.put, inside)))
    return list(_claims(instruction, contract))


def _claims(instruction: Instruction, contract: StepContract) -> Iterator[Query]:
    """Only collectives leave claims: the lists of exchanges and permutes are compared in full."""
    if isinstance(instruction, Permute):
        check_permute(instruction, contract)
    elif isinstance(instruction, Exchange):
        check_exchange(instruction, contract)
    elif isinstance(instruction, ExchangeInPlace):
        check_exchange_in_place(instruction, contract)
    else:
        yield from run(instruction, contract)


def _part_places(instruction: Instruction | ByFormula, operand: Layout) -> tuple[Place, ...]:
    """The two places between which the digit lies that numbers the parts; none if a step runs as a whole."""
    if not isinstance(instruction, InParts):
        return ()
    take = instruction.take
    low = local_place(operand, take.axis, take.inner)
    require(low is not None, "parts that cut digits elsewhere than the layouts do")
    return (take.axis, low or 1), (take.axis, (low or 1) * take.parts)
