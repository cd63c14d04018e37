"""`prove(plan)`: that a plan is right, for all sizes of its form, stays within its promise, and moves no byte too many.

>>> import reshard as rs
>>> mesh = rs.Mesh(x=4)
>>> proof = prove(rs.plan(rs.Layout.parse("f32[{x}4, 16]", mesh), rs.Layout.parse("f32[16, {x}4]", mesh)))
>>> print(proof.form.spell(proof.plan.source), "->", proof.form.spell(proof.plan.target))
[{x}n0, 4 n1] -> [4 n0, {x}n1]
>>> print(proof.bounded.statement)
at most 48 N bytes live on a device (768 here)
"""

from __future__ import annotations

from dataclasses import replace

from reshard.errors import ProofError as ProofError
from reshard.errors import UndecidedError as UndecidedError
from reshard.lower import Program, lower
from reshard.lower.program import Instruction
from reshard.proofs import symbolic
from reshard.proofs.instances import instance as instance
from reshard.proofs.launches import fewest as fewest
from reshard.proofs.least import floor
from reshard.proofs.proof import Fewest as Fewest
from reshard.proofs.proof import Part as Part
from reshard.proofs.proof import Proof as Proof
from reshard.proofs.refute import Counterexample as Counterexample
from reshard.proofs.refute import fits, refute
from reshard.proofs.rules import Rules as Rules
from reshard.proofs.rules import prove_rules as prove_rules
from reshard.proofs.symbolic import Fewer, Form, Outline, Query, Written
from reshard.types import dtypes
from reshard.types.plan import Plan, Step, StepSpec, chain

MANY_TRANSFERS = 1 << 14
"""An even exchange or a permute that lists more transfers is proved by the formulas that would list them."""

MOST_TRANSFERS = 1 << 21
"""An exchange that has no such formulas and lists more transfers is not decided."""


def prove(plan: Plan, program: Program | None = None, *, launches: bool = False, limit: float = 30.0) -> Proof:
    """Proves a plan, by the program that `lower` makes of it, or by another one.

    With `launches`, a plan of fewer launches is sought besides, for at most `limit` seconds; see `fewest`.
    Raises `ProofError` with a counterexample where the program is wrong, and `UndecidedError` where it is
    neither proved nor found to be wrong.
    """
    made = program or _outline(plan)
    try:
        if 0 in plan.source.shape:
            _check_runs(plan, made)
        proof = _proof(plan, made)
    except UndecidedError as undecided:
        found = refute(plan, made) if isinstance(made, Program) and fits(plan) else None
        if found is None:
            raise
        raise ProofError(f"{plan.source} -> {plan.target}: {found}", found) from undecided
    return replace(proof, launches=fewest(plan, limit)) if launches else proof


def _check_runs(plan: Plan, program: Program | Outline) -> None:
    """A program of an empty array has no element to put right, and must run all the same."""
    if not isinstance(program, Program) or refute(plan, program) is not None:
        raise UndecidedError("the program of an empty array does not run as the plan says")


def _proof(plan: Plan, program: Program | Outline) -> Proof:
    form, claims = symbolic.right(plan, program)
    right = _right(plan, program, claims)
    bounded = _bounded(plan, program, form)
    minimal = _minimal(plan, program, form)
    proof = Proof(plan, form, right, bounded, minimal)
    symbolic.decide(proof.claims)
    return proof


def _outline(plan: Plan) -> Program | Outline:
    """The lowered program, with formulas in place of lists that are too long to write."""
    if not any(_long(step) for step in plan.steps):
        return lower(plan)
    shapes = tuple(step.result.tile_shape for step in plan.steps)
    instructions = tuple(_instruction(step) for step in plan.steps)
    return Outline(
        plan.source.mesh.devices, plan.source.dtype, plan.source.tile_shape, instructions, shapes, not plan.donate
    )


def _long(step: Step) -> bool:
    """Exchanges and permutes list a transfer per device and round."""
    return step.kind in ("permute", "exchange") and step.launches * step.operand.mesh.size > MANY_TRANSFERS


def _instruction(step: Step) -> Instruction | Written:
    found = symbolic.written(step) if _long(step) else None
    if found is not None:
        return found
    if step.launches * step.operand.mesh.size > MOST_TRANSFERS:
        raise UndecidedError(
            f"{step.kind}: {step.operand} -> {step.result} lists {step.launches} rounds for each of "
            f"{step.operand.mesh.size} devices, too many to compare, uneven or in pieces; prove it on fewer devices"
        )
    # A step alone gives its operand up, or it could not run in place.
    moves = [StepSpec(step.kind, step.result, step.mode)]
    return lower(chain(step.operand, step.result, moves, donate=True)).instructions[0]


def _right(plan: Plan, program: Program | Outline, claims: list[list[Query]]) -> Part:
    said = {
        "permute": "each receiver's sender spells before, by its held digits, what the receiver spells after",
        "exchange": "each box has, at both ends, the same elements, and each element of each result is in a box",
    }
    argument: list[str] = []
    for number, (step, made) in enumerate(zip(plan.steps, program.instructions, strict=True), 1):
        what = said.get(step.kind, "its lists of devices are what the layouts say")
        if isinstance(made, Written):
            what = "run on one device of unknown coordinates, by the formulas that its lists are written by"
        argument.append(f"step {number}, {step.kind}: {what}")
    return Part(
        "every device ends with the elements that the target demands",
        tuple(argument) or ("there is nothing to do",),
        tuple(claim for step in claims for claim in step),
    )


def _bounded(plan: Plan, program: Program | Outline, form: Form) -> Part:
    """Live bytes of the program's own buffers, against what each step promises."""
    unit = _unit(plan, form)
    argument: list[str] = []
    claims: list[Fewer] = []
    for number, (step, found) in enumerate(zip(plan.steps, symbolic.moments(program), strict=True), 1):
        fullest = max(found, key=lambda m: sum(plan.source.nbytes(e) for e in m))
        parts = [_times(plan.source.nbytes(e), unit) for e in fullest]
        argument.append(f"step {number}, {step.kind}: at its fullest {' + '.join(parts)} bytes")
        live = sum(plan.source.nbytes(e) for e in fullest)
        claims.append(Fewer(f"step {number} as promised", *_scaled((live, step.live_bytes), unit)))
    peak = _times(plan.peak_bytes, unit)
    here = f" ({plan.peak_bytes} here)" if unit > 1 else ""
    return Part(f"at most {peak} bytes live on a device{here}", tuple(argument), tuple(claims))


def _minimal(plan: Plan, program: Program | Outline, form: Form) -> Part:
    """What the program's lists have the worst device receive, against the bound of the two layouts."""
    unit = _unit(plan, form)
    tiles = [plan.source.tile_shape, *program.tile_shapes]
    wires = [symbolic.wire(i, _elements(tile)) for i, tile in zip(program.instructions, tiles, strict=False)]
    elements = sum(w.elements for w in wires)
    received, bound = plan.source.nbytes(elements), floor(plan.source, plan.target, form)
    least = plan.source.nbytes(bound.elements)
    launches = sum(w.launches for w in wires)
    if launches != plan.launches or received > plan.received_bytes:
        raise UndecidedError(f"the program has {launches} launches and {received} bytes, the plan says otherwise")
    argument = [
        *(f"step {n}: {_times(plan.source.nbytes(w.elements), unit)} bytes" for n, w in enumerate(wires, 1)),
        bound.argument,
    ]
    if received < least and plan.source.partial == plan.target.partial:
        raise UndecidedError(f"{received} bytes are received, fewer than {least}, which no program can do")
    spelled = _times(received, unit), _times(least, unit)
    if received <= least:
        return Part(f"the worst device receives {spelled[0]} bytes, as few as in any plan", tuple(argument))
    statement = f"not shown: the worst device receives {spelled[0]} bytes, and the bound is {spelled[1]}"
    return Part(statement, tuple(argument), holds=False)


def _unit(plan: Plan, form: Form) -> int:
    """The product of the sizes that vary; 1 for elements below a byte, whose buffers are rounded up one by one."""
    return form.unit if dtypes.bits(plan.source.dtype) >= 8 else 1


def _scaled(figures: tuple[int, int], unit: int) -> tuple[int, int]:
    """Figures for N = 1; a buffer that does not grow with N has no such figure, and is not decided."""
    if any(figure % unit for figure in figures):
        raise UndecidedError(f"{figures} bytes are no multiples of the sizes that vary ({unit})")
    return figures[0] // unit, figures[1] // unit


def _times(figure: int, unit: int) -> str:
    """Bytes as a multiple of N, where sizes vary."""
    if unit == 1 or not figure:
        return str(figure)
    return f"{figure // unit} N" if figure % unit == 0 else f"{figure}/{unit} N"


def _elements(shape: tuple[int, ...]) -> int:
    found = 1
    for size in shape:
        found *= size
    return found
