"""A plan as a page that needs nothing else, and in a notebook: no scripts, styles of the page, no matplotlib."""

import re
import sys

import pytest

import reshard as rs
from reshard.draw.plan_page import write_page
from reshard.types import Layout, Mesh
from reshard.types.units import bytes_text
from tests.draw.cases import CASES, planned
from tests.markup import Read, check_self_contained

PAGES = [
    "scalar",
    "three dims",
    "four dims",
    "uneven",
    "partial",
    "empty",
    "identity",
    "budget",
    "donated",
    "64 devices",
]


@pytest.mark.fast(3)
@pytest.mark.parametrize("name", PAGES)
def test_the_page_is_html_that_needs_nothing_else(name):
    plan = planned(name)
    html = write_page(plan)
    read = Read(html)
    assert html.startswith("<!doctype html>")
    check_self_contained(read)
    assert (
        "prefers-color-scheme: dark" in html
        and 'name="viewport"' in html
        and not re.search(r"@import|@font-face", html)
    )
    assert str(plan.source) in read.text and str(plan.target) in read.text
    for step in plan.steps:
        assert read.text.count(step.kind) >= 2  # In the table, and in the reasons.
    # Tiles and memory for two widths, unless they are alike, and traffic.
    assert read.tags.count("figure") == 3 and len(read.all("role")) in (4, 5)


def test_names_are_escaped(monkeypatch, tmp_path):
    """No layout has such a text today, but pages escape it all the same; the file of a network may have such a name."""
    a_plan, network = planned("two dims"), tmp_path / "<b>network.json"
    network.write_text(rs.Network.load("tpu-v5p").to_json())
    plan = rs.plan(a_plan.source, a_plan.target, network=str(network))
    monkeypatch.setattr(Layout, "__str__", lambda layout: "<script>alert('&')</script>")
    for html in (plan._repr_html_(), write_page(plan, str(network))):
        assert "<script" not in html and "&lt;script&gt;" in html and "<b>network" not in html
        check_self_contained(Read(html))


def test_lines_have_the_colours_of_the_page():
    html = write_page(planned("uneven"))
    assert "currentColor" in html and "<title>padding</title>" in html and "Hatched: padding." in html


def test_a_page_for_too_many_devices_names_the_missing_pictures():
    mesh = Mesh(x=128, y=64)
    plan = rs.plan(Layout.parse("bf16[{x}8, {y}16]", mesh), Layout.parse("bf16[{y}16, {x}8]", mesh))
    read = Read(write_page(plan))
    assert "8192 devices" in read.text and "too many to draw" in read.text and "too many for a matrix" in read.text
    check_self_contained(read)


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
