"""The proof of one plan: the program that it is lowered to is right, bounded and minimal.

    right     every device ends with the elements that the target demands       symbolic.derive, z3
    bounded   the program's own buffers stay within what each step promises     symbolic.moments, z3
    minimal   the bytes in the program's lists are as few as in any plan        symbolic.wire, least.floor

What is not proved is run on marked elements (`refute`): a counterexample makes it wrong, otherwise it is undecided.
"""

from __future__ import annotations

import math
from dataclasses import replace

from reshard.errors import PlanError, ProofError, UndecidedError, quoted
from reshard.lower import Program, lower_plan
from reshard.lower.program import Instruction
from reshard.proofs import symbolic
from reshard.proofs.launches import check_limit, fewest
from reshard.proofs.least import floor, plans_meant
from reshard.proofs.proof import Proof, ProofPart
from reshard.proofs.refute import fits, refute
from reshard.proofs.symbolic import ByFormula, Fewer, Form, Outline, Query
from reshard.proofs.view_proof import prove_view
from reshard.types import dtypes
from reshard.types.flags import checked_flag
from reshard.types.plan import Plan, Step, StepSpec, chain
from reshard.types.rules.checker import VIEW_RULES

MANY_TRANSFERS = 1 << 14
"""Even exchanges and permutes that list more transfers are proved by the formulas that would list them."""

MOST_TRANSFERS = 1 << 21
"""Exchanges that have no such formulas and list more transfers are not decided."""


def prove_plan(plan: Plan, program: Program | None = None, *, launches: bool = False, limit: float = 30.0) -> Proof:
    """Proves one plan; see `prove`, which takes trees too."""
    _check_given(plan, program)
    launches = checked_flag(launches, "launches")
    check_limit(limit)
    if plan.view is not None or any(step.kind in VIEW_RULES for step in plan.steps):
        if launches:
            raise PlanError(f"{plan.source} -> {plan.target}: the search for fewer launches knows no views or casts")
        return prove_view(plan, program, prove_plan)
    proof = _proof_or_counterexample(plan, _outline(plan) if program is None else program)
    return replace(proof, launches=fewest(plan, limit)) if launches else proof


def _check_given(plan: object, program: object) -> None:
    if not isinstance(plan, Plan):
        raise PlanError(f"{quoted(plan)} is a {type(plan).__name__}, not a Plan; give what reshard.plan() returns")
    if not (program is None or isinstance(program, Program)):
        raise PlanError(f"{quoted(program)} is not a Program; give what lower_plan(plan) returns, or None")


def _proof_or_counterexample(plan: Plan, program: Program | Outline) -> Proof:
    """The proof that the program is right; raises `ProofError` where one that cannot be proved goes wrong on a run."""
    try:
        if 0 in plan.source.shape:
            _check_runs(plan, program)
        return _proof(plan, program)
    except UndecidedError as undecided:
        counterexample = refute(plan, program) if isinstance(program, Program) and fits(plan) else None
        if counterexample is None:
            raise
        raise ProofError(f"{plan.source} -> {plan.target}: {counterexample}", counterexample) from undecided


def _check_runs(plan: Plan, program: Program | Outline) -> None:
    """Runs the program of an empty array: no element can be wrong, but the program must still run."""
    if not isinstance(program, Program) or refute(plan, program) is not None:
        raise UndecidedError("the program of an empty array does not run as the plan says")


def _proof(plan: Plan, program: Program | Outline) -> Proof:
    form, claims = symbolic.derive(plan, program)
    right = _right(plan, program, claims)
    bounded = _bounded(plan, program, form)
    minimal = _minimal(plan, program, form)
    proof = Proof(plan, form, right, bounded, minimal)
    symbolic.decide(proof.claims)
    return proof


def _outline(plan: Plan) -> Program | Outline:
    """The lowered program, with formulas in place of lists that are too long to write."""
    if not any(_long(step) for step in plan.steps):
        return lower_plan(plan)
    shapes = tuple(step.result.tile_shape for step in plan.steps)
    instructions = tuple(_instruction(step) for step in plan.steps)
    return Outline(
        plan.source.mesh.devices, plan.source.dtype, plan.source.tile_shape, instructions, shapes, not plan.donate
    )


def _long(step: Step) -> bool:
    """Whether the lists are long: exchanges and permutes have a transfer per device and round."""
    return step.kind in ("permute", "exchange") and step.launches * step.operand.mesh.size > MANY_TRANSFERS


def _instruction(step: Step) -> Instruction | ByFormula:
    formula = symbolic.by_formula(step) if _long(step) else None
    if formula is not None:
        return formula
    if step.launches * step.operand.mesh.size > MOST_TRANSFERS:
        raise UndecidedError(
            f"{step.kind}: {step.operand} -> {step.result} lists {step.launches} rounds for each of "
            f"{step.operand.mesh.size} devices, too many to compare, uneven or in pieces; prove it on fewer devices"
        )
    # Lower the step alone with a donated operand, since a step in place could not run otherwise.
    specs = [StepSpec(step.kind, step.result, step.mode)]
    return lower_plan(chain(step.operand, step.result, specs, donate=True)).instructions[0]


_REASONS = {
    "permute": "the held digits of each receiver's sender spell before what the receiver's own spell after",
    "exchange": "each box has, at both ends, the same elements, and each element of each result is in a box",
}


def _right(plan: Plan, program: Program | Outline, claims: list[list[Query]]) -> ProofPart:
    """Every step leaves in each tile what its result means."""
    argument: list[str] = []
    for number, (step, instruction) in enumerate(zip(plan.steps, program.instructions, strict=True), 1):
        why = _REASONS.get(step.kind, "its lists of devices are what the layouts say")
        if isinstance(instruction, ByFormula):
            why = "run on one device of unknown coordinates, by the formulas that write its lists"
        argument.append(f"step {number}, {step.kind}: {why}")
    return ProofPart(
        "every device ends with the elements that the target demands",
        tuple(argument) or ("there is nothing to do",),
        tuple(claim for step in claims for claim in step),
    )


def _bounded(plan: Plan, program: Program | Outline, form: Form) -> ProofPart:
    """The live bytes of the program's own buffers are within what each step promises."""
    unit = _unit(plan, form)
    argument: list[str] = []
    claims: list[Fewer] = []
    for number, (step, moments) in enumerate(zip(plan.steps, symbolic.moments(program), strict=True), 1):
        fullest = max(([plan.source.nbytes(e) for e in buffers] for buffers in moments), key=sum)
        terms = " + ".join(_times(size, unit) for size in fullest)
        argument.append(f"step {number}, {step.kind}: at its fullest {terms} bytes")
        claims.append(Fewer(f"step {number} as promised", *_scaled((sum(fullest), step.live_bytes), unit)))
    peak = _times(plan.peak_bytes, unit)
    here = f" ({plan.peak_bytes} here)" if unit > 1 else ""
    return ProofPart(f"at most {peak} bytes live on a device{here}", tuple(argument), tuple(claims))


def _minimal(plan: Plan, program: Program | Outline, form: Form) -> ProofPart:
    """The bytes that the program's lists bring the worst device, compared with the bound of the two layouts."""
    unit, nbytes = _unit(plan, form), plan.source.nbytes
    tiles = [plan.source.tile_shape, *program.tile_shapes]
    wires = [symbolic.wire(i, math.prod(tile)) for i, tile in zip(program.instructions, tiles, strict=False)]
    received = nbytes(_received(plan, [w.elements for w in wires]))
    launches = sum(w.launches for w in wires)
    promised = sum(step.received_bytes for step in plan.steps)
    if launches != plan.launches or received > promised:
        raise UndecidedError(
            f"the program has {launches} launches and {received} bytes, the plan says {plan.launches} and {promised}"
        )
    bound = floor(plan.source, plan.target, form)
    least = nbytes(bound.elements)
    if received < least and plan.source.partial_as(plan.target):
        raise UndecidedError(f"{received} bytes are received, but no program can receive fewer than {least}")
    steps = (f"step {n}: {_times(nbytes(w.elements), unit)} bytes" for n, w in enumerate(wires, 1))
    argument = (*steps, bound.argument)
    figure, bytes_bound = _times(received, unit), _times(least, unit)
    if received <= least:
        return ProofPart(f"the worst device receives {figure} bytes, as few as in any {plans_meant(plan)}", argument)
    statement = f"not shown: the worst device receives {figure} bytes, and the bound is {bytes_bound}"
    return ProofPart(statement, argument, holds=False)


def _received(plan: Plan, elements: list[int]) -> int:
    """Elements that the worst device receives in all steps: between disjoint sets, each step is on one side of them."""
    source, target = set(plan.source.mesh.devices), set(plan.target.mesh.devices)
    if source != target and source.isdisjoint(target):
        before = sum(
            count for step, count in zip(plan.steps, elements, strict=True) if step.result.mesh.devices[0] in source
        )
        return max(before, sum(elements) - before)
    return sum(elements)


def _unit(plan: Plan, form: Form) -> int:
    """The product of the sizes that vary; 1 for elements below a byte, whose buffers are rounded up one by one."""
    return form.unit if dtypes.bits(plan.source.dtype) >= 8 else 1


def _scaled(figures: tuple[int, int], unit: int) -> tuple[int, int]:
    """Figures for N = 1; raises `UndecidedError` for a buffer that does not grow with N, which has no such figure."""
    if any(figure % unit for figure in figures):
        raise UndecidedError(f"{figures} bytes are not multiples of the sizes that vary ({unit})")
    return figures[0] // unit, figures[1] // unit


def _times(figure: int, unit: int) -> str:
    """Bytes as a multiple of N if sizes vary.

    >>> _times(96, 8), _times(96, 1), _times(12, 8)
    ('12 N', '96', '12/8 N')
    """
    if unit == 1 or not figure:
        return str(figure)
    return f"{figure // unit} N" if figure % unit == 0 else f"{figure}/{unit} N"
