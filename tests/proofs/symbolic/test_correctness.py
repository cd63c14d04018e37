"""A program step by step: right ones leave true claims, those of another plan are refused; buffers and traffic."""

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
from reshard.proofs.symbolic import (
    ByFormula,
    Outline,
    count_received,
    decide_claims,
    derive_claims,
    formula_of_step,
    list_moments,
)
from reshard.runtime import Account, run
from reshard.types import Layout, Mesh
from tests.layouts import random_pair
from tests.oracle import source_tiles
from tests.proofs.contracts import one_step

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


# ---- buffers and received elements: what the numpy runtime measures


def measured(plan: rs.Plan) -> Account:
    account = Account(plan.source.dtype)
    run(lower_plan(plan), source_tiles(plan), account)
    return account


@pytest.mark.parametrize("seed", range(3))
def test_the_fullest_moment_is_what_the_numpy_runtime_measures(seed: int):
    """At most: the runtime frees what a device does not use, such as the buffers of a round that it sits out."""
    choose, equal = random.Random(seed), 0
    for number in range(50):
        source, target = random_pair(choose, "float32", partial=number % 3 == 0)
        plan = rs.plan(source, target, donate=number % 2 == 0)
        if not plan.steps:
            continue
        elements = max(sum(buffers) for step in list_moments(lower_plan(plan)) for buffers in step)
        assert plan.source.nbytes(elements) >= measured(plan).peak_bytes, str(plan)
        equal += plan.source.nbytes(elements) == measured(plan).peak_bytes
    assert equal > 30


@pytest.mark.parametrize("seed", range(2))
def test_a_single_step_receives_what_the_numpy_runtime_measures(seed: int):
    choose, compared = random.Random(seed), 0
    while compared < 40:
        plan = rs.plan(*random_pair(choose, "float32", partial=compared % 3 == 0))
        if len(plan.steps) != 1:
            continue
        program, account = lower_plan(plan), measured(plan)
        received = count_received(program.instructions[0], plan.source.tile_bytes // 4)
        assert (received.elements * 4, received.launches) == (account.received_bytes, account.launches), str(plan)
        compared += 1


def test_a_kept_source_is_live_from_the_second_step_on():
    mesh = Mesh(dcn=2, x=4)
    ends = [Layout.parse(text, mesh) for text in ("bf16[{dcn}512, {x}256]", "bf16[{x}256, {dcn}512]")]
    plan = rs.plan(*ends, network="h100")
    assert len(plan.steps) > 1
    program = lower_plan(plan)
    kept, given = list_moments(program), list_moments(replace(program, keep_source=False))
    source = plan.source.tile_bytes // 2
    assert kept[0] == given[0]
    assert kept[1:] == [[(source, *buffers) for buffers in step] for step in given[1:]]


def test_formulas_have_the_figures_of_the_lists():
    """The program and its outline, with formulas in place of the lists, have equal buffers and traffic."""
    mesh = Mesh(x=3)
    for source, target in (("f32[{x}5, 6]", "f32[15, {x}2]"), ("f32[{x}5]", "f32[15]")):
        plan = one_step("exchange", source, target, mesh)
        program, formula = lower_plan(plan), formula_of_step(plan.steps[0])
        assert isinstance(formula, ByFormula)
        outline = Outline(
            program.devices, program.dtype, program.tile_shape, (formula,), program.tile_shapes, program.keep_source
        )
        assert list_moments(outline) == list_moments(program)
        before = plan.source.tile_bytes // 4
        assert count_received(formula, before) == count_received(program.instructions[0], before)
