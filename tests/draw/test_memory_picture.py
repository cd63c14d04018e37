"""The bars of the picture of memory are as high as the plan's live bytes."""

import re

import pytest

import reshard as rs
from reshard.show.plan_table import moments
from reshard.types import Layout, Mesh
from tests.draw.cases import CASES, picture, planned
from tests.draw.reading import labelled, words
from tests.sampling import sampled


@pytest.mark.fast(1)
@pytest.mark.parametrize("name", sampled(list(CASES), *list(CASES)[::3]))
def test_bars_are_the_live_bytes(name):
    plan = planned(name)
    axes = labelled(picture(name), "memory")
    tops = dict.fromkeys(range(len(moments(plan))), 0.0)
    for collection in axes.collections:
        for path in collection.get_paths():
            (left, low), (right, high) = path.vertices.min(axis=0), path.vertices.max(axis=0)
            tops[round((left + right) / 2)] = max(tops[round((left + right) / 2)], high)
            assert low < high or not high
    assert list(tops.values())[1:-1] == [step.live_bytes for step in plan.steps]
    assert tops[0] == plan.source.tile_bytes
    heights = sorted({float(line.get_ydata()[0]) for line in axes.lines}, reverse=True)
    assert heights == sorted({plan.peak_bytes, plan.floor_bytes}, reverse=True)


def test_memory_has_units_and_names():
    written = words(picture("three dims"))
    for word in (
        "source\n2048 B",
        "operand\n2048 B",
        "result\n2048 B",
        "scratch\n2048 B",
        "peak\n 6144 B",
        "floor\n 4096 B",
    ):
        assert word in written
    large = rs.plan(Layout.parse("f32[{x}4096, 8192]", Mesh(x=4)), Layout.parse("f32[16384, {x}2048]", Mesh(x=4)))
    assert re.search(r"\d MiB", words(large.draw("memory")))
