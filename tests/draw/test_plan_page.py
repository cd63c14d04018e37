"""A plan as a page that needs nothing else."""

import re

import pytest

import reshard as rs
from reshard.draw.plan_page import page
from reshard.types import Layout, Mesh
from tests.draw.cases import planned
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
    html = page(plan)
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
    assert read.tags.count("figure") == 3 and read.all("role") == ["img"] * 3  # Tiles for two widths, and traffic.


def test_names_are_escaped(monkeypatch, tmp_path):
    """No layout has such a text today, but pages escape it all the same; the file of a network may have such a name."""
    a_plan, network = planned("two dims"), tmp_path / "<b>network.json"
    network.write_text(rs.Network.load("tpu-v5p").to_json())
    plan = rs.plan(a_plan.source, a_plan.target, network=str(network))
    monkeypatch.setattr(Layout, "__str__", lambda layout: "<script>alert('&')</script>")
    for html in (plan._repr_html_(), page(plan, str(network))):
        assert "<script" not in html and "&lt;script&gt;" in html and "<b>network" not in html
        check_self_contained(Read(html))


def test_lines_have_the_colours_of_the_page():
    html = page(planned("uneven"))
    assert "currentColor" in html and "<title>padding</title>" in html and "Hatched: padding." in html


@pytest.mark.slow
def test_the_page_is_the_same_each_time():
    assert page(planned("three dims")) == page(planned("three dims"))


@pytest.mark.slow
def test_a_page_for_a_million_devices_names_the_missing_pictures():
    mesh = Mesh(x=1024, y=1024)
    plan = rs.plan(Layout.parse("bf16[{x}8, {y}8]", mesh), Layout.parse("bf16[{y}8, {x}8]", mesh))
    read = Read(page(plan))
    assert "1048576 devices" in read.text and "too many to draw" in read.text and "too many for a matrix" in read.text
    check_self_contained(read)
