"""The parts of a plan's live bytes."""

import pytest

import reshard as rs
from reshard.show.plan_table import IN_PLACE, OPERAND, RESULT, SOURCE, live_parts, moments
from reshard.types import Layout, Mesh
from tests.draw.cases import CASES, planned


@pytest.mark.parametrize("name", list(CASES))
def test_parts_add_up_to_the_live_bytes(name):
    for step in planned(name).steps:
        assert sum(size for _, size in live_parts(step)) == step.live_bytes


@pytest.mark.parametrize("name", list(CASES))
def test_moments_are_the_source_the_steps_and_what_remains(name):
    plan = planned(name)
    first, *during = moments(plan)
    assert (first.name, first.live_bytes) == ("before", plan.source.tile_bytes)
    assert [moment.live_bytes for moment in during[:-1]] == [step.live_bytes for step in plan.steps]
    if plan.steps:
        assert max(moment.live_bytes for moment in during) == plan.peak_bytes
        kept = 0 if plan.donate else plan.source.tile_bytes
        assert (during[-1].name, during[-1].live_bytes) == ("after", kept + plan.target.tile_bytes)


def test_the_source_is_kept_while_later_steps_run_unless_it_is_donated():
    mesh = Mesh(x=4, y=2)
    source, target = Layout.parse("f32[{x}5, 16]", mesh), Layout.parse("f32[20, {y}8]", mesh)
    for donate, kept in ((False, source.tile_bytes), (True, 0)):
        steps = rs.plan(source, target, donate=donate).steps
        assert len(steps) == 2
        assert [dict(live_parts(step))[SOURCE] for step in steps] == [0, kept]
        for step in steps:
            parts = dict(live_parts(step))
            assert (parts[OPERAND], parts[RESULT]) == (step.operand.tile_bytes, step.result.tile_bytes)


def test_in_place_operand_and_result_share_their_bytes():
    (step,) = planned("donated").steps
    assert step.mode.in_place
    assert dict(live_parts(step))[IN_PLACE] == max(step.operand.tile_bytes, step.result.tile_bytes)
