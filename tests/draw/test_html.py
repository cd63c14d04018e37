"""Plans as HTML: in a notebook, and as a page that needs nothing else."""

import re
import sys

import pytest

import reshard as rs
from reshard.cli import main
from reshard.draw.page import page
from reshard.types import Layout, Mesh
from reshard.types.plan import Plan, Step
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


# ---- in a notebook ---------------------------------------------------------------------------------


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
    assert f"peak {rs.draw.fragment.bytes_text(plan.peak_bytes)}" in read.text


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


def test_seconds_are_there_when_they_are_known():
    plan = rs.plan(Layout.parse("f32[{x}4]", Mesh(x=4)), Layout.parse("f32[16]", Mesh(x=4)), network="tpu-v5p")
    assert re.search(r"[num]?s predicted", Read(plan._repr_html_()).text) and "tpu" not in plan._repr_html_()


def test_names_are_escaped(monkeypatch, tmp_path):
    """No layout has such a text; what shows it does not count on that. A network's file may have such a name."""
    a_plan, network = planned("two dims"), tmp_path / "<b>network.json"
    network.write_text(rs.Network.load("tpu-v5p").to_json())
    plan = rs.plan(a_plan.source, a_plan.target, network=str(network))
    monkeypatch.setattr(Layout, "__str__", lambda layout: "<script>alert('&')</script>")
    for html in (plan._repr_html_(), page(plan, str(network))):
        assert "<script" not in html and "&lt;script&gt;" in html and "<b>network" not in html
        check_self_contained(Read(html))


# ---- the page --------------------------------------------------------------------------------------


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
        assert read.text.count(step.kind) >= 2  # in the table, and why
    assert read.tags.count("figure") == 3 and read.tags.count("svg") == 3


def test_ids_are_unique_and_lead_somewhere():
    html = page(planned("block-cyclic"))
    ids = Read(html).all("id")
    assert len(ids) == len(set(ids)) > 0
    used = set(re.findall(r"(?:href=\"#|url\(#)([^\")]+)", html))
    assert used and used <= set(ids)


def test_lines_have_the_colours_of_the_page():
    html = page(planned("uneven"))
    assert "currentColor" in html and "stroke: var(--card)" in html
    assert "#010203" not in html and "#fdfcfb" not in html


def test_the_page_is_the_same_each_time():
    assert page(planned("three dims")) == page(planned("three dims"))


def test_a_page_for_a_million_devices_says_what_it_does_not_draw():
    mesh = Mesh(x=1024, y=1024)
    plan = rs.plan(Layout.parse("bf16[{x}8, {y}8]", mesh), Layout.parse("bf16[{y}8, {x}8]", mesh))
    read = Read(page(plan))
    assert "1048576 devices" in read.text and "too many to draw" in read.text and read.tags.count("svg") == 1
    check_self_contained(read)


# ---- the command -----------------------------------------------------------------------------------

CALL = ["plan", "--mesh", "x=4,y=2", "f32[{y}8, 16, {x}4]", "f32[16, {x}{y}2, 16]"]


def test_the_command_writes_a_page_and_prints_nothing(tmp_path, capsys):
    path = tmp_path / "plan.html"
    assert main([*CALL, "--html", str(path), "--network", "tpu-v5p"]) == 0
    assert capsys.readouterr().out == ""
    read = Read(path.read_text(encoding="utf-8"))
    check_self_contained(read)
    assert "predicted on tpu-v5p" in read.text and "no longer split over y" in read.text


def test_the_command_prints_json_beside_a_page(tmp_path, capsys):
    path = tmp_path / "plan.html"
    assert main([*CALL, "--html", str(path), "--json"]) == 0
    assert isinstance(Plan.from_json(capsys.readouterr().out).steps[0], Step) and path.exists()


def test_a_page_that_cannot_be_written_is_an_error(tmp_path, capsys):
    path = tmp_path / "none" / "plan.html"
    assert main([*CALL, "--html", str(path)]) == 2
    out = capsys.readouterr()
    assert out.err == f"reshard: error: cannot write {path}: No such file or directory\n" and not out.out


def test_a_page_without_matplotlib_is_an_error(tmp_path, capsys, monkeypatch):
    for name in [name for name in sys.modules if name.startswith(("matplotlib", "reshard.draw.canvas"))]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.delattr("reshard.draw.canvas")
    path = tmp_path / "plan.html"
    assert main([*CALL, "--html", str(path)]) == 2
    assert "pip install 'reshard[draw]'" in capsys.readouterr().err and not path.exists()
