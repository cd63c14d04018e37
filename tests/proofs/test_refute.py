"""Counterexamples are what the numpy runtime does, and right programs have none."""

from __future__ import annotations

import random
import sys
from dataclasses import replace

import numpy as np
import pytest

import reshard as rs
from reshard.lower import Program, lower_plan
from reshard.plans.plan import StepSpec, chain
from reshard.proofs.refute import fits_in_memory, refute
from reshard.runtime import Account, run
from reshard.types import Layout, Mesh
from tests.layouts import random_pair


def test_right_programs_are_not_refuted():
    choose = random.Random(0)
    for number in range(40):
        plan = rs.plan(*random_pair(choose, "float32", partial=number % 2 == 0))
        assert refute(plan, lower_plan(plan)) is None, str(plan)


MESH = Mesh(x=3)


def plan_and_program(source: str, target: str, **options: object) -> tuple[rs.Plan, Program]:
    plan = rs.plan(Layout.parse(source, MESH), Layout.parse(target, MESH), **options)
    return plan, lower_plan(plan)


def test_a_swapped_group_by_hand():
    """Members 1, 0, 2: block 0 of every result is device 1's tile, so element 5 is where element 0 belongs."""
    plan, program = plan_and_program("f32[{x}5]", "f32[15]")
    wrong = refute(plan, replace(program, instructions=(replace(program.instructions[0], groups=((1, 0, 2),)),)))
    assert (wrong.part, wrong.device, wrong.index, wrong.element, wrong.actual) == ("right", 0, (0,), (0,), (5,))
    assert wrong.sizes == ((15,), (5,), (15,))
    assert str(wrong) == wrong.what and "device 0 must hold element (0,)" in wrong.what


@pytest.mark.parametrize("reduction", ["sum", "mean", "product", "max", "min"])
def test_a_lost_summand_is_noticed(reduction: str):
    """A group that combines only two of three summands: whichever of them, even a maximum's."""
    plan, program = plan_and_program(f"f32[7] + {reduction}{{x}}", "f32[7]")
    last = next(n for n, step in enumerate(plan.steps) if step.kind in ("reduce_scatter", "all_reduce"))
    step = program.instructions[last]
    for lost in range(3):
        group = tuple(d for d in range(3) if d != lost)
        groups = (tuple(group[min(n, 1)] for n in range(3)),) if step.groups == ((0, 1, 2),) else step.groups
        instructions = (*program.instructions[:last], replace(step, groups=groups), *program.instructions[last + 1 :])
        assert refute(plan, replace(program, instructions=instructions)).part == "right"


@pytest.mark.parametrize("lost", range(3))
@pytest.mark.parametrize("reduction", ["max", "min"])
def test_a_lost_summand_of_a_single_element_is_noticed(monkeypatch: pytest.MonkeyPatch, reduction: str, lost: int):
    """One marking shows only the largest of three summands, and so hides the loss of any other."""
    source, target = Layout.parse(f"f32[1] + {reduction}{{x}}", MESH), Layout.parse("f32[1]", MESH)
    plan = chain(source, target, [StepSpec("all_reduce", target)])

    def losing(program: Program, tiles: dict[int, np.ndarray], account: Account) -> dict[int, np.ndarray]:
        return run(program, {**tiles, lost: tiles[(lost + 1) % 3].copy()}, account)

    monkeypatch.setattr(sys.modules["reshard.proofs.refute"], "run", losing)
    assert refute(plan, lower_plan(plan)).part == "right"


def test_a_source_that_is_overwritten(monkeypatch: pytest.MonkeyPatch):
    """The numpy runtime does not write to the tiles it gets; one that did would be caught."""
    plan, program = plan_and_program("f32[{x}5]", "f32[15]")

    def overwriting(program: Program, tiles: dict[int, np.ndarray], account: Account) -> dict[int, np.ndarray]:
        result = run(program, tiles, account)
        tiles[1][0] += 1
        return result

    monkeypatch.setattr(sys.modules["reshard.proofs.refute"], "run", overwriting)
    assert refute(plan, program).what == "device 1's source is written to"


def test_a_program_for_another_dtype():
    plan, program = plan_and_program("f32[{x}5]", "f32[15]")
    assert "for int32, not float32" in refute(plan, replace(program, dtype="int32")).what


def test_a_program_that_does_not_run():
    plan, program = plan_and_program("f32[{x}5]", "f32[15]")
    wrong = refute(plan, replace(program, instructions=(replace(program.instructions[0], groups=((0, 1, 9),)),)))
    assert wrong.part == "right" and "does not run" in wrong.what


def test_promises_are_compared():
    """The program of a plan without a budget exceeds the memory of a tighter one, and has other launches."""
    plan, program = plan_and_program("f32[{x}5, 6]", "f32[15, {x}2]")
    tight = rs.plan(plan.source, plan.target, budget=plan.peak_bytes - 1)
    wrong = refute(tight, program)
    assert wrong.part == "bounded" and f"the plan promises at most {tight.peak_bytes}" in wrong.what
    assert refute(plan, lower_plan(tight)).part in ("bounded", "minimal")


def test_large_arrays_are_not_run():
    """2^24 elements over all devices still fit; a replicated array counts once per device."""
    mesh = Mesh(x=4)
    for size, runs in ((1 << 22, True), ((1 << 22) + 4, False)):
        layout = Layout.parse(f"f32[{size}]", mesh)
        assert fits_in_memory(rs.plan(layout, layout)) == runs
