"""That a proof is one for all sizes of its form: the same plan at other sizes runs right, and within the formula."""

import random
from contextlib import suppress

import pytest

import reshard as rs
from reshard.errors import PlanError
from reshard.lower import lower
from reshard.proofs import Proof, UndecidedError, instance, plan_proof, prove, symbolic
from reshard.types import Layout, Mesh
from tests.layouts import random_pair
from tests.oracle import check

SIZED = [
    (Mesh(x=4), "f32[{x}4, 16]", "f32[16, {x}4]", {}, "[{x}n0, 4 n1] -> [4 n0, {x}n1]"),
    (Mesh(x=4, y=2), "f32[{x}2, {y}4]", "f32[8, {y}4]", {}, "[{x}n0, {y}n1] -> [4 n0, {y}n1]"),
    (Mesh(x=2, y=2), "f32[{x}4, {y}2]", "f32[{y}4, {x}2]", {}, "[{x}n0, {y}n1] -> [{y}n0, {x}n1]"),
    (Mesh(x=4), "f32[4{x}2]", "f32[{x}8]", {}, "[4{x}n0] -> [{x}4 n0]"),
    (Mesh(x=2, y=3), "f32[{x}6, 7]", "f32[{y}4, 7]", {}, "[{x}6, n1] -> [{y}4, n1]"),
    (Mesh(x=4), "f32[{x}3/10, 4]", "f32[10, {x}]", {}, "[{x}3/10, 4] -> [10, {x}]"),
    (Mesh(x=4), "f32[{x}4, 16]", "f32[16, {x}4]", {"budget": 544}, "[{x}4, 4 n1] -> [4 4, {x}n1]"),
    (Mesh(x=4), "f32[16, 3] + sum{x}", "f32[{x}4, 3]", {}, "[4 n0, n1] -> [{x}n0, n1]"),
    (Mesh({"x": 4}, device_ids=[10, 3, 7, 20]), "f32[{x}4, 16]", "f32[16, {x}4]", {}, "[{x}n0, 4 n1] -> [4 n0, {x}n1]"),
    (Mesh(x=2), "f32[5{x}2]", "f32[{x}10]", {}, "[5{x}2] -> [{x}10]"),
]


def forms(proof: Proof) -> str:
    return f"{proof.form.spell(proof.plan.source)} -> {proof.form.spell(proof.plan.target)}"


@pytest.mark.parametrize(("mesh", "source", "target", "options", "form"), SIZED)
def test_which_sizes_vary(mesh: Mesh, source: str, target: str, options: dict, form: str):
    assert forms(prove(rs.plan(Layout.parse(source, mesh), Layout.parse(target, mesh), **options))) == form


@pytest.mark.parametrize("sizes", [{"n7": 3}, {"n0": 0}, {(0, 4): 2}])
def test_sizes_that_the_form_does_not_have_are_refused(sizes: dict):
    plan = rs.plan(*(Layout.parse(text, Mesh(x=4)) for text in ("f32[{x}4, 16]", "f32[16, {x}4]")))
    with pytest.raises(PlanError, match="its names are n0, n1"):
        instance(plan, prove(plan).form, sizes)


def some_plans(seed: int, count: int) -> list[rs.Plan]:
    choose = random.Random(seed)
    found = []
    while len(found) < count:
        source, target = random_pair(choose, "float32", partial=len(found) % 3 == 0)
        plan = rs.plan(source, target)
        if len(found) % 4 == 1:
            with suppress(rs.errors.BudgetError):
                plan = rs.plan(source, target, budget=plan.floor_bytes + plan.peak_bytes // 10, donate=True)
        found.append(plan)
    return found


@pytest.mark.parametrize("seed", range(8))
def test_other_sizes_of_the_form_run_right_and_within_the_formula(seed: int):
    """What is said of all sizes is run at two others, against the meaning of the layouts."""
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
        assert lower(other).tile_shapes != lower(plan).tile_shapes or sizes == proof.form.sizes or not plan.steps
        grown += 1
    assert grown >= 4


def test_the_same_program_is_proved_at_other_sizes():
    """Lists of devices do not depend on the sizes that vary."""
    mesh = Mesh(x=4, y=2)
    plan = rs.plan(Layout.parse("f32[{y}8, 16, {x}4]", mesh), Layout.parse("f32[16, {x}{y}2, 16]", mesh))
    proof = prove(plan)
    other = instance(plan, proof.form, {"n0": 3, "n1": 5, "n2": 2})
    assert [i.groups for i in lower(plan).instructions] == [i.groups for i in lower(other).instructions]
    assert forms(prove(other)) == forms(proof)


def test_a_form_that_a_chunk_cuts_keeps_that_size():
    mesh = Mesh(x=4)
    plan = rs.plan(Layout.parse("f32[{x}4, 16]", mesh), Layout.parse("f32[16, {x}4]", mesh), budget=544)
    form, _ = symbolic.derive(plan, lower(plan))
    assert form.names == {(1, 1): "n1"}
    assert form.sizes == {"n1": 4}


def test_an_empty_array_is_proved():
    mesh = Mesh(x=4)
    proof = prove(rs.plan(Layout.parse("f32[0, 16]", mesh), Layout.parse("f32[0, {x}4]", mesh)))
    assert proof.form.fixed[0] == "it is empty"


def test_many_devices_are_not_enumerated():
    """2^20 devices: an exchange of 32 rounds would list 2^25 transfers."""
    mesh = Mesh(dcn=64, x=16, y=32, z=32)
    source, target = "bf16[{dcn}{x}{y}64, {z}128]", "bf16[{z}{y}2048, {dcn}{x}4]"
    proof = prove(rs.plan(Layout.parse(source, mesh), Layout.parse(target, mesh)))
    assert [step.kind for step in proof.plan.steps] == ["exchange"]
    assert proof.minimal.holds
    assert "on one device of unknown coordinates" in proof.explain()


def test_a_list_that_is_too_long_to_compare_is_not_decided(monkeypatch: pytest.MonkeyPatch):
    """Not proved, nor refuted: an uneven exchange has no formula in the coordinates."""
    monkeypatch.setattr(plan_proof, "MANY_TRANSFERS", 4)
    monkeypatch.setattr(plan_proof, "MOST_TRANSFERS", 8)
    mesh = Mesh(x=4, y=2)
    plan = rs.plan(Layout.parse("f32[{x}3/10]", mesh), Layout.parse("f32[{y}5]", mesh))
    with pytest.raises(UndecidedError, match="too many to compare"):
        prove(plan)
