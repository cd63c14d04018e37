"""Pipelines: what they promise follows from their parts, and no predicted time is less than the wires take."""

from __future__ import annotations

import random

import pytest

import reshard as rs
from reshard.errors import PlanError
from reshard.plans.pipeline import Pipeline, plan_part
from reshard.plans.plan import Plan, StepSpec, chain
from reshard.synth import overlapped
from reshard.synth.planner import predict_pipeline
from tests.layouts import random_crossing

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


# ---- The predicted time of a crossing that overlaps with the gathers after it: never less than the wires take ----

WEIGHTS, SERVED = rs.Layout.parse("f32[{fsdp}8, 128]", TRAINER), rs.Layout.parse("f32[128, {tp}16]", SERVER)
WIRES = rs.Network("wires", inner=(0.0, 1e9), domain=1024)


def test_fsdp_to_tensor_parallel_replicas():
    """The crossing keeps senders busy for half of the bound, the gather receivers for all but a sixteenth."""
    bound = 8192 / 1e9
    plan, pipeline = rs.plan(WEIGHTS, SERVED, network=WIRES), overlapped(WEIGHTS, SERVED, WIRES)
    assert pipeline is not None
    assert plan.seconds == pytest.approx(bound * 23 / 16)
    assert predict_pipeline(plan_part(pipeline.plan, 8), 8, WIRES) == pytest.approx((512 + 7 * 1024 + 960) / 1e9)
    assert bound <= pipeline.seconds <= 1.03 * bound
    assert max(pipeline.sent_bytes, pipeline.received_bytes) == pipeline.plan.endpoint_bound_bytes == 8192


def test_latency_decides_the_number_of_parts():
    slow = rs.Network("slow", inner=(1e-6, 1e9), domain=1024)
    large = rs.Layout.parse("f32[{fsdp}512, 8192]", TRAINER), rs.Layout.parse("f32[8192, {tp}1024]", SERVER)
    small, big = overlapped(WEIGHTS, SERVED, slow), overlapped(*large, slow)
    assert small is not None and big is not None
    assert small.parts == 2 and small.seconds > (rs.plan(WEIGHTS, SERVED, network=slow).seconds or 0)
    assert big.parts > 8 and big.seconds < 0.8 * (rs.plan(*large, network=slow).seconds or 0)


@pytest.mark.parametrize("part", range(4))
def test_never_less_than_what_the_busiest_device_takes(part: int):
    """On one link a device for all steps, nothing is faster than the bytes that it sends or receives."""
    overlap = 0
    for seed in range(part * 60, part * 60 + 60):
        source, target = random_crossing(random.Random(seed), counts=(2, 4, 6, 8))
        pipeline = overlapped(source, target, WIRES)
        if pipeline is None:
            continue
        overlap += 1
        assert pipeline.seconds >= max(pipeline.sent_bytes, pipeline.received_bytes) / 1e9 * (1 - 1e-9)
    assert part or overlap


def test_sums_and_shared_devices_do_not_overlap():
    summed = rs.Layout.parse("f32[128, 128] + sum{fsdp}", TRAINER)
    shared = rs.Layout.parse("f32[128, {tp}16]", rs.Mesh.parse("tp=8,rep=2@8"))
    assert overlapped(summed, SERVED, WIRES) is None
    assert overlapped(WEIGHTS, shared, WIRES) is None
    assert overlapped(WEIGHTS, rs.Layout.parse("f32[{tp}{rep}1, 128]", SERVER), WIRES) is None


def test_a_turn_on_the_targets_devices_overlaps_as_a_gather_does():
    pipeline = overlapped(WEIGHTS, rs.Layout.parse("f32[{tp}16, {rep}8]", SERVER), WIRES)
    assert pipeline is not None and [step.kind for step in pipeline.plan.steps] == ["exchange", "all_to_all"]
    assert pipeline.seconds * 1e9 >= max(pipeline.sent_bytes, pipeline.received_bytes)
