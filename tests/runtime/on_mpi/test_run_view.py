"""A rank's steps of a plan with views: those that keep memory are left out, the others see tiles as they need them."""

import pytest

pytest.importorskip("mpi4py", reason="the MPI runtime needs reshard[mpi]")

import reshard as rs
from reshard.runtime.on_mpi.run_plan import view_plan

MESH = rs.Mesh(x=4)


def steps(source: str, target: str, **options):
    plan = rs.plan(rs.Move(*(rs.Layout.parse(text, MESH) for text in (source, target)), **options))
    return [step.kind for step in plan.steps], view_plan(plan, 1, 4).steps


def test_steps_that_keep_memory_are_left_out():
    kinds, mine = steps("f32[3{x}2, 5]", "bf16[8, 5]", view="(t h) d -> h d", take={"t": 1}, t=3, cast=True)
    assert kinds == ["cast", "view", "take", "view", "all_gather"]
    assert [step.step is None for step in mine] == [True, False, False]
    assert [(step.before, step.after) for step in mine] == [((6, 5), (6, 5)), ((30,), (10,)), ((2, 5), (8, 5))]
    assert not any(step.fills for step in mine)


def test_a_step_that_fills_the_target():
    kinds, mine = steps("f32[{x}2, 5]", "f32[3{x}2, 5]", view="h d -> (t h) d", into={"t": 1}, t=3)
    assert kinds == ["view", "put", "view"]
    assert [step.fills for step in mine] == [True]
