"""Proofs of trees: each different plan once, and the bound of all arrays together."""

from __future__ import annotations

import pytest

import reshard as rs
from reshard.errors import PlanError
from reshard.lower import lower_plan
from tests.trees import llama

MESH = rs.Mesh(x=4, y=2)


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
