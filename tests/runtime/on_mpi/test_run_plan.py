"""Plans of several steps on four ranks, see `tests.mpi.calls`, and what a rank's plan is made of."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.mpi import running

pytest.importorskip("mpi4py", reason="the MPI runtime needs reshard[mpi]")

import reshard as rs
from reshard.lower.to_mpi import NewSummand, Overwrite, Reduce
from reshard.runtime.on_mpi.run_plan import rank_plan
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
    mine = rank_plan(plan, 4, 3, 4)
    assert mine.ranks == {4: 0, 6: 1, 9: 2}
    assert mine.tile_shapes == ((9, 2),)
    (step,) = mine.steps
    assert isinstance(step, Messages)
    assert {chunk.peer for chunk in step.sends.chunks} == {1, 2}
    assert rank_plan(plan, 4, 3, 4) is mine


def test_each_kind_of_step():
    mesh = Mesh(x=2)
    source, target = Layout.parse("f32[4, 6] + sum{x}", mesh), Layout.parse("f32[{x}2, 6]", mesh)
    assert [type(step) for step in rank_plan(rs.plan(source, target), 1, 2, 4).steps] == [Reduce]
    start = rs.plan(target, source)
    assert [type(step) for step in rank_plan(start, 1, 2, 4).steps] == [NewSummand]
    rows, columns = Layout.parse("f32[{x}2, 4]", mesh), Layout.parse("f32[4, {x}2]", mesh)
    tight = rs.plan(rows, columns, budget=rows.tile_bytes, donate=True)
    assert [type(step) for step in rank_plan(tight, 1, 2, 4).steps] == [Overwrite]
