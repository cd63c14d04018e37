"""Steps written as text, with their cost or refusal; and random steps that a rule derives."""

from __future__ import annotations

import random

from reshard.errors import StepError
from reshard.plans.plan import Plan, StepSpec, chain
from reshard.plans.rules.collectives import check_step
from reshard.plans.rules.step_mode import PLAIN, Cost, StepMode
from reshard.types.layout import Layout
from reshard.types.mesh import Mesh
from tests.layouts import random_pair

MESH = Mesh(x=4, y=2)


def cost(kind: str, operand: str, result: str, mode: StepMode = PLAIN, mesh: Mesh = MESH) -> Cost:
    return check_step(kind, Layout.parse(operand, mesh), Layout.parse(result, mesh), mode)


def derived(kind: str, seed: int = 0, count: int = 40) -> list[tuple[Layout, Layout]]:
    """Random pairs of different layouts that the rule of a kind derives, uneven ones and partial ones too."""
    choose = random.Random(seed)
    pairs: list[tuple[Layout, Layout]] = []
    while len(pairs) < count:
        operand, result = random_pair(choose, "float32", partial=bool(choose.randint(0, 1)), most_rank=2)
        if operand != result:
            try:
                check_step(kind, operand, result)
            except StepError:
                continue
            pairs.append((operand, result))
    return pairs


def one_step(kind: str, operand: Layout, result: Layout, mode: StepMode = PLAIN) -> Plan:
    return chain(operand, result, [StepSpec(kind, result, mode)])
