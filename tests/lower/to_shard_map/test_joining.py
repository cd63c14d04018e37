"""Exchanges whose messages are joined at the end: the order of every device, and what has no such order."""

from __future__ import annotations

import pytest

import reshard as rs
from reshard.lower import lower_plan
from reshard.lower.program import Exchange
from reshard.lower.to_shard_map import exchange as joining
from reshard.plans.plan import StepSpec, chain
from reshard.plans.rules.cost import StepMode
from reshard.types import Layout, Mesh
from tests.lower.to_shard_map.on_xla import check_on_xla


def exchange(mesh: Mesh, source: str, target: str, chunk: int | None = None) -> tuple[Exchange, rs.Plan]:
    before, after = Layout.parse(source, mesh), Layout.parse(target, mesh)
    plan = chain(before, after, [StepSpec("exchange", after, StepMode(chunk))])
    (step,) = lower_plan(plan).instructions
    assert isinstance(step, Exchange)
    return step, plan


def test_the_order_of_a_transposition():
    """In turn k a device receives from the k-th device after it: device 1 has rows of 0 (turn 2), 1 and 2."""
    step, _ = exchange(Mesh(x=3), "f32[{x}2, 6]", "f32[6, {x}2]")
    assert joining.find_message_orders(step) == {0: (0, 1, 2), 1: (2, 0, 1), 2: (1, 2, 0)}
    assert joining.count_boxes(step) == (3, 1)


@pytest.mark.parametrize(
    ("mesh", "source", "target"),
    [
        (Mesh(x=3), "f32[{x}2, 6]", "f32[6, {x}2]"),
        (Mesh(x=5), "f32[{x}3]", "f32[15]"),
        (Mesh(x=4, y=2), "f32[{x}{y}1, 16]", "f32[8, {y}{x}2]"),
        (Mesh(x=2, y=3), "f32[{x}3, {y}5]", "f32[6, 15]"),
        (Mesh(x=2, y=2), "f32[2{x}2, 3]", "f32[8, 3]"),
        (Mesh(x=4, y=2), "f32[{x}{y}2]", "f32[{y}{x}2]"),
    ],
)
def test_messages_in_order_are_the_target(mesh: Mesh, source: str, target: str):
    step, plan = exchange(mesh, source, target)
    assert joining.find_message_orders(step) is not None
    check_on_xla(plan)


@pytest.mark.parametrize(
    ("mesh", "source", "target", "chunk"),
    [
        (Mesh(x=3), "f32[{x}2, 6]", "f32[6, {x}2]", 2),  # messages in pieces
        (Mesh(x=4, y=2), "f32[{x}{y}2]", "f32[{y}{x}2]", 1),  # in pieces that would tile the result
        (Mesh(x=3), "f32[{x}4/10]", "f32[10]", None),  # the last piece is shorter
        (Mesh(x=2, y=3), "f32[{x}6, 7]", "f32[{y}4, 7]", None),  # boxes of several shapes
        (Mesh(x=17), "f32[{x}1, 17]", "f32[17, {x}1]", None),  # 17 orders: more branches than allowed
    ],
)
def test_no_order(mesh: Mesh, source: str, target: str, chunk: int | None):
    step, _ = exchange(mesh, source, target, chunk)
    assert joining.find_message_orders(step) is None
