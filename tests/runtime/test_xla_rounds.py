"""Plans for CPUs: which all-to-alls become rounds, and which stay."""

from __future__ import annotations

import pytest

import reshard as rs
from reshard.plans.plan import Plan
from reshard.runtime import xla_parts
from reshard.types import Layout, Mesh
from tests.oracle import check

M42 = Mesh(x=4, y=2)


def planned(source: str, target: str, mesh: Mesh = M42) -> Plan:
    return rs.plan(Layout.parse(source, mesh), Layout.parse(target, mesh))


@pytest.mark.parametrize(
    ("source", "target", "kinds"),
    [
        ("f32[{y}4, 8]", "f32[8, {y}4]", ["exchange"]),
        ("f32[{x}4, {y}8]", "f32[{x}{y}2, 16]", ["exchange"]),
        ("f32[{x}2, 16]", "f32[8, {y}{x}2]", ["slice", "exchange"]),
        ("f32[{y}{x}2, 16]", "f32[16, {y}8]", ["exchange", "all_gather"]),
        ("f32[{x}{y}2, 16]", "f32[{y}8, 16]", ["permute", "all_gather"]),
        ("f32[{y}4, 7]", "f32[8, {y}4/7]", ["all_to_all"]),  # padded: messages differ
        ("f32[{y}2, 8, {x}2]", "f32[4, {x}{y}1, 8]", ["all_to_all"]),  # joined along two dims: two copies
    ],
)
def test_all_to_alls_become_rounds(source: str, target: str, kinds: list[str]):
    plan = planned(source, target)
    rounds = xla_parts.in_rounds(plan, least=0)
    assert [step.kind for step in rounds.steps] == kinds
    assert rounds.received_bytes == plan.received_bytes and rounds.peak_bytes <= plan.peak_bytes
    check(rounds)


def test_small_messages_and_many_rounds_stay_an_all_to_all():
    plan = planned("f32[{x}4, 16]", "f32[16, {x}4]")
    message = 4 * 4 * 4
    assert [step.kind for step in xla_parts.in_rounds(plan, message).steps] == ["exchange"]
    assert xla_parts.in_rounds(plan, message + 1) is plan and xla_parts.in_rounds(plan) is plan
    five = planned("f32[{x}4, 20]", "f32[20, {x}4]", Mesh(x=5))
    assert [step.kind for step in xla_parts.in_rounds(five, message // 2).steps] == ["exchange"]
    assert xla_parts.in_rounds(five, message) is five
    for size, kind in ((16, "exchange"), (17, "all_to_all")):
        wide = planned(f"f32[{{x}}1, {size}]", f"f32[{size}, {{x}}1]", Mesh(x=size))
        assert [step.kind for step in xla_parts.in_rounds(wide, least=0).steps] == [kind]
