"""Plans whose permutes and exchanges list few messages."""

from __future__ import annotations

import pytest

from reshard.synth import plan
from reshard.synth.network import PRESETS
from reshard.synth.options import PlanOptions
from reshard.synth.short import message_count, short_plans
from reshard.types.layout import Layout
from reshard.types.mesh import Mesh

NETWORK = PRESETS["tpu-v5p"]
WITHIN = PlanOptions(network=NETWORK)
LARGE = Mesh(x=8, y=8, z=16)
MOVES = [
    ("bf16[{z}{y}32, {x}512, 4096]", "bf16[{x}512, {z}{y}32, 4096]"),
    ("bf16[4096, 4096, {z}{x}{y}4]", "bf16[4096, {z}256, {x}{y}64]"),
    ("bf16[{z}{y}{x}4, 4096, 4096]", "bf16[{x}{z}32, {y}512, 4096]"),
    ("bf16[{y}512, {x}512, {z}256]", "bf16[4096, 4096, {y}{z}{x}4]"),
]


@pytest.mark.parametrize(("source", "target"), MOVES)
def test_many_rounds_on_many_devices_have_a_plan_of_few_messages(source: str, target: str):
    """In at most 1.6 times the time, in tiles no larger than those at the ends."""
    before, after = (Layout.parse(text, LARGE) for text in (source, target))
    fast, plans = plan(before, after, network=NETWORK), short_plans(before, after, 4096, WITHIN)
    assert message_count(fast) > 4096 and fast.seconds is not None
    assert min(short.seconds or 0 for short in plans) <= 1.6 * fast.seconds
    most = max(before.tile_bytes, after.tile_bytes)
    for short in plans:
        assert message_count(short) <= 4096
        assert all(step.result.tile_bytes <= most for step in short.steps)


def test_limits_are_kept():
    before, after = (Layout.parse(text, Mesh(x=4, y=4)) for text in ("f32[{x}4, {y}4]", "f32[{y}4, {x}4]"))
    whole = short_plans(before, after, 16, WITHIN)
    assert {message_count(each) for each in whole} >= {16}
    least = min(each.peak_bytes for each in whole)
    assert {each.peak_bytes for each in short_plans(before, after, 16, WITHIN._replace(budget=least))} == {least}
    assert short_plans(before, after, 16, WITHIN._replace(budget=least - 1)) == []
    assert all(message_count(each) == 0 for each in short_plans(before, after, 15, WITHIN))
