"""The proof of one plan: the program that it is lowered to is right, bounded and minimal.

    right     every device ends with the elements that the target demands       symbolic.derive, z3
    bounded   the program's own buffers stay within what each step promises     symbolic.moments, z3
    minimal   the bytes in the program's lists are as few as in any plan        symbolic.wire, least.floor

What is not proved is run on marked elements (`refute`): a counterexample makes it wrong, otherwise it is undecided.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import overload

import numpy as np

from reshard.errors import PlanError, ProofError, UndecidedError, name_arguments, quoted
from reshard.lower import Program, lower_plan
from reshard.lower.exchange_rounds import ExchangeInPlace
from reshard.lower.program import Exchange, InParts, Instruction, is_alias, join_launches, lower_batch
from reshard.plans.descriptors import Descriptor
from reshard.plans.plan import Batch, Plan, Step, StepSpec, TreePlan, chain
from reshard.plans.rules.collectives import VIEW_RULES
from reshard.proofs import symbolic
from reshard.proofs.launches import check_limit, fewest
from reshard.proofs.least import least_steps_bytes, plans_meant
from reshard.proofs.parts import compare_parts
from reshard.proofs.proof import WIDTH, Proof, ProofPart, checked_width
from reshard.proofs.refute import MALFORMED, Counterexample, fits_in_memory, refute
from reshard.proofs.symbolic import ByFormula, Fewer, Form, Outline, Query
from reshard.proofs.transfer_proof import verify
from reshard.runtime import oracle
from reshard.types import dtypes
from reshard.types.layout import Digit, Dim, Layout
from reshard.types.move import Move
from reshard.types.units import bytes_text, counted
from reshard.types.view import View
from reshard.types.whole import check_kind, checked_flag, whole

MANY_TRANSFERS = 1 << 14
"""Even exchanges and permutes that list more transfers are proved by the formulas that would list them."""

MOST_TRANSFERS = 1 << 21
"""Exchanges that have no such formulas and list more transfers are not decided."""

_RIGHT = "every device ends with the elements that the target demands"
_NOTHING_TO_DO = ("there is nothing to do",)


def prove_plan(plan: Plan, program: Program | None = None, *, launches: bool = False, limit: float = 30.0) -> Proof:
    """Proves one plan; see `prove`, which takes trees too."""
    if not isinstance(plan, Plan):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise PlanError(f"{quoted(plan)} is a {type(plan).__name__}, not a Plan; give what reshard.plan() returns")
    if not isinstance(program, Program | None):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise PlanError(f"{quoted(program)} is not a Program; give what lower_plan(plan) returns, or None")
    launches = checked_flag(launches, "launches")
    check_limit(limit)
    if plan.view is not None or any(map(_changes_indices, plan.steps)):
        if launches:
            why = "the search for fewer launches knows no views, no casts, and nothing that is held"
            raise PlanError(f"{plan.source} -> {plan.target}: {why}")
        return _prove_view(plan, program)
    made = _outline(plan) if program is None else program
    try:
        # No element of an empty array can be wrong, but its program must still run.
        if 0 in plan.source.shape and (not isinstance(made, Program) or refute(plan, made) is not None):
            raise UndecidedError("the program of an empty array does not run as the plan says")
        form, claims = symbolic.derive_claims(plan, made)
        proof = Proof(plan, form, _right(plan, made, claims), _bounded(plan, made, form), _minimal(plan, made, form))
        symbolic.decide_claims(proof.claims)
    except (UndecidedError, *MALFORMED) as undecided:
        counterexample = refute(plan, made) if isinstance(made, Program) else None
        if counterexample is None:
            if isinstance(undecided, UndecidedError) or program is None:
                raise
            raise UndecidedError(f"the program cannot be read ({type(undecided).__name__}: {undecided})") from undecided
        raise ProofError(f"{plan.source} -> {plan.target}: {counterexample}", counterexample) from undecided
    return replace(proof, launches=fewest(plan, limit)) if launches else proof


def _outline(plan: Plan) -> Program | Outline:
    """The lowered program, with formulas in place of lists that are too long to write."""

    def transfers(step: Step) -> int:
        """Exchanges and permutes have a transfer for each device and round."""
        return step.launches * step.operand.mesh.size if step.kind in ("permute", "exchange") else 0

    if all(transfers(step) <= MANY_TRANSFERS for step in plan.steps):
        return lower_plan(plan)
    instructions: list[Instruction | ByFormula] = []
    for step in plan.steps:
        formula = symbolic.formula_of_step(step) if transfers(step) > MANY_TRANSFERS else None
        if formula is None:
            if step.launches * step.operand.mesh.size > MOST_TRANSFERS:
                raise UndecidedError(
                    f"{step.kind}: {step.operand} -> {step.result} lists {step.launches} rounds for each of "
                    f"{step.operand.mesh.size} devices, too many to compare, uneven or in pieces; prove it on fewer "
                    f"devices"
                )
            # Lower the step alone with a donated operand, since a step in place could not run otherwise.
            specs = [step.spec]
            formula = lower_plan(chain(step.operand, step.result, specs, donate=True)).instructions[0]
        instructions.append(formula)
    source, shapes = plan.source, tuple(step.result.tile_shape for step in plan.steps)
    return Outline(source.mesh.devices, source.dtype, source.tile_shape, tuple(instructions), shapes, not plan.donate)


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
    return ProofPart(_RIGHT, tuple(argument) or _NOTHING_TO_DO, tuple(claim for step in claims for claim in step))


def _bounded(plan: Plan, program: Program | Outline, form: Form) -> ProofPart:
    """The live bytes of the program's own buffers are within what each step promises."""
    unit = _unit(plan, form)
    argument: list[str] = []
    claims: list[Fewer] = []
    for number, (step, moments) in enumerate(zip(plan.steps, symbolic.list_moments(program), strict=True), 1):
        fullest = max(([plan.source.nbytes(e) for e in buffers] for buffers in moments), key=sum)
        terms = " + ".join(_times(size, unit) for size in fullest)
        argument.append(f"step {number}, {step.kind}: at its fullest {terms} bytes")
        # A buffer that does not grow with N has no figure for N = 1.
        figures = (sum(fullest), step.live_bytes)
        if any(figure % unit for figure in figures):
            raise UndecidedError(f"{figures} bytes are not multiples of the sizes that vary ({unit})")
        claims.append(Fewer(f"step {number} as promised", *(figures[0] // unit, figures[1] // unit)))
    here = f" ({plan.peak_bytes} here)" if unit > 1 else ""
    statement = f"at most {_times(plan.peak_bytes, unit)} bytes live on a device{here}"
    return ProofPart(statement, tuple(argument), tuple(claims))


def _minimal(plan: Plan, program: Program | Outline, form: Form) -> ProofPart:
    """The bytes that the program's lists bring the worst device, compared with the bound of the two layouts."""
    unit, nbytes = _unit(plan, form), plan.source.nbytes
    tiles = [plan.source.tile_shape, *program.tile_shapes]
    wires = [symbolic.count_received(i, math.prod(tile)) for i, tile in zip(program.instructions, tiles, strict=False)]
    elements = sum(w.elements for w in wires)
    source, target = set(plan.source.mesh.devices), set(plan.target.mesh.devices)
    if source.isdisjoint(target):  # Each step is then on one side of the two.
        each = zip(plan.steps, wires, strict=True)
        before = sum(w.elements for step, w in each if step.result.mesh.devices[0] in source)
        elements = max(before, elements - before)
    received, launches = nbytes(elements), sum(w.launches for w in wires)
    promised = sum(step.received_bytes for step in plan.steps)
    if launches != plan.launches or received > promised:
        raise UndecidedError(
            f"the program has {launches} launches and {received} bytes, the plan says {plan.launches} and {promised}"
        )
    bound = least_steps_bytes(plan.source, plan.target, form)
    least = nbytes(bound.elements)
    if received < least and plan.source.partial_as(plan.target):
        raise UndecidedError(f"{received} bytes are received, but no program can receive fewer than {least}")
    steps = (f"step {n}: {_times(nbytes(w.elements), unit)} bytes" for n, w in enumerate(wires, 1))
    figures = _times(received, unit), _times(least, unit)
    return _compare_bytes(plan, figures, received <= least, (*steps, bound.argument))


def _compare_bytes(plan: Plan, figures: tuple[str, str], reached: bool, argument: tuple[str, ...]) -> ProofPart:
    """What is received, and the bound, in words."""
    received, least = figures
    if reached:
        return ProofPart(f"the worst device receives {received} bytes, as few as in any {plans_meant(plan)}", argument)
    statement = f"not shown: the worst device receives {received} bytes, and the bound is {least}"
    return ProofPart(statement, argument, holds=False)


def _unit(plan: Plan, form: Form) -> int:
    """The product of the sizes that vary; 1 for elements below a byte, whose buffers are rounded up one by one."""
    return form.unit if dtypes.bits(plan.source.dtype) >= 8 else 1


def _times(figure: int, unit: int) -> str:
    """Bytes as a multiple of N if sizes vary.

    >>> _times(96, 8), _times(96, 1), _times(12, 8)
    ('12 N', '96', '12/8 N')
    """
    if unit == 1 or not figure:
        return str(figure)
    return f"{figure // unit} N" if figure % unit == 0 else f"{figure}/{unit} N"


# Plans of the same form at other sizes.


def instance(plan: Plan, form: Form, sizes: Mapping[str, int]) -> Plan:
    """The same steps with other sizes for the names of the form; the chunks of an exchange grow with its messages.

    Raises `PlanError` for names that the form does not have, and for sizes below 1.

    >>> import reshard as rs
    >>> mesh = rs.Mesh(x=4)
    >>> plan = rs.plan(rs.Layout.parse("f32[{x}4, 16]", mesh), rs.Layout.parse("f32[16, {x}4]", mesh))
    >>> print(instance(plan, rs.prove(plan).form, {"n0": 7}).target)
    f32[28, {x}4]
    """
    check_kind(plan, Plan, "plan", "what reshard.plan() returns")
    check_kind(form, Form, "form", "the form of a proof")
    check_kind(sizes, Mapping, "sizes", "a dict of the form's names")
    # One more than the names is wrong already: a mapping may list without end.
    given = {name: sizes[name] for name in itertools.islice(sizes, len(form.sizes) + 1)}
    wrong = {name: size for name, size in given.items() if name not in form.sizes or whole(size, 1) is None}
    if wrong:
        names = ", ".join(form.sizes) or "none"
        raise PlanError(f"{quoted(wrong)} are not sizes of this form: its names are {names}, and sizes are 1 or more")
    at = {**form.sizes, **{name: int(size) for name, size in given.items()}}
    growth = math.prod(at.values()), form.unit
    specs: list[StepSpec] = []
    for step in plan.steps:
        chunk = None if step.mode.chunk is None else step.mode.chunk * growth[0] // growth[1]
        specs.append(StepSpec(step.kind, resized(step.result, form, at), step.mode._replace(chunk=chunk)))
    return chain(resized(plan.source, form, at), resized(plan.target, form, at), specs, plan.donate)


def resized(layout: Layout, form: Form, sizes: Mapping[str, int]) -> Layout:
    """A layout with other sizes for the names of a form: a local digit grows by the names of those that it contains."""
    dims: list[Dim] = []
    for at, dim in enumerate(layout.dims):
        digits: list[Digit] = []
        low = 1
        for radix, axis in reversed(dim.digits):
            inside = [name for (d, place), name in form.names.items() if d == at and low <= place < low * radix]
            size = radix
            for name in inside if axis is None else ():
                size = size // form.sizes[name] * sizes[name]
            digits.insert(0, Digit(size, axis))
            low *= radix
        dims.append(dim if at in form.fixed else Dim(tuple(digits), math.prod(d.radix for d in digits)))
    return Layout(layout.mesh, tuple(dims), layout.dtype, layout.reduction, layout.partial)


# The proof of a tree of plans: each different plan is proved, and the programs of each batch are compared.
#
# plans      every program of every batch is right and bounded for all sizes of its plan's form, and minimal where it is
# batches    each launch does together what the programs say one by one, in no more launches and buffers than promised
# parts      those of one target have no element in common, and as many as it has, or it is given; and no program writes
#            over a source that other moves read
# tree       the sums and maxima that follow: bytes received against the joint bound, and the peak


@dataclass(frozen=True)
class TreeProof:
    """The proofs of a tree's different plans; `of` has that of each array.

    >>> import reshard as rs
    >>> rows, whole = (rs.Layout.parse(text, rs.Mesh(x=2)) for text in ("f32[{x}4]", "f32[8]"))
    >>> proof = rs.prove(rs.plan_tree({"a": (rows, whole), "b": (rows, whole)}))
    >>> len(proof.proofs), proof.of["b"].right.holds, proof.minimal
    (1, True, True)
    """

    tree: TreePlan
    proofs: tuple[Proof, ...]
    parts: tuple[str, ...] = ()
    """What is shown of each target that is filled in parts."""

    @cached_property
    def of(self) -> Mapping[str, Proof]:
        """The proof of each array's plan, by name."""
        by_plan = {proof.plan: proof for proof in self.proofs}
        return {name: by_plan[plan] for name, plan in self.tree.plans.items()}

    @property
    def minimal(self) -> bool:
        """Whether the busiest device receives no more than some device must, of all arrays together."""
        return self.tree.received_bytes <= self.tree.lower_bound_bytes

    def explain(self, width: int = WIDTH) -> str:
        """The proofs of the different plans, and what follows for the tree; `width` as for a proof."""
        tree, width = self.tree, checked_width(width)
        bound = "as few as in any plans" if self.minimal else f"the bound is {bytes_text(tree.lower_bound_bytes)}"
        head = (
            f"{counted(len(tree.names), 'array')}, {counted(len(self.proofs), 'different plan')}, all proved; "
            f"{counted(len(tree.batches), 'batch')}, whose programs have the same devices in every launch\n"
            f"the busiest device receives {bytes_text(tree.received_bytes)} of all arrays together, {bound}\n"
            f"at most {bytes_text(tree.peak_bytes)} live on a device"
        )
        return "\n".join([head, *self.parts, *(proof.explain(width) for proof in self.proofs)])

    def __str__(self) -> str:
        return self.explain()


@overload
def prove(plan: Plan, program: Program | None = None, *, launches: bool = False, limit: float = 30.0) -> Proof: ...


@overload
def prove(plan: TreePlan, program: None = None, *, launches: bool = False, limit: float = 30.0) -> TreeProof: ...


@name_arguments
def prove(
    plan: Plan | TreePlan, program: Program | None = None, *, launches: bool = False, limit: float = 30.0
) -> Proof | TreeProof:
    """Proves a plan, by the program that `lower` makes of it or by the given one; or all plans of a tree.

    `launches=True` also searches for a plan with fewer launches, for at most `limit` seconds; see `fewest`.
    Raises `ProofError` with a counterexample if the program is wrong, and `UndecidedError` if it is neither proved
    nor refuted. Needs z3: `pip install z3-solver`.

    >>> import reshard as rs
    >>> mesh = rs.Mesh(x=3)
    >>> proof = prove(rs.plan(rs.Layout.parse("f32[{x}5]", mesh), rs.Layout.parse("f32[15]", mesh)))
    >>> print(proof.minimal.statement)
    the worst device receives 8 N bytes, as few as in any plan
    """
    if not isinstance(plan, TreePlan):
        return prove_plan(plan, program, launches=launches, limit=limit)
    if program is not None:
        raise PlanError("a tree of plans has a program for each batch; prove the tree without one")
    proofs: dict[Plan, list[tuple[Program, Proof]]] = {}
    for batch in plan.batches:
        programs = lower_batch(batch)
        if len(programs) != len(batch.plans):
            raise UndecidedError(f"{batch}: {len(programs)} programs for {len(batch.plans)} arrays")
        for name, each, own in zip(batch.names, batch.plans, programs, strict=True):
            if plan.sources.count(plan.source_of[name]) > 1:
                _check_source_stays(name, own)
            known = proofs.setdefault(each, [])
            if not any(own is other or own == other for other, _ in known):
                known.append((own, prove_plan(each, own, launches=launches, limit=limit)))
        _check_batch(batch, programs)
    return TreeProof(plan, tuple(known[0][1] for known in proofs.values()), _prove_parts(plan))


def _check_source_stays(name: str, program: Program) -> None:
    """Checks that a program does not write over its source, which others read."""
    for instruction in program.instructions:
        if isinstance(instruction, ExchangeInPlace) or (isinstance(instruction, InParts) and instruction.in_place):
            raise UndecidedError(f"{name}: {type(instruction).__name__} overwrites an array that other moves read")
        if not is_alias(instruction):
            return


def _prove_parts(tree: TreePlan) -> tuple[str, ...]:
    """What is shown of each target that moves fill in parts: that they have no element in common, and how many they
    leave to the array that is given.
    """
    lines: list[str] = []
    for target, moves in tree.parts.items():
        plans = [tree.plans[name] for name in moves]
        if len(plans) == 1 and not plans[0].fills:
            continue
        views = tuple(plan.view or View.identity(plan.target.shape) for plan in plans)
        overlap, filled = compare_parts(views)
        if overlap is not None:
            both = moves[overlap[0]], moves[overlap[1]]
            raise ProofError(f"{target}: {both[0]} and {both[1]} fill an element both", both)
        left = math.prod(plans[0].target.shape) - filled
        if (left == 0) == (target in tree.filled) and not plans[0].have:
            given = "is not given" if left else "is to be given"
            raise ProofError(f"{target} {given}, and {left} of its elements are in no part", left)
        rest = f"{left} elements stay as the given array has them" if left else "which is all of it"
        lines.append(f"{target} is filled in {counted(len(moves), 'part')} without an element in common, {rest}")
    return tuple(lines)


def _check_batch(batch: Batch, programs: Sequence[Program]) -> None:
    """Checks that the launches of a batch do what the program of each of its arrays does, and as the batch promises."""
    launches = 0
    try:
        joints = join_launches(programs)
        steps = list(zip(*(program.instructions for program in programs), strict=True))
        for number, (joint, each, plans) in enumerate(zip(joints, steps, batch.steps, strict=True), 1):
            about = f"{batch}, step {number}"
            if len({step.operand.dtype for step in plans}) > 1:
                raise UndecidedError(f"{about}: arrays of several dtypes in one launch")
            cost = symbolic.check_joint_launch(about, each, joint)
            launches += cost.launches
            nbytes, scratch = plans[0].wire.nbytes(cost.buffers), batch.scratch_bytes[number - 1]
            if nbytes > scratch:
                raise UndecidedError(f"{about}: buffers of {nbytes} bytes, the batch promises {scratch}")
    except (PlanError, *MALFORMED) as error:
        raise UndecidedError(f"{batch}: the programs do not run together ({error})") from error
    if launches != batch.launches:
        raise UndecidedError(f"{batch}: {launches} launches, the batch promises {batch.launches}")


# The proof of a plan with views: its ordinary steps for all sizes of their form, all of it at the sizes here.
#
#     view, take, put, cast   nothing is sent: the typing rule has the same elements on every device, before and after
#     ordinary steps          each stretch of them is a plan of its own, and is proved like any other
#     exchange with a view    has no form: it is proved at these sizes only
#
# At these sizes every element is marked, and the program is run: what a program does never depends on values, so that
# marks that all differ and all arrive where the view says are a proof, not a sample. Marks are not cast, since they
# would not survive it: which dtype each tile has, instruction by instruction, is compared with the plan's.


_LOCAL = "nothing is sent, and every tile has the elements that the view says (marked and run at these sizes)"
_BOXES = "each marked element arrives where the view says, at these sizes"


def _prove_view(plan: Plan, program: Program | None) -> Proof:
    """The proof of a plan that has a view.

    Raises `ProofError` with a counterexample for a wrong program, and `UndecidedError` for an array that is too large
    to mark.
    """
    made = lower_plan(plan) if program is None else program
    if not fits_in_memory(plan) and plan.holding is not None and plan.source.dtype == plan.target.dtype:
        return _prove_update(plan, made)
    if not fits_in_memory(plan):
        raise UndecidedError(
            f"{plan.source} -> {plan.target}: steps with a view are proved by marking every element, and here there "
            f"are too many; prove the plan of a smaller array"
        )
    counterexample = refute(plan, made)
    if counterexample is not None:
        raise ProofError(f"{plan.source} -> {plan.target}: {counterexample}", counterexample)
    symbolic.check_outside(plan, made)
    argument: list[str] = []
    claims: list[Query] = []
    begun = 0  # The first of the ordinary steps that are proved together.
    for number, step in enumerate(plan.steps, 1):
        if _changes_indices(step):
            if step.kind == "exchange" and step.mode.view is None and step.mode.holding is None:
                # A cast on the way: the marks follow the messages, all else is as the lowering has it.
                given, own = (each.instructions[number - 1] for each in (made, lower_plan(plan)))
                same = isinstance(given, Exchange) and replace(given, local=(), rounds=())
                relayed = isinstance(given, Exchange) and given.relays
                if relayed or not isinstance(own, Exchange) or same != replace(own, local=(), rounds=()):
                    raise UndecidedError(f"step {number}: another kind of exchange than the plan's")
            elif step.kind == "exchange":
                tiles = step.operand.tile_shape, step.result.tile_shape
                given, fills = made.instructions[number - 1], step.mode.fills
                symbolic.check_view_exchange(given, f"step {number}", tiles, fills=fills)
            begun, why = number, _BOXES if step.kind == "exchange" else _LOCAL
        elif number < len(plan.steps) and not _changes_indices(plan.steps[number]):
            why = "proved with the steps that follow it"
        else:
            why, more = _prove_stretch(plan.steps[begun:number], program, begun)
            claims += more
        argument.append(f"step {number}, {step.kind}: {why}")
    bounded = ProofPart(f"at most {plan.peak_bytes} bytes live on a device", ("counted while the marks moved",))
    right = ProofPart(_RIGHT, tuple(argument) or _NOTHING_TO_DO, tuple(claims))
    return Proof(plan, Form({}, {}, {}, {}), right, bounded, _minimal_view(plan))


def _prove_update(plan: Plan, program: Program) -> Proof:
    """The proof of one exchange beside what devices hold, of an array too large to mark: its messages as transfers,
    compared run by run with what the target means, and with what is held and fresh."""
    broken = symbolic.broken_rule(plan, program)
    if broken is not None:
        raise ProofError(f"{plan.source} -> {plan.target}: {broken}", Counterexample("right", broken))
    symbolic.check_outside(plan, program)
    (exchange,) = program.instructions
    tiles = plan.source.tile_shape, plan.target.tile_shape
    symbolic.check_view_exchange(exchange, "step 1", tiles, fills=True)
    assert isinstance(exchange, Exchange)
    transfers: list[Descriptor] = []
    for transfer in (*exchange.local, *(each for turn in exchange.rounds for each in turn)):
        for src, dst, axes in transfer.blocks:
            extents, before, after = (tuple([axis[side] for axis in axes]) for side in range(3))
            sender, receiver, turn = transfer.sender, transfer.receiver, int(transfer.relayed)
            transfers.append(Descriptor(sender, receiver, src, dst, extents, before, after, turn))
            if exchange.relays and not turn:  # What has arrived stays while the rest is passed on.
                transfers.append(Descriptor(receiver, receiver, dst, dst, extents, after, after, 1))
    view = plan.view or View.identity(plan.source.shape)
    verified = verify(transfers, Move(plan.source, plan.target, view, have=plan.have, changed=plan.changed))
    fullest = max(sum(buffers) for step in symbolic.list_moments(program) for buffers in step)
    live = plan.source.nbytes(fullest) + plan.steps[0].held_bytes
    if live > plan.peak_bytes or verified.received_bytes > plan.received_bytes:
        raise UndecidedError(f"{live} bytes are live and {verified.received_bytes} received, more than the plan says")
    right = ProofPart(_RIGHT, ("step 1, exchange: its messages, run by run, at these sizes",))
    bounded = ProofPart(f"at most {plan.peak_bytes} bytes live on a device", (f"step 1: at its fullest {live} bytes",))
    figures = verified.received_bytes, plan.lower_bound_bytes
    reached = figures[0] <= figures[1]
    minimal = _compare_bytes(plan, (str(figures[0]), str(figures[1])), reached, ("counted as the typing rules do",))
    return Proof(plan, Form({}, {}, {}, {}), right, bounded, minimal)


def _changes_indices(step: Step) -> bool:
    """Whether a step is proved at these sizes only: one that changes indices, casts, or leaves what devices hold."""
    at_these_sizes = step.mode.view is not None or step.mode.holding is not None
    return step.kind in VIEW_RULES or at_these_sizes or step.operand.dtype != step.result.dtype


def _prove_stretch(steps: Sequence[Step], program: Program | None, begun: int) -> tuple[str, tuple[Query, ...]]:
    """Why neighbouring ordinary steps are right, and the claims: they are a plan of their own, and their instructions
    in the given program, from number `begun` on, are its program.
    """
    operand, result = steps[0].operand, steps[-1].result
    if program is not None:
        own = slice(begun, begun + len(steps))
        program = Program(
            operand.mesh.devices,
            operand.dtype,
            operand.tile_shape,
            program.instructions[own],
            program.tile_shapes[own],
            keep_source=False,
        )
    specs = [step.spec for step in steps]
    plan = chain(operand, result, specs, donate=True)
    try:
        proof = prove_plan(plan, program)
    except (UndecidedError, ProofError) as error:
        # Marks show what the numpy runtime does; other instructions than the lowering's may tell others something else.
        if program is not None and program.instructions != lower_plan(plan).instructions:
            raise UndecidedError(f"step {begun + 1}: instructions that are not shown to be right ({error})") from error
        return _BOXES, ()
    sizes = f"all {', '.join(sorted(proof.form.sizes))} >= 1" if proof.form.sizes else "these sizes"
    return f"proved for {sizes} of {proof.form.spell(operand)} -> {proof.form.spell(result)}", proof.claims


def _minimal_view(plan: Plan) -> ProofPart:
    """The bytes received against what the neediest device lacks, counted element by element."""
    if not plan.source.partial_as(plan.target):
        return ProofPart("not shown: the bound of a sum through a view", (), holds=False)
    # What a device needs and does not hold: the source's indices, seen through the view, cut into tiles of both ends.
    index = np.full(plan.target.shape, -1, np.int64).reshape(-1)
    src, dst = oracle.index_pairs(plan.view or View.identity(plan.source.shape))
    index[dst] = src
    have = plan.holding
    kept = np.zeros(0, np.int64) if have is None else np.flatnonzero(~oracle.stale_marks(have))
    whole = np.arange(math.prod(plan.source.shape), dtype=np.int64).reshape(plan.source.shape)
    held, wanted = (
        oracle.cut_tiles(
            layout, dict.fromkeys(oracle.summands(layout), array), partial(np.full, layout.tile_shape, -1, np.int64)
        )
        for layout, array in ((plan.source, whole), (plan.target, index.reshape(plan.target.shape)))
    )
    there = {}
    if have is not None:  # What devices hold of the target, as indices of the source.
        arrays = {(): index.reshape(plan.target.shape)}
        there = oracle.cut_tiles(have.layout, arrays, partial(np.full, have.layout.tile_shape, -1, np.int64))
    lacked, none = 0, np.empty(0, np.int64)
    for device in plan.target.mesh.devices:
        needed = wanted[device][wanted[device] >= 0]
        needed = needed[np.isin(needed, held.get(device, none), invert=True)]
        fresh = np.isin(needed, np.intersect1d(there.get(device, none), kept))
        lacked = max(lacked, int((~fresh).sum()))
    narrow = min((plan.source, plan.target), key=lambda layout: layout.nbytes(8))
    least = narrow.nbytes(lacked)
    argument = (f"the neediest device lacks {lacked} elements of its target tile, {least} bytes",)
    return _compare_bytes(plan, (str(plan.received_bytes), str(least)), plan.received_bytes <= least, argument)
