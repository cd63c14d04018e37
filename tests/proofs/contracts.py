"""Contracts of single steps, as the prover makes them of a plan."""

from __future__ import annotations

from reshard.plans.plan import Plan, Step, StepSpec, chain
from reshard.proofs.symbolic.contract import StepContract
from reshard.proofs.symbolic.form import form_of, step_digits
from reshard.types import Layout, Mesh


def one_step(kind: str, source: str, target: str, mesh: Mesh, **mode: object) -> Plan:
    """A plan of one step; `mode` may have a chunk, or be in place."""
    ends = Layout.parse(source, mesh), Layout.parse(target, mesh)
    step = Step(kind, *ends)
    return chain(*ends, [StepSpec(kind, ends[1], step.mode._replace(**mode))], donate=True)


def contract_of(operand: Layout, result: Layout) -> StepContract:
    """The contract of a step between two layouts, with every size that can vary named."""
    form = form_of([operand, result], (), ())
    tiles = operand.tile_shape, result.tile_shape
    return StepContract("step 1", operand, result, step_digits(operand, result, form), tiles, frozenset(form.names))
