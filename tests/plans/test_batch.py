"""Batches: plans that share launches, and those that cannot."""

from __future__ import annotations

import pytest

import reshard as rs
from reshard.errors import PlanError
from reshard.plans.plan import Batch, buffer_bytes, list_lanes
from reshard.plans.rules.cost import StepMode

MESH = rs.Mesh(x=4, y=2)


def plan(source: str, target: str, mesh: rs.Mesh = MESH, **options: object) -> rs.Plan:
    return rs.plan(rs.Layout.parse(source, mesh), rs.Layout.parse(target, mesh), **options)


ROWS = plan("f32[{x}4, 16]", "f32[16, {x}4]")

NOT_ALIKE = {
    "other groups": plan("f32[{y}8, 16]", "f32[16, {y}8]"),
    "another order of members": plan("f32[{y}{x}2, 16]", "f32[16, {y}{x}2]"),
    "another dtype": plan("s32[{x}4, 16]", "s32[16, {x}4]"),
    "another kind": plan("f32[{x}4]", "f32[16]"),
    "more steps": plan("f32[{x}4, 16] + sum{y}", "f32[16, {x}4]"),
    "donated": plan("f32[{x}4, 16]", "f32[16, {x}4]", donate=True),
    "other devices": plan("f32[{x}4, 16]", "f32[16, {x}4]", rs.Mesh({"x": 4, "y": 2}, device_ids=range(8, 16))),
    "a devices' order": plan("f32[{x}4, 16]", "f32[16, {x}4]", rs.Mesh({"x": 4, "y": 2}, device_ids=[*range(8)][::-1])),
}


@pytest.mark.parametrize("other", NOT_ALIKE.values(), ids=NOT_ALIKE)
def test_plans_that_cannot_share_launches_are_refused(other: rs.Plan):
    with pytest.raises(PlanError, match="cannot share launches"):
        Batch(("a", "b"), (ROWS, other))


def test_shapes_and_names_of_axes_do_not_matter():
    renamed = rs.Mesh(p=4, q=2)
    other = plan("f32[8, {p}2, 4]", "f32[8, 8, {p}1]", renamed)
    batch = Batch(("a", "b"), (ROWS, other))
    assert batch.launches == 1
    assert batch.received_bytes == ROWS.received_bytes + other.received_bytes


def test_what_is_cut_shares_no_launch():
    small = plan("f32[{x}4, 16]", "f32[16, {x}4]", budget=512 + 32)
    assert any(step.mode != StepMode() for step in small.steps)
    assert list_lanes(small) is None
    assert Batch(("a",), (small,)).launches == small.launches
    with pytest.raises(PlanError, match="shares its launches with no other"):
        Batch(("a", "b"), (small, small))


def test_buffers_hold_the_blocks_of_all_arrays():
    gather = plan("f32[{x}4, 8]", "f32[16, 8]")
    assert Batch(("a",), (gather,)).scratch_bytes == (0,)
    assert Batch(("a", "b"), (gather, gather)).scratch_bytes == (2 * buffer_bytes(gather),)
    assert buffer_bytes(gather) == gather.source.tile_bytes + gather.target.tile_bytes


@pytest.mark.parametrize(
    ("names", "plans"),
    [
        ((), ()),
        (("a",), ()),
        (("a",), (None,)),
        (("a",), [ROWS]),
        (["a"], (ROWS,)),
        ((1,), (ROWS,)),
        (("a", "b"), (ROWS,)),
    ],
)
def test_what_is_not_a_batch_is_refused(names: object, plans: object):
    with pytest.raises(PlanError):
        Batch(names, plans)


@pytest.mark.parametrize("seconds", [-1, "1", float("nan"), True])
def test_seconds_are_checked(seconds: object):
    with pytest.raises(PlanError, match="seconds"):
        Batch(("a",), (ROWS,), seconds)
