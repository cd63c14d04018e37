"""Buffers and received elements of a program: what the numpy runtime measures when it runs it."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

import reshard as rs
from reshard.lower import lower_plan
from reshard.proofs.symbolic import ByFormula, Outline, count_received, formula_of_step, list_moments
from reshard.runtime import Account, run
from reshard.types import Layout, Mesh
from tests.layouts import random_pair
from tests.oracle import source_tiles
from tests.proofs.contracts import one_step


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


@pytest.mark.parametrize(
    ("kind", "source", "target", "mode", "buffers"),
    [
        ("slice", "f32[15, 2]", "f32[{x}5, 2]", {}, [(30, 10)]),
        ("all_gather", "f32[{x}5, 2]", "f32[15, 2]", {}, [(10, 30)]),
        # Columns arrive in a buffer of 30 and are unpacked beside it.
        ("all_gather", "f32[2, {x}5]", "f32[2, 15]", {}, [(10, 30, 30)]),
        ("all_to_all", "f32[{x}5, 6]", "f32[15, {x}2]", {}, [(30, 30, 30), (30, 30)]),
        ("reduce_scatter", "f32[6, 5] + sum{x}", "f32[{x}2, 5]", {}, [(30, 10)]),
        ("exchange", "f32[{x}5, 6]", "f32[15, {x}2]", {}, [(30, 30, 20)]),
        ("exchange", "f32[{x}5, 6]", "f32[15, {x}2]", {"in_place": True}, [(30, 20)]),
        ("exchange", "f32[{x}5, 6]", "f32[15, {x}2]", {"in_place": True, "chunk": 1}, [(30,)]),
        ("permute", "f32[{x}5, 6]", "f32[{x}5, 6]", {}, [(30, 30)]),
        # Parts of 15 elements beside both tiles, or beside the one that they lie in.
        ("all_to_all", "f32[{x}5, 6]", "f32[15, {x}2]", {"parts": 2}, [(30, 30, 15, 15, 15), (30, 30, 15, 15)]),
        (
            "all_to_all",
            "f32[{x}5, 6]",
            "f32[15, {x}2]",
            {"parts": 2, "in_place": True},
            [(30, 15, 15, 15), (30, 15, 15)],
        ),
    ],
)
def test_buffers_by_hand(kind: str, source: str, target: str, mode: dict, buffers: list[tuple]):
    """On 3 devices, in elements; the largest moments suffice."""
    program = lower_plan(one_step(kind, source, target, Mesh(x=3), **mode))
    (step,) = list_moments(program)
    assert max(map(sum, step)) == max(map(sum, buffers)) and set(buffers) <= set(step)


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
