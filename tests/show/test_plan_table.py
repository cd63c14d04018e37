"""The table of a plan holds the plan's own numbers, and the totals name their bounds."""

import re

import pytest

import reshard as rs
from reshard.show.plan_table import show_heading, show_steps, show_totals, totals
from reshard.types import Layout, Mesh
from reshard.types.units import bytes_text, seconds_text
from tests.draw.cases import CASES, planned
from tests.show.printing import printed


@pytest.mark.parametrize("name", list(CASES))
def test_a_row_for_each_step_with_its_numbers(name):
    plan = planned(name)
    rows = printed(show_steps, plan, width=400).splitlines()[2:-1]
    if not plan.steps:
        assert "nothing to do" in printed(show_steps, plan)
        return
    assert len(rows) == len(plan.steps)
    for number, (row, step) in enumerate(zip(rows, plan.steps, strict=True), 1):
        cells = re.split(r" {2,}", row.strip())
        assert cells[:3] == [str(number), step.kind, str(step.result)]
        assert cells[-2:] == [bytes_text(step.received_bytes), bytes_text(step.live_bytes)]
        assert len(cells) == 5 or cells[3] == str(step.launches)


def test_seconds_have_a_column_of_their_own():
    mesh = Mesh(x=3, y=5)
    plan = rs.plan(Layout.parse("f32[{x}5, 15]", mesh), Layout.parse("f32[15, {y}3]", mesh), network="h100")
    text = printed(show_steps, plan)
    assert "seconds" in text.splitlines()[0]
    for step in plan.steps:
        assert seconds_text(step.seconds) in text


def test_launches_have_a_column_only_where_a_step_has_several():
    mesh = Mesh(x=4, y=2)
    several = rs.plan(Layout.parse("f32[{x}3/10]", mesh), Layout.parse("f32[{y}5]", mesh))
    one = rs.plan(Layout.parse("f32[{x}4]", mesh), Layout.parse("f32[16]", mesh))
    assert "launches" in printed(show_steps, several) and "launches" not in printed(show_steps, one)


def test_the_heading_wraps_long_layouts_and_keeps_them_apart():
    mesh = Mesh(x=4)
    long = [Layout.parse(f"f32[{first}, {', '.join(['16'] * 40)}]", mesh) for first in ("{x}4", "16")]
    lines = printed(show_heading, *long, width=60).splitlines()
    assert max(map(len, lines)) <= 60
    assert sum(line.startswith("-> ") for line in lines) == 1
    assert "".join(lines).replace(" ", "").startswith(str(long[0]).replace(" ", ""))


def test_totals_are_those_of_the_plan():
    plan = planned("budget")
    facts = dict(totals(plan, None))
    assert facts["received"] == f"{plan.received_bytes} B on the worst device, the lower bound"
    assert facts["launches"] == str(plan.launches)
    sizes = [int(size) for size in re.findall(r"(\d+) B(?= \+|;)", facts["peak"])]
    assert facts["peak"].startswith(f"{plan.peak_bytes} B live") and sum(sizes) == plan.peak_bytes
    assert facts["peak"].endswith(f"floor {plan.floor_bytes} B") and "predicted" not in facts


def test_more_than_the_bound_is_a_multiple_of_it():
    mesh = Mesh(dcn=2, x=4)
    pair = Layout.parse("f32[{x}4, 16]", mesh), Layout.parse("f32[{dcn}8, {x}4]", mesh)
    plan = rs.plan(*pair, network="tpu-v5p")
    assert plan.received_bytes > plan.lower_bound_bytes
    facts = dict(totals(plan, "tpu-v5p"))
    times = f"{plan.received_bytes / plan.lower_bound_bytes:.2f} times the lower bound of {plan.lower_bound_bytes} B"
    assert facts["received"].endswith(times)
    assert facts["predicted"] == f"{seconds_text(plan.seconds)} on tpu-v5p"


def test_totals_of_no_steps():
    assert dict(totals(planned("identity"), None))["peak"] == f"{planned('identity').peak_bytes} B live on a device"
    assert printed(show_totals, planned("identity"), None).count("\n") == 3


@pytest.mark.parametrize("name", list(CASES))
def test_the_step_of_the_peak_is_named_if_there_are_several(name):
    plan = planned(name)
    peak = dict(totals(plan, None))["peak"]
    named = re.findall(r" in step (\d+);", peak)
    assert len(named) == (len(plan.steps) > 1)
    for number in named:
        assert plan.steps[int(number) - 1].live_bytes == plan.peak_bytes
