"""Lanes and loads: the devices of every launch in lowered programs, and what each receives and sends in a run."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

import reshard as rs
from reshard.lower import lower_plan
from reshard.lower.program import AllGather, AllReduce, AllToAll, Exchange, Permute, ReduceScatter
from reshard.lower.program_traffic import program_traffic
from reshard.plans.rules.collectives import step_loads
from reshard.plans.rules.lane import step_lane
from reshard.runtime import Account
from tests.layouts import pairs
from tests.oracle import source_tiles

MESH = rs.Mesh(x=4, y=2)


@given(st.lists(pairs(partial=True), min_size=2, max_size=7))
@settings(max_examples=60, deadline=None)
def test_steps_of_one_lane_have_the_same_devices(ends: list[tuple[rs.Layout, rs.Layout]]):
    between: dict[object, object] = {}
    for source, target in ends:
        plan = rs.plan(source, target)
        for step, instruction in zip(plan.steps, lower_plan(plan).instructions, strict=True):
            one = step_lane(step.kind, step.operand, step.result, step.mode)
            if one is not None and step.launches:
                assert between.setdefault(one.key, _devices(instruction)) == _devices(instruction)


def _devices(step: object) -> object:
    match step:
        case AllGather() | AllToAll():
            return step.groups
        case ReduceScatter() | AllReduce():
            return step.groups, step.reduction
        case Permute():
            return step.pairs
        case Exchange():
            return [[(t.sender, t.receiver) for t in turn] for turn in step.rounds]
        case _:
            raise AssertionError(type(step))


def test_the_shape_of_the_array_does_not_matter():
    ends = [("f32[{y}8, 16, {x}4]", "f32[16, {x}{y}2, 16]"), ("f32[{y}2, 16, 3, {x}2]", "f32[4, {x}{y}2, 3, 8]")]
    one, other = (step_lane("all_to_all", *(rs.Layout.parse(text, MESH) for text in pair)) for pair in ends)
    assert one is not None and other is not None
    assert one.key == other.key
    assert (one.packed, other.packed) == (512, 192)


@given(pairs(partial=True))
@settings(max_examples=60, deadline=None)
def test_each_device_receives_and_sends_what_runs(ends: tuple[rs.Layout, rs.Layout]):
    for step in rs.plan(*ends).steps:
        if step.kind == "split_sum":
            continue
        plan = rs.plan(*ends)
        one = rs.Plan(
            step.operand, step.result, (rs.Step(step.kind, step.operand, step.result, step.mode),), plan.donate
        )
        account, matrix = Account(step.operand.dtype), program_traffic(lower_plan(one))
        rs.simulate(one, source_tiles(one), account)
        received, sent = step_loads(step.kind, step.operand, step.result, step.mode)
        for device in step.operand.mesh.devices:
            assert account.received[device] == received.on(step.result.mesh.devices)[device]
            if step.kind not in ("all_reduce",):
                assert matrix.sent[device] == sent.on(step.operand.mesh.devices)[device]
