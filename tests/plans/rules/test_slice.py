"""`slice`: free where every device holds its share already, refused elsewhere."""

from __future__ import annotations

import random

import pytest

from reshard.errors import StepError
from reshard.geometry.refine import refine
from reshard.plans.rules.collectives import check_step
from reshard.plans.rules.step_mode import FREE, Cost
from tests.geometry.brute import elements
from tests.layouts import random_pair
from tests.oracle import check
from tests.plans.rules.steps import cost, derived, one_step, refuses


@pytest.mark.parametrize(
    ("operand", "result"),
    [
        ("f32[16]", "f32[{x}4]"),
        ("f32[{y}8]", "f32[{y}{x}2]"),
        ("f32[16, 4]", "f32[{x}4, {y}2]"),
        ("f32[16]", "f32[4{x}]"),
        ("f32[16]", "f32[2{x:(1)2}4]"),
        ("f32[8] + sum{x}", "f32[{y}4] + sum{x}"),
        ("f32[10]", "f32[{x}3/10]"),
        ("f32[0]", "f32[0]"),
    ],
)
def test_slice_is_free(operand: str, result: str):
    assert cost("slice", operand, result) == FREE == Cost(0, 0, 0)


@pytest.mark.parametrize(
    ("kind", "operand", "result", "why"),
    [
        ("slice", "f32[{x}4]", "f32[16]", "only local digits may change"),
        ("slice", "f32[{x}4, 16]", "f32[16, {x}4]", "only local digits may change"),
        ("slice", "f32[{x}{y}2]", "f32[{y}{x}2]", "only to sub-axes not in use"),
        ("slice", "f32[16] + sum{x}", "f32[{x}4]", "partial sub-axes must stay"),
    ],
)
def test_refusals(kind: str, operand: str, result: str, why: str):
    refuses(kind, operand, result, why)


def test_a_slice_is_what_every_device_has():
    for operand, result in derived("slice"):
        for device in operand.mesh.devices:
            assert elements(result, device) <= elements(operand, device)
        check(one_step("slice", operand, result))


def test_even_pairs_whose_devices_have_all_they_need_are_slices():
    choose, slices = random.Random(5), 0
    for _ in range(600):
        operand, result = random_pair(choose, most_rank=2)
        if not (operand.even and result.even) or operand.mesh != result.mesh:
            continue
        has_all = all(elements(result, d) <= elements(operand, d) for d in operand.mesh.devices)
        try:
            cost = check_step("slice", operand, result)
        except StepError:
            assert not has_all or refine(operand, result) is None, f"{operand} -> {result}"
        else:
            assert has_all and cost == FREE
            slices += operand != result
    assert slices > 10
