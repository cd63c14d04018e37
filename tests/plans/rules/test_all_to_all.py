"""`all_to_all`: costs by hand, and refusals."""

from __future__ import annotations

import pytest

from reshard.plans.rules.collectives import check_step
from reshard.plans.rules.step_mode import Cost
from tests.geometry.brute import elements
from tests.oracle import check
from tests.plans.rules.steps import cost, derived, one_step, refuses


@pytest.mark.parametrize(
    ("operand", "result", "expected"),
    [
        # A tile of 4 x 16: 3/4 of 256 B arrive. Blocks of columns are packed, rows arrive in place.
        ("f32[{x}4, 16]", "f32[16, {x}4]", Cost(192, 1, 256)),
        # The way back: rows leave in place, blocks of columns are unpacked.
        ("f32[16, {x}4]", "f32[{x}4, 16]", Cost(192, 1, 256)),
        # Packed and unpacked; the packed operand is freed before the result is made.
        ("f32[2, {x}4, 16]", "f32[2, 16, {x}4]", Cost(384, 1, 512)),
        # Neither packed nor unpacked: the digit moves one place down.
        ("f32[{x}4]", "f32[4{x}]", Cost(12, 1, 0)),
        # Two sub-axes in one step: 7/8 of 128 B.
        ("f32[{x}2, {y}2, 8]", "f32[8, 4, {x}{y}]", Cost(112, 1, 128)),
        ("f32[{x}4, 16] + sum{y}", "f32[16, {x}4] + sum{y}", Cost(192, 1, 256)),
    ],
)
def test_all_to_all(operand: str, result: str, expected: Cost):
    assert cost("all_to_all", operand, result) == expected


@pytest.mark.parametrize(
    ("kind", "operand", "result", "why"),
    [
        ("all_to_all", "f32[{x}4, 16]", "f32[16, {y}8]", "must be those that take local ones"),
        ("all_to_all", "f32[{x}4, 16]", "f32[16, 16]", "must be those that take local ones"),
        ("all_to_all", "f32[16, 16]", "f32[{x}4, 16]", "must be those that take local ones"),
        ("all_to_all", "f32[{x}4, {y}8]", "f32[{y}8, {x}4]", "must be those that take local ones"),
        ("all_to_all", "f32[{x}4, 16] + sum{y}", "f32[16, {x}4]", "partial sub-axes must stay"),
    ],
)
def test_refusals(kind: str, operand: str, result: str, why: str):
    refuses(kind, operand, result, why)


def test_each_device_keeps_one_block_and_receives_the_others():
    even = 0
    for operand, result in derived("all_to_all"):
        check(one_step("all_to_all", operand, result))
        if operand.even and result.even and not operand.partial and operand.tile_bytes:
            even += 1
            missing = [elements(result, d) - elements(operand, d) for d in operand.mesh.devices]
            assert {4 * len(lacked) for lacked in missing} == {check_step("all_to_all", operand, result).received}
    assert even > 5


@pytest.mark.parametrize(
    ("operand", "result", "scratch"),
    [
        # Tiles of 256 B. Neither packed nor unpacked, packed, unpacked, both.
        ("f32[{x}4, 16]", "f32[4{x}, 16]", 0),
        ("f32[{x}4, 16]", "f32[16, {x}4]", 256),
        ("f32[16, {x}4]", "f32[{x}4, 16]", 256),
        ("f32[2, {x}4, 8]", "f32[2, 16, {x}2]", 256),
        # Rows 0-11 in pieces of 3, of which 10 are true: 48 B packed and 48 B unpacked, less the result's 40 B, which
        # is made once the packed copy is freed.
        ("f32[{x}3/10, 4]", "f32[10, {x}]", 48 + 48 - 40),
    ],
)
def test_scratch_by_hand(operand: str, result: str, scratch: int):
    assert cost("all_to_all", operand, result).scratch == scratch
