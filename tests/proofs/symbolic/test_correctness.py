"""A program step by step: whole right programs leave true claims, and programs of another plan are refused."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

import reshard as rs
from reshard.errors import UndecidedError
from reshard.lower import lower_plan
from reshard.lower.program import InParts, Program
from reshard.plans.plan import StepSpec, chain
from reshard.plans.rules.step_mode import StepMode
from reshard.proofs.symbolic import decide_claims, derive_claims
from reshard.types import Layout, Mesh
from tests.layouts import random_pair
from tests.program_faults import WHOLE

MESH = Mesh(x=3, y=2)


def plan_of(source: str, target: str, **options: object) -> rs.Plan:
    return rs.plan(Layout.parse(source, MESH), Layout.parse(target, MESH), **options)


@pytest.mark.parametrize("seed", range(2))
def test_right_programs_leave_true_claims(seed: int):
    """One list of claims per step; named sizes are those of local digits that no step cuts."""
    choose = random.Random(seed)
    for number in range(40):
        plan = rs.plan(*random_pair(choose, "float32", partial=number % 3 == 0))
        form, claims = derive_claims(plan, lower_plan(plan))
        assert len(claims) == len(plan.steps)
        assert all(
            plan.source.shape[dim] % size == 0 for (dim, _), size in zip(form.names, form.sizes.values(), strict=True)
        )
        for step in claims:
            decide_claims(step)


PLAN = plan_of("f32[{x}5, 6]", "f32[15, {x}2]")
WRONG = {
    "other devices": (lambda p: replace(p, devices=p.devices[::-1]), "for other devices"),
    "another dtype": (lambda p: replace(p, dtype="int32"), "for another dtype"),
    "a source that is given up": (lambda p: replace(p, keep_source=False), "disagree on whether the source is kept"),
    "other tiles before": (lambda p: replace(p, tile_shape=(6, 5)), "starts from other tiles"),
    "other tiles after": (lambda p: replace(p, tile_shapes=((2, 15),)), "tiles of shape"),
    "no steps": (lambda p: replace(p, instructions=(), tile_shapes=()), "other steps"),
    "more steps": (lambda p: replace(p, instructions=p.instructions * 2), "other steps"),
}


@pytest.mark.parametrize("what", WRONG)
def test_a_program_for_something_else_is_refused(what: str):
    change, message = WRONG[what]
    with pytest.raises(UndecidedError, match=message):
        derive_claims(PLAN, change(lower_plan(PLAN)))


@pytest.mark.parametrize("kind", WHOLE)
def test_faults_of_the_whole_program_leave_no_proof(kind: str):
    """Either a list is refused, or a claim is false."""
    mesh = Mesh(x=2, y=2, z=2)
    plan = rs.plan(
        Layout.parse("f32[{x}4, {z}4, 8, 8]", mesh), Layout.parse("f32[8, 8, {z}4, {y}4]", mesh), donate=False
    )
    with pytest.raises(UndecidedError):
        for claims in derive_claims(plan, WHOLE[kind](lower_plan(plan)))[1]:
            decide_claims(claims)


def in_parts(count: int) -> tuple[rs.Plan, Program]:
    source, target = Layout.parse("f32[{x}5, 6, 4]", MESH), Layout.parse("f32[15, {x}2, 4]", MESH)
    plan = chain(source, target, [StepSpec("all_to_all", target, StepMode(parts=count))])
    return plan, lower_plan(plan)


def test_parts_tie_the_digit_that_numbers_them():
    """4 columns in 2 parts of 2: the 2 that number parts are fixed, the other sizes still vary."""
    plan, program = in_parts(2)
    assert isinstance(program.instructions[0], InParts)
    form, (claims,) = derive_claims(plan, program)
    decide_claims(claims)
    whole = plan_of("f32[{x}5, 6, 4]", "f32[15, {x}2, 4]")
    assert form.unit * 2 == derive_claims(whole, lower_plan(whole))[0].unit == 5 * 2 * 4


@pytest.mark.parametrize(
    ("source", "between", "target", "devices"),
    [
        ("f32[5, 24, 24] + sum{x}", "f32[5, 24, {x}5/24]", "f32[5, 24, {z}5/24]", [3, 1, 4, 0, 2]),
        ("f32[24, 24] + max{x}", "f32[{x}5/24, 24]", "f32[{z}5/24, 24]", [1, 2, 3, 4, 0]),
    ],
)
@pytest.mark.parametrize("parts", [2, 3, 4])
def test_parts_of_a_dim_of_fixed_size(source: str, between: str, target: str, devices: list[int], parts: int):
    """Where devices are counted in two orders no size varies, and the form has no cuts at all."""
    before, after = Mesh(x=5), Mesh({"z": 5}, device_ids=devices)
    start, end = Layout.parse(source, before), Layout.parse(target, after)
    specs = [
        StepSpec("reduce_scatter", Layout.parse(between, before), StepMode(parts=parts)),
        StepSpec("permute", end),
    ]
    plan = chain(start, end, specs)
    program = lower_plan(plan)
    form, claims = derive_claims(plan, program)
    assert not form.names
    for step in claims:
        decide_claims(step)
    step = program.instructions[0]
    assert isinstance(step, InParts)
    elsewhere = replace(step, take=step.take._replace(axis=step.take.axis - 1))
    with pytest.raises(UndecidedError):
        derive_claims(plan, replace(program, instructions=(elsewhere, *program.instructions[1:])))


def test_parts_that_cut_elsewhere_are_refused():
    """A cut into 3 parts of 4 columns is no digit."""
    plan, program = in_parts(2)
    (step,) = program.instructions
    for take in (step.take._replace(parts=4, inner=1), step.take._replace(inner=3)):
        wrong = replace(program, instructions=(replace(step, take=take),))
        with pytest.raises(UndecidedError):
            for claims in derive_claims(plan, wrong)[1]:
                decide_claims(claims)
