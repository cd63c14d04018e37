"""A plan in a notebook: HTML without scripts, styles of the page, or matplotlib."""

import re
import sys

import pytest

import reshard as rs
from reshard.types import Layout, Mesh
from reshard.types.units import bytes_text
from tests.draw.cases import CASES, planned
from tests.markup import Read, check_self_contained


@pytest.mark.parametrize("name", list(CASES))
def test_a_notebook_shows_layouts_steps_and_totals(name):
    plan = planned(name)
    html = plan._repr_html_()
    read = Read(html)
    check_self_contained(read)
    assert not {"svg", "style", "img"} & set(read.tags) and "background:#" not in html and "color:#" not in html
    assert str(plan.source) in read.text and str(plan.target) in read.text
    for step in plan.steps:
        assert step.kind in read.text and str(step.result) in read.text
    assert ("nothing to do" in read.text) == (not plan.steps)
    assert f"peak {bytes_text(plan.peak_bytes)}" in read.text


def test_bars_and_marks_are_to_scale():
    plan = planned("three dims")
    (step,) = plan.steps
    styles = Read(plan._repr_html_()).all("style")
    widths = [float(w) for style in styles for w in re.findall(r"^width:([\d.]+)%", style)]
    marks = [float(w) for style in styles for w in re.findall(r"left:([\d.]+)%", style)]
    assert widths == [100 * step.live_bytes / plan.peak_bytes]
    assert marks == [pytest.approx(100 * plan.floor_bytes / plan.peak_bytes, abs=0.01)]


def test_a_notebook_needs_no_matplotlib(monkeypatch):
    for name in [name for name in sys.modules if name.startswith("matplotlib")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert "all_to_all" in planned("three dims")._repr_html_()


def test_predicted_seconds_are_shown():
    plan = rs.plan(Layout.parse("f32[{x}4]", Mesh(x=4)), Layout.parse("f32[16]", Mesh(x=4)), network="tpu-v5p")
    assert re.search(r"[num]?s predicted", Read(plan._repr_html_()).text) and "tpu" not in plan._repr_html_()
