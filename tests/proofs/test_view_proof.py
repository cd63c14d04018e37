"""Plans with views proved, and wrong programs of them refuted."""

from dataclasses import replace

import pytest

import reshard as rs
from reshard.errors import PlanError, ProofError, UndecidedError
from reshard.lower import lower_plan
from reshard.lower.exchange_rounds import Exchange
from reshard.lower.program import Reorder, TakePart
from reshard.plans.rules.view_steps import TileOrder

pytest.importorskip("z3", reason="proofs need reshard[prove]")

MESH = rs.Mesh(x=4, y=2)


def plan(source: str, target: str, **options) -> rs.Plan:
    return rs.plan(rs.Move(*(rs.Layout.parse(text, MESH) for text in (source, target)), **options))


TURN = plan("f32[2, 3{x}8, 5]", "f32[3, 2, 8, {x}, 5]", view="l (t h d) m -> t l h d m", t=3, h=8)
TAKE = plan("f32[3{x}2, 5]", "f32[{y}4, 5]", view="(t h) d -> h d", take={"t": 1}, t=3)
BOXES = plan("f32[{x}6]", "f32[{x}2]", view="(t h) -> h", take={"t": 1}, t=3)
PLANS = {
    "turn": TURN,
    "take": TAKE,
    "boxes": BOXES,
    "put": plan("f32[{y}4, 5]", "f32[3{x}2, 5]", view="h d -> (t h) d", into={"t": 1}, t=3),
    "cast": plan("f32[{x}6, 5]", "bf16[24, 5]", cast=True),
    "sum": plan("f32[8, 6] + sum{x}", "f32[2, {x}, 6]", view="(a b) c -> a b c", a=2),
}


@pytest.mark.parametrize("name", PLANS)
def test_proofs(name):
    proof = rs.prove(PLANS[name])
    assert proof.right.holds and proof.minimal.holds == (name != "sum") and proof.bounded.holds
    assert len(proof.right.argument) == len(PLANS[name].steps)
    assert str(proof) and proof.to_smt2() is not None


def test_ordinary_steps_are_proved_for_all_sizes():
    argument = rs.prove(TURN).right.argument
    assert (
        argument[1] == "step 2, all_to_all: proved for all n0, n1, n2, n4 >= 1 of [n0, n1, {x}n2, 4, n4] -> "
        "[n0, n1, 4 n2, {x}, n4]"
    )


def with_step(made: rs.Plan, at: int, step: object):
    program = lower_plan(made)
    return replace(program, instructions=(*program.instructions[:at], step, *program.instructions[at + 1 :]))


def test_wrong_programs_are_refuted():
    at, order = next(
        (n, i.order)
        for n, i in enumerate(lower_plan(TURN).instructions)
        if isinstance(i, Reorder) and not i.order.aliases
    )
    wrong = Reorder(TileOrder(order.digits, tuple(range(len(order.digits)))))
    with pytest.raises(ProofError, match="must hold element"):
        rs.prove(TURN, with_step(TURN, at, wrong))
    with pytest.raises(ProofError, match="must hold element"):
        rs.prove(TAKE, with_step(TAKE, 1, TakePart(((2, 1), (0, 2), (0, 5)))))
    exchange = lower_plan(BOXES).instructions[0]
    assert isinstance(exchange, Exchange)
    with pytest.raises(ProofError):
        rs.prove(BOXES, with_step(BOXES, 0, replace(exchange, rounds=exchange.rounds[1:])))


def test_what_is_not_proved_is_said():
    with pytest.raises(UndecidedError, match="too many"):
        rs.prove(plan("f32[{x}4096, 4096]", "f32[4096, {x}4096]", view="a b -> b a"))
    with pytest.raises(PlanError, match="knows no views"):
        rs.prove(TURN, launches=True)
