"""`permute`: the same tiles on other devices, and refusals."""

from __future__ import annotations

import random

import pytest

from reshard.errors import StepError
from reshard.plans.rules.bounds import lower_bound
from reshard.plans.rules.collectives import check_step
from reshard.plans.rules.step_mode import Cost
from reshard.types.layout import Layout
from reshard.types.meaning import meaning
from reshard.types.mesh import Mesh
from tests.layouts import random_pair
from tests.oracle import check
from tests.plans.rules.steps import cost, derived, one_step, refuses


@pytest.mark.parametrize(
    ("operand", "result", "expected"),
    [
        ("f32[{x}{y}2]", "f32[{y}{x}2]", Cost(8, 1, 0)),
        ("f32[{x:(1)2}8]", "f32[{y}8]", Cost(32, 1, 0)),
        ("f32[2{x:(1)2}3, 5]", "f32[2{x:(2)2}3, 5]", Cost(120, 1, 0)),
        ("f32[{y}8] + sum{x:(1)2}", "f32[{x:(2)2}8] + sum{x:(1)2}", Cost(32, 1, 0)),
    ],
)
def test_permute(operand: str, result: str, expected: Cost):
    assert cost("permute", operand, result) == expected


def test_permute_to_another_order_of_devices():
    a, b = Mesh(x=4), Mesh({"x": 4}, device_ids=[3, 1, 2, 0])
    assert check_step("permute", Layout.parse("f32[{x}2]", a), Layout.parse("f32[{x}2]", b)) == Cost(8, 1, 0)


@pytest.mark.parametrize(
    ("kind", "operand", "result", "why"),
    [
        ("permute", "f32[{x}4]", "f32[{y}8]", "the tiles must be the same ones"),
        ("permute", "f32[{y}8]", "f32[8{y}]", "the tiles must be the same ones"),
        ("permute", "f32[{y}8] + sum{x:(1)2}", "f32[{y}8] + sum{x:(2)2}", "the tiles must be the same ones"),
    ],
)
def test_refusals(kind: str, operand: str, result: str, why: str):
    refuses(kind, operand, result, why)


def test_a_permute_gives_every_device_another_one_s_tile():
    pairs = [pair for pair in derived("permute", count=80) if lower_bound(*pair)]
    assert len(pairs) > 10
    for operand, result in pairs:
        check(one_step("permute", operand, result))


def test_pairs_with_the_same_tiles_are_permutes_and_no_others():
    choose, permuted = random.Random(3), 0
    for _ in range(600):
        operand, result = random_pair(choose, most_rank=2)
        before, after = ({meaning(lay, device) for device in lay.mesh.devices} for lay in (operand, result))
        try:
            cost = check_step("permute", operand, result)
        except StepError:
            assert before != after, f"{operand} -> {result}"
        else:
            assert before == after, f"{operand} -> {result}"
            assert cost == (operand.tile_bytes, 1, 0)
            permuted += operand != result
    assert permuted > 10
