"""The proof of a plan with views: its ordinary steps for all sizes of their form, all of it at the sizes here.

    view, take, put, cast   nothing is sent: the typing rule has the same elements on every device, before and after
    ordinary steps          each stretch of them is a plan of its own, and is proved like any other
    view_exchange           has no form: it is proved at these sizes only

At these sizes every element is marked, and the program is run: what a program does never depends on values, so that
marks that all differ and all arrive where the view says are a proof, not a sample.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from reshard.errors import ProofError, UndecidedError
from reshard.lower import Program, lower_plan
from reshard.proofs.least import plans_meant
from reshard.proofs.proof import Proof, ProofPart
from reshard.proofs.refute import fits, refute
from reshard.proofs.symbolic import Form, Query
from reshard.runtime import oracle
from reshard.types.layout import Layout
from reshard.types.plan import Plan, Step, StepSpec, chain
from reshard.types.rules.checker import VIEW_RULES
from reshard.types.view import View

_LOCAL = "nothing is sent, and every tile has the elements that the view says (marked and run at these sizes)"
_BOXES = "each marked element arrives where the view says, at these sizes"


def prove_view(plan: Plan, program: Program | None, prove: Callable[[Plan], Proof]) -> Proof:
    """The proof of a plan that has a view; `prove` proves a plan that has none.

    Raises `ProofError` with a counterexample for a wrong program, and `UndecidedError` for an array that is too large
    to mark.
    """
    made = lower_plan(plan) if program is None else program
    if not fits(plan):
        raise UndecidedError(
            f"{plan.source} -> {plan.target}: steps with a view are proved by marking every element, and here there "
            f"are too many; prove the plan of a smaller array"
        )
    counterexample = refute(plan, made)
    if counterexample is not None:
        raise ProofError(f"{plan.source} -> {plan.target}: {counterexample}", counterexample)
    parts = list(_parts(plan, prove))
    claims = tuple(claim for _, _, more in parts for claim in more)
    right = ProofPart(
        "every device ends with the elements that the target demands",
        tuple(f"step {number}, {plan.steps[number - 1].kind}: {why}" for number, why, _ in parts)
        or ("there is nothing to do",),
        claims,
    )
    bounded = ProofPart(f"at most {plan.peak_bytes} bytes live on a device", ("counted while the marks moved",))
    return Proof(plan, Form({}, {}, {}, {}), right, bounded, _minimal(plan))


def _parts(plan: Plan, prove: Callable[[Plan], Proof]) -> Iterator[tuple[int, str, tuple[Query, ...]]]:
    """Each step's number, why it is right, and the claims that were decided for the stretch that it ends."""
    stretch: list[Step] = []
    for number, step in enumerate(plan.steps, 1):
        if step.kind in VIEW_RULES:
            stretch = []
            yield number, _BOXES if step.kind == "view_exchange" else _LOCAL, ()
            continue
        stretch.append(step)
        ends = number == len(plan.steps) or plan.steps[number].kind in VIEW_RULES
        why, claims = _stretch(stretch, prove) if ends else ("", ())
        yield number, why or "proved with the steps that follow it", claims


def _stretch(steps: list[Step], prove: Callable[[Plan], Proof]) -> tuple[str, tuple[Query, ...]]:
    """Why neighbouring ordinary steps are right: they are a plan of their own."""
    specs = [StepSpec(step.kind, step.result, step.mode) for step in steps]
    try:
        proof = prove(chain(steps[0].operand, steps[-1].result, specs, donate=True))
    except UndecidedError:
        return _BOXES, ()
    sizes = f"all {', '.join(sorted(proof.form.sizes))} >= 1" if proof.form.sizes else "these sizes"
    form = f"{proof.form.spell(steps[0].operand)} -> {proof.form.spell(steps[-1].result)}"
    return f"proved for {sizes} of {form}", proof.claims


def _minimal(plan: Plan) -> ProofPart:
    """The bytes received against what the neediest device lacks, counted element by element."""
    if not plan.source.partial_as(plan.target):
        return ProofPart("not shown: the bound of a sum through a view", (), holds=False)
    lacked = _lacked(plan)
    narrow = min((plan.source, plan.target), key=lambda layout: layout.nbytes(8))
    least = narrow.nbytes(lacked)
    argument = (f"the neediest device lacks {lacked} elements of its target tile, {least} bytes",)
    if plan.received_bytes <= least:
        few = f"as few as in any {plans_meant(plan)}"
        return ProofPart(f"the worst device receives {plan.received_bytes} bytes, {few}", argument)
    statement = f"not shown: the worst device receives {plan.received_bytes} bytes, and the bound is {least}"
    return ProofPart(statement, argument, holds=False)


def _lacked(plan: Plan) -> int:
    """The most elements that a device needs and does not hold: the source's indices, seen through the view."""
    index = np.full(plan.target.shape, -1, np.int64).reshape(-1)
    src, dst = oracle.index_pairs(plan.view or View.identity(plan.source.shape))
    index[dst] = src
    whole = np.arange(int(np.prod(plan.source.shape)), dtype=np.int64).reshape(plan.source.shape)
    held, wanted = _cut(plan.source, whole), _cut(plan.target, index.reshape(plan.target.shape))
    needs = (wanted[device][wanted[device] >= 0] for device in plan.target.mesh.devices)
    each = zip(plan.target.mesh.devices, needs, strict=True)
    none = np.empty(0, np.int64)
    return max(int(np.isin(need, held.get(device, none), invert=True).sum()) for device, need in each)


def _cut(layout: Layout, array: np.ndarray) -> dict[int, np.ndarray]:
    arrays = dict.fromkeys(oracle.summands(layout), array)
    return oracle.cut_tiles(layout, arrays, lambda: np.full(layout.tile_shape, -1, np.int64))
