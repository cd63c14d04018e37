"""`reduce_scatter` and `all_reduce`: costs by hand, and refusals."""

from __future__ import annotations

from math import ceil

import pytest

from reshard.plans.rules.step_mode import Cost
from reshard.types.mesh import Mesh
from tests.oracle import check
from tests.plans.rules.steps import cost, derived, one_step, refuses


@pytest.mark.parametrize(
    ("operand", "result", "expected"),
    [
        ("f32[16] + sum{x}", "f32[{x}4]", Cost(48, 1, 0)),
        ("f32[4, 16] + sum{x}", "f32[4, {x}4]", Cost(192, 1, 256)),
        ("f32[16] + max{x}{y}", "f32[{x}{y}2]", Cost(56, 1, 0)),
        ("f32[16] + sum{x}{y}", "f32[{x}4] + sum{y}", Cost(48, 1, 0)),
        ("f32[{y}8] + product{x}", "f32[{y}{x}2]", Cost(24, 1, 0)),
    ],
)
def test_reduce_scatter(operand: str, result: str, expected: Cost):
    assert cost("reduce_scatter", operand, result) == expected


@pytest.mark.parametrize(
    ("operand", "result", "expected"),
    [
        ("f32[16] + sum{x}", "f32[16]", Cost(2 * 3 * 64 // 4, 1, 0)),
        ("f32[{x}4] + mean{y}", "f32[{x}4]", Cost(16, 1, 0)),
        ("f32[16] + sum{x}{y}", "f32[16] + sum{x}", Cost(64, 1, 0)),
        ("f32[3] + min{x}", "f32[3]", Cost(5 * 4, 1, 0)),  # 2 * 3/4 * 3 elements, rounded up
    ],
)
def test_all_reduce(operand: str, result: str, expected: Cost):
    assert cost("all_reduce", operand, result) == expected


@pytest.mark.parametrize(
    ("kind", "operand", "result", "why"),
    [
        ("reduce_scatter", "f32[16] + sum{x}", "f32[{y}8]", "must come to hold local digits"),
        ("reduce_scatter", "f32[16] + sum{x}", "f32[16]", "must come to hold local digits"),
        ("reduce_scatter", "f32[16]", "f32[{x}4]", "must come to hold local digits"),
        ("reduce_scatter", "f32[16] + sum{x}", "f32[{x}{y}2]", "must come to hold local digits"),
        ("reduce_scatter", "f32[{y}8] + sum{x}", "f32[{x}4]", "must come to hold local digits"),
        ("reduce_scatter", "f32[16] + sum{x}", "f32[{x:(1)2}8] + sum{y}", "must come to hold local digits"),
        ("all_reduce", "f32[16]", "f32[16]", "must become replicated"),
        ("all_reduce", "f32[16]", "f32[16] + sum{x}", "must become replicated"),
        ("all_reduce", "f32[16] + sum{x}", "f32[{x}4]", "must become replicated"),
        ("all_reduce", "f32[{y}8] + sum{x}", "f32[16]", "must become replicated"),
        ("all_reduce", "f32[16] + sum{x}", "f32[16] + sum{y}", "must become replicated"),
    ],
)
def test_refusals(kind: str, operand: str, result: str, why: str):
    refuses(kind, operand, result, why)


@pytest.mark.parametrize("kind", ["reduce_scatter", "all_reduce"])
def test_summands_are_combined_at_the_promised_cost(kind: str):
    for operand, result in derived(kind):
        check(one_step(kind, operand, result))


@pytest.mark.parametrize("f", [2, 3, 5, 7])
def test_prime_groups(f: int):
    """A reduce-scatter receives f - 1 blocks; an all-reduce the same again, its blocks being unequal here."""
    mesh = Mesh(x=f)
    assert cost("reduce_scatter", f"f32[{6 * f}] + sum{{x}}", "f32[{x}6]", mesh=mesh) == (4 * 6 * (f - 1), 1, 0)
    received = ceil(2 * (f - 1) / f * 11)
    assert cost("all_reduce", "f32[11] + sum{x}", "f32[11]", mesh=mesh) == (4 * received, 1, 0)
