"""Instances: the same plan at other sizes of its form runs right, and within the figures of its proof."""

from __future__ import annotations

import random
from contextlib import suppress

import pytest

import reshard as rs
from reshard.errors import PlanError
from reshard.lower import lower_plan
from reshard.proofs import instance, prove
from reshard.proofs.plan_proof import resized
from reshard.types import Layout, Mesh
from tests.layouts import random_pair
from tests.oracle import check


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
