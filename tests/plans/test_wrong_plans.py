"""Wrong steps and plans near right ones: the constructors of `Step` and `Plan` must refuse each."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations

import pytest

from reshard.errors import ReshardError
from reshard.plans.plan import Plan, Step
from reshard.plans.rules.collectives import RULES
from reshard.types import Layout
from tests.program_faults import plans, replaced


def test_a_step_of_another_kind_is_refused():
    """An exchange may replace any other step, since it can make any move; no other kind can."""
    for plan in plans():
        for step in (s for s in plan.steps if s.kind != "exchange"):
            for kind in set(RULES) - {step.kind, "exchange"}:
                with pytest.raises(ReshardError):
                    Step(kind, step.operand, step.result)


def test_a_plan_for_another_target_is_refused():
    """The steps of every plan, with each other target of the same mesh."""
    refused = 0
    for plan in plans():
        for other in plans():
            if other.target != plan.target and other.target.mesh == plan.target.mesh:
                with pytest.raises(ReshardError):
                    Plan(plan.source, other.target, plan.steps, plan.donate)
                refused += 1
    assert refused > 20


def test_a_step_whose_result_is_wrong_is_refused():
    """Each result with two holders or two dims swapped, or with a summand too many or too few."""
    refused = 0
    for plan in plans():
        for at, step in enumerate(plan.steps):
            for text in near(str(step.result)):
                try:
                    result = Layout.parse(text, step.result.mesh)
                except ReshardError:
                    continue
                if result == step.result or result.shape != step.result.shape:
                    continue
                with pytest.raises(ReshardError):
                    wrong = Step(step.kind, step.operand, result, step.mode, step.retained_bytes)
                    Plan(plan.source, plan.target, replaced(plan.steps, at, wrong), plan.donate)
                refused += 1
    assert refused > 20


def near(text: str) -> Iterator[str]:
    """Texts of layouts that are close to the given one."""
    for a, b in combinations("xyz", 2):
        yield text.replace(f"{{{a}}}", "{?}").replace(f"{{{b}}}", f"{{{a}}}").replace("{?}", f"{{{b}}}")
    body = text[text.index("[") + 1 : text.index("]")]
    dims = body.split(", ")
    for i, j in combinations(range(len(dims)), 2):
        swapped = list(dims)
        swapped[i], swapped[j] = swapped[j], swapped[i]
        yield text.replace(body, ", ".join(swapped))
    for op in ("sum", "max"):
        yield f"{text} + {op}{{x}}"
        yield f"{text} + {op}{{y}}"
    yield text.split(" + ")[0]
