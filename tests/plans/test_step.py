"""Steps: checked by their rule as they are built, with what they send, receive and keep live."""

from __future__ import annotations

import pytest

from reshard.errors import StepError
from reshard.plans.step import Step
from reshard.types import Layout, Mesh

HERE = Mesh(x=4)
APART, OVERLAPPING = Mesh.parse("d=2@4"), Mesh.parse("d=2@3")


def _step(target: Mesh, retained: int = 0) -> Step:
    source, result = Layout.parse("f32[{x}4]", HERE), Layout.parse("f32[{d}8]", target)
    return Step("exchange", source, result, retained_bytes=retained)


def test_a_step_that_no_rule_derives_cannot_be_built():
    with pytest.raises(StepError, match="lead to other devices"):
        Step("all_gather", Layout.parse("f32[{x}4]", HERE), Layout.parse("f32[16]", APART))
    with pytest.raises(StepError, match="from 4 devices to 2"):
        Step("permute", Layout.parse("f32[16]", HERE), Layout.parse("f32[16]", APART))
    with pytest.raises(StepError, match="stay partial on other devices"):
        Step("exchange", Layout.parse("f32[16] + sum{x}", HERE), Layout.parse("f32[16] + sum{x}", Mesh.parse("x=4@4")))


def test_a_device_has_both_tiles_only_if_it_is_in_both_sets():
    """Tiles of 16 and 32 bytes; messages of 16, which are one run and need no buffer."""
    assert _step(APART).live_bytes == 32
    assert _step(APART, retained=24).live_bytes == 16 + 24
    assert _step(OVERLAPPING).live_bytes == 16 + 32


def test_what_the_busiest_device_sends_and_receives():
    step = _step(APART)
    assert (step.sent_bytes, step.received_bytes, step.launches) == (16, 32, 2)
    gather = Step("all_gather", Layout.parse("f32[{d}8]", APART), Layout.parse("f32[16]", APART))
    assert gather.sent_bytes == gather.received_bytes == 32
