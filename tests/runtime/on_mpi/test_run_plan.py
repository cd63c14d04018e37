"""Plans of several steps on four ranks, see `tests.mpi.calls`, and what a rank's plan is made of."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.mpi import running

pytest.importorskip("mpi4py", reason="the MPI runtime needs reshard[mpi]")

import reshard as rs
from reshard.lower.to_mpi import NewSummand, Overwrite, Reduce
from reshard.lower.views import CastTiles
from reshard.runtime.on_mpi.run_plan import RankStep, rank_plan
from reshard.runtime.on_mpi.wire.messages import Messages
from reshard.types import Layout, Mesh


@pytest.mark.slow
def test_steps_of_several_plans(tmp_path: Path):
    running.check("calls.plans", 4, tmp_path)


@pytest.mark.slow
def test_a_failing_rank_leaves_nobody_waiting_for_a_group(tmp_path: Path):
    running.check("mistakes.groups", 4, tmp_path)


def test_ranks_number_the_devices_by_their_ids():
    mesh = Mesh({"x": 3}, device_ids=[9, 4, 6])
    plan = rs.plan(Layout.parse("f32[{x}3, 6]", mesh), Layout.parse("f32[9, {x}2]", mesh))
    mine = rank_plan(plan, 0, 3, 4)
    assert mine.ranks == {4: 0, 6: 1, 9: 2}
    (step,) = mine.steps
    assert step.after == (9, 2) and isinstance(step.run, Messages)
    assert {chunk.peer for chunk in step.run.sends.chunks} == {1, 2}
    assert rank_plan(plan, 0, 3, 4) is mine


def test_each_kind_of_step():
    mesh = Mesh(x=2)
    source, target = Layout.parse("f32[4, 6] + sum{x}", mesh), Layout.parse("f32[{x}2, 6]", mesh)
    assert [type(step.run) for step in rank_plan(rs.plan(source, target), 1, 2, 4).steps] == [Reduce]
    start = rs.plan(target, source)
    assert [type(step.run) for step in rank_plan(start, 1, 2, 4).steps] == [NewSummand]
    rows, columns = Layout.parse("f32[{x}2, 4]", mesh), Layout.parse("f32[4, {x}2]", mesh)
    tight = rs.plan(rows, columns, budget=rows.tile_bytes, donate=True)
    assert [type(step.run) for step in rank_plan(tight, 1, 2, 4).steps] == [Overwrite]


def steps(source: str, target: str, **options) -> tuple[list[str], tuple[RankStep, ...]]:
    plan = rs.plan(rs.Move(*(rs.Layout.parse(text, rs.Mesh(x=4)) for text in (source, target)), **options))
    return [step.kind for step in plan.steps], rank_plan(plan, 1, 4, 4).steps


def test_views_that_keep_memory_are_left_out_and_the_others_see_flat_tiles():
    kinds, mine = steps("f32[3{x}2, 5]", "bf16[8, 5]", view="(t h) d -> h d", take={"t": 1}, t=3, cast=True)
    assert kinds == ["cast", "view", "take", "view", "all_gather"]
    assert [isinstance(step.run, CastTiles) for step in mine] == [True, False, False]
    assert [(step.before, step.after) for step in mine] == [((6, 5), (6, 5)), ((30,), (10,)), ((2, 5), (8, 5))]
    assert not any(step.fills for step in mine)


def test_a_step_that_fills_the_target():
    kinds, mine = steps("f32[{x}2, 5]", "f32[3{x}2, 5]", view="h d -> (t h) d", into={"t": 1}, t=3)
    assert kinds == ["view", "put", "view"]
    assert [step.fills for step in mine] == [True]
