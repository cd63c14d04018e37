"""Pipelines: what they promise follows from their parts, and what does not split is refused."""

from __future__ import annotations

import pytest

import reshard as rs
from reshard.errors import PlanError
from reshard.plans.pipeline import Pipeline, plan_part
from reshard.plans.plan import Plan, StepSpec, chain

TRAINER, SERVER = rs.Mesh(fsdp=16), rs.Mesh.parse("tp=8,rep=16@16")


def layouts(source: str, target: str) -> tuple[rs.Layout, rs.Layout]:
    return rs.Layout.parse(source, TRAINER), rs.Layout.parse(target, SERVER)


def gathered() -> Plan:
    return rs.plan(*layouts("f32[{fsdp}8, 128]", "f32[128, {tp}16]"))


def test_figures_are_those_of_the_parts():
    """64 B of a part arrive beside two of 512 B that are packed; the gather of a part takes 1024 B of its own."""
    pipeline = Pipeline(gathered(), 8, 1e-6)
    assert (str(pipeline.each.source), str(pipeline.each.target)) == ("f32[{fsdp}, 128]", "f32[16, {tp}16]")
    assert (pipeline.received_bytes, pipeline.sent_bytes) == (pipeline.plan.received_bytes, pipeline.plan.sent_bytes)
    assert pipeline.launches == 8 * (8 + 1)
    assert pipeline.peak_bytes == max(4096 + 2 * (512 + 512), 8192 + 2 * (64 + 64) + 1024)
    assert "in 8 parts, each gathered while the next one crosses" in str(pipeline)
    assert "received 8192 B, 72 launches, peak 9472 B a device, 1 us predicted" in str(pipeline)


@pytest.mark.parametrize("parts", [0, 1, 3, 256, True])
def test_parts_that_do_not_divide_are_refused(parts: int):
    with pytest.raises(PlanError, match="does not go in"):
        Pipeline(gathered(), parts, 0.0)


def test_plans_without_two_sets_and_two_steps_are_refused():
    source, target = layouts("f32[{fsdp}8, 128]", "f32[128, {tp}16]")
    pull = chain(source, target, [StepSpec("exchange", target)])
    same = rs.plan(source, rs.Layout.parse("f32[128, 128]", TRAINER))
    for plan in (pull, same):
        with pytest.raises(PlanError, match="does not go in"):
            Pipeline(plan, 2, 0.0)
    with pytest.raises(PlanError, match="no digit that is local"):
        plan_part(gathered(), 3)
