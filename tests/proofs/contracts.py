"""Contracts of single steps, as the prover makes them of a plan."""

from __future__ import annotations

import random

import reshard as rs
from reshard.plans.plan import Plan, Step, StepSpec, chain
from reshard.proofs.symbolic import formula_of_step
from reshard.proofs.symbolic.contract import StepContract
from reshard.proofs.symbolic.form import form_of, step_digits
from reshard.types import Layout, Mesh
from tests.layouts import random_pair


def one_step(kind: str, source: str, target: str, mesh: Mesh, **mode: object) -> Plan:
    """A plan of one step; `mode` may have a chunk, or be in place."""
    ends = Layout.parse(source, mesh), Layout.parse(target, mesh)
    step = Step(kind, *ends)
    return chain(*ends, [StepSpec(kind, ends[1], step.mode._replace(**mode))], donate=True)


def formula_plans(count: int) -> list[Plan]:
    """Plans of random pairs with an even exchange or a permute, which have formulas."""
    choose, some = random.Random(3), list[Plan]()
    while len(some) < count:
        plan = rs.plan(*random_pair(choose, "float32"))
        if any(formula_of_step(step) for step in plan.steps):
            some.append(plan)
    return some


def contract_of(operand: Layout, result: Layout) -> StepContract:
    """The contract of a step between two layouts, with every size that can vary named."""
    form = form_of([operand, result], (), ())
    tiles = operand.tile_shape, result.tile_shape
    return StepContract("step 1", operand, result, step_digits(operand, result, form), tiles, frozenset(form.names))
