"""Bytes by device, against a run of the step."""

from __future__ import annotations

from hypothesis import given, settings

import reshard as rs
from reshard.lower import lower_plan
from reshard.lower.program_traffic import program_traffic
from reshard.plans.rules.collectives import step_loads
from reshard.runtime import Account
from tests.layouts import pairs
from tests.oracle import source_tiles


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
            assert account.received[device] == (received.each if received.listed is None else received.listed[device])
            if step.kind not in ("all_reduce",):
                assert matrix.sent[device] == (sent.each if sent.listed is None else sent.listed[device])
