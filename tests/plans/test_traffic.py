"""What the busiest device sends and receives in all steps, against counting every message."""

from __future__ import annotations

import random
from collections import Counter

import pytest

import reshard as rs
from reshard.lower import lower_plan
from reshard.lower.traffic import traffic as matrix
from reshard.plans.traffic import count_busiest_bytes
from tests.layouts import random_crossing


@pytest.mark.fast(20)
@pytest.mark.parametrize("seed", range(60))
def test_no_device_sends_or_receives_more_than_the_plan_says(seed: int):
    plan = rs.plan(*random_crossing(random.Random(seed)))
    sent, received = Counter(), Counter()
    for (sender, receiver), elements in matrix(lower_plan(plan)).elements.items():
        sent[sender] += elements * 4
        received[receiver] += elements * 4
    busiest = count_busiest_bytes(plan.steps)
    assert (busiest.received, busiest.sent) == (plan.received_bytes, plan.sent_bytes)
    assert max(received.values(), default=0) <= busiest.received
    assert max(sent.values(), default=0) <= busiest.sent
    if [step.kind for step in plan.steps] == ["exchange"]:
        assert max(received.values(), default=0) == busiest.received
        assert max(sent.values(), default=0) == busiest.sent


def test_the_sides_of_disjoint_sets_are_counted_apart():
    source = rs.Layout.parse("f32[{fsdp}4, 8]", rs.Mesh(fsdp=4))
    target = rs.Layout.parse("f32[16, {tp}4]", rs.Mesh.parse("tp=2,rep=4@4"))
    plan = rs.plan(source, target)
    assert [(s.kind, s.sent_bytes, s.received_bytes) for s in plan.steps] == [
        ("exchange", 128, 64),
        ("all_gather", 192, 192),
    ]
    assert (plan.sent_bytes, plan.received_bytes, plan.endpoint_bytes) == (192, 256, 128 + 192)
    assert plan.lower_bound_bytes == plan.endpoint_bound_bytes == 256
