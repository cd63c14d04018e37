"""Wrong programs of all kinds are refused, and right ones proved: a sample of `benchmarks/fuzz_programs.py`.

By hand, what no run on one machine shows: dtypes, rounds, receivers, copies, buffers, and what the arrays of a batch
do together.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

import reshard as rs
from benchmarks import fuzz_programs
from benchmarks.fuzz_faults import mutated_program, program_changes
from reshard.errors import ProofError, UndecidedError
from reshard.geometry.blocks import Axis, Block
from reshard.lower import Program, lower_plan
from reshard.lower.program import join_launches, lower_batch
from reshard.plans.plan import StepSpec, chain
from reshard.plans.rules.step_mode import StepMode
from reshard.proofs import plan_proof

MESH, CUBE, THREE = rs.Mesh(x=4, y=2), rs.Mesh(x=2, y=2, z=2), rs.Mesh(x=3)


def moved(source: str, target: str, mesh: rs.Mesh = MESH, to: rs.Mesh | None = None, **options: Any) -> rs.Plan:
    ends = rs.Layout.parse(source, mesh), rs.Layout.parse(target, to or mesh)
    return rs.plan(rs.Move(*ends, **options)) if options else rs.plan(*ends)


def one_step(kind: str, source: str, target: str, mesh: rs.Mesh, to: rs.Mesh | None = None, **mode: Any) -> rs.Plan:
    ends = rs.Layout.parse(source, mesh), rs.Layout.parse(target, to or mesh)
    return chain(*ends, [StepSpec(kind, ends[1], StepMode(**mode))], donate=True)


PLANS = {
    "gather": moved("f32[{x}{y}2, 3]", "f32[16, 3]"),
    "even exchange": one_step("exchange", "f32[{x}4, 12]", "f32[12, {x}4]", THREE),
    "uneven exchange": moved("f32[{x}3/10, 4]", "f32[10, {x}]"),
    "several blocks": moved("f32[3{x}5/27]", "f32[5{x}3/27]", rs.Mesh(x=2)),
    "a cycle and a move": moved("f32[{x}{y}2, {z}4]", "f32[{z}4, 2{x}2]", CUBE),
    "in place": one_step("exchange", "f32[{x}4, 12]", "f32[12, {x}4]", THREE, in_place=True),
    "in place, in pieces": one_step("exchange", "f32[{x}4, 12]", "f32[12, {x}4]", THREE, in_place=True, chunk=3),
    "in parts": one_step("exchange", "f32[{x}4, 12, 2]", "f32[12, {x}4, 2]", THREE, parts=2),
    "in parts, uneven": one_step("exchange", "s32[18, 6, 6]", "s32[18, 1{x}6/6, {y}2]", rs.Mesh(x=2, y=3), parts=2),
    "all to all": moved("f32[{x}4, 12]", "f32[12, {x}4]", THREE),
    "reduce": moved("f32[12, 2] + sum{x}", "f32[{x}4, 2]", THREE),
    "permute": moved("f32[{x}{y}2]", "f32[{y}{x}2]"),
    "other devices": moved("f32[{x}6]", "f32[{a}4]", rs.Mesh(x=2), rs.Mesh({"a": 3}, device_ids=[4, 5, 6])),
    "relay": one_step(
        "exchange", "f32[{x}6]", "f32[12]", rs.Mesh(x=2), rs.Mesh({"a": 3}, device_ids=[4, 5, 6]), relay=True
    ),
    "wider": moved("f32[{x}6, 5]", "f64[24, 5]", cast=True),
    "narrower": moved("f32[{x}6, 5]", "bf16[24, 5]", cast=True),
    "wider after a move": moved("int8[24, 5]", "int32[{x}6, 5]", cast=True),
    "view and cast": moved("f32[{x}6, 4]", "f64[2, 12, {x}]", view="(a b) c -> a b c", a=2, cast=True),
    "view exchange without a buffer": moved("s64[96, {y}/1]", "s64[96]", view="a b -> (a b)"),
    "view exchange": moved("f32[{x}6]", "f32[{x}2]", view="(t h) -> h", take={"t": 1}, t=3),
}


# ---- a sample of all kinds and operators -----------------------------------------------------------


@pytest.fixture(scope="module")
def sampled() -> tuple[list[str], fuzz_programs.Table]:
    """What is amiss among some programs of every kind, and the table of what they were."""
    table: fuzz_programs.Table = {}
    return list(fuzz_programs.fuzz_programs(1, 0, len(fuzz_programs.KINDS) + 1, table, each=EACH)), table


EACH = 12


def test_no_wrong_program_is_proved_and_no_right_one_is_refused(sampled: tuple[list[str], fuzz_programs.Table]):
    amiss, table = sampled
    assert not amiss, "\n".join(amiss)
    assert {kind for kind, _ in table} == {*fuzz_programs.KINDS, fuzz_programs.TREES}
    assert sum(tally.wrong for tally in table.values()) > 90
    assert sum(tally.right for tally in table.values()) > 20
    assert len({operator for _, operator in table}) > 100


def test_what_is_proved_wrongly_is_found(monkeypatch: pytest.MonkeyPatch):
    """A prover without an objection is found by every kind; one that always has one, by the right programs."""
    monkeypatch.setattr(rs, "prove", lambda *given: None)
    kinds = len(fuzz_programs.KINDS) + 1
    for number in (0, kinds - 1):
        amiss = list(fuzz_programs.fuzz_programs(1, number, 1, {}, each=6))
        assert amiss and all("a wrong program is proved" in line for line in amiss)

    def refuse(*given: object) -> None:
        raise UndecidedError("too hard")

    monkeypatch.setattr(rs, "prove", refuse)
    assert "a right program is refused" in next(fuzz_programs.fuzz_programs(1, 0, 1, {}, each=0))


# ---- by hand ---------------------------------------------------------------------------------------


def wrong_program(plan: rs.Plan, operator: str) -> Program:
    """The first program that an operator makes of a plan's."""
    program = lower_plan(plan)
    for seed in range(200):
        change = program_changes(random.Random(seed), program).get(operator)
        made = None if change is None else change()
        if made is not None and made != program:
            return made
    raise AssertionError(f"{operator} finds nothing to change")


@pytest.mark.parametrize("name", PLANS)
def test_a_plan_is_proved_and_its_changed_programs_are_judged_alike(name: str):
    """What the prover takes is right by the judge, who has an oracle of his own."""
    plan = PLANS[name]
    program = lower_plan(plan)
    assert rs.prove(plan, program).right.holds
    choose = random.Random(name)
    for _ in range(4):
        made = mutated_program(choose, program)
        if made is not None and plan.view is None and fuzz_programs.find_fault(fuzz_programs.Subject(plan, SAME), made):
            with pytest.raises((ProofError, UndecidedError)):
                rs.prove(plan, made)


SAME: Callable[[Any, Any], Any] = lambda array, held: array  # noqa: E731


@pytest.mark.parametrize(
    ("name", "operator", "message"),
    [
        ("narrower", "a cast to another dtype", "leaves tiles of .*, the plan says bfloat16"),
        ("wider", "a cast to another dtype", "leaves tiles of .*, the plan says float64"),
        ("wider", "an instruction left out", "ends with tiles of float32, not float64"),
        ("in place", "two rounds at once, and an empty one", "in round [12], a device sends more than one message"),
        ("even exchange", "a message sent again in its round", "in round [12], a device sends more than one message"),
        ("view exchange", "a receiver twice", "a device is listed twice among the receivers"),
        ("even exchange", "a copy to another device", "a local copy goes to another device"),
        ("permute", "a message to another device too", "a device sends more than one message"),
        ("view exchange", "a view of a larger tile", "a view of another tile"),
        ("view exchange", "viewed otherwise", "another kind of exchange"),
        ("other devices", "a receiver added", "other devices|ends with a tile|does not run"),
        ("relay", "all rounds backwards", "before all have arrived|it is not|is there"),
    ],
)
def test_the_reason_is_said(name: str, operator: str, message: str):
    plan = PLANS[name]
    with pytest.raises((ProofError, UndecidedError), match=message):
        rs.prove(plan, wrong_program(plan, operator))


@pytest.mark.parametrize(
    "blocks",
    [
        (Block(0, 0, (Axis(48, 1, 1),)), Block(48, 48, (Axis(48, 1, 1),))),
        (Block(95, 95, (Axis(96, -1, -1),)),),
        (Block(0, 0, (Axis(2, 1, 1), Axis(48, 2, 2))),),
    ],
)
def test_a_message_through_a_view_that_needs_a_buffer_has_one(blocks: tuple[Block, ...]):
    """All of these bring each element to its place, and no runtime could send them straight from memory to memory."""
    plan = PLANS["view exchange without a buffer"]
    program = lower_plan(plan)
    (step,) = program.instructions
    turn = tuple(t._replace(blocks=blocks) for t in step.rounds[0])
    with pytest.raises(ProofError, match="not one run of memory at both ends"):
        rs.prove(plan, replace(program, instructions=(replace(step, rounds=(turn,)),)))


def test_a_block_whose_corners_leave_the_tile_does_not_run():
    """First and last element inside, others outside: memory that is not the tile's is neither read nor written."""
    plan = PLANS["several blocks"]
    program = lower_plan(plan)
    (step,) = program.instructions
    astray = Block(0, 0, (Axis(2, 1 << 20, 1), Axis(2, 1 - (1 << 20), 1)))
    first = step.rounds[0][0]._replace(blocks=(astray,))
    rounds = ((first, *step.rounds[0][1:]), *step.rounds[1:])
    with pytest.raises(ProofError, match="leaves a tile"):
        rs.prove(plan, replace(program, instructions=(replace(step, rounds=rounds),)))


def test_a_permute_in_place_of_a_sum_is_refused():
    plan = PLANS["reduce"]
    program, turn = lower_plan(plan), lower_plan(PLANS["permute"]).instructions[0]
    with pytest.raises((ProofError, UndecidedError)):
        rs.prove(plan, replace(program, instructions=(turn,)))


# ---- batches ---------------------------------------------------------------------------------------

TREE = rs.plan_tree(
    {
        "w": (rs.Layout.parse("f32[{x}4, 8]", rs.Mesh(x=4)), rs.Layout.parse("f32[16, 8]", rs.Mesh(x=4))),
        "b": (rs.Layout.parse("f32[{x}2]", rs.Mesh(x=4)), rs.Layout.parse("f32[8]", rs.Mesh(x=4))),
    }
)


def test_the_proof_of_a_tree_is_of_the_programs_that_run(monkeypatch: pytest.MonkeyPatch):
    """Another program of an array, fewer of them, or arrays that trade places."""
    assert len(TREE.batches) == 1 and rs.prove(TREE).of["b"].right.holds
    own = lower_batch(TREE.batches[0])
    gather = own[1].instructions[0]
    astray = replace(own[1], instructions=(replace(gather, groups=((1, 0, 2, 3),)),))
    both = [replace(one, instructions=(replace(one.instructions[0], groups=((1, 0, 2, 3),)),)) for one in own]
    for wrong in ((own[0], astray), tuple(both), own[:1], own[::-1]):
        monkeypatch.setattr(plan_proof, "lower_batch", lambda batch, wrong=wrong: wrong)
        with pytest.raises((ProofError, UndecidedError)):
            rs.prove(TREE)


def test_the_proof_of_a_tree_is_of_the_launches_that_run(monkeypatch: pytest.MonkeyPatch):
    """What the arrays of a batch do together is compared with what the program of each does."""
    (joint,) = join_launches(lower_batch(TREE.batches[0]))
    packed = joint.packed
    order = replace(packed, groups=((1, 0, 2, 3),))
    larger = replace(packed, send=replace(packed.send, tile=(35,), padded=(35,), digits=(35,)))
    wrong: dict[str, Any] = {
        "of other groups": replace(joint, packed=order),
        "by other views": replace(joint, receive=joint.receive[::-1]),
        "with other blocks": replace(joint, packed=larger),
        "one after another": None,
        "do not run together": (),
    }
    for message, other in wrong.items():
        steps = [other] if other != () else []
        monkeypatch.setattr(plan_proof, "join_launches", lambda programs, steps=steps: steps)
        with pytest.raises(UndecidedError, match=message):
            rs.prove(TREE)
