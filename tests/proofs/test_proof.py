"""What a proof says, and that another solver can recheck it from its text."""

from __future__ import annotations

import pytest

import reshard as rs
from reshard.proofs import Fewest, Proof, ProofPart, prove
from reshard.proofs.proof import part_lines
from reshard.proofs.symbolic import Fewer
from reshard.types import Layout, Mesh

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
