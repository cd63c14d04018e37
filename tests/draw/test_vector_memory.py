"""Memory as bars: their lengths are the bytes, the parts' colours are named, and the floor is marked."""

import re

import pytest

from reshard.draw.plan_page import memory_bars
from reshard.show.plan_table import moments
from reshard.synth import plan
from reshard.types import Layout, Mesh


@pytest.mark.parametrize("budget", [None, 4500, 10**6])
def test_the_bars_are_as_long_as_what_is_live(budget: int | None):
    mesh = Mesh(x=4, y=2)
    source, target = Layout.parse("f32[{y}8, 16, {x}4]", mesh), Layout.parse("f32[16, {x}{y}2, 16]", mesh)
    made = plan(source, target, budget=budget)
    bars = re.findall(r"<svg.*?</svg>", memory_bars(made, budget))
    lengths = [sum(map(float, re.findall(r'width="([\d.]+)" height="1" fill', bar))) for bar in bars]
    scale = max(made.peak_bytes, budget or 0)
    assert lengths == pytest.approx([100 * moment.live_bytes / scale for moment in moments(made)], abs=0.01)
    marks = [float(mark) for bar in bars for mark in re.findall(r'x="([\d.]+)" width=".6"', bar)]
    assert marks == pytest.approx([min(99.4, 100 * made.floor_bytes / scale)] * len(bars), abs=0.01)
