"""The rule of view_exchange: bytes, rounds and scratch are those of its messages."""

import pytest

import reshard as rs
from reshard.errors import StepError
from reshard.geometry.view_messages import view_stats
from reshard.plans.rules.collectives import check_step
from reshard.plans.rules.cost import StepMode
from reshard.types.view import Atom, View

MESH = rs.Mesh(x=2, y=2)
TURN = View((Atom("a", 3), Atom("b", 4)), ((0, 1),), ((1, 0),))


def test_costs():
    both = [rs.Layout.parse(text, MESH) for text in ("f32[{x}{y}3]", "f32[{y}{x}3]")]
    stats = view_stats(*both, TURN)
    cost = check_step("view_exchange", *both, StepMode(view=TURN))
    assert cost == (4 * stats.received, stats.rounds, 8 * stats.message if stats.staged else 0)
    assert stats.received > 0


def test_a_sum_stays_a_sum_on_one_mesh():
    both = [rs.Layout.parse(text, MESH) for text in ("f32[{x}6] + sum{y}", "f32[{x}6] + sum{y}")]
    assert check_step("view_exchange", *both, StepMode(view=TURN)).received == 8
    other = rs.Layout.parse("f32[{y}6] + sum{x}", MESH)
    with pytest.raises(StepError):
        check_step("view_exchange", both[0], other, StepMode(view=TURN))
