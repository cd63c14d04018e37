"""What a proof says, and of what: text, trees, plans with views, and other sizes of a form."""

from __future__ import annotations

import random
from contextlib import suppress
from dataclasses import replace

import pytest

import reshard as rs
from reshard.errors import PlanError, ProofError, UndecidedError
from reshard.lower import lower_plan
from reshard.lower.exchange_rounds import Exchange
from reshard.lower.program import Reorder, TakePart
from reshard.plans.rules.view_steps import TileOrder
from reshard.proofs import Fewest, Proof, ProofPart, instance, prove
from reshard.proofs.plan_proof import resized
from reshard.proofs.proof import part_lines
from reshard.proofs.symbolic import Fewer
from reshard.types import Layout, Mesh
from tests.layouts import random_pair
from tests.oracle import check
from tests.trees import llama

pytest.importorskip("z3", reason="proofs need reshard[prove]")

MESH = Mesh(x=4, y=2)


def proof_of(source: str, target: str, mesh: Mesh = MESH, **options: object) -> Proof:
    return prove(rs.plan(Layout.parse(source, mesh), Layout.parse(target, mesh), **options))


def test_explain_reads_as_an_argument():
    text = proof_of("f32[{y}8, 16, {x}4]", "f32[16, {x}{y}2, 16]").explain()
    for line in (
        "for all n0, n1, n2 >= 1 (here n0 = 8, n1 = 2, n2 = 4)",
        "right: every device ends with the elements that the target demands",
        "bounded: at most 96 N bytes live on a device (6144 here)",
        "minimal: the worst device receives 28 N bytes, as few as in any plan",
    ):
        assert line in text
    assert max(map(len, text.splitlines())) <= 120


@pytest.mark.parametrize("width", [40, 60, 100])
def test_explain_keeps_its_width_and_its_words(width: int):
    """The first line, with the layouts, is never wrapped."""
    proof = proof_of("f32[{x}3/10, 8]", "f32[{y}5, 8]")
    text = proof.explain(width)
    assert all(len(line) <= width for line in text.splitlines()[1:])
    assert text.replace("- ", " ").split() == proof.explain().replace("- ", " ").split()
    assert str(proof) == proof.explain()


def test_sizes_that_do_not_vary_are_said():
    fixed = proof_of("f32[{x}3/10]", "f32[{y}5]").explain()
    assert "  for these sizes\n  dim 0 keeps its size: it is padded\n" in fixed


def test_smt2_is_rechecked_from_its_text():
    z3 = pytest.importorskip("z3")
    proof = proof_of("f32[{x}3/10, 4, {y}2]", "f32[10, {x}, {y}2]")
    texts = proof.to_smt2().split("(reset)\n")
    assert len(texts) == len(proof.claims) > 0
    for text in texts:
        solver = z3.Solver()
        solver.from_string(text)
        assert solver.check() == z3.unsat


def test_parts_and_claims_are_in_order():
    proof = proof_of("f32[{x}4, 16]", "f32[16, {x}4]", Mesh(x=4))
    assert [name for name, _ in proof.parts] == ["right", "bounded", "minimal"]
    assert proof.claims == (*proof.right.claims, *proof.bounded.claims)
    searched = Proof(proof.plan, proof.form, proof.right, proof.bounded, proof.minimal, Fewest("none", ()))
    assert [name for name, _ in searched.parts] == ["right", "bounded", "minimal", "launches"]


def test_a_part_is_its_statement_with_the_argument_and_the_claims_below():
    part = ProofPart("a statement of six words here", ("the first step", "the second step"), (Fewer("a claim", 1, 2),))
    assert part_lines("right", part, 24) == [
        "right: a statement of",
        "  six words here",
        "  - the first step",
        "  - the second step",
        "  - a claim: 1 N <= 2 N",
        "    for all N >= 1",
    ]


# ---- trees


def test_the_weights_of_a_model_are_proved():
    tree = rs.plan_tree(llama(MESH))
    proof = rs.prove(tree)
    assert len(proof.proofs) == len(set(tree.plans.values())) < len(tree.names)
    assert all(each.right.holds and each.minimal.holds for each in proof.of.values())
    assert proof.minimal
    first = str(proof).splitlines()[0]
    assert first.startswith(f"20 arrays, {len(proof.proofs)} different plans, all proved; 2 batches")


def test_a_tree_above_its_bound_says_so():
    ends = tuple(rs.Layout.parse(text, MESH) for text in ("f32[{x}3/10]", "f32[10]"))
    tree = rs.plan_tree({"a": ends})
    proof = rs.prove(tree)
    assert proof.minimal == (tree.received_bytes == tree.lower_bound_bytes)


def test_a_tree_has_no_program_of_its_own():
    ends = tuple(rs.Layout.parse(text, MESH) for text in ("f32[{x}4]", "f32[16]"))
    with pytest.raises(PlanError, match="a program for each batch"):
        rs.prove(rs.plan_tree({"a": ends}), lower_plan(rs.plan(*ends)))


# ---- views


def plan(source: str, target: str, **options) -> rs.Plan:
    return rs.plan(rs.Move(*(Layout.parse(text, MESH) for text in (source, target)), **options))


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


# ---- the same plan at other sizes of its form runs right, and within the figures of its proof


@pytest.mark.parametrize("sizes", [{"n7": 3}, {"n0": 0}, {(0, 4): 2}])
def test_sizes_that_the_form_does_not_have_are_refused(sizes: dict):
    plan = rs.plan(*(Layout.parse(text, Mesh(x=4)) for text in ("f32[{x}4, 16]", "f32[16, {x}4]")))
    with pytest.raises(PlanError, match="its names are n0, n1"):
        instance(plan, prove(plan).form, sizes)


def some_plans(seed: int, count: int) -> list[rs.Plan]:
    choose = random.Random(seed)
    plans = []
    while len(plans) < count:
        source, target = random_pair(choose, "float32", partial=len(plans) % 3 == 0)
        plan = rs.plan(source, target)
        if len(plans) % 4 == 1:
            with suppress(rs.errors.BudgetError):
                plan = rs.plan(source, target, budget=plan.floor_bytes + plan.peak_bytes // 10, donate=True)
        plans.append(plan)
    return plans


@pytest.mark.parametrize("seed", range(8))
def test_other_sizes_of_the_form_run_right_and_within_the_formula(seed: int):
    """A proof for all sizes is run at two others, against the meaning of the layouts."""
    choose = random.Random(seed)
    grown = 0
    for plan in some_plans(seed, 20):
        proof = prove(plan)
        if not proof.form.names:
            continue
        sizes = {name: choose.choice([2, 3, 5]) for name in proof.form.sizes}
        other = instance(plan, proof.form, sizes)
        check(other)
        more = 1
        for name in sizes:
            more *= sizes[name]
        assert other.peak_bytes * proof.form.unit <= plan.peak_bytes * more
        assert other.received_bytes * proof.form.unit <= plan.received_bytes * more
        assert (
            lower_plan(other).tile_shapes != lower_plan(plan).tile_shapes or sizes == proof.form.sizes or not plan.steps
        )
        grown += 1
    assert grown >= 4


def test_the_same_program_is_proved_at_other_sizes():
    """Lists of devices do not depend on the sizes that vary."""
    mesh = Mesh(x=4, y=2)
    plan = rs.plan(Layout.parse("f32[{y}8, 16, {x}4]", mesh), Layout.parse("f32[16, {x}{y}2, 16]", mesh))
    proof = prove(plan)
    other = instance(plan, proof.form, {"n0": 3, "n1": 5, "n2": 2})
    again = prove(other)
    assert [i.groups for i in lower_plan(plan).instructions] == [i.groups for i in lower_plan(other).instructions]
    assert again.form.spell(other.source) == proof.form.spell(plan.source)
    assert again.form.spell(other.target) == proof.form.spell(plan.target)


def test_chunks_grow_with_the_messages():
    """The chunk cuts one digit and has the other one, of 4, whole: at 7 it is 7/4 as large."""
    mesh = Mesh(x=4)
    plan = rs.plan(Layout.parse("f32[{x}4, 16]", mesh), Layout.parse("f32[16, {x}4]", mesh), budget=544)
    (step,) = plan.steps
    form = prove(plan).form
    (larger,) = instance(plan, form, {"n1": 7}).steps
    assert form.sizes == {"n1": 4} and step.mode.chunk % 4 == 0
    assert larger.mode.chunk == step.mode.chunk // 4 * 7 and larger.launches == step.launches


def test_a_layout_is_resized_digit_by_digit():
    mesh = Mesh(x=4, y=2)
    plan = rs.plan(Layout.parse("f32[{y}8, 16, {x}4]", mesh), Layout.parse("f32[16, {x}{y}2, 16]", mesh))
    form = prove(plan).form
    assert form.spell(plan.source) == "[{y}n0, 4 2 n1, {x}n2]"
    assert str(resized(plan.source, form, {"n0": 3, "n1": 5, "n2": 7})) == "f32[{y}3, 40, {x}7]"
    assert str(resized(plan.target, form, {"n0": 3, "n1": 5, "n2": 7})) == "f32[6, {x}{y}5, 28]"
