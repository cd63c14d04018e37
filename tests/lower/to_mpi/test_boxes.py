"""Exchanges of boxes by one device: which ones are worked out alone, and in which turns they go."""

from __future__ import annotations

import pytest

import reshard as rs
from reshard.lower.to_mpi.boxes import is_closed, own_boxes
from reshard.types import Layout, Mesh
from reshard.types.plan import Step
from reshard.types.rules.cost import StepMode

MESH = Mesh(x=5)
BEFORE, AFTER = Layout.parse("f32[{x}3/13]", MESH), Layout.parse("f32[2{x}2/13]", MESH)
EVEN = Layout.parse("f32[{x}2, 10]", MESH), Layout.parse("f32[10, {x}2]", MESH)


@pytest.mark.parametrize(
    ("step", "device", "closed"),
    [
        (Step("exchange", BEFORE, AFTER), 0, True),
        (Step("exchange", BEFORE, AFTER), 7, False),
        (Step("exchange", BEFORE, AFTER, StepMode(chunk=1)), 0, False),
        (Step("exchange", BEFORE, AFTER, StepMode(chunk=100)), 0, True),
        (Step("exchange", *EVEN), 0, False),
        (Step("all_to_all", *EVEN), 0, False),
    ],
)
def test_boxes_of_one_set_of_devices_that_are_not_cut(step: Step, device: int, closed: bool) -> None:
    assert is_closed(step, device) == closed


def test_the_head_of_both_queues_is_the_same_message() -> None:
    """Ranks that send and receive in their order never wait for each other, with one message under way."""
    step = rs.plan(BEFORE, AFTER).steps[0]
    queues = {device: own_boxes(step, device)[1] for device in range(5)}
    sends = {device: [peer for peer, _ in sent] for device, (sent, _) in queues.items()}
    receives = {device: [peer for peer, _ in received] for device, (_, received) in queues.items()}
    assert any(sends.values())
    while any(sends.values()):
        ready = [(d, to[0]) for d, to in sends.items() if to and receives[to[0]][0] == d]
        assert ready, "every rank waits for another"
        for sender, receiver in ready:
            sends[sender].pop(0)
            receives[receiver].pop(0)
    assert not any(receives.values())
